//! What a checkpoint, a container or one .safetensors file is, and whether it is whole.

mod values;

use std::collections::BTreeMap;
use std::path::Path;

use globset::{Glob, GlobMatcher};

use crate::checkpoint::{Allowed, Checkpoint, SCALE_SUFFIX, weight_files};
use crate::config::{CONFIG_FILE, Config, MODEL_TYPE};
use crate::container::reader::{StoredWeight, Survey};
use crate::error::{Fault, FaultKind, Faults, Place, Result, Severity};
use crate::format::Format;
use crate::header::Header;
use crate::io::SourceFile;
use crate::payload::check_head;
use crate::report::Finding;
use crate::report::inspect::{InspectFile, InspectReport, InspectTensor, Kind, Mtp, Total};
use crate::roles::{Census, Class, Pass, Role};
use crate::tensor::{Dtype, TensorName};
use crate::weights::ModelKind;

/// What of the tensors is asked for.
#[derive(Debug, Clone, Default)]
pub struct Query {
    /// Only tensors that this glob matches.
    pub tensor: Option<String>,
    /// Only tensors of this class.
    pub class: Option<String>,
    /// Statistics of their values.
    pub stats: bool,
    /// Distribution of their values in so many steps; levels where the format has them.
    pub bins: Option<usize>,
    /// So many values of a row.
    pub values: Option<u64>,
    /// Of this row instead of the first.
    pub row: Option<u64>,
}

impl Query {
    /// Whether payload must be read.
    fn reads(&self) -> bool {
        self.stats || self.bins.is_some() || self.values.is_some() || self.row.is_some()
    }
}

/// Inspects a path; writes nothing. What is wrong with it is a finding; an error is only a path that is nothing of it.
pub fn inspect(path: &Path, query: &Query, watch: &dyn Fn(&str, u64, u64)) -> Result<InspectReport, Faults> {
    let selection = Selection::new(query)?;
    if !path.exists() {
        return Err(Fault::new(Place::file(path), FaultKind::NotFound).into());
    }
    let mut report = if path.is_file() {
        file(path, &selection)?
    } else if ModelKind::of(path)? == ModelKind::Container {
        let survey = Survey::read(path)?;
        let mut report = container(&survey, &selection);
        if query.reads() {
            values::of_container(&survey, query, &mut report, watch)?;
        }
        report
    } else {
        let (mut report, checkpoint) = checkpoint(path, &selection)?;
        match checkpoint {
            Some(checkpoint) if query.reads() => values::of_checkpoint(&checkpoint, query, &mut report, watch)?,
            _ => {}
        }
        report
    };
    if query.tensor.is_some() && report.tensors.is_empty() {
        let glob = query.tensor.clone().unwrap_or_default();
        return Err(Fault::new(Place::file(path), FaultKind::NothingMatches { glob }).into());
    }
    report.findings.sort_by_key(|finding| finding.severity);
    Ok(report)
}

/// Which tensors are listed.
struct Selection {
    glob: Option<GlobMatcher>,
    class: Option<Class>,
}

impl Selection {
    fn new(query: &Query) -> Result<Selection> {
        let glob = |text: &String| {
            let kind = |e: globset::Error| FaultKind::Glob { glob: text.clone(), message: e.kind().to_string() };
            Glob::new(text).map(|glob| glob.compile_matcher()).map_err(|e| Fault::new(Place::default(), kind(e)))
        };
        let class = |text: &String| {
            let found = Class::ALL.into_iter().find(|class| class.name() == text);
            found.ok_or_else(|| Fault::new(Place::default(), FaultKind::UnknownClass { found: text.clone() }))
        };
        Ok(Selection {
            glob: query.tensor.as_ref().map(glob).transpose()?,
            class: query.class.as_ref().map(class).transpose()?,
        })
    }

    fn takes(&self, name: &TensorName, role: Option<&Role>) -> bool {
        self.glob.as_ref().is_none_or(|glob| glob.is_match(name.as_str()))
            && self.class.is_none_or(|class| role.is_some_and(|role| role.class == class))
    }
}

fn empty(kind: Kind, config: Option<&Config>) -> InspectReport {
    InspectReport {
        kind,
        model_type: config.map(|_| MODEL_TYPE.to_owned()),
        layers: config.map(|config| config.num_hidden_layers),
        experts: config.map(|config| config.n_routed_experts),
        mtp: Mtp { present: false, format: None },
        indexer: false,
        files: Vec::new(),
        tensors: Vec::new(),
        totals: Vec::new(),
        findings: Vec::new(),
    }
}

/// Key of a total: position of the class, format, group size.
type TotalKey = (usize, Option<String>, Option<u64>);

/// Adds weights to a report one by one.
struct Lister<'a> {
    report: InspectReport,
    selection: &'a Selection,
    totals: BTreeMap<TotalKey, Total>,
}

impl Lister<'_> {
    fn add(&mut self, name: &TensorName, role: Option<&Role>, tensor: InspectTensor) {
        let place = role.map_or(usize::MAX, |role| Class::ALL.iter().position(|&c| c == role.class).unwrap_or(0));
        let key = (place, tensor.format.clone(), tensor.group_size);
        let total = self.totals.entry(key).or_insert_with(|| Total {
            class: tensor.class.clone(),
            format: tensor.format.clone(),
            group_size: tensor.group_size,
            tensors: 0,
            bytes: 0,
        });
        total.tensors += 1;
        total.bytes += tensor.bytes + tensor.scale_bytes;
        match role.map(|role| role.pass) {
            Some(Pass::Mtp) => {
                self.report.mtp.present = true;
                if name.as_str().ends_with(".eh_proj.weight") {
                    self.report.mtp.format.clone_from(&tensor.format);
                }
            }
            Some(Pass::Indexer) => self.report.indexer = true,
            _ => {}
        }
        if self.selection.takes(name, role) {
            self.report.tensors.push(tensor);
        }
    }

    fn finish(self) -> InspectReport {
        InspectReport { totals: self.totals.into_values().collect(), ..self.report }
    }
}

fn container(survey: &Survey, selection: &Selection) -> InspectReport {
    let mut report = empty(Kind::Container, survey.config.as_ref());
    let files = survey.files.iter().map(|file| InspectFile {
        name: file.name.clone(),
        bytes: file.header.file_bytes(),
        tensors: Some(file.header.tensors().len() as u64),
    });
    let unreadable = survey.unreadable.iter().map(|name| InspectFile {
        name: name.clone(),
        bytes: std::fs::metadata(survey.directory.join(name)).map_or(0, |m| m.len()),
        tensors: None,
    });
    report.files = files.chain(unreadable).collect();
    report.files.sort_by(|a, b| a.name.cmp(&b.name));
    report.findings = survey.findings.iter().map(|(severity, fault)| Finding::new(*severity, fault)).collect();
    report.findings.extend(check_head(survey).map(|(severity, fault)| Finding::new(severity, &fault)));
    let mut lister = Lister { report, selection, totals: BTreeMap::new() };
    for (name, weight) in &survey.weights {
        lister.add(name, weight.role.as_ref(), container_tensor(survey, name, weight));
    }
    lister.finish()
}

fn container_tensor(survey: &Survey, name: &TensorName, weight: &StoredWeight) -> InspectTensor {
    InspectTensor {
        name: name.as_str().to_owned(),
        file: survey.files[weight.file].name.clone(),
        dtype: weight.codes.dtype.to_string(),
        stored_shape: weight.codes.shape.dims().to_vec(),
        shape: weight.shape().map(|shape| shape.dims().to_vec()),
        class: weight.role.as_ref().map(|role| role.class.name().to_owned()),
        format: weight.format.map(|format| format.name().to_owned()),
        group_size: weight.format.and_then(Format::group_size),
        candidates: weight.candidates.iter().map(Format::to_string).collect(),
        offset: weight.codes.offset,
        bytes: weight.codes.bytes,
        scale_bytes: weight.scales.as_ref().map_or(0, |(_, scales)| scales.bytes),
        stats: None,
        values: None,
    }
}

/// How a source weight is stored, in the words of formats.
fn source_format(dtype: Dtype, has_scales: bool) -> Option<String> {
    match dtype {
        Dtype::F8_E4M3 if has_scales => Some(Format::Fp8E4m3B128.name().to_owned()),
        Dtype::F32 => Some(Format::F32.name().to_owned()),
        Dtype::BF16 => Some("bf16".to_owned()),
        Dtype::F16 => Some("f16".to_owned()),
        _ => None,
    }
}

/// A checkpoint, sound or not: its headers are listed even where something else is wrong.
fn checkpoint(directory: &Path, selection: &Selection) -> Result<(InspectReport, Option<Checkpoint>), Faults> {
    let config = Config::read(directory);
    let census = config.as_ref().ok().map(Census::of);
    let mut report = empty(Kind::Checkpoint, config.as_ref().ok());
    let opened = match Checkpoint::open(directory, &Pass::ALL, Allowed::default()) {
        Ok(checkpoint) => {
            let config_path = directory.join(CONFIG_FILE);
            let silent = checkpoint.config.silent_faults(&config_path);
            report.findings = checkpoint.warnings.iter().map(Finding::accepted).collect();
            report.findings.extend(silent.iter().map(|fault| Finding::new(Severity::Error, fault)));
            Some(checkpoint)
        }
        Err(faults) => {
            report.findings = faults.iter().map(|fault| Finding::new(Severity::Error, fault)).collect();
            None
        }
    };
    let mut headers = Vec::new();
    for name in weight_files(directory)? {
        let path = directory.join(&name);
        let header = SourceFile::open(&path).map_err(Faults::from).and_then(|file| Header::read(&file));
        let bytes = std::fs::metadata(&path).map_or(0, |m| m.len());
        report.files.push(InspectFile {
            name: name.clone(),
            bytes,
            tensors: header.as_ref().ok().map(|h| h.tensors().len() as u64),
        });
        match header {
            Ok(header) => headers.push((name, header)),
            Err(faults) => {
                // A refused checkpoint has told these already, unless it stopped before.
                for finding in faults.iter().map(|fault| Finding::new(Severity::Error, fault)) {
                    if !report.findings.contains(&finding) {
                        report.findings.push(finding);
                    }
                }
            }
        }
    }
    let mut lister = Lister { report, selection, totals: BTreeMap::new() };
    list_source(&headers, census.as_ref(), &mut lister);
    Ok((lister.finish(), opened))
}

/// Lists the weights of source headers with their scales.
fn list_source(headers: &[(String, Header)], census: Option<&Census>, lister: &mut Lister<'_>) {
    let scales: BTreeMap<&str, u64> = headers
        .iter()
        .flat_map(|(_, header)| header.tensors())
        .filter_map(|t| Some((t.name.as_str().strip_suffix(SCALE_SUFFIX)?, t.bytes)))
        .collect();
    let mut tensors: Vec<(&String, _)> =
        headers.iter().flat_map(|(file, header)| header.tensors().iter().map(move |tensor| (file, tensor))).collect();
    tensors.sort_by(|(_, a), (_, b)| a.name.cmp(&b.name));
    for (file, tensor) in tensors {
        let name = &tensor.name;
        if name.as_str().ends_with(SCALE_SUFFIX) {
            continue;
        }
        let role = census.and_then(|census| census.role(name.as_str()));
        let scale_bytes = scales.get(name.as_str()).copied();
        let listed = InspectTensor {
            name: name.as_str().to_owned(),
            file: file.clone(),
            dtype: tensor.dtype.to_string(),
            stored_shape: tensor.shape.dims().to_vec(),
            shape: Some(tensor.shape.dims().to_vec()),
            class: role.map(|role| role.class.name().to_owned()),
            format: source_format(tensor.dtype, scale_bytes.is_some()),
            group_size: None,
            candidates: Vec::new(),
            offset: tensor.offset,
            bytes: tensor.bytes,
            scale_bytes: scale_bytes.unwrap_or(0),
            stats: None,
            values: None,
        };
        lister.add(name, role, listed);
    }
}

/// One file: its header, and what the config beside it says of its tensors.
fn file(path: &Path, selection: &Selection) -> Result<InspectReport, Faults> {
    let directory = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let source = SourceFile::open(path)?;
    let mut report = empty(Kind::File, None);
    report.files.push(InspectFile { name: name.clone(), bytes: source.bytes(), tensors: None });
    let header = match Header::read(&source) {
        Ok(header) => header,
        Err(faults) => {
            report.findings = faults.iter().map(|fault| Finding::new(Severity::Error, fault)).collect();
            return Ok(report);
        }
    };
    report.files[0].tensors = Some(header.tensors().len() as u64);
    report.findings = header.misaligned(path).iter().map(|fault| Finding::new(Severity::Note, fault)).collect();
    report.findings.extend(header.odd_names(path).iter().map(|fault| Finding::new(Severity::Warning, fault)));
    // Beside its config a file of a container shows as it does in the container, without what only the whole can tell.
    if header.tensors().iter().any(|t| t.name.as_str().ends_with(".qs")) && directory.join(CONFIG_FILE).exists() {
        let survey = Survey::read(directory)?;
        let whole = container(&survey, selection);
        let mut lister = Lister { report, selection, totals: BTreeMap::new() };
        for (name_of, weight) in survey.weights.iter().filter(|(_, weight)| survey.files[weight.file].name == name) {
            lister.add(name_of, weight.role.as_ref(), container_tensor(&survey, name_of, weight));
        }
        let path_text = survey.directory.join(&name).to_string_lossy().into_owned();
        let of_file = |finding: &Finding| finding.file.as_ref() == Some(&path_text);
        let mut report = lister.finish();
        report.findings.extend(whole.findings.into_iter().filter(of_file));
        return Ok(InspectReport {
            model_type: whole.model_type,
            layers: whole.layers,
            experts: whole.experts,
            ..report
        });
    }
    let census = Config::read(directory).ok().map(|config| Census::of(&config));
    let mut lister = Lister { report, selection, totals: BTreeMap::new() };
    list_source(&[(name, header)], census.as_ref(), &mut lister);
    Ok(lister.finish())
}
