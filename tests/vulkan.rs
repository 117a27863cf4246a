//! The Vulkan backend through the command line, on whatever device there is; and what users are told where there is none.

#![cfg(target_os = "linux")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

fn nano() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nano")
}

fn reference() -> PathBuf {
    nano().join("expected/tokens-source.json")
}

fn coliconv() -> Command {
    Command::new(env!("CARGO_BIN_EXE_coliconv"))
}

/// A folder with files in the place of the libraries of drivers; none of them loads.
fn no_libraries() -> TempDir {
    let dir = TempDir::new().unwrap();
    for name in ["libvulkan.so.1", "libcuda.so", "libcuda.so.1"] {
        fs::write(dir.path().join(name), "not a library").unwrap();
    }
    dir
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn ran(command: &mut Command) -> (i32, Value, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let document = serde_json::from_slice(&stdout).unwrap_or(Value::Null);
    (status.code().unwrap(), document, text(&stderr))
}

/// What `devices` says of Vulkan.
fn listed(command: &mut Command) -> Value {
    let (code, report, said) = ran(command.args(["devices", "--json"]));
    assert_eq!(code, 0, "{said}");
    assert_eq!(report["apis"][1]["api"], "vulkan");
    report["apis"][1].clone()
}

/// Whether there is a device; where there is none it is said, and refused if COLICONV_REQUIRE_DEVICES names `vulkan`.
fn present() -> bool {
    let api = listed(&mut coliconv());
    let found = api["devices"].as_array().unwrap().first().is_some_and(|device| device["unusable"].is_null());
    let required = std::env::var("COLICONV_REQUIRE_DEVICES").unwrap_or_default();
    assert!(
        found || !required.split(',').any(|device| device == "vulkan"),
        "COLICONV_REQUIRE_DEVICES={required}: {api:#}"
    );
    if !found {
        eprintln!("not tested: there is no Vulkan device: {api}");
    }
    found
}

fn verify(arguments: &[&str]) -> Command {
    let mut command = coliconv();
    command.arg("verify").arg(nano()).args(["--quiet", "--json"]).args(arguments);
    command
}

#[test]
fn a_library_that_does_not_load_is_told() {
    let dir = no_libraries();
    let mut command = coliconv();
    command.env("LD_LIBRARY_PATH", dir.path()).arg("verify").arg(nano()).args(["--quiet", "--device", "vulkan"]);
    let (code, _, said) = ran(&mut command);
    assert_eq!(code, 2, "{said}");
    let expected = "error: Vulkan cannot be used: no library libvulkan.so.1 can be loaded: ";
    assert!(said.starts_with(expected) && said.contains("\nhint: install the Vulkan loader"), "{said}");
    let api = listed(coliconv().env("LD_LIBRARY_PATH", dir.path()));
    assert_eq!((&api["unusable"]["kind"], api["devices"].as_array().unwrap().len()), (&"gpu-library".into(), 0));
}

#[test]
fn drivers_and_layers_that_are_not_there_are_told() {
    if !present() {
        return;
    }
    let nothing = |command: &mut Command| {
        // The second is the name that older loaders know.
        ran(command.env("VK_DRIVER_FILES", "/nowhere/a.json").env("VK_ICD_FILENAMES", "/nowhere/a.json"))
    };
    let (code, document, said) = nothing(&mut verify(&["--device", "vulkan"]));
    assert_eq!(code, 2, "{said}");
    assert_eq!(document["refused"][0]["kind"], "gpu-api", "{document:#}");
    let message = document["refused"][0]["message"].as_str().unwrap();
    assert!(message.contains("vkCreateInstance: VK_ERROR_INCOMPATIBLE_DRIVER: no driver"), "{message}");
    let (code, document, _) = ran(&mut verify(&["--device", "vulkan:77"]));
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &"gpu-ordinal".into()));
    let mut unwatched = verify(&["--device", "vulkan"]);
    unwatched.env("COLICONV_VULKAN_VALIDATION", "1").env("VK_LAYER_PATH", "/nowhere");
    let (code, document, _) = ran(&mut unwatched);
    assert_eq!(code, 2, "{document:#}");
    let message = document["refused"][0]["message"].as_str().unwrap();
    assert!(
        message.ends_with("validation is asked for, and VK_LAYER_KHRONOS_validation is not installed"),
        "{message}"
    );
}

#[test]
fn every_device_verifies_the_same_references() {
    if !present() {
        return;
    }
    let dir = no_libraries();
    fs::remove_file(dir.path().join("libvulkan.so.1")).unwrap();
    let reference = reference();
    let arguments = ["--all-devices", "--reference", reference.to_str().unwrap()];
    let (code, report, said) = ran(verify(&arguments).env("LD_LIBRARY_PATH", dir.path()));
    assert_eq!((code, &report["verdict"]), (0, &"pass".into()), "{report:#}{said}");
    let entries = report["tokens"].as_array().unwrap();
    let of = |device: &str| entries.iter().filter(|entry| entry["device"] == device).collect::<Vec<_>>();
    let (cpu, vulkan) = (of("cpu"), of("vulkan"));
    assert!(!cpu.is_empty() && cpu.len() == vulkan.len());
    for (cpu, vulkan) in cpu.iter().zip(&vulkan) {
        assert_eq!(vulkan["backend"], "vulkan");
        assert_eq!((&vulkan["teacher_forced"], &vulkan["greedy"]), (&cpu["teacher_forced"], &cpu["greedy"]));
        assert!(vulkan["max_abs_logprob_diff"].as_f64().unwrap() < 1e-4);
        assert!(vulkan["gpu"]["dispatches"].as_u64().unwrap() > 100 && vulkan["gpu"]["fallbacks"] == 0);
        assert!(cpu["gpu"].is_null());
    }
    // What is not used says why.
    let unused = &report["findings"].as_array().unwrap()[0];
    assert_eq!((&unused["kind"], &unused["severity"]), (&"device-unused".into(), &"warning".into()));
    let message = unused["message"].as_str().unwrap();
    assert!(message.contains("cuda is not used: CUDA cannot be used: no library"), "{message}");
    let check = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "devices").unwrap();
    assert_eq!((&check["status"], &check["detail"]), (&"pass".into(), &"cpu, vulkan; 1 warning".into()));

    let mut table = coliconv();
    table.env("LD_LIBRARY_PATH", dir.path()).arg("verify").arg(nano()).args(["--quiet"]).args(arguments);
    let out = text(&table.output().unwrap().stdout);
    let head = out.lines().find(|line| line.starts_with("reference ")).unwrap_or_else(|| panic!("{out}"));
    assert!(head.ends_with("log-probability  on GPU + CPU"), "{head}");
    assert_eq!(out.lines().filter(|line| line.contains("tokens-source.json ")).count(), entries.len(), "{out}");
}

/// One device that is opened several times computes one model to the same bits, each time with a part of its memory.
#[test]
fn several_devices_say_what_one_says() {
    if !present() {
        return;
    }
    let reference = reference();
    let devices = ["vulkan:0", "vulkan:0,0", "vulkan:0,0,0"];
    let mut command = verify(&["--reference", reference.to_str().unwrap()]);
    for device in devices {
        command.args(["--device", device]);
    }
    let (code, report, said) = ran(&mut command);
    assert_eq!((code, &report["verdict"]), (0, &"pass".into()), "{report:#}{said}");
    let entries = report["tokens"].as_array().unwrap();
    assert!(entries.len() >= devices.len() && entries.len() % devices.len() == 0);
    for of_reference in entries.chunks(devices.len()) {
        for (entry, gpus) in of_reference.iter().zip(1..) {
            for key in ["reference", "number", "teacher_forced", "greedy", "mtp", "max_abs_logprob_diff"] {
                assert_eq!(entry[key], of_reference[0][key], "{entry:#}");
            }
            assert_eq!(entry["gpu"]["operations"], of_reference[0]["gpu"]["operations"]);
            let on = entry["gpu"]["devices"].as_array().unwrap();
            assert_eq!(on.len(), gpus);
            for (at, gpu) in on.iter().enumerate() {
                assert_eq!(gpu["copied_bytes"].as_u64().unwrap() > 0, at > 0, "{entry:#}");
                assert!(gpu["dispatches"].as_u64().unwrap() > 0 && gpu["memory_bytes"].as_u64().unwrap() > 0);
            }
        }
    }
    let (code, document, _) = ran(&mut verify(&["--device", "vulkan:0,77"]));
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &"gpu-ordinal".into()));
    let (code, document, _) = ran(&mut verify(&["--device", "vulkan:0,0", "--device-memory", "1M"]));
    assert_eq!((code, &document["refused"][0]["kind"]), (2, &"gpus-memory".into()), "{document:#}");
}

#[test]
fn faults_on_purpose_change_the_verdict() {
    if !present() {
        return;
    }
    let reference = reference();
    let with = |fault: &str| {
        let arguments = ["--device", "vulkan", "--reference", reference.to_str().unwrap(), "--inject-fault", fault];
        ran(&mut verify(&arguments))
    };
    for fault in ["numbers", "numbers:40", "launch", "launch:300"] {
        let (code, report, said) = with(fault);
        assert_eq!((code, &report["verdict"]), (1, &"fail".into()), "{fault}: {report:#}{said}");
    }
    let (code, report, _) = with("launch:99999999");
    assert_eq!(code, 1, "{report:#}");
    assert!(report["findings"].as_array().unwrap().iter().any(|found| found["kind"] == "gpu-not-injected"));
}

#[test]
fn text_is_that_of_the_cpu() {
    if !present() {
        return;
    }
    let generated = |device: &str, drafts: &str| {
        let mut command = coliconv();
        command.arg("generate").arg(nano()).args(["--quiet", "--json", "--prompt-ids", "1,2,3", "--max-tokens", "12"]);
        let (code, report, said) = ran(command.args(["--device", device, "--draft", drafts]));
        assert_eq!(code, 0, "{said}");
        report
    };
    let (cpu, gpu, twice) = (generated("cpu", "0"), generated("vulkan", "0"), generated("vulkan:0,0", "0"));
    assert_eq!((&gpu["ids"], &twice["ids"]), (&cpu["ids"], &cpu["ids"]));
    assert_eq!(gpu["gpu"]["operations"], twice["gpu"]["operations"]);
    assert_eq!(generated("vulkan", "2")["ids"], cpu["ids"]);
    assert!(gpu["gpu"]["dispatches"].as_u64().unwrap() > 100, "{gpu:#}");
}
