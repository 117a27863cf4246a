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

impl Name {
    /// Whether it reads weights, and so comes once for each [`Coding`].
    pub fn reads_weights(self) -> bool {
        matches!(self, Name::Matmul | Name::Experts | Name::Embed | Name::Absorb)
            || self.reads_bricks()
            || self.reads_halves()
    }

    /// Whether it reads weights as halves: such a kernel wants cooperative matrices, and only Vulkan has it.
    pub fn reads_halves(self) -> bool {
        matches!(self, Name::MatmulHalves | Name::ExpertsHalves)
    }

    /// Whether a device without cooperative matrices has no use for it.
    pub fn is_for_halves(self) -> bool {
        self.reads_halves() || self == Name::RoundHalves
    }

    /// Whether it reads weights in bricks: such a kernel wants tensor cores, and only CUDA has it.
    pub fn reads_bricks(self) -> bool {
        self.streamed().is_some()
    }

    /// Numbers of rows of x that it comes for, if it reads bricks.
    fn streamed(self) -> Option<&'static [u32]> {
        match self {
            Name::Stream | Name::StreamNarrow | Name::StreamExperts => Some(&[2]),
            Name::StreamRanges | Name::StreamExpertsRanges => Some(&[2, 8]),
            Name::StreamTile | Name::StreamExpertsTile | Name::StreamWide | Name::StreamExpertsWide => Some(&[16]),
            Name::Fast | Name::FastNarrow | Name::FastExperts | Name::FastRanges | Name::FastExpertsRanges => {
                Some(&[8])
            }
            Name::FastTile | Name::FastExpertsTile => Some(&[48]),
            Name::FastWide => Some(&[32, 64]),
            Name::FastExpertsWide => Some(&[16, 32, 64]),
            _ => None,
        }
    }

    /// Whether a device without tensor cores has no use for it.
    pub fn is_for_bricks(self) -> bool {
        self.reads_bricks() || matches!(self, Name::RoundRows | Name::SumRanges | Name::SumExpertsRanges)
    }

    /// Numbers of rows of x that it comes for; none where it is one kernel.
    pub fn tiles(self) -> &'static [u32] {
        match self {
            Name::Matmul | Name::Experts => &TILE_ROWS,
            Name::RouterLogits => &[1, 8],
            Name::MatmulHalves | Name::ExpertsHalves => &[16, 64],
            _ => self.streamed().unwrap_or_default(),
        }
    }

    /// The file of its source, without an ending.
    pub fn file(self) -> &'static str {
        match self {
            Name::Matmul | Name::Experts | Name::Embed | Name::Absorb | Name::Read => self.into(),
            Name::RoundHalves | Name::MatmulHalves | Name::ExpertsHalves => self.into(),
            Name::Predict | Name::PredictMerge => "predict",
            Name::FmaPeak => "peak",
            Name::Attend | Name::Merge => "attention",
            Name::IndexScores | Name::TopPositions => "indexer",
            Name::RouterLogits | Name::Choose | Name::GroupRows | Name::Combine | Name::CombineOnto => "router",
            Name::RmsNorm | Name::AddNorm | Name::LayerNorm | Name::Rope | Name::Keep => "pointwise",
            Name::CopyRows | Name::TakeRows | Name::Add | Name::Swiglu => "pointwise",
            Name::Stream | Name::StreamNarrow | Name::StreamRanges => "stream",
            Name::Fast | Name::FastNarrow | Name::FastRanges => "stream",
            Name::StreamTile | Name::FastTile => "tile",
            Name::StreamExpertsTile | Name::FastExpertsTile => "tile_experts",
            Name::StreamExperts | Name::StreamExpertsRanges | Name::FastExperts | Name::FastExpertsRanges => {
                "stream_experts"
            }
            Name::RoundRows | Name::StreamWide | Name::FastWide => "wide",
            Name::StreamExpertsWide | Name::FastExpertsWide => "wide_experts",
            Name::SumRanges | Name::SumExpertsRanges => "ranges",
        }
    }

    /// Buffers that it has.
    pub fn buffers(self) -> usize {
        match self {
            Name::StreamExperts | Name::StreamExpertsRanges | Name::StreamExpertsTile => 9,
            Name::FastExperts | Name::FastExpertsRanges | Name::FastExpertsTile => 9,
            Name::Experts | Name::ExpertsHalves | Name::StreamExpertsWide | Name::FastExpertsWide => 6,
            Name::IndexScores | Name::Keep | Name::Choose | Name::SumExpertsRanges => 5,
            Name::Stream | Name::StreamNarrow | Name::StreamRanges | Name::StreamTile | Name::StreamWide => 5,
            Name::Fast | Name::FastNarrow | Name::FastRanges | Name::FastTile | Name::FastWide => 5,
            Name::Matmul | Name::MatmulHalves | Name::Embed | Name::Absorb | Name::Attend | Name::LayerNorm => 4,
            Name::AddNorm | Name::CombineOnto | Name::PredictMerge => 4,
            Name::TopPositions | Name::Merge | Name::Combine | Name::RmsNorm | Name::TakeRows => 3,
            Name::Swiglu | Name::RouterLogits | Name::SumRanges => 3,
            Name::GroupRows | Name::Rope | Name::CopyRows | Name::Add | Name::Read | Name::Predict => 2,
            Name::RoundRows | Name::RoundHalves => 2,
            Name::FmaPeak => 1,
        }
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
