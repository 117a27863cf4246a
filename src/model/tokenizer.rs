//! Text to ids and back, by the model's tokenizer.json.

use std::path::{Path, PathBuf};

use crate::error::{Fault, FaultKind, Place, Result};
use crate::io::read_small;

/// Name of the file.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// Largest tokenizer.json that is read, in bytes; GLM-5.2's has about 20 MB.
pub const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// The tokenizer of a model.
#[derive(Debug)]
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Loads tokenizer.json of a directory.
    pub fn load(directory: &Path) -> Result<Tokenizer> {
        let path = directory.join(TOKENIZER_FILE);
        let bytes = read_small(&path, MAX_TOKENIZER_BYTES)?;
        let inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|e| Fault::new(Place::file(&path), FaultKind::TokenizerSyntax { message: e.to_string() }))?;
        Ok(Tokenizer { path, inner })
    }

    /// The ids of a text; special tokens only where the text spells them.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode(text, false).map_err(|e| self.fault("encode the text", &e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of some ids; special tokens are spelled out unless `skip_special`. An id that the tokenizer does not have
    /// is an error.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        // The crate leaves unknown ids out without a word.
        if let Some(&id) = ids.iter().find(|&&id| !self.has(id)) {
            return Err(Fault::new(Place::file(&self.path), FaultKind::TokenUnknown { id }));
        }
        self.inner.decode(ids, skip_special).map_err(|e| self.fault("decode the ids", &e))
    }

    /// The largest id that it gives.
    pub fn largest_id(&self) -> Option<u32> {
        self.inner.get_vocab(true).into_values().max()
    }

    /// Whether there is a token of this id.
    pub fn has(&self, id: u32) -> bool {
        self.inner.id_to_token(id).is_some()
    }

    /// The bytes of some ids, if the tokenizer spells bytes as characters: those that print as they are, the others as
    /// U+0100 and on, in order (byte-level BPE). `None` if it does not.
    pub fn bytes(&self, ids: &[u32]) -> Option<Vec<u8>> {
        let printable = |byte: &u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let others: Vec<u8> = (0..=255).filter(|byte| !printable(byte)).collect();
        let byte = |c: char| match u8::try_from(u32::from(c)).ok().filter(printable) {
            Some(byte) => Some(byte),
            None => others.get(u32::from(c).checked_sub(0x100)? as usize).copied(),
        };
        let added = self.inner.get_added_tokens_decoder();
        let mut bytes = Vec::new();
        for &id in ids {
            let token = self.inner.id_to_token(id)?;
            match added.contains_key(&id) {
                true => bytes.extend_from_slice(token.as_bytes()),
                false => bytes.extend(token.chars().map(byte).collect::<Option<Vec<u8>>>()?),
            }
        }
        Some(bytes)
    }

    /// The id of a token spelled exactly so.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    fn fault(&self, action: &'static str, error: &tokenizers::Error) -> Fault {
        Fault::new(Place::file(&self.path), FaultKind::Tokenizer { action, message: error.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nano() -> Tokenizer {
        Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nano")).unwrap()
    }

    #[test]
    fn text_makes_a_round_trip() {
        let tokenizer = nano();
        for text in ["abacus: a plant", "[gMASK]<sop>In the beginning 123456", "naïve ☃ 𝄞\r\n\tx  y", ""] {
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        }
        assert_eq!(tokenizer.encode("[gMASK]<sop>").unwrap(), [2040, 2042]);
        assert_eq!(tokenizer.decode(&[2040, 2042], true).unwrap(), "");
        assert_eq!(tokenizer.token_id("<sop>"), Some(2042));
    }

    #[test]
    fn unknown_ids_and_broken_files_are_errors() {
        let message = nano().decode(&[1, 2048], false).unwrap_err().to_string();
        assert!(message.ends_with("the tokenizer has no token with id 2048"), "{message}");
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(TOKENIZER_FILE), "{}").unwrap();
        let message = Tokenizer::load(directory.path()).unwrap_err().to_string();
        assert!(message.contains("the tokenizer does not load: "), "{message}");
    }
}
