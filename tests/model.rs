//! The forward pass on converted models: what drafting, threads and long texts must not change.

mod support;

use coliconv::backend::Backend;
use coliconv::backend::reference::Reference as ReferenceBackend;
use coliconv::container::reader::Container;
use coliconv::convert::Options;
use coliconv::model::{CHUNK_ROWS, Model};
use coliconv::recipe::Settings;
use coliconv::reference::ReferenceFile;
use coliconv::roles::Pass;

use support::containers::{container, fixture};

/// A fixture with everything, converted.
fn converted(checkpoint: &str, settings: Settings) -> Container {
    let mut options = Options { passes: Pass::ALL.to_vec(), settings, ..Options::default() };
    options.allowed.ambiguous = true;
    let directory = container(checkpoint, "all", || options);
    Container::open(directory.path()).unwrap_or_else(|faults| panic!("{faults}"))
}

fn nano() -> Container {
    converted("nano", Settings::default())
}

#[test]
fn drafting_finds_the_same_tokens() {
    let (weights, backend) = (nano(), ReferenceBackend::default());
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
    let counters = backend.counters().total();
    assert!(counters.dispatches > 0 && counters.fallbacks == 0);
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let weights = nano();
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
    let weights = converted("tiny", Settings { ebits: Some(8), ..Settings::default() });
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
