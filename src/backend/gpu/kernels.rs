//! The kernels that every GPU API has under the same names, with the same buffers, constants and groups of threads.
//!
//! Source: `kernels/cuda/*.cu` and `kernels/vulkan/*.comp`. A kernel's buffers are pointers in CUDA and storage buffers of
//! set 0 in Vulkan, its constants a struct by value and push constants: the order is that of the launch in both.

use crate::format::Format;

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// Its name; for one that reads weights without the format's.
    pub name: Name,
    /// Storage of the weights that it reads.
    pub coding: Option<Coding>,
    /// Rows of x that a group of threads takes, where a kernel comes for several such numbers.
    pub rows: Option<u32>,
}

/// Names of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, strum::IntoStaticStr, strum::EnumIter)]
#[strum(serialize_all = "snake_case")]
#[allow(missing_docs)] // what they compute is written at the head of their source
pub enum Name {
    Matmul,
    Experts,
    Embed,
    Absorb,
    Attend,
    Merge,
    IndexScores,
    TopPositions,
    RouterLogits,
    Choose,
    GroupRows,
    Combine,
    CombineOnto,
    RmsNorm,
    AddNorm,
    LayerNorm,
    Rope,
    Keep,
    CopyRows,
    TakeRows,
    Add,
    Swiglu,
    Predict,
    PredictMerge,
    Read,
    FmaPeak,
    Stream,
    StreamNarrow,
    StreamRanges,
    StreamTile,
    StreamExperts,
    StreamExpertsRanges,
    StreamExpertsTile,
    Fast,
    FastNarrow,
    FastRanges,
    FastTile,
    FastExperts,
    FastExpertsRanges,
    FastExpertsTile,
    RoundRows,
    StreamWide,
    StreamExpertsWide,
    FastWide,
    FastExpertsWide,
    SumRanges,
    SumExpertsRanges,
    RoundHalves,
    MatmulHalves,
    ExpertsHalves,
}

/// How weights are stored, as far as kernels differ: groups of any size are one coding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, strum::IntoStaticStr, strum::EnumIter)]
#[strum(serialize_all = "snake_case")]
#[allow(missing_docs)] // they are formats
pub enum Coding {
    F32,
    Int8Row,
    Int4Row,
    Int4Grouped,
    Int3G64,
    Int2Row,
    Fp8E4m3B128,
}

impl Coding {
    /// The coding of a format; `None` if no kernel reads it.
    pub fn of(format: Format) -> Option<Coding> {
        match format {
            Format::F32 => Some(Coding::F32),
            Format::Int8Row => Some(Coding::Int8Row),
            Format::Int4Row => Some(Coding::Int4Row),
            Format::Int4Grouped { group_size } if group_size > 0 => Some(Coding::Int4Grouped),
            Format::Int3G64 => Some(Coding::Int3G64),
            Format::Int2Row => Some(Coding::Int2Row),
            Format::Fp8E4m3B128 => Some(Coding::Fp8E4m3B128),
            _ => None,
        }
    }
}

impl Coding {
    /// Planes of a brick of 16 rows by 256 columns, 512 bytes each: kernels/cuda/bricks.cuh. `None` for what is not laid in bricks.
    pub fn planes(self) -> Option<usize> {
        match self {
            Coding::F32 => None,
            Coding::Int8Row | Coding::Fp8E4m3B128 => Some(8),
            Coding::Int4Row | Coding::Int4Grouped => Some(4),
            Coding::Int3G64 => Some(3),
            Coding::Int2Row => Some(2),
        }
    }
}

/// Threads of a group, of every kernel.
pub const THREADS: u32 = 256;

/// Numbers of rows of x that a group of threads takes in the kernels that come in several.
pub const TILE_ROWS: [u32; 4] = [1, 2, 4, 8];

/// What a kernel reads of weights: nothing, rows as they are stored, the same as halves, or bricks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reads {
    Nothing,
    Rows,
    Halves,
    Bricks,
}

/// The file of a kernel's source, without an ending; its buffers; what weights it reads; numbers of rows of x that it comes for.
type Form = (&'static str, usize, Reads, &'static [u32]);

impl Name {
    /// The one list of what there is to know of each kernel.
    fn form(self) -> Form {
        use Reads::{Bricks, Halves, Nothing, Rows};
        match self {
            Name::Matmul => ("matmul", 4, Rows, &TILE_ROWS),
            Name::Experts => ("experts", 6, Rows, &TILE_ROWS),
            Name::Embed => ("embed", 4, Rows, &[]),
            Name::Absorb => ("absorb", 4, Rows, &[]),
            Name::RoundHalves => ("round_halves", 2, Nothing, &[]),
            Name::MatmulHalves => ("matmul_halves", 4, Halves, &[16, 64]),
            Name::ExpertsHalves => ("experts_halves", 6, Halves, &[16, 64]),
            Name::Attend => ("attention", 4, Nothing, &[]),
            Name::Merge => ("attention", 3, Nothing, &[]),
            Name::IndexScores => ("indexer", 5, Nothing, &[]),
            Name::TopPositions => ("indexer", 3, Nothing, &[]),
            Name::RouterLogits => ("router", 3, Nothing, &[1, 8]),
            Name::Choose => ("router", 5, Nothing, &[]),
            Name::GroupRows => ("router", 2, Nothing, &[]),
            Name::Combine => ("router", 3, Nothing, &[]),
            Name::CombineOnto => ("router", 4, Nothing, &[]),
            Name::Keep => ("pointwise", 5, Nothing, &[]),
            Name::AddNorm | Name::LayerNorm => ("pointwise", 4, Nothing, &[]),
            Name::RmsNorm | Name::TakeRows | Name::Swiglu => ("pointwise", 3, Nothing, &[]),
            Name::Rope | Name::CopyRows | Name::Add => ("pointwise", 2, Nothing, &[]),
            Name::Predict => ("predict", 2, Nothing, &[]),
            Name::PredictMerge => ("predict", 4, Nothing, &[]),
            Name::Read => ("read", 2, Nothing, &[]),
            Name::FmaPeak => ("peak", 1, Nothing, &[]),
            Name::Stream | Name::StreamNarrow => ("stream", 5, Bricks, &[2]),
            Name::StreamRanges => ("stream", 5, Bricks, &[2, 8]),
            Name::StreamTile => ("tile", 5, Bricks, &[16]),
            Name::StreamWide => ("wide", 5, Bricks, &[16]),
            Name::StreamExperts => ("stream_experts", 9, Bricks, &[2]),
            Name::StreamExpertsRanges => ("stream_experts", 9, Bricks, &[2, 8]),
            Name::StreamExpertsTile => ("tile_experts", 9, Bricks, &[16]),
            Name::StreamExpertsWide => ("wide_experts", 6, Bricks, &[16]),
            Name::Fast | Name::FastNarrow | Name::FastRanges => ("stream", 5, Bricks, &[8]),
            Name::FastTile => ("tile", 5, Bricks, &[48]),
            Name::FastWide => ("wide", 5, Bricks, &[32, 64]),
            Name::FastExperts | Name::FastExpertsRanges => ("stream_experts", 9, Bricks, &[8]),
            Name::FastExpertsTile => ("tile_experts", 9, Bricks, &[48]),
            Name::FastExpertsWide => ("wide_experts", 6, Bricks, &[16, 32, 64]),
            Name::RoundRows => ("wide", 2, Nothing, &[]),
            Name::SumRanges => ("ranges", 3, Nothing, &[]),
            Name::SumExpertsRanges => ("ranges", 5, Nothing, &[]),
        }
    }

    /// The file of its source, without an ending.
    pub fn file(self) -> &'static str {
        self.form().0
    }

    /// Buffers that it has.
    pub fn buffers(self) -> usize {
        self.form().1
    }

    fn reads(self) -> Reads {
        self.form().2
    }

    /// Numbers of rows of x that it comes for; none where it is one kernel.
    pub fn tiles(self) -> &'static [u32] {
        self.form().3
    }

    /// Whether it reads weights, and so comes once for each [`Coding`].
    pub fn reads_weights(self) -> bool {
        self.reads() != Reads::Nothing
    }

    /// Whether it reads weights as halves: such a kernel wants cooperative matrices, and only Vulkan has it.
    pub fn reads_halves(self) -> bool {
        self.reads() == Reads::Halves
    }

    /// Whether a device without cooperative matrices has no use for it.
    pub fn is_for_halves(self) -> bool {
        self.reads_halves() || self == Name::RoundHalves
    }

    /// Whether it reads weights in bricks: such a kernel wants tensor cores, and only CUDA has it.
    pub fn reads_bricks(self) -> bool {
        self.reads() == Reads::Bricks
    }

    /// Whether a device without tensor cores has no use for it.
    pub fn is_for_bricks(self) -> bool {
        self.reads_bricks() || matches!(self, Name::RoundRows | Name::SumRanges | Name::SumExpertsRanges)
    }
}

impl Name {
    /// The buffer that it writes numbers to; `None` for one that writes others.
    pub fn output(self) -> Option<usize> {
        match self {
            Name::TopPositions | Name::Choose | Name::GroupRows | Name::Read => None,
            Name::Predict | Name::PredictMerge => None,
            // x, for one kernel alone
            Name::RoundRows | Name::RoundHalves => None,
            Name::Rope | Name::Add => Some(0),
            Name::CopyRows | Name::SumRanges | Name::SumExpertsRanges => Some(1),
            // after weights and x; the choice of experts comes behind
            Name::Experts | Name::ExpertsHalves => Some(3),
            name if name.reads_bricks() => Some(3),
            _ => Some(self.buffers() - 1),
        }
    }

    /// Threads of a group, in one dimension: the one list that both APIs' sources and hosts agree on.
    pub fn threads(self) -> u32 {
        THREADS
    }
}

impl Kernel {
    /// A kernel that reads no weights.
    pub fn plain(name: Name) -> Kernel {
        debug_assert!(!name.reads_weights() && name.tiles().is_empty(), "{name:?} is a kernel of its own");
        Kernel { name, coding: None, rows: None }
    }

    /// The name of its function: name, coding, rows.
    pub fn function(self) -> String {
        let mut function = <&str>::from(self.name).to_owned();
        if let Some(coding) = self.coding {
            function += "_";
            function += coding.into();
        }
        if let Some(rows) = self.rows {
            function += &format!("_{rows}");
        }
        function
    }

    /// Every kernel there is.
    pub fn all() -> Vec<Kernel> {
        use strum::IntoEnumIterator;
        let mut all = Vec::new();
        for name in Name::iter() {
            let every = !name.reads_bricks() && !name.reads_halves();
            let codings = Coding::iter().filter(|coding| every || coding.planes().is_some());
            let codings: Vec<Option<Coding>> =
                if name.reads_weights() { codings.map(Some).collect() } else { vec![None] };
            let mut rows: Vec<Option<u32>> = name.tiles().iter().copied().map(Some).collect();
            if rows.is_empty() {
                rows.push(None);
            }
            for &coding in &codings {
                all.extend(rows.iter().map(|&rows| Kernel { name, coding, rows }));
            }
        }
        all
    }
}
