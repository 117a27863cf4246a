//! Stored rows to codes and scales with vector instructions: the same bits as the plain versions.
//!
//! A row is worked on in *chunks* of 64 columns. The last chunk is filled up with zeros, whose level is 0: what int3 demands
//! as padding; the padding of int4 and int2 is cleared afterwards. The steps of a row:
//!
//! 1. The largest magnitude of every group. Magnitudes of stored elements are ordered as their bits are, without the sign,
//!    and rounding to nearest is monotonic: the largest product with a block scale is the product of the largest element.
//!    The same integers tell whether all values are finite.
//! 2. Scales.
//! 3. Levels of 64 elements at a time, by division, and their bits packed.
//!
//! # Rounding
//!
//! Any f32 from 2²³ to 2²⁴ is an integer. So w / s + (1.5 · 2²³ + bias) is rounded to one, to the nearest, ties to even; and
//! since the addends are even, that is the level plus the bias. Its lowest byte is the code. There is nothing to clamp:
//! no quotient of a group is rounded to more than the largest level, see [`scale`](super::scale).

/// `[f(0), f(1), …]`, written out: the vector code of a closure would be compiled without the features.
#[cfg(target_arch = "x86_64")]
macro_rules! each {
    ([$($n:literal)*] $i:ident => $work:expr) => {
        [$({ let $i = $n; $work }),*]
    };
}

/// Stamps `fn kernel(Quantizer, SourceDtype)` for a proof and the features that it proves.
#[cfg(target_arch = "x86_64")]
macro_rules! kernels {
    ($proof:ident, $features:literal) => {
        type Kernel = fn($proof, Rows, Row<'_>) -> Outcome;

        /// The kernel for scales alone.
        pub(super) fn scales_kernel(dtype: SourceDtype) -> Kernel {
            match dtype {
                SourceDtype::Fp8E4m3 => scales_only::<rows::Fp8>,
                SourceDtype::Bf16 => scales_only::<rows::Bf16>,
                SourceDtype::F16 => scales_only::<rows::F16>,
                SourceDtype::F32 => scales_only::<rows::F32>,
            }
        }

        /// The kernel for that work.
        pub(super) fn kernel(quantizer: Quantizer, dtype: SourceDtype) -> Kernel {
            match dtype {
                SourceDtype::Fp8E4m3 => of_source::<rows::Fp8>(quantizer),
                SourceDtype::Bf16 => of_source::<rows::Bf16>(quantizer),
                SourceDtype::F16 => of_source::<rows::F16>(quantizer),
                SourceDtype::F32 => of_source::<rows::F32>(quantizer),
            }
        }

        fn of_source<S: rows::Source>(quantizer: Quantizer) -> Kernel {
            match quantizer {
                Quantizer::F32 => widen::<S>,
                Quantizer::Int8Row { .. } => convert::<S, rows::Int8>,
                Quantizer::Int4Row | Quantizer::Int4Grouped { .. } => convert::<S, rows::Int4>,
                Quantizer::Int3G64 => convert::<S, rows::Int3>,
                Quantizer::Int2Row => convert::<S, rows::Int2>,
            }
        }

        /// [`rows::convert`] with the features.
        fn convert<S: rows::Source, P: rows::Packing>(proof: $proof, rows: Rows, row: Row<'_>) -> Outcome {
            #[target_feature(enable = $features)]
            fn enabled<S: rows::Source, P: rows::Packing>(proof: $proof, rows: Rows, row: Row<'_>) -> Outcome {
                rows::convert::<$proof, S, P>(proof, rows, row)
            }
            // SAFETY: `proof` proves these features.
            unsafe { enabled::<S, P>(proof, rows, row) }
        }

        /// [`rows::scales_only`] with the features.
        fn scales_only<S: rows::Source>(proof: $proof, rows: Rows, row: Row<'_>) -> Outcome {
            #[target_feature(enable = $features)]
            fn enabled<S: rows::Source>(proof: $proof, rows: Rows, row: Row<'_>) -> Outcome {
                rows::scales_only::<$proof, S>(proof, rows, row)
            }
            // SAFETY: `proof` proves these features.
            unsafe { enabled::<S>(proof, rows, row) }
        }

        /// [`rows::widen`] with the features.
        fn widen<S: rows::Source>(proof: $proof, rows: Rows, row: Row<'_>) -> Outcome {
            #[target_feature(enable = $features)]
            fn enabled<S: rows::Source>(proof: $proof, rows: Rows, row: Row<'_>) -> Outcome {
                rows::widen::<$proof, S>(proof, rows, row)
            }
            // SAFETY: `proof` proves these features.
            unsafe { enabled::<S>(proof, rows, row) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod rows;

use super::Quantizer;
use crate::dequantize::SourceDtype;
use crate::isa::{Avx2, Avx512, Isa};

/// Columns that are worked on at once.
const CHUNK: usize = 64;
/// Columns that have one scale in [`Lanes::levels`].
const PART: usize = 16;

/// Block scales above this, 2⁹⁶, go the plain way: 2⁸ times a block scale has to be finite. In checkpoints they are below 1.
const LARGEST: f32 = f32::from_bits((127 + 96) << 23);

/// 1.5 · 2²³: see [the module](self#rounding).
const ROUNDER: f32 = 12_582_912.0;

/// How a row came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Codes and scales are written.
    Done,
    /// An element, or its product with the block scale, is not finite.
    NonFinite,
    /// A block scale is too large for the method.
    TooLarge,
}

/// What all rows of a matrix have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    /// Elements of a row.
    pub columns: usize,
    /// Elements that share a scale, at least 1; `columns` or more: the whole row.
    pub group_size: usize,
    /// Largest level.
    pub qmax: f32,
}

/// One row to be converted.
#[derive(Debug)]
pub(super) struct Row<'a> {
    /// Elements as they are stored.
    pub stored: &'a [u8],
    /// FP8: the scales of the row's block row, else empty.
    pub block_scales: &'a [f32],
    /// Where the codes go; nowhere for scales alone.
    pub codes: &'a mut [u8],
    /// Where the scales go.
    pub scales: &'a mut [f32],
}

/// Vector operations on 64 elements. Implementations are proofs that the CPU has them.
///
/// Everything is `inline(always)` and without closures: only the outermost function enables the features, see `kernels!`,
/// and what is not inlined into it would be compiled without them.
trait Lanes: Copy {
    /// 64 f32, in an order of its own.
    type Floats: Copy;
    /// 64 bytes, in the order of columns.
    type Codes: Copy;

    /// e4m3 / 256: exact, and infinity is no value; a NaN becomes some number.
    fn fp8(self, stored: &[u8; CHUNK]) -> Self::Floats;
    /// bf16, widened.
    fn bf16(self, stored: &[u8; 2 * CHUNK]) -> Self::Floats;
    /// IEEE binary16, widened.
    fn f16(self, stored: &[u8; 2 * CHUNK]) -> Self::Floats;
    /// f32 as they are.
    fn f32(self, stored: &[u8; 4 * CHUNK]) -> Self::Floats;
    /// Each times `factor`.
    fn times(self, values: Self::Floats, factor: f32) -> Self::Floats;
    /// Little-endian.
    fn store_floats(self, values: Self::Floats, out: &mut [u8; 4 * CHUNK]);

    /// The lowest byte of value / scale + `rounder`, with a scale for each 16 values.
    fn levels(self, values: Self::Floats, scales: [f32; CHUNK / PART], rounder: f32) -> Self::Codes;
    /// The same with a scale for each value.
    fn levels_each(self, values: Self::Floats, scales: &[f32; CHUNK], rounder: f32) -> Self::Codes;

    /// One byte each.
    fn store(self, codes: Self::Codes, out: &mut [u8; CHUNK]);
    /// The 4 low bits of each, the first lowest; the upper bits are 0.
    fn store_nibbles(self, codes: Self::Codes, out: &mut [u8; CHUNK / 2]);
    /// The 2 low bits of each, the first lowest, whatever stands above them.
    fn store_pairs(self, codes: Self::Codes, out: &mut [u8; CHUNK / 4]);
    /// Bit 2 of each.
    fn third_bits(self, codes: Self::Codes) -> u64;

    /// The largest of the bytes without their highest bit; 0 if there are none.
    fn largest_byte(self, chunks: &[[u8; CHUNK]], parts: &[[u8; PART]]) -> u8;
}

/// Converts a row; the arithmetic is that of the instruction set that the kernel was chosen for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kernel {
    /// With 256-bit vectors: codes with scales, and scales alone.
    Avx2(Avx2, fn(Avx2, Rows, Row<'_>) -> Outcome, fn(Avx2, Rows, Row<'_>) -> Outcome),
    /// With 512-bit vectors.
    Avx512(Avx512, fn(Avx512, Rows, Row<'_>) -> Outcome, fn(Avx512, Rows, Row<'_>) -> Outcome),
}

impl Kernel {
    /// The kernel for that work, or `None` if there is none but the plain version.
    pub fn new(quantizer: Quantizer, dtype: SourceDtype, isa: Isa) -> Option<Kernel> {
        match isa {
            Isa::Plain => None,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(proof) => Some(Kernel::Avx2(proof, avx2::kernel(quantizer, dtype), avx2::scales_kernel(dtype))),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(proof) => {
                Some(Kernel::Avx512(proof, avx512::kernel(quantizer, dtype), avx512::scales_kernel(dtype)))
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2(_) | Isa::Avx512(_) => {
                let _ = (quantizer, dtype);
                None
            }
        }
    }

    /// Converts a row.
    pub fn convert(self, rows: Rows, row: Row<'_>) -> Outcome {
        match self {
            Kernel::Avx2(proof, convert, _) => convert(proof, rows, row),
            Kernel::Avx512(proof, convert, _) => convert(proof, rows, row),
        }
    }

    /// Finds the scales of a row; nothing is done to codes.
    pub fn scales(self, rows: Rows, row: Row<'_>) -> Outcome {
        match self {
            Kernel::Avx2(proof, _, scales) => scales(proof, rows, row),
            Kernel::Avx512(proof, _, scales) => scales(proof, rows, row),
        }
    }
}
