//! Operations that follow each other in a layer, in one launch: each gives what the operations by themselves give.

use super::Gpu;
use super::driver::Driver;
use super::kernels::{Kernel, Name, THREADS};
use super::rows::{Cache, Rows};
use super::weight::Weight;
use crate::backend::{Kept, Pair};
use crate::error::Result;
use crate::weights::Matrix;

impl<D: Driver> Gpu<D> {
    /// [`crate::backend::Backend::upload_pair`]: in one weight where both go into bricks that one buffer holds.
    pub(super) fn pair(&self, names: [&str; 2], [first, second]: [Matrix; 2]) -> Result<Pair<Weight<D>>> {
        if let Some(layout) = Weight::joined_layout(&self.device, names[0], &first, &second)? {
            let rows = first.rows;
            return Ok(Pair::Joined(Weight::upload_as(&self.device, names[0], &first.above(second), layout)?, rows));
        }
        let upload = |name, matrix: Matrix| Weight::upload_linear(&self.device, name, &matrix);
        Ok(Pair::Apart(upload(names[0], first)?, upload(names[1], second)?))
    }

    /// [`crate::backend::Backend::matmul_pair`].
    pub(super) fn products(&self, pair: Pair<&Weight<D>>, x: &Rows<D>) -> Result<[Rows<D>; 2]> {
        match pair {
            Pair::Apart(first, second) => Ok([self.matmul_rows(first, x)?, self.matmul_rows(second, x)?]),
            Pair::Joined(weight, first) => self.stream_pair(weight, first, x),
        }
    }

    /// [`crate::backend::Backend::add_norm`].
    pub(super) fn sum_and_norm(&self, x: &mut Rows<D>, y: &Rows<D>, weight: &Weight<D>, eps: f64) -> Result<Rows<D>> {
        assert_eq!((x.width, x.rows), (y.width, y.rows), "shapes of a sum");
        assert_eq!(x.width, weight.layout.rows, "width of a norm");
        let out = self.rows(x.rows, x.width)?;
        self.device.launch(
            Kernel::plain(Name::AddNorm),
            [x.rows, 1, 1],
            &[x.buffer(), y.buffer(), weight.vector(), out.buffer()],
            &[x.width as u32, (eps as f32).to_bits()],
        )?;
        Ok(out)
    }

    /// [`crate::backend::Backend::keep`].
    pub(super) fn keep_rows(
        &self,
        cache: &mut Cache<D>,
        q: &Rows<D>,
        kv: &Rows<D>,
        kept: &Kept<'_, Weight<D>>,
        positions: &[usize],
    ) -> Result<()> {
        let &Kept { norm, eps, latent, rope, heads } = kept;
        let pairs = rope.frequencies.len();
        assert_eq!(
            (cache.width, kv.width, norm.layout.rows),
            (latent + 2 * pairs, cache.width, latent),
            "what is kept"
        );
        assert_eq!(q.width % heads.width, 0, "a row is a whole number of heads");
        assert_eq!((q.rows, kv.rows), (positions.len(), positions.len()), "rows and positions");
        let turns = self.made.turns(&self.device, rope, positions)?;
        self.room_for(cache, kv.rows)?;
        let count = q.width / heads.width;
        let constants = [q.width, heads.width, heads.rope_at, pairs, count, latent, cache.rows];
        let mut constants: Vec<u32> = constants.into_iter().map(|value| value as u32).collect();
        constants.push((eps as f32).to_bits());
        self.device.launch(
            Kernel::plain(Name::Keep),
            [1 + (count * pairs).div_ceil(THREADS as usize), kv.rows, 1],
            &[q.buffer(), kv.buffer(), norm.vector(), turns.buffer(), cache.values.buffer()],
            &constants,
        )?;
        cache.rows += kv.rows;
        Ok(())
    }
}
