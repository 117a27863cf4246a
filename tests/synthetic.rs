//! The tools of the other tests: checkpoints made from a config, and the editor of checkpoints.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use coliconv::checkpoint::{Allowed, Checkpoint, SCALE_SUFFIX};
use coliconv::error::Faults;
use coliconv::roles::Pass;
use coliconv::tensor::Dtype;
use coliconv::weights::Weights;
use serde_json::{Value, json};
use support::shards::{Shards, Tensor, edit_file, edit_header};
use support::synthetic::{Kind, Scales, Synthetic, small_config};
use tempfile::TempDir;

fn open(directory: &Path) -> Result<Checkpoint, Faults> {
    Checkpoint::open(directory, &Pass::ALL, Allowed::default())
}

/// Opens a checkpoint about which nothing is odd.
fn open_clean(directory: &Path) -> Checkpoint {
    let checkpoint = open(directory).unwrap_or_else(|faults| panic!("{faults}"));
    assert!(checkpoint.warnings.is_empty(), "{:?}", checkpoint.warnings);
    assert_eq!(checkpoint.absent_passes, []);
    checkpoint
}

fn made(synthetic: &Synthetic) -> TempDir {
    let directory = TempDir::new().unwrap();
    synthetic.write(directory.path()).unwrap();
    directory
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn contents(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let paths = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    paths.map(|path| (path.file_name().unwrap().into(), fs::read(&path).unwrap())).collect()
}

#[test]
fn every_kind_opens_without_warning_and_holds_finite_values() {
    for kind in Kind::ALL {
        let directory = made(&Synthetic::new(small_config()).kind(kind).shards(3));
        let checkpoint = open_clean(directory.path());
        assert_eq!(checkpoint.shards.len(), 3);
        assert_eq!(
            checkpoint.weights(&Pass::ALL).count(),
            checkpoint.census.iter().filter(|(_, r)| !r.optional).count()
        );
        for (name, role) in checkpoint.weights(&Pass::ALL) {
            let matrix = checkpoint.load(name.as_str()).unwrap();
            let mut row = vec![0.0; matrix.columns];
            let mut largest = 0f32;
            for r in 0..matrix.rows {
                matrix.dequantize_row(r, &mut row);
                assert!(row.iter().all(|value| value.is_finite()), "{kind:?} {name}");
                largest = row.iter().fold(largest, |largest, value| largest.max(value.abs()));
            }
            assert!(largest > 0.01 && largest < 60.0, "{kind:?} {name}: {largest}");
            assert_eq!(role.shape.elements().unwrap() as usize, matrix.rows * matrix.columns);
        }
    }
}

#[test]
fn element_types_are_those_of_real_checkpoints() {
    let directory = made(&Synthetic::new(small_config()).kind(Kind::Fp8(Scales::Bf16)));
    let shards = Shards::load(directory.path());
    let real = Shards::load(&fixture("nano"));
    for (name, _) in real.names() {
        let ours = name.replacen("layers.4.", "layers.3.", 1);
        if shards.names().any(|(other, _)| other == ours) {
            let expected = if name.ends_with(SCALE_SUFFIX) { Dtype::BF16 } else { real.tensor(name).dtype };
            assert_eq!(shards.tensor(&ours).dtype, expected, "{name}");
        }
    }
    assert!(!shards.names().any(|(name, _)| name.contains("layers.2.self_attn.indexer")));
}

#[test]
fn scales_may_lie_in_another_shard() {
    for kind in [Kind::Fp8(Scales::F32), Kind::Fp8(Scales::Ue8m0)] {
        let directory = made(&Synthetic::new(small_config()).kind(kind).shards(2).scales_apart());
        let checkpoint = open_clean(directory.path());
        let mut apart = 0;
        for (name, _) in checkpoint.weights(&Pass::ALL) {
            let tensor = checkpoint.tensor(name.as_str()).unwrap();
            if let Some((shard, _)) = tensor.scales {
                assert_ne!(shard.name, tensor.shard.name);
                apart += 1;
            }
        }
        assert!(apart > 50);
    }
}

#[test]
fn the_same_seed_makes_the_same_bytes_however_they_are_split() {
    let small = || Synthetic::new(small_config()).seed(7);
    let one = made(&small());
    assert_eq!(contents(one.path()), contents(made(&small()).path()));
    let (one, split) = (Shards::load(one.path()), Shards::load(made(&small().shard_bytes(100_000)).path()));
    let other = Shards::load(made(&small().seed(8)).path());
    assert!(split.files.len() > 5);
    let mut compared = 0;
    for (name, _) in one.names() {
        assert_eq!(one.tensor(name), split.tensor(name), "{name}");
        assert_ne!(one.tensor(name).bytes, other.tensor(name).bytes, "{name}");
        compared += 1;
    }
    assert_eq!(split.names().count(), compared);
}

#[test]
fn the_data_take_every_finite_code_and_scales_of_two_decades() {
    let directory = made(&Synthetic::new(small_config()));
    let shards = Shards::load(directory.path());
    let name = "model.layers.1.mlp.experts.2.down_proj.weight";
    let codes = &shards.tensor(name).bytes;
    assert!((0..=255).all(|code: u8| codes.contains(&code) == (code & 0x7f != 0x7f)));
    let scales: Vec<f32> = shards
        .names()
        .filter(|(name, _)| name.ends_with(SCALE_SUFFIX))
        .flat_map(|(name, _)| shards.tensor(name).to_f32())
        .collect();
    let (low, high) = scales.iter().fold((f32::MAX, 0f32), |(low, high), &s| (low.min(s), high.max(s)));
    assert!((9e-4..2e-3).contains(&low) && (0.06..0.125).contains(&high), "{low} to {high}");
}

#[test]
fn passes_may_be_absent_and_optional_parts_present() {
    let directory = made(&Synthetic::new(small_config()).without(Pass::Mtp).without(Pass::Indexer));
    let checkpoint = open(directory.path()).unwrap();
    assert_eq!(checkpoint.absent_passes, [Pass::Mtp, Pass::Indexer]);
    assert!(checkpoint.warnings.iter().all(|fault| fault.kind.name() == "pass-absent"));

    let directory = made(&Synthetic::new(small_config()).optional().mtp_indexer());
    let checkpoint = open_clean(directory.path());
    assert_eq!(checkpoint.weights(&Pass::ALL).count(), checkpoint.census.iter().count());
    assert!(checkpoint.tensor("model.layers.3.self_attn.indexer.wk.weight").is_some());

    let directory = made(&Synthetic::new(small_config()).extra("model.rotary.inv_freq", Dtype::F32, &[5]));
    assert!(open(directory.path()).unwrap_err().to_string().contains("model.rotary.inv_freq"));
}

#[test]
fn holes_are_as_long_as_data() {
    let (directory, holes) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let with_data = Synthetic::new(small_config()).shards(4);
    let made = with_data.clone().holes().write(holes.path()).unwrap();
    assert_eq!(made, with_data.write(directory.path()).unwrap());
    assert_eq!((made.shards, made.weights), (4, made.entries - scales(holes.path())));
    let checkpoint = open_clean(holes.path());
    assert_eq!(checkpoint.shards.iter().map(|shard| shard.file.bytes()).sum::<u64>(), made.file_bytes);
    assert!(with_data.write(directory.path()).is_err(), "nothing is overwritten");
}

fn scales(directory: &Path) -> usize {
    Shards::load(directory).names().filter(|(name, _)| name.ends_with(SCALE_SUFFIX)).count()
}

#[test]
fn exactly_as_many_shards_as_asked_for() {
    for count in [1, 2, 5, 40, 138] {
        let directory = TempDir::new().unwrap();
        let made = Synthetic::new(small_config()).holes().shards(count).write(directory.path()).unwrap();
        assert_eq!(made.shards, count.min(made.weights));
        open_clean(directory.path());
    }
}

#[test]
fn the_editor_stores_what_it_loads() {
    for name in ["nano", "tiny"] {
        let directory = TempDir::new().unwrap();
        Shards::load(&fixture(name)).store(directory.path());
        open_clean(directory.path());
        let (ours, theirs) = (contents(directory.path()), contents(&fixture(name)));
        assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
        for (file, bytes) in &theirs {
            if file.to_string_lossy().ends_with(".index.json") {
                let value = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
                assert_eq!(value(&ours[file]), value(bytes));
            } else {
                assert!(ours[file] == *bytes, "{} differs", file.display());
            }
        }
    }
}

/// The kinds of the faults or warnings that an edit of the small model leads to.
fn after(edit: impl FnOnce(&mut Shards)) -> Vec<&'static str> {
    let mut shards = Shards::load(made(&Synthetic::new(small_config()).shards(3)).path());
    edit(&mut shards);
    let directory = TempDir::new().unwrap();
    shards.store(directory.path());
    kinds(directory.path())
}

fn kinds(directory: &Path) -> Vec<&'static str> {
    match open(directory) {
        Ok(checkpoint) => checkpoint.warnings.iter().map(|fault| fault.kind.name()).collect(),
        Err(faults) => faults.iter().map(|fault| fault.kind.name()).collect(),
    }
}

#[test]
fn the_editor_reaches_every_inconsistency() {
    const O: &str = "model.layers.0.self_attn.o_proj.weight";
    const SCALE: &str = "model.layers.0.self_attn.o_proj.weight_scale_inv";
    const DOWN: &str = "model.layers.0.mlp.down_proj.weight_scale_inv";
    const LAST: &str = "model-00003-of-00003.safetensors";
    let first = "model-00001-of-00003.safetensors";
    assert_eq!(after(|_| {}), [""; 0]);
    assert_eq!(after(|s| s.index_entry("lm_head.weight", "model-9.safetensors")), ["shard-missing"]);
    assert_eq!(after(|s| s.index_entry("lm_head.weight", "../x.safetensors")), ["index-path"]);
    assert_eq!(after(|s| s.index_entry("x", LAST)), ["tensor-not-in-shard"]);
    assert_eq!(after(|s| s.unindex("lm_head.weight")), ["tensor-not-in-index"]);
    assert_eq!(after(|s| s.unindex_file(LAST)), ["file-not-in-index"]);
    assert_eq!(after(|s| s.total_size(json!(3))), ["total-size"]);
    assert_eq!(after(|s| s.total_size(Value::Null)), ["total-size-missing"]);
    assert_eq!(after(Shards::without_index), ["index-missing"]);
    assert_eq!(after(|s| s.set_config("rope_parameters.rope_type", json!("yarn"))), ["config-value"]);
    assert_eq!(after(|s| s.set_config("hidden_size", Value::Null)), ["config-missing"]);
    assert_eq!(after(|s| drop(s.remove(O))), ["tensor-missing", "scale-orphan"]);
    assert_eq!(after(|s| drop(s.remove(SCALE))), ["scale-missing"]);
    assert_eq!(after(|s| s.rename(O, "model.layers.0.self_attn.o.weight")).len(), 3);
    assert_eq!(after(|s| s.move_to(SCALE, LAST)), [""; 0]);
    assert_eq!(after(|s| s.move_to(SCALE, "model-extra.safetensors")), [""; 0]);
    assert_eq!(after(|s| s.retain(|name| !name.contains("layers.2."))), ["layer-missing"]);
    assert_eq!(after(|s| s.add(first, O, s.tensor(O).clone())), ["duplicate-in-header"]);
    assert_eq!(after(|s| s.tensor_mut(O).dtype = Dtype::F8_E5M2), ["source-dtype", "scale-orphan"]);
    assert_eq!(after(|s| s.tensor_mut(O).shape.reverse()), ["shape-mismatch"]);
    assert_eq!(after(|s| s.tensor_mut(O).bytes.truncate(7)), ["span-mismatch"]);
    // 96 × 201: the grid is [1, 2].
    assert_eq!(after(|s| s.tensor_mut(DOWN).shape.reverse()), ["scale-grid"]);
    assert_eq!(after(|s| *s.tensor_mut(DOWN) = Tensor::zeros(Dtype::F32, &[2, 2])), ["scale-grid"]);
    assert_eq!(after(|s| *s.tensor_mut(DOWN) = Tensor::zeros(Dtype::F16, &[1, 2])), ["scale-dtype"]);
    // Values are not read when opening.
    assert_eq!(after(|s| s.tensor_mut(O).set(5, &[0x7f])), [""; 0]);
    assert_eq!(after(|s| *s.tensor_mut(DOWN) = Tensor::f32(&[1, 2], &[1.0, f32::NAN])), [""; 0]);
}

#[test]
fn stored_files_can_be_changed_byte_by_byte() {
    let directory = made(&Synthetic::new(small_config()));
    let path = directory.path().join("model-00001-of-00001.safetensors");
    let size = fs::metadata(&path).unwrap().len() as usize;
    edit_file(&path, |bytes| bytes.truncate(size - 1));
    assert_eq!(kinds(directory.path()), ["data-truncated"]);
    edit_file(&path, |bytes| bytes.extend([0, 0]));
    assert_eq!(kinds(directory.path()), ["trailing-bytes"]);
    edit_file(&path, |bytes| bytes.truncate(size));
    edit_header(&path, |text| text.extend(b"       \0"));
    assert_eq!(kinds(directory.path()), ["header-padding"]);
}
