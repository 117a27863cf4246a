//! Progress of a run: a bar on a terminal, plain lines now and then otherwise.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::{size, tell};
use crate::error::listed;
use crate::progress::Progress;

/// Time between two plain lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// Time between two plain lines while nothing can be done.
const WAITING_INTERVAL: Duration = Duration::from_secs(60);
/// Whether the user has asked for the end.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on the first Ctrl-C, or request to terminate, ends a run between two blocks, so that it leaves nothing half
/// done; the second one ends it at once, which the next run repairs.
pub(crate) fn end_on_request() {
    let handler = || {
        if INTERRUPTED.swap(true, Ordering::Relaxed) {
            std::process::exit(2);
        }
    };
    // Without a handler a request ends the program at once, as ever.
    let _ = ctrlc::set_handler(handler);
}

/// Whether the user has asked for the end.
pub(crate) fn is_end_requested() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Shows bytes done, rate and time left on stderr.
pub(crate) struct Meter {
    bar: Option<ProgressBar>,
    lines: bool,
    total: AtomicU64,
    done: AtomicU64,
    state: Mutex<(Instant, Instant, String)>,
    waited: Mutex<Option<(Instant, Vec<String>)>>,
}

/// A bar for bytes on stderr; none without a terminal or with `quiet`.
pub(crate) fn bar(quiet: bool) -> Option<ProgressBar> {
    (!quiet && std::io::stderr().is_terminal()).then(|| {
        let style =
            "{bar:30} {percent}%  {decimal_bytes}/{decimal_total_bytes}  {decimal_bytes_per_sec}  {eta} left  {msg}";
        ProgressBar::no_length().with_style(ProgressStyle::with_template(style).expect("a constant template"))
    })
}

impl Meter {
    /// A bar on a terminal, lines elsewhere, or with `quiet` nothing.
    pub(crate) fn new(quiet: bool) -> Meter {
        let terminal = std::io::stderr().is_terminal();
        let bar = bar(quiet);
        let now = Instant::now();
        let state = Mutex::new((now, now, String::new()));
        Meter {
            bar,
            lines: !quiet && !terminal,
            total: AtomicU64::new(0),
            done: AtomicU64::new(0),
            state,
            waited: Mutex::default(),
        }
    }

    fn line(&self) {
        let Ok(mut state) = self.state.lock() else { return };
        let (started, last, name) = &mut *state;
        if last.elapsed() < INTERVAL {
            return;
        }
        *last = Instant::now();
        let (done, total) = (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed).max(1));
        let rate = done as f64 / started.elapsed().as_secs_f64();
        let left = (total.saturating_sub(done)) as f64 / rate.max(1.0);
        tell(&format!(
            "{name}: {:.1} % of {}, {:.2} GB/s, {} left\n",
            100.0 * done as f64 / total as f64,
            size::human(total),
            rate / 1e9,
            duration(left),
        ));
    }
}

/// `1 h 02 min`, `3 min 10 s`, `12 s`
pub(crate) fn duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s:02} s"),
        (h, m, _) => format!("{h} h {m:02} min"),
    }
}

impl Progress for Meter {
    fn start(&self, source_bytes: u64) {
        self.total.store(source_bytes, Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.set_length(source_bytes);
            bar.reset();
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        if let Ok(mut state) = self.state.lock() {
            (state.0, state.1) = (Instant::now(), Instant::now());
        }
    }

    fn file(&self, name: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(name.to_owned());
        }
        if let Ok(mut state) = self.state.lock() {
            state.2 = name.to_owned();
        }
    }

    fn step(&self, name: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| tell(&format!("{name}\n"))),
            None if self.lines => tell(&format!("{name}\n")),
            None => {}
        }
    }

    fn advance(&self, source_bytes: u64, _output_bytes: u64) {
        self.done.fetch_add(source_bytes, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.inc(source_bytes);
        }
        if self.lines {
            self.line();
        }
    }

    fn waiting(&self, missing: &[String]) {
        let files = if missing.len() == 1 { "file" } else { "files" };
        let text = format!("waiting for {} {files}: {}", missing.len(), listed(missing));
        if let Some(bar) = &self.bar {
            bar.set_message(text.clone());
        }
        let Ok(mut waited) = self.waited.lock() else { return };
        let due = waited.as_ref().is_none_or(|(told, known)| {
            told.elapsed() >= WAITING_INTERVAL || known != missing && told.elapsed() >= INTERVAL
        });
        if self.lines && due {
            *waited = Some((Instant::now(), missing.to_owned()));
            tell(&format!("{text}\n"));
        }
    }

    fn interrupted(&self) -> bool {
        is_end_requested()
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_are_short() {
        assert_eq!(duration(11.6), "12 s");
        assert_eq!(duration(190.0), "3 min 10 s");
        assert_eq!(duration(3720.0), "1 h 02 min");
    }
}
