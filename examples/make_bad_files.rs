//! Writes `fixtures/bad` and `fixtures/odd` anew: run it after changing the generator, then look at `git status`.

#[path = "../tests/support/mod.rs"]
mod support;

use std::error::Error;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use support::bad;

fn main() -> Result<(), Box<dyn Error>> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    for folder in bad::groups().iter().map(|group| format!("bad/{}", group.name)).chain(["odd".to_owned()]) {
        match fs::remove_dir_all(fixtures.join(&folder)) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(format!("fixtures/{folder}: {e}").into()),
            _ => {}
        }
    }
    let groups = bad::groups();
    bad::write_groups(&groups, &fixtures.join("bad"));
    bad::write_cases(&bad::odd(), &fixtures.join("odd"));
    let cases: usize = groups.iter().map(|group| group.cases.len()).sum();
    println!("{cases} bad and {} odd files and directories", bad::odd().len());
    Ok(())
}
