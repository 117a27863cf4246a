//! What is converted is read back: survey without findings, weights equal to what the quantizers make.

mod support;

use std::path::Path;

use coliconv::checkpoint::{Allowed, Checkpoint};
use coliconv::container::reader::{Container, Survey};
use coliconv::convert::{Job, Options, Silent};
use coliconv::format::Format;
use coliconv::recipe::{GroupSize, Settings};
use coliconv::roles::Pass;
use coliconv::weights::Weights;

fn fixture(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn convert(name: &str, options: Options) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let job = Job::prepare(&fixture(name), directory.path(), options).unwrap_or_else(|faults| panic!("{faults}"));
    job.run(&Silent).unwrap_or_else(|faults| panic!("{faults}"));
    directory
}

fn all_passes() -> Options {
    Options { passes: Pass::ALL.to_vec(), ..Options::default() }
}

#[test]
fn a_converted_model_is_surveyed_without_findings() {
    let directory = convert("nano", all_passes());
    let survey = Survey::read(directory.path()).unwrap();
    let findings: Vec<String> = survey.findings.iter().map(|(_, fault)| fault.to_string()).collect();
    assert_eq!(findings, [""; 0]);
    assert_eq!(survey.weights.len(), survey.manifest.as_ref().unwrap().tensors.len());
}

#[test]
fn a_bare_container_with_colliding_sizes_is_only_warned_of() {
    let mut options = all_passes();
    options.bare = true;
    options.allowed.ambiguous = true;
    let directory = convert("tiny", options);
    let survey = Survey::read(directory.path()).unwrap();
    assert!(!survey.has_errors());
    assert!(survey.findings.iter().any(|(_, fault)| fault.kind.name() == "ambiguous"));
}

#[test]
fn weights_are_within_half_a_step_of_the_source() {
    let settings = Settings { group_size: Some(GroupSize::Elements(32)), xbits: Some(3), ..Settings::default() };
    let directory = convert("nano", Options { settings, ..all_passes() });
    let container = Container::open(directory.path()).unwrap_or_else(|faults| panic!("{faults}"));
    let source = Checkpoint::open(&fixture("nano"), &Pass::ALL, Allowed::default()).unwrap();
    let names: Vec<String> = container.survey().weights.keys().map(|name| name.as_str().to_owned()).collect();
    assert_eq!(names.len(), 191);
    for name in names {
        let (ours, theirs) = (container.load(&name).unwrap(), source.load(&name).unwrap());
        assert_eq!((ours.rows, ours.columns), (theirs.rows, theirs.columns), "{name}");
        let (mut a, mut b) = (vec![0.0; ours.columns], vec![0.0; ours.columns]);
        for row in 0..ours.rows {
            ours.dequantize_row(row, &mut a);
            theirs.dequantize_row(row, &mut b);
            let amax = b.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            let levels = match ours.format {
                Format::F32 => f32::INFINITY,
                Format::Int8Row => 127.0,
                Format::Int3G64 => 3.0,
                _ => 7.0,
            };
            let half_step = amax / levels / 2.0 * 1.0001;
            for (x, y) in a.iter().zip(&b) {
                assert!((x - y).abs() <= half_step, "{name} row {row}: {x} against {y}");
            }
        }
    }
}
