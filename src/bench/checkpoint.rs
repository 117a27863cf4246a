//! Checkpoints made from a config alone, to be converted and measured.

use std::path::Path;

use serde_json::{Value, json};

use crate::checkpoint::{INDEX_FILE, SCALE_BLOCK, SCALE_SUFFIX};
use crate::config::{CONFIG_FILE, Config, GENERATION_CONFIG_FILE};
use crate::container::manifest::json_text;
use crate::error::{Fault, FaultKind, Faults, Place};
use crate::header::{self, StoredTensor};
use crate::io::{Appender, NewFile, write_whole};
use crate::roles::{Census, Role};
use crate::tensor::{Dtype, Shape, TensorName};

/// Bytes that are written at once.
const STEP: usize = 1 << 20;

/// A model of GLM-5.2's widths with as few layers, and as many experts in the last, as make up so many bytes: nearly all are
/// matrices of 2048 × 6144 and 6144 × 2048.
fn config(bytes: u64) -> Value {
    let mut config: Value = serde_json::from_str(super::synthetic::GLM).expect("the committed config");
    let expert = 3 * 2048 * 6144;
    // More experts than a model may have go into more layers.
    let experts = (bytes / expert).clamp(8, 16_000);
    let layers = experts.div_ceil(256);
    let changes = json!({
        "num_hidden_layers": layers + 1, "first_k_dense_replace": 1, "n_routed_experts": experts.div_ceil(layers),
        "num_nextn_predict_layers": 0, "vocab_size": 1024, "intermediate_size": 2048, "num_attention_heads": 4,
        "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": [1],
    });
    let (Value::Object(config), Value::Object(changes)) = (&mut config, changes) else { unreachable!("objects") };
    config.extend(changes);
    config.remove("indexer_types");
    Value::Object(std::mem::take(config))
}

/// Tensors of a weight as they are stored: FP8 with its scales, or BF16.
fn stored(name: &TensorName, role: &Role) -> Vec<StoredTensor> {
    let tensor = |name: TensorName, dtype, shape: Shape| {
        let bytes = shape.bytes(dtype).expect("a small shape");
        StoredTensor { name, dtype, shape, offset: 0, bytes }
    };
    match role.shape.matrix().filter(|_| role.matrix) {
        Some((rows, columns)) => {
            let scales = format!("{}{SCALE_SUFFIX}", name.as_str()).into();
            let grid = Shape::from([rows.div_ceil(SCALE_BLOCK), columns.div_ceil(SCALE_BLOCK)]);
            vec![tensor(name.clone(), Dtype::F8_E4M3, role.shape.clone()), tensor(scales, Dtype::F32, grid)]
        }
        None => vec![tensor(name.clone(), Dtype::BF16, role.shape.clone())],
    }
}

/// The weights of a checkpoint, in the order of their names.
fn weights(census: &Census) -> Vec<(&TensorName, &Role)> {
    let mut weights: Vec<(&TensorName, &Role)> =
        census.iter().filter(|(_, role)| role.pass == crate::roles::Pass::Main && !role.optional).collect();
    weights.sort_by_key(|(name, _)| *name);
    weights
}

/// Bytes of the tensors of the checkpoint that [`write`] makes: there are at least eight experts, however small it is to be.
pub(super) fn stored_bytes(bytes: u64) -> Result<u64, Faults> {
    let config = Config::parse(Path::new(CONFIG_FILE), &json_text(&config(bytes)))?;
    let census = Census::of(&config);
    let tensors = weights(&census).into_iter().flat_map(|(name, role)| stored(name, role));
    Ok(tensors.map(|tensor| tensor.bytes).sum())
}

/// Writes an FP8 checkpoint of about so many bytes in shards of about so many, of the main pass alone; tells how many weights
/// it has.
pub(super) fn write(directory: &Path, bytes: u64, shard_bytes: u64) -> Result<u64, Faults> {
    let text = json_text(&config(bytes));
    let config = Config::parse(&directory.join(CONFIG_FILE), &text)?;
    let census = Census::of(&config);
    let mut shards: Vec<Vec<StoredTensor>> = vec![Vec::new()];
    let (mut filled, mut elements) = (0, 0);
    for (name, role) in weights(&census) {
        elements += role.shape.elements().unwrap_or(0);
        let tensors = stored(name, role);
        if filled >= shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += tensors.iter().map(|tensor| tensor.bytes).sum::<u64>();
        shards.last_mut().expect("at least one").extend(tensors);
    }
    std::fs::create_dir(directory).map_err(|e| Fault::io("create the directory", directory, e))?;
    let (count, mut map, mut total) = (shards.len(), serde_json::Map::new(), 0);
    for (number, mut tensors) in shards.into_iter().enumerate() {
        let name = format!("model-{:05}-of-{count:05}.safetensors", number + 1);
        for tensor in &mut tensors {
            map.insert(tensor.name.as_str().to_owned(), Value::from(name.as_str()));
            (tensor.offset, total) = (total, total + tensor.bytes);
        }
        let first = tensors.first().map_or(0, |tensor| tensor.offset);
        tensors.iter_mut().for_each(|tensor| tensor.offset -= first);
        write_shard(&directory.join(name), &tensors)?;
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    write_whole(&directory.join(INDEX_FILE), &json_text(&index), false)?;
    write_whole(&directory.join(CONFIG_FILE), &text, false)?;
    write_whole(&directory.join(GENERATION_CONFIG_FILE), &json_text(&json!({"eos_token_id": [1]})), false)?;
    Ok(elements)
}

fn write_shard(path: &Path, tensors: &[StoredTensor]) -> Result<(), Faults> {
    let mut file = Appender::new(NewFile::create(path)?, STEP);
    file.append(&header::encode(None, tensors))?;
    // One piece for each type, and again: what is converted does not depend on where it repeats.
    let piece = |dtype| {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut bytes = Vec::with_capacity(STEP + 8);
        while bytes.len() < STEP {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            bytes.extend(element_bytes(dtype, random >> 32));
        }
        bytes
    };
    let pieces = [Dtype::F8_E4M3, Dtype::F32, Dtype::BF16].map(|dtype| (dtype, piece(dtype)));
    for tensor in tensors {
        let (_, piece) = pieces.iter().find(|(dtype, _)| *dtype == tensor.dtype).ok_or_else(|| {
            Fault::new(Place::tensor(path, tensor.name.clone()), FaultKind::SourceDtype { dtype: tensor.dtype })
        })?;
        let mut left = tensor.bytes as usize;
        while left > 0 {
            let step = left.min(piece.len());
            file.append(&piece[..step])?;
            left -= step;
        }
    }
    Ok(file.finish()?.commit(false)?)
}

/// A finite element of some size: of FP8 all codes but NaN, of scales from 2^−12 to 2^−11.
fn element_bytes(dtype: Dtype, random: u64) -> Vec<u8> {
    match dtype {
        Dtype::F8_E4M3 => vec![if random as u8 & 0x7f == 0x7f { 0 } else { random as u8 }],
        Dtype::F32 => f32::from_bits(115 << 23 | (random as u32 & 0x007f_ffff)).to_le_bytes().to_vec(),
        _ => (0x3f00 | (random as u16 & 0x7f)).to_le_bytes().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_is_counted_before() {
        // Codes alone of the fewest experts, and not much more.
        let fewest = 8 * 3 * 2048 * 6144;
        for asked in [1, 1 << 20, fewest] {
            let bytes = stored_bytes(asked).unwrap();
            assert!(bytes > fewest && bytes < 2 * fewest, "{asked} {bytes}");
        }
        let bytes = stored_bytes(10 << 30).unwrap();
        assert!(bytes > 10 << 30 && bytes < 11 << 30, "{bytes}");
    }
}
