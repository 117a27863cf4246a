//! The directory that a conversion writes to, and what earlier runs left there.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::earlier::Earlier;
use super::small::{self, SmallFile};
use super::{Options, Plan};
use crate::checkpoint::{Checkpoint, INDEX_FILE, Shard};
use crate::container::manifest::{FileRecord, MANIFEST_FILE, Manifest, SourceIdentity, TensorRecord, hex};
use crate::container::progress::{self, PROGRESS_VERSION, Progress};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::{is_same_file, is_working_name};
use crate::limits;
use crate::part::Part;
use crate::recipe::Settings;
use crate::roles::Pass;
use crate::tensor::TensorName;

/// A destination that this conversion may write to.
#[derive(Debug)]
pub struct Destination {
    /// The directory; it may not exist yet.
    pub directory: PathBuf,
    /// Whether an earlier run left progress that this one goes on from, unfinished or bare.
    pub begun: bool,
    /// The part of the conversion that is this run's.
    part: Option<Part>,
    /// The files of that part.
    mine: HashSet<String>,
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
    /// The model card, where the container was published before: it stays.
    pub card: Option<FileRecord>,
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
        earlier: Earlier,
    ) -> Result<Destination, Faults> {
        let mut warnings = Vec::new();
        let mut small = small::list(&source.directory, container, options.bare, &mut warnings)?;
        let card = earlier.manifest.as_ref().and_then(|manifest| small::beside_card(&mut small, manifest, container));
        if options.follow.is_some() {
            // The rest may still be on its way.
            warnings.retain(|fault: &Fault| !matches!(*fault.kind, FaultKind::SmallFileMissing { .. }));
        }
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
            part: options.part,
            mine: plan.mine().map(|file| file.name.clone()).collect(),
            added: false,
            progress: fresh,
            recipe: options.settings.clone(),
            kept_tensors: BTreeMap::new(),
            small,
            card,
            warnings,
        };
        if container.exists() {
            destination.read_earlier(source, plan, options, earlier)?;
        }
        destination.merge(source, plan, options)?;
        destination.check_small(plan)?;
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

    /// Writes what this run knows to be finished: of a part only its own files.
    pub fn write_progress(&self) -> Result<()> {
        let mut own = self.progress.clone();
        if self.part.is_some() {
            own.files.retain(|file| self.mine.contains(&file.name));
        }
        own.write(&self.directory, self.part)
    }

    /// The name of the file that this run keeps its progress in.
    pub fn progress_file(&self) -> String {
        progress::file_name(self.part)
    }

    /// Goes back to a part after its completion of the whole.
    pub fn mind(&mut self, part: Option<Part>, mine: HashSet<String>) {
        (self.part, self.mine) = (part, mine);
    }

    /// Whether a file is this run's to make.
    pub fn is_mine(&self, name: &str) -> bool {
        self.mine.contains(name)
    }

    /// The records of finished files: of a part only its own.
    pub fn own_files(&self) -> impl Iterator<Item = &FileRecord> {
        self.progress.files.iter().filter(|file| self.part.is_none() || self.is_mine(&file.name))
    }

    /// Notes where the bytes come from; an identity that is known already stays.
    pub fn note_sources<'a>(&mut self, shards: impl Iterator<Item = &'a Shard>) {
        self.add_sources(shards.map(identity).collect());
    }

    fn add_sources(&mut self, identities: Vec<SourceIdentity>) {
        for identity in identities {
            if !self.progress.source.iter().any(|known| known.name == identity.name) {
                self.progress.source.push(identity);
            }
        }
        self.progress.source.sort_by(|a, b| a.name.cmp(&b.name));
    }

    /// Lists the small files once more, for those that came late.
    pub fn list_small(&mut self, source: &Checkpoint, plan: &Plan, bare: bool) -> Result<Vec<Fault>, Faults> {
        let mut warnings = Vec::new();
        self.small = small::list(&source.directory, &self.directory, bare, &mut warnings)?;
        if let Some(manifest) = Manifest::read(&self.directory)? {
            self.card = small::beside_card(&mut self.small, &manifest, &self.directory);
        }
        self.check_small(plan)?;
        Ok(warnings)
    }

    fn recorded(&self, name: &str) -> Option<&FileRecord> {
        self.progress.files.iter().find(|file| file.name == name)
    }

    /// Reads manifest and progress of earlier runs; anything else in the directory is foreign.
    fn read_earlier(
        &mut self,
        source: &Checkpoint,
        plan: &Plan,
        options: &Options,
        earlier: Earlier,
    ) -> Result<(), Faults> {
        let directory = &self.directory;
        if !directory.is_dir() {
            return Err(Fault::new(Place::file(directory), FaultKind::DestinationIsFile).into());
        }
        let names = &earlier.names;
        for name in names {
            let path = directory.join(name);
            if let Some(shard) = source.shards.iter().find(|s| is_same_file(s.file.path(), &path)) {
                let kind = FaultKind::SameFile { other: shard.file.path().to_owned() };
                return Err(Fault::new(Place::file(path), kind).into());
            }
        }
        let small_files = earlier.manifest.iter().flat_map(|manifest| &manifest.small_files);
        let recorded = earlier.files().chain(small_files).map(|file| &file.name);
        let planned = plan.files.iter().map(|file| &file.name).chain(self.small.iter().map(|file| &file.name));
        let ours: HashSet<&String> = recorded.chain(planned).collect();
        // In a directory that is ours a user's notes are no obstacle: they are never touched. Weight files would be read.
        let harmless = |name: &String| !name.ends_with(".safetensors") || ours.contains(name);
        let foreign: Vec<String> = if earlier.is_empty() {
            names.iter().filter(|name| !is_working_name(name)).cloned().collect()
        } else {
            names.iter().filter(|name| !harmless(name)).cloned().collect()
        };
        if !foreign.is_empty() {
            return Err(Fault::new(Place::file(directory), FaultKind::DestinationUsed { found: foreign }).into());
        }
        self.check_division(&earlier)?;
        let complete: Vec<String> = earlier.manifest.iter().flat_map(|m| m.passes.keys().cloned()).collect();
        if let Some(manifest) = earlier.manifest {
            self.take_manifest(manifest, options);
        }
        for (part, progress) in earlier.progress {
            self.begun |= self.part.is_none() || part == self.part;
            self.take_progress(progress)?;
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

    /// Parts that others have begun must be parts of the same whole.
    fn check_division(&self, earlier: &Earlier) -> Result<()> {
        match (self.part, earlier.parts()) {
            (Some(part), Some((of, _))) if part.of() != of => {
                Err(progress::other_division(&self.directory, of, part.of()))
            }
            _ => Ok(()),
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

    /// What a later run began on top of a manifest, or what a part of one did.
    fn take_progress(&mut self, progress: Progress) -> Result<(), Faults> {
        self.progress.bare = progress.bare;
        self.progress.warn(progress.warnings);
        let known = self.progress.source.iter().map(|known| (known.name.as_str(), known)).collect::<HashMap<_, _>>();
        let differs = progress.source.iter().find_map(|other| {
            difference(known.get(other.name.as_str())?, other)
                .map(|what| format!("{what} of {} differs between parts", other.name))
        });
        if let Some(what) = differs {
            return Err(self.fault(FaultKind::OtherSource { what }).into());
        }
        for (pass, parameters) in progress.passes {
            let pass_name = Pass::ALL.into_iter().map(Pass::name).find(|name| *name == pass);
            let (Some(earlier), Some(pass_name)) = (self.progress.passes.get(&pass), pass_name) else {
                self.progress.passes.insert(pass, parameters);
                continue;
            };
            let faults = differing(earlier, &parameters).map(|(parameter, found, wanted)| {
                self.fault(FaultKind::OtherParameters { pass: pass_name, parameter, found, wanted })
            });
            Faults::check(faults.collect())?;
        }
        self.add_sources(progress.source);
        for file in progress.files {
            if self.recorded(&file.name).is_none() {
                self.progress.files.push(file);
            }
        }
        Ok(())
    }

    /// A small file that is there already must be the one that would be written, and its name must mean it everywhere.
    fn check_small(&self, plan: &Plan) -> Result<()> {
        let written = plan.files.iter().map(|file| file.name.as_str()).chain([INDEX_FILE, MANIFEST_FILE]);
        let mut names: HashMap<String, &str> = written.map(|name| (name.to_lowercase(), name)).collect();
        for file in &self.small {
            if let Some(other) = names.insert(file.name.to_lowercase(), &file.name) {
                let kind = FaultKind::NamesDifferInCase { other: other.to_owned() };
                return Err(Fault::new(Place::file(file.source()), kind));
            }
        }
        for file in self.small.iter().filter(|file| file.present) {
            let path = self.directory.join(&file.name);
            if path.is_symlink() {
                return Err(Fault::new(Place::file(path), FaultKind::OutputIsLink));
            }
            if fs::read(&path).map_err(|e| Fault::io("read the file", &path, e))? != file.contents()? {
                return Err(Fault::new(Place::file(path), FaultKind::SmallFileDiffers));
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
        faults.extend(source.shards.iter().filter_map(|shard| self.changed(shard, plan, options)));
        let planned: HashMap<&str, u64> = plan.files.iter().map(|f| (f.name.as_str(), f.layout.bytes)).collect();
        for file in plan.mine() {
            if self.recorded(&file.name).is_some() && self.directory.join(&file.name).is_symlink() {
                faults.push(Fault::new(Place::file(self.directory.join(&file.name)), FaultKind::OutputIsLink));
            }
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
        self.progress.files.sort_by(|a, b| a.name.cmp(&b.name));
        for (pass, parameters) in &plan.parameters {
            self.progress.passes.insert(pass.name().to_owned(), parameters.clone());
        }
        self.note_sources(source.shards.iter());
        Ok(())
    }

    /// Whether a shard is another one than that of earlier runs. One that comes again after it was consumed is judged by
    /// size and header, as long as nothing more is read from it.
    pub fn changed(&self, shard: &Shard, plan: &Plan, options: &Options) -> Option<Fault> {
        let now = identity(shard);
        let earlier = self.progress.source.iter().find(|earlier| earlier.name == now.name)?;
        let what = difference(earlier, &now)?;
        if what == MODIFICATION_TIME {
            let needed = |file: &&super::PlannedFile| file.needs.contains(&now.name) && !self.is_finished(&file.name);
            if options.consume && !plan.mine().any(|file| needed(&file)) {
                return None;
            }
            let kind = FaultKind::SourceTouched {
                container: self.directory.clone(),
                expected: earlier.modified_nanoseconds,
                found: now.modified_nanoseconds,
            };
            return Some(Fault::new(Place::file(shard.file.path()), kind));
        }
        Some(self.fault(FaultKind::OtherSource { what: format!("{what} of {} has changed", now.name) }))
    }

    fn fault(&self, kind: FaultKind) -> Fault {
        Fault::new(Place::file(&self.directory), kind)
    }
}

/// Name and version of this program.
pub fn tool() -> String {
    concat!("coliconv ", env!("CARGO_PKG_VERSION")).to_owned()
}

/// The identity of an opened shard.
fn identity(shard: &Shard) -> SourceIdentity {
    SourceIdentity {
        name: shard.name.clone(),
        bytes: shard.file.bytes(),
        modified_nanoseconds: shard.modified_nanoseconds,
        header_sha256: hex(&shard.header.sha256()),
    }
}

/// What a file's modification time is called.
const MODIFICATION_TIME: &str = "the modification time";

/// What is different between two identities of a file.
fn difference(earlier: &SourceIdentity, now: &SourceIdentity) -> Option<&'static str> {
    if earlier.bytes != now.bytes {
        Some("the size")
    } else if earlier.header_sha256 != now.header_sha256 {
        Some("the header")
    } else if earlier.modified_nanoseconds != now.modified_nanoseconds {
        Some(MODIFICATION_TIME)
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
