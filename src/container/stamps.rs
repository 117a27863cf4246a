//! Stamps: format names of resident tensors, kept in a file's `__metadata__`.

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::{Fault, FaultKind, Place, Result};
use crate::json::Object;
use crate::tensor::TensorName;

/// The key in `__metadata__` whose value is JSON text: {tensor name: format name}.
pub const STAMP_KEY: &str = "colibri.fmt";

/// `__metadata__` with these stamps, or none where there is nothing to stamp.
pub fn metadata(stamps: &BTreeMap<TensorName, &'static str>) -> Option<BTreeMap<String, String>> {
    if stamps.is_empty() {
        return None;
    }
    let text = serde_json::to_string(stamps).expect("names and formats are plain strings");
    Some(BTreeMap::from([(STAMP_KEY.to_owned(), text)]))
}

/// The stamps of a file, empty where it has none; `path` is for messages only.
pub fn parse(path: &Path, metadata: Option<&BTreeMap<String, String>>) -> Result<BTreeMap<TensorName, String>> {
    let Some(text) = metadata.and_then(|metadata| metadata.get(STAMP_KEY)) else { return Ok(BTreeMap::new()) };
    let fault = |message: String| Fault::new(Place::file(path), FaultKind::StampSyntax { message });
    let object = Object::parse(text).map_err(|e| fault(e.to_string()))?;
    let mut stamps = BTreeMap::new();
    for (name, value) in &object.0 {
        let format: String = serde_json::from_str(value.get()).map_err(|e| fault(e.to_string()))?;
        let name = TensorName::from(name.as_str());
        match stamps.insert(name.clone(), format.clone()) {
            Some(other) if other != format => {
                let kind = FaultKind::StampConflict { one: other, other: format };
                return Err(Fault::new(Place::tensor(path, name), kind));
            }
            _ => {}
        }
    }
    Ok(stamps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<BTreeMap<TensorName, String>> {
        parse(Path::new("f"), Some(&BTreeMap::from([(STAMP_KEY.to_owned(), text.to_owned())])))
    }

    #[test]
    fn stamps_round_trip() {
        let stamps = BTreeMap::from([("a\"b".into(), "int8-row"), ("c".into(), "int4-grouped")]);
        let read = parse(Path::new("f"), metadata(&stamps).as_ref()).unwrap();
        assert!(read.iter().map(|(k, v)| (k, v.as_str())).eq(stamps.iter().map(|(k, v)| (k, *v))));
        assert!(metadata(&BTreeMap::new()).is_none());
    }

    #[test]
    fn malformed_stamps_are_told() {
        for text in ["", "[]", "3", r#"{"a": 1}"#, r#"{"a": "x""#, &"[".repeat(10_000)] {
            assert!(matches!(*read(text).unwrap_err().kind, FaultKind::StampSyntax { .. }), "{text:.20}");
        }
        let twice = read(r#"{"a": "int8-row", "a": "int4-row"}"#).unwrap_err();
        assert!(matches!(*twice.kind, FaultKind::StampConflict { .. }));
    }
}
