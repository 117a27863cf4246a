//! What a conversion writes: the bytes, the stamps, the manifest, the index, and the report about them.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use coliconv::container::manifest::Manifest;
use coliconv::container::stamps;
use coliconv::convert::Options;
use coliconv::format::{ByteCounts, upstream_rule};
use coliconv::header::{Header, StoredTensor};
use coliconv::io::SourceFile;
use coliconv::quantize::{Decoder, Quantizer};
use coliconv::report::ConvertReport;
use coliconv::roles::Pass;
use coliconv::tensor::Dtype;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use support::convert::{G32, Place, contents, groups_of_32, load, small, weights};
use support::shards::{Shards, Tensor};
use support::synthetic::{Kind, Scales, Synthetic, small_config};

const ALL_PASSES: [&str; 4] = ["--group-size", "32", "--mtp", "--indexer"];

/// Every stored tensor of a container with its bytes and its file, by name.
fn stored(container: &Path) -> BTreeMap<String, (StoredTensor, Vec<u8>, String)> {
    let mut tensors = BTreeMap::new();
    for (name, bytes) in weights(&contents(container).unwrap()) {
        let header = Header::read(&SourceFile::open(&container.join(&name)).unwrap()).unwrap();
        for tensor in header.tensors() {
            let data = bytes[tensor.offset as usize..][..tensor.bytes as usize].to_vec();
            tensors.insert(tensor.name.as_str().to_owned(), (tensor.clone(), data, name.to_str().unwrap().to_owned()));
        }
    }
    tensors
}

/// The stamps of a container, and in how many headers they are.
fn stamps_of(container: &Path) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for name in weights(&contents(container).unwrap()).keys() {
        let path = container.join(name);
        let header = Header::read(&SourceFile::open(&path).unwrap()).unwrap();
        for (tensor, format) in stamps::parse(&path, header.metadata()).unwrap() {
            assert!(all.insert(tensor.as_str().to_owned(), format).is_none());
        }
    }
    all
}

#[test]
fn payloads_are_those_of_a_bare_container() {
    for (arguments, name) in [(&["--mtp", "--indexer"][..], "nano"), (&ALL_PASSES, "tiny")] {
        let place = Place::copy(name);
        place.convert(arguments);
        let bare = Place { container: place.root.path().join("bare"), source: place.source.clone(), ..Place::new() };
        bare.convert(&[arguments, &["--bare"]].concat());
        let (ours, theirs) = (stored(&place.container), stored(&bare.container));
        assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
        for (name, (tensor, bytes, file)) in &ours {
            let (bare_tensor, bare_bytes, bare_file) = &theirs[name];
            assert!(bytes == bare_bytes && file == bare_file, "{name}");
            assert_eq!((tensor.dtype, &tensor.shape), (bare_tensor.dtype, &bare_tensor.shape));
        }
        assert!(stamps_of(&bare.container).is_empty());
    }
}

#[test]
fn stamps_are_what_the_engine_resolves() {
    let place = Place::of(&small());
    // At 128 most matrices have one group: they are `int4-row`, as the engine says, too.
    place.convert(&["--group-size", "128", "--mtp", "--indexer", "--ebits", "4", "--o-bits", "8", "--allow-ambiguous"]);
    let manifest = Manifest::read(&place.container).unwrap().unwrap();
    let stored = stored(&place.container);
    let stamps = stamps_of(&place.container);
    let mut expected = BTreeMap::new();
    for (name, record) in &manifest.tensors {
        let (name, (rows, columns)) = (
            name.as_str(),
            match record.shape.matrix() {
                Some(matrix) if record.format != "f32" => matrix,
                _ => continue,
            },
        );
        let bytes = ByteCounts { codes: stored[name].0.bytes, scales: stored[&format!("{name}.qs")].0.bytes };
        assert_eq!((bytes.codes, bytes.scales), (record.bytes, record.scale_bytes), "{name}");
        if !name.contains(".mlp.experts.") {
            expected.insert(name.to_owned(), upstream_rule(rows, columns, bytes, None).unwrap().name().to_owned());
        }
    }
    assert_eq!(stamps, expected);
    assert!(stamps.len() < 4096);
    let names: BTreeSet<&str> = stamps.values().map(String::as_str).collect();
    assert_eq!(names, BTreeSet::from(["int4-grouped", "int4-row", "int8-row"]));
    assert_eq!(stamps["model.layers.0.self_attn.q_a_proj.weight"], "int4-row");
    for (name, record) in &manifest.tensors {
        let one_group = record.format == "int4-row" && record.shape.matrix().is_some_and(|(_, columns)| columns <= 128);
        assert!(record.format != "int4-row" || one_group, "{name}");
    }
}

#[test]
fn manifest_and_index_describe_every_byte() {
    let place = Place::of(&small());
    place.convert(&ALL_PASSES);
    let (files, stored) = (contents(&place.container).unwrap(), stored(&place.container));
    let manifest = Manifest::read(&place.container).unwrap().unwrap();
    let sha256 = |bytes: &[u8]| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let mut recorded = BTreeSet::from(["coliconv.manifest.json"]);
    for file in manifest.files.iter().chain(&manifest.small_files) {
        let bytes = &files[Path::new(&file.name)];
        assert_eq!((file.bytes, &file.sha256), (bytes.len() as u64, &sha256(bytes)), "{}", file.name);
        recorded.insert(&file.name);
    }
    assert_eq!(recorded, files.keys().map(|name| name.to_str().unwrap()).collect());
    let checksum = |bytes: &[u8]| format!("{:016x}", twox_hash::XxHash3_64::oneshot(bytes));
    for (name, record) in &manifest.tensors {
        let (tensor, bytes, file) = &stored[name.as_str()];
        assert_eq!((record.bytes, &record.checksum, &record.file), (tensor.bytes, &checksum(bytes), file), "{name}");
        let scales = stored.get(&format!("{name}.qs"));
        assert_eq!(record.scale_checksum, scales.map(|(_, bytes, _)| checksum(bytes)), "{name}");
    }
    let index: Value = serde_json::from_slice(&files[Path::new("model.safetensors.index.json")]).unwrap();
    let map: BTreeMap<String, String> = serde_json::from_value(index["weight_map"].clone()).unwrap();
    assert_eq!(map, stored.iter().map(|(name, (_, _, file))| (name.clone(), file.clone())).collect());
    assert_eq!(index["metadata"]["total_size"], stored.values().map(|(tensor, ..)| tensor.bytes).sum::<u64>());
    let source: Vec<&str> = manifest.source.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(source, (1..=3).map(|n| format!("model-{n:05}-of-00003.safetensors")).collect::<Vec<_>>());
}

#[test]
fn a_dry_run_predicts_every_byte_and_writes_none() {
    for arguments in [&G32[..], &ALL_PASSES, &["--bare", "--ebits", "3", "--allow-ambiguous", "--mtp"]] {
        let place = Place::of(&small());
        let dry = place.json(&[arguments, &["--dry-run"]].concat());
        assert!(!place.container.exists());
        let wet = place.json(arguments);
        for key in ["tensors", "source_bytes", "output_bytes", "classes", "warnings", "container"] {
            assert_eq!(dry[key], wet[key], "{key}");
        }
        assert!(dry["fits"].as_bool().unwrap() && dry["free_bytes"].as_u64().unwrap() > 0);
        let files = |report: &Value| -> Vec<(String, u64)> {
            let files = report["files"].as_array().unwrap();
            files.iter().map(|f| (f["name"].as_str().unwrap().to_owned(), f["bytes"].as_u64().unwrap())).collect()
        };
        assert_eq!(files(&dry), files(&wet));
        let written = weights(&contents(&place.container).unwrap());
        let sizes: Vec<(String, u64)> =
            written.iter().map(|(name, bytes)| (name.to_str().unwrap().to_owned(), bytes.len() as u64)).collect();
        assert_eq!(files(&wet), sizes);
        assert_eq!(wet["output_bytes"], sizes.iter().map(|(_, bytes)| bytes).sum::<u64>());
        let payload: u64 = stored(&place.container).values().map(|(tensor, ..)| tensor.bytes).sum();
        let classes = wet["classes"].as_array().unwrap();
        assert_eq!(payload, classes.iter().map(|class| class["output_bytes"].as_u64().unwrap()).sum::<u64>());
    }
}

#[test]
fn output_depends_on_neither_threads_nor_memory() {
    let shards = small();
    let place = Place::of(&shards);
    let run = |name: &str, threads: usize, memory: Option<u64>| -> (ConvertReport, _) {
        let place = Place { container: place.root.path().join(name), source: place.source.clone(), ..Place::new() };
        let passes = Pass::ALL.to_vec();
        let report = place.run(Options { threads, memory, stats: true, passes, ..groups_of_32() }).unwrap();
        (report, contents(&place.container).unwrap())
    };
    let (report, one) = run("1", 1, None);
    for (name, threads, memory) in [("2", 2, None), ("5", 5, Some(100_000)), ("tiny", 3, Some(1)), ("none", 1, Some(0))]
    {
        let (other, files) = run(name, threads, memory);
        assert!(files == one, "{name}");
        assert_eq!(other.classes, report.classes, "{name}");
    }
    for class in &report.classes {
        let range = match (class.class.as_str(), class.format.as_str()) {
            (_, "f32") => {
                assert_eq!(class.sqnr_db, None, "{class:?}");
                continue;
            }
            (_, "int8-row") => 35.0..50.0,
            (_, "int4-grouped") => 14.0..25.0,
            other => panic!("{other:?}"),
        };
        assert!(range.contains(&class.sqnr_db.unwrap()), "{class:?}");
    }
}

/// A model whose `q_a_proj` is [130, 200], in blocks of 128 a grid of [2, 2].
fn with_partial_blocks(kind: Kind) -> Shards {
    let mut config = small_config();
    config["q_lora_rank"] = json!(130);
    config["hidden_size"] = json!(200);
    load(&Synthetic::new(config).kind(kind).shards(2))
}

const Q_A: &str = "model.layers.0.self_attn.q_a_proj.weight";

/// The values of a matrix of a container, by what the manifest says of it.
fn values(container: &Path, name: &str) -> Vec<f32> {
    let manifest = Manifest::read(container).unwrap().unwrap();
    let record = &manifest.tensors[name];
    let (rows, columns) = record.shape.matrix().unwrap();
    let stored = stored(container);
    let format = coliconv::format::Format::parse(&record.format, record.group_size).unwrap();
    let decoder = Decoder::new(format).unwrap();
    let codes = &stored[name].1;
    let scales: Vec<f32> = stored
        .get(&format!("{name}.qs"))
        .map_or(Vec::new(), |(_, bytes, _)| bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect());
    let (code_bytes, row_scales) = (decoder.row_code_bytes(columns as usize), decoder.row_scales(columns as usize));
    let mut out = vec![0.0; (rows * columns) as usize];
    for (row, out) in out.chunks_mut(columns as usize).enumerate() {
        decoder.dequantize_row(
            &codes[row * code_bytes..][..code_bytes],
            &scales[row * row_scales..][..row_scales],
            out,
        );
    }
    out
}

#[test]
fn every_element_is_multiplied_by_the_scale_of_its_block() {
    let grids = [
        (Scales::F32, Tensor::f32(&[2, 2], &[1.0, 2.0, 4.0, 8.0]), [1.0, 2.0, 4.0, 8.0]),
        (
            Scales::Bf16,
            Tensor::new(Dtype::BF16, &[2, 2], vec![0x80, 0x3f, 0, 0x40, 0x80, 0x40, 0, 0x41]),
            [1.0, 2.0, 4.0, 8.0],
        ),
        // 2^-7, 2^-127, 2^0, 2^1
        (
            Scales::Ue8m0,
            Tensor::new(Dtype::F8_E8M0, &[2, 2], vec![0x78, 0x00, 0x7f, 0x80]),
            [0.0078125, 5.877_472e-39, 1.0, 2.0],
        ),
    ];
    for (kind, grid, scales) in grids {
        let mut shards = with_partial_blocks(Kind::Fp8(kind));
        *shards.tensor_mut(Q_A) = Tensor::new(Dtype::F8_E4M3, &[130, 200], vec![0x38; 130 * 200]);
        shards.tensor_mut(Q_A).set(199, &[0xbc]);
        *shards.tensor_mut(&format!("{Q_A}_scale_inv")) = grid;
        // The scales may lie elsewhere.
        shards.move_to(&format!("{Q_A}_scale_inv"), "model-00002-of-00002.safetensors");
        let place = Place::of(&shards);
        let recipe = place.root.path().join("recipe.json");
        fs::write(&recipe, json!({"rules": [{"tensor": Q_A, "format": "f32"}]}).to_string()).unwrap();
        place.convert(&["--group-size", "32", "--recipe", recipe.to_str().unwrap()]);
        for (i, &value) in values(&place.container, Q_A).iter().enumerate() {
            let (row, column) = (i / 200, i % 200);
            let element = if i == 199 { -1.5 } else { 1.0 };
            assert_eq!(value, element * scales[row / 128 * 2 + column / 128], "{kind:?}: row {row}, column {column}");
        }
    }
}

#[test]
fn what_is_not_finite_counts_as_zero_if_that_is_allowed() {
    let mut shards = with_partial_blocks(Kind::Fp8(Scales::F32));
    let (k, c) = ("model.layers.1.self_attn.q_a_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias");
    *shards.tensor_mut(&format!("{Q_A}_scale_inv")) = Tensor::f32(&[2, 2], &[1.0, 1.0, 1.0, f32::NAN]);
    shards.tensor_mut(k).set(3 * 200 + 4, &[0x7f]);
    shards.tensor_mut(k).set(129 * 200 + 4, &[0xff]);
    shards.tensor_mut(c).set(1, &f32::NEG_INFINITY.to_le_bytes());
    let place = Place::of(&shards);
    let report = place.json(&["--group-size", "32", "--allow-non-finite"]);
    let told: BTreeMap<&str, &str> = report["warnings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|warning| (warning["tensor"].as_str().unwrap(), warning["message"].as_str().unwrap()))
        .collect();
    let scale = format!("{Q_A}_scale_inv");
    let expected = [
        (Q_A, "144 elements are not finite and count as 0; the first is row 128, column 128: NaN"),
        (&scale, "1 elements are not finite and count as 0; the first is row 1, column 1: NaN"),
        (c, "1 elements are not finite and count as 0; the first is row 0, column 1: -inf"),
        (k, "2 elements are not finite and count as 0; the first is row 3, column 4: NaN"),
    ];
    assert_eq!(told, BTreeMap::from(expected));
    assert!(values(&place.container, Q_A).iter().enumerate().all(|(i, v)| i / 200 < 128 || i % 200 < 128 || *v == 0.0));
    assert_eq!(values(&place.container, k)[604], 0.0);
    let bias = stored(&place.container)[c].1.clone();
    assert_eq!(bias[4..8], [0; 4]);
}

#[test]
fn zeros_and_subnormals_stay_finite() {
    let mut shards = small();
    let zeros = "model.layers.0.mlp.up_proj.weight";
    shards.tensor_mut(zeros).bytes.fill(0x80);
    *shards.tensor_mut("lm_head.weight") = Tensor::new(Dtype::F16, &[301, 96], [0x01, 0x80].repeat(301 * 96));
    let place = Place::of(&shards);
    place.convert(&["--group-size", "32", "--io-bits", "4"]);
    let stored = stored(&place.container);
    let scales = |name: &str| {
        stored[&format!("{name}.qs")].1.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>()
    };
    assert!(stored[zeros].1.iter().all(|&byte| byte == 0x88));
    assert!(scales(zeros).iter().all(|&scale| scale == 1e-8));
    // The smallest F16, −2^−24, is −6 times 1e-8.
    assert!(stored["lm_head.weight"].1.iter().all(|&byte| byte == 0x22));
    assert!(scales("lm_head.weight").iter().all(|&scale| scale == 1e-8));
}

#[test]
fn every_kind_of_source_is_quantized_as_the_formula_says() {
    for kind in [Kind::Bf16, Kind::F16, Kind::F32] {
        let shards = with_partial_blocks(kind);
        let place = Place::of(&shards);
        place.convert(&G32);
        let bytes = &shards.tensor(Q_A).bytes;
        let row: Vec<f32> = match kind {
            Kind::Bf16 => bytes.as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect(),
            Kind::F16 => bytes.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
            _ => shards.tensor(Q_A).to_f32(),
        };
        let quantizer = Quantizer::Int4Grouped { group_size: 32 };
        let (mut codes, mut scales) = (vec![0; 100], vec![0.0; 7]);
        let stored = stored(&place.container);
        for (r, row) in row.chunks(200).enumerate() {
            quantizer.quantize_row(row, &mut codes, &mut scales);
            assert_eq!(stored[Q_A].1[r * 100..][..100], codes, "{kind:?} row {r}");
            let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            assert_eq!(stored[&format!("{Q_A}.qs")].1[r * 28..][..28], bytes, "{kind:?} row {r}");
        }
    }
}
