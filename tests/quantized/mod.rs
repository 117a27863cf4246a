//! A checkpoint whose weights are quantized in memory, as a container of it would hold them.

use std::path::{Path, PathBuf};

use coliconv::checkpoint::{Allowed, Checkpoint};
use coliconv::config::Config;
use coliconv::error::Result;
use coliconv::format::Format;
use coliconv::quantize::Quantizer;
use coliconv::roles::{Class, Pass, Role};
use coliconv::weights::{Matrix, Weights};

/// The formats of a container, by class; everything that is not named is int8.
#[derive(Clone, Copy)]
pub struct Plan {
    /// Routed experts.
    pub experts: Quantizer,
    /// The other matrices of the hidden layers.
    pub others: Quantizer,
}

pub const INT8: Quantizer = Quantizer::Int8Row { bits: 8 };

/// Groups of that many elements.
pub fn grouped(group_size: usize) -> Quantizer {
    Quantizer::Int4Grouped { group_size }
}

impl Plan {
    /// One format for all classes of the hidden layers.
    pub fn all(format: Quantizer) -> Plan {
        Plan { experts: format, others: format }
    }

    fn quantizer(&self, role: &Role) -> Quantizer {
        match role.class {
            _ if !role.matrix => Quantizer::F32,
            Class::Io | Class::Mtp | Class::Indexer => INT8,
            Class::X => self.experts,
            _ => self.others,
        }
    }
}

/// Weights of a container that was never written.
pub struct Quantized {
    checkpoint: Checkpoint,
    plan: Plan,
    passes: Vec<Pass>,
}

/// The directory of a fixture.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// A fixture's checkpoint, whole.
pub fn checkpoint(name: &str) -> Checkpoint {
    Checkpoint::open(&fixture(name), &Pass::ALL, Allowed::default()).unwrap()
}

impl Quantized {
    /// The container of a fixture that holds these passes.
    pub fn new(name: &str, plan: Plan, passes: &[Pass]) -> Quantized {
        Quantized { checkpoint: checkpoint(name), plan, passes: passes.to_vec() }
    }
}

impl Weights for Quantized {
    fn config(&self) -> &Config {
        &self.checkpoint.config
    }

    fn directory(&self) -> PathBuf {
        self.checkpoint.directory.clone()
    }

    fn contains(&self, name: &str) -> bool {
        self.checkpoint.census.role(name).is_some_and(|role| self.passes.contains(&role.pass))
            && self.checkpoint.contains(name)
    }

    fn load(&self, name: &str) -> Result<Matrix> {
        let source = self.checkpoint.load(name)?;
        let Matrix { rows, columns, .. } = source;
        let quantizer = self.plan.quantizer(self.checkpoint.census.role(name).unwrap());
        let quantizer = match quantizer.format().canonical(columns as u64) {
            Format::Int4Row => Quantizer::Int4Row,
            _ => quantizer,
        };
        let (code_bytes, row_scales) = (quantizer.row_code_bytes(columns), quantizer.row_scales(columns));
        let mut values = vec![0.0; columns];
        let mut codes = vec![0; rows * code_bytes];
        let mut scales = vec![0.0; rows * row_scales];
        for row in 0..rows {
            source.dequantize_row(row, &mut values);
            let scales = &mut scales[row * row_scales..][..row_scales];
            quantizer.quantize_row(&values, &mut codes[row * code_bytes..][..code_bytes], scales);
        }
        Ok(Matrix { rows, columns, format: quantizer.format(), codes, scales })
    }
}
