//! What earlier runs, and other parts of this one, left in a directory.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;

use crate::container::manifest::{FileRecord, Manifest};
use crate::container::progress::{self, Progress};
use crate::error::{Fault, Result};
use crate::part::Part;

/// Manifest and progress of a directory.
#[derive(Debug, Default)]
pub struct Earlier {
    /// Every name in the directory, sorted.
    pub names: Vec<String>,
    /// The manifest, of passes that are finished.
    pub manifest: Option<Manifest>,
    /// The progress of passes that are not, or of a bare conversion: that of a whole run and those of parts.
    pub progress: Vec<(Option<Part>, Progress)>,
}

impl Earlier {
    /// Reads it; nothing where there is no such directory.
    pub fn read(directory: &Path) -> Result<Earlier> {
        if !directory.is_dir() {
            return Ok(Earlier::default());
        }
        let list = |e| Fault::io("list the directory", directory, e);
        let mut names = Vec::new();
        for entry in fs::read_dir(directory).map_err(list)? {
            names.push(entry.map_err(list)?.file_name().to_string_lossy().into_owned());
        }
        names.sort_unstable();
        // In this order, because other parts are at work: a file is recorded before it is named, and who folds progress
        // into the manifest writes the one before removing the other.
        let progress = progress::read_all(directory)?;
        Ok(Earlier { names, manifest: Manifest::read(directory)?, progress })
    }

    /// Whether nothing was ever begun here.
    pub fn is_empty(&self) -> bool {
        self.manifest.is_none() && self.progress.is_empty()
    }

    /// Whether nothing is left to be folded into the manifest, or, of a bare conversion, into the progress of the whole.
    pub fn is_complete(&self) -> bool {
        match (&self.manifest, self.progress.as_slice()) {
            (Some(_), []) => true,
            (None, [(None, progress)]) => progress.bare,
            _ => false,
        }
    }

    /// Names of the source files that were there once.
    pub fn sources(&self) -> HashSet<&str> {
        let manifest = self.manifest.iter().flat_map(|manifest| &manifest.source);
        let progress = self.progress.iter().flat_map(|(_, progress)| &progress.source);
        manifest.chain(progress).map(|identity| identity.name.as_str()).collect()
    }

    /// The weight files that are recorded as finished.
    pub fn files(&self) -> impl Iterator<Item = &FileRecord> {
        let manifest = self.manifest.iter().flat_map(|manifest| &manifest.files);
        manifest.chain(self.progress.iter().flat_map(|(_, progress)| &progress.files))
    }

    /// Those of them that are there, by name.
    pub fn finished(&self, directory: &Path) -> HashSet<&str> {
        self.files().map(|file| file.name.as_str()).filter(|name| directory.join(name).exists()).collect()
    }

    /// How many files each part has finished, by the part's number, with the number of parts; `None` without parts.
    pub fn parts(&self) -> Option<(usize, BTreeMap<usize, usize>)> {
        let parts = self.progress.iter().filter_map(|(part, progress)| Some(((*part)?, progress.files.len())));
        let of = parts.clone().next()?.0.of();
        Some((of, parts.map(|(part, files)| (part.number(), files)).collect()))
    }
}
