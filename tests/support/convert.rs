//! Conversions as a user runs them, and refusals as a user sees them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::OnceLock;

use assert_cmd::Command;
use coliconv::convert::{Job, Options, Silent};
use coliconv::error::Faults;
use coliconv::recipe::{GroupSize, Settings};
use coliconv::report::ConvertReport;
use serde_json::Value;
use tempfile::TempDir;

use super::shards::Shards;
use super::synthetic::{Synthetic, small_config};

/// A committed checkpoint.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// The small model in three shards, to be edited.
pub fn small() -> Shards {
    static SMALL: OnceLock<Shards> = OnceLock::new();
    SMALL.get_or_init(|| load(&Synthetic::new(small_config()).shards(3))).clone()
}

/// A checkpoint, made and loaded.
pub fn load(synthetic: &Synthetic) -> Shards {
    let directory = TempDir::new().unwrap();
    synthetic.write(directory.path()).unwrap();
    Shards::load(directory.path())
}

/// Somewhere for a checkpoint and a container that does not exist yet.
pub struct Place {
    pub root: TempDir,
    pub source: PathBuf,
    pub container: PathBuf,
}

impl Place {
    /// With nothing in it.
    pub fn new() -> Place {
        Place::within(TempDir::new().unwrap())
    }

    /// With nothing in it, in memory where the system has such a place: for tests that write and sync a lot.
    pub fn in_memory() -> Place {
        Place::within(TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap())
    }

    fn within(root: TempDir) -> Place {
        let (source, container) = (root.path().join("checkpoint"), root.path().join("container"));
        Place { root, source, container }
    }

    /// With this checkpoint.
    pub fn of(shards: &Shards) -> Place {
        let place = Place::new();
        shards.store(&place.source);
        place
    }

    /// With this checkpoint.
    pub fn made(synthetic: &Synthetic) -> Place {
        let place = Place::new();
        synthetic.write(&place.source).unwrap();
        place
    }

    /// With a copy of a committed checkpoint.
    pub fn copy(name: &str) -> Place {
        let place = Place::new();
        fs::create_dir(&place.source).unwrap();
        for entry in fs::read_dir(fixture(name)).unwrap().map(Result::unwrap) {
            if entry.path().is_file() {
                fs::copy(entry.path(), place.source.join(entry.file_name())).unwrap();
            }
        }
        place
    }

    /// `coliconv convert CHECKPOINT CONTAINER` with more arguments.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::cargo_bin("coliconv").unwrap();
        command.arg("convert").arg(&self.source).arg(&self.container).args(arguments);
        command
    }

    /// Runs it.
    pub fn output(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs it with success.
    pub fn convert(&self, arguments: &[&str]) {
        let output = self.output(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    }

    /// Runs it with success and reads its JSON.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let output = self.command(arguments).arg("--json").output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Prepares and runs it in this process.
    pub fn run(&self, options: Options) -> Result<ConvertReport, Faults> {
        Job::prepare(&self.source, &self.container, options)?.run(&Silent)
    }

    /// What it says on stderr when it refuses: exit code 2, no container (or one that is untouched), the source as it was.
    pub fn refused(&self, arguments: &[&str]) -> String {
        let before = (contents(&self.source), contents(&self.container));
        let output = self.output(arguments);
        let said = self.redacted(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains("error: "), "{arguments:?}: {said}");
        assert!((contents(&self.source), contents(&self.container)) == before, "{arguments:?} left traces: {said}");
        said
    }

    /// Text without the paths of this run.
    pub fn redacted(&self, bytes: &[u8]) -> String {
        text(bytes).replace(self.root.path().to_str().unwrap(), "[ROOT]")
    }
}

/// What is said about an edited small model, under a title.
pub fn refusal(title: &str, edit: impl FnOnce(&mut Shards), arguments: &[&str]) -> String {
    let mut shards = small();
    edit(&mut shards);
    refusal_of(title, &shards, arguments)
}

/// What is said about a model, under a title.
pub fn refusal_of(title: &str, shards: &Shards, arguments: &[&str]) -> String {
    println!("{title}");
    format!("## {title}\n{}\n", Place::of(shards).refused(arguments))
}

/// Bytes of a program's output.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Every file of a directory, by name; `None` if there is no directory.
pub fn contents(directory: &Path) -> Option<BTreeMap<PathBuf, Vec<u8>>> {
    let entries = fs::read_dir(directory).ok()?.map(Result::unwrap);
    let file = |path: PathBuf| {
        let bytes = if fs::metadata(&path).is_ok_and(|m| m.is_file()) { fs::read(&path).unwrap() } else { Vec::new() };
        (path.file_name().unwrap().into(), bytes)
    };
    Some(entries.map(|entry| file(entry.path())).collect())
}

/// The weight files among these.
pub fn weights(contents: &BTreeMap<PathBuf, Vec<u8>>) -> BTreeMap<PathBuf, Vec<u8>> {
    let is_weight = |path: &Path| path.extension().is_some_and(|e| e == "safetensors");
    contents.iter().filter(|(path, _)| is_weight(path)).map(|(path, bytes)| (path.clone(), bytes.clone())).collect()
}

/// Settings at which the small model has no width that is misread.
pub fn groups_of_32() -> Options {
    let settings = Settings { group_size: Some(GroupSize::Elements(32)), ..Settings::default() };
    Options { settings, threads: 1, ..Options::default() }
}

/// The same on the command line.
pub const G32: [&str; 2] = ["--group-size", "32"];
