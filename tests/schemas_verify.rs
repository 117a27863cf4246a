//! `schemas/` holds what the report types say; `COLICONV_WRITE_SCHEMAS=1` writes it anew.

use std::path::Path;

use coliconv::pipeline::Settings;
use coliconv::publish::plan::UploadPlan;
use coliconv::publish::policy::Policy;
use coliconv::report::{
    BenchDocument, DiffDocument, GenerateDocument, PipelineDocument, PublishDocument, ScoreDocument, VerifyDocument,
};
use schemars::{JsonSchema, schema_for};

fn check<T: JsonSchema>(name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schemas").join(format!("{name}.schema.json"));
    let text = serde_json::to_string_pretty(&schema_for!(T)).unwrap() + "\n";
    if std::env::var_os("COLICONV_WRITE_SCHEMAS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(stored, text, "{name}: run with COLICONV_WRITE_SCHEMAS=1 and look at what changed");
}

#[test]
fn schemas_are_those_of_the_reports() {
    check::<DiffDocument>("diff");
    check::<GenerateDocument>("generate");
    check::<ScoreDocument>("score");
    check::<VerifyDocument>("verify");
    check::<BenchDocument>("bench");
    check::<PublishDocument>("publish");
    check::<Policy>("policy");
    check::<UploadPlan>("upload-plan");
    check::<PipelineDocument>("pipeline");
    check::<Settings>("pipeline-file");
}
