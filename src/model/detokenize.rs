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

    /// What was held back when no more ids come, without the bytes of a character that is not whole, and how many these are.
    pub fn finish(&mut self) -> Result<(String, usize)> {
        let mut text = self.held()?;
        let bytes = self.tokenizer.bytes(&self.ids[self.given..]).unwrap_or_default();
        let last = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
        // What could still become a character, unlike bytes that no character has.
        let is_begun = std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
        let unfinished = if is_begun && text.ends_with(char::REPLACEMENT_CHARACTER) { last.len() } else { 0 };
        if unfinished > 0 {
            text.pop();
        }
        self.given = self.ids.len();
        Ok((text, unfinished))
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
        let (rest, unfinished) = detokenizer.finish().unwrap();
        pieces.push(rest);
        assert_eq!(detokenizer.finish().unwrap(), (String::new(), 0));
        let all = nano().decode(ids, false).unwrap();
        let expected = if unfinished > 0 { all.strip_suffix('\u{fffd}').unwrap() } else { &all };
        assert_eq!(pieces.concat(), expected);
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
        assert_eq!(pieces(&snow[..2]), ["", "", ""]);
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

    #[test]
    fn a_character_that_is_not_finished_is_no_text() {
        let finished = |ids: &[u32]| {
            let mut detokenizer = Detokenizer::new(nano());
            let before: String = ids.iter().map(|&id| detokenizer.push(id).unwrap()).collect();
            let (rest, unfinished) = detokenizer.finish().unwrap();
            (before + &rest, unfinished)
        };
        let (the, snow, clef) =
            (nano().encode("the").unwrap(), nano().encode("☃").unwrap(), nano().encode("𝄞").unwrap());
        assert_eq!(finished(&[&the[..], &snow[..1]].concat()), ("the".to_owned(), 1));
        assert_eq!(finished(&snow[..2]), (String::new(), 2));
        assert_eq!(finished(&clef[..3]), (String::new(), 3));
        // Bytes that begin no character are broken, whatever follows.
        assert_eq!(finished(&snow[1..2]), ("\u{fffd}".to_owned(), 0));
        assert_eq!(finished(&[snow[0], snow[0]]), ("\u{fffd}".to_owned(), 1));
    }

    proptest! {
        #[test]
        fn pieces_make_the_text_of_all_ids(ids in proptest::collection::vec(0u32..2048, 0..40)) {
            pieces(&ids);
        }

        #[test]
        fn so_do_pieces_of_single_bytes(ids in proptest::collection::vec(0u32..256, 0..40)) {
            pieces(&ids);
        }
    }
}
