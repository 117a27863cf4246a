//! The chat template of a model: messages to the text of a prompt.
//!
//! It is Jinja, as transformers' `apply_chat_template` renders it: blocks take the line end after them and the blanks before
//! them along, Python's methods of strings, lists and dicts are there, and so are `raise_exception`, `strftime_now`, `tojson`
//! and `%`. What is no text is printed as Python prints it. `jinja` renders, `bounds` says how much a template may make.

mod bounds;
mod jinja;
mod python;
#[cfg(test)]
mod written;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use chrono::{DateTime, Local};
use minijinja::Value;
use serde::Serialize;

use crate::config::parse_object;
use crate::error::{Fault, FaultKind, Place, Result};
use crate::io::read_small;
use crate::limits;

/// Name of the file that holds nothing but the template.
pub const CHAT_TEMPLATE_FILE: &str = "chat_template.jinja";
/// Name of the file that may hold it under a key, and the special tokens that it may ask for.
pub const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";
/// The key.
const KEY: &str = "chat_template";

/// What someone says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    /// What they say.
    pub content: String,
}

/// The chat template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    /// The file that holds it.
    path: PathBuf,
    source: String,
    /// The spelling of special tokens, for one of `eos_token`.
    tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Reads the template of a directory: chat_template.jinja, or without it `chat_template` of tokenizer_config.json, of
    /// several the one named `default`.
    pub fn load(directory: &Path) -> Result<ChatTemplate> {
        let config_path = directory.join(TOKENIZER_CONFIG_FILE);
        let config = match config_path.exists() {
            true => parse_object(&config_path, &read_small(&config_path, limits::MAX_TEMPLATE_BYTES)?)?,
            false => serde_json::Map::new(),
        };
        let tokens = config.iter().filter(|(key, _)| key.ends_with("_token"));
        let spelled = |value: &serde_json::Value| value.as_str().or(value["content"].as_str()).map(str::to_owned);
        let tokens = tokens.filter_map(|(key, value)| Some((key.clone(), spelled(value)?))).collect();
        let path = directory.join(CHAT_TEMPLATE_FILE);
        if path.exists() {
            let bytes = read_small(&path, limits::MAX_TEMPLATE_BYTES)?;
            let source = String::from_utf8(bytes).map_err(|e| {
                let kind = FaultKind::ChatTemplate { line: None, message: e.to_string() };
                Fault::new(Place::file(&path), kind)
            })?;
            return Ok(ChatTemplate { path, source, tokens });
        }
        let value = match config.get(KEY) {
            None | Some(serde_json::Value::Null) => {
                return Err(Fault::new(Place::file(directory), FaultKind::NoChatTemplate));
            }
            Some(value) => value,
        };
        let named = |list: &Vec<serde_json::Value>| {
            let default = list.iter().find(|entry| entry["name"] == "default")?;
            Some(default["template"].as_str()?.to_owned())
        };
        match value.as_str().map(str::to_owned).or_else(|| named(value.as_array()?)) {
            Some(source) => Ok(ChatTemplate { path: config_path, source, tokens }),
            None => {
                let expected = "a template, or a list of named ones with one named default".to_owned();
                let kind = FaultKind::ConfigValue { key: KEY, expected, found: value.to_string() };
                Err(Fault::new(Place::file(config_path), kind))
            }
        }
    }

    /// The prompt after which the model says what the assistant says.
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        self.render_at(messages, Local::now(), limits::MAX_TEMPLATE_MADE_BYTES)
    }

    /// The same at another time, within so many bytes.
    fn render_at(&self, messages: &[Message], now: DateTime<Local>, bytes: u64) -> Result<String> {
        let mut context: BTreeMap<String, Value> =
            self.tokens.iter().map(|(key, token)| (key.clone(), Value::from(token.as_str()))).collect();
        context.insert("messages".to_owned(), Value::from_serialize(messages));
        context.insert("add_generation_prompt".to_owned(), true.into());
        context.insert("tools".to_owned(), ().into());
        context.insert("documents".to_owned(), ().into());
        let text = jinja::render(&self.source, &context, now, bytes).map_err(|failure| {
            let kind = FaultKind::ChatTemplate { line: failure.line, message: failure.message };
            Fault::new(Place::file(&self.path), kind)
        })?;
        if text.is_empty() {
            let kind = FaultKind::ChatTemplate { line: None, message: "it writes nothing".to_owned() };
            return Err(Fault::new(Place::file(&self.path), kind));
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn messages() -> Vec<Message> {
        let message = |role, content: &str| Message { role, content: content.to_owned() };
        vec![message("system", "Be brief."), message("user", "{{ 1 }} <b>")]
    }

    /// A directory with these files.
    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    fn rendered(files: &[(&str, &str)]) -> Result<String, String> {
        let directory = directory(files);
        let template = ChatTemplate::load(directory.path());
        let text = template.and_then(|template| template.render(&messages()));
        text.map_err(|fault| fault.to_string().replace(directory.path().to_str().unwrap(), "M"))
    }

    fn of(template: &str) -> Result<String, String> {
        rendered(&[(CHAT_TEMPLATE_FILE, template)])
    }

    #[test]
    fn nano_has_one() {
        let template = ChatTemplate::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nano")).unwrap();
        let text = template.render(&messages()).unwrap();
        assert_eq!(text, "[gMASK]<sop><|system|>Be brief.<|user|>{{ 1 }} <b><|assistant|>");
    }

    #[test]
    fn the_file_comes_before_the_key() {
        let config = r#"{"chat_template": "key {{ eos_token }}{{ pad_token }}", "eos_token": "<e>", "pad_token": {"content": "<p>"}}"#;
        assert_eq!(rendered(&[(TOKENIZER_CONFIG_FILE, config)]).unwrap(), "key <e><p>");
        let both = [(TOKENIZER_CONFIG_FILE, config), (CHAT_TEMPLATE_FILE, "file {{ eos_token }}")];
        assert_eq!(rendered(&both).unwrap(), "file <e>");
        let named = r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}"#;
        assert_eq!(rendered(&[(TOKENIZER_CONFIG_FILE, named)]).unwrap(), "d");
        assert_eq!(of("{# #}").unwrap_err(), "M/chat_template.jinja: the chat template fails: it writes nothing");
    }

    #[test]
    fn templates_are_rendered_as_transformers_does() {
        let text = "{% for m in messages %}\n  {%- if m.role == 'user' %}\n    U {{ m['content'].strip().split(' ')[-1] }}\n  {% endif %}\n{% endfor %}\n";
        assert_eq!(of(text).unwrap(), "    U <b>\n");
        let text = "{%- set ns = namespace(n=0) %}{%- for m in messages %}{%- set ns.n = loop.index0 %}{%- endfor %}{{ ns.n }}{{ messages[0].missing }}{{ tools is none }}";
        assert_eq!(of(text).unwrap(), "1True");
        let text = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role.upper() }}{{ m.items() | length }}{% endfor %}";
        assert_eq!(of(text).unwrap(), "USER2");
    }

    #[test]
    fn what_fails_is_told_with_its_line() {
        for (template, expected) in [
            ("\n\n{{ messages", "M/chat_template.jinja: line 3: the chat template fails: "),
            (
                "a\n{{ raise_exception('no ' ~ messages[0].role) }}",
                "M/chat_template.jinja: line 2: the chat template fails: no system",
            ),
            (
                "{{ tools | batch(2) }}",
                "M/chat_template.jinja: line 1: the chat template fails: filter batch is unknown",
            ),
            (
                "{% macro m() %}\n{{ none.x.y }}{% endmacro %}\n\n{{ m() }}",
                "M/chat_template.jinja: line 2: the chat template fails: undefined value",
            ),
            (
                "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                "M/chat_template.jinja: line 1: the chat template fails: engine ran out of fuel",
            ),
            (
                "{% for i in range(20) %}{{ 'x' * 1000000 }}{% endfor %}",
                "M/chat_template.jinja: the chat template fails: the prompt has more than 16777216 bytes",
            ),
        ] {
            let message = of(template).unwrap_err();
            assert!(message.starts_with(expected), "{message}");
        }
    }

    #[test]
    fn what_is_no_template_is_refused() {
        for (files, expected) in [
            (
                &[][..],
                "M: the model has no chat template: neither chat_template.jinja nor `chat_template` of tokenizer_config.json is there",
            ),
            (&[(TOKENIZER_CONFIG_FILE, "{}")], "M: the model has no chat template: neither"),
            (&[(TOKENIZER_CONFIG_FILE, "[")], "M/tokenizer_config.json: the file does not parse: "),
            (
                &[(TOKENIZER_CONFIG_FILE, r#"{"chat_template": 7}"#)],
                "M/tokenizer_config.json: `chat_template` is 7, expected a template",
            ),
            (
                &[(TOKENIZER_CONFIG_FILE, r#"{"chat_template": [{"name": "rag", "template": "r"}]}"#)],
                "M/tokenizer_config.json: `chat_template` is [",
            ),
        ] {
            let message = rendered(files).unwrap_err();
            assert!(message.starts_with(expected), "{message}");
        }
        let directory = directory(&[]);
        fs::write(directory.path().join(CHAT_TEMPLATE_FILE), [0xff]).unwrap();
        let message = ChatTemplate::load(directory.path()).unwrap_err().to_string();
        assert!(message.contains("the chat template fails: invalid utf-8"), "{message}");
    }
}
