//! The text of a reference file, key by key.

use std::path::Path;

use serde_json::Value;
use serde_json::value::RawValue;

use super::{MAX_REFERENCES, Reference, ReferenceFile};
use crate::error::{Fault, FaultKind, Faults, Place, escaped};
use crate::json::Object;

/// Parses a file; `path` is for messages only.
pub fn file(path: &Path, bytes: &[u8]) -> Result<ReferenceFile, Faults> {
    let fault = |kind| Fault::new(Place::file(path), kind);
    let syntax = |message: String| fault(FaultKind::JsonSyntax { message });
    let text = std::str::from_utf8(bytes).map_err(|e| syntax(e.to_string()))?;
    let top: &RawValue = serde_json::from_str(text).map_err(|e| syntax(e.to_string()))?;
    let object = Object::parse(top.get()).map_err(|e| syntax(e.to_string()))?;
    let list: Vec<&RawValue> = match object.get("references") {
        Some(list) => serde_json::from_str(list.get()).map_err(|e| syntax(format!("`references`: {e}")))?,
        None => vec![top],
    };
    if list.is_empty() || list.len() > MAX_REFERENCES {
        return Err(fault(FaultKind::ReferenceCount { found: list.len(), limit: MAX_REFERENCES }).into());
    }
    let mut faults = Vec::new();
    let mut references = Vec::with_capacity(list.len());
    for (number, raw) in list.into_iter().enumerate() {
        let object = Object::parse(raw.get()).map_err(|e| syntax(format!("reference {number}: {e}")))?;
        if let Some(key) = object.duplicates().first() {
            return Err(syntax(format!("reference {number}: `{}` appears twice", escaped(key))).into());
        }
        let mut keys = Keys { path, number, object, faults: Vec::new() };
        references.extend(keys.reference());
        faults.extend(keys.faults);
    }
    Faults::check(faults)?;
    Ok(ReferenceFile { references })
}

/// Reads the keys of one reference, collecting what is wrong with them.
struct Keys<'a> {
    path: &'a Path,
    number: usize,
    object: Object<'a>,
    faults: Vec<Fault>,
}

impl Keys<'_> {
    fn fault(&mut self, kind: FaultKind) {
        self.faults.push(Fault::new(Place::file(self.path), kind));
    }

    fn wrong(&mut self, key: &'static str, expected: impl Into<String>, found: impl Into<String>) {
        let (expected, found) = (expected.into(), found.into());
        self.fault(FaultKind::ReferenceValue { reference: self.number, key, expected, found });
    }

    /// A value, unless it is absent or null.
    fn value<T: serde::de::DeserializeOwned>(&mut self, key: &'static str, expected: &str) -> Option<T> {
        let raw = self.object.get(key)?.get();
        if raw == "null" {
            return None;
        }
        let value = serde_json::from_str(raw).ok();
        if value.is_none() {
            self.wrong(key, expected, described(raw));
        }
        value
    }

    /// A value that must be there; its absence leaves a fault.
    fn needed<T: serde::de::DeserializeOwned>(&mut self, key: &'static str, expected: &str) -> Option<T> {
        let before = self.faults.len();
        let value = self.value(key, expected);
        if value.is_none() && self.faults.len() == before {
            self.fault(FaultKind::ReferenceMissing { reference: self.number, key });
        }
        value
    }

    fn reference(&mut self) -> Option<Reference> {
        const IDS: &str = "a list of ids";
        const NUMBERS: &str = "a list of numbers";
        let prompt_ids: Option<Vec<u32>> = self.needed("prompt_ids", IDS);
        let full_ids: Option<Vec<u32>> = self.needed("full_ids", IDS);
        let reference = Reference {
            prompt_ids: prompt_ids?,
            full_ids: full_ids?,
            tf_pred: self.value("tf_pred", IDS),
            margin: self.value("margin", NUMBERS),
            logprob_next: self.value("logprob_next", NUMBERS),
            greedy: self.value("greedy", "true or false").unwrap_or(true),
            index_topk: self.value("index_topk", "a whole number above 0"),
            draft_pred: self.value("draft_pred", IDS),
            draft_margin: self.value("draft_margin", NUMBERS),
            fingerprint: self.value("fingerprint", "text"),
            written_by: self.value("written_by", "text"),
        };
        self.relations(&reference);
        Some(reference)
    }

    /// What must hold between the keys.
    fn relations(&mut self, r: &Reference) {
        let n = r.full_ids.len();
        let mut length = |key: &'static str, found: Option<usize>, least: usize, most: usize| {
            if let Some(found) = found.filter(|found| !(least..=most).contains(found)) {
                let expected =
                    if least == most { format!("{most} values") } else { format!("{least} to {most} values") };
                self.wrong(key, expected, format!("a list of {found}"));
            }
        };
        length("prompt_ids", Some(r.prompt_ids.len()), 1, n);
        length("tf_pred", r.tf_pred.as_ref().map(Vec::len), n, n);
        length("margin", r.margin.as_ref().map(Vec::len), n, n);
        let pairs = n.saturating_sub(1);
        length("logprob_next", r.logprob_next.as_ref().map(Vec::len), pairs, pairs);
        length("draft_pred", r.draft_pred.as_ref().map(Vec::len), 0, pairs);
        let drafts = r.draft_pred.as_ref().map_or(0, Vec::len);
        length("draft_margin", r.draft_margin.as_ref().map(Vec::len), drafts, drafts);
        if !r.full_ids.starts_with(&r.prompt_ids) {
            self.wrong("full_ids", "ids that begin with `prompt_ids`", "another beginning");
        }
        if r.index_topk == Some(0) {
            self.wrong("index_topk", "a whole number above 0", "0");
        }
        if r.tf_pred.is_none() && r.draft_pred.is_none() && self.faults.is_empty() {
            self.fault(FaultKind::ReferenceMissing { reference: self.number, key: "tf_pred" });
        }
    }
}

/// A value for a message: short ones as they stand.
fn described(raw: &str) -> String {
    match serde_json::from_str(raw) {
        Ok(Value::Array(list)) => format!("a list of {} with something else in it", list.len()),
        Ok(Value::Object(_)) => "an object".into(),
        _ => raw.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: Value) -> Result<ReferenceFile, Faults> {
        file(Path::new("r.json"), value.to_string().as_bytes())
    }

    fn one(key: &str, value: Value) -> Value {
        let mut object = json!({
            "prompt_ids": [1, 2], "full_ids": [1, 2, 3], "tf_pred": [2, 3, 4], "margin": [1.5, 0, -0.0],
            "logprob_next": [-1, -2.5], "draft_pred": [3, 4], "draft_margin": [1, 2], "text": "ignored"
        });
        object[key] = value;
        object
    }

    #[test]
    fn one_or_many_are_read() {
        let single = parse(one("note", "x".into())).unwrap();
        assert_eq!(single.references[0].margin, Some(vec![1.5, 0.0, 0.0]));
        assert!(single.references[0].greedy);
        let many = json!({"references": [one("greedy", false.into()), one("index_topk", 4.into())], "index_topk": "x"});
        let many = parse(many).unwrap().references;
        assert_eq!((many[0].greedy, many[1].index_topk), (false, Some(4)));
        let absent = parse(one("tf_pred", Value::Null)).unwrap();
        assert_eq!(absent.references[0].tf_pred, None);
        let again = ReferenceFile::parse(Path::new("r"), single.to_text().as_bytes()).unwrap();
        assert_eq!(again, single);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (value, expected) in [
            (json!([]), "r.json: the file does not parse: "),
            (json!({"references": 1}), "`references`: "),
            (json!({"references": []}), "the file has 0 references"),
            (
                json!({"references": [{}]}),
                "reference 0: `prompt_ids` is missing\nr.json: reference 0: `full_ids` is missing",
            ),
            (json!({"prompt_ids": [1], "full_ids": [1]}), "reference 0: `tf_pred` is missing"),
            (one("prompt_ids", json!([])), "`prompt_ids` is a list of 0, expected 1 to 3 values"),
            (
                one("prompt_ids", json!([2])),
                "`full_ids` is another beginning, expected ids that begin with `prompt_ids`",
            ),
            (
                one("full_ids", json!([1, 2, -1])),
                "`full_ids` is a list of 3 with something else in it, expected a list of ids",
            ),
            (one("tf_pred", json!([1])), "`tf_pred` is a list of 1, expected 3 values"),
            (one("tf_pred", json!({})), "`tf_pred` is an object, expected a list of ids"),
            (one("margin", json!(["x", 1, 2])), "`margin` is a list of 3 with something else in it"),
            (one("logprob_next", json!([0, 0, 0])), "`logprob_next` is a list of 3, expected 2 values"),
            (one("draft_pred", json!([0, 0, 0])), "`draft_pred` is a list of 3, expected 0 to 2 values"),
            (one("draft_margin", json!([0])), "`draft_margin` is a list of 1, expected 2 values"),
            (one("greedy", json!("no")), "`greedy` is \"no\", expected true or false"),
            (one("index_topk", json!(0)), "`index_topk` is 0, expected a whole number above 0"),
            (one("index_topk", json!(-1)), "`index_topk` is -1, expected a whole number above 0"),
            (one("fingerprint", json!(7)), "`fingerprint` is 7, expected text"),
        ] {
            let message = parse(value).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        let twice = br#"{"prompt_ids": [1], "prompt_ids": [2]}"#;
        assert!(file(Path::new("r"), twice).unwrap_err().to_string().contains("`prompt_ids` appears twice"));
        let deep = format!("{{\"references\": {}", "[".repeat(100_000));
        assert!(file(Path::new("r"), deep.as_bytes()).is_err());
    }
}
