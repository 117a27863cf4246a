//! Products, once for every instruction set and coding.

// Arrays of vectors are indexed by constants: iterators would hide them from the registers.
#![allow(clippy::needless_range_loop)]

use super::codes::Codes;
use super::{CHUNK, Job, LANES, Lanes, Line, Tile};
use crate::quantize::Decoder;

/// Rows of x whose sums are kept together: a tile is decoded once for so many.
const MAX_X_ROWS: usize = 96;
/// Up to so many rows of x a tile is small and stays in the first cache; for more it is used by many.
const FEW_X_ROWS: usize = 16;
/// Weight rows of a tile.
const FEW_TILE_ROWS: usize = 4;
const MANY_TILE_ROWS: usize = 16;
/// Chunks of a tile: 1024 columns, so that a few rows of x and of weights stay in the first cache.
const TILE_CHUNKS: usize = 16;
/// Lines from one row of a tile to the next: one more, so that rows do not compete for the same places of a cache.
const TILE_STRIDE: usize = 4 * TILE_CHUNKS + 1;

/// Weight rows `first` on with all rows of x: out [rows, n].
#[inline(always)]
pub(super) fn block<L: Lanes, C: Codes>(lanes: L, job: &Job<'_>, first: usize, out: &mut [f32]) {
    // Where there are few registers, few rows of x are many.
    let wide = L::TILE.0 >= 4;
    if job.n > if wide { 8 } else { 2 } || C::BY_WORD {
        return tiled::<L, C>(lanes, job, first, out);
    }
    let (n, rows) = (job.n, out.len() / job.n);
    // Enough weight rows at once to hide the latency of a sum.
    let at_once = match (n, wide) {
        (1, true) if !C::HEAVY => 8,
        (1, false) | (_, true) => 4,
        (_, false) => 2,
    };
    let whole = rows / at_once * at_once;
    for row in (0..whole).step_by(at_once) {
        let (first, out) = (first + row, &mut out[row * n..][..at_once * n]);
        match at_once {
            8 => few::<L, C, 8>(lanes, job, first, out),
            4 => few::<L, C, 4>(lanes, job, first, out),
            _ => few::<L, C, 2>(lanes, job, first, out),
        }
    }
    for row in whole..rows {
        few::<L, C, 1>(lanes, job, first + row, &mut out[row * n..][..n]);
    }
}

/// R weight rows with all rows of x, up to four of them at once.
#[inline(always)]
fn few<L: Lanes, C: Codes, const R: usize>(lanes: L, job: &Job<'_>, first: usize, out: &mut [f32]) {
    if R == 8 {
        return direct::<L, C, R, 1>(lanes, job, first, 0, out);
    }
    let mut x = 0;
    while x < job.n {
        let left = job.n - x;
        let t = left.div_ceil(left.div_ceil(4));
        match t {
            1 => direct::<L, C, R, 1>(lanes, job, first, x, out),
            2 => direct::<L, C, R, 2>(lanes, job, first, x, out),
            3 if R != 2 => direct::<L, C, R, 3>(lanes, job, first, x, out),
            4 if R != 2 => direct::<L, C, R, 4>(lanes, job, first, x, out),
            t => unreachable!("{t} of {} rows at once", job.n),
        }
        x += t;
    }
}

/// R weight rows with T rows of x from `x_first` on, decoded in registers: out [R, n].
///
/// Memory is asked for in the order in which it lies there: while R rows are multiplied, the R rows behind them.
#[inline(always)]
fn direct<L: Lanes, C: Codes, const R: usize, const T: usize>(
    lanes: L,
    job: &Job<'_>,
    first: usize,
    x_first: usize,
    out: &mut [f32],
) {
    let mut sums = [[lanes.zero(); T]; R];
    let mut rows: [&[C::Chunk]; R] = [&[]; R];
    let mut scales: [&[f32]; R] = [&[]; R];
    let mut rest: [&[u8]; R] = [&[]; R];
    for r in 0..R {
        (rows[r], rest[r]) = C::split(job.codes(first + r));
        scales[r] = job.scales(first + r);
    }
    let full = rows[0].len();
    let mut x: [&[[Line; 4]]; T] = [&[]; T];
    for t in 0..T {
        x[t] = job.x_row(x_first + t).as_chunks().0;
    }
    let per_scale = job.chunks_per_scale();
    let (codes, ahead) = (job.codes(first), R * job.row_bytes);
    let of_chunk = R * size_of::<C::Chunk>();
    if C::SCALED && per_scale == 1 {
        let mut of_chunks = scales;
        for r in 0..R {
            (rows[r], of_chunks[r]) = (&rows[r][..full], &scales[r][..full]);
        }
        for chunk in 0..full {
            lanes.prefetch_lines(codes, ahead + chunk * of_chunk, of_chunk);
            for r in 0..R {
                let w = C::decode(lanes, &rows[r][chunk], of_chunks[r][chunk]);
                for t in 0..T {
                    sums[r][t] = multiplied(lanes, w, &x[t][chunk], sums[r][t]);
                }
            }
        }
    } else {
        let (mut begin, mut group) = (0, 0);
        while begin < full {
            let end = full.min(begin.saturating_add(per_scale));
            let mut scale = [1.0; R];
            if C::SCALED {
                for r in 0..R {
                    scale[r] = scales[r][group];
                }
            }
            for chunk in begin..end {
                lanes.prefetch_lines(codes, ahead + chunk * of_chunk, of_chunk);
                for r in 0..R {
                    let w = C::decode(lanes, &rows[r][chunk], scale[r]);
                    for t in 0..T {
                        sums[r][t] = multiplied(lanes, w, &x[t][chunk], sums[r][t]);
                    }
                }
            }
            (begin, group) = (end, group + 1);
        }
    }
    if !rest[0].is_empty() {
        for r in 0..R {
            let scale = if C::SCALED { scales[r][full / per_scale] } else { 1.0 };
            let w = C::decode(lanes, &C::padded(rest[r]), scale);
            for t in 0..T {
                sums[r][t] = multiplied(lanes, w, &x[t][full], sums[r][t]);
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            out[r * job.n + x_first + t] = lanes.sum(sums[r][t]);
        }
    }
}

/// The products of a chunk, added to sums.
#[inline(always)]
fn multiplied<L: Lanes>(lanes: L, w: [L::Vector; 4], x: &[Line; 4], mut sums: L::Vector) -> L::Vector {
    for v in 0..4 {
        sums = lanes.fma(w[v], lanes.load(&x[v].0), sums);
    }
    sums
}

/// The same for many rows of x: tiles of weights are decoded once for up to [`MAX_X_ROWS`] of them.
#[inline(always)]
fn tiled<L: Lanes, C: Codes>(lanes: L, job: &Job<'_>, first: usize, out: &mut [f32]) {
    let rows = out.len() / job.n;
    let tile_rows = if job.n <= FEW_X_ROWS { FEW_TILE_ROWS } else { MANY_TILE_ROWS };
    let x_rows = job.n.min(MAX_X_ROWS);
    let mut tile = vec![Line::default(); tile_rows * TILE_STRIDE];
    let mut sums = vec![Line::default(); tile_rows * x_rows];
    let chunks_of_row = job.lines / 4;
    for x_first in (0..job.n).step_by(x_rows) {
        let n = x_rows.min(job.n - x_first);
        for row in (0..rows).step_by(tile_rows) {
            let count = tile_rows.min(rows - row);
            let sums = &mut sums[..count * n];
            sums.fill(Line::default());
            for chunk in (0..chunks_of_row).step_by(TILE_CHUNKS) {
                let chunks = TILE_CHUNKS.min(chunks_of_row - chunk);
                // The next chunks of these rows; after the last the first of the next rows.
                let ahead = match chunk + TILE_CHUNKS < chunks_of_row {
                    true => TILE_CHUNKS * size_of::<C::Chunk>(),
                    false => tile_rows * job.row_bytes - chunk * size_of::<C::Chunk>(),
                };
                for r in 0..count {
                    let tile = &mut tile[r * TILE_STRIDE..][..chunks * 4];
                    decode_row::<L, C>(lanes, job, first + row + r, chunk, ahead, tile.as_chunks_mut().0);
                }
                let x = &job.x[x_first * job.stride + chunk * 4..];
                lanes.accumulate(Tile {
                    w: &tile,
                    w_stride: TILE_STRIDE,
                    rows: count,
                    x,
                    x_stride: job.stride,
                    n,
                    steps: chunks * 4,
                    sums: &mut *sums,
                });
            }
            write_sums(lanes, sums, n, &mut out[row * job.n + x_first..], job.n);
        }
    }
}

/// Weight rows `first` on, decoded: out [rows, 16 · lines].
#[inline(always)]
pub(super) fn decode<L: Lanes, C: Codes>(lanes: L, job: &Job<'_>, first: usize, out: &mut [f32]) {
    let per_scale = job.chunks_per_scale();
    for (r, out) in out.chunks_exact_mut(LANES * job.lines).enumerate() {
        let ((codes, rest), scales) = (C::split(job.codes(first + r)), job.scales(first + r));
        for (chunk, out) in out.as_chunks_mut::<CHUNK>().0.iter_mut().enumerate() {
            let codes = codes.get(chunk).copied().unwrap_or_else(|| C::padded(rest));
            let w = decode_chunk::<L, C>(lanes, job, scales, per_scale, chunk, &codes);
            for (w, out) in w.into_iter().zip(out.as_chunks_mut::<LANES>().0) {
                lanes.store(w, out);
            }
        }
    }
}

/// The same for any format, by the plain decoder.
pub(super) fn decode_plainly(job: &Job<'_>, first: usize, out: &mut [f32]) {
    let decoder = Decoder::new(job.matrix.format).expect("checked when the matrix was uploaded");
    for (r, out) in out.chunks_exact_mut(LANES * job.lines).enumerate() {
        let out = &mut out[..job.matrix.columns];
        decoder.dequantize_row(job.codes(first + r), job.scales(first + r), out);
    }
}

/// The weights of a chunk with the scales of its row.
#[inline(always)]
fn decode_chunk<L: Lanes, C: Codes>(
    lanes: L,
    job: &Job<'_>,
    scales: &[f32],
    per_scale: usize,
    chunk: usize,
    codes: &C::Chunk,
) -> [L::Vector; 4] {
    if C::BY_WORD {
        return C::decode_words(lanes, codes, &job.word_scales(scales, chunk));
    }
    C::decode(lanes, codes, if C::SCALED { scales[chunk / per_scale] } else { 1.0 })
}

/// Chunks `first_chunk` on of a weight row.
#[inline(always)]
fn decode_row<L: Lanes, C: Codes>(
    lanes: L,
    job: &Job<'_>,
    row: usize,
    first_chunk: usize,
    ahead: usize,
    out: &mut [[Line; 4]],
) {
    let (codes, rest) = C::split(job.codes(row));
    let (scales, per_scale) = (job.scales(row), job.chunks_per_scale());
    for (number, out) in out.iter_mut().enumerate() {
        let chunk = first_chunk + number;
        let w = match codes.get(chunk) {
            Some(codes) => {
                lanes.prefetch(C::bytes(codes), ahead);
                decode_chunk::<L, C>(lanes, job, scales, per_scale, chunk, codes)
            }
            None => decode_chunk::<L, C>(lanes, job, scales, per_scale, chunk, &C::padded(rest)),
        };
        for v in 0..4 {
            lanes.store(w[v], &mut out[v].0);
        }
    }
}

/// Sums of [rows, n] lines to one value each, `stride` from a weight row to the next.
#[inline(always)]
fn write_sums<L: Lanes>(lanes: L, sums: &[Line], n: usize, out: &mut [f32], stride: usize) {
    for (at, sums) in sums.iter().enumerate() {
        out[at / n * stride + at % n] = lanes.sum(lanes.load(&sums.0));
    }
}

/// Any format, by whole rows that the plain decoder decodes.
pub(super) fn decoded<L: Lanes>(lanes: L, job: &Job<'_>, first: usize, out: &mut [f32]) {
    let rows = out.len() / job.n;
    let x_rows = job.n.min(MAX_X_ROWS);
    let mut tile = vec![Line::default(); FEW_TILE_ROWS * job.lines];
    let mut values = vec![0.0; FEW_TILE_ROWS * job.lines * LANES];
    let mut sums = vec![Line::default(); FEW_TILE_ROWS * x_rows];
    for row in (0..rows).step_by(FEW_TILE_ROWS) {
        let count = FEW_TILE_ROWS.min(rows - row);
        decode_plainly(job, first + row, &mut values[..count * job.lines * LANES]);
        for (line, values) in tile.iter_mut().zip(values.as_chunks().0) {
            line.0 = *values;
        }
        for x_first in (0..job.n).step_by(x_rows) {
            let n = x_rows.min(job.n - x_first);
            let sums = &mut sums[..count * n];
            sums.fill(Line::default());
            lanes.accumulate(Tile {
                w: &tile,
                w_stride: job.lines,
                rows: count,
                x: &job.x[x_first * job.stride..],
                x_stride: job.stride,
                n,
                steps: job.lines,
                sums: &mut *sums,
            });
            write_sums(lanes, sums, n, &mut out[row * job.n + x_first..], job.n);
        }
    }
}

/// Σ w · x for every weight row and row of x of a tile, added to its sums.
#[inline(always)]
pub(super) fn accumulate<L: Lanes>(lanes: L, mut tile: Tile<'_>) {
    let (most_rows, most_x) = L::TILE;
    let mut x = 0;
    while x < tile.n {
        // Eight rows are four and four, not six and two: what is left over has too few sums to hide their latency.
        let left = tile.n - x;
        let t = left.div_ceil(left.div_ceil(most_x));
        let mut row = 0;
        while row < tile.rows {
            let r = if tile.rows - row >= most_rows { most_rows } else { 1 };
            match (r, t) {
                (4, 6) => micro::<L, 4, 6>(lanes, &mut tile, row, x),
                (4, 5) => micro::<L, 4, 5>(lanes, &mut tile, row, x),
                (4, 4) => micro::<L, 4, 4>(lanes, &mut tile, row, x),
                (4, 3) => micro::<L, 4, 3>(lanes, &mut tile, row, x),
                (4, 2) => micro::<L, 4, 2>(lanes, &mut tile, row, x),
                (4, 1) => micro::<L, 4, 1>(lanes, &mut tile, row, x),
                (2, 3) => micro::<L, 2, 3>(lanes, &mut tile, row, x),
                (2, 2) => micro::<L, 2, 2>(lanes, &mut tile, row, x),
                (2, 1) => micro::<L, 2, 1>(lanes, &mut tile, row, x),
                (1, 6) => micro::<L, 1, 6>(lanes, &mut tile, row, x),
                (1, 5) => micro::<L, 1, 5>(lanes, &mut tile, row, x),
                (1, 4) => micro::<L, 1, 4>(lanes, &mut tile, row, x),
                (1, 3) => micro::<L, 1, 3>(lanes, &mut tile, row, x),
                (1, 2) => micro::<L, 1, 2>(lanes, &mut tile, row, x),
                (1, 1) => micro::<L, 1, 1>(lanes, &mut tile, row, x),
                (r, t) => unreachable!("a tile of {r} × {t}"),
            }
            row += r;
        }
        x += t;
    }
}

/// R weight rows with T rows of x, whose sums stay in registers.
#[inline(always)]
fn micro<L: Lanes, const R: usize, const T: usize>(lanes: L, tile: &mut Tile<'_>, row: usize, x: usize) {
    let steps = tile.steps;
    let mut w: [&[Line]; R] = [&[]; R];
    let mut xs: [&[Line]; T] = [&[]; T];
    for r in 0..R {
        w[r] = &tile.w[(row + r) * tile.w_stride..][..steps];
    }
    for t in 0..T {
        xs[t] = &tile.x[(x + t) * tile.x_stride..][..steps];
    }
    let mut sums = [[lanes.zero(); T]; R];
    for r in 0..R {
        for t in 0..T {
            sums[r][t] = lanes.load(&tile.sums[(row + r) * tile.n + x + t].0);
        }
    }
    for step in 0..steps {
        let mut values = [lanes.zero(); R];
        for r in 0..R {
            values[r] = lanes.load(&w[r][step].0);
        }
        for t in 0..T {
            let x = lanes.load(&xs[t][step].0);
            for r in 0..R {
                sums[r][t] = lanes.fma(values[r], x, sums[r][t]);
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            lanes.store(sums[r][t], &mut tile.sums[(row + r) * tile.n + x + t].0);
        }
    }
}
