//! Runs that fail or die at a chosen change of the file system, and what must be true afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use coliconv::convert::Options;
use coliconv::error::Faults;
use coliconv::io::hook::{self, Change, Hook};
use coliconv::io::is_working_name;
use coliconv::part::Part;
use coliconv::report::ConvertReport;
use coliconv::roles::Pass;
use serde_json::{Value, json};

use super::convert::{Place, contents, groups_of_32, load};
use super::disk::{Disk, Left, Omit, Random};
use super::shards::Shards;
use super::synthetic::{Synthetic, small_config};

/// The hook is one for the whole process: a case holds this, so that no other is hit by it.
static ALONE: Mutex<()> = Mutex::new(());

/// A hook, installed until this is dropped.
pub struct Hooked(());

impl Hooked {
    /// Installs a hook.
    pub fn with(hook: impl Fn(Change<'_>, &Path) -> io::Result<()> + Send + Sync + 'static) -> Hooked {
        let hook: Arc<Hook> = Arc::new(hook);
        hook::install(Some(hook));
        Hooked(())
    }
}

impl Drop for Hooked {
    fn drop(&mut self) {
        hook::install(None);
    }
}

/// What happens at the chosen change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// From it on nothing is done any more, as after the death of the process.
    Death,
    /// The same, but half of the bytes of a write still reach the file, and they are wrong.
    Torn,
    /// It fails with this error, and everything after it succeeds.
    Failure(io::ErrorKind),
}

/// The model that is converted: as small as one can be that has every pass.
pub fn tiny_config() -> Value {
    let mut config = small_config();
    let sizes = json!({
        "num_hidden_layers": 2, "indexer_types": ["full", "shared"], "n_routed_experts": 2, "num_experts_per_tok": 1,
        "hidden_size": 96, "intermediate_size": 96, "moe_intermediate_size": 96, "vocab_size": 301,
    });
    for (key, value) in sizes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

/// It in four shards, of which scales of the one may lie in the next.
pub fn tiny(scales_apart: bool) -> Shards {
    let synthetic = Synthetic::new(tiny_config()).shards(4);
    load(&if scales_apart { synthetic.scales_apart() } else { synthetic })
}

/// All passes at settings at which no width is misread.
pub fn all_passes() -> Options {
    Options { passes: Pass::ALL.to_vec(), ..groups_of_32() }
}

/// The parts of a conversion, as one command each.
pub fn parts(options: &Options, of: usize) -> Vec<Options> {
    (1..=of).map(|number| Options { part: Part::new(number, of), ..options.clone() }).collect()
}

/// A conversion by one or more commands, with what must come of it.
pub struct Case {
    pub place: Place,
    pub commands: Vec<Options>,
    /// Every file of the finished container.
    pub reference: BTreeMap<PathBuf, Vec<u8>>,
    /// The names of the source that stay.
    pub stays: BTreeSet<PathBuf>,
    /// The source as it was, to be linked from.
    master: PathBuf,
    source_names: Vec<PathBuf>,
    _alone: MutexGuard<'static, ()>,
}

impl Case {
    /// The reference is converted by one run that consumes nothing.
    pub fn new(shards: &Shards, commands: Vec<Options>) -> Case {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let place = Place::in_memory();
        let master = place.root.path().join("master");
        shards.store(&master);
        let source_names: Vec<PathBuf> = contents(&master).unwrap().into_keys().collect();
        for name in &source_names {
            let file = File::options().write(true).open(master.join(name)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_nanos(1_700_000_000_123_456_789)).unwrap();
        }
        let stays = BTreeSet::new();
        let mut case = Case { place, commands, reference: BTreeMap::new(), stays, master, source_names, _alone: alone };
        case.fresh();
        let whole = Options { part: None, consume: false, follow: None, ..case.commands[0].clone() };
        case.place.run(whole).unwrap();
        case.reference = contents(&case.place.container).unwrap();
        case.fresh();
        case.run().unwrap();
        case.stays = contents(&case.place.source).unwrap().into_keys().collect();
        case.check_finished("without a fault");
        case
    }

    /// Source as it was, no container.
    pub fn fresh(&self) {
        for directory in [&self.place.source, &self.place.container] {
            let _ = fs::remove_dir_all(directory);
        }
        fs::create_dir(&self.place.source).unwrap();
        self.source_names.iter().for_each(|name| self.restore(name));
    }

    /// Puts a file of the source where it was.
    pub fn restore(&self, name: &Path) {
        fs::hard_link(self.master.join(name), self.place.source.join(name)).unwrap();
    }

    /// Runs the commands one after the other, up to the first that fails.
    pub fn run(&self) -> Result<Vec<ConvertReport>, Faults> {
        self.commands.iter().map(|options| self.place.run(options.clone())).collect()
    }

    /// The changes that the commands make: which of them only write.
    pub fn changes(&self) -> Vec<bool> {
        self.fresh();
        let changes = Arc::new(Mutex::new(Vec::new()));
        let seen = changes.clone();
        let hooked = Hooked::with(move |change, _| {
            seen.lock().unwrap().push(matches!(change, Change::Write { .. }));
            Ok(())
        });
        self.run().unwrap();
        drop(hooked);
        changes.lock().unwrap().clone()
    }

    /// Runs the commands until change number `at` ends them as told.
    pub fn run_until(&self, at: usize, end: End) -> Result<Vec<ConvertReport>, Faults> {
        self.fresh();
        self.go_on_until(at, end)
    }

    /// The same from where earlier runs came to.
    pub fn go_on_until(&self, at: usize, end: End) -> Result<Vec<ConvertReport>, Faults> {
        let count = AtomicUsize::new(0);
        let _hooked = Hooked::with(move |change, path| {
            let number = count.fetch_add(1, Ordering::SeqCst);
            match end {
                End::Failure(kind) if number == at => Err(kind.into()),
                End::Torn if number == at => {
                    tear(change, path);
                    Err(dead())
                }
                End::Death | End::Torn if number >= at => Err(dead()),
                _ => Ok(()),
            }
        });
        self.run()
    }

    /// No file is half under its final name, at any time.
    pub fn check_unharmed(&self, when: &str) {
        for (name, bytes) in contents(&self.place.container).unwrap_or_default() {
            if is_working_name(&name.to_string_lossy()) {
                continue;
            }
            let expected = self.reference.get(&name);
            assert!(expected == Some(&bytes), "{when}: {} is not what it should be", name.display());
        }
    }

    /// The container is that of one run, and the source has what stays, untouched.
    pub fn check_finished(&self, when: &str) {
        let found = contents(&self.place.container).unwrap_or_default();
        let names = |map: &BTreeMap<PathBuf, Vec<u8>>| map.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&found), names(&self.reference), "{when}");
        for (name, bytes) in &self.reference {
            assert!(found[name] == *bytes, "{when}: {} differs: {}", name.display(), show(&found[name]));
        }
        let source = contents(&self.place.source).unwrap();
        assert_eq!(source.keys().cloned().collect::<BTreeSet<_>>(), self.stays, "{when}: what stays of the source");
        for (name, bytes) in source {
            assert!(fs::read(self.master.join(&name)).unwrap() == bytes, "{when}: {} was changed", name.display());
        }
    }

    /// The commands once more end well.
    pub fn check_next_run(&self, when: &str) {
        if let Err(faults) = self.run() {
            panic!("{when}: the next run says: {faults}");
        }
        self.check_finished(when);
    }

    /// Ends a run at every change, of writes at every `step`th, and sees what the next one makes of it. Failures for one or
    /// the other reason take turns.
    pub fn sweep(&self, title: &str, ends: &[End], step: usize) {
        let changes = self.changes();
        let chosen: Vec<usize> = (0..changes.len()).filter(|&at| !changes[at] || at % step == 0).collect();
        println!("{title}: {} changes, {} of them tried", changes.len(), chosen.len());
        for (&end, &at) in ends.iter().flat_map(|end| chosen.iter().map(move |at| (end, at))) {
            let pointless = match end {
                End::Torn => !changes[at],
                End::Failure(kind) => (at % 2 == 0) != (kind == io::ErrorKind::StorageFull),
                End::Death => false,
            };
            if pointless {
                continue;
            }
            let when = format!("{title}, {end:?} at change {at} of {}", changes.len());
            let outcome = self.run_until(at, end);
            self.check_unharmed(&when);
            // What cannot be tidied up at the end is no reason to refuse.
            if let Err(faults) = outcome {
                check_told(&faults, self.place.root.path(), &when);
            }
            self.check_next_run(&when);
        }
    }

    /// Dies, and dies again while it goes on, at random places.
    pub fn die_twice(&self, rounds: usize, random: &mut Random) {
        let changes = self.changes().len();
        for round in 0..rounds {
            let (first, second) = (random.below(changes), random.below(changes));
            let when = format!("round {round}: dead at change {first}, then at {second}");
            let _ = self.run_until(first, End::Torn);
            let _ = self.go_on_until(second, End::Torn);
            self.check_unharmed(&when);
            self.check_next_run(&when);
        }
    }

    /// Cuts the power at every change, and sees what the next run makes of each thing that this may leave. First the run
    /// may be killed once before, after so many changes, and be begun anew. Returns what went wrong.
    pub fn cut_power(&self, omit: Omit, killed_at: Option<usize>, mixed: usize, seed: u64) -> Vec<String> {
        self.fresh();
        let root = self.place.root.path();
        let disk = Disk::new(&[root, &self.place.source], omit);
        let state = Arc::new(Mutex::new((disk, Random(seed), BTreeMap::<Left, usize>::new(), 0_usize)));
        let seen = state.clone();
        let dies = Arc::new(AtomicUsize::new(killed_at.unwrap_or(usize::MAX)));
        let dies_at = dies.clone();
        let hooked = Hooked::with(move |change, path| {
            let (disk, random, all, number) = &mut *seen.lock().unwrap();
            if *number >= dies_at.load(Ordering::SeqCst) {
                return Err(dead());
            }
            for left in disk.left(mixed, random) {
                all.entry(left).or_insert(*number);
            }
            *number += 1;
            disk.change(change, path);
            Ok(())
        });
        if killed_at.is_some() {
            self.run().unwrap_err();
            dies.store(usize::MAX, Ordering::SeqCst);
        }
        self.run().unwrap();
        drop(hooked);
        let (_, _, all, changes) = &mut *state.lock().unwrap();
        println!("{changes} changes leave {} different disks", all.len());
        let mut wrong = Vec::new();
        for (left, number) in std::mem::take(all) {
            self.restore_disk(&left);
            let outcome = self.run();
            let when = format!("power cut before change {number} of {changes}");
            match outcome {
                Err(faults) => wrong.push(format!("{when}: {faults}")),
                Ok(_) if contents(&self.place.container).unwrap() != self.reference => {
                    wrong.push(format!("{when}: other bytes"));
                }
                Ok(_) => {}
            }
        }
        wrong
    }

    /// Makes directories and files what a power cut left.
    fn restore_disk(&self, left: &Left) {
        for directory in [&self.place.source, &self.place.container] {
            let _ = fs::remove_dir_all(directory);
        }
        for directory in left.directories.iter().filter(|directory| *directory != self.place.root.path()) {
            fs::create_dir_all(directory).unwrap();
        }
        for (path, bytes) in &left.files {
            match path.strip_prefix(&self.place.source) {
                Ok(name) => self.restore(name),
                Err(_) => fs::write(path, &**bytes).unwrap(),
            }
        }
    }
}

/// A refusal names a file or directory.
fn check_told(faults: &Faults, root: &Path, when: &str) {
    for fault in faults.iter() {
        let named = fault.place.file.as_deref().is_some_and(|file| file.starts_with(root));
        assert!(named, "{when}: names no path: {fault}");
    }
}

/// What a dead process is told, if it still asks.
fn dead() -> io::Error {
    io::Error::other("dead")
}

/// Half of the bytes of a write, none of them right.
fn tear(change: Change<'_>, path: &Path) {
    if let Change::Write { offset, bytes } = change {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&vec![0xa5; bytes.div_ceil(2)], offset).unwrap();
    }
}

fn show(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(4000)]).into_owned()
}
