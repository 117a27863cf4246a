//! Computing what has no result yet, on the device that was asked for.

use std::time::Instant;

use super::record::Record;
use super::results::Results;
use super::row::{Baseline, Scorer};
use super::{Compared, Job, Source, is_done, probes};
use crate::backend::cpu::Cpu;
use crate::backend::gpu::placement::Spread;
use crate::backend::reference::Reference as Plain;
use crate::backend::{self, Backend, Counters, Device, Gpus, Mode, Operation, Work, cuda, vulkan};
use crate::config::stop_ids;
use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::io::anonymous_bytes;
use crate::isa::Isa;
use crate::limits;
use crate::model::{Loaded, Model};
use crate::report::{DeviceExperts, Experts, Finding, GpuRun, ScoreProbes, ScoreShares, Severity};
use crate::tensor::TensorName;
use crate::weights::Model as Stored;

/// What a run took.
#[derive(Default)]
pub(super) struct Run {
    pub(super) probes: Option<ScoreProbes>,
    /// Why the model was to generate and did not.
    pub(super) not_generated: Option<Finding>,
    pub(super) tokens: u64,
    pub(super) loading_seconds: f64,
    pub(super) scoring_seconds: f64,
    pub(super) peak_anonymous_bytes: Option<u64>,
    pub(super) shares: Option<ScoreShares>,
    pub(super) experts: Option<Experts>,
    pub(super) device_experts: Option<DeviceExperts>,
    pub(super) gpu: Option<GpuRun>,
}

/// Name and mode of a device's backend.
pub(super) fn backend(device: Device, mode: Mode) -> (&'static str, &'static str) {
    let name = match device {
        Device::Reference => Plain::default().name(),
        Device::Cpu => Cpu::default().name(),
        Device::Cuda(_) => cuda::NAME,
        Device::Vulkan(_) => vulkan::NAME,
        Device::Several(several) => several.api().into(),
    };
    (name, mode.into())
}

/// Scoring on GPUs.
struct OnGpus<'a, 'j> {
    job: &'a Job<'j>,
    model: &'a Stored,
    baseline: Option<&'a Compared>,
    probe: bool,
    results: &'a mut Results,
}

impl Work for OnGpus<'_, '_> {
    type Done = Run;

    fn on<B: backend::OnGpus>(self, backend: &B, _: &dyn Fn(&Spread) -> Result<B>) -> Result<Run, Faults> {
        self.job.compute_on(backend, self.model, self.baseline, self.probe, self.results)
    }
}

impl Job<'_> {
    /// Scores what has no result yet. `probed` tells that what the model generates is known.
    pub(super) fn compute(
        &self,
        model: &Stored,
        baseline: Option<&Compared>,
        probed: bool,
        results: &mut Results,
    ) -> Result<Run, Faults> {
        let tag = baseline.map(|baseline| baseline.tag.as_str());
        let probe = self.options.probes && !probed;
        if self.pending(results, tag)? == 0 && !probe {
            return Ok(Run::default());
        }
        match self.options.device() {
            Device::Reference => self.compute_on(&Plain::default(), model, baseline, probe, results),
            device @ (Device::Cuda(_) | Device::Vulkan(_) | Device::Several(_)) => {
                let spread = &self.on_gpu.as_ref().expect("what runs on GPUs is planned").spread;
                spread.told().iter().for_each(|told| self.watch.plan(told));
                let gpus = Gpus::open(device, self.options.mode, None)?;
                gpus.run(spread, OnGpus { job: self, model, baseline, probe, results })
            }
            Device::Cpu => {
                let cpu = self.plan.map_or_else(Cpu::default, |plan| Cpu::with_experts(Isa::detect(), plan.experts));
                self.compute_on(&cpu, model, baseline, probe, results)
            }
        }
    }

    fn compute_on<B: Backend>(
        &self,
        backend: &B,
        model: &Stored,
        baseline: Option<&Compared>,
        probe: bool,
        results: &mut Results,
    ) -> Result<Run, Faults> {
        let tag = baseline.map(|baseline| baseline.tag.as_str());
        let started = Instant::now();
        self.watch.phase("loading the model");
        let own = Model::load_parts(model.weights(), backend, Loaded::for_drafts(probe))?;
        let theirs = match baseline.map(|baseline| &baseline.source) {
            Some(Source::Model(model)) => {
                let theirs = Model::load_parts(model.weights(), backend, Loaded::WithoutMtp)?;
                Some(self.other(theirs)?)
            }
            _ => None,
        };
        let loading_seconds = started.elapsed().as_secs_f64();
        self.watch.phase("scoring");
        self.watch.start(self.pending(results, tag)?);
        let compared = match (baseline.map(|baseline| &baseline.source), &theirs) {
            (Some(Source::Results(stored)), _) => Baseline::Stored(stored),
            (Some(Source::Model(_)), Some(theirs)) => Baseline::Model(theirs),
            _ => Baseline::None,
        };
        let rows = self
            .plan
            .map(|plan| plan.rows)
            .or(self.on_gpu.as_ref().map(|plan| plan.rows))
            .unwrap_or(limits::BATCH_ROWS);
        let mut scorer = Scorer::new(&own, compared, &self.encoder, self.store, tag, rows)?;
        let scored = self.rows(&mut scorer, results, tag);
        self.watch.end();
        let peak_anonymous_bytes = scored?;
        let scoring_seconds = started.elapsed().as_secs_f64() - loading_seconds;
        let tokens = scorer.computed();
        let waited = backend.expert_counters().map_or(0.0, |counters| counters.wait_seconds);
        let device = self.options.device();
        // A GPU goes on by itself: nothing here knows what takes its time.
        let shares = (tokens > 0 && !device.is_gpu()).then(|| shares(&backend.counters(), waited, scoring_seconds));
        let (probes, not_generated) = if probe { self.probes(&own, model)? } else { (None, None) };
        let (experts, device_experts) = (backend.expert_counters(), backend.device_expert_counters());
        let gpu = device.is_gpu().then(|| GpuRun::of(backend));
        Ok(Run {
            probes,
            not_generated,
            tokens,
            loading_seconds,
            scoring_seconds,
            peak_anonymous_bytes,
            shares,
            experts,
            device_experts,
            gpu,
        })
    }

    /// A baseline's model, if it has the same vocabulary.
    fn other<'b, B: Backend>(&self, theirs: Model<'b, B>) -> Result<Model<'b, B>> {
        let (expected, found) = (self.encoder.vocab_size, theirs.config().vocab_size);
        if found != expected {
            let (expected, found) = (expected.to_string(), found.to_string());
            let kind = FaultKind::ConfigNotTheSource { key: "vocab_size".into(), expected, found };
            return Err(Fault::new(Place::file(self.path), kind));
        }
        Ok(theirs)
    }

    /// Lets the model generate. Logits that are not finite are a finding, as they are in rows: these have their results.
    fn probes<B: Backend>(
        &self,
        model: &Model<'_, B>,
        stored: &Stored,
    ) -> Result<(Option<ScoreProbes>, Option<Finding>), Faults> {
        self.watch.phase("generating");
        let config = model.config();
        let stop_ids = stop_ids(self.path, config)?;
        let stop_ids: Vec<u32> = stop_ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect();
        let head = config.mtp_layer().map(|layer| TensorName::from(format!("model.layers.{layer}.eh_proj.weight")));
        let format = head.and_then(|name| Some(stored.stored(&name)?.format));
        match probes::run(model, &self.encoder, &stop_ids, format) {
            Ok(probes) => Ok((Some(probes), None)),
            Err(Fault { kind, .. }) if matches!(*kind, FaultKind::LogitsNotFinite { .. }) => {
                let fault = Fault { place: Place::file(self.path), kind };
                Ok((None, Some(Finding::new(Severity::Error, &fault))))
            }
            Err(fault) => Err(fault.into()),
        }
    }

    /// Scores the rows that have no result; the largest anonymous memory that was seen.
    fn rows<B: Backend>(
        &self,
        scorer: &mut Scorer<'_, '_, B>,
        results: &mut Results,
        tag: Option<&str>,
    ) -> Result<Option<u64>> {
        let (mut count, mut peak) = (0, None);
        let mut keep = |records: Vec<Record>, computed, results: &mut Results| -> Result<()> {
            let scored = records.len();
            results.add(records)?;
            peak = peak.max(anonymous_bytes());
            (0..scored).for_each(|_| self.watch.row(computed));
            Ok(())
        };
        for (number, input) in self.inputs.iter().enumerate() {
            for item in input.items()? {
                let item = item?;
                count += 1;
                if self.is_mine(count) && !is_done(results, (number, item.row), tag) {
                    let records = scorer.add(input, item)?;
                    keep(records, scorer.computed(), results)?;
                }
            }
        }
        let records = scorer.finish()?;
        keep(records, scorer.computed(), results)?;
        Ok(peak)
    }
}

/// What the time went into.
fn shares(counters: &Counters, waited: f64, seconds: f64) -> ScoreShares {
    let of = |operations: &[Operation]| {
        let busy: f64 = operations.iter().map(|&operation| counters.busy(operation).as_secs_f64()).sum();
        busy / seconds.max(1e-9)
    };
    ScoreShares {
        experts: (of(&[Operation::Experts]) - waited / seconds.max(1e-9)).max(0.0),
        attention: of(&[Operation::Attention, Operation::Select]),
        products: of(&[Operation::Matmul, Operation::Route, Operation::Predict]),
        disk: waited / seconds.max(1e-9),
    }
}
