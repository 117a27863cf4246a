//! What fuzzing runs: each function reads arbitrary bytes as one kind of file and checks what must hold of any result.
//!
//! The fuzz targets in `fuzz/` and the test that replays their corpora share this file.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;

use coliconv::checkpoint::Index;
use coliconv::config::{CONFIG_FILE, Config, generation_stop_ids};
use coliconv::container::manifest::Manifest;
use coliconv::container::progress::Progress;
use coliconv::container::reader::Survey;
use coliconv::container::stamps;
use coliconv::error::{Fault, Faults, Place, Severity, is_unprintable};
use coliconv::header::{self, Header, StoredTensor};
use coliconv::payload::{check_head, findings, scan};
use coliconv::pipeline;
use coliconv::publish::bytes::Hashed;
use coliconv::publish::listing::Listing;
use coliconv::publish::policy::Policy;
use coliconv::recipe::{Recipe, Settings};
use coliconv::report::Finding;
use coliconv::roles::Census;
use coliconv::score::encode::{Bounds, request};
use coliconv::score::import::Template;
use coliconv::weights::ContainerRows;

/// A kind of file: its name and what reads it.
pub type Target = (&'static str, fn(&[u8]));

/// Every kind of file.
pub const TARGETS: [Target; 13] = [
    ("header", header),
    ("index", index),
    ("config", config),
    ("listing", listing),
    ("manifest", manifest),
    ("pipeline", pipeline),
    ("policy", policy),
    ("progress", progress),
    ("recipe", recipe),
    ("requests", requests),
    ("stamps", stamps),
    ("survey", survey),
    ("task", task),
];

/// A fault can be shown: on one line, without control characters, not too long.
fn shown(fault: &Fault) {
    let finding = Finding::new(Severity::Error, fault);
    for text in [fault.to_string(), finding.line()].into_iter().chain(finding.hint) {
        assert!(!text.chars().any(is_unprintable), "not escaped: {text:?}");
        assert!(text.len() < 50_000, "{} bytes of message", text.len());
    }
}

fn all_shown<T>(result: Result<T, Faults>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(faults) => {
            assert!(faults.iter().next().is_some(), "refused without a fault");
            faults.iter().for_each(shown);
            assert!(!faults.to_string().is_empty());
            None
        }
    }
}

fn one_shown<T>(result: Result<T, Fault>) -> Option<T> {
    all_shown(result.map_err(Faults::from))
}

/// Two bytes that give the size of the data, then the text of a header.
pub fn header(input: &[u8]) {
    let path = Path::new("model.safetensors");
    let Some((data_bytes, text)) = input.split_first_chunk::<2>() else { return };
    let data_bytes = u64::from(u16::from_le_bytes(*data_bytes));
    let start = 8 + text.len() as u64;
    let Some(header) = all_shown(Header::parse(path, text, start + data_bytes)) else { return };
    header.misaligned(path).iter().chain(&header.odd_names(path)).for_each(shown);
    let mut names = HashSet::new();
    let mut end = start;
    for tensor in header.tensors() {
        assert!(names.insert(tensor.name.clone()), "{} twice", tensor.name);
        assert_eq!(tensor.shape.bytes(tensor.dtype), Some(tensor.bytes));
        assert!(tensor.offset + tensor.bytes <= start + data_bytes);
        if tensor.bytes > 0 {
            assert_eq!(tensor.offset, end, "{} leaves a gap or overlaps", tensor.name);
            end += tensor.bytes;
        }
    }
    assert_eq!(end, start + data_bytes, "bytes without a tensor");
    rewritten(&header, data_bytes);
    agreed(&header, text, data_bytes);
}

/// Lines of a request file, for a vocabulary of 50 and texts of at most 9 tokens.
pub fn requests(input: &[u8]) {
    let bounds = Bounds { vocab_size: 50, max_tokens: Some(9) };
    for (line, row) in String::from_utf8_lossy(input).lines().zip(1..) {
        let digits = |line: &str| line.bytes().all(|byte| byte.is_ascii_digit() || byte.is_ascii_whitespace());
        match request(line, &bounds) {
            Ok(encoded) => {
                assert!((1..encoded.ids.len()).contains(&encoded.start) && encoded.ids.len() <= 9);
                assert!(encoded.ids.iter().all(|&id| id < 50) && digits(line));
                let ids: Vec<String> = encoded.ids.iter().map(u32::to_string).collect();
                let again = format!("{} {} {}", encoded.start, encoded.tokens(), ids.join(" "));
                assert!(request(&again, &bounds).is_ok_and(|again| again == encoded));
            }
            Err(reason) => shown(&Fault::new(Place::file("requests.txt"), reason(row))),
        }
    }
}

/// Rows of a task, one JSON object a line.
pub fn task(input: &[u8]) {
    for line in String::from_utf8_lossy(input).lines() {
        let Ok(row) = serde_json::from_str(line) else { continue };
        let Some(Ok(question)) = Template::of(&row).map(|template| template.question(&row)) else { continue };
        assert!(question.gold < question.pairs.len() && question.pairs.len() >= 2);
    }
}

/// What was read is written and read again.
fn rewritten(header: &Header, data_bytes: u64) {
    let mut end = 0;
    let placed = |tensor: &StoredTensor| {
        let offset = end;
        end += tensor.bytes;
        StoredTensor { offset, ..tensor.clone() }
    };
    let tensors: Vec<StoredTensor> = header.tensors().iter().map(placed).collect();
    let bytes = header::encode(header.metadata(), &tensors);
    let again = Header::parse(Path::new("again"), &bytes[8..], bytes.len() as u64 + data_bytes).unwrap();
    assert_eq!(again.metadata(), header.metadata());
    let known = |header: &Header| -> BTreeMap<_, _> {
        header.tensors().iter().map(|t| (t.name.clone(), (t.dtype, t.shape.clone(), t.bytes))).collect()
    };
    assert_eq!(known(&again), known(header));
}

/// What this reader accepts, the safetensors crate accepts, too. Where empty tensors lie, it is stricter.
fn agreed(header: &Header, text: &[u8], data_bytes: u64) {
    if header.tensors().iter().any(|tensor| tensor.bytes == 0) {
        return;
    }
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text);
    file.resize(file.len() + data_bytes as usize, 0);
    let theirs = safetensors::SafeTensors::deserialize(&file).unwrap_or_else(|e| panic!("only accepted here: {e}"));
    assert_eq!(theirs.len(), header.tensors().len());
}

/// The text of an index.
pub fn index(input: &[u8]) {
    let Some(index) = all_shown(Index::parse(Path::new("index.json"), input)) else { return };
    for (_, file) in index.entries() {
        assert!(index.names_file(file));
        let parent = Path::new("directory");
        assert_eq!(parent.join(file).parent(), Some(parent), "{file:?} leaves the directory");
    }
    index.warnings().iter().for_each(shown);
}

/// The text of a config.json and of a generation_config.json.
pub fn config(input: &[u8]) {
    all_shown(generation_stop_ids(Path::new("generation_config.json"), input));
    let path = Path::new(CONFIG_FILE);
    let Some(config) = all_shown(Config::parse(path, input)) else { return };
    config.silent_faults(path).iter().chain(&config.engine_limits(path)).for_each(shown);
    // The census of the largest models takes a while.
    if (config.num_hidden_layers + 1) * config.n_routed_experts > 500 {
        return;
    }
    let census = Census::of(&config);
    for (name, role) in census.iter() {
        assert_eq!(census.role(name.as_str()), Some(role));
        assert!(role.shape.elements().is_some_and(|elements| elements > 0), "{name} {}", role.shape);
    }
    assert!(census.absent(&|_| true).faults.is_empty());
    census.absent(&|_| false).faults.iter().for_each(shown);
}

/// The text of a manifest.
pub fn manifest(input: &[u8]) {
    let path = Path::new("coliconv.manifest.json");
    if let Some(manifest) = one_shown(Manifest::parse(path, input)) {
        assert_eq!(Manifest::parse(path, &manifest.to_bytes()).unwrap(), manifest);
    }
}

/// The text of a policy.
pub fn policy(input: &[u8]) {
    let path = Path::new("policy.json");
    if let Some(policy) = one_shown(Policy::parse(path, input)) {
        assert_eq!(Policy::parse(path, &serde_json::to_vec(&policy).unwrap()).unwrap(), policy);
    }
}

/// The text of a pipeline.
pub fn pipeline(input: &[u8]) {
    let path = Path::new("pipeline.json");
    if let Some(settings) = one_shown(pipeline::Settings::parse(path, input)) {
        let text = serde_json::to_vec(&settings).unwrap();
        assert_eq!(pipeline::Settings::parse(path, &text).unwrap(), settings);
    }
}

/// The text of a listing, of a container of two files.
pub fn listing(input: &[u8]) {
    const NAMES: [&str; 2] = ["config.json", "out-00000.safetensors"];
    const TEXT: &[u8] = b"hello\n";
    thread_local!(static CONTAINER: OnceCell<tempfile::TempDir> = const { OnceCell::new() });
    let Some(listing) = one_shown(Listing::parse(Path::new("listing.json"), input)) else { return };
    CONTAINER.with(|container| {
        let container = container.get_or_init(|| {
            let container = tempfile::tempdir().unwrap();
            NAMES.iter().for_each(|name| fs::write(container.path().join(name), TEXT).unwrap());
            container
        });
        let records = NAMES.map(|name| Hashed::of(name, TEXT).record);
        let (report, faults) = listing.compare(container.path(), &records);
        faults.iter().for_each(shown);
        let bad = [&report.short, &report.wrong, &report.missing].map(|names| names.len() as u64);
        assert_eq!(report.matched + bad.iter().sum::<u64>(), report.expected, "every file is counted once");
        assert_eq!(faults.is_empty(), bad == [0; 3] && report.extra.is_empty(), "what is wrong is said");
        assert!(!report.extra.iter().any(|name| NAMES.contains(&name.as_str())));
    });
}

/// The text of a progress file.
pub fn progress(input: &[u8]) {
    let path = Path::new(".coliconv-progress.json");
    if let Some(progress) = one_shown(Progress::parse(path, input)) {
        let text = serde_json::to_vec(&progress).unwrap();
        assert_eq!(Progress::parse(path, &text).unwrap(), progress);
    }
}

/// A sparse layer and an MTP layer of two experts: the model of the bad containers.
const SMALL_CONFIG: &str = r#"{
    "model_type": "glm_moe_dsa", "hidden_size": 8, "num_hidden_layers": 1, "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 0, "intermediate_size": 6, "moe_intermediate_size": 4, "n_routed_experts": 2,
    "n_shared_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
    "num_attention_heads": 1, "q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2,
    "v_head_dim": 4, "index_n_heads": 1, "index_head_dim": 2, "index_topk": 4, "indexer_types": ["full"],
    "vocab_size": 5, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "eos_token_id": 4
}"#;

fn small_config() -> Config {
    Config::parse(Path::new(CONFIG_FILE), SMALL_CONFIG.as_bytes()).unwrap()
}

/// The text of a recipe.
pub fn recipe(input: &[u8]) {
    thread_local!(static CENSUS: OnceCell<Census> = const { OnceCell::new() });
    let Some(settings) = one_shown(Settings::parse(Path::new("recipe.json"), input)) else { return };
    let text = serde_json::to_vec(&settings).unwrap();
    assert_eq!(Settings::parse(Path::new("again"), &text).unwrap(), settings);
    let Some(recipe) = all_shown(Recipe::new(&settings)) else { return };
    CENSUS.with(|census| {
        for (name, role) in census.get_or_init(|| Census::of(&small_config())).iter() {
            if let Ok((quantizer, rule)) = recipe.quantizer(name, role) {
                assert!(rule.is_none_or(|rule| rule < recipe.rules().count()));
                let (rows, columns) = role.shape.matrix().unwrap_or((1, 1));
                assert!(quantizer.format().bytes(rows, columns).is_some());
            }
        }
    });
}

/// The text of the stamps in a header.
pub fn stamps(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let metadata = BTreeMap::from([(stamps::STAMP_KEY.to_owned(), text.to_owned())]);
    one_shown(stamps::parse(Path::new("out-00000.safetensors"), Some(&metadata)));
}

/// A file of a container; the config is that of a small model. Everything in it is read.
pub fn survey(input: &[u8]) {
    thread_local!(static DIRECTORY: OnceCell<tempfile::TempDir> = const { OnceCell::new() });
    DIRECTORY.with(|directory| {
        let directory = directory.get_or_init(|| {
            let directory = tempfile::tempdir().unwrap();
            fs::write(directory.path().join(CONFIG_FILE), SMALL_CONFIG).unwrap();
            directory
        });
        fs::write(directory.path().join("out-00000.safetensors"), input).unwrap();
        let survey = Survey::read(directory.path()).unwrap();
        survey.findings.iter().chain(&check_head(&survey)).for_each(|(_, fault)| shown(fault));
        for (name, weight) in &survey.weights {
            let Some(format) = weight.format else { continue };
            let place = coliconv::error::Place::name(name.clone());
            let Some(rows) = one_shown(ContainerRows::new(&survey, weight)) else { continue };
            let scan = one_shown(scan(&rows)).expect("the file does not change");
            findings(&scan, format, &place).iter().for_each(|(_, fault)| shown(fault));
        }
    });
}
