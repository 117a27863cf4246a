//! `coliconv generate`: the tokens of other implementations, with and without drafts; what is drawn is drawn again
//! anywhere; text that streams; chats; and what is refused.

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use coliconv::backend::cpu::Cpu;
use coliconv::backend::{Backend, Device, Mode};
use coliconv::convert;
use coliconv::error::Faults;
use coliconv::generate::{Options, Prompt, Unwatched, Watch, generate};
use coliconv::isa::Isa;
use coliconv::model::Model;
use coliconv::model::drafting::Decoding;
use coliconv::model::sampler::{Sampler, Sampling};
use coliconv::model::tokenizer::Tokenizer;
use coliconv::report::{GenerateReport, GenerateStop};
use coliconv::roles::Pass;
use coliconv::score::encode::PrefixChoice;
use coliconv::weights::Model as Stored;
use serde_json::Value;
use support::containers::{assert_valid, container, copy, fixture, run, run_json, set_f32};
use tempfile::TempDir;

const CONFIGS: [&str; 2] = ["tokenizer_config.json", "chat_template.jinja"];

/// All passes of nano in groups of 64, with a manifest.
fn g64() -> TempDir {
    container("nano", "whole", || convert::Options { passes: Pass::ALL.to_vec(), ..Default::default() })
}

/// The checkpoint, to be edited: nothing says what its small files must be.
fn checkpoint() -> TempDir {
    copy(&fixture("nano"))
}

/// A container without MTP head and indexer.
fn main_only() -> TempDir {
    container("nano", "main", convert::Options::default)
}

fn of(prompt: Prompt) -> Options {
    Options {
        prompt,
        max_tokens: Some(48),
        sampler: Sampler::Greedy,
        drafts: 0,
        stop_at_ids: true,
        stop_at_repetition: true,
        device: Device::Cpu,
        mode: Mode::Exact,
        unused: Vec::new(),
        threads: 0,
        memory: None,
        device_memory: None,
    }
}

fn text(text: &str) -> Prompt {
    Prompt::Text { text: text.to_owned(), prefix: PrefixChoice::Auto }
}

/// Generates, and checks that the report is as its schema says.
fn said(path: &Path, options: &Options) -> GenerateReport {
    let report = generate(path, options, &Unwatched).unwrap_or_else(|faults| panic!("{faults}"));
    assert_valid("generate", &serde_json::to_value(&report).unwrap());
    report
}

/// Prompts of a file of references with what follows them.
fn references(file: &str) -> Vec<(Vec<u64>, Vec<u32>)> {
    let text = fs::read(fixture("nano").join("expected").join(file)).unwrap();
    let file: Value = serde_json::from_slice(&text).unwrap();
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let of = |reference: &Value| {
        let (prompt, full) = (ids(&reference["prompt_ids"]), ids(&reference["full_ids"]));
        (prompt.iter().map(|&id| id.into()).collect(), full[prompt.len()..].to_vec())
    };
    file["references"].as_array().unwrap().iter().map(of).collect()
}

fn until_stopped(ids: &[u32]) -> &[u32] {
    let end = ids.iter().position(|id| [2038, 2045, 2047].contains(id)).map_or(ids.len(), |at| at + 1);
    &ids[..end]
}

#[test]
fn greedy_text_is_that_of_the_references() {
    let g64 = g64();
    for (path, file) in [(g64.path(), "tokens-g64-mtp-indexer.json"), (&fixture("nano"), "tokens-source.json")] {
        for (prompt, expected) in references(file) {
            for drafts in 0..=4 {
                let raw = Options {
                    drafts,
                    stop_at_ids: false,
                    stop_at_repetition: false,
                    ..of(Prompt::Ids(prompt.clone()))
                };
                let raw = Options { max_tokens: Some(expected.len()), ..raw };
                let report = said(path, &raw);
                assert_eq!((&report.ids, report.stop_reason), (&expected, GenerateStop::Length), "{file} {drafts}");
                assert_eq!(report.draft.most, drafts as u64);
                assert!((report.draft.proposed > 0) == (drafts > 0) && report.draft.accepted <= report.draft.proposed);
            }
            let report = said(path, &Options { drafts: 3, ..of(Prompt::Ids(prompt.clone())) });
            assert_eq!(report.ids, until_stopped(&expected));
        }
    }
}

#[test]
fn the_plain_backend_says_the_same() {
    let (prompt, expected) = references("tokens-g64-mtp-indexer.json").swap_remove(0);
    let report = said(g64().path(), &Options { device: Device::Reference, drafts: 2, ..of(Prompt::Ids(prompt)) });
    assert_eq!(report.ids, until_stopped(&expected));
    assert_eq!((&*report.device, &*report.backend, &*report.mode), ("reference", "reference", "exact"));
}

#[test]
fn a_stop_id_is_the_last_id_and_no_text() {
    let report = said(g64().path(), &of(text("abacus:")));
    let (tokenizer, last) = (Tokenizer::load(&fixture("nano")).unwrap(), report.ids.len() - 1);
    assert_eq!((report.stop_reason, report.ids[last]), (GenerateStop::StopId, 2038));
    assert_eq!(report.text, tokenizer.decode(&report.ids[..last], false).unwrap());
    assert_eq!(report.prompt.as_deref(), Some("[gMASK]<sop>abacus:"));
    assert_eq!(report.prompt_ids, tokenizer.encode("[gMASK]<sop>abacus:").unwrap());
    assert_eq!((report.temperature, report.top_p, report.seed), (0.0, None, None));
    let again = said(g64().path(), &of(text("[gMASK]<sop>abacus:")));
    assert_eq!((again.prompt_ids, again.ids), (report.prompt_ids, report.ids.clone()));
    // The stop id itself is left to the model when nobody minds it.
    let raw = said(g64().path(), &Options { stop_at_ids: false, ..of(text("abacus:")) });
    assert_eq!((&raw.ids[..=last], raw.ids.len()), (&report.ids[..], 48));
    let short = said(g64().path(), &Options { max_tokens: Some(1), ..of(text("abacus:")) });
    assert_eq!((short.ids.len(), short.tokens_per_second, short.stop_reason), (1, None, GenerateStop::Length));
}

#[test]
fn repetitions_end_a_text_at_the_same_place_with_drafts() {
    let endless = Options { max_tokens: Some(300), stop_at_ids: false, ..of(text("a")) };
    let report = said(g64().path(), &endless);
    assert_eq!(report.stop_reason, GenerateStop::Repetition);
    assert!(report.ids.len() < 300);
    let drafted = said(g64().path(), &Options { drafts: 4, ..endless.clone() });
    assert_eq!((drafted.ids, drafted.text, drafted.stop_reason), (report.ids.clone(), report.text, report.stop_reason));
    let on =
        said(g64().path(), &Options { stop_at_repetition: false, max_tokens: Some(report.ids.len() + 3), ..endless });
    assert_eq!((on.stop_reason, &on.ids[..report.ids.len()]), (GenerateStop::Length, &report.ids[..]));
}

fn drawn(temperature: f64, top_p: f64, seed: u64) -> Sampler {
    Sampler::Drawn(Sampling { temperature, top_p, seed })
}

#[test]
fn drawn_text_is_the_same_with_any_drafts_and_threads() {
    let g64 = g64();
    let mut texts = Vec::new();
    for (sampler, prompt) in [
        (drawn(0.3, 1.0, 1), "abacus:"),
        (drawn(0.8, 0.9, 2), "And the LORD"),
        (drawn(1.0, 1.0, 3), "a kind of"),
        (drawn(1.5, 0.95, u64::MAX), "In the beginning"),
    ] {
        let plain = Options { sampler, stop_at_ids: false, max_tokens: Some(32), threads: 1, ..of(text(prompt)) };
        let expected = said(g64.path(), &plain);
        for (drafts, threads) in [(1, 2), (2, 0), (3, 1), (4, 2)] {
            let report = said(g64.path(), &Options { drafts, threads, ..plain.clone() });
            assert_eq!((&report.ids, &report.text), (&expected.ids, &expected.text), "{prompt} {drafts}");
            assert!(report.draft.proposed > 0);
        }
        texts.push(expected.ids);
    }
    let plain = Options { sampler: drawn(1.0, 1.0, 4), stop_at_ids: false, ..of(text("a kind of")) };
    let other = said(g64.path(), &plain);
    assert_ne!(other.ids[..32], texts[2][..], "another seed");
    assert_eq!((other.temperature, other.top_p, other.seed), (1.0, Some(1.0), Some(4)));
    // Almost no temperature is none.
    let cold = said(g64.path(), &Options { sampler: drawn(1e-9, 1.0, 5), ..of(text("abacus:")) });
    assert_eq!(cold.ids, said(g64.path(), &of(text("abacus:"))).ids);
}

#[test]
fn drawn_text_is_the_same_with_any_instruction_set() {
    let g64 = g64();
    let stored = Stored::open(g64.path()).unwrap();
    let drawn = |isa| {
        let backend = Cpu::new(isa);
        let model = Model::load(stored.weights(), &backend).unwrap();
        let mut decoding = Decoding::new(&model, &[2040, 2042, 257], drawn(1.0, 0.95, 11), 2, None).unwrap();
        while decoding.generated().len() < 24 {
            decoding.step(24 - decoding.generated().len()).unwrap();
        }
        (backend.device(), decoding.generated().to_vec())
    };
    let all: Vec<(String, Vec<u32>)> = Isa::available().into_iter().map(drawn).collect();
    assert!(all.iter().all(|(_, ids)| *ids == all[0].1), "{all:?}");
}

/// Keeps the pieces, and ends after some.
struct Heard {
    pieces: Mutex<Vec<String>>,
    most: usize,
    asked: AtomicUsize,
}

impl Watch for Heard {
    fn phase(&self, _what: &str) {}

    fn piece(&self, text: &str) {
        self.pieces.lock().unwrap().push(text.to_owned());
    }

    fn interrupted(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.pieces.lock().unwrap().len() >= self.most
    }
}

fn heard(options: &Options, most: usize) -> (Vec<String>, Result<GenerateReport, Faults>) {
    let heard = Heard { pieces: Mutex::default(), most, asked: AtomicUsize::new(0) };
    let report = generate(g64().path(), options, &heard);
    assert!(heard.asked.into_inner() > 0);
    (heard.pieces.into_inner().unwrap(), report)
}

#[test]
fn pieces_are_the_text_in_whole_characters() {
    let tokenizer = Tokenizer::load(&fixture("nano")).unwrap();
    let mut broken = 0;
    for (prompt, seed) in [("☃ 从前有座山 👩‍👩‍👧‍👦", 1), ("naïve", 2), ("𝄞", 3), ("abc", 4)]
    {
        // So hot that single bytes of characters are drawn.
        let hot =
            Options { sampler: drawn(4.0, 1.0, seed), stop_at_ids: false, max_tokens: Some(64), ..of(text(prompt)) };
        let (pieces, report) = heard(&hot, usize::MAX);
        let report = report.unwrap();
        assert_eq!(pieces.concat(), report.text);
        assert_eq!(report.text, tokenizer.decode(&report.ids, false).unwrap());
        assert!(pieces.len() > 20 && pieces.iter().all(|piece| !piece.is_empty()));
        broken += usize::from(report.text.contains('\u{fffd}'));
    }
    assert!(broken > 0, "the test has to see broken characters, too");
}

#[test]
fn an_interrupted_text_says_so() {
    let (pieces, report) = heard(&of(text("abacus:")), 3);
    assert_eq!(pieces.len(), 3);
    assert_eq!(report.unwrap_err().to_string(), "interrupted after 3 tokens");
    assert_eq!(heard(&of(text("abacus:")), 0).1.unwrap_err().to_string(), "interrupted after 0 tokens");
}

/// A running `coliconv generate` that does not stop by itself.
fn endless(model: &Path) -> Child {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("coliconv"));
    command.arg("generate").arg(model).args(["--prompt", "a", "--max-tokens", "4000"]);
    command.args(["--ignore-stop-ids", "--keep-repeating", "--quiet"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[cfg(unix)]
#[test]
fn control_c_ends_between_two_tokens() {
    let model = g64();
    let mut child = endless(model.path());
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut first = [0];
    stdout.read_exact(&mut first).unwrap();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let (mut rest, mut stderr) = (String::new(), String::new());
    stdout.read_to_string(&mut rest).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(2), "{stderr}");
    assert!(rest.ends_with('\n'), "{rest:?}");
    assert!(stderr.starts_with("error: interrupted after ") && stderr.ends_with(" tokens\n"), "{stderr}");
}

#[cfg(unix)]
#[test]
fn a_reader_that_has_gone_ends_the_text() {
    let model = g64();
    let mut child = endless(model.path());
    let mut first = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!((child.wait().unwrap().code(), &*stderr), (Some(0), ""));
}

#[test]
fn the_text_is_on_stdout_and_everything_else_on_stderr() {
    let model = g64();
    let output = run(&["generate", "--draft", "2", "--prompt", "abacus:"], &[model.path()]);
    assert_eq!(output.status.code(), Some(0));
    let stderr = timeless(&String::from_utf8(output.stderr).unwrap());
    let told = format!("{}---\n{stderr}", String::from_utf8(output.stdout).unwrap());
    insta::assert_snapshot!("text", told);
    let quiet = run(&["generate", "--quiet", "--prompt", "abacus:"], &[model.path()]);
    assert_eq!(quiet.stderr, b"");
    let (code, document) = run_json(&["generate", "--prompt", "abacus:"], &[model.path()]);
    assert_valid("generate", &document);
    assert_eq!(code, 0);
    assert_eq!(format!("{}\n", document["text"].as_str().unwrap()).as_bytes(), quiet.stdout);
    assert_eq!(document["stop_reason"], "stop_id");
}

/// Text with rates and durations replaced.
fn timeless(text: &str) -> String {
    let word = |word: &str| match word.trim_end_matches(',').parse::<f64>() {
        Ok(_) if word.contains('.') => "N".to_owned(),
        _ => word.to_owned(),
    };
    let line = |line: &str| match line.split_once("loading: ") {
        Some((before, _)) => format!("{}loading: TIME", before.split(' ').map(word).collect::<Vec<_>>().join(" ")),
        None if line.contains("tokens/s") => line.split(' ').map(word).collect::<Vec<_>>().join(" "),
        None => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n") + "\n"
}

#[test]
fn a_prompt_may_come_from_standard_input() {
    let model = g64();
    let from_input = |bytes: &[u8]| {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("coliconv"));
        command.arg("generate").arg(model.path()).args(["--prompt", "-", "--json", "--max-tokens", "4"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(bytes).unwrap();
        serde_json::from_slice::<Value>(&child.wait_with_output().unwrap().stdout).unwrap()
    };
    for (bytes, prompt) in
        [(&b"abacus:\n"[..], "abacus:"), (b"abacus:\r\n", "abacus:"), (b"a\n\n", "a\n"), (b"abacus:", "abacus:")]
    {
        assert_eq!(from_input(bytes)["prompt"], format!("[gMASK]<sop>{prompt}"));
    }
    assert_eq!(from_input(b"\xff")["refused"][0]["kind"], "flag-value");
    // The prefix alone is a prompt too.
    assert_eq!(from_input(b"\n")["prompt"], "[gMASK]<sop>");
}

fn chat(user: &str, system: Option<&str>) -> Options {
    of(Prompt::Chat { user: user.to_owned(), system: system.map(str::to_owned) })
}

#[test]
fn chats_are_written_by_the_template() {
    let report = said(g64().path(), &chat("abacus", None));
    assert_eq!(report.prompt.as_deref(), Some("[gMASK]<sop><|user|>abacus<|assistant|>"));
    assert_eq!(report.prompt_ids[..3], [2040, 2042, 2045]);
    assert_eq!(report.prompt_ids.last(), Some(&2046));
    let report = said(g64().path(), &chat("abacus", Some("Be brief.")));
    assert_eq!(report.prompt.as_deref(), Some("[gMASK]<sop><|system|>Be brief.<|user|>abacus<|assistant|>"));
    // The same template under the key of the other file.
    let moved = checkpoint();
    let template = fs::read_to_string(moved.path().join(CONFIGS[1])).unwrap();
    fs::remove_file(moved.path().join(CONFIGS[1])).unwrap();
    edit_json(&moved.path().join(CONFIGS[0]), |config| config["chat_template"] = template.into());
    assert_eq!(said(moved.path(), &chat("abacus", Some("Be brief."))).prompt_ids, report.prompt_ids);
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// What is said when the program refuses, without the path.
fn refused(model: &Path, arguments: &[&str]) -> String {
    let output = run(&[&["generate"], arguments].concat(), &[model]);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(2), &b""[..]), "{arguments:?}");
    let (code, document) = run_json(&[&["generate"], arguments].concat(), &[model]);
    assert_valid("generate", &document);
    assert!(code == 2 && !document["refused"].as_array().unwrap().is_empty());
    String::from_utf8(output.stderr).unwrap().replace(model.to_str().unwrap(), "MODEL")
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let (whole, main) = (g64(), main_only());
    let mut told = String::new();
    for arguments in [
        &["--prompt", "", "--prefix", "none"][..],
        &["--prompt", "", "--chat"],
        &["--prompt-ids", ""],
        &["--prompt-ids", "1,x"],
        &["--prompt-ids", "1,2048"],
        &["--prompt-ids", "99999999999"],
        &["--prompt-ids", "1", "--chat"],
        &["--prompt-ids", "1", "--prefix", "none"],
        &["--prompt", "a", "--chat", "--prefix", "none"],
        &["--prompt", "a", "--system", "b"],
        &["--prompt", "a", "--max-tokens", "0"],
        &["--prompt", "a", "--max-tokens", "4096"],
        &["--prompt", "a", "--max-tokens", "99999999999999999999"],
        &["--prompt", "a", "--temperature", "-1"],
        &["--prompt", "a", "--temperature", "NaN"],
        &["--prompt", "a", "--top-p", "0.5"],
        &["--prompt", "a", "--seed", "5", "--temperature", "0"],
        &["--prompt", "a", "--temperature", "1", "--top-p", "0"],
        &["--prompt", "a", "--temperature", "1", "--top-p", "1.01"],
        &["--prompt", "a", "--draft", "17"],
        &["--prompt", "a", "--device", "gpu"],
        &["--prompt", "a", "--device", "cuda:first"],
        &["--prompt", "a", "--device", "vulkan:"],
        &["--prompt", "a", "--mode", "fast"],
        &["--prompt", "a", "--mode", "quick"],
        &["--prompt", "a", "--memory", "1M"],
    ] {
        told += &format!("## {}\n{}\n", arguments.join(" "), refused(whole.path(), arguments));
    }
    told += &format!("## --draft 1 without a head\n{}\n", refused(main.path(), &["--prompt", "a", "--draft", "1"]));
    insta::assert_snapshot!("refused", without_bytes(&told));
    for arguments in [&["generate"][..], &["generate", "--prompt", "a", "--prompt-ids", "1"]] {
        assert_eq!(run(arguments, &[whole.path()]).status.code(), Some(2));
    }
    assert_eq!(said(main.path(), &of(text("abacus:"))).draft.acceptance, None);
}

/// How much memory is needed changes with every new weight; what is given does not.
fn without_bytes(text: &str) -> String {
    let number = |word: &str| match word.parse::<u64>() {
        Ok(number) if number > 1000 && number != 1 << 20 => "N".to_owned(),
        _ => word.to_owned(),
    };
    let line = |line: &str| match line.contains(" bytes of memory at least") {
        true => line.split(' ').map(number).collect::<Vec<_>>().join(" "),
        false => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n") + "\n"
}

#[test]
fn damaged_models_are_told_by_file() {
    let mut told = String::new();
    let mut tell = |title: &str, of: fn() -> TempDir, damage: &dyn Fn(&Path), arguments: &[&str]| {
        let model = of();
        damage(model.path());
        told += &format!("## {title}\n{}\n", refused(model.path(), arguments));
    };
    let write = |name: &'static str, text: &'static str| move |path: &Path| fs::write(path.join(name), text).unwrap();
    let remove = |name: &'static str| move |path: &Path| fs::remove_file(path.join(name)).unwrap();
    let (plain, asked) = (["--prompt", "a"], ["--prompt", "a", "--chat"]);
    tell("no template", checkpoint, &remove(CONFIGS[1]), &asked);
    tell("a template that does not parse", checkpoint, &write(CONFIGS[1], "a\n{% if %}"), &asked);
    tell(
        "a template that refuses",
        checkpoint,
        &write(CONFIGS[1], "\n{{ raise_exception('no chats\u{1b}') }}"),
        &asked,
    );
    tell("a template that writes nothing", checkpoint, &write(CONFIGS[1], ""), &asked);
    tell(
        "a template without an end",
        checkpoint,
        &write(CONFIGS[1], "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        &asked,
    );
    tell("no tokenizer", checkpoint, &remove("tokenizer.json"), &plain);
    tell("a broken tokenizer", checkpoint, &write("tokenizer.json", "{}"), &plain);
    tell("a broken list of stop ids", checkpoint, &write("generation_config.json", r#"{"eos_token_id": "x"}"#), &plain);
    tell("a file that is not the manifest's", g64, &write(CONFIGS[1], "{% if %}"), &asked);
    tell("weights that are no numbers", g64, &|path| set_f32(path, "model.norm.weight", 3, f32::NAN), &plain);
    tell(
        "logits that are no numbers",
        g64,
        &|path| set_f32(path, "model.norm.weight", 3, f32::NAN),
        &["--prompt", "a", "--temperature", "1"],
    );
    insta::assert_snapshot!("damaged", told);
    // Without the chat a template is not looked at.
    let model = checkpoint();
    write(CONFIGS[1], "{% if %}")(model.path());
    assert_eq!(said(model.path(), &of(text("abacus:"))).prompt.as_deref(), Some("[gMASK]<sop>abacus:"));
}

/// The MTP head is loaded where a draft is asked for, or where it is checked, and nowhere else: neither its bytes nor what is
/// wrong with it matter then.
#[test]
fn a_head_that_nobody_asks_is_not_loaded() {
    let damaged = g64();
    set_f32(damaged.path(), "model.layers.4.enorm.weight", 3, f32::NAN);
    let (whole, main) = (g64(), main_only());
    let expected = said(whole.path(), &of(text("abacus:")));
    assert_eq!(said(damaged.path(), &of(text("abacus:"))).ids, expected.ids);
    let output = run(&["generate", "--prompt", "abacus:", "--draft", "1"], &[damaged.path()]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && told.contains("the logits of the MTP head"), "{told}");
    let (code, verified) = run_json(&["verify", "--level", "payload"], &[damaged.path()]);
    assert!(code == 1 && verified.to_string().contains("model.layers.4.enorm.weight"), "{verified}");
    for device in [Device::Cpu, Device::Reference] {
        let name = device.to_string();
        let least = |model: &Path, drafts: &str| -> u64 {
            let told = refused(model, &["--prompt", "a", "--device", &name, "--memory", "1M", "--draft", drafts]);
            let (_, least) = told.split_once("need ").unwrap();
            least.split(' ').next().unwrap().parse().unwrap()
        };
        let (without, with) = (least(whole.path(), "0"), least(whole.path(), "1"));
        // All of the head but its experts, of which no more are there at the same time.
        let stored: u64 = if device == Device::Cpu { 100 << 10 } else { 4 << 20 };
        assert!(with > without + stored, "{device} {with} {without}");
        let memory = Some(without);
        said(whole.path(), &Options { memory, device, max_tokens: None, ..of(text("a")) });
        let beside = least(main.path(), "0");
        assert!(without.abs_diff(beside) < without / 4, "{without} {beside}");
    }
}

#[test]
fn ids_without_a_token_are_told_and_make_no_text() {
    // A tokenizer that has lost the first token of the text.
    let model = checkpoint();
    let path: PathBuf = model.path().join("tokenizer.json");
    let report = said(model.path(), &of(text("abacus:")));
    let lost = report.ids[0];
    edit_json(&path, |tokenizer| {
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let token = vocab.iter().find(|(_, id)| **id == lost).unwrap().0.clone();
        vocab.remove(&token);
        let merges = tokenizer["model"]["merges"].as_array_mut().unwrap();
        merges.retain(|merge| {
            let pair: [String; 2] = serde_json::from_value(merge.clone()).unwrap();
            !pair.contains(&token) && pair.concat() != token
        });
    });
    let ids = report.prompt_ids.iter().map(|&id| id.into()).collect();
    let lacking = said(model.path(), &of(Prompt::Ids(ids)));
    assert_eq!(lacking.ids, report.ids);
    let rest: Vec<u32> = report.ids[..report.ids.len() - 1].iter().copied().filter(|&id| id != lost).collect();
    assert_eq!(lacking.text, Tokenizer::load(&fixture("nano")).unwrap().decode(&rest, false).unwrap());
    let kinds: Vec<&str> = lacking.warnings.iter().map(|warning| &*warning.kind).collect();
    assert_eq!(kinds.iter().filter(|kind| **kind == "generated-unknown").count(), 1, "{kinds:?}");
    assert_eq!(lacking.prompt, None);
}

#[test]
fn the_default_length_fits_behind_the_prompt() {
    let model = checkpoint();
    let shortened =
        |limit: u64| edit_json(&model.path().join("config.json"), |c| c["max_position_embeddings"] = limit.into());
    let options = Options { max_tokens: None, stop_at_ids: false, stop_at_repetition: false, ..of(text("abacus:")) };
    shortened(10);
    let report = said(model.path(), &options);
    assert_eq!((report.prompt_ids.len(), report.ids.len(), report.max_tokens), (6, 4, 4));
    shortened(6);
    let faults = generate(model.path(), &options, &Unwatched).unwrap_err();
    assert!(faults.to_string().contains("has 6 tokens and 1 is to follow, together 7; the model takes at most 6"));
}

#[test]
fn text_without_stop_ids_is_a_warning() {
    let model = checkpoint();
    fs::remove_file(model.path().join("generation_config.json")).unwrap();
    edit_json(&model.path().join("config.json"), |config| drop(config.as_object_mut().unwrap().remove("eos_token_id")));
    let report = said(model.path(), &Options { max_tokens: Some(2), ..of(text("a")) });
    assert!(report.warnings.iter().any(|warning| warning.kind == "no-stop-ids"), "{:?}", report.warnings);
}

#[test]
fn lines_come_while_the_text_goes_on() {
    // What is read here is printed long before the end.
    let model = g64();
    let mut child = endless(model.path());
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut bytes = Vec::new();
    stdout.read_until(b'.', &mut bytes).unwrap();
    assert!(child.try_wait().unwrap().is_none() && bytes.len() > 3);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn small_files_are_those_of_the_manifest() {
    let model = g64();
    let config = model.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    let other = text.replacen("1e-05", "9e-02", 1);
    assert!(other != text && other.len() == text.len());
    let arguments = ["generate", "--prompt", "abacus:", "--max-tokens", "2"];
    assert_eq!(run_json(&arguments, &[model.path()]).0, 0);
    fs::write(&config, other).unwrap();
    let (code, document) = run_json(&arguments, &[model.path()]);
    assert_eq!((code, document["refused"][0]["kind"].as_str()), (2, Some("file-hash")), "{document:#}");
}
