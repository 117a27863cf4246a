//! `publish`: what the gate demands, each refusal, what is written, interruptions, listings of a repository, the card.

#[path = "publish/binding.rs"]
mod binding;
#[path = "publish/card.rs"]
mod card;
#[path = "publish/cards.rs"]
mod cards;
#[path = "publish/gate.rs"]
mod gate;
#[path = "publish/honest.rs"]
mod honest;
#[path = "publish/listing.rs"]
mod listing;
mod support;
#[path = "publish/written.rs"]
mod written;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use coliconv::convert::{self, Job, Silent};
use coliconv::publish::policy::Policy;
use coliconv::publish::{Options, publish};
use coliconv::report::{PublishReport, Severity, Verdict};
use coliconv::roles::Pass;
use coliconv::score::input::{Given, Kind};
use coliconv::score::{self, Unwatched};
use coliconv::verify::{self, Level, TokenOptions};
use serde_json::Value;
use support::containers::{copy, fixture};
use tempfile::TempDir;

/// The source's own card.
const CARD: &str = "---\nlicense: other\nlicense_name: nano-licence\nlicense_link: https://example.org/licence\nlanguage:\n- en\n\
                    base_model: example/nano\n---\n# Nano\n\nA small model.\n";

/// A policy that a small model meets on a few rows.
const LENIENT: &str = r#"{"verify": {"min_predictions": 20}, "score": {"max_accuracy_drop": 0.5, "max_perplexity_increase": 0.5, "min_questions": 1, "min_tokens": 1}}"#;

/// A container with its reports, in a directory of their own.
struct Place {
    root: TempDir,
}

impl Place {
    /// A copy of the one that is made once: nano with a card and a licence, all passes, verified and scored.
    fn new() -> Place {
        static MADE: OnceLock<Place> = OnceLock::new();
        let made = MADE.get_or_init(Place::make);
        let place = Place { root: copy(made.root.path()) };
        fs::create_dir(place.container()).unwrap();
        for entry in fs::read_dir(made.container()).unwrap().map(Result::unwrap) {
            fs::copy(entry.path(), place.container().join(entry.file_name())).unwrap();
        }
        place
    }

    fn make() -> Place {
        let place = Place { root: TempDir::new().unwrap() };
        let source = copy(&fixture("nano"));
        fs::write(source.path().join("README.md"), CARD).unwrap();
        let options = convert::Options { passes: Pass::ALL.to_vec(), ..Default::default() };
        let job = Job::prepare(source.path(), &place.container(), options);
        job.and_then(|job| job.run(&Silent)).unwrap_or_else(|faults| panic!("{faults}"));
        place.store("verify.json", &place.verified(Level::Tokens));
        place.store("score.json", &place.scored(Some(source.path())));
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn container(&self) -> PathBuf {
        self.path("nano-g64")
    }

    /// The report of a verification with one reference.
    fn verified(&self, level: Level) -> Value {
        let reference = fixture("nano").join("expected/mtp-g64-mtp-indexer.json");
        let full = fs::read(fixture("nano").join("expected/tokens-g64-mtp-indexer.json")).unwrap();
        let mut full: Value = serde_json::from_slice(&full).unwrap();
        full["references"].as_array_mut().unwrap().truncate(1);
        fs::write(self.path("reference.json"), full.to_string()).unwrap();
        let references = if level == Level::Tokens { vec![self.path("reference.json"), reference] } else { Vec::new() };
        let tokens = TokenOptions { references, ..TokenOptions::default() };
        let options = verify::Options { level, source: None, threads: 0, tokens };
        let report = verify::verify(&self.container(), &options, &Silent).unwrap_or_else(|faults| panic!("{faults}"));
        serde_json::to_value(&report).unwrap()
    }

    /// The report of a few rows, compared with a baseline where there is one.
    fn scored(&self, baseline: Option<&Path>) -> Value {
        let head = |name: &str, rows| {
            let text = fs::read_to_string(fixture("nano").join("expected").join(name)).unwrap();
            let path = self.path(name);
            fs::write(&path, text.lines().take(rows).collect::<Vec<_>>().join("\n") + "\n").unwrap();
            path
        };
        let inputs = vec![
            Given { kind: Kind::Task, name: "gloss".into(), path: head("gloss.jsonl", 6) },
            Given { kind: Kind::Text, name: "heldout".into(), path: head("heldout.txt", 3) },
        ];
        let options = score::Options { inputs, baseline: baseline.map(Path::to_owned), ..Default::default() };
        let report = score::score(&self.container(), &options, &Unwatched).unwrap_or_else(|faults| panic!("{faults}"));
        serde_json::to_value(&report).unwrap()
    }

    fn store(&self, name: &str, value: &Value) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, serde_json::to_vec_pretty(value).unwrap()).unwrap();
        path
    }

    fn load(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap()
    }

    /// Changes a report.
    fn edit(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut value = self.load(name);
        edit(&mut value);
        self.store(name, &value);
    }

    /// Both reports, a repository, and a policy that this small model meets.
    fn options(&self) -> Options {
        let policy = Policy::parse(Path::new("policy.json"), LENIENT.as_bytes()).unwrap();
        Options {
            reports: vec![self.path("verify.json"), self.path("score.json")],
            repo_id: Some("example/nano-g64".to_owned()),
            policy: Some(policy),
            ..Options::default()
        }
    }

    fn with_policy(&self, text: &str) -> Options {
        let policy = Policy::parse(Path::new("policy.json"), text.as_bytes()).unwrap_or_else(|fault| panic!("{fault}"));
        let mut policy = policy;
        // These references are short.
        if !text.contains("min_predictions") {
            policy.verify.min_predictions = 1;
        }
        Options { policy: Some(policy), ..self.options() }
    }

    fn publish(&self, options: &Options) -> PublishReport {
        publish(&self.container(), options, &Silent).unwrap_or_else(|faults| panic!("{faults}"))
    }

    /// Publishes what must be good.
    fn published(&self) -> PublishReport {
        let report = self.publish(&self.options());
        assert_eq!((report.verdict, errors(&report)), (Verdict::Pass, vec![]), "{report:#?}");
        report
    }

    /// Name and contents of every file of the container.
    fn files(&self) -> Vec<(String, Vec<u8>)> {
        let read = |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
        let mut files: Vec<_> = fs::read_dir(self.container()).unwrap().map(|entry| read(entry.unwrap())).collect();
        files.sort();
        files
    }

    /// Fails unless exactly these kinds of errors keep the gate closed and nothing was written.
    #[track_caller]
    fn refuses(&self, options: &Options, kinds: &[&str]) -> PublishReport {
        let before = self.files();
        let report = self.publish(options);
        assert_eq!(errors(&report), kinds, "{report:#?}");
        assert_eq!(report.verdict, Verdict::Fail);
        assert!(report.written.is_empty() && report.plan.is_none() && report.steps.is_empty());
        assert!(self.files() == before, "nothing is written");
        assert!(!self.path("nano-g64.upload-plan.json").exists());
        report
    }
}

/// The kinds of what kept the gate closed, each once.
fn errors(report: &PublishReport) -> Vec<&str> {
    let errors = report.findings.iter().filter(|finding| finding.severity == Severity::Error);
    let mut kinds: Vec<&str> = errors.map(|finding| finding.kind.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

/// The messages of a report, with their places.
fn lines(report: &PublishReport) -> String {
    report.findings.iter().map(|finding| finding.line() + "\n").collect()
}
