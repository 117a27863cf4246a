//! The source: a Hugging Face checkpoint of FP8 or BF16 shards.
//!
//! [`Checkpoint::open`] reads config, index and the headers of the shards that the wanted passes need, checks them against
//! each other and against the census, and collects everything that is wrong before anything is converted.

pub mod arrival;
mod check;
mod index;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use crate::config::{CONFIG_FILE, Config, GENERATION_CONFIG_FILE, stop_ids};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::header::{Header, StoredTensor};
use crate::io::SourceFile;
use crate::limits;
use crate::roles::{Census, Pass, Role};
use crate::tensor::TensorName;

pub use index::{INDEX_FILE, Index};

/// Ending that turns the name of an FP8 weight into the name of its scales.
pub const SCALE_SUFFIX: &str = "_scale_inv";
/// Side of the square blocks that share a scale.
pub const SCALE_BLOCK: u64 = 128;
/// What of a directory shows that it is a container: beginnings of the names of files that only a converter writes.
const CONTAINER_SIGNS: [&str; 2] = ["coliconv.manifest.json", ".coliconv-progress."];

/// One opened file of the checkpoint.
#[derive(Debug)]
pub struct Shard {
    /// File name.
    pub name: String,
    /// The open file.
    pub file: SourceFile,
    /// Its validated header.
    pub header: Header,
    /// Modification time, nanoseconds since 1970; 0 where the system tells none.
    pub modified_nanoseconds: u64,
}

/// A checkpoint whose headers are known and consistent.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its directory.
    pub directory: PathBuf,
    /// Its config.json.
    pub config: Config,
    /// What the config asks for.
    pub census: Census,
    /// The opened shards, by name.
    pub shards: Vec<Shard>,
    /// Passes that it was opened for: files with nothing but others are not open.
    pub passes: Vec<Pass>,
    /// Passes of which the checkpoint holds nothing.
    pub absent_passes: Vec<Pass>,
    /// What is odd but no obstacle.
    pub warnings: Vec<Fault>,
    /// Its index; empty where there is none.
    pub index: Index,
    located: HashMap<TensorName, (usize, usize)>,
    /// Files that are left for later: they may not be there yet, or no longer.
    deferred: BTreeSet<String>,
}

/// Refusals that a user turned into warnings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Formats that the colibri engine would misread at the shape.
    pub ambiguous: bool,
    /// Elements that are NaN or infinite: they count as 0.
    pub non_finite: bool,
    /// Missing tensors and files.
    pub incomplete: bool,
}

/// A weight of a checkpoint with what it needs.
#[derive(Debug, Clone, Copy)]
pub struct SourceTensor<'a> {
    /// The file that holds it.
    pub shard: &'a Shard,
    /// Where it lies there.
    pub stored: &'a StoredTensor,
    /// The scales of an FP8 weight, with their file.
    pub scales: Option<(&'a Shard, &'a StoredTensor)>,
}

impl Checkpoint {
    /// Opens a checkpoint for some passes. Shards that hold nothing for them are not opened.
    pub fn open(directory: &Path, passes: &[Pass], allowed: Allowed) -> Result<Checkpoint, Faults> {
        Checkpoint::open_but(directory, passes, allowed, &|_| false)
    }

    /// The same, but files for which `deferred` is true are not touched, be they there or not: what the index says of
    /// them is believed until [`Checkpoint::open_deferred`].
    pub fn open_but(
        directory: &Path,
        passes: &[Pass],
        allowed: Allowed,
        deferred: &dyn Fn(&str) -> bool,
    ) -> Result<Checkpoint, Faults> {
        let weight_files = list_weight_files(directory)?;
        // A bare container has nothing but its weight files' names, and no index by which it could be read further.
        let series = || weight_files.iter().find(|name| Pass::of_file(name).is_some()).cloned();
        if let Some(sign) = container_sign(directory)?.or_else(series) {
            return Err(Fault::new(Place::file(directory), FaultKind::SourceIsContainer { sign }).into());
        }
        let config = Config::read(directory)?;
        check::quantization(&config, &directory.join(CONFIG_FILE))?;
        if !deferred(GENERATION_CONFIG_FILE) {
            stop_ids(directory, &config)?;
        }
        let census = Census::of(&config);
        let index = Index::read(directory, &weight_files)?;
        if weight_files.is_empty() && !(index.is_present() && index.files().any(deferred)) {
            return Err(Fault::new(Place::file(directory), FaultKind::NoWeights).into());
        }
        let mut checkpoint = Checkpoint {
            directory: directory.to_owned(),
            config,
            census,
            shards: Vec::new(),
            passes: passes.to_vec(),
            absent_passes: Vec::new(),
            warnings: index.warnings(),
            index,
            located: HashMap::new(),
            deferred: BTreeSet::new(),
        };
        checkpoint.open_shards(passes, &weight_files, allowed, deferred)?;
        checkpoint.check(passes, allowed)?;
        Ok(checkpoint)
    }

    /// Opens files that were left for later and are there now. Their faults are found now, too; after one the checkpoint
    /// is of no further use.
    pub fn open_deferred(&mut self, files: &[String], passes: &[Pass]) -> Result<(), Faults> {
        let from = self.shards.len();
        let mut faults = Vec::new();
        for name in files {
            match Shard::open(name, &self.directory.join(name)) {
                Ok(shard) => self.shards.push(shard),
                Err(more) => faults.extend(more.into_vec()),
            }
            self.deferred.remove(name);
        }
        Faults::check(faults)?;
        self.check_shards(from, passes)
    }

    /// Closes a shard: nothing more is read from it.
    pub fn close(&mut self, file: &str) {
        for shard in self.shards.iter_mut().filter(|shard| shard.name == file) {
            shard.file.close();
        }
    }

    /// Whether a file is left for later.
    pub fn is_deferred(&self, file: &str) -> bool {
        self.deferred.contains(file)
    }

    /// A weight, if the checkpoint's opened shards hold it.
    pub fn tensor(&self, name: &str) -> Option<SourceTensor<'_>> {
        let (shard, stored) = self.stored(name)?;
        let scales = self.stored(&format!("{name}{SCALE_SUFFIX}"));
        Some(SourceTensor { shard, stored, scales })
    }

    /// A tensor as stored, weight or scales.
    fn stored(&self, name: &str) -> Option<(&Shard, &StoredTensor)> {
        let &(shard, tensor) = self.located.get(name)?;
        let shard = &self.shards[shard];
        Some((shard, &shard.header.tensors()[tensor]))
    }

    /// Name of the file that holds a tensor: opened, or left for later.
    pub fn file_of(&self, name: &str) -> Option<&str> {
        let opened = self.located.get(name).map(|&(shard, _)| self.shards[shard].name.as_str());
        opened.or_else(|| self.index.file_of(name).filter(|file| self.is_deferred(file)))
    }

    /// The weights of some passes with their roles, in no particular order: of opened files and of those left for later.
    pub fn weights(&self, passes: &[Pass]) -> impl Iterator<Item = (&TensorName, &Role)> {
        self.census
            .iter()
            .filter(move |(name, role)| passes.contains(&role.pass) && self.file_of(name.as_str()).is_some())
    }

    /// Those of the weights of some passes for which a shard from number `from` on is needed, and all that is are opened.
    pub fn weights_since(&self, from: usize, passes: &[Pass]) -> impl Iterator<Item = (&TensorName, &Role)> {
        self.weights(passes).filter(move |(name, _)| {
            let shard = |name: &str| self.located.get(name).map(|&(shard, _)| shard);
            let scales = format!("{}{SCALE_SUFFIX}", name.as_str());
            let waits = self.index.file_of(&scales).is_some_and(|file| self.is_deferred(file));
            shard(name.as_str()).is_some_and(|weight| weight.max(shard(&scales).unwrap_or(0)) >= from) && !waits
        })
    }

    /// Opens the shards in which the index places a tensor of the passes or its scales, and every file that the index
    /// does not mention.
    fn open_shards(
        &mut self,
        passes: &[Pass],
        weight_files: &[String],
        allowed: Allowed,
        deferred: &dyn Fn(&str) -> bool,
    ) -> Result<(), Faults> {
        let index = &self.index;
        // A name that the model does not have is nobody's: its file is looked at, so that what is wrong is told whole.
        let wanted = |name: &TensorName| {
            let weight = name.as_str().strip_suffix(SCALE_SUFFIX).unwrap_or(name.as_str());
            match self.census.role(weight) {
                Some(role) => passes.contains(&role.pass),
                None => !Census::dropped(name.as_str(), &self.config),
            }
        };
        let mut tensors_of: BTreeMap<&str, (usize, bool)> = BTreeMap::new();
        for (name, shard) in index.entries() {
            let (tensors, is_wanted) = tensors_of.entry(shard).or_default();
            *tensors += 1;
            *is_wanted |= wanted(name);
        }
        for extra in weight_files.iter().filter(|file| !index.names_file(file)) {
            tensors_of.insert(extra, (0, true));
        }
        let mut faults = Vec::new();
        let mut shards = Vec::new();
        let mut unrelated_missing = Vec::new();
        for (name, (tensors, is_wanted)) in tensors_of {
            let path = self.directory.join(name);
            if deferred(name) {
                if is_wanted && index.names_file(name) {
                    self.deferred.insert(name.to_owned());
                }
                continue;
            }
            let missing = !path.exists();
            if missing && is_wanted && !allowed.incomplete {
                faults.push(Fault::new(Place::file(path), FaultKind::ShardMissing { tensors }));
            } else if missing {
                unrelated_missing.push(Fault::new(Place::file(path), FaultKind::ShardMissing { tensors }));
            } else if is_wanted {
                match Shard::open(name, &path) {
                    Ok(shard) => shards.push(shard),
                    Err(more) => faults.extend(more.into_vec()),
                }
            }
        }
        Faults::check(faults)?;
        self.shards = shards;
        self.warnings.extend(unrelated_missing);
        Ok(())
    }
}

impl Shard {
    fn open(name: &str, path: &Path) -> Result<Shard, Faults> {
        let file = SourceFile::open(path)?;
        let header = Header::read(&file)?;
        let modified_nanoseconds = SourceFile::modified_nanoseconds(path);
        Ok(Shard { name: name.to_owned(), file, header, modified_nanoseconds })
    }
}

/// The name of a file that shows that a directory is a container.
fn container_sign(directory: &Path) -> Result<Option<String>> {
    let list = |e| Fault::io("list the directory", directory, e);
    let mut signs = Vec::new();
    for entry in fs::read_dir(directory).map_err(list)? {
        let name = entry.map_err(list)?.file_name().to_string_lossy().into_owned();
        signs.extend(CONTAINER_SIGNS.iter().any(|sign| name.starts_with(sign)).then_some(name));
    }
    Ok(signs.into_iter().max())
}

/// The names of the .safetensors files of a directory, sorted; at least one.
pub fn weight_files(directory: &Path) -> Result<Vec<String>> {
    let files = list_weight_files(directory)?;
    if files.is_empty() {
        return Err(Fault::new(Place::file(directory), FaultKind::NoWeights));
    }
    Ok(files)
}

fn list_weight_files(directory: &Path) -> Result<Vec<String>> {
    if !directory.exists() {
        return Err(Fault::new(Place::file(directory), FaultKind::NotFound));
    }
    if !directory.is_dir() {
        return Err(Fault::new(Place::file(directory), FaultKind::NotADirectory));
    }
    let list = |e| Fault::io("list the directory", directory, e);
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(list)? {
        match entry.map_err(list)?.file_name().into_string() {
            Ok(name) if name.ends_with(".safetensors") => files.push(name),
            // Others would read such a file; here it can be named in no index, manifest or report.
            Err(name) if name.to_string_lossy().ends_with(".safetensors") => {
                return Err(Fault::new(Place::file(directory.join(name)), FaultKind::WeightFileName));
            }
            _ => {}
        }
    }
    if files.len() > limits::MAX_FILES {
        let kind = FaultKind::TooManyFiles { found: files.len(), limit: limits::MAX_FILES };
        return Err(Fault::new(Place::file(directory), kind));
    }
    files.sort_unstable();
    Ok(files)
}
