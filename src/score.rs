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
pub mod metrics;
mod out;
mod parquet;
mod plot;
pub mod probes;
pub mod record;
pub mod results;
mod row;
pub mod runner;
pub mod statistics;
mod summary;
mod worst;

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::backend::reference::Reference as Plain;
use crate::backend::{Backend, Device};
use crate::config::{Config, stop_ids};
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::{anonymous_bytes, is_same_file};
use crate::model::tokenizer::{TOKENIZER_FILE, Tokenizer};
use crate::model::{Model, check_memory, plain_bytes};
use crate::part::Part;
use crate::report::{Finding, ScoreProbes, ScoreReport, Severity};
use crate::tensor::TensorName;
use crate::threads;
use crate::weights::{Model as Stored, ModelKind, Weights};

use encode::{Encoder, PrefixChoice};
use identity::Identity;
use input::{Given, Input, Kind, Sampling};
use out::Out;
use results::{Binding, BoundInput, Results};
use row::{Baseline, Scorer};

pub use summary::answers;

/// Told how far a run is.
pub trait Watch: Sync {
    /// What is being done now.
    fn phase(&self, what: &str);
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
    /// Threads; 0 for one per core.
    pub threads: usize,
    /// Memory for the models, in bytes; by default what is available.
    pub memory: Option<u64>,
}

/// Scores a container or a checkpoint.
pub fn score(path: &Path, options: &Options, watch: &dyn Watch) -> Result<ScoreReport, Faults> {
    let started = Instant::now();
    check_options(options)?;
    watch.phase("reading the inputs");
    let inputs = open_inputs(options)?;
    let kind = ModelKind::of(path)?;
    let model = Stored::open(path)?;
    let config = weights(&model).config().clone();
    let with_baseline_model = options.baseline.as_deref().is_some_and(|baseline| !out::has_results(baseline));
    if !options.finish {
        let needed = plain_bytes(&config).saturating_mul(1 + u64::from(with_baseline_model));
        check_memory(path, needed, options.memory)?;
    }
    let tokenizer = Tokenizer::load(path)?;
    let prefix = encode::prefix(&options.prefix, &tokenizer, &path.join(TOKENIZER_FILE))?;
    let out = options.out.as_deref().map(|out| Out::prepare(out, path, options)).transpose()?;
    let pool = threads::pool(options.threads, path)?;
    watch.phase("hashing the model");
    let identity = pool.install(|| Identity::of(path))?;
    let binding = Binding {
        model: identity.model_sha256.clone(),
        tokenizer: identity.tokenizer_sha256.clone(),
        prefix: prefix.clone(),
        backend: format!("{} {}", backend().0, backend().1),
        inputs: inputs.iter().map(|input| bound(input, options.sampling)).collect(),
    };
    let mut results = match &out {
        Some(out) => out.results(binding)?,
        None => Results::in_memory(binding),
    };
    let vocab_size = config.vocab_size;
    let max_tokens = config.max_position_embeddings;
    let job = Job {
        path,
        options,
        inputs: &inputs,
        encoder: Encoder { tokenizer: &tokenizer, prefix: &prefix, vocab_size, max_tokens },
        store: out.is_some(),
        watch,
    };
    let baseline = options.baseline.as_deref().map(|path| job.baseline(path, &pool, results.binding())).transpose()?;
    let mut run = Run::default();
    if options.finish {
        out.as_ref().expect("checked with the options").merge(&mut results)?;
    } else {
        run = pool.install(|| job.compute(&model, &config, baseline.as_ref(), &mut results))?;
    }
    let baseline_tag = baseline.as_ref().map(|baseline| baseline.tag.as_str());
    if options.part.is_none() {
        job.complete(&results, baseline_tag)?;
        results.finish()?;
    }
    let mut report = summary::report(&job, &results, &identity, kind, baseline.as_ref());
    report.probes = run.probes;
    report.tokens = run.tokens;
    report.loading_seconds = run.loading_seconds;
    report.seconds = started.elapsed().as_secs_f64();
    report.tokens_per_second = (run.tokens > 0).then(|| run.tokens as f64 / run.scoring_seconds.max(1e-9));
    report.peak_anonymous_bytes = run.peak_anonymous_bytes;
    report.warnings = model.findings();
    if let Some(same) = baseline.as_ref().filter(|baseline| baseline.model_sha256 == identity.model_sha256) {
        let kind = FaultKind::BaselineSameModel { hash: same.model_sha256.clone() };
        report.warnings.push(Finding::new(Severity::Warning, &Fault::new(Place::file(&same.path), kind)));
    }
    if let Some(out) = out.filter(|_| options.part.is_none()) {
        out.write(&report, &job, &results)?;
    }
    Ok(report)
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

/// Name and mode of the backend that computes, whatever device is asked for: so far there is one.
fn backend() -> (&'static str, &'static str) {
    let backend = Plain::default();
    (backend.name(), backend.mode().into())
}

fn weights(model: &Stored) -> &dyn Weights {
    match model {
        Stored::Checkpoint(checkpoint) => &**checkpoint,
        Stored::Container(container) => &**container,
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
    watch: &'a dyn Watch,
}

/// A baseline that was opened and checked.
struct Compared {
    path: PathBuf,
    kind: &'static str,
    model_sha256: String,
    /// Marks the records that were compared with it.
    tag: String,
    source: Source,
}

/// Where a baseline's distributions come from.
enum Source {
    Results(Box<results::Stored>),
    Model(Stored),
}

/// What a run took.
#[derive(Default)]
struct Run {
    probes: Option<ScoreProbes>,
    tokens: u64,
    loading_seconds: f64,
    scoring_seconds: f64,
    peak_anonymous_bytes: Option<u64>,
}

impl Job<'_> {
    /// Opens a baseline and checks that it is one of these rows and this tokenizer.
    fn baseline(&self, path: &Path, pool: &rayon::ThreadPool, own: &Binding) -> Result<Compared, Faults> {
        if out::has_results(path) {
            let stored = results::Stored::open(&path.join(results::RESULTS_FILE), own, self.inputs)?;
            let model_sha256 = stored.binding.model.clone();
            let tag = format!("{} {model_sha256}", summary::TOP_METHOD);
            let source = Source::Results(Box::new(stored));
            return Ok(Compared { path: path.to_owned(), kind: "results", model_sha256, tag, source });
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
        Ok(Compared { path: path.to_owned(), kind, model_sha256, tag, source: Source::Model(model) })
    }

    /// Scores what has no result yet.
    fn compute(
        &self,
        model: &Stored,
        config: &Config,
        baseline: Option<&Compared>,
        results: &mut Results,
    ) -> Result<Run, Faults> {
        let tag = baseline.map(|baseline| baseline.tag.as_str());
        let pending = self.pending(results, tag)?;
        if pending == 0 && !self.options.probes {
            return Ok(Run::default());
        }
        let started = Instant::now();
        self.watch.phase("loading the model");
        let backend = Plain::default();
        let own = Model::load(weights(model), &backend)?;
        let theirs = match baseline.map(|baseline| &baseline.source) {
            Some(Source::Model(model)) => {
                let theirs = Model::load(weights(model), &backend)?;
                if theirs.config().vocab_size != config.vocab_size {
                    let (expected, found) = (config.vocab_size.to_string(), theirs.config().vocab_size.to_string());
                    let kind = FaultKind::ConfigNotTheSource { key: "vocab_size".into(), expected, found };
                    return Err(Fault::new(Place::file(self.path), kind).into());
                }
                Some(theirs)
            }
            _ => None,
        };
        let loading_seconds = started.elapsed().as_secs_f64();
        self.watch.phase("scoring");
        self.watch.start(pending);
        let compared = match (baseline.map(|baseline| &baseline.source), &theirs) {
            (Some(Source::Results(stored)), _) => Baseline::Stored(stored),
            (Some(Source::Model(_)), Some(theirs)) => Baseline::model(theirs)?,
            _ => Baseline::None,
        };
        let mut scorer = Scorer::new(&own, compared, &self.encoder, self.store, tag)?;
        let scored = self.rows(&mut scorer, results, tag);
        self.watch.end();
        let peak_anonymous_bytes = scored?;
        let scoring_seconds = started.elapsed().as_secs_f64() - loading_seconds;
        let probes = self.options.probes.then(|| self.probes(&own, model)).transpose()?;
        let tokens = scorer.computed();
        Ok(Run { probes, tokens, loading_seconds, scoring_seconds, peak_anonymous_bytes })
    }

    /// Lets the model generate.
    fn probes<B: Backend>(&self, model: &Model<'_, B>, stored: &Stored) -> Result<ScoreProbes, Faults> {
        self.watch.phase("generating");
        let config = model.config();
        let stop_ids = stop_ids(self.path, config)?;
        let stop_ids: Vec<u32> = stop_ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect();
        let head = config.mtp_layer().map(|layer| TensorName::from(format!("model.layers.{layer}.eh_proj.weight")));
        let format = head.and_then(|name| Some(stored.stored(&name)?.format));
        Ok(probes::run(model, &self.encoder, &stop_ids, format)?)
    }

    /// Scores the rows that have no result; the largest anonymous memory that was seen.
    fn rows<B: Backend>(
        &self,
        scorer: &mut Scorer<'_, '_, B>,
        results: &mut Results,
        tag: Option<&str>,
    ) -> Result<Option<u64>> {
        let (mut count, mut peak) = (0, None);
        for (number, input) in self.inputs.iter().enumerate() {
            for item in input.items()? {
                let item = item?;
                count += 1;
                if self.is_mine(count) && !is_done(results, (number, item.row), tag) {
                    results.add(vec![scorer.score(input, item)?])?;
                    peak = peak.max(anonymous_bytes());
                    self.watch.row(scorer.computed());
                }
            }
        }
        Ok(peak)
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
    results.get(key).is_some_and(|record| tag.is_none() || record.baseline.as_deref() == tag)
}
