//! Writes a checkpoint of random weights, or of none, for trying out and measuring.

#[allow(dead_code)]
#[path = "../tests/support/synthetic.rs"]
mod synthetic;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Parser, ValueEnum};
use coliconv::roles::Pass;
use synthetic::{Kind, Scales, Synthetic};

/// Write a checkpoint that is made from a config alone.
#[derive(Parser)]
struct Arguments {
    /// Directory to write, without weights so far.
    out_dir: PathBuf,
    /// config.json of the model; a small one of our own if neither this nor --glm is given.
    #[arg(long, value_name = "FILE", conflicts_with = "glm")]
    config: Option<PathBuf>,
    /// The size of GLM-5.2: 756 GB, to be made with --holes unless there is room.
    #[arg(long)]
    glm: bool,
    /// Number of shards [default: 141 with --glm, otherwise 1].
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// Files as long as they should be, but with nothing behind their headers.
    #[arg(long)]
    holes: bool,
    /// How matrices are stored.
    #[arg(long, value_enum, default_value = "fp8")]
    kind: MatrixKind,
    /// How the scales of --kind fp8 are stored.
    #[arg(long, value_enum, default_value = "f32")]
    scales: ScaleKind,
    /// Scales in another shard than their weight.
    #[arg(long)]
    scales_apart: bool,
    /// Other data.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Leave out the tensors of the MTP layer; the config keeps asking for them.
    #[arg(long)]
    no_mtp: bool,
    /// Leave out the tensors of the indexers; the config keeps asking for them.
    #[arg(long)]
    no_indexer: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum MatrixKind {
    Fp8,
    Bf16,
    F16,
    F32,
}

#[derive(Clone, Copy, ValueEnum)]
enum ScaleKind {
    F32,
    Bf16,
    Ue8m0,
}

impl Arguments {
    fn synthetic(&self) -> Result<Synthetic, Box<dyn Error + Send + Sync>> {
        let glm = self.glm.then(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/glm-5.2/config.json"));
        let config = match self.config.clone().or(glm) {
            Some(path) => serde_json::from_slice(&fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?)?,
            None => synthetic::small_config(),
        };
        let scales = match self.scales {
            ScaleKind::F32 => Scales::F32,
            ScaleKind::Bf16 => Scales::Bf16,
            ScaleKind::Ue8m0 => Scales::Ue8m0,
        };
        let kind = match self.kind {
            MatrixKind::Fp8 => Kind::Fp8(scales),
            MatrixKind::Bf16 => Kind::Bf16,
            MatrixKind::F16 => Kind::F16,
            MatrixKind::F32 => Kind::F32,
        };
        let shards = self.shards.unwrap_or(if self.glm { 141 } else { 1 });
        let mut synthetic = Synthetic::new(config).kind(kind).shards(shards).seed(self.seed);
        if self.glm && !self.no_indexer {
            synthetic = synthetic.mtp_indexer();
        }
        if self.holes {
            synthetic = synthetic.holes();
        }
        if self.scales_apart {
            synthetic = synthetic.scales_apart();
        }
        if self.no_mtp {
            synthetic = synthetic.without(Pass::Mtp);
        }
        if self.no_indexer {
            synthetic = synthetic.without(Pass::Indexer);
        }
        Ok(synthetic)
    }
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let arguments = Arguments::parse();
    let start = Instant::now();
    let made = arguments.synthetic()?.write(&arguments.out_dir)?;
    println!(
        "{}: {} shards, {} weights, {} entries, {:.3} GB of tensors, {:.3} GB of files, {:.2} s",
        arguments.out_dir.display(),
        made.shards,
        made.weights,
        made.entries,
        made.tensor_bytes as f64 / 1e9,
        made.file_bytes as f64 / 1e9,
        start.elapsed().as_secs_f64()
    );
    Ok(())
}
