//! Text that a model says after a prompt, token by token.
//!
//! [`generate`] reads the prompt ([`Prompt`]), refuses what can be refused before anything long begins, loads the model,
//! and gives its text away piece by piece ([`Watch`]), each as soon as it is certain. Drafts, batches and threads change
//! no token: [`crate::model::drafting`].

mod opened;

use std::path::Path;
use std::time::Instant;

use crate::backend::gpu::placement::Spread;
use crate::backend::reference::Reference as Plain;
use crate::backend::{Backend, Device, Mode, OnGpus, Work};
use crate::config::{CONFIG_FILE, Config, stop_ids};
use crate::container::manifest::Manifest;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::anonymous_bytes;
use crate::model::chat::{ChatTemplate, Message};
use crate::model::detokenize::Detokenizer;
use crate::model::drafting::Decoding;
use crate::model::ending::{StopReason, repetition};
use crate::model::sampler::Sampler;
use crate::model::tokenizer::{TOKENIZER_FILE, Tokenizer};
use crate::model::{Loaded, Model};
use crate::report::{DeviceExperts, Experts, Finding, GenerateDraft, GenerateReport, GenerateStop, GpuRun, Severity};
use crate::score::encode::{PrefixChoice, prefix, prefixed};
use crate::score::identity::sha256_of;
use crate::threads;
use crate::weights::{Model as Stored, Weights};
use opened::Opened;

/// Most tokens of a text where nobody says how many; fewer where the model's context ends before.
pub const DEFAULT_MAX_TOKENS: usize = 256;

/// What the text follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// A text, and what stands before it.
    Text {
        /// The text.
        text: String,
        /// What stands before it, unless it begins with it already.
        prefix: PrefixChoice,
    },
    /// What a user says, as the model's chat template writes it.
    Chat {
        /// What they say.
        user: String,
        /// What is said to the model before.
        system: Option<String>,
    },
    /// Ids, as they are.
    Ids(Vec<u64>),
}

/// What a user asks for.
#[derive(Debug, Clone)]
pub struct Options {
    /// What the text follows.
    pub prompt: Prompt,
    /// Most tokens; by default [`DEFAULT_MAX_TOKENS`], or as many as fit.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampler: Sampler,
    /// Tokens that the MTP head drafts before each verification; 0 for none.
    pub drafts: usize,
    /// Whether a stop id ends the text.
    pub stop_at_ids: bool,
    /// Whether a repetition ends the text.
    pub stop_at_repetition: bool,
    /// Where to compute.
    pub device: Device,
    /// How sums are formed.
    pub mode: Mode,
    /// Devices that were left out of it, with the reason.
    pub unused: Vec<(String, String)>,
    /// Threads; 0 for one per core.
    pub threads: usize,
    /// Memory for the model, in bytes; by default what is available.
    pub memory: Option<u64>,
    /// Memory of a GPU for the model, in bytes; by default what is free.
    pub device_memory: Option<u64>,
}

impl Options {
    /// What of the model is loaded.
    fn loaded(&self) -> Loaded {
        Loaded::for_drafts(self.drafts > 0)
    }
}

/// Told what a run does and says.
pub trait Watch: Sync {
    /// What is being done now.
    fn phase(&self, what: &str);
    /// What memory is used for, where there is a choice.
    fn plan(&self, _what: &str) {}
    /// What the model says next. It is never empty, and holds whole characters.
    fn piece(&self, text: &str);
    /// Whether nobody wants to hear more.
    fn interrupted(&self) -> bool;
}

/// Tells nobody.
#[derive(Debug)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn phase(&self, _what: &str) {}
    fn piece(&self, _text: &str) {}
    fn interrupted(&self) -> bool {
        false
    }
}

/// Refuses config, tokenizer and templates that are not those that the manifest says: they decide what is said.
fn check_small_files(directory: &Path, manifest: Option<&Manifest>) -> Result<()> {
    let decides = |name: &str| name.ends_with(".json") || name.ends_with(".jinja");
    let records = manifest.iter().flat_map(|manifest| &manifest.small_files);
    for record in records.filter(|record| decides(&record.name)) {
        let path = directory.join(&record.name);
        let found = sha256_of(&path)?;
        if found != record.sha256 {
            let kind = FaultKind::FileHash { expected: record.sha256.clone(), found };
            return Err(Fault::new(Place::file(path), kind));
        }
    }
    Ok(())
}

/// Lets a container or a checkpoint continue a prompt.
pub fn generate(path: &Path, options: &Options, watch: &dyn Watch) -> Result<GenerateReport, Faults> {
    let started = Instant::now();
    watch.phase("reading the model");
    let stored = Stored::open(path)?;
    let weights = stored.weights();
    let config = weights.config();
    let tokenizer = Tokenizer::load(path)?;
    let (prompt, ids) = encoded(path, &options.prompt, &tokenizer)?;
    check_ids(path, &ids, config)?;
    let max_tokens = max_tokens(path, options.max_tokens, ids.len(), config)?;
    if options.drafts > 0 && !has_head(weights) {
        return Err(Fault::new(Place::file(path), FaultKind::NoMtpHead).into());
    }
    let positions = (ids.len() + max_tokens) as u64;
    let opened = Opened::open(path, config, positions, options, watch).map_err(|fault| too_large(fault, positions))?;
    let stop_ids = match options.stop_at_ids {
        true => stop_ids(path, config)?,
        false => Vec::new(),
    };
    if let Stored::Container(container) = &stored {
        check_small_files(path, container.survey().manifest.as_ref())?;
    }
    let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
    let pool = threads::pool(options.threads, path)?;
    let run =
        Run { path, options, weights, tokenizer: &tokenizer, prompt: &ids, stop_ids: &stop_ids, max_tokens, watch };
    let said = pool.install(|| match opened {
        Opened::Reference => run.on(&Plain::default(), started),
        Opened::Cpu(cpu) => run.on(&cpu, started),
        Opened::Gpus(gpus, spread) => gpus.run(&spread, Started { run: &run, started }),
    })?;
    let mut report = run.report(said, stored.kind().name(), prompt, started);
    let mut warnings = stored.findings();
    warnings.extend(Finding::of_unused(path, &options.unused));
    if options.stop_at_ids && stop_ids.is_empty() {
        let endless = Fault::new(Place::file(path.join(CONFIG_FILE)), FaultKind::NoStopIds);
        let endless = Finding::new(Severity::Warning, &endless);
        if !warnings.iter().any(|known| known.kind == endless.kind) {
            warnings.push(endless);
        }
    }
    warnings.append(&mut report.warnings);
    report.warnings = warnings;
    Ok(report)
}

/// The text of a prompt, unless it is given as ids, and its ids.
fn encoded(path: &Path, prompt: &Prompt, tokenizer: &Tokenizer) -> Result<(Option<String>, Vec<u64>)> {
    let empty = match prompt {
        // The prefix may be a prompt by itself: that there are no ids is seen later.
        Prompt::Text { .. } => false,
        Prompt::Chat { user, .. } => user.is_empty(),
        Prompt::Ids(ids) => ids.is_empty(),
    };
    if empty {
        return Err(Fault::new(Place::default(), FaultKind::PromptEmpty));
    }
    let text = match prompt {
        Prompt::Ids(ids) => return Ok((None, ids.clone())),
        Prompt::Text { text, prefix: choice } => {
            prefixed(text, &prefix(choice, tokenizer, &path.join(TOKENIZER_FILE))?)
        }
        Prompt::Chat { user, system } => {
            let system = system.iter().map(|said| Message { role: "system", content: said.clone() });
            let user = Message { role: "user", content: user.clone() };
            ChatTemplate::load(path)?.render(&system.chain([user]).collect::<Vec<_>>())?
        }
    };
    let ids = tokenizer.encode(&text)?;
    Ok((Some(text), ids.into_iter().map(u64::from).collect()))
}

/// Refuses ids that the model does not have, and a prompt without any.
fn check_ids(path: &Path, ids: &[u64], config: &Config) -> Result<()> {
    let vocab_size = config.vocab_size;
    match ids.iter().find(|&&id| id >= vocab_size) {
        Some(&id) => Err(Fault::new(Place::file(path), FaultKind::TokenId { id, vocab_size })),
        None if ids.is_empty() => Err(Fault::new(Place::default(), FaultKind::PromptEmpty)),
        None => Ok(()),
    }
}

/// Most tokens of the text, which must fit behind the prompt where config.json says how much fits.
fn max_tokens(path: &Path, asked: Option<usize>, tokens: usize, config: &Config) -> Result<usize> {
    let Some(limit) = config.max_position_embeddings else { return Ok(asked.unwrap_or(DEFAULT_MAX_TOKENS)) };
    let left = limit.saturating_sub(tokens as u64);
    let max_tokens = asked.unwrap_or((DEFAULT_MAX_TOKENS as u64).min(left).max(1) as usize);
    match max_tokens as u64 > left {
        true => Err(Fault::new(Place::file(path), FaultKind::PromptTooLong { tokens, max_tokens, limit })),
        false => Ok(max_tokens),
    }
}

/// What does not fit into memory is the model with a text, which may be shorter.
fn too_large(fault: Fault, tokens: u64) -> Fault {
    let (needed, available) = match *fault.kind {
        FaultKind::ModelTooLarge { needed, available } => (needed, available),
        FaultKind::MemoryTooSmall { fixed, experts, available } => (fixed.saturating_add(experts), available),
        _ => return fault,
    };
    Fault { place: fault.place, kind: Box::new(FaultKind::GenerationTooLarge { tokens, needed, available }) }
}

/// Whether there is a part of an MTP head; that it is whole is seen when it is loaded.
fn has_head(weights: &dyn Weights) -> bool {
    let layer = weights.config().mtp_layer();
    layer.is_some_and(|layer| weights.contains(&format!("model.layers.{layer}.eh_proj.weight")))
}

/// A run that can start.
struct Run<'a> {
    path: &'a Path,
    options: &'a Options,
    weights: &'a dyn Weights,
    tokenizer: &'a Tokenizer,
    prompt: &'a [u32],
    stop_ids: &'a [u64],
    max_tokens: usize,
    watch: &'a dyn Watch,
}

/// What came of it.
struct Said {
    backend: (&'static str, String, &'static str),
    ids: Vec<u32>,
    text: String,
    stop_reason: StopReason,
    unfinished_bytes: usize,
    unknown: Vec<u32>,
    /// Drafts that were verified, and those of them that were right.
    drafts: (usize, usize),
    /// Seconds of loading, of the prompt, and of the tokens after the first.
    seconds: [f64; 3],
    peak_anonymous_bytes: Option<u64>,
    experts: Option<Experts>,
    device_experts: Option<DeviceExperts>,
    gpu: Option<GpuRun>,
}

/// A run on GPUs, since when it runs.
struct Started<'a> {
    run: &'a Run<'a>,
    started: Instant,
}

impl Work for Started<'_> {
    type Done = Said;

    fn on<B: OnGpus>(self, backend: &B, _: &dyn Fn(&Spread) -> Result<B>) -> Result<Said, Faults> {
        self.run.on(backend, self.started)
    }
}

impl Run<'_> {
    fn on<B: Backend>(&self, backend: &B, started: Instant) -> Result<Said, Faults> {
        self.watch.phase("loading the model");
        let model = Model::load_parts(self.weights, backend, self.options.loaded())?;
        let (loading, loaded) = (started.elapsed().as_secs_f64(), Instant::now());
        self.watch.phase("generating");
        let mut said = self.decode(&model, loaded).map_err(|fault| self.placed(fault))?;
        said.seconds[0] = loading;
        said.seconds[2] = loaded.elapsed().as_secs_f64() - said.seconds[1];
        Ok(said)
    }

    fn decode<B: Backend>(&self, model: &Model<'_, B>, loaded: Instant) -> Result<Said> {
        let backend = model.backend();
        let mut decoding = Decoding::new(model, self.prompt, self.options.sampler, self.options.drafts, None)?;
        while decoding.absorb_prompt()? {
            self.go_on(0)?;
        }
        let mut detokenizer = Detokenizer::new(self.tokenizer);
        let (mut ids, mut text, mut peak) = (Vec::new(), String::new(), anonymous_bytes());
        let mut prompt_seconds = None;
        let stop_reason = 'text: loop {
            let tokens = decoding.step(self.max_tokens - ids.len())?.to_vec();
            prompt_seconds.get_or_insert_with(|| loaded.elapsed().as_secs_f64());
            peak = peak.max(anonymous_bytes());
            for id in tokens {
                ids.push(id);
                if self.stop_ids.contains(&u64::from(id)) {
                    break 'text StopReason::StopId;
                }
                self.say(detokenizer.push(id)?, &mut text);
                if let Some(reason) = self.end(&ids) {
                    break 'text reason;
                }
            }
            self.go_on(ids.len())?;
        };
        let (rest, unfinished_bytes) = detokenizer.finish()?;
        self.say(rest, &mut text);
        Ok(Said {
            backend: (backend.name(), backend.device(), backend.mode().into()),
            ids,
            text,
            stop_reason,
            unfinished_bytes,
            unknown: detokenizer.unknown,
            drafts: (decoding.proposed, decoding.accepted),
            seconds: [0.0, prompt_seconds.unwrap_or_default(), 0.0],
            peak_anonymous_bytes: peak,
            experts: backend.expert_counters(),
            device_experts: backend.device_expert_counters(),
            gpu: self.options.device.is_gpu().then(|| GpuRun::of(backend)),
        })
    }

    /// Whether a text that no stop id has ended ends here.
    fn end(&self, ids: &[u32]) -> Option<StopReason> {
        if self.options.stop_at_repetition && repetition(ids).is_some() {
            return Some(StopReason::Repetition);
        }
        (ids.len() == self.max_tokens).then_some(StopReason::Length)
    }

    fn say(&self, piece: String, text: &mut String) {
        if !piece.is_empty() {
            self.watch.piece(&piece);
            text.push_str(&piece);
        }
    }

    fn go_on(&self, tokens: usize) -> Result<()> {
        match self.watch.interrupted() {
            true => Err(Fault::new(Place::default(), FaultKind::GenerationInterrupted { tokens })),
            false => Ok(()),
        }
    }

    /// A fault of the computation, which knows no file, at the model.
    fn placed(&self, fault: Fault) -> Fault {
        let is_interruption = matches!(*fault.kind, FaultKind::GenerationInterrupted { .. });
        match fault.place == Place::default() && !is_interruption {
            true => Fault { place: Place::file(self.path), kind: fault.kind },
            false => fault,
        }
    }

    fn report(&self, said: Said, kind: &str, prompt: Option<String>, started: Instant) -> GenerateReport {
        let device = self.options.device.to_string();
        let (backend, backend_device, mode) = said.backend;
        let (temperature, top_p, seed) = match self.options.sampler {
            Sampler::Greedy => (0.0, None, None),
            Sampler::Drawn(sampling) => (sampling.temperature, Some(sampling.top_p), Some(sampling.seed)),
        };
        let [loading_seconds, prompt_seconds, decoding_seconds] = said.seconds;
        let (proposed, accepted) = said.drafts;
        let unknown = (!said.unknown.is_empty()).then(|| {
            let place = Place::file(self.path.join(TOKENIZER_FILE));
            Finding::new(Severity::Warning, &Fault::new(place, FaultKind::GeneratedUnknown { ids: said.unknown }))
        });
        let later = said.ids.len() - 1;
        GenerateReport {
            path: self.path.to_string_lossy().into_owned(),
            kind: kind.to_owned(),
            device,
            backend: backend.to_owned(),
            backend_device,
            mode: mode.to_owned(),
            prompt,
            prompt_ids: self.prompt.to_vec(),
            ids: said.ids,
            text: said.text,
            unfinished_bytes: said.unfinished_bytes as u64,
            stop_reason: match said.stop_reason {
                StopReason::StopId => GenerateStop::StopId,
                StopReason::Length => GenerateStop::Length,
                StopReason::Repetition => GenerateStop::Repetition,
            },
            max_tokens: self.max_tokens as u64,
            temperature,
            top_p,
            seed,
            draft: GenerateDraft {
                most: self.options.drafts as u64,
                proposed: proposed as u64,
                accepted: accepted as u64,
                acceptance: (proposed > 0).then(|| accepted as f64 / proposed as f64),
            },
            tokens_per_second: (later > 0).then(|| later as f64 / decoding_seconds.max(1e-9)),
            prompt_tokens_per_second: self.prompt.len() as f64 / prompt_seconds.max(1e-9),
            seconds: started.elapsed().as_secs_f64(),
            loading_seconds,
            prompt_seconds,
            decoding_seconds,
            peak_anonymous_bytes: said.peak_anonymous_bytes,
            experts: said.experts,
            device_experts: said.device_experts,
            gpu: said.gpu,
            warnings: unknown.into_iter().collect(),
        }
    }
}
