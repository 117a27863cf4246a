//! Notes the commit that is built, for `coliconv --version`. Outside of a git repository there is none to note.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A source archive names its commit by the environment.
    println!("cargo::rerun-if-env-changed=COLICONV_COMMIT");
    let given = std::env::var("COLICONV_COMMIT").ok().filter(|commit| !commit.is_empty());
    let commit = given.or_else(of_repository).unwrap_or_else(|| "unknown commit".to_owned());
    println!("cargo::rustc-env=COLICONV_COMMIT={commit}");
}

/// The commit that is checked out here, if this is the repository's own folder and not one within another's.
fn of_repository() -> Option<String> {
    let root = std::env::var("CARGO_MANIFEST_DIR").ok()?;
    let top = git(&["rev-parse", "--show-toplevel"])?;
    if Path::new(&top).canonicalize().ok()? != Path::new(&root).canonicalize().ok()? {
        return None;
    }
    // What changes with every commit: HEAD, the branch that it names, and packed branches.
    for name in ["HEAD", "packed-refs"].map(str::to_owned).into_iter().chain(git(&["symbolic-ref", "HEAD"])) {
        let path = git(&["rev-parse", "--git-path", &name])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned()).filter(|text| !text.is_empty())
}
