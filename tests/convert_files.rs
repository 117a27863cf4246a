//! Files of a checkpoint that are missing, broken, odd or elsewhere; and small files, which are all carried along.

mod support;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use insta::assert_snapshot;
use serde_json::Value;
use support::convert::{G32, Place, contents, small, text, weights};
use support::shards::{edit_file, edit_header};
use support::synthetic::{Kind, Synthetic, small_config};

const SECOND: &str = "model-00002-of-00003.safetensors";

fn make_pipe(path: &Path) {
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

/// What happens to the files of a checkpoint.
type Damage = (&'static str, fn(&Path));

#[test]
fn broken_files_are_refused() {
    let damages: [Damage; 22] = [
        ("a missing shard", |source| fs::remove_file(source.join(SECOND)).unwrap()),
        ("a shard that is a link to nothing", |source| {
            fs::remove_file(source.join(SECOND)).unwrap();
            symlink("../../blobs/0123", source.join(SECOND)).unwrap();
        }),
        ("a shard of no bytes", |source| fs::write(source.join(SECOND), "").unwrap()),
        ("a shard that is cut off", |source| edit_file(&source.join(SECOND), |bytes| bytes.truncate(30_000))),
        ("a byte too many", |source| edit_file(&source.join(SECOND), |bytes| bytes.push(0))),
        ("a shard of text", |source| {
            fs::write(source.join(SECOND), "version https://git-lfs.github.com/spec/v1\n").unwrap()
        }),
        ("a header that is no JSON", |source| edit_header(&source.join(SECOND), |text| text[5] = b'\0')),
        ("a directory of a weight file's name", |source| fs::create_dir(source.join("x.safetensors")).unwrap()),
        ("a pipe of a weight file's name", |source| make_pipe(&source.join("x.safetensors"))),
        ("a pipe", |source| make_pipe(&source.join("notes"))),
        ("a pipe for config.json", |source| {
            fs::remove_file(source.join("config.json")).unwrap();
            make_pipe(&source.join("config.json"));
        }),
        ("a link to nothing", |source| symlink("../blobs/4567", source.join("chat_template.jinja")).unwrap()),
        ("no config.json", |source| fs::remove_file(source.join("config.json")).unwrap()),
        ("half a config.json", |source| edit_file(&source.join("config.json"), |bytes| bytes.truncate(99))),
        ("a config.json of no bytes", |source| fs::write(source.join("config.json"), "").unwrap()),
        ("a key of config.json twice", |source| {
            edit_file(&source.join("config.json"), |bytes| drop(bytes.splice(1..1, *b"\"model_type\": \"x\",")));
        }),
        ("an index that is no JSON", |source| fs::write(source.join("model.safetensors.index.json"), "[").unwrap()),
        ("an index without a map", |source| fs::write(source.join("model.safetensors.index.json"), "{}").unwrap()),
        ("an index with a name twice", |source| {
            let index = r#"{"metadata": {}, "weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}"#;
            fs::write(source.join("model.safetensors.index.json"), index).unwrap();
        }),
        ("half a generation_config.json", |source| fs::write(source.join("generation_config.json"), "{").unwrap()),
        ("no directory", |source| fs::rename(source, source.with_file_name("elsewhere")).unwrap()),
        ("a file", |source| {
            fs::rename(source, source.with_file_name("elsewhere")).unwrap();
            fs::write(source, "").unwrap();
        }),
    ];
    let mut told = String::new();
    for (title, damage) in damages {
        println!("{title}");
        let place = Place::of(&small());
        damage(&place.source);
        told += &format!("## {title}\n{}\n", place.refused(&G32));
    }
    assert_snapshot!(told);
}

#[test]
fn containers_are_no_sources() {
    let mut told = String::new();
    for (title, arguments) in [("a container", &[][..]), ("a bare container", &["--bare"])] {
        let mut place = Place::of(&small());
        place.convert(&[&G32, arguments].concat());
        place.source = std::mem::replace(&mut place.container, place.root.path().join("again"));
        told += &format!("## {title}\n{}\n", place.refused(&G32));
        // Whatever is left of one: its names give it away.
        for trace in ["coliconv.manifest.json", ".coliconv-progress.json"] {
            let _ = fs::remove_file(place.source.join(trace));
        }
        told += &format!("## {title}, without the files of its own\n{}\n", place.refused(&G32));
        for (number, name) in weights(&contents(&place.source).unwrap()).keys().enumerate() {
            let renamed = place.source.join(format!("model-{number}.safetensors"));
            fs::rename(place.source.join(name), renamed).unwrap();
        }
        let _ = fs::remove_file(place.source.join("model.safetensors.index.json"));
        fs::write(place.source.join("model.safetensors.index.json"), r#"{"weight_map": {}}"#).unwrap();
        told += &format!("## {title}, with other names\n{}\n", place.refused(&G32));
    }
    assert_snapshot!(told);
}

#[test]
fn every_small_file_is_carried_along() {
    let mut shards = small();
    for (name, bytes) in [
        ("chat_template.jinja", &b"{{ x }}"[..]),
        ("LICENSE", b"free\n"),
        ("README.md", b"# model\n"),
        ("empty.txt", b""),
        ("merges.txt", b"a b\r\n\xff\x00"),
        ("vocab.json", b"{}"),
    ] {
        shards.others.insert(name.to_owned(), bytes.to_vec());
    }
    let place = Place::of(&shards);
    for (name, bytes) in [(".gitattributes", ""), ("x.bin", "weights"), ("x.safetensors.incomplete", "half")] {
        fs::write(place.source.join(name), bytes).unwrap();
    }
    fs::create_dir(place.source.join(".cache")).unwrap();
    let strange = OsStr::from_bytes(b"na\xffme.txt");
    fs::write(place.source.join(strange), "x").unwrap();
    let hostile = ["a\u{1b}[2Jb.txt", "a\nb.txt", "a\\b.txt", "a\u{202e}b.txt"];
    hostile.iter().for_each(|name| fs::write(place.source.join(name), "x").unwrap());
    let output = place.output(&G32);
    let said = place.redacted(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(said.matches("a backslash, so the file is not carried along").count(), hostile.len(), "{said}");
    assert!(!said.contains('\u{1b}') && !said.contains('\u{202e}'), "{said}");
    assert!(said.contains("the file's name is not valid UTF-8, so the file is not carried along"), "{said}");
    let carried = contents(&place.container).unwrap();
    for (name, bytes) in &shards.others {
        assert_eq!(carried[Path::new(name)], *bytes, "{name}");
    }
    for name in [".gitattributes", "x.bin", "x.safetensors.incomplete", ".cache"] {
        assert!(!carried.contains_key(Path::new(name)), "{name}");
    }
    assert!(!carried.contains_key(Path::new(strange)));
    assert!(hostile.iter().all(|name| !carried.contains_key(Path::new(name))));
}

#[test]
fn missing_small_files_are_warnings() {
    let mut shards = small();
    shards.others.clear();
    shards.set_config("eos_token_id", Value::Null);
    shards.total_size(3.into());
    let place = Place::of(&shards);
    let output = place.output(&[&G32[..], &["--dry-run"]].concat());
    assert_eq!(output.status.code(), Some(0));
    assert_snapshot!(place.redacted(&output.stderr));
}

#[test]
fn config_json_loses_its_quantization_and_nothing_else() {
    let place = Place::copy("nano");
    place.convert(&[]);
    let read = |path: &Path| fs::read_to_string(path.join("config.json")).unwrap();
    let (before, after) = (read(&place.source), read(&place.container));
    let begin = before.find(",\n  \"quantization_config\"").unwrap();
    let end = begin + before[begin..].find("\n  }").unwrap() + 4;
    assert_eq!(after, format!("{}{}", &before[..begin], &before[end..]));
    let bf16 = Place::made(&Synthetic::new(small_config()).kind(Kind::Bf16));
    edit_file(&bf16.source.join("config.json"), |bytes| bytes.extend(b" \n\t\n"));
    bf16.convert(&G32);
    assert_eq!(read(&bf16.container), read(&bf16.source));
}

#[test]
fn a_download_cache_of_links_is_a_checkpoint() {
    let plain = Place::of(&small());
    plain.convert(&G32);
    let linked = Place::new();
    let (blobs, snapshot) = (linked.root.path().join("blobs"), linked.root.path().join("snapshots/main"));
    fs::create_dir(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    for (number, entry) in fs::read_dir(&plain.source).unwrap().enumerate() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), blobs.join(number.to_string())).unwrap();
        symlink(format!("../../blobs/{number}"), snapshot.join(entry.file_name())).unwrap();
    }
    let linked = Place { source: snapshot, ..linked };
    linked.convert(&G32);
    let (ours, theirs) = (contents(&linked.container).unwrap(), contents(&plain.container).unwrap());
    assert!(weights(&ours) == weights(&theirs) && ours.len() == theirs.len());
    let is_link = |name: &Path| linked.container.join(name).symlink_metadata().unwrap().is_symlink();
    assert!(!ours.keys().any(|name| is_link(name)));
    // Its blobs are the source, too.
    let into = Place { container: linked.root.path().join("more"), source: linked.source.clone(), ..Place::new() };
    fs::create_dir(&into.container).unwrap();
    fs::hard_link(blobs.join("0"), into.container.join("0")).unwrap();
    assert!(text(&into.output(&G32).stderr).contains("error: "));
}

#[test]
fn files_have_the_mode_of_the_umask() {
    let place = Place::of(&small());
    let mut shell = assert_cmd::Command::new("sh");
    let program = assert_cmd::cargo::cargo_bin("coliconv");
    shell.args(["-c", "umask 027; \"$@\"", "sh"]).arg(program).arg("convert").arg(&place.source).arg(&place.container);
    shell.args(G32).assert().success();
    for name in contents(&place.container).unwrap().keys() {
        let mode = fs::metadata(place.container.join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640, "{}", name.display());
    }
    assert_eq!(fs::metadata(&place.container).unwrap().permissions().mode() & 0o777, 0o750);
}

#[test]
fn paths_may_be_relative_or_end_in_a_slash() {
    let place = Place::of(&small());
    place.convert(&G32);
    let whole = weights(&contents(&place.container).unwrap());
    let root = place.root.path();
    for (from, arguments, container) in [
        (root.to_owned(), ["checkpoint/", "a/"], root.join("a")),
        (place.source.clone(), [".", "../b"], root.join("b")),
        (place.source.clone(), ["../checkpoint/.", "../c/d/../e"], root.join("c/e")),
        (root.join("f"), ["../checkpoint", "."], root.join("f")),
    ] {
        fs::create_dir_all(&from).unwrap();
        let mut command = assert_cmd::Command::cargo_bin("coliconv").unwrap();
        command.current_dir(&from).arg("convert").args(arguments).args(G32).assert().success();
        assert!(weights(&contents(&container).unwrap()) == whole, "{arguments:?}");
    }
    let mut command = assert_cmd::Command::cargo_bin("coliconv").unwrap();
    let same = command.current_dir(&place.source).args(["convert", ".", "../checkpoint"]).args(G32).assert().code(2);
    assert!(text(&same.get_output().stderr).contains("source and destination are the same directory"));
}
