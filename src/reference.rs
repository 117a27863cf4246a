//! Reference files: what a model said to some texts, to be compared with what another run of it says.
//!
//! A file holds one reference or `{"references": [references]}`. Keys of a reference, n tokens long:
//!
//! | key | values | meaning |
//! |---|---|---|
//! | `prompt_ids` | 1 to n ids | the beginning of the text |
//! | `full_ids` | n ids | the text: the prompt and what follows it |
//! | `tf_pred` | n ids | the best id after each token |
//! | `margin` | n numbers | how far its logit is above the second best |
//! | `logprob_next` | n − 1 numbers | log-probability of each next token, natural |
//! | `greedy` | true or false | whether the text after the prompt is the model's own; true if absent |
//! | `index_topk` | a number | overrides config.json for this text |
//! | `draft_pred` | up to n − 1 ids | the MTP head's best id at each position p, a draft of token p + 2 |
//! | `draft_margin` | as many numbers | their margins |
//! | `fingerprint` | text | see [`fingerprint`] |
//! | `written_by` | text | the hash of the container that said this; it proves nothing about that container |
//!
//! `tf_pred` or `draft_pred` must be there, the other optional keys need not; unknown keys are ignored.

mod compare;
mod fingerprint;
mod parse;

use std::path::Path;

use serde::Serialize;

use crate::backend::{Backend, Prediction};
use crate::error::{Faults, Result};
use crate::io::read_small;
use crate::model::Model;

pub use compare::{
    Agreement, Drafts, FAST_NEAR_TIE_MARGIN, Matches, NEAR_TIE_MARGIN, accepted_drafts, compare, near_tie_margin,
};
pub use fingerprint::{Difference, Fingerprint, differences, fingerprint};

/// Largest reference file that is read, in bytes.
pub const MAX_REFERENCE_BYTES: u64 = 256 << 20;
/// Most references in one file.
pub const MAX_REFERENCES: usize = 1 << 16;

/// What a model said to one text.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)] // the module's table says it
pub struct Reference {
    pub prompt_ids: Vec<u32>,
    pub full_ids: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tf_pred: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin: Option<Vec<f64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprob_next: Option<Vec<f64>>,
    pub greedy: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index_topk: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft_pred: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft_margin: Option<Vec<f64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub written_by: Option<String>,
}

/// A reference file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReferenceFile {
    /// Its references; at least one.
    pub references: Vec<Reference>,
}

impl ReferenceFile {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<ReferenceFile, Faults> {
        ReferenceFile::parse(path, &read_small(path, MAX_REFERENCE_BYTES)?)
    }

    /// Parses and checks the text of a file; `path` is for messages only.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<ReferenceFile, Faults> {
        parse::file(path, bytes)
    }

    /// The text of a file with these references.
    pub fn to_text(&self) -> String {
        let mut text = serde_json::to_string(self).expect("ids, numbers and text are JSON");
        text.push('\n');
        text
    }
}

/// What the reference of a text is to contain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recording {
    /// Greedy tokens that follow the prompt.
    pub tokens: usize,
    /// Overrides config.json.
    pub index_topk: Option<u64>,
    /// Whether the MTP head's drafts are recorded too.
    pub drafts: bool,
    /// The model's fingerprint.
    pub fingerprint: Option<String>,
}

/// Records what a model says to a prompt and its own greedy continuation of it.
pub fn record<B: Backend>(model: &Model<'_, B>, prompt_ids: &[u32], recording: &Recording) -> Result<Reference> {
    let topk = recording.index_topk;
    let mut full_ids = prompt_ids.to_vec();
    full_ids.extend(model.greedy(prompt_ids, recording.tokens, topk)?);
    let predictions = model.teacher_forced(&full_ids, topk)?;
    let drafts = if recording.drafts { Some(model.drafts(&full_ids, topk)?) } else { None };
    let ids = |of: &[Prediction]| of.iter().map(|p| p.id).collect::<Vec<u32>>();
    let margins = |of: &[Prediction]| of.iter().map(|p| p.margin().into()).collect::<Vec<f64>>();
    Ok(Reference {
        prompt_ids: prompt_ids.to_vec(),
        full_ids,
        tf_pred: Some(ids(&predictions)),
        margin: Some(margins(&predictions)),
        logprob_next: Some(predictions.iter().filter_map(Prediction::logprob).collect()),
        greedy: true,
        index_topk: topk,
        draft_pred: drafts.as_deref().map(ids),
        draft_margin: drafts.as_deref().map(margins),
        fingerprint: recording.fingerprint.clone(),
        written_by: None,
    })
}
