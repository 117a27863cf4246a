//! What the tests of all backends compute: matrices of every format, attention, experts.

use std::ops::Range;

use crate::backend::{Backend, Dsa, ExpertSource, Mla, Places, Routing};
use crate::error::Result;
use crate::format::Format;
use crate::quantize::Quantizer;
use crate::roles::Projection;
use crate::weights::Matrix;

/// Numbers from −1 to 1, exact in f32.
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 - 8_388_608.0) / 8_388_608.0
    };
    (0..count).map(|_| next()).collect()
}

/// Formats with every kind of kernel, and some without one of their own.
pub fn formats() -> Vec<Format> {
    let grouped =
        [64, 128, 192, 8, 16, 32, 48, 96, 200, 7, 12, 100_000].map(|group_size| Format::Int4Grouped { group_size });
    let others = [Format::F32, Format::Int8Row, Format::Int4Row, Format::Int3G64, Format::Int2Row, Format::Fp8E4m3B128];
    others.into_iter().chain(grouped).collect()
}

/// A matrix of any codes that a format has.
pub fn matrix(format: Format, rows: usize, columns: usize, seed: u64) -> Matrix {
    let values = numbers(seed, rows * columns);
    let quantizer = match format {
        Format::F32 => Quantizer::F32,
        Format::Int8Row => Quantizer::Int8Row { bits: 8 },
        Format::Int4Row => Quantizer::Int4Row,
        Format::Int4Grouped { group_size } => Quantizer::Int4Grouped { group_size: group_size as usize },
        Format::Int3G64 => Quantizer::Int3G64,
        Format::Int2Row => Quantizer::Int2Row,
        _ => {
            // Every code but NaN.
            let code = |value: &f32| match value.to_bits() as u8 ^ (value.to_bits() >> 8) as u8 {
                0x7f => 0x7e,
                0xff => 0xfe,
                code => code,
            };
            let scales = numbers(seed + 1, rows.div_ceil(128) * columns.div_ceil(128));
            return Matrix { rows, columns, format, codes: values.iter().map(code).collect(), scales };
        }
    };
    let (bytes, per_row) = (quantizer.row_code_bytes(columns), quantizer.row_scales(columns));
    let (mut codes, mut scales) = (vec![0; rows * bytes], vec![0.0; rows * per_row]);
    for (row, values) in values.chunks_exact(columns).enumerate() {
        quantizer.quantize_row(values, &mut codes[row * bytes..][..bytes], &mut scales[row * per_row..][..per_row]);
    }
    Matrix { rows, columns, format, codes, scales }
}

/// Several ways on from the beginning of a text of 10 tokens, one of which goes on itself: 20 rows.
pub fn ways() -> Places {
    let mut ways = Places::new(10);
    ways.add(5, &[0..3, 7..9]);
    ways.add(1, &[]);
    ways.add(12, &[0..1, 1..10]);
    ways.add(2, &[0..3, 7..9, 10..12]);
    ways
}

/// Attention and its choice of positions on a backend, for the last rows of a cache.
pub fn attended<B: Backend>(backend: &B, places: &Places, format: Format) -> (Vec<f32>, Vec<Vec<usize>>, Vec<f32>) {
    let mla = Mla { heads: 3, nope: 5, rope: 4, value: 7, latent: 37 };
    let dsa = Dsa { heads: 3, width: 18, topk: 9 };
    let (positions, n) = (30, places.rows());
    let fill = |width, seed| {
        let mut cache = backend.cache(width).unwrap();
        backend.append(&mut cache, &backend.write(&numbers(seed, positions * width), width).unwrap()).unwrap();
        cache
    };
    let rows = |width, seed| {
        let all = backend.write(&numbers(seed, positions * width), width).unwrap();
        backend.slice(&all, positions - n..positions, 0..width).unwrap()
    };
    let kv_b = backend.upload("kv_b", matrix(format, 3 * 12, 37, 11)).unwrap();
    let (cache, keys, q) = (fill(41, 1), fill(18, 2), rows(27, 3));
    let selection = backend.select(&dsa, &rows(54, 4), &rows(3, 5), &keys, places).unwrap();
    let dense = backend.attention(&mla, &q, &kv_b, &cache, places, None).unwrap();
    let sparse = backend.attention(&mla, &q, &kv_b, &cache, places, Some(&selection)).unwrap();
    let chosen = backend.read_selection(&selection).unwrap();
    (backend.read(&dense).unwrap(), chosen, backend.read(&sparse).unwrap())
}

/// Experts of a format that are made here.
#[derive(Clone, Copy)]
pub struct Made {
    pub format: Format,
    pub count: usize,
    /// Width of the rows that go in, and of what is between the products.
    pub width: usize,
    pub inner: usize,
}

impl Made {
    /// Six of narrow rows.
    pub fn six(format: Format) -> Made {
        Made { format, count: 6, width: 40, inner: 70 }
    }

    /// Three of wide rows.
    pub fn three(format: Format) -> Made {
        Made { format, count: 3, width: 2100, inner: 36 }
    }
}

impl ExpertSource for Made {
    fn layer(&self) -> u64 {
        1
    }

    fn count(&self) -> usize {
        self.count
    }

    fn name(&self, expert: usize, _projection: Projection) -> String {
        expert.to_string()
    }

    fn load(&self, expert: usize, projection: Projection) -> Result<Matrix> {
        let (seed, Made { format, width, inner, .. }) = (3 * expert as u64, *self);
        Ok(match projection {
            Projection::Gate => matrix(format, inner, width, seed),
            Projection::Up => matrix(format, inner, width, seed + 1),
            Projection::Down => matrix(format, width, inner, seed + 2),
        })
    }
}

/// Rows `rows` of some input through those of the six experts that they choose.
pub fn routed<B: Backend>(backend: &B, format: Format, rows: Range<usize>) -> Vec<f32> {
    through(backend, Made::six(format), 12, rows)
}

/// Rows `rows` of an input of `all` rows through the two experts that each chooses.
pub fn through<B: Backend>(backend: &B, made: Made, all: usize, rows: Range<usize>) -> Vec<f32> {
    let Made { count, width, .. } = made;
    let experts = backend.upload_experts(&made).unwrap();
    let gate = backend.upload("gate", matrix(Format::F32, count, width, 50)).unwrap();
    let bias = backend.upload("bias", matrix(Format::F32, count, 1, 51)).unwrap();
    let routing = Routing { chosen: 2, groups: 1, chosen_groups: 1, normalized: true, factor: 2.5 };
    let x = backend.write(&numbers(52, all * width), width).unwrap();
    let x = backend.slice(&x, rows, 0..width).unwrap();
    let choice = backend.route(&routing, &gate, &bias, &x).unwrap();
    backend.read(&backend.experts(&experts, &choice, &x).unwrap()).unwrap()
}
