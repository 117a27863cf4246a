//! Numbers that decide whether a container may be published: accuracies of tasks, perplexities of texts, log-probabilities
//! of requests, and how far all of them are from a baseline.
//!
//! The rows of the inputs ([`input`]) become texts of ids ([`encode`]) that a model runs along ([`runner`]). What a row got
//! is a line of the results ([`results`], [`record`]), written as it lands, and everything that is reported is computed
//! from these lines: [`metrics`] of the model itself, and how it compares with a baseline ([`compare`]). Formulas: model
//! description, scoring.

pub mod compare;
pub mod distribution;
pub mod encode;
pub mod html;
pub mod identity;
pub mod import;
pub mod input;
mod memory;
pub mod metrics;
mod out;
mod parquet;
mod plan;
mod plot;
pub mod probes;
pub mod record;
pub mod results;
mod row;
mod run;
pub mod runner;
pub mod statistics;
mod summary;
mod worst;

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::backend::{Device, Mode, check_mode};
use crate::checkpoint::weight_files;
use crate::config::Config;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::is_same_file;
use crate::model::memory::Allowed;
use crate::model::tokenizer::{TOKENIZER_FILE, Tokenizer};
use crate::model::{Loaded, check_memory, plain_bytes};
use crate::part::Part;
use crate::report::{Finding, ScoreReport, Severity};
use crate::threads;
use crate::weights::{Model as Stored, ModelKind};

use encode::{Encoder, PrefixChoice};
use identity::Identity;
use input::{Given, Input, Kind, Sampling};
use out::Out;
use results::{Binding, BoundInput, Results};
use run::Run;

pub use summary::answers;

/// Told how far a run is.
pub trait Watch: Sync {
    /// What is being done now.
    fn phase(&self, what: &str);
    /// What memory is used for, where there is a choice.
    fn plan(&self, _what: &str) {}
    /// So many rows are to be scored.
    fn start(&self, rows: u64);
    /// A row was scored; `tokens` went through the layers so far.
    fn row(&self, tokens: u64);
    /// All rows are scored.
    fn end(&self);
}

/// Tells nobody.
#[derive(Debug)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn phase(&self, _what: &str) {}
    fn start(&self, _rows: u64) {}
    fn row(&self, _tokens: u64) {}
    fn end(&self) {}
}

/// What a user asks for.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Files to score, in the order of the report: a request file first.
    pub inputs: Vec<Given>,
    /// Which rows of tasks and texts.
    pub sampling: Sampling,
    /// What stands before every text.
    pub prefix: PrefixChoice,
    /// A directory of finished results, or a model, to compare with.
    pub baseline: Option<PathBuf>,
    /// How much worse than the baseline is accepted.
    pub threshold: Option<f64>,
    /// Directory for results and reports.
    pub out: Option<PathBuf>,
    /// Whether the model is to generate, too.
    pub probes: bool,
    /// Only this slice of the rows.
    pub part: Option<Part>,
    /// Join the parts of earlier runs; nothing is computed.
    pub finish: bool,
    /// Where to compute; by default on the CPU.
    pub device: Option<Device>,
    /// How sums are formed.
    pub mode: Mode,
    /// Devices that were left out of it, with the reason.
    pub unused: Vec<(String, String)>,
    /// Threads; 0 for one per core.
    pub threads: usize,
    /// Memory for the models, in bytes; by default what is available.
    pub memory: Option<u64>,
    /// Memory of a GPU for them, in bytes; by default what is free.
    pub device_memory: Option<u64>,
}

impl Options {
    /// Where to compute.
    fn device(&self) -> Device {
        self.device.unwrap_or(Device::Cpu)
    }
}

/// Scores a container or a checkpoint.
pub fn score(path: &Path, options: &Options, watch: &dyn Watch) -> Result<ScoreReport, Faults> {
    let started = Instant::now();
    check_options(options)?;
    watch.phase("reading the inputs");
    let inputs = open_inputs(options)?;
    let kind = ModelKind::of(path)?;
    let model = Stored::open(path)?;
    let config = model.weights().config().clone();
    if !options.finish {
        check_mode(options.device(), options.mode)?;
    }
    // What an earlier run generated is generated no more. Whether it is of this model is seen when that is hashed.
    let known = options.out.as_deref().is_some_and(out::has_probes);
    let loaded = Loaded::for_drafts(options.probes && !known);
    let mut plans = planned(path, &config, &inputs, options, loaded)?;
    let tokenizer = Tokenizer::load(path)?;
    let prefix = encode::prefix(&options.prefix, &tokenizer, &path.join(TOKENIZER_FILE))?;
    let out = options.out.as_deref().map(|out| Out::prepare(out, path, options)).transpose()?;
    let pool = threads::pool(options.threads, path)?;
    watch.phase("hashing the model");
    let identity = pool.install(|| Identity::of(path))?;
    let (backend, mode) = run::backend(options.device(), options.mode);
    let binding = Binding {
        model: identity.model_sha256.clone(),
        tokenizer: identity.tokenizer_sha256.clone(),
        prefix: prefix.clone(),
        backend: format!("{backend} {mode}"),
        inputs: inputs.iter().map(|input| bound(input, options.sampling)).collect(),
    };
    let probes = out.as_ref().and_then(|out| out.earlier_probes(&binding));
    let needed = Loaded::for_drafts(options.probes && probes.is_none());
    if needed != loaded {
        plans = planned(path, &config, &inputs, options, needed)?;
    }
    let (plan, on_gpu) = plans;
    let vocab_size = config.vocab_size;
    let max_tokens = config.max_position_embeddings;
    let job = Job {
        path,
        options,
        inputs: &inputs,
        encoder: Encoder { tokenizer: &tokenizer, prefix: &prefix, vocab_size, max_tokens },
        store: out.is_some(),
        plan,
        on_gpu,
        watch,
    };
    // A baseline that is refused leaves no results behind.
    let baseline = options.baseline.as_deref().map(|path| job.baseline(path, &pool, &binding)).transpose()?;
    let mut results = match &out {
        Some(out) => out.results(binding)?,
        None => Results::temporary(binding)?,
    };
    let mut run = Run::default();
    if options.finish {
        out.as_ref().expect("checked with the options").merge(&mut results)?;
    } else {
        run = pool.install(|| job.compute(&model, baseline.as_ref(), probes.is_some(), &mut results))?;
    }
    let baseline_tag = baseline.as_ref().map(|baseline| baseline.tag.as_str());
    if options.part.is_none() {
        job.complete(&results, baseline_tag)?;
        results.finish()?;
    }
    let records = results.records()?;
    let mut report = summary::report(&job, &records, &identity, kind, baseline.as_ref());
    report.probes = run.probes.or(probes);
    report.shares = run.shares;
    report.experts = run.experts;
    report.device_experts = run.device_experts;
    report.gpu = run.gpu;
    report.tokens = run.tokens;
    report.loading_seconds = run.loading_seconds;
    report.seconds = started.elapsed().as_secs_f64();
    report.tokens_per_second = (run.tokens > 0).then(|| run.tokens as f64 / run.scoring_seconds.max(1e-9));
    report.peak_anonymous_bytes = run.peak_anonymous_bytes;
    report.warnings = model.findings();
    report.warnings.extend(run.not_generated);
    report.warnings.extend(Finding::of_unused(path, &options.unused));
    if let Some(same) = baseline.as_ref().filter(|baseline| baseline.model_sha256 == identity.model_sha256) {
        let kind = FaultKind::BaselineSameModel { hash: same.model_sha256.clone() };
        report.warnings.push(Finding::new(Severity::Warning, &Fault::new(Place::file(&same.path), kind)));
    }
    if let Some(out) = out.filter(|_| options.part.is_none()) {
        out.write(&report, &job, &records)?;
    }
    Ok(report)
}

/// What a run with so much of the model does with memory, on the CPU or on GPUs; nothing is planned on the plain backend, nor
/// where nothing is computed. Models that have no room are refused.
fn planned(
    path: &Path,
    config: &Config,
    inputs: &[Input],
    options: &Options,
    loaded: Loaded,
) -> Result<(Option<memory::Plan>, Option<memory::OnGpu>)> {
    if options.finish {
        return Ok((None, None));
    }
    // A model that is the baseline has the same config but for its formats.
    let baseline = options.baseline.as_deref().filter(|baseline| !out::has_results(baseline));
    let parts = std::iter::once((path, config, loaded));
    let models: Vec<memory::Part<'_>> =
        parts.chain(baseline.map(|baseline| (baseline, config, Loaded::WithoutMtp))).collect();
    // The prefix is a few tokens more.
    let longest = inputs.iter().map(|input| input.longest).max().unwrap_or(0) + probes::MAX_TOKENS as u64;
    let longest = config.max_position_embeddings.map_or(longest, |limit| longest.min(limit));
    match options.device() {
        Device::Reference => {
            let needed = models.iter().map(|&(_, config, loaded)| plain_bytes(config, loaded));
            check_memory(path, needed.fold(0, u64::saturating_add), options.memory)?;
            Ok((None, None))
        }
        Device::Cpu => Ok((Some(memory::plan(&models, longest, options.memory)?), None)),
        device @ (Device::Cuda(_) | Device::Vulkan(_) | Device::Several(_)) => {
            let allowed = Allowed { memory: options.memory, device: options.device_memory };
            Ok((None, Some(memory::on_gpu(&models, longest, allowed, device)?)))
        }
    }
}

/// Refuses what the options cannot mean together.
fn check_options(options: &Options) -> Result<(), Fault> {
    let refuse = |kind| Err(Fault::new(Place::default(), kind));
    if options.inputs.is_empty() && !options.probes {
        return refuse(FaultKind::NothingToScore);
    }
    let mut names: Vec<&str> = options.inputs.iter().map(|input| input.name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return refuse(FaultKind::InputNameTwice { name: twice[0].to_owned() });
    }
    let needs = [
        (options.threshold.is_some() && options.baseline.is_none(), "--threshold", "--baseline"),
        (options.part.is_some() && options.out.is_none(), "--part", "--out"),
        (options.finish && options.out.is_none(), "--finish", "--out"),
        (options.finish && options.probes, "--probes", "a run that computes"),
        (options.part.is_some() && options.probes, "--probes", "a run of all rows"),
    ];
    if let Some((_, flag, needs)) = needs.into_iter().find(|(wrong, ..)| *wrong) {
        return refuse(FaultKind::FlagNeeds { flag, needs });
    }
    match (&options.baseline, &options.out) {
        (Some(baseline), Some(out)) if baseline == out || is_same_file(baseline, out) => {
            Err(Fault::new(Place::file(out), FaultKind::BaselineIsOut))
        }
        _ => Ok(()),
    }
}

/// Every input, or everything that is wrong with them.
fn open_inputs(options: &Options) -> Result<Vec<Input>, Faults> {
    let (mut inputs, mut faults) = (Vec::new(), Vec::new());
    for given in &options.inputs {
        match Input::open(given, options.sampling) {
            Ok(input) => inputs.push(input),
            Err(found) => faults.extend(found.into_vec()),
        }
    }
    Faults::check(faults)?;
    Ok(inputs)
}

fn bound(input: &Input, sampling: Sampling) -> BoundInput {
    let limit = sampling.limit.filter(|_| input.kind != Kind::Requests);
    BoundInput {
        kind: input.kind,
        name: input.name.clone(),
        sha256: input.sha256.clone(),
        limit,
        seed: limit.map_or(0, |_| sampling.seed),
    }
}

/// What is scored, and how.
struct Job<'a> {
    path: &'a Path,
    options: &'a Options,
    inputs: &'a [Input],
    encoder: Encoder<'a>,
    /// Whether results are kept in a file, with the distributions that a later comparison needs.
    store: bool,
    /// Of a run on the CPU.
    plan: Option<memory::Plan>,
    /// Of a run on GPUs.
    on_gpu: Option<memory::OnGpu>,
    watch: &'a dyn Watch,
}

/// A baseline that was opened and checked.
struct Compared {
    path: PathBuf,
    kind: &'static str,
    /// What the scored model is, where it is known.
    model_kind: Option<String>,
    model_sha256: String,
    /// How its sums were formed.
    mode: String,
    /// Marks the records that were compared with it.
    tag: String,
    source: Source,
}

/// Where a baseline's distributions come from.
enum Source {
    Results(Box<results::Stored>),
    Model(Stored),
}

impl Job<'_> {
    /// Opens a baseline and checks that it is one of these rows and this tokenizer.
    fn baseline(&self, path: &Path, pool: &rayon::ThreadPool, own: &Binding) -> Result<Compared, Faults> {
        if out::has_results(path) {
            let stored = results::Stored::open(&path.join(results::RESULTS_FILE), own, self.inputs)?;
            let model_sha256 = stored.binding.model.clone();
            let mode = stored.binding.mode().to_owned();
            let rounded = if mode == <&str>::from(Mode::Exact) { String::new() } else { format!(" {mode}") };
            let tag = format!("{} {model_sha256}{rounded}", summary::TOP_METHOD);
            let source = Source::Results(Box::new(stored));
            let (path, model_kind) = (path.to_owned(), out::scored_kind(path, &model_sha256));
            return Ok(Compared { path, kind: "results", model_kind, model_sha256, mode, tag, source });
        }
        if path.is_dir() && weight_files(path).is_ok_and(|names| names.is_empty()) {
            return Err(Fault::new(Place::file(path), FaultKind::BaselineEmpty).into());
        }
        let kind = ModelKind::of(path)?.name();
        let model = Stored::open(path)?;
        self.watch.phase("hashing the baseline");
        let identity = pool.install(|| Identity::of(path))?;
        if identity.tokenizer_sha256 != own.tokenizer {
            let (expected, found) = (own.tokenizer.clone(), identity.tokenizer_sha256);
            let kind = FaultKind::BaselineTokenizer { expected, found };
            return Err(Fault::new(Place::file(path.join(TOKENIZER_FILE)), kind).into());
        }
        let model_sha256 = identity.model_sha256;
        let tag = format!("{} {model_sha256}", summary::EXACT_METHOD);
        let (path, source, model_kind) = (path.to_owned(), Source::Model(model), Some(kind.to_owned()));
        let mode = <&str>::from(self.options.mode).to_owned();
        Ok(Compared { path, kind, model_kind, model_sha256, mode, tag, source })
    }

    /// Whether row `count`, from 1, of all inputs belongs to the part that is run.
    fn is_mine(&self, count: u64) -> bool {
        self.options.part.is_none_or(|part| part.has((count - 1) as usize))
    }

    /// Rows that are to be scored.
    fn pending(&self, results: &Results, tag: Option<&str>) -> Result<u64> {
        let (mut count, mut pending) = (0, 0);
        for (number, input) in self.inputs.iter().enumerate() {
            for item in input.items()? {
                count += 1;
                pending += u64::from(self.is_mine(count) && !is_done(results, (number, item?.row), tag));
            }
        }
        Ok(pending)
    }

    /// Refuses results in which a row is missing, or was not compared with the baseline.
    fn complete(&self, results: &Results, tag: Option<&str>) -> Result<()> {
        let pending = self.pending(results, tag)?;
        if pending == 0 {
            return Ok(());
        }
        let total = self.inputs.iter().map(|input| input.rows).sum();
        let kind = match self.pending(results, None)? {
            0 => FaultKind::ResultsNotCompared { rows: pending, total },
            missing => FaultKind::ResultsIncomplete { missing, total },
        };
        Err(Fault::new(self.options.out.clone().map_or(Place::default(), Place::file), kind))
    }
}

/// Whether a row has a result, compared with the baseline where one is given.
fn is_done(results: &Results, key: results::Key, tag: Option<&str>) -> bool {
    results.get(key).is_some_and(|found| tag.is_none() || found == tag)
}
