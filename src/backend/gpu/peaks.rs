//! What the device gives at most, whatever the work: reading memory, and products and sums in registers.

use std::ops::Range;

use super::device::Device;
use super::driver::Driver;
use super::kernels::{Kernel, Name, THREADS};
use crate::error::Result;

/// Bytes of a piece that a thread reads at a time.
pub const PIECE_BYTES: u64 = 16;
/// Pieces that a group reads at a time: kernels/cuda/read.cu.
const TILE_PIECES: u64 = 2048;
/// Most groups that read: many times those that run at once, and what every device takes.
const READING_GROUPS: u64 = 16_384;
/// Sums of each of them.
const SUMS: u64 = 8;

/// Groups that multiply, enough for every multiprocessor to be full.
const MULTIPLYING_GROUPS: usize = 4096;
/// Products and sums of a thread in a step: kernels/cuda/peak.cu.
const STEP_FLOPS: u64 = 2 * 8 * 16;

/// Bytes of the sums that [`Device::read_pieces`] leaves.
pub const SUM_BYTES: u64 = 4 * SUMS * READING_GROUPS;
/// Bytes of the numbers that [`Device::multiply`] leaves.
pub const MULTIPLIED_BYTES: u64 = 4 * THREADS as u64 * MULTIPLYING_GROUPS as u64;

impl<D: Driver> Device<D> {
    /// Reads pieces of a buffer once and leaves sums of their words, modulo 2^32: how many. All together they are the sum of
    /// all words.
    pub fn read_pieces(&self, from: &D::Buffer, pieces: Range<u64>, sums: &D::Buffer) -> Result<u64> {
        assert!(pieces.end * PIECE_BYTES <= self.driver().bytes(from), "pieces of a buffer");
        let count = pieces.end - pieces.start;
        let groups = count.div_ceil(TILE_PIECES).min(READING_GROUPS);
        let constants = [pieces.start as u32, count as u32];
        self.launch(Kernel::plain(Name::Read), [groups as usize, 1, 1], &[from, sums], &constants)?;
        Ok(SUMS * groups)
    }

    /// Multiplies and adds in registers alone, so many steps of each thread: how many products and sums.
    pub fn multiply(&self, steps: u32, out: &D::Buffer) -> Result<u64> {
        let constants = [steps, 0.75f32.to_bits(), 0.5f32.to_bits()];
        self.launch(Kernel::plain(Name::FmaPeak), [MULTIPLYING_GROUPS, 1, 1], &[out], &constants)?;
        Ok(u64::from(THREADS) * MULTIPLYING_GROUPS as u64 * STEP_FLOPS * u64::from(steps))
    }
}
