//! The YAML at the top of a model card: read from the source's card, and written for the container's.

use std::path::Path;

use saphyr::{LoadableYamlNode, Yaml};

use crate::error::{Fault, FaultKind, Place, Result};

/// The line before and after the YAML.
const FENCE: &str = "---";

/// What the source's card says of itself; every value is a list, of one where the card has a single text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Front {
    /// `license`: an identifier of the Hub.
    pub license: Option<String>,
    /// More of them, where `license` is a list.
    pub more_licenses: Vec<String>,
    /// `license_name`, for licences that the Hub does not list.
    pub license_name: Option<String>,
    /// `license_link`.
    pub license_link: Option<String>,
    /// `base_model`.
    pub base_model: Vec<String>,
    /// `language`.
    pub language: Vec<String>,
    /// `pipeline_tag`.
    pub pipeline_tag: Option<String>,
}

impl Front {
    /// Reads the YAML of a card; without any everything is unknown. `path` is for messages only.
    pub fn parse(path: &Path, card: &str) -> Result<Front> {
        let syntax = |message: String| Fault::new(Place::file(path), FaultKind::CardSyntax { message });
        let yaml = match block(card) {
            Block::None => return Ok(Front::default()),
            Block::Open => return Err(syntax(format!("the first line is {FENCE}, and no other line closes it"))),
            Block::Closed(yaml) => yaml,
        };
        let documents = Yaml::load_from_str(yaml).map_err(|e| syntax(e.to_string()))?;
        let Some(document) = documents.first() else { return Ok(Front::default()) };
        if document.as_mapping().is_none() {
            return Err(syntax("expected keys with values".to_owned()));
        }
        let list = |key| texts(document.as_mapping_get(key));
        let one = |key| list(key).into_iter().next();
        Ok(Front {
            license: one("license"),
            more_licenses: list("license").into_iter().skip(1).collect(),
            license_name: one("license_name"),
            license_link: one("license_link"),
            base_model: list("base_model"),
            language: list("language"),
            pipeline_tag: one("pipeline_tag"),
        })
    }
}

/// A text, or the texts of a list.
fn texts(value: Option<&Yaml>) -> Vec<String> {
    let Some(value) = value else { return Vec::new() };
    let one = |value: &Yaml| value.as_str().map(str::to_owned);
    match value.as_sequence() {
        Some(list) => list.iter().filter_map(one).collect(),
        None => one(value).into_iter().collect(),
    }
}

/// What stands between the fences.
enum Block<'a> {
    /// There are none.
    None,
    /// The second is missing.
    Open,
    /// The text.
    Closed(&'a str),
}

fn block(card: &str) -> Block<'_> {
    let text = card.strip_prefix('\u{feff}').unwrap_or(card);
    let rest = text.strip_prefix(FENCE).and_then(|rest| rest.strip_prefix("\r\n").or_else(|| rest.strip_prefix('\n')));
    let Some(rest) = rest else { return Block::None };
    let mut end = 0;
    for line in rest.split_inclusive('\n') {
        if line.trim_end() == FENCE {
            return Block::Closed(&rest[..end]);
        }
        end += line.len();
    }
    Block::Open
}

/// Writes YAML line by line. Texts are written as JSON, which YAML contains.
#[derive(Debug, Default)]
pub struct Writer(String);

impl Writer {
    /// A key with a text.
    pub fn text(&mut self, key: &str, value: &str) {
        self.0 += &format!("{key}: {}\n", word(value));
    }

    /// A key with a number.
    pub fn number(&mut self, key: &str, value: u64) {
        self.0 += &format!("{key}: {value}\n");
    }

    /// A key with a list; nothing for an empty one.
    pub fn list(&mut self, key: &str, values: &[String]) {
        if !values.is_empty() {
            self.0 += &format!("{key}:\n");
            self.0.extend(values.iter().map(|value| format!("- {}\n", word(value))));
        }
    }

    /// The lines between the fences, and both fences.
    pub fn finish(self) -> String {
        format!("{FENCE}\n{}{FENCE}\n", self.0)
    }
}

/// A text as YAML: bare where no reader can take it for anything else.
fn word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    let bare = text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(plain);
    let keyword = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"].contains(&&*text.to_lowercase());
    if bare && !keyword { text.to_owned() } else { serde_json::to_string(text).expect("a text") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(card: &str) -> Result<Front> {
        Front::parse(Path::new("README.md"), card)
    }

    #[test]
    fn what_a_card_says_is_read() {
        let card = "---\nlicense: mit\nlanguage:\n  - en\n  - zh\nbase_model: zai-org/GLM-5.2 # same\nx: {y: [1]}\n---\n# GLM\n";
        let front = parse(card).unwrap();
        assert_eq!(front.license.as_deref(), Some("mit"));
        assert_eq!(
            (front.language, front.base_model),
            (vec!["en".into(), "zh".into()], vec!["zai-org/GLM-5.2".into()])
        );
        for none in ["", "# GLM\n", "--- \nx", "---\n---\n"] {
            assert_eq!(parse(none).unwrap(), Front::default(), "{none}");
        }
        assert_eq!(parse("\u{feff}---\r\nlicense: mit\r\n---\r\n").unwrap().license.as_deref(), Some("mit"));
    }

    #[test]
    fn several_licences_are_kept() {
        let front = parse("---\nlicense: [mit, apache-2.0]\n---\n").unwrap();
        assert_eq!((front.license.as_deref(), front.more_licenses), (Some("mit"), vec!["apache-2.0".to_owned()]));
    }

    #[test]
    fn broken_yaml_is_told() {
        for card in
            ["---\nlicense: mit\n", "---\na: [1\n---\n", "---\n- a\n---\n", "---\na: b: c\n---\n", "---\n\"\n---\n"]
        {
            assert!(matches!(*parse(card).unwrap_err().kind, FaultKind::CardSyntax { .. }), "{card}");
        }
        assert!(parse(&format!("---\na: {}\n---\n", "[".repeat(100_000))).is_err());
    }

    #[test]
    fn what_is_written_reads_back() {
        let texts = ["mit", "no", "a: b", "- x", "it's \"q\"\n#", "1e3", "", "zai-org/GLM-5.2", "日本", "@x", "~"];
        let mut writer = Writer::default();
        writer.list("language", &texts.map(str::to_owned));
        writer.text("license", "null");
        writer.number("n", 3);
        writer.list("base_model", &[]);
        let front = parse(&writer.finish()).unwrap();
        assert_eq!(front.language, texts);
        assert_eq!((front.license.as_deref(), front.base_model.len()), (Some("null"), 0));
    }
}
