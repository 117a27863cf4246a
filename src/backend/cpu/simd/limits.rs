//! What this CPU can do at best: reading memory, multiplying and adding. Kernels are measured against it.

// Arrays of vectors are indexed by constants: iterators would hide them from the registers.
#![allow(clippy::needless_range_loop)]

use super::{CHUNK, Lanes};

/// Reads bytes with vector instructions; the value only keeps the reads alive.
#[inline(always)]
pub(super) fn read<L: Lanes>(lanes: L, bytes: &[u8]) -> f32 {
    let one = lanes.splat(1.0);
    let mut sums = [lanes.zero(); 4];
    for chunk in bytes.as_chunks::<{ 4 * CHUNK }>().0 {
        let values = lanes.f32(chunk);
        for v in 0..4 {
            sums[v] = lanes.fma(values[v], one, sums[v]);
        }
    }
    lanes.sum(sums[0]) + lanes.sum(sums[1]) + lanes.sum(sums[2]) + lanes.sum(sums[3])
}

/// `steps` times [`FLOPS_PER_STEP`] operations in registers, in as many chains as a tile of a product has.
#[inline(always)]
pub(super) fn peak<L: Lanes>(lanes: L, steps: u64) -> f32 {
    if L::TILE.0 * L::TILE.1 >= 24 { chains::<L, 24>(lanes, steps) } else { chains::<L, 6>(lanes, 4 * steps) }
}

/// Products and sums of a step: 24 vectors of 16.
pub(in crate::backend::cpu) const FLOPS_PER_STEP: u64 = 24 * 16 * 2;

#[inline(always)]
fn chains<L: Lanes, const N: usize>(lanes: L, steps: u64) -> f32 {
    // They stay near 1.
    let (factor, offset) = (lanes.splat(std::hint::black_box(0.5)), lanes.splat(std::hint::black_box(0.5)));
    let mut sums = [lanes.splat(0.75); N];
    for _ in 0..steps {
        for i in 0..N {
            sums[i] = lanes.fma(sums[i], factor, offset);
        }
    }
    let mut total = lanes.zero();
    for i in 0..N {
        total = lanes.fma(sums[i], factor, total);
    }
    lanes.sum(total)
}
