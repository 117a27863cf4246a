//! AVX2: 16 values are two vectors.

use std::arch::x86_64::*;

use super::{CHUNK, Coding, Dsa, Job, LANES, Lanes, Task, Terms, Tile, WORDS, attend, codes, limits, product};
use crate::dequantize::fp8::e4m3;
use crate::isa::Avx2;

kernels!(Avx2, "avx2,fma,f16c");

/// An expression of intrinsics that need no more than an [`Avx2`], of which there must be one.
macro_rules! proven {
    ($proof:expr, $work:expr) => {{
        let Avx2 { .. } = $proof;
        // SAFETY: the proof is only made where the CPU has the features, and no pointer is read or written but through
        // references to arrays of the size that is read or written; a prefetch may be of any address.
        unsafe { $work }
    }};
}

impl Avx2 {
    /// 16 words shifted down, each half by its own numbers.
    #[inline(always)]
    fn shifted(self, words: __m256i, low: __m256i, high: __m256i) -> [__m256i; 2] {
        proven!(self, [_mm256_srlv_epi32(words, low), _mm256_srlv_epi32(words, high)])
    }

    /// Shifts of pairs of bits: those of the low half of vector v, then of the high half.
    #[inline(always)]
    fn pair_shifts(self, v: i32) -> [__m256i; 2] {
        let s = 8 * v;
        proven!(
            self,
            [
                _mm256_setr_epi32(s, s, s, s, s + 2, s + 2, s + 2, s + 2),
                _mm256_setr_epi32(s + 4, s + 4, s + 4, s + 4, s + 6, s + 6, s + 6, s + 6),
            ]
        )
    }

    /// e4m3 of 16 columns, as two vectors; not yet scaled.
    #[inline(always)]
    fn e4m3(self, codes: &[u8; 16]) -> [__m256; 2] {
        proven!(self, {
            let bytes = _mm_loadu_si128(codes.as_ptr().cast());
            let magnitudes = _mm_and_si128(bytes, _mm_set1_epi8(0x7f));
            if _mm_movemask_epi8(_mm_cmpeq_epi8(magnitudes, _mm_set1_epi8(0x7f))) != 0 {
                return self.e4m3_with_nan(codes);
            }
            // The bits of a half that is e4m3 / 256.
            let words = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(bytes));
            let halves = _mm256_and_si256(words, _mm256_set1_epi16(!0x4000));
            let factor = _mm256_set1_ps(256.0);
            [
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor),
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)), factor),
            ]
        })
    }

    /// The same by the table.
    #[cold]
    fn e4m3_with_nan(self, codes: &[u8; 16]) -> [__m256; 2] {
        let values = codes.map(e4m3);
        proven!(self, [_mm256_loadu_ps(values[..8].as_ptr()), _mm256_loadu_ps(values[8..].as_ptr())])
    }
}

impl Lanes for Avx2 {
    type Vector = [__m256; 2];
    const TILE: (usize, usize) = (2, 3);

    #[inline(always)]
    fn zero(self) -> Self::Vector {
        proven!(self, [_mm256_setzero_ps(); 2])
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Vector {
        proven!(self, [_mm256_set1_ps(value); 2])
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Self::Vector {
        each!([0 1] half => proven!(self, _mm256_loadu_ps(values[8 * half..][..8].as_ptr())))
    }

    #[inline(always)]
    fn store(self, values: Self::Vector, out: &mut [f32; LANES]) {
        proven!(self, {
            _mm256_storeu_ps(out[..8].as_mut_ptr(), values[0]);
            _mm256_storeu_ps(out[8..].as_mut_ptr(), values[1]);
        });
    }

    #[inline(always)]
    fn fma(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        each!([0 1] half => proven!(self, _mm256_fmadd_ps(a[half], b[half], c[half])))
    }

    #[inline(always)]
    fn sum(self, values: Self::Vector) -> f32 {
        proven!(self, {
            let sums = _mm256_add_ps(values[0], values[1]);
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
    fn f32(self, codes: &[u8; 4 * CHUNK]) -> [Self::Vector; 4] {
        each!([0 1 2 3] v => each!([0 1] half => {
            proven!(self, _mm256_loadu_ps(codes[64 * v + 32 * half..][..32].as_ptr().cast()))
        }))
    }

    #[inline(always)]
    fn int8(self, codes: &[u8; CHUNK], scale: f32) -> [Self::Vector; 4] {
        each!([0 1 2 3] v => each!([0 1] half => proven!(self, {
            let bytes = _mm_loadl_epi64(codes[16 * v + 8 * half..][..8].as_ptr().cast());
            _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_set1_ps(scale))
        })))
    }

    #[inline(always)]
    fn int4(self, codes: &[u8; CHUNK / 2], scale: f32) -> [Self::Vector; 4] {
        self.int4_words(codes, &[scale; WORDS])
    }

    #[inline(always)]
    fn int4_words(self, codes: &[u8; CHUNK / 2], scales: &[f32; WORDS]) -> [Self::Vector; 4] {
        proven!(self, {
            let words = _mm256_loadu_si256(codes.as_ptr().cast());
            let scale = _mm256_loadu_ps(scales.as_ptr());
            each!([0 1 2 3] v => each!([0 1] half => {
                let nibbles = _mm256_srlv_epi32(words, _mm256_set1_epi32(8 * v + 4 * half));
                let nibbles = _mm256_and_si256(nibbles, _mm256_set1_epi32(15));
                let levels = _mm256_cvtepi32_ps(_mm256_sub_epi32(nibbles, _mm256_set1_epi32(8)));
                _mm256_mul_ps(levels, scale)
            }))
        })
    }

    #[inline(always)]
    fn int3(self, codes: &[u8; 24], scale: f32) -> [Self::Vector; 4] {
        proven!(self, {
            let low = _mm256_broadcastsi128_si256(_mm_loadu_si128(codes[..16].as_ptr().cast()));
            let high = _mm_loadl_epi64(codes[16..].as_ptr().cast());
            let high = _mm256_broadcastsi128_si256(_mm_unpacklo_epi32(high, high));
            // Columns of odd lanes are in the upper half of a word.
            let odd = _mm256_setr_epi32(0, 16, 0, 16, 0, 16, 0, 16);
            let levels = _mm256_setr_ps(-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0);
            let table = _mm256_mul_ps(levels, _mm256_set1_ps(scale));
            each!([0 1 2 3] v => {
                let [first, second] = self.pair_shifts(v);
                let pairs = self.shifted(low, first, second);
                // Half the shift of the pairs.
                let (first, second) = (_mm256_srli_epi32::<1>(first), _mm256_srli_epi32::<1>(second));
                let thirds = self.shifted(high, _mm256_add_epi32(first, odd), _mm256_add_epi32(second, odd));
                each!([0 1] half => {
                    let pairs = _mm256_and_si256(pairs[half], _mm256_set1_epi32(3));
                    // Of an index the three lowest bits count.
                    let index = _mm256_or_si256(pairs, _mm256_slli_epi32::<2>(thirds[half]));
                    _mm256_permutevar8x32_ps(table, index)
                })
            })
        })
    }

    #[inline(always)]
    fn int2(self, codes: &[u8; CHUNK / 4], scale: f32) -> [Self::Vector; 4] {
        proven!(self, {
            let words = _mm256_broadcastsi128_si256(_mm_loadu_si128(codes.as_ptr().cast()));
            let levels = _mm256_setr_ps(-2.0, -1.0, 0.0, 1.0, -2.0, -1.0, 0.0, 1.0);
            let table = _mm256_mul_ps(levels, _mm256_set1_ps(scale));
            each!([0 1 2 3] v => {
                let [first, second] = self.pair_shifts(v);
                let index = self.shifted(words, first, second);
                // Of an index the two lowest bits count.
                each!([0 1] half => _mm256_permutevar_ps(table, index[half]))
            })
        })
    }

    #[inline(always)]
    fn fp8(self, codes: &[u8; CHUNK], scale: f32) -> [Self::Vector; 4] {
        proven!(self, {
            let parts = codes.as_chunks::<16>().0;
            let scale = _mm256_set1_ps(scale);
            each!([0 1 2 3] i => {
                let [low, high] = self.e4m3(&parts[i]);
                [_mm256_mul_ps(low, scale), _mm256_mul_ps(high, scale)]
            })
        })
    }

    #[inline(always)]
    fn accumulate(self, tile: Tile<'_>) {
        accumulate(self, tile);
    }
}
