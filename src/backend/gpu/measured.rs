//! Parts of operations that are of use by themselves: to be measured.

use super::Gpu;
use super::driver::Driver;
use super::moe::{Experts, Groups};
use super::rows::{Choice, Rows};
use crate::backend::Routed;
use crate::error::Result;
use crate::roles::Projection;

impl<D: Driver> Gpu<D> {
    /// A choice that is given: for each row as many experts, best first, with their weights.
    pub fn chosen(&self, routed: &[Vec<Routed>]) -> Result<Choice<D>> {
        let chosen = routed.first().map_or(0, Vec::len);
        assert!(routed.iter().all(|row| row.len() == chosen), "experts of each row");
        let ids: Vec<u32> = routed.iter().flatten().map(|&(expert, _)| expert as u32).collect();
        let weights: Vec<f32> = routed.iter().flatten().map(|&(_, weight)| weight).collect();
        let (words, floats) = (self.device.words(&ids)?, self.device.floats(&weights)?);
        Ok(Choice { ids: words, weights: floats, rows: routed.len(), chosen, groups: None, known: ids.into() })
    }

    /// The slots of a choice, by expert: for [`Gpu::projected`], which may read them before the launch before it has ended.
    pub fn groups_of(&self, experts: &Experts<D>, choice: &Choice<D>) -> Result<Groups<D>> {
        let groups = self.grouped(experts, &choice.ids, choice.rows, choice.chosen)?;
        self.device.driver().wait()?;
        Ok(groups)
    }

    /// One projection of the chosen experts, whose groups were made before: [slots, O], a slot for each expert of each row. `x`
    /// has a row for each row of the choice, or, for `down`, one for each slot.
    pub fn projected(
        &self,
        experts: &Experts<D>,
        projection: Projection,
        groups: &Groups<D>,
        x: &Rows<D>,
    ) -> Result<Rows<D>> {
        let matrices = &experts.whole()[projection as usize];
        let (divisor, rows) = match projection {
            Projection::Gate | Projection::Up => (groups.slots / groups.rows.max(1), groups.rows),
            Projection::Down => (1, groups.slots),
        };
        assert_eq!(x.rows, rows, "rows of a projection");
        let out = self.rows(groups.slots, matrices.rows)?;
        self.of_experts(&matrices.slabs, x, &out, groups, divisor, true)?;
        Ok(out)
    }
}
