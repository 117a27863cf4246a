//! Which format a stored matrix has: by the manifest, else by its stamp, else by its bytes.

use crate::error::{FaultKind, Severity};
use crate::format::{ByteCounts, Format, GROUP_SIZES, Unresolved, candidates, upstream_rule};
use crate::tensor::Shape;

/// What was found out about a matrix.
#[derive(Debug)]
pub struct Resolution {
    /// The format, where one is certain enough to read by.
    pub format: Option<Format>,
    /// Every format that the bytes fit.
    pub candidates: Vec<Format>,
    /// What the colibri engine takes it for.
    pub upstream: Result<Format, Unresolved>,
    /// What is wrong or odd.
    pub findings: Vec<(Severity, FaultKind)>,
}

/// Resolves a matrix of `rows` × `columns`; `manifest` is the format that the manifest gives, `stamp` the text of the stamp.
/// Routed experts have no stamps in the engine's eyes: pass none for them. A stamp that is no format's name
/// ([`is_stamp`]) counts as none here; that it is there is told with the stamps.
pub fn resolve(
    rows: u64,
    columns: u64,
    bytes: ByteCounts,
    manifest: Option<Format>,
    stamp: Option<&str>,
) -> Resolution {
    let stamp = stamp.filter(|stamp| is_stamp(stamp));
    let candidates = candidates(rows, columns, bytes);
    let upstream = upstream_rule(rows, columns, bytes, stamp).map(|format| format.canonical(columns));
    let mut resolution = Resolution { format: None, candidates, upstream, findings: Vec::new() };
    let shape = Shape::from([rows, columns]);
    if let Some(declared) = manifest.map(|format| format.canonical(columns)) {
        resolution.by_manifest(&shape, declared, bytes, stamp);
    } else if let Some(stamp) = stamp {
        resolution.by_stamp(&shape, stamp, bytes);
    } else {
        resolution.by_bytes(&shape, bytes);
    }
    resolution
}

impl Resolution {
    fn error(&mut self, kind: FaultKind) {
        self.findings.push((Severity::Error, kind));
    }

    fn warning(&mut self, kind: FaultKind) {
        self.findings.push((Severity::Warning, kind));
    }

    /// The manifest names the format: the bytes must fit it. The engine knows no manifest, so what it takes the matrix for
    /// is said where it differs.
    fn by_manifest(&mut self, shape: &Shape, declared: Format, bytes: ByteCounts, stamp: Option<&str>) {
        let (rows, columns) = shape.matrix().expect("a matrix");
        if !declared.fits(rows, columns, bytes) {
            return self.unfitting(shape, declared, bytes);
        }
        self.format = Some(declared);
        match (self.upstream, stamp) {
            (Err(Unresolved::Stamp(by_bytes)), Some(stamp)) => {
                self.error(FaultKind::StampMismatch { stamp: stamp.to_owned(), by_bytes });
            }
            // A stamp that is what the bytes alone say changes nothing: the engine misreads the matrix with it or without.
            (Ok(taken), Some(stamp))
                if stamp != declared.name() && upstream_rule(rows, columns, bytes, None) == Ok(taken) =>
            {
                let taken = format!("it takes it for {taken}");
                self.warning(FaultKind::EngineMisreads { shape: shape.clone(), format: declared, taken });
            }
            (_, Some(stamp)) if stamp != declared.name() => {
                self.error(FaultKind::StampAgainstManifest { stamp: stamp.to_owned(), manifest: declared });
            }
            (Ok(taken), _) if taken == declared => {}
            (Ok(taken), _) => {
                let taken = format!("it takes it for {taken}");
                self.warning(FaultKind::EngineMisreads { shape: shape.clone(), format: declared, taken });
            }
            (Err(unresolved), _) => {
                let taken = unresolved.to_string();
                self.error(FaultKind::EngineMisreads { shape: shape.clone(), format: declared, taken });
            }
        }
    }

    /// The stamp names the format, but not the group size.
    fn by_stamp(&mut self, shape: &Shape, stamp: &str, bytes: ByteCounts) {
        match self.upstream {
            Err(Unresolved::Stamp(by_bytes)) => {
                self.error(FaultKind::StampMismatch { stamp: stamp.to_owned(), by_bytes });
            }
            Err(_) => self.by_bytes(shape, bytes),
            Ok(taken) => {
                self.format = Some(taken);
                let same_name: Vec<Format> =
                    self.candidates.iter().copied().filter(|format| format.name() == stamp).collect();
                if same_name.len() > 1 {
                    self.warning(FaultKind::Ambiguous { shape: shape.clone(), candidates: same_name, taken });
                }
            }
        }
    }

    /// Nothing but the bytes: what the engine takes is taken, and other readings are named.
    fn by_bytes(&mut self, shape: &Shape, bytes: ByteCounts) {
        let (rows, columns) = shape.matrix().expect("a matrix");
        match self.upstream {
            Ok(taken) => {
                self.format = Some(taken);
                if self.candidates.len() > 1 {
                    let candidates = self.candidates.clone();
                    self.warning(FaultKind::Ambiguous { shape: shape.clone(), candidates, taken });
                }
            }
            Err(unresolved) if !self.candidates.is_empty() && !matches!(unresolved, Unresolved::Stamp(_)) => {
                let format = self.candidates[0];
                self.format = Some(format);
                let taken = unresolved.to_string();
                self.error(FaultKind::EngineMisreads { shape: shape.clone(), format, taken });
            }
            Err(_) => {
                let near = near(rows, columns, bytes);
                self.error(FaultKind::NoFormat { shape: shape.clone(), found: bytes, near });
            }
        }
    }

    fn unfitting(&mut self, shape: &Shape, format: Format, found: ByteCounts) {
        let (rows, columns) = shape.matrix().expect("a matrix");
        let expected =
            ByteCounts::of(format, rows, columns).unwrap_or(ByteCounts { codes: u64::MAX, scales: u64::MAX });
        let fitting = self.candidates.clone();
        self.error(FaultKind::StoredBytes { shape: shape.clone(), format, expected, found, fitting });
    }
}

/// Whether a name is one that a stamp may give.
pub fn is_stamp(name: &str) -> bool {
    const STAMPS: [&str; 8] =
        ["f32", "int8-row", "int4-row", "int2-row", "int4-grouped", "int3-g64", "e8-iq3-lattice", "fp8-e4m3-b128"];
    STAMPS.contains(&name)
}

/// The formats to compare wrong byte counts with: those whose codes fit, or if there is none, those without groups.
fn near(rows: u64, columns: u64, bytes: ByteCounts) -> Vec<(Format, ByteCounts)> {
    let flat = [Format::Int8Row, Format::Int4Row, Format::Int2Row, Format::Int3G64, Format::Fp8E4m3B128];
    let grouped =
        GROUP_SIZES.into_iter().filter(|&size| size < columns).map(|group_size| Format::Int4Grouped { group_size });
    let all: Vec<(Format, ByteCounts)> = flat
        .into_iter()
        .chain(grouped)
        .filter_map(|format| Some((format, ByteCounts::of(format, rows, columns)?)))
        .collect();
    let fitting: Vec<(Format, ByteCounts)> = all.iter().copied().filter(|(_, b)| b.codes == bytes.codes).collect();
    if fitting.is_empty() { all.into_iter().take(flat.len()).collect() } else { fitting }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(format: Format, rows: u64, columns: u64) -> ByteCounts {
        ByteCounts::of(format, rows, columns).unwrap()
    }

    fn kinds(resolution: &Resolution) -> Vec<&'static str> {
        resolution.findings.iter().map(|(_, kind)| kind.name()).collect()
    }

    #[test]
    fn the_manifest_decides_and_bytes_are_a_check() {
        let g64 = Format::Int4Grouped { group_size: 64 };
        // 144 columns: three groups of 64 or of 48.
        let found = resolve(10, 144, bytes(g64, 10, 144), Some(g64), Some("int4-grouped"));
        assert_eq!(found.format, Some(g64));
        assert_eq!(kinds(&found), ["engine-misreads"]);
        let found = resolve(10, 144, bytes(g64, 10, 144), Some(Format::Int4Row), None);
        assert_eq!((found.format, kinds(&found)), (None, vec!["stored-bytes"]));
        let found = resolve(10, 256, bytes(Format::Int8Row, 10, 256), Some(Format::Int8Row), Some("int4-row"));
        assert_eq!(kinds(&found), ["stamp-mismatch"]);
        // One row: the bytes fit both, the engine follows the stamp.
        let found = resolve(1, 8, bytes(Format::Int8Row, 1, 8), Some(Format::Int8Row), Some("fp8-e4m3-b128"));
        assert_eq!(kinds(&found), ["stamp-against-manifest"]);
    }

    #[test]
    fn without_a_manifest_ambiguity_is_told() {
        let g64 = Format::Int4Grouped { group_size: 64 };
        let found = resolve(10, 144, bytes(g64, 10, 144), None, None);
        assert_eq!(found.format, Some(Format::Int4Grouped { group_size: 48 }));
        assert_eq!(kinds(&found), ["ambiguous"]);
        let o_proj = bytes(Format::Int8Row, 6144, 16384);
        assert_eq!(kinds(&resolve(6144, 16384, o_proj, None, None)), ["ambiguous"]);
        assert_eq!(kinds(&resolve(6144, 16384, o_proj, None, Some("int8-row"))), [""; 0]);
        let stamped = resolve(6144, 16384, o_proj, None, Some("fp8-e4m3-b128"));
        assert_eq!(stamped.format, Some(Format::Fp8E4m3B128));
        assert_eq!(kinds(&resolve(10, 256, o_proj, None, None)), ["no-format"]);
        assert_eq!(kinds(&resolve(6144, 16384, o_proj, None, Some("q4_0"))), ["ambiguous"]);
    }

    /// The candidates by trying everything, slowly.
    fn slow(rows: u64, columns: u64, found: ByteCounts) -> Vec<Format> {
        let mut all = vec![
            Format::Int8Row,
            Format::Int4Row,
            Format::Int2Row,
            Format::Int3G64,
            Format::E8Iq3Lattice,
            Format::Fp8E4m3B128,
        ];
        all.extend(
            (1..columns).filter(|g| GROUP_SIZES.contains(g)).map(|group_size| Format::Int4Grouped { group_size }),
        );
        all.retain(|&format| ByteCounts::of(format, rows, columns) == Some(found));
        all.sort();
        all
    }

    proptest! {
        #[test]
        fn any_bytes_resolve_within_the_candidates(
            rows in 1u64..300, columns in 1u64..600, pick in 0usize..12, codes in 0u64..100_000, scales in 0u64..100_000,
            stamp in proptest::option::of("(int8-row|int4-row|int4-grouped|int3-g64|int2-row|fp8-e4m3-b128|x|)"),
        ) {
            let mut formats = vec![Format::Int8Row, Format::Int4Row, Format::Int2Row, Format::Int3G64];
            formats.extend(GROUP_SIZES.map(|group_size| Format::Int4Grouped { group_size }));
            let found = formats.get(pick).map_or(ByteCounts { codes, scales }, |&f| bytes(f, rows, columns));
            let resolution = resolve(rows, columns, found, None, stamp.as_deref());
            prop_assert_eq!(&resolution.candidates, &slow(rows, columns, found));
            if let Some(format) = resolution.format {
                prop_assert!(resolution.candidates.contains(&format), "{format}");
            } else {
                prop_assert!(resolution.findings.iter().any(|(severity, _)| *severity == Severity::Error));
            }
        }

        #[test]
        fn extremes_do_not_panic(rows: u64, columns: u64, codes: u64, scales: u64, g in 1u64.., stamp: String) {
            let found = ByteCounts { codes, scales };
            resolve(rows, columns, found, Some(Format::Int4Grouped { group_size: g }), Some(&stamp));
            resolve(rows, columns, found, None, None);
        }
    }
}
