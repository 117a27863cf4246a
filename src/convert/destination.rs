//! The directory that a conversion writes to, and what earlier runs left there.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::small::{self, SmallFile};
use super::{Options, Plan};
use crate::checkpoint::{Checkpoint, INDEX_FILE};
use crate::container::manifest::{FileRecord, MANIFEST_FILE, Manifest, SourceIdentity, TensorRecord, hex};
use crate::container::progress::{PROGRESS_FILE, PROGRESS_VERSION, Progress};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::{TEMPORARY_SUFFIX, is_same_file};
use crate::limits;
use crate::recipe::Settings;
use crate::roles::Pass;
use crate::tensor::TensorName;

/// A destination that this conversion may write to.
#[derive(Debug)]
pub struct Destination {
    /// The directory; it may not exist yet.
    pub directory: PathBuf,
    /// Whether an earlier run left its progress, unfinished or bare.
    pub begun: bool,
    /// Whether this run has finished a file of its own.
    pub added: bool,
    /// What is finished, with the passes that are begun: of earlier runs, to be continued.
    pub progress: Progress,
    /// The settings of the main pass, with the rules of the others.
    pub recipe: Settings,
    /// Tensor records of finished passes that this run leaves alone.
    pub kept_tensors: BTreeMap<TensorName, TensorRecord>,
    /// The small files to carry along.
    pub small: Vec<SmallFile>,
    /// What is odd about the small files.
    pub warnings: Vec<Fault>,
}

impl Destination {
    /// Source and destination must be different directories, by whatever name they are given.
    pub fn refuse_source(source: &Path, container: &Path) -> Result<()> {
        if is_same_file(source, container) {
            return Err(Fault::new(Place::file(container), FaultKind::SameDirectory));
        }
        Ok(())
    }

    /// Looks at a destination and refuses whatever this conversion would overwrite or mix with. Writes nothing.
    pub fn examine(
        container: &Path,
        source: &Checkpoint,
        plan: &Plan,
        options: &Options,
    ) -> Result<Destination, Faults> {
        let mut warnings = Vec::new();
        let small = small::list(&source.directory, container, options.bare, &mut warnings)?;
        let fresh = Progress {
            version: PROGRESS_VERSION,
            tool: tool(),
            bare: options.bare,
            passes: BTreeMap::new(),
            source: Vec::new(),
            files: Vec::new(),
            warnings: Vec::new(),
        };
        let mut destination = Destination {
            directory: container.to_owned(),
            begun: false,
            added: false,
            progress: fresh,
            recipe: options.settings.clone(),
            kept_tensors: BTreeMap::new(),
            small,
            warnings,
        };
        if container.exists() {
            destination.read_earlier(source, plan, options)?;
        }
        destination.merge(source, plan, options)?;
        destination.check_small()?;
        Ok(destination)
    }

    /// Whether an earlier run finished a file that is still there.
    pub fn is_finished(&self, name: &str) -> bool {
        self.finished(name).is_some()
    }

    /// The record of a file that an earlier run finished and that is still there.
    pub fn finished(&self, name: &str) -> Option<&FileRecord> {
        self.recorded(name).filter(|_| self.directory.join(name).exists())
    }

    fn recorded(&self, name: &str) -> Option<&FileRecord> {
        self.progress.files.iter().find(|file| file.name == name)
    }

    /// Reads manifest and progress of earlier runs; anything else in the directory is foreign.
    fn read_earlier(&mut self, source: &Checkpoint, plan: &Plan, options: &Options) -> Result<(), Faults> {
        let directory = &self.directory;
        if !directory.is_dir() {
            return Err(Fault::new(Place::file(directory), FaultKind::DestinationIsFile).into());
        }
        let list = |e| Fault::io("list the directory", directory, e);
        let mut names = Vec::new();
        for entry in fs::read_dir(directory).map_err(list)? {
            names.push(entry.map_err(list)?.file_name().to_string_lossy().into_owned());
        }
        names.sort_unstable();
        for name in &names {
            let path = directory.join(name);
            if let Some(shard) = source.shards.iter().find(|s| is_same_file(s.file.path(), &path)) {
                let kind = FaultKind::SameFile { other: shard.file.path().to_owned() };
                return Err(Fault::new(Place::file(path), kind).into());
            }
        }
        let manifest = Manifest::read(directory)?;
        let progress = Progress::read(directory)?;
        let recorded = manifest.iter().flat_map(|m| m.files.iter().chain(&m.small_files));
        let recorded = recorded.chain(progress.iter().flat_map(|p| &p.files)).map(|file| &file.name);
        let planned = plan.files.iter().map(|file| &file.name).chain(self.small.iter().map(|file| &file.name));
        let ours: HashSet<&String> = recorded.chain(planned).collect();
        let known = |name: &String| {
            name.ends_with(TEMPORARY_SUFFIX)
                || [MANIFEST_FILE, PROGRESS_FILE, INDEX_FILE].contains(&name.as_str())
                || ours.contains(name)
        };
        let foreign: Vec<String> = match (&manifest, &progress) {
            (None, None) => names.iter().filter(|name| !name.ends_with(TEMPORARY_SUFFIX)).cloned().collect(),
            _ => names.iter().filter(|name| !known(name)).cloned().collect(),
        };
        if !foreign.is_empty() {
            return Err(Fault::new(Place::file(directory), FaultKind::DestinationUsed { found: foreign }).into());
        }
        let complete: Vec<String> = manifest.iter().flat_map(|m| m.passes.keys().cloned()).collect();
        if let Some(manifest) = manifest {
            self.take_manifest(manifest, options);
        }
        if let Some(progress) = progress {
            self.take_progress(progress);
        }
        // The manifest needs every tensor's checksum, so it cannot be written around a pass that was cut off.
        let cut_off = Pass::ALL.into_iter().find(|pass| {
            let name = pass.name().to_owned();
            let begun = self.progress.passes.contains_key(&name) && !complete.contains(&name);
            begun && !options.bare && !options.passes.contains(pass)
        });
        match cut_off {
            Some(pass) => Err(self.fault(FaultKind::PassUnfinished { pass: pass.name() }).into()),
            None => Ok(()),
        }
    }

    fn take_manifest(&mut self, manifest: Manifest, options: &Options) {
        let of_other_pass = |file: &str| Pass::of_file(file).is_none_or(|(pass, _)| !options.passes.contains(&pass));
        self.kept_tensors = manifest.tensors.into_iter().filter(|(_, tensor)| of_other_pass(&tensor.file)).collect();
        self.progress.bare = false;
        self.progress.passes = manifest.passes;
        self.progress.source = manifest.source;
        // Those that name no weight are found again by every run.
        self.progress.warn(manifest.warnings.into_iter().filter(|warning| warning.tensor.is_some()));
        let now = std::mem::take(&mut self.recipe);
        let is_main = options.passes.contains(&Pass::Main);
        let (base, other) = if is_main { (now, manifest.recipe) } else { (manifest.recipe, now) };
        self.recipe = base.with_rules_of(&other);
        self.progress.files = manifest.files;
    }

    /// What a later run began on top of a manifest.
    fn take_progress(&mut self, progress: Progress) {
        self.begun = true;
        self.progress.bare = progress.bare;
        self.progress.warn(progress.warnings);
        self.progress.passes.extend(progress.passes);
        for identity in progress.source {
            if !self.progress.source.iter().any(|known| known.name == identity.name) {
                self.progress.source.push(identity);
            }
        }
        for file in progress.files {
            if self.recorded(&file.name).is_none() {
                self.progress.files.push(file);
            }
        }
    }

    /// A small file that is there already must be the one that would be written.
    fn check_small(&self) -> Result<()> {
        for file in self.small.iter().filter(|file| file.present) {
            let path = self.directory.join(&file.name);
            if fs::read(&path).map_err(|e| Fault::io("read the file", &path, e))? != file.contents()? {
                return Err(Fault::new(Place::file(path), FaultKind::OutputExists));
            }
        }
        Ok(())
    }

    /// Refuses other parameters, another source, and weight files that no run has recorded; then notes the new passes.
    fn merge(&mut self, source: &Checkpoint, plan: &Plan, options: &Options) -> Result<(), Faults> {
        let mut faults = Vec::new();
        if self.progress.bare != options.bare {
            let word = |bare| if bare { "true" } else { "false" }.to_owned();
            let (found, wanted) = (word(self.progress.bare), word(options.bare));
            let parameter = "bare".to_owned();
            faults.push(self.fault(FaultKind::OtherParameters { pass: "main", parameter, found, wanted }));
        }
        for (&pass, parameters) in &plan.parameters {
            if let Some(earlier) = self.progress.passes.get(pass.name()) {
                faults.extend(differing(earlier, parameters).map(|(parameter, found, wanted)| {
                    self.fault(FaultKind::OtherParameters { pass: pass.name(), parameter, found, wanted })
                }));
            }
        }
        let other_parameters = !faults.is_empty();
        let identities = identities(source);
        for now in &identities {
            let earlier = self.progress.source.iter().find(|earlier| earlier.name == now.name);
            if let Some(what) = earlier.and_then(|earlier| difference(earlier, now)) {
                let what = format!("{what} of {} has changed", now.name);
                faults.push(self.fault(FaultKind::OtherSource { what }));
            }
        }
        let planned: HashMap<&str, u64> = plan.files.iter().map(|f| (f.name.as_str(), f.layout.bytes)).collect();
        for file in &plan.files {
            if self.recorded(&file.name).is_none() && self.directory.join(&file.name).symlink_metadata().is_ok() {
                faults.push(Fault::new(Place::file(self.directory.join(&file.name)), FaultKind::OutputExists));
            }
        }
        for file in &self.progress.files {
            let (found, path) = (planned.get(file.name.as_str()), self.directory.join(&file.name));
            let pass = Pass::of_file(&file.name).map(|(pass, _)| pass);
            if found.is_none_or(|&bytes| bytes != file.bytes) && pass.is_some_and(|p| options.passes.contains(&p)) {
                // Under other parameters other files are no wonder.
                let what = format!("its files are others ({})", file.name);
                faults.extend((!other_parameters).then(|| self.fault(FaultKind::OtherSource { what })));
            } else if found.is_none() && fs::metadata(&path).map_or(0, |m| m.len()) != file.bytes {
                let found = fs::metadata(&path).map_or("nothing".into(), |m| format!("{} bytes", m.len()));
                let kind = FaultKind::OutputChanged { expected: format!("{} bytes", file.bytes), found };
                faults.push(Fault::new(Place::file(path), kind));
            }
        }
        let others = self.progress.files.iter().filter(|file| !planned.contains_key(file.name.as_str())).count();
        let (what, found, limit) = ("weight files", (planned.len() + others) as u64, limits::MAX_FILES as u64);
        if others > 0 && found > limit {
            faults.push(self.fault(FaultKind::EngineLimit { what, found, limit }));
        }
        Faults::check(faults)?;
        for (pass, parameters) in &plan.parameters {
            self.progress.passes.insert(pass.name().to_owned(), parameters.clone());
        }
        for identity in identities {
            if !self.progress.source.iter().any(|known| known.name == identity.name) {
                self.progress.source.push(identity);
            }
        }
        self.progress.source.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(())
    }

    fn fault(&self, kind: FaultKind) -> Fault {
        Fault::new(Place::file(&self.directory), kind)
    }
}

/// Name and version of this program.
pub fn tool() -> String {
    concat!("coliconv ", env!("CARGO_PKG_VERSION")).to_owned()
}

/// The identities of the opened shards.
fn identities(source: &Checkpoint) -> Vec<SourceIdentity> {
    source
        .shards
        .iter()
        .map(|shard| SourceIdentity {
            name: shard.name.clone(),
            bytes: shard.file.bytes(),
            modified_nanoseconds: shard.modified_nanoseconds,
            header_sha256: hex(&shard.header.sha256()),
        })
        .collect()
}

/// What is different between two identities of a file.
fn difference(earlier: &SourceIdentity, now: &SourceIdentity) -> Option<&'static str> {
    if earlier.bytes != now.bytes {
        Some("the size")
    } else if earlier.header_sha256 != now.header_sha256 {
        Some("the header")
    } else if earlier.modified_nanoseconds != now.modified_nanoseconds {
        Some("the modification time")
    } else {
        None
    }
}

/// Parameters that differ: name, earlier value, value now.
fn differing<'a>(
    earlier: &'a BTreeMap<String, String>,
    now: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = (String, String, String)> + 'a {
    let absent = || "absent".to_owned();
    let keys: std::collections::BTreeSet<&String> = earlier.keys().chain(now.keys()).collect();
    keys.into_iter().filter(|key| earlier.get(*key) != now.get(*key)).map(move |key| {
        let value = |map: &BTreeMap<String, String>| map.get(key).cloned().unwrap_or_else(absent);
        (key.clone(), value(earlier), value(now))
    })
}
