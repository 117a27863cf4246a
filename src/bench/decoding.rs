//! Decoding with routed experts on demand: from the disk against plain reads of the same experts, and from memory against
//! reading memory.
//!
//! The model is one of GLM-5.2's widths with few layers. One token goes through at a time, each a random one. Reads go past
//! the system's cache on both sides, where the file system can do that, and the plain reads are taken again before every
//! round: a shared disk's rate changes within seconds, so the share is the median of pairs.

use std::hint::black_box;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::kernels::{Random, median};
use super::synthetic::{Contents, Synthetic};
use super::{Options, check_space, measure};
use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::container::reader::Container;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::experts;
use crate::io::{DirectFile, PageBuffer, Span, anonymous_bytes};
use crate::isa::Isa;
use crate::limits;
use crate::model::kv_cache::KvCache;
use crate::model::memory::{Needs, share};
use crate::model::{Loaded, Model};
use crate::progress::Progress;
use crate::report::{BenchMeasure, BenchTokenBytes};
use crate::roles::{Census, Class, Projection};
use crate::weights::Weights;

/// Share of the experts that the cache may keep while they come from the disk, or a GPU while they come from memory.
pub(super) const KEPT: u64 = 8;
/// Bytes that a round reads from the disk, about.
const ROUND_BYTES: u64 = 3_000_000_000;
/// Most positions of all rounds together.
const POSITIONS: u64 = 2048;
/// Bytes of memory that are read to measure its rate: beyond all caches.
const MEMORY_BYTES: usize = 256 << 20;

/// Makes a container and decodes with it.
pub(super) fn measures(path: &Path, options: &Options, progress: &dyn Progress) -> Result<Vec<BenchMeasure>, Faults> {
    let synthetic = Synthetic::model(options.decoded_bytes());
    check_space(path, synthetic.bytes()?)?;
    progress.step("making a container");
    synthetic.write(path, Contents::Model, true, progress)?;
    let container = Container::open(path)?;
    let needs = Needs::of(path, container.config(), Loaded::WithoutMtp, POSITIONS, POSITIONS);
    let tokens = tokens(&container, &needs);
    let mut measures = from_disk(&container, &needs, tokens, options.rounds, progress)?;
    match share(std::slice::from_ref(&needs), None)?[0] {
        all if !all.direct => measures.extend(from_memory(&container, &needs, all, options.rounds, progress)?),
        _ => progress.step("decode with all experts in memory is left out: they do not fit"),
    }
    Ok(measures)
}

/// Tokens of a round.
fn tokens(container: &Container, needs: &Needs) -> u64 {
    let config = container.config();
    let of_token = needs.experts / config.n_routed_experts.max(1) * config.num_experts_per_tok;
    (ROUND_BYTES / of_token.max(1)).clamp(4, 16)
}

/// A model, its text so far, and the tokens to come.
pub(super) struct Decoder<'m, 'b, B: Backend> {
    model: &'m Model<'b, B>,
    cache: KvCache<B>,
    random: Random,
}

impl<'m, 'b, B: Backend> Decoder<'m, 'b, B> {
    /// No text yet.
    pub(super) fn new(model: &'m Model<'b, B>) -> Result<Self> {
        Ok(Decoder { model, cache: model.cache(None)?, random: Random::new(7) })
    }

    /// So many tokens, one after the other; seconds that they took.
    pub(super) fn run(&mut self, tokens: u64) -> Result<f64> {
        let vocab_size = self.model.config().vocab_size;
        let started = Instant::now();
        for _ in 0..tokens {
            let id = (self.random.next() >> 8) % vocab_size;
            black_box(self.model.next(&mut self.cache, &[id as u32])?);
        }
        Ok(started.elapsed().as_secs_f64())
    }
}

/// The difference of counters, with what is not a sum taken from the later.
pub(super) fn since(now: experts::Counters, before: experts::Counters) -> experts::Counters {
    experts::Counters {
        requests: now.requests - before.requests,
        hits: now.hits - before.hits,
        read_ahead: now.read_ahead - before.read_ahead,
        read_ahead_hits: now.read_ahead_hits - before.read_ahead_hits,
        reads: now.reads - before.reads,
        bytes_read: now.bytes_read - before.bytes_read,
        wait_seconds: now.wait_seconds - before.wait_seconds,
        evictions: now.evictions - before.evictions,
        ..now
    }
}

/// Bytes that were read and computed with: what was read ahead in vain does not count.
fn used(counters: &experts::Counters) -> u64 {
    let used = counters.requests - counters.hits + counters.read_ahead_hits;
    let read = (used + counters.read_ahead - counters.read_ahead_hits).max(1);
    (u128::from(counters.bytes_read) * u128::from(used) / u128::from(read)) as u64
}

/// Decoding with room for an eighth of the experts, beside plain reads of experts in any order.
fn from_disk(
    container: &Container,
    needs: &Needs,
    tokens: u64,
    rounds: usize,
    progress: &dyn Progress,
) -> Result<Vec<BenchMeasure>, Faults> {
    let budget = (needs.experts / KEPT).max(needs.experts_at_least);
    let cpu = Cpu::with_experts(Isa::detect(), experts::Options::within(budget));
    progress.step("loading the model");
    let model = Model::load_parts(container, &cpu, Loaded::WithoutMtp)?;
    let spans = spans(container)?;
    let mut decoder = Decoder::new(&model)?;
    decoder.run(1)?;
    let first = counters(&cpu);
    let mut plain = Plain { spans: &spans, random: Random::new(1) };
    let (mut disk, mut decode, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    let mut bytes = 0;
    let mut peak = 0;
    for _ in 0..rounds {
        progress.step("reading experts");
        let (seconds, read) = plain.read(ROUND_BYTES.min(needs.experts))?;
        disk.push((seconds, read));
        progress.step("decoding with experts from the disk");
        let before = counters(&cpu);
        let took = decoder.run(tokens)?;
        let used = used(&since(counters(&cpu), before));
        shares.push(used as f64 / took / (read as f64 / seconds));
        bytes += used;
        decode.push(took);
        peak = peak.max(anonymous_bytes().unwrap_or(0));
    }
    let read = disk.iter().map(|(_, read)| read).max().copied();
    let disk: Vec<f64> = disk.iter().map(|(seconds, _)| *seconds).collect();
    let what = if spans.iter().all(|(file, _)| file.is_direct()) { "past the cache" } else { "through the cache" };
    let limit = measure(&format!("read experts, {} threads, {what}", limits::EXPERT_READ_THREADS), &disk, read);
    let of_rounds = since(counters(&cpu), first);
    let name = format!("decode, experts from the disk, {tokens} tokens");
    let mut decoding = measure(&name, &decode, Some(bytes / rounds as u64));
    decoding.tokens_per_second = Some(tokens as f64 / decoding.fastest_seconds.max(1e-9));
    decoding.limit = Some("reading experts".to_owned());
    decoding.of_limit = Some(median(&shares));
    decoding.peak_anonymous_bytes = Some(peak).filter(|peak| *peak > 0);
    decoding.experts = Some(of_rounds);
    Ok(vec![limit, decoding])
}

/// Decoding with all experts in memory, beside reading memory.
fn from_memory(
    container: &Container,
    needs: &Needs,
    options: experts::Options,
    rounds: usize,
    progress: &dyn Progress,
) -> Result<Vec<BenchMeasure>, Faults> {
    let cpu = Cpu::with_experts(Isa::detect(), options);
    progress.step("loading the model");
    let model = Model::load_parts(container, &cpu, Loaded::WithoutMtp)?;
    let mut decoder = Decoder::new(&model)?;
    progress.step("loading experts");
    let config = container.config();
    let stored: u64 = spans(container)?.iter().map(|(_, span)| span.bytes as u64).sum();
    while counters(&cpu).bytes_read < stored && decoder.cache.len() < POSITIONS as usize / 4 {
        decoder.run(1)?;
    }
    let of_experts = needs.experts / config.n_routed_experts * config.num_experts_per_tok;
    let of_token = BenchTokenBytes { routed: of_experts, ..token_bytes(container)? };
    let bytes_of_token = of_token.total();
    let (memory, tokens) = (vec![1u8; MEMORY_BYTES], 4);
    let (mut read, mut decode, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    let before = counters(&cpu);
    for _ in 0..rounds {
        progress.step("decoding with experts in memory");
        let started = Instant::now();
        black_box(cpu.read_bytes(&memory));
        let seconds = started.elapsed().as_secs_f64();
        let took = decoder.run(tokens)?;
        shares.push((bytes_of_token * tokens) as f64 / took / (MEMORY_BYTES as f64 / seconds));
        read.push(seconds);
        decode.push(took);
    }
    let limit = measure("read memory", &read, Some(MEMORY_BYTES as u64));
    let name = format!("decode, experts in memory, {tokens} tokens");
    let mut decoding = measure(&name, &decode, Some(bytes_of_token * tokens));
    decoding.tokens_per_second = Some(tokens as f64 / decoding.fastest_seconds.max(1e-9));
    decoding.token_bytes = Some(of_token);
    decoding.limit = Some("reading memory".to_owned());
    decoding.of_limit = Some(median(&shares));
    decoding.experts = Some(since(counters(&cpu), before));
    Ok(vec![limit, decoding])
}

fn counters(cpu: &Cpu) -> experts::Counters {
    cpu.expert_counters().unwrap_or_default()
}

/// Bytes of the weights that a token reads: all but the embedding, of routed experts those that it chooses, and of indexers
/// what makes keys, for no text here is longer than what they choose.
pub(super) fn token_bytes(container: &Container) -> Result<BenchTokenBytes> {
    let config = container.config();
    let census = Census::of(config);
    let mut of_token = BenchTokenBytes::default();
    for (name, role) in census.iter().filter(|(_, role)| !role.optional) {
        let unread = name.as_str() == "model.embed_tokens.weight"
            || role.class == Class::Indexer && ["wq_b", "weights_proj"].iter().any(|part| name.as_str().contains(part));
        if unread || !container.contains(name.as_str()) {
            continue;
        }
        let located = container.locate(name.as_str())?;
        let bytes = located.map_or(0, |weight| weight.code_bytes() + 4 * weight.scale_count());
        let sum = match role.class {
            Class::O | Class::Kvb | Class::Attn | Class::Indexer => &mut of_token.attention,
            Class::Dmlp => &mut of_token.dense,
            Class::Sh => &mut of_token.shared,
            Class::X => &mut of_token.routed,
            Class::Io => &mut of_token.head,
            Class::F32 | Class::Mtp => &mut of_token.other,
        };
        *sum += bytes;
    }
    of_token.routed = of_token.routed / config.n_routed_experts.max(1) * config.num_experts_per_tok;
    Ok(of_token)
}

/// What of a file is read at once.
type Range = (Arc<DirectFile>, Span);

/// Codes, and scales, of each routed expert: neighbours, which are read at once.
fn spans(container: &Container) -> Result<Vec<Range>> {
    let census = Census::of(container.config());
    let mut spans: Vec<Range> = Vec::new();
    for (name, role) in census.iter() {
        // The first of an expert's three in a file.
        let Some((_, Projection::Down)) = role.expert else { continue };
        let of = |projection: Projection| name.as_str().replace(Projection::Down.name(), projection.name());
        let located = |projection| {
            let found = container.locate(&of(projection))?;
            let place = Place::name(of(projection));
            found.ok_or_else(|| Fault::new(place, FaultKind::FormatUnknown))
        };
        let (down, gate, up) = (located(Projection::Down)?, located(Projection::Gate)?, located(Projection::Up)?);
        let codes = (&down.codes, gate.codes.bytes + up.codes.bytes);
        let scales = down.scales.as_ref().zip(gate.scales.as_ref()).zip(up.scales.as_ref());
        let scales = scales.map(|((down, gate), up)| (&down.0, gate.0.bytes + up.0.bytes));
        for (first, others) in std::iter::once(codes).chain(scales) {
            let span = Span { offset: first.offset, bytes: (first.bytes + others) as usize, at: 0 };
            let file = match spans.iter().rev().find(|(file, _)| file.file().is_shared(first.file)) {
                Some((file, _)) => file.clone(),
                None => Arc::new(DirectFile::new(first.file, true)?),
            };
            spans.push((file, span));
        }
    }
    Ok(spans)
}

/// Plain reads by as many threads as read experts.
struct Plain<'a> {
    spans: &'a [Range],
    random: Random,
}

impl Plain<'_> {
    /// Reads about so many bytes, experts in any order: seconds, and bytes.
    fn read(&mut self, bytes: u64) -> Result<(f64, u64)> {
        let (mut chosen, mut total) = (Vec::new(), 0);
        while total < bytes {
            let range = &self.spans[(self.random.next() >> 8) as usize % self.spans.len()];
            total += range.1.bytes as u64;
            chosen.push(range);
        }
        let longest = self.spans.iter().map(|(_, span)| span.bytes).max().unwrap_or(0) + 2 * 4096;
        let mut buffers: Vec<PageBuffer> = (0..limits::EXPERT_READ_THREADS).map(|_| PageBuffer::new(longest)).collect();
        // Memory that was touched before is what the cache reads into as well.
        buffers.iter_mut().for_each(|buffer| buffer.bytes_mut().fill(1));
        let queue = Mutex::new(chosen);
        let next = || queue.lock().map(|mut queue| queue.pop()).ok().flatten();
        let started = Instant::now();
        let read = |buffer: &mut PageBuffer| -> Result<()> {
            while let Some((file, span)) = next() {
                file.read(span, buffer.bytes_mut())?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = buffers.iter_mut().map(|buffer| scope.spawn(|| read(buffer))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("reading does not panic"))
        })?;
        Ok((started.elapsed().as_secs_f64(), total))
    }
}
