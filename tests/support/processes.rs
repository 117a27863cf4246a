//! Conversions in processes of their own, to be killed.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::convert::{Place, contents};

/// A running `coliconv convert`.
pub struct Running(Child);

/// How it ended.
pub struct Ended {
    /// `None` if a signal ended it.
    pub code: Option<i32>,
    pub stderr: String,
}

impl Place {
    /// Starts `coliconv convert CHECKPOINT CONTAINER` with more arguments.
    pub fn start(&self, arguments: &[&str]) -> Running {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("coliconv"));
        command.arg("convert").arg(&self.source).arg(&self.container).args(arguments);
        Running(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
    }
}

impl Running {
    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    /// `kill -9`
    pub fn kill(mut self) -> Ended {
        let _ = self.0.kill();
        self.end()
    }

    /// Ctrl-C
    pub fn interrupt(&self) {
        let status = Command::new("kill").args(["-INT", &self.0.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Waits for its end.
    pub fn end(mut self) -> Ended {
        let mut stderr = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        Ended { code: self.0.wait().unwrap().code(), stderr }
    }
}

/// Waits until something is so.
pub fn until(what: &str, mut is: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < Duration::from_secs(30), "waited for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The temporary files of a directory.
pub fn temporary_files(directory: &Path) -> Vec<String> {
    let names = contents(directory).unwrap_or_default().into_keys().map(|name| name.to_string_lossy().into_owned());
    names.filter(|name| name.ends_with(coliconv::io::TEMPORARY_SUFFIX)).collect()
}

/// The names of a directory, sorted.
pub fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
