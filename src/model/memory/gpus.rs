//! How models lie on one GPU or on several, by what is free on each: which layers go where, and how each has routed experts.

use super::{Allowed, Needs, check_passing, directory, on_gpu, share_beside, tier_bytes};
use crate::backend::gpu::driver::DeviceMemory;
use crate::backend::gpu::placement::{Part, Placement, Room, Spread, Unplaced, place};
use crate::backend::gpu::tiers;
use crate::backend::{Found, Gpus};
use crate::error::{Fault, FaultKind, Place, Result};

/// How each of the models lies on GPUs that are open, all models there at the same time. Where all experts fit they are on the
/// GPUs; else everything but experts is, and each GPU has as many experts of its layers as it has room for. What does not
/// suffice for that is refused: see [`super::fits_gpu`], and of several GPUs [`crate::error::FaultKind::GpusMemory`].
pub fn spread(models: &[Needs], gpus: &Gpus, allowed: Allowed) -> Result<Vec<Spread>> {
    let found = gpus.found()?;
    if let [gpu] = &*found {
        let tiers = on_gpu(models, &gpu.device, gpu.memory, allowed)?;
        let spread = |tiers| Spread { placement: Placement::single(), tiers: vec![tiers] };
        return Ok(tiers.into_iter().map(spread).collect());
    }
    let models = &*models.iter().map(Needs::laid_in_bricks).collect::<Vec<_>>();
    let whole = place(&parts(models, true), &rooms(models, &found, allowed, true));
    if let Ok(placement) = whole {
        check_passing(models, allowed)?;
        let spread = Spread { placement, tiers: vec![None; found.len()] };
        return Ok(vec![spread; models.len()]);
    }
    let placement = place(&parts(models, false), &rooms(models, &found, allowed, false));
    let placement = placement.map_err(|unplaced| too_little(unplaced, models, &found, allowed))?;
    in_tiers(models, placement, &found, allowed)
}

/// The fault of models that have no place, with the least that would do: of what may be taken of each GPU, or, where that
/// would not help, of what is free on each.
fn too_little(unplaced: Unplaced, models: &[Needs], found: &[Found], allowed: Allowed) -> Fault {
    let fits = |found: &[Found], device: Option<u64>| {
        let of = |whole| place(&parts(models, whole), &rooms(models, found, Allowed { device, ..allowed }, whole));
        of(true).is_ok() || of(false).is_ok()
    };
    let by_limit = allowed.device.is_some() && fits(found, None);
    let with_each = |bytes: u64| -> Vec<Found> {
        let memory = DeviceMemory { free: bytes, total: bytes };
        found.iter().map(|gpu| Found { memory, ..gpu.clone() }).collect()
    };
    let does = |bytes: u64| if by_limit { fits(found, Some(bytes)) } else { fits(&with_each(bytes), None) };
    // The first number of bytes that does; whatever all models take at most does.
    let (mut too_few, mut least) = (0, u64::MAX);
    while least - too_few > 1 {
        let middle = too_few + (least - too_few) / 2;
        *(if does(middle) { &mut least } else { &mut too_few }) = middle;
    }
    let Unplaced { layer, bytes, wanted, devices } = unplaced;
    let kind = FaultKind::GpusMemory { layer, bytes, wanted, devices, least, by_limit };
    Fault::new(Place::file(directory(models)), kind)
}

/// Tiers for the models on each GPU, of whose layers all but the experts has room there.
fn in_tiers(models: &[Needs], placement: Placement, found: &[Found], allowed: Allowed) -> Result<Vec<Spread>> {
    // Of each GPU the bytes for each model's experts; nothing where all of them fit.
    let mut bytes: Vec<Option<Vec<u64>>> = Vec::with_capacity(found.len());
    for (at, gpu) in found.iter().enumerate() {
        let here: Vec<Needs> = models.iter().map(|needs| part_of(needs, &placement, at)).collect();
        let fits = tier_bytes(&here, gpu.memory.free, allowed.device);
        bytes.push(fits.expect("the layers were placed with one expert of each size"));
    }
    // In memory everything is there once, beside the experts of all GPUs.
    let mut waiting: Vec<Needs> = Vec::new();
    for at in (0..found.len()).filter(|&at| bytes[at].is_some()) {
        let first = waiting.is_empty();
        waiting.extend(models.iter().map(|needs| in_memory(needs, part_of(needs, &placement, at), first)));
    }
    let mut hosts = share_beside(&waiting, Needs::beside_gpu, allowed.memory)?.into_iter();
    let mut spreads = vec![Spread { placement, tiers: Vec::new() }; models.len()];
    for (gpu, bytes) in found.iter().zip(bytes) {
        let fewer = allowed.device.is_none_or(|allowed| allowed > gpu.memory.free);
        for (number, spread) in spreads.iter_mut().enumerate() {
            let mut options = |device_bytes: u64| {
                let host = hosts.next().expect("a share for each");
                tiers::Options { device_bytes, fewer, host }
            };
            spread.tiers.push(bytes.as_ref().map(|bytes| options(bytes[number])));
        }
    }
    Ok(spreads)
}

/// What of a model is on one of the GPUs.
fn part_of(needs: &Needs, placement: &Placement, at: usize) -> Needs {
    let is_here = |on: usize| on == at;
    let layers = |of: &[u64]| -> u64 {
        let here = of.iter().zip(0..).filter(|&(_, layer)| is_here(placement.of_layer(layer)));
        here.map(|(bytes, _)| *bytes).fold(0, u64::saturating_add)
    };
    let experts = layers(&needs.experts_of_layers);
    let ends = [(needs.embedding, placement.first()), (needs.head, placement.last())];
    let ends = ends.into_iter().filter(|&(_, on)| is_here(on)).map(|(bytes, _)| bytes).sum::<u64>();
    Needs {
        dense: (layers(&needs.of_layers) - experts).saturating_add(ends),
        working: (needs.working - kept(needs)).saturating_add(layers(&needs.kept)),
        experts,
        experts_at_least: experts.min(needs.experts_at_least - needs.staging) + needs.staging,
        one_of_each: needs.one_of_each.min(experts),
        ..needs.clone()
    }
}

/// What a part of a model takes in memory: what is known of tensors, and the weight on its way, count once.
fn in_memory(needs: &Needs, here: Needs, first: bool) -> Needs {
    let working = if first { needs.working } else { needs.of_texts };
    Needs { working, largest: if first { needs.largest } else { 0 }, ..here }
}

/// What each GPU has room for beside what models take on every one of them.
fn rooms(models: &[Needs], found: &[Found], allowed: Allowed, whole: bool) -> Vec<Room> {
    let least = |needs: &Needs| if whole { 0 } else { needs.one_of_each };
    let on_each = |needs: &Needs| (needs.working - kept(needs)).saturating_add(least(needs));
    let reserved = models.iter().map(on_each).fold(0, u64::saturating_add);
    let room = |found: &Found| Room {
        device: found.device.clone(),
        free: found.memory.free,
        total: found.memory.total,
        allowed: allowed.device,
        reserved,
    };
    found.iter().map(room).collect()
}

/// What models keep of positions.
fn kept(needs: &Needs) -> u64 {
    needs.kept.iter().copied().fold(0, u64::saturating_add)
}

/// What lies on one device each: the embeddings of all models, the layers of the same number, the heads. With all routed
/// experts, or without any: then too each device gets its share of the whole.
fn parts(models: &[Needs], whole: bool) -> Vec<Part> {
    let layers = models.iter().map(|needs| needs.kept.len()).max().unwrap_or(0);
    let sum = |of: &dyn Fn(&Needs) -> u64| models.iter().map(of).fold(0, u64::saturating_add);
    let part = |name: String, all: u64, experts: u64| match whole {
        true => Part { name, bytes: all, measured: None },
        false => Part { name, bytes: all - experts, measured: Some(all) },
    };
    let layer = |layer: usize| {
        let of = |of: &[u64]| of.get(layer).copied().unwrap_or(0);
        let bytes = sum(&|needs| of(&needs.of_layers).saturating_add(of(&needs.kept)));
        part(format!("layer {layer}"), bytes, sum(&|needs| of(&needs.experts_of_layers)))
    };
    std::iter::once(part("the embedding".to_owned(), sum(&|needs| needs.embedding), 0))
        .chain((0..layers).map(layer))
        .chain([part("the output head".to_owned(), sum(&|needs| needs.head), 0)])
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;
    use crate::model::Loaded;

    fn needs(fixture: &str) -> (Needs, u64) {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(fixture);
        let config = Config::read(&directory).unwrap();
        (
            Needs::of(&directory, &config, Loaded::Whole, 1000, 512),
            config.num_hidden_layers + config.num_nextn_predict_layers,
        )
    }

    fn gpus(free: &[u64]) -> Vec<Found> {
        let found = |(at, &free): (usize, &u64)| {
            let memory = DeviceMemory { free, total: free };
            Found { device: format!("gpu {at}"), memory }
        };
        free.iter().enumerate().map(found).collect()
    }

    /// All bytes that one device would be asked for are in the parts, or stand beside them.
    #[test]
    fn parts_are_all_there_is() {
        for fixture in ["fixtures/tiny", "fixtures/nano"] {
            let (needs, layers) = needs(fixture);
            let whole = parts(std::slice::from_ref(&needs), true);
            assert_eq!(whole.len() as u64, layers + 2);
            assert!(whole.iter().all(|part| part.bytes > 0), "{whole:?}");
            let sum = |parts: &[Part]| parts.iter().map(|part| part.bytes).sum::<u64>();
            assert_eq!(sum(&whole) + needs.working - kept(&needs), needs.fixed() + needs.experts);
            assert!(kept(&needs) < needs.working);
            let without = parts(std::slice::from_ref(&needs), false);
            assert_eq!(sum(&whole) - sum(&without), needs.experts);
            // Two models are where one is.
            let twice = super::parts(&[needs.clone(), needs], true);
            assert!(twice.iter().zip(&whole).all(|(two, one)| two.bytes == 2 * one.bytes && two.name == one.name));
        }
    }

    /// What is said to be enough is, and one byte less is not.
    #[test]
    fn the_least_that_would_do_is_told() {
        let (needs, _) = needs("fixtures/nano");
        let models = [needs.clone(), needs];
        let (whole, tiered) = (parts(&models, true), parts(&models, false));
        let does = |found: &[Found], device: Option<u64>| {
            let allowed = Allowed { memory: None, device };
            let fits = |parts, whole| place(parts, &rooms(&models, found, allowed, whole));
            fits(&whole, true).is_ok().then_some(()).ok_or(()).or_else(|()| fits(&tiered, false).map(drop))
        };
        for (free, device) in [
            ([1 << 30, 1 << 30], Some(1)),
            ([1 << 30, 1 << 23], Some(1 << 20)),
            ([1 << 20, 1 << 20], Some(1 << 30)),
            ([1 << 20, 0], None),
            ([1 << 10, 1 << 10], Some(1 << 9)),
        ] {
            let found = gpus(&free);
            let fault =
                too_little(does(&found, device).unwrap_err(), &models, &found, Allowed { memory: None, device });
            let FaultKind::GpusMemory { least, by_limit, .. } = *fault.kind else { panic!("{fault}") };
            assert_eq!(by_limit, free[0] == 1 << 30, "{fault}");
            let each = |bytes| if by_limit { does(&found, Some(bytes)) } else { does(&gpus(&[bytes; 2]), None) };
            assert!(each(least).is_ok() && each(least - 1).is_err(), "{fault}");
            let told = if by_limit { "--device-memory {} would do" } else { "{} bytes free on each would do" };
            assert!(fault.to_string().ends_with(&told.replace("{}", &least.to_string())), "{fault}");
        }
    }

    /// Wherever the layers lie, the GPUs together have all of the model, and what each takes fits.
    #[test]
    fn tiers_take_what_is_left_on_each_gpu() {
        let (needs, _) = needs("fixtures/nano");
        let parts = parts(std::slice::from_ref(&needs), false);
        let on_each = needs.working - kept(&needs) + needs.one_of_each;
        let fixed: u64 = parts.iter().map(|part| part.bytes).sum();
        let models = [needs.clone(), needs.clone()];
        let mut seen = 0;
        for hundredth in (0..=200).step_by(5) {
            for shares in [[1, 1], [1, 3], [3, 1]] {
                let room = |share: u64| share * (2 * fixed + needs.experts * hundredth / 100) / 4 + 2 * on_each;
                let found = gpus(&shares.map(room));
                let allowed = Allowed { memory: Some(1 << 40), device: None };
                let rooms = rooms(&models, &found, allowed, false);
                let Ok(placement) = place(&super::parts(&models, false), &rooms) else { continue };
                let spreads = in_tiers(&models, placement.clone(), &found, allowed).unwrap();
                for (at, gpu) in found.iter().enumerate() {
                    let here = part_of(&needs, &placement, at);
                    let tiers: Vec<_> = spreads.iter().map(|spread| spread.tiers[at]).collect();
                    let bytes = |tiers: &Option<tiers::Options>| tiers.map_or(here.experts, |tiers| tiers.device_bytes);
                    let taken = 2 * here.fixed() + tiers.iter().map(bytes).sum::<u64>();
                    assert!(taken <= gpu.memory.free, "{hundredth} {shares:?} {taken} {gpu:?}");
                    assert!(tiers.iter().all(|tiers| bytes(tiers) >= here.one_of_each));
                    seen += tiers.iter().flatten().count();
                }
            }
        }
        assert!(seen > 20, "{seen}");
    }
}
