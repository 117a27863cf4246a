//! Routed experts that are read on demand, in the reports of every command that runs a model.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::experts::Counters;

/// What reading routed experts on demand took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Experts {
    /// Experts that were asked for.
    pub requests: u64,
    /// Of these, experts for which nothing had to be read after they were asked for.
    pub hits: u64,
    /// Experts that were read because they were likely to be asked for next.
    pub read_ahead: u64,
    /// Of the hits, those that were read for that reason.
    pub read_ahead_hits: u64,
    /// Reads of files.
    pub reads: u64,
    /// Their bytes.
    pub bytes_read: u64,
    /// Seconds that computing waited for reading.
    pub wait_seconds: f64,
    /// Experts that had to go for others.
    pub evictions: u64,
    /// Largest number of bytes that were kept, what readers need included.
    pub peak_bytes: u64,
    /// Most that could have been kept.
    pub budget_bytes: u64,
    /// Whether reads went past the system's cache.
    pub direct: bool,
}

impl From<Counters> for Experts {
    fn from(counters: Counters) -> Experts {
        Experts {
            requests: counters.requests,
            hits: counters.hits,
            read_ahead: counters.read_ahead,
            read_ahead_hits: counters.read_ahead_hits,
            reads: counters.reads,
            bytes_read: counters.bytes_read,
            wait_seconds: counters.wait_seconds,
            evictions: counters.evictions,
            peak_bytes: counters.peak_bytes,
            budget_bytes: counters.budget_bytes,
            direct: counters.direct,
        }
    }
}

impl Experts {
    /// That of two runs together: sums, and the larger of two sizes.
    pub fn and(&self, other: &Experts) -> Experts {
        Experts {
            requests: self.requests + other.requests,
            hits: self.hits + other.hits,
            read_ahead: self.read_ahead + other.read_ahead,
            read_ahead_hits: self.read_ahead_hits + other.read_ahead_hits,
            reads: self.reads + other.reads,
            bytes_read: self.bytes_read + other.bytes_read,
            wait_seconds: self.wait_seconds + other.wait_seconds,
            evictions: self.evictions + other.evictions,
            peak_bytes: self.peak_bytes.max(other.peak_bytes),
            budget_bytes: self.budget_bytes.max(other.budget_bytes),
            direct: self.direct && other.direct,
        }
    }
}
