//! When is a file that a downloader writes whole?

mod support;

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use coliconv::checkpoint::arrival::{Arrivals, Waiting};
use sha2::{Digest, Sha256};
use support::convert::Place;
use support::crash::tiny;
use support::shards::edit_file;

const NAME: &str = "model-00002-of-00004.safetensors";

/// A change of a file, with a title.
type Edit = (&'static str, fn(&mut Vec<u8>));

/// A place with a whole checkpoint, left alone for a long time.
fn place() -> (Place, std::path::PathBuf) {
    let place = Place::in_memory();
    tiny(false).store(&place.source);
    let path = place.source.join(NAME);
    age(&path);
    (place, path)
}

fn age(path: &Path) {
    let then = SystemTime::now() - Duration::from_secs(3600);
    File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
}

fn waiting(place: &Place) -> Option<Waiting> {
    Arrivals::new(&place.source, Duration::from_secs(10)).waiting(NAME)
}

fn sha256(path: &Path) -> String {
    Sha256::digest(fs::read(path).unwrap()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_whole_file_is_left_alone_and_has_nothing_beside_it() {
    let (place, path) = place();
    assert_eq!(waiting(&place), None);
    for ending in [".part", ".incomplete", ".aria2", ".partial", ".crdownload", ".download", ".tmp"] {
        let mark = place.source.join(format!("{NAME}{ending}"));
        fs::write(&mark, "").unwrap();
        assert_eq!(waiting(&place), Some(Waiting::Marked(format!("{NAME}{ending}"))));
        fs::remove_file(mark).unwrap();
    }
    fs::write(place.source.join(format!("{NAME}.lock")), "").unwrap();
    fs::write(place.source.join("model-00003-of-00004.safetensors.part"), "").unwrap();
    assert_eq!(waiting(&place), None);
    File::options().write(true).open(&path).unwrap().set_modified(SystemTime::now()).unwrap();
    assert_eq!(waiting(&place), Some(Waiting::Fresh));
    fs::remove_file(&path).unwrap();
    assert_eq!(waiting(&place), Some(Waiting::Absent));
}

#[test]
fn contents_must_be_what_the_header_says() {
    let edits: [Edit; 5] = [
        ("cut off", |bytes| bytes.truncate(bytes.len() - 1)),
        ("longer", |bytes| bytes.push(0)),
        ("empty", Vec::clear),
        ("half a header", |bytes| bytes.truncate(100)),
        ("zeros", |bytes| bytes.fill(0)),
    ];
    for (title, edit) in edits {
        let (place, path) = place();
        edit_file(&path, edit);
        age(&path);
        assert!(matches!(waiting(&place), Some(Waiting::Header(_))), "{title}: {:?}", waiting(&place));
    }
    let (place, path) = place();
    let bytes = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let file = File::create(&path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes[..8192], 0).unwrap();
    age(&path);
    assert_eq!(waiting(&place), Some(Waiting::Hole(8192)));
}

#[test]
fn the_records_of_a_download_decide() {
    let (place, path) = place();
    let right = sha256(&path);
    let list = place.source.join("SHA256SUMS");
    for line in [format!("{right}  {NAME}"), format!("{} *./{NAME}", right.to_uppercase()), format!("{right} {NAME}")] {
        fs::write(&list, format!("{} other\n{line}\n", "0".repeat(64))).unwrap();
        assert_eq!(waiting(&place), None, "{line}");
    }
    fs::write(&list, format!("{}  {NAME}\n", "0".repeat(64))).unwrap();
    assert!(matches!(waiting(&place), Some(Waiting::Hash { found, .. }) if found == right));
    // A list that comes anew is read anew.
    let mut arrivals = Arrivals::new(&place.source, Duration::from_millis(1));
    assert!(matches!(arrivals.waiting(NAME), Some(Waiting::Hash { .. })));
    fs::write(&list, format!("{right}  {NAME}\n")).unwrap();
    assert_eq!(arrivals.waiting(NAME), None);
    fs::remove_file(list).unwrap();

    let folder = place.source.join(".cache/huggingface/download");
    fs::create_dir_all(&folder).unwrap();
    let record = |etag: &str, seconds_ago: u64| {
        let time = SystemTime::now() - Duration::from_secs(seconds_ago);
        let time = time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
        fs::write(folder.join(format!("{NAME}.metadata")), format!("{}\n{etag}\n{time}\n", "1".repeat(40))).unwrap();
    };
    record(&right, 0);
    assert_eq!(waiting(&place), None);
    record(&"0".repeat(64), 0);
    assert!(matches!(waiting(&place), Some(Waiting::Hash { .. })));
    // Of an older file, and of a file whose etag is no SHA-256.
    record(&"0".repeat(64), 7200);
    assert_eq!(waiting(&place), None);
    record(&"0".repeat(40), 0);
    assert_eq!(waiting(&place), None);
}

/// Without any record, bytes that are wrong in a file of the right size cannot be told: with one they are.
#[test]
fn damage_is_seen_where_a_hash_is_known() {
    let (place, path) = place();
    let right = sha256(&path);
    edit_file(&path, |bytes| *bytes.last_mut().unwrap() ^= 1);
    age(&path);
    assert_eq!(waiting(&place), None);
    fs::write(place.source.join("SHA256SUMS"), format!("{right}  {NAME}\n")).unwrap();
    assert!(matches!(waiting(&place), Some(Waiting::Hash { .. })));
}
