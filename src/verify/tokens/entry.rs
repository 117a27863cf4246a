//! How far a model agrees with a reference, in the words of the report.

use std::path::Path;

use crate::backend::{Backend, Counters, Device, Mode};
use crate::container::reader::Found;
use crate::error::{Fault, FaultKind, Place, Severity, counted};
use crate::reference::{Agreement, Matches};
use crate::report::{GpuRun, VerifyDrafts, VerifyGreedy, VerifyTeacherForced, VerifyTokens};

/// Largest difference of a log-probability in exact mode. Other implementations in f32 stay within 3e-5, or 1.5e-4 where
/// they take another eps inside attention; another `rms_norm_eps` of the config makes more.
pub const LOGPROB_TOLERANCE: f64 = 2e-4;

/// Largest difference of a log-probability in fast mode: that of [`crate::reference::FAST_NEAR_TIE_MARGIN`].
pub const FAST_LOGPROB_TOLERANCE: f64 = crate::reference::FAST_NEAR_TIE_MARGIN;

/// Largest difference of a log-probability in a mode.
pub fn logprob_tolerance(mode: Mode) -> f64 {
    match mode {
        Mode::Exact => LOGPROB_TOLERANCE,
        Mode::Fast => FAST_LOGPROB_TOLERANCE,
    }
}

/// Real mismatches of one reference, and log-probabilities that rounding cannot explain.
pub(super) fn disagreements(agreement: &Agreement, path: &Path, reference: usize, mode: Mode) -> Vec<Found> {
    let mut findings = Vec::new();
    let mut push = |kind| findings.push((Severity::Error, Fault::new(Place::file(path), kind)));
    let compared = [
        ("teacher-forced predictions", agreement.teacher_forced),
        ("greedy tokens", agreement.greedy),
        ("drafts", agreement.mtp.map(|mtp| mtp.matches)),
    ];
    for (what, matches) in compared {
        let Some(Matches { matched, near_tie, total, first_mismatch }) = matches.filter(|m| !m.good()) else {
            continue;
        };
        let (at, expected, found) = first_mismatch.unwrap_or_default();
        push(FaultKind::TokensDiffer { reference, what, equal: matched + near_tie, total, at, expected, found });
    }
    let tolerance = logprob_tolerance(mode);
    if let Some(found) = agreement.max_abs_logprob_diff.filter(|&apart| apart.is_nan() || apart > tolerance) {
        push(FaultKind::LogprobsDiffer { reference, found, tolerance });
    }
    findings
}

/// What the report says of one reference on one device, and what the backend `counted` along it.
pub(super) fn entry<B: Backend>(
    name: &str,
    number: usize,
    device: Device,
    backend: &B,
    counted: &Counters,
    agreement: &Agreement,
) -> VerifyTokens {
    VerifyTokens {
        reference: name.to_owned(),
        number: number as u64,
        written_by: None,
        device: device.to_string(),
        backend: backend.name().to_owned(),
        mode: <&str>::from(backend.mode()).to_owned(),
        teacher_forced: agreement.teacher_forced.map(|m| VerifyTeacherForced {
            matched: m.matched as u64,
            near_tie: m.near_tie as u64,
            total: m.total as u64,
        }),
        greedy: agreement.greedy.map(|m| VerifyGreedy { matched: m.matched as u64, total: m.total as u64 }),
        max_abs_logprob_diff: agreement.max_abs_logprob_diff.filter(|apart| apart.is_finite()),
        mtp: agreement.mtp.map(|mtp| VerifyDrafts {
            matched: mtp.matches.matched as u64,
            total: mtp.matches.total as u64,
            proposed: mtp.proposed as u64,
            accepted: mtp.accepted as u64,
        }),
        gpu: device.is_gpu().then(|| GpuRun::counted(counted)),
    }
}

/// All references together in one line.
pub(super) fn summary(total: &Agreement) -> String {
    let mut parts = Vec::new();
    let of = |m: &Matches| match m.near_tie {
        0 => format!("{} of {}", m.matched, m.total),
        ties => format!("{} of {} ({})", m.matched, m.total, counted(ties, "near-tie")),
    };
    parts.extend(total.teacher_forced.as_ref().map(|m| format!("teacher-forced {}", of(m))));
    parts.extend(total.greedy.as_ref().map(|m| format!("greedy {}", of(m))));
    parts.extend(total.max_abs_logprob_diff.map(|apart| format!("log-probabilities within {apart:.1e}")));
    parts.extend(
        total
            .mtp
            .as_ref()
            .map(|mtp| format!("drafts {}, {} of {} accepted", of(&mtp.matches), mtp.accepted, mtp.proposed)),
    );
    parts.join("; ")
}
