//! Reading a container: everything that headers, config, index, stamps and manifest say, and where they disagree.
//!
//! [`Survey::read`] looks at a directory and collects findings without stopping at the first. [`Container`] is a survey
//! without errors, from which weights can be loaded.

mod declared;
mod weight;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::manifest::{MANIFEST_FILE, Manifest};
use super::progress;
use super::resolve::Resolution;
use super::stamps;
use crate::checkpoint::{Index, weight_files};
use crate::config::{CONFIG_FILE, Config, stop_ids};
use crate::error::{Fault, FaultKind, Faults, Place, Result, Severity};
use crate::format::Format;
use crate::header::{Header, StoredTensor};
use crate::io::SourceFile;
use crate::limits;
use crate::roles::{Census, Pass, Role};
use crate::tensor::{Dtype, Shape, TensorName};

/// A finding before it is made a report.
pub type Found = (Severity, Fault);

/// A weight file of a container.
#[derive(Debug)]
pub struct ContainerFile {
    /// File name.
    pub name: String,
    /// The open file.
    pub file: SourceFile,
    /// Its validated header.
    pub header: Header,
}

/// A weight as it is stored.
#[derive(Debug)]
pub struct StoredWeight {
    /// Its role, if the model has it.
    pub role: Option<Role>,
    /// File of `X`, an index in `files`.
    pub file: usize,
    /// `X` as stored.
    pub codes: StoredTensor,
    /// `X.qs` with the index of its file.
    pub scales: Option<(usize, StoredTensor)>,
    /// The format, where it is known.
    pub format: Option<Format>,
    /// Every format that the bytes fit; empty for raw tensors.
    pub candidates: Vec<Format>,
}

impl StoredWeight {
    /// Logical shape: that of config.json where the model has the tensor, else the stored one of a raw tensor.
    pub fn shape(&self) -> Option<Shape> {
        match &self.role {
            Some(role) => Some(role.shape.clone()),
            None => (self.codes.dtype != Dtype::U8).then(|| self.codes.shape.clone()),
        }
    }

    /// Bytes of codes and scales.
    pub fn bytes(&self) -> u64 {
        self.codes.bytes + self.scales.as_ref().map_or(0, |(_, scales)| scales.bytes)
    }
}

/// What a directory holds, sound or not.
#[derive(Debug)]
pub struct Survey {
    /// The directory.
    pub directory: PathBuf,
    /// Its config.json, if it could be read.
    pub config: Option<Config>,
    /// What the config asks for.
    pub census: Option<Census>,
    /// Its manifest, if there is a readable one.
    pub manifest: Option<Manifest>,
    /// The files whose headers are valid, by name.
    pub files: Vec<ContainerFile>,
    /// Names of the files whose headers are not.
    pub unreadable: Vec<String>,
    /// The weights, by name.
    pub weights: BTreeMap<TensorName, StoredWeight>,
    /// What is wrong or odd, in the order in which it was found.
    pub findings: Vec<Found>,
}

impl Survey {
    /// Surveys a directory. Only a directory without weight files is an error; everything else is a finding.
    pub fn read(directory: &Path) -> Result<Survey> {
        let names = weight_files(directory)?;
        let mut survey = Survey {
            directory: directory.to_owned(),
            config: None,
            census: None,
            manifest: None,
            files: Vec::new(),
            unreadable: Vec::new(),
            weights: BTreeMap::new(),
            findings: Vec::new(),
        };
        survey.read_config();
        survey.read_files(&names);
        survey.check_series();
        let index = survey.read_index(&names);
        let located = survey.locate();
        if let Some(index) = index {
            survey.check_index(&index, &located);
        }
        survey.read_manifest();
        let stamps = survey.read_stamps();
        survey.pair(&located, &stamps);
        survey.check_stamps(&stamps, &located);
        survey.check_census();
        survey.check_manifest(&located);
        Ok(survey)
    }

    /// Whether a finding is an error.
    pub fn has_errors(&self) -> bool {
        self.findings.iter().any(|(severity, _)| *severity == Severity::Error)
    }

    pub(super) fn found(&mut self, severity: Severity, place: Place, kind: FaultKind) {
        self.findings.push((severity, Fault::new(place, kind)));
    }

    pub(super) fn error(&mut self, place: Place, kind: FaultKind) {
        self.found(Severity::Error, place, kind);
    }

    pub(super) fn warning(&mut self, place: Place, kind: FaultKind) {
        self.found(Severity::Warning, place, kind);
    }

    fn faults(&mut self, faults: Faults) {
        self.findings.extend(faults.into_vec().into_iter().map(|fault| (Severity::Error, fault)));
    }

    /// The place of a tensor in a file.
    pub(super) fn place(&self, file: usize, tensor: &TensorName) -> Place {
        Place::tensor(self.files[file].file.path(), tensor.clone())
    }

    fn read_config(&mut self) {
        let path = self.directory.join(CONFIG_FILE);
        let config = match Config::read(&self.directory) {
            Ok(config) => config,
            Err(faults) => return self.faults(faults),
        };
        let silent = config.silent_faults(&path).into_iter().chain(config.engine_limits(&path));
        self.findings.extend(silent.map(|fault| (Severity::Error, fault)));
        if let Some(quantization) = &config.quantization {
            let method = quantization.quant_method.clone();
            self.warning(Place::file(&path), FaultKind::StaleQuantization { method });
        }
        match stop_ids(&self.directory, &config) {
            Ok(ids) if ids.is_empty() => self.warning(Place::file(&path), FaultKind::NoStopIds),
            Ok(_) => {}
            Err(faults) => self.faults(faults),
        }
        for (name, consequence) in crate::config::NEEDED_SMALL_FILES {
            let path = self.directory.join(name);
            if path.symlink_metadata().is_err() {
                self.warning(Place::file(path), FaultKind::SmallFileMissing { consequence });
            }
        }
        self.census = Some(Census::of(&config));
        self.config = Some(config);
    }

    fn read_files(&mut self, names: &[String]) {
        for name in names {
            let path = self.directory.join(name);
            let read = SourceFile::open(&path).map_err(Faults::from).and_then(|file| Ok((Header::read(&file)?, file)));
            match read {
                Ok((header, file)) => {
                    let odd = header.misaligned(&path);
                    self.findings.extend(odd.into_iter().map(|fault| (Severity::Note, fault)));
                    let odd = header.odd_names(&path);
                    self.findings.extend(odd.into_iter().map(|fault| (Severity::Warning, fault)));
                    for tensor in header.tensors().iter().filter(|t| !t.dtype.engine_reads()) {
                        let kind = FaultKind::EngineDtype { dtype: tensor.dtype };
                        self.error(Place::tensor(&path, tensor.name.clone()), kind);
                    }
                    self.files.push(ContainerFile { name: name.clone(), file, header });
                }
                Err(faults) => {
                    self.unreadable.push(name.clone());
                    self.faults(faults);
                }
            }
        }
    }

    /// Each series is numbered from 0 without gaps; what misses at its end only the census can tell.
    fn check_series(&mut self) {
        for pass in Pass::ALL {
            let names = self.files.iter().map(|file| &file.name).chain(&self.unreadable);
            let numbers: std::collections::BTreeSet<usize> =
                names.filter_map(|name| Pass::of_file(name)).filter(|(p, _)| *p == pass).map(|(_, n)| n).collect();
            let Some(&last) = numbers.last() else { continue };
            let absent = |n: &usize| !numbers.contains(n);
            let missing: Vec<String> =
                (0..last).filter(absent).take(limits::MAX_FILES).map(|n| pass.file_name(n)).collect();
            if !missing.is_empty() {
                let series = pass.series();
                let kind = FaultKind::NumberingGap { series, found: numbers.len(), last, missing };
                self.error(Place::file(&self.directory), kind);
            }
        }
    }

    fn read_index(&mut self, names: &[String]) -> Option<Index> {
        // A container needs no index, however many files it has.
        if !self.directory.join(crate::checkpoint::INDEX_FILE).exists() {
            return None;
        }
        match Index::read(&self.directory, names) {
            Ok(index) => {
                self.findings.extend(index.warnings().into_iter().map(|fault| (Severity::Warning, fault)));
                Some(index)
            }
            Err(faults) => {
                self.faults(faults);
                None
            }
        }
    }

    /// Where each tensor is. A name in two files is an error, whatever the engine would take.
    fn locate(&mut self) -> HashMap<TensorName, (usize, usize)> {
        let mut located: HashMap<TensorName, (usize, usize)> = HashMap::new();
        let mut twice = Vec::new();
        for (f, file) in self.files.iter().enumerate() {
            for (t, tensor) in file.header.tensors().iter().enumerate() {
                // The first file in sorted order wins, as in the engine.
                let &mut (first, _) = located.entry(tensor.name.clone()).or_insert((f, t));
                if first != f {
                    let kind = FaultKind::DuplicateInFiles { other: self.files[first].name.clone() };
                    twice.push((Place::tensor(file.file.path(), tensor.name.clone()), kind));
                }
            }
        }
        for (place, kind) in twice {
            self.error(place, kind);
        }
        located
    }

    /// Index and headers must say the same, both ways.
    fn check_index(&mut self, index: &Index, located: &HashMap<TensorName, (usize, usize)>) {
        let mut found = Vec::new();
        let mut missing: BTreeMap<&str, usize> = BTreeMap::new();
        let mut total = 0;
        for (name, file) in index.entries() {
            let path = self.directory.join(file);
            match located.get(name) {
                Some(&(f, t)) if self.files[f].name == file => total += self.files[f].header.tensors()[t].bytes,
                _ if self.unreadable.iter().any(|name| name == file) => {}
                _ if !path.exists() => *missing.entry(file).or_default() += 1,
                // Told below, where it is.
                Some(_) => {}
                None => found.push((Place::tensor(path, name.clone()), FaultKind::TensorNotInShard)),
            }
        }
        for (file, tensors) in missing {
            found.push((Place::file(self.directory.join(file)), FaultKind::ShardMissing { tensors }));
        }
        for file in &self.files {
            for tensor in file.header.tensors() {
                let place = || Place::tensor(file.file.path(), tensor.name.clone());
                match index.file_of(tensor.name.as_str()) {
                    None => found.push((place(), FaultKind::TensorNotInIndex)),
                    Some(other) if other != file.name => {
                        found.push((place(), FaultKind::TensorElsewhere { other: other.to_owned() }));
                    }
                    Some(_) => {}
                }
            }
        }
        let whole = found.is_empty() && self.unreadable.is_empty();
        for (place, kind) in found {
            self.error(place, kind);
        }
        if let Some(found) = index.total_size().filter(|&found| whole && found != total) {
            self.warning(Place::file(index.path()), FaultKind::TotalSize { expected: total, found });
        }
    }

    fn read_manifest(&mut self) {
        match Manifest::read(&self.directory) {
            Ok(manifest) => self.manifest = manifest,
            Err(fault) => self.findings.push((Severity::Error, fault)),
        }
        // After a bare run the progress stays, complete, and there is no manifest; beside one it is unfinished work, and
        // that of a part is always.
        let beside_manifest = self.directory.join(MANIFEST_FILE).exists();
        match progress::present(&self.directory) {
            Ok(present) => {
                for (_, name) in present.into_iter().filter(|(part, _)| part.is_some() || beside_manifest) {
                    self.error(Place::file(self.directory.join(name)), FaultKind::ConversionUnfinished);
                }
            }
            Err(fault) => self.findings.push((Severity::Error, fault)),
        }
    }

    /// The stamps of all files; two that disagree are an error.
    fn read_stamps(&mut self) -> BTreeMap<TensorName, String> {
        let mut all: BTreeMap<TensorName, String> = BTreeMap::new();
        let mut found = Vec::new();
        let mut conflicting = HashSet::new();
        let mut entries = 0;
        for file in &self.files {
            match stamps::parse(file.file.path(), file.header.metadata()) {
                Err(fault) => found.push(fault),
                Ok(stamps) => {
                    entries += stamps.len();
                    for (name, format) in stamps {
                        match all.insert(name.clone(), format.clone()) {
                            Some(one) if one != format => {
                                let kind = FaultKind::StampConflict { one, other: format };
                                found.push(Fault::new(Place::tensor(file.file.path(), name.clone()), kind));
                                conflicting.insert(name);
                            }
                            _ => {}
                        }
                    }
                }
            }
        }
        if entries > limits::MAX_STAMPS {
            let (found_entries, limit) = (entries as u64, limits::MAX_STAMPS as u64);
            let kind = FaultKind::EngineLimit { what: "stamps", found: found_entries, limit };
            found.push(Fault::new(Place::file(&self.directory), kind));
        }
        self.findings.extend(found.into_iter().map(|fault| (Severity::Error, fault)));
        // Neither of two that disagree says anything about the bytes.
        all.retain(|name, _| !conflicting.contains(name));
        all
    }

    /// Everything that config.json asks for is there.
    fn check_census(&mut self) {
        let Some(census) = &self.census else { return };
        if !self.unreadable.is_empty() {
            let kind = FaultKind::CensusIncomplete { files: self.unreadable.len() };
            return self.found(Severity::Note, Place::file(&self.directory), kind);
        }
        let absent = census.absent(&|name| self.weights.contains_key(name));
        let unknown = self.weights.iter().filter(|(_, weight)| weight.role.is_none());
        let unknown: Vec<Place> =
            unknown.map(|(name, weight)| Place::tensor(self.files[weight.file].file.path(), name.clone())).collect();
        for fault in absent.faults {
            let place = Place { file: Some(self.directory.clone()), ..fault.place };
            self.error(place, *fault.kind);
        }
        let tied = self.config.as_ref().is_some_and(|config| config.tie_word_embeddings);
        if tied && self.weights.contains_key("lm_head.weight") {
            let place = Place::tensor(&self.directory, "lm_head.weight");
            self.warning(place, FaultKind::HeadTied);
        }
        for pass in absent.passes {
            let (severity, what) = match pass {
                Pass::Main => (Severity::Error, "of the hidden layers"),
                Pass::Mtp => (Severity::Note, "of the MTP head"),
                Pass::Indexer => (Severity::Note, "of the DSA indexer"),
            };
            self.found(severity, Place::file(&self.directory), FaultKind::PassAbsent { what });
        }
        for place in unknown {
            self.warning(place, FaultKind::UnknownTensor);
        }
    }
}

/// Takes over what a resolution found about a weight.
fn apply(weight: &mut StoredWeight, resolution: &Resolution) {
    weight.format = resolution.format;
    weight.candidates.clone_from(&resolution.candidates);
}

/// A container without errors.
#[derive(Debug)]
pub struct Container {
    survey: Survey,
}

impl Container {
    /// Opens a container; every error of its survey is a reason to refuse it.
    pub fn open(directory: &Path) -> Result<Container, Faults> {
        Container::from_survey(Survey::read(directory)?)
    }

    /// A survey without errors.
    pub fn from_survey(mut survey: Survey) -> Result<Container, Faults> {
        let (errors, others) =
            std::mem::take(&mut survey.findings).into_iter().partition(|(s, _)| *s == Severity::Error);
        survey.findings = others;
        Faults::check(Vec::into_iter(errors).map(|(_, fault): Found| fault).collect())?;
        Ok(Container { survey })
    }

    /// What was surveyed.
    pub fn survey(&self) -> &Survey {
        &self.survey
    }

    /// Its config.
    pub fn config(&self) -> &Config {
        self.survey.config.as_ref().expect("a container without errors has a config")
    }
}
