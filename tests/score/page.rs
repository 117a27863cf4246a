//! The page for people, and what the model generates.

use std::fs;
use std::path::Path;
use std::process::Command;

use coliconv::config::Config;
use coliconv::error::FaultKind;
use coliconv::score::Options;
use coliconv::score::input::Kind;
use serde_json::Value;
use tempfile::TempDir;

use super::support::containers::{fixture, run_json, set_f32};
use super::{g64, given, head, of, refusal, scored, try_score, written};

/// Everything that a page can show: a baseline, a threshold, rows without a score, hostile names, generated texts.
fn everything(directory: &Path, out: &Path) -> Options {
    let hostile =
        r#"{"ctx": "</p><script>document.title='broken'</script>:", "choices": [" <b>x</b>", " & y"], "gold": 1}"#;
    let rows = format!("{hostile}\n{{\"ctx\": 1}}\n");
    Options {
        baseline: Some(fixture("nano")),
        threshold: Some(0.05),
        probes: true,
        out: Some(out.to_owned()),
        ..of(vec![
            given(Kind::Task, "gloss", head(directory, "gloss.jsonl", 12)),
            given(Kind::Task, "<i>a task with a very long name indeed</i>", written(directory, "t", &rows)),
            given(Kind::Text, "heldout", head(directory, "heldout.txt", 6)),
        ])
    }
}

#[test]
fn the_page_holds_what_the_report_says() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let out = directory.path().join("out");
    let report = scored(model.path(), &everything(directory.path(), &out));
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    for text in [
        format!("{:.2} %", 100.0 * report.tasks[0].acc_norm),
        format!("{:.4}", report.texts[0].ppl),
        format!("{:.5}", report.baseline.as_ref().unwrap().kl_mean.unwrap()),
        report.model_sha256.clone(),
        "Worst questions".into(),
        "Not scored: 1 row<".into(),
        "&lt;/p&gt;&lt;script&gt;".into(),
    ] {
        assert!(page.contains(&text), "{text}");
    }
    assert_eq!(page.matches("<svg").count(), 4);
    // Nothing is loaded, and nothing of a file becomes markup.
    assert!(
        ["<script", "<i>", "<b>x", "http:", "https:", "src=", "@import", "url("]
            .iter()
            .all(|part| !page.contains(part))
    );
    // The same page again from what is stored, generated texts included.
    let again = Options { probes: false, ..everything(directory.path(), &out) };
    scored(model.path(), &again);
    let second = fs::read_to_string(out.join("report.html")).unwrap();
    assert_eq!(page, second);
}

#[test]
fn probes_tell_how_a_model_generates() {
    let (code, document) = run_json(&["score", "--probes"], &[g64().path()]);
    assert_eq!(code, 0, "{document:#}");
    let probes = &document["probes"];
    let texts = probes["texts"].as_array().unwrap();
    assert_eq!(texts.len(), coliconv::score::probes::PROMPTS.len());
    let mtp = &probes["mtp"];
    assert_eq!(mtp["format"], "int8-row");
    let (proposed, accepted) = (mtp["proposed"].as_u64().unwrap(), mtp["accepted"].as_u64().unwrap());
    assert!(accepted > 0 && accepted < proposed, "{mtp}");
    for text in texts {
        let (tokens, reason) = (text["tokens"].as_u64().unwrap(), text["stop_reason"].as_str().unwrap());
        assert!(tokens <= 64 && ["stop_id", "length", "repetition"].contains(&reason), "{text}");
        assert_eq!(tokens == 64, reason != "stop_id", "{text}");
        assert!(text["distinct"].as_array().unwrap().iter().filter_map(Value::as_f64).all(|s| s > 0.0 && s <= 1.0));
    }
    // A stop id that nobody knows of: nothing stops any more.
    let model = g64();
    fs::remove_file(model.path().join("coliconv.manifest.json")).unwrap();
    fs::remove_file(model.path().join("generation_config.json")).unwrap();
    let path = model.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["eos_token_id"] = 2041.into();
    fs::write(&path, config.to_string()).unwrap();
    let (_, document) = run_json(&["score", "--probes"], &[model.path()]);
    assert_eq!(document["probes"]["stopped"], 0);
    let stopped = probes["stopped"].as_u64().unwrap();
    assert!(stopped > 0, "the trained model stops somewhere, or the comparison shows nothing");
}

/// An MTP head, and a model, whose logits are no numbers: rows have their results and reports are written all the same.
#[test]
fn probes_without_numbers_are_told_beside_the_scores() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    fs::remove_file(model.path().join("coliconv.manifest.json")).unwrap();
    let text = format!("text={}", head(directory.path(), "heldout.txt", 2).display());
    let mtp_layer = Config::read(model.path()).unwrap().mtp_layer().unwrap();
    for (tensor, what, excluded) in [
        (format!("model.layers.{mtp_layer}.enorm.weight"), "the MTP head", 0),
        ("model.norm.weight".into(), "the model", 2),
    ] {
        set_f32(model.path(), &tensor, 0, f32::NAN);
        let out = directory.path().join(what);
        let arguments = ["score", "--probes", "--allow-excluded", "--text", &text, "--out", out.to_str().unwrap()];
        // A run that is gone on from says the same.
        for _ in 0..2 {
            let (code, document) = run_json(&arguments, &[model.path()]);
            assert_eq!((code, &document["probes"]), (1, &Value::Null), "{document:#}");
            let errors: Vec<&Value> =
                document["warnings"].as_array().unwrap().iter().filter(|told| told["severity"] == "error").collect();
            let [error] = errors[..] else { panic!("{errors:?}") };
            assert_eq!((&error["kind"], error["file"].as_str()), (&"logits-not-finite".into(), model.path().to_str()));
            let message = format!("the logits of {what}, row 0 of those that were computed together, are not finite");
            assert_eq!(error["message"], message);
            assert_eq!(document["excluded"].as_array().unwrap().len(), excluded);
            let report: Value = serde_json::from_slice(&fs::read(out.join("score.json")).unwrap()).unwrap();
            assert_eq!(report["warnings"], document["warnings"]);
            assert!(out.join("report.html").is_file() && out.join("requests.csv").is_file());
        }
    }
}

/// What was generated before is generated no more, and the MTP head has no part in the memory of such a run.
#[test]
fn probes_that_are_known_need_no_memory() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let out = directory.path().join("out");
    let rows = || vec![given(Kind::Text, "text", head(directory.path(), "heldout.txt", 2))];
    let least = |options: Options| {
        let faults = try_score(model.path(), &Options { memory: Some(1), ..options }).unwrap_err();
        match *faults.into_vec().remove(0).kind {
            FaultKind::MemoryTooSmall { fixed, experts, .. } => fixed + experts,
            kind => panic!("{kind}"),
        }
    };
    let with = Options { probes: true, out: Some(out.clone()), ..of(rows()) };
    let (without, whole) = (least(of(rows())), least(with.clone()));
    assert!(without < whole, "{without} {whole}");
    let little = Options { memory: Some(without), ..with.clone() };
    assert_eq!(refusal(model.path(), &little), ["memory-too-small"]);
    let first = scored(model.path(), &with).probes;
    assert!(first.is_some());
    assert_eq!(scored(model.path(), &little).probes, first);
    // Those of another model are no reason to have less memory.
    let report = out.join("score.json");
    let mut other: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    other["model_sha256"] = "0".repeat(64).into();
    fs::write(&report, other.to_string()).unwrap();
    assert_eq!(refusal(model.path(), &little), ["memory-too-small"]);
    assert_eq!(scored(model.path(), &with).probes, first);
}

/// What a browser makes of the page: counts, texts of plots that leave their box, width of the page, its title.
const MEASURE: &str = r#"<script>
const clipped = [...document.querySelectorAll('svg')].flatMap(svg => [...svg.querySelectorAll('text')].filter(text => {
  const box = text.getBBox(), view = svg.viewBox.baseVal;
  return box.x < 0 || box.y < 0 || box.x + box.width > view.width || box.y + box.height > view.height;
}).map(text => text.textContent));
const visible = [...document.querySelectorAll('svg, table, h2')].every(e => e.getBoundingClientRect().height > 0);
const colour = getComputedStyle(document.querySelector('circle.model')).fill;
document.body.innerHTML = '<pre id="measured">' + JSON.stringify({
  clipped, visible, colour, title: document.title, width: document.documentElement.scrollWidth, window: innerWidth,
  loaded: performance.getEntriesByType('resource').length,
}).replace(/</g, '&lt;') + '</pre>';
</script>"#;

/// Chromium, under one of its names, or what `COLICONV_CHROMIUM` names.
fn chromium() -> String {
    let named = std::env::var("COLICONV_CHROMIUM").ok();
    let names = named.into_iter().chain(["chromium", "chromium-browser", "google-chrome"].map(String::from));
    let works =
        |name: &String| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    names.into_iter().find(works).expect("no Chromium: apt-get install chromium, or set COLICONV_CHROMIUM")
}

#[test]
#[ignore = "needs Chromium; .ci/run runs it"]
fn a_browser_shows_the_page() {
    let (directory, model) = (TempDir::new().unwrap(), g64());
    let out = directory.path().join("out");
    scored(model.path(), &everything(directory.path(), &out));
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    let measured = written(&out, "measured.html", &page.replace("</body>", &format!("{MEASURE}</body>")));
    if let Some(kept) = std::env::var_os("COLICONV_KEEP_PAGE") {
        fs::copy(out.join("report.html"), kept).unwrap();
    }
    let browser = chromium();
    for width in [1280, 520] {
        let output = Command::new(&browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=2000"])
            .arg(format!("--window-size={width},900"))
            .arg(format!("--user-data-dir={}", directory.path().join("profile").display()))
            .arg(format!("file://{}", measured.display()))
            .output()
            .unwrap();
        let dom = String::from_utf8_lossy(&output.stdout);
        let begin = dom.find("<pre id=\"measured\">").unwrap_or_else(|| panic!("{dom}")) + 19;
        let json = dom[begin..].split("</pre>").next().unwrap().replace("&lt;", "<").replace("&amp;", "&");
        let found: Value = serde_json::from_str(&json.replace("&gt;", ">")).unwrap();
        assert_eq!(found["clipped"], serde_json::json!([]), "{width}: {found}");
        assert_eq!((&found["visible"], &found["loaded"]), (&true.into(), &0.into()), "{width}: {found}");
        assert!(found["title"].as_str().unwrap().starts_with("Scores of "), "{found}");
        assert_eq!(found["colour"], "rgb(11, 98, 196)", "the style sheet is in force");
        assert!(found["width"].as_f64() <= found["window"].as_f64(), "{width}: {found}");
    }
}
