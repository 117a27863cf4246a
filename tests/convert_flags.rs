//! Flags, recipes and config.json: what cannot be meant is refused, with the fix in the message.

mod support;

use std::fs;

use assert_cmd::Command;
use insta::assert_snapshot;
use serde_json::{Value, json};
use support::convert::{G32, Place, refusal, small, text, weights};
use support::shards::Shards;

/// A change of the small model, with a title.
type Edit = (&'static str, fn(&mut Shards));

fn coliconv() -> Command {
    Command::cargo_bin("coliconv").unwrap()
}

#[test]
fn bits_and_group_sizes() {
    let place = Place::of(&small());
    let told: String = [
        &["--ebits", "0"][..],
        &["--ebits", "1"],
        &["--up-bits", "9"],
        &["--group-size", "32", "--xbits", "2"],
        &["--group-size", "32", "--xbits", "4", "--shared-bits", "2", "--up-bits", "2"],
        &["--group-size", "100"],
        &["--ebits", "1", "--io-bits", "16", "--group-size", "100"],
        &["--ebits", "four"],
    ]
    .into_iter()
    .map(|arguments| format!("## {}\n{}\n", arguments.join(" "), place.refused(arguments)))
    .collect();
    assert_snapshot!(told);
}

#[test]
fn shapes_that_would_be_misread() {
    // Widths of the small model: 96 is misread at groups of 64, and as int3.
    let place = Place::of(&small());
    let only = |lines: &str| {
        lines
            .lines()
            .filter(|line| line.contains("layers.0.") || line.contains("hint"))
            .map(|l| format!("{l}\n"))
            .collect::<String>()
    };
    let mut told = format!("## groups of 64\n{}\n", only(&place.refused(&[])));
    told += &format!("## 3 bits\n{}\n", only(&place.refused(&["--dmlp-bits", "3", "--group-size", "32"])));
    assert_snapshot!(told);
    let arguments = ["--allow-ambiguous", "--mtp"];
    let report = place.json(&arguments);
    let warnings = report["warnings"].as_array().unwrap();
    assert!(!warnings.is_empty() && warnings.iter().all(|warning| warning["kind"] == "misread"));
    let misread = warnings.len();
    let manifest: Value =
        serde_json::from_slice(&fs::read(place.container.join("coliconv.manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["warnings"].as_array().unwrap().len(), misread);
    assert!(text(&Place::of(&small()).output(&arguments).stderr).contains("would be misread"));
}

#[test]
fn passes_that_would_emit_nothing() {
    let mut told = refusal(
        "no MTP layer in config.json",
        |s| {
            s.set_config("num_nextn_predict_layers", json!(0));
            s.retain(|name| !name.contains("layers.3."));
        },
        &["--group-size", "32", "--mtp"],
    );
    let no_mtp = |s: &mut Shards| s.retain(|name| !name.contains("layers.3."));
    told += &refusal("no MTP tensors", no_mtp, &["--group-size", "32", "--mtp"]);
    told += &refusal("no MTP tensors, only mtp", no_mtp, &["--only", "mtp"]);
    told +=
        &refusal("no indexers", |s| s.retain(|name| !name.contains("indexer")), &["--group-size", "32", "--indexer"]);
    assert_snapshot!(told);
}

#[test]
fn config_values() {
    let edits: [Edit; 14] = [
        ("another model", |s| s.set_config("model_type", json!("deepseek_v3"))),
        ("no model_type", |s| s.set_config("model_type", Value::Null)),
        ("other blocks", |s| s.set_config("quantization_config.weight_block_size", json!([64, 128]))),
        ("no blocks", |s| s.set_config("quantization_config.weight_block_size", Value::Null)),
        ("yarn", |s| s.set_config("rope_parameters.rope_type", json!("yarn"))),
        ("linear, by the older key", |s| s.set_config("rope_scaling", json!({"type": "linear", "factor": 4}))),
        ("no rope_parameters", |s| s.set_config("rope_parameters", Value::Null)),
        ("no rope_theta", |s| s.set_config("rope_parameters.rope_theta", Value::Null)),
        ("no norm_topk_prob", |s| s.set_config("norm_topk_prob", Value::Null)),
        ("no routed_scaling_factor", |s| s.set_config("routed_scaling_factor", Value::Null)),
        ("no indexer_types", |s| s.set_config("indexer_types", Value::Null)),
        ("two groups of experts", |s| s.set_config("n_group", json!(2))),
        ("nine stop ids", |s| s.set_config("eos_token_id", json!([1, 2, 3, 4, 5, 6, 7, 8, 9]))),
        ("tied, but a head of its own", |s| s.set_config("tie_word_embeddings", json!(true))),
    ];
    let told: String = edits.into_iter().map(|(title, edit)| refusal(title, edit, &G32)).collect();
    assert_snapshot!(told);
}

#[test]
fn recipes() {
    let place = Place::of(&small());
    let recipe = place.root.path().join("recipe.json");
    let mut told = String::new();
    for text in [
        r#"{"rules": [{"tensor": "model.layers.*.mlp.expert.*", "format": "int8-row"}]}"#,
        r#"{"rules": [{"tensor": "model.norm.weight", "format": "int8-row"}]}"#,
        r#"{"rules": [{"tensor": "model.layers.[0.weight", "format": "int8-row"}]}"#,
        "{\"rules\": [{\"tensor\": \"[b-\u{1b}]\", \"format\": \"int8-row\"}]}",
        r#"{"rules": [{"tensor": "*", "format": "int5"}, {"tensor": "*", "format": "int4-grouped"}]}"#,
        r#"{"rules": [{"tensor": "*", "format": "int4-grouped", "group_size": 100}]}"#,
        r#"{"rules": [{"tensor": "*", "format": "e8-iq3-lattice"}, {"tensor": "*", "format": "mxfp4"}]}"#,
        r#"{"ebits": 8, "group_size": 16}"#,
        r#"{"xbits": 1}"#,
        r#"{"bits": 4}"#,
        "{\"\\u001b[31mred\": 4}",
        r#"{"rules": [{"tensor": "*", "form": "int8-row"}]}"#,
        r#"{"group_size": "column"}"#,
        "[]",
        r#"{"rules": [["*", "int8-row"]]}"#,
    ] {
        fs::write(&recipe, text).unwrap();
        let arguments = ["--group-size", "32", "--ebits", "4", "--recipe", recipe.to_str().unwrap()];
        told += &format!("## {}\n{}\n", coliconv::error::escaped(text), place.refused(&arguments));
    }
    let mtp = r#"{"rules": [{"tensor": "*.eh_proj.weight", "format": "int4-row"}]}"#;
    fs::write(&recipe, mtp).unwrap();
    let arguments = ["--only", "mtp", "--recipe", recipe.to_str().unwrap()];
    told += &format!("## a per-row head of 4 bits\n{}\n", place.refused(&arguments));
    fs::remove_file(&recipe).unwrap();
    told += &format!("## no file\n{}\n", place.refused(&arguments));
    assert_snapshot!(told);
}

#[test]
fn a_recipe_says_what_flags_say() {
    let place = Place::of(&small());
    let recipe = place.root.path().join("recipe.json");
    fs::write(&recipe, r#"{"group_size": 32, "ebits": 4, "down_bits": 8}"#).unwrap();
    place.convert(&["--ebits", "4", "--recipe", recipe.to_str().unwrap()]);
    let flags = Place { container: place.root.path().join("flags"), source: place.source.clone(), ..Place::new() };
    flags.convert(&["--group-size", "32", "--down-bits", "8"]);
    let weights = |place: &Place| weights(&support::convert::contents(&place.container).unwrap());
    assert!(weights(&place) == weights(&flags));
    // What it is called does not matter to what is finished.
    flags.convert(&["--recipe", recipe.to_str().unwrap()]);
    // A rule for the MTP head alone is no rule without use in the main pass.
    fs::write(
        &recipe,
        r#"{"group_size": 32, "down_bits": 8, "rules": [{"tensor": "*.eh_proj.weight", "format": "f32"}]}"#,
    )
    .unwrap();
    flags.convert(&["--recipe", recipe.to_str().unwrap()]);
    flags.convert(&["--only", "mtp", "--recipe", recipe.to_str().unwrap()]);
}

#[test]
fn what_is_not_there_yet_is_refused_by_name() {
    let place = Place::of(&small());
    for flags in [["--device", "cpu"], ["--mode", "fast"]] {
        let said = place.refused(&flags);
        assert!(said.starts_with(&format!("error: {}", flags[0])), "{said}");
        assert!(said.ends_with("is not available in this version\n"), "{said}");
    }
    for command in ["repair", "repack"] {
        let output = coliconv().args([command, "a", "--level", "payload", "--help"]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let expected = format!("error: `coliconv {command}` is not available in this version\n");
        assert_eq!(text(&output.stderr), expected);
    }
}

#[test]
fn spellings_of_the_other_converter_are_answered() {
    let mut told = String::new();
    for arguments in [
        &["--indir", "a", "--outdir", "b"][..],
        &["a", "b", "--outdir", "b"],
        &["a", "b", "--workers", "8"],
        &["a", "b", "--n-layers=78"],
        &["a", "b", "--min-free-gb", "20"],
        &["a", "b", "-g", "64"],
        &["a", "b", "--something-else"],
        &["a"],
    ] {
        let output = coliconv().arg("convert").args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        told += &format!("## {}\n{}\n", arguments.join(" "), text(&output.stderr));
    }
    assert_snapshot!(told);
}

#[test]
fn a_reader_that_has_gone_is_no_error() {
    let place = Place::of(&small());
    for arguments in [&["--dry-run"][..], &["--dry-run", "--json"], &["--quiet"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("coliconv"));
        command.arg("convert").args([&place.source, &place.container]).args(G32).args(arguments).stdout(writer);
        assert_eq!(command.status().unwrap().code(), Some(0), "{arguments:?}");
    }
    assert!(place.container.join("coliconv.manifest.json").exists());
}
