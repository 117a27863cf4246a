//! Every kernel, instruction set and format against the reference, and against itself in other batches and pools.

use super::*;
use crate::backend::reference::Reference;
use crate::backend::samples::{attended, formats, matrix, numbers, routed, ways};
use crate::backend::tolerances;
use crate::dequantize::fp8::e4m3;

fn product(backend: &Cpu, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    let weight = backend.upload("w", matrix.clone()).unwrap();
    linear::matmul(backend.isa, weight.operand(), &Rows { width: matrix.columns, values: x.to_vec() }).values
}

/// Every instruction set computes the same bits, close to the reference, for these rows of x and each of them alone.
fn check(matrix: &Matrix, n: usize) {
    let (rows, columns) = (matrix.rows, matrix.columns);
    let what = format!("{} {rows} × {columns}, {n} rows", matrix.format);
    let x = numbers(n as u64 + 7, n * columns);
    let plain = product(&Cpu::new(Isa::Plain), matrix, &x);
    let reference = Reference::default();
    let weight = reference.upload("w", matrix.clone()).unwrap();
    let exact = reference.read(&reference.matmul(&weight, &reference.write(&x, columns).unwrap()).unwrap()).unwrap();
    let mut decoded = vec![0.0; columns];
    for row in 0..rows {
        matrix.dequantize_row(row, &mut decoded);
        for (token, x) in x.chunks_exact(columns).enumerate() {
            let terms: f64 = x.iter().zip(&decoded).map(|(x, w)| (f64::from(*x) * f64::from(*w)).abs()).sum();
            let (found, exact) = (f64::from(plain[token * rows + row]), f64::from(exact[token * rows + row]));
            assert!((found - exact).abs() <= terms * tolerances::PRODUCT, "{what}: {found}, not {exact} of {terms}");
        }
    }
    for isa in Isa::available() {
        let backend = Cpu::new(isa);
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&product(&backend, matrix, &x)), bits(&plain), "{what}, {isa}");
        for token in [0, n / 2, n - 1] {
            let alone = product(&backend, matrix, &x[token * columns..][..columns]);
            assert_eq!(bits(&alone), bits(&plain[token * rows..][..rows]), "{what}, {isa}, row {token} alone");
        }
    }
}

#[test]
fn every_format_at_every_edge_of_a_chunk() {
    for format in formats() {
        for columns in [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 200] {
            check(&matrix(format, 5, columns, columns as u64), 3);
        }
    }
}

#[test]
fn every_number_of_rows() {
    for format in formats() {
        for n in [1, 2, 4, 5, 6, 7, 8, 16, 17, 97, 100] {
            check(&matrix(format, 7, 130, 5), n);
        }
        for rows in [1, 3, 4, 63, 64, 65, 130] {
            check(&matrix(format, rows, 70, 6), 1);
            check(&matrix(format, rows, 70, 6), 9);
        }
    }
}

#[test]
fn the_widths_of_glm() {
    for format in formats() {
        for columns in [512, 2048, 6144, 12288, 16384] {
            check(&matrix(format, 5, columns, 3), 2);
        }
        check(&matrix(format, 4, 6144, 3), 18);
    }
}

#[test]
fn threads_change_nothing() {
    for format in formats() {
        let (matrix, x) = (matrix(format, 300, 200, 1), numbers(2, 5 * 200));
        let backend = Cpu::default();
        let in_pool = |threads| {
            let pool = crate::threads::pool(threads, std::path::Path::new("")).unwrap();
            pool.install(|| product(&backend, &matrix, &x))
        };
        let one = in_pool(1);
        assert!(one == in_pool(2) && one == in_pool(3), "{format}");
    }
}

#[test]
fn no_rows_are_no_work() {
    let matrix = matrix(Format::Int4Row, 3, 64, 1);
    assert!(product(&Cpu::default(), &matrix, &[]).is_empty());
}

#[test]
fn every_e4m3_code_and_what_is_not_finite() {
    let mut codes: Vec<u8> = (0..=255).collect();
    codes.retain(|&code| !e4m3(code).is_nan());
    codes.resize(256, 0);
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    for isa in Isa::available() {
        let backend = Cpu::new(isa);
        let matrix = |codes: &[u8], scale| Matrix {
            rows: 1,
            columns: 256,
            format: Format::Fp8E4m3B128,
            codes: codes.to_vec(),
            scales: vec![scale, scale],
        };
        for (column, &code) in codes.iter().enumerate() {
            let mut x = vec![0.0; 256];
            x[column] = 1.0;
            for scale in [1.0, 1e-3, 3e38, 1e-42] {
                let expected = e4m3(code) * scale;
                // An infinite weight meets zeros of x.
                if expected.is_finite() && codes.iter().all(|&code| (e4m3(code) * scale).is_finite()) {
                    assert_eq!(product(&backend, &matrix(&codes, scale), &x), [expected], "{isa} {code:#x}");
                }
            }
        }
        for nan in [0x7f, 0xff] {
            let mut with_nan = codes.clone();
            with_nan[77] = nan;
            let out = product(&backend, &matrix(&with_nan, 1.0), &vec![1.0; 3 * 256]);
            assert!(out.iter().all(|value| value.is_nan()), "{isa}");
        }
        // A row of x that is not finite leaves the others alone.
        let (good, mut x) = (matrix(&codes, 0.5), numbers(4, 3 * 256));
        let before = product(&backend, &good, &x);
        (x[256 + 9], x[256 + 10]) = (f32::NAN, f32::INFINITY);
        let after = product(&backend, &good, &x);
        assert!(after[1].is_nan());
        assert_eq!(bits(vec![after[0], after[2]]), bits(vec![before[0], before[2]]), "{isa}");
    }
    for format in formats() {
        let mut matrix = matrix(format, 2, 70, 9);
        let at = if format == Format::Fp8E4m3B128 { 0 } else { matrix.scales.len() / 2 };
        match matrix.scales.get_mut(at) {
            Some(scale) => *scale = f32::INFINITY,
            None => matrix.codes[70 * 4..][..4].copy_from_slice(&f32::INFINITY.to_le_bytes()),
        }
        for isa in Isa::available() {
            let out = product(&Cpu::new(isa), &matrix, &numbers(1, 70));
            assert!(!out[1].is_finite() && (out[0].is_finite() || format == Format::Fp8E4m3B128), "{format} {isa}");
        }
    }
}

#[test]
fn a_format_without_a_decoder_is_refused_by_name() {
    for format in [Format::E8Iq3Lattice, Format::Mxfp4, Format::Int4Grouped { group_size: 0 }] {
        let matrix = Matrix { rows: 1, columns: 4, format, codes: vec![0; 98], scales: vec![1.0] };
        let message = Cpu::default().upload("w", matrix).unwrap_err().to_string();
        assert_eq!(message, format!("tensor w: the cpu backend does not compute {format}"));
    }
}

#[test]
fn attention_is_that_of_the_reference_row_by_row() {
    // One text that goes on, and several ways on from its beginning, one of which goes on itself.
    let ways = ways();
    for (format, places) in
        formats().into_iter().flat_map(|format| [(format, Places::after(10, 20)), (format, ways.clone())])
    {
        let (dense, chosen, sparse) = attended(&Reference::default(), &places, format);
        let plain = attended(&Cpu::new(Isa::Plain), &places, format);
        assert_eq!(plain.1, chosen);
        let largest = dense.iter().chain(&sparse).fold(0.0f32, |largest, value| largest.max(value.abs()));
        for (found, expected) in plain.0.iter().chain(&plain.2).zip(dense.iter().chain(&sparse)) {
            let apart = f64::from((found - expected).abs());
            assert!(apart <= f64::from(largest) * tolerances::ATTENTION, "{format}: {found}, not {expected}");
        }
        for isa in Isa::available() {
            assert_eq!(attended(&Cpu::new(isa), &places, format), plain, "{format} {isa}");
            let mut last = Places::new(27);
            last.add(1, &[0..1, 1..10, 16..27]);
            last.add(2, &[0..3, 7..9, 10..12]);
            let last = if places == ways { last } else { Places::after(27, 3) };
            let (dense, chosen, sparse) = attended(&Cpu::new(isa), &last, format);
            assert!(plain.0.ends_with(&dense) && plain.1.ends_with(&chosen) && plain.2.ends_with(&sparse));
        }
    }
}

#[test]
fn experts_are_those_of_the_reference_row_by_row() {
    for format in formats() {
        let exact = routed(&Reference::default(), format, 0..12);
        let plain = routed(&Cpu::new(Isa::Plain), format, 0..12);
        let largest = exact.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        for (found, expected) in plain.iter().zip(&exact) {
            let apart = f64::from((found - expected).abs());
            assert!(apart <= f64::from(largest) * tolerances::EXPERTS, "{format}: {found}, not {expected}");
        }
        for isa in Isa::available() {
            let backend = Cpu::new(isa);
            assert_eq!(routed(&backend, format, 0..12), plain, "{format} {isa}");
            let in_pieces =
                [routed(&backend, format, 0..1), routed(&backend, format, 1..5), routed(&backend, format, 5..12)];
            assert_eq!(in_pieces.concat(), plain, "{format} {isa}");
        }
    }
}
