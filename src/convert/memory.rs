//! How much memory a run takes.

use std::sync::Mutex;
use std::time::Duration;

use crate::io;

/// Watches the anonymous memory of this process.
pub(super) struct MemoryPeak {
    stop: std::sync::Arc<(Mutex<bool>, std::sync::Condvar)>,
    thread: Option<std::thread::JoinHandle<Option<u64>>>,
}

impl MemoryPeak {
    const INTERVAL: Duration = Duration::from_millis(20);

    pub(super) fn start() -> MemoryPeak {
        let stop = std::sync::Arc::new((Mutex::new(false), std::sync::Condvar::new()));
        let watched = std::sync::Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut peak = io::anonymous_bytes();
            let mut stopped = watched.0.lock().expect("no panic while held");
            while !*stopped {
                stopped = watched.1.wait_timeout(stopped, MemoryPeak::INTERVAL).expect("no panic while held").0;
                peak = peak.max(io::anonymous_bytes());
            }
            peak
        });
        MemoryPeak { stop, thread: Some(thread) }
    }

    /// The largest value seen.
    pub(super) fn stop(mut self) -> Option<u64> {
        *self.stop.0.lock().expect("no panic while held") = true;
        self.stop.1.notify_all();
        self.thread.take().and_then(|thread| thread.join().ok()).flatten()
    }
}

impl Drop for MemoryPeak {
    fn drop(&mut self) {
        if let Ok(mut stopped) = self.stop.0.lock() {
            *stopped = true;
        }
        self.stop.1.notify_all();
    }
}
