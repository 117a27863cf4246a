//! The formats in which a container stores a matrix: names, byte counts, and which of them fit given bytes.
//!
//! No format number is on disk. A reader has the byte counts of the codes (`X`) and of the scales (`X.qs`), the matrix's
//! logical shape `[O, I]` from config.json, and perhaps a stamp. [`upstream_rule`] is what the colibri engine makes of
//! these; [`candidates`] is every format that they would fit.

use std::fmt;

/// Group sizes that the colibri engine recognizes, in the order in which it tries them.
pub const GROUP_SIZES: [u64; 8] = [16, 32, 48, 64, 96, 128, 192, 256];

/// How a matrix of O rows and I columns is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Format {
    /// Raw little-endian f32, no scales.
    F32,
    /// One signed byte an element, one scale a row.
    Int8Row,
    /// One nibble an element (offset 8), one scale a row.
    Int4Row,
    /// Two bits an element (offset 2), one scale a row.
    Int2Row,
    /// One nibble an element (offset 8), one scale per `group_size` elements of a row.
    Int4Grouped {
        /// Elements of a row that share a scale.
        group_size: u64,
    },
    /// Three bits an element (offset 4) in 24 bytes per 64 elements, one scale per 64.
    Int3G64,
    /// 256 elements in 98 bytes on a rotated E8 lattice.
    E8Iq3Lattice,
    /// e2m1 nibbles with a power-of-two scale byte per 32.
    Mxfp4,
    /// e4m3 bytes with one f32 scale per 128 × 128 block.
    Fp8E4m3B128,
}

/// The scale blocks of `fp8-e4m3-b128` are squares of this side.
pub const FP8_BLOCK: u64 = 128;

impl Format {
    /// The name used in stamps, manifests and reports.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::Int8Row => "int8-row",
            Format::Int4Row => "int4-row",
            Format::Int2Row => "int2-row",
            Format::Int4Grouped { .. } => "int4-grouped",
            Format::Int3G64 => "int3-g64",
            Format::E8Iq3Lattice => "e8-iq3-lattice",
            Format::Mxfp4 => "mxfp4",
            Format::Fp8E4m3B128 => "fp8-e4m3-b128",
        }
    }

    /// The format of that name; `int4-grouped` needs its group size, the others must not have one
    /// (but `int3-g64` may say 64).
    pub fn parse(name: &str, group_size: Option<u64>) -> Option<Format> {
        let format = match (name, group_size) {
            ("int4-grouped", Some(group_size)) if group_size > 0 => Format::Int4Grouped { group_size },
            ("int3-g64", None | Some(64)) => Format::Int3G64,
            (_, Some(_)) => return None,
            ("f32", None) => Format::F32,
            ("int8-row", None) => Format::Int8Row,
            ("int4-row", None) => Format::Int4Row,
            ("int2-row", None) => Format::Int2Row,
            ("e8-iq3-lattice", None) => Format::E8Iq3Lattice,
            ("mxfp4", None) => Format::Mxfp4,
            ("fp8-e4m3-b128", None) => Format::Fp8E4m3B128,
            _ => return None,
        };
        Some(format)
    }

    /// Elements of a row that share a scale, where that is a property of the format.
    pub fn group_size(self) -> Option<u64> {
        match self {
            Format::Int4Grouped { group_size } => Some(group_size),
            Format::Int3G64 => Some(64),
            _ => None,
        }
    }

    /// Bytes of the codes of `rows` × `columns` elements, or `None` beyond 64 bits.
    pub fn code_bytes(self, rows: u64, columns: u64) -> Option<u64> {
        let a_row = match self {
            Format::F32 => columns.checked_mul(4)?,
            Format::Int8Row | Format::Fp8E4m3B128 => columns,
            Format::Int4Row | Format::Int4Grouped { .. } | Format::Mxfp4 => columns.div_ceil(2),
            Format::Int2Row => columns.div_ceil(4),
            Format::Int3G64 => columns.div_ceil(64).checked_mul(24)?,
            Format::E8Iq3Lattice => columns.div_ceil(256).checked_mul(98)?,
        };
        rows.checked_mul(a_row)
    }

    /// Bytes of the scales of `rows` × `columns` elements (0 where the format has none), or `None` beyond 64 bits.
    pub fn scale_bytes(self, rows: u64, columns: u64) -> Option<u64> {
        let scales = match self {
            Format::F32 => 0,
            Format::Int8Row | Format::Int4Row | Format::Int2Row => rows,
            Format::Int4Grouped { group_size } => rows.checked_mul(columns.div_ceil(group_size))?,
            Format::Int3G64 => rows.checked_mul(columns.div_ceil(64))?,
            Format::E8Iq3Lattice => 1,
            Format::Mxfp4 => return rows.checked_mul(columns.div_ceil(32)),
            Format::Fp8E4m3B128 => rows.div_ceil(FP8_BLOCK).checked_mul(columns.div_ceil(FP8_BLOCK))?,
        };
        scales.checked_mul(4)
    }

    /// Codes plus scales, or `None` beyond 64 bits.
    pub fn bytes(self, rows: u64, columns: u64) -> Option<u64> {
        self.code_bytes(rows, columns)?.checked_add(self.scale_bytes(rows, columns)?)
    }

    /// Scales of one row, where every row has its own.
    pub fn scales_per_row(self, columns: u64) -> Option<u64> {
        match self {
            Format::Int8Row | Format::Int4Row | Format::Int2Row => Some(1),
            Format::Int4Grouped { group_size } => Some(columns.div_ceil(group_size)),
            Format::Int3G64 => Some(columns.div_ceil(64)),
            Format::F32 | Format::E8Iq3Lattice | Format::Mxfp4 | Format::Fp8E4m3B128 => None,
        }
    }

    /// Whether `rows` × `columns` elements take exactly these bytes.
    pub fn fits(self, rows: u64, columns: u64, bytes: ByteCounts) -> bool {
        self.code_bytes(rows, columns) == Some(bytes.codes) && self.scale_bytes(rows, columns) == Some(bytes.scales)
    }

    /// The same storage under its canonical name: a group that spans the whole row is a row.
    pub fn canonical(self, columns: u64) -> Format {
        match self {
            Format::Int4Grouped { group_size } if group_size >= columns => Format::Int4Row,
            format => format,
        }
    }
}

impl fmt::Display for Format {
    /// The name, with the group size where the name does not say it: `int4-grouped(64)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::Int4Grouped { group_size } => f.pad(&format!("int4-grouped({group_size})")),
            format => f.pad(format.name()),
        }
    }
}

/// Sizes of a stored matrix: of the tensor `X` and of the tensor `X.qs`, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteCounts {
    /// Bytes of `X`.
    pub codes: u64,
    /// Bytes of `X.qs`.
    pub scales: u64,
}

impl ByteCounts {
    /// What `format` needs for `rows` × `columns` elements, or `None` beyond 64 bits.
    pub fn of(format: Format, rows: u64, columns: u64) -> Option<ByteCounts> {
        Some(ByteCounts { codes: format.code_bytes(rows, columns)?, scales: format.scale_bytes(rows, columns)? })
    }
}

/// Why the byte rule refuses a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unresolved {
    /// No format has that many bytes of codes.
    #[error("no format stores these dimensions in that many bytes of codes")]
    Codes,
    /// The codes fit a format, the scales do not.
    #[error("the bytes of codes mean {0}, which needs another number of scales")]
    Scales(Format),
    /// The scales are one UE8M0 byte per block.
    #[error("fp8 with UE8M0 block scales is not a container format")]
    Ue8m0Scales,
    /// The stamp names another format than the bytes do.
    #[error("the stamp names another format than the byte counts, which mean {0}")]
    Stamp(Format),
}

/// The colibri engine's rule for a matrix of `rows` × `columns` with these byte counts and, perhaps, a stamp.
///
/// Source: container format description, reading rule 1 to 5; group sizes are tried in the order of [`GROUP_SIZES`].
pub fn upstream_rule(rows: u64, columns: u64, bytes: ByteCounts, stamp: Option<&str>) -> Result<Format, Unresolved> {
    let format = by_bytes(rows, columns, bytes, stamp)?;
    match stamp {
        Some(stamp) if stamp != format.name() => Err(Unresolved::Stamp(format)),
        _ => Ok(format),
    }
}

fn by_bytes(rows: u64, columns: u64, bytes: ByteCounts, stamp: Option<&str>) -> Result<Format, Unresolved> {
    let codes_fit = |format: Format| format.code_bytes(rows, columns) == Some(bytes.codes);
    let scales_fit = |format: Format| format.scale_bytes(rows, columns) == Some(bytes.scales);
    // At I = 98 one row of 98 bytes would also be int8, and the engine takes int8.
    if bytes.scales == 4 && codes_fit(Format::E8Iq3Lattice) && !(columns == 98 && codes_fit(Format::Int8Row)) {
        return Ok(Format::E8Iq3Lattice);
    }
    let by_codes =
        [Format::Int8Row, Format::Int4Row, Format::Int2Row, Format::Int3G64].into_iter().find(|&f| codes_fit(f));
    match by_codes {
        None => Err(Unresolved::Codes),
        Some(Format::Int4Row) if rows.checked_mul(4).is_some_and(|a_row| bytes.scales > a_row) => GROUP_SIZES
            .into_iter()
            .map(|group_size| Format::Int4Grouped { group_size })
            .find(|&format| format.group_size() <= Some(columns) && scales_fit(format))
            .ok_or(Unresolved::Scales(Format::Int4Row)),
        Some(Format::Int8Row) => {
            let is_row = scales_fit(Format::Int8Row);
            let is_block = scales_fit(Format::Fp8E4m3B128);
            if is_block && (!is_row || stamp == Some(Format::Fp8E4m3B128.name())) {
                Ok(Format::Fp8E4m3B128)
            } else if is_row {
                Ok(Format::Int8Row)
            } else if Format::Fp8E4m3B128.scale_bytes(rows, columns) == bytes.scales.checked_mul(4) {
                Err(Unresolved::Ue8m0Scales)
            } else {
                Err(Unresolved::Scales(Format::Int8Row))
            }
        }
        Some(format) if scales_fit(format) => Ok(format),
        Some(format) => Err(Unresolved::Scales(format)),
    }
}

/// Every format that a matrix of `rows` × `columns` with these byte counts could be, in the order of [`Format`].
///
/// `int4-grouped` appears once for each size of [`GROUP_SIZES`] that fits and is smaller than a row.
pub fn candidates(rows: u64, columns: u64, bytes: ByteCounts) -> Vec<Format> {
    let grouped = GROUP_SIZES.into_iter().filter(|&group_size| group_size < columns);
    let mut fitting: Vec<Format> = [
        Format::Int8Row,
        Format::Int4Row,
        Format::Int2Row,
        Format::Int3G64,
        Format::E8Iq3Lattice,
        Format::Mxfp4,
        Format::Fp8E4m3B128,
    ]
    .into_iter()
    .chain(grouped.map(|group_size| Format::Int4Grouped { group_size }))
    .filter(|format| format.fits(rows, columns, bytes))
    .collect();
    fitting.sort_unstable();
    fitting
}

/// What the colibri engine would take a correctly written `format` for, where that is another format.
pub fn misread_as(format: Format, rows: u64, columns: u64) -> Option<Result<Format, Unresolved>> {
    let format = format.canonical(columns);
    if format == Format::F32 {
        return None;
    }
    let bytes = ByteCounts::of(format, rows, columns)?;
    // The engine has stamps for resident tensors only and checks them against the bytes, so bytes decide.
    let stamp = (format == Format::Fp8E4m3B128).then_some(format.name());
    let taken = upstream_rule(rows, columns, bytes, stamp);
    (taken != Ok(format)).then_some(taken)
}

/// Group sizes at which `int4-grouped` with these dimensions is read back as what it is.
pub fn safe_group_sizes(rows: u64, columns: u64) -> Vec<u64> {
    GROUP_SIZES
        .into_iter()
        .filter(|&group_size| {
            group_size < columns && misread_as(Format::Int4Grouped { group_size }, rows, columns).is_none()
        })
        .collect()
}
