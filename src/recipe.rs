//! Which class gets which format: bit flags, group size, and rules of a recipe file.
//!
//! Flags and recipe have the same keys. A rule names tensors by a glob and gives them a format; the first that matches wins.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use globset::{Glob, GlobMatcher};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::format::{Format, GROUP_SIZES};
use crate::io::read_small;
use crate::json::Object;
use crate::limits;
use crate::quantize::Quantizer;
use crate::roles::{Class, Pass, Projection, Role};
use crate::tensor::TensorName;

/// Elements that share a scale: a number, or the whole row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a group size is a number of elements or \"row\"")]
pub enum GroupSize {
    /// So many; 0 means the row.
    Elements(u64),
    /// The whole row.
    Row(RowWord),
}

/// The word `row`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RowWord {
    /// `row`
    Row,
}

impl GroupSize {
    /// One scale a row.
    pub const ROW: GroupSize = GroupSize::Row(RowWord::Row);

    /// Elements of a group, `None` for the whole row.
    pub fn elements(self) -> Option<u64> {
        match self {
            GroupSize::Elements(0) | GroupSize::Row(_) => None,
            GroupSize::Elements(elements) => Some(elements),
        }
    }
}

impl std::str::FromStr for GroupSize {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "row" { Ok(GroupSize::ROW) } else { text.parse().map(GroupSize::Elements) }
    }
}

impl fmt::Display for GroupSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.elements() {
            Some(elements) => write!(f, "{elements}"),
            None => f.write_str("row"),
        }
    }
}

/// What a user sets, on the command line or in a recipe file; what is absent has its default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(title = "coliconv recipe")]
pub struct Settings {
    /// Elements that share a scale in int4; default 64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_size: Option<GroupSize>,
    /// Bits of every class that has no flag of its own; default 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 8))]
    pub ebits: Option<u32>,
    /// Bits of the routed experts; default `ebits`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 8))]
    pub xbits: Option<u32>,
    /// Bits of embedding and output head; default 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 8))]
    pub io_bits: Option<u32>,
    /// Bits of the shared experts; default `ebits`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 8))]
    pub shared_bits: Option<u32>,
    /// Bits of `o_proj`; default `ebits`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 8))]
    pub o_bits: Option<u32>,
    /// Bits of `kv_b_proj`; default `ebits`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 8))]
    pub kvb_bits: Option<u32>,
    /// Bits of the other attention projections; default `ebits`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 8))]
    pub attn_bits: Option<u32>,
    /// Bits of the dense layers' MLP; default `ebits`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 8))]
    pub dmlp_bits: Option<u32>,
    /// Bits of the routed experts' `gate_proj`; default `xbits`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 8))]
    pub gate_bits: Option<u32>,
    /// Bits of the routed experts' `up_proj`; default `xbits`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 8))]
    pub up_bits: Option<u32>,
    /// Bits of the routed experts' `down_proj`; default `xbits`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 8))]
    pub down_bits: Option<u32>,
    /// Formats of single tensors; the first rule that matches wins.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
}

/// A format for the tensors that a glob matches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Glob over whole tensor names: `*` any run of characters, `?` one, `[…]` one of a set, `{a,b}` alternatives.
    pub tensor: String,
    /// `f32`, `int8-row`, `int4-row`, `int4-grouped`, `int3-g64` or `int2-row`.
    pub format: String,
    /// Elements that share a scale; with `int4-grouped` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_size: Option<u64>,
}

impl Settings {
    /// Reads a recipe file.
    pub fn read(path: &Path) -> Result<Settings> {
        Settings::parse(path, &read_small(path, limits::MAX_CONFIG_BYTES)?)
    }

    /// Parses the text of a recipe; `path` is for messages only.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Settings> {
        let fault = |message: String| Fault::new(Place::file(path), FaultKind::RecipeSyntax { message });
        let text = std::str::from_utf8(bytes).map_err(|e| fault(e.to_string()))?;
        // Left to itself serde would also take lists, with members by their position.
        let object = Object::parse(text).map_err(|e| fault(e.to_string()))?;
        if let Some(rules) = object.get("rules") {
            serde_json::from_str::<Vec<Object<'_>>>(rules.get()).map_err(|e| fault(format!("`rules`: {e}")))?;
        }
        serde_json::from_str(text).map_err(|e| fault(e.to_string()))
    }

    /// These flags and a recipe together; a setting that both give must be the same.
    pub fn with_recipe(self, recipe: Settings) -> Result<Settings, Faults> {
        let mut faults = Vec::new();
        let group_size = either("--group-size", self.group_size, recipe.group_size, &mut faults);
        let mut bits = |flag, ours, theirs| either(flag, ours, theirs, &mut faults);
        let settings = Settings {
            group_size,
            ebits: bits("--ebits", self.ebits, recipe.ebits),
            xbits: bits("--xbits", self.xbits, recipe.xbits),
            io_bits: bits("--io-bits", self.io_bits, recipe.io_bits),
            shared_bits: bits("--shared-bits", self.shared_bits, recipe.shared_bits),
            o_bits: bits("--o-bits", self.o_bits, recipe.o_bits),
            kvb_bits: bits("--kvb-bits", self.kvb_bits, recipe.kvb_bits),
            attn_bits: bits("--attn-bits", self.attn_bits, recipe.attn_bits),
            dmlp_bits: bits("--dmlp-bits", self.dmlp_bits, recipe.dmlp_bits),
            gate_bits: bits("--gate-bits", self.gate_bits, recipe.gate_bits),
            up_bits: bits("--up-bits", self.up_bits, recipe.up_bits),
            down_bits: bits("--down-bits", self.down_bits, recipe.down_bits),
            rules: recipe.rules,
        };
        Faults::check(faults)?;
        Ok(settings)
    }

    /// These settings with the rules of others that they lack behind their own.
    pub fn with_rules_of(mut self, other: &Settings) -> Settings {
        for rule in &other.rules {
            if !self.rules.contains(rule) {
                self.rules.push(rule.clone());
            }
        }
        self
    }
}

fn either<T: PartialEq + fmt::Display>(
    flag: &'static str,
    on_line: Option<T>,
    in_recipe: Option<T>,
    faults: &mut Vec<Fault>,
) -> Option<T> {
    if let (Some(a), Some(b)) = (&on_line, &in_recipe)
        && a != b
    {
        let (flag_value, recipe_value) = (a.to_string(), b.to_string());
        faults.push(Fault::new(Place::default(), FaultKind::RecipeConflict { flag, flag_value, recipe_value }));
    }
    on_line.or(in_recipe)
}

/// Settings with every default filled in and every rule compiled.
#[derive(Debug)]
pub struct Recipe {
    group_size: Option<u64>,
    bits: BTreeMap<&'static str, (&'static str, u32)>,
    rules: Vec<(Rule, GlobMatcher, Quantizer)>,
}

impl Recipe {
    /// Resolves and checks settings.
    pub fn new(settings: &Settings) -> Result<Recipe, Faults> {
        let s = settings;
        let ebits = s.ebits.unwrap_or(4);
        let xbits = s.xbits.unwrap_or(ebits);
        // Class or projection, the flag to name when its bits are wrong, the bits.
        let own = |flag: &'static str, own: Option<u32>, from: &'static str, default: u32| match own {
            Some(bits) => (flag, bits),
            None => (from, default),
        };
        let x_flag = if s.xbits.is_some() { "--xbits" } else { "--ebits" };
        let bits = BTreeMap::from([
            ("io", own("--io-bits", s.io_bits, "--io-bits", 8)),
            ("sh", own("--shared-bits", s.shared_bits, "--ebits", ebits)),
            ("o", own("--o-bits", s.o_bits, "--ebits", ebits)),
            ("kvb", own("--kvb-bits", s.kvb_bits, "--ebits", ebits)),
            ("attn", own("--attn-bits", s.attn_bits, "--ebits", ebits)),
            ("dmlp", own("--dmlp-bits", s.dmlp_bits, "--ebits", ebits)),
            ("gate", own("--gate-bits", s.gate_bits, x_flag, xbits)),
            ("up", own("--up-bits", s.up_bits, x_flag, xbits)),
            ("down", own("--down-bits", s.down_bits, x_flag, xbits)),
        ]);
        let group_size = s.group_size.unwrap_or(GroupSize::Elements(64)).elements();
        let mut recipe = Recipe { group_size, bits, rules: Vec::new() };
        let mut faults = recipe.check_bits(s);
        for rule in &s.rules {
            match compile(rule) {
                Ok((glob, quantizer)) => recipe.rules.push((rule.clone(), glob, quantizer)),
                Err(kind) => faults.push(Fault::new(Place::default(), kind)),
            }
        }
        Faults::check(faults)?;
        Ok(recipe)
    }

    /// Bits that no format has, given or inherited, each once; group sizes that no engine recognizes.
    fn check_bits(&self, settings: &Settings) -> Vec<Fault> {
        let mut flags: BTreeMap<&'static str, u32> = self.bits.values().copied().collect();
        // Flags that every class overrides are checked all the same.
        flags.extend(settings.ebits.map(|bits| ("--ebits", bits)));
        flags.extend(settings.xbits.map(|bits| ("--xbits", bits)));
        let mut faults: Vec<Fault> = flags
            .into_iter()
            .filter_map(|(flag, value)| {
                let reason = match value {
                    0 => "no bits hold no value",
                    1 => "one bit leaves a largest level of 0, and every scale would be infinite",
                    2..=8 => return None,
                    _ => "codes of more than 8 bits would wrap around in their bytes",
                };
                Some(Fault::new(Place::default(), FaultKind::Bits { flag, value, reason }))
            })
            .collect();
        if let Some(found) = self.group_size.filter(|size| !GROUP_SIZES.contains(size)) {
            faults.push(Fault::new(Place::default(), FaultKind::GroupSize { found }));
        }
        faults
    }

    /// What a tensor becomes, and the number of the rule that decides it, if one does.
    pub fn quantizer(&self, name: &TensorName, role: &Role) -> Result<(Quantizer, Option<usize>), FaultKind> {
        if !role.matrix {
            return Ok((Quantizer::F32, None));
        }
        if let Some(number) = self.rules.iter().position(|(_, glob, _)| glob.is_match(name.as_str())) {
            return Ok((self.rules[number].2, Some(number)));
        }
        let key = match (role.class, role.expert) {
            (Class::Mtp | Class::Indexer, _) => return Ok((Quantizer::Int8Row { bits: 8 }, None)),
            (_, Some((_, Projection::Gate))) => "gate",
            (_, Some((_, Projection::Up))) => "up",
            (_, Some((_, Projection::Down))) => "down",
            (class, None) => class.name(),
        };
        let (_, bits) = self.bits[key];
        let quantizer = match (bits, self.group_size) {
            (5..=8, _) => Quantizer::Int8Row { bits },
            (4, Some(group_size)) => Quantizer::Int4Grouped { group_size: group_size as usize },
            (4, None) => Quantizer::Int4Row,
            (3, _) => Quantizer::Int3G64,
            (_, Some(group_size)) => return Err(FaultKind::TwoBitsGrouped { class: role.class.name(), group_size }),
            (_, None) => Quantizer::Int2Row,
        };
        Ok((quantizer, None))
    }

    /// The rules.
    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.rules.iter().map(|(rule, _, _)| rule)
    }

    /// What of the recipe decides the bytes of a pass, as comparable text; `rules` are the numbers of those that it uses.
    pub fn parameters(&self, pass: Pass, rules: &[usize]) -> BTreeMap<String, String> {
        let mut parameters = BTreeMap::new();
        if pass == Pass::Main {
            parameters.insert("group_size".to_owned(), self.group_size.map_or("row".into(), |size| size.to_string()));
            for (key, (_, bits)) in &self.bits {
                parameters.insert(format!("{key} bits"), bits.to_string());
            }
        }
        if !rules.is_empty() {
            let used: Vec<&Rule> = rules.iter().map(|&number| &self.rules[number].0).collect();
            parameters.insert("rules".to_owned(), serde_json::to_string(&used).expect("rules are plain data"));
        }
        parameters
    }
}

fn compile(rule: &Rule) -> Result<(GlobMatcher, Quantizer), FaultKind> {
    let glob = Glob::new(&rule.tensor)
        .map_err(|e| FaultKind::Glob { glob: rule.tensor.clone(), message: e.kind().to_string() })?;
    let refused = || FaultKind::RuleFormat {
        glob: rule.tensor.clone(),
        format: rule.format.clone(),
        group_size: rule.group_size,
    };
    let quantizer = match Format::parse(&rule.format, rule.group_size).ok_or_else(refused)? {
        Format::F32 => Quantizer::F32,
        Format::Int8Row => Quantizer::Int8Row { bits: 8 },
        Format::Int4Row => Quantizer::Int4Row,
        Format::Int2Row => Quantizer::Int2Row,
        Format::Int3G64 => Quantizer::Int3G64,
        Format::Int4Grouped { group_size } if GROUP_SIZES.contains(&group_size) => {
            Quantizer::Int4Grouped { group_size: group_size as usize }
        }
        _ => return Err(refused()),
    };
    Ok((glob.compile_matcher(), quantizer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::roles::Census;

    fn census() -> Census {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nano");
        Census::of(&Config::read(&path).unwrap())
    }

    fn quantizer(settings: &Settings, name: &str) -> Result<Quantizer, FaultKind> {
        let recipe = Recipe::new(settings).unwrap();
        recipe.quantizer(&name.into(), census().role(name).unwrap()).map(|(quantizer, _)| quantizer)
    }

    #[test]
    fn defaults_and_overrides() {
        let up = "model.layers.1.mlp.experts.0.up_proj.weight";
        let sh = "model.layers.1.mlp.shared_experts.up_proj.weight";
        let none = Settings::default();
        assert_eq!(quantizer(&none, up).unwrap(), Quantizer::Int4Grouped { group_size: 64 });
        assert_eq!(quantizer(&none, "lm_head.weight").unwrap(), Quantizer::Int8Row { bits: 8 });
        assert_eq!(quantizer(&none, "model.norm.weight").unwrap(), Quantizer::F32);
        assert_eq!(quantizer(&none, "model.layers.4.eh_proj.weight").unwrap(), Quantizer::Int8Row { bits: 8 });
        let row = Settings { group_size: Some(GroupSize::ROW), xbits: Some(2), ebits: Some(5), ..Settings::default() };
        assert_eq!(quantizer(&row, up).unwrap(), Quantizer::Int2Row);
        assert_eq!(quantizer(&row, sh).unwrap(), Quantizer::Int8Row { bits: 5 });
        let three = Settings { xbits: Some(8), up_bits: Some(3), ..Settings::default() };
        assert_eq!(quantizer(&three, up).unwrap(), Quantizer::Int3G64);
        assert!(matches!(
            quantizer(&Settings { up_bits: Some(2), ..Settings::default() }, up),
            Err(FaultKind::TwoBitsGrouped { group_size: 64, .. })
        ));
    }

    #[test]
    fn impossible_settings_are_refused_together() {
        let settings = Settings {
            group_size: Some(GroupSize::Elements(100)),
            ebits: Some(1),
            io_bits: Some(9),
            rules: vec![Rule { tensor: "a[".into(), format: "f32".into(), group_size: None }],
            ..Settings::default()
        };
        let faults = Recipe::new(&settings).unwrap_err();
        let kinds: Vec<&str> = faults.iter().map(|f| f.kind.name()).collect();
        assert_eq!(kinds, ["bits", "bits", "group-size", "glob"]);
    }

    #[test]
    fn flags_and_recipe_must_agree() {
        let flags = Settings { ebits: Some(4), ..Settings::default() };
        let recipe: Settings = serde_json::from_str(r#"{"ebits": 4, "group_size": "row", "xbits": 3}"#).unwrap();
        let both = flags.clone().with_recipe(recipe).unwrap();
        assert_eq!((both.ebits, both.xbits, both.group_size), (Some(4), Some(3), Some(GroupSize::ROW)));
        let fault = flags.with_recipe(Settings { ebits: Some(8), ..Settings::default() }).unwrap_err();
        assert_eq!(fault.to_string(), "--ebits on the command line contradicts the recipe: 4 against 8");
        assert!(serde_json::from_str::<Settings>(r#"{"bits": 4}"#).is_err());
    }

    #[test]
    fn the_first_matching_rule_wins() {
        let rule =
            |tensor: &str, format: &str, group_size| Rule { tensor: tensor.into(), format: format.into(), group_size };
        let settings = Settings {
            rules: vec![
                rule("*.layers.1.*.up_proj.weight", "int4-grouped", Some(32)),
                rule("*.up_proj.weight", "int8-row", None),
            ],
            ..Settings::default()
        };
        let up = |layer| quantizer(&settings, &format!("model.layers.{layer}.mlp.experts.0.up_proj.weight")).unwrap();
        assert_eq!(up(1), Quantizer::Int4Grouped { group_size: 32 });
        assert_eq!(up(2), Quantizer::Int8Row { bits: 8 });
        for (format, size) in
            [("int4-grouped", None), ("int4-grouped", Some(100)), ("int8-row", Some(64)), ("mxfp4", None)]
        {
            let settings = Settings { rules: vec![rule("*", format, size)], ..Settings::default() };
            assert_eq!(Recipe::new(&settings).unwrap_err().iter().next().unwrap().kind.name(), "rule-format");
        }
    }
}
