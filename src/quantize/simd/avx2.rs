//! AVX2: 64 elements are eight vectors of f32, or two of bytes.

use std::arch::x86_64::*;

use super::{CHUNK, Lanes, Outcome, PART, Row, Rows, rows};
use crate::dequantize::SourceDtype;
use crate::isa::Avx2;
use crate::quantize::Quantizer;

kernels!(Avx2, "avx2,fma,f16c");

/// An expression of intrinsics that need no more than an [`Avx2`], of which there must be one.
macro_rules! proven {
    ($proof:expr, $work:expr) => {{
        let Avx2 { .. } = $proof;
        // SAFETY: the proof is only made where the CPU has the features, and no pointer is read or written but through
        // references to arrays of the size that is read or written.
        unsafe { $work }
    }};
}

/// 16 bytes of an array that has them.
#[inline(always)]
fn half<const N: usize>(bytes: &[u8; N], number: usize) -> *const __m128i {
    bytes[16 * number..][..16].as_ptr().cast()
}

/// 32 bytes of an array that has them.
#[inline(always)]
fn full<const N: usize>(bytes: &[u8; N], number: usize) -> *const __m256i {
    bytes[32 * number..][..32].as_ptr().cast()
}

impl Avx2 {
    /// value / scale + `rounder`, which is a float in the bits.
    #[inline(always)]
    fn rounded(self, value: __m256, scale: __m256, rounder: f32) -> __m256i {
        proven!(self, {
            let rounded = _mm256_add_ps(_mm256_div_ps(value, scale), _mm256_set1_ps(rounder));
            _mm256_castps_si256(rounded)
        })
    }

    /// The lowest byte of each of 32.
    #[inline(always)]
    fn low_bytes(self, numbers: [__m256i; 4]) -> __m256i {
        proven!(self, {
            let [a, b, c, d] = each!([0 1 2 3] i => _mm256_and_si256(numbers[i], _mm256_set1_epi32(0xff)));
            // Each half of a vector is packed by itself: four bytes of a, b, c and d from the lower halves come first.
            let bytes = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
            _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
        })
    }

    /// The lowest byte of each of 64.
    #[inline(always)]
    fn all_low_bytes(self, [a, b, c, d, e, f, g, h]: [__m256i; 8]) -> [__m256i; 2] {
        [self.low_bytes([a, b, c, d]), self.low_bytes([e, f, g, h])]
    }

    /// The low bytes of 32 words that are at most 255.
    #[inline(always)]
    fn pack_words(self, low: __m256i, high: __m256i) -> __m256i {
        proven!(self, _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi16(low, high)))
    }
}

impl Lanes for Avx2 {
    type Floats = [__m256; 8];
    type Codes = [__m256i; 2];

    #[inline(always)]
    fn fp8(self, stored: &[u8; CHUNK]) -> Self::Floats {
        let [[a, b], [c, d], [e, f], [g, h]] = each!([0 1 2 3] i => proven!(self, {
            let words = _mm256_cvtepi8_epi16(_mm_loadu_si128(half(stored, i)));
            let halves = _mm256_and_si256(_mm256_slli_epi16::<7>(words), _mm256_set1_epi16(!0x4000));
            [_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves))]
        }));
        [a, b, c, d, e, f, g, h]
    }

    #[inline(always)]
    fn bf16(self, stored: &[u8; 2 * CHUNK]) -> Self::Floats {
        each!([0 1 2 3 4 5 6 7] i => proven!(self, {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(half(stored, i)));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        }))
    }

    #[inline(always)]
    fn f16(self, stored: &[u8; 2 * CHUNK]) -> Self::Floats {
        each!([0 1 2 3 4 5 6 7] i => proven!(self, _mm256_cvtph_ps(_mm_loadu_si128(half(stored, i)))))
    }

    #[inline(always)]
    fn f32(self, stored: &[u8; 4 * CHUNK]) -> Self::Floats {
        each!([0 1 2 3 4 5 6 7] i => proven!(self, _mm256_castsi256_ps(_mm256_loadu_si256(full(stored, i)))))
    }

    #[inline(always)]
    fn times(self, values: Self::Floats, factor: f32) -> Self::Floats {
        each!([0 1 2 3 4 5 6 7] i => proven!(self, _mm256_mul_ps(values[i], _mm256_set1_ps(factor))))
    }

    #[inline(always)]
    fn store_floats(self, values: Self::Floats, out: &mut [u8; 4 * CHUNK]) {
        for (values, out) in values.into_iter().zip(out.as_chunks_mut::<32>().0) {
            proven!(self, _mm256_storeu_ps(out.as_mut_ptr().cast(), values));
        }
    }

    #[inline(always)]
    fn levels(self, values: Self::Floats, scales: [f32; CHUNK / PART], rounder: f32) -> Self::Codes {
        self.all_low_bytes(each!([0 1 2 3 4 5 6 7] i => {
            let scale = proven!(self, _mm256_set1_ps(scales[i / 2]));
            self.rounded(values[i], scale, rounder)
        }))
    }

    #[inline(always)]
    fn levels_each(self, values: Self::Floats, scales: &[f32; CHUNK], rounder: f32) -> Self::Codes {
        self.all_low_bytes(each!([0 1 2 3 4 5 6 7] i => {
            let scale = proven!(self, _mm256_loadu_ps(scales[8 * i..][..8].as_ptr()));
            self.rounded(values[i], scale, rounder)
        }))
    }

    #[inline(always)]
    fn store(self, codes: Self::Codes, out: &mut [u8; CHUNK]) {
        for (codes, out) in codes.into_iter().zip(out.as_chunks_mut::<32>().0) {
            proven!(self, _mm256_storeu_si256(out.as_mut_ptr().cast(), codes));
        }
    }

    #[inline(always)]
    fn store_nibbles(self, codes: Self::Codes, out: &mut [u8; CHUNK / 2]) {
        proven!(self, {
            let [low, high] = each!([0 1] i => _mm256_maddubs_epi16(codes[i], _mm256_set1_epi16(0x1001)));
            _mm256_storeu_si256(out.as_mut_ptr().cast(), self.pack_words(low, high));
        });
    }

    #[inline(always)]
    fn store_pairs(self, codes: Self::Codes, out: &mut [u8; CHUNK / 4]) {
        proven!(self, {
            let [low, high] = each!([0 1] i => {
                let low = _mm256_and_si256(codes[i], _mm256_set1_epi8(3));
                let nibbles = _mm256_maddubs_epi16(low, _mm256_set1_epi16(0x0401));
                _mm256_madd_epi16(nibbles, _mm256_set1_epi32(0x0010_0001))
            });
            // 8 numbers each, at most 255; packing the halves by themselves leaves 0-3, 8-11, 4-7, 12-15.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(out.as_mut_ptr().cast(), bytes);
        });
    }

    #[inline(always)]
    fn third_bits(self, codes: Self::Codes) -> u64 {
        let [low, high] = each!([0 1] i => {
            proven!(self, _mm256_movemask_epi8(_mm256_slli_epi16::<5>(codes[i]))).cast_unsigned()
        });
        u64::from(low) | u64::from(high) << 32
    }

    #[inline(always)]
    fn largest_byte(self, chunks: &[[u8; CHUNK]], parts: &[[u8; PART]]) -> u8 {
        proven!(self, {
            let mut bytes = _mm256_setzero_si256();
            for stored in chunks {
                let (low, high) = (_mm256_loadu_si256(full(stored, 0)), _mm256_loadu_si256(full(stored, 1)));
                let mask = _mm256_set1_epi8(0x7f);
                let magnitudes = _mm256_max_epu8(_mm256_and_si256(low, mask), _mm256_and_si256(high, mask));
                bytes = _mm256_max_epu8(bytes, magnitudes);
            }
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
