//! How many tokens go through the layers together, and what memory routed experts get.

use std::path::Path;

use crate::backend::Device;
use crate::backend::gpu::placement::Spread;
use crate::backend::gpu::tiers;
use crate::config::Config;
use crate::error::Result;
use crate::experts;
use crate::limits;
use crate::model::Loaded;
use crate::model::memory::{Allowed, Needs, fits_device, gpu_positions, share};

/// What a run on the CPU does with its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    /// Tokens that go through the layers together.
    pub(super) rows: usize,
    /// How experts are read, of all models together.
    pub(super) experts: experts::Options,
}

/// A model that takes part in a run: where it is, its config, and what of it is loaded.
pub(super) type Part<'a> = (&'a Path, &'a Config, Loaded);

/// The plan for models that run side by side, for texts of at most `longest` tokens.
///
/// Where all experts stay in memory more rows gain nothing. Where they come from the disk they are read once for all rows
/// that go through together, so there are as many as leave experts half of what fewer would.
pub(super) fn plan(models: &[Part<'_>], longest: u64, memory: Option<u64>) -> Result<Plan> {
    let few = limits::BATCH_ROWS;
    let positions = |rows: usize| (limits::WAITING_BATCHES * rows) as u64 + longest;
    let needs = |&(path, config, loaded): &Part<'_>| Needs::of(path, config, loaded, positions(few), few as u64);
    let fewest: Vec<Needs> = models.iter().map(needs).collect();
    let least = joined(&share(&fewest, memory)?);
    let mut plan = Plan { rows: few, experts: least };
    let mut rows = 2 * few;
    while least.direct && rows <= limits::MAX_BATCH_ROWS {
        let needs: Vec<Needs> = fewest
            .iter()
            .zip(models)
            .map(|(needs, (_, config, _))| needs.with_rows(config, positions(rows), rows as u64))
            .collect();
        match share(&needs, memory).map(|options| joined(&options)) {
            Ok(experts) if experts.budget_bytes >= least.budget_bytes / 2 => plan = Plan { rows, experts },
            _ => break,
        }
        rows *= 2;
    }
    Ok(plan)
}

/// What a run on GPUs does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OnGpu {
    /// Tokens that go through the layers together.
    pub(super) rows: usize,
    /// How all models together lie there.
    pub(super) spread: Spread,
}

/// The plan for models that run side by side on a GPU, or on several. Refuses models that have no room there at all.
pub(super) fn on_gpu(models: &[Part<'_>], longest: u64, allowed: Allowed, device: Device) -> Result<OnGpu> {
    let fits = |rows: usize| -> Result<Spread> {
        let positions = gpu_positions((limits::WAITING_BATCHES * rows) as u64 + longest);
        let needs = |&(path, config, loaded): &Part<'_>| Needs::of(path, config, loaded, positions, rows as u64);
        Ok(together(&fits_device(device, &|| models.iter().map(needs).collect(), allowed)?))
    };
    Ok(with_most_rows(fits(limits::BATCH_ROWS)?, |rows| fits(rows).ok()))
}

/// As many rows as leave experts in tiers half of what the fewest would: an expert is uploaded once for all rows that go through
/// together.
fn with_most_rows(fewest: Spread, fits: impl Fn(usize) -> Option<Spread>) -> OnGpu {
    let bytes = fewest.tier_bytes();
    let mut plan = OnGpu { rows: limits::BATCH_ROWS, spread: fewest };
    let Some(bytes) = bytes else { return plan };
    while 2 * plan.rows <= limits::MAX_BATCH_ROWS {
        let rows = 2 * plan.rows;
        match fits(rows).filter(|spread| spread.tier_bytes().is_none_or(|left| left >= bytes / 2)) {
            Some(spread) => plan = OnGpu { rows, spread },
            None => break,
        }
    }
    plan
}

/// Models on one backend share what each GPU has for experts.
fn together(spreads: &[Spread]) -> Spread {
    let first = spreads.first().expect("a model at least");
    let on = |at: usize| {
        let tiers: Vec<tiers::Options> = spreads.iter().filter_map(|spread| spread.tiers[at]).collect();
        let hosts: Vec<experts::Options> = tiers.iter().map(|tiers| tiers.host).collect();
        tiers.first().map(|first| tiers::Options {
            device_bytes: tiers.iter().map(|tiers| tiers.device_bytes).fold(0, u64::saturating_add),
            host: joined(&hosts),
            ..*first
        })
    };
    Spread { tiers: (0..first.tiers.len()).map(on).collect(), ..first.clone() }
}

/// Models on one backend share its experts' memory.
fn joined(options: &[experts::Options]) -> experts::Options {
    let budget = options.iter().map(|options| options.budget_bytes).fold(0, u64::saturating_add);
    experts::Options { direct: options.iter().any(|options| options.direct), ..experts::Options::within(budget) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::placement::Placement;

    #[test]
    fn more_rows_where_experts_are_uploaded() {
        let of = |device_bytes| tiers::Options { device_bytes, fewer: true, host: experts::Options::within(9) };
        let plan = |memory: u64, row: u64| {
            let spread = |bytes| Spread { placement: Placement::single(), tiers: vec![Some(of(bytes))] };
            let fits = |rows: usize| memory.checked_sub(row * rows as u64).map(spread);
            let OnGpu { rows, spread } = with_most_rows(fits(limits::BATCH_ROWS).unwrap(), fits);
            (rows, spread.tier_bytes().unwrap())
        };
        assert_eq!(plan(1 << 40, 1), (limits::MAX_BATCH_ROWS, (1 << 40) - limits::MAX_BATCH_ROWS as u64));
        // 512 rows leave 9,488 bytes, 4,096 rows 5,904, 8,192 less than half.
        assert_eq!(plan(10_000, 1), (4096, 5904));
        assert_eq!(plan(1000, 1), (512, 488));
    }

    #[test]
    fn more_rows_where_experts_come_from_the_disk() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nano");
        let config = Config::read(&directory).unwrap();
        let one = [(directory.as_path(), &config, Loaded::Whole)];
        let of = |memory: u64| plan(&one, 100, Some(memory)).unwrap();
        let all = of(1 << 30);
        assert_eq!((all.rows, all.experts.direct), (limits::BATCH_ROWS, false));
        let needs = Needs::of(&directory, &config, Loaded::Whole, 4 * 512 + 100, 512);
        let least = needs.fixed() + needs.experts_at_least;
        assert_eq!(of(least).rows, limits::BATCH_ROWS);
        assert_eq!(of(least).experts.budget_bytes, needs.experts_at_least);
        assert!(plan(&one, 100, Some(least - 1)).is_err());
        // What more rows take is taken from the experts, but no more than half of it.
        for memory in (least..least + needs.experts).step_by(needs.experts as usize / 64) {
            let plan = of(memory);
            let fewest = share(std::slice::from_ref(&needs), Some(memory)).unwrap()[0];
            assert!(plan.experts.budget_bytes >= fewest.budget_bytes / 2);
            let takes = needs.with_rows(&config, (4 * plan.rows + 100) as u64, plan.rows as u64);
            assert!(takes.fixed() + plan.experts.budget_bytes <= memory, "{memory} {plan:?}");
        }
        // Two models need twice as much.
        assert!(plan(&[one[0], one[0]], 100, Some(least)).is_err());
    }
}
