//! What fuzzing starts from: bad and good texts of every kind, a file each, named like the cases that they come from.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use coliconv::checkpoint::INDEX_FILE;
use coliconv::config::CONFIG_FILE;
use coliconv::container::manifest::MANIFEST_FILE;
use coliconv::header::Header;
use coliconv::io::SourceFile;
use coliconv::quantize::Quantizer;

use super::publishing::{LISTINGS, PIPELINES, POLICIES};
use super::{Model, write_cases, write_groups, write_manifest};
use serde_json::json;

const FILE: &str = "out-00000.safetensors";
const HEAD: &str = "lm_head.weight";

/// The seeds of a target by name.
type Seeds = BTreeMap<String, Vec<u8>>;

/// Writes the seeds of every target below `root`, a folder each.
pub fn write_seeds(root: &Path) {
    let made = tempfile::tempdir().unwrap();
    write_groups(&super::groups(), made.path());
    write_cases(&super::odd(), &made.path().join("odd"));
    Model::container(json!({"first_k_dense_replace": 0, "num_nextn_predict_layers": 1}))
        .store(&made.path().join("good"));
    write_manifest(&made.path().join("good"));
    let targets = [
        ("header", headers(made.path())),
        ("index", single(made.path(), "index", INDEX_FILE)),
        ("config", configs(made.path())),
        ("listing", texts(&LISTINGS)),
        ("manifest", manifests(made.path())),
        ("pipeline", texts(&PIPELINES)),
        ("policy", texts(&POLICIES)),
        ("progress", texts(&PROGRESSES)),
        ("recipe", texts(&RECIPES)),
        ("requests", texts(&REQUESTS)),
        ("stamps", stamps(made.path())),
        ("survey", surveys()),
        ("task", texts(&TASKS)),
    ];
    for (target, seeds) in targets {
        let folder = root.join(target);
        fs::create_dir_all(&folder).unwrap();
        for (name, bytes) in seeds {
            fs::write(folder.join(name), bytes).unwrap();
        }
    }
}

fn entries(folder: &Path) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let mut entries: Vec<_> = entries.map(|e| (e.file_name().into_string().unwrap(), e.path())).collect();
    entries.sort();
    entries
}

/// The size of the data in two bytes, then the header's text: of every file whose length before the header is right.
fn headers(made: &Path) -> Seeds {
    let mut seeds = Seeds::new();
    for (name, path) in entries(&made.join("header")).into_iter().chain(entries(&made.join("odd"))) {
        let bytes = fs::read(path).unwrap();
        let Some((length, rest)) = bytes.split_first_chunk::<8>() else { continue };
        let length = u64::from_le_bytes(*length) as usize;
        let Some((text, data)) = rest.split_at_checked(length) else { continue };
        let data_bytes = (data.len() as u16).to_le_bytes();
        seeds.insert(name.replace(".safetensors", ""), [&data_bytes[..], text].concat());
    }
    seeds
}

/// One file of each directory of a group.
fn single(made: &Path, group: &str, file: &str) -> Seeds {
    let text = |(name, path): (String, PathBuf)| Some((name, fs::read(path.join(file)).ok()?));
    entries(&made.join(group)).into_iter().filter_map(text).collect()
}

fn configs(made: &Path) -> Seeds {
    let mut seeds: Seeds =
        entries(&made.join("config")).into_iter().map(|(name, path)| (name, fs::read(path).unwrap())).collect();
    seeds.insert("good.json".to_owned(), fs::read(made.join("good").join(CONFIG_FILE)).unwrap());
    seeds.insert("generation.json".to_owned(), b"{\"eos_token_id\": [3, 4], \"top_p\": 0.95}".to_vec());
    seeds
}

/// Of manifests only those of other structure than the good one.
fn manifests(made: &Path) -> Seeds {
    let mut seeds = single(made, "manifest", MANIFEST_FILE);
    let kept =
        ["array", "bytes-float", "cut-off", "key-twice", "nested", "other-version", "tensor-twice", "group-size-zero"];
    seeds.retain(|name, _| kept.contains(&name.as_str()));
    seeds.insert("good".to_owned(), fs::read(made.join("good").join(MANIFEST_FILE)).unwrap());
    seeds
}

fn texts(texts: &[(&str, &str)]) -> Seeds {
    texts.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect()
}

const PROGRESSES: [(&str, &str); 4] = [
    (
        "good",
        r#"{"version": 1, "tool": "coliconv 0.1.0", "bare": false, "passes": {"main": {"group_size": "64", "io bits": "8"}},
 "source": [{"name": "model.safetensors", "bytes": 7, "modified_nanoseconds": 1, "header_sha256": "00"}],
 "files": [{"name": "out-00000.safetensors", "bytes": 9, "sha256": "00"}]}"#,
    ),
    ("empty-lists", r#"{"version": 1, "tool": "", "bare": true, "passes": {}, "source": [], "files": []}"#),
    (
        "pass-twice",
        r#"{"version": 1, "tool": "", "bare": true, "passes": {"a": {}, "a": {}}, "source": [], "files": []}"#,
    ),
    ("other-version", r#"{"version": 2}"#),
];

const REQUESTS: [(&str, &str); 5] = [
    (
        "bad",
        r#"2 1 3 4
0 1 5
1 0 5
9999999999999999999 1 2
18446744073709551615 18446744073709551615
"#,
    ),
    ("empty", "\n\n 1 1 2 3 \n"),
    (
        "good",
        r#"2 1 3 4 5
1 2 7 8 9
"#,
    ),
    (
        "long",
        r#"5 6 1 2 3 4 5 6 7 8 9 10 11
"#,
    ),
    (
        "signs",
        r#"+2 1 3 4 5
-1 2 3
1 1 2 50
1.0 1 2 3
"#,
    ),
];

const TASKS: [(&str, &str); 6] = [
    (
        "arc",
        r#"{"question":"q","choices":{"text":["a","b"],"label":["A","B"]},"answerKey":"B"}
{"question":{"stem":"q","choices":[{"text":"a","label":"1"},{"text":"b","label":"2"}]},"answerKey":"2"}
"#,
    ),
    (
        "hellaswag",
        r#"{"activity_label":"x","ctx_a":"A","ctx_b":"b","endings":["p","q"],"label":"1"}
{"activity_label":"x","ctx_a":"A","ctx_b":"","endings":["p","q"],"label":""}
"#,
    ),
    (
        "mmlu",
        r#"{"question":"q","choices":["a","b"],"answer":"B"}
{"question":"q","choices":["a","b"],"answer":7}
"#,
    ),
    (
        "piqa",
        r#"{"goal":"g","sol1":"a","sol2":"b","label":0}
"#,
    ),
    (
        "plain",
        r#"{"ctx":"a","choices":["b","c"],"gold":1}
{"ctx":"a","choices":["b"],"gold":0}
"#,
    ),
    (
        "winogrande",
        r#"{"sentence":"a _ b","option1":"x","option2":"y","answer":"2"}
{"sentence":"a __ b","option1":"x","option2":"y","answer":"0"}
"#,
    ),
];

const RECIPES: [(&str, &str); 8] = [
    (
        "rules",
        r#"{"group_size": 64, "ebits": 4, "rules": [
 {"tensor": "model.layers.0.*", "format": "int8-row"},
 {"tensor": "*.experts.?.{up,gate}_proj.weight", "format": "int4-grouped", "group_size": 32}]}"#,
    ),
    (
        "every-key",
        r#"{"group_size": "row", "ebits": 4, "xbits": 3, "io_bits": 8, "shared_bits": 7, "o_bits": 6, "kvb_bits": 5,
 "attn_bits": 8, "dmlp_bits": 2, "gate_bits": 3, "up_bits": 3, "down_bits": 4}"#,
    ),
    ("empty", "{}"),
    ("unknown-key", r#"{"bits": 4, "\u001b[31m": 1}"#),
    ("bits", r#"{"ebits": 1, "io_bits": 9, "xbits": -1}"#),
    ("group-size", r#"{"group_size": 100}"#),
    ("malformed-glob", r#"{"rules": [{"tensor": "a[", "format": "f32"}, {"tensor": "{{{", "format": "f32"}]}"#),
    ("unknown-format", r#"{"rules": [{"tensor": "*", "format": "q8_0", "group_size": 0}]}"#),
];

/// The stamps in the headers of a group.
fn stamps(made: &Path) -> Seeds {
    let mut seeds = Seeds::new();
    for (name, path) in entries(&made.join("stamps")) {
        let file = SourceFile::open(&path.join(FILE)).unwrap();
        let Ok(header) = Header::read(&file) else { continue };
        let Some(text) = header.metadata().and_then(|metadata| metadata.get("colibri.fmt")) else { continue };
        seeds.insert(name, text.clone().into_bytes());
    }
    seeds
}

/// Containers of one file, of the model that the target knows.
fn surveys() -> Seeds {
    let mut seeds = Seeds::new();
    let mut add = |name: &str, change: fn(&mut Model)| {
        let mut model = Model::container(json!({"first_k_dense_replace": 0, "num_nextn_predict_layers": 1}));
        let mtp = model.shards.files.remove("out-mtp-00000.safetensors").unwrap();
        for (name, tensor) in mtp.tensors {
            model.shards.add(FILE, &name, tensor);
        }
        change(&mut model);
        seeds.insert(name.to_owned(), model.shards.files[FILE].to_bytes());
    };
    add("f32", |_| ());
    add("quantized", |model| {
        model.quantize(HEAD, Quantizer::Int8Row { bits: 8 });
        model.quantize("model.embed_tokens.weight", Quantizer::Int4Row);
        model.quantize("model.layers.0.mlp.experts.0.up_proj.weight", Quantizer::Int2Row);
        model.quantize("model.layers.0.mlp.experts.0.down_proj.weight", Quantizer::Int3G64);
        model.quantize("model.layers.1.eh_proj.weight", Quantizer::Int8Row { bits: 8 });
        model.set_quantized("model.layers.1.self_attn.o_proj.weight", vec![0x38; 8 * 4], &[1.0]);
    });
    add("stamped", |model| {
        model.quantize(HEAD, Quantizer::Int4Row);
        model.stamp(HEAD, "int4-row");
    });
    add("counts", |model| model.set_counts(HEAD, 19, 5));
    add("scales", |model| {
        model.quantize(HEAD, Quantizer::Int4Row);
        model.scales(HEAD).set(1, &f32::NAN.to_le_bytes());
    });
    seeds
}
