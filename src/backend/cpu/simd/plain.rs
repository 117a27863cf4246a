//! Without vector instructions: the same arithmetic, a value at a time. It is slow where the CPU has no fused product.

use super::{CHUNK, Coding, Job, LANES, Lanes, Tile, WORD, WORDS, codes, order, product};
use crate::dequantize::fp8::e4m3;

/// Nothing to prove.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plain;

/// The product for any coding.
pub(super) fn multiply(job: &Job<'_>, first: usize, out: &mut [f32]) {
    match job.coding {
        Coding::F32 => product::block::<Plain, codes::F32>(Plain, job, first, out),
        Coding::Int8 => product::block::<Plain, codes::Int8>(Plain, job, first, out),
        Coding::Int4 => product::block::<Plain, codes::Int4>(Plain, job, first, out),
        Coding::Int4Words => product::block::<Plain, codes::Int4Words>(Plain, job, first, out),
        Coding::Int3 => product::block::<Plain, codes::Int3>(Plain, job, first, out),
        Coding::Int2 => product::block::<Plain, codes::Int2>(Plain, job, first, out),
        Coding::Fp8 => product::block::<Plain, codes::Fp8>(Plain, job, first, out),
        Coding::Decoded => product::decoded(Plain, job, first, out),
    }
}

/// Whole rows of any coding.
pub(super) fn decode(job: &Job<'_>, first: usize, out: &mut [f32]) {
    match job.coding {
        Coding::F32 => product::decode::<Plain, codes::F32>(Plain, job, first, out),
        Coding::Int8 => product::decode::<Plain, codes::Int8>(Plain, job, first, out),
        Coding::Int4 => product::decode::<Plain, codes::Int4>(Plain, job, first, out),
        Coding::Int4Words => product::decode::<Plain, codes::Int4Words>(Plain, job, first, out),
        Coding::Int3 => product::decode::<Plain, codes::Int3>(Plain, job, first, out),
        Coding::Int2 => product::decode::<Plain, codes::Int2>(Plain, job, first, out),
        Coding::Fp8 => product::decode::<Plain, codes::Fp8>(Plain, job, first, out),
        Coding::Decoded => product::decode_plainly(job, first, out),
    }
}

/// The weights of a chunk in the order of a coding; `value` gives that of a column.
fn ordered(order: &[u8; CHUNK], value: impl Fn(usize) -> f32) -> [[f32; LANES]; 4] {
    std::array::from_fn(|v| std::array::from_fn(|lane| value(usize::from(order[v * LANES + lane]))))
}

impl Lanes for Plain {
    type Vector = [f32; LANES];
    const TILE: (usize, usize) = (2, 3);

    fn zero(self) -> Self::Vector {
        [0.0; LANES]
    }

    fn splat(self, value: f32) -> Self::Vector {
        [value; LANES]
    }

    fn load(self, values: &[f32; LANES]) -> Self::Vector {
        *values
    }

    fn store(self, values: Self::Vector, out: &mut [f32; LANES]) {
        *out = values;
    }

    fn fma(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    fn sum(self, mut values: Self::Vector) -> f32 {
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                values[i] += values[i + half];
            }
            half /= 2;
        }
        values[0]
    }

    fn prefetch(self, _from: &[u8], _ahead: usize) {}

    fn f32(self, codes: &[u8; 4 * CHUNK]) -> [Self::Vector; 4] {
        let values = codes.as_chunks::<4>().0;
        ordered(&const { order(Coding::F32) }, |column| f32::from_le_bytes(values[column]))
    }

    fn int8(self, codes: &[u8; CHUNK], scale: f32) -> [Self::Vector; 4] {
        ordered(&const { order(Coding::Int8) }, |column| f32::from(codes[column].cast_signed()) * scale)
    }

    fn int4(self, codes: &[u8; CHUNK / 2], scale: f32) -> [Self::Vector; 4] {
        self.int4_words(codes, &[scale; WORDS])
    }

    fn int4_words(self, codes: &[u8; CHUNK / 2], scales: &[f32; WORDS]) -> [Self::Vector; 4] {
        ordered(&const { order(Coding::Int4) }, |column| {
            let nibble = codes[column / 2] >> (4 * (column % 2)) & 15;
            (f32::from(nibble) - 8.0) * scales[column / WORD]
        })
    }

    fn int3(self, codes: &[u8; 24], scale: f32) -> [Self::Vector; 4] {
        ordered(&const { order(Coding::Int3) }, |column| {
            let low = codes[column / 4] >> (2 * (column % 4)) & 3;
            let high = codes[16 + column / 8] >> (column % 8) & 1;
            (f32::from(low | high << 2) - 4.0) * scale
        })
    }

    fn int2(self, codes: &[u8; CHUNK / 4], scale: f32) -> [Self::Vector; 4] {
        ordered(&const { order(Coding::Int2) }, |column| {
            let pair = codes[column / 4] >> (2 * (column % 4)) & 3;
            (f32::from(pair) - 2.0) * scale
        })
    }

    fn fp8(self, codes: &[u8; CHUNK], scale: f32) -> [Self::Vector; 4] {
        ordered(&const { order(Coding::Fp8) }, |column| e4m3(codes[column]) * scale)
    }

    fn accumulate(self, tile: Tile<'_>) {
        product::accumulate(self, tile);
    }
}
