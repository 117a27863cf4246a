//! The upload: order, checksums, and commands. Nothing here goes to the network.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::shell::quoted_path;
use crate::config::CONFIG_FILE;
use crate::container::manifest::{FileRecord, MANIFEST_FILE};
use crate::io::LOCK_FILE;
use crate::report::{PublishFile, PublishStep, Storage};

/// Version of the plan's structure.
const PLAN_VERSION: u64 = 1;

/// The files that come last: without them nobody takes a repository for whole.
const LAST: [&str; 2] = [CONFIG_FILE, MANIFEST_FILE];

/// An upload plan, the contents of its file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UploadPlan {
    /// Version of the structure: 1.
    pub version: u64,
    /// The repository; null where none was given.
    pub repo_id: Option<String>,
    /// SHA-256 over names and hashes of weight files and config.json.
    pub model_sha256: String,
    /// Size of all files.
    pub total_bytes: u64,
    /// The files, in the order of their arrival.
    pub files: Vec<PublishFile>,
    /// The commands, in order.
    pub steps: Vec<PublishStep>,
}

impl UploadPlan {
    /// The plan of these files.
    pub fn new(
        container: &Path,
        repo_id: Option<&str>,
        model_sha256: String,
        mut files: Vec<PublishFile>,
    ) -> UploadPlan {
        files.sort_by_key(|file| (rank(file), file.name.clone()));
        let total_bytes = files.iter().map(|file| file.bytes).sum();
        let steps = repo_id.map_or_else(Vec::new, |id| steps(container, id));
        UploadPlan {
            version: PLAN_VERSION,
            repo_id: repo_id.map(str::to_owned),
            model_sha256,
            total_bytes,
            files,
            steps,
        }
    }
}

/// Weights first, then small files, then config.json, the manifest at the very end.
fn rank(file: &PublishFile) -> u8 {
    match file.name.as_str() {
        MANIFEST_FILE => 3,
        CONFIG_FILE => 2,
        _ if file.storage == Storage::Lfs => 0,
        _ => 1,
    }
}

/// The commands that upload a container and check what has arrived.
fn steps(container: &Path, id: &str) -> Vec<PublishStep> {
    // The commands mean the same wherever they are run.
    let container = container.canonicalize().unwrap_or_else(|_| container.to_owned());
    let path = quoted_path(&container);
    let each = |flag: &str, names: &[&str]| names.iter().map(|name| format!(" {flag} {name}")).collect::<String>();
    // A run that was killed leaves its lock behind.
    let (last, but_last) = (each("--include", &LAST), each("--exclude", &[&LAST[..], &[LOCK_FILE]].concat()));
    let step = |what: &str, command: String| PublishStep { what: what.to_owned(), command, with_hub_1: None };
    vec![
        // huggingface_hub 2 has no other command, and its own splits large folders and goes on; before, `hf upload` made one
        // commit of everything.
        PublishStep {
            what: "upload everything but config.json and the manifest; to be repeated until it ends well".to_owned(),
            command: format!("hf upload {id} {path} . --repo-type model{but_last}"),
            with_hub_1: Some(format!("hf upload-large-folder {id} {path} --repo-type model{but_last}")),
        },
        step("upload config.json and the manifest", format!("hf upload {id} {path} . --repo-type model{last}")),
        step(
            "list what has arrived",
            format!("curl -fsS 'https://huggingface.co/api/models/{id}/tree/main?recursive=true' -o listing.json"),
        ),
        step("compare the listing", format!("coliconv publish {path} --check-listing listing.json")),
    ]
}

/// Where the plan of a container is kept: beside it, so that no upload takes it along.
pub fn plan_path(container: &Path) -> PathBuf {
    let own = container.canonicalize().unwrap_or_else(|_| container.to_owned());
    let name = own.file_name().map_or_else(|| "container".into(), |name| name.to_string_lossy().into_owned());
    own.with_file_name(format!("{name}.upload-plan.json"))
}

/// `SHA256SUMS` as `sha256sum` reads it: every file but itself, by name.
pub fn sums_text(files: &[FileRecord]) -> String {
    let mut files: Vec<&FileRecord> = files.iter().collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files.iter().map(|file| format!("{}  {}\n", file.sha256, file.name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_and_manifest_come_last() {
        let names = [
            "coliconv.manifest.json",
            "README.md",
            "config.json",
            "out-00001.safetensors",
            "constants.json",
            "big.json",
        ];
        let file = |name: &&str| {
            let storage = if name.starts_with(['o', 'b']) { Storage::Lfs } else { Storage::Git };
            PublishFile { name: name.to_string(), bytes: 1, sha256: String::new(), storage, git_blob_id: None }
        };
        let plan = UploadPlan::new(Path::new("/a b"), Some("o/n"), String::new(), names.iter().map(file).collect());
        let order: Vec<&str> = plan.files.iter().map(|file| &*file.name).collect();
        let expected = [
            "big.json",
            "out-00001.safetensors",
            "README.md",
            "constants.json",
            "config.json",
            "coliconv.manifest.json",
        ];
        assert_eq!((order, plan.total_bytes), (expected.to_vec(), 6));
        let but = "--exclude config.json --exclude coliconv.manifest.json --exclude .coliconv.lock";
        assert_eq!(plan.steps[0].command, format!("hf upload o/n '/a b' . --repo-type model {but}"));
        let older = format!("hf upload-large-folder o/n '/a b' --repo-type model {but}");
        assert_eq!(plan.steps[0].with_hub_1, Some(older));
        let last = "hf upload o/n '/a b' . --repo-type model --include config.json --include coliconv.manifest.json";
        assert_eq!(plan.steps[1].command, last);
    }

    #[test]
    fn sums_are_sorted() {
        let record = |name: &str| FileRecord { name: name.into(), bytes: 0, sha256: format!("{name}0") };
        assert_eq!(sums_text(&[record("b"), record("a")]), "a0  a\nb0  b\n");
    }
}
