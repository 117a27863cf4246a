//! The fuzz targets on everything that fuzzing starts from, and on everything that it ever found.

mod support;

use std::fs;
use std::path::Path;

use support::fuzz::TARGETS;

#[test]
fn seeds_and_regressions_are_replayed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    for (target, run) in TARGETS {
        let mut files = 0;
        for kind in ["seeds", "regressions"] {
            let folder = root.join(kind).join(target);
            // Nothing was found yet for some targets.
            if kind == "regressions" && !folder.exists() {
                continue;
            }
            for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
                let path = entry.unwrap().path();
                println!("{}", path.display());
                run(&fs::read(path).unwrap());
                files += 1;
            }
        }
        assert!(files > 3, "{target} has {files} seeds");
    }
}

#[test]
fn every_target_has_its_program() {
    let manifest = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/Cargo.toml")).unwrap();
    for (target, _) in TARGETS {
        assert!(manifest.contains(&format!("name = \"{target}\"")), "{target} is not in fuzz/Cargo.toml");
    }
    assert_eq!(manifest.matches("[[bin]]").count(), TARGETS.len());
}
