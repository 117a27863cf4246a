//! `coliconv bench`: that it runs and says what it should; figures are never asserted.

mod support;

use std::fs;
use std::path::Path;

use coliconv::isa::Isa;
use serde_json::Value;
use support::containers::{assert_valid, run, run_json};
use tempfile::TempDir;

#[test]
fn inspect_is_measured_and_leaves_nothing() {
    let directory = TempDir::new().unwrap();
    let arguments = ["bench", "inspect", "--size", "2M", "--layers", "5", "--rounds", "1", "--dir"];
    let (code, report) = run_json(&arguments, &[directory.path()]);
    assert_eq!(code, 0, "{report}");
    assert_valid("bench", &report);
    let measures = report["measures"].as_array().unwrap();
    assert!(measures.iter().all(|measure| measure["seconds"].as_f64().unwrap() > 0.0));
    assert_eq!(measures.iter().filter(|measure| measure["of_limit"].is_f64()).count(), 2);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn quantizing_is_measured_with_every_instruction_set() {
    let (code, report) = run_json(&["bench", "convert", "--size", "1M", "--rounds", "1"], &[]);
    assert_eq!(code, 0, "{report}");
    assert_valid("bench", &report);
    let measures = report["measures"].as_array().unwrap();
    for isa in Isa::available() {
        let of_isa: Vec<_> =
            measures.iter().filter(|measure| measure["name"].as_str().unwrap().ends_with(isa.name())).collect();
        assert!(of_isa.len() >= 14, "{isa}");
        assert!(of_isa.iter().all(|measure| measure["g_weights_per_second"].as_f64().unwrap() > 0.0));
        assert!(of_isa.iter().all(|measure| measure["of_baseline"].is_f64() != (isa == Isa::Plain)));
    }
    assert!(measures.iter().any(|measure| measure["name"] == "SHA-256, one core"));
}

#[test]
fn weights_beyond_the_memory_are_refused() {
    let (code, document) = run_json(&["bench", "kernels", "--size", "900000G"], &[]);
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &"bench-memory".into()), "{document}");
}

/// A size that would be cut is refused with what was expected and found.
#[test]
fn sizes_beyond_what_can_be_made_are_refused() {
    for (target, size, expected) in [
        ("decode", "64G", "24M to 63G, to decode"),
        ("decode", "18446744073709551615", "24M to 63G, to decode"),
        ("score", "16777215T", "24M to 63G, to score"),
        ("inspect", "41G", "1M to 40G, to inspect"),
        ("convert", "563G", "1M to 562G, to convert"),
        ("convert", "1023K", "1M to 562G, to convert"),
    ] {
        let (code, document) = run_json(&["bench", target, "--size", size], &[]);
        assert_eq!((code, &document["refused"][0]["kind"]), (2, &"flag-value".into()), "{document}");
        let message = document["refused"][0]["message"].as_str().unwrap();
        assert!(message.starts_with("--size is ") && message.contains(expected), "{message}");
    }
    let (code, document) = run_json(&["bench", "kernels", "--size", "18446744073709551615"], &[]);
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &"bench-memory".into()), "{document}");
}

#[test]
fn kernels_are_measured_against_their_limits() {
    let (code, report) = run_json(&["bench", "kernels", "--size", "1M", "--rounds", "1", "--device", "cpu"], &[]);
    assert_eq!(code, 0, "{report}");
    assert_valid("bench", &report);
    let measures = report["measures"].as_array().unwrap();
    for format in ["f32", "int8-row", "int4-row", "int4-grouped", "int3-g64", "int2-row", "fp8-e4m3-b128"] {
        let of_format: Vec<_> =
            measures.iter().filter(|measure| measure["name"].as_str().unwrap().starts_with(format)).collect();
        let with = |key: &str| of_format.iter().filter(|measure| measure[key].as_f64() > Some(0.0)).count();
        assert!(with("gb_per_second") >= 2 && with("gflop_per_second") >= 2 && with("of_limit") >= 3, "{format}");
    }
}

#[test]
fn decoding_is_measured_against_disk_and_memory() {
    let directory = TempDir::new().unwrap();
    let arguments = ["bench", "decode", "--size", "24M", "--rounds", "2", "--device", "cpu", "--dir"];
    let (code, report) = run_json(&arguments, &[directory.path()]);
    assert_eq!(code, 0, "{report}");
    assert_valid("bench", &report);
    let measures = report["measures"].as_array().unwrap();
    let decoded: Vec<_> = measures.iter().filter(|measure| measure["tokens_per_second"].as_f64() > Some(0.0)).collect();
    assert_eq!((measures.len(), decoded.len()), (4, 2));
    assert!(decoded.iter().all(|measure| measure["of_limit"].as_f64() > Some(0.0)));
    let (disk, memory) = (&decoded[0]["experts"], &decoded[1]["experts"]);
    assert!(disk["bytes_read"].as_u64() > Some(0) && disk["evictions"].as_u64() > Some(0), "{disk}");
    assert!(disk["peak_bytes"].as_u64() <= disk["budget_bytes"].as_u64(), "{disk}");
    assert_eq!((memory["evictions"].as_u64(), memory["requests"].as_u64() > Some(0)), (Some(0), true), "{memory}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn scoring_is_measured() {
    let directory = TempDir::new().unwrap();
    let arguments = ["bench", "score", "--size", "24M", "--rounds", "1", "--dir"];
    let (code, report) = run_json(&arguments, &[directory.path()]);
    assert_eq!(code, 0, "{report}");
    assert_valid("bench", &report);
    assert_scored(&report, "cpu");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

/// What is written out is more than what goes through the layers: requests have much in common.
fn assert_scored(report: &Value, device: &str) {
    assert_eq!((&report["device"], report["gpu"].is_string()), (&device.into(), device != "cpu"));
    let [measure] = &report["measures"].as_array().unwrap()[..] else { panic!("{report}") };
    let [through, written] = ["tokens_per_second", "written_out_tokens_per_second"].map(|key| measure[key].as_f64());
    assert!(through > Some(0.0) && written.unwrap() > 1.5 * through.unwrap(), "{measure}");
}

/// A report of `bench` on a GPU; `None`, said aloud, where there is none and COLICONV_REQUIRE_DEVICES does not name it.
fn on_gpu(device: &str, arguments: &[&str], dir: &Path) -> Option<Value> {
    let arguments =
        [&["bench"], arguments, &["--rounds", "1", "--json", "--quiet", "--device", device, "--dir"]].concat();
    let mut command = match device {
        #[cfg(target_os = "linux")]
        "cuda" => support::emulated_cuda::coliconv(support::emulated_cuda::folder(), &[]),
        _ => assert_cmd::Command::cargo_bin("coliconv").unwrap(),
    };
    let output = command.args(arguments).arg(dir).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let required = std::env::var("COLICONV_REQUIRE_DEVICES").unwrap_or_default();
    if output.status.code() == Some(2) && device == "vulkan" && !required.split(',').any(|name| name == device) {
        eprintln!("not tested: {report}");
        return None;
    }
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_valid("bench", &report);
    assert_eq!((&report["device"], report["gpu"].is_string()), (&device.into(), true));
    assert_eq!(fs::read_dir(dir).unwrap().count(), 0);
    Some(report)
}

fn gpus() -> &'static [&'static str] {
    if cfg!(target_os = "linux") { &["cuda", "vulkan"] } else { &["vulkan"] }
}

#[test]
fn kernels_of_gpus_are_measured_against_their_limits() {
    let directory = TempDir::new().unwrap();
    for device in gpus() {
        let measures = |only: &str| -> Option<Vec<Value>> {
            let report = on_gpu(device, &["kernels", "--size", "1M", "--only", only], directory.path())?;
            Some(report["measures"].as_array().unwrap().clone())
        };
        let Some(few) = measures("int4-grouped(64) [128, 384], 1 row") else { continue };
        let names: Vec<&str> = few.iter().map(|measure| measure["name"].as_str().unwrap()).collect();
        let of = "int4-grouped(64)";
        let shape = format!("{of} [128, 384]");
        let expected = [format!("{of}, read"), format!("{shape}, read a matrix a launch"), format!("{shape}, 1 row")];
        assert_eq!(names, expected);
        // As many matrices as make up 1M: 16 bytes and a scale for each 32 weights.
        let bytes = 128 * (384 / 2 + 4 * 384 / 64);
        let count = (1u64 << 20).div_ceil(bytes);
        assert_eq!((few[0]["bytes"].as_u64(), few[0]["of_limit"].is_null()), (Some(1 << 20), true));
        assert_eq!((few[2]["bytes"].as_u64(), few[2]["launches"].as_f64()), (Some(count * bytes), Some(count as f64)));
        assert!(few[1..].iter().all(|measure| measure["limit"] == "read" && measure["of_limit"].as_f64() > Some(0.0)));
        assert!(few.iter().all(|measure| measure["gb_per_second"].as_f64() > Some(0.0)), "{few:?}");
        assert!(few.iter().all(|measure| ["device", "host"].contains(&measure["clock"].as_str().unwrap())));
        // Whatever is printed is found by its name, also what others are measured against.
        for name in [
            "int8-row [384, 128], read a matrix a launch",
            "int3-g64, f32 FMA",
            "fp8-e4m3-b128, read",
            "experts int4-row, read",
        ] {
            let found = measures(name).unwrap();
            let names: Vec<&str> = found.iter().map(|measure| measure["name"].as_str().unwrap()).collect();
            let expected: &[&str] = match name {
                "int8-row [384, 128], read a matrix a launch" => &["int8-row, read", name],
                "fp8-e4m3-b128, read" => &[name, "experts fp8-e4m3-b128, read"],
                _ => &[name],
            };
            assert_eq!(names, expected);
            assert!(found.iter().all(|measure| measure["seconds"].as_f64() > Some(0.0)), "{found:?}");
        }
        let many = measures("int8-row [384, 128], 64 rows").unwrap();
        assert_eq!((many.len(), &many[1]["limit"]), (2, &"f32 FMA".into()));
        assert!(many.iter().all(|measure| measure["gflop_per_second"].as_f64() > Some(0.0)), "{many:?}");
        // 16 experts of which 8 are chosen at a time; gate and up are as large.
        let experts = measures("experts int4-row, gate").unwrap();
        let bytes: Vec<Option<u64>> = experts[1..].iter().map(|measure| measure["bytes"].as_u64()).collect();
        let (gate, down) = (128 * (384 / 2 + 4), 384 * (128 / 2 + 4));
        let whole = Some(16 * (2 * gate + down));
        assert_eq!(bytes, [Some(16 * gate), Some(16 * gate), Some(16 * gate), whole, whole, whole]);
    }
}

#[test]
fn models_on_gpus_are_measured() {
    let directory = TempDir::new().unwrap();
    for device in gpus() {
        let Some(report) = on_gpu(device, &["decode", "--size", "24M"], directory.path()) else { continue };
        let measures = report["measures"].as_array().unwrap();
        let named = |at: usize, key: &str| measures[at][key].as_str().unwrap_or_default().to_owned();
        assert_eq!((measures.len(), named(0, "name"), named(1, "limit")), (4, "read".to_owned(), "read".to_owned()));
        let decoded = &measures[1];
        assert!(decoded["tokens_per_second"].as_f64() > Some(0.0) && decoded["of_limit"].as_f64() > Some(0.0));
        assert!(decoded["launches"].as_f64() > Some(50.0) && decoded["wait_seconds"].as_f64() > Some(0.0), "{decoded}");
        // Three sparse layers of 8 experts, each 3 matrices of 128 × 512 as int4 in groups of 64.
        let of_token = &decoded["token_bytes"];
        assert_eq!(of_token["routed"].as_u64(), Some(3 * 8 * 3 * 128 * (512 / 2 + 4 * 512 / 64)), "{of_token}");
        assert_eq!(of_token["shared"].as_u64(), Some(3 * 3 * 128 * (512 / 2 + 4 * 512 / 64)), "{of_token}");
        assert_eq!([named(2, "name"), named(3, "limit")], ["upload", "upload"]);
        let (tiered, experts) = (&measures[3], &measures[3]["device_experts"]);
        let count = |key: &str| experts[key].as_u64().unwrap_or_else(|| panic!("{key}: {experts}"));
        assert!(
            tiered["tokens_per_second"].as_f64() > Some(0.0) && tiered["of_limit"].as_f64() > Some(0.0),
            "{tiered}"
        );
        // Everything is in memory, an eighth on the device: what is wanted is there or uploaded.
        assert_eq!(tiered["experts"]["reads"].as_u64(), Some(0), "{tiered}");
        assert!(count("hits") > 0 && count("uploads") == count("requests") - count("hits"), "{experts}");
        // As it is stored, or in bricks.
        let stored = count("uploads") * 3 * 128 * (512 / 2 + 4 * 512 / 64);
        assert!((stored..=2 * stored).contains(&count("bytes_uploaded")), "{experts}");
        assert!(count("budget_bytes") > 0 && count("budget_bytes") <= count("bytes_uploaded"), "{experts}");
        assert_scored(&on_gpu(device, &["score", "--size", "24M"], directory.path()).unwrap(), device);
    }
}

#[test]
fn what_a_gpu_cannot_measure_is_refused() {
    let refused = |arguments: &[&str]| {
        let (code, document) = run_json(&[&["bench"], arguments].concat(), &[]);
        assert_eq!(code, 2, "{document}");
        document["refused"][0].clone()
    };
    let found = refused(&["kernels", "--device", "cuda:7000"]);
    assert!(["gpu-ordinal", "gpu-library", "gpu-call"].contains(&found["kind"].as_str().unwrap()), "{found}");
    assert_eq!(refused(&["kernels", "--device", "tpu"])["kind"], "flag-value");
    for target in ["kernels", "decode", "score"] {
        assert_eq!(refused(&[target, "--device", "reference"])["kind"], "not-available");
    }
    assert_eq!(refused(&["kernels", "--only", "int4"])["kind"], "flag-needs");
    assert_eq!(refused(&["decode", "--only", "int4", "--device", "vulkan"])["kind"], "flag-needs");
    assert_eq!(refused(&["score", "--size", "23M"])["kind"], "flag-value");
    for target in ["kernels", "decode", "score", "inspect", "convert"] {
        let found = refused(&[target, "--mode", "fast"]);
        assert_eq!(found["message"], "--mode fast is not available on cpu");
    }
}

/// As everywhere else, a device without kernels for the fast mode is refused by name, and one with them scores in it.
#[test]
#[cfg(target_os = "linux")]
fn the_fast_mode_is_measured_where_there_is_one() {
    let directory = TempDir::new().unwrap();
    let ran = |settings: &[(&str, &str)], target: &str| -> (Option<i32>, Value) {
        let mut command = support::emulated_cuda::coliconv(support::emulated_cuda::folder(), settings);
        let flags =
            ["--size", "24M", "--rounds", "1", "--mode", "fast", "--device", "cuda", "--json", "--quiet", "--dir"];
        let output = command.args(["bench", target]).args(flags).arg(directory.path()).output().unwrap();
        (output.status.code(), serde_json::from_slice(&output.stdout).unwrap())
    };
    for target in ["kernels", "decode", "score"] {
        let (code, document) = ran(&[("EMULATED_CUDA_CAPABILITY", "75")], target);
        let message = document["refused"][0]["message"].as_str().unwrap();
        assert!(code == Some(2) && message.starts_with("--mode fast is not available on "), "{document}");
    }
    let (code, report) = ran(&[], "score");
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

/// What the device has no memory for is refused with sizes, before anything is made.
#[test]
#[cfg(target_os = "linux")]
fn models_that_a_gpu_has_no_room_for_are_refused() {
    let directory = TempDir::new().unwrap();
    let settings = [("EMULATED_CUDA_MEMORY", "10000000")];
    for (arguments, kind) in [
        (&["decode", "--size", "24M"][..], "gpu-memory"),
        (&["kernels", "--size", "100M"], "gpu-memory"),
        (&["kernels", "--size", "1M", "--only", "nothing"], "flag-value"),
    ] {
        let mut command = support::emulated_cuda::coliconv(support::emulated_cuda::folder(), &settings);
        let flags = ["--device", "cuda", "--json", "--quiet", "--dir"];
        let output = command.arg("bench").args(arguments).args(flags).arg(directory.path()).output().unwrap();
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((output.status.code(), &document["refused"][0]["kind"]), (Some(2), &kind.into()), "{document}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

#[test]
fn other_targets_are_refused_by_name() {
    assert_eq!(run(&["bench"], &[]).status.code(), Some(2));
    let output = run(&["bench", "inspect", "--device", "cpu"], &[]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text, "error: --device is not available in this version\n");
}
