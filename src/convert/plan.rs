//! The plan of a conversion: every file, tensor and byte, from headers alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{Options, path_text};
use crate::checkpoint::{Allowed, Checkpoint, SCALE_BLOCK, SCALE_SUFFIX, SourceTensor};
use crate::config::{CONFIG_FILE, stop_ids};
use crate::container::layout::{FileLayout, PlannedWeight};
use crate::container::stamps;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::format::{ByteCounts, Format, misread_as, safe_group_sizes, upstream_rule};
use crate::limits;
use crate::part::Part;
use crate::quantize::Quantizer;
use crate::recipe::Recipe;
use crate::report::{ConvertClass, ConvertFile, ConvertReport, Finding};
use crate::roles::{Class, Pass, Role};
use crate::tensor::TensorName;
use crate::weights::{ReadBuffer, SourceRows, read_scales};

/// What will be converted into what.
#[derive(Debug)]
pub struct Plan {
    /// The files of the container's passes, in the order in which they are written.
    pub files: Vec<PlannedFile>,
    /// Totals of this run, in the order of [`Class::ALL`].
    pub classes: Vec<PlannedClass>,
    /// For each pass, what decides its bytes.
    pub parameters: BTreeMap<Pass, BTreeMap<String, String>>,
    /// Bytes of this run's source weights, scales included.
    pub source_bytes: u64,
    /// Size of this run's files.
    pub output_bytes: u64,
}

/// A file to write.
#[derive(Debug)]
pub struct PlannedFile {
    /// Its name.
    pub name: String,
    /// Its pass.
    pub pass: Pass,
    /// The source file that it is made from.
    pub shard: String,
    /// The source files that it needs: that one, and those of scales that lie elsewhere.
    pub needs: BTreeSet<String>,
    /// Whether this run is to make it: all files without parts.
    pub mine: bool,
    /// Its weights.
    pub weights: Vec<Weight>,
    /// Where every byte goes.
    pub layout: FileLayout,
}

/// A weight to convert.
#[derive(Debug, Clone)]
pub struct Weight {
    /// Name, logical shape, stored format.
    pub planned: PlannedWeight,
    /// How it gets there.
    pub quantizer: Quantizer,
    /// Its class.
    pub class: Class,
    /// Whether the engine keeps it in memory, so that it is stamped.
    pub resident: bool,
    /// Bytes in the source, scales included.
    pub source_bytes: u64,
}

/// Weights of one class and format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedClass {
    /// The class.
    pub class: Class,
    /// The format.
    pub format: Format,
    /// Bits of the levels, where fewer than the storage has.
    pub bits: Option<u32>,
    /// Weights.
    pub tensors: u64,
    /// Bytes in the source, scales included.
    pub source_bytes: u64,
    /// Bytes in the container, scales included.
    pub output_bytes: u64,
}

impl PlannedClass {
    /// The format as text, with group size and bits where they say something: `int4-grouped(64)`, `int8-row (5 bits)`.
    pub fn format_text(&self) -> String {
        match self.bits {
            Some(bits) => format!("{} ({bits} bits)", self.format),
            None => self.format.to_string(),
        }
    }
}

/// Key by which totals and statistics are kept: class, format, bits below the storage's.
pub type ClassKey = (Class, Format, Option<u32>);

impl Weight {
    /// What its totals are kept by.
    pub fn key(&self) -> ClassKey {
        let bits = match self.quantizer {
            Quantizer::Int8Row { bits } if bits < 8 => Some(bits),
            _ => None,
        };
        (self.class, self.planned.format, bits)
    }

    fn output_bytes(&self) -> u64 {
        match self.planned.shape.matrix() {
            Some((rows, columns)) => self.planned.format.bytes(rows, columns).unwrap_or(u64::MAX),
            None => 4 * self.planned.shape.elements().unwrap_or(u64::MAX / 4),
        }
    }
}

impl Plan {
    /// Plans the passes of `options`; what is accepted although odd goes to `warnings`.
    pub fn new(
        source: &Checkpoint,
        recipe: &Recipe,
        options: &Options,
        warnings: &mut Vec<Fault>,
    ) -> Result<Plan, Faults> {
        let mut planner =
            Planner { source, recipe, options, faults: Vec::new(), warnings, rules_used: BTreeMap::new() };
        planner.check_config();
        let checked = check_values(source, &options.passes, options.allowed, 0, planner.warnings);
        planner.faults.extend(checked.err().into_iter().flat_map(Faults::into_vec));
        let mut files = Vec::new();
        for &pass in &options.passes {
            let of_pass = planner.files(pass);
            if of_pass.is_empty() {
                planner.empty_pass(pass);
            }
            files.extend(of_pass);
        }
        planner.check_rules();
        planner.check_count(files.len());
        // The files of one source file together: it is read while the system has it in memory, and can go afterwards.
        files.sort_by(|a, b| a.shard.cmp(&b.shard));
        let parameters = planner.parameters();
        planner.faults.sort_by(|a, b| a.place.cmp(&b.place));
        Faults::check(planner.faults)?;
        let mut plan = Plan { files, classes: Vec::new(), parameters, source_bytes: 0, output_bytes: 0 };
        plan.divide(options.part);
        Ok(plan)
    }

    /// Leaves to this run what is its part's, or all. Files of one source file stay together, so that it is read by one
    /// part only.
    pub fn divide(&mut self, part: Option<Part>) {
        let shards: BTreeSet<String> = self.files.iter().map(|file| file.shard.clone()).collect();
        let ranks: BTreeMap<&String, usize> = shards.iter().enumerate().map(|(rank, shard)| (shard, rank)).collect();
        for file in &mut self.files {
            file.mine = part.is_none_or(|part| part.has(ranks[&file.shard]));
        }
        self.count();
    }

    /// Takes the true sizes of a file's weights from their source, which was not there when the plan was made.
    pub fn know(&mut self, number: usize, source: &Checkpoint) {
        for weight in &mut self.files[number].weights {
            if let Some(tensor) = source.tensor(weight.planned.name.as_str()) {
                weight.source_bytes = source_bytes(&tensor);
            }
        }
        self.count();
    }

    fn count(&mut self) {
        self.classes = totals(self.mine());
        self.source_bytes = self.classes.iter().map(|c| c.source_bytes).sum();
        self.output_bytes = self.mine().map(|f| f.layout.bytes).sum();
    }

    /// The files that this run is to make.
    pub fn mine(&self) -> impl Iterator<Item = &PlannedFile> {
        self.files.iter().filter(|file| file.mine)
    }

    /// The part of the report that is known before the run.
    pub fn report(&self, container: &Path, warnings: &[Fault]) -> ConvertReport {
        let file = |f: &PlannedFile| ConvertFile { name: f.name.clone(), bytes: f.layout.bytes, sha256: None };
        let class = |c: &PlannedClass| ConvertClass {
            class: c.class.name().to_owned(),
            format: c.format.name().to_owned(),
            group_size: c.format.group_size(),
            bits: c.bits,
            tensors: c.tensors,
            source_bytes: c.source_bytes,
            output_bytes: c.output_bytes,
            sqnr_db: None,
        };
        let mut files: Vec<ConvertFile> = self.mine().map(file).collect();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        ConvertReport {
            container: path_text(container),
            files,
            classes: self.classes.iter().map(class).collect(),
            tensors: self.classes.iter().map(|c| c.tensors).sum(),
            source_bytes: self.source_bytes,
            output_bytes: self.output_bytes,
            seconds: 0.0,
            peak_anonymous_bytes: None,
            free_bytes: None,
            fits: None,
            complete: None,
            consumed: Vec::new(),
            verify: None,
            warnings: warnings.iter().map(Finding::accepted).collect(),
        }
    }
}

/// Totals per class and format.
fn totals<'a>(files: impl Iterator<Item = &'a PlannedFile>) -> Vec<PlannedClass> {
    let mut totals: BTreeMap<(usize, Format, Option<u32>), PlannedClass> = BTreeMap::new();
    for weight in files.flat_map(|file| &file.weights) {
        let (class, format, bits) = weight.key();
        let order = Class::ALL.iter().position(|&c| c == class).unwrap_or(usize::MAX);
        let total = totals.entry((order, format, bits)).or_insert(PlannedClass {
            class,
            format,
            bits,
            tensors: 0,
            source_bytes: 0,
            output_bytes: 0,
        });
        total.tensors += 1;
        total.source_bytes += weight.source_bytes;
        total.output_bytes += weight.output_bytes();
    }
    totals.into_values().collect()
}

struct Planner<'a> {
    source: &'a Checkpoint,
    recipe: &'a Recipe,
    options: &'a Options,
    faults: Vec<Fault>,
    warnings: &'a mut Vec<Fault>,
    rules_used: BTreeMap<Pass, Vec<usize>>,
}

impl Planner<'_> {
    /// A container keeps config.json, so what the engine would silently assume must be said there.
    fn check_config(&mut self) {
        let path = self.source.directory.join(CONFIG_FILE);
        self.faults.extend(self.source.config.silent_faults(&path));
        self.faults.extend(self.source.config.engine_limits(&path));
        match stop_ids(&self.source.directory, &self.source.config) {
            // The file that has them may still be on its way.
            Ok(_) | Err(_) if self.options.follow.is_some() => {}
            Ok(ids) if ids.is_empty() => self.warnings.push(Fault::new(Place::file(path), FaultKind::NoStopIds)),
            Ok(_) => {}
            Err(faults) => self.faults.extend(faults.into_vec()),
        }
    }

    /// The files of a pass: one for each shard that emits something, numbered in the order of the shards' names.
    fn files(&mut self, pass: Pass) -> Vec<PlannedFile> {
        let source = self.source;
        let mut weights: BTreeMap<&str, Vec<(&TensorName, &Role)>> = BTreeMap::new();
        for (name, role) in source.weights(&[pass]) {
            let shard = source.file_of(name.as_str()).expect("located");
            weights.entry(shard).or_default().push((name, role));
        }
        let mut files = Vec::new();
        for (shard, weights) in weights {
            let planned: Vec<Weight> = weights.iter().filter_map(|&(name, role)| self.weight(name, role)).collect();
            let metadata = if self.options.bare { None } else { stamps::metadata(&stamps_of(&planned)) };
            let stored: Vec<PlannedWeight> = planned.iter().map(|weight| weight.planned.clone()).collect();
            let name = pass.file_name(files.len());
            match FileLayout::new(&stored, metadata.as_ref()) {
                Some(layout) if layout.head.len() as u64 <= limits::MAX_HEADER_BYTES => {
                    let needs = weights.iter().flat_map(|(name, _)| needs(source, name.as_str())).collect();
                    let shard = shard.to_owned();
                    files.push(PlannedFile { name, pass, shard, needs, mine: true, weights: planned, layout });
                }
                _ => self.engine_limit("bytes of header", u64::MAX, limits::MAX_HEADER_BYTES),
            }
        }
        files
    }

    /// What becomes of one weight, or `None` when that leaves a fault.
    fn weight(&mut self, name: &TensorName, role: &Role) -> Option<Weight> {
        let file = self.source.file_of(name.as_str())?;
        let place = Place::tensor(self.source.directory.join(file), name.clone());
        let tensor = self.source.tensor(name.as_str());
        let source_bytes = match &tensor {
            Some(tensor) => source_bytes(tensor),
            None => likely_bytes(self.source, name.as_str(), role),
        };
        let (quantizer, rule) = match self.recipe.quantizer(name, role) {
            Ok(found) => found,
            Err(kind) => {
                // One fault a class is enough: the message names the class.
                let known = |f: &Fault| f.kind.to_string() == kind.to_string();
                if !self.faults.iter().any(known) {
                    self.faults.push(Fault::new(Place::default(), kind));
                }
                return None;
            }
        };
        if let Some(rule) = rule {
            let used = self.rules_used.entry(role.pass).or_default();
            if !used.contains(&rule) {
                used.push(rule);
            }
        }
        let format = match role.shape.matrix() {
            Some((_, columns)) => quantizer.format().canonical(columns),
            None => Format::F32,
        };
        if let Some((rows, columns)) = role.shape.matrix().filter(|_| role.matrix) {
            self.check_format(place, role, format, rows, columns);
        }
        let planned = PlannedWeight { name: name.clone(), shape: role.shape.clone(), format };
        let (class, resident) = (role.class, role.resident());
        Some(Weight { planned, quantizer, class, resident, source_bytes })
    }

    /// Whether the engine can read the matrix back as what it is.
    fn check_format(&mut self, place: Place, role: &Role, format: Format, rows: u64, columns: u64) {
        if role.class == Class::Mtp && matches!(format, Format::Int4Row | Format::Int2Row) {
            self.faults.push(Fault::new(place.clone(), FaultKind::HeadFormat { format }));
        }
        if let Some(taken) = misread_as(format, rows, columns) {
            let taken = taken.map_or_else(|unresolved| unresolved.to_string(), |format| format.to_string());
            let grouped = matches!(format, Format::Int4Grouped { .. });
            let safe = if grouped { safe_group_sizes(rows, columns) } else { Vec::new() };
            let kind = FaultKind::Misread { format, shape: role.shape.clone(), taken, safe };
            let fault = Fault::new(place, kind);
            if self.options.allowed.ambiguous { self.warnings.push(fault) } else { self.faults.push(fault) }
        }
    }

    fn empty_pass(&mut self, pass: Pass) {
        let config = &self.source.config;
        let reason = match pass {
            Pass::Mtp if config.mtp_layer().is_none() => {
                "config.json has no num_nextn_predict_layers, so there is no MTP layer".to_owned()
            }
            Pass::Mtp => format!("the checkpoint has no tensor of layer {}, the MTP layer", config.num_hidden_layers),
            Pass::Indexer => "the checkpoint has no `self_attn.indexer` tensors".to_owned(),
            Pass::Main => "the checkpoint has none of its tensors".to_owned(),
        };
        // Weights that were refused already explain an empty pass.
        if self.faults.is_empty() {
            let kind = FaultKind::EmptyPass { pass: pass.name(), reason };
            self.faults.push(Fault::new(Place::file(&self.source.directory), kind));
        }
    }

    /// A rule that names nothing is a misspelt one, as far as these passes can tell.
    fn check_rules(&mut self) {
        for (number, rule) in self.recipe.rules().enumerate() {
            let of_other_pass = || {
                let other = |pass: &Pass| !self.options.passes.contains(pass);
                let others: Vec<Pass> = Pass::ALL.into_iter().filter(other).collect();
                self.source.census.iter().any(|(name, role)| {
                    others.contains(&role.pass)
                        && matches!(self.recipe.quantizer(name, role), Ok((_, Some(n))) if n == number)
                })
            };
            if !self.rules_used.values().any(|used| used.contains(&number)) && !of_other_pass() {
                self.faults.push(Fault::new(Place::default(), FaultKind::RuleUnused { glob: rule.tensor.clone() }));
            }
        }
    }

    fn check_count(&mut self, files: usize) {
        if files > limits::MAX_FILES {
            self.engine_limit("weight files", files as u64, limits::MAX_FILES as u64);
        }
    }

    fn engine_limit(&mut self, what: &'static str, found: u64, limit: u64) {
        self.faults.push(Fault::new(Place::default(), FaultKind::EngineLimit { what, found, limit }));
    }

    fn parameters(&self) -> BTreeMap<Pass, BTreeMap<String, String>> {
        let used = |pass| {
            let mut used = self.rules_used.get(&pass).cloned().unwrap_or_default();
            used.sort_unstable();
            used
        };
        self.options.passes.iter().map(|&pass| (pass, self.recipe.parameters(pass, &used(pass)))).collect()
    }
}

/// What of the values is checked before they are converted, for the weights that need a shard from number `from` on:
/// scales, and a tied head.
pub(super) fn check_values(
    source: &Checkpoint,
    passes: &[Pass],
    allowed: Allowed,
    from: usize,
    warnings: &mut Vec<Fault>,
) -> Result<(), Faults> {
    let mut faults = Vec::new();
    for (name, _) in source.weights_since(from, passes) {
        check_scales(source, name, allowed, &mut faults, warnings);
    }
    check_tied_head(source, passes, from, &mut faults);
    Faults::check(faults)
}

/// Scales are small and read now; a bad one would otherwise end a run of hours.
fn check_scales(
    source: &Checkpoint,
    name: &TensorName,
    allowed: Allowed,
    faults: &mut Vec<Fault>,
    warnings: &mut Vec<Fault>,
) {
    let Some(tensor) = source.tensor(name.as_str()) else { return };
    let Some((shard, stored)) = tensor.scales else { return };
    let scales = match read_scales(&tensor) {
        Ok(scales) => scales,
        Err(fault) => return faults.push(fault),
    };
    let bad = scales.iter().enumerate().filter(|(_, scale)| !scale.is_finite());
    let Some((first, &value)) = bad.clone().next() else { return };
    let columns = stored.shape.matrix().map_or(1, |(_, columns)| columns.max(1));
    let (row, column) = (first as u64 / columns, first as u64 % columns);
    let place = Place::tensor(shard.file.path(), stored.name.clone());
    if allowed.non_finite {
        let kind = FaultKind::NonFiniteZeroed { count: bad.count() as u64, row, column, value };
        warnings.push(Fault::new(place, kind));
    } else {
        faults.push(Fault::new(place, FaultKind::NonFinite { row, column, value }));
    }
}

/// Name of the output head.
const HEAD: &str = "lm_head.weight";
/// Name of the embedding.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// A tied output head that is stored all the same must be the embedding, or nobody knows which one is meant.
fn check_tied_head(source: &Checkpoint, passes: &[Pass], from: usize, faults: &mut Vec<Fault>) {
    let (Some(head), Some(embedding)) = (source.tensor(HEAD), source.tensor(EMBEDDING)) else { return };
    if !source.config.tie_word_embeddings || !passes.contains(&Pass::Main) {
        return;
    }
    if !source.weights_since(from, passes).any(|(name, _)| [HEAD, EMBEDDING].contains(&name.as_str())) {
        return;
    }
    match same_values(&head, &embedding) {
        Ok(true) => {}
        Ok(false) => {
            let place = Place::tensor(head.shard.file.path(), head.stored.name.clone());
            faults.push(Fault::new(place, FaultKind::HeadTied));
        }
        Err(fault) => faults.push(fault),
    }
}

/// The source files that a weight needs: its own, that of its scales, and those of what it is compared with.
fn needs(source: &Checkpoint, name: &str) -> impl Iterator<Item = String> {
    let tied = source.config.tie_word_embeddings && source.file_of(HEAD).is_some();
    let other = match name {
        HEAD if tied => Some(EMBEDDING),
        EMBEDDING if tied => Some(HEAD),
        _ => None,
    };
    let scales = format!("{name}{SCALE_SUFFIX}");
    let files = [source.file_of(name), source.file_of(&scales), other.and_then(|name| source.file_of(name))];
    files.map(|file| file.map(str::to_owned)).into_iter().flatten()
}

/// Bytes that a weight probably takes in a source file that is not there.
fn likely_bytes(source: &Checkpoint, name: &str, role: &Role) -> u64 {
    let elements = role.shape.elements().unwrap_or(0);
    match role.shape.matrix() {
        Some((rows, columns)) if source.index.file_of(&format!("{name}{SCALE_SUFFIX}")).is_some() => {
            elements + 4 * rows.div_ceil(SCALE_BLOCK) * columns.div_ceil(SCALE_BLOCK)
        }
        _ => 2 * elements,
    }
}

/// Whether two weights have the same values, row by row.
fn same_values(one: &SourceTensor<'_>, other: &SourceTensor<'_>) -> Result<bool> {
    let (one, other) = (SourceRows::new(*one)?, SourceRows::new(*other)?);
    if (one.rows, one.columns) != (other.rows, other.columns) {
        return Ok(false);
    }
    let mut buffers = (ReadBuffer::default(), ReadBuffer::default());
    let mut rows = (vec![0.0; one.columns as usize], vec![0.0; other.columns as usize]);
    for row in 0..one.rows {
        one.read(row, 1, &mut buffers.0)?;
        other.read(row, 1, &mut buffers.1)?;
        one.row(&buffers.0, row, row, &mut rows.0);
        other.row(&buffers.1, row, row, &mut rows.1);
        if rows.0 != rows.1 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Bytes of a weight and its scales in the source.
fn source_bytes(tensor: &SourceTensor<'_>) -> u64 {
    tensor.stored.bytes + tensor.scales.map_or(0, |(_, scales)| scales.bytes)
}

/// The stamps of a file: for each resident quantized matrix the name that the engine's byte rule gives.
fn stamps_of(weights: &[Weight]) -> BTreeMap<TensorName, &'static str> {
    weights
        .iter()
        .filter(|weight| weight.resident && weight.planned.format != Format::F32)
        .filter_map(|weight| {
            let (rows, columns) = weight.planned.shape.matrix()?;
            let bytes = ByteCounts::of(weight.planned.format, rows, columns)?;
            let format = upstream_rule(rows, columns, bytes, None).ok()?;
            Some((weight.planned.name.clone(), format.name()))
        })
        .collect()
}
