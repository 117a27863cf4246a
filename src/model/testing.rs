//! Models without files for the tests of the blocks, and what transformers made of them: see fixtures/blocks.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::backend::Backend;
use crate::backend::reference::Reference;
use crate::config::Config;
use crate::error::{Fault, FaultKind, Place, Result};
use crate::format::Format;
use crate::roles::Census;
use crate::weights::{Matrix, Weights};

/// Rows of the blocks' inputs.
pub const TOKENS: usize = 9;

/// `count` numbers from −1 to 1, exact in f32: FNV-1a of the name starts a linear congruential generator.
pub fn numbers(name: &str, count: usize) -> Vec<f32> {
    let start = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let states = std::iter::successors(Some(start), |state| {
        Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407))
    });
    states.skip(1).take(count).map(|state| ((state >> 40) as f32 - 8_388_608.0) / 8_388_608.0).collect()
}

/// Weights that a formula gives.
pub struct Synthetic {
    config: Config,
    census: Census,
    /// Whether a weight is there.
    present: fn(&str) -> bool,
    /// Whether weights that a model may lack are there.
    optional: bool,
}

impl Synthetic {
    /// The model of the blocks' config.json with other values for some keys.
    pub fn new(changes: Value) -> Synthetic {
        let path = directory().join("config.json");
        let mut keys: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            keys[key] = value.clone();
        }
        let config = Config::parse(&path, keys.to_string().as_bytes()).unwrap();
        Synthetic { census: Census::of(&config), config, present: |_| true, optional: false }
    }

    /// The same with only some weights.
    pub fn only(self, present: fn(&str) -> bool) -> Synthetic {
        Synthetic { present, ..self }
    }

    /// The same with the weights that a model may lack.
    pub fn with_optional(self) -> Synthetic {
        Synthetic { optional: true, ..self }
    }
}

impl Weights for Synthetic {
    fn config(&self) -> &Config {
        &self.config
    }

    fn directory(&self) -> PathBuf {
        directory()
    }

    fn contains(&self, name: &str) -> bool {
        self.census.role(name).is_some_and(|role| self.optional || !role.optional) && (self.present)(name)
    }

    fn load(&self, name: &str) -> Result<Matrix> {
        let shape = &self.census.role(name).unwrap().shape;
        if !self.contains(name) {
            let kind = FaultKind::TensorMissing { shape: shape.clone() };
            return Err(Fault::new(Place::tensor(self.directory(), name), kind));
        }
        let (rows, columns) = shape.matrix().unwrap_or((shape.dims()[0], 1));
        let (rows, columns) = (rows as usize, columns as usize);
        let of = |value: f32| {
            if name.ends_with("norm.weight") {
                1.0 + value / 4.0
            } else if name.ends_with("e_score_correction_bias") {
                value / 4.0 - 1.0
            } else {
                value / 2.0
            }
        };
        let codes = numbers(name, rows * columns).into_iter().flat_map(|value| of(value).to_le_bytes()).collect();
        Ok(Matrix { rows, columns, format: Format::F32, codes, scales: Vec::new() })
    }
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/blocks")
}

/// What transformers made of the blocks.
pub fn blocks() -> Value {
    serde_json::from_slice(&std::fs::read(directory().join("blocks.json")).unwrap()).unwrap()
}

/// The rows of an input.
pub fn input(backend: &Reference, name: &str, width: u64) -> <Reference as Backend>::Rows {
    backend.write(&numbers(name, TOKENS * width as usize), width as usize).unwrap()
}

/// Expects numbers within 2e-6 of the stored ones, relative to 1 or to the largest.
#[track_caller]
pub fn assert_close(found: &[f32], expected: &Value) {
    let expected: Vec<f64> = serde_json::from_value(expected.clone()).unwrap();
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(1.0f64, |largest, value| largest.max(value.abs()));
    for (at, (&found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(found) - expected).abs() <= 2e-6 * scale, "{at}: {found}, expected {expected}");
    }
}

/// All rows of an input as one piece.
pub fn whole() -> Vec<std::ops::Range<usize>> {
    std::iter::once(0..TOKENS).collect()
}

/// Splits `count` rows into pieces, some way for each `seed`.
pub fn pieces(count: usize, seed: u64) -> Vec<std::ops::Range<usize>> {
    let mut pieces = Vec::new();
    let mut begin = 0;
    for value in numbers(&seed.to_string(), count) {
        let end = count.min(begin + 1 + ((value + 1.0) * 2.0) as usize);
        if begin < end {
            pieces.push(begin..end);
        }
        begin = end;
    }
    pieces
}
