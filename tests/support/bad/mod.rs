//! The generator of `fixtures/bad`, `fixtures/odd` and `fuzz/seeds`: one small file or directory for each way in which a file can lie.
//!
//! Everything here is deterministic: `cargo run --example make_bad_files` writes the same bytes again, and a test compares
//! them with what is committed. What is to be reported of each stands in the tables of `tests/bad_files.rs`.

mod census;
mod checkpoint;
mod container;
mod declared;
mod header;
mod manifest;
mod model;
mod publishing;
mod seeds;

use std::fs;
use std::path::Path;

pub use manifest::write_manifest;
pub use model::{Model, TOKENIZER};
pub use seeds::write_seeds;

/// Makes one case at a path that does not exist yet: a file or a directory.
pub type Make = fn(&Path);

/// A group of cases: a folder of `fixtures/bad`.
pub struct Group {
    pub name: &'static str,
    /// Name of the file or directory, and how it is made.
    pub cases: Vec<(&'static str, Make)>,
}

/// Every group of bad files that are committed.
pub fn groups() -> Vec<Group> {
    vec![
        Group { name: "header", cases: header::bad() },
        Group { name: "index", cases: checkpoint::indexes() },
        Group { name: "config", cases: checkpoint::configs() },
        Group { name: "census", cases: census::bad() },
        Group { name: "container", cases: container::bad() },
        Group { name: "stamps", cases: declared::stamps() },
        Group { name: "manifest", cases: declared::manifests() },
    ]
}

/// Bad files that are too large to be committed: tests make them when they need them.
pub fn large() -> Vec<Group> {
    vec![Group { name: "header", cases: header::large() }, Group { name: "stamps", cases: container::large() }]
}

/// Files that look odd and are good.
pub fn odd() -> Vec<(&'static str, Make)> {
    header::odd()
}

/// Writes groups below `root`, a folder each.
pub fn write_groups(groups: &[Group], root: &Path) {
    for group in groups {
        write_cases(&group.cases, &root.join(group.name));
    }
}

/// Writes cases into a folder, which is made.
pub fn write_cases(cases: &[(&'static str, Make)], folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    for (name, make) in cases {
        let path = folder.join(name);
        assert!(!path.exists(), "two cases are called {name}");
        make(&path);
    }
}
