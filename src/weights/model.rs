//! A model on disk, be it a checkpoint or a container.

use std::path::Path;

use super::{ContainerRows, Rows, SourceRows, Weights};
use crate::checkpoint::{Allowed, Checkpoint, weight_files};
use crate::container::manifest::MANIFEST_FILE;
use crate::container::progress;
use crate::container::reader::Container;
use crate::error::{Faults, Result, Severity};
use crate::format::Format;
use crate::header::{Header, StoredTensor};
use crate::io::SourceFile;
use crate::report::Finding;
use crate::roles::{Pass, Role};
use crate::tensor::{Dtype, Shape, TensorName};

/// What a directory holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKind {
    /// A Hugging Face checkpoint.
    Checkpoint,
    /// A colibri container.
    Container,
}

impl ModelKind {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            ModelKind::Checkpoint => "checkpoint",
            ModelKind::Container => "container",
        }
    }

    /// Tells a container from a checkpoint: by a manifest, by quantized tensors, or by the names of its files.
    pub fn of(directory: &Path) -> Result<ModelKind> {
        let names = weight_files(directory)?;
        let written = directory.join(MANIFEST_FILE).exists() || !progress::present(directory)?.is_empty();
        if written || names.iter().any(|name| Pass::of_file(name).is_some()) {
            return Ok(ModelKind::Container);
        }
        let quantized = names.iter().any(|name| {
            let header = SourceFile::open(&directory.join(name)).map_err(Faults::from);
            let header = header.and_then(|file| Header::read(&file));
            header.is_ok_and(|header| header.tensors().iter().any(|tensor| tensor.name.as_str().ends_with(".qs")))
        });
        Ok(if quantized { ModelKind::Container } else { ModelKind::Checkpoint })
    }
}

/// A model without errors whose weights can be read by row.
#[derive(Debug)]
pub enum Model {
    /// A checkpoint.
    Checkpoint(Box<Checkpoint>),
    /// A container.
    Container(Box<Container>),
}

/// How a weight is stored, and where.
#[derive(Debug, Clone)]
pub struct Stored<'a> {
    /// The format, or the element type of what is stored raw; `unknown` where nothing tells.
    pub format: &'static str,
    /// Elements that share a scale, where the format has groups.
    pub group_size: Option<u64>,
    /// Codes, then scales where there are some.
    pub parts: Vec<(&'a SourceFile, &'a StoredTensor)>,
}

impl Stored<'_> {
    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, stored)| stored.bytes).sum()
    }
}

impl Model {
    /// Opens whatever the directory holds; errors in it are reasons to refuse.
    pub fn open(directory: &Path) -> Result<Model, Faults> {
        Ok(match ModelKind::of(directory)? {
            ModelKind::Checkpoint => {
                Model::Checkpoint(Box::new(Checkpoint::open(directory, &Pass::ALL, Allowed::default())?))
            }
            ModelKind::Container => Model::Container(Box::new(Container::open(directory)?)),
        })
    }

    /// Its weights by name.
    pub fn weights(&self) -> &dyn Weights {
        match self {
            Model::Checkpoint(checkpoint) => &**checkpoint,
            Model::Container(container) => &**container,
        }
    }

    /// Which it is.
    pub fn kind(&self) -> ModelKind {
        match self {
            Model::Checkpoint(_) => ModelKind::Checkpoint,
            Model::Container(_) => ModelKind::Container,
        }
    }

    /// The names of its weights, sorted. Of a checkpoint these are the weights that are converted.
    pub fn names(&self) -> Vec<&TensorName> {
        match self {
            Model::Container(container) => container.survey().weights.keys().collect(),
            Model::Checkpoint(checkpoint) => {
                let mut names: Vec<&TensorName> = checkpoint.weights(&Pass::ALL).map(|(name, _)| name).collect();
                names.sort_unstable();
                names
            }
        }
    }

    /// What a weight is for, if its config asks for it.
    pub fn role(&self, name: &TensorName) -> Option<&Role> {
        match self {
            Model::Container(container) => container.survey().weights.get(name)?.role.as_ref(),
            Model::Checkpoint(checkpoint) => checkpoint.census.role(name.as_str()),
        }
    }

    /// Logical shape of a weight, where it is known.
    pub fn shape(&self, name: &TensorName) -> Option<Shape> {
        match self {
            Model::Container(container) => container.survey().weights.get(name)?.shape(),
            Model::Checkpoint(checkpoint) => Some(checkpoint.tensor(name.as_str())?.stored.shape.clone()),
        }
    }

    /// How a weight is stored.
    pub fn stored(&self, name: &TensorName) -> Option<Stored<'_>> {
        match self {
            Model::Container(container) => {
                let survey = container.survey();
                let weight = survey.weights.get(name)?;
                let format = weight.format.map_or("unknown", |format| match (format, weight.codes.dtype) {
                    (Format::F32, dtype) => raw_name(dtype),
                    (format, _) => format.name(),
                });
                let mut parts = vec![(&survey.files[weight.file].file, &weight.codes)];
                parts.extend(weight.scales.as_ref().map(|(file, scales)| (&survey.files[*file].file, scales)));
                Some(Stored { format, group_size: weight.format.and_then(Format::group_size), parts })
            }
            Model::Checkpoint(checkpoint) => {
                let tensor = checkpoint.tensor(name.as_str())?;
                let mut parts = vec![(&tensor.shard.file, tensor.stored)];
                parts.extend(tensor.scales.map(|(shard, scales)| (&shard.file, scales)));
                Some(Stored { format: raw_name(tensor.stored.dtype), group_size: None, parts })
            }
        }
    }

    /// The rows of a weight of this model.
    ///
    /// # Panics
    ///
    /// If there is no weight of that name.
    pub fn rows(&self, name: &TensorName) -> Result<Rows<'_>> {
        match self {
            Model::Container(container) => {
                let survey = container.survey();
                ContainerRows::new(survey, &survey.weights[name]).map(Rows::Container)
            }
            Model::Checkpoint(checkpoint) => {
                let tensor = checkpoint.tensor(name.as_str()).expect("a weight of this model");
                SourceRows::new(tensor).map(Rows::Source)
            }
        }
    }

    /// What was accepted although it is odd.
    pub fn findings(&self) -> Vec<Finding> {
        match self {
            Model::Container(container) => {
                container.survey().findings.iter().map(|(severity, fault)| Finding::new(*severity, fault)).collect()
            }
            Model::Checkpoint(checkpoint) => {
                checkpoint.warnings.iter().map(|fault| Finding::new(Severity::Warning, fault)).collect()
            }
        }
    }
}

/// The format of numbers that are stored as they are, or of the source's FP8.
fn raw_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => Format::F32.name(),
        Dtype::BF16 => "bf16",
        Dtype::F16 => "f16",
        Dtype::F8_E4M3 => Format::Fp8E4m3B128.name(),
        _ => "unknown",
    }
}
