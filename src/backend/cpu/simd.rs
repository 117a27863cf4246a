//! Products of rows with stored matrices, and attention, with vector instructions.
//!
//! # Arithmetic
//!
//! An output is one sum over the columns of a weight row, and there is one way to form it, whatever the instruction set,
//! the number of rows of x, and the threads:
//!
//! 1. The row is cut into *chunks* of 64 columns; what is missing in the last is a product with 0.
//! 2. Every weight is decoded to the f32 that [`Matrix::dequantize_row`](crate::weights::Matrix::dequantize_row) gives: a
//!    level times its scale, rounded once.
//! 3. A chunk is four vectors of 16 columns, in the order that is cheapest for its format: [`order`]. The rows of x are
//!    put into the same order beforehand. Vector after vector is multiplied and added to 16 sums, fused, in f32.
//! 4. The 16 sums are added: those 8 apart, then those 4, 2 and 1 apart.
//!
//! So equal inputs give equal bits, and a value that is not finite gives NaN or infinity in its own outputs only: an
//! infinite scale or weight may give NaN where the exact sum were infinite, because it meets a 0 of the padding.
//!
//! # Kernels
//!
//! Up to eight rows of x are multiplied while some weight rows are decoded, in registers ([`product`]). For more rows a
//! tile of weights is decoded once and multiplied with all of them.

/// `[f(0), f(1), …]`, written out: the vector code of a closure would be compiled without the features.
#[cfg(target_arch = "x86_64")]
macro_rules! each {
    ([$($n:literal)*] $i:ident => $work:expr) => {
        [$({ let $i = $n; $work }),*]
    };
}

/// Stamps the kernels for a proof and the features that it proves.
#[cfg(target_arch = "x86_64")]
macro_rules! kernels {
    ($proof:ident, $features:literal) => {
        /// The product for that coding.
        pub(super) fn kernel(coding: Coding) -> fn($proof, &Job<'_>, usize, &mut [f32]) {
            match coding {
                Coding::F32 => block::<codes::F32>,
                Coding::Int8 => block::<codes::Int8>,
                Coding::Int4 => block::<codes::Int4>,
                Coding::Int4Words => block::<codes::Int4Words>,
                Coding::Int3 => block::<codes::Int3>,
                Coding::Int2 => block::<codes::Int2>,
                Coding::Fp8 => block::<codes::Fp8>,
                Coding::Decoded => decoded,
            }
        }

        /// [`product::block`] with the features.
        fn block<C: codes::Codes>(proof: $proof, job: &Job<'_>, first: usize, out: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn enabled<C: codes::Codes>(proof: $proof, job: &Job<'_>, first: usize, out: &mut [f32]) {
                product::block::<$proof, C>(proof, job, first, out);
            }
            // SAFETY: `proof` proves these features.
            unsafe { enabled::<C>(proof, job, first, out) }
        }

        /// [`product::decoded`], which leaves the arithmetic to [`accumulate`].
        fn decoded(proof: $proof, job: &Job<'_>, first: usize, out: &mut [f32]) {
            product::decoded(proof, job, first, out);
        }

        /// [`product::accumulate`] with the features.
        pub(super) fn accumulate(proof: $proof, tile: Tile<'_>) {
            #[target_feature(enable = $features)]
            fn enabled(proof: $proof, tile: Tile<'_>) {
                product::accumulate(proof, tile);
            }
            // SAFETY: `proof` proves these features.
            unsafe { enabled(proof, tile) }
        }

        /// The decoder of whole rows for that coding.
        pub(super) fn decoder(coding: Coding) -> fn($proof, &Job<'_>, usize, &mut [f32]) {
            match coding {
                Coding::F32 => decode::<codes::F32>,
                Coding::Int8 => decode::<codes::Int8>,
                Coding::Int4 => decode::<codes::Int4>,
                Coding::Int4Words => decode::<codes::Int4Words>,
                Coding::Int3 => decode::<codes::Int3>,
                Coding::Int2 => decode::<codes::Int2>,
                Coding::Fp8 => decode::<codes::Fp8>,
                Coding::Decoded => |_, job, first, out| product::decode_plainly(job, first, out),
            }
        }

        /// [`product::decode`] with the features.
        fn decode<C: codes::Codes>(proof: $proof, job: &Job<'_>, first: usize, out: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn enabled<C: codes::Codes>(proof: $proof, job: &Job<'_>, first: usize, out: &mut [f32]) {
                product::decode::<$proof, C>(proof, job, first, out);
            }
            // SAFETY: `proof` proves these features.
            unsafe { enabled::<C>(proof, job, first, out) }
        }

        /// [`attend::attend`] with the features.
        pub(super) fn attend_task(proof: $proof, task: &Task<'_>, out: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn enabled(proof: $proof, task: &Task<'_>, out: &mut [f32]) {
                attend::attend(proof, task, out);
            }
            // SAFETY: `proof` proves these features.
            unsafe { enabled(proof, task, out) }
        }

        /// [`attend::combine`] with the features.
        pub(super) fn combine(proof: $proof, factors: &[f32], terms: &Terms<'_>, columns: usize, out: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn enabled(proof: $proof, factors: &[f32], terms: &Terms<'_>, columns: usize, out: &mut [f32]) {
                attend::combine(proof, factors, terms.rows.len(), terms, columns, out, columns);
            }
            // SAFETY: `proof` proves these features.
            unsafe { enabled(proof, factors, terms, columns, out) }
        }

        /// [`attend::score`] with the features.
        pub(super) fn score(proof: $proof, dsa: &Dsa, q: &[f32], weights: &[f32], key: &[f32]) -> f32 {
            #[target_feature(enable = $features)]
            fn enabled(proof: $proof, dsa: &Dsa, q: &[f32], weights: &[f32], key: &[f32]) -> f32 {
                attend::score(proof, dsa, q, weights, key)
            }
            // SAFETY: `proof` proves these features.
            unsafe { enabled(proof, dsa, q, weights, key) }
        }

        /// [`limits::read`] with the features.
        pub(super) fn read(proof: $proof, bytes: &[u8]) -> f32 {
            #[target_feature(enable = $features)]
            fn enabled(proof: $proof, bytes: &[u8]) -> f32 {
                limits::read(proof, bytes)
            }
            // SAFETY: `proof` proves these features.
            unsafe { enabled(proof, bytes) }
        }

        /// [`limits::peak`] with the features.
        pub(super) fn peak(proof: $proof, steps: u64) -> f32 {
            #[target_feature(enable = $features)]
            fn enabled(proof: $proof, steps: u64) -> f32 {
                limits::peak(proof, steps)
            }
            // SAFETY: `proof` proves these features.
            unsafe { enabled(proof, steps) }
        }
    };
}

mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod codes;
mod limits;
mod plain;
mod product;

use crate::backend::Dsa;
use crate::format::{FP8_BLOCK, Format};
use crate::isa::Isa;
use crate::weights::MatrixRef;

pub(super) use attend::{Task, Terms};
pub(super) use limits::FLOPS_PER_STEP;
use plain::Plain;

/// Columns that are worked on at once.
pub(super) const CHUNK: usize = 64;
/// Bytes that memory gives at once.
const LINE_BYTES: usize = 64;
/// Columns of a word of nibbles.
const WORD: usize = 8;
/// Words of nibbles of a chunk.
const WORDS: usize = CHUNK / WORD;
/// Sums that are formed side by side.
pub(super) const LANES: usize = 16;

/// 16 values, at the beginning of a cache line.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(align(64))]
pub(super) struct Line(pub [f32; LANES]);

/// How the columns of a chunk are stored, and which kernel takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    /// Raw.
    F32,
    /// Bytes.
    Int8,
    /// Nibbles, with one scale for all columns of a chunk.
    Int4,
    /// Nibbles, with one scale for all columns of a word.
    Int4Words,
    /// Planes of two bits and of one.
    Int3,
    /// Pairs of bits.
    Int2,
    /// e4m3.
    Fp8,
    /// Anything: rows are decoded by the plain [`Decoder`](crate::quantize::Decoder).
    Decoded,
}

impl Coding {
    /// The coding of a matrix of so many columns.
    pub fn of(format: Format, columns: usize) -> Coding {
        match format.canonical(columns as u64) {
            Format::F32 => Coding::F32,
            Format::Int8Row => Coding::Int8,
            Format::Int4Row => Coding::Int4,
            Format::Int4Grouped { group_size } if group_size % CHUNK as u64 == 0 => Coding::Int4,
            Format::Int4Grouped { group_size } if group_size > 0 && group_size.is_multiple_of(WORD as u64) => {
                Coding::Int4Words
            }
            Format::Int3G64 => Coding::Int3,
            Format::Int2Row => Coding::Int2,
            Format::Fp8E4m3B128 => Coding::Fp8,
            Format::Int4Grouped { .. } | Format::E8Iq3Lattice | Format::Mxfp4 => Coding::Decoded,
        }
    }
}

/// The column of a chunk that stands in lane p mod 16 of vector p / 16, for each p.
///
/// - 4 bits: a chunk is eight words of eight columns. Lanes below 8 have the even columns of a word each, the others the odd.
/// - 2 and 3 bits: four words of sixteen columns. A vector has four columns of each.
/// - f32, 8 bits and e4m3: as they are, so that an FP8 checkpoint and its container of f32 give the same bits.
pub(super) const fn order(coding: Coding) -> [u8; CHUNK] {
    let mut order = [0; CHUNK];
    let mut p = 0;
    while p < CHUNK {
        let (vector, lane) = (p / LANES, p % LANES);
        let column = match coding {
            Coding::F32 | Coding::Int8 | Coding::Fp8 | Coding::Decoded => p,
            Coding::Int4 | Coding::Int4Words => 8 * (lane % 8) + 2 * vector + lane / 8,
            Coding::Int3 | Coding::Int2 => 16 * (lane % 4) + 4 * vector + lane / 4,
        };
        order[p] = column as u8;
        p += 1;
    }
    order
}

/// A matrix, and the rows that it is multiplied with.
#[derive(Debug)]
pub(super) struct Job<'a> {
    /// [O, I].
    pub matrix: MatrixRef<'a>,
    /// Its coding.
    pub coding: Coding,
    /// Rows in [`order`], filled up with zeros: [n, lines], `stride` apart.
    pub x: &'a [Line],
    /// From one row of x to the next.
    pub stride: usize,
    /// Rows of x.
    pub n: usize,
    /// Lines of a row: four a chunk.
    pub lines: usize,
    /// Bytes of a weight row.
    pub row_bytes: usize,
    /// Scales of a weight row.
    pub row_scales: usize,
}

impl<'a> Job<'a> {
    /// Columns of a decoded row: whole chunks.
    pub fn columns(&self) -> usize {
        LANES * self.lines
    }

    /// Codes of a weight row.
    fn codes(&self, row: usize) -> &'a [u8] {
        &self.matrix.codes[row * self.row_bytes..][..self.row_bytes]
    }

    /// Scales of a weight row.
    fn scales(&self, row: usize) -> &'a [f32] {
        let row = if self.coding == Coding::Fp8 { row / FP8_BLOCK as usize } else { row };
        &self.matrix.scales[row * self.row_scales..][..self.row_scales]
    }

    /// Chunks that share a scale; all of them where a row has one or none.
    fn chunks_per_scale(&self) -> usize {
        match self.matrix.format {
            Format::Int4Grouped { group_size } if self.row_scales > 1 => group_size as usize / CHUNK,
            Format::Int3G64 => 1,
            Format::Fp8E4m3B128 => FP8_BLOCK as usize / CHUNK,
            _ => usize::MAX,
        }
    }

    /// The scales of the words of a chunk, of a weight row's scales; beyond the row's end its last.
    #[inline(always)]
    fn word_scales(&self, scales: &[f32], chunk: usize) -> [f32; WORDS] {
        let Format::Int4Grouped { group_size } = self.matrix.format else { return [1.0; WORDS] };
        let (group_size, column) = (group_size as usize, chunk * CHUNK);
        let (mut group, mut within) = (column / group_size, column % group_size);
        let mut out = [0.0; WORDS];
        for out in &mut out {
            *out = scales[group.min(scales.len() - 1)];
            within += WORD;
            if within == group_size {
                (group, within) = (group + 1, 0);
            }
        }
        out
    }

    /// A row of x.
    fn x_row(&self, row: usize) -> &'a [Line] {
        &self.x[row * self.stride..][..self.lines]
    }
}

/// Decoded weights times rows of x, added to sums.
#[derive(Debug)]
pub(super) struct Tile<'a> {
    /// Weights [rows, steps], `w_stride` apart.
    pub w: &'a [Line],
    /// From one weight row to the next.
    pub w_stride: usize,
    /// Weight rows.
    pub rows: usize,
    /// Rows of x [n, steps], `x_stride` apart.
    pub x: &'a [Line],
    /// From one row of x to the next.
    pub x_stride: usize,
    /// Rows of x.
    pub n: usize,
    /// Lines that are multiplied.
    pub steps: usize,
    /// Sums [rows, n].
    pub sums: &'a mut [Line],
}

/// Vector operations on 16 values. Implementations are proofs that the CPU has them.
///
/// Everything is `inline(always)` and without closures: only the outermost function enables the features, see `kernels!`,
/// and what is not inlined into it would be compiled without them.
trait Lanes: Copy {
    /// 16 f32.
    type Vector: Copy;
    /// Weight rows and rows of x whose sums fit into registers together.
    const TILE: (usize, usize);

    /// All 0.
    fn zero(self) -> Self::Vector;
    /// 16 equal values.
    fn splat(self, value: f32) -> Self::Vector;
    /// Reads.
    fn load(self, values: &[f32; LANES]) -> Self::Vector;
    /// Writes.
    fn store(self, values: Self::Vector, out: &mut [f32; LANES]);
    /// a · b + c, rounded once.
    fn fma(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The sum of those 8 apart, of these 4 apart, and so on.
    fn sum(self, values: Self::Vector) -> f32;
    /// Asks for memory that is read soon; `ahead` bytes on.
    fn prefetch(self, from: &[u8], ahead: usize);
    /// The same for so many bytes.
    #[inline(always)]
    fn prefetch_lines(self, from: &[u8], ahead: usize, bytes: usize) {
        for line in 0..bytes.div_ceil(LINE_BYTES) {
            self.prefetch(from, ahead + line * LINE_BYTES);
        }
    }

    /// Weights as they are; this and the following in the order of [`order`].
    fn f32(self, codes: &[u8; 4 * CHUNK]) -> [Self::Vector; 4];
    /// Level · scale.
    fn int8(self, codes: &[u8; CHUNK], scale: f32) -> [Self::Vector; 4];
    /// (nibble − 8) · scale.
    fn int4(self, codes: &[u8; CHUNK / 2], scale: f32) -> [Self::Vector; 4];
    /// (nibble − 8) · the scale of its word.
    fn int4_words(self, codes: &[u8; CHUNK / 2], scales: &[f32; WORDS]) -> [Self::Vector; 4];
    /// (u − 4) · scale.
    fn int3(self, codes: &[u8; 24], scale: f32) -> [Self::Vector; 4];
    /// (pair − 2) · scale.
    fn int2(self, codes: &[u8; CHUNK / 4], scale: f32) -> [Self::Vector; 4];
    /// e4m3 · scale.
    fn fp8(self, codes: &[u8; CHUNK], scale: f32) -> [Self::Vector; 4];

    /// [`product::accumulate`] with the features, and not inlined.
    fn accumulate(self, tile: Tile<'_>);
}

/// Weight rows `first` on with all rows of x: `out` [rows, n].
pub(super) fn multiply(isa: Isa, job: &Job<'_>, first: usize, out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(proof) => avx2::kernel(job.coding)(proof, job, first, out),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(proof) => avx512::kernel(job.coding)(proof, job, first, out),
        _ => plain::multiply(job, first, out),
    }
}

/// Weight rows `first` on, decoded in the [`order`] of their coding: `out` [rows, 16 · lines].
pub(super) fn decode(isa: Isa, job: &Job<'_>, first: usize, out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(proof) => avx2::decoder(job.coding)(proof, job, first, out),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(proof) => avx512::decoder(job.coding)(proof, job, first, out),
        _ => plain::decode(job, first, out),
    }
}

/// softmax(scores) · latents: see [`Task`].
pub(super) fn attend(isa: Isa, task: &Task<'_>, out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(proof) => avx2::attend_task(proof, task, out),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(proof) => avx512::attend_task(proof, task, out),
        _ => attend::attend(Plain, task, out),
    }
}

/// out += factors · terms, for factors [n, terms] and `out` [n, columns].
pub(super) fn combine(isa: Isa, factors: &[f32], terms: &Terms<'_>, columns: usize, out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(proof) => avx2::combine(proof, factors, terms, columns, out),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(proof) => avx512::combine(proof, factors, terms, columns, out),
        _ => attend::combine(Plain, factors, terms.rows.len(), terms, columns, out, columns),
    }
}

/// heads^−½ · Σ_h w_h · relu(q_h · k · width^−½), for q [heads · width], weights [heads] and key [width].
pub(super) fn score(isa: Isa, dsa: &Dsa, q: &[f32], weights: &[f32], key: &[f32]) -> f32 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(proof) => avx2::score(proof, dsa, q, weights, key),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(proof) => avx512::score(proof, dsa, q, weights, key),
        _ => attend::score(Plain, dsa, q, weights, key),
    }
}

/// Reads bytes: the limit of a product with one row.
pub(super) fn read(isa: Isa, bytes: &[u8]) -> f32 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(proof) => avx2::read(proof, bytes),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(proof) => avx512::read(proof, bytes),
        _ => limits::read(Plain, bytes),
    }
}

/// `steps` times [`FLOPS_PER_STEP`] operations: the limit of a product with many rows.
pub(super) fn peak(isa: Isa, steps: u64) -> f32 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(proof) => avx2::peak(proof, steps),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(proof) => avx512::peak(proof, steps),
        _ => limits::peak(Plain, steps),
    }
}
