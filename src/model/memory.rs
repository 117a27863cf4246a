//! Memory of models: what must be there, and what is left for routed experts, in memory and on a GPU.
//!
//! Weights stay where they are computed with as they are stored (halves as f32), but routed experts need not: they are read on
//! demand, within what the rest leaves of the memory. On a GPU whose memory does not hold all of them they are in tiers: as many
//! as fit beside the rest, as many more in memory, and the others on the disk. Everything is known from config.json and
//! headers, before any weight is read.

mod gpus;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::{CHUNK_ROWS, Loaded};
use crate::backend::cpu::Cpu;
use crate::backend::gpu::device::Device;
use crate::backend::gpu::driver::{DeviceMemory, Driver};
use crate::backend::gpu::placement::Spread;
use crate::backend::gpu::tiers;
use crate::backend::reference::spare_rows;
use crate::backend::{self, Gpus, Mode};
use crate::checkpoint::{SCALE_SUFFIX, weight_files};
use crate::config::{Config, IndexerType};
use crate::error::{Fault, FaultKind, Place, Result};
use crate::experts::{Options, slot_bytes, staging_bytes};
use crate::header::{Header, StoredTensor};
use crate::io::{SourceFile, available_bytes};
use crate::isa::Isa;
use crate::roles::Census;
use crate::tensor::Dtype;

pub use gpus::spread;

/// Experts that must fit at least: one is computed with while the next is read.
const LEAST_EXPERTS: u64 = 2;
/// Bytes for what is known of a tensor: names, places, headers.
const TENSOR_BYTES: u64 = 1 << 10;
/// Queries that attention works on at once, at least.
const ATTENDED_QUERIES: u64 = 2048;
/// Rows whose logits are formed at once.
const HEAD_ROWS: u64 = 64;
/// The part of what is left of a GPU's memory that is not taken for experts where nobody says that less may be: the driver takes some.
const LEFT_FREE: u64 = 16;

/// How much memory models may take at most, in bytes; by default what is available.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Of the machine's memory.
    pub memory: Option<u64>,
    /// Of a GPU's.
    pub device: Option<u64>,
}

/// What a model takes, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// Where it is.
    pub directory: PathBuf,
    /// Which parts of it are loaded: only those count.
    loaded: Loaded,
    /// All weights but routed experts.
    pub dense: u64,
    /// What the layers work on, and what they keep of each position.
    pub working: u64,
    /// Routed experts, all of them.
    pub experts: u64,
    /// Routed experts at least, with what reading them takes.
    pub experts_at_least: u64,
    /// What reading them takes.
    staging: u64,
    /// Of `working`, what depends on texts.
    of_texts: u64,
    /// Routed experts at least on a GPU: one of each size.
    one_of_each: u64,
    /// The largest weight that is no routed expert, which is in memory on its way to a GPU.
    largest: u64,
    /// Of that, what each layer keeps of positions, MTP layers after the others.
    kept: Vec<u64>,
    /// Of all weights, those of the embedding, of each layer, and of what comes after.
    embedding: u64,
    of_layers: Vec<u64>,
    /// Of those of each layer, those of routed experts.
    experts_of_layers: Vec<u64>,
    /// Of all tensors the bytes in memory, and the bytes where matrices are laid in bricks.
    laid: (u64, u64),
    head: u64,
}

/// Codes and scales of an expert in memory, and what of it is not used as it is stored.
#[derive(Debug, Clone, Copy, Default)]
struct OfExpert {
    codes: u64,
    scales: u64,
    staged: u64,
}

impl Needs {
    /// What the model in a directory takes for texts of up to so many positions at once, of which up to `rows` go through
    /// the layers together, with these parts loaded. What cannot be read is none of it: whoever opens the model refuses it.
    pub fn of(directory: &Path, config: &Config, loaded: Loaded, positions: u64, rows: u64) -> Needs {
        Needs::planned(directory, config, loaded, positions, rows, std::iter::empty())
    }

    /// The same of a model that is about to be written: these tensors are not in the directory yet.
    pub fn planned<'t>(
        directory: &Path,
        config: &Config,
        loaded: Loaded,
        positions: u64,
        rows: u64,
        planned: impl Iterator<Item = &'t StoredTensor>,
    ) -> Needs {
        let census = Census::of(config);
        let (of_texts, kept) = (working_bytes(config, loaded, positions, rows), kept_bytes(config, loaded, positions));
        let mut needs = Needs {
            directory: directory.to_owned(),
            loaded,
            dense: 0,
            working: of_texts,
            experts: 0,
            experts_at_least: 0,
            staging: 0,
            of_texts,
            one_of_each: 0,
            largest: 0,
            embedding: 0,
            of_layers: vec![0; kept.len()],
            experts_of_layers: vec![0; kept.len()],
            kept,
            head: 0,
            laid: (0, 0),
        };
        let mut experts: BTreeMap<(u64, u64), OfExpert> = BTreeMap::new();
        for name in weight_files(directory).unwrap_or_default() {
            let header = SourceFile::open(&directory.join(name)).ok().and_then(|file| Header::read(&file).ok());
            for tensor in header.iter().flat_map(|header| header.tensors()) {
                needs.add(tensor, &census, &mut experts);
            }
        }
        planned.for_each(|tensor| needs.add(tensor, &census, &mut experts));
        let slot = |expert: &OfExpert| slot_bytes(expert.codes, expert.scales);
        needs.staging = experts.values().map(|expert| staging_bytes(expert.staged)).max().unwrap_or(0);
        needs.experts = experts.values().map(slot).fold(0, u64::saturating_add);
        for (&(layer, _), expert) in &experts {
            needs.count(Some(layer), false, slot(expert));
            if let Some(of_layer) = needs.experts_of_layers.get_mut(layer as usize) {
                *of_layer = of_layer.saturating_add(slot(expert));
            }
        }
        let largest = experts.values().map(slot).max().unwrap_or(0);
        needs.experts_at_least = needs.experts.min(LEAST_EXPERTS.saturating_mul(largest)) + needs.staging;
        let sizes: BTreeSet<(u64, u64)> = experts.values().map(|expert| (expert.codes, expert.scales)).collect();
        needs.one_of_each =
            sizes.iter().map(|(codes, scales)| slot_bytes(*codes, *scales)).fold(0, u64::saturating_add);
        needs
    }

    /// The same for other texts.
    pub fn with_rows(&self, config: &Config, positions: u64, rows: u64) -> Needs {
        let of_texts = working_bytes(config, self.loaded, positions, rows);
        let working = (self.working - self.of_texts).saturating_add(of_texts);
        Needs { working, of_texts, kept: kept_bytes(config, self.loaded, positions), ..self.clone() }
    }

    /// Adds bytes to those of a layer, of the embedding, or of what comes after.
    fn count(&mut self, layer: Option<u64>, embedding: bool, bytes: u64) {
        let of_layer = layer.and_then(|layer| self.of_layers.get_mut(usize::try_from(layer).ok()?));
        let sum = match of_layer {
            Some(of_layer) => of_layer,
            None if embedding => &mut self.embedding,
            None => &mut self.head,
        };
        *sum = sum.saturating_add(bytes);
    }

    fn add(&mut self, tensor: &StoredTensor, census: &Census, experts: &mut BTreeMap<(u64, u64), OfExpert>) {
        let name = tensor.name.as_str();
        let of_codes = name.strip_suffix(".qs").or_else(|| name.strip_suffix(SCALE_SUFFIX));
        let (is_scales, role) = (of_codes.is_some(), census.role(of_codes.unwrap_or(name)));
        self.working = self.working.saturating_add(TENSOR_BYTES);
        let Some(role) = role.filter(|role| self.loaded.uses(role)) else { return };
        let in_memory = match (tensor.dtype, is_scales) {
            (Dtype::BF16 | Dtype::F16, _) => tensor.bytes.saturating_mul(2),
            (Dtype::F8_E8M0, true) => tensor.bytes.saturating_mul(4),
            _ => tensor.bytes,
        };
        let in_bricks = bricks_bytes(role.shape.dims(), in_memory, is_scales);
        self.laid = (self.laid.0.saturating_add(in_memory), self.laid.1.saturating_add(in_bricks));
        let Some((layer, (expert, _))) = role.layer.zip(role.expert) else {
            self.dense = self.dense.saturating_add(in_memory);
            self.largest = self.largest.max(in_memory);
            self.count(role.layer, name.starts_with("model.embed_tokens."), in_memory);
            return;
        };
        let of_expert = experts.entry((layer, expert)).or_default();
        if is_scales {
            of_expert.scales += in_memory;
        } else {
            of_expert.codes += in_memory;
        }
        if is_scales || in_memory != tensor.bytes {
            of_expert.staged += tensor.bytes;
        }
    }

    /// The same where a GPU has matrices in bricks, which are padded: more in the measure of the whole.
    fn laid_in_bricks(&self) -> Needs {
        let (stored, bricks) = (u128::from(self.laid.0.max(1)), u128::from(self.laid.1.max(self.laid.0).max(1)));
        let more = |bytes: u64| u64::try_from((u128::from(bytes) * bricks).div_ceil(stored)).unwrap_or(u64::MAX);
        let each = |bytes: &[u64]| bytes.iter().map(|&bytes| more(bytes)).collect();
        Needs {
            dense: more(self.dense),
            experts: more(self.experts),
            one_of_each: more(self.one_of_each),
            embedding: more(self.embedding),
            of_layers: each(&self.of_layers),
            experts_of_layers: each(&self.experts_of_layers),
            head: more(self.head),
            ..self.clone()
        }
    }

    /// Everything but routed experts.
    pub fn fixed(&self) -> u64 {
        self.dense.saturating_add(self.working)
    }

    /// Everything in memory where a GPU computes and has all of the model: what is known of tensors, and the largest weight, as it is
    /// stored and as it is laid out for the GPU.
    fn passing(&self) -> u64 {
        (self.working - self.of_texts).saturating_add(self.largest.saturating_mul(2))
    }

    /// Everything in memory but routed experts where a GPU computes: what is known of tensors, and a weight on its way there as
    /// far as it takes more than the experts that come later.
    fn beside_gpu(&self) -> u64 {
        let on_its_way = self.largest.saturating_mul(2);
        (self.working - self.of_texts).saturating_add(on_its_way.saturating_sub(self.experts_at_least))
    }

    /// Routed experts, all of them, with what reading them takes.
    fn all_experts(&self) -> u64 {
        self.experts.saturating_add(self.staging)
    }
}

/// Bytes of a tensor that is stored in `bytes`, codes or scales of a matrix of that shape, where it is laid in bricks of 16 rows by
/// 256 columns with a scale for every 64 columns of a row: backend::gpu::bricks.
fn bricks_bytes(shape: &[u64], bytes: u64, is_scales: bool) -> u64 {
    let &[rows, columns] = shape else { return bytes };
    let padded = rows.next_multiple_of(16).saturating_mul(columns.next_multiple_of(256));
    if is_scales {
        let of_rows = 4 * rows;
        return if bytes > of_rows { bytes.max(padded / 16) } else { bytes };
    }
    let scaled = u128::from(bytes) * u128::from(padded) / u128::from((rows * columns).max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX).max(bytes)
}

/// Activations of as many rows as go through the layers together, and caches of all positions with what they have room for
/// beside them. One cache at a time moves when it grows.
fn working_bytes(config: &Config, loaded: Loaded, positions: u64, rows: u64) -> u64 {
    let (d, heads) = (config.hidden_size, config.num_attention_heads);
    let (q, values) = (heads * config.qk_head_dim(), heads * config.v_head_dim);
    let inner =
        config.intermediate_size.max(config.moe_intermediate_size.saturating_mul(config.n_shared_experts.max(1)));
    let rows = positions.min(rows);
    let of_row = [(d, 24), (q, 4), (values, 5), (inner, 8)].iter().map(|(width, times)| width * times).sum::<u64>();
    let kv = config.kv_lora_rank + config.qk_rope_head_dim;
    let indexers = config.indexer_types.iter().filter(|&&kind| kind == IndexerType::Full).count() as u64;
    let of_position =
        (config.num_hidden_layers + mtp_layers(config, loaded) + 1) * kv + indexers * config.index_head_dim;
    let kept = kept_rows(positions);
    let of_head =
        (config.qk_head_dim() + config.v_head_dim) * config.kv_lora_rank * rayon::current_num_threads() as u64;
    // Queries of cached rows and what they find there, of some heads at a time.
    let attended = ATTENDED_QUERIES.max(rows) * (kv + 4 * config.kv_lora_rank);
    let logits = 3 * HEAD_ROWS.min(rows) * config.vocab_size;
    [rows.saturating_mul(of_row), kept.saturating_mul(of_position), of_head, attended, logits]
        .into_iter()
        .fold(0, u64::saturating_add)
        .saturating_mul(4)
}

/// MTP layers that are loaded.
fn mtp_layers(config: &Config, loaded: Loaded) -> u64 {
    u64::from(loaded == Loaded::Whole && config.mtp_layer().is_some())
}

/// Rows that caches have room for when they have come to so many positions.
fn kept_rows(positions: u64) -> u64 {
    positions.saturating_add(spare_rows(positions))
}

/// What each layer keeps of positions: the part of [`working_bytes`] that is of one layer, MTP layers after the others, loaded
/// or not.
fn kept_bytes(config: &Config, loaded: Loaded, positions: u64) -> Vec<u64> {
    let kv = config.kv_lora_rank + config.qk_rope_head_dim;
    let of_layer = |layer: u64| {
        let indexer = config.indexer_types.get(layer as usize) == Some(&IndexerType::Full);
        let width = kv + if indexer { config.index_head_dim } else { 0 };
        kept_rows(positions).saturating_mul(4 * width)
    };
    let left_out = u64::from(config.mtp_layer().is_some()) - mtp_layers(config, loaded);
    let layers = 0..config.num_hidden_layers + mtp_layers(config, loaded);
    layers.map(of_layer).chain((0..left_out).map(|_| 0)).collect()
}

/// How models that are held at the same time read their routed experts within `memory` bytes, by default within what is
/// available but for an eighth. Experts that all fit stay; what does not suffice for the rest and for two experts of each
/// is [`FaultKind::MemoryTooSmall`].
pub fn share(models: &[Needs], memory: Option<u64>) -> Result<Vec<Options>> {
    share_beside(models, Needs::fixed, memory)
}

/// The same beside something else that each model has in memory.
fn share_beside(models: &[Needs], beside: fn(&Needs) -> u64, memory: Option<u64>) -> Result<Vec<Options>> {
    let Some(available) = memory.or_else(|| available_bytes().map(|bytes| bytes / 8 * 7)) else {
        return Ok(models.iter().map(|_| Options { direct: false, ..Options::within(u64::MAX) }).collect());
    };
    let sum = |of: fn(&Needs) -> u64| models.iter().map(of).fold(0, u64::saturating_add);
    let (fixed, least, all) = (sum(beside), sum(|needs| needs.experts_at_least), sum(Needs::all_experts));
    let Some(over) = available.checked_sub(fixed.saturating_add(least)) else {
        return Err(Fault::new(
            Place::file(directory(models)),
            FaultKind::MemoryTooSmall { fixed, experts: least, available },
        ));
    };
    let options = |needs: &Needs| {
        let more = needs.all_experts() - needs.experts_at_least;
        // What is over is shared by what each could make use of.
        let share = match all - least {
            0 => 0,
            all_more => (u128::from(over) * u128::from(more) / u128::from(all_more)) as u64,
        };
        Options { direct: share < more, ..Options::within(needs.experts_at_least + share.min(more)) }
    };
    Ok(models.iter().map(options).collect())
}

/// Positions that the caches of a GPU have room for when they have come to so many: they grow by doubling.
pub fn gpu_positions(positions: u64) -> u64 {
    positions.saturating_mul(2)
}

/// A CPU for parts of a model within `memory` bytes: see [`share`]. `positions` are those of all texts that are kept at the same
/// time.
pub fn cpu(directory: &Path, config: &Config, loaded: Loaded, positions: u64, memory: Option<u64>) -> Result<Cpu> {
    let options = share(&[Needs::of(directory, config, loaded, positions, CHUNK_ROWS as u64)], memory)?;
    Ok(Cpu::with_experts(Isa::detect(), options[0]))
}

/// How models that are held at the same time have their routed experts on a GPU: `None` where all of them fit beside the rest.
/// What does not suffice for the rest and for one expert of each size is refused, before any weight is read: as
/// [`FaultKind::GpuMemory`] or [`FaultKind::GpuMemoryLimit`], and of the machine's memory as [`FaultKind::MemoryTooSmall`].
pub fn fits_gpu<D: Driver>(models: &[Needs], gpu: &Device<D>, allowed: Allowed) -> Result<Vec<Option<tiers::Options>>> {
    on_gpu(models, &gpu.driver().device(), gpu.driver().memory()?, allowed)
}

/// The same on a GPU with this name and memory.
fn on_gpu(
    models: &[Needs],
    device: &str,
    DeviceMemory { free, total }: DeviceMemory,
    allowed: Allowed,
) -> Result<Vec<Option<tiers::Options>>> {
    let models = &*models.iter().map(Needs::laid_in_bricks).collect::<Vec<_>>();
    let fault = |wanted| {
        let (device, purpose) = (device.to_owned(), "the model with one routed expert at a time".to_owned());
        Fault::new(
            Place::file(directory(models)),
            match allowed.device.filter(|&allowed| wanted > allowed) {
                Some(allowed) => FaultKind::GpuMemoryLimit { device, purpose, wanted, allowed },
                None => FaultKind::GpuMemory { device, purpose, wanted, free, total },
            },
        )
    };
    let Some(on_device) = tier_bytes(models, free, allowed.device).map_err(fault)? else {
        check_passing(models, allowed)?;
        return Ok(vec![None; models.len()]);
    };
    let hosts = share_beside(models, Needs::beside_gpu, allowed.memory)?;
    let fewer = allowed.device.is_none_or(|allowed| allowed > free);
    let tiered = |(device_bytes, host)| Some(tiers::Options { device_bytes, fewer, host });
    Ok(on_device.into_iter().zip(hosts).map(tiered).collect())
}

/// Refuses models of which memory does not hold what passes through it to GPUs that have room for all of them: one weight after
/// the other.
fn check_passing(models: &[Needs], allowed: Allowed) -> Result<()> {
    let fixed = models.iter().map(Needs::passing).fold(0, u64::saturating_add);
    match allowed.memory.filter(|&available| available < fixed) {
        Some(available) => {
            let kind = FaultKind::MemoryTooSmall { fixed, experts: 0, available };
            Err(Fault::new(Place::file(directory(models)), kind))
        }
        None => Ok(()),
    }
}

/// The directory that faults of several models name.
fn directory(models: &[Needs]) -> PathBuf {
    models.first().map(|needs| needs.directory.clone()).unwrap_or_default()
}

/// Bytes of a GPU's memory for the routed experts of each model; `None` where all fit. The error is how much is wanted at least.
fn tier_bytes(models: &[Needs], free: u64, allowed: Option<u64>) -> Result<Option<Vec<u64>>, u64> {
    let available = allowed.map_or(free, |allowed| allowed.min(free));
    let sum = |of: fn(&Needs) -> u64| models.iter().map(of).fold(0, u64::saturating_add);
    let (fixed, all) = (sum(Needs::fixed), sum(|needs| needs.experts));
    if fixed.saturating_add(all) <= available {
        return Ok(None);
    }
    let least = sum(|needs| needs.one_of_each);
    let wanted = fixed.saturating_add(least);
    let over = available.checked_sub(wanted).ok_or(wanted)?;
    let over = if allowed.is_some_and(|allowed| allowed <= free) { over } else { over - over / LEFT_FREE };
    let more = |needs: &Needs| needs.experts - needs.one_of_each.min(needs.experts);
    let all_more: u128 = models.iter().map(|needs| u128::from(more(needs))).sum();
    let bytes = |needs: &Needs| {
        let share = (u128::from(over) * u128::from(more(needs))).checked_div(all_more).unwrap_or(0) as u64;
        needs.one_of_each + share.min(more(needs))
    };
    Ok(Some(models.iter().map(bytes).collect()))
}

/// How models lie on the device that they would run on: GPUs are opened for a moment to ask them; other devices have limits of
/// their own, and nothing is told of them.
pub fn fits_device(device: backend::Device, models: &dyn Fn() -> Vec<Needs>, allowed: Allowed) -> Result<Vec<Spread>> {
    if !device.is_gpu() {
        return Ok(Vec::new());
    }
    spread(&models(), &Gpus::open(device, Mode::Exact, None)?, allowed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::plain_bytes;
    use crate::roles::Pass;

    fn needs(fixed: u64, experts: u64, experts_at_least: u64) -> Needs {
        let directory = PathBuf::from("m");
        Needs {
            directory,
            loaded: Loaded::Whole,
            dense: fixed - 3,
            working: 3,
            experts: experts - 10,
            experts_at_least,
            staging: 10,
            of_texts: 0,
            one_of_each: experts_at_least / 3,
            laid: (0, 0),
            largest: 7,
            kept: Vec::new(),
            embedding: 0,
            of_layers: Vec::new(),
            experts_of_layers: Vec::new(),
            head: 0,
        }
    }

    #[test]
    fn what_is_left_is_shared() {
        let models = [needs(100, 1010, 30), needs(200, 110, 30)];
        let budgets = |memory| -> Vec<(u64, bool)> {
            let options = share(&models, Some(memory)).unwrap();
            options.iter().map(|options| (options.budget_bytes, options.direct)).collect()
        };
        assert_eq!(budgets(360), [(30, true), (30, true)]);
        assert_eq!(budgets(360 + 106), [(30 + 98, true), (30 + 8, true)]);
        assert_eq!(budgets(1420), [(1010, false), (110, false)]);
        assert_eq!(budgets(u64::MAX), [(1010, false), (110, false)]);
        for memory in 360..1420 {
            let used: u64 = budgets(memory).iter().map(|(budget, _)| budget).sum();
            assert!(used + 300 <= memory && used + 302 >= memory, "{memory}");
        }
        let message = share(&models, Some(359)).unwrap_err().to_string();
        let expected = "m: at least 360 bytes of memory are needed: 60 for routed experts, one after the other, and 300 for \
                        all else; there are 359";
        assert_eq!(message, expected);
    }

    #[test]
    fn a_gpu_has_all_experts_or_as_many_as_fit() {
        let models = [needs(100, 1010, 30), needs(200, 110, 30)];
        // 300 beside the experts, of which there are 1000 and 100, 10 of each at least.
        assert_eq!(tier_bytes(&models, 1400, None), Ok(None));
        assert_eq!(tier_bytes(&models, u64::MAX, Some(1400)), Ok(None));
        assert_eq!(tier_bytes(&models, 5000, Some(1399)), Ok(Some(vec![999, 99])));
        assert_eq!(tier_bytes(&models, 1399, Some(5000)), Ok(Some(vec![937, 94])));
        assert_eq!(tier_bytes(&models, 320, None), Ok(Some(vec![10, 10])));
        assert_eq!(tier_bytes(&models, 319, None), Err(320));
        assert_eq!(tier_bytes(&models, 9999, Some(319)), Err(320));
        // A sixteenth of what is over is left free, unless somebody says how much may be taken.
        assert_eq!(tier_bytes(&models, 320 + 160, None), Ok(Some(vec![10 + 137, 10 + 12])));
        assert_eq!(tier_bytes(&models, 9999, Some(320 + 160)), Ok(Some(vec![10 + 146, 10 + 13])));
        for free in 320..1400 {
            let bytes = tier_bytes(&models, free, None).unwrap().unwrap();
            assert!(bytes.iter().sum::<u64>() + 300 <= free, "{free}");
        }
    }

    #[test]
    fn needs_are_those_of_the_headers() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny");
        let config = Config::read(&directory).unwrap();
        let few = Needs::of(&directory, &config, Loaded::Whole, 10, 512);
        let many = Needs::of(&directory, &config, Loaded::Whole, 100_000, 512);
        assert_eq!(few.with_rows(&config, 100_000, 512), many);
        assert_eq!((few.dense, few.experts), (many.dense, many.experts));
        assert!(few.working < many.working && few.experts_at_least < few.experts);
        assert!(0 < few.one_of_each && few.one_of_each < few.experts && 0 < few.largest && few.largest < few.dense);
        let stored: u64 = weight_files(&directory)
            .unwrap()
            .iter()
            .map(|name| SourceFile::open(&directory.join(name)).unwrap().bytes())
            .sum();
        assert!((few.dense + few.experts) > stored / 2 && few.experts > few.dense / 4, "{few:?} of {stored}");
    }

    /// What is left out counts nothing: neither weights nor what is kept of positions, but for what is known of tensors.
    #[test]
    fn a_head_that_is_left_out_takes_nothing() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny");
        let config = Config::read(&directory).unwrap();
        let mtp = config.mtp_layer().unwrap() as usize;
        let of = |loaded| Needs::of(&directory, &config, loaded, 1000, 512);
        let (whole, without) = (of(Loaded::Whole), of(Loaded::WithoutMtp));
        assert_eq!((without.of_layers[mtp], without.experts_of_layers[mtp], without.kept[mtp]), (0, 0, 0));
        assert!(whole.experts_of_layers[mtp] > 0 && whole.of_layers[mtp] > whole.experts_of_layers[mtp]);
        assert_eq!(whole.experts - without.experts, whole.experts_of_layers[mtp]);
        let dense = whole.of_layers[mtp] - whole.experts_of_layers[mtp];
        assert_eq!(whole.dense - without.dense, dense);
        assert_eq!(whole.working - without.working, whole.kept[mtp]);
        assert_eq!(whole.of_layers[..mtp], without.of_layers[..mtp]);
        let census = Census::of(&config);
        let of_head = census.iter().filter(|(_, role)| role.pass == Pass::Mtp && !role.optional);
        let elements: u64 = of_head.filter_map(|(_, role)| role.shape.elements()).sum();
        assert_eq!(plain_bytes(&config, Loaded::Whole) - plain_bytes(&config, Loaded::WithoutMtp), 4 * elements);
    }
}
