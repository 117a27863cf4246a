//! AVX-512: 16 values are one vector.

use std::arch::x86_64::*;

use super::{CHUNK, Coding, Dsa, Job, LANES, Lanes, Task, Terms, Tile, WORDS, attend, codes, limits, product};
use crate::dequantize::fp8::E4M3_UPPER;
use crate::isa::Avx512;

kernels!(Avx512, "avx512f,avx512bw,avx512vl,avx512vbmi,avx2,fma,f16c");

/// An expression of intrinsics that need no more than an [`Avx512`], of which there must be one.
macro_rules! proven {
    ($proof:expr, $work:expr) => {{
        let Avx512 { .. } = $proof;
        // SAFETY: the proof is only made where the CPU has the features, and no pointer is read or written but through
        // references to arrays of the size that is read or written; a prefetch may be of any address.
        unsafe { $work }
    }};
}

/// What a lane is shifted by: `step` for each vector and `part` for each part of so many lanes, from `first` on.
const fn shifts(vector: i32, step: i32, lanes_per_part: usize, part: i32, first: i32) -> [i32; LANES] {
    let mut shifts = [0; LANES];
    let mut lane = 0;
    while lane < LANES {
        shifts[lane] = first + step * vector + part * (lane / lanes_per_part) as i32;
        lane += 1;
    }
    shifts
}

/// By what the pairs of vector v are shifted down.
const PAIRS: [[i32; LANES]; 4] =
    [shifts(0, 8, 4, 2, 0), shifts(1, 8, 4, 2, 0), shifts(2, 8, 4, 2, 0), shifts(3, 8, 4, 2, 0)];

/// By what the third bits of vector v are rotated down to stand at bit 2; odd lanes have the upper half of a word.
const THIRDS: [[i32; LANES]; 4] = {
    let mut shifts = [[0; LANES]; 4];
    let mut i = 0;
    while i < 4 * LANES {
        let (vector, lane) = (i / LANES, i % LANES);
        shifts[vector][lane] = (32 + 16 * (lane % 2) + 4 * vector + lane / 4 - 2) as i32 % 32;
        i += 1;
    }
    shifts
};

/// By what the nibbles of vector v are shifted down.
const NIBBLES: [[i32; LANES]; 4] =
    [shifts(0, 8, 8, 4, 0), shifts(1, 8, 8, 4, 0), shifts(2, 8, 8, 4, 0), shifts(3, 8, 8, 4, 0)];

/// 0, 1, … 15 less an offset; with a period.
const fn levels(period: usize, offset: i32) -> [f32; LANES] {
    let mut levels = [0.0; LANES];
    let mut i = 0;
    while i < LANES {
        levels[i] = ((i % period) as i32 - offset) as f32;
        i += 1;
    }
    levels
}

const LEVELS_4: [f32; LANES] = levels(16, 8);
const LEVELS_3: [f32; LANES] = levels(8, 4);
const LEVELS_2: [f32; LANES] = levels(4, 2);

/// Where each e4m3 byte comes from, so that columns are in order after they are put together within lanes of 128 bits.
const SPREAD: [u8; CHUNK] = {
    let mut spread = [0; CHUNK];
    let mut column = 0;
    while column < CHUNK {
        let (vector, lane) = (column / LANES, column % LANES);
        spread[16 * (lane / 4) + 4 * vector + lane % 4] = column as u8;
        column += 1;
    }
    spread
};

impl Avx512 {
    /// Levels times a scale.
    #[inline(always)]
    fn table(self, levels: &[f32; LANES], scale: f32) -> __m512 {
        proven!(self, _mm512_mul_ps(_mm512_loadu_ps(levels.as_ptr()), _mm512_set1_ps(scale)))
    }

    /// 16 numbers.
    #[inline(always)]
    fn numbers(self, numbers: &[i32; LANES]) -> __m512i {
        proven!(self, _mm512_loadu_si512(numbers.as_ptr().cast()))
    }
}

impl Lanes for Avx512 {
    type Vector = __m512;
    const TILE: (usize, usize) = (4, 6);

    #[inline(always)]
    fn zero(self) -> __m512 {
        proven!(self, _mm512_setzero_ps())
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        proven!(self, _mm512_set1_ps(value))
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> __m512 {
        proven!(self, _mm512_loadu_ps(values.as_ptr()))
    }

    #[inline(always)]
    fn store(self, values: __m512, out: &mut [f32; LANES]) {
        proven!(self, _mm512_storeu_ps(out.as_mut_ptr(), values));
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        proven!(self, _mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn sum(self, values: __m512) -> f32 {
        proven!(self, {
            let upper = _mm256_castsi256_ps(_mm512_extracti64x4_epi64::<1>(_mm512_castps_si512(values)));
            let sums = _mm256_add_ps(_mm512_castps512_ps256(values), upper);
            let sums = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
            let sums = _mm_add_ps(sums, _mm_movehl_ps(sums, sums));
            _mm_cvtss_f32(_mm_add_ss(sums, _mm_movehdup_ps(sums)))
        })
    }

    #[inline(always)]
    fn prefetch(self, from: &[u8], ahead: usize) {
        proven!(self, _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(ahead).cast()));
    }

    #[inline(always)]
    fn f32(self, codes: &[u8; 4 * CHUNK]) -> [__m512; 4] {
        each!([0 1 2 3] v => proven!(self, _mm512_loadu_ps(codes[64 * v..][..64].as_ptr().cast())))
    }

    #[inline(always)]
    fn int8(self, codes: &[u8; CHUNK], scale: f32) -> [__m512; 4] {
        proven!(self, {
            let scale = _mm512_set1_ps(scale);
            each!([0 1 2 3] v => {
                let bytes = _mm_loadu_si128(codes[16 * v..][..16].as_ptr().cast());
                _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale)
            })
        })
    }

    #[inline(always)]
    fn int4(self, codes: &[u8; CHUNK / 2], scale: f32) -> [__m512; 4] {
        proven!(self, {
            let words = _mm512_broadcast_i64x4(_mm256_loadu_si256(codes.as_ptr().cast()));
            let table = self.table(&LEVELS_4, scale);
            // Of an index the four lowest bits count.
            each!([0 1 2 3] v => _mm512_permutexvar_ps(_mm512_srlv_epi32(words, self.numbers(&NIBBLES[v])), table))
        })
    }

    #[inline(always)]
    fn int4_words(self, codes: &[u8; CHUNK / 2], scales: &[f32; WORDS]) -> [__m512; 4] {
        proven!(self, {
            let words = _mm512_broadcast_i64x4(_mm256_loadu_si256(codes.as_ptr().cast()));
            let scales = _mm256_castps_pd(_mm256_loadu_ps(scales.as_ptr()));
            let scales = _mm512_castpd_ps(_mm512_broadcast_f64x4(scales));
            let levels = _mm512_loadu_ps(LEVELS_4.as_ptr());
            each!([0 1 2 3] v => {
                let nibbles = _mm512_srlv_epi32(words, self.numbers(&NIBBLES[v]));
                _mm512_mul_ps(_mm512_permutexvar_ps(nibbles, levels), scales)
            })
        })
    }

    #[inline(always)]
    fn int3(self, codes: &[u8; 24], scale: f32) -> [__m512; 4] {
        proven!(self, {
            let low = _mm512_broadcast_i32x4(_mm_loadu_si128(codes[..16].as_ptr().cast()));
            let high = _mm_loadl_epi64(codes[16..].as_ptr().cast());
            let high = _mm512_broadcast_i32x4(_mm_unpacklo_epi32(high, high));
            let table = self.table(&LEVELS_3, scale);
            each!([0 1 2 3] v => {
                let pairs = _mm512_srlv_epi32(low, self.numbers(&PAIRS[v]));
                let thirds = _mm512_rorv_epi32(high, self.numbers(&THIRDS[v]));
                // The two lowest bits of the one, the others of the other; bit 3 chooses between equal halves of the table.
                let index = _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi32(3), pairs, thirds);
                _mm512_permutexvar_ps(index, table)
            })
        })
    }

    #[inline(always)]
    fn int2(self, codes: &[u8; CHUNK / 4], scale: f32) -> [__m512; 4] {
        proven!(self, {
            let words = _mm512_broadcast_i32x4(_mm_loadu_si128(codes.as_ptr().cast()));
            let table = self.table(&LEVELS_2, scale);
            // Of an index the two lowest bits count.
            each!([0 1 2 3] v => _mm512_permutevar_ps(table, _mm512_srlv_epi32(words, self.numbers(&PAIRS[v]))))
        })
    }

    #[inline(always)]
    fn fp8(self, codes: &[u8; CHUNK], scale: f32) -> [__m512; 4] {
        proven!(self, {
            let spread = _mm512_loadu_si512(SPREAD.as_ptr().cast());
            let codes = _mm512_permutexvar_epi8(spread, _mm512_loadu_si512(codes.as_ptr().cast()));
            // The highest bit of an index is ignored.
            let [low, high] = each!([0 1] i => {
                let (first, second) = (E4M3_UPPER[i][..64].as_ptr().cast(), E4M3_UPPER[i][64..].as_ptr().cast());
                _mm512_permutex2var_epi8(_mm512_loadu_si512(first), codes, _mm512_loadu_si512(second))
            });
            // The sign: high | (codes & 0x80)
            let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, _mm512_set1_epi8(i8::MIN));
            let [first, second] = [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)];
            let (zero, scale) = (_mm512_setzero_si512(), _mm512_set1_ps(scale));
            let values = [
                _mm512_unpacklo_epi16(zero, first),
                _mm512_unpackhi_epi16(zero, first),
                _mm512_unpacklo_epi16(zero, second),
                _mm512_unpackhi_epi16(zero, second),
            ];
            each!([0 1 2 3] v => _mm512_mul_ps(_mm512_castsi512_ps(values[v]), scale))
        })
    }

    #[inline(always)]
    fn accumulate(self, tile: Tile<'_>) {
        accumulate(self, tile);
    }
}
