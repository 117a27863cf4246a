//! Faults: what is wrong, where, what was expected and found, and what to do about it.
//!
//! A [`Fault`] is a [`Place`] and a [`FaultKind`]. As an error it ends a command; as a finding of `inspect` or `verify` it
//! is data. Several faults of one input travel together as [`Faults`], so that a user sees them all at once.

mod hint;
mod kind;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

pub(crate) use kind::counted;
pub use kind::{Count, FaultKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits;
use crate::tensor::TensorName;

/// Result of an operation that stops at its first fault.
pub type Result<T, E = Fault> = std::result::Result<T, E>;

/// Where a fault is; any part may be unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The file.
    pub file: Option<PathBuf>,
    /// The tensor.
    pub tensor: Option<TensorName>,
    /// Byte offset in the file.
    pub offset: Option<u64>,
}

impl Place {
    /// A whole file.
    pub fn file(path: impl Into<PathBuf>) -> Place {
        Place { file: Some(path.into()), ..Place::default() }
    }

    /// A tensor of a file.
    pub fn tensor(path: impl Into<PathBuf>, tensor: impl Into<TensorName>) -> Place {
        Place { file: Some(path.into()), tensor: Some(tensor.into()), offset: None }
    }

    /// A tensor, wherever it is or should be.
    pub fn name(tensor: impl Into<TensorName>) -> Place {
        Place { file: None, tensor: Some(tensor.into()), offset: None }
    }

    /// The same place, at a byte offset of the file.
    pub fn at(self, offset: u64) -> Place {
        Place { offset: Some(offset), ..self }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        if let Some(file) = &self.file {
            write!(f, "{}", escaped_whole(&file.to_string_lossy()))?;
            separator = ": ";
        }
        if let Some(tensor) = &self.tensor {
            write!(f, "{separator}tensor {tensor}")?;
            separator = ": ";
        }
        if let Some(offset) = self.offset {
            write!(f, "{separator}byte {offset}")?;
        }
        Ok(())
    }
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The answer is no.
    Error,
    /// Odd, but it works.
    Warning,
    /// Worth knowing.
    Note,
}

impl Severity {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        }
    }
}

/// One thing that is wrong, and where.
#[derive(Debug)]
pub struct Fault {
    /// Where.
    pub place: Place,
    /// What.
    pub kind: Box<FaultKind>,
}

impl Fault {
    /// A fault of that kind at that place.
    pub fn new(place: Place, kind: FaultKind) -> Fault {
        Fault { place, kind: Box::new(kind) }
    }

    /// A failed operation of the operating system on `path`; `action` completes "cannot …".
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Fault {
        Fault::new(Place::file(path), FaultKind::Io { action, source })
    }

    /// What a person can do about it.
    pub fn hint(&self) -> Option<String> {
        self.kind.hint()
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.place != Place::default() {
            write!(f, "{}: ", self.place)?;
        }
        write!(f, "{}", self.kind)
    }
}

impl std::error::Error for Fault {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.kind.source_error()
    }
}

/// One or more faults of one input.
#[derive(Debug)]
pub struct Faults(Vec<Fault>);

impl Faults {
    /// `Ok` when there is no fault.
    pub fn check(faults: Vec<Fault>) -> Result<(), Faults> {
        if faults.is_empty() { Ok(()) } else { Err(Faults(faults)) }
    }

    /// The faults; at least one.
    pub fn iter(&self) -> std::slice::Iter<'_, Fault> {
        self.0.iter()
    }

    /// The same number of others.
    pub fn map(self, of: impl Fn(Fault) -> Fault) -> Faults {
        Faults(self.0.into_iter().map(of).collect())
    }

    /// The faults; at least one.
    pub fn into_vec(self) -> Vec<Fault> {
        self.0
    }
}

impl From<Fault> for Faults {
    fn from(fault: Fault) -> Self {
        Faults(vec![fault])
    }
}

impl fmt::Display for Faults {
    /// The first faults, a line each, and how many more there are.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, fault) in self.0.iter().take(limits::MAX_PRINTED_FINDINGS).enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{fault}")?;
        }
        match self.0.len().saturating_sub(limits::MAX_PRINTED_FINDINGS) {
            0 => Ok(()),
            more => write!(f, "\n… and {more} more ({} in all)", self.0.len()),
        }
    }
}

impl std::error::Error for Faults {}

/// Whether a character is a control character or a mark that reorders or hides text, which is as dangerous on a terminal.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Text from a file, made safe to print: control and formatting characters escaped, very long text cut.
pub fn escaped(text: &str) -> impl fmt::Display + '_ {
    Escaped { text, most: limits::MAX_PRINTED_NAME }
}

/// Text that must not be cut, for one a path, made safe to print.
pub fn escaped_whole(text: &str) -> impl fmt::Display + '_ {
    Escaped { text, most: usize::MAX }
}

/// What another crate says of text from a file, made safe to print: it may quote the text as it is, all of it.
pub(crate) fn escaped_message(text: &str) -> impl fmt::Display + '_ {
    Escaped { text, most: limits::MAX_PRINTED_MESSAGE }
}

struct Escaped<'a> {
    text: &'a str,
    most: usize,
}

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        for (i, c) in self.text.chars().enumerate() {
            if i == self.most {
                return write!(f, "… ({} bytes)", self.text.len());
            }
            if is_unprintable(c) {
                write!(f, "{}", c.escape_default())?;
            } else {
                f.write_char(c)?;
            }
        }
        Ok(())
    }
}

/// A list of names for a message: the first few, and how many more.
pub fn listed<T: fmt::Display>(items: &[T]) -> impl fmt::Display + '_ {
    struct Listed<'a, T>(&'a [T]);
    impl<T: fmt::Display> fmt::Display for Listed<'_, T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            const SHOWN: usize = 20;
            for (i, item) in self.0.iter().take(SHOWN).enumerate() {
                write!(f, "{}{}", if i > 0 { ", " } else { "" }, escaped(&item.to_string()))?;
            }
            match self.0.len().saturating_sub(SHOWN) {
                0 => Ok(()),
                more => write!(f, " and {more} more"),
            }
        }
    }
    Listed(items)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_file_tensor_and_offset() {
        let place = Place::tensor("model.safetensors", "a\tb").at(17);
        let fault = Fault::new(place, FaultKind::TrailingBytes { data_end: 10, file_bytes: 12 });
        assert_eq!(
            fault.to_string(),
            "model.safetensors: tensor a\\tb: byte 17: 2 bytes follow the last tensor, which ends at byte 10 of 12"
        );
    }

    #[test]
    fn many_faults_are_counted() {
        let fault = || Fault::new(Place::file("x"), FaultKind::HeaderNotUtf8);
        let faults = Faults::check((0..25).map(|_| fault()).collect()).unwrap_err();
        let text = faults.to_string();
        assert_eq!(text.lines().count(), 21);
        assert!(text.ends_with("… and 5 more (25 in all)"));
    }

    #[test]
    fn hidden_characters_are_escaped() {
        assert_eq!(escaped("a\u{202e}b\r").to_string(), "a\\u{202e}b\\r");
        assert!(escaped(&"x".repeat(1000)).to_string().ends_with("… (1000 bytes)"));
        let fault = |kind| Fault::new(Place::file("y/".repeat(1000)), kind).to_string();
        let message = "\u{1b}[31mred".to_owned() + &"x".repeat(1000);
        for kind in [
            FaultKind::RecipeSyntax { message: message.clone() },
            FaultKind::JsonSyntax { message: message.clone() },
            FaultKind::IndexSyntax { message: message.clone() },
            FaultKind::HeaderSyntax { message: message.clone() },
            FaultKind::EntrySyntax { message: message.clone() },
            FaultKind::StampSyntax { message: message.clone() },
            FaultKind::Glob { glob: String::new(), message },
        ] {
            let text = fault(kind);
            assert!(text.contains("\\u{1b}[31mred") && !text.contains(char::is_control), "{text}");
            assert!(text.len() > 3000, "neither path nor reason is cut: {text}");
        }
    }
}
