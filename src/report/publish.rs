//! `publish --json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Finding, Refusal, Verdict, VerifyCheck};

/// `publish --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "coliconv publish report")]
pub struct PublishReport {
    /// The container.
    pub container: String,
    /// The repository that it is to become; null where none was given.
    pub repo_id: Option<String>,
    /// `pass` when the gate is open and the listing, if there is one, is that of this container.
    pub verdict: Verdict,
    /// SHA-256 over names and hashes of weight files and config.json; null if they could not be hashed.
    pub model_sha256: Option<String>,
    /// What was checked, in order.
    pub checks: Vec<VerifyCheck>,
    /// Everything that was found; errors are why a check failed.
    pub findings: Vec<Finding>,
    /// The files of the upload, in the order in which they are to arrive: config.json and the manifest last. Empty while
    /// the gate is closed.
    pub files: Vec<PublishFile>,
    /// Their size together.
    pub total_bytes: u64,
    /// The files that this run wrote, those that held the same bytes already not counted.
    pub written: Vec<String>,
    /// The file that holds the upload plan; null while the gate is closed.
    pub plan: Option<String>,
    /// The commands of the upload, in order; empty without a repository and while the gate is closed.
    pub steps: Vec<PublishStep>,
    /// The comparison with a listing of the repository; null without one.
    pub listing: Option<PublishListing>,
    /// Bytes read.
    pub bytes_read: u64,
    /// Duration.
    pub seconds: f64,
}

/// A file of the upload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PublishFile {
    /// File name.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256, hexadecimal: the oid of Git LFS.
    pub sha256: String,
    /// Where the Hub keeps it, as far as that is its size and name.
    pub storage: Storage,
    /// Git's own id of the file, by which the Hub lists files outside LFS; null for a file of LFS.
    pub git_blob_id: Option<String>,
}

/// Where the Hub keeps a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Storage {
    /// Git LFS, in the Hub's Xet storage where the repository has it: listed by SHA-256 either way.
    Lfs,
    /// Git itself.
    Git,
}

impl Storage {
    /// The word in text.
    pub fn name(self) -> &'static str {
        match self {
            Storage::Lfs => "LFS or Xet",
            Storage::Git => "git",
        }
    }
}

/// A command of the upload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PublishStep {
    /// What it does.
    pub what: String,
    /// The command, for a shell, with huggingface_hub 2 or newer.
    pub command: String,
    /// The same with huggingface_hub 1, where that is another command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub with_hub_1: Option<String>,
}

/// A container and a listing of its repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PublishListing {
    /// File of the listing.
    pub file: String,
    /// Files of the container.
    pub expected: u64,
    /// Of these, files that are there with the same bytes.
    pub matched: u64,
    /// Files that are there, but smaller.
    pub short: Vec<String>,
    /// Files that are there with other bytes, or of which the listing does not tell.
    pub wrong: Vec<String>,
    /// Files that are not there.
    pub missing: Vec<String>,
    /// Files that are there and not in the container.
    pub extra: Vec<String>,
}

/// Either document of `publish --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(title = "coliconv publish --json")]
pub enum PublishDocument {
    /// It ran.
    Report(Box<PublishReport>),
    /// It could not run.
    Refusal(Refusal),
}
