//! `coliconv.manifest.json`: what a container holds, how it was made, and the checksums to prove it.

use std::collections::BTreeMap;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::error::{Fault, FaultKind, Place, Result, escaped};
use crate::io::read_small;
use crate::json::{repeated_key, unique_map};
use crate::limits;
use crate::recipe::Settings;
use crate::report::Finding;
use crate::tensor::{Shape, TensorName};

/// Name of the file.
pub const MANIFEST_FILE: &str = "coliconv.manifest.json";
/// Name of the model card, which `publish` writes.
pub const CARD_FILE: &str = "README.md";
/// The line by which a card is known to be this program's.
pub const CARD_MARK: &str = "<!-- This card is made by `coliconv publish`, which refuses changes of it. -->";
/// Name of the source's card beside it.
pub const SOURCE_CARD_FILE: &str = "README.source.md";
/// Name of the list of checksums, which `publish` writes: of every file but itself.
pub const SUMS_FILE: &str = "SHA256SUMS";
/// Version of its structure.
pub const MANIFEST_VERSION: u64 = 1;
/// Name of the checksum of tensors: XXH3 with 64 bits, 16 hexadecimal digits.
pub const CHECKSUM: &str = "xxh3-64";

/// The manifest of a container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "coliconv manifest")]
pub struct Manifest {
    /// Version of the structure: 1.
    pub version: u64,
    /// The program that wrote it.
    pub tool: String,
    /// `model_type` of the model.
    pub model_type: String,
    /// Name of the tensors' checksum: `xxh3-64`.
    pub checksum: String,
    /// The settings as given, those of the main pass first.
    pub recipe: Settings,
    /// For each pass that was converted, what decided its bytes.
    #[serde(deserialize_with = "unique_map")]
    pub passes: BTreeMap<String, BTreeMap<String, String>>,
    /// The files of the source.
    pub source: Vec<SourceIdentity>,
    /// The weight files.
    pub files: Vec<FileRecord>,
    /// The other files, but for this one.
    pub small_files: Vec<FileRecord>,
    /// The weights, by name.
    #[serde(deserialize_with = "unique_map")]
    pub tensors: BTreeMap<TensorName, TensorRecord>,
    /// What was accepted although it is odd.
    pub warnings: Vec<Finding>,
}

/// What identifies a file of the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SourceIdentity {
    /// File name.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// Modification time, nanoseconds since 1970.
    pub modified_nanoseconds: u64,
    /// SHA-256 of its header, hexadecimal.
    pub header_sha256: String,
}

/// A file of the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FileRecord {
    /// File name.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256, hexadecimal: what Hugging Face calls the LFS oid.
    pub sha256: String,
}

/// A weight of the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TensorRecord {
    /// The file that holds it.
    pub file: String,
    /// Its class.
    pub class: String,
    /// Its format.
    pub format: String,
    /// Elements that share a scale, where the format has groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_size: Option<u64>,
    /// Logical shape.
    pub shape: Shape,
    /// Bytes of the codes, or of the f32 values.
    pub bytes: u64,
    /// Their checksum.
    pub checksum: String,
    /// Bytes of the scales; 0 for none.
    pub scale_bytes: u64,
    /// Their checksum, where there are scales.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_checksum: Option<String>,
}

impl Manifest {
    /// Reads the manifest of a directory, if there is one.
    pub fn read(directory: &Path) -> Result<Option<Manifest>> {
        let path = directory.join(MANIFEST_FILE);
        if is_absent(&path) {
            return Ok(None);
        }
        Manifest::parse(&path, &read_small(&path, limits::MAX_MANIFEST_BYTES)?).map(Some)
    }

    /// Parses the text of a manifest; `path` is for messages only.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Manifest> {
        parse_versioned(path, bytes, MANIFEST_VERSION)
    }

    /// Reads the manifest of a directory, if there is one, with the hash of what it says: [`statement_sha256`].
    pub fn read_stated(directory: &Path) -> Result<Option<(Manifest, String)>> {
        let path = directory.join(MANIFEST_FILE);
        if is_absent(&path) {
            return Ok(None);
        }
        let bytes = read_small(&path, limits::MAX_MANIFEST_BYTES)?;
        let manifest = Manifest::parse(&path, &bytes)?;
        Ok(Some((manifest, statement_sha256(&path, &bytes)?)))
    }

    /// The text of the manifest.
    pub fn to_bytes(&self) -> Vec<u8> {
        json_text(self)
    }
}

/// Whether there is no such file. One that cannot be looked at is there: reading it says why.
fn is_absent(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound)
}

/// SHA-256, hexadecimal, of everything that the text of a manifest says, keys that nobody knows included, but for the
/// records of the cards, which `publish` writes: of its JSON without spaces, keys and small files in the order of their names.
/// `path` is for messages only.
pub fn statement_sha256(path: &Path, bytes: &[u8]) -> Result<String> {
    let syntax = |message: String| Fault::new(Place::file(path), FaultKind::JsonSyntax { message });
    let text = std::str::from_utf8(bytes).map_err(|e| syntax(e.to_string()))?;
    // The last of two values would hide the first.
    if let Some(key) = repeated_key(text) {
        return Err(syntax(format!("`{}` appears twice", escaped(&key))));
    }
    let mut value: Value = serde_json::from_str(text).map_err(|e| syntax(e.to_string()))?;
    let name = |file: &Value| file["name"].as_str().unwrap_or_default().to_owned();
    if let Some(files) = value.get_mut("small_files").and_then(Value::as_array_mut) {
        files.retain(|file| ![CARD_FILE, SOURCE_CARD_FILE].contains(&&*name(file)));
        files.sort_by_key(name);
    }
    Ok(hex(&Sha256::digest(value.to_string())))
}

/// Whether a README.md is a card that `publish` wrote.
pub fn is_model_card(text: &[u8]) -> bool {
    // Behind the YAML, so not far from the start.
    text.windows(CARD_MARK.len()).take(64 << 10).any(|window| window == CARD_MARK.as_bytes())
}

/// Whether the README.md of a container is a card that `publish` wrote, and the very one that the manifest means.
pub fn has_model_card(container: &Path, manifest: &[FileRecord]) -> bool {
    let Some(record) = manifest.iter().find(|record| record.name == CARD_FILE) else { return false };
    let text = read_small(&container.join(CARD_FILE), limits::MAX_SMALL_FILE_BYTES).unwrap_or_default();
    is_model_card(&text) && hex(&Sha256::digest(&text)) == record.sha256
}

/// Parses JSON that carries its `version`; another version is told apart from damage.
pub(super) fn parse_versioned<T: for<'de> Deserialize<'de>>(path: &Path, bytes: &[u8], expected: u64) -> Result<T> {
    #[derive(Deserialize)]
    struct Version {
        version: u64,
    }
    let syntax = |e: serde_json::Error| Fault::new(Place::file(path), FaultKind::JsonSyntax { message: e.to_string() });
    let found = serde_json::from_slice::<Version>(bytes).map_err(syntax)?.version;
    if found != expected {
        return Err(Fault::new(Place::file(path), FaultKind::FileVersion { expected, found }));
    }
    serde_json::from_slice(bytes).map_err(syntax)
}

/// Indented JSON with a final newline.
pub(crate) fn json_text<T: Serialize>(value: &T) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("plain data");
    text.push(b'\n');
    text
}

/// Bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
