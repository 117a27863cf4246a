//! JSON objects read with every member kept, so that duplicates are seen and values can be passed on byte for byte.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::error::escaped;

/// The members of a JSON object in the order in which they stand, duplicates included; values are still text.
#[derive(Debug)]
pub struct Object<'a>(pub Vec<(String, &'a RawValue)>);

impl<'a> Object<'a> {
    /// Parses the members of an object; each value is checked to be JSON, but not read.
    pub fn parse(text: &'a str) -> serde_json::Result<Object<'a>> {
        serde_json::from_str(text)
    }

    /// The value of a member; of duplicates the first.
    pub fn get(&self, key: &str) -> Option<&'a RawValue> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| *v)
    }

    /// The keys that appear more than once, each time but the first.
    pub fn duplicates(&self) -> Vec<&str> {
        let mut seen = HashSet::new();
        self.0.iter().map(|(key, _)| key.as_str()).filter(|key| !seen.insert(*key)).collect()
    }

    /// `text`, from which the object was parsed, without the first member of that key and its comma; every other byte stays.
    pub fn text_without(&self, text: &str, key: &str) -> String {
        let Some(number) = self.0.iter().position(|(k, _)| k == key) else { return text.to_owned() };
        let span = |value: &RawValue| {
            let begin = value.get().as_ptr() as usize - text.as_ptr() as usize;
            (begin, begin + value.get().len())
        };
        let (_, end) = span(self.0[number].1);
        let (begin, end) = match number.checked_sub(1) {
            // From the end of the value before: the comma behind that goes too.
            Some(before) => (span(self.0[before].1).1, end),
            None => {
                let begin = text.find('{').map_or(0, |brace| brace + 1);
                let comma = text[end..].find(',').filter(|_| self.0.len() > 1);
                (begin, end + comma.map_or(0, |comma| comma + 1))
            }
        };
        format!("{}{}", &text[..begin], &text[end..])
    }
}

/// Deepest nesting in which [`repeated_key`] looks: as deep as serde_json reads values.
const DEPTH: usize = 128;

/// The first key that an object repeats, with the keys that lead to it: `rope_parameters.rope_theta`.
pub fn repeated_key(text: &str) -> Option<String> {
    repeated_within(text, DEPTH)
}

fn repeated_within(text: &str, depth: usize) -> Option<String> {
    let depth = depth.checked_sub(1)?;
    match text.trim_start().as_bytes().first()? {
        b'{' => {
            let object = Object::parse(text).ok()?;
            if let Some(key) = object.duplicates().first() {
                return Some((*key).to_owned());
            }
            let inner =
                |(key, value): &(String, &RawValue)| Some(format!("{key}.{}", repeated_within(value.get(), depth)?));
            object.0.iter().find_map(inner)
        }
        b'[' => {
            let values: Vec<&RawValue> = serde_json::from_str(text).ok()?;
            values.iter().find_map(|value| repeated_within(value.get(), depth))
        }
        _ => None,
    }
}

/// For `deserialize_with`: a map whose keys do not repeat. A plain `BTreeMap` keeps the last of several values silently.
pub fn unique_map<'de, D, K, V>(deserializer: D) -> Result<BTreeMap<K, V>, D::Error>
where
    D: Deserializer<'de>,
    K: Deserialize<'de> + Ord + fmt::Display,
    V: Deserialize<'de>,
{
    struct Members<K, V>(PhantomData<(K, V)>);
    impl<'de, K, V> Visitor<'de> for Members<K, V>
    where
        K: Deserialize<'de> + Ord + fmt::Display,
        V: Deserialize<'de>,
    {
        type Value = BTreeMap<K, V>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = BTreeMap::new();
            while let Some((key, value)) = map.next_entry::<K, V>()? {
                if members.contains_key(&key) {
                    return Err(A::Error::custom(format!("`{}` appears twice", escaped(&key.to_string()))));
                }
                members.insert(key, value);
            }
            Ok(members)
        }
    }
    deserializer.deserialize_map(Members(PhantomData))
}

impl<'de> Deserialize<'de> for Object<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Object<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Object(members))
            }
        }
        deserializer.deserialize_map(Members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicates_and_bytes_are_kept() {
        let object = Object::parse(r#"{"a": 1e-05, "b": [1,  2], "a": 3}"#).unwrap();
        assert_eq!(object.duplicates(), ["a"]);
        assert_eq!(object.get("a").unwrap().get(), "1e-05");
    }

    #[test]
    fn a_member_is_cut_out_and_nothing_else() {
        let cases = [
            ("{\n  \"q\": {\"x\": [1, {}]},\n  \"b\": 1.0e5\n}\n", "{\n  \"b\": 1.0e5\n}\n"),
            (" {\"a\":\"\\u00e9\" , \"q\" : 1 ,\"b\":2}", " {\"a\":\"\\u00e9\" ,\"b\":2}"),
            ("{\"a\": 1,\n\t\"q\": null\n}", "{\"a\": 1\n}"),
            ("{ \"q\": 3 }", "{ }"),
            ("{\"\\u0071\": 3, \"a\": [1,2]}", "{ \"a\": [1,2]}"),
            ("{\"a\": {\"q\": 1}}", "{\"a\": {\"q\": 1}}"),
        ];
        for (text, without) in cases {
            assert_eq!(Object::parse(text).unwrap().text_without(text, "q"), without, "{text}");
        }
    }

    #[test]
    fn repeated_keys_are_found_at_any_depth() {
        assert_eq!(repeated_key(r#"{"a": {"b": [1, {"c": 1, "\u0063": 2}]}}"#).unwrap(), "a.b.c");
        assert_eq!(repeated_key(r#"[{"a": 1}, {"a": 1}, {"a": {"b": 1}, "b": 1}]"#), None);
        assert_eq!(repeated_key("7"), None);
        assert_eq!(repeated_key(&"[".repeat(100_000)), None);
        let map = |text: &str| unique_map::<_, String, u8>(&mut serde_json::Deserializer::from_str(text));
        assert_eq!(map(r#"{"b": 2, "a": 1}"#).unwrap().len(), 2);
        assert!(map(r#"{"a": 1, "a": 1}"#).unwrap_err().to_string().starts_with("`a` appears twice"));
    }

    #[test]
    fn deep_nesting_does_not_overflow_the_stack() {
        let text = format!("{{\"a\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(Object::parse(&text).unwrap().0.len(), 1);
        assert!(Object::parse(&"[".repeat(100_000)).is_err());
        assert!(serde_json::from_str::<serde_json::Value>(&text).is_err());
    }
}
