//! What of an earlier run still holds: a step is kept where everything that decides its outcome is the same.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Settings;
use crate::checkpoint::weight_files;
use crate::container::manifest::{CARD_FILE, Manifest, SOURCE_CARD_FILE, has_model_card, hex};
use crate::error::{Fault, Result};
use crate::io::{SourceFile, hook, write_whole};
use crate::score::identity::sha256_of;

/// The key of a step: a hash of all that decides its outcome.
pub(super) struct State {
    file: &'static str,
    key: String,
}

impl State {
    /// Of a verification: the container's bytes, the references, the devices, and the source.
    pub(super) fn of_verify(settings: &Settings) -> Result<State> {
        let stated = Manifest::read_stated(&settings.container)?;
        let (manifest, statement) = stated.as_ref().map(|(manifest, sha256)| (manifest, sha256)).unzip();
        let files = manifest.map(|manifest| (&manifest.files, &manifest.small_files, &manifest.source));
        // The source's card counts, whichever of its two names it has; one that `publish` made does not.
        let files = files.map(|(files, small, source)| {
            let card = small.iter().find(|file| file.name == SOURCE_CARD_FILE);
            let card = card.or_else(|| {
                let card = small.iter().find(|file| file.name == CARD_FILE);
                card.filter(|_| !has_model_card(&settings.container, small))
            });
            let card = card.map(|card| &card.sha256);
            let is_card = |name: &str| [CARD_FILE, SOURCE_CARD_FILE].contains(&name);
            let small: Vec<_> = small.iter().filter(|file| !is_card(&file.name)).collect();
            json!([files, small, source, card])
        });
        let references = hashes(settings.verify.references.iter())?;
        let (devices, source) = (&settings.verify.devices, settings.verify.source);
        State::new(
            "verify.key",
            json!({"files": files, "manifest": statement, "references": references, "devices": devices, "source": source}),
        )
    }

    /// Of the scores of the source: its files by name, size and time, the inputs, and how they are read.
    pub(super) fn of_source(settings: &Settings) -> Result<State> {
        let mut files = Vec::new();
        for name in weight_files(&settings.checkpoint)? {
            let path = settings.checkpoint.join(&name);
            let bytes = SourceFile::open(&path)?.bytes();
            files.push(json!([name, bytes, SourceFile::modified_nanoseconds(&path)]));
        }
        let small = hashes(["config.json", "tokenizer.json"].map(|name| settings.checkpoint.join(name)).iter())?;
        let score = &settings.score;
        let names: Vec<&String> = score.tasks.keys().chain(score.texts.keys()).collect();
        let inputs = hashes(score.tasks.values().chain(score.texts.values()))?;
        let (limit, seed, prefix) = (score.limit, score.seed, &score.prefix);
        let value = json!({
            "files": files, "small": small, "names": names, "inputs": inputs, "limit": limit, "seed": seed, "prefix": prefix,
        });
        State::new("source.key", value)
    }

    fn new(file: &'static str, value: Value) -> Result<State> {
        let text = format!("{} {value}", env!("CARGO_PKG_VERSION"));
        Ok(State { file, key: hex(&Sha256::digest(text)) + "\n" })
    }

    /// Whether an earlier run ended with this key.
    pub(super) fn is_kept(&self, reports: &Path) -> bool {
        fs::read_to_string(reports.join(self.file)).is_ok_and(|key| key == self.key)
    }

    /// Notes that the step ended.
    pub(super) fn keep(&self, reports: &Path) -> Result<()> {
        write_whole(&reports.join(self.file), self.key.as_bytes(), true)
    }

    /// Forgets an earlier run, before its report is replaced.
    pub(super) fn forget(&self, reports: &Path) -> Result<()> {
        let path = reports.join(self.file);
        match hook::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Fault::io("remove the file", &path, e)),
            _ => Ok(()),
        }
    }
}

fn hashes<'a>(paths: impl Iterator<Item = &'a PathBuf>) -> Result<Vec<String>> {
    paths.map(|path| sha256_of(path)).collect()
}
