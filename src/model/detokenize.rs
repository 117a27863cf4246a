//! Text of ids that come one after the other, given away as soon as it is certain.
//!
//! A token may hold a part of a character. It is held back until the rest is there, so that the replacement character U+FFFD
//! stands only where the text really is broken. The pieces together are the text of all ids at once.

use super::tokenizer::Tokenizer;
use crate::error::Result;

/// Ids that become text.
#[derive(Debug)]
pub struct Detokenizer<'t> {
    tokenizer: &'t Tokenizer,
    /// Ids from some boundary between two characters on: first those of the last piece, then those that are held back.
    ids: Vec<u32>,
    /// How many of them are those of the last piece: a decoder may treat the first token of a text in its own way.
    given: usize,
    /// Ids that the tokenizer has no token for, which make no text, in the order of their first appearance.
    pub unknown: Vec<u32>,
}

impl<'t> Detokenizer<'t> {
    /// Nothing yet.
    pub fn new(tokenizer: &'t Tokenizer) -> Detokenizer<'t> {
        Detokenizer { tokenizer, ids: Vec::new(), given: 0, unknown: Vec::new() }
    }

    /// The text that is certain with the next id; special tokens are spelled out.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if !self.tokenizer.has(id) {
            if !self.unknown.contains(&id) {
                self.unknown.push(id);
            }
            return Ok(String::new());
        }
        self.ids.push(id);
        let text = self.held()?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        Ok(text)
    }

    /// What was held back when no more ids come.
    pub fn finish(&mut self) -> Result<String> {
        let text = self.held()?;
        self.given = self.ids.len();
        Ok(text)
    }

    /// The text after the last piece.
    fn held(&self) -> Result<String> {
        let before = self.tokenizer.decode(&self.ids[..self.given], false)?;
        let all = self.tokenizer.decode(&self.ids, false)?;
        Ok(all.get(before.len()..).unwrap_or_default().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::OnceLock;

    use proptest::prelude::*;

    use super::*;

    fn nano() -> &'static Tokenizer {
        static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nano");
        TOKENIZER.get_or_init(|| Tokenizer::load(&directory).unwrap())
    }

    /// The pieces, one for each id and a last one.
    fn pieces(ids: &[u32]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(nano());
        let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id).unwrap()).collect();
        pieces.push(detokenizer.finish().unwrap());
        assert_eq!(detokenizer.finish().unwrap(), "");
        pieces
    }

    #[test]
    fn characters_come_whole() {
        for text in ["naïve ☃ 𝄞", "从前有一座山,山上有一座庙", "👩‍👩‍👧‍👦🇺🇦 e\u{301}", "كان يا ما كان", "ab \n\t\u{fffd}c"]
        {
            let ids = nano().encode(text).unwrap();
            let pieces = pieces(&ids);
            assert_eq!(pieces.concat(), text);
            let broken = |piece: &&String| piece.contains('\u{fffd}') && !text.contains('\u{fffd}');
            assert_eq!(pieces.iter().find(broken), None);
        }
        let snow = nano().encode("☃").unwrap();
        assert_eq!(pieces(&snow), ["", "", "☃", ""]);
        assert_eq!(pieces(&snow[..2]), ["", "", "\u{fffd}"]);
        // Half a character and then a whole one: what is broken is told as soon as that is certain.
        let the = nano().encode("the").unwrap();
        assert_eq!(pieces(&[&snow[..1], &the[..]].concat()).concat(), "\u{fffd}the");
        assert_eq!(pieces(&[2040, 2042]), ["[gMASK]", "<sop>", ""]);
    }

    #[test]
    fn ids_without_a_token_are_told() {
        let mut detokenizer = Detokenizer::new(nano());
        for id in [4000, 5000, 4000] {
            assert_eq!(detokenizer.push(id).unwrap(), "");
        }
        assert_eq!(detokenizer.unknown, [4000, 5000]);
    }

    proptest! {
        #[test]
        fn pieces_make_the_text_of_all_ids(ids in proptest::collection::vec(0u32..2048, 0..40)) {
            prop_assert_eq!(pieces(&ids).concat(), nano().decode(&ids, false).unwrap());
        }

        #[test]
        fn so_do_pieces_of_single_bytes(ids in proptest::collection::vec(0u32..256, 0..40)) {
            prop_assert_eq!(pieces(&ids).concat(), nano().decode(&ids, false).unwrap());
        }
    }
}
