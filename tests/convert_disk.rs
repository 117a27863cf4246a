//! Disks that are full or read-only, sources that change, and what earlier runs and others left in a directory.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;

use coliconv::convert::{Job, Progress};
use insta::assert_snapshot;
use serde_json::json;
use support::convert::{G32, Place, contents, groups_of_32, load, small, text, weights};
use support::crash::{all_passes, parts, tiny};
use support::processes::{names, temporary_files};
use support::shards::{Shards, edit_file};
use support::synthetic::{Synthetic, small_config};

const SHARD: &str = "model-00002-of-00003.safetensors";
const PROGRESS: &str = ".coliconv-progress.json";

/// A change of a file, with a title.
type Damage = (&'static str, fn(&mut Vec<u8>));

/// Runs a script in a mount namespace of its own, where the user is root. Without one the test cannot be made.
fn in_namespace(script: &str, arguments: &[&Path]) -> Output {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-euc", script, "sh"]).args(arguments);
    let output = command.output().expect("unshare (util-linux) is installed");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !said.contains("unshare failed") && !said.contains("unshare: ") && !said.contains("mount: "),
        "the system must allow user namespaces (kernel.unprivileged_userns_clone, \
         kernel.apparmor_restrict_unprivileged_userns) and mounts in them: {said}"
    );
    output
}

fn coliconv() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_coliconv"))
}

/// What is printed between lines that begin with `==`, without the plan.
fn told(place: &Place, output: &Output) -> String {
    let all = place.redacted(&output.stdout);
    let wanted = |line: &&str| line.starts_with("==") || line.contains("error: ") || line.contains("hint: ");
    all.lines().filter(wanted).map(|line| format!("{line}\n")).collect()
}

#[test]
fn a_full_disk_keeps_what_is_finished() {
    let mut config = small_config();
    for (key, value) in json!({"hidden_size": 480, "moe_intermediate_size": 1048}).as_object().unwrap() {
        config[key] = value.clone();
    }
    let mut place = Place::of(&load(&Synthetic::new(config).shards(5)));
    let reference = std::mem::replace(&mut place.container, place.root.path().join("full"));
    let full = std::mem::replace(&mut place.container, reference);
    place.convert(&G32);
    let output: u64 = contents(&place.container).unwrap().values().map(|bytes| bytes.len() as u64).sum();
    fs::create_dir(&full).unwrap();
    let script = r#"
        mount -t tmpfs -o "size=$4" tmpfs "$3"
        run() { "$1" convert "$2" "$3/container" --group-size 32 --threads 1 "$5" 2>&1 || echo "== exit $?"; }
        echo "== not enough"; run "$1" "$2" "$3" "$4" --quiet
        ls -A "$3" | sed 's/^/== there: /'
        echo "== by force"; run "$1" "$2" "$3" "$4" --force
        ls -A "$3/container" | sed 's/^/== there: /'
        for file in "$3"/container/out-*; do cmp "$file" "$6/$(basename "$file")" && echo "== whole"; done
        mount -o remount,size=1g "$3"
        echo "== after it was enlarged"; run "$1" "$2" "$3" "$4" --quiet
        diff -r "$3/container" "$6" && echo "== the same bytes"
    "#;
    let size = PathBuf::from(format!("{}k", output / 1024 * 6 / 10));
    let arguments = [coliconv(), &place.source, &full, &size, Path::new("-"), &place.container];
    let said = told(&place, &in_namespace(script, &arguments));
    let numbers = |text: &str| {
        text.split(' ')
            .map(|w| if w.parse::<u64>().is_ok() { "[N]" } else { w }.to_owned())
            .collect::<Vec<_>>()
            .join(" ")
    };
    let lines = said.lines().map(|line| if line.contains("bytes needed") { numbers(line) } else { line.to_owned() });
    assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
}

#[test]
fn read_only_directories_are_told() {
    let place = Place::of(&small());
    fs::create_dir(&place.container).unwrap();
    let mut finished = Place::of(&small());
    finished.convert(&G32);
    let script = r#"
        run() { "$@" 2>&1 || echo "== exit $?"; }
        mount --bind "$3" "$3"; mount -o remount,bind,ro "$3"
        echo "== a destination"; run "$1" convert "$2" "$3" --group-size 32 --quiet
        echo "== in a destination"; run "$1" convert "$2" "$3/new" --group-size 32 --quiet
        mount --bind "$2" "$2"; mount -o remount,bind,ro "$2"
        echo "== a source that is to be consumed"; run "$1" convert "$2" "$4/new" --group-size 32 --consume --quiet
        echo "== a source"; run "$1" convert "$2" "$4/new" --group-size 32 --quiet
    "#;
    let arguments = [coliconv(), &place.source, &place.container, finished.root.path()];
    let output = in_namespace(script, &arguments);
    let said = told(&place, &output).replace(finished.root.path().to_str().unwrap(), "[OTHER]");
    assert_snapshot!(said);
    finished.container = finished.root.path().join("new");
    assert!(finished.container.join("coliconv.manifest.json").exists());
}

/// Permissions bind everyone but root, so the test becomes somebody else where it can.
#[test]
fn permissions_are_respected() {
    let place = Place::of(&small());
    let is_root = Command::new("id").arg("-u").output().unwrap().stdout == b"0\n";
    let run = |container: &Path| {
        let mut command = Command::new(if is_root { "setpriv" } else { "env" });
        if is_root {
            command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
        }
        let program = place.root.path().join("coliconv");
        command.arg(program).arg("convert").arg(&place.source).arg(container).args(G32).arg("--quiet");
        command.output().expect("setpriv (util-linux) is installed")
    };
    fs::copy(coliconv(), place.root.path().join("coliconv")).unwrap();
    let mode = |path: &Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    mode(place.root.path(), 0o755);
    fs::create_dir(&place.container).unwrap();
    let mut said = String::new();
    let mut tell = |title: &str, container: &Path| {
        let output = run(container);
        assert_eq!(output.status.code(), Some(2), "{title}: {}", text(&output.stderr));
        said += &format!("## {title}\n{}\n", place.redacted(&output.stderr));
    };
    mode(&place.container, 0o555);
    tell("a directory that may not be written", &place.container);
    tell("a new directory in one that may not be written", &place.container.join("new"));
    mode(&place.container, 0o777);
    let shard = place.source.join(SHARD);
    mode(&shard, 0);
    tell("a shard that may not be read", &place.container);
    assert_eq!(names(&place.container), Vec::<String>::new());
    mode(&shard, 0o644);
    assert_snapshot!(said);
    let output = run(&place.container);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

/// Does something to the source when a file is begun.
struct Meddler<F: Fn() + Sync>(&'static str, Mutex<bool>, F);

impl<F: Fn() + Sync> Progress for Meddler<F> {
    fn start(&self, _source_bytes: u64) {}
    fn file(&self, name: &str) {
        if name == self.0 && !std::mem::replace(&mut *self.1.lock().unwrap(), true) {
            self.2();
        }
    }
    fn advance(&self, _source_bytes: u64, _output_bytes: u64) {}
    fn end(&self) {}
}

#[test]
fn a_shard_that_changes_while_it_is_read() {
    let place = Place::of(&small());
    let shard = place.source.join(SHARD);
    let (whole, modified) = (fs::read(&shard).unwrap(), fs::metadata(&shard).unwrap().modified().unwrap());
    let mut said = String::new();
    let edits: [(&str, &(dyn Fn() + Sync)); 5] = [
        ("it shrinks", &|| File::options().write(true).open(&shard).unwrap().set_len(1000).unwrap()),
        ("it grows", &|| File::options().write(true).open(&shard).unwrap().set_len(whole.len() as u64 + 1).unwrap()),
        ("it is written again", &|| edit_file(&shard, |bytes| *bytes.last_mut().unwrap() ^= 1)),
        ("it is replaced", &|| {
            fs::remove_file(&shard).unwrap();
            fs::write(&shard, &whole).unwrap();
        }),
        ("it is removed", &|| fs::remove_file(&shard).unwrap()),
    ];
    for (title, edit) in edits {
        let job = Job::prepare(&place.source, &place.container, groups_of_32()).unwrap();
        let faults = job.run(&Meddler("out-00001.safetensors", Mutex::new(false), edit)).unwrap_err();
        said += &format!("## {title}\n{}\n", place.redacted(faults.to_string().as_bytes()));
        assert!(place.container.join("out-00000.safetensors").exists(), "{title}: what was finished is kept");
        assert!(!place.container.join("out-00001.safetensors").exists(), "{title}");
        assert_eq!(temporary_files(&place.container), Vec::<String>::new(), "{title}");
        // The same file again, as it was.
        fs::write(&shard, &whole).unwrap();
        File::options().write(true).open(&shard).unwrap().set_modified(modified).unwrap();
    }
    place.convert(&G32);
    let again = Place::of(&small());
    again.convert(&G32);
    assert!(weights(&contents(&again.container).unwrap()) == weights(&contents(&place.container).unwrap()));
    let is_time = |word: &str| word.trim_end_matches(',').parse::<f64>().is_ok_and(|seconds| seconds > 1e9);
    let redact =
        |line: &str| line.split(' ').map(|w| if is_time(w) { "[TIME]" } else { w }).collect::<Vec<_>>().join(" ");
    assert_snapshot!(said.lines().map(redact).collect::<Vec<_>>().join("\n"));
}

/// A container of which the last file and the manifest are missing, as after a kill.
fn unfinished(shards: &Shards) -> Place {
    let place = Place::in_memory();
    shards.store(&place.source);
    let part = &parts(&all_passes(), 2)[0];
    place.run(part.clone()).unwrap();
    fs::rename(place.container.join(".coliconv-progress.1-of-2.json"), place.container.join(PROGRESS)).unwrap();
    place
}

#[test]
fn damaged_files_of_an_unfinished_container_are_told() {
    let arguments = [&G32[..], &["--mtp", "--indexer"]].concat();
    let place = unfinished(&tiny(false));
    let path = place.container.join("out-00000.safetensors");
    let whole = fs::read(&path).unwrap();
    let mut said = String::new();
    let damages: [Damage; 3] = [
        ("empty", Vec::clear),
        ("a byte less", |bytes| bytes.truncate(bytes.len() - 1)),
        ("zeros in the last 4 KiB", |bytes| bytes.iter_mut().rev().take(4096).for_each(|byte| *byte = 0)),
    ];
    for (title, damage) in damages {
        edit_file(&path, damage);
        said += &format!("## {title}\n{}\n", place.refused(&arguments));
        fs::write(&path, &whole).unwrap();
    }
    let progress = place.container.join(PROGRESS);
    let good = fs::read(&progress).unwrap();
    let damages: [Damage; 4] = [
        ("progress of a later version", |bytes| {
            let later = String::from_utf8(bytes.clone()).unwrap().replacen("\"version\": 1", "\"version\": 2", 1);
            *bytes = later.into_bytes();
        }),
        ("half of the progress", |bytes| bytes.truncate(bytes.len() / 2)),
        ("empty progress", Vec::clear),
        ("progress of zeros", |bytes| bytes.fill(0)),
    ];
    for (title, damage) in damages {
        edit_file(&progress, damage);
        said += &format!("## {title}\n{}\n", place.refused(&arguments));
        fs::write(&progress, &good).unwrap();
    }
    fs::remove_file(&path).unwrap();
    place.convert(&arguments);
    assert!(fs::read(&path).unwrap() == whole);
    let is_hash = |word: &str| word.len() == 64 && word.bytes().all(|b| b.is_ascii_hexdigit());
    let redact =
        |word: &str| if is_hash(word.trim_end_matches(',')) { "[SHA-256]".to_owned() } else { word.to_owned() };
    let lines = said.lines().map(|line| line.split(' ').map(redact).collect::<Vec<_>>().join(" "));
    assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
}

#[test]
fn stale_temporary_files_go() {
    let arguments = [&G32[..], &["--mtp", "--indexer"]].concat();
    let place = unfinished(&tiny(false));
    let precious = place.root.path().join("precious");
    fs::write(&precious, "precious").unwrap();
    let temporary = |name: &str| place.container.join(format!("{name}.coliconv-tmp"));
    fs::write(temporary("out-00001.safetensors"), "half").unwrap();
    fs::write(temporary("coliconv.manifest.json"), "half").unwrap();
    fs::write(temporary("out-00077.safetensors"), "of another time").unwrap();
    symlink(&precious, temporary("config.json")).unwrap();
    symlink(&precious, temporary("out-mtp-00000.safetensors")).unwrap();
    symlink(place.root.path().join("nothing"), temporary("tokenizer.json")).unwrap();
    place.convert(&arguments);
    assert_eq!(fs::read(&precious).unwrap(), b"precious");
    assert!(!place.root.path().join("nothing").exists());
    assert_eq!(temporary_files(&place.container), Vec::<String>::new());

    let mut said = String::new();
    let place = unfinished(&tiny(false));
    let temporary = |name: &str| place.container.join(format!("{name}.coliconv-tmp"));
    symlink(place.source.join("model-00004-of-00004.safetensors"), temporary("out-00001.safetensors")).unwrap();
    said += &format!("## a temporary file that is a link to a shard\n{}\n", place.refused(&arguments));
    fs::remove_file(temporary("out-00001.safetensors")).unwrap();
    fs::create_dir(temporary("out-00001.safetensors")).unwrap();
    let output = place.output(&arguments);
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    said += &format!("## a directory in the place of a temporary file\n{}\n", place.redacted(error.as_bytes()));
    fs::remove_dir(temporary("out-00001.safetensors")).unwrap();
    fs::create_dir(temporary("notes")).unwrap();
    place.convert(&arguments);
    assert!(temporary("notes").is_dir(), "a directory is nobody's temporary file");
    assert_snapshot!(said);
}

#[test]
fn names_that_are_one_on_other_systems() {
    let mut said = String::new();
    for (one, other) in [
        ("LICENSE", "license"),
        ("Config.JSON", "config.json"),
        ("OUT-00000.SAFETENSORS", ""),
        ("Coliconv.Manifest.json", ""),
        ("MODEL.SAFETENSORS.INDEX.JSON", ""),
        ("Ä.txt", "ä.txt"),
    ] {
        let place = Place::of(&small());
        fs::write(place.source.join(one), "one").unwrap();
        if !other.is_empty() && other != "config.json" {
            fs::write(place.source.join(other), "other").unwrap();
        }
        said += &format!("## {one} and {other}\n{}\n", place.refused(&G32));
    }
    assert_snapshot!(said);
}

#[test]
fn links_in_the_container() {
    let mut said = String::new();
    let place = unfinished(&tiny(false));
    let arguments = [&G32[..], &["--mtp", "--indexer"]].concat();
    let mut tell = |title: &str| said += &format!("## {title}\n{}\n", place.refused(&arguments));
    let link = |from: &str, to: &Path| symlink(to, place.container.join(from)).unwrap();
    let unlink = |name: &str| fs::remove_file(place.container.join(name)).unwrap();
    link("tokenizer.json", &place.source.join("tokenizer.json"));
    tell("a small file");
    unlink("tokenizer.json");
    let precious = place.root.path().join("precious");
    fs::write(&precious, "precious").unwrap();
    link(".coliconv.lock", &precious);
    tell("the lock");
    unlink(".coliconv.lock");
    let nothing = place.root.path().join("nothing");
    link(".coliconv.lock", &nothing);
    tell("the lock, to nothing");
    unlink(".coliconv.lock");
    link("out-00001.safetensors", &precious);
    tell("a weight file");
    unlink("out-00001.safetensors");
    link("coliconv.manifest.json", &precious);
    tell("the manifest");
    unlink("coliconv.manifest.json");
    assert_eq!(fs::read(&precious).unwrap(), b"precious");
    assert!(!nothing.exists());
    place.convert(&arguments);
    assert_snapshot!(said);
}
