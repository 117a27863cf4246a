//! Which layers of a model lie on which GPU: runs of layers that follow one another, so that rows go from one device to the
//! next as few times as there are devices.

use super::tiers;

/// A layer, or another part of the model that lies on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// For messages: `layer 5`.
    pub name: String,
    /// Bytes of its weights, and of what it keeps of positions.
    pub bytes: u64,
    /// Its use as it was measured, or as it is expected, in any unit: devices are then given equal shares of that, where they
    /// have room.
    pub measured: Option<u64>,
}

/// What a device has room for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// Its own name, for messages.
    pub device: String,
    /// Bytes that are free.
    pub free: u64,
    /// Bytes that it has.
    pub total: u64,
    /// Bytes that may be taken, where somebody said how many.
    pub allowed: Option<u64>,
    /// Bytes of those that no part may take: activations, and room for a routed expert.
    pub reserved: u64,
}

impl Room {
    /// Bytes for parts.
    pub fn bytes(&self) -> u64 {
        self.allowed.map_or(self.free, |allowed| allowed.min(self.free)).saturating_sub(self.reserved)
    }
}

/// For each part of a model, in its order, the number of its device: the embedding, the layers, MTP layers among them, and
/// what comes after.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement(Vec<usize>);

impl Placement {
    /// Everything on the first device.
    pub fn single() -> Placement {
        Placement(vec![0])
    }

    /// Parts on devices of these numbers, which do not decrease.
    pub fn of(devices: Vec<usize>) -> Placement {
        assert!(!devices.is_empty() && devices.is_sorted(), "{devices:?} are no runs of layers");
        Placement(devices)
    }

    /// The device of the embedding, where a text begins.
    pub fn first(&self) -> usize {
        self.0[0]
    }

    /// The device of the last norm and the output head.
    pub fn last(&self) -> usize {
        self.0[self.0.len() - 1]
    }

    /// The device of a layer. Layers after the last are with the head.
    pub fn of_layer(&self, layer: u64) -> usize {
        usize::try_from(layer).ok().and_then(|layer| self.0.get(layer.checked_add(1)?)).copied().unwrap_or(self.last())
    }

    /// The device of a weight by the name that Hugging Face gives it.
    pub fn of_weight(&self, name: &str) -> usize {
        if name.starts_with("model.embed_tokens.") {
            return self.first();
        }
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
        layer.map_or(self.last(), |layer| self.of_layer(layer))
    }

    /// The device of each part.
    pub fn devices(&self) -> &[usize] {
        &self.0
    }
}

/// How a model lies on one GPU, or on several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spread {
    /// Which layers are on which.
    pub placement: Placement,
    /// How each has the routed experts of its layers; `None` where all of them are there.
    pub tiers: Vec<Option<tiers::Options>>,
}

impl Spread {
    /// Bytes of the GPUs' memory for routed experts in tiers; `None` where no GPU has them so.
    pub fn tier_bytes(&self) -> Option<u64> {
        let bytes = self.tiers.iter().flatten().map(|tiers| tiers.device_bytes);
        bytes.reduce(u64::saturating_add)
    }

    /// How much each tier has, for people; nothing where all experts are on the GPUs.
    pub fn told(&self) -> Vec<String> {
        let told = |(number, tiers): (usize, &Option<tiers::Options>)| {
            let told = tiers.as_ref()?.told();
            Some(if self.tiers.len() > 1 {
                format!("GPU {} of {}: {told}", number + 1, self.tiers.len())
            } else {
                told
            })
        };
        self.tiers.iter().enumerate().filter_map(told).collect()
    }
}

/// Why parts have no place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unplaced {
    /// The first part for which no device has room, and its bytes.
    pub layer: String,
    /// Its bytes.
    pub bytes: u64,
    /// Bytes of all parts.
    pub wanted: u64,
    /// What each device has, for people.
    pub devices: String,
}

/// Places parts on devices in the order of both, so that each device has the share of all that its room is of all room: each
/// cut lies where it is nearest to that, or as near as there is memory for. Where they have no
/// place at all the error says which part, and what devices have.
pub fn place(parts: &[Part], rooms: &[Room]) -> Result<Placement, Unplaced> {
    assert!(!parts.is_empty() && !rooms.is_empty(), "parts and devices");
    let from = latest_starts(parts, rooms);
    if from[0] > 0 {
        return Err(too_large(parts, rooms));
    }
    // Sums of what is balanced, of the parts before each.
    let measured = parts.iter().all(|part| part.measured.is_some());
    let load = |part: &Part| if measured { part.measured.unwrap_or(0) } else { part.bytes };
    let mut sums = vec![0u128];
    parts.iter().for_each(|part| sums.push(sums[sums.len() - 1] + u128::from(load(part))));
    let (all, all_room) = (sums[parts.len()], rooms.iter().map(|room| u128::from(room.bytes())).sum::<u128>().max(1));
    let (mut devices, mut begin, mut room_before) = (Vec::with_capacity(parts.len()), 0, 0);
    for (device, room) in rooms.iter().enumerate() {
        room_before += u128::from(room.bytes());
        let target = share(all, room_before, all_room);
        let least = from[device + 1].max(begin);
        let most = begin + fitting(parts[begin..].iter(), room.bytes());
        let end = (least..=most).min_by_key(|&end| sums[end].abs_diff(target)).expect("what is after it has its place");
        devices.resize(end, device);
        begin = end;
    }
    Ok(Placement(devices))
}

/// all · part / whole, rounded down; `part` is at most `whole`.
fn share(all: u128, part: u128, whole: u128) -> u128 {
    match all.checked_mul(part) {
        Some(product) => product / whole,
        None => all / whole * part,
    }
}

/// For each device the first part from which on all fit on it and those after it; the last is the number of parts.
fn latest_starts(parts: &[Part], rooms: &[Room]) -> Vec<usize> {
    let mut from = vec![parts.len(); rooms.len() + 1];
    for (device, room) in rooms.iter().enumerate().rev() {
        let end = from[device + 1];
        from[device] = end - fitting(parts[..end].iter().rev(), room.bytes());
    }
    from
}

/// How many of the next parts fit together.
fn fitting<'p>(parts: impl Iterator<Item = &'p Part>, mut room: u64) -> usize {
    let mut fits = |part: &&Part| room.checked_sub(part.bytes).map(|left| room = left).is_some();
    parts.take_while(|part| fits(part)).count()
}

/// The first part for which no device has room, and what each device has.
fn too_large(parts: &[Part], rooms: &[Room]) -> Unplaced {
    let placed = rooms.iter().fold(0, |placed, room| placed + fitting(parts[placed..].iter(), room.bytes()));
    let told = |room: &Room| {
        let Room { device, free, total, allowed, reserved } = room;
        let allowed = allowed.filter(|allowed| allowed < free);
        let allowed = allowed.map_or(String::new(), |allowed| format!(", of which {allowed} may be taken"));
        let left = match room.bytes() {
            0 => "nothing is left".to_owned(),
            left => format!("{left} are left"),
        };
        format!(
            "{device} has {free} of {total} bytes free{allowed}, activations and an expert take {reserved}, {left} for these"
        )
    };
    let without = &parts[placed];
    Unplaced {
        layer: without.name.clone(),
        bytes: without.bytes,
        wanted: parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add),
        devices: rooms.iter().map(told).collect::<Vec<_>>().join("; "),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn parts(bytes: &[u64]) -> Vec<Part> {
        let part = |(at, &bytes): (usize, &u64)| Part { name: format!("layer {at}"), bytes, measured: None };
        bytes.iter().enumerate().map(part).collect()
    }

    fn rooms(free: &[u64]) -> Vec<Room> {
        let room = |(at, &free): (usize, &u64)| Room {
            device: format!("gpu {at}"),
            free: free + 5,
            total: 1000,
            allowed: None,
            reserved: 5,
        };
        free.iter().enumerate().map(room).collect()
    }

    fn placed(bytes: &[u64], free: &[u64]) -> Vec<usize> {
        place(&parts(bytes), &rooms(free)).unwrap().devices().to_vec()
    }

    #[test]
    fn layers_are_shared_by_the_room_there_is() {
        assert_eq!(placed(&[1; 8], &[100, 100]), [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(placed(&[1; 8], &[300, 100]), [0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(placed(&[1; 6], &[100; 3]), [0, 0, 1, 1, 2, 2]);
        // A device may be left out, also the first.
        assert_eq!(placed(&[9, 1], &[3, 100]), [1, 1]);
        assert_eq!(placed(&[5, 5], &[10, 0, 0]), [0, 0]);
        // Memory before balance.
        assert_eq!(placed(&[4, 4, 1, 1, 1, 1], &[8, 4]), [0, 0, 1, 1, 1, 1]);
        assert_eq!(placed(&[1, 1, 1, 1, 4, 4], &[4, 8]), [0, 0, 0, 0, 1, 1]);
        assert_eq!(placed(&[u64::MAX / 2, u64::MAX / 2], &[u64::MAX - 5, u64::MAX - 5]), [0, 1]);
    }

    #[test]
    fn what_is_measured_is_shared_where_there_is_room() {
        let mut parts = parts(&[10, 10, 10, 10]);
        for (part, used) in parts.iter_mut().zip([30, 10, 10, 10]) {
            part.measured = Some(used);
        }
        let devices = |free: &[u64]| place(&parts, &rooms(free)).unwrap().devices().to_vec();
        assert_eq!(devices(&[100, 100]), [0, 1, 1, 1]);
        assert_eq!(devices(&[20, 20]), [0, 0, 1, 1]);
    }

    #[test]
    fn what_finds_no_place_is_named_with_sizes() {
        let said = |bytes, free| place(&parts(bytes), &rooms(free)).unwrap_err();
        let unplaced = said(&[10, 10, 30], &[25, 20]);
        assert_eq!((&*unplaced.layer, unplaced.bytes, unplaced.wanted), ("layer 2", 30, 50));
        assert_eq!(
            unplaced.devices,
            "gpu 0 has 30 of 1000 bytes free, activations and an expert take 5, 25 are left for these; gpu 1 has 25 of 1000 \
             bytes free, activations and an expert take 5, 20 are left for these"
        );
        let mut rooms = rooms(&[20, 20, 20]);
        (rooms[0].allowed, rooms[1].allowed, rooms[2].allowed) = (Some(15), Some(4), Some(26));
        assert_eq!(
            place(&parts(&[11, 21]), &rooms).unwrap_err().devices,
            "gpu 0 has 25 of 1000 bytes free, of which 15 may be taken, activations and an expert take 5, 10 are left for these; \
             gpu 1 has 25 of 1000 bytes free, of which 4 may be taken, activations and an expert take 5, nothing is left for these; \
             gpu 2 has 25 of 1000 bytes free, activations and an expert take 5, 20 are left for these"
        );
        let unplaced = said(&[1], &[0]);
        assert_eq!((&*unplaced.layer, unplaced.bytes), ("layer 0", 1));
    }

    #[test]
    fn weights_are_with_their_layers() {
        let placement = Placement::of(vec![0, 0, 1, 2, 2]);
        for (name, device) in [
            ("model.embed_tokens.weight", 0),
            ("model.layers.0.input_layernorm.weight", 0),
            ("model.layers.1.mlp.experts.7.up_proj.weight", 1),
            ("model.layers.2.embed_tokens.weight", 2),
            ("model.layers.77.eh_proj.weight", 2),
            ("model.norm.weight", 2),
            ("lm_head.weight", 2),
        ] {
            assert_eq!(placement.of_weight(name), device, "{name}");
        }
        assert_eq!((placement.first(), placement.last()), (0, 2));
        assert_eq!(Placement::single().of_weight("model.layers.3.x"), 0);
    }

    /// Whether parts fit in any way at all, by trying every cut.
    fn fits(parts: &[u64], rooms: &[u64]) -> bool {
        let Some((&room, rooms)) = rooms.split_first() else { return parts.is_empty() };
        let counts = 0..=parts.len();
        counts.into_iter().any(|count| parts[..count].iter().sum::<u64>() <= room && fits(&parts[count..], rooms))
    }

    proptest! {
        #[test]
        fn every_part_has_one_device_with_room(bytes in vec(0u64..20, 1..12), free in vec(0u64..60, 1..5)) {
            match place(&parts(&bytes), &rooms(&free)) {
                Err(_) => prop_assert!(!fits(&bytes, &free)),
                Ok(placement) => {
                    let devices = placement.devices();
                    prop_assert!(devices.len() == bytes.len() && devices.is_sorted());
                    for (device, &room) in free.iter().enumerate() {
                        let on = devices.iter().zip(&bytes).filter(|(of, _)| **of == device);
                        prop_assert!(on.map(|(_, bytes)| bytes).sum::<u64>() <= room);
                    }
                }
            }
        }

        #[test]
        fn shares_are_even_within_the_largest_part(
            bytes in vec(1u64..1000, 1..60),
            used in vec(1u64..1000, 60),
            measured: bool,
            free in vec(60_000u64..200_000, 1..6),
        ) {
            let mut parts = parts(&bytes);
            if measured {
                parts.iter_mut().zip(used).for_each(|(part, used)| part.measured = Some(used));
            }
            let loads: Vec<u64> = parts.iter().map(|part| part.measured.unwrap_or(part.bytes)).collect();
            let placement = place(&parts, &rooms(&free)).unwrap();
            let (all, all_room) = (loads.iter().sum::<u64>() as f64, free.iter().sum::<u64>() as f64);
            let largest = *loads.iter().max().unwrap() as f64;
            for (device, &room) in free.iter().enumerate() {
                let on = placement.devices().iter().zip(&loads).filter(|(of, _)| **of == device);
                let load = on.map(|(_, load)| load).sum::<u64>() as f64;
                prop_assert!((load - all * room as f64 / all_room).abs() <= largest + 1.0);
            }
        }
    }
}
