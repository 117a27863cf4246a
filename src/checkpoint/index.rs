//! `model.safetensors.index.json`: which file holds which tensor.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use crate::error::{Fault, FaultKind, Faults, Place, escaped};
use crate::io::read_small;
use crate::json::Object;
use crate::limits;
use crate::tensor::TensorName;

/// Name of the file.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// Name of the only weight file of a model without an index.
const SINGLE_FILE: &str = "model.safetensors";

/// The index of a directory; empty where there is none.
#[derive(Debug, Default)]
pub struct Index {
    /// Where it was read.
    path: PathBuf,
    weight_map: BTreeMap<TensorName, String>,
    files: HashSet<String>,
    total_size: Option<u64>,
    present: bool,
}

impl Index {
    /// Reads the index of a directory with these weight files. One file needs none.
    pub fn read(directory: &Path, weight_files: &[String]) -> Result<Index, Faults> {
        let path = directory.join(INDEX_FILE);
        if path.exists() {
            let bytes = read_small(&path, limits::MAX_INDEX_BYTES)?;
            return Index::parse(&path, &bytes);
        }
        if weight_files.len() > 1 && !weight_files.iter().any(|file| file == SINGLE_FILE) {
            let kind = FaultKind::IndexMissing { found: weight_files.len() };
            return Err(Fault::new(Place::file(directory), kind).into());
        }
        Ok(Index { path, ..Index::default() })
    }

    /// Parses the text of an index; `path` is for messages only. File names are checked to be plain names.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Index, Faults> {
        let syntax = |message: String| Fault::new(Place::file(path), FaultKind::IndexSyntax { message });
        let text = std::str::from_utf8(bytes).map_err(|e| syntax(e.to_string()))?;
        let object = Object::parse(text).map_err(|e| syntax(e.to_string()))?;
        if let Some(key) = object.duplicates().first() {
            return Err(syntax(format!("`{}` appears twice", escaped(key))).into());
        }
        let map = object.get("weight_map").ok_or_else(|| syntax("`weight_map` is missing".into()))?;
        let map = Object::parse(map.get()).map_err(|e| syntax(format!("`weight_map`: {e}")))?;
        let mut faults: Vec<Fault> = map
            .duplicates()
            .into_iter()
            .map(|name| Fault::new(Place::tensor(path, name), FaultKind::DuplicateInIndex))
            .collect();
        let mut weight_map = BTreeMap::new();
        for (name, value) in &map.0 {
            let place = || Place::tensor(path, name.as_str());
            match serde_json::from_str::<String>(value.get()) {
                Ok(file) if is_plain_name(&file) => {
                    weight_map.insert(TensorName::from(name.as_str()), file);
                }
                Ok(found) => faults.push(Fault::new(place(), FaultKind::IndexPath { found })),
                Err(e) => faults.push(Fault::new(place(), FaultKind::IndexSyntax { message: e.to_string() })),
            }
        }
        Faults::check(faults)?;
        // A wrong total is only worth a warning, so a malformed one is, too.
        let total_size = object
            .get("metadata")
            .and_then(|metadata| serde_json::from_str::<serde_json::Value>(metadata.get()).ok())
            .and_then(|metadata| metadata.get("total_size").cloned())
            .and_then(|total| total.as_u64().or_else(|| whole(total.as_f64()?)));
        let files = weight_map.values().cloned().collect();
        Ok(Index { path: path.to_owned(), weight_map, files, total_size, present: true })
    }

    /// Where the index is or would be.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there is an index.
    pub fn is_present(&self) -> bool {
        self.present
    }

    /// Tensors with their files, by name.
    pub fn entries(&self) -> impl Iterator<Item = (&TensorName, &str)> {
        self.weight_map.iter().map(|(name, file)| (name, file.as_str()))
    }

    /// The file that should hold a tensor.
    pub fn file_of(&self, name: &str) -> Option<&str> {
        self.weight_map.get(name).map(String::as_str)
    }

    /// The files that the index mentions, in no particular order.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(String::as_str)
    }

    /// Whether the index mentions a file.
    pub fn names_file(&self, file: &str) -> bool {
        self.files.contains(file)
    }

    /// `total_size`, where it is a number.
    pub fn total_size(&self) -> Option<u64> {
        self.total_size
    }

    /// What is odd about the index alone.
    pub fn warnings(&self) -> Vec<Fault> {
        let missing = self.present && self.total_size.is_none();
        missing.then(|| Fault::new(Place::file(&self.path), FaultKind::TotalSizeMissing)).into_iter().collect()
    }
}

/// A double that is a whole number: some writers put `total_size` as 1.5e11.
fn whole(number: f64) -> Option<u64> {
    (number >= 0.0 && number <= 2f64.powi(53) && number.fract() == 0.0).then_some(number as u64)
}

/// A name of a .safetensors file in the same directory: no separators, no way up, no device.
fn is_plain_name(name: &str) -> bool {
    name.ends_with(".safetensors")
        && name.len() > ".safetensors".len()
        && name.len() <= 255
        && !name.contains(['/', '\\', ':', '\0'])
        && !name.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Index, Faults> {
        Index::parse(Path::new("i"), text.as_bytes())
    }

    #[test]
    fn paths_that_leave_the_directory_are_refused() {
        for name in
            ["../x.safetensors", "/x.safetensors", "a\\b.safetensors", "C:x.safetensors", "a\u{7}.safetensors", "x"]
        {
            let text = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": {"t": name}}).to_string();
            let faults = parse(&text).unwrap_err();
            assert!(matches!(*faults.iter().next().unwrap().kind, FaultKind::IndexPath { .. }), "{name:?}");
        }
    }

    #[test]
    fn a_wrong_total_is_no_error() {
        let index = parse(r#"{"metadata": {"total_size": 12.0}, "weight_map": {"t": "a.safetensors"}}"#).unwrap();
        assert_eq!(index.total_size(), Some(12));
        assert_eq!(parse(r#"{"weight_map": {}}"#).unwrap().warnings().len(), 1);
        assert!(parse(r#"{"weight_map": 3}"#).is_err());
        assert!(parse(r#"{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}"#).is_err());
    }
}
