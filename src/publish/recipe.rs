//! The command that makes a container again, from what its manifest says.

use super::shell::quoted;
use crate::container::manifest::Manifest;
use crate::recipe::Settings;
use crate::roles::Pass;

/// Name of the recipe file in the command.
pub const RECIPE_FILE: &str = "recipe.json";

/// The command of a conversion, and the text of the recipe file that it wants, if it wants one.
pub fn command(manifest: &Manifest) -> (String, Option<String>) {
    let has = |pass: Pass| manifest.passes.contains_key(pass.name());
    let mut words = vec!["coliconv convert CHECKPOINT CONTAINER".to_owned()];
    words.extend(flags(&manifest.recipe));
    let recipe = (!manifest.recipe.rules.is_empty()).then(|| {
        words.push(format!("--recipe {RECIPE_FILE}"));
        let rules = Settings { rules: manifest.recipe.rules.clone(), ..Settings::default() };
        serde_json::to_string_pretty(&rules).expect("plain data")
    });
    if has(Pass::Main) {
        words.extend(has(Pass::Mtp).then(|| "--mtp".to_owned()));
        words.extend(has(Pass::Indexer).then(|| "--indexer".to_owned()));
    } else {
        words.extend(Pass::ALL.into_iter().filter(|&pass| has(pass)).map(|pass| format!("--only {}", pass.name())));
    }
    let accepted = |kind: &str| manifest.warnings.iter().any(|warning| warning.kind == kind);
    words.extend(accepted("misread").then(|| "--allow-ambiguous".to_owned()));
    words.extend(accepted("non-finite-zeroed").then(|| "--allow-non-finite".to_owned()));
    (words.join(" "), recipe)
}

/// The flags of settings, those that were given.
fn flags(settings: &Settings) -> Vec<String> {
    let s = settings;
    let bits = [
        ("--ebits", s.ebits),
        ("--xbits", s.xbits),
        ("--io-bits", s.io_bits),
        ("--shared-bits", s.shared_bits),
        ("--o-bits", s.o_bits),
        ("--kvb-bits", s.kvb_bits),
        ("--attn-bits", s.attn_bits),
        ("--dmlp-bits", s.dmlp_bits),
        ("--gate-bits", s.gate_bits),
        ("--up-bits", s.up_bits),
        ("--down-bits", s.down_bits),
    ];
    let group_size = s.group_size.map(|size| format!("--group-size {}", quoted(&size.to_string())));
    let bits = bits.into_iter().filter_map(|(flag, bits)| Some(format!("{flag} {}", bits?)));
    group_size.into_iter().chain(bits).collect()
}
