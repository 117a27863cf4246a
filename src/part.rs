//! Slices of a run, for several processes or machines.

use std::fmt;
use std::str::FromStr;

use crate::limits;

/// One of the slices that a run is divided into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    number: usize,
    of: usize,
}

impl Part {
    /// The only part of what is not divided.
    pub const WHOLE: Part = Part { number: 1, of: 1 };

    /// Part `number` of `of`, both counted from 1; `None` beyond `of` or [`limits::MAX_PARTS`].
    pub fn new(number: usize, of: usize) -> Option<Part> {
        ((1..=of).contains(&number) && of <= limits::MAX_PARTS).then_some(Part { number, of })
    }

    /// Its number, from 1.
    pub fn number(self) -> usize {
        self.number
    }

    /// How many parts there are.
    pub fn of(self) -> usize {
        self.of
    }

    /// Whether the item of this rank, counted from 0, is the part's.
    pub fn has(self, rank: usize) -> bool {
        rank % self.of == self.number - 1
    }

    /// Its name within file names: `2-of-8`.
    pub fn file_text(self) -> String {
        format!("{}-of-{}", self.number, self.of)
    }

    /// The part of that name within file names.
    pub fn from_file_text(text: &str) -> Option<Part> {
        let (number, of) = text.split_once("-of-")?;
        Part::new(number.parse().ok()?, of.parse().ok()?).filter(|part| part.file_text() == text)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.of)
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Part, String> {
        let part = text.split_once('/').and_then(|(number, of)| Part::new(number.parse().ok()?, of.parse().ok()?));
        part.ok_or_else(|| format!("expected K/N with K from 1 to N and N at most {}", limits::MAX_PARTS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_counted_from_one() {
        let part: Part = "2/8".parse().unwrap();
        assert_eq!(
            (part.number(), part.of(), part.to_string(), part.file_text()),
            (2, 8, "2/8".into(), "2-of-8".into())
        );
        for text in ["0/8", "9/8", "1/0", "1", "1/2/3", "-1/2", "a/b", "1/100000", " 1/2", ""] {
            assert!(text.parse::<Part>().is_err(), "{text}");
        }
        let of_three: Vec<bool> = (0..6).map(|rank| Part::new(2, 3).unwrap().has(rank)).collect();
        assert_eq!(of_three, [false, true, false, false, true, false]);
    }
}
