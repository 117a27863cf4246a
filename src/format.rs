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
/// `int4-grouped` appears once for each size of [`GROUP_SIZES`] that fits and is smaller than a row. `f32` has no scales
/// and `mxfp4` no f32 ones, so neither is among the candidates: the latter's byte counts are those of groups of 128
/// wherever 128 divides the columns.
pub fn candidates(rows: u64, columns: u64, bytes: ByteCounts) -> Vec<Format> {
    let grouped = GROUP_SIZES.into_iter().filter(|&group_size| group_size < columns);
    let mut fitting: Vec<Format> =
        [Format::Int8Row, Format::Int4Row, Format::Int2Row, Format::Int3G64, Format::E8Iq3Lattice, Format::Fp8E4m3B128]
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ROW_FORMATS: [Format; 3] = [Format::Int8Row, Format::Int4Row, Format::Int2Row];

    fn grouped(group_size: u64) -> Format {
        Format::Int4Grouped { group_size }
    }

    /// Every format whose scales are f32, with every group size that is recognized.
    fn container_formats() -> Vec<Format> {
        let mut formats = ROW_FORMATS.to_vec();
        formats.extend([Format::Int3G64, Format::E8Iq3Lattice, Format::Fp8E4m3B128]);
        formats.extend(GROUP_SIZES.map(grouped));
        formats
    }

    fn counts(format: Format, rows: u64, columns: u64) -> ByteCounts {
        ByteCounts::of(format, rows, columns).unwrap()
    }

    /// The widths up to 2000 at which the engine misreads `format` in `rows` rows, with what it takes it for.
    fn misread_widths(format: Format, rows: u64) -> Vec<(u64, Format)> {
        (1..=2000)
            .filter_map(|columns| misread_as(format, rows, columns).map(|taken| (columns, taken.unwrap())))
            .collect()
    }

    #[test]
    fn names_round_trip() {
        for format in container_formats().into_iter().chain([Format::F32, Format::Mxfp4]) {
            let group_size = format.group_size().filter(|_| format != Format::Int3G64);
            assert_eq!(Format::parse(format.name(), group_size), Some(format));
        }
        assert_eq!(Format::parse("int3-g64", Some(64)), Some(Format::Int3G64));
        for (name, group_size) in [
            ("int4-grouped", None),
            ("int4-grouped", Some(0)),
            ("int4-row", Some(64)),
            ("int3-g64", Some(32)),
            ("Int4-row", None),
            ("", None),
        ] {
            assert_eq!(Format::parse(name, group_size), None, "{name} {group_size:?}");
        }
        assert_eq!(grouped(64).to_string(), "int4-grouped(64)");
        assert_eq!(format!("{:>9}", Format::Int4Row), " int4-row");
    }

    #[test]
    fn bytes_of_a_routed_expert() {
        // gate_proj or up_proj of GLM-5.2, [2048, 6144]
        for (format, codes, scales) in [
            (Format::F32, 50_331_648, 0),
            (Format::Int8Row, 12_582_912, 8_192),
            (Format::Int4Row, 6_291_456, 8_192),
            (Format::Int2Row, 3_145_728, 8_192),
            (grouped(64), 6_291_456, 786_432),
            (grouped(128), 6_291_456, 393_216),
            (Format::Int3G64, 4_718_592, 786_432),
            (Format::E8Iq3Lattice, 4_816_896, 4),
            (Format::Mxfp4, 6_291_456, 393_216),
            (Format::Fp8E4m3B128, 12_582_912, 3_072),
        ] {
            assert_eq!(counts(format, 2048, 6144), ByteCounts { codes, scales }, "{format}");
            assert_eq!(format.bytes(2048, 6144), Some(codes + scales), "{format}");
        }
        // all three matrices of the expert; down_proj is [6144, 2048]
        let expert = |format: Format| 2 * format.bytes(2048, 6144).unwrap() + format.bytes(6144, 2048).unwrap();
        assert_eq!(expert(Format::Int4Row), 18_915_328);
        assert_eq!(expert(Format::Int8Row), 37_789_696);
    }

    #[test]
    fn bytes_of_widths_that_do_not_divide() {
        for (format, codes, scales) in [
            (Format::F32, 3 * 4 * 131, 0),
            (Format::Int8Row, 3 * 131, 3 * 4),
            (Format::Int4Row, 3 * 66, 3 * 4),
            (Format::Int2Row, 3 * 33, 3 * 4),
            (grouped(64), 3 * 66, 3 * 3 * 4),
            (grouped(16), 3 * 66, 3 * 9 * 4),
            (Format::Int3G64, 3 * 3 * 24, 3 * 3 * 4),
            (Format::E8Iq3Lattice, 3 * 98, 4),
            (Format::Mxfp4, 3 * 66, 3 * 5),
            (Format::Fp8E4m3B128, 3 * 131, 2 * 4),
        ] {
            assert_eq!(counts(format, 3, 131), ByteCounts { codes, scales }, "{format}");
        }
        // 128 rows are one row of blocks, 129 are two
        assert_eq!(Format::Fp8E4m3B128.scale_bytes(128, 128), Some(4));
        assert_eq!(Format::Fp8E4m3B128.scale_bytes(129, 129), Some(16));
        // an empty row still has its scale
        assert_eq!(counts(Format::Int4Row, 5, 0), ByteCounts { codes: 0, scales: 20 });
        assert_eq!(counts(grouped(64), 5, 0), ByteCounts { codes: 0, scales: 0 });
    }

    #[test]
    fn sizes_beyond_64_bits_are_none() {
        for format in container_formats().into_iter().chain([Format::F32, Format::Mxfp4]) {
            assert_eq!(format.bytes(u64::MAX, u64::MAX), None, "{format}");
            assert!(misread_as(format, u64::MAX, u64::MAX).is_none(), "{format}");
        }
    }

    #[test]
    fn a_group_that_spans_the_row_is_a_row() {
        assert_eq!(grouped(64).canonical(64), Format::Int4Row);
        assert_eq!(grouped(64).canonical(63), Format::Int4Row);
        assert_eq!(grouped(64).canonical(65), grouped(64));
        assert_eq!(counts(grouped(64), 7, 64), counts(Format::Int4Row, 7, 64));
        assert_eq!(Format::Int3G64.canonical(1), Format::Int3G64);
    }

    #[test]
    fn group_sizes_are_misread_in_these_ranges_only() {
        for (group_size, taken, ranges) in [
            (16, 16, &[][..]),
            (32, 32, &[]),
            (48, 32, &[49..=64]),
            (64, 48, &[65..=96, 129..=144]),
            (96, 64, &[97..=128]),
            (128, 96, &[129..=192, 257..=288]),
            (192, 128, &[193..=256]),
            (256, 192, &[257..=384, 513..=576]),
        ] {
            let expected: Vec<_> = ranges.iter().cloned().flatten().map(|columns| (columns, grouped(taken))).collect();
            for rows in [1, 2, 300] {
                let mut misread = misread_widths(grouped(group_size), rows);
                // Up to there it is int4-row under another name.
                misread.retain(|&(columns, _)| columns > group_size);
                assert!(misread == expected, "{group_size} in {rows} rows: {misread:?}");
            }
        }
    }

    #[test]
    fn unlisted_group_sizes_are_refused_or_misread() {
        assert_eq!(misread_as(grouped(100), 7, 192), Some(Ok(grouped(96))));
        assert_eq!(misread_as(grouped(100), 7, 6144), Some(Err(Unresolved::Scales(Format::Int4Row))));
    }

    #[test]
    fn int3_is_misread_at_seven_widths() {
        let expected = [
            (24, Format::Int8Row),
            (47, Format::Int4Row),
            (48, Format::Int4Row),
            (95, grouped(48)),
            (96, grouped(48)),
            (143, grouped(48)),
            (144, grouped(48)),
        ];
        for rows in [1, 2, 300] {
            assert_eq!(misread_widths(Format::Int3G64, rows), expected, "{rows} rows");
        }
    }

    #[test]
    fn rows_are_misread_where_they_are_narrow_or_single() {
        let e8 = |columns| (columns, Format::E8Iq3Lattice);
        let single: Vec<_> =
            [(1, Format::Int8Row)].into_iter().chain([195, 196, 391, 392, 587, 588, 783, 784].map(e8)).collect();
        assert_eq!(misread_widths(Format::Int4Row, 1), single);
        assert_eq!(misread_widths(Format::Int4Row, 2), [(1, Format::Int8Row)]);
        for rows in [1, 2, 300] {
            assert_eq!(misread_widths(Format::Int2Row, rows), [(1, Format::Int8Row), (2, Format::Int4Row)]);
            assert_eq!(misread_widths(Format::Int8Row, rows), []);
            assert_eq!(misread_widths(Format::Fp8E4m3B128, rows), []);
        }
    }

    #[test]
    fn one_row_of_98_is_int8_to_the_engine() {
        let bytes = counts(Format::Int8Row, 1, 98);
        assert_eq!(upstream_rule(1, 98, bytes, None), Ok(Format::Int8Row));
        assert_eq!(candidates(1, 98, bytes), [Format::Int8Row, Format::E8Iq3Lattice, Format::Fp8E4m3B128]);
        assert_eq!(misread_widths(Format::E8Iq3Lattice, 1), [(98, Format::Int8Row)]);
    }

    #[test]
    fn int8_with_as_many_rows_as_blocks_might_be_fp8() {
        // o_proj of GLM-5.2: 48 · 128 blocks and 6144 rows
        let bytes = counts(Format::Int8Row, 6144, 16384);
        assert_eq!(bytes, counts(Format::Fp8E4m3B128, 6144, 16384));
        assert_eq!(candidates(6144, 16384, bytes), [Format::Int8Row, Format::Fp8E4m3B128]);
        assert_eq!(upstream_rule(6144, 16384, bytes, None), Ok(Format::Int8Row));
        assert_eq!(upstream_rule(6144, 16384, bytes, Some("int8-row")), Ok(Format::Int8Row));
        assert_eq!(upstream_rule(6144, 16384, bytes, Some("fp8-e4m3-b128")), Ok(Format::Fp8E4m3B128));
        assert_eq!(misread_as(Format::Int8Row, 6144, 16384), None);
    }

    #[test]
    fn the_rule_refuses_what_fits_nothing() {
        let rule = |codes, scales, stamp| upstream_rule(2048, 6144, ByteCounts { codes, scales }, stamp);
        assert_eq!(rule(6_291_455, 8_192, None), Err(Unresolved::Codes));
        assert_eq!(rule(0, 0, None), Err(Unresolved::Codes));
        assert_eq!(rule(6_291_456, 8_188, None), Err(Unresolved::Scales(Format::Int4Row)));
        assert_eq!(rule(6_291_456, 8_196, None), Err(Unresolved::Scales(Format::Int4Row)));
        assert_eq!(rule(4_718_592, 8_192, None), Err(Unresolved::Scales(Format::Int3G64)));
        assert_eq!(rule(12_582_912, 768, None), Err(Unresolved::Ue8m0Scales));
        assert_eq!(rule(12_582_912, 769, None), Err(Unresolved::Scales(Format::Int8Row)));
        assert_eq!(rule(6_291_456, 8_192, Some("int4-grouped")), Err(Unresolved::Stamp(Format::Int4Row)));
        assert_eq!(rule(6_291_456, 8_192, Some("")), Err(Unresolved::Stamp(Format::Int4Row)));
        assert_eq!(rule(12_582_912, 8_192, Some("fp8-e4m3-b128")), Err(Unresolved::Stamp(Format::Int8Row)));
        assert_eq!(rule(12_582_912, 3_072, Some("int8-row")), Err(Unresolved::Stamp(Format::Fp8E4m3B128)));
    }

    #[test]
    fn groups_of_the_models_own_widths_are_unambiguous() {
        for columns in [512, 2048, 6144, 12288, 16384] {
            for rows in [64, 512, 2048, 6144, 12288, 154_880] {
                for format in [32, 64, 128, 256].map(grouped) {
                    let bytes = counts(format, rows, columns);
                    assert_eq!(candidates(rows, columns, bytes), [format], "[{rows}, {columns}]");
                    assert_eq!(misread_as(format, rows, columns), None);
                }
                for format in [Format::Int4Row, Format::Int2Row, Format::Int3G64] {
                    assert_eq!(candidates(rows, columns, counts(format, rows, columns)), [format]);
                }
            }
        }
    }

    #[test]
    fn safe_sizes_are_those_read_back() {
        assert_eq!(safe_group_sizes(7, 144), [16, 32, 48, 96]);
        assert_eq!(safe_group_sizes(7, 96), [16, 32, 48]);
        assert_eq!(safe_group_sizes(7, 6144), GROUP_SIZES);
        assert!(safe_group_sizes(7, 16).is_empty());
    }

    #[test]
    fn the_truth_and_the_rules_answer_are_among_the_candidates() {
        for rows in [1, 2, 3, 127, 128, 129, 130] {
            for columns in 1..=600 {
                for format in container_formats() {
                    let bytes = counts(format, rows, columns);
                    let candidates = candidates(rows, columns, bytes);
                    let place = || format!("{format} [{rows}, {columns}]: {candidates:?}");
                    assert!(candidates.contains(&format.canonical(columns)), "{}", place());
                    assert!(candidates.is_sorted_by(|a, b| a < b), "{}", place());
                    for stamp in [None, Some(format.name())] {
                        if let Ok(taken) = upstream_rule(rows, columns, bytes, stamp) {
                            assert!(candidates.contains(&taken), "{taken}, {}", place());
                        }
                    }
                }
            }
        }
    }

    fn extent() -> impl Strategy<Value = u64> {
        prop_oneof![
            0u64..600,
            any::<u64>(),
            (0u32..64, 0u64..3).prop_map(|(shift, less)| (1u64 << shift).wrapping_sub(less)),
        ]
    }

    proptest! {
        #[test]
        fn no_counts_make_the_rules_panic(
            rows in extent(), columns in extent(), codes in extent(), scales in extent(), stamp in 0usize..4,
        ) {
            let stamp = [None, Some("int8-row"), Some("fp8-e4m3-b128"), Some("\u{0}")][stamp];
            let bytes = ByteCounts { codes, scales };
            let candidates = candidates(rows, columns, bytes);
            if let Ok(taken) = upstream_rule(rows, columns, bytes, stamp) {
                prop_assert!(candidates.contains(&taken));
            }
            safe_group_sizes(rows, columns);
            // Groups of an empty row have no scales, the row would have one: there the two are not the same.
            for format in container_formats().into_iter().filter(|_| columns > 0) {
                if let Some(bytes) = ByteCounts::of(format, rows, columns) {
                    prop_assert!(super::candidates(rows, columns, bytes).contains(&format.canonical(columns)));
                    if let Ok(taken) = upstream_rule(rows, columns, bytes, stamp) {
                        prop_assert!(super::candidates(rows, columns, bytes).contains(&taken));
                    }
                }
            }
        }
    }
}
