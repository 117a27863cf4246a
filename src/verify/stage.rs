//! What a level found, check by check, in a form that parts of a verification are joined from.

use serde::{Deserialize, Serialize};

use crate::container::reader::Found;
use crate::error::{Severity, counted};
use crate::report::{CheckStatus, Finding, VerifyCheck};

/// What one level found.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Stage {
    pub(super) checks: Vec<Check>,
    /// Bytes of weights and files that were read.
    pub(super) bytes_read: u64,
}

/// One check.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Check {
    pub(super) name: String,
    looked: Looked,
    findings: Vec<Ranked>,
}

/// What a check looked at; the texts of a share are about the whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Looked {
    /// At all there is.
    At(String),
    /// At what the part has of it.
    Share(String),
    /// Why it did not.
    Skipped(String),
    /// Only another part does.
    Elsewhere,
}

/// A finding with the rank of the thing that it is about: the order of findings is that of the ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Ranked {
    rank: u64,
    #[serde(flatten)]
    finding: Finding,
}

impl Check {
    /// How it ended.
    pub(super) fn status(&self) -> CheckStatus {
        match (self.count(Severity::Error), &self.looked) {
            (1.., _) => CheckStatus::Fail,
            (_, Looked::At(_) | Looked::Share(_)) => CheckStatus::Pass,
            (_, Looked::Skipped(_) | Looked::Elsewhere) => CheckStatus::Skipped,
        }
    }

    fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|found| found.finding.severity == severity).count()
    }

    /// What was looked at, or how much is wrong, or why it was left out.
    fn detail(&self, of_part: bool) -> String {
        let (errors, warnings) = (self.count(Severity::Error), self.count(Severity::Warning));
        let looked = match &self.looked {
            _ if errors > 0 => counted(errors, "error"),
            Looked::Share(text) if of_part => format!("{text}; its share"),
            Looked::At(text) | Looked::Share(text) | Looked::Skipped(text) => text.clone(),
            Looked::Elsewhere => "another part looks at it".to_owned(),
        };
        if warnings > 0 { format!("{looked}; {}", counted(warnings, "warning")) } else { looked }
    }

    /// Takes over what another part found. What both found of one thing is the same.
    fn join(&mut self, other: Check) {
        let known = std::mem::take(&mut self.findings);
        let new: Vec<Ranked> = other.findings.into_iter().filter(|found| !known.contains(found)).collect();
        self.findings = known.into_iter().chain(new).collect();
        self.findings.sort_by_key(|found| found.rank);
        // What a part could not look at was not looked at.
        let replaces = matches!(
            (&self.looked, &other.looked),
            (Looked::Elsewhere, _) | (Looked::At(_) | Looked::Share(_), Looked::Skipped(_))
        );
        if replaces {
            self.looked = other.looked;
        }
    }
}

impl Stage {
    /// Whether a check failed.
    pub(super) fn failed(&self) -> bool {
        self.checks.iter().any(|check| check.status() == CheckStatus::Fail)
    }

    /// Adds a check that ended with these findings; without an error it passed, and `looked_at` says what.
    pub(super) fn check(&mut self, name: &str, findings: Vec<Found>, looked_at: &str) {
        let ranked = findings.into_iter().map(|found| (0, found)).collect();
        self.add(name, ranked, Looked::At(looked_at.to_owned()));
    }

    /// Adds a check of which a part makes its share; `looked_at` says what all parts look at. Findings have the rank of
    /// what they are about.
    pub(super) fn share(&mut self, name: &str, findings: Vec<(u64, Found)>, looked_at: &str) {
        self.add(name, findings, Looked::Share(looked_at.to_owned()));
    }

    /// Adds a check that had nothing to look at, unless it found something all the same.
    pub(super) fn check_or_skip(&mut self, name: &str, findings: Vec<Found>, looked_at: Result<String, &str>) {
        match looked_at {
            Err(why) if findings.is_empty() => self.skip(name, why),
            Err(why) => self.check(name, findings, why),
            Ok(looked_at) => self.check(name, findings, &looked_at),
        }
    }

    /// Adds a check that was left out.
    pub(super) fn skip(&mut self, name: &str, why: &str) {
        self.add(name, Vec::new(), Looked::Skipped(why.to_owned()));
    }

    /// Adds a check that another part makes.
    pub(super) fn elsewhere(&mut self, name: &str) {
        self.add(name, Vec::new(), Looked::Elsewhere);
    }

    fn add(&mut self, name: &str, findings: Vec<(u64, Found)>, looked: Looked) {
        let ranked = |(rank, (severity, fault)): (u64, Found)| Ranked { rank, finding: Finding::new(severity, &fault) };
        let mut findings: Vec<Ranked> = findings.into_iter().map(ranked).collect();
        findings.sort_by_key(|found| found.rank);
        self.checks.push(Check { name: name.to_owned(), looked, findings });
    }

    /// Takes over what another part found at this level. Checks of one name are told apart by their order.
    pub(super) fn join(&mut self, other: Stage) {
        self.bytes_read += other.bytes_read;
        let mut joined = vec![false; self.checks.len()];
        for check in other.checks {
            let at = (0..joined.len()).find(|&at| !joined[at] && self.checks[at].name == check.name);
            match at {
                Some(at) => {
                    joined[at] = true;
                    self.checks[at].join(check);
                }
                None => self.checks.push(check),
            }
        }
    }

    /// Says of a check that passed in shares what they looked at together.
    pub(super) fn conclude(&mut self, name: &str, looked_at: &str) {
        for check in self.checks.iter_mut().filter(|check| check.name == name) {
            if let Looked::Share(text) = &mut check.looked {
                *text = looked_at.to_owned();
            }
        }
    }

    /// Whether parts made a check each for its share, so that what they say together can be said anew.
    pub(super) fn is_shared(&self, name: &str) -> bool {
        self.checks.iter().any(|check| check.name == name && matches!(check.looked, Looked::Share(_)))
    }

    /// The checks and findings of a report.
    pub(super) fn into_report(self, of_part: bool) -> (Vec<VerifyCheck>, Vec<Finding>) {
        let check = |check: &Check| VerifyCheck {
            name: check.name.clone(),
            status: check.status(),
            detail: check.detail(of_part),
        };
        let checks = self.checks.iter().map(check).collect();
        let findings = self.checks.into_iter().flat_map(|check| check.findings).map(|found| found.finding).collect();
        (checks, findings)
    }
}
