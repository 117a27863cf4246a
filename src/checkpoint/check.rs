//! Whether index, headers, config and census of a checkpoint agree.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::{Allowed, Checkpoint, SCALE_BLOCK, SCALE_SUFFIX, Shard};
use crate::config::Config;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::roles::{Census, Pass};
use crate::tensor::{Dtype, Shape, TensorName};

/// Quantization methods other than FP8 in 128 × 128 blocks are refused by their names.
pub(super) fn quantization(config: &Config, path: &Path) -> Result<()> {
    let fault = |kind| Err(Fault::new(Place::file(path), kind));
    let Some(quantization) = &config.quantization else { return Ok(()) };
    if quantization.quant_method != "fp8" {
        return fault(FaultKind::SourceQuantization { method: quantization.quant_method.clone() });
    }
    if let Some(fmt) = quantization.fmt.as_deref().filter(|fmt| !matches!(*fmt, "e4m3" | "e4m3fn")) {
        return fault(FaultKind::SourceQuantization { method: format!("fp8 with fmt {fmt}") });
    }
    match quantization.weight_block_size.as_deref() {
        Some([SCALE_BLOCK, SCALE_BLOCK]) => Ok(()),
        other => fault(FaultKind::ConfigValue {
            key: "quantization_config.weight_block_size",
            expected: "[128, 128]".into(),
            found: other.map_or("missing".into(), |size| format!("{size:?}")),
        }),
    }
}

/// How a tensor's name fits the model.
enum Fit {
    /// A weight of the census, its scales, or a tensor that is dropped on purpose.
    Known,
    /// A known form of weights that is not read.
    Unread(&'static str),
    /// A weight of the census under another prefix.
    Nested(TensorName),
    /// Nothing of this model.
    Unknown,
}

fn fit(name: &str, census: &Census, config: &Config) -> Fit {
    let weight = name.strip_suffix(SCALE_SUFFIX).unwrap_or(name);
    if census.role(weight).is_some() || Census::dropped(name, config) {
        return Fit::Known;
    }
    let ends = |suffixes: &[&str]| suffixes.iter().any(|suffix| weight.ends_with(suffix));
    if ends(&["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.experts.gate_proj", "mlp.experts.up_proj"]) {
        Fit::Unread("a layer's experts fused into one tensor")
    } else if ends(&[".weight_packed", ".weight_global_scale", ".input_global_scale"]) {
        Fit::Unread("NVFP4 of compressed-tensors")
    } else if ends(&[".weight_scale_2"]) {
        Fit::Unread("NVFP4 of modelopt")
    } else if ends(&["_proj_blocks", "_proj_scales", ".weight_blocks", ".weight_scales"]) {
        Fit::Unread("MXFP4")
    } else if ends(&[".weight_scale", ".input_scale"]) {
        Fit::Unread(
            "a quantization with `weight_scale` or `input_scale` (NVFP4, MXFP4, or FP8 other than in 128 × 128 blocks)",
        )
    } else {
        let without = |prefix: &str| weight.contains(prefix).then(|| weight.replacen(prefix, "", 1));
        let inner = ["language_model.", "model."].into_iter().filter_map(without);
        let found =
            inner.flat_map(|inner| [format!("model.{inner}"), inner]).find(|inner| census.role(inner).is_some());
        found.map_or(Fit::Unknown, |inner| Fit::Nested(inner.into()))
    }
}

impl Checkpoint {
    /// The opened shards, the index, and the census.
    pub(super) fn check(&mut self, passes: &[Pass], allowed: Allowed) -> Result<(), Faults> {
        let mut faults = Vec::new();
        self.locate(0, &mut faults);
        // While names are in doubt, everything that follows would only repeat it.
        Faults::check(std::mem::take(&mut faults))?;
        self.check_names(&mut faults);
        self.check_census(passes, allowed, &mut faults);
        self.check_tensors(0, passes, &mut faults);
        Faults::check(faults)
    }

    /// The shards from number `from` on, opened after the others were checked.
    pub(super) fn check_shards(&mut self, from: usize, passes: &[Pass]) -> Result<(), Faults> {
        let mut faults = Vec::new();
        self.locate(from, &mut faults);
        Faults::check(std::mem::take(&mut faults))?;
        self.check_tensors(from, passes, &mut faults);
        Faults::check(faults)
    }

    /// What was opened from shard number `from` on.
    fn check_tensors(&mut self, from: usize, passes: &[Pass], faults: &mut Vec<Fault>) {
        for (name, role) in self.weights_since(from, &Pass::ALL) {
            self.check_tensor(name, &role.shape, faults);
            if passes.contains(&role.pass) || !self.unopened(&format!("{}{SCALE_SUFFIX}", name.as_str())) {
                self.check_scales(name, &role.shape, faults);
            }
        }
        self.check_orphans(from, faults);
        self.check_total();
    }

    /// Where each tensor is; index and headers must say the same.
    fn locate(&mut self, from: usize, faults: &mut Vec<Fault>) {
        let mut located = std::mem::take(&mut self.located);
        let index = &self.index;
        for (s, shard) in self.shards.iter().enumerate().skip(from) {
            let path = shard.file.path();
            let indexed = index.names_file(&shard.name);
            for (t, tensor) in shard.header.tensors().iter().enumerate() {
                let place = || Place::tensor(path, tensor.name.clone());
                if tensor.name.as_str().ends_with(".qs") {
                    let kind = FaultKind::SourceIsContainer { sign: format!("the scales {}", tensor.name) };
                    faults.push(Fault::new(place(), kind));
                    return;
                }
                match index.file_of(tensor.name.as_str()) {
                    Some(file) if file != shard.name => {
                        let other = file.to_owned();
                        let both = self.shards.iter().any(|shard| shard.name == file && holds(shard, &tensor.name));
                        let kind = if both {
                            FaultKind::TensorElsewhere { other }
                        } else {
                            FaultKind::IndexWrongFile { other }
                        };
                        faults.push(Fault::new(place(), kind));
                    }
                    None if indexed => faults.push(Fault::new(place(), FaultKind::TensorNotInIndex)),
                    _ => {}
                }
                if let Some((other, _)) = located.insert(tensor.name.clone(), (s, t))
                    && other != s
                {
                    let other = self.shards[other].name.clone();
                    faults.push(Fault::new(place(), FaultKind::DuplicateInFiles { other }));
                }
            }
            if index.is_present() && !indexed {
                let kind = FaultKind::FileNotInIndex { tensors: shard.header.tensors().len() };
                self.warnings.push(Fault::new(Place::file(path), kind));
            }
            self.warnings.extend(shard.header.misaligned(path));
            self.warnings.extend(shard.header.odd_names(path));
        }
        let opened: HashMap<&str, &Path> =
            self.shards[from..].iter().map(|s| (s.name.as_str(), s.file.path())).collect();
        for (name, file) in index.entries() {
            if let Some(path) = opened.get(file)
                && !located.contains_key(name)
            {
                faults.push(Fault::new(Place::tensor(*path, name.clone()), FaultKind::TensorNotInShard));
            }
        }
        self.located = located;
    }

    /// Every name that is known, from opened headers and from the index, with its file.
    fn names(&self) -> impl Iterator<Item = (&TensorName, PathBuf)> {
        let index = &self.index;
        let opened = self.located.iter().map(|(name, &(shard, _))| (name, self.shards[shard].file.path().to_owned()));
        let unopened = index.entries().filter(|(name, _)| !self.located.contains_key(*name));
        opened.chain(unopened.map(|(name, file)| (name, self.directory.join(file))))
    }

    /// Every tensor must be of this model: what it is not is named, all of it.
    fn check_names(&self, faults: &mut Vec<Fault>) {
        let mut misfits: Vec<(&TensorName, PathBuf, FaultKind)> = Vec::new();
        for (name, path) in self.names() {
            match fit(name.as_str(), &self.census, &self.config) {
                Fit::Known => {}
                Fit::Unread(what) => misfits.push((name, path, FaultKind::SourceFormat { what })),
                Fit::Nested(within) => misfits.push((name, path, FaultKind::NestedTensor { within })),
                Fit::Unknown => misfits.push((name, path, FaultKind::UnknownTensor)),
            }
        }
        misfits.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        faults
            .extend(misfits.into_iter().map(|(name, path, kind)| Fault::new(Place::tensor(path, name.clone()), kind)));
    }

    /// Everything that config.json asks for is there, of the wanted passes and of those that the index knows.
    fn check_census(&mut self, passes: &[Pass], allowed: Allowed, faults: &mut Vec<Fault>) {
        let index = &self.index;
        let on_disk = |file: &str| self.is_deferred(file) || self.directory.join(file).exists();
        let absent = self.census.absent(&|name| {
            self.located.contains_key(name)
                || index.file_of(name.as_str()).is_some_and(|file| !allowed.incomplete || on_disk(file))
        });
        let target = if allowed.incomplete { &mut self.warnings } else { &mut *faults };
        for fault in absent.faults {
            let place = Place { file: Some(self.directory.clone()), ..fault.place };
            target.push(Fault { place, kind: fault.kind });
        }
        for &pass in &absent.passes {
            let what = match pass {
                Pass::Main => "of the hidden layers",
                Pass::Mtp => "of the MTP head",
                Pass::Indexer => "of the DSA indexer",
            };
            let fault = Fault::new(Place::file(&self.directory), FaultKind::PassAbsent { what });
            if pass == Pass::Main && passes.contains(&pass) { faults.push(fault) } else { self.warnings.push(fault) }
        }
        self.absent_passes = absent.passes;
    }

    /// Whether a tensor is in a file of the index that no wanted pass needs, so that it was not opened.
    fn unopened(&self, name: &str) -> bool {
        self.index.file_of(name).is_some_and(|file| !self.shards.iter().any(|shard| shard.name == file))
    }

    /// Shape by config, element type by what is read.
    fn check_tensor(&self, name: &TensorName, shape: &Shape, faults: &mut Vec<Fault>) {
        let Some(tensor) = self.tensor(name.as_str()) else { return };
        let stored = tensor.stored;
        let place = || Place::tensor(tensor.shard.file.path(), name.clone());
        match stored.dtype {
            Dtype::F32 | Dtype::BF16 | Dtype::F16 => {}
            Dtype::F8_E4M3 if stored.shape.matrix().is_none() => {
                let kind = FaultKind::SourceNotMatrix { dtype: stored.dtype, shape: stored.shape.clone() };
                return faults.push(Fault::new(place(), kind));
            }
            Dtype::F8_E4M3 => {}
            // Half as many columns in bytes or nibbles: four-bit weights.
            Dtype::U8 | Dtype::I8 | Dtype::F4 if stored.shape != *shape || stored.dtype == Dtype::F4 => {
                let kind = FaultKind::SourceFormat { what: "a packed four-bit weight (NVFP4, MXFP4)" };
                return faults.push(Fault::new(place(), kind));
            }
            dtype => return faults.push(Fault::new(place(), FaultKind::SourceDtype { dtype })),
        }
        if stored.shape != *shape {
            let kind = FaultKind::ShapeMismatch { expected: shape.clone(), found: stored.shape.clone() };
            faults.push(Fault::new(place(), kind));
        }
    }

    /// An FP8 weight of the right shape has the ceiling grid of scales.
    fn check_scales(&self, name: &TensorName, shape: &Shape, faults: &mut Vec<Fault>) {
        let Some(tensor) = self.tensor(name.as_str()) else { return };
        if tensor.stored.dtype != Dtype::F8_E4M3 || tensor.stored.shape != *shape || shape.matrix().is_none() {
            return;
        }
        let Some((shard, scales)) = tensor.scales else {
            let scale = format!("{}{SCALE_SUFFIX}", name.as_str()).into();
            let place = Place::tensor(tensor.shard.file.path(), name.clone());
            return faults.push(Fault::new(place, FaultKind::ScaleMissing { scale }));
        };
        let place = Place::tensor(shard.file.path(), scales.name.clone());
        if !matches!(scales.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F8_E8M0) {
            faults.push(Fault::new(place, FaultKind::ScaleDtype { found: scales.dtype }));
        } else if let Some(kind) = grid_fault(shape, &scales.shape) {
            faults.push(Fault::new(place, kind));
        }
    }

    /// Scales belong to an FP8 weight.
    fn check_orphans(&self, from: usize, faults: &mut Vec<Fault>) {
        let mut orphans: Vec<(&TensorName, &str)> = self
            .located
            .iter()
            .filter(|(_, (shard, _))| *shard >= from)
            .filter_map(|(name, _)| Some((name, name.as_str().strip_suffix(SCALE_SUFFIX)?)))
            .filter(|(_, weight)| match self.stored(weight) {
                Some((_, stored)) => stored.dtype != Dtype::F8_E4M3,
                None => !self.unopened(weight),
            })
            .collect();
        orphans.sort();
        for (name, weight) in orphans {
            let path = self.shards[self.located[name].0].file.path();
            faults
                .push(Fault::new(Place::tensor(path, name.clone()), FaultKind::ScaleOrphan { weight: weight.into() }));
        }
    }

    /// `total_size` counts the tensors' bytes; it can be checked when every file of the index is open.
    fn check_total(&mut self) {
        let index = &self.index;
        let all_open = index.entries().all(|(name, _)| self.located.contains_key(name));
        let Some(found) = index.total_size().filter(|_| all_open) else { return };
        let expected: u64 = index.entries().filter_map(|(name, _)| Some(self.stored(name.as_str())?.1.bytes)).sum();
        if expected != found {
            self.warnings.push(Fault::new(Place::file(index.path()), FaultKind::TotalSize { expected, found }));
        }
    }
}

/// Whether a shard has a tensor of that name.
fn holds(shard: &Shard, name: &TensorName) -> bool {
    shard.header.tensors().iter().any(|tensor| tensor.name == *name)
}

/// What is wrong with the shape of a scale grid.
fn grid_fault(weight: &Shape, found: &Shape) -> Option<FaultKind> {
    let (rows, columns) = weight.matrix()?;
    let expected = [rows.div_ceil(SCALE_BLOCK), columns.div_ceil(SCALE_BLOCK)];
    if found.dims() == expected {
        return None;
    }
    let kind = match *found.dims() {
        [] | [1] => "one scale for the whole tensor",
        [n] if n == rows => "one scale per row",
        [n, 1] | [1, n] if n == rows => "one scale per row",
        [n, 1] | [1, n] if n == columns => "one scale per column",
        [a, b] if [b, a] == expected => "a transposed grid",
        [a, b] if a >= expected[0] && b >= expected[1] => {
            "an oversize grid, as for smaller blocks or padded dimensions"
        }
        [a, b] if a <= expected[0] && b <= expected[1] => "too small a grid, as for larger blocks",
        _ => "another grid",
    };
    Some(FaultKind::ScaleGrid { weight: weight.clone(), expected: expected.into(), found: found.clone(), kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_are_the_ceiling_grid_or_another_format() {
        let kind = |weight: [u64; 2], grid: &[u64]| match grid_fault(&weight.into(), &grid.to_vec().into()) {
            None => "",
            Some(FaultKind::ScaleGrid { kind, .. }) => kind,
            Some(other) => panic!("{other}"),
        };
        assert_eq!(kind([130, 200], &[2, 2]), "");
        assert_eq!(kind([130, 300], &[3, 2]), "a transposed grid");
        assert_eq!(kind([130, 300], &[130, 1]), "one scale per row");
        assert_eq!(kind([130, 300], &[130]), "one scale per row");
        assert_eq!(kind([130, 300], &[1, 300]), "one scale per column");
        assert_eq!(kind([130, 300], &[]), "one scale for the whole tensor");
        assert_eq!(kind([130, 300], &[2, 4]), "an oversize grid, as for smaller blocks or padded dimensions");
        assert_eq!(kind([130, 300], &[1, 2]), "too small a grid, as for larger blocks");
    }
}
