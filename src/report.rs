//! The JSON documents that commands print with `--json`. `schemas/` is generated from these types.

mod bench;
mod devices;
mod diff;
mod generate;
mod gpu;
pub mod inspect;
mod pipeline;
mod publish;
mod score;
mod verify;

use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::bench::{BenchDocument, BenchMeasure, BenchReport, BenchTokenBytes};
pub use self::devices::{DevicesApi, DevicesCpu, DevicesGpu, DevicesReport};
pub use self::diff::{DiffClass, DiffDocument, DiffElement, DiffReport, DiffSide, DiffTensor, Side};
pub use self::generate::{GenerateDocument, GenerateDraft, GenerateReport, GenerateStop};
pub use self::gpu::{GpuDevice, GpuOperation, GpuRun};
pub use self::pipeline::{PipelineDocument, PipelineReport, PipelineStep, StepStatus};
pub use self::publish::{PublishDocument, PublishFile, PublishListing, PublishReport, PublishStep, Storage};
pub use self::score::{
    ScoreBaseline, ScoreCheck, ScoreCompared, ScoreDocument, ScoreDrafts, ScoreExcluded, ScoreFlipped, ScoreInput,
    ScoreKlPositions, ScorePaired, ScoreProbe, ScoreProbes, ScoreReport, ScoreRequest, ScoreShares, ScoreTask,
    ScoreTaskDifference, ScoreText, ScoreTextDifference,
};
pub use self::verify::{
    CheckStatus, Verdict, VerifyAgreement, VerifyBinding, VerifyCheck, VerifyDocument, VerifyDrafts, VerifyFile,
    VerifyGreedy, VerifyOwnDrafts, VerifyPart, VerifyReport, VerifyTeacherForced, VerifyTokens,
};
pub use crate::backend::gpu::tiers::Counters as DeviceExperts;
pub use crate::error::Severity;
use crate::error::{Fault, FaultKind, Place, escaped, escaped_whole};
pub use crate::experts::Counters as Experts;

/// Something that a report tells about a file or tensor.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What kind of thing, in kebab-case; stable across versions.
    pub kind: String,
    /// The file, where it is about one.
    pub file: Option<String>,
    /// The tensor, where it is about one.
    pub tensor: Option<String>,
    /// Byte offset in the file, where it is about one.
    pub offset: Option<u64>,
    /// One sentence with what was expected and found; names escaped.
    pub message: String,
    /// What a person can do.
    pub hint: Option<String>,
}

impl Finding {
    /// A fault as data.
    pub fn new(severity: Severity, fault: &Fault) -> Finding {
        Finding {
            severity,
            kind: fault.kind.name().to_owned(),
            file: fault.place.file.as_ref().map(|file| file.to_string_lossy().into_owned()),
            tensor: fault.place.tensor.as_ref().map(|tensor| tensor.as_str().to_owned()),
            offset: fault.place.offset,
            message: fault.kind.to_string(),
            hint: fault.hint(),
        }
    }

    /// A warning for each device that is not used, with the reason, about the model in `path`.
    pub fn of_unused(path: &Path, unused: &[(String, String)]) -> Vec<Finding> {
        let warning = |(device, reason): &(String, String)| {
            let kind = FaultKind::DeviceUnused { device: device.clone(), reason: reason.clone() };
            Finding::new(Severity::Warning, &Fault::new(Place::file(path), kind))
        };
        unused.iter().map(warning).collect()
    }

    /// Something that was accepted: odd, or only worth knowing.
    pub fn accepted(fault: &Fault) -> Finding {
        let severity = match *fault.kind {
            FaultKind::PassAbsent { .. } | FaultKind::Misaligned { .. } => Severity::Note,
            _ => Severity::Warning,
        };
        Finding::new(severity, fault)
    }

    /// Place and message on one line.
    pub fn line(&self) -> String {
        let mut line = String::new();
        if let Some(file) = &self.file {
            line += &format!("{}: ", escaped_whole(file));
        }
        if let Some(tensor) = &self.tensor {
            line += &format!("tensor {}: ", escaped(tensor));
        }
        if let Some(offset) = self.offset {
            line += &format!("byte {offset}: ");
        }
        line + &self.message
    }
}

/// `convert --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "coliconv convert report")]
pub struct ConvertReport {
    /// Directory of the container.
    pub container: String,
    /// Its .safetensors files, those of earlier runs included; with `--part` those of the part.
    pub files: Vec<ConvertFile>,
    /// What became of each class, of the passes of this run.
    pub classes: Vec<ConvertClass>,
    /// Weights of the source in these passes.
    pub tensors: u64,
    /// Their bytes in the source, scales included.
    pub source_bytes: u64,
    /// Size of the .safetensors files of these passes.
    pub output_bytes: u64,
    /// Duration; 0 for a dry run.
    pub seconds: f64,
    /// Largest anonymous memory seen, in bytes; null where the system does not tell.
    pub peak_anonymous_bytes: Option<u64>,
    /// Free space at the destination, in bytes; with `--dry-run` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Whether the output fits there; with `--dry-run` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fits: Option<bool>,
    /// Whether the container is complete: with `--part` false while other parts are missing; not with `--dry-run`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub complete: Option<bool>,
    /// The source files that were removed; with `--consume`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub consumed: Vec<String>,
    /// What was found wrong with the container, or not; with `--verify`, unless other parts are missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<Box<VerifyReport>>,
    /// What was accepted although it is odd.
    pub warnings: Vec<Finding>,
}

/// A .safetensors file of [`ConvertReport`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConvertFile {
    /// File name.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256, hexadecimal; absent in a dry run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// A class and format of [`ConvertReport`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ConvertClass {
    /// The class.
    pub class: String,
    /// The format.
    pub format: String,
    /// Elements that share a scale, where the format has groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_size: Option<u64>,
    /// Bits of the levels, where fewer than the storage has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits: Option<u32>,
    /// Weights.
    pub tensors: u64,
    /// Their bytes in the source, scales included.
    pub source_bytes: u64,
    /// Their bytes in the container, scales included.
    pub output_bytes: u64,
    /// Signal to quantization noise in decibels, with `--stats`; null where there is no noise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sqnr_db: Option<f64>,
}

/// What a command prints with `--json` when it refuses its input: exit code 2.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Refusal {
    /// Everything that stands in the way.
    pub refused: Vec<Finding>,
}

/// Either document of `convert --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(title = "coliconv convert --json")]
pub enum ConvertDocument {
    /// It ran, or would.
    Report(ConvertReport),
    /// It could not run.
    Refusal(Refusal),
}
