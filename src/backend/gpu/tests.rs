//! Every kernel of a GPU against the reference, and against itself in other batches: for any API.

mod products;

use super::*;
use crate::backend::reference::Reference;
use crate::backend::samples::{Made, attended, formats, matrix, numbers, routed, through, ways};
use crate::backend::tolerances;
use crate::format::Format;
use crate::roles::Projection;
pub(in crate::backend) use products::{fast_products, same_with_wgmma};
use products::{product, product_with, products};

/// How much a device computes in tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) enum Extent {
    /// Every case, at sizes that an emulated device computes in seconds.
    Small,
    /// The shapes of GLM-5.2 too.
    Glm,
}

/// Shapes [O, I] of GLM-5.2: an expert's gate or up and its down projection, q_b, o_proj.
const GLM: [(usize, usize); 4] = [(2048, 6144), (6144, 2048), (16384, 2048), (6144, 16384)];

/// All of the table.
pub(in crate::backend) fn every_kernel<D: Driver>(gpu: &Gpu<D>, extent: Extent) {
    products(gpu, extent);
    embeddings(gpu);
    rows_by_themselves(gpu);
    attention_and_its_positions(gpu);
    many_positions(gpu);
    choices_and_experts(gpu);
    caches(gpu);
    together(gpu);
    predictions(gpu);
    reads(gpu);
    multiplies(gpu);
    recordings(gpu);
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn rows_of<B: Backend>(backend: &B, values: &[f32], width: usize) -> B::Rows {
    backend.write(values, width).unwrap()
}

fn embeddings<D: Driver>(gpu: &Gpu<D>) {
    let reference = Reference::default();
    for format in formats() {
        for columns in [1, 9, 300] {
            let table = matrix(format, 200, columns, 4);
            let ids = [0, 199, 7, 128, 7];
            let on = |rows: Vec<f32>| rows;
            let found = gpu.embed(&gpu.upload("table", table.clone()).unwrap(), &ids).unwrap();
            let exact = reference.embed(&reference.upload("table", table.clone()).unwrap(), &ids).unwrap();
            let (found, exact) = (on(gpu.read(&found).unwrap()), on(reference.read(&exact).unwrap()));
            assert_eq!(bits(&found), bits(&exact), "{format} {columns}");
        }
    }
}

/// Largest distance in units in the last place of the larger value.
fn assert_close(what: &str, found: &[f32], exact: &[f32], units: f32) {
    assert_eq!(found.len(), exact.len(), "{what}");
    for (found, exact) in found.iter().zip(exact) {
        let unit = exact.abs().max(f32::MIN_POSITIVE) * f32::EPSILON;
        assert!((found - exact).abs() <= units * unit, "{what}: {found}, not {exact}");
    }
}

/// Two rows of an operation on each row by itself: both at once, and the second alone.
fn by_row<B: Backend>(backend: &B, width: usize, of: impl Fn(&B, B::Rows) -> B::Rows) -> (Vec<f32>, Vec<f32>) {
    let x = numbers(width as u64, 2 * width);
    let both = backend.read(&of(backend, rows_of(backend, &x, width))).unwrap();
    let second = backend.read(&of(backend, rows_of(backend, &x[width..], width))).unwrap();
    (both, second)
}

fn rows_by_themselves<D: Driver>(gpu: &Gpu<D>) {
    /// The same on a GPU and the reference.
    macro_rules! check {
        ($what:expr, $width:expr, $units:expr, $of:expr) => {{
            let (both, second) = by_row(gpu, $width, $of);
            let (exact, _) = by_row(&Reference::default(), $width, $of);
            assert_close(&format!("{} of {}", $what, $width), &both, &exact, $units);
            assert!(bits(&both).ends_with(&bits(&second)), "{} of {}", $what, $width);
        }};
    }
    for width in [1, 2, 31, 255, 256, 257, 6144] {
        fn vector<B: Backend>(backend: &B, width: usize, seed: u64) -> B::Weight {
            backend.upload("vector", matrix(Format::F32, width, 1, seed)).unwrap()
        }
        check!("rms_norm", width, 8.0, |b, x| b.rms_norm(&x, &vector(b, width, 1), 1e-5).unwrap());
        check!("swiglu", width, 8.0, |b, x| b.swiglu(&x, &x).unwrap());
        check!("add", width, 0.0, |b, mut x| {
            let y = b.slice(&x, 0..b.shape(&x).0, 0..width).unwrap();
            b.add(&mut x, &y).unwrap();
            x
        });
        check!("slice", width, 0.0, |b, x| b.slice(&x, b.shape(&x).0 - 1..b.shape(&x).0, width / 3..width).unwrap());
        check!("concat", width, 0.0, |b, x| b.concat(&x, &x).unwrap());
        check!("take", width, 0.0, |b, x| b.take(&x, &[b.shape(&x).0 - 1; 2]).unwrap());
        let x = numbers(4, 3 * width);
        let taken = gpu.read(&gpu.take(&rows_of(gpu, &x, width), &[2, 0, 1, 2]).unwrap()).unwrap();
        assert_eq!(taken, [&x[2 * width..], &x[..2 * width], &x[2 * width..]].concat(), "take of {width}");
    }
    // Sums cancel in a layer norm: what counts is the largest value.
    for width in [2, 31, 256, 257, 6144] {
        fn of<B: Backend>(backend: &B, width: usize) -> Vec<f32> {
            let vector = |seed| backend.upload("vector", matrix(Format::F32, width, 1, seed)).unwrap();
            let x = rows_of(backend, &numbers(5, 3 * width), width);
            backend.read(&backend.layer_norm(&x, &vector(1), &vector(2), 1e-6).unwrap()).unwrap()
        }
        for (found, exact) in of(gpu, width).iter().zip(of(&Reference::default(), width)) {
            assert!((found - exact).abs() <= 4e-6, "layer_norm of {width}: {found}, not {exact}");
        }
    }
    // Squares that no f32 holds leave no number: outputs of 0 would look sound.
    for large in [1e20f32, f32::INFINITY] {
        let x = rows_of(gpu, &[vec![1.0; 300], vec![large; 300], vec![2.0; 300]].concat(), 300);
        let vector = |value: f32| {
            let matrix = Matrix {
                rows: 300,
                columns: 1,
                format: Format::F32,
                codes: value.to_le_bytes().repeat(300),
                scales: vec![],
            };
            gpu.upload("vector", matrix).unwrap()
        };
        let found = gpu.read(&gpu.rms_norm(&x, &vector(3.0), 0.0).unwrap()).unwrap();
        assert!(found[300..600].iter().all(|value| value.is_nan()), "{found:?}");
        assert!(found[..300].iter().chain(&found[600..]).all(|value| (value - 3.0).abs() < 1e-5), "{found:?}");
    }
    fn turned<B: Backend>(backend: &B) -> Vec<f32> {
        let rope = Rope { frequencies: (0..32).map(|j| 10_000f32.powf(-j as f32 / 32.0)).collect() };
        let mut x = rows_of(backend, &numbers(8, 3 * 300), 300);
        backend.rope(&mut x, &rope, Heads { width: 100, rope_at: 36 }, &[0, 77, 190_000]).unwrap();
        backend.read(&x).unwrap()
    }
    for (found, exact) in turned(gpu).iter().zip(turned(&Reference::default())) {
        assert!((found - exact).abs() <= 3e-7, "rope: {found}, not {exact}");
    }
    let far = gpu.swiglu(&rows_of(gpu, &[-1000.0, 0.0, 1000.0], 3), &rows_of(gpu, &[1.0, 5.0, 0.5], 3)).unwrap();
    assert_eq!(gpu.read(&far).unwrap(), [0.0, 0.0, 500.0]);
}

fn attention_and_its_positions<D: Driver>(gpu: &Gpu<D>) {
    for (format, places) in formats().into_iter().flat_map(|f| [(f, Places::after(10, 20)), (f, ways())]) {
        let (dense, chosen, sparse) = attended(&Reference::default(), &places, format);
        let found = attended(gpu, &places, format);
        assert_eq!(found.1, chosen, "{format}");
        let largest = dense.iter().chain(&sparse).fold(0.0f32, |largest, value| largest.max(value.abs()));
        for (found, expected) in found.0.iter().chain(&found.2).zip(dense.iter().chain(&sparse)) {
            let apart = f64::from((found - expected).abs());
            assert!(apart <= f64::from(largest) * tolerances::ATTENTION, "{format}: {found}, not {expected}");
        }
        let mut last = Places::new(27);
        last.add(1, &[0..1, 1..10, 16..27]);
        last.add(2, &[0..3, 7..9, 10..12]);
        let last = if places == ways() { last } else { Places::after(27, 3) };
        let (dense, chosen, sparse) = attended(gpu, &last, format);
        assert!(found.0.ends_with(&dense) && found.1.ends_with(&chosen) && found.2.ends_with(&sparse), "{format}");
    }
}

/// Longer than a split, and than what one group of threads looks at: with equal scores among the best.
fn many_positions<D: Driver>(gpu: &Gpu<D>) {
    fn of<B: Backend>(backend: &B, first: usize, n: usize) -> (Vec<f32>, Vec<Vec<usize>>, Vec<f32>) {
        let (mla, total) = (Mla { heads: 9, nope: 3, rope: 2, value: 3, latent: 6 }, first + n);
        let dsa = Dsa { heads: 33, width: 35, topk: 260 };
        let cached = |width, seed: u64, repeated: usize| {
            let mut cache = backend.cache(width).unwrap();
            let some = numbers(seed, total.div_ceil(repeated) * width);
            let values: Vec<f32> =
                some.chunks(width).flat_map(|row| row.repeat(repeated)).take(total * width).collect();
            for part in values.chunks(97 * width) {
                backend.append(&mut cache, &rows_of(backend, part, width)).unwrap();
            }
            cache
        };
        // The last rows of what is the same for every n.
        let rows = |width, seed| {
            let all = rows_of(backend, &numbers(seed, 900 * width), width);
            backend.slice(&all, total - n..total, 0..width).unwrap()
        };
        let places = Places::after(first, n);
        let (cache, keys) = (cached(8, 1, 1), cached(35, 2, 3));
        let (q, weights) = (rows(33 * 35, 3), rows(33, 4));
        let selection = backend.select(&dsa, &q, &weights, &keys, &places).unwrap();
        let kv_b = backend.upload("kv_b", matrix(Format::Int8Row, 9 * 6, 6, 5)).unwrap();
        let q = rows(9 * 5, 6);
        let dense = backend.attention(&mla, &q, &kv_b, &cache, &places, None).unwrap();
        let sparse = backend.attention(&mla, &q, &kv_b, &cache, &places, Some(&selection)).unwrap();
        let chosen = backend.read_selection(&selection).unwrap();
        (backend.read(&dense).unwrap(), chosen, backend.read(&sparse).unwrap())
    }
    let (dense, chosen, sparse) = of(&Reference::default(), 797, 3);
    let found = of(gpu, 797, 3);
    assert_eq!(found.1, chosen);
    for (found, exact) in found.0.iter().chain(&found.2).zip(dense.iter().chain(&sparse)) {
        assert!(f64::from((found - exact).abs()) <= 2.0 * tolerances::ATTENTION, "{found}, not {exact}");
    }
    let alone = of(gpu, 799, 1);
    assert!(found.0.ends_with(&alone.0) && found.1.ends_with(&alone.1) && found.2.ends_with(&alone.2));
}

/// Rows through two of three experts, each of which has many of them.
fn many_of_three<B: Backend>(backend: &B, format: Format, rows: Range<usize>) -> Vec<f32> {
    through(backend, Made::three(format), 26, rows)
}

fn choices_and_experts<D: Driver>(gpu: &Gpu<D>) {
    for format in formats() {
        let exact = routed(&Reference::default(), format, 0..12);
        let found = routed(gpu, format, 0..12);
        let largest = exact.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        for (found, expected) in found.iter().zip(&exact) {
            let apart = f64::from((found - expected).abs());
            assert!(apart <= f64::from(largest) * tolerances::EXPERTS, "{format}: {found}, not {expected}");
        }
        let in_pieces = [routed(gpu, format, 0..1), routed(gpu, format, 1..5), routed(gpu, format, 5..12)];
        assert_eq!(bits(&in_pieces.concat()), bits(&found), "{format}");
    }
    for format in formats().into_iter().take(8) {
        let exact = many_of_three(&Reference::default(), format, 0..26);
        let found = many_of_three(gpu, format, 0..26);
        let largest = exact.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        for (found, expected) in found.iter().zip(&exact) {
            let apart = f64::from((found - expected).abs());
            assert!(apart <= f64::from(largest) * tolerances::EXPERTS, "{format}: {found}, not {expected}");
        }
        let in_pieces = [many_of_three(gpu, format, 0..1), many_of_three(gpu, format, 1..26)];
        assert_eq!(bits(&in_pieces.concat()), bits(&found), "{format}");
    }
    // A choice that is given, and its parts by themselves.
    let format = Format::Int4Grouped { group_size: 64 };
    let experts = gpu.upload_experts(&Made::six(format)).unwrap();
    let routed = [vec![(5, 0.5), (0, 2.0)], vec![(0, 1.0), (3, 0.25)], vec![(5, 1.5), (3, 1.0)]];
    let (choice, x) = (gpu.chosen(&routed).unwrap(), rows_of(gpu, &numbers(52, 3 * 40), 40));
    assert_eq!(gpu.read_choice(&choice).unwrap(), routed);
    let groups = gpu.groups_of(&experts, &choice).unwrap();
    let part = |projection, x| gpu.projected(&experts, projection, &groups, x).unwrap();
    let gated = gpu.swiglu(&part(Projection::Gate, &x), &part(Projection::Up, &x)).unwrap();
    let down = gpu.read(&part(Projection::Down, &gated)).unwrap();
    let whole = gpu.read(&gpu.experts(&experts, &choice, &x).unwrap()).unwrap();
    for (row, routed) in routed.iter().enumerate() {
        for column in 0..40 {
            let sum: f32 = (0..2).map(|slot| routed[slot].1 * down[(2 * row + slot) * 40 + column]).sum();
            assert!((sum - whole[row * 40 + column]).abs() <= 1e-5 * sum.abs().max(1.0), "row {row}, column {column}");
        }
    }
    // Groups of experts, of which only the best are looked at; equal scores; scores that are no numbers.
    fn choose<B: Backend>(backend: &B, routing: &Routing, bias: &[f32], x: &[f32]) -> Vec<Vec<Routed>> {
        let codes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let vector = |values: &[f32], columns: usize| Matrix {
            rows: values.len() / columns,
            columns,
            format: Format::F32,
            codes: codes(values),
            scales: vec![],
        };
        let gate = backend.upload("gate", vector(&numbers(6, 2 * bias.len()), 2)).unwrap();
        let bias = backend.upload("bias", vector(bias, 1)).unwrap();
        backend.read_choice(&backend.route(routing, &gate, &bias, &rows_of(backend, x, 2)).unwrap()).unwrap()
    }
    let plain = Routing { chosen: 3, groups: 1, chosen_groups: 1, normalized: true, factor: 2.5 };
    let biases = [vec![0.0; 12], numbers(1, 12), vec![-3.0; 12], numbers(2, 256), numbers(3, 1000)];
    for routing in [
        plain,
        Routing { normalized: false, ..plain },
        Routing { groups: 4, chosen_groups: 2, ..plain },
        Routing { groups: 2, chosen_groups: 1, factor: 1.0, ..plain },
    ] {
        for bias in &biases {
            let x = [numbers(7, 8), vec![0.0, 0.0]].concat();
            let (found, exact) = (choose(gpu, &routing, bias, &x), choose(&Reference::default(), &routing, bias, &x));
            for (found, exact) in found.iter().flatten().zip(exact.iter().flatten()) {
                assert_eq!(found.0, exact.0, "{routing:?}");
                assert_close("weights of experts", &[found.1], &[exact.1], 8.0);
            }
        }
    }
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut bias = vec![0.0; 12];
        bias[5] = wrong;
        let chosen = choose(gpu, &plain, &bias, &[1.0, 1.0]).remove(0);
        let mut ids: Vec<usize> = chosen.iter().map(|&(expert, _)| expert).collect();
        ids.sort_unstable();
        ids.dedup();
        assert!(ids.len() == 3 && ids.iter().all(|&id| id < 12), "{wrong}: {chosen:?}");
        assert!(chosen.iter().all(|(_, weight)| weight.is_nan()), "{wrong}: {chosen:?}");
    }
    // A router of many columns, all rows at once and each alone.
    for (experts, columns) in [(256, 6144), (7, 70), (5, 9)] {
        fn routed<B: Backend>(backend: &B, experts: usize, columns: usize, x: &[f32]) -> Vec<Vec<Routed>> {
            let routing = Routing { chosen: 3, groups: 1, chosen_groups: 1, normalized: true, factor: 2.5 };
            let gate = backend.upload("gate", matrix(Format::F32, experts, columns, 1)).unwrap();
            let bias = backend.upload("bias", matrix(Format::F32, experts, 1, 2)).unwrap();
            let choice = backend.route(&routing, &gate, &bias, &rows_of(backend, x, columns)).unwrap();
            backend.read_choice(&choice).unwrap()
        }
        // Logits of about 1.
        let x: Vec<f32> = numbers(3, 9 * columns).iter().map(|x| x * 3.0 / (columns as f32).sqrt()).collect();
        let (found, exact) = (routed(gpu, experts, columns, &x), routed(&Reference::default(), experts, columns, &x));
        for ((row, found), exact) in found.iter().enumerate().zip(&exact) {
            let ids = |routed: &[Routed]| routed.iter().map(|&(expert, _)| expert).collect::<Vec<_>>();
            let weights = |routed: &[Routed]| routed.iter().map(|&(_, weight)| weight).collect::<Vec<_>>();
            assert_eq!(ids(found), ids(exact), "{experts} experts of {columns} columns, row {row}");
            assert_close("weights of experts", &weights(found), &weights(exact), 64.0);
            let alone = routed(gpu, experts, columns, &x[row * columns..][..columns]).remove(0);
            assert_eq!(bits(&weights(&alone)), bits(&weights(found)), "row {row} alone");
        }
    }
    let many = numbers(1, 1025);
    let gate = gpu.upload("gate", matrix(Format::F32, 1025, 2, 1)).unwrap();
    let bias = gpu.upload("bias", matrix(Format::F32, 1025, 1, 1)).unwrap();
    let refused = gpu.route(&plain, &gate, &bias, &rows_of(gpu, &many[..2], 2)).err().unwrap().to_string();
    assert_eq!(refused, "experts of a layer are 1025, a GPU computes at most 1024");
}

/// Operations in one launch give the bits that they give by themselves.
fn together<D: Driver>(gpu: &Gpu<D>) {
    let read = |rows: &Rows<D>| bits(&gpu.read(rows).unwrap());
    let vector = |width: usize, seed: u64| gpu.upload("vector", matrix(Format::F32, width, 1, seed)).unwrap();
    for width in [3, 40, 6144] {
        let (x, y) = (numbers(1, 3 * width), rows_of(gpu, &numbers(2, 3 * width), width));
        let [mut alone, mut at_once] = [0, 1].map(|_| rows_of(gpu, &x, width));
        gpu.add(&mut alone, &y).unwrap();
        let expected = gpu.rms_norm(&alone, &vector(width, 3), 1e-5).unwrap();
        let found = gpu.add_norm(&mut at_once, &y, &vector(width, 3), 1e-5).unwrap();
        assert_eq!((read(&at_once), read(&found)), (read(&alone), read(&expected)), "add_norm of {width}");
    }
    // Of latents in fours and of others; heads that need more than one group of threads.
    for (latent, pairs, count) in [(512, 32, 64), (37, 3, 3), (24, 5, 200)] {
        let rope = Rope { frequencies: (0..pairs).map(|j| 10_000f32.powf(-(j as f32) / pairs as f32)).collect() };
        let heads = Heads { width: 2 * pairs + 7, rope_at: 7 };
        let (norm, width) = (vector(latent, 5), latent + 2 * pairs);
        let kept = Kept { norm: &norm, eps: 1e-6, latent, rope: &rope, heads };
        let mut caches = [0, 1].map(|_| gpu.cache(width).unwrap());
        for (n, first) in [(3, 0), (1, 3)] {
            let positions: Vec<usize> = (first..first + n).map(|at| 1000 * at).collect();
            let kv = rows_of(gpu, &numbers(6, n * width), width);
            let [mut alone, mut at_once] =
                [0, 1].map(|_| rows_of(gpu, &numbers(7, n * count * heads.width), count * heads.width));
            gpu.keep(&mut caches[0], &mut at_once, &kv, &kept, &positions).unwrap();
            gpu.rope(&mut alone, &rope, heads, &positions).unwrap();
            let latents = gpu.rms_norm(&gpu.slice(&kv, 0..n, 0..latent).unwrap(), &norm, 1e-6).unwrap();
            let mut keys = gpu.slice(&kv, 0..n, latent..width).unwrap();
            gpu.rope(&mut keys, &rope, Heads { width: 2 * pairs, rope_at: 0 }, &positions).unwrap();
            gpu.append(&mut caches[1], &gpu.concat(&latents, &keys).unwrap()).unwrap();
            assert_eq!(read(&at_once), read(&alone), "queries, {latent} {pairs}");
        }
        let [found, expected] = caches.map(|cache| {
            assert_eq!(gpu.cache_len(&cache), 4);
            gpu.device.read_words(cache.values.buffer(), 4 * width).unwrap()
        });
        assert_eq!(found, expected, "cache, {latent} {pairs}");
    }
    // Alike, of two formats, and with a block of rows that ends between them.
    let grouped = Format::Int4Grouped { group_size: 64 };
    for (formats, [first, second]) in [
        ([grouped; 2], [48, 33]),
        ([grouped, Format::Int8Row], [20, 5]),
        ([Format::Fp8E4m3B128; 2], [128, 7]),
        ([Format::Fp8E4m3B128; 2], [100, 7]),
        ([Format::F32; 2], [3, 4]),
    ] {
        let matrices = || [matrix(formats[0], first, 600, 1), matrix(formats[1], second, 600, 2)];
        let pair = gpu.upload_pair(["a", "b"], matrices()).unwrap();
        for n in [1, 5, 20] {
            let x = numbers(3, n * 600);
            let found = gpu.matmul_pair(pair.as_ref(), &rows_of(gpu, &x, 600)).unwrap();
            let expected = matrices().map(|matrix| bits(&product(gpu, &matrix, &x)));
            assert_eq!(found.each_ref().map(read), expected, "{formats:?}, {n} rows");
        }
    }
    let experts = gpu.upload_experts(&Made::six(grouped)).unwrap();
    let choice = gpu.chosen(&[vec![(5, 0.5), (0, 2.0)], vec![(0, 1.0), (3, 0.25)]]).unwrap();
    let [x, shared, mut alone, mut at_once] = [1, 2, 3, 3].map(|seed| rows_of(gpu, &numbers(seed, 2 * 40), 40));
    let mut sum = gpu.experts(&experts, &choice, &x).unwrap();
    gpu.add(&mut sum, &shared).unwrap();
    gpu.add(&mut alone, &sum).unwrap();
    gpu.add_experts(&mut at_once, &experts, &choice, &x, &shared).unwrap();
    assert_eq!(read(&at_once), read(&alone));
}

fn caches<D: Driver>(gpu: &Gpu<D>) {
    let mut cache = gpu.cache(3).unwrap();
    let values = numbers(1, 3 * 50);
    for part in values.chunks(9) {
        gpu.append(&mut cache, &rows_of(gpu, part, 3)).unwrap();
    }
    assert_eq!(gpu.cache_len(&cache), 50);
    gpu.truncate(&mut cache, 20);
    gpu.append(&mut cache, &rows_of(gpu, &values[..6], 3)).unwrap();
    assert_eq!(gpu.cache_len(&cache), 22);
    let words = gpu.device.read_words(cache.values.buffer(), 66).unwrap();
    let kept: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
    assert_eq!(kept, [&values[..60], &values[..6]].concat());
}

fn predictions<D: Driver>(gpu: &Gpu<D>) {
    fn of<B: Backend>(backend: &B, vocabulary: usize, n: usize) -> Vec<Prediction> {
        let head = backend.upload("head", matrix(Format::Int8Row, vocabulary, 20, 1)).unwrap();
        let x: Vec<f32> = numbers(2, n * 20).iter().map(|value| value * 8.0).collect();
        let asked: Vec<Option<u32>> = (0..n).map(|row| (row % 3 > 0).then_some((row % vocabulary) as u32)).collect();
        backend.predict(&head, &rows_of(backend, &x, 20), &asked).unwrap()
    }
    for (vocabulary, n) in [(1, 2), (2, 1), (255, 3), (1000, 3), (300, 130), (9000, 2)] {
        let found = of(gpu, vocabulary, n);
        assert_eq!(found.len(), n);
        for (found, exact) in found.iter().zip(of(&Reference::default(), vocabulary, n)) {
            assert_eq!(found.id, exact.id);
            assert_eq!(found.asked.is_some(), exact.asked.is_some());
            for (found, exact) in [
                (f64::from(found.logit), f64::from(exact.logit)),
                (f64::from(found.runner_up), f64::from(exact.runner_up)),
                (found.log_sum_exp, exact.log_sum_exp),
                (f64::from(found.asked.unwrap_or(0.0)), f64::from(exact.asked.unwrap_or(0.0))),
            ] {
                assert!(found == exact || (found - exact).abs() <= 2e-5, "{vocabulary}: {found}, not {exact}");
            }
        }
    }
    // Of equal logits the lowest id; what is no number is seen.
    let ones =
        Matrix { rows: 600, columns: 1, format: Format::F32, codes: [0, 0, 128, 63].repeat(600), scales: vec![] };
    let head = gpu.upload("head", ones).unwrap();
    let said = gpu.predict(&head, &rows_of(gpu, &[1.0, f32::NAN], 1), &[None, None]).unwrap();
    assert_eq!((said[0].id, said[0].margin()), (0, 0.0));
    assert!((said[0].log_sum_exp - (1.0 + 600f64.ln())).abs() < 1e-6);
    assert!(!said[1].log_sum_exp.is_finite());
    // A slice of nothing but −∞ beside others, and one with what is no number.
    for (wrong, seen) in [(f32::NEG_INFINITY, true), (f32::NAN, false)] {
        let mut values = vec![0.0f32; 9000];
        values[4096..8192].fill(wrong);
        values[8500] = 2.0;
        let codes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let head = Matrix { rows: 9000, columns: 1, format: Format::F32, codes, scales: vec![] };
        let head = gpu.upload("head", head).unwrap();
        let said = gpu.predict(&head, &rows_of(gpu, &[1.0], 1), &[Some(8500)]).unwrap()[0];
        assert_eq!(said.log_sum_exp.is_finite(), seen, "{wrong}");
        if seen {
            assert_eq!((said.id, said.logit, said.runner_up, said.asked), (8500, 2.0, 0.0, Some(2.0)));
            assert!((said.log_sum_exp - (4903.0 + 2f64.exp()).ln()).abs() < 1e-6);
        }
    }
}

/// The sums of what is read are those of all words, each of them.
fn reads<D: Driver>(gpu: &Gpu<D>) {
    let device = gpu.gpu();
    let pieces = 3 * 2048 + 77;
    let mut words: Vec<u32> = (0..4 * pieces as u32).map(|at| at.wrapping_mul(2_654_435_761) ^ at >> 3).collect();
    let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let buffer = device.allocate(16 * pieces as u64, "a test").unwrap();
    let sums = device.allocate(peaks::SUM_BYTES, "a test").unwrap();
    device.driver().write(&buffer, 0, &bytes(&words)).unwrap();
    let total = |values: &[u32]| values.iter().fold(0u32, |sum, &value| sum.wrapping_add(value));
    let read = |range: Range<usize>| {
        let count = device.read_pieces(&buffer, range.start as u64..range.end as u64, &sums).unwrap();
        total(&device.read_words(&sums, count as usize).unwrap())
    };
    let ranges = [0..1, 0..255, 0..2047, 0..2048, 0..2049, 5..pieces, pieces - 1..pieces, 100..100 + 2 * 2048];
    for range in ranges {
        assert_eq!(read(range.clone()), total(&words[4 * range.start..4 * range.end]), "pieces {range:?}");
    }
    for changed in [0, 3, 4 * 2048 - 1, 4 * 2048, 4 * pieces - 1] {
        words[changed] ^= 0x0100_0001;
        device.driver().write(&buffer, 4 * changed as u64, &words[changed].to_le_bytes()).unwrap();
        assert_eq!(read(0..pieces), total(&words), "word {changed}");
    }
    // More tiles than groups.
    let constants = [0, pieces as u32];
    device.launch(Kernel::plain(Name::Read), [2, 1, 1], &[&buffer, &sums], &constants).unwrap();
    assert_eq!(total(&device.read_words(&sums, 16).unwrap()), total(&words));
}

/// Products and sums in registers are those of the formula.
fn multiplies<D: Driver>(gpu: &Gpu<D>) {
    let device = gpu.gpu();
    let out = device.allocate(4 * 512, "a test").unwrap();
    let constants = [3, 0.75f32.to_bits(), 0.5f32.to_bits()];
    device.launch(Kernel::plain(Name::FmaPeak), [2, 1, 1], &[&out], &constants).unwrap();
    let chain = |k: usize| (0..3 * 16).fold(k as f32, |x, _| x.mul_add(0.75, 0.5));
    let expected: f32 = (0..8).map(chain).sum();
    for word in device.read_words(&out, 512).unwrap() {
        assert!((f32::from_bits(word) - expected).abs() <= 1e-4, "{}, not {expected}", f32::from_bits(word));
    }
}

/// What was recorded is done as often as it is asked for, in its turn, with memory that nobody else has any more.
fn recordings<D: Driver>(gpu: &Gpu<D>) {
    let device = gpu.gpu();
    let (x, y) = (rows_of(gpu, &[1.0, 2.0], 2), device.allocate(8, "a test").unwrap());
    device.driver().write(&y, 0, &[10f32.to_le_bytes(), 20f32.to_le_bytes()].concat()).unwrap();
    let before = device.launches();
    let recorded = device
        .record(|| {
            let (twice, sum) = (gpu.concat(&x, &x)?, gpu.slice(&x, 0..1, 0..2)?);
            device.launch(Kernel::plain(Name::Add), [1, 1, 1], &[sum.buffer(), &y], &[2])?;
            device.launch(Kernel::plain(Name::Add), [1, 1, 1], &[x.buffer(), sum.buffer()], &[2])?;
            drop(twice);
            Ok(())
        })
        .unwrap();
    assert_eq!((recorded.launches(), device.launches()), (5, before));
    assert_eq!(gpu.read(&x).unwrap(), [1.0, 2.0], "nothing is done yet");
    drop(y);
    // What is made meanwhile is not in the place of what the recording uses.
    let others: Vec<Rows<D>> = (0..8).map(|_| rows_of(gpu, &[1000.0; 4], 2)).collect();
    // x + (x + y), again and again.
    device.replay(&recorded).unwrap();
    assert_eq!(gpu.read(&x).unwrap(), [12.0, 24.0]);
    let elapsed = device.timed(&recorded, 2).unwrap();
    assert_eq!(gpu.read(&x).unwrap(), [78.0, 156.0]);
    assert!(elapsed.seconds > 0.0, "{elapsed:?}");
    assert_eq!(device.launches() - before, 15);
    assert!(others.iter().all(|rows| gpu.read(rows).unwrap() == [1000.0; 4]));
    device.replay(&recorded).unwrap();
    drop(recorded);
    assert_eq!(gpu.read(&x).unwrap(), [166.0, 332.0]);
    // More launches than a submission has.
    let (mut sum, one) = (rows_of(gpu, &[0.0], 1), rows_of(gpu, &[1.0], 1));
    let many = device.record(|| (0..200).try_for_each(|_| gpu.add(&mut sum, &one))).unwrap();
    (0..3).for_each(|_| device.replay(&many).unwrap());
    assert_eq!(gpu.read(&sum).unwrap(), [600.0]);
    // What fails while it is recorded is told, and the device goes on.
    let most = device.driver().limits().groups[1] as usize;
    let failing = device.record(|| {
        gpu.add(&mut sum, &one)?;
        device.launch(Kernel::plain(Name::Add), [1, most + 1, 1], &[sum.buffer(), one.buffer()], &[1])
    });
    assert!(failing.unwrap_err().to_string().starts_with("add "));
    assert_eq!(gpu.read(&sum).unwrap(), [600.0]);
}

/// A fault on purpose makes a launch fail, or its numbers wrong; then the device goes on.
pub(in crate::backend) fn faults_on_purpose<D: Driver>(open: impl Fn() -> D) {
    use device::InjectionKind;
    let x = numbers(1, 64);
    let matrix = matrix(Format::Int4Row, 40, 64, 2);
    /// With a weight of which rows could be looked up: its kernel is that of every device.
    fn product<D: Driver>(gpu: &Gpu<D>, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
        product_with(gpu, &gpu.upload("w", matrix.clone()).unwrap(), matrix, x)
    }
    let right = product(&Gpu::new(open(), None), &matrix, &x);
    let on = |launch, kind| {
        let gpu = Gpu::new(open(), Some(Injection { launch, kind }));
        // What nobody looks at does not count.
        assert_eq!(product(&gpu, &matrix, &x), right);
        gpu.arm();
        gpu
    };
    let failing = on(2, InjectionKind::Launch);
    let weight = failing.upload("w", matrix.clone()).unwrap();
    let run = || failing.matmul(&weight, &rows_of(&failing, &x, 64)).and_then(|out| failing.read(&out));
    assert_eq!(run().unwrap(), right);
    assert_eq!(run().unwrap_err().to_string(), "launch 2, matmul_int4_row_1, was made to fail");
    assert_eq!(failing.gpu().injected(), Some((2, "matmul_int4_row_1".into())));
    assert_eq!(run().unwrap(), right);
    let wrong = on(1, InjectionKind::Numbers);
    let found = product(&wrong, &matrix, &x);
    assert!(found.iter().zip(&right).all(|(found, right)| found != right) && wrong.gpu().injected().is_some());
    assert_eq!(product(&wrong, &matrix, &x), right);
}

/// A format that no kernel reads is refused by name.
pub(in crate::backend) fn formats_are_refused<D: Driver>(gpu: &Gpu<D>) {
    for format in [Format::E8Iq3Lattice, Format::Mxfp4, Format::Int4Grouped { group_size: 0 }] {
        let matrix = Matrix { rows: 1, columns: 4, format, codes: vec![0; 98], scales: vec![1.0] };
        let message = gpu.upload("w", matrix).unwrap_err().to_string();
        assert_eq!(message, format!("tensor w: the {} backend does not compute {format}", gpu.name()));
    }
}
