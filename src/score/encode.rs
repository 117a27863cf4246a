//! Text to ids: where the prefix goes, and where a continuation begins.

use crate::config::MODEL_TYPE;
use crate::error::{Fault, FaultKind, Place, Result};
use crate::model::tokenizer::Tokenizer;

/// The special tokens with which texts of GLM models begin.
const GLM_PREFIX: [&str; 2] = ["[gMASK]", "<sop>"];

/// What a user wants to stand before every text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum PrefixChoice {
    /// `[gMASK]<sop>` for GLM models, nothing for others.
    #[default]
    Auto,
    /// Nothing.
    None,
    /// This text.
    Text(String),
}

/// What stands before every text, for a tokenizer; empty for nothing.
pub fn prefix(choice: &PrefixChoice, tokenizer: &Tokenizer, tokenizer_path: &std::path::Path) -> Result<String> {
    match choice {
        PrefixChoice::None => Ok(String::new()),
        PrefixChoice::Text(text) => Ok(text.clone()),
        PrefixChoice::Auto if !MODEL_TYPE.contains("glm") => Ok(String::new()),
        // Without the tokens the prefix would be encoded as ordinary text, silently.
        PrefixChoice::Auto => match GLM_PREFIX.into_iter().find(|token| tokenizer.token_id(token).is_none()) {
            Some(token) => Err(Fault::new(Place::file(tokenizer_path), FaultKind::PrefixUnknown { token })),
            None => Ok(GLM_PREFIX.concat()),
        },
    }
}

/// A text as ids, and from where on it is scored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The whole text.
    pub ids: Vec<u32>,
    /// The first id that is scored; at least 1, below the number of ids.
    pub start: usize,
}

impl Encoded {
    /// Ids that are scored.
    pub fn tokens(&self) -> usize {
        self.ids.len() - self.start
    }
}

/// Why a row cannot be scored: the fault's kind, given the row's number.
pub type Reason = Box<dyn FnOnce(u64) -> FaultKind>;

/// Makes ids of texts, for one model.
pub struct Encoder<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// What stands before every text.
    pub prefix: &'a str,
    /// Ids are below it.
    pub vocab_size: u64,
    /// Longest text in tokens, where config.json says one.
    pub max_tokens: Option<u64>,
}

/// The text with the prefix, unless it begins with it already.
pub fn prefixed(text: &str, prefix: &str) -> String {
    if text.starts_with(prefix) { text.to_owned() } else { format!("{prefix}{text}") }
}

impl Encoder<'_> {
    /// A continuation of a context. It starts where the ids of the context, alone and continued, first differ: a token may
    /// reach across the boundary. If nothing remains, both are encoded apart.
    pub fn continuation(&self, ctx: &str, continuation: &str) -> Result<Result<Encoded, Reason>> {
        let ctx = prefixed(ctx, self.prefix);
        let alone = self.tokenizer.encode(&ctx)?;
        let mut ids = self.tokenizer.encode(&format!("{ctx}{continuation}"))?;
        let mut start = alone.iter().zip(&ids).take_while(|(a, b)| a == b).count();
        if start == ids.len() {
            start = alone.len();
            ids = alone;
            ids.extend(self.tokenizer.encode(continuation)?);
        }
        Ok(self.checked(Encoded { ids, start }))
    }

    /// A document: everything after the prefix is scored. Without a prefix the first token has no probability.
    pub fn document(&self, text: &str) -> Result<Result<Encoded, Reason>> {
        let text = text.strip_prefix(self.prefix).unwrap_or(text);
        if self.prefix.is_empty() {
            let ids = self.tokenizer.encode(text)?;
            // A lone token would be scored, if something stood before it.
            return Ok(self.checked(Encoded { start: usize::from(ids.len() > 1), ids }));
        }
        self.continuation("", text)
    }

    /// A line of a request file.
    pub fn request(&self, line: &str) -> Result<Encoded, Reason> {
        request(line, &self.bounds())
    }

    fn checked(&self, encoded: Encoded) -> Result<Encoded, Reason> {
        self.bounds().checked(encoded)
    }

    fn bounds(&self) -> Bounds {
        Bounds { vocab_size: self.vocab_size, max_tokens: self.max_tokens }
    }
}

/// What a model takes.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Ids are below it.
    pub vocab_size: u64,
    /// Longest text in tokens, where config.json says one.
    pub max_tokens: Option<u64>,
}

/// The ids of a line of a request file: `ctxlen contlen id…`, digits and spaces only.
pub fn request(line: &str, bounds: &Bounds) -> Result<Encoded, Reason> {
    let malformed = |expected: String, found: String| -> Reason {
        Box::new(move |row| FaultKind::RowMalformed { row, expected, found })
    };
    let number = |word: &str| word.bytes().all(|byte| byte.is_ascii_digit()).then(|| word.parse().ok())?;
    let numbers: Option<Vec<u64>> = line.split_ascii_whitespace().map(number).collect();
    let Some([ctxlen, contlen, ids @ ..]) = numbers.as_deref() else {
        return Err(malformed("`ctxlen contlen id…`".into(), format!("{line:?}")));
    };
    let expected = ctxlen.checked_add(*contlen);
    if expected != Some(ids.len() as u64) {
        let expected = expected.map_or("fewer".to_owned(), |count| count.to_string());
        return Err(malformed(format!("{expected} ids after `{ctxlen} {contlen}`"), ids.len().to_string()));
    }
    let vocab_size = bounds.vocab_size;
    if let Some(&id) = ids.iter().find(|&&id| id >= vocab_size) {
        return Err(Box::new(move |row| FaultKind::RowTokenId { row, id, vocab_size }));
    }
    let ids = ids.iter().map(|&id| id as u32).collect();
    bounds.checked(Encoded { ids, start: *ctxlen as usize })
}

impl Bounds {
    fn checked(&self, encoded: Encoded) -> Result<Encoded, Reason> {
        let (tokens, vocab_size) = (encoded.ids.len(), self.vocab_size);
        if encoded.start >= tokens {
            return Err(Box::new(|row| FaultKind::RowEmpty { row }));
        }
        if encoded.start == 0 {
            return Err(Box::new(|row| FaultKind::RowNoContext { row }));
        }
        if let Some(limit) = self.max_tokens.filter(|&limit| tokens as u64 > limit) {
            return Err(Box::new(move |row| FaultKind::RowTooLong { row, tokens, limit }));
        }
        match encoded.ids.iter().find(|&&id| u64::from(id) >= vocab_size) {
            Some(&id) => Err(Box::new(move |row| FaultKind::RowTokenId { row, id: id.into(), vocab_size })),
            None => Ok(encoded),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn nano() -> Tokenizer {
        Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nano")).unwrap()
    }

    fn encoder<'a>(tokenizer: &'a Tokenizer, prefix: &'a str) -> Encoder<'a> {
        Encoder { tokenizer, prefix, vocab_size: 2048, max_tokens: Some(12) }
    }

    fn reason(result: Result<Encoded, Reason>) -> String {
        result.unwrap_err()(3).to_string()
    }

    #[test]
    fn prefixes_stand_once() {
        let tokenizer = nano();
        let path = Path::new("tokenizer.json");
        let auto = prefix(&PrefixChoice::Auto, &tokenizer, path).unwrap();
        assert_eq!(auto, "[gMASK]<sop>");
        assert_eq!(prefix(&PrefixChoice::None, &tokenizer, path).unwrap(), "");
        assert_eq!(prefix(&PrefixChoice::Text("x".into()), &tokenizer, path).unwrap(), "x");
        let encoder = encoder(&tokenizer, &auto);
        let plain = encoder.continuation("the man", " is").unwrap().ok().unwrap();
        assert_eq!(plain.ids[..2], [2040, 2042]);
        assert_eq!(encoder.continuation("[gMASK]<sop>the man", " is").unwrap().ok().unwrap(), plain);
        let document = encoder.document("the man").unwrap().ok().unwrap();
        assert_eq!((document.start, &document.ids[..2]), (2, &[2040, 2042][..]));
        assert_eq!(encoder.document("[gMASK]<sop>the man").unwrap().ok().unwrap(), document);
        let bare = self::encoder(&tokenizer, "");
        let bare = bare.document("the man").unwrap().ok().unwrap();
        assert_eq!((bare.start, &bare.ids[..]), (1, &document.ids[2..]));
    }

    #[test]
    fn a_token_across_the_boundary_belongs_to_the_continuation() {
        let tokenizer = nano();
        let encoder = encoder(&tokenizer, "[gMASK]<sop>");
        let ids = |text: &str| tokenizer.encode(text).unwrap();
        // " the" is one token, " t" another: the context's last token is not that of the whole text.
        let (alone, whole) = (ids("[gMASK]<sop>in t"), ids("[gMASK]<sop>in the"));
        assert_ne!(alone[..], whole[..alone.len().min(whole.len())]);
        let encoded = encoder.continuation("in t", "he").unwrap().ok().unwrap();
        let start = alone.iter().zip(&whole).take_while(|(a, b)| a == b).count();
        assert_eq!((encoded.ids, encoded.start), (whole, start));
        assert!(start < alone.len());
    }

    #[test]
    fn bad_texts_and_requests_are_told() {
        let tokenizer = nano();
        let encoder = encoder(&tokenizer, "[gMASK]<sop>");
        let bare = self::encoder(&tokenizer, "");
        assert_eq!(reason(encoder.continuation("a", "").unwrap()), "row 3: the continuation has no token");
        assert!(reason(bare.continuation("", "a").unwrap()).starts_with("row 3: no token stands before"));
        assert!(reason(bare.document("a").unwrap()).starts_with("row 3: no token stands before"));
        let long = encoder.document(&"the ".repeat(20)).unwrap();
        assert_eq!(reason(long), "row 3 has 23 tokens, the model takes at most 12");
        assert_eq!(encoder.request("2 1 2040 2042 7").ok().unwrap(), Encoded { ids: vec![2040, 2042, 7], start: 2 });
        for (line, expected) in [
            ("", "row 3: expected `ctxlen contlen id…`, found \"\""),
            ("1", "row 3: expected `ctxlen contlen id…`, found \"1\""),
            ("1 1 2 x", "row 3: expected `ctxlen contlen id…`, found \"1 1 2 x\""),
            ("1 1 2 -3", "row 3: expected `ctxlen contlen id…`, found \"1 1 2 -3\""),
            ("1 1 2 3.0", "row 3: expected `ctxlen contlen id…`, found \"1 1 2 3.0\""),
            ("2 1 4 5", "row 3: expected 3 ids after `2 1`, found 2"),
            ("1 1 4 5 6", "row 3: expected 2 ids after `1 1`, found 3"),
            ("18446744073709551615 1 4", "row 3: expected fewer ids after `18446744073709551615 1`, found 1"),
            ("1 0 4", "row 3: the continuation has no token"),
            ("0 1 4", "row 3: no token stands before the continuation, so its first token has no probability"),
            ("0 0", "row 3: the continuation has no token"),
            ("1 1 4 2048", "row 3: token id 2048 is not below vocab_size 2048"),
            ("1 1 99999999999 4", "row 3: token id 99999999999 is not below vocab_size 2048"),
            ("12 1 1 1 1 1 1 1 1 1 1 1 1 1 1", "row 3 has 13 tokens, the model takes at most 12"),
        ] {
            assert_eq!(reason(encoder.request(line)), expected);
        }
    }

    proptest::proptest! {
        #[test]
        fn any_line_is_a_sound_request_or_none(line in "([0-9]{1,2} ){0,8}.{0,4}") {
            static TOKENIZER: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
            let tokenizer = TOKENIZER.get_or_init(nano);
            if let Ok(Encoded { ids, start }) = encoder(tokenizer, "").request(&line) {
                proptest::prop_assert!((1..ids.len()).contains(&start) && ids.len() <= 12);
                let again = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
                let (context, rest) = (start, ids.len() - start);
                let words: Vec<u64> = line.split_ascii_whitespace().map(|word| word.parse().unwrap()).collect();
                proptest::prop_assert_eq!(&words[..2], &[context as u64, rest as u64][..]);
                proptest::prop_assert!(line.split_ascii_whitespace().skip(2).map(|word| word.parse::<u32>().unwrap().to_string()).collect::<Vec<_>>().join(" ") == again);
            }
        }
    }
}
