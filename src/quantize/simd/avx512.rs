//! AVX-512: 64 elements are four vectors of f32, or one of bytes.

use std::arch::x86_64::*;

use super::{CHUNK, Lanes, Outcome, PART, Row, Rows, rows};
use crate::dequantize::SourceDtype;
use crate::isa::Avx512;
use crate::quantize::Quantizer;

kernels!(Avx512, "avx512f,avx512bw,avx512vl,avx512vbmi,avx2,fma,f16c");

/// An expression of intrinsics that need no more than an [`Avx512`], of which there must be one.
macro_rules! proven {
    ($proof:expr, $work:expr) => {{
        let Avx512 { .. } = $proof;
        // SAFETY: the proof is only made where the CPU has the features, and no pointer is read or written but through
        // references to arrays of the size that is read or written.
        unsafe { $work }
    }};
}

/// 64 bytes of an array that has them.
#[inline(always)]
fn full<const N: usize>(bytes: &[u8; N], number: usize) -> *const __m512i {
    bytes[64 * number..][..64].as_ptr().cast()
}

/// Bytes 2 and 3 of the f32 that is e4m3 / 256; the others are 0.
const E4M3: [[u8; 128]; 2] = {
    let mut bytes = [[0; 128]; 2];
    let mut code = 0;
    while code < 128 {
        let fraction = (code % 8) as f32 / 8.0;
        // Subnormal below exponent 1; the bias is 7, and 2⁻⁸ on top.
        let value = match code / 8 {
            0 => fraction * f32::from_bits((127 - 6 - 8) << 23),
            exponent => (1.0 + fraction) * f32::from_bits((127 + exponent as u32 - 7 - 8) << 23),
        };
        [_, _, bytes[0][code], bytes[1][code]] = value.to_le_bytes();
        code += 1;
    }
    bytes
};

/// Column `[vector][place]` of a chunk: 16 columns stand in the same lane of all four vectors, so that what takes bytes
/// apart and puts them together again never crosses lanes.
const COLUMN: [[u8; 16]; 4] = {
    let mut columns = [[0; 16]; 4];
    let mut column = 0;
    while column < CHUNK {
        let (lane, vector, place) = (column / 16, column % 16 / 4, column % 4);
        columns[vector][4 * lane + place] = column as u8;
        column += 1;
    }
    columns
};

impl Avx512 {
    /// value / scale + `rounder`, which is a float in the bits.
    #[inline(always)]
    fn rounded(self, value: __m512, scale: __m512, rounder: f32) -> __m512i {
        proven!(self, {
            let rounded = _mm512_add_ps(_mm512_div_ps(value, scale), _mm512_set1_ps(rounder));
            _mm512_castps_si512(rounded)
        })
    }

    /// The lowest byte of each of 64, in the order of columns.
    #[inline(always)]
    fn low_bytes(self, [a, b, c, d]: [__m512i; 4]) -> __m512i {
        /// Byte i of every lane: of 8 the first 4 are of one vector, the others of the next.
        const LOW: [u8; 64] = {
            let mut index = [0; 64];
            let mut i = 0;
            while i < 64 {
                index[i] = (i / 16 * 16 + i % 4 * 4 + i % 8 / 4 * 64) as u8;
                i += 1;
            }
            index
        };
        proven!(self, {
            let index = _mm512_loadu_si512(full(&LOW, 0));
            let (even, odd) = (_mm512_permutex2var_epi8(a, index, b), _mm512_permutex2var_epi8(c, index, d));
            _mm512_mask_blend_epi64(0b1010_1010, even, odd)
        })
    }

    /// Vectors in the order of columns to vectors in the order of [`COLUMN`], or back.
    #[inline(always)]
    fn transposed(self, [a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
        proven!(self, {
            let (ab, cd) = (_mm512_shuffle_f32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_f32x4::<0b01_00_01_00>(c, d));
            let (ab_high, cd_high) =
                (_mm512_shuffle_f32x4::<0b11_10_11_10>(a, b), _mm512_shuffle_f32x4::<0b11_10_11_10>(c, d));
            [
                _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd),
                _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd),
                _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_high, cd_high),
                _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_high, cd_high),
            ]
        })
    }
}

impl Lanes for Avx512 {
    /// In the order of [`COLUMN`].
    type Floats = [__m512; 4];
    type Codes = __m512i;

    #[inline(always)]
    fn fp8(self, stored: &[u8; CHUNK]) -> Self::Floats {
        proven!(self, {
            let stored = _mm512_loadu_si512(full(stored, 0));
            // The highest bit of an index is ignored.
            let [low, high] = each!([0 1] i => {
                let (first, second) = (_mm512_loadu_si512(full(&E4M3[i], 0)), _mm512_loadu_si512(full(&E4M3[i], 1)));
                _mm512_permutex2var_epi8(first, stored, second)
            });
            // The sign: high | (stored & 0x80)
            let high = _mm512_ternarylogic_epi32::<0xf8>(high, stored, _mm512_set1_epi8(i8::MIN));
            let [first, second] = [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)];
            let zero = _mm512_setzero_si512();
            [
                _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, first)),
                _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, first)),
                _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, second)),
                _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, second)),
            ]
        })
    }

    #[inline(always)]
    fn bf16(self, stored: &[u8; 2 * CHUNK]) -> Self::Floats {
        /// Every second word is a half, the others are masked out.
        const WORDS: [[u16; 32]; 4] = {
            let mut words = [[0; 32]; 4];
            let mut i = 0;
            while i < CHUNK {
                words[i / 16][2 * (i % 16) + 1] = COLUMN[i / 16][i % 16] as u16;
                i += 1;
            }
            words
        };
        proven!(self, {
            let (first, second) = (_mm512_loadu_si512(full(stored, 0)), _mm512_loadu_si512(full(stored, 1)));
            each!([0 1 2 3] i => {
                let index = _mm512_loadu_si512(WORDS[i].as_ptr().cast());
                _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi16(0xaaaa_aaaa, first, index, second))
            })
        })
    }

    #[inline(always)]
    fn f16(self, stored: &[u8; 2 * CHUNK]) -> Self::Floats {
        /// Two vectors after each other.
        const WORDS: [[u16; 32]; 2] = {
            let mut words = [[0; 32]; 2];
            let mut i = 0;
            while i < CHUNK {
                words[i / 32][i % 32] = COLUMN[i / 16][i % 16] as u16;
                i += 1;
            }
            words
        };
        proven!(self, {
            let (first, second) = (_mm512_loadu_si512(full(stored, 0)), _mm512_loadu_si512(full(stored, 1)));
            let [[a, b], [c, d]] = each!([0 1] i => {
                let index = _mm512_loadu_si512(WORDS[i].as_ptr().cast());
                let halves = _mm512_permutex2var_epi16(first, index, second);
                let (low, high) = (_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64::<1>(halves));
                [_mm512_cvtph_ps(low), _mm512_cvtph_ps(high)]
            });
            [a, b, c, d]
        })
    }

    #[inline(always)]
    fn f32(self, stored: &[u8; 4 * CHUNK]) -> Self::Floats {
        self.transposed(each!([0 1 2 3] i => proven!(self, _mm512_castsi512_ps(_mm512_loadu_si512(full(stored, i))))))
    }

    #[inline(always)]
    fn times(self, values: Self::Floats, factor: f32) -> Self::Floats {
        each!([0 1 2 3] i => proven!(self, _mm512_mul_ps(values[i], _mm512_set1_ps(factor))))
    }

    #[inline(always)]
    fn store_floats(self, values: Self::Floats, out: &mut [u8; 4 * CHUNK]) {
        for (values, out) in self.transposed(values).into_iter().zip(out.as_chunks_mut::<64>().0) {
            proven!(self, _mm512_storeu_ps(out.as_mut_ptr().cast(), values));
        }
    }

    #[inline(always)]
    fn levels(self, values: Self::Floats, scales: [f32; CHUNK / PART], rounder: f32) -> Self::Codes {
        // 16 columns are a lane.
        let scales = proven!(self, {
            let index = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            let [a, b, c, d] = scales;
            _mm512_permutexvar_ps(index, _mm512_castps128_ps512(_mm_setr_ps(a, b, c, d)))
        });
        self.low_bytes(each!([0 1 2 3] i => self.rounded(values[i], scales, rounder)))
    }

    #[inline(always)]
    fn levels_each(self, values: Self::Floats, scales: &[f32; CHUNK], rounder: f32) -> Self::Codes {
        let scales = each!([0 1 2 3] i => proven!(self, _mm512_loadu_ps(scales[16 * i..][..16].as_ptr())));
        let scales = self.transposed(scales);
        self.low_bytes(each!([0 1 2 3] i => self.rounded(values[i], scales[i], rounder)))
    }

    #[inline(always)]
    fn store(self, codes: Self::Codes, out: &mut [u8; CHUNK]) {
        proven!(self, _mm512_storeu_si512(out.as_mut_ptr().cast(), codes));
    }

    #[inline(always)]
    fn store_nibbles(self, codes: Self::Codes, out: &mut [u8; CHUNK / 2]) {
        proven!(self, {
            let pairs = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001));
            _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm512_cvtepi16_epi8(pairs));
        });
    }

    #[inline(always)]
    fn store_pairs(self, codes: Self::Codes, out: &mut [u8; CHUNK / 4]) {
        proven!(self, {
            let low = _mm512_and_si512(codes, _mm512_set1_epi8(3));
            let nibbles = _mm512_maddubs_epi16(low, _mm512_set1_epi16(0x0401));
            let bytes = _mm512_madd_epi16(nibbles, _mm512_set1_epi32(0x0010_0001));
            _mm_storeu_si128(out.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(bytes));
        });
    }

    #[inline(always)]
    fn third_bits(self, codes: Self::Codes) -> u64 {
        proven!(self, _mm512_test_epi8_mask(codes, _mm512_set1_epi8(4)))
    }

    #[inline(always)]
    fn largest_byte(self, chunks: &[[u8; CHUNK]], parts: &[[u8; PART]]) -> u8 {
        proven!(self, {
            let mut bytes = _mm512_setzero_si512();
            for stored in chunks {
                let magnitudes = _mm512_and_si512(_mm512_loadu_si512(full(stored, 0)), _mm512_set1_epi8(0x7f));
                bytes = _mm512_max_epu8(bytes, magnitudes);
            }
            let bytes = _mm256_max_epu8(_mm512_castsi512_si256(bytes), _mm512_extracti64x4_epi64::<1>(bytes));
            let mut bytes = _mm_max_epu8(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes));
            for stored in parts {
                let part = _mm_loadu_si128(stored.as_ptr().cast());
                bytes = _mm_max_epu8(bytes, _mm_and_si128(part, _mm_set1_epi8(0x7f)));
            }
            // The smallest of eight words is one instruction: of the complements, the larger byte of each word.
            let words = _mm_xor_si128(_mm_max_epu8(bytes, _mm_srli_epi16::<8>(bytes)), _mm_set1_epi16(0xff));
            let words = _mm_minpos_epu16(_mm_and_si128(words, _mm_set1_epi16(0xff)));
            0xff ^ _mm_cvtsi128_si32(words) as u8
        })
    }
}
