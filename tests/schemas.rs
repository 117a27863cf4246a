//! The committed schemas are those of the types, and what is written follows them.
//!
//! After a change of the types: `COLICONV_WRITE_SCHEMAS=1 cargo test --test schemas`.

mod support;

use std::fs;
use std::path::Path;

use coliconv::container::manifest::Manifest;
use coliconv::recipe::Settings;
use coliconv::report::inspect::InspectDocument;
use coliconv::report::{ConvertDocument, DevicesReport};
use jsonschema::Validator;
use schemars::{JsonSchema, schema_for};
use serde_json::{Value, json};
use support::convert::{G32, Place, small};
use support::shards::Tensor;

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))).unwrap()
}

/// The committed schema of a document, checked to be that of its type.
fn schema<T: JsonSchema>(name: &str) -> Validator {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schemas").join(format!("{name}.schema.json"));
    let generated = serde_json::to_string_pretty(&schema_for!(T)).unwrap() + "\n";
    if std::env::var_os("COLICONV_WRITE_SCHEMAS").is_some() {
        fs::write(&path, &generated).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == generated,
        "{} is not that of the types: run COLICONV_WRITE_SCHEMAS=1 cargo test --test schemas",
        path.display()
    );
    jsonschema::validator_for(&read(&path)).unwrap()
}

fn check(validator: &Validator, document: &Value) {
    let errors: Vec<String> =
        validator.iter_errors(document).map(|error| format!("{}: {error}", error.instance_path())).collect();
    assert!(errors.is_empty(), "{errors:?}\n{document:#}");
}

#[test]
fn reports_of_convert() {
    let validator = schema::<ConvertDocument>("convert");
    let mut shards = small();
    shards.total_size(json!(7));
    let place = Place::of(&shards);
    let all = ["--group-size", "32", "--mtp", "--indexer", "--stats", "--io-bits", "6"];
    check(&validator, &place.json(&[&all[..], &["--dry-run"]].concat()));
    let report = place.json(&all);
    check(&validator, &report);
    assert_eq!(report["warnings"].as_array().unwrap().len(), 1);
    check(&validator, &place.json(&all));
    shards.remove("model.norm.weight");
    let bad = Place::of(&shards);
    let refusal: Value = serde_json::from_slice(&bad.command(&G32).arg("--json").output().unwrap().stdout).unwrap();
    check(&validator, &refusal);
    assert!(!validator.is_valid(&json!({})) && !validator.is_valid(&json!({"refused": [1]})));
    assert!(!validator.is_valid(&json!({"container": "x"})));
}

#[test]
fn reports_of_inspect() {
    let validator = schema::<InspectDocument>("inspect");
    let place = Place::of(&small());
    place.convert(&[&G32[..], &["--mtp"]].concat());
    let shard = place.container.join("out-00000.safetensors");
    for (path, kind) in [(&place.source, "checkpoint"), (&place.container, "container"), (&shard, "file")] {
        for arguments in [&[][..], &["--stats", "--values", "2", "--tensor", "*.o_proj.weight"]] {
            let mut command = assert_cmd::Command::cargo_bin("coliconv").unwrap();
            let output = command.arg("inspect").arg(path).args(arguments).arg("--json").output().unwrap();
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            check(&validator, &report);
            assert_eq!(report["kind"], kind);
        }
    }
    assert!(!validator.is_valid(&json!({"kind": "checkpoint"})));
}

#[test]
fn manifests() {
    let validator = schema::<Manifest>("manifest");
    let mut shards = small();
    *shards.tensor_mut("model.norm.weight") = Tensor::f32(&[96], &[f32::NAN; 96]);
    let place = Place::of(&shards);
    let recipe = place.root.path().join("recipe.json");
    fs::write(&recipe, r#"{"rules": [{"tensor": "*.eh_proj.weight", "format": "int4-grouped", "group_size": 32}]}"#)
        .unwrap();
    let arguments = ["--mtp", "--group-size", "row", "--allow-non-finite", "--recipe", recipe.to_str().unwrap()];
    place.convert(&arguments);
    let manifest = read(&place.container.join("coliconv.manifest.json"));
    check(&validator, &manifest);
    assert_eq!(manifest["warnings"].as_array().unwrap().len(), 1);
    assert_eq!(manifest["recipe"]["group_size"], "row");
    for key in ["version", "files", "tensors", "source", "passes"] {
        let mut less = manifest.clone();
        less.as_object_mut().unwrap().remove(key).unwrap();
        assert!(!validator.is_valid(&less), "{key}");
    }
}

#[test]
fn recipes() {
    let validator = schema::<Settings>("recipe");
    let cases = [
        (json!({}), true),
        (json!({"group_size": 64, "ebits": 4, "rules": []}), true),
        (json!({"group_size": "row", "io_bits": 8}), true),
        (json!({"rules": [{"tensor": "*", "format": "int8-row"}]}), true),
        (json!({"rules": [{"tensor": "*", "format": "int4-grouped", "group_size": 32}]}), true),
        (json!([]), false),
        (json!({"bits": 4}), false),
        (json!({"ebits": "4"}), false),
        (json!({"group_size": "column"}), false),
        (json!({"rules": [{"tensor": "*"}]}), false),
        (json!({"rules": [["*", "int8-row"]]}), false),
    ];
    for (recipe, good) in cases {
        assert_eq!(validator.is_valid(&recipe), good, "{recipe}");
        // What the schema says of a recipe, the program does.
        let read = Settings::parse(Path::new("recipe.json"), recipe.to_string().as_bytes());
        assert_eq!(read.is_ok(), good, "{recipe}");
    }
}

#[test]
fn reports_of_devices() {
    let validator = schema::<DevicesReport>("devices");
    let output = assert_cmd::Command::cargo_bin("coliconv").unwrap().args(["devices", "--json"]).output().unwrap();
    assert!(output.status.success());
    check(&validator, &serde_json::from_slice(&output.stdout).unwrap());
}
