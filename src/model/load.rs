//! Weights by their Hugging Face names, checked against config.json and uploaded.

use std::path::Path;

use super::Loaded;
use crate::backend::{Backend, ExpertSource, Pair};
use crate::checkpoint::weight_files;
use crate::config::Config;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::header::{Header, StoredTensor};
use crate::io::{SourceFile, available_bytes};
use crate::roles::{Census, Pass, Projection};
use crate::tensor::{Dtype, Shape};
use crate::weights::{Located, Matrix, Weights};

/// Bytes of these parts of a model of this config on the plain backend, which keeps every weight as f32.
pub fn plain_bytes(config: &Config, loaded: Loaded) -> u64 {
    let census = Census::of(config);
    let used = census.iter().filter(|(_, role)| !role.optional && loaded.uses(role));
    let elements = used.filter_map(|(_, role)| role.shape.elements());
    elements.fold(0u64, u64::saturating_add).saturating_mul(4)
}

/// Bytes of the model of a directory on the CPU, which keeps weights as they are stored, but for halves, which are widened.
/// Files that cannot be read count nothing.
pub fn stored_bytes(directory: &Path) -> u64 {
    let of_tensor = |tensor: &StoredTensor| match tensor.dtype {
        Dtype::BF16 | Dtype::F16 => tensor.bytes.saturating_mul(2),
        _ => tensor.bytes,
    };
    let of_file = |name: &String| -> Option<u64> {
        let header = Header::read(&SourceFile::open(&directory.join(name)).ok()?).ok()?;
        Some(header.tensors().iter().map(of_tensor).fold(0, u64::saturating_add))
    };
    let names = weight_files(directory).unwrap_or_default();
    names.iter().filter_map(of_file).fold(0, u64::saturating_add)
}

/// Refuses what needs more than `memory` bytes, by default those that are available.
pub fn check_memory(directory: &Path, needed: u64, memory: Option<u64>) -> Result<()> {
    match memory.or_else(available_bytes) {
        Some(available) if needed > available => {
            Err(Fault::new(Place::file(directory), FaultKind::ModelTooLarge { needed, available }))
        }
        _ => Ok(()),
    }
}

/// Brings weights to a backend.
pub struct Loader<'a, B> {
    weights: &'a dyn Weights,
    backend: &'a B,
    census: Census,
}

impl<'a, B: Backend> Loader<'a, B> {
    /// A loader of these weights.
    pub fn new(weights: &'a dyn Weights, backend: &'a B) -> Loader<'a, B> {
        Loader { weights, backend, census: Census::of(weights.config()) }
    }

    /// The model's config.
    pub fn config(&self) -> &Config {
        self.weights.config()
    }

    /// Whether there is a weight of that name.
    pub fn has(&self, name: &str) -> bool {
        self.weights.contains(name)
    }

    /// Whether there is any weight that the pass must have.
    pub fn has_any(&self, pass: Pass) -> bool {
        self.census.iter().any(|(name, role)| role.pass == pass && !role.optional && self.has(name.as_str()))
    }

    /// Loads and uploads a weight.
    pub fn weight(&self, name: &str) -> Result<B::Weight> {
        self.backend.upload(name, self.matrix(name)?).map_err(|fault| self.placed(fault))
    }

    /// Loads and uploads a weight that is used in products with rows and in no other way.
    pub fn linear(&self, name: &str) -> Result<B::Weight> {
        self.backend.upload_linear(name, self.matrix(name)?).map_err(|fault| self.placed(fault))
    }

    /// Loads and uploads two weights that are used in products with the same rows, and in no other way.
    pub fn pair(&self, names: [&str; 2]) -> Result<Pair<B::Weight>> {
        let matrices = [self.matrix(names[0])?, self.matrix(names[1])?];
        self.backend.upload_pair(names, matrices).map_err(|fault| self.placed(fault))
    }

    /// Loads and uploads a weight, if there is one of that name.
    pub fn optional(&self, name: &str) -> Result<Option<B::Weight>> {
        self.has(name).then(|| self.weight(name)).transpose()
    }

    /// Prepares the routed experts of a layer.
    pub fn experts(&self, layer: u64) -> Result<B::Experts, Faults> {
        let uploaded = self.backend.upload_experts(&Routed { loader: self, layer });
        uploaded.map_err(|faults| faults.map(|fault| self.placed(fault)))
    }

    /// A fault of a backend, which knows no file, at the model.
    fn placed(&self, fault: Fault) -> Fault {
        let Fault { place: Place { file, tensor, offset }, kind } = fault;
        let file = file.or_else(|| Some(self.weights.directory()));
        Fault { place: Place { file, tensor, offset }, kind }
    }

    /// Loads a weight whose shape is the one that config.json asks for.
    fn matrix(&self, name: &str) -> Result<Matrix> {
        let matrix = self.weights.load(name)?;
        self.check_shape(name, matrix.rows, matrix.columns)?;
        Ok(matrix)
    }

    /// Finds a weight whose shape is the one that config.json asks for.
    fn locate(&self, name: &str) -> Result<Option<Located<'_>>> {
        let located = self.weights.locate(name)?;
        located.as_ref().map_or(Ok(()), |weight| self.check_shape(name, weight.rows, weight.columns))?;
        Ok(located)
    }

    fn check_shape(&self, name: &str, rows: usize, columns: usize) -> Result<()> {
        let role = self.census.role(name).expect("the model asks for what the census lists");
        let (rows, columns) = (rows as u64, columns as u64);
        let found = if role.shape.dims().len() == 1 && columns == 1 {
            Shape::from([rows])
        } else {
            Shape::from([rows, columns])
        };
        if found != role.shape {
            let kind = FaultKind::ShapeMismatch { expected: role.shape.clone(), found };
            return Err(Fault::new(Place::tensor(self.weights.directory(), name), kind));
        }
        Ok(())
    }
}

/// The routed experts of a layer, by name.
struct Routed<'l, 'a, B> {
    loader: &'l Loader<'a, B>,
    layer: u64,
}

impl<B: Backend> ExpertSource for Routed<'_, '_, B> {
    fn layer(&self) -> u64 {
        self.layer
    }

    fn count(&self) -> usize {
        self.loader.config().n_routed_experts as usize
    }

    fn name(&self, expert: usize, projection: Projection) -> String {
        format!("model.layers.{}.mlp.experts.{expert}.{}.weight", self.layer, projection.name())
    }

    fn load(&self, expert: usize, projection: Projection) -> Result<Matrix> {
        self.loader.matrix(&self.name(expert, projection))
    }

    fn locate(&self, expert: usize, projection: Projection) -> Result<Option<Located<'_>>> {
        self.loader.locate(&self.name(expert, projection))
    }
}
