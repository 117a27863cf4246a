//! Texts to compare along: those of references, or without any the model's own, as the plain backend continues them.

use std::path::{Path, PathBuf};

use super::{OWN_TOKENS, Prepared, Subject};
use crate::backend::Device;
use crate::backend::reference::Reference as Plain;
use crate::model::Model;
use crate::model::tokenizer::Tokenizer;
use crate::progress::Progress;
use crate::reference::{Recording, Reference, ReferenceFile, record};

/// Beginnings of the model's own texts.
pub(super) const PROMPTS: [&str; 3] = ["[gMASK]<sop>The", "[gMASK]<sop>In the beginning", "[gMASK]<sop>a kind of"];

/// What the report calls references that are made here.
pub const OWN: &str = "reference backend";

/// References of one origin.
pub(super) struct Texts {
    /// What the report calls them.
    pub(super) name: String,
    /// Where a disagreement is reported.
    pub(super) place: PathBuf,
    pub(super) file: ReferenceFile,
}

/// The references of the given files.
pub(super) fn given(prepared: &Prepared) -> Vec<Texts> {
    let texts = |(path, file): &(PathBuf, ReferenceFile)| Texts {
        name: path.to_string_lossy().into_owned(),
        place: path.clone(),
        file: file.clone(),
    };
    prepared.files.iter().map(texts).collect()
}

/// What the plain backend says, or why it does not say anything.
pub(super) fn recorded(
    subject: &Subject<'_>,
    prepared: &Prepared,
    devices: &[Device],
    progress: &dyn Progress,
) -> Result<Texts, String> {
    if devices.iter().all(|&device| device == Device::Reference) {
        return Err("no --reference, and no other device than the reference backend: nothing to compare with".into());
    }
    if let Some((needed, available)) = prepared.plain_too_large {
        return Err(format!(
            "no --reference, and the reference backend needs {needed} bytes of memory for this model; {available} are available"
        ));
    }
    progress.file("running the reference backend");
    let backend = Plain::default();
    let model = Model::load(subject.weights, &backend).map_err(|_| "the model does not load".to_owned())?;
    let directory = subject.weights.directory();
    let recording = Recording { tokens: OWN_TOKENS, drafts: model.has_mtp(), ..Recording::default() };
    let prompts = prompts(&directory, model.config().vocab_size);
    let references: Vec<Reference> =
        prompts.iter().filter_map(|prompt| record(&model, prompt, &recording).ok()).collect();
    if references.is_empty() {
        return Err("no --reference, and the reference backend computes nothing that could be compared".into());
    }
    Ok(Texts { name: OWN.to_owned(), place: directory, file: ReferenceFile { references } })
}

/// Beginnings of texts: those that the tokenizer makes of [`PROMPTS`], or some ids without a tokenizer.
pub(super) fn prompts(directory: &Path, vocab_size: u64) -> Vec<Vec<u32>> {
    let tokenizer = Tokenizer::load(directory).ok();
    let encode = |text: &&str| tokenizer.as_ref()?.encode(text).ok().filter(|ids| !ids.is_empty());
    let known = |ids: &Vec<u32>| ids.iter().all(|&id| u64::from(id) < vocab_size);
    let prompts: Vec<Vec<u32>> = PROMPTS.iter().filter_map(encode).filter(known).collect();
    if prompts.len() == PROMPTS.len() {
        return prompts;
    }
    (1..=3u64).map(|n| (0..8).map(|i| (n * (i * i + 7 * i + 1) % vocab_size) as u32).collect()).collect()
}
