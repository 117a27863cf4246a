//! Containers whose bytes are not what they should be: counts, element types, scales, codes.

use std::path::Path;

use coliconv::quantize::Quantizer;
use coliconv::roles::Pass;
use coliconv::tensor::Dtype;
use serde_json::json;

use super::Make;
use super::manifest::write_manifest;
use super::model::{Model, lm_head, scales_of};
use crate::support::shards::{Tensor, edit_file};

/// `[5, 8]`.
const HEAD: &str = "lm_head.weight";
const NORM: &str = "model.norm.weight";
/// `[4, q_lora_rank]`.
const Q_B: &str = "model.layers.0.self_attn.q_b_proj.weight";
/// `[intermediate_size, 8]`.
const UP: &str = "model.layers.0.mlp.up_proj.weight";
/// Of the MTP layer that follows one hidden layer: `[8, 16]`.
const EH: &str = "model.layers.1.eh_proj.weight";

const INT8: Quantizer = Quantizer::Int8Row { bits: 8 };
const G32: Quantizer = Quantizer::Int4Grouped { group_size: 32 };

/// The base container with one change.
fn changed(path: &Path, change: impl FnOnce(&mut Model)) {
    wide(path, 6, change);
}

/// The base container with q_lora_rank of that width.
fn wide(path: &Path, q_lora_rank: u64, change: impl FnOnce(&mut Model)) {
    let mut model = Model::container(json!({"q_lora_rank": q_lora_rank}));
    change(&mut model);
    model.store(path);
}

/// The output head in these numbers of bytes of codes and of scales.
fn counts(path: &Path, code_bytes: usize, scales: usize) {
    changed(path, |m| m.set_counts(HEAD, code_bytes, scales));
}

/// The output head as int8-row, then changed.
fn int8(path: &Path, change: impl FnOnce(&mut Model)) {
    changed(path, |m| {
        m.quantize(HEAD, INT8);
        change(m);
    });
}

/// The output head as int8-row with another second scale.
fn scale(path: &Path, value: f32) {
    int8(path, |m| m.scales(HEAD).set(1, &value.to_le_bytes()));
}

/// A container with an MTP layer.
fn mtp(path: &Path, change: impl FnOnce(&mut Model)) {
    let mut model = Model::container(json!({"num_nextn_predict_layers": 1}));
    change(&mut model);
    model.store(path);
}

/// A container with the manifest of what it held before a byte of a tensor was flipped.
fn flipped(path: &Path, name: &str) {
    changed(path, |m| {
        m.quantize(HEAD, INT8);
        m.quantize(UP, Quantizer::Int4Row);
    });
    write_manifest(path);
    let file = path.join(Pass::Main.file_name(0));
    let offset = super::model::offset_of(&file, name);
    edit_file(&file, |bytes| bytes[offset + 1] ^= 0x10);
}

pub fn bad() -> Vec<(&'static str, Make)> {
    let mut cases = byte_counts();
    cases.extend(ambiguities());
    cases.extend(dtypes());
    cases.extend(scales());
    cases.extend(values());
    cases.extend(heads());
    cases
}

/// Bytes of codes and scales that no format has at that shape.
fn byte_counts() -> Vec<(&'static str, Make)> {
    vec![
        // Upstream once took any other count for int2.
        ("codes-a-byte-short", |p| counts(p, 39, 5)),
        ("codes-a-byte-long", |p| counts(p, 41, 5)),
        ("codes-of-nothing", |p| counts(p, 0, 5)),
        ("codes-of-one-row-less", |p| counts(p, 32, 4)),
        ("codes-of-int2-short", |p| counts(p, 9, 5)),
        ("codes-between-int4-and-int2", |p| counts(p, 15, 5)),
        ("codes-of-a-wider-matrix", |p| counts(p, 45, 5)),
        ("codes-as-f16", |p| counts(p, 80, 5)),
        ("scales-one-short", |p| counts(p, 20, 4)),
        ("scales-one-long", |p| counts(p, 20, 6)),
        ("scales-of-columns", |p| counts(p, 40, 8)),
        ("scales-none", |p| counts(p, 40, 0)),
        ("scales-of-groups-for-int2", |p| counts(p, 10, 10)),
        ("scales-of-groups-for-int8", |p| wide(p, 64, |m| m.set_counts(Q_B, 256, 8))),
        ("scales-as-ue8m0", |p| {
            // One byte a block instead of four: [4, 512] has four blocks of 128 columns.
            wide(p, 512, |m| {
                m.quantize("model.layers.0.self_attn.q_a_proj.weight", INT8);
                m.set_counts(Q_B, 4 * 512, 1);
            });
        }),
        ("group-of-40", |p| wide(p, 144, |m| m.quantize(Q_B, Quantizer::Int4Grouped { group_size: 40 }))),
        ("group-of-8", |p| wide(p, 32, |m| m.quantize(Q_B, Quantizer::Int4Grouped { group_size: 8 }))),
        ("one-scale-a-row-for-a-manifest-of-groups", |p| {
            wide(p, 64, |m| m.quantize(Q_B, G32));
            write_manifest(p);
            let manifest = std::fs::read(p.join(coliconv::container::manifest::MANIFEST_FILE)).unwrap();
            std::fs::remove_dir_all(p).unwrap();
            wide(p, 64, |m| {
                m.quantize(Q_B, Quantizer::Int4Row);
                m.shards.others.insert(coliconv::container::manifest::MANIFEST_FILE.to_owned(), manifest);
            });
        }),
        ("embedding-of-fewer-rows", |p| {
            changed(p, |m| {
                let name = "model.embed_tokens.weight";
                m.quantize(name, INT8);
                m.shards.tensor_mut(name).shape = vec![32];
                m.shards.tensor_mut(name).bytes.truncate(32);
                m.scales(name).shape = vec![4];
                m.scales(name).bytes.truncate(16);
            });
        }),
        ("codes-not-flat", |p| int8(p, |m| m.shards.tensor_mut(lm_head()).shape = vec![5, 8])),
        ("scales-not-flat", |p| int8(p, |m| m.scales(HEAD).shape = vec![5, 1])),
        ("norm-short", |p| changed(p, |m| *m.shards.tensor_mut(NORM) = Tensor::f32(&[7], &[1.0; 7]))),
        ("norm-long", |p| changed(p, |m| *m.shards.tensor_mut(NORM) = Tensor::f32(&[9], &[1.0; 9]))),
        ("norm-empty", |p| changed(p, |m| *m.shards.tensor_mut(NORM) = Tensor::f32(&[0], &[]))),
        ("norm-of-two-dimensions", |p| changed(p, |m| m.shards.tensor_mut(NORM).shape = vec![1, 8])),
        ("matrix-transposed", |p| changed(p, |m| m.shards.tensor_mut(UP).shape = vec![8, 6])),
        ("matrix-flat", |p| changed(p, |m| m.shards.tensor_mut(UP).shape = vec![48])),
    ]
}

/// Bytes that fit several formats.
fn ambiguities() -> Vec<(&'static str, Make)> {
    vec![
        ("group-of-64-read-as-48", |p| wide(p, 144, |m| m.quantize(Q_B, Quantizer::Int4Grouped { group_size: 64 }))),
        ("group-of-128-read-as-96", |p| wide(p, 144, |m| m.quantize(Q_B, Quantizer::Int4Grouped { group_size: 128 }))),
        ("group-of-64-read-as-48-stamped", |p| {
            wide(p, 144, |m| {
                m.quantize(Q_B, Quantizer::Int4Grouped { group_size: 64 });
                m.stamp(Q_B, "int4-grouped");
            });
        }),
        ("int8-or-fp8", |p| {
            let mut model = Model::container(json!({"intermediate_size": 1}));
            model.quantize(UP, INT8);
            model.store(p);
        }),
        ("int3-or-int4", |p| wide(p, 48, |m| m.quantize(Q_B, Quantizer::Int3G64))),
        ("int3-or-int8", |p| wide(p, 24, |m| m.quantize(Q_B, Quantizer::Int3G64))),
    ]
}

/// Element types, and pairs of codes and scales.
fn dtypes() -> Vec<(&'static str, Make)> {
    vec![
        ("scales-f16", |p| {
            // As many bytes as the scales of groups twice as large.
            wide(p, 64, |m| {
                m.quantize(Q_B, Quantizer::Int4Grouped { group_size: 16 });
                *m.scales(Q_B) = Tensor::new(Dtype::F16, &[16], vec![0x3c; 32]);
            });
        }),
        ("scales-bf16", |p| int8(p, |m| *m.scales(HEAD) = Tensor::new(Dtype::BF16, &[5], vec![0x3c; 10]))),
        ("scales-f64", |p| int8(p, |m| *m.scales(HEAD) = Tensor::zeros(Dtype::F64, &[5]))),
        ("scales-u8", |p| int8(p, |m| *m.scales(HEAD) = Tensor::new(Dtype::U8, &[20], vec![0x3c; 20]))),
        ("codes-i8", |p| int8(p, |m| m.shards.tensor_mut(HEAD).dtype = Dtype::I8)),
        ("codes-fp8", |p| int8(p, |m| m.shards.tensor_mut(HEAD).dtype = Dtype::F8_E4M3)),
        ("norm-quantized", |p| {
            changed(p, |m| m.set_quantized(NORM, vec![1; 8], &[0.5]));
        }),
        ("norm-i64", |p| changed(p, |m| *m.shards.tensor_mut(NORM) = Tensor::zeros(Dtype::I64, &[8]))),
        ("norm-f64", |p| changed(p, |m| *m.shards.tensor_mut(NORM) = Tensor::zeros(Dtype::F64, &[8]))),
        ("codes-without-scales", |p| int8(p, |m| drop(m.shards.remove(&scales_of(HEAD))))),
        ("scales-without-codes", |p| int8(p, |m| drop(m.shards.remove(HEAD)))),
        ("scales-of-an-f32-matrix", |p| {
            changed(p, |m| m.shards.add("out-00000.safetensors", &scales_of(HEAD), Tensor::f32(&[5], &[0.5; 5])));
        }),
        ("scales-of-scales", |p| {
            let twice = scales_of(&scales_of(HEAD));
            int8(p, |m| m.shards.add("out-00000.safetensors", &twice, Tensor::f32(&[1], &[0.5])));
        }),
        ("scales-in-another-file", |p| {
            int8(p, |m| m.shards.move_to(&scales_of(HEAD), "out-00001.safetensors"));
        }),
    ]
}

/// Scales that are no scales.
fn scales() -> Vec<(&'static str, Make)> {
    vec![
        ("scale-nan", |p| scale(p, f32::NAN)),
        ("scale-infinite", |p| scale(p, f32::INFINITY)),
        ("scale-zero", |p| scale(p, 0.0)),
        ("scale-minus-zero", |p| scale(p, -0.0)),
        ("scale-negative", |p| scale(p, -0.5)),
        ("scale-of-a-group-nan", |p| {
            wide(p, 64, |m| {
                m.quantize(Q_B, G32);
                m.scales(Q_B).set(7, &f32::NAN.to_le_bytes());
            });
        }),
        ("scale-of-int3-negative", |p| {
            wide(p, 72, |m| {
                m.quantize(Q_B, Quantizer::Int3G64);
                m.scales(Q_B).set(0, &(-1f32).to_le_bytes());
            });
        }),
        ("scale-of-fp8-zero", |p| {
            wide(p, 130, |m| m.set_quantized(Q_B, vec![0x38; 4 * 130], &[1.0, 0.0]));
        }),
    ]
}

/// Codes and raw values.
fn values() -> Vec<(&'static str, Make)> {
    vec![
        ("value-nan", |p| changed(p, |m| m.shards.tensor_mut(NORM).set(3, &f32::NAN.to_le_bytes()))),
        ("value-infinite-in-bf16", |p| {
            let bytes = [[0x80, 0x3f]; 7].concat().into_iter().chain([0x80, 0x7f]).collect();
            changed(p, |m| *m.shards.tensor_mut(NORM) = Tensor::new(Dtype::BF16, &[8], bytes));
        }),
        ("value-nan-in-fp8", |p| {
            let codes = (0..4 * 130).map(|i| if i == 200 { 0x7f } else { 0x38 }).collect();
            wide(p, 130, |m| m.set_quantized(Q_B, codes, &[1.0, 2.0]));
        }),
        ("rows-all-zero", |p| int8(p, |m| m.shards.tensor_mut(HEAD).bytes[8..24].fill(0))),
        ("code-minus-128", |p| int8(p, |m| m.shards.tensor_mut(HEAD).bytes[9] = 0x80)),
        ("code-minus-8", |p| {
            changed(p, |m| {
                m.quantize(HEAD, Quantizer::Int4Row);
                m.shards.tensor_mut(HEAD).bytes[5] = 0x90;
            });
        }),
        ("padding-of-int3-zero", |p| {
            wide(p, 72, |m| {
                m.quantize(Q_B, Quantizer::Int3G64);
                // High bits of the elements behind the last one of the first row.
                m.shards.tensor_mut(Q_B).bytes[24 + 17..48].fill(0);
            });
        }),
        ("padding-of-int3-low-bits", |p| {
            wide(p, 72, |m| {
                m.quantize(Q_B, Quantizer::Int3G64);
                m.shards.tensor_mut(Q_B).bytes[24 + 15] = 0xff;
            });
        }),
        ("padding-of-int4", |p| {
            wide(p, 7, |m| {
                m.quantize(Q_B, Quantizer::Int4Row);
                m.shards.tensor_mut(Q_B).bytes[3] |= 0x80;
            });
        }),
        ("padding-of-int2", |p| {
            wide(p, 7, |m| {
                m.quantize(Q_B, Quantizer::Int2Row);
                m.shards.tensor_mut(Q_B).bytes[1] |= 0xc0;
            });
        }),
        ("flipped-bit-in-codes", |p| flipped(p, HEAD)),
        ("flipped-bit-in-scales", |p| flipped(p, &scales_of(UP))),
        ("flipped-bit-in-a-norm", |p| flipped(p, NORM)),
    ]
}

/// The MTP head.
fn heads() -> Vec<(&'static str, Make)> {
    vec![
        ("head-int4-row", |p| mtp(p, |m| m.quantize(EH, Quantizer::Int4Row))),
        ("head-int2-row", |p| mtp(p, |m| m.quantize("model.layers.1.self_attn.o_proj.weight", Quantizer::Int2Row))),
        ("head-with-a-zeroed-half", |p| {
            mtp(p, |m| {
                m.quantize(EH, INT8);
                for row in m.shards.tensor_mut(EH).bytes.chunks_mut(16) {
                    row[8..].fill(0);
                }
            });
        }),
        ("head-of-int4-with-a-zeroed-half", |p| {
            mtp(p, |m| {
                // What one scale a row does when one half is small.
                let tensor = m.shards.tensor_mut(EH);
                for (i, bytes) in tensor.bytes.chunks_mut(4).enumerate().filter(|(i, _)| i % 16 < 8) {
                    let small = if i % 2 == 0 { 1e-3f32 } else { -2e-3 };
                    bytes.copy_from_slice(&small.to_le_bytes());
                }
                m.quantize(EH, Quantizer::Int4Row);
            });
        }),
    ]
}

/// Too large to be committed.
pub fn large() -> Vec<(&'static str, Make)> {
    vec![
        ("stamps-4097", |p| {
            changed(p, |m| {
                let entries: Vec<String> = (0..4097).map(|i| format!("\"t{i}\":\"f32\"")).collect();
                m.stamp_text("out-00000.safetensors", &format!("{{{}}}", entries.join(",")));
            });
        }),
        ("stamps-4097-in-two-files", |p| {
            changed(p, |m| {
                m.shards.move_to(HEAD, "out-00001.safetensors");
                for (file, numbers) in [("out-00000.safetensors", 0..2000), ("out-00001.safetensors", 2000..4097)] {
                    let entries: Vec<String> = numbers.map(|i| format!("\"t{i}\":\"f32\"")).collect();
                    m.stamp_text(file, &format!("{{{}}}", entries.join(",")));
                }
            });
        }),
    ]
}
