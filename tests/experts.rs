//! Routed experts on demand, in whole models: the same bits whatever the memory, the threads and the way of reading; and
//! what is said when a file changes or the memory does not suffice.

mod support;

use std::fs;
use std::path::Path;

use coliconv::backend::Backend;
use coliconv::backend::cpu::Cpu;
use coliconv::checkpoint::{Allowed, Checkpoint};
use coliconv::config::Config;
use coliconv::container::reader::Container;
use coliconv::convert;
use coliconv::error::FaultKind;
use coliconv::experts::{Counters, Options};
use coliconv::io::anonymous_bytes;
use coliconv::isa::Isa;
use coliconv::model::memory::{Needs, share};
use coliconv::model::{Loaded, Model};
use coliconv::recipe::Settings;
use coliconv::report::{CheckStatus, VerifyReport};
use coliconv::roles::Pass;
use coliconv::weights::Weights;
use support::containers::{container, fixture, run, run_json, stored};
use tempfile::TempDir;

fn converted(checkpoint: &str, key: &str, settings: Settings) -> TempDir {
    let mut options = convert::Options { passes: Pass::ALL.to_vec(), settings, ..Default::default() };
    options.allowed.ambiguous = true;
    container(checkpoint, key, || options)
}

fn nano() -> TempDir {
    converted("nano", "all", Settings::default())
}

/// Everything that a model says along a text, bit for bit, and what reading experts took.
fn said(weights: &dyn Weights, options: Options, threads: usize) -> (Vec<u64>, Vec<u32>, Counters) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| {
        let backend = Cpu::with_experts(Isa::detect(), options);
        let model = Model::load(weights, &backend).unwrap_or_else(|faults| panic!("{faults}"));
        let vocab_size = model.config().vocab_size as u32;
        let ids: Vec<u32> = (0..24).map(|i| i * 37 % vocab_size).collect();
        let mut bits = Vec::new();
        let predictions = model.teacher_forced(&ids, None).unwrap();
        let drafts = if model.has_mtp() { model.drafts(&ids, None).unwrap() } else { Vec::new() };
        for prediction in predictions.iter().chain(&drafts) {
            bits.extend([u64::from(prediction.id), u64::from(prediction.logit.to_bits())]);
            bits.push(prediction.log_sum_exp.to_bits());
        }
        (bits, model.greedy(&ids[..5], 12, None).unwrap(), backend.expert_counters().unwrap())
    })
}

/// Memory of all experts of a model, and of one at least with what its readers need.
fn bounds(directory: &Path) -> (u64, u64) {
    let needs = Needs::of(directory, &Config::read(directory).unwrap(), Loaded::Whole, 64, 64);
    let least = share(std::slice::from_ref(&needs), Some(needs.fixed() + needs.experts_at_least)).unwrap();
    (needs.experts + needs.experts_at_least, least[0].budget_bytes)
}

#[track_caller]
fn assert_same_in_any_memory(weights: &dyn Weights) {
    let (all, least) = bounds(&weights.directory());
    let everything = said(weights, Options { direct: false, ..Options::within(u64::MAX) }, 1);
    assert_eq!(everything.2.evictions, 0);
    for (budget_bytes, threads, direct) in
        [(all, 2, true), (all / 2, 1, true), (all / 2, 3, false), (least, 1, false), (least, 2, true), (least, 3, true)]
    {
        let budget_bytes = budget_bytes.max(least);
        // The least is for one reader.
        let readers = if budget_bytes == least { 1 } else { 1 + threads };
        let found = said(weights, Options { budget_bytes, readers, direct }, threads);
        let what = format!("{budget_bytes} bytes, {threads} threads, direct {direct}");
        assert_eq!((&found.0, &found.1), (&everything.0, &everything.1), "{what}");
        assert!(found.2.peak_bytes <= budget_bytes, "{what}: {:?}", found.2);
        assert_eq!(found.2.requests, everything.2.requests, "{what}");
        assert!(found.2.evictions > 0 || budget_bytes > least, "{what}");
    }
}

#[test]
fn containers_say_the_same_in_any_memory() {
    let mut settings = Settings::default();
    for (key, ebits) in [("g64", None), ("int3", Some(3)), ("int8", Some(8))] {
        settings.ebits = ebits;
        let directory = converted("nano", key, settings.clone());
        let weights = Container::open(directory.path()).unwrap_or_else(|faults| panic!("{faults}"));
        assert_same_in_any_memory(&weights);
    }
    let directory = converted("tiny", "tiny", Settings::default());
    assert_same_in_any_memory(&Container::open(directory.path()).unwrap_or_else(|faults| panic!("{faults}")));
}

#[test]
fn checkpoints_say_the_same_in_any_memory() {
    for name in ["nano", "tiny"] {
        let checkpoint = Checkpoint::open(&fixture(name), &Pass::ALL, Allowed::default());
        assert_same_in_any_memory(&checkpoint.unwrap_or_else(|faults| panic!("{faults}")));
    }
}

#[test]
fn a_thousand_requests_take_no_more_than_the_first() {
    let directory = nano();
    let weights = Container::open(directory.path()).unwrap_or_else(|faults| panic!("{faults}"));
    let (_, budget_bytes) = bounds(directory.path());
    let backend = Cpu::with_experts(Isa::detect(), Options { budget_bytes, readers: 1, direct: true });
    let model = Model::load(&weights, &backend).unwrap_or_else(|faults| panic!("{faults}"));
    let (mut peaks, mut anonymous) = (Vec::new(), Vec::new());
    for request in 0..1000u32 {
        let ids: Vec<u32> = (0..3).map(|i| (request * 31 + i * 7) % 2048).collect();
        model.teacher_forced(&ids, None).unwrap();
        peaks.push(backend.expert_counters().unwrap().peak_bytes);
        anonymous.push(anonymous_bytes().unwrap_or(0));
    }
    // Other tests of this process take memory as well, so this is for people to read.
    println!("anonymous memory after 100 and 1000 requests: {} and {} bytes", anonymous[99], anonymous[999]);
    assert!(peaks[999] <= budget_bytes && peaks[100] == peaks[999], "{} {}", peaks[100], peaks[999]);
}

#[test]
fn a_file_that_is_cut_or_replaced_under_a_running_model() {
    let directory = nano();
    let weights = Container::open(directory.path()).unwrap_or_else(|faults| panic!("{faults}"));
    let (_, budget_bytes) = bounds(directory.path());
    let backend = Cpu::with_experts(Isa::detect(), Options { budget_bytes, readers: 1, direct: true });
    let model = Model::load(&weights, &backend).unwrap_or_else(|faults| panic!("{faults}"));
    let ids: Vec<u32> = (0..40).map(|i| i * 53 % 2048).collect();
    let before = model.teacher_forced(&ids, None).unwrap();
    // Another file of that name is not read: the one that was opened still is.
    let (path, _) = stored(directory.path(), "model.layers.2.mlp.experts.0.gate_proj.weight");
    let moved = path.with_extension("moved");
    fs::rename(&path, &moved).unwrap();
    fs::write(&path, b"something else").unwrap();
    assert_eq!(model.teacher_forced(&ids, None).unwrap(), before);
    let bytes = fs::metadata(&moved).unwrap().len();
    fs::File::options().write(true).open(&moved).unwrap().set_len(bytes / 2).unwrap();
    let fault = model.teacher_forced(&ids, None).unwrap_err();
    assert!(matches!(*fault.kind, FaultKind::FileShrank { .. }), "{fault}");
    let tensor = fault.place.tensor.as_ref().unwrap().as_str().to_owned();
    assert!(tensor.contains(".mlp.experts.") && fault.place.offset.is_some(), "{fault}");
    assert_eq!(fault.place.file.as_deref(), Some(&*path));
}

#[test]
fn verify_tells_what_reading_took_and_refuses_too_little() {
    let directory = nano();
    let config = Config::read(directory.path()).unwrap();
    let needs = Needs::of(directory.path(), &config, Loaded::Whole, 128, 128);
    let least = needs.fixed() + needs.experts_at_least;
    let reference = fixture("nano").join("expected/tokens-g64-mtp-indexer.json");
    let report = |memory: u64| -> VerifyReport {
        let flags = ["verify", "--memory", &memory.to_string(), "--reference", reference.to_str().unwrap()];
        let (code, document) = run_json(&flags, &[directory.path()]);
        assert_eq!(code, 0, "{document:#}");
        serde_json::from_value(document).unwrap()
    };
    let all = report(1 << 30);
    let few = report(least);
    let (of_all, of_few) = (all.experts.unwrap(), few.experts.unwrap());
    assert_eq!((of_all.requests, of_all.evictions, of_all.direct), (of_few.requests, 0, false));
    assert!(of_few.evictions > 0 && of_few.direct && of_few.bytes_read > of_all.bytes_read, "{of_few:?}");
    assert!(of_few.peak_bytes <= of_few.budget_bytes && of_few.budget_bytes <= needs.experts_at_least);
    assert!(few.checks.iter().any(|check| check.name == "forward" && check.status == CheckStatus::Pass));
    let output = run(&["verify", "--quiet", "--memory", &(least - 1).to_string()], &[directory.path()]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap().replace(directory.path().to_str().unwrap(), "DIR");
    let text =
        text.replace(&needs.fixed().to_string(), "FIXED").replace(&needs.experts_at_least.to_string(), "EXPERTS");
    insta::assert_snapshot!(text.replace(&least.to_string(), "LEAST").replace(&(least - 1).to_string(), "GIVEN"));
}
