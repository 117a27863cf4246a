//! A row, whatever the instruction set: the steps that [`simd`](super) lists.

use super::{CHUNK, LARGEST, Lanes, Outcome, PART, ROUNDER, Row, Rows};
use crate::dequantize::fp8;
use crate::format::FP8_BLOCK;
use crate::quantize::scale::MIN_SCALE;

/// Columns that share a block scale.
const BLOCK: usize = FP8_BLOCK as usize;

/// An element type of a source.
pub(super) trait Source {
    /// Bytes of an element.
    const BYTES: usize;

    /// The bits without the sign of the largest magnitude.
    fn largest<V: Lanes>(v: V, stored: &[u8]) -> u32;
    /// Whether these are the bits of a finite magnitude.
    fn is_finite(bits: u32) -> bool;
    /// The magnitude of these bits, before a block scale.
    fn magnitude(bits: u32) -> f32;
    /// The values of a chunk; `block_scale` is 1 but for FP8.
    fn values<V: Lanes>(v: V, stored: &[u8], block_scale: f32) -> V::Floats;
}

/// e4m3 with block scales.
pub(super) struct Fp8;
/// The upper half of an f32.
pub(super) struct Bf16;
/// IEEE binary16.
pub(super) struct F16;
/// IEEE binary32.
pub(super) struct F32;

/// A slice of whole chunks is taken apart by `chunks_exact`: the length is known.
#[inline(always)]
fn array<const N: usize>(slice: &[u8]) -> &[u8; N] {
    slice.try_into().expect("a whole chunk")
}

#[inline(always)]
fn array_mut<const N: usize>(slice: &mut [u8]) -> &mut [u8; N] {
    slice.try_into().expect("a whole chunk")
}

impl Source for Fp8 {
    const BYTES: usize = 1;

    #[inline(always)]
    fn largest<V: Lanes>(v: V, stored: &[u8]) -> u32 {
        let (chunks, rest) = stored.as_chunks();
        let (parts, rest) = rest.as_chunks();
        let mut largest = v.largest_byte(chunks, parts);
        for byte in rest {
            largest = largest.max(byte & 0x7f);
        }
        u32::from(largest)
    }

    #[inline(always)]
    fn is_finite(bits: u32) -> bool {
        bits != 0x7f
    }

    #[inline(always)]
    fn magnitude(bits: u32) -> f32 {
        fp8::e4m3(bits as u8)
    }

    #[inline(always)]
    fn values<V: Lanes>(v: V, stored: &[u8], block_scale: f32) -> V::Floats {
        // Powers of two change nothing: the product is rounded once.
        v.times(v.fp8(array(stored)), 256.0 * block_scale)
    }
}

/// The largest of little-endian 16-bit numbers without their highest bit.
#[inline(always)]
fn largest_half(stored: &[u8]) -> u32 {
    let halves = stored.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes) & 0x7fff);
    u32::from(halves.fold(0, u16::max))
}

impl Source for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn largest<V: Lanes>(_: V, stored: &[u8]) -> u32 {
        largest_half(stored)
    }

    #[inline(always)]
    fn is_finite(bits: u32) -> bool {
        bits < 0x7f80
    }

    #[inline(always)]
    fn magnitude(bits: u32) -> f32 {
        f32::from_bits(bits << 16)
    }

    #[inline(always)]
    fn values<V: Lanes>(v: V, stored: &[u8], _: f32) -> V::Floats {
        v.bf16(array(stored))
    }
}

impl Source for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn largest<V: Lanes>(_: V, stored: &[u8]) -> u32 {
        largest_half(stored)
    }

    #[inline(always)]
    fn is_finite(bits: u32) -> bool {
        bits < 0x7c00
    }

    #[inline(always)]
    fn magnitude(bits: u32) -> f32 {
        half::f16::from_bits(bits as u16).to_f32_const()
    }

    #[inline(always)]
    fn values<V: Lanes>(v: V, stored: &[u8], _: f32) -> V::Floats {
        v.f16(array(stored))
    }
}

impl Source for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    fn largest<V: Lanes>(_: V, stored: &[u8]) -> u32 {
        let words = stored.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes) & 0x7fff_ffff);
        words.fold(0, u32::max)
    }

    #[inline(always)]
    fn is_finite(bits: u32) -> bool {
        bits < 0x7f80_0000
    }

    #[inline(always)]
    fn magnitude(bits: u32) -> f32 {
        f32::from_bits(bits)
    }

    #[inline(always)]
    fn values<V: Lanes>(v: V, stored: &[u8], _: f32) -> V::Floats {
        v.f32(array(stored))
    }
}

/// How levels become bytes.
pub(super) trait Packing {
    /// Bytes of a chunk.
    const BYTES: usize;
    /// What a code exceeds its level by.
    const BIAS: f32;

    /// Writes a chunk.
    fn pack<V: Lanes>(v: V, codes: V::Codes, out: &mut [u8]);
    /// Clears what stands after the last of `columns` columns, where the format has zeros there.
    fn clear_padding(columns: usize, codes: &mut [u8]);
}

/// `int8-row`, whatever its bits.
pub(super) struct Int8;
/// `int4-row` and `int4-grouped`.
pub(super) struct Int4;
/// `int3-g64`.
pub(super) struct Int3;
/// `int2-row`.
pub(super) struct Int2;

impl Packing for Int8 {
    const BYTES: usize = CHUNK;
    const BIAS: f32 = 0.0;

    #[inline(always)]
    fn pack<V: Lanes>(v: V, codes: V::Codes, out: &mut [u8]) {
        v.store(codes, array_mut(out));
    }

    #[inline(always)]
    fn clear_padding(_: usize, _: &mut [u8]) {}
}

impl Packing for Int4 {
    const BYTES: usize = CHUNK / 2;
    const BIAS: f32 = 8.0;

    #[inline(always)]
    fn pack<V: Lanes>(v: V, codes: V::Codes, out: &mut [u8]) {
        v.store_nibbles(codes, array_mut(out));
    }

    #[inline(always)]
    fn clear_padding(columns: usize, codes: &mut [u8]) {
        if let (false, Some(last)) = (columns.is_multiple_of(2), codes.last_mut()) {
            *last &= 0xf;
        }
    }
}

impl Packing for Int3 {
    const BYTES: usize = CHUNK / 4 + CHUNK / 8;
    const BIAS: f32 = 4.0;

    #[inline(always)]
    fn pack<V: Lanes>(v: V, codes: V::Codes, out: &mut [u8]) {
        let (low, high) = out.split_at_mut(CHUNK / 4);
        v.store_pairs(codes, array_mut(low));
        *array_mut(high) = v.third_bits(codes).to_le_bytes();
    }

    #[inline(always)]
    fn clear_padding(_: usize, _: &mut [u8]) {}
}

impl Packing for Int2 {
    const BYTES: usize = CHUNK / 4;
    const BIAS: f32 = 2.0;

    #[inline(always)]
    fn pack<V: Lanes>(v: V, codes: V::Codes, out: &mut [u8]) {
        v.store_pairs(codes, array_mut(out));
    }

    #[inline(always)]
    fn clear_padding(columns: usize, codes: &mut [u8]) {
        if let (used @ 1.., Some(last)) = (columns % 4, codes.last_mut()) {
            *last &= (1 << (2 * used)) - 1;
        }
    }
}

/// The largest magnitude so far, and whether all was finite.
#[derive(Clone, Copy)]
struct Largest {
    amax: f32,
    finite: bool,
}

impl Largest {
    const NONE: Largest = Largest { amax: 0.0, finite: true };

    /// With elements that have one block scale.
    #[inline(always)]
    fn with<V: Lanes, S: Source>(self, v: V, stored: &[u8], block_scale: f32) -> Largest {
        let bits = S::largest(v, stored);
        let magnitude = S::magnitude(bits) * block_scale.abs();
        // Zero times infinity is NaN: neither less than infinity nor the maximum.
        let finite = self.finite & S::is_finite(bits) & (magnitude < f32::INFINITY);
        Largest { amax: if magnitude > self.amax { magnitude } else { self.amax }, finite }
    }

    /// With elements from column `first` on.
    #[inline(always)]
    fn with_blocks<V: Lanes, S: Source>(self, v: V, stored: &[u8], first: usize, block_scales: &[f32]) -> Largest {
        if block_scales.is_empty() {
            return self.with::<V, S>(v, stored, 1.0);
        }
        // Up to the end of the block in which the group begins, then by whole blocks.
        let (head, rest) = stored.split_at((BLOCK - first % BLOCK).min(stored.len()));
        let block_scales = &block_scales[first / BLOCK..];
        let mut largest = self.with::<V, S>(v, head, block_scales[0]);
        for (stored, &block_scale) in rest.chunks(BLOCK).zip(&block_scales[1..]) {
            largest = largest.with::<V, S>(v, stored, block_scale);
        }
        largest
    }
}

/// What must be known of all values before any is converted.
#[inline(always)]
fn examine(finite: bool, block_scales: &[f32]) -> Outcome {
    let mut largest = 0f32;
    for scale in block_scales {
        largest = largest.max(scale.abs());
    }
    match (finite, largest <= LARGEST) {
        (false, _) => Outcome::NonFinite,
        (true, false) => Outcome::TooLarge,
        (true, true) => Outcome::Done,
    }
}

/// The scales of a row.
#[inline(always)]
pub(super) fn scales_only<V: Lanes, S: Source>(v: V, rows: Rows, mut row: Row<'_>) -> Outcome {
    scales::<V, S>(v, rows.group_size.min(rows.columns).max(1), rows.qmax, &mut row)
}

/// Converts a row to codes with scales.
#[inline(always)]
pub(super) fn convert<V: Lanes, S: Source, P: Packing>(v: V, rows: Rows, mut row: Row<'_>) -> Outcome {
    let group_size = rows.group_size.min(rows.columns).max(1);
    let outcome = scales::<V, S>(v, group_size, rows.qmax, &mut row);
    if outcome != Outcome::Done {
        return outcome;
    }
    let scales = &*row.scales;
    let cursor = Cursor { scales, group_size, group: 0, left: group_size };
    let target = Target { columns: rows.columns, stored: row.stored, block_scales: row.block_scales, codes: row.codes };
    if group_size == rows.columns {
        target.chunks::<V, S, P>(v, OneScale(scales[0]));
    } else if group_size == CHUNK {
        target.chunks::<V, S, P>(v, ScalePerChunk(scales.iter()));
    } else if group_size.is_multiple_of(PART) {
        target.chunks::<V, S, P>(v, ScalePerPart(cursor));
    } else {
        target.chunks::<V, S, P>(v, AnyScales(cursor));
    }
    Outcome::Done
}

/// Scales of all groups.
#[inline(always)]
fn scales<V: Lanes, S: Source>(v: V, group_size: usize, qmax: f32, row: &mut Row<'_>) -> Outcome {
    // An empty row has one scale or none, the smallest.
    row.scales.fill(0.0);
    let mut finite = true;
    if group_size == CHUNK {
        let (whole, rest) = row.stored.split_at(row.stored.len() / (CHUNK * S::BYTES) * CHUNK * S::BYTES);
        let (scales, last) = row.scales.split_at_mut(whole.len() / (CHUNK * S::BYTES));
        let mut block_scale = chunk_scales(row.block_scales);
        for (scale, stored) in scales.iter_mut().zip(whole.chunks_exact(CHUNK * S::BYTES)) {
            let group = Largest::NONE.with::<V, S>(v, stored, block_scale());
            (*scale, finite) = (group.amax, finite & group.finite);
        }
        if let [last] = last {
            let group = Largest::NONE.with::<V, S>(v, rest, block_scale());
            (*last, finite) = (group.amax, finite & group.finite);
        }
    } else {
        let groups = row.stored.chunks(group_size * S::BYTES);
        for (number, (scale, stored)) in row.scales.iter_mut().zip(groups).enumerate() {
            let group = Largest::NONE.with_blocks::<V, S>(v, stored, number * group_size, row.block_scales);
            (*scale, finite) = (group.amax, finite & group.finite);
        }
    }
    for scale in row.scales.iter_mut() {
        *scale = (*scale / qmax).max(MIN_SCALE);
    }
    examine(finite, row.block_scales)
}

/// The scales of one chunk after the other.
trait Steps {
    /// Levels of the next chunk.
    fn levels<V: Lanes>(&mut self, v: V, values: V::Floats, rounder: f32) -> V::Codes;
}

/// One scale a row.
struct OneScale(f32);

/// One scale a chunk.
struct ScalePerChunk<'a>(std::slice::Iter<'a, f32>);

/// Groups of a multiple of 16.
struct ScalePerPart<'a>(Cursor<'a>);

/// Groups of any size.
struct AnyScales<'a>(Cursor<'a>);

impl Steps for OneScale {
    #[inline(always)]
    fn levels<V: Lanes>(&mut self, v: V, values: V::Floats, rounder: f32) -> V::Codes {
        v.levels(values, [self.0; 4], rounder)
    }
}

impl Steps for ScalePerChunk<'_> {
    #[inline(always)]
    fn levels<V: Lanes>(&mut self, v: V, values: V::Floats, rounder: f32) -> V::Codes {
        let scale = *self.0.next().expect("a group a chunk");
        v.levels(values, [scale; 4], rounder)
    }
}

impl Steps for ScalePerPart<'_> {
    #[inline(always)]
    fn levels<V: Lanes>(&mut self, v: V, values: V::Floats, rounder: f32) -> V::Codes {
        let mut scales = [0.0; CHUNK / PART];
        for scale in &mut scales {
            *scale = self.0.next(PART);
        }
        v.levels(values, scales, rounder)
    }
}

impl Steps for AnyScales<'_> {
    #[inline(always)]
    fn levels<V: Lanes>(&mut self, v: V, values: V::Floats, rounder: f32) -> V::Codes {
        let mut scales = [0.0; CHUNK];
        for scale in &mut scales {
            *scale = self.0.next(1);
        }
        v.levels_each(values, &scales, rounder)
    }
}

/// Walks through the scales of a row.
struct Cursor<'a> {
    scales: &'a [f32],
    group_size: usize,
    group: usize,
    /// Columns that are left of the group.
    left: usize,
}

impl Cursor<'_> {
    /// The scale of the next `columns` columns, which do not cross a group's end; beyond the row, something.
    #[inline(always)]
    fn next(&mut self, columns: usize) -> f32 {
        if self.left == 0 {
            (self.group, self.left) = (self.group + 1, self.group_size);
        }
        self.left -= columns;
        self.scales.get(self.group).copied().unwrap_or(1.0)
    }
}

/// A row whose scales are known.
struct Target<'a> {
    columns: usize,
    stored: &'a [u8],
    block_scales: &'a [f32],
    codes: &'a mut [u8],
}

impl Target<'_> {
    /// Quantizes and packs, chunk after chunk.
    #[inline(always)]
    fn chunks<V: Lanes, S: Source, P: Packing>(self, v: V, mut steps: impl Steps) {
        let rounder = ROUNDER + P::BIAS;
        let (whole, rest) = self.stored.split_at(self.columns / CHUNK * CHUNK * S::BYTES);
        let (out, out_rest) = self.codes.split_at_mut(self.columns / CHUNK * P::BYTES);
        let mut scale = chunk_scales(self.block_scales);
        for (stored, out) in whole.chunks_exact(CHUNK * S::BYTES).zip(out.chunks_exact_mut(P::BYTES)) {
            P::pack(v, steps.levels(v, S::values(v, stored, scale()), rounder), out);
        }
        if !rest.is_empty() {
            let (mut padded, mut packed) = ([0; 4 * CHUNK], [0; CHUNK]);
            padded[..rest.len()].copy_from_slice(rest);
            let values = S::values(v, &padded[..CHUNK * S::BYTES], scale());
            P::pack(v, steps.levels(v, values, rounder), &mut packed[..P::BYTES]);
            out_rest.copy_from_slice(&packed[..out_rest.len()]);
            P::clear_padding(self.columns, out_rest);
        }
    }
}

/// The block scales of one chunk after the other.
#[inline(always)]
fn chunk_scales(block_scales: &[f32]) -> impl FnMut() -> f32 {
    let mut chunk = 0;
    move || {
        let scale = block_scales.get(chunk / (BLOCK / CHUNK)).copied().unwrap_or(1.0);
        chunk += 1;
        scale
    }
}

/// Converts a row to f32.
#[inline(always)]
pub(super) fn widen<V: Lanes, S: Source>(v: V, rows: Rows, row: Row<'_>) -> Outcome {
    if rows.columns == 0 {
        return Outcome::Done;
    }
    let all = Largest::NONE.with_blocks::<V, S>(v, row.stored, 0, row.block_scales);
    let outcome = examine(all.finite, row.block_scales);
    if outcome != Outcome::Done {
        return outcome;
    }
    let (whole, rest) = row.stored.split_at(rows.columns / CHUNK * CHUNK * S::BYTES);
    let (out, out_rest) = row.codes.split_at_mut(rows.columns / CHUNK * CHUNK * 4);
    let mut scale = chunk_scales(row.block_scales);
    for (stored, out) in whole.chunks_exact(CHUNK * S::BYTES).zip(out.chunks_exact_mut(4 * CHUNK)) {
        v.store_floats(S::values(v, stored, scale()), array_mut(out));
    }
    if !rest.is_empty() {
        let (mut padded, mut wide) = ([0; 4 * CHUNK], [0; 4 * CHUNK]);
        padded[..rest.len()].copy_from_slice(rest);
        v.store_floats(S::values(v, &padded[..CHUNK * S::BYTES], scale()), &mut wide);
        out_rest.copy_from_slice(&wide[..out_rest.len()]);
    }
    Outcome::Done
}
