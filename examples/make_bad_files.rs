//! Writes `fixtures/bad`, `fixtures/odd` and `fuzz/seeds` anew: run it after changing the generator, then look at `git status`.

#[path = "../tests/support/mod.rs"]
mod support;

use std::error::Error;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use support::bad;

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let groups = bad::groups();
    let folders = groups.iter().map(|group| format!("fixtures/bad/{}", group.name));
    for folder in folders.chain(["fixtures/odd".to_owned(), "fuzz/seeds".to_owned()]) {
        match fs::remove_dir_all(root.join(&folder)) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(format!("{folder}: {e}").into()),
            _ => {}
        }
    }
    bad::write_groups(&groups, &root.join("fixtures/bad"));
    bad::write_cases(&bad::odd(), &root.join("fixtures/odd"));
    bad::write_seeds(&root.join("fuzz/seeds"));
    let cases: usize = groups.iter().map(|group| group.cases.len()).sum();
    println!("{cases} bad and {} odd files and directories", bad::odd().len());
    Ok(())
}
