//! Experts of files that are made here, asked for in every way.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::dequantize::{ScaleDtype, SourceDtype};
use crate::error::FaultKind;
use crate::io::SourceFile;
use crate::weights::Extent;

/// Rows and columns of gate and up; those of down are turned.
const ROWS: usize = 40;
const COLUMNS: usize = 150;
/// Bytes before the first tensor: no multiple of anything.
const HEAD: usize = 1237;

/// A file of experts: scales of all matrices, then codes, both by expert and matrix.
struct Model {
    directory: TempDir,
    file: SourceFile,
    count: usize,
}

/// A byte of the codes that says whose it is.
fn code(expert: usize, matrix: usize, at: usize) -> u8 {
    (expert * 31 + matrix * 7 + at * 3) as u8
}

fn scale(expert: usize, matrix: usize, row: usize) -> f32 {
    (expert * 1000 + matrix * 100 + row) as f32
}

impl Model {
    fn new(count: usize) -> Model {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("experts.safetensors");
        let mut bytes = vec![0xee; HEAD];
        let matrices = || (0..count).flat_map(|expert| (0..3).map(move |matrix| (expert, matrix)));
        for (expert, matrix) in matrices() {
            bytes.extend((0..rows(matrix)).flat_map(|row| scale(expert, matrix, row).to_le_bytes()));
        }
        for (expert, matrix) in matrices() {
            bytes.extend((0..ROWS * COLUMNS).map(|at| code(expert, matrix, at)));
        }
        std::fs::write(&path, bytes).unwrap();
        Model { file: SourceFile::open(&path).unwrap(), directory, count }
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("experts.safetensors")
    }

    fn matrix(&self, expert: usize, matrix: usize) -> Located<'_> {
        let before: usize = (0..matrix).map(rows).sum();
        let scales_of_one: usize = (0..3).map(rows).sum();
        let of = |name: String, offset: usize, bytes: usize| Extent {
            file: &self.file,
            name: name.into(),
            offset: (HEAD + offset) as u64,
            bytes: bytes as u64,
        };
        let codes_at = 4 * self.count * scales_of_one + (3 * expert + matrix) * ROWS * COLUMNS;
        Located {
            rows: rows(matrix),
            columns: ROWS * COLUMNS / rows(matrix),
            format: Format::Int8Row,
            codes: of(format!("{expert}.{matrix}"), codes_at, ROWS * COLUMNS),
            raw: SourceDtype::F32,
            scales: Some((
                of(format!("{expert}.{matrix}.qs"), 4 * (expert * scales_of_one + before), 4 * rows(matrix)),
                ScaleDtype::F32,
            )),
        }
    }

    fn experts(&self) -> Vec<[Located<'_>; 3]> {
        (0..self.count).map(|expert| [0, 1, 2].map(|matrix| self.matrix(expert, matrix))).collect()
    }

    /// Memory of an expert, and what one reader needs.
    fn sizes(&self) -> (u64, u64) {
        let mut files = Files::default();
        let of = |place: &Place| (place.size().bytes(), Size::of_buffer(place.staging_bytes()));
        let places = self.experts().into_iter().map(|expert| of(&Place::new(&expert, &mut files, true).unwrap()));
        places.reduce(|a, b| (a.0.max(b.0), a.1.max(b.1))).unwrap()
    }

    /// A cache with room for so many experts.
    fn cache(&self, room: u64, readers: usize, direct: bool) -> Arc<ExpertCache> {
        let (size, staging) = self.sizes();
        let budget_bytes = room * size + readers as u64 * staging;
        Arc::new(ExpertCache::new(Options { budget_bytes, readers, direct }))
    }
}

fn rows(matrix: usize) -> usize {
    if matrix == 2 { COLUMNS } else { ROWS }
}

/// Fails unless it is that expert, down to the last byte.
fn assert_is(expert: &Expert<'_>, number: usize) {
    for (matrix, found) in expert.matrices().into_iter().enumerate() {
        assert_eq!((found.rows, found.rows * found.columns), (rows(matrix), ROWS * COLUMNS));
        let codes = (0..ROWS * COLUMNS).map(|at| code(number, matrix, at));
        assert!(found.codes.iter().copied().eq(codes), "expert {number}, matrix {matrix}");
        let scales = (0..rows(matrix)).map(|row| scale(number, matrix, row));
        assert!(found.scales.iter().copied().eq(scales), "expert {number}, matrix {matrix}");
    }
}

#[test]
fn equal_experts_take_equal_memory() {
    let model = Model::new(20);
    let mut files = Files::default();
    let experts = model.experts();
    let sizes: Vec<Size> = experts.iter().map(|expert| Place::new(expert, &mut files, true).unwrap().size()).collect();
    assert!(sizes.iter().all(|size| *size == sizes[0]));
}

#[test]
fn an_expert_takes_two_reads() {
    let model = Model::new(3);
    for direct in [false, true] {
        let cache = model.cache(3, 1, direct);
        let layer = cache.add_layer(&model.experts()).unwrap();
        for (number, expert) in layer.request(&[0, 1, 2]).enumerate() {
            assert_is(&expert.unwrap(), number);
        }
        assert_is(&layer.request(&[1]).next().unwrap().unwrap(), 1);
        let counters = cache.counters();
        assert_eq!((counters.requests, counters.hits, counters.reads), (4, 1, 6));
        let bytes = 3 * (3 * ROWS * COLUMNS + 4 * (2 * ROWS + COLUMNS));
        assert_eq!((counters.bytes_read, counters.evictions), (bytes as u64, 0));
        assert!(counters.peak_bytes <= counters.budget_bytes);
    }
}

#[test]
fn large_experts_are_read_in_pieces() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("a");
    let (rows, columns) = (700, 9001);
    let bytes: Vec<u8> = (0..3 * rows * columns + 99).map(|at| ((at * 7) >> 5) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let file = SourceFile::open(&path).unwrap();
    let matrix = |number: usize| Located {
        rows,
        columns,
        format: Format::Int8Row,
        codes: Extent {
            file: &file,
            name: number.to_string().into(),
            offset: (99 + number * rows * columns) as u64,
            bytes: (rows * columns) as u64,
        },
        raw: SourceDtype::F32,
        scales: None,
    };
    for direct in [false, true] {
        let options = Options { direct, ..Options::within(1 << 30) };
        let cache = Arc::new(ExpertCache::new(options));
        let layer = cache.add_layer(&[[matrix(0), matrix(1), matrix(2)]]).unwrap();
        let expert = layer.request(&[0]).next().unwrap().unwrap();
        for (number, found) in expert.matrices().into_iter().enumerate() {
            assert!(found.codes == &bytes[99 + number * rows * columns..][..rows * columns], "{number}, {direct}");
        }
        let pieces = bytes.len().div_ceil(crate::limits::EXPERT_READ_BYTES) as u64;
        assert_eq!((cache.counters().reads, pieces), (pieces, 19));
        assert_eq!(cache.counters().bytes_read, (3 * rows * columns) as u64);
    }
}

#[test]
fn halves_are_widened_and_other_scales_decoded() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("a");
    // A gap of two bytes between gate and up, and scales of two bytes behind.
    let halves: Vec<u16> = (0..60).map(|i| 0x3f80 + i).collect();
    let mut bytes: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
    bytes.extend([0x38; 20]);
    bytes.extend([0x00, 0x40]);
    std::fs::write(&path, &bytes).unwrap();
    let file = SourceFile::open(&path).unwrap();
    let of = |name: &str, offset, bytes| Extent { file: &file, name: name.into(), offset, bytes };
    let half = |name, offset| Located {
        rows: 5,
        columns: 4,
        format: Format::F32,
        codes: of(name, offset, 40),
        raw: SourceDtype::Bf16,
        scales: None,
    };
    let down = Located {
        rows: 4,
        columns: 5,
        format: Format::Fp8E4m3B128,
        codes: of("down", 120, 20),
        raw: SourceDtype::Fp8E4m3,
        scales: Some((of("down_scale_inv", 140, 2), ScaleDtype::Bf16)),
    };
    let matrices = [half("gate", 0), half("up", 42), down];
    let loaded: Vec<_> = matrices.iter().map(|matrix| matrix.load().unwrap()).collect();
    assert_eq!(loaded[2].scales, [2.0]);
    assert_eq!(loaded[0].codes[..8], [0, 0, 0x80, 0x3f, 0, 0, 0x81, 0x3f]);
    let cache = Arc::new(ExpertCache::new(Options::within(1 << 20)));
    let layer = cache.add_layer(&[matrices]).unwrap();
    let expert = layer.request(&[0]).next().unwrap().unwrap();
    for (found, expected) in expert.matrices().into_iter().zip(&loaded) {
        assert_eq!(found, expected.view());
    }
}

#[test]
fn every_budget_gives_the_same_experts() {
    let model = Model::new(9);
    for (room, readers) in [(1, 1), (1, 4), (2, 2), (4, 3), (9, 4)] {
        let cache = model.cache(room, readers, true);
        let layer = cache.add_layer(&model.experts()).unwrap();
        for round in 0..5 {
            layer.announce(&[1, 4, round]);
            layer.read_ahead(&[7, 8, 0]);
            for (number, expert) in layer.request(&[1, 4, round]).enumerate() {
                assert_is(&expert.unwrap(), [1, 4, round][number]);
            }
        }
        let counters = cache.counters();
        assert!(counters.peak_bytes <= counters.budget_bytes, "{counters:?}");
        assert_eq!(counters.requests, 15);
    }
}

#[test]
fn what_is_read_ahead_is_there_when_it_is_asked_for() {
    let model = Model::new(8);
    let cache = model.cache(8, 1, false);
    let (one, other) = (cache.add_layer(&model.experts()).unwrap(), cache.add_layer(&model.experts()).unwrap());
    one.read_ahead(&[2, 5]);
    // The reader takes what is asked for only after what it has begun.
    while cache.counters().reads < 4 {
        std::thread::yield_now();
    }
    assert!(one.request(&[2, 3]).all(|expert| expert.is_ok()));
    let counters = cache.counters();
    assert_eq!((counters.read_ahead, counters.read_ahead_hits, counters.hits), (2, 1, 1));
    // An announced expert is read on behalf of the request that follows.
    other.announce(&[1]);
    assert!(other.request(&[1]).all(|expert| expert.is_ok()));
    assert_eq!((cache.counters().hits, cache.counters().read_ahead), (1, 2));
}

#[test]
fn a_budget_below_one_expert_is_refused() {
    let model = Model::new(2);
    let (size, staging) = model.sizes();
    let options = Options { budget_bytes: size + staging - 1, readers: 1, direct: true };
    let fault = Arc::new(ExpertCache::new(options)).add_layer(&model.experts()).unwrap_err();
    let expected = format!(
        "routed experts need {} bytes of memory to be read one after the other, {} are left for them",
        size + staging,
        size + staging - 1
    );
    assert_eq!(fault.kind.to_string(), expected);
    assert_eq!(fault.place.file.as_deref(), Some(model.directory.path()));
    let (codes, scales) = (3 * (ROWS * COLUMNS) as u64, 4 * (2 * ROWS + COLUMNS) as u64);
    assert!(slot_bytes(codes, scales) >= size && staging_bytes(scales) >= staging);
}

/// Expects the fault of reading an expert, and that others are told the same.
#[track_caller]
fn fails(layer: &ExpertLayer, expert: usize, kind: fn(&FaultKind) -> bool, path: &Path) -> Fault {
    let faults: Vec<Fault> = std::thread::scope(|scope| {
        let ask = || layer.request(&[expert]).next().unwrap().expect_err("it cannot be read");
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(faults.iter().all(|fault| kind(&fault.kind) && fault.place.file.as_deref() == Some(path)), "{faults:?}");
    faults.into_iter().next().unwrap()
}

#[test]
fn files_that_change_while_they_are_used_are_told() {
    for direct in [false, true] {
        let model = Model::new(6);
        let cache = model.cache(5, 2, direct);
        let layer = cache.add_layer(&model.experts()).unwrap();
        assert_is(&layer.request(&[0]).next().unwrap().unwrap(), 0);
        std::thread::sleep(std::time::Duration::from_millis(20));
        // Within the second matrix of the last expert but one.
        let matrix = model.matrix(4, 1);
        let file = std::fs::File::options().write(true).open(model.path()).unwrap();
        file.set_len(matrix.codes.offset + 100).unwrap();
        let fault = fails(&layer, 4, |kind| matches!(kind, FaultKind::FileShrank { .. }), &model.path());
        assert_eq!(fault.place.tensor.as_ref().unwrap().as_str(), "4.1");
        assert_eq!(fault.place.offset, Some(matrix.codes.offset));
        fails(&layer, 2, |kind| matches!(kind, FaultKind::FileShrank { .. }), &model.path());
        file.set_len(model.file.bytes()).unwrap();
        fails(&layer, 2, |kind| matches!(kind, FaultKind::SourceChanged { .. }), &model.path());
        // What is in memory stays as it was, and a request that is taken back leaves nothing behind.
        drop(layer.request(&[3, 4, 5]));
        let mut requests = layer.request(&[0, 4]);
        assert_is(&requests.next().unwrap().unwrap(), 0);
        assert!(requests.next().unwrap().is_err());
    }
}

#[test]
fn a_layer_that_is_dropped_gives_its_memory_back() {
    let model = Model::new(4);
    let cache = model.cache(4, 1, false);
    let layer = cache.add_layer(&model.experts()).unwrap();
    assert!(layer.request(&[0, 1, 2, 3]).all(|expert| expert.is_ok()));
    drop(layer);
    let layer = cache.add_layer(&model.experts()).unwrap();
    assert!(layer.request(&[0, 1, 2, 3]).all(|expert| expert.is_ok()));
    let counters = cache.counters();
    assert_eq!((counters.evictions, counters.hits, counters.reads), (0, 0, 16));
    assert!(counters.peak_bytes <= counters.budget_bytes);
}

/// Experts that one thread asks for at once, ascending.
fn batches() -> impl Strategy<Value = Vec<Vec<usize>>> {
    let batch = proptest::collection::btree_set(0usize..12, 1..6).prop_map(|set| set.into_iter().collect());
    proptest::collection::vec(batch, 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Any threads, any requests, any room: everybody gets what he asked for, and the budget holds.
    #[test]
    fn many_threads_get_what_they_ask_for(
        of_threads in proptest::collection::vec(batches(), 1..5),
        room in 1u64..12,
        readers in 1usize..5,
        ahead in batches(),
        stop_early in any::<bool>(),
    ) {
        let model = Model::new(12);
        let cache = model.cache(room, readers, true);
        let layers = [cache.add_layer(&model.experts()).unwrap(), cache.add_layer(&model.experts()).unwrap()];
        std::thread::scope(|scope| {
            for (thread, batches) in of_threads.iter().enumerate() {
                let (layers, ahead) = (&layers, &ahead);
                scope.spawn(move || {
                    for (number, batch) in batches.iter().enumerate() {
                        let layer = (thread + number) % 2;
                        layers[layer].announce(batch);
                        layers[1 - layer].read_ahead(&ahead[number % ahead.len()]);
                        for (&expert, found) in batch.iter().zip(layers[layer].request(batch)) {
                            assert_is(&found.unwrap(), expert);
                            if stop_early && expert % 5 == 4 {
                                break;
                            }
                        }
                    }
                });
            }
        });
        let counters = cache.counters();
        let requests: usize = of_threads.iter().flatten().map(Vec::len).sum();
        prop_assert_eq!(counters.requests, requests as u64);
        prop_assert!(counters.peak_bytes <= counters.budget_bytes);
        prop_assert!(counters.hits <= counters.requests && counters.read_ahead_hits <= counters.hits);
    }

    /// One thread and one expert at a time: who stays is what a plain list of uses says.
    #[test]
    fn who_stays_is_what_the_plain_rule_says(
        asked in proptest::collection::vec((0usize..3, 0usize..5), 1..80),
        room in 1usize..8,
    ) {
        let model = Model::new(5);
        let cache = model.cache(room as u64, 1, false);
        let layers = [(); 3].map(|()| cache.add_layer(&model.experts()).unwrap());
        // Uses and last request of each expert; those that are there.
        let mut uses: BTreeMap<(usize, usize), (u32, usize)> = BTreeMap::new();
        let (mut there, mut hits, mut since) = (Vec::new(), 0, 0);
        for (time, &(layer, expert)) in asked.iter().enumerate() {
            since += 1;
            if since > 4 * 15 {
                since = 0;
                uses.values_mut().for_each(|(uses, _)| *uses /= 2);
            }
            let of_expert = uses.entry((layer, expert)).or_default();
            *of_expert = (of_expert.0 + 1, time);
            if there.contains(&(layer, expert)) {
                hits += 1;
            } else {
                if there.len() == room {
                    // Fewest uses, then the layer that is longest to come, then the oldest.
                    let rank = |key: &(usize, usize)| {
                        let next = (1..=3).find(|step| (layer + step) % 3 == key.0).unwrap();
                        (uses[key].0, 3 - next, uses[key].1)
                    };
                    let gone = (0..there.len()).min_by_key(|&at| rank(&there[at])).unwrap();
                    there.remove(gone);
                }
                there.push((layer, expert));
            }
            assert_is(&layers[layer].request(&[expert]).next().unwrap().unwrap(), expert);
            prop_assert_eq!(cache.counters().hits, hits);
        }
    }
}
