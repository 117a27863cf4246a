//! PIPELINE.json: what each step is to do. Paths are relative to the file.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::backend::Device;
use crate::error::{Fault, FaultKind, Faults, Place, Result, escaped};
use crate::io::read_small;
use crate::json::{Object, repeated_key, unique_map};
use crate::limits;
use crate::publish::check_repo_id;
use crate::publish::policy::Policy;
use crate::recipe::Settings as Recipe;
use crate::score::input::{Given, Kind};

/// A pipeline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "coliconv pipeline")]
pub struct Settings {
    /// Directory of the checkpoint.
    pub checkpoint: PathBuf,
    /// Directory of the container.
    pub container: PathBuf,
    /// Directory of all reports, outside of the container; made where there is none.
    pub reports: PathBuf,
    /// How to convert.
    #[serde(default)]
    pub convert: Convert,
    /// How to verify.
    #[serde(default)]
    pub verify: Verify,
    /// What to score.
    pub score: Score,
    /// How good it must be, and where it is to go.
    #[serde(default)]
    pub publish: Publish,
    /// Threads; 0 for one per core.
    #[serde(default)]
    pub threads: usize,
    /// Memory for the model when it is verified and scored, in bytes; null for what is available. No result depends on it.
    #[serde(default)]
    pub memory: Option<u64>,
    /// The same of a GPU's memory, in bytes; null for what is free. Routed experts for which there is no room are in
    /// memory, or are read on demand.
    #[serde(default)]
    pub device_memory: Option<u64>,
}

/// How to convert.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Convert {
    /// Formats, as a recipe file gives them.
    pub recipe: Recipe,
    /// Whether to convert the MTP head.
    pub mtp: bool,
    /// Whether to convert the DSA indexer.
    pub indexer: bool,
    /// Whether to wait for files that are still arriving.
    pub follow: bool,
    /// Whether to remove files of the source when nothing needs them. Then nothing can be compared with the source.
    pub consume: bool,
    /// Whether to write formats that the colibri engine would misread at their shape.
    pub allow_ambiguous: bool,
    /// Whether to count NaN and infinite weights as 0.
    pub allow_non_finite: bool,
    /// Whether to convert although tensors or files are missing.
    pub allow_incomplete: bool,
}

/// How to verify.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Verify {
    /// Whether to compare weights and tokens with the source.
    pub source: bool,
    /// Reference files.
    pub references: Vec<PathBuf>,
    /// Devices that compute; none means the CPU.
    pub devices: Vec<String>,
}

impl Default for Verify {
    fn default() -> Self {
        Verify { source: true, references: Vec::new(), devices: Vec::new() }
    }
}

/// What to score.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Score {
    /// Tasks by name.
    #[serde(deserialize_with = "unique_map")]
    pub tasks: BTreeMap<String, PathBuf>,
    /// Texts by name.
    #[serde(deserialize_with = "unique_map")]
    pub texts: BTreeMap<String, PathBuf>,
    /// Most rows of each; null for all.
    pub limit: Option<u64>,
    /// Seed of the draw.
    pub seed: u64,
    /// `auto`, `none`, or what is to stand before every text; null for `auto`.
    pub prefix: Option<String>,
    /// Whether to let the model generate, too.
    pub probes: bool,
    /// Finished results of the source; null to score it in a step of its own.
    pub baseline: Option<PathBuf>,
}

/// How good the container must be, and where it is to go.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Publish {
    /// The repository, ORG/NAME; null for no commands.
    pub repo_id: Option<String>,
    /// The policy.
    pub policy: Policy,
}

/// A path without links, `.` and `..`; what is not there yet is taken as it is written.
fn resolved(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut out = PathBuf::new();
    for part in absolute.components() {
        match part {
            Component::ParentDir => {
                out.pop();
            }
            part => out.push(part),
        }
        out = out.canonicalize().unwrap_or(out);
    }
    out
}

impl Settings {
    /// Reads a pipeline file; paths become relative to the working directory.
    pub fn read(path: &Path) -> Result<Settings, Faults> {
        let bytes = read_small(path, limits::MAX_CONFIG_BYTES)?;
        let mut settings = Settings::parse(path, &bytes)?;
        let directory = path.parent().unwrap_or(Path::new(""));
        let mut own = vec![&mut settings.checkpoint, &mut settings.container, &mut settings.reports];
        own.extend(settings.verify.references.iter_mut());
        own.extend(settings.score.tasks.values_mut().chain(settings.score.texts.values_mut()));
        own.extend(settings.score.baseline.as_mut());
        own.into_iter().for_each(|path| *path = directory.join(&*path));
        settings.check(path)?;
        Ok(settings)
    }

    /// Parses the text of a pipeline; `path` is for messages only.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Settings> {
        let fault = |message: String| Fault::new(Place::file(path), FaultKind::PipelineSyntax { message });
        let text = std::str::from_utf8(bytes).map_err(|e| fault(e.to_string()))?;
        // Left to itself serde would also take lists, with members by their position, and the last of two values.
        let object = Object::parse(text).map_err(|e| fault(e.to_string()))?;
        for key in ["convert", "verify", "score", "publish"] {
            if let Some(value) = object.get(key) {
                Object::parse(value.get()).map_err(|e| fault(format!("`{key}`: {e}")))?;
            }
        }
        if let Some(key) = repeated_key(text) {
            return Err(fault(format!("`{}` appears twice", escaped(&key))));
        }
        let settings: Settings = serde_json::from_str(text).map_err(|e| fault(e.to_string()))?;
        // A policy has bounds of its own.
        let policy = serde_json::to_vec(&settings.publish.policy).expect("plain data");
        Policy::parse(path, &policy)?;
        Ok(settings)
    }

    /// Refuses what cannot go together, before anything is done.
    fn check(&self, path: &Path) -> Result<(), Faults> {
        let mut faults = Vec::new();
        let mut refuse = |place: Place, kind| faults.push(Fault::new(place, kind));
        let exclude = |one, other, why| FaultKind::FlagsExclude { one, other, why };
        if self.convert.consume && self.verify.source {
            let why = "the source is gone when the container is verified";
            refuse(Place::file(path), exclude("`convert.consume`", "`verify.source`", why));
        }
        if self.convert.consume && self.score.baseline.is_none() {
            let why = "the source is gone when it is to be scored: score it before, and give the results";
            refuse(Place::file(path), exclude("`convert.consume`", "no `score.baseline`", why));
        }
        if self.score.tasks.is_empty() && self.score.texts.is_empty() {
            refuse(Place::file(path), FaultKind::NothingToScore);
        }
        let (checkpoint, container) = (resolved(&self.checkpoint), resolved(&self.container));
        let nested = |what, outer: &Path| {
            let outer = outer.to_string_lossy().into_owned();
            FaultKind::NestedDirectory { what, outer }
        };
        if checkpoint == container {
            refuse(Place::file(&self.container), FaultKind::SameDirectory);
        } else if container.starts_with(&checkpoint) {
            refuse(Place::file(&self.container), nested("checkpoint", &self.checkpoint));
        } else if checkpoint.starts_with(&container) {
            refuse(Place::file(&self.checkpoint), nested("container", &self.container));
        }
        let reports = resolved(&self.reports);
        if [&container, &checkpoint].into_iter().any(|model| reports.starts_with(model)) {
            refuse(Place::file(&self.reports), FaultKind::ResultsInModel);
        } else if container.starts_with(&reports) {
            refuse(Place::file(&self.container), nested("reports", &self.reports));
        }
        for file in self.verify.references.iter().chain(self.score.tasks.values()).chain(self.score.texts.values()) {
            if !file.is_file() {
                refuse(Place::file(file), FaultKind::InputAbsent);
            }
        }
        if let Some(baseline) = self.score.baseline.as_ref().filter(|baseline| !baseline.exists()) {
            refuse(Place::file(baseline), FaultKind::InputAbsent);
        }
        // What is waited for may be made by a downloader.
        if !self.convert.follow && !self.checkpoint.is_dir() {
            refuse(Place::file(&self.checkpoint), FaultKind::NotADirectory);
        }
        if self.score.limit == Some(0) {
            let (flag, expected) = ("`score.limit`", "a number above 0");
            refuse(Place::file(path), FaultKind::FlagValue { flag, expected, found: "0".to_owned() });
        }
        for (given, flag) in [(self.memory, "`memory`"), (self.device_memory, "`device_memory`")] {
            if given == Some(0) {
                let expected = "a number above 0";
                refuse(Place::file(path), FaultKind::FlagValue { flag, expected, found: "0".to_owned() });
            }
        }
        faults.extend(self.publish.repo_id.as_deref().and_then(|id| check_repo_id(id).err()));
        faults.extend(self.devices().err());
        Faults::check(faults)
    }

    /// What is scored: tasks, then texts, each by name.
    pub fn inputs(&self) -> Vec<Given> {
        let given =
            |kind| move |(name, path): (&String, &PathBuf)| Given { kind, name: name.clone(), path: path.clone() };
        let tasks = self.score.tasks.iter().map(given(Kind::Task));
        tasks.chain(self.score.texts.iter().map(given(Kind::Text))).collect()
    }

    /// The devices that verify.
    pub fn devices(&self) -> Result<Vec<Device>> {
        self.verify.devices.iter().map(|name| Device::parse("`verify.devices`", name)).collect()
    }
}
