//! One model on several GPUs, emulated ones: the same bits wherever its layers lie, and what users are told.

#![cfg(target_os = "linux")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use coliconv::backend::cuda::Cuda;
use coliconv::backend::gpu::many::{Many, open};
use coliconv::backend::gpu::placement::Placement;
use coliconv::backend::{Backend, Prediction};
use coliconv::model::Model;
use coliconv::weights::Model as Stored;
use serde_json::{Value, json};
use support::emulated_cuda::{coliconv, folder};
use tempfile::TempDir;

/// Layers of the fixture, its MTP layer, the embedding and the head.
const PARTS: usize = 4 + 1 + 2;

fn nano() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nano")
}

/// Runs of parts on three devices: every cut between two of them, and some between three; the emulation is slow.
fn placements() -> Vec<Vec<usize>> {
    let cuts = (0..=PARTS).flat_map(|first| (first..=PARTS).map(move |second| (first, second)));
    let cuts = cuts.filter(|(first, second)| first == second || (first + 2 * second) % 5 == 0);
    let device = |part: usize, first: usize, second: usize| usize::from(part >= first) + usize::from(part >= second);
    cuts.map(|(first, second)| (0..PARTS).map(|part| device(part, first, second)).collect()).collect()
}

/// What a model says along a text and after it, of drafts too, where positions are chosen.
fn said<B: Backend>(model: &Model<'_, B>) -> (Vec<Prediction>, Vec<Prediction>, Vec<u32>) {
    let ids: Vec<u32> = (0..9).map(|at| (at * 37 + 11) % 2048).collect();
    let forced = model.teacher_forced(&ids, Some(5)).unwrap();
    (forced, model.drafts(&ids, Some(5)).unwrap(), model.greedy(&ids[..7], 2, Some(5)).unwrap())
}

#[test]
fn bits_are_the_same_wherever_layers_lie() {
    // SAFETY: the library is made by the tests, and has nothing that runs when it is loaded but its lists of kernels.
    std::mem::forget(unsafe { libloading::Library::new(folder().join("libcuda.so")) }.unwrap());
    let stored = Stored::open(&nano()).unwrap();
    let on = |devices: Vec<usize>| {
        let gpus = open([0, 0, 0].into_iter(), None, Cuda::open).unwrap();
        let many = Many::new(gpus, Placement::of(devices)).unwrap();
        let said = said(&Model::load(stored.weights(), &many).unwrap());
        (said, many.counters())
    };
    let gpu = coliconv::backend::cuda::backend(0, None).unwrap();
    let expected = said(&Model::load(stored.weights(), &gpu).unwrap());
    let all = gpu.counters();
    for devices in placements() {
        let (said, counters) = on(devices.clone());
        assert!(said == expected, "{devices:?}");
        // One operation is one on any number of devices.
        assert_eq!(counters.0, all.0, "{devices:?}");
        let used = |device: usize| devices.contains(&device);
        for (device, counted) in counters.1.iter().enumerate() {
            assert_eq!(
                (counted.dispatches > 0, counted.allocated_bytes > 0),
                (used(device), used(device)),
                "{devices:?}"
            );
            let is_first = devices[0] == device;
            assert!(!is_first || used((device + 1) % 3) || used((device + 2) % 3) || counted.copied_bytes == 0);
            assert!(is_first || used(device) == (counted.copied_bytes > 0), "{devices:?} {counters:?}");
        }
    }
}

fn settings<'s>(of: &[(&'static str, &'s str)]) -> Vec<(&'static str, &'s str)> {
    let mut settings = vec![("EMULATED_CUDA_DEVICES", "3")];
    settings.extend(of);
    settings
}

fn ran(of: &[(&'static str, &str)], arguments: &[&str]) -> (Option<i32>, Value, String) {
    let mut command = coliconv(folder(), &settings(of));
    let output = command.arg(arguments[0]).arg(nano()).args(&arguments[1..]).arg("--json").output().unwrap();
    let document = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code(), document, String::from_utf8(output.stderr).unwrap())
}

/// Entries of a report without what says where they were computed.
fn entries(report: &Value, device: &str) -> Vec<Value> {
    let of = |entry: &&Value| entry["device"] == device;
    let mut entries: Vec<Value> = report["tokens"].as_array().unwrap().iter().filter(of).cloned().collect();
    for entry in &mut entries {
        entry["device"] = Value::Null;
        entry["gpu"]["devices"] = Value::Null;
    }
    entries
}

/// The first reference that another implementation wrote, in a file of its own: the emulation is slow.
fn reference(dir: &TempDir) -> String {
    let path = dir.path().join("reference.json");
    let text = fs::read_to_string(nano().join("expected/tokens-source.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    fs::write(&path, json!({"references": [all["references"][0]]}).to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn references_are_exact_on_any_number_of_gpus() {
    let dir = TempDir::new().unwrap();
    let reference = reference(&dir);
    let mut one = Vec::new();
    for (settings, devices) in [
        (vec![], &["cuda", "cuda:0,1,2", "cuda:2,0,1,1,0,2,1,0"][..]),
        (vec![("EMULATED_CUDA_PEERS", "0")], &["cuda:1,0"]),
        (vec![("EMULATED_CUDA_MEMORY", "14000000,9000000,3000000000")], &["cuda:0,1,2"]),
    ] {
        let mut arguments = vec!["verify", "--quiet", "--reference", &reference];
        devices.iter().for_each(|device| arguments.extend(["--device", device]));
        let (code, report, said) = ran(&settings, &arguments);
        assert_eq!((code, &report["verdict"]), (Some(0), &"pass".into()), "{report:#}{said}");
        if one.is_empty() {
            one = entries(&report, "cuda");
        }
        assert_eq!(one.len(), 1);
        for device in devices {
            assert_eq!(entries(&report, device), one, "{device}");
        }
        for entry in report["tokens"].as_array().unwrap() {
            let gpus = entry["gpu"]["devices"].as_array().unwrap();
            let numbers = entry["device"].as_str().unwrap().split(':').nth(1).unwrap_or("0");
            assert_eq!(gpus.len(), numbers.split(',').count());
            let of = |gpu: &Value, key: &str| gpu[key].as_u64().unwrap();
            let sum: u64 = gpus.iter().map(|gpu| of(gpu, "dispatches")).sum();
            assert_eq!(Some(sum), entry["gpu"]["dispatches"].as_u64());
            let computing = gpus.iter().position(|gpu| of(gpu, "dispatches") > 0).unwrap();
            for (at, (gpu, number)) in gpus.iter().zip(numbers.split(',')).enumerate() {
                assert!(gpu["device"].as_str().unwrap().contains(&format!("(cuda:{number},")), "{gpu}");
                // Whoever computes was given rows, but for the first.
                assert_eq!(of(gpu, "copied_bytes") > 0, of(gpu, "dispatches") > 0 && at > computing, "{entry:#}");
                // An MTP layer that has a GPU for itself may not be asked for anything.
                assert!(of(gpu, "dispatches") == 0 || of(gpu, "memory_bytes") > 0, "{entry:#}");
            }
        }
    }
}

/// Were a stream not to wait for another, the emulation would show it: else the tests above would prove less than they say.
#[test]
fn copies_that_nobody_waits_for_are_noticed() {
    let dir = TempDir::new().unwrap();
    let arguments = ["verify", "--quiet", "--reference", &reference(&dir), "--device", "cuda:0,1"];
    let (code, report, said) = ran(&[("EMULATED_CUDA_WAITS", "0")], &arguments);
    assert_eq!((code, &report["verdict"]), (Some(1), &"fail".into()), "{report:#}{said}");
}

#[test]
fn text_and_scores_are_those_of_one_gpu() {
    let generated = |device: &str| {
        let arguments = ["--prompt", "In the beginning", "--max-tokens", "12", "--draft", "3", "--quiet", "--device"];
        let (code, report, said) = ran(&[], &[&["generate"][..], &arguments, &[device]].concat());
        assert_eq!(code, Some(0), "{said}");
        assert!(report["gpu"]["dispatches"].as_u64() > Some(100));
        report
    };
    let (one, many) = (generated("cuda"), generated("cuda:0,1,2"));
    assert_eq!((&one["ids"], &one["draft"]), (&many["ids"], &many["draft"]));
    assert_eq!(one["gpu"]["dispatches"], many["gpu"]["dispatches"]);
    let name = many["backend_device"].as_str().unwrap();
    assert!(name.contains("(cuda:0,") && name.contains(" + ") && name.contains("(cuda:2,"), "{name}");

    let task = format!("verse={}", nano().join("expected/verse.jsonl").to_str().unwrap());
    let baseline = nano();
    let scored = |device: &str| {
        let arguments = ["score", "--task", &task, "--limit", "2", "--baseline", baseline.to_str().unwrap(), "--quiet"];
        let (code, report, said) = ran(&[], &[&arguments[..], &["--device", device]].concat());
        assert_eq!(code, Some(0), "{report:#}{said}");
        report
    };
    let (one, many) = (scored("cuda:1"), scored("cuda:1,2"));
    assert_eq!((&one["tasks"], &one["baseline"]), (&many["tasks"], &many["baseline"]));
    assert_eq!(one["gpu"]["operations"], many["gpu"]["operations"]);
}

/// Everything that can be used; what is left out is named.
#[test]
fn all_devices_are_one() {
    let generated = |settings: &[(&'static str, &str)]| {
        let arguments = ["generate", "--prompt-ids", "1,2,3", "--max-tokens", "3", "--quiet", "--device", "cuda:all"];
        ran(settings, &arguments)
    };
    let (code, report, _) = generated(&[]);
    assert_eq!((code, &report["device"]), (Some(0), &"cuda:0,1,2".into()));
    assert_eq!(report["warnings"], json!([]));
    let (code, report, _) = generated(&[("EMULATED_CUDA_CAPABILITY", "90,61,90")]);
    assert_eq!((code, &report["device"]), (Some(0), &"cuda:0,2".into()));
    let message = report["warnings"][0]["message"].as_str().unwrap();
    assert!(
        message.starts_with("cuda:1 is not used: Emulated GPU (cuda:1, driver of CUDA 12.2): its compute"),
        "{message}"
    );
    let (code, report, _) = generated(&[("EMULATED_CUDA_CAPABILITY", "61,61,90")]);
    assert_eq!((code, &report["device"], report["warnings"].as_array().unwrap().len()), (Some(0), &"cuda:2".into(), 2));
    let (code, report, said) = generated(&[("EMULATED_CUDA_CAPABILITY", "61")]);
    assert_eq!(code, Some(2), "{report:#}{said}");
    let dir = TempDir::new().unwrap();
    let verify = ["verify", "--quiet", "--reference", &reference(&dir), "--device", "cuda:all"];
    let (code, report, said) = ran(&[("EMULATED_CUDA_CAPABILITY", "90,90,61")], &verify);
    assert_eq!(code, Some(0), "{said}");
    let unused = |found: &Value| found["kind"] == "device-unused";
    assert!(report["findings"].as_array().unwrap().iter().any(unused), "{report:#}");
    assert_eq!(report["tokens"][0]["device"], "cuda:0,1");
}

#[test]
fn faults_on_purpose_are_counted_over_all_gpus() {
    let dir = TempDir::new().unwrap();
    let reference = reference(&dir);
    let with = |device: &str, fault: &str| {
        let arguments = ["verify", "--quiet", "--reference", &reference, "--device", device, "--inject-fault", fault];
        let (code, report, said) = ran(&[], &arguments);
        assert_eq!((code, &report["verdict"]), (Some(1), &"fail".into()), "{fault}: {report:#}{said}");
        let told = |found: &&Value| found["kind"].as_str().unwrap().starts_with("gpu-");
        let findings = report["findings"].as_array().unwrap();
        findings.iter().filter(told).map(|found| found["message"].clone()).collect::<Vec<_>>()
    };
    for fault in ["launch:90", "numbers:150"] {
        assert_eq!(with("cuda:0,1,2", fault), with("cuda", fault), "{fault}");
    }
}

/// What `generate` on several GPUs says when it is refused.
fn refused(device: &str, settings: &[(&'static str, &str)]) -> String {
    let arguments = ["generate", "--prompt-ids", "1,2,3", "--max-tokens", "3", "--quiet", "--device", device];
    let (code, document, said) = ran(settings, &arguments);
    assert_eq!(code, Some(2), "{device} {settings:?}: {document:#}{said}");
    let refused = document["refused"].as_array().unwrap().iter();
    let line = |found: &Value| format!("{}\nhint: {}\n", found["message"].as_str().unwrap(), found["hint"]);
    refused.map(line).collect()
}

#[test]
fn every_failure_names_the_device() {
    let mut told = String::new();
    for device in ["cuda:0,3", "cuda:0,vulkan:0", "cuda:0,cpu", "cuda:0,", "cpu,cuda", "cuda:0,1:all", "metal:all"] {
        told += &format!("## {device}\n{}\n", refused(device, &[]));
    }
    for (setting, value) in [
        ("EMULATED_CUDA_MEMORY", "1000000"),
        ("EMULATED_CUDA_MEMORY", "7000000,5000000"),
        ("EMULATED_CUDA_CAPABILITY", "90,61"),
        ("EMULATED_CUDA_FAIL", "cuDeviceCanAccessPeer=999@2"),
        ("EMULATED_CUDA_FAIL", "cuCtxEnablePeerAccess=2"),
        ("EMULATED_CUDA_FAIL", "cuMemcpyPeerAsync=1"),
        ("EMULATED_CUDA_FAIL", "cuStreamWaitEvent=999@3"),
        ("EMULATED_CUDA_FAIL", "cuEventRecord=400@300"),
        ("EMULATED_CUDA_FAIL", "cuMemAlloc_v2=2@150"),
    ] {
        told += &format!("## {setting} {value}\n{}\n", refused("cuda:0,1", &[(setting, value)]));
    }
    let bounded = ["generate", "--prompt-ids", "1", "--quiet", "--device", "cuda:0,1"];
    for (flag, size, kind) in [("--memory", "1K", "generation-too-large"), ("--device-memory", "100K", "gpus-memory")] {
        let (code, document, _) = ran(&[], &[&bounded[..], &[flag, size]].concat());
        assert_eq!((code, &document["refused"][0]["kind"]), (Some(2), &kind.into()), "{document:#}");
    }
    insta::assert_snapshot!(told);
}

#[test]
fn verify_shows_what_each_gpu_did() {
    let dir = TempDir::new().unwrap();
    let mut command = coliconv(folder(), &settings(&[]));
    let arguments = ["--quiet", "--reference", &reference(&dir), "--device", "cuda:0,1"];
    let output = command.arg("verify").arg(nano()).args(arguments).output().unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    let from = out.find("\ndevice").unwrap_or_else(|| panic!("{out}"));
    let table: Vec<&str> = out[from..].lines().filter(|line| line.contains("GPU")).collect();
    assert_eq!(table.len(), 3, "{out}");
    assert!(
        table[1].starts_with("cuda:0,1") && table[1].contains("(cuda:0,") && table[2].contains("(cuda:1,"),
        "{out}"
    );
}

/// GPUs that have no room for all experts together: each has tiers for its layers, and no token depends on that.
#[test]
fn experts_are_in_tiers_on_each_gpu() {
    let generated = |device: &str, more: &[&str]| {
        let arguments = ["generate", "--prompt-ids", "1,2,3,4,5", "--max-tokens", "4", "--quiet", "--device", device];
        ran(&[], &[&arguments[..], more].concat())
    };
    let (_, whole, _) = generated("cuda", &[]);
    let (code, refusal, _) = generated("cuda:0,1", &["--device-memory", "6000K"]);
    assert_eq!((code, &refusal["refused"][0]["kind"]), (Some(2), &"gpus-memory".into()), "{refusal:#}");
    let message = refusal["refused"][0]["message"].as_str().unwrap();
    assert!(message.contains("of which 6144000 may be taken"), "{message}");
    // What is said to be enough is, and no less.
    let (_, least) = message.strip_suffix(" would do").unwrap().split_once("; --device-memory ").unwrap();
    let (code, report, _) = generated("cuda:0,1", &["--device-memory", least]);
    assert_eq!((code, &report["ids"]), (Some(0), &whole["ids"]), "{report:#}");
    let less = (least.parse::<u64>().unwrap() - 1).to_string();
    let (code, refusal, _) = generated("cuda:0,1", &["--device-memory", &less]);
    assert_eq!((code, &refusal["refused"][0]["kind"]), (Some(2), &"gpus-memory".into()), "{refusal:#}");
    for (device, kilobytes, drafts) in [("cuda:0,1", 9000, "1"), ("cuda:0,1", 9800, "0"), ("cuda:0,0,2", 8200, "0")] {
        let (code, report, said) = generated(device, &["--device-memory", &format!("{kilobytes}K"), "--draft", drafts]);
        assert_eq!((code, &report["ids"]), (Some(0), &whole["ids"]), "{report:#}{said}");
        let of = |key: &str| report["device_experts"][key].as_u64().unwrap_or_else(|| panic!("{report:#}"));
        assert_eq!(of("uploads"), of("requests") - of("hits"), "{report:#}");
        assert!(of("uploads") > 0, "{report:#}");
        assert_eq!(report["experts"]["requests"].as_u64(), Some(of("uploads")), "{report:#}");
        for gpu in report["gpu"]["devices"].as_array().unwrap() {
            assert!(gpu["memory_bytes"].as_u64().unwrap() <= kilobytes << 10, "{report:#}");
        }
    }
}
