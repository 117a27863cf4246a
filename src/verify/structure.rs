//! Level structure: what headers, index, config, stamps and manifest say, sorted into named checks.

use std::fs;
use std::path::Path;

use super::Stage;
use crate::checkpoint::{Checkpoint, INDEX_FILE};
use crate::config::{CONFIG_FILE, Config, GENERATION_CONFIG_FILE, NEEDED_SMALL_FILES};
use crate::container::manifest::{MANIFEST_FILE, SUMS_FILE};
use crate::container::reader::{Found, Survey};
use crate::container::stamps::STAMP_KEY;
use crate::error::{Fault, FaultKind, Place, Severity, counted};
use crate::model::tokenizer::{TOKENIZER_FILE, Tokenizer};
use crate::roles::Pass;

/// What a finding is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Topic {
    Headers,
    Files,
    Index,
    Config,
    SmallFiles,
    Census,
    Counts,
    Stamps,
    Manifest,
}

impl Topic {
    pub(super) fn name(self) -> &'static str {
        match self {
            Topic::Headers => "headers",
            Topic::Files => "files",
            Topic::Index => "index",
            Topic::Config => "config",
            Topic::SmallFiles => "small-files",
            Topic::Census => "census",
            Topic::Counts => "counts",
            Topic::Stamps => "stamps",
            Topic::Manifest => "manifest",
        }
    }

    /// What a fault of a survey, or of opening a checkpoint, is about.
    pub(super) fn of(fault: &Fault) -> Topic {
        use FaultKind as K;
        match &*fault.kind {
            K::ShardMissing { .. } | K::NumberingGap { .. } | K::DuplicateInFiles { .. } | K::TooManyFiles { .. } => {
                Topic::Files
            }
            K::Unfinished | K::CensusIncomplete { .. } | K::WeightFileName => Topic::Files,
            K::IndexSyntax { .. } | K::DuplicateInIndex | K::IndexPath { .. } | K::IndexMissing { .. } => Topic::Index,
            K::TensorNotInShard | K::TensorNotInIndex | K::TensorElsewhere { .. } | K::IndexWrongFile { .. } => {
                Topic::Index
            }
            K::TotalSize { .. } | K::TotalSizeMissing | K::FileNotInIndex { .. } => Topic::Index,
            K::ConfigMissing { .. } | K::ConfigValue { .. } | K::ConfigSilent { .. } | K::ModelType { .. } => {
                Topic::Config
            }
            K::TooManyStopIds { .. } | K::StaleQuantization { .. } | K::SourceQuantization { .. } => Topic::Config,
            K::NoStopIds | K::ConfigAbsent => Topic::Config,
            K::EngineLimit { what: "stamps", .. } => Topic::Stamps,
            K::EngineLimit { .. } => Topic::Config,
            K::SmallFileMissing { .. } | K::TokenizerSyntax { .. } | K::TokenizerVocab { .. } => Topic::SmallFiles,
            K::TensorMissing { .. } | K::ShapeMismatch { .. } | K::UnknownTensor => Topic::Census,
            K::LayerMissing { .. } | K::IndexerMissing { .. } | K::ExpertMissing { .. } => Topic::Census,
            K::PassAbsent { .. } | K::HeadMissing | K::HeadTied | K::NestedTensor { .. } => Topic::Census,
            K::StoredDtype { .. } | K::StoredShape { .. } | K::StoredBytes { .. } | K::NoFormat { .. } => Topic::Counts,
            K::Ambiguous { .. } | K::EngineMisreads { .. } | K::HeadFormat { .. } => Topic::Counts,
            K::QuantizedScaleMissing { .. } | K::QuantizedScaleOrphan { .. } | K::ScalesApart { .. } => Topic::Counts,
            K::SourceDtype { .. } | K::SourceFormat { .. } | K::SourceNotMatrix { .. } => Topic::Counts,
            K::ScaleMissing { .. } | K::ScaleDtype { .. } | K::ScaleGrid { .. } | K::ScaleOrphan { .. } => {
                Topic::Counts
            }
            K::StampSyntax { .. } | K::StampConflict { .. } | K::StampUnknown { .. } => Topic::Stamps,
            K::StampMismatch { .. } | K::StampAgainstManifest { .. } | K::StampIdle { .. } => Topic::Stamps,
            K::ManifestFileMissing | K::ManifestFileSize { .. } | K::ManifestFileUnknown => Topic::Manifest,
            K::ManifestTensorMissing | K::ManifestTensorUnknown | K::ManifestTensorDiffers { .. } => Topic::Manifest,
            K::ManifestPath { .. } | K::ManifestFileTwice | K::ManifestIncomplete { .. } => Topic::Manifest,
            K::ManifestFormat { .. } | K::ConversionUnfinished => Topic::Manifest,
            _ => Topic::of_file(fault),
        }
    }

    /// What cannot be read or parsed is about the file that it is in.
    fn of_file(fault: &Fault) -> Topic {
        let file = fault.place.file.as_deref().and_then(Path::file_name);
        match file.and_then(|name| name.to_str()) {
            Some(CONFIG_FILE | GENERATION_CONFIG_FILE) => Topic::Config,
            Some(INDEX_FILE) => Topic::Index,
            Some(MANIFEST_FILE) => Topic::Manifest,
            Some(TOKENIZER_FILE) => Topic::SmallFiles,
            _ => Topic::Headers,
        }
    }
}

/// The findings about each topic.
struct Sorted(Vec<(Topic, Found)>);

impl Sorted {
    fn take(&mut self, topic: Topic) -> Vec<Found> {
        let (of_topic, others) = std::mem::take(&mut self.0).into_iter().partition(|(found, _)| *found == topic);
        self.0 = others;
        Vec::into_iter(of_topic).map(|(_, found): (Topic, Found)| found).collect()
    }
}

/// The checks of a surveyed container; its findings go into the stage.
pub(super) fn of_container(survey: &mut Survey) -> Stage {
    let mut findings = std::mem::take(&mut survey.findings);
    findings.extend(tokenizer(&survey.directory, survey.config.as_ref()));
    let survey = &*survey;
    let mut sorted = Sorted(findings.into_iter().map(|found| (Topic::of(&found.1), found)).collect());
    let mut stage = Stage::default();
    let entries: usize = survey.files.iter().map(|file| file.header.tensors().len()).sum();
    let files = counted(survey.files.len(), "file");
    stage.check("headers", sorted.take(Topic::Headers), &format!("{files} with {entries} entries"));
    stage.check("files", sorted.take(Topic::Files), &series(survey));
    let index = survey.directory.join(INDEX_FILE).exists().then(|| format!("{entries} entries")).ok_or("no index");
    stage.check_or_skip("index", sorted.take(Topic::Index), index);
    let config = survey.config.as_ref();
    stage.check_or_skip("config", sorted.take(Topic::Config), config.map(model).ok_or("not read"));
    stage.check("small-files", sorted.take(Topic::SmallFiles), "tokenizer, which loads, and generation config");
    let census = match (config, survey.unreadable.is_empty()) {
        (None, _) => Err("config.json was not read"),
        (_, false) => Err("not every file could be read"),
        (Some(_), true) => Ok(parts(survey)),
    };
    stage.check_or_skip("census", sorted.take(Topic::Census), census);
    let quantized = survey.weights.values().filter(|weight| weight.scales.is_some()).count();
    let counts = config.map(|_| format!("{quantized} quantized tensors, each of a known format"));
    stage.check_or_skip("counts", sorted.take(Topic::Counts), counts.ok_or("config.json was not read"));
    let stamped = survey.files.iter().any(|file| file.header.metadata().is_some_and(|m| m.contains_key(STAMP_KEY)));
    let stamps = stamped.then(|| "as the byte counts say".to_owned()).ok_or("no stamps");
    stage.check_or_skip("stamps", sorted.take(Topic::Stamps), stamps);
    let manifest = survey.manifest.as_ref().map(|manifest| {
        let files = manifest.files.len() + manifest.small_files.len();
        format!("{} and {} tensors, as it says", counted(files, "file"), manifest.tensors.len())
    });
    let mut of_manifest = sorted.take(Topic::Manifest);
    of_manifest.extend(unlisted(survey));
    stage.check_or_skip("manifest", of_manifest, manifest.ok_or("no manifest"));
    stage
}

/// `out- 3, out-mtp- 1`, or how many files there are.
fn series(survey: &Survey) -> String {
    let of =
        |pass| survey.files.iter().filter(|file| Pass::of_file(&file.name).is_some_and(|(p, _)| p == pass)).count();
    let numbered: Vec<String> = Pass::ALL
        .into_iter()
        .map(|pass| (pass, of(pass)))
        .filter(|(_, n)| *n > 0)
        .map(|(p, n)| format!("{n} {}…", p.series()))
        .collect();
    if numbered.is_empty() { counted(survey.files.len(), "file") } else { numbered.join(", ") }
}

/// What config.json describes.
fn model(config: &Config) -> String {
    let mtp = if config.mtp_layer().is_some() { " and an MTP layer" } else { "" };
    format!("{} layers of {} experts{mtp}", config.num_hidden_layers, config.n_routed_experts)
}

/// Which passes are there.
fn parts(survey: &Survey) -> String {
    let of = |pass| survey.weights.values().any(|weight| weight.role.as_ref().is_some_and(|role| role.pass == pass));
    let there = |pass, name: &str| format!("{name} {}", if of(pass) { "there" } else { "absent" });
    let weights = survey.weights.len();
    format!("{weights} weights; {}, {}", there(Pass::Mtp, "MTP head"), there(Pass::Indexer, "indexer"))
}

/// Why the tokenizer that is there does not load, or does not belong to the model.
fn tokenizer(directory: &Path, config: Option<&Config>) -> Option<Found> {
    directory.join(TOKENIZER_FILE).symlink_metadata().ok()?;
    let tokenizer = match Tokenizer::load(directory) {
        Ok(tokenizer) => tokenizer,
        Err(fault) => return Some((Severity::Error, fault)),
    };
    let vocab_size = config?.vocab_size;
    let id = tokenizer.largest_id().filter(|&id| u64::from(id) >= vocab_size)?;
    let kind = FaultKind::TokenizerVocab { id, vocab_size };
    Some((Severity::Error, Fault::new(Place::file(directory.join(TOKENIZER_FILE)), kind)))
}

/// Small files that the manifest does not name: nobody vouches for them.
fn unlisted(survey: &Survey) -> Vec<Found> {
    let Some(manifest) = &survey.manifest else { return Vec::new() };
    let Ok(entries) = fs::read_dir(&survey.directory) else { return Vec::new() };
    let listed = |name: &str| manifest.files.iter().chain(&manifest.small_files).any(|record| record.name == name);
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name != MANIFEST_FILE && name != SUMS_FILE)
        .filter(|name| !name.starts_with('.') && !name.ends_with(".safetensors"))
        .filter(|name| !listed(name) && survey.directory.join(name).is_file())
        .collect();
    names.sort_unstable();
    let note = |name: String| Fault::new(Place::file(survey.directory.join(name)), FaultKind::ManifestFileUnknown);
    names.into_iter().map(|name| (Severity::Note, note(name))).collect()
}

/// The checks of a checkpoint, or, without one, of what stood in the way of opening it.
pub(super) fn of_checkpoint(directory: &Path, checkpoint: Option<&Checkpoint>, mut findings: Vec<Found>) -> Stage {
    let absent = NEEDED_SMALL_FILES.iter().filter(|(name, _)| directory.join(name).symlink_metadata().is_err());
    findings.extend(absent.map(|(name, consequence)| {
        (Severity::Warning, Fault::new(Place::file(directory.join(name)), FaultKind::SmallFileMissing { consequence }))
    }));
    findings.extend(tokenizer(directory, checkpoint.map(|checkpoint| &checkpoint.config)));
    let mut sorted = Sorted(findings.into_iter().map(|found| (Topic::of(&found.1), found)).collect());
    let mut stage = Stage::default();
    let topics =
        [Topic::Headers, Topic::Files, Topic::Index, Topic::Config, Topic::SmallFiles, Topic::Census, Topic::Counts];
    for topic in topics {
        // Opening stops at the first kind of fault that makes the following ones meaningless.
        let looked_at = checkpoint.map(|checkpoint| checkpoint_detail(checkpoint, topic)).ok_or("not reached");
        stage.check_or_skip(topic.name(), sorted.take(topic), looked_at);
    }
    stage
}

fn checkpoint_detail(checkpoint: &Checkpoint, topic: Topic) -> String {
    let entries: usize = checkpoint.shards.iter().map(|shard| shard.header.tensors().len()).sum();
    let files = counted(checkpoint.shards.len(), "file");
    match topic {
        Topic::Headers => format!("{files} with {entries} entries"),
        Topic::Files => files,
        Topic::Index => format!("{entries} entries"),
        Topic::Config => model(&checkpoint.config),
        Topic::Census => format!("{} weights", checkpoint.weights(&Pass::ALL).count()),
        Topic::Counts => "element types and scale grids are as they should be".to_owned(),
        Topic::SmallFiles | Topic::Stamps | Topic::Manifest => "nothing is missing".to_owned(),
    }
}
