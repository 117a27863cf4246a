//! Named checks with what they found.

use crate::error::{Fault, Severity};
use crate::report::{CheckStatus, Finding, VerifyCheck};

/// Checks in order, and all findings.
#[derive(Debug, Default)]
pub struct Checks {
    /// How each check ended.
    pub list: Vec<VerifyCheck>,
    /// What was found.
    pub findings: Vec<Finding>,
}

impl Checks {
    /// Adds a check that fails with a fault, or passes; `looked_at` says what was looked at.
    pub fn check(&mut self, name: &str, faults: Vec<Fault>, looked_at: impl Into<String>) {
        let status = if faults.is_empty() { CheckStatus::Pass } else { CheckStatus::Fail };
        let detail = match faults.len() {
            0 => looked_at.into(),
            1 => "1 error".to_owned(),
            n => format!("{n} errors"),
        };
        self.list.push(VerifyCheck { name: name.to_owned(), status, detail });
        self.findings.extend(faults.iter().map(|fault| Finding::new(Severity::Error, fault)));
    }

    /// Adds a check that had nothing to look at.
    pub fn skip(&mut self, name: &str, why: &str) {
        let (name, detail) = (name.to_owned(), why.to_owned());
        self.list.push(VerifyCheck { name, status: CheckStatus::Skipped, detail });
    }

    /// Adds what is odd, but no reason to say no.
    pub fn warn(&mut self, faults: &[Fault]) {
        self.findings.extend(faults.iter().map(|fault| Finding::new(Severity::Warning, fault)));
    }

    /// Whether no check failed and none is without an answer.
    pub fn passed(&self) -> bool {
        self.list.iter().all(|check| check.status == CheckStatus::Pass)
    }
}
