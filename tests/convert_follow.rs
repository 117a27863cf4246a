//! Sources that are still arriving, and sources that go as they are converted.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coliconv::convert::{Follow, Job, Options, Progress, wait_for_model};
use coliconv::error::Faults;
use coliconv::io::hook;
use coliconv::report::ConvertReport;
use coliconv::roles::Pass;
use insta::assert_snapshot;
use sha2::Digest;
use support::convert::{G32, Place, contents, groups_of_32, text, weights};
use support::crash::{all_passes, parts, tiny};
use support::disk::Random;
use support::processes::{names, until};
use support::shards::Shards;
use support::writer::{How, Writer};

const FOLLOW: Follow = Follow {
    poll: Duration::from_millis(10),
    settle: Duration::from_millis(50),
    patience: Some(Duration::from_secs(30)),
};

fn following() -> Options {
    Options { follow: Some(FOLLOW), ..all_passes() }
}

fn consuming() -> Options {
    Options { consume: true, ..all_passes() }
}

/// Remembers what was waited for.
#[derive(Default)]
struct Listener(Mutex<Vec<String>>);

impl Progress for Listener {
    fn start(&self, _source_bytes: u64) {}
    fn file(&self, _name: &str) {}
    fn advance(&self, _source_bytes: u64, _output_bytes: u64) {}
    fn waiting(&self, missing: &[String]) {
        let mut heard = self.0.lock().unwrap();
        missing.iter().filter(|text| !heard.contains(text)).cloned().collect::<Vec<_>>().into_iter().for_each(|text| {
            heard.push(text);
        });
    }
    fn end(&self) {}
}

impl Listener {
    fn heard(&self, text: &str) -> bool {
        self.0.lock().unwrap().iter().any(|heard| heard.contains(text))
    }
}

/// What `coliconv convert --follow` does.
fn follow(place: &Place, options: &Options, progress: &dyn Progress) -> Result<ConvertReport, Faults> {
    wait_for_model(&place.source, options.follow.unwrap(), progress)?;
    Job::prepare(&place.source, &place.container, options.clone())?.run(progress)
}

type Files = BTreeMap<PathBuf, Vec<u8>>;

/// A place without a source, whoever brings it, and what is to come of it.
fn arriving(shards: &Shards, pause: u64) -> (Place, Writer, Files) {
    let mut place = Place::in_memory();
    let from = place.root.path().join("remote");
    shards.store(&from);
    let to = std::mem::replace(&mut place.source, from.clone());
    place.run(all_passes()).unwrap();
    let reference = without_times(contents(&place.container).unwrap());
    fs::remove_dir_all(&place.container).unwrap();
    fs::create_dir(&to).unwrap();
    place.source = to.clone();
    (place, Writer { from, to, pause: Duration::from_millis(pause) }, reference)
}

/// Without the times at which files arrived.
fn without_times(mut files: Files) -> Files {
    let manifest = files.get_mut(Path::new("coliconv.manifest.json")).unwrap();
    let told = text(manifest);
    let lines = told.lines().map(|line| if line.contains("\"modified_nanoseconds\"") { "[TIME]" } else { line });
    *manifest = lines.collect::<Vec<_>>().join("\n").into_bytes();
    files
}

fn check_same(place: &Place, reference: &Files, when: &str) {
    let found = without_times(contents(&place.container).unwrap());
    assert_eq!(found.keys().collect::<Vec<_>>(), reference.keys().collect::<Vec<_>>(), "{when}");
    for (name, bytes) in reference {
        assert!(found[name] == *bytes, "{when}: {}:\n{}", name.display(), String::from_utf8_lossy(&found[name]));
    }
}

/// Bytes of the files of a directory but those whose names are left out.
fn bytes_of(directory: &Path, counts: impl Fn(&str) -> bool) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let counted = entries.filter(|entry| counts(&entry.file_name().to_string_lossy()));
    counted.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum()
}

#[test]
fn files_arrive_in_any_order_and_manner() {
    let mut waited = 0;
    for (seed, scales_apart) in [(1, false), (2, true), (3, false), (4, true), (5, true)] {
        let (place, writer, reference) = arriving(&tiny(scales_apart), 8);
        let listener = Listener::default();
        let options = Options { consume: seed > 2, threads: 2, ..following() };
        std::thread::scope(|scope| {
            scope.spawn(|| writer.write_all(&mut Random(seed)));
            let report = follow(&place, &options, &listener).unwrap_or_else(|faults| panic!("seed {seed}: {faults}"));
            assert_eq!(report.complete, Some(true));
        });
        check_same(&place, &reference, &format!("seed {seed}"));
        let left = names(&place.source).iter().filter(|name| name.ends_with(".safetensors")).count();
        assert_eq!(left, if options.consume { 0 } else { 4 }, "seed {seed}");
        waited += usize::from(listener.heard("not there yet"));
    }
    assert!(waited > 1);
}

#[test]
fn parts_follow_and_consume_at_once() {
    for seed in 0..3 {
        let (place, writer, reference) = arriving(&tiny(true), 5);
        let commands = parts(&Options { consume: true, ..following() }, 3);
        std::thread::scope(|scope| {
            scope.spawn(|| writer.write_all(&mut Random(seed)));
            let follow = |part| follow(&place, part, &Listener::default());
            let running: Vec<_> = commands.iter().map(|part| scope.spawn(move || follow(part))).collect();
            for part in running {
                part.join().unwrap().unwrap_or_else(|faults| panic!("seed {seed}: {faults}"));
            }
        });
        check_same(&place, &reference, &format!("seed {seed}"));
        assert!(!names(&place.source).iter().any(|name| name.ends_with(".safetensors")), "{:?}", names(&place.source));
    }
}

/// A downloader that waits for its space: the next file becomes whole when the last one is gone.
#[test]
fn a_consumed_source_needs_little_space() {
    let (place, writer, reference) = arriving(&tiny(false), 2);
    let shards: Vec<String> = names(&writer.from).into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    let (source, container) = (place.source.clone(), place.container.clone());
    let used = Arc::new(move || {
        // The file that is being written counts for the downloader.
        bytes_of(&container, |_| true) + bytes_of(&source, |name| name.ends_with(".safetensors"))
    });
    let (peak, done) = (Arc::new(AtomicU64::new(0)), AtomicBool::new(false));
    let (peak_seen, used_then) = (peak.clone(), used.clone());
    let watched = place.root.path().to_owned();
    hook::install(Some(Arc::new(move |_, path: &Path| {
        if path.starts_with(&watched) {
            peak_seen.fetch_max(used_then(), Ordering::SeqCst);
        }
        Ok(())
    })));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                peak.fetch_max(used(), Ordering::SeqCst);
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        scope.spawn(|| {
            let mut random = Random(3);
            for name in names(&writer.from).iter().filter(|name| !shards.contains(name)) {
                writer.write(name, How::Renamed(".part"), &mut random);
            }
            let mut order = shards.clone();
            random.shuffle(&mut order);
            for name in order {
                until("the last file to be consumed", || bytes_of(&place.source, |n| n.ends_with(".safetensors")) == 0);
                writer.write(&name, How::Renamed(".incomplete"), &mut random);
            }
        });
        let outcome = follow(&place, &Options { consume: true, ..following() }, &Listener::default());
        done.store(true, Ordering::SeqCst);
        outcome.unwrap();
    });
    hook::install(None);
    check_same(&place, &reference, "consumed");
    let largest = shards.iter().map(|name| fs::metadata(writer.from.join(name)).unwrap().len()).max().unwrap();
    let output = bytes_of(&place.container, |_| true);
    let (peak, most) = (peak.load(Ordering::SeqCst), (largest + output) * 11 / 10);
    println!("peak {peak} bytes, largest shard {largest}, output {output}");
    assert!(peak <= most, "{peak} bytes at most, expected {most}");
}

/// Everything that a shard of several passes is for must be done before it goes.
#[test]
fn what_is_still_needed_stays() {
    let place = Place::in_memory();
    tiny(false).store(&place.source);
    let all = names(&place.source);
    let output = place.output(&[&G32[..], &["--consume"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let told = [&output.stderr[..], b"\n", &output.stdout].concat();
    let told = place.redacted(&told);
    let told: Vec<&str> = told.lines().filter(|line| !line.starts_with("done: ") && !line.contains("free:")).collect();
    let left = |place: &Place| {
        let names = names(&place.source);
        all.iter().filter(|name| !names.contains(name)).map(|name| name[6..11].to_owned()).collect::<Vec<_>>().join(" ")
    };
    let after_main = left(&place);
    place.convert(&["--only", "mtp", "--consume"]);
    let after_mtp = left(&place);
    place.convert(&["--only", "indexer", "--consume"]);
    let after_indexer = left(&place);
    assert_snapshot!(format!(
        "{}\n\ngone after main: {after_main}\nafter mtp: {after_mtp}\nafter indexer: {after_indexer}\n",
        told.join("\n")
    ));
    // What is not converted is checked, and the container is that of one run.
    place.convert(&[&G32[..], &["--mtp", "--indexer", "--consume"]].concat());
    let mut whole = Place::in_memory();
    tiny(false).store(&whole.source);
    whole.convert(&[&G32[..], &["--mtp", "--indexer"]].concat());
    let of = |place: &Place| weights(&contents(&place.container).unwrap());
    assert!(of(&place) == of(&whole));
    whole.container = whole.root.path().join("x");
}

#[test]
fn what_cannot_be_consumed_is_refused() {
    let mut told = String::new();
    let consume = [&G32[..], &["--mtp", "--indexer", "--consume"]].concat();
    let place = Place::in_memory();
    tiny(false).store(&place.source);
    let shard = place.source.join("model-00002-of-00004.safetensors");
    let aside = place.root.path().join("blob");
    fs::rename(&shard, &aside).unwrap();
    std::os::unix::fs::symlink(&aside, &shard).unwrap();
    told += &format!("## a link\n{}\n", place.refused(&consume));
    fs::remove_file(&shard).unwrap();
    // One that comes later.
    let container = place.container.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            until("the other files", || names(&container).len() > 5);
            std::os::unix::fs::symlink(&aside, &shard).unwrap();
        });
        let faults = follow(&place, &Options { consume: true, ..following() }, &Listener::default()).unwrap_err();
        told += &format!("## a link that comes late\n{}\n", place.redacted(faults.to_string().as_bytes()));
    });
    assert!(aside.exists() && shard.is_symlink());

    let mut single = tiny(false);
    let all: Vec<(String, _)> = single.files.values().flat_map(|shard| shard.tensors.clone()).collect();
    single.files.clear();
    all.into_iter().for_each(|(name, tensor)| single.add("model.safetensors", &name, tensor));
    single.without_index();
    let place = Place::of(&single);
    told += &format!("## a model in one file without an index\n{}\n", place.refused(&consume));
    for flags in [["--consume", "--stats"], ["--follow", "--stats"], ["--follow", "--allow-incomplete"]] {
        told += &format!("## {}\n{}\n", flags.join(" "), place.refused(&[&G32[..], &flags].concat()));
    }
    assert_snapshot!(told);
}

#[test]
fn a_consumed_conversion_runs_again() {
    let place = Place::in_memory();
    tiny(true).store(&place.source);
    let shard = "model-00002-of-00004.safetensors";
    let kept = fs::read(place.source.join(shard)).unwrap();
    let report = place.run(consuming()).unwrap();
    assert_eq!(report.consumed.len(), 4);
    let before = contents(&place.container).unwrap();
    for options in [consuming(), all_passes(), Options { consume: true, ..following() }] {
        let report = place.run(options).unwrap();
        assert!(report.consumed.is_empty() && contents(&place.container).unwrap() == before);
    }
    let arguments = [&G32[..], &["--mtp", "--indexer", "--consume"]].concat();
    let said = text(&place.output(&arguments).stdout);
    assert!(said.contains("6 of them finished by an earlier run") && said.contains("disk needed: 0 "), "{said}");
    // One that is downloaded again goes again: nothing needs it.
    fs::write(place.source.join(shard), &kept).unwrap();
    assert_eq!(place.run(consuming()).unwrap().consumed, [shard]);
    assert!(contents(&place.container).unwrap() == before && !place.source.join(shard).exists());
    // Without its source a damaged file cannot be written anew, and nothing else is lost.
    fs::remove_file(place.container.join("out-00001.safetensors")).unwrap();
    assert_snapshot!(place.refused(&arguments));
}

#[test]
fn impatience_is_told() {
    let place = Place::in_memory();
    tiny(false).store(&place.source);
    fs::remove_file(place.source.join("model-00001-of-00004.safetensors")).unwrap();
    fs::remove_file(place.source.join("tokenizer.json")).unwrap();
    let shard = place.source.join("model-00003-of-00004.safetensors");
    fs::write(place.source.join("model-00003-of-00004.safetensors.aria2"), "").unwrap();
    support::shards::edit_file(&shard, |bytes| bytes.truncate(bytes.len() / 2));
    support::shards::edit_file(&place.source.join("model-00004-of-00004.safetensors"), |b| b.truncate(b.len() - 1));
    let mut told = String::new();
    let impatient =
        Options { follow: Some(Follow { patience: Some(Duration::from_millis(300)), ..FOLLOW }), ..groups_of_32() };
    let mut tell = |title: &str| {
        let faults = follow(&place, &impatient, &Listener::default()).unwrap_err();
        told += &format!("## {title}\n{}\n", place.redacted(faults.to_string().as_bytes()));
    };
    tell("shards");
    fs::remove_file(place.source.join("config.json")).unwrap();
    tell("config.json");
    fs::remove_dir_all(&place.source).unwrap();
    tell("the directory");
    assert_snapshot!(told);
}

/// A pass that was not asked for is not waited for.
#[test]
fn only_what_is_needed_is_waited_for() {
    let (place, writer, _) = arriving(&tiny(false), 1);
    let mut random = Random(1);
    // The MTP layer lies in the last shards.
    for name in names(&writer.from).iter().filter(|name| !name.starts_with("model-00001")) {
        writer.write(name, How::Growing, &mut random);
    }
    let only = Options { passes: vec![Pass::Mtp], follow: Some(FOLLOW), ..groups_of_32() };
    let report = follow(&place, &only, &Listener::default()).unwrap();
    assert!(report.files.iter().all(|file| file.name.starts_with("out-mtp-")), "{:?}", report.files);
}

/// Looks at the open files of this process whenever a new file is begun.
struct OpenFiles {
    source: PathBuf,
    removed_and_open: Mutex<Vec<String>>,
}

impl Progress for OpenFiles {
    fn start(&self, _source_bytes: u64) {}
    fn file(&self, _name: &str) {
        let source = self.source.to_string_lossy().into_owned();
        let open = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        let open = open.map(|path| path.to_string_lossy().into_owned());
        let removed = open.filter(|path| path.starts_with(&source) && path.ends_with(" (deleted)"));
        self.removed_and_open.lock().unwrap().extend(removed);
    }
    fn advance(&self, _source_bytes: u64, _output_bytes: u64) {}
    fn end(&self) {}
}

/// A removed file keeps its space for as long as somebody has it open.
#[test]
#[cfg(target_os = "linux")]
fn what_is_consumed_gives_its_space_back() {
    let place = Place::of(&tiny(false));
    let progress = OpenFiles { source: place.source.clone(), removed_and_open: Mutex::default() };
    let report = Job::prepare(&place.source, &place.container, consuming()).unwrap().run(&progress).unwrap();
    assert!(report.consumed.len() > 1);
    assert_eq!(progress.removed_and_open.into_inner().unwrap(), Vec::<String>::new());
}

/// The files of one shard follow each other, so that it can go before the next one is opened.
#[test]
fn a_shard_goes_before_the_next_is_begun() {
    let place = Place::of(&tiny(false));
    let report = place.run(consuming()).unwrap();
    let mut sorted = report.consumed.clone();
    sorted.sort();
    assert_eq!(report.consumed, sorted);
}

/// A downloader that was started again brings what is gone: it goes again, with and without records of its own.
#[test]
fn what_is_downloaded_again_goes_again() {
    let shards = tiny(false);
    let place = Place::of(&shards);
    place.run(consuming()).unwrap();
    let container = contents(&place.container);
    let fresh = Place::of(&shards);
    for records in [false, true] {
        for name in support::convert::contents(&fresh.source).unwrap().into_keys() {
            fs::copy(fresh.source.join(&name), place.source.join(&name)).unwrap();
            let name = name.to_str().unwrap();
            if records && name.ends_with(".safetensors") {
                let folder = place.source.join(".cache/huggingface/download");
                fs::create_dir_all(&folder).unwrap();
                let hash = coliconv::container::manifest::hex(&sha2::Sha256::digest(
                    fs::read(place.source.join(name)).unwrap(),
                ));
                fs::write(folder.join(format!("{name}.metadata")), format!("commit\n{hash}\n9999999999\n")).unwrap();
            }
        }
        let options = Options { consume: true, ..following() };
        follow(&place, &options, &Listener::default()).unwrap();
        assert!(weights(&contents(&place.source).unwrap()).is_empty(), "with records: {records}");
        assert!(contents(&place.container) == container);
    }
}

/// What is gone on purpose is not missing.
#[test]
fn a_pass_is_added_after_its_neighbours_were_consumed() {
    let place = Place::of(&tiny(false));
    place.run(consuming()).unwrap();
    let before = contents(&place.container);
    let report = place.run(Options { passes: vec![Pass::Main], ..all_passes() }).unwrap();
    assert!(report.warnings.is_empty(), "{:?}", report.warnings);
    assert!(contents(&place.container) == before);
}

/// What a damaged file of another part was made from stays.
#[test]
fn damage_in_another_part_keeps_what_it_was_made_from() {
    let shards = support::convert::load(
        &support::synthetic::Synthetic::new(support::synthetic::small_config()).shards(4).scales_apart(),
    );
    let place = Place::of(&shards);
    let part = |number| Options {
        part: coliconv::part::Part::new(number, 2),
        consume: true,
        passes: Pass::ALL.to_vec(),
        ..groups_of_32()
    };
    place.run(part(1)).unwrap();
    let first = weights(&contents(&place.container).unwrap()).into_keys().next().unwrap();
    let path = place.container.join(first);
    support::shards::edit_file(&path, |bytes| *bytes.last_mut().unwrap() ^= 1);
    assert!(place.run(part(2)).is_err());
    fs::remove_file(&path).unwrap();
    place.run(Options { part: None, ..part(1) }).unwrap();
    assert!(weights(&contents(&place.source).unwrap()).is_empty());
}
