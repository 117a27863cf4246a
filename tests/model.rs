//! The references that transformers made of the fixtures, against the forward pass.

mod quantized;

use coliconv::backend::Backend;
use coliconv::backend::reference::Reference as ReferenceBackend;
use coliconv::config::Config;
use coliconv::error::Result;
use coliconv::model::{CHUNK_ROWS, Model};
use coliconv::quantize::Quantizer;
use coliconv::reference::{Agreement, Matches, ReferenceFile, compare};
use coliconv::roles::Pass;
use coliconv::weights::{Matrix, Weights};

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
        for Matches { matched, near_tie, total, .. } in matches.into_iter().flatten() {
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

#[test]
fn nano_from_the_checkpoint() {
    let all = agree(&checkpoint("nano"), "nano", "tokens-source.json");
    let teacher_forced = all.teacher_forced.unwrap();
    assert_eq!((teacher_forced.total, all.greedy.unwrap().total), (348, 288));
}

#[test]
fn nano_in_int8() {
    agree(&Quantized::new("nano", Plan::all(INT8), &[Pass::Main]), "nano", "tokens-int8.json");
}

#[test]
fn nano_in_groups_of_64() {
    let weights = Quantized::new("nano", Plan::all(grouped(64)), &Pass::ALL);
    agree(&weights, "nano", "tokens-g64-mtp-indexer.json");
}

#[test]
fn nano_in_int4_rows() {
    agree(&Quantized::new("nano", Plan::all(Quantizer::Int4Row), &[Pass::Main]), "nano", "tokens-row.json");
}

#[test]
fn nano_with_int3_experts() {
    let plan = Plan { experts: Quantizer::Int3G64, others: grouped(64) };
    agree(&Quantized::new("nano", plan, &[Pass::Main]), "nano", "tokens-x3.json");
}

#[test]
fn nano_with_int2_experts() {
    let plan = Plan { experts: Quantizer::Int2Row, others: Quantizer::Int4Row };
    agree(&Quantized::new("nano", plan, &[Pass::Main]), "nano", "tokens-x2-row.json");
}

#[test]
fn nano_attending_sparsely() {
    let weights = Quantized::new("nano", Plan::all(grouped(64)), &Pass::ALL);
    for file in ["dsa-topk4-g64-mtp-indexer.json", "dsa-topk16-g64-mtp-indexer.json"] {
        let all = agree(&weights, "nano", file);
        assert_eq!((all.teacher_forced.unwrap().total, all.greedy), (348, None));
    }
}

#[test]
fn nano_drafting() {
    let weights = Quantized::new("nano", Plan::all(grouped(64)), &Pass::ALL);
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
fn nano_finds_the_same_tokens_with_drafts() {
    let weights = Quantized::new("nano", Plan::all(grouped(64)), &Pass::ALL);
    let backend = ReferenceBackend::default();
    let model = Model::load(&weights, &backend).unwrap();
    let path = fixture("nano").join("expected/tokens-g64-mtp-indexer.json");
    let reference = ReferenceFile::read(&path).unwrap().references.remove(0);
    let own = &reference.full_ids[reference.prompt_ids.len()..];
    for drafts in [0, 1, 3] {
        let drafted = model.greedy_drafted(&reference.prompt_ids, own.len(), drafts, None).unwrap();
        println!("{drafts} drafts: {} of {} accepted", drafted.accepted, drafted.proposed);
        assert_eq!(drafted.ids, own);
        assert_eq!(drafted.accepted > 0, drafts > 0);
    }
}

#[test]
fn tiny_in_groups_of_32() {
    agree(&Quantized::new("tiny", Plan::all(grouped(32)), &[Pass::Main]), "tiny", "tokens-g32.json");
}

#[test]
fn tiny_in_int8() {
    agree(&Quantized::new("tiny", Plan::all(INT8), &[Pass::Main]), "tiny", "tokens-int8.json");
}

#[test]
fn tiny_in_int4_rows_with_a_head() {
    let weights = Quantized::new("tiny", Plan::all(Quantizer::Int4Row), &[Pass::Main, Pass::Mtp]);
    agree(&weights, "tiny", "tokens-row-mtp.json");
}

#[test]
fn tiny_with_int2_experts() {
    let plan = Plan { experts: Quantizer::Int2Row, others: Quantizer::Int4Row };
    agree(&Quantized::new("tiny", plan, &[Pass::Main]), "tiny", "tokens-x2-row.json");
}

/// Weights with something wrong.
struct Tampered<W> {
    inner: W,
    config: Config,
    /// Another name of which the scales are taken.
    scales_of: fn(&str) -> Option<String>,
}

impl<W: Weights> Tampered<W> {
    fn new(inner: W) -> Tampered<W> {
        Tampered { config: inner.config().clone(), inner, scales_of: |_| None }
    }

    /// How the first reference of a file takes it.
    fn agreement(&self, name: &str, file: &str) -> Agreement {
        let backend = ReferenceBackend::default();
        let model = Model::load(self, &backend).unwrap();
        let path = fixture(name).join("expected").join(file);
        compare(&model, &ReferenceFile::read(&path).unwrap().references[0]).unwrap()
    }
}

impl<W: Weights> Weights for Tampered<W> {
    fn config(&self) -> &Config {
        &self.config
    }

    fn directory(&self) -> std::path::PathBuf {
        self.inner.directory()
    }

    fn contains(&self, name: &str) -> bool {
        self.inner.contains(name)
    }

    fn load(&self, name: &str) -> Result<Matrix> {
        let mut matrix = self.inner.load(name)?;
        if let Some(other) = (self.scales_of)(name) {
            matrix.scales = self.inner.load(&other)?.scales;
        }
        Ok(matrix)
    }
}

#[test]
fn two_experts_with_each_others_scales_are_noticed() {
    let mut weights = Tampered::new(Quantized::new("nano", Plan::all(grouped(64)), &[Pass::Main]));
    let file = "tokens-g64-mtp-indexer.json";
    assert!(weights.agreement("nano", file).good());
    weights.scales_of = |name| {
        let swapped = [(".2.mlp.experts.0.", ".2.mlp.experts.1."), (".2.mlp.experts.1.", ".2.mlp.experts.0.")];
        swapped.iter().find(|(own, _)| name.contains(own)).map(|(own, other)| name.replace(own, other))
    };
    let agreement = weights.agreement("nano", file);
    assert!(agreement.max_abs_logprob_diff.unwrap() > 1000.0 * MAX_LOGPROB_DIFF, "{agreement:?}");
    assert!(!agreement.good(), "{agreement:?}");
}

#[test]
fn another_theta_is_noticed() {
    let mut weights = Tampered::new(checkpoint("nano"));
    weights.config.rope_theta = 8e6;
    let agreement = weights.agreement("nano", "tokens-source.json");
    assert!(!agreement.good(), "{agreement:?}");
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let weights = Quantized::new("nano", Plan::all(grouped(64)), &Pass::ALL);
    let ids: Vec<u32> = (0..40).map(|i| i * 37 % 2048).collect();
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let backend = ReferenceBackend::default();
            let model = Model::load(&weights, &backend).unwrap();
            (model.teacher_forced(&ids, Some(16)).unwrap(), model.drafts(&ids, Some(16)).unwrap())
        })
    };
    assert_eq!(run(1), run(5));
}

#[test]
fn texts_longer_than_a_piece_are_the_same_in_any_pieces() {
    let weights = Quantized::new("tiny", Plan::all(INT8), &Pass::ALL);
    let backend = ReferenceBackend::default();
    let model = Model::load(&weights, &backend).unwrap();
    let ids: Vec<u32> = (0..CHUNK_ROWS as u32 + 40).map(|i| i * i % 300).collect();
    // The library's own pieces against pieces of 100.
    let whole = model.teacher_forced(&ids, Some(64)).unwrap();
    let mut cache = model.cache(Some(64)).unwrap();
    let mut in_pieces = Vec::new();
    for piece in ids.chunks(100) {
        let asked: Vec<Option<u32>> = (1..=piece.len()).map(|i| ids.get(in_pieces.len() + i).copied()).collect();
        let x = model.forward(&mut cache, piece).unwrap();
        in_pieces.extend(model.predict(&x, &asked).unwrap());
    }
    assert_eq!(in_pieces, whole);
    assert_eq!(model.drafts(&ids, Some(64)).unwrap().len(), ids.len() - 1);
    let prompt = &ids[..CHUNK_ROWS + 3];
    let plain = model.greedy(prompt, 6, Some(64)).unwrap();
    assert_eq!(model.greedy_drafted(prompt, 6, 2, Some(64)).unwrap().ids, plain);
}
