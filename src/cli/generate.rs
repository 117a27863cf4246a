//! `coliconv generate`

use std::io::{self, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Duration;

use clap::{ArgGroup, Args};
use indicatif::{ProgressBar, ProgressStyle};

use super::progress::{duration, end_on_request, is_end_requested};
use super::running::{Running, device_experts};
use super::{Talk, findings_text, print_json, tell};
use crate::backend::Device;
use crate::error::{Fault, FaultKind, Faults, Place};
use crate::generate::{Options, Prompt, Watch, generate};
use crate::limits;
use crate::model::sampler::{Sampler, Sampling};
use crate::report::{GenerateReport, GenerateStop};
use crate::score::encode::PrefixChoice;

/// No model takes more: config.json could not say so.
const MAX_TOKENS: usize = 1 << 32;

/// Arguments of `generate`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true).args(["prompt", "prompt_ids"])))]
pub(crate) struct Arguments {
    /// Directory of a container or checkpoint
    path: PathBuf,
    /// The text to continue; `-` reads it from standard input, without its last line end
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// The ids to continue, for one 2040,2042,257; nothing is put before them
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    prompt_ids: Option<String>,
    /// The prompt is what a user says: the model's chat template writes it out
    #[arg(long)]
    chat: bool,
    /// With --chat: what is said to the model before
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// What stands before the prompt: auto ([gMASK]<sop> for GLM), none, or this text; it is never doubled [default: auto]
    #[arg(long, value_name = "auto|none|TEXT")]
    prefix: Option<String>,
    /// Most tokens of the text [default: 256, or what the model's context has left]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    max_tokens: Option<String>,
    /// Draw tokens at random, with logits divided by T; 0 takes the best one each time [default: 0]
    #[arg(long, value_name = "T", allow_hyphen_values = true)]
    temperature: Option<String>,
    /// With --temperature: draw only among the most probable tokens that reach this probability together [default: 1]
    #[arg(long, value_name = "P", allow_hyphen_values = true)]
    top_p: Option<String>,
    /// With --temperature: other seeds draw other tokens [default: 0]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Let the MTP head draft up to N tokens that the model then verifies together; the text is the same
    #[arg(long, value_name = "N", allow_hyphen_values = true, default_value = "0", hide_default_value = true)]
    draft: String,
    /// Go on when the text repeats itself
    #[arg(long)]
    keep_repeating: bool,
    /// Go on after stop ids
    #[arg(long)]
    ignore_stop_ids: bool,
    #[command(flatten)]
    running: Running,
    #[command(flatten)]
    pub(super) talk: Talk,
}

impl Arguments {
    fn options(&self) -> Result<Options, Fault> {
        let device = self.running.devices()?.first().copied().unwrap_or(Device::Cpu);
        let mode = self.running.mode()?;
        self.running.check_device_memory(&[device])?;
        let max_tokens = self.max_tokens.as_deref().map(|text| match text.parse() {
            Ok(count @ 1..=MAX_TOKENS) => Ok(count),
            _ => wrong("--max-tokens", "a number from 1 to 4294967296", text),
        });
        let drafts = match self.draft.parse() {
            Ok(drafts) if drafts <= limits::MAX_DRAFTS => drafts,
            _ => return wrong("--draft", "a number from 0 to 16", &self.draft),
        };
        Ok(Options {
            sampler: self.sampler()?,
            prompt: self.prompt()?,
            max_tokens: max_tokens.transpose()?,
            drafts,
            stop_at_ids: !self.ignore_stop_ids,
            stop_at_repetition: !self.keep_repeating,
            device,
            mode,
            unused: self.running.unused()?,
            threads: self.running.threads,
            memory: self.running.memory,
            device_memory: self.running.device_memory,
        })
    }

    fn sampler(&self) -> Result<Sampler, Fault> {
        let number = |flag, expected, text: &Option<String>, good: fn(f64) -> bool, default| match text.as_deref() {
            None => Ok(default),
            Some(text) => match text.parse::<f64>() {
                Ok(number) if number.is_finite() && good(number) => Ok(number),
                _ => wrong(flag, expected, text),
            },
        };
        let temperature = number("--temperature", "a number of 0 or more", &self.temperature, |t| t >= 0.0, 0.0)?;
        let among = "a number above 0 and at most 1";
        let top_p = number("--top-p", among, &self.top_p, |p| p > 0.0 && p <= 1.0, 1.0)?;
        let needs = "--temperature above 0";
        for (given, flag) in [(self.top_p.is_some(), "--top-p"), (self.seed.is_some(), "--seed")] {
            if given && temperature == 0.0 {
                return Err(Fault::new(Place::default(), FaultKind::FlagNeeds { flag, needs }));
            }
        }
        Ok(match temperature {
            0.0 => Sampler::Greedy,
            temperature => Sampler::Drawn(Sampling { temperature, top_p, seed: self.seed.unwrap_or(0) }),
        })
    }

    fn prompt(&self) -> Result<Prompt, Fault> {
        let fault = |kind| Err(Fault::new(Place::default(), kind));
        let exclude = |one, other, why| fault(FaultKind::FlagsExclude { one, other, why });
        if self.system.is_some() && !self.chat {
            return fault(FaultKind::FlagNeeds { flag: "--system", needs: "--chat" });
        }
        if self.chat && self.prefix.is_some() {
            return exclude("--chat", "--prefix", "the chat template says what a prompt begins with");
        }
        if let Some(list) = &self.prompt_ids {
            if self.chat {
                return exclude("--prompt-ids", "--chat", "a chat template writes text");
            }
            if self.prefix.is_some() {
                return exclude("--prompt-ids", "--prefix", "nothing is put before ids");
            }
            return ids(list).map(Prompt::Ids);
        }
        let text = match self.prompt.as_deref().unwrap_or_default() {
            "-" => standard_input()?,
            text => text.to_owned(),
        };
        if text.len() as u64 > limits::MAX_PROMPT_BYTES {
            return wrong("--prompt", "at most 16 MiB", &format!("{} bytes", text.len()));
        }
        if self.chat {
            return Ok(Prompt::Chat { user: text, system: self.system.clone() });
        }
        let prefix = match self.prefix.as_deref() {
            None | Some("auto") => PrefixChoice::Auto,
            Some("none") => PrefixChoice::None,
            Some(text) => PrefixChoice::Text(text.to_owned()),
        };
        Ok(Prompt::Text { text, prefix })
    }
}

fn wrong<T>(flag: &'static str, expected: &'static str, found: &str) -> Result<T, Fault> {
    let found = if found.is_empty() { "empty".to_owned() } else { found.to_owned() };
    Err(Fault::new(Place::default(), FaultKind::FlagValue { flag, expected, found }))
}

/// Ids with commas between them.
fn ids(list: &str) -> Result<Vec<u64>, Fault> {
    let id = |text: &str| match text.trim().parse() {
        Ok(id) => Ok(id),
        Err(_) => wrong("--prompt-ids", "ids with commas between them, for one 2040,2042,257", list),
    };
    list.split(',').map(id).collect()
}

/// All of standard input, without its last line end.
fn standard_input() -> Result<String, Fault> {
    let flag = "the prompt on standard input";
    let mut bytes = Vec::new();
    if let Err(e) = io::stdin().lock().take(limits::MAX_PROMPT_BYTES + 1).read_to_end(&mut bytes) {
        return wrong(flag, "text", &format!("not to be read ({e})"));
    }
    if bytes.len() as u64 > limits::MAX_PROMPT_BYTES {
        return wrong(flag, "at most 16 MiB", "longer");
    }
    match String::from_utf8(bytes) {
        Ok(mut text) => {
            if text.ends_with('\n') {
                text.pop();
                text.truncate(text.strip_suffix('\r').map_or(text.len(), str::len));
            }
            Ok(text)
        }
        Err(e) => wrong(flag, "UTF-8", &format!("no text ({e})")),
    }
}

/// Runs `generate`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Faults> {
    let Talk { json, quiet } = arguments.talk;
    let speaker = Speaker::new(json, quiet);
    let generated = generate(&arguments.path, &arguments.options()?, &speaker);
    speaker.rest();
    match (speaker.end(), generated) {
        (End::Broken(error), _) => {
            tell(&format!("error: cannot write to standard output: {error}\n"));
            Ok(ExitCode::from(2))
        }
        // A reader that has gone away is no error, and nobody is there to be told anything.
        (End::Gone, Err(_)) => Ok(ExitCode::SUCCESS),
        (_, Err(faults)) => Err(faults),
        (_, Ok(report)) => {
            tell(&findings_text(&report.warnings));
            if json {
                return Ok(print_json(&report));
            }
            if !quiet {
                tell(&statistics(&report));
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn statistics(report: &GenerateReport) -> String {
    let counted = |count: usize| format!("{count} token{}", if count == 1 { "" } else { "s" });
    let ended = match (report.stop_reason, report.ids.last()) {
        (GenerateStop::StopId, Some(id)) => format!("ended by stop id {id}"),
        (GenerateStop::Repetition, _) => "ended because the text repeats itself (--keep-repeating goes on)".to_owned(),
        _ => "ended at --max-tokens".to_owned(),
    };
    let rate = report.tokens_per_second.map_or(String::new(), |rate| format!(", {rate:.1} tokens/s"));
    let mut out = format!("{}{rate}, {ended}\n", counted(report.ids.len()));
    out += &format!(
        "prompt: {}, {:.1} tokens/s; loading: {}\n",
        counted(report.prompt_ids.len()),
        report.prompt_tokens_per_second,
        duration(report.loading_seconds)
    );
    if report.unfinished_bytes > 0 {
        out += &format!("left out: {} bytes of a character that is not finished\n", report.unfinished_bytes);
    }
    let draft = &report.draft;
    if let Some(share) = draft.acceptance {
        out += &format!("drafts: {} of {} accepted ({:.1} %)\n", draft.accepted, draft.proposed, 100.0 * share);
    }
    out + &device_experts(report.device_experts)
}

/// How writing to stdout goes.
enum End {
    /// Well.
    Open,
    /// The reader has gone away.
    Gone,
    /// It fails.
    Broken(io::Error),
}

/// Writes the text to stdout as it comes, and on stderr what is done before.
struct Speaker {
    /// Whether the text is printed as it comes.
    aloud: bool,
    /// Whether stdout is a terminal.
    terminal: bool,
    bar: Option<ProgressBar>,
    /// Plain lines on stderr.
    lines: bool,
    state: Mutex<State>,
}

struct State {
    end: End,
    /// Whether the text so far ends within a line.
    within_line: bool,
}

impl Speaker {
    fn new(json: bool, quiet: bool) -> Speaker {
        let talkative = io::stderr().is_terminal();
        let bar = (!quiet && talkative).then(|| {
            let style = ProgressStyle::with_template("{spinner} {msg}").expect("a constant template");
            ProgressBar::new_spinner().with_style(style)
        });
        Speaker {
            aloud: !json,
            terminal: io::stdout().is_terminal(),
            bar,
            lines: !quiet && !talkative,
            state: Mutex::new(State { end: End::Open, within_line: false }),
        }
    }

    /// Writes, unless that has failed before.
    fn write(&self, text: &str) {
        let Ok(mut state) = self.state.lock() else { return };
        if !matches!(state.end, End::Open) {
            return;
        }
        let mut stdout = io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Ok(()) => state.within_line = !text.ends_with('\n'),
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => state.end = End::Gone,
            Err(e) => state.end = End::Broken(e),
        }
    }

    /// Ends the last line.
    fn rest(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        if self.state.lock().is_ok_and(|state| state.within_line) {
            self.write("\n");
        }
    }

    fn end(&self) -> End {
        self.state.lock().map_or(End::Open, |mut state| std::mem::replace(&mut state.end, End::Open))
    }
}

impl Watch for Speaker {
    fn phase(&self, what: &str) {
        if what == "generating" {
            // Until here a request ends the program at once: nothing is lost.
            end_on_request();
            if let Some(bar) = self.bar.as_ref().filter(|_| self.aloud) {
                return bar.finish_and_clear();
            }
        }
        if let Some(bar) = &self.bar {
            bar.set_message(what.to_owned());
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        if self.lines && what == "loading the model" {
            tell("loading the model\n");
        }
    }

    fn plan(&self, what: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| tell(&format!("{what}\n"))),
            None if self.lines => tell(&format!("{what}\n")),
            None => {}
        }
    }

    fn piece(&self, text: &str) {
        if !self.aloud {
            return;
        }
        match self.terminal {
            true => self.write(&shown(text)),
            false => self.write(text),
        }
    }

    fn interrupted(&self) -> bool {
        is_end_requested() || self.state.lock().is_ok_and(|state| !matches!(state.end, End::Open))
    }
}

/// Text for a terminal, which control characters could do things to.
fn shown(text: &str) -> String {
    let safe = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().map(|c| if safe(c) { c.to_string() } else { c.escape_default().to_string() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_ids_are_read() {
        assert_eq!(ids("2040, 2042,7").unwrap(), [2040, 2042, 7]);
        for list in ["", ",", "1,", "1;2", "-1", "1.0", "0x7", "99999999999999999999"] {
            assert!(ids(list).unwrap_err().to_string().starts_with("--prompt-ids is "), "{list}");
        }
    }

    #[test]
    fn a_terminal_is_not_controlled_by_a_model() {
        assert_eq!(shown("a\n\tb \u{1b}[2J\u{7} é👩‍👧"), "a\n\tb \\u{1b}[2J\\u{7} é👩‍👧");
    }
}
