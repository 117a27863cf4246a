//! The references that transformers made of the fixtures, against the forward pass.

mod quantized;

use coliconv::backend::Backend;
use coliconv::backend::reference::Reference as ReferenceBackend;
use coliconv::model::Model;
use coliconv::quantize::Quantizer;
use coliconv::reference::{Agreement, Matches, ReferenceFile, compare};
use coliconv::roles::Pass;
use coliconv::weights::Weights;

use quantized::{INT8, Plan, Quantized, checkpoint, fixture, grouped};

/// How far a log-probability may be from transformers' f32 one.
const MAX_LOGPROB_DIFF: f64 = 1e-4;

/// Runs all references of a file and expects every position to match.
fn agree(weights: &dyn Weights, name: &str, file: &str) -> Agreement {
    let backend = ReferenceBackend::default();
    let model = Model::load(weights, &backend).unwrap();
    let path = fixture(name).join("expected").join(file);
    let references = ReferenceFile::read(&path).unwrap().references;
    let mut all = Agreement::default();
    for (number, reference) in references.iter().enumerate() {
        let agreement = compare(&model, reference).unwrap();
        println!("{name} {file} {number}: {agreement:?}");
        let matches = [agreement.teacher_forced, agreement.greedy, agreement.mtp.map(|mtp| mtp.matches)];
        for Matches { matched, near_tie, total } in matches.into_iter().flatten() {
            assert_eq!((matched, near_tie), (total, 0), "{name} {file}, reference {number}: {agreement:?}");
            assert!(agreement.good());
        }
        assert!(agreement.max_abs_logprob_diff.is_none_or(|diff| diff < MAX_LOGPROB_DIFF), "{agreement:?}");
        all = all.and(&agreement);
    }
    let counters = backend.counters().total();
    assert!(counters.dispatches > 0 && counters.fallbacks == 0);
    all
}

/// The container of a fixture with the passes that its name says.
fn container(name: &str, plan: Plan, passes: &[Pass]) -> Quantized {
    Quantized::new(name, plan, passes)
}

#[test]
fn nano_from_the_checkpoint() {
    let all = agree(&checkpoint("nano"), "nano", "tokens-source.json");
    let teacher_forced = all.teacher_forced.unwrap();
    assert_eq!((teacher_forced.total, all.greedy.unwrap().total), (348, 288));
}

#[test]
fn nano_in_int8() {
    agree(&container("nano", Plan::all(INT8), &[Pass::Main]), "nano", "tokens-int8.json");
}

#[test]
fn nano_in_groups_of_64() {
    let weights = container("nano", Plan::all(grouped(64)), &Pass::ALL);
    agree(&weights, "nano", "tokens-g64-mtp-indexer.json");
}

#[test]
fn nano_in_int4_rows() {
    agree(&container("nano", Plan::all(Quantizer::Int4Row), &[Pass::Main]), "nano", "tokens-row.json");
}

#[test]
fn nano_with_int3_experts() {
    let plan = Plan { experts: Quantizer::Int3G64, others: grouped(64) };
    agree(&container("nano", plan, &[Pass::Main]), "nano", "tokens-x3.json");
}

#[test]
fn nano_with_int2_experts() {
    let plan = Plan { experts: Quantizer::Int2Row, others: Quantizer::Int4Row };
    agree(&container("nano", plan, &[Pass::Main]), "nano", "tokens-x2-row.json");
}

#[test]
fn nano_attending_sparsely() {
    let weights = container("nano", Plan::all(grouped(64)), &Pass::ALL);
    for file in ["dsa-topk4-g64-mtp-indexer.json", "dsa-topk16-g64-mtp-indexer.json"] {
        let all = agree(&weights, "nano", file);
        assert_eq!((all.teacher_forced.unwrap().total, all.greedy), (348, None));
    }
}

#[test]
fn nano_drafting() {
    let weights = container("nano", Plan::all(grouped(64)), &Pass::ALL);
    let file = "mtp-g64-mtp-indexer.json";
    let all = agree(&weights, "nano", file);
    assert_eq!((all.teacher_forced, all.greedy, all.max_abs_logprob_diff), (None, None, None));
    // The file counts its own hits and positions.
    let text = std::fs::read_to_string(fixture("nano").join("expected").join(file)).unwrap();
    let file: serde_json::Value = serde_json::from_str(&text).unwrap();
    let references = file["references"].as_array().unwrap();
    let sum = |key: &str| references.iter().map(|r| r[key].as_u64().unwrap() as usize).sum::<usize>();
    let mtp = all.mtp.unwrap();
    assert_eq!((mtp.accepted, mtp.proposed), (sum("hits_over_greedy"), sum("positions")));
}

#[test]
fn tiny_in_groups_of_32() {
    agree(&container("tiny", Plan::all(grouped(32)), &[Pass::Main]), "tiny", "tokens-g32.json");
}

#[test]
fn tiny_in_int8() {
    agree(&container("tiny", Plan::all(INT8), &[Pass::Main]), "tiny", "tokens-int8.json");
}

#[test]
fn tiny_in_int4_rows_with_a_head() {
    let weights = container("tiny", Plan::all(Quantizer::Int4Row), &[Pass::Main, Pass::Mtp]);
    agree(&weights, "tiny", "tokens-row-mtp.json");
}

#[test]
fn tiny_with_int2_experts() {
    let plan = Plan { experts: Quantizer::Int2Row, others: Quantizer::Int4Row };
    agree(&container("tiny", plan, &[Pass::Main]), "tiny", "tokens-x2-row.json");
}
