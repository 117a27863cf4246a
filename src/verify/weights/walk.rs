//! Every weight against its source in one pass over the source's files, which are hashed on the way: what was compared is
//! what the hash is of.
//!
//! Some files are gone through at the same time, each from its first byte to its last, a round of blocks after the other.
//! In a round blocks are read, then compared by all threads while the bytes of each file are hashed in their order.

use std::collections::{HashMap, VecDeque};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::bound::Distance;
use super::{Buffers, findings, near};
use crate::checkpoint::{Checkpoint, Shard, weight_files};
use crate::config::CONFIG_FILE;
use crate::container::manifest::hex;
use crate::container::reader::{Found, StoredWeight, Survey};
use crate::error::{Fault, FaultKind, Place, Result, Severity};
use crate::limits;
use crate::progress::Progress;
use crate::score::identity::{model_sha256, sha256_of};
use crate::tensor::TensorName;
use crate::weights::{ContainerRows, ReadBuffer, SourceRows};

/// What a pass came to.
pub(super) struct Walked {
    /// What is wrong, with the rank of its weight among those of the container.
    pub found: Vec<(u64, Found)>,
    /// The hash of the source, as [`model_sha256`] has it; none where a weight could not be read, which was `found`.
    pub model_sha256: Result<Option<String>>,
}

/// Bytes of a file that are read at once.
#[derive(Clone, Copy)]
struct Block {
    offset: u64,
    bytes: u64,
    /// Which weight of the file, first row, and rows; none for what is only hashed.
    rows: Option<(usize, u64, u64)>,
}

/// A weight on both sides.
struct Pair<'a> {
    rank: u64,
    place: Place,
    stored: ContainerRows<'a>,
    source: SourceRows<'a>,
    /// What its blocks so far came to.
    distance: Result<Distance>,
    /// Blocks that are still to come.
    left: usize,
    /// Bytes of both sides.
    bytes: u64,
}

/// A file that is gone through.
struct Walk<'a> {
    shard: &'a Shard,
    blocks: VecDeque<Block>,
    pairs: Vec<Pair<'a>>,
    /// None when a weight could not be read.
    hash: Option<Sha256>,
    /// Why bytes that are no weight's could not be read.
    unread: Option<Fault>,
}

/// Compares every weight with its source, and hashes the source. Findings are those of [`super::compare`].
pub(super) fn walk(survey: &Survey, source: &Checkpoint, progress: &dyn Progress) -> Walked {
    let ranks: HashMap<&TensorName, u64> = survey.weights.keys().zip(0..).collect();
    let mut found: Vec<(u64, Found)> = survey
        .weights
        .iter()
        .filter(|(name, _)| source.tensor(name.as_str()).is_none())
        .map(|(name, weight)| (ranks[name], (Severity::Error, not_there(survey, name, weight))))
        .collect();
    let threads = rayon::current_num_threads();
    let at_once = threads.min(source.shards.len()).max(1);
    // Two blocks a thread are enough for all to end together.
    let width = (2 * threads).div_ceil(at_once);
    let mut waiting = source.shards.iter();
    let mut active: Vec<Walk<'_>> = Vec::new();
    let mut hashes: HashMap<String, Result<Option<String>>> = HashMap::new();
    let mut buffers: Vec<ReadBuffer> = Vec::new();
    loop {
        while let Some(shard) = (active.len() < at_once).then(|| waiting.next()).flatten() {
            active.push(Walk::new(survey, source, shard, &ranks, &mut found));
        }
        if active.is_empty() {
            break;
        }
        round(&mut active, width, &mut buffers, progress);
        for walk in &mut active {
            walk.conclude(survey, &mut found, progress);
        }
        let (ended, rest): (Vec<_>, Vec<_>) = active.into_iter().partition(|walk| walk.blocks.is_empty());
        active = rest;
        hashes.extend(ended.into_iter().map(|walk| {
            let hash = walk.hash.map(|hash| hex(&hash.finalize()));
            (walk.shard.name.clone(), walk.unread.map_or(Ok(hash), Err))
        }));
    }
    Walked { found, model_sha256: whole_hash(source, hashes) }
}

/// The hash of all weight files and config.json, those included that nothing was compared of.
fn whole_hash(source: &Checkpoint, mut walked: HashMap<String, Result<Option<String>>>) -> Result<Option<String>> {
    let mut names = weight_files(&source.directory)?;
    names.push(CONFIG_FILE.to_owned());
    names.sort_unstable();
    let left: Vec<String> = names.iter().filter(|name| !walked.contains_key(*name)).cloned().collect();
    let hash = |name: String| {
        let hash = sha256_of(&source.directory.join(&name)).map(Some);
        (name, hash)
    };
    walked.extend(left.into_par_iter().map(hash).collect::<Vec<_>>());
    let hashes = names.into_iter().map(|name| {
        let hash = walked.remove(&name).expect("every name was hashed")?;
        Ok(hash.map(|hash| (name, hash)))
    });
    let hashes: Option<Vec<(String, String)>> = hashes.collect::<Result<Option<_>>>()?;
    Ok(hashes.map(|hashes| model_sha256(hashes.iter().map(|(name, hash)| (name.as_str(), hash.as_str())))))
}

fn place_of(survey: &Survey, name: &TensorName, weight: &StoredWeight) -> Place {
    Place::tensor(survey.files[weight.file].file.path(), name.clone())
}

fn not_there(survey: &Survey, name: &TensorName, weight: &StoredWeight) -> Fault {
    Fault::new(place_of(survey, name, weight), FaultKind::NotInSource)
}

impl<'a> Walk<'a> {
    /// Lays out the blocks of a file. What of its weights cannot be compared is `found` now.
    fn new(
        survey: &'a Survey,
        source: &'a Checkpoint,
        shard: &'a Shard,
        ranks: &HashMap<&TensorName, u64>,
        found: &mut Vec<(u64, Found)>,
    ) -> Walk<'a> {
        let mut walk =
            Walk { shard, blocks: VecDeque::new(), pairs: Vec::new(), hash: Some(Sha256::new()), unread: None };
        let mut end = 0;
        for tensor in shard.header.tensors() {
            walk.hashed_only(&mut end, tensor.offset);
            let Some((name, weight)) = survey.weights.get_key_value(&tensor.name) else { continue };
            match Pair::new(survey, source, name, weight, ranks[name]) {
                Ok(pair) => {
                    walk.lay_out(pair);
                    end = tensor.offset + tensor.bytes;
                }
                Err(fault) => found.push((ranks[name], (Severity::Error, fault))),
            }
        }
        walk.hashed_only(&mut end, shard.file.bytes());
        walk
    }

    /// The blocks of bytes that nothing is compared of, up to `offset`.
    fn hashed_only(&mut self, end: &mut u64, offset: u64) {
        while *end < offset {
            let bytes = (offset - *end).min(limits::BLOCK_SOURCE_BYTES);
            self.blocks.push_back(Block { offset: *end, bytes, rows: None });
            *end += bytes;
        }
    }

    /// The blocks of a weight.
    fn lay_out(&mut self, mut pair: Pair<'a>) {
        let (rows, row_bytes) = (pair.source.rows, pair.source.row_bytes());
        let step = (limits::BLOCK_SOURCE_BYTES / row_bytes.max(1)).max(1);
        let begin = pair.source.tensor().stored.offset;
        for first in (0..rows).step_by(step as usize) {
            let count = step.min(rows - first);
            let (offset, bytes) = (begin + first * row_bytes, count * row_bytes);
            self.blocks.push_back(Block { offset, bytes, rows: Some((self.pairs.len(), first, count)) });
            pair.left += 1;
        }
        self.pairs.push(pair);
    }

    /// Reads a block.
    fn read(&self, block: &Block, buffer: &mut ReadBuffer) -> Result<()> {
        match block.rows {
            Some((pair, first, count)) => self.pairs[pair].source.read(first, count, buffer),
            None => buffer.read(&self.shard.file, block.offset, block.bytes),
        }
    }

    /// Says of the weights that are through what was found, and lets go of them.
    fn conclude(&mut self, survey: &Survey, found: &mut Vec<(u64, Found)>, progress: &dyn Progress) {
        // Blocks come in the order of the weights, and name them by their index.
        for pair in self.pairs.iter_mut().filter(|pair| pair.left == 0 && pair.bytes > 0) {
            match &pair.distance {
                Ok(distance) => {
                    let of_weight = findings(distance, &pair.stored, survey, &pair.place);
                    found.extend(of_weight.into_iter().map(|found| (pair.rank, found)));
                }
                Err(_) => {
                    let fault = std::mem::replace(&mut pair.distance, Ok(Distance::default()));
                    found.extend(fault.err().map(|fault| (pair.rank, (Severity::Error, fault))));
                }
            }
            progress.advance(pair.bytes, 0);
            pair.bytes = 0;
        }
    }
}

impl<'a> Pair<'a> {
    fn new(
        survey: &'a Survey,
        source: &'a Checkpoint,
        name: &TensorName,
        weight: &'a StoredWeight,
        rank: u64,
    ) -> Result<Pair<'a>> {
        let place = place_of(survey, name, weight);
        let tensor = source.tensor(name.as_str()).ok_or_else(|| not_there(survey, name, weight))?;
        let bytes = weight.bytes() + tensor.stored.bytes;
        let (stored, source) = super::sides(survey, weight, tensor, &place)?;
        Ok(Pair { rank, place, stored, source, distance: Ok(Distance::default()), left: 0, bytes })
    }
}

/// Reads the next blocks of every file, compares and hashes them.
fn round(active: &mut [Walk<'_>], width: usize, buffers: &mut Vec<ReadBuffer>, progress: &dyn Progress) {
    let mut batch: Vec<(usize, Block)> = Vec::new();
    for (at, walk) in active.iter_mut().enumerate() {
        let count = width.min(walk.blocks.len());
        batch.extend(walk.blocks.drain(..count).map(|block| (at, block)));
    }
    buffers.resize_with(batch.len().max(buffers.len()), ReadBuffer::default);
    let walks: &[Walk<'_>] = active;
    let read: Vec<Result<()>> = batch
        .par_iter()
        .zip(buffers.par_iter_mut())
        .map(|((at, block), buffer)| walks[*at].read(block, buffer))
        .collect();
    let mut hashes: Vec<Option<Sha256>> = active.iter_mut().map(|walk| walk.hash.take()).collect();
    let walks: &[Walk<'_>] = active;
    let blocks = || batch.iter().zip(&*buffers).zip(&read);
    let hash = || {
        hashes.par_iter_mut().enumerate().for_each(|(at, hash)| {
            let Some(hash) = hash else { return };
            blocks().filter(|(((of, _), _), read)| *of == at && read.is_ok()).for_each(|((_, buffer), _)| {
                hash.update(buffer.bytes());
            });
        });
    };
    let compare = || {
        let all: Vec<_> = blocks().collect();
        let each = |buffers: &mut Buffers, ((place, buffer), read): &((&(usize, Block), &ReadBuffer), &Result<()>)| {
            let (at, block) = place;
            let (pair, first, count) = block.rows.filter(|_| read.is_ok())?;
            let Pair { stored, source, place, .. } = &walks[*at].pairs[pair];
            if first == 0 {
                progress.file(place.tensor.as_ref().expect("the place of a tensor").as_str());
            }
            Some(near(stored, source, buffer, first, count, buffers))
        };
        all.par_iter().map_init(Buffers::default, each).collect::<Vec<Option<Result<Distance>>>>()
    };
    let ((), distances) = rayon::join(hash, compare);
    for (walk, hash) in active.iter_mut().zip(hashes) {
        walk.hash = hash;
    }
    for (((at, block), read), distance) in batch.iter().zip(read).zip(distances) {
        active[*at].take(block, read, distance);
    }
}

impl Walk<'_> {
    /// Takes what came of a block; blocks are given in their order.
    fn take(&mut self, block: &Block, read: Result<()>, distance: Option<Result<Distance>>) {
        let Some((pair, ..)) = block.rows else {
            self.unread = self.unread.take().or(read.err());
            return;
        };
        if read.is_err() {
            self.hash = None;
        }
        let pair = &mut self.pairs[pair];
        pair.left -= 1;
        let next = read.and_then(|()| distance.expect("what was read was compared"));
        match (&mut pair.distance, next) {
            (Ok(whole), Ok(next)) => whole.join(&next),
            (Ok(_), Err(fault)) => pair.distance = Err(fault),
            (Err(_), _) => {}
        }
    }
}
