//! Bare containers have the bytes of upstream's converter: every setting of `fixtures/*/expected/bare*.json`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use coliconv::dequantize::{ScaleDtype, SourceDtype};
use coliconv::header::{self, Header, StoredTensor};
use coliconv::io::SourceFile;
use coliconv::isa::Isa;
use coliconv::tensor::{Dtype, TensorName};
use serde::Deserialize;
use sha2::{Digest, Sha256};

#[derive(Deserialize)]
struct Setting {
    flags: Vec<String>,
    files: BTreeMap<String, ExpectedFile>,
}

#[derive(Deserialize)]
struct ExpectedFile {
    bytes: u64,
    sha256: String,
}

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}

fn sha256(path: &Path) -> String {
    Sha256::digest(fs::read(path).unwrap()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Converts `checkpoint` with every setting of a table and compares every file; one to three threads take turns.
fn check_table(checkpoint: &Path, table: &str, isa: &str) {
    let settings: BTreeMap<String, Setting> = serde_json::from_slice(&fs::read(fixture(table)).unwrap()).unwrap();
    assert!(!settings.is_empty());
    if Isa::named(isa).is_none() {
        return refused(checkpoint, isa, &format!("this CPU has no {isa}"));
    }
    for ((name, setting), threads) in settings.into_iter().zip(["1", "2", "3"].into_iter().cycle()) {
        let out = tempfile::tempdir().unwrap();
        Command::cargo_bin("coliconv")
            .unwrap()
            .args(["convert", "--quiet", "--isa", isa, "--threads", threads])
            .args([checkpoint, out.path()])
            .args(&setting.flags)
            .assert()
            .success();
        let mut written: Vec<String> = fs::read_dir(out.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|file| file.ends_with(".safetensors"))
            .collect();
        written.sort();
        assert_eq!(written, setting.files.keys().cloned().collect::<Vec<_>>(), "{table} {name}");
        for (file, expected) in &setting.files {
            let path = out.path().join(file);
            assert_eq!(fs::metadata(&path).unwrap().len(), expected.bytes, "{table} {name} {file}");
            assert_eq!(sha256(&path), expected.sha256, "{table} {name} {file}");
        }
        for small in ["config.json", "tokenizer.json", "generation_config.json"] {
            assert_eq!(sha256(&out.path().join(small)), sha256(&checkpoint.join(small)), "{table} {name} {small}");
        }
        assert!(!out.path().join("model.safetensors.index.json").exists());
        assert!(!out.path().join("coliconv.manifest.json").exists());
    }
}

/// An instruction set that is not there is refused by name, before anything is written.
fn refused(checkpoint: &Path, isa: &str, message: &str) {
    let out = tempfile::tempdir().unwrap();
    let output = Command::cargo_bin("coliconv")
        .unwrap()
        .args(["convert", "--quiet", "--isa", isa])
        .args([checkpoint, out.path()])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(message), "{said}");
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
}

#[test]
fn nano_with_every_setting_plain() {
    check_table(&fixture("nano"), "nano/expected/bare.json", "plain");
}

#[test]
fn nano_with_every_setting_avx2() {
    check_table(&fixture("nano"), "nano/expected/bare.json", "avx2");
}

#[test]
fn nano_with_every_setting_avx512() {
    check_table(&fixture("nano"), "nano/expected/bare.json", "avx512");
}

#[test]
fn tiny_with_every_setting() {
    for isa in Isa::NAMES {
        check_table(&fixture("tiny"), "tiny/expected/bare.json", isa);
    }
}

#[test]
fn the_bf16_twin_of_tiny() {
    let twin = tempfile::tempdir().unwrap();
    make_bf16(&fixture("tiny"), twin.path());
    for isa in Isa::NAMES {
        check_table(twin.path(), "tiny/expected/bare-bf16.json", isa);
    }
}

#[test]
fn instruction_sets_that_nothing_has() {
    refused(&fixture("nano"), "AVX2", "expected one of: plain, avx2, avx512");
}

/// The checkpoint with every FP8 weight dequantized and rounded to BF16, ties to even, as `fixtures/make_bf16.py` does.
fn make_bf16(source: &Path, target: &Path) {
    let mut shards: Vec<PathBuf> = fs::read_dir(source)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    shards.sort();
    let read = |path: &Path| Header::read(&SourceFile::open(path).unwrap()).unwrap();
    let stored: BTreeMap<TensorName, (PathBuf, StoredTensor)> = shards
        .iter()
        .flat_map(|path| {
            read(path).tensors().iter().map(|t| (t.name.clone(), (path.clone(), t.clone()))).collect::<Vec<_>>()
        })
        .collect();
    let bytes = |name: &str| {
        let (path, tensor) = &stored[name];
        fs::read(path).unwrap()[tensor.offset as usize..][..tensor.bytes as usize].to_vec()
    };
    let mut weight_map = serde_json::Map::new();
    for path in &shards {
        let (mut tensors, mut body) = (Vec::new(), Vec::new());
        for tensor in read(path).tensors().iter().filter(|t| !t.name.as_str().ends_with("_scale_inv")) {
            let name = tensor.name.as_str();
            let (dtype, data) = if tensor.dtype == Dtype::F8_E4M3 {
                let mut scales = Vec::new();
                ScaleDtype::F32.decode(&bytes(&format!("{name}_scale_inv")), &mut scales);
                (Dtype::BF16, bf16_rows(tensor, &bytes(name), &scales))
            } else {
                (tensor.dtype, bytes(name))
            };
            let (offset, length) = (body.len() as u64, data.len() as u64);
            body.extend(data);
            tensors.push(StoredTensor { dtype, offset, bytes: length, ..tensor.clone() });
            weight_map.insert(name.into(), path.file_name().unwrap().to_str().unwrap().into());
        }
        let mut file = header::encode(None, &tensors);
        file.extend(body);
        fs::write(target.join(path.file_name().unwrap()), file).unwrap();
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": weight_map});
    fs::write(target.join("model.safetensors.index.json"), index.to_string()).unwrap();
    for name in ["tokenizer.json", "generation_config.json"] {
        fs::copy(source.join(name), target.join(name)).unwrap();
    }
    let config = fs::read(source.join("config.json")).unwrap();
    let mut config: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&config).unwrap();
    config.remove("quantization_config").unwrap();
    fs::write(target.join("config.json"), serde_json::to_string_pretty(&config).unwrap()).unwrap();
}

fn bf16_rows(tensor: &StoredTensor, data: &[u8], scales: &[f32]) -> Vec<u8> {
    let (rows, columns) = tensor.shape.matrix().unwrap();
    let per_row = columns.div_ceil(128) as usize;
    let mut out = vec![0.0; columns as usize];
    let mut result = Vec::new();
    for row in 0..rows as usize {
        let stored = &data[row * columns as usize..][..columns as usize];
        SourceDtype::Fp8E4m3.dequantize_row(stored, &scales[row / 128 * per_row..][..per_row], &mut out);
        result.extend(out.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()));
    }
    result
}
