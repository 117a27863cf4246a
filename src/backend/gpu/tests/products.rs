//! Products with weights: exact, fast, and with wgmma.

use rayon::prelude::*;

use super::{Extent, GLM, bits, rows_of};
use crate::backend::Backend;
use crate::backend::Mode;
use crate::backend::gpu::Gpu;
use crate::backend::gpu::driver::Driver;
use crate::backend::gpu::kernels::{Coding, Kernel, Name};
use crate::backend::gpu::weight::Layout;
use crate::backend::reference::Reference;
use crate::backend::samples::{Made, formats, matrix, numbers, through};
use crate::backend::tolerances;
use crate::format::Format;
use crate::weights::Matrix;

/// x · weightᵀ on a backend, with a weight that is used in no other way.
pub(super) fn product<B: Backend>(backend: &B, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    product_with(backend, &backend.upload_linear("w", matrix.clone()).unwrap(), matrix, x)
}

pub(super) fn product_with<B: Backend>(backend: &B, weight: &B::Weight, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    backend.read(&backend.matmul(weight, &rows_of(backend, x, matrix.columns)).unwrap()).unwrap()
}

/// Close to the reference, by Σ|terms|; each row alone has the same bits.
fn check_product<D: Driver>(gpu: &Gpu<D>, matrix: &Matrix, n: usize) {
    let (rows, columns) = (matrix.rows, matrix.columns);
    let what = format!("{} {rows} × {columns}, {n} rows", matrix.format);
    let x = numbers(n as u64 + 7, n * columns);
    let found = product(gpu, matrix, &x);
    let exact = product(&Reference::default(), matrix, &x);
    (0..rows).into_par_iter().for_each_init(
        || vec![0.0; columns],
        |decoded, row| {
            matrix.dequantize_row(row, decoded);
            for (token, x) in x.chunks_exact(columns).enumerate() {
                let terms: f64 = x.iter().zip(&*decoded).map(|(x, w)| (f64::from(*x) * f64::from(*w)).abs()).sum();
                let (found, exact) = (f64::from(found[token * rows + row]), f64::from(exact[token * rows + row]));
                let apart = (found - exact).abs();
                assert!(apart <= terms * tolerances::PRODUCT, "{what}: {found}, not {exact} of {terms}");
            }
        },
    );
    for token in [0, n / 2, n - 1] {
        let alone = product(gpu, matrix, &x[token * columns..][..columns]);
        assert_eq!(bits(&alone), bits(&found[token * rows..][..rows]), "{what}, row {token} alone");
    }
}

pub(super) fn products<D: Driver>(gpu: &Gpu<D>, extent: Extent) {
    for format in formats() {
        // Around eight columns, a warp's 256, a group, a block.
        for columns in [1, 2, 7, 8, 9, 63, 64, 65, 127, 129, 200, 255, 256, 257, 600] {
            check_product(gpu, &matrix(format, 5, columns, columns as u64), 3);
        }
        // Around the four outputs of a warp and the 32 of a group; around the tiles of rows.
        for rows in [1, 3, 4, 31, 32, 33, 130] {
            check_product(gpu, &matrix(format, rows, 70, 6), 1);
        }
        for n in [2, 4, 5, 8, 9, 17] {
            check_product(gpu, &matrix(format, 6, 130, 5), n);
        }
        for columns in [2048, 6144, 12288, 16384] {
            check_product(gpu, &matrix(format, 5, columns, 3), 2);
        }
        // Around the columns that a group of threads takes at a time, in every tile of rows.
        for columns in [511, 1025, 2047, 2049] {
            check_product(gpu, &matrix(format, 5, columns, 4), 9);
        }
        // Many rows, over ranges of columns of which the last is shorter, and several tiles of outputs.
        if gpu.gpu().driver().has(Kernel { name: Name::StreamTile, coding: Some(Coding::Int8Row), rows: Some(16) }) {
            check_product(gpu, &matrix(format, 5, 5888, 3), 18);
            check_product(gpu, &matrix(format, 300, 200, 3), 33);
        }
        // Odd groups are no less odd in a small matrix.
        if extent == Extent::Glm && !matches!(format, Format::Int4Grouped { group_size } if group_size % 64 != 0) {
            for (rows, columns) in GLM {
                let matrix = matrix(format, rows, columns, 9);
                [1, 8].into_iter().for_each(|n| check_product(gpu, &matrix, n));
            }
            check_product(gpu, &matrix(format, 2048, 6144, 9), 64);
        }
    }
    // Where weights stand in a word, and what they are put right by, changes no bit: x may be large or small.
    for format in formats() {
        let (matrix, x) = (matrix(format, 6, 130, 5), numbers(8, 2 * 130));
        let times = |values: &[f32], factor: f32| values.iter().map(|value| value * factor).collect::<Vec<f32>>();
        let found = product(gpu, &matrix, &x);
        for factor in [2f32.powi(60), 2f32.powi(-60)] {
            let scaled = product(gpu, &matrix, &times(&x, factor));
            assert_eq!(bits(&scaled), bits(&times(&found, factor)), "{format}, x times {factor}");
        }
    }
    // A code that is no number spoils its own output alone, with a weight that is used in any way: others may be laid out
    // differently for it.
    for code in [0x7f, 0xff] {
        let mut weights = matrix(Format::Fp8E4m3B128, 3, 150, 2);
        let x = numbers(3, 9 * 150);
        let product_of = |weights: &Matrix| product_with(gpu, &gpu.upload("w", weights.clone()).unwrap(), weights, &x);
        let before = product_of(&weights);
        weights.codes[150 + 141] = code;
        let after = product_of(&weights);
        let linear = product(gpu, &weights, &x);
        assert!(linear.iter().enumerate().all(|(at, value)| value.is_nan() == (at % 3 == 1)));
        assert!(after.iter().zip(&before).enumerate().all(|(at, (after, before))| match at % 3 {
            1 => after.is_nan(),
            _ => after == before,
        }));
    }
    // No rows are no work.
    assert!(product(gpu, &matrix(Format::Int4Row, 3, 64, 1), &[]).is_empty());
    // A row of x that is not finite leaves the others alone.
    let weights = matrix(Format::Int4Grouped { group_size: 64 }, 4, 100, 2);
    let mut x = numbers(3, 3 * 100);
    let before = product(gpu, &weights, &x);
    x[100] = f32::NAN;
    let after = product(gpu, &weights, &x);
    assert!(after[4..8].iter().all(|value| value.is_nan()));
    assert_eq!((&after[..4], &after[8..]), (&before[..4], &before[8..]));
}

/// Products of the fast mode, if the device has it: as far from the reference as rounding each x to bf16 takes them, or nearer,
/// each row by itself with the same bits, experts too.
pub(in crate::backend) fn fast_products<D: Driver>(gpu: &Gpu<D>) {
    assert_eq!(gpu.mode(), Mode::Fast);
    let is_fast = |format: Format, columns: usize| {
        let layout = Layout::new("test", "w", 64, columns, format).unwrap().in_bricks(gpu.gpu().driver());
        layout.bricks.is_some() || gpu.in_halves(&layout).is_some()
    };
    // However many columns there are.
    let formats: Vec<Format> = formats().into_iter().filter(|&format| is_fast(format, 1 << 16)).collect();
    assert!(formats.len() >= 6, "{formats:?}");
    for format in formats {
        for (rows, columns, n) in [
            (5, 70, 1),
            (40, 600, 3),
            (33, 2500, 8),
            (5, 130, 11),
            (20, 5888, 50),
            (300, 200, 65),
            (130, 257, 17),
            (1, 9, 600),
        ] {
            let matrix = matrix(format, rows, columns, 9);
            let (what, x) = (format!("{format} {rows} × {columns}, {n} rows"), numbers(n as u64 + 7, n * columns));
            let found = product(gpu, &matrix, &x);
            let largest = check_near(&what, &matrix, &x, &found);
            assert!(largest > 4.0 * tolerances::PRODUCT, "{what}: {largest} is too good for x that was rounded");
            for token in [0, n / 2, n - 1] {
                let alone = product(gpu, &matrix, &x[token * columns..][..columns]);
                assert_eq!(bits(&alone), bits(&found[token * rows..][..rows]), "{what}, row {token} alone");
            }
        }
        // Experts have 4, 14, 27 and 40 rows on average.
        for (count, pieces) in [
            (12, vec![0..1, 1..5, 5..12]),
            (42, vec![0..10, 10..42]),
            (80, vec![0..20, 20..80]),
            (120, vec![0..50, 50..120]),
        ] {
            let exact = through(&Reference::default(), Made::six(format), count, 0..count);
            let found = through(gpu, Made::six(format), count, 0..count);
            let largest = exact.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            for (found, expected) in found.iter().zip(&exact) {
                let apart = f64::from((found - expected).abs());
                let allowed = f64::from(largest) * 8.0 * tolerances::FAST_PRODUCT;
                assert!(apart <= allowed, "{format}, {count} rows: {found}, not {expected}");
            }
            let in_pieces: Vec<f32> =
                pieces.into_iter().flat_map(|rows| through(gpu, Made::six(format), count, rows)).collect();
            assert_eq!(bits(&in_pieces), bits(&found), "{format}, {count} rows");
        }
        // x may be large or small; a row that is 0 or not finite leaves the others alone.
        let (matrix, mut x) = (matrix(format, 40, 130, 5), numbers(8, 20 * 130));
        let before = product(gpu, &matrix, &x);
        for factor in [2f32.powi(60), 2f32.powi(-60)] {
            let times = |values: &[f32]| values.iter().map(|value| value * factor).collect::<Vec<f32>>();
            assert_eq!(bits(&product(gpu, &matrix, &times(&x))), bits(&times(&before)), "{format}, x times {factor}");
        }
        x[130..2 * 130].fill(0.0);
        (x[2 * 130 + 100], x[4 * 130 + 3]) = (f32::NAN, f32::INFINITY);
        for (row, (after, before)) in product(gpu, &matrix, &x).chunks(40).zip(before.chunks(40)).enumerate() {
            match row {
                1 => assert!(after.iter().all(|&value| value == 0.0), "{format}: {after:?}"),
                2 => assert!(after.iter().all(|value| value.is_nan()), "{format}: {after:?}"),
                4 => assert!(after.iter().all(|value| !value.is_finite()), "{format}: {after:?}"),
                _ => assert_eq!(bits(after), bits(before), "{format}, row {row}"),
            }
        }
    }
    // A code that is no number spoils its own output alone.
    for code in [0x7f, 0xff] {
        let (mut weights, x) = (matrix(Format::Fp8E4m3B128, 3, 150, 2), numbers(3, 18 * 150));
        weights.codes[150 + 141] = code;
        let found = product(gpu, &weights, &x);
        assert!(found.iter().enumerate().all(|(at, value)| value.is_nan() == (at % 3 == 1)), "{found:?}");
        check_near("a code that is no number", &weights, &x, &found);
    }
}

/// Products as far from the reference as rounding each x to bf16 takes them; the largest distance, by Σ|terms|.
fn check_near(what: &str, matrix: &Matrix, x: &[f32], found: &[f32]) -> f64 {
    let exact = product(&Reference::default(), matrix, x);
    let (mut decoded, mut largest) = (vec![0.0; matrix.columns], 0.0f64);
    for row in 0..matrix.rows {
        matrix.dequantize_row(row, &mut decoded);
        for (token, x) in x.chunks_exact(matrix.columns).enumerate() {
            let terms: f64 = x.iter().zip(&*decoded).map(|(x, w)| (f64::from(*x) * f64::from(*w)).abs()).sum();
            let (found, exact) = (found[token * matrix.rows + row], exact[token * matrix.rows + row]);
            if exact.is_nan() {
                assert!(found.is_nan(), "{what}: {found}, not {exact}");
                continue;
            }
            let apart = f64::from((found - exact).abs());
            assert!(apart <= terms * tolerances::FAST_PRODUCT, "{what}: {found}, not {exact} of {terms}");
            largest = largest.max(apart / terms.max(f64::MIN_POSITIVE));
        }
    }
    largest
}

/// Products of many rows with the same bits on two devices that compute them with different kernels: one has wgmma.
pub(in crate::backend) fn same_with_wgmma<D: Driver>(with: &Gpu<D>, without: &Gpu<D>, extent: Extent) {
    let wide = Kernel { name: Name::FastWide, coding: Some(Coding::Int8Row), rows: Some(64) };
    assert_eq!(with.mode(), without.mode());
    assert_eq!([with, without].map(|gpu| gpu.gpu().driver().has(wide)), [true, false]);
    // Of one row of outputs and of several groups'; with fewer columns than a brick, and with ranges of one and of three bricks.
    let mut shapes = vec![(1, 9, 17), (65, 257, 33), (129, 2100, 64), (30, 4200, 70)];
    if extent == Extent::Glm {
        shapes.push((GLM[0].0, GLM[0].1, 512));
    }
    for format in formats() {
        for &(rows, columns, n) in &shapes {
            let (matrix, mut x) = (matrix(format, rows, columns, 9), numbers(n as u64 + 7, n * columns));
            // What is no number, and what is too large for bf16, stay in their row.
            (x[columns / 2], x[3 * columns]) = (f32::NAN, f32::MAX);
            let [found, expected] = [with, without].map(|gpu| product(gpu, &matrix, &x));
            let equal = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            let other = found.iter().zip(&expected).position(|pair| !equal(pair));
            assert_eq!(other, None, "{format} {rows} × {columns}, {n} rows");
            assert!(found.iter().filter(|value| value.is_finite()).count() >= (n - 2) * rows, "{format}, {n} rows");
        }
        for count in [17, 80] {
            let [found, expected] = [with, without].map(|gpu| bits(&through(gpu, Made::six(format), count, 0..count)));
            assert!(found == expected, "experts of {format}, {count} rows");
        }
    }
}
