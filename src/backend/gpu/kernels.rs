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
    Choose,
    GroupRows,
    Combine,
    RmsNorm,
    LayerNorm,
    Rope,
    CopyRows,
    TakeRows,
    Add,
    Swiglu,
    Predict,
    Read,
    FmaPeak,
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

/// Threads of a group, of every kernel.
pub const THREADS: u32 = 256;

/// Numbers of rows of x that a group of threads takes in the kernels that come in several.
pub const TILE_ROWS: [u32; 4] = [1, 2, 4, 8];

impl Name {
    /// Whether it reads weights, and so comes once for each [`Coding`].
    pub fn reads_weights(self) -> bool {
        matches!(self, Name::Matmul | Name::Experts | Name::Embed | Name::Absorb)
    }

    /// Whether it comes once for each of [`TILE_ROWS`].
    pub fn is_tiled(self) -> bool {
        matches!(self, Name::Matmul | Name::Experts)
    }

    /// The file of its source, without an ending.
    pub fn file(self) -> &'static str {
        match self {
            Name::Matmul | Name::Experts | Name::Embed | Name::Absorb | Name::Predict | Name::Read => self.into(),
            Name::FmaPeak => "peak",
            Name::Attend | Name::Merge => "attention",
            Name::IndexScores | Name::TopPositions => "indexer",
            Name::Choose | Name::GroupRows | Name::Combine => "router",
            Name::RmsNorm | Name::LayerNorm | Name::Rope | Name::CopyRows | Name::TakeRows | Name::Add => "pointwise",
            Name::Swiglu => "pointwise",
        }
    }

    /// Buffers that it has.
    pub fn buffers(self) -> usize {
        match self {
            Name::Experts => 6,
            Name::IndexScores => 5,
            Name::Matmul | Name::Embed | Name::Absorb | Name::Attend | Name::LayerNorm | Name::Choose => 4,
            Name::TopPositions | Name::Merge | Name::Combine | Name::RmsNorm | Name::TakeRows => 3,
            Name::Swiglu | Name::Predict => 3,
            Name::GroupRows | Name::Rope | Name::CopyRows | Name::Add | Name::Read => 2,
            Name::FmaPeak => 1,
        }
    }
}

impl Name {
    /// The buffer that it writes numbers to; `None` for one that writes others.
    pub fn output(self) -> Option<usize> {
        match self {
            Name::TopPositions | Name::Choose | Name::GroupRows | Name::Predict | Name::Read => None,
            Name::Rope | Name::Add => Some(0),
            Name::CopyRows => Some(1),
            Name::Experts => Some(3),
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
        debug_assert!(!name.reads_weights() && !name.is_tiled(), "{name:?} is a kernel of its own");
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
            let codings: Vec<Option<Coding>> =
                if name.reads_weights() { Coding::iter().map(Some).collect() } else { vec![None] };
            let rows: Vec<Option<u32>> = if name.is_tiled() { TILE_ROWS.map(Some).to_vec() } else { vec![None] };
            for &coding in &codings {
                all.extend(rows.iter().map(|&rows| Kernel { name, coding, rows }));
            }
        }
        all
    }
}
