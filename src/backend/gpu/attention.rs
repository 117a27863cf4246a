//! Attention over compressed keys and values, and the choice of the positions it looks at.

use super::device::groups_of;
use super::driver::Driver;
use super::kernels::{Kernel, Name, THREADS};
use super::rows::{Cache, Lists, Rows};
use super::weight::Weight;
use super::{Gpu, LAUNCH_TERMS, SCRATCH_BYTES, Terms};
use crate::backend::{Dsa, Mla};
use crate::error::Result;

/// Entries of a split of a list, heads of a group of threads: kernels/cuda/attention.cu.
const SPLIT: usize = 64;
const HEADS: usize = 8;
/// Entries of a list that a group of threads scores: kernels/cuda/indexer.cu.
const TILE: usize = 64;

impl<D: Driver> Gpu<D> {
    /// [`crate::backend::Backend::attention`] over the rows of the cache that the lists name.
    pub(super) fn attend(
        &self,
        mla: &Mla,
        q: &Rows<D>,
        kv_b: &Weight<D>,
        cache: &Cache<D>,
        lists: &Lists<D>,
    ) -> Result<Rows<D>> {
        let (n, width) = (q.rows, mla.latent + mla.rope);
        let query = self.absorbed(mla, q, kv_b)?;
        let context = self.rows(n, mla.heads * mla.latent)?;
        // Partial sums of some rows at a time.
        let splits = lists.longest.div_ceil(SPLIT).max(1);
        let row_bytes = 4 * mla.heads * splits * (mla.latent + 2);
        let row_terms = mla.heads * lists.longest * (width + mla.latent);
        let step = (SCRATCH_BYTES / row_bytes).min(LAUNCH_TERMS / row_terms.max(1)).clamp(1, n.max(1));
        let scale = ((mla.nope + mla.rope) as f64).powf(-0.5) as f32;
        for first in (0..n).step_by(step) {
            let rows = step.min(n - first);
            let partial = self.device.values(rows * row_bytes / 4)?;
            self.device.launch(
                Kernel::plain(Name::Attend),
                [splits, mla.heads.div_ceil(HEADS), rows],
                &[query.buffer(), cache.values.buffer(), lists.words.buffer(), partial.buffer()],
                &[first as u32, mla.heads as u32, width as u32, mla.latent as u32, splits as u32, scale.to_bits()],
            )?;
            self.device.launch(
                Kernel::plain(Name::Merge),
                [mla.latent.div_ceil(THREADS as usize), mla.heads, rows],
                &[partial.buffer(), lists.words.buffer(), context.buffer()],
                &[first as u32, mla.heads as u32, mla.latent as u32, splits as u32],
            )?;
        }
        let values = Terms {
            columns: mla.latent,
            heads: mla.heads,
            head_rows: mla.nope + mla.value,
            head_first: mla.nope,
            outputs: mla.value,
        };
        self.product(kv_b, &context, &values)
    }

    /// [K_hᵀ q_nope; q_rope] for each head: [n, H · (latent + rope)].
    fn absorbed(&self, mla: &Mla, q: &Rows<D>, kv_b: &Weight<D>) -> Result<Rows<D>> {
        let width = mla.latent + mla.rope;
        let query = self.rows(q.rows, mla.heads * width)?;
        let row_terms = mla.heads * mla.nope * mla.latent;
        let step = (LAUNCH_TERMS / row_terms.max(1)).clamp(1, q.rows.max(1));
        for part in &kv_b.parts {
            for first in (0..q.rows).step_by(step) {
                let kernel = Kernel { name: Name::Absorb, coding: Some(kv_b.layout.coding), rows: None };
                let [stride, row_scales, group_size] = kv_b.layout.constants();
                self.device.launch(
                    kernel,
                    [width.div_ceil(THREADS as usize), mla.heads, step.min(q.rows - first)],
                    &[part.codes(), part.scales(), q.buffer(), query.buffer()],
                    &[
                        stride,
                        row_scales,
                        group_size,
                        part.rows.start as u32,
                        part.rows.len() as u32,
                        mla.heads as u32,
                        (mla.nope + mla.value) as u32,
                        mla.nope as u32,
                        mla.rope as u32,
                        mla.latent as u32,
                        first as u32,
                    ],
                )?;
            }
        }
        Ok(query)
    }

    /// [`crate::backend::Backend::select`] among the rows of the cache that the lists name.
    pub(super) fn best_positions(
        &self,
        dsa: &Dsa,
        q: &Rows<D>,
        weights: &Rows<D>,
        keys: &Cache<D>,
        lists: &Lists<D>,
    ) -> Result<Lists<D>> {
        let (n, longest) = (q.rows, lists.longest.min(dsa.topk));
        let count = n * (2 + longest);
        let selection = Lists { words: self.device.values(count)?, rows: n, longest, count };
        // Where every row sees too few to choose among, no score is read.
        let scored = lists.longest > dsa.topk;
        let row_terms = dsa.heads * dsa.width * lists.longest;
        let step = match scored {
            true => (SCRATCH_BYTES / (4 * lists.longest)).min(LAUNCH_TERMS / row_terms.max(1)).clamp(1, n.max(1)),
            false => n.max(1),
        };
        for first in (0..n).step_by(step) {
            let rows = step.min(n - first);
            let scores = self.device.values(if scored { rows * lists.longest } else { 1 })?;
            if scored {
                self.device.launch(
                    Kernel::plain(Name::IndexScores),
                    [lists.longest.div_ceil(TILE), rows, 1],
                    &[q.buffer(), weights.buffer(), keys.values.buffer(), lists.words.buffer(), scores.buffer()],
                    &[
                        first as u32,
                        dsa.heads as u32,
                        dsa.width as u32,
                        lists.longest as u32,
                        ((dsa.width as f64).powf(-0.5) as f32).to_bits(),
                        ((dsa.heads as f64).powf(-0.5) as f32).to_bits(),
                    ],
                )?;
            }
            self.device.launch(
                Kernel::plain(Name::TopPositions),
                [rows, 1, 1],
                &[scores.buffer(), lists.words.buffer(), selection.words.buffer()],
                &[first as u32, n as u32, longest as u32, lists.longest as u32],
            )?;
        }
        Ok(selection)
    }

    /// Adds rows to a cache, which grows to twice its room where it has too little.
    pub(super) fn append_rows(&self, cache: &mut Cache<D>, rows: &Rows<D>) -> Result<()> {
        assert_eq!(cache.width, rows.width, "width of a cache and of its new rows");
        self.room_for(cache, rows.rows)?;
        let width = cache.width;
        self.copy(rows.buffer(), [0, width, 0], &cache.values, [cache.rows, width, 0], [rows.rows, width])?;
        cache.rows += rows.rows;
        Ok(())
    }

    /// Makes room for so many more rows.
    pub(super) fn room_for(&self, cache: &mut Cache<D>, rows: usize) -> Result<()> {
        let needed = cache.rows + rows;
        if needed > cache.room {
            let room = needed.max(2 * cache.room);
            let grown = self.device.values(room * cache.width)?;
            self.copy(
                cache.values.buffer(),
                [0, cache.width, 0],
                &grown,
                [0, cache.width, 0],
                [cache.rows, cache.width],
            )?;
            cache.values = grown;
            cache.room = room;
        }
        Ok(())
    }

    /// Copies [rows, width] values; `from` and `to` are first row, width of a row, first column.
    pub(super) fn copy(
        &self,
        x: &D::Buffer,
        from: [usize; 3],
        out: &super::device::Pooled<D>,
        to: [usize; 3],
        [rows, width]: [usize; 2],
    ) -> Result<()> {
        let constants: Vec<u32> = [rows, width].into_iter().chain(from).chain(to).map(|value| value as u32).collect();
        self.device.launch(Kernel::plain(Name::CopyRows), groups_of(rows * width), &[x, out.buffer()], &constants)
    }
}
