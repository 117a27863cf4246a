//! What computes: one trait for every device.
//!
//! A backend holds weights, which are uploaded once in their stored format, and rows of activations, which stay on the
//! device between operations. The model ([`crate::model`]) composes the operations; what an operation means is written
//! here, and [`mod@reference`] is the plain version of it that every other backend is judged by.
//!
//! - Shapes: [n, w] are n rows (tokens) of w f32 values. A weight [O, I] has O output features (rows) of I inputs.
//! - Every row is computed by itself: results never depend on how rows are batched or chunked, nor on the number of
//!   threads. A backend may have kernel classes for few and for many rows; within a class this holds bit for bit.
//! - A weight format that a backend does not compute is refused by name when it is uploaded
//!   ([`crate::error::FaultKind::BackendFormat`]); no operation guesses.
//! - Shapes that do not fit together are faults of the caller and panic: the model checks every weight against
//!   config.json before it uploads it.
//!
//! Formulas: model description, forward.

pub mod cpu;
pub mod cuda;
pub mod gpu;
mod opened;
mod places;
mod present;
pub mod reference;
#[cfg(test)]
pub(crate) mod samples;
mod several;
mod tally;
#[cfg(test)]
pub(crate) mod tolerances;
pub mod vulkan;

use std::fmt;
use std::ops::Range;

use crate::error::{Fault, FaultKind, Faults, Place, Result};
use crate::experts;
use crate::roles::Projection;
use crate::weights::{Located, Matrix};

pub use opened::{Found, Gpus, OnGpus, Work, check_mode};
pub use places::{Places, Seen};
pub use present::Present;
pub use several::{Api, Several};
pub use tally::{Counters, Counts, OnDevice, Operation, Tally};

/// Where a model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The plain backend, the oracle of the others.
    Reference,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU of that number, in the driver's order.
    Cuda(usize),
    /// The device of that number that Vulkan shows, in the order of [`vulkan::list`].
    Vulkan(usize),
    /// Several GPUs, over which the layers of one model go.
    Several(Several),
}

impl Device {
    /// What can stand there, in words.
    const EXPECTED: &str = "reference, cpu, cuda[:N[,N…]|:all] or vulkan[:N[,N…]|:all]";

    /// Reads `reference`, `cpu`, `cuda[:N[,N…]]` or `vulkan[:N[,N…]]`, which stands at `flag`; anything else is refused as
    /// [`FaultKind::FlagValue`].
    pub fn parse(flag: &'static str, text: &str) -> Result<Device> {
        if text.contains(',') {
            return Several::parse(flag, text).map(Device::Several);
        }
        let (api, number) = text.split_once(':').unwrap_or((text, "0"));
        match (api, number.parse()) {
            ("cuda", Ok(number)) => Ok(Device::Cuda(number)),
            ("vulkan", Ok(number)) => Ok(Device::Vulkan(number)),
            ("reference", _) if text == "reference" => Ok(Device::Reference),
            ("cpu", _) if text == "cpu" => Ok(Device::Cpu),
            _ => {
                let found = text.to_owned();
                Err(Fault::new(Place::default(), FaultKind::FlagValue { flag, expected: Device::EXPECTED, found }))
            }
        }
    }

    /// Whether it is a GPU.
    pub fn is_gpu(self) -> bool {
        !matches!(self, Device::Reference | Device::Cpu)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Reference => f.write_str("reference"),
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(0) => f.write_str("cuda"),
            Device::Cuda(number) => write!(f, "cuda:{number}"),
            Device::Vulkan(0) => f.write_str("vulkan"),
            Device::Vulkan(number) => write!(f, "vulkan:{number}"),
            Device::Several(several) => several.fmt(f),
        }
    }
}

/// How sums are formed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, strum::IntoStaticStr, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum Mode {
    /// At least f32 products and sums, in a fixed order.
    #[default]
    Exact,
    /// Whatever the device does fastest within the tolerances of its tests.
    Fast,
}

/// The routed experts of a layer, loaded by the backend when it wants them: all at once, or on demand.
pub trait ExpertSource {
    /// The layer they belong to.
    fn layer(&self) -> u64;
    /// How many there are.
    fn count(&self) -> usize;
    /// The name of one of an expert's matrices.
    fn name(&self, expert: usize, projection: Projection) -> String;
    /// Loads one of an expert's matrices in its stored format; its shape is checked.
    fn load(&self, expert: usize, projection: Projection) -> Result<Matrix>;
    /// Where one of an expert's matrices is stored, to be read later; its shape is checked. `None` if it is in no file.
    fn locate(&self, _expert: usize, _projection: Projection) -> Result<Option<Located<'_>>> {
        Ok(None)
    }
}

/// Rotary position embedding of one part of every head.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Angle per position of each pair, in radians: theta^(−2j/d) for j < d/2.
    pub frequencies: Vec<f32>,
}

/// Heads side by side in a row, with the place of their rotated part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Width of a head; a row is a whole number of heads.
    pub width: usize,
    /// First rotated dimension of each head.
    pub rope_at: usize,
}

/// How a layer makes what it keeps of positions: [`Backend::keep`].
#[derive(Debug)]
pub struct Kept<'w, W> {
    /// `kv_a_layernorm`.
    pub norm: &'w W,
    /// Its eps.
    pub eps: f64,
    /// `kv_lora_rank`.
    pub latent: usize,
    /// Of queries and keys.
    pub rope: &'w Rope,
    /// Of queries.
    pub heads: Heads,
}

/// Dimensions of attention over compressed keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mla {
    /// Heads H.
    pub heads: usize,
    /// `qk_nope_head_dim`.
    pub nope: usize,
    /// `qk_rope_head_dim`.
    pub rope: usize,
    /// `v_head_dim`.
    pub value: usize,
    /// `kv_lora_rank`.
    pub latent: usize,
}

impl Mla {
    /// Panics unless the widths of queries and cached rows, and the shape of `kv_b`, are those of this attention.
    fn check(&self, q: usize, cached: usize, kv_b: (usize, usize)) {
        let &Mla { heads, nope, rope, value, latent } = self;
        assert_eq!((q, cached), (heads * (nope + rope), latent + rope), "attention's rows");
        assert_eq!(kv_b, (heads * (nope + value), latent), "kv_b");
    }
}

/// Dimensions of a DSA indexer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dsa {
    /// `index_n_heads`.
    pub heads: usize,
    /// `index_head_dim`.
    pub width: usize,
    /// `index_topk`: positions that a row attends to, at most.
    pub topk: usize,
}

impl Dsa {
    /// Panics unless the widths of queries, weights and keys are those of this indexer.
    fn check(&self, q: usize, weights: usize, keys: usize) {
        assert_eq!((q, weights, keys), (self.heads * self.width, self.heads, self.width), "an indexer's rows");
    }
}

/// How experts are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// `num_experts_per_tok`.
    pub chosen: usize,
    /// `n_group`.
    pub groups: usize,
    /// `topk_group`.
    pub chosen_groups: usize,
    /// `norm_topk_prob`.
    pub normalized: bool,
    /// `routed_scaling_factor`.
    pub factor: f32,
}

/// An expert that a row was routed to, with its weight in the sum.
pub type Routed = (usize, f32);

/// What the output head says after one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// The id with the largest logit; of equals the lowest.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
    /// The largest logit of the other ids; −∞ if there is none.
    pub runner_up: f32,
    /// ln Σ exp(logit), formed in f64.
    pub log_sum_exp: f64,
    /// The logit of the id that was asked for.
    pub asked: Option<f32>,
}

impl Prediction {
    /// How far the best logit is above the second best.
    pub fn margin(&self) -> f32 {
        self.logit - self.runner_up
    }

    /// Natural logarithm of the probability of the id that was asked for.
    pub fn logprob(&self) -> Option<f64> {
        self.asked.map(|logit| f64::from(logit) - self.log_sum_exp)
    }
}

/// Two weights that are used in products with the same rows, and in no other way.
#[derive(Debug)]
pub enum Pair<W> {
    /// Each by itself.
    Apart(W, W),
    /// One above the other in one weight, of whose output features so many are the first's.
    Joined(W, usize),
}

impl<W> Pair<W> {
    /// The same weights, lent.
    pub fn as_ref(&self) -> Pair<&W> {
        match self {
            Pair::Apart(first, second) => Pair::Apart(first, second),
            Pair::Joined(weight, first) => Pair::Joined(weight, *first),
        }
    }

    /// The same with something else for each weight.
    pub fn map<V>(self, of: impl Fn(W) -> V) -> Pair<V> {
        match self {
            Pair::Apart(first, second) => Pair::Apart(of(first), of(second)),
            Pair::Joined(weight, first) => Pair::Joined(of(weight), first),
        }
    }
}

/// A device with everything that the forward pass needs.
///
/// Rows passed by reference are only read unless they are `&mut`.
pub trait Backend: Sync {
    /// An uploaded matrix or vector.
    type Weight: Send + Sync;
    /// The routed experts of a layer.
    type Experts: Send + Sync;
    /// Activations: [n, w] f32 values.
    type Rows: Send + Sync;
    /// Rows that are kept for each position seen.
    type Cache: Send + Sync;
    /// Experts chosen for each row.
    type Choice: Send + Sync;
    /// Positions chosen for each row.
    type Selection: Send + Sync;

    /// The backend's name in options and reports.
    fn name(&self) -> &'static str;
    /// The device's own name.
    fn device(&self) -> String;
    /// How sums are formed.
    fn mode(&self) -> Mode;
    /// What has run so far.
    fn counters(&self) -> Counters;

    /// Uploads a weight in its stored format; `name` is for messages. A vector of n elements has n rows of one column.
    fn upload(&self, name: &str, matrix: Matrix) -> Result<Self::Weight>;
    /// The same of a weight that is used in products with rows and in no other way.
    fn upload_linear(&self, name: &str, matrix: Matrix) -> Result<Self::Weight> {
        self.upload(name, matrix)
    }
    /// Uploads two weights that are used in products with the same rows, and in no other way.
    fn upload_pair(&self, names: [&str; 2], matrices: [Matrix; 2]) -> Result<Pair<Self::Weight>> {
        let [first, second] = matrices;
        Ok(Pair::Apart(self.upload_linear(names[0], first)?, self.upload_linear(names[1], second)?))
    }
    /// Prepares the routed experts of a layer.
    fn upload_experts(&self, source: &dyn ExpertSource) -> Result<Self::Experts, Faults>;

    /// Copies values to the device as rows of `width`.
    fn write(&self, values: &[f32], width: usize) -> Result<Self::Rows>;
    /// Copies rows back, one after the other.
    fn read(&self, rows: &Self::Rows) -> Result<Vec<f32>>;
    /// Number of rows n and their width w.
    fn shape(&self, rows: &Self::Rows) -> (usize, usize);
    /// Some columns of some rows.
    fn slice(&self, x: &Self::Rows, rows: Range<usize>, columns: Range<usize>) -> Result<Self::Rows>;
    /// Some rows [m, w], in the order of their numbers.
    fn take(&self, x: &Self::Rows, rows: &[usize]) -> Result<Self::Rows>;
    /// [a; b]: the columns of `a`, then those of `b`.
    fn concat(&self, a: &Self::Rows, b: &Self::Rows) -> Result<Self::Rows>;
    /// x + y, into x.
    fn add(&self, x: &mut Self::Rows, y: &Self::Rows) -> Result<()>;

    /// Rows `ids` of a table [V, w]. Every id is below V.
    fn embed(&self, table: &Self::Weight, ids: &[u32]) -> Result<Self::Rows>;
    /// x · rsqrt(mean(x²) + eps) · weight.
    fn rms_norm(&self, x: &Self::Rows, weight: &Self::Weight, eps: f64) -> Result<Self::Rows>;
    /// (x − mean(x)) · rsqrt(mean((x − mean(x))²) + eps) · weight + bias.
    fn layer_norm(&self, x: &Self::Rows, weight: &Self::Weight, bias: &Self::Weight, eps: f64) -> Result<Self::Rows>;
    /// x [n, I] · weightᵀ [I, O] → [n, O].
    fn matmul(&self, weight: &Self::Weight, x: &Self::Rows) -> Result<Self::Rows>;
    /// x [n, I] with both weights of a pair → [n, O], [n, P].
    fn matmul_pair(&self, pair: Pair<&Self::Weight>, x: &Self::Rows) -> Result<[Self::Rows; 2]> {
        match pair {
            Pair::Apart(first, second) => Ok([self.matmul(first, x)?, self.matmul(second, x)?]),
            Pair::Joined(weight, first) => {
                let both = self.matmul(weight, x)?;
                let (n, width) = self.shape(&both);
                Ok([self.slice(&both, 0..n, 0..first)?, self.slice(&both, 0..n, first..width)?])
            }
        }
    }
    /// x + y, into x, and of the sum [`Backend::rms_norm`].
    fn add_norm(&self, x: &mut Self::Rows, y: &Self::Rows, weight: &Self::Weight, eps: f64) -> Result<Self::Rows> {
        self.add(x, y)?;
        self.rms_norm(x, weight, eps)
    }
    /// silu(gate) · up, with silu(g) = g / (1 + e^−g).
    fn swiglu(&self, gate: &Self::Rows, up: &Self::Rows) -> Result<Self::Rows>;
    /// Turns each pair (x₀, x₁), (x₂, x₃), … of the rotated part of each head by position · frequency; `positions [n]`.
    fn rope(&self, x: &mut Self::Rows, rope: &Rope, heads: Heads, positions: &[usize]) -> Result<()>;

    /// An empty cache of rows of `width`.
    fn cache(&self, width: usize) -> Result<Self::Cache>;
    /// Positions in a cache.
    fn cache_len(&self, cache: &Self::Cache) -> usize;
    /// Adds rows, one for each next position.
    fn append(&self, cache: &mut Self::Cache, rows: &Self::Rows) -> Result<()>;
    /// Forgets the positions from `len` on.
    fn truncate(&self, cache: &mut Self::Cache, len: usize);
    /// What attention keeps of the next positions, and its queries there.
    ///
    /// Of `kv` [n, latent + rope] the latents are normalized as by [`Backend::rms_norm`] with `norm` `[latent]` and the keys are
    /// turned; so the rows go into the cache. `q` [n, H · w] is turned in place, where `heads` says.
    fn keep(
        &self,
        cache: &mut Self::Cache,
        q: &mut Self::Rows,
        kv: &Self::Rows,
        kept: &Kept<'_, Self::Weight>,
        positions: &[usize],
    ) -> Result<()> {
        let &Kept { norm, eps, latent, rope, heads } = kept;
        let (n, width) = self.shape(kv);
        self.rope(q, rope, heads, positions)?;
        let latents = self.rms_norm(&self.slice(kv, 0..n, 0..latent)?, norm, eps)?;
        let mut keys = self.slice(kv, 0..n, latent..width)?;
        self.rope(&mut keys, rope, Heads { width: width - latent, rope_at: 0 }, positions)?;
        self.append(cache, &self.concat(&latents, &keys)?)
    }

    /// The positions that rows of indexer queries attend to.
    ///
    /// `q` [n, heads · width] and `weights` [n, heads] belong to the last n rows of `keys` [T, width], which stand at
    /// `places`. The score of a row t that is seen is heads^−½ · Σ_h weights_h · relu(q_h · k_t · width^−½); the `topk`
    /// largest are chosen, of equals the one at the lowest position.
    fn select(
        &self,
        dsa: &Dsa,
        q: &Self::Rows,
        weights: &Self::Rows,
        keys: &Self::Cache,
        places: &Places,
    ) -> Result<Self::Selection>;
    /// Copies a selection back: for each row the chosen rows of the cache, in the order of the text.
    fn read_selection(&self, selection: &Self::Selection) -> Result<Vec<Vec<usize>>>;
    /// Causal attention over compressed keys and values, absorbed form.
    ///
    /// `q` [n, H · (nope + rope)] belongs to the last n rows of `cache` [T, latent + rope], which stand at `places`. The
    /// cache holds normalized latents c_t and rotated keys r_t. `kv_b` is [H · (nope + value), latent]: for each head the rows K_h, then V_h.
    /// Scores are ((K_hᵀ q_nope) · c_t + q_rope · r_t) · (nope + rope)^−½, over the selected rows, or with no selection over
    /// all that are seen; a = softmax(scores), and head h gives V_h Σ_t a_t c_t → [n, H · value].
    fn attention(
        &self,
        mla: &Mla,
        q: &Self::Rows,
        kv_b: &Self::Weight,
        cache: &Self::Cache,
        places: &Places,
        selection: Option<&Self::Selection>,
    ) -> Result<Self::Rows>;

    /// Chooses experts for each row: s = sigmoid(gate x), in f32.
    ///
    /// Chosen are the best by s + bias, of equals the lowest index; with several groups only from the `chosen_groups` best
    /// groups by the sum of their two best s + bias. The weight of a chosen expert is its s, if `normalized` divided by the
    /// sum over the chosen + 1e-20, times `factor`; NaN where a score or a bias is not finite.
    fn route(
        &self,
        routing: &Routing,
        gate: &Self::Weight,
        bias: &Self::Weight,
        x: &Self::Rows,
    ) -> Result<Self::Choice>;
    /// Copies a choice back: for each row the experts, best first, with their weights.
    fn read_choice(&self, choice: &Self::Choice) -> Result<Vec<Vec<Routed>>>;
    /// Tells that the chosen experts will be asked for in a moment. What is computed never depends on it.
    fn announce(&self, _experts: &Self::Experts, _choice: &Self::Choice) -> Result<()> {
        Ok(())
    }
    /// Tells which experts are likely to be asked for next; the choice is made only where it is of use. What is computed
    /// never depends on it.
    fn read_ahead(&self, _experts: &Self::Experts, _choose: &dyn Fn() -> Result<Self::Choice>) -> Result<()> {
        Ok(())
    }
    /// Tells that what is computed from here on is compared with something: faults on purpose count from here.
    fn arm(&self) {}
    /// What reading experts on demand took so far; `None` for a backend that keeps all of them.
    fn expert_counters(&self) -> Option<experts::Counters> {
        None
    }
    /// What keeping routed experts on a device took so far; `None` where that is not done, or all of them stay there.
    fn device_expert_counters(&self) -> Option<gpu::tiers::Counters> {
        None
    }
    /// Σ over the chosen experts of weight · down(swiglu(gate x, up x)).
    fn experts(&self, experts: &Self::Experts, choice: &Self::Choice, x: &Self::Rows) -> Result<Self::Rows>;
    /// [`Backend::experts`] of x, and what the shared expert gave, added to `stream`: stream + (Σ + shared), into `stream`.
    fn add_experts(
        &self,
        stream: &mut Self::Rows,
        experts: &Self::Experts,
        choice: &Self::Choice,
        x: &Self::Rows,
        shared: &Self::Rows,
    ) -> Result<()> {
        let mut sum = self.experts(experts, choice, x)?;
        self.add(&mut sum, shared)?;
        self.add(stream, &sum)
    }

    /// What the output head [V, w] says after each row; `asked [n]` are ids whose logits are wanted too.
    fn predict(&self, head: &Self::Weight, x: &Self::Rows, asked: &[Option<u32>]) -> Result<Vec<Prediction>>;
}
