//! The comparison with a baseline.

use std::fs;
use std::path::Path;

use coliconv::convert;
use coliconv::part::Part;
use coliconv::recipe::GroupSize;
use coliconv::report::{ScoreBaseline, ScoreReport, Verdict};
use coliconv::roles::Pass;
use coliconv::score::Options;
use coliconv::score::encode::PrefixChoice;
use coliconv::score::input::Kind;
use tempfile::TempDir;

use super::support::containers::{container, fixture, run, run_json};
use super::{expected, g64, given, head, of, refusal, scored, timeless, written};

fn some(directory: &Path) -> Options {
    of(vec![
        given(Kind::Task, "gloss", head(directory, "gloss.jsonl", 12)),
        given(Kind::Text, "heldout", head(directory, "heldout.txt", 6)),
    ])
}

fn against(report: &ScoreReport) -> &ScoreBaseline {
    report.baseline.as_ref().unwrap()
}

/// int2 experts: a broken model.
fn broken() -> TempDir {
    container("nano", "x2", || {
        let mut options = convert::Options { passes: vec![Pass::Main], ..Default::default() };
        options.settings.group_size = Some(GroupSize::ROW);
        options.settings.xbits = Some(2);
        options
    })
}

#[test]
fn results_and_models_as_baselines() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let (source, out) = (directory.path().join("source"), directory.path().join("out"));
    let options = some(directory.path());
    let alone = scored(&fixture("nano"), &Options { out: Some(source.clone()), ..options.clone() });
    let with = |baseline: &Path| Options { baseline: Some(baseline.to_owned()), ..options.clone() };
    let live = scored(model.path(), &with(&fixture("nano")));
    let stored = scored(model.path(), &Options { out: Some(out.clone()), ..with(&source) });
    assert_eq!((against(&live).kind.as_str(), against(&stored).kind.as_str()), ("checkpoint", "results"));
    assert_eq!((against(&live).kl_method.as_str(), against(&stored).kl_method.as_str()), ("exact", "top-16"));
    assert_eq!(against(&live).model_sha256, alone.model_sha256);
    // The same but for the divergence, of which a part is lost with the tail.
    assert_eq!(against(&live).tasks, against(&stored).tasks);
    assert_eq!(against(&live).texts, against(&stored).texts);
    assert_eq!(against(&live).top1_agreement, against(&stored).top1_agreement);
    assert_eq!(against(&live).positions, against(&stored).positions);
    let (exact, least) = (against(&live).kl_mean.unwrap(), against(&stored).kl_mean.unwrap());
    assert!(least < exact && least > 0.5 * exact, "{least} {exact}");
    let (text, task) = (&against(&live).texts[0], &against(&live).tasks[0]);
    assert_eq!((text.baseline, text.model), (alone.texts[0].ppl, live.texts[0].ppl));
    assert_eq!((task.acc.baseline, task.acc.model), (alone.tasks[0].acc, live.tasks[0].acc));
    for (metric, paired) in [("acc", &task.acc), ("acc_norm", &task.acc_norm)] {
        let flipped = task.flipped.iter().filter(|flipped| flipped.metric == metric).count() as u64;
        assert_eq!(paired.gained + paired.lost, flipped);
    }
    let tokens: u64 = live.requests.iter().filter_map(|request| request.tokens).sum();
    assert_eq!(against(&live).positions, tokens);
    assert_eq!(against(&live).kl_by_position.iter().map(|bin| bin.count).sum::<u64>(), tokens);
    // Scored alone first, then compared: the rows are looked at again; and the other way round they are not.
    fs::remove_dir_all(&out).unwrap();
    let plain = Options { out: Some(out.clone()), ..options.clone() };
    scored(model.path(), &plain);
    let later = scored(model.path(), &Options { out: Some(out.clone()), ..with(&source) });
    assert!(later.tokens > 0);
    assert_eq!(against(&later), against(&stored));
    let again = scored(model.path(), &Options { out: Some(out.clone()), ..with(&source) });
    assert_eq!((again.tokens, timeless(&again)), (0, timeless(&later)));
    assert_eq!(scored(model.path(), &plain).tokens, 0);
    // Asked for without a baseline, the reports say nothing of one.
    let table = fs::read_to_string(out.join("requests.csv")).unwrap();
    assert!(table.lines().skip(1).all(|line| line.split(',').nth(9) == Some("")), "{table}");
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(
        !page.contains("class=\"baseline\"") && !page.contains("Against the baseline") && !page.contains(">baseline<")
    );
    // An interrupted comparison goes on.
    let bytes = fs::read(out.join("results.jsonl")).unwrap();
    fs::write(out.join("results.jsonl"), &bytes[..bytes.len() / 2]).unwrap();
    assert_eq!(timeless(&scored(model.path(), &Options { out: Some(out.clone()), ..with(&source) })), timeless(&later));
    assert!(fs::read(out.join("results.jsonl")).unwrap() == bytes);
}

#[test]
fn a_model_is_no_different_from_itself() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let out = directory.path().join("out");
    let options = some(directory.path());
    scored(model.path(), &Options { out: Some(out.clone()), ..options.clone() });
    for baseline in [model.path(), &out] {
        let with = Options { baseline: Some(baseline.to_owned()), threshold: Some(0.0), ..options.clone() };
        let report = scored(model.path(), &with);
        let same = against(&report);
        assert_eq!(report.warnings.last().map(|warning| warning.kind.as_str()), Some("baseline-same-model"));
        assert!(same.kl_max.unwrap() < 1e-6, "{same:?}");
        assert_eq!((same.top1_agreement, same.texts[0].ratio), (Some(1.0), 1.0));
        assert!(same.tasks[0].flipped.is_empty() && same.tasks[0].acc.difference == 0.0);
        assert_eq!(report.verdict, Some(Verdict::Pass));
        assert!(same.compared.iter().all(|compared| compared.is_whole()) && same.checks.len() == 3);
        // No interval is narrower than nothing: nobody should take 12 questions for proof.
        assert!(same.checks.iter().filter(|check| check.metric == "acc").all(|check| !check.conclusive));
    }
}

#[test]
fn the_verdict_is_no_for_a_broken_model() {
    let (directory, model) = (TempDir::new().unwrap(), broken());
    let source = directory.path().join("source");
    let options = some(directory.path());
    scored(&fixture("nano"), &Options { out: Some(source.clone()), ..options.clone() });
    let with = |threshold| Options { baseline: Some(source.clone()), threshold: Some(threshold), ..options.clone() };
    let report = scored(model.path(), &with(0.1));
    assert_eq!(report.verdict, Some(Verdict::Fail));
    let ppl = against(&report).checks.iter().find(|check| check.metric == "ppl").unwrap();
    assert!(!ppl.met && ppl.conclusive && ppl.worse_by > Some(10.0), "{ppl:?}");
    // The better one of two passes in any case.
    let backwards = Options { baseline: Some(model.path().to_owned()), threshold: Some(0.0), ..options.clone() };
    let better = scored(&fixture("nano"), &backwards);
    let ppl = against(&better).checks.iter().find(|check| check.metric == "ppl").unwrap();
    assert!(ppl.met && ppl.worse_by < Some(0.0));
    let heldout = format!("heldout={}", options.inputs[1].path.display());
    let gloss = format!("gloss={}", options.inputs[0].path.display());
    let source = source.to_str().unwrap();
    let arguments = ["score", "--task", &gloss, "--text", &heldout, "--baseline", source];
    let (code, document) = run_json(&[&arguments[..], &["--threshold", "0.1"]].concat(), &[model.path()]);
    assert_eq!((code, document["verdict"].as_str()), (1, Some("fail")));
    let (code, document) = run_json(&arguments, &[model.path()]);
    assert_eq!((code, document["verdict"].as_str()), (0, None));
}

#[test]
fn baselines_of_anything_else() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let source = directory.path().join("source");
    let options = some(directory.path());
    scored(&fixture("nano"), &Options { out: Some(source.clone()), ..options.clone() });
    let with = |options: Options| Options { baseline: Some(source.clone()), ..options };
    assert_eq!(
        refusal(model.path(), &with(Options { prefix: PrefixChoice::None, ..options.clone() })),
        ["baseline-other"]
    );
    let other = of(vec![given(Kind::Task, "gloss", expected("gloss.jsonl")), options.inputs[1].clone()]);
    assert_eq!(refusal(model.path(), &with(other)), ["baseline-other"]);
    assert_eq!(refusal(model.path(), &with(of(vec![options.inputs[0].clone()]))), ["baseline-other"]);
    // Another tokenizer, and no model at all.
    let tiny = Options { baseline: Some(fixture("tiny")), ..options.clone() };
    assert_eq!(refusal(model.path(), &tiny), ["baseline-tokenizer"]);
    let nothing = Options { baseline: Some(directory.path().to_owned()), ..options.clone() };
    assert_eq!(refusal(model.path(), &nothing), ["no-weights"]);
    // Results of a run that was interrupted are not taken for whole.
    let bytes = fs::read(source.join("results.jsonl")).unwrap();
    fs::write(source.join("results.jsonl"), &bytes[..2 * bytes.len() / 3]).unwrap();
    assert_eq!(refusal(model.path(), &with(options.clone())), ["results-incomplete"]);
    let mut flipped = bytes.clone();
    let at = bytes.len() / 2;
    flipped[at] = if bytes[at] == b'1' { b'2' } else { b'1' };
    fs::write(source.join("results.jsonl"), &flipped).unwrap();
    assert_eq!(refusal(model.path(), &with(options)), ["results-damaged"]);
}

#[test]
fn a_row_without_a_score_is_compared_with_nothing() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let rows = "{\"ctx\": \"a\", \"choices\": [\" b\", \"\"], \"gold\": 0}\n{\"ctx\": \"a\", \"choices\": [\" b\", \" c\"], \"gold\": 0}\n";
    let options = of(vec![given(Kind::Task, "t", written(directory.path(), "t", rows))]);
    let report = scored(model.path(), &Options { baseline: Some(fixture("nano")), ..options });
    assert_eq!((against(&report).tasks[0].n, report.excluded.len()), (1, 1));
}

/// Names, rows and compared rows of checks that are not met.
fn unmet(report: &ScoreReport) -> Vec<(&str, u64, u64)> {
    let checks = against(report).checks.iter().filter(|check| !check.met);
    checks.map(|check| (check.name.as_str(), check.compared, check.rows)).collect()
}

#[test]
fn what_was_not_compared_does_not_pass() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let (source, out) = (directory.path().join("source"), directory.path().join("out"));
    // Only the text is damaged, one line of it or all of them.
    let tokenizer = coliconv::model::tokenizer::Tokenizer::load(model.path()).unwrap();
    let row = tokenizer.encode("Moses").unwrap()[0] as usize;
    let damaged = g64();
    fs::remove_file(damaged.path().join("coliconv.manifest.json")).unwrap();
    super::support::containers::edit_tensor(damaged.path(), "model.embed_tokens.weight.qs", |scales| {
        let per_row = scales.len() / 2048;
        scales[row * per_row..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let gloss = given(Kind::Task, "gloss", head(directory.path(), "gloss.jsonl", 4));
    for (lines, compared, rows) in [("Moses said.\nMoses.\n", 0, 2), ("And he said.\nMoses said.\n", 1, 2)] {
        let text = given(Kind::Text, "text", written(directory.path(), "x", lines));
        let options = Options { threshold: Some(1.0), ..of(vec![gloss.clone(), text.clone()]) };
        let with = |baseline: &Path| Options { baseline: Some(baseline.to_owned()), ..options.clone() };
        // In the baseline, run beside and stored; in the model.
        let mut reports = vec![scored(model.path(), &with(damaged.path()))];
        let _ = fs::remove_dir_all(&source);
        scored(damaged.path(), &Options { out: Some(source.clone()), threshold: None, ..options.clone() });
        let _ = fs::remove_dir_all(&out);
        reports.push(scored(model.path(), &Options { out: Some(out.clone()), ..with(&source) }));
        reports.push(scored(damaged.path(), &with(model.path())));
        for report in &reports {
            assert_eq!(unmet(report), [("text", compared, rows)]);
            assert_eq!((report.verdict, against(report).checks.len()), (Some(Verdict::Fail), 3));
            assert_eq!(against(report).checks[2].worse_by.is_none(), compared == 0);
        }
        let told = format!("{compared} of {rows} rows were compared");
        assert!(fs::read_to_string(out.join("report.html")).unwrap().contains(&told));
        let (gloss, text) = (format!("gloss={}", gloss.path.display()), format!("text={}", text.path.display()));
        let arguments = ["score", "--quiet", "--task", &gloss, "--text", &text, "--baseline", source.to_str().unwrap()];
        let with = |more: &[&str]| {
            let output = run(&[&arguments[..], more].concat(), &[model.path()]);
            (output.status.code(), String::from_utf8(output.stdout).unwrap())
        };
        let (code, stdout) = with(&["--allow-excluded", "--threshold", "1"]);
        assert!(code == Some(1) && stdout.contains(&told) && stdout.contains("verdict: fail"), "{stdout}");
        // Without a threshold it is told, and accepted only when asked for.
        assert_eq!((with(&[]).0, with(&["--allow-excluded"]).0), (Some(1), Some(0)));
    }
}

#[test]
fn a_refused_baseline_leaves_no_results() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let (source, out) = (directory.path().join("source"), directory.path().join("out"));
    let options = some(directory.path());
    scored(&fixture("nano"), &Options { out: Some(source.clone()), ..options.clone() });
    let other = of(vec![given(Kind::Text, "other", written(directory.path(), "other.txt", "Other rows.\n"))]);
    let part = Part::new(1, 2);
    for part in [None, part] {
        let (baseline, out) = (Some(source.clone()), Some(out.clone()));
        let wrong = Options { baseline: baseline.clone(), out: out.clone(), part, ..other.clone() };
        assert_eq!(refusal(model.path(), &wrong), ["baseline-other"]);
        // With its rows the same directory is taken.
        scored(model.path(), &Options { baseline, out, part, ..options.clone() });
    }
}

#[test]
fn a_run_is_not_its_own_baseline() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let out = directory.path().join("out");
    let own = Options { out: Some(out.clone()), baseline: Some(out.clone()), ..some(directory.path()) };
    assert_eq!(refusal(model.path(), &own), ["baseline-is-out"]);
    assert!(!out.exists());
    scored(model.path(), &Options { baseline: None, ..own.clone() });
    let spelled = Options { baseline: Some(out.join("../out")), ..own };
    assert_eq!(refusal(model.path(), &spelled), ["baseline-is-out"]);
}

#[test]
fn parts_that_were_not_compared_are_told_apart_from_missing_ones() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let (source, out) = (directory.path().join("source"), directory.path().join("out"));
    let options = some(directory.path());
    scored(&fixture("nano"), &Options { out: Some(source.clone()), ..options.clone() });
    let plain = Options { out: Some(out.clone()), ..options };
    let compared = Options { baseline: Some(source), ..plain.clone() };
    let part = |number, of: &Options| Options { part: Part::new(number, 2), ..of.clone() };
    let finish = Options { finish: true, ..compared.clone() };
    scored(model.path(), &part(1, &plain));
    assert_eq!(refusal(model.path(), &finish), ["score-parts-missing"]);
    scored(model.path(), &part(2, &plain));
    assert_eq!(refusal(model.path(), &finish), ["results-not-compared"]);
    (1..=2).for_each(|number| drop(scored(model.path(), &part(number, &compared))));
    assert!(against(&scored(model.path(), &finish)).compared.iter().all(|compared| compared.is_whole()));
}
