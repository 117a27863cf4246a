//! What a release has beside the program: its commit, completions, manual pages; and that it is built for every CPU.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn coliconv(arguments: &[&str]) -> Output {
    assert_cmd::Command::cargo_bin("coliconv").unwrap().args(arguments).output().unwrap()
}

#[test]
fn the_version_names_the_commit() {
    let text = String::from_utf8(coliconv(&["--version"]).stdout).unwrap();
    let commit = text.trim().strip_prefix(concat!("coliconv ", env!("CARGO_PKG_VERSION"), " (")).unwrap();
    let commit = commit.strip_suffix(')').unwrap();
    let known = commit.len() >= 12 && commit.chars().all(|c| c.is_ascii_hexdigit());
    assert!(known || commit == "unknown commit" || std::env::var("COLICONV_COMMIT").is_ok(), "{text}");
    let git = Command::new("git").args(["cat-file", "-t", commit]).current_dir(ROOT).output();
    if let (true, Some(output)) = (known, git.ok().filter(|output| output.status.success())) {
        assert_eq!(output.stdout, b"commit\n");
    }
}

#[test]
fn every_shell_completes() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let text = String::from_utf8(coliconv(&["completions", shell]).stdout).unwrap();
        for word in ["publish", "check-listing", "convert", "group-size"] {
            assert!(text.contains(word), "{shell}: {word}");
        }
    }
    assert_eq!(coliconv(&["completions", "csh"]).status.code(), Some(2));
    let script = TempDir::new().unwrap().keep().join("coliconv.bash");
    fs::write(&script, coliconv(&["completions", "bash"]).stdout).unwrap();
    let sourced = Command::new("bash").arg("-n").arg(&script).output().unwrap();
    assert!(sourced.status.success(), "{}", String::from_utf8_lossy(&sourced.stderr));
    fs::remove_dir_all(script.parent().unwrap()).unwrap();
}

#[test]
fn every_command_has_a_page() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().to_str().unwrap();
    assert_eq!(coliconv(&["man", path]).status.code(), Some(0));
    let page = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    for command in
        ["convert", "inspect", "diff", "verify", "score", "publish", "pipeline", "bench", "completions", "man"]
    {
        let text = page(&format!("coliconv-{command}.1"));
        assert!(text.contains(&format!(".TH coliconv-{command} 1")), "{command}");
        assert!(page("coliconv.1").contains(&format!("coliconv\\-{command}(1)")), "{command}");
    }
    assert!(page("coliconv-publish.1").contains("\\-\\-check\\-listing"));
    let names: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name == "coliconv-repair.1"), "{names:?}");
    let none = coliconv(&["man", directory.path().join("none").to_str().unwrap()]);
    let text = String::from_utf8_lossy(&none.stderr);
    assert_eq!(none.status.code(), Some(2));
    assert!(
        text.contains("none: the pages cannot be written here: not a directory") && !text.contains("--out"),
        "{text}"
    );
}

#[test]
fn nothing_is_built_for_one_cpu() {
    for name in ["Cargo.toml", "build.rs", ".cargo/config.toml", ".cargo/config"] {
        let text = fs::read_to_string(Path::new(ROOT).join(name)).unwrap_or_default();
        assert!(!text.contains("target-cpu") && !text.contains("target-feature"), "{name}");
    }
    let manifest = fs::read_to_string(Path::new(ROOT).join("Cargo.toml")).unwrap();
    assert!(manifest.contains("[profile.dist]"));
}
