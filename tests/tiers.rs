//! Models of which a GPU's memory does not hold all routed experts: the same tokens wherever an expert comes from, and what
//! is said where the memory does not suffice or a file changes. On the emulated driver, and on a Vulkan device if there is one.

#![cfg(target_os = "linux")]

mod support;

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use coliconv::backend::Backend;
use coliconv::backend::cuda;
use coliconv::backend::gpu::tiers;
use coliconv::container::reader::Container;
use coliconv::convert;
use coliconv::error::FaultKind;
use coliconv::experts::Options;
use coliconv::model::Model;
use coliconv::recipe::Settings;
use coliconv::roles::Pass;
use serde_json::Value;
use support::containers::{container, fixture, stored};
use support::emulated_cuda;
use tempfile::TempDir;

/// A container with an MTP head, whose experts have a format of their own.
fn nano() -> TempDir {
    container("nano", "all", || {
        let mut options =
            convert::Options { passes: Pass::ALL.to_vec(), settings: Settings::default(), ..Default::default() };
        options.allowed.ambiguous = true;
        options
    })
}

/// `coliconv` with the emulated driver and these settings.
fn coliconv(settings: &[(&str, &str)], model: &Path, arguments: &[&str]) -> Command {
    let mut command = emulated_cuda::coliconv(emulated_cuda::folder(), settings);
    command.arg(arguments[0]).arg(model).args(&arguments[1..]).arg("--json");
    command
}

fn ran(mut command: Command) -> (i32, Value) {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let document = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"));
    (output.status.code().unwrap(), document)
}

fn generated(settings: &[(&str, &str)], model: &Path, more: &[&str]) -> (i32, Value) {
    let arguments = ["generate", "--quiet", "--prompt-ids", "1,2,3,4,5,6,7", "--max-tokens", "8"];
    ran(coliconv(settings, model, &[&arguments[..], more].concat()))
}

/// The bytes of a GPU's memory that are wanted at least, as a refusal of less says them.
fn least(model: &Path, device: &str, of: impl Fn(&[&str]) -> (i32, Value)) -> u64 {
    let (code, refusal) = of(&["--device", device, "--device-memory", "1"]);
    assert_eq!((code, &refusal["refused"][0]["kind"]), (2, &"gpu-memory-limit".into()), "{refusal:#} {model:?}");
    let message = refusal["refused"][0]["message"].as_str().unwrap();
    let (before, after) = message.split_once(" bytes of the GPU's memory, --device-memory allows 1").unwrap();
    assert!(before.contains(": the model with one routed expert at a time needs ") && after.is_empty(), "{message}");
    assert_eq!(refusal["refused"][0]["hint"], "give more with --device-memory, or use --device cpu");
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Whether there is a Vulkan device; COLICONV_REQUIRE_DEVICES can demand one.
fn has_vulkan() -> bool {
    let (_, report) = ran({
        let mut command = Command::cargo_bin("coliconv").unwrap();
        command.args(["devices", "--json"]);
        command
    });
    let found = report["apis"][1]["devices"].as_array().unwrap().first().is_some_and(|one| one["unusable"].is_null());
    let required = std::env::var("COLICONV_REQUIRE_DEVICES").unwrap_or_default();
    assert!(found || !required.split(',').any(|device| device == "vulkan"), "{report:#}");
    if !found {
        eprintln!("not tested: there is no Vulkan device");
    }
    found
}

fn number(report: &Value, path: &str) -> u64 {
    report.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path}: {report:#}"))
}

#[test]
fn texts_are_the_same_whichever_tier_an_expert_comes_from() {
    let model = nano();
    let on = |more: &[&str]| generated(&[], model.path(), more);
    let mut devices = vec!["cuda"];
    devices.extend(has_vulkan().then_some("vulkan"));
    for device in devices {
        let (code, whole) = on(&["--device", device]);
        assert_eq!((code, &whole["device_experts"], &whole["experts"]), (0, &Value::Null, &Value::Null), "{whole:#}");
        let of_drafts = |drafts: &str| least(model.path(), device, |more| on(&[more, &["--draft", drafts]].concat()));
        // What does not draft has no MTP head on the device.
        assert!(of_drafts("0") + (1 << 17) < of_drafts("1") && of_drafts("1") == of_drafts("2"));
        for (more, drafts) in [(0, "0"), (0, "2"), (1 << 19, "1"), (1 << 21, "0")] {
            let least = of_drafts(drafts);
            let memory = (least + more).to_string();
            let (code, few) = on(&["--device", device, "--device-memory", &memory, "--draft", drafts]);
            assert_eq!((code, &few["ids"]), (0, &whole["ids"]), "{device} {more}: {few:#}");
            let of = |key: &str| number(&few, &format!("/device_experts/{key}"));
            assert_eq!(of("uploads"), of("requests") - of("hits"), "{few:#}");
            assert!(of("evictions") > 0 || more == 1 << 21, "{few:#}");
            assert!(of("bytes_uploaded") > of("uploads") && of("budget_bytes") < least + more, "{few:#}");
            // What is on the device is not asked of the memory.
            assert_eq!(number(&few, "/experts/requests"), of("uploads"), "{few:#}");
            assert!(number(&few, "/gpu/dispatches") > 100 && number(&few, "/gpu/fallbacks") == 0);
        }
        let (code, refusal) = on(&["--device", device, "--device-memory", &(of_drafts("0") - 1).to_string()]);
        assert_eq!((code, &refusal["refused"][0]["kind"]), (2, &"gpu-memory-limit".into()), "{refusal:#}");
    }
}

/// Whatever order copies and kernels take that nobody asked for, and however little memory the machine gives.
#[test]
fn neither_the_order_of_copies_nor_the_memory_changes_a_token() {
    let model = nano();
    let (_, whole) = generated(&[], model.path(), &["--device", "cuda"]);
    let least = least(model.path(), "cuda", |more| generated(&[], model.path(), &[more, &["--draft", "1"]].concat()));
    let device_memory = (least + (1 << 18)).to_string();
    let few = ["--device", "cuda", "--draft", "1", "--device-memory", &device_memory];
    let (code, early) = generated(&[("EMULATED_CUDA_COPIES", "early")], model.path(), &few);
    assert_eq!((code, &early["ids"]), (0, &whole["ids"]), "{early:#}");
    let (code, refusal) = generated(&[], model.path(), &[&few[..], &["--memory", "1"]].concat());
    assert_eq!((code, &refusal["refused"][0]["kind"]), (2, &"generation-too-large".into()), "{refusal:#}");
    let message = refusal["refused"][0]["message"].as_str().unwrap();
    let memory: u64 = message.split(' ').find_map(|word| word.parse().ok().filter(|&n: &u64| n > 1000)).unwrap();
    let (code, from_disk) = generated(&[], model.path(), &[&few[..], &["--memory", &memory.to_string()]].concat());
    assert_eq!((code, &from_disk["ids"]), (0, &whole["ids"]), "{from_disk:#}");
    assert!(number(&from_disk, "/experts/evictions") > 0, "{from_disk:#}");
}

#[test]
fn memory_of_a_gpu_is_bounded_where_one_is_asked_for() {
    for device in ["cpu", "reference"] {
        let (code, refusal) = generated(&[], &fixture("nano"), &["--device", device, "--device-memory", "1G"]);
        assert_eq!((code, &refusal["refused"][0]["kind"]), (2, &"flag-needs".into()), "{refusal:#}");
    }
    // On its way to the GPU a weight is in memory.
    let (code, refusal) = generated(&[], &fixture("nano"), &["--device", "cuda", "--memory", "1K"]);
    assert_eq!((code, &refusal["refused"][0]["kind"]), (2, &"generation-too-large".into()), "{refusal:#}");
}

/// A GPU that has less than the model: as much as there is, without being told.
#[test]
fn a_small_gpu_has_as_many_experts_as_fit() {
    let model = nano();
    let (_, whole) = generated(&[], model.path(), &["--device", "cuda"]);
    let least = least(model.path(), "cuda", |more| generated(&[], model.path(), more));
    let memory = (least + (1 << 20)).to_string();
    let (code, few) = generated(&[("EMULATED_CUDA_MEMORY", &memory)], model.path(), &["--device", "cuda"]);
    assert_eq!((code, &few["ids"]), (0, &whole["ids"]), "{few:#}");
    assert!(number(&few, "/device_experts/budget_bytes") < least + (1 << 20));
    let memory = (least - 1).to_string();
    let (code, refusal) = generated(&[("EMULATED_CUDA_MEMORY", &memory)], model.path(), &["--device", "cuda"]);
    assert_eq!((code, &refusal["refused"][0]["kind"]), (2, &"gpu-memory".into()), "{refusal:#}");
    let message = refusal["refused"][0]["message"].as_str().unwrap();
    assert!(message.ends_with(&format!("{least} bytes are wanted, {memory} of {memory} are free")), "{message}");
}

/// References of another implementation, and rows of many lengths at once.
#[test]
fn references_and_scores_are_the_same_in_tiers() {
    let model = nano();
    let reference = fixture("nano").join("expected/tokens-g64-mtp-indexer.json");
    let verify = |more: &[&str]| {
        let arguments = ["verify", "--quiet", "--device", "cuda", "--reference", reference.to_str().unwrap()];
        ran(coliconv(&[], model.path(), &[&arguments[..], more].concat()))
    };
    let (code, whole) = verify(&[]);
    assert_eq!(code, 0, "{whole:#}");
    let least = least(model.path(), "cuda", |more| verify(&more[2..]));
    let (code, few) = verify(&["--device-memory", &(least + (1 << 19)).to_string()]);
    assert_eq!(code, 0, "{few:#}");
    assert!(number(&few, "/device_experts/evictions") > 0 && whole["device_experts"].is_null());
    let without_launches = |report: &Value| {
        let mut tokens = report["tokens"].clone();
        tokens.as_array_mut().unwrap().iter_mut().for_each(|entry| entry["gpu"] = Value::Null);
        tokens
    };
    assert_eq!(without_launches(&few), without_launches(&whole));

    let directory = TempDir::new().unwrap();
    let text = directory.path().join("text.jsonl");
    let rows: Vec<String> =
        (1..4).map(|n| format!("{{\"text\":\"{}\"}}\n", "In the beginning was a word. ".repeat(n))).collect();
    fs::write(&text, rows.concat()).unwrap();
    let text = format!("t={}", text.display());
    let score = |more: &[&str]| {
        let arguments = ["score", "--quiet", "--device", "cuda", "--text", &text];
        ran(coliconv(&[], model.path(), &[&arguments[..], more].concat()))
    };
    let (code, whole) = score(&[]);
    assert_eq!(code, 0, "{whole:#}");
    let least = self::least(model.path(), "cuda", |more| score(&more[2..]));
    let (code, few) = score(&["--device-memory", &least.to_string()]);
    assert_eq!((code, &few["texts"], &few["requests"]), (0, &whole["texts"], &whole["requests"]), "{few:#}");
    assert!(number(&few, "/device_experts/evictions") > 0, "{few:#}");
}

/// A file that shrinks while a model runs is told as it is on the CPU, and the model goes on with what it has.
#[test]
fn a_file_that_shrinks_under_a_running_model() {
    let model = nano();
    // SAFETY: the library is made by the tests, and has nothing that runs when it is loaded but its lists of kernels.
    std::mem::forget(unsafe { libloading::Library::new(emulated_cuda::folder().join("libcuda.so")) }.unwrap());
    let weights = Container::open(model.path()).unwrap_or_else(|faults| panic!("{faults}"));
    let host = Options { budget_bytes: 600_000, readers: 1, direct: true };
    let options = tiers::Options { device_bytes: 400_000, fewer: false, host };
    let backend = cuda::backend(0, None).unwrap().in_tiers(Some(options));
    let loaded = Model::load(&weights, &backend).unwrap_or_else(|faults| panic!("{faults}"));
    let ids: Vec<u32> = (0..12).map(|i| i * 53 % 2048).collect();
    let before = loaded.teacher_forced(&ids, None).unwrap();
    assert_eq!(loaded.teacher_forced(&ids, None).unwrap(), before);
    let (path, _) = stored(model.path(), "model.layers.2.mlp.experts.0.gate_proj.weight");
    let (whole, written) = (fs::read(&path).unwrap(), fs::metadata(&path).unwrap().modified().unwrap());
    fs::File::options().write(true).open(&path).unwrap().set_len(whole.len() as u64 / 2).unwrap();
    let fault = loaded.teacher_forced(&ids, None).unwrap_err();
    assert!(matches!(*fault.kind, FaultKind::FileShrank { .. }), "{fault}");
    assert!(fault.place.tensor.as_ref().unwrap().as_str().contains(".mlp.experts."), "{fault}");
    assert_eq!(fault.place.file.as_deref(), Some(&*path));
    // Nothing half of it is on the device: with the file as it was everything is as it was.
    use std::io::Write;
    let mut file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all(&whole).unwrap();
    file.set_modified(written).unwrap();
    assert_eq!(loaded.teacher_forced(&ids, None).unwrap(), before);
    let counters = backend.device_expert_counters().unwrap();
    assert!(counters.evictions > 0 && counters.budget_bytes <= 400_000, "{counters:?}");
}
