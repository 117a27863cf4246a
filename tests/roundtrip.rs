//! What is written is read back; what was changed since is told with its place; what shrinks while it is read is an error.

mod support;

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use coliconv::checkpoint::{Allowed, Checkpoint};
use coliconv::config::{CONFIG_FILE, Config};
use coliconv::container::layout::{FileLayout, PlannedWeight};
use coliconv::container::reader::Survey;
use coliconv::container::writer::{FileWriter, digest_file};
use coliconv::error::{Fault, FaultKind, Severity};
use coliconv::header::Header;
use coliconv::io::SourceFile;
use coliconv::model::tokenizer::TOKENIZER_FILE;
use coliconv::progress::Silent;
use coliconv::quantize::{Decoder, Quantizer};
use coliconv::report::Finding;
use coliconv::roles::{Census, Pass};
use coliconv::verify::{Level, Options, TokenOptions, verify};
use coliconv::weights::{ContainerRows, ReadBuffer, SourceRows, StoredRows};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use serde_json::json;
use support::bad::{Model, TOKENIZER, write_manifest};

const FILE: &str = "out-00000.safetensors";
const HEAD: &str = "lm_head.weight";

// ---- written and read ------------------------------------------------------------------------------------------------

fn quantizers() -> impl Strategy<Value = Quantizer> {
    prop_oneof![
        Just(Quantizer::F32),
        (5u32..=8).prop_map(|bits| Quantizer::Int8Row { bits }),
        Just(Quantizer::Int4Row),
        prop_oneof![Just(16), Just(32), Just(48), Just(64)]
            .prop_map(|group_size| Quantizer::Int4Grouped { group_size }),
        Just(Quantizer::Int3G64),
        Just(Quantizer::Int2Row),
    ]
}

/// Some finite values that are no sequence.
fn values(seed: u32, count: usize) -> Vec<f32> {
    let mixed = |i: usize| (i as u32).wrapping_add(seed).wrapping_mul(0x9e37_79b9);
    (0..count).map(|i| ((mixed(i) ^ mixed(i) >> 15) as i32) as f32 / 2f32.powi(31)).collect()
}

/// A weight with its codes and its scales, row after row.
struct Written {
    planned: PlannedWeight,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

fn written(planned: PlannedWeight, quantizer: Quantizer, seed: u32) -> Written {
    let (rows, columns) = planned.shape.matrix().unwrap_or((1, planned.shape.elements().unwrap()));
    let (rows, columns) = (rows as usize, columns as usize);
    let mut written = Written { planned, codes: Vec::new(), scales: Vec::new() };
    for row in 0..rows {
        let mut codes = vec![0; quantizer.row_code_bytes(columns)];
        let mut scales = vec![0.0; quantizer.row_scales(columns)];
        quantizer.quantize_row(&values(seed.wrapping_add(row as u32), columns), &mut codes, &mut scales);
        written.codes.extend(codes);
        written.scales.extend(scales);
    }
    written
}

/// Writes a container of one file with its manifest, by the writer of conversions.
fn write(directory: &Path, config: &[u8], weights: &[Written]) {
    fs::create_dir(directory).unwrap();
    fs::write(directory.join(CONFIG_FILE), config).unwrap();
    fs::write(directory.join(TOKENIZER_FILE), TOKENIZER).unwrap();
    let planned: Vec<PlannedWeight> = weights.iter().map(|weight| weight.planned.clone()).collect();
    let layout = FileLayout::new(&planned, None).unwrap();
    let mut data = vec![Vec::new(); layout.tensors.len()];
    for (weight, &(codes, scales)) in weights.iter().zip(&layout.places) {
        data[codes] = weight.codes.clone();
        if let Some(scales) = scales {
            data[scales] = weight.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        }
    }
    let mut writer = FileWriter::create(directory, FILE, &layout, 4096).unwrap();
    // In pieces that end anywhere.
    data.concat().chunks(97).for_each(|piece| writer.append(piece).unwrap());
    let sealed = writer.seal().unwrap();
    let finished = (sealed.record.clone(), sealed.digests.clone());
    sealed.commit().unwrap();
    assert_eq!(digest_file(&directory.join(FILE), FILE, &layout, &|_| ()).unwrap(), finished);
    // The manifest takes the formats from the bytes; those that bytes do not tell are corrected.
    write_manifest(directory);
    let path = directory.join(coliconv::container::manifest::MANIFEST_FILE);
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for weight in weights {
        let record = &mut manifest["tensors"][weight.planned.name.as_str()];
        let format = weight.planned.format;
        record["format"] = json!(format.name());
        record["group_size"] = json!(format.group_size());
    }
    fs::write(path, manifest.to_string()).unwrap();
}

/// The weight as it is read: formats, codes, scales, and values like those of the decoder.
fn check_read(survey: &Survey, weight: &Written) -> Result<(), TestCaseError> {
    let stored = &survey.weights[&weight.planned.name];
    prop_assert_eq!(stored.format, Some(weight.planned.format), "{}", weight.planned.name);
    let rows = ContainerRows::new(survey, stored).unwrap();
    let (mut buffer, columns) = (StoredRows::default(), rows.columns as usize);
    let decoder = Decoder::new(weight.planned.format).unwrap();
    let (codes, scales) = (decoder.row_code_bytes(columns), decoder.row_scales(columns));
    let (mut ours, mut theirs) = (vec![0.0; columns], vec![0.0; columns]);
    // In two parts, as blocks of rows are read.
    let half = rows.rows / 2;
    for (first, count) in [(0, half), (half, rows.rows - half)] {
        rows.read(first, count, &mut buffer).unwrap();
        for row in first..first + count {
            let stored = &weight.codes[row as usize * codes..][..codes];
            prop_assert_eq!(rows.codes(&buffer, first, row), stored);
            decoder.dequantize_row(stored, &weight.scales[row as usize * scales..][..scales], &mut theirs);
            rows.row(&buffer, first, row, &mut ours);
            prop_assert_eq!(&ours, &theirs);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_is_written_is_read(
        (hidden, inner, rank, vocabulary) in (1u64..40, 1u64..30, 1u64..150, 5u64..12), experts in any::<bool>(),
        mtp in any::<bool>(), quantizers in proptest::collection::vec(quantizers(), 1..9), seed: u32,
    ) {
        let changes = json!({
            "hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": inner, "q_lora_rank": rank,
            "vocab_size": vocabulary, "first_k_dense_replace": u64::from(!experts),
            "num_nextn_predict_layers": u64::from(mtp),
        });
        let config = Model::container(changes).config_text();
        let census = Census::of(&Config::parse(Path::new(CONFIG_FILE), &config).unwrap());
        let required = census.iter().filter(|(_, role)| !role.optional && role.pass != Pass::Indexer);
        let weights: Vec<Written> = required
            .enumerate()
            .map(|(i, (name, role))| {
                let quantizer = if role.matrix { quantizers[i % quantizers.len()] } else { Quantizer::F32 };
                let columns = role.shape.matrix().map_or(1, |(_, columns)| columns);
                let format = quantizer.format().canonical(columns);
                let planned = PlannedWeight { name: name.clone(), shape: role.shape.clone(), format };
                written(planned, quantizer, seed.wrapping_add(i as u32))
            })
            .collect();
        let made = tempfile::tempdir().unwrap();
        let directory = made.path().join("container");
        write(&directory, &config, &weights);
        let survey = Survey::read(&directory).unwrap();
        for (severity, fault) in &survey.findings {
            // Any format is written here, also where the engine would take it for another.
            let expected = ["engine-misreads", "head-format", "small-file-missing", "pass-absent"];
            prop_assert!(expected.contains(&fault.kind.name()), "{}: {fault}", severity.name());
        }
        prop_assert_eq!(survey.weights.len(), weights.len());
        for weight in &weights {
            check_read(&survey, weight)?;
        }
        // Values that make no model: an engine that reads others, a head whose codes are all zero.
        let found = errors(&directory).into_iter();
        let found = found.filter(|f| !["engine-misreads", "head-half-zero"].contains(&f.kind.as_str())).map(|f| f.message);
        prop_assert_eq!(found.collect::<Vec<_>>(), Vec::<String>::new());
    }
}

// ---- changed since ---------------------------------------------------------------------------------------------------

/// A container with stamps, quantized tensors, two files, and a manifest.
fn sealed(directory: &Path) {
    let mut model = Model::container(json!({"num_nextn_predict_layers": 1}));
    model.quantize(HEAD, Quantizer::Int8Row { bits: 8 });
    model.quantize("model.layers.0.mlp.up_proj.weight", Quantizer::Int4Row);
    model.quantize("model.layers.1.eh_proj.weight", Quantizer::Int8Row { bits: 8 });
    model.stamp(HEAD, "int8-row");
    model.store(directory);
    write_manifest(directory);
}

/// Everything that is wrong with a container whose manifest is right.
fn errors(directory: &Path) -> Vec<Finding> {
    let options = Options { level: Level::Payload, source: None, threads: 1, tokens: TokenOptions::default() };
    let report = verify(directory, &options, &Silent).unwrap_or_else(|faults| panic!("{faults}"));
    let errors: Vec<Finding> = report.findings.into_iter().filter(|f| f.severity == Severity::Error).collect();
    assert_eq!(report.verdict.name() == "pass", errors.is_empty());
    errors
}

/// The container of [`sealed`], in which one file is changed at a time.
struct Sealed {
    made: tempfile::TempDir,
    files: Vec<(PathBuf, Vec<u8>, Header)>,
}

impl Sealed {
    fn new() -> Sealed {
        let made = tempfile::tempdir().unwrap();
        let directory = made.path().join("container");
        sealed(&directory);
        let file = |name: &str| {
            let path = directory.join(name);
            let header = Header::read(&SourceFile::open(&path).unwrap()).unwrap();
            (path.clone(), fs::read(path).unwrap(), header)
        };
        let files = vec![file(FILE), file("out-mtp-00000.safetensors")];
        assert_eq!(errors(&directory).len(), 0);
        Sealed { made, files }
    }

    /// What is wrong when a file holds these bytes.
    fn errors_with(&self, file: usize, bytes: &[u8]) -> Vec<Finding> {
        let (path, right, _) = &self.files[file];
        fs::write(path, bytes).unwrap();
        let found = errors(&self.made.path().join("container"));
        fs::write(path, right).unwrap();
        found
    }
}

thread_local!(static SEALED: Sealed = Sealed::new());

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_flipped_byte_is_told_with_its_tensor(file in 0usize..2, place: prop::sample::Index, flip in 1u8..=255) {
        SEALED.with(|sealed| {
            let (path, right, header) = &sealed.files[file];
            let at = place.index(right.len());
            let mut bytes = right.clone();
            bytes[at] ^= flip;
            let found = sealed.errors_with(file, &bytes);
            let inside = header.tensors().iter().find(|t| (t.offset..t.offset + t.bytes).contains(&(at as u64)));
            // Scales are told with the weight that they belong to.
            let weight = inside.map(|tensor| tensor.name.as_str().trim_end_matches(".qs"));
            let told = |finding: &Finding| finding.file.as_deref() == path.to_str()
                && weight.is_none_or(|name| finding.tensor.as_deref() == Some(name) && finding.kind == "tensor-checksum");
            prop_assert!(found.iter().any(told), "byte {at} of {}: {found:?}", path.display());
            // No other tensor is blamed for a byte of this one.
            if weight.is_some() {
                let blamed = found.iter().filter_map(|finding| finding.tensor.as_deref());
                prop_assert!(blamed.into_iter().all(|name| Some(name) == weight), "byte {at}: {found:?}");
            }
            Ok(())
        })?;
    }

    #[test]
    fn any_other_size_is_told_with_its_file(file in 0usize..2, place: prop::sample::Index, more in 0usize..20) {
        SEALED.with(|sealed| {
            let (path, right, _) = &sealed.files[file];
            let mut bytes = right.clone();
            match more {
                0..10 => bytes.truncate(place.index(right.len())),
                _ => bytes.extend(std::iter::repeat_n(0, more)),
            }
            let found = sealed.errors_with(file, &bytes);
            prop_assert!(found.iter().any(|finding| finding.file.as_deref() == path.to_str()), "{found:?}");
            Ok(())
        })?;
    }
}

// ---- shrinking -------------------------------------------------------------------------------------------------------

/// Cuts a file to so many bytes, as a download that starts anew does.
fn shrink(path: &Path, bytes: u64) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

fn assert_shrank(fault: &Fault, file: &Path, tensor: Option<&str>) {
    assert!(matches!(*fault.kind, FaultKind::FileShrank { .. }), "{fault}");
    assert_eq!(fault.place.file.as_deref(), Some(file));
    assert_eq!(fault.place.tensor.as_ref().map(|name| name.as_str()), tensor);
    assert!(fault.hint().is_some());
}

#[test]
fn a_container_that_shrinks_while_it_is_read_is_an_error() {
    let made = tempfile::tempdir().unwrap();
    let directory = made.path().join("container");
    sealed(&directory);
    let survey = Survey::read(&directory).unwrap();
    let weight = &survey.weights[HEAD];
    let rows = ContainerRows::new(&survey, weight).unwrap();
    let mut buffer = StoredRows::default();
    rows.read(0, rows.rows, &mut buffer).unwrap();
    let file = directory.join(FILE);
    // The codes come last in the file, the scales before them.
    let scales = weight.scales.as_ref().unwrap().1.offset;
    for (bytes, tensor) in [(weight.codes.offset + 7, HEAD), (scales, HEAD), (0, HEAD)] {
        shrink(&file, bytes);
        assert_shrank(&rows.read(0, rows.rows, &mut buffer).unwrap_err(), &file, Some(tensor));
        assert_shrank(&coliconv::payload::scan(&rows).unwrap_err(), &file, Some(tensor));
    }
}

#[test]
fn a_checkpoint_that_shrinks_while_it_is_read_is_an_error() {
    let made = tempfile::tempdir().unwrap();
    let directory = made.path().join("checkpoint");
    Model::checkpoint(json!({})).store(&directory);
    let checkpoint = Checkpoint::open(&directory, &Pass::ALL, Allowed::default()).unwrap();
    let rows = SourceRows::new(checkpoint.tensor(HEAD).unwrap()).unwrap();
    let mut buffer = ReadBuffer::default();
    rows.read(0, rows.rows, &mut buffer).unwrap();
    let file = checkpoint.tensor(HEAD).unwrap().shard.file.path().to_owned();
    shrink(&file, checkpoint.tensor(HEAD).unwrap().stored.offset + 1);
    assert_shrank(&rows.read(0, rows.rows, &mut buffer).unwrap_err(), &file, Some(HEAD));
}

#[test]
fn a_file_that_shrinks_before_its_header_is_read_is_an_error() {
    let made = tempfile::tempdir().unwrap();
    for bytes in [100, 4] {
        let directory = made.path().join(bytes.to_string());
        sealed(&directory);
        let path = directory.join(FILE);
        let file = SourceFile::open(&path).unwrap();
        shrink(&path, bytes);
        let faults = Header::read(&file).unwrap_err().into_vec();
        let [fault] = &faults[..] else { panic!("{faults:?}") };
        assert_shrank(fault, &path, None);
    }
}
