//! The CUDA backend through the command line, on an emulated driver; and what users are told where something is wrong.

#![cfg(target_os = "linux")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use coliconv::backend::cuda::Cuda;
use coliconv::backend::gpu::driver::{Driver, Launch};
use coliconv::backend::gpu::kernels::{Kernel, Name};
use serde_json::Value;
use support::emulated_cuda::{coliconv, folder, with_wrong_kernels, without_a_function};

fn nano() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nano")
}

/// What `generate` on a GPU says, with the driver of a folder; it must not come to an end.
fn refused(folder: &Path, device: &str, settings: &[(&str, &str)]) -> String {
    let mut command = coliconv(folder, settings);
    let arguments = ["--prompt", "In the beginning", "--max-tokens", "3", "--quiet", "--device", device];
    let output = command.arg("generate").arg(nano()).args(arguments).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}{}", String::from_utf8_lossy(&output.stdout));
    said.replace(env!("CARGO_MANIFEST_DIR"), "")
}

/// The tokens of a reference that another implementation wrote, whichever threads of a group come first; the counters are
/// those of the kernels that ran, and none ran elsewhere.
#[test]
fn tokens_are_exact_in_any_order_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let said = ["forwards", "backwards"].map(|order| {
        let log = dir.path().join(order);
        let settings = [("EMULATED_CUDA_ORDER", order), ("EMULATED_CUDA_LOG", log.to_str().unwrap())];
        let mut command = coliconv(folder(), &settings);
        let output = command.arg("verify").arg(nano()).args(["--device", "cuda", "--json"]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let mut report: Value = serde_json::from_slice(&output.stdout).unwrap();
        report["seconds"] = Value::Null;
        assert!(fs::read_to_string(log).unwrap().lines().count() > 1000);
        report
    });
    assert_eq!(said[0], said[1]);
    let tokens = said[0]["tokens"].as_array().unwrap();
    assert!(!tokens.is_empty());
    for entry in tokens {
        assert_eq!((&entry["device"], entry["gpu"]["fallbacks"].as_u64()), (&Value::from("cuda"), Some(0)));
        assert!(entry["gpu"]["dispatches"].as_u64() > Some(100));
        assert_eq!(entry["greedy"]["matched"], entry["greedy"]["total"]);
    }
}

#[test]
fn every_failure_is_told() {
    let mut told = String::new();
    for (setting, value) in [
        ("FAIL", "cuInit=100"),
        ("FAIL", "cuInit=803"),
        ("FAIL", "cuInit=12345"),
        ("FAIL", "cuDeviceGetCount=3"),
        ("FAIL", "cuDevicePrimaryCtxRetain=46"),
        ("FAIL", "cuStreamCreate=2"),
        ("FAIL", "cuMemAllocHost_v2=2@2"),
        ("FAIL", "cuEventCreate=999"),
        ("FAIL", "cuMemAlloc_v2=2@5"),
        ("FAIL", "cuMemAlloc_v2=2@72"),
        ("FAIL", "cuMemAlloc_v2=1@5"),
        ("FAIL", "cuMemcpyHtoDAsync_v2=1@3"),
        ("FAIL", "cuModuleLoadData=222"),
        ("FAIL", "cuModuleGetFunction=500"),
        ("FAIL", "cuLaunchKernelEx=1"),
        ("FAIL", "cuLaunchKernelEx=719@4"),
        ("FAIL", "cuStreamSynchronize=700@2"),
        ("FAIL", "cuStreamSynchronize=12345@2"),
        ("FAIL", "cuEventSynchronize=999@5"),
        ("CAPABILITY", "70"),
        ("MEMORY", "100000"),
        ("DEVICES", "0"),
    ] {
        let mut said = refused(folder(), "cuda", &[(&format!("EMULATED_CUDA_{setting}"), value)]);
        if setting == "MEMORY" {
            // How much a model needs is no matter of this test.
            let (before, after) = said.split_once(" bytes are wanted").unwrap();
            let number = before.rfind(' ').unwrap();
            assert!(before[number + 1..].parse::<u64>().unwrap() > 1_000_000, "{said}");
            said = format!("{} N bytes are wanted{after}", &before[..number]);
        }
        told += &format!("## {setting} {value}\n{said}\n");
    }
    told += &format!("## cuda:3\n{}\n", refused(folder(), "cuda:3", &[("EMULATED_CUDA_DEVICES", "2")]));
    told += &format!("## a function is missing\n{}\n", refused(&without_a_function(), "cuda", &[]));
    insta::assert_snapshot!(told);
}

/// After an error nothing of the device is believed, though it may go on by itself.
#[test]
fn nothing_is_done_after_an_error() {
    let settings = [("EMULATED_CUDA_FAIL", "cuStreamSynchronize=700@2")];
    let mut command = coliconv(folder(), &settings);
    let output = command.arg("verify").arg(nano()).args(["--device", "cuda", "--quiet"]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("cannot go on after an error: cuStreamSynchronize says CUDA_ERROR_ILLEGAL_ADDRESS"),
        "{said}"
    );
    assert!(!said.contains("predictions are equal"), "{said}");
}

#[test]
fn a_library_that_does_not_load_is_told() {
    let dir = tempfile::tempdir().unwrap();
    // In the place of a driver that the machine may have.
    for name in ["libcuda.so", "libcuda.so.1"] {
        fs::write(dir.path().join(name), "not a library").unwrap();
    }
    let said = refused(dir.path(), "cuda", &[]);
    let expected = "error: CUDA cannot be used: no library libcuda.so.1 can be loaded: ";
    assert!(said.starts_with(expected) && said.contains("\nhint: install NVIDIA's driver"), "{said}");
    let report = devices(dir.path(), &[]);
    assert_eq!(report["apis"][0]["unusable"]["kind"], "gpu-library");
    assert_eq!(report["apis"][0]["devices"].as_array().unwrap().len(), 0);
}

fn devices(folder: &Path, settings: &[(&str, &str)]) -> Value {
    let output = coliconv(folder, settings).args(["devices", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn devices_are_listed() {
    let mut told = String::new();
    for settings in [
        &[("EMULATED_CUDA_DEVICES", "2")][..],
        &[("EMULATED_CUDA_CAPABILITY", "87")],
        &[("EMULATED_CUDA_CAPABILITY", "110")],
        &[("EMULATED_CUDA_CAPABILITY", "61")],
        &[("EMULATED_CUDA_FAIL", "cuDevicePrimaryCtxRetain=2")],
        &[("EMULATED_CUDA_DEVICES", "0")],
    ] {
        let output = coliconv(folder(), settings).arg("devices").output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        let text = String::from_utf8(output.stdout).unwrap();
        let (cpu, gpus) = text.split_at(text.find("cuda").unwrap());
        // What the machine has of other APIs comes after.
        let gpus = gpus.split_once("\nvulkan").map_or(gpus, |(cuda, _)| cuda).trim_end();
        assert!(cpu.starts_with("cpu: "), "{cpu}");
        told += &format!("## {settings:?}\n{gpus}\n\n");
    }
    insta::assert_snapshot!(told);
    let report = devices(folder(), &[("EMULATED_CUDA_MEMORY", "8000000000")]);
    let gpu = &report["apis"][0]["devices"][0];
    assert_eq!((gpu["memory_bytes"].as_u64(), gpu["free_bytes"].as_u64()), (Some(8_000_000_000), Some(8_000_000_000)));
    assert_eq!((gpu["kernels"].as_str(), gpu["unusable"].is_null()), (Some("sm_90"), true));
}

/// What the emulation must notice, it does: else the tests that run on it would prove less than they say.
#[test]
fn wrong_kernels_are_noticed() {
    // SAFETY: the library is made by the tests, and has nothing that runs when it is loaded but its lists of kernels.
    std::mem::forget(unsafe { libloading::Library::new(with_wrong_kernels().join("libcuda.so")) }.unwrap());
    let device = "Emulated GPU (cuda:0, driver of CUDA 12.2)";
    for (what, code) in [
        (0, None),
        (1, Some("CUDA_ERROR_ILLEGAL_ADDRESS (700)")),
        (2, Some("CUDA_ERROR_LAUNCH_FAILED (719)")),
        (3, Some("CUDA_ERROR_LAUNCH_FAILED (719)")),
        (4, Some("CUDA_ERROR_MISALIGNED_ADDRESS (716)")),
        (5, Some("CUDA_ERROR_MISALIGNED_ADDRESS (716)")),
    ] {
        let cuda = Cuda::open(0).unwrap();
        let floats = 2f32.to_le_bytes().repeat(256);
        let [x, y] = [0, 1].map(|_| cuda.allocate(1024, "a test").unwrap());
        cuda.write(&y, 0, &floats).unwrap();
        let launch = Launch {
            kernel: Kernel::plain(Name::Add),
            groups: [1, 1, 1],
            buffers: &[&x, &y],
            constants: &[what],
            shared_bytes: 0,
        };
        cuda.launch(&launch).unwrap();
        let mut back = vec![0; 1024];
        let said = cuda.read(&x, 0, &mut back);
        match code {
            None => assert!(said.is_ok() && back == 34f32.to_le_bytes().repeat(256), "{said:?}"),
            Some(code) => assert_eq!(
                said.unwrap_err().to_string(),
                format!(
                    "{device}: cannot compute: cuStreamSynchronize says {code}, which may come from the kernel add, \
                     started before"
                ),
                "{what}"
            ),
        }
    }
    // Memory that nobody wrote is no number.
    let cuda = Cuda::open(0).unwrap();
    let [x, y] = [0, 1].map(|_| cuda.allocate(1024, "a test").unwrap());
    let mut back = vec![0; 1024];
    cuda.read(&y, 0, &mut back).unwrap();
    assert!(back.iter().all(|&byte| byte == 0xff));
    cuda.launch(&Launch {
        kernel: Kernel::plain(Name::Add),
        groups: [1, 1, 1],
        buffers: &[&x, &y],
        constants: &[9],
        shared_bytes: 0,
    })
    .unwrap();
    back.fill(0);
    cuda.read(&x, 0, &mut back).unwrap();
    assert!(back.iter().all(|&byte| byte == 0xff));
}

/// Rounded sums: what they say is near, not the same, and a report says so. No device without such kernels takes the mode.
#[test]
fn fast_mode_is_near_and_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let ran = |settings: &[(&str, &str)], arguments: &[&str]| {
        let mut command = coliconv(folder(), settings);
        let output = command.arg(arguments[0]).arg(nano()).args(&arguments[1..]).arg("--json").output().unwrap();
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code(), document)
    };
    // One reference: the emulation is slow.
    let text = fs::read_to_string(nano().join("expected/tokens-source.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let reference = dir.path().join("reference.json");
    fs::write(&reference, serde_json::json!({"references": [all["references"][0]]}).to_string()).unwrap();
    let reference = reference.to_str().unwrap();
    let verify =
        |device: &str| ran(&[], &["verify", "--quiet", "--reference", reference, "--device", device, "--mode", "fast"]);
    let (code, one) = verify("cuda");
    assert_eq!((code, &one["verdict"]), (Some(0), &"pass".into()), "{one:#}");
    for entry in one["tokens"].as_array().unwrap() {
        let apart = entry["max_abs_logprob_diff"].as_f64().unwrap();
        assert!(entry["mode"] == "fast" && 2e-5 < apart && apart < 0.05, "{entry:#}");
    }
    let (_, two) = verify("cuda:0,0");
    let figures = |report: &Value| -> Vec<Value> {
        report["tokens"].as_array().unwrap().iter().map(|entry| entry["max_abs_logprob_diff"].clone()).collect()
    };
    assert_eq!(figures(&one), figures(&two));
    let generate = ["generate", "--quiet", "--prompt-ids", "1,2,3", "--max-tokens", "4", "--mode", "fast"];
    let (code, report) = ran(&[], &[&generate[..], &["--device", "cuda"]].concat());
    assert_eq!((code, &report["mode"]), (Some(0), &"fast".into()), "{report:#}");
    // Rows that were scored in one mode are not gone on with in the other.
    let out = dir.path().join("scores");
    let verse = format!("verse={}", nano().join("expected/verse.jsonl").to_str().unwrap());
    let score =
        ["score", "--quiet", "--task", &verse, "--limit", "1", "--device", "cuda", "--out", out.to_str().unwrap()];
    let (code, report) = ran(&[], &[&score[..], &["--mode", "fast"]].concat());
    assert_eq!((code, &report["mode"]), (Some(0), &"fast".into()), "{report:#}");
    let (code, report) = ran(&[], &score);
    assert_eq!((code, report["refused"].is_array()), (Some(2), true), "{report:#}");
    for (settings, device) in [
        (&[][..], "cpu"),
        (&[], "reference"),
        (&[("EMULATED_CUDA_CAPABILITY", "75")], "cuda"),
        (&[("EMULATED_CUDA_CAPABILITY", "90,75"), ("EMULATED_CUDA_DEVICES", "2")], "cuda:0,1"),
    ] {
        for arguments in [
            &generate[..],
            &["verify", "--quiet", "--mode", "fast"],
            &["score", "--quiet", "--task", &verse, "--mode", "fast"],
        ] {
            let arguments = [arguments, &["--device", device]].concat();
            let (code, refusal) = ran(settings, &arguments);
            assert_eq!((code, &refusal["refused"][0]["kind"]), (Some(2), &"mode-not-available".into()), "{refusal:#}");
            let message = refusal["refused"][0]["message"].as_str().unwrap();
            assert!(message.starts_with("--mode fast is not available on "), "{message}");
        }
    }
    let written = dir.path().join("r.json");
    let written = written.to_str().unwrap();
    let write = ["verify", "--quiet", "--device", "cuda", "--mode", "fast", "--write-reference", written];
    let (code, refusal) = ran(&[], &write);
    assert_eq!((code, &refusal["refused"][0]["kind"]), (Some(2), &"flag-needs".into()), "{refusal:#}");
}
