//! Weights in bricks: how matrices lie in memory whose products tensor cores compute. The order is that of
//! `kernels/cuda/bricks.cuh`, which says what it is for.

use std::ops::Range;

use rayon::prelude::*;

use super::kernels::Coding;
use crate::weights::MatrixRef;

/// Rows and columns of a brick.
pub const ROWS: usize = 16;
pub const COLUMNS: usize = 256;
/// Columns that have a scale of a group.
const BLOCK: usize = 64;
/// Blocks of a brick.
const BLOCKS: usize = COLUMNS / BLOCK;
/// Words of a plane: four of each of 32 lanes.
const PLANE: usize = 128;
/// Scales of groups of a brick.
const SCALES: usize = ROWS * BLOCKS;

/// A code of e4m3 that is not a number: bricks have none.
pub fn is_nan(code: u8) -> bool {
    code & 0x7f == 0x7f
}

/// How a matrix is laid in bricks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bricks {
    /// Bricks side by side.
    pub across: usize,
    /// Planes of each.
    pub planes: usize,
    /// Blocks of a group that has a scale; 0 where scales are as stored.
    blocks: usize,
}

impl Bricks {
    /// For a coding with so many columns; a group of `group_size` has `row_scales` in a row. `None` if there is no such kernel.
    pub fn of(coding: Coding, columns: usize, group_size: usize, row_scales: usize) -> Option<Bricks> {
        let planes = coding.planes()?;
        let blocks = match coding {
            Coding::Int3G64 => 1,
            Coding::Int4Grouped if row_scales == 1 => usize::MAX,
            Coding::Int4Grouped if group_size.is_multiple_of(BLOCK) => group_size / BLOCK,
            Coding::Int4Grouped => return None,
            _ => 0,
        };
        Some(Bricks { across: columns.div_ceil(COLUMNS), planes, blocks })
    }

    /// Bricks of so many rows.
    fn count(&self, rows: usize) -> usize {
        rows.div_ceil(ROWS) * self.across
    }

    /// Bricks of a matrix of so many rows.
    pub fn of_matrix(&self, rows: usize) -> usize {
        self.count(rows)
    }

    /// Words of the codes of so many rows.
    pub fn words(&self, rows: usize) -> usize {
        self.count(rows) * self.planes * PLANE
    }

    /// Scales of so many rows, where they are those of groups.
    pub fn scales(&self, rows: usize) -> Option<usize> {
        (self.blocks > 0).then(|| self.count(rows) * SCALES)
    }

    /// Words of codes from rows as they are stored, of `row_bytes` each.
    pub fn codes(&self, codes: &[u8], row_bytes: usize) -> Vec<u8> {
        let of_tile = 4 * self.across * self.planes * PLANE;
        let mut bricks = vec![0; of_tile * (codes.len() / row_bytes.max(1)).div_ceil(ROWS)];
        let tiles = bricks.par_chunks_exact_mut(of_tile).zip(codes.par_chunks(ROWS * row_bytes));
        tiles.for_each(|(tile, rows)| self.tile(tile, rows, row_bytes));
        bricks
    }

    /// A tile of up to 16 rows.
    fn tile(&self, tile: &mut [u8], rows: &[u8], row_bytes: usize) {
        for (i, plane) in tile.as_chunks_mut::<{ 4 * PLANE }>().0.iter_mut().enumerate() {
            let (brick, number) = (i / self.planes, i % self.planes);
            for (at, word) in plane.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let (g, t, w) = (at / 16, at / 4 % 4, at % 4);
                // From where in which row; of high bits half a word each from two.
                let mut copy = |into: Range<usize>, row: usize, from: usize| {
                    let of_row = rows.get(row * row_bytes..(row + 1) * row_bytes).unwrap_or_default();
                    let from = of_row.get(from..).unwrap_or_default();
                    let count = into.len().min(from.len());
                    word[into][..count].copy_from_slice(&from[..count]);
                };
                match self.planes {
                    8 => copy(0..4, g + 8 * (number % 2), 4 * (64 * brick + 16 * (number / 2) + 4 * t + w)),
                    4 => copy(0..4, g + 8 * (w / 2), 4 * (32 * brick + 8 * number + 2 * t + w % 2)),
                    2 => copy(0..4, g + 8 * (w % 2), 4 * (16 * brick + 4 * (2 * number + w / 2) + t)),
                    _ if number < 2 => copy(0..4, g + 8 * number, 4 * (24 * brick + 6 * w + t)),
                    _ => {
                        let from = 4 * (24 * brick + 6 * w + 4) + 2 * t;
                        copy(0..2, g, from);
                        copy(2..4, g + 8, from);
                    }
                }
            }
        }
    }

    /// Scales of groups, spread out to one for every block of 64 columns, from `row_scales` of each row.
    pub fn group_scales(&self, scales: &[f32], row_scales: usize) -> Vec<f32> {
        let rows = scales.len() / row_scales.max(1);
        let mut bricks = vec![0.0; self.count(rows) * SCALES];
        for (brick, to) in bricks.chunks_exact_mut(SCALES).enumerate() {
            let (tile, across) = (brick / self.across, brick % self.across);
            for (row, to) in (ROWS * tile..rows).zip(to.chunks_exact_mut(BLOCKS)) {
                let of_row = &scales[row * row_scales..][..row_scales];
                for (block, to) in (BLOCKS * across..).zip(to) {
                    *to = of_row[(block / self.blocks).min(row_scales - 1)];
                }
            }
        }
        bricks
    }
}

/// Whether a matrix has codes that bricks cannot have.
pub fn has_nan(coding: Coding, matrix: MatrixRef<'_>) -> bool {
    coding == Coding::Fp8E4m3B128 && matrix.codes.iter().fold(false, |found, &code| found | is_nan(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte of the rows is in the bricks once, and everything else is 0.
    #[test]
    fn bricks_have_all_of_the_rows() {
        for (coding, columns, row_bytes) in [
            (Coding::Int8Row, 300, 300),
            (Coding::Int4Row, 300, 150),
            (Coding::Int3G64, 320, 120),
            (Coding::Int2Row, 300, 75),
            (Coding::Fp8E4m3B128, 256, 256),
            (Coding::Int4Row, 1, 1),
        ] {
            for rows in [1, 8, 9, 16, 17, 40] {
                let bricks = Bricks::of(coding, columns, 0, 1).unwrap();
                let codes: Vec<u8> = (0..rows * row_bytes).map(|i| (i % 251 + 1) as u8).collect();
                let mut laid = bricks.codes(&codes, row_bytes);
                assert_eq!(laid.len(), 4 * bricks.words(rows), "{coding:?} {rows}");
                laid.retain(|&byte| byte != 0);
                let mut expected = codes.clone();
                laid.sort();
                expected.sort();
                assert!(laid == expected, "{coding:?} {rows}");
            }
        }
    }

    #[test]
    fn scales_are_spread_out() {
        let bricks = Bricks::of(Coding::Int4Grouped, 600, 128, 5).unwrap();
        let scales: Vec<f32> = (0..17 * 5).map(|i| i as f32).collect();
        let laid = bricks.group_scales(&scales, 5);
        assert_eq!(Some(laid.len()), bricks.scales(17));
        // Row 16 is the first of the second tile, columns 256 to 511 are its second brick.
        let brick = &laid[(bricks.across + 1) * SCALES..][..SCALES];
        assert_eq!(brick[..4], [82.0, 82.0, 83.0, 83.0]);
        assert!(brick[4..].iter().all(|&scale| scale == 0.0));
        // Past the last column the last scale.
        assert_eq!(laid[2 * SCALES..][..4], [4.0; 4]);
        assert_eq!(Bricks::of(Coding::Int4Grouped, 600, 32, 19), None);
        assert!(Bricks::of(Coding::Int4Grouped, 24, 24, 1).is_some());
        assert_eq!(Bricks::of(Coding::F32, 600, 0, 0), None);
    }
}
