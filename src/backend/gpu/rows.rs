//! Activations on the device, what a cache keeps of them, and what was chosen from them.

use std::sync::{Arc, OnceLock};

use super::device::Pooled;
use super::driver::Driver;

/// Activations [rows, width].
#[derive(Debug)]
pub struct Rows<D: Driver> {
    pub(super) values: Pooled<D>,
    pub(super) rows: usize,
    pub(super) width: usize,
}

impl<D: Driver> Rows<D> {
    /// The values, row after row.
    pub fn buffer(&self) -> &D::Buffer {
        self.values.buffer()
    }

    /// How many values there are.
    pub fn count(&self) -> usize {
        self.rows * self.width
    }
}

/// Rows [rows, width] that are kept, with room for more.
#[derive(Debug)]
pub struct Cache<D: Driver> {
    pub(super) values: Pooled<D>,
    pub(super) rows: usize,
    pub(super) width: usize,
    /// Rows that it has room for.
    pub(super) room: usize,
}

/// For each row the chosen experts, best first.
#[derive(Debug)]
pub struct Choice<D: Driver> {
    /// [rows, chosen] numbers.
    pub(super) ids: Pooled<D>,
    /// [rows, chosen] weights in the sum.
    pub(super) weights: Pooled<D>,
    pub(super) rows: usize,
    pub(super) chosen: usize,
    /// The slots by expert, of one row that was chosen for here: [`super::Groups`].
    pub(super) groups: Option<Arc<Pooled<D>>>,
    /// The numbers, once they were copied back.
    pub(super) known: OnceLock<Vec<u32>>,
}

/// For each row a list of rows of a cache, as kernels read it: where each begins and how many entries it has, then the lists.
#[derive(Debug)]
pub struct Lists<D: Driver> {
    pub(super) words: Pooled<D>,
    pub(super) rows: usize,
    /// Entries of the longest.
    pub(super) longest: usize,
    /// Words of the buffer.
    pub(super) count: usize,
}
