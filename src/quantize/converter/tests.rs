//! Every instruction set that this CPU has against the plain versions, bit for bit.

use super::*;
use crate::dequantize::fp8::e4m3;
use proptest::prelude::*;

const QUANTIZERS: [Quantizer; 17] = [
    Quantizer::F32,
    Quantizer::Int8Row { bits: 8 },
    Quantizer::Int8Row { bits: 7 },
    Quantizer::Int8Row { bits: 6 },
    Quantizer::Int8Row { bits: 5 },
    Quantizer::Int4Row,
    Quantizer::Int4Grouped { group_size: 1 },
    Quantizer::Int4Grouped { group_size: 16 },
    Quantizer::Int4Grouped { group_size: 32 },
    Quantizer::Int4Grouped { group_size: 33 },
    Quantizer::Int4Grouped { group_size: 48 },
    Quantizer::Int4Grouped { group_size: 64 },
    Quantizer::Int4Grouped { group_size: 96 },
    Quantizer::Int4Grouped { group_size: 128 },
    Quantizer::Int4Grouped { group_size: 200 },
    Quantizer::Int3G64,
    Quantizer::Int2Row,
];

const DTYPES: [SourceDtype; 4] = [SourceDtype::Fp8E4m3, SourceDtype::Bf16, SourceDtype::F16, SourceDtype::F32];

/// Compares all instruction sets on one row with dequantizing and quantizing; tells whether its values were finite.
fn check(quantizer: Quantizer, dtype: SourceDtype, stored: &[u8], block_scales: &[f32]) -> bool {
    let columns = stored.len() / dtype.bytes();
    let (mut codes, mut scales) =
        (vec![0; quantizer.row_code_bytes(columns)], vec![0.0; quantizer.row_scales(columns)]);
    let mut values = vec![0.0; columns];
    dtype.dequantize_row(stored, block_scales, &mut values);
    let finite = first_non_finite(&values).is_none();
    if finite {
        quantizer.quantize_row(&values, &mut codes, &mut scales);
    }
    for isa in Isa::available() {
        let (mut found_codes, mut found_scales) = (vec![0x5a; codes.len()], vec![f32::NAN; scales.len()]);
        let mut converter = Converter::new(quantizer, dtype, columns, isa);
        let result = converter.convert_row(stored, block_scales, &mut found_codes, &mut found_scales);
        let what = || format!("{quantizer:?} of {dtype:?} [{columns}], {isa}");
        assert_eq!(result.is_ok(), finite, "{}", what());
        if quantizer != Quantizer::F32 {
            let mut alone = vec![f32::NAN; scales.len()];
            assert_eq!(converter.scales_row(stored, block_scales, &mut alone).is_ok(), finite, "{}", what());
            let same = alone.iter().zip(&scales).all(|(alone, scale)| alone.to_bits() == scale.to_bits());
            assert!(!finite || same, "{}: scales alone are others", what());
        }
        if finite {
            let bits = |scales: &[f32]| scales.iter().map(|scale| scale.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&found_scales), bits(&scales), "{}", what());
            if let Some(place) = found_codes.iter().zip(&codes).position(|(found, code)| found != code) {
                let (found, code) = (found_codes[place], codes[place]);
                panic!("{}: byte {place} is {found:#04x}, not {code:#04x}", what());
            }
        }
    }
    finite
}

/// Elements of `dtype` nearest to these values.
fn stored(dtype: SourceDtype, values: &[f32]) -> Vec<u8> {
    let nearest = |value: f32| {
        let code = (0..0x7f).find(|&code| e4m3(code + 1).is_nan() || e4m3(code + 1) > value.abs()).unwrap_or(0x7e);
        code | u8::from(value.is_sign_negative()) << 7
    };
    match dtype {
        SourceDtype::Fp8E4m3 => values.iter().map(|&value| nearest(value)).collect(),
        SourceDtype::Bf16 => values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect(),
        SourceDtype::F16 => values.iter().flat_map(|&value| half::f16::from_f32(value).to_le_bytes()).collect(),
        SourceDtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

/// xorshift64*, for tables that would be long as properties.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A float with any significand and an exponent of that range.
    fn float(&mut self, exponents: std::ops::Range<i32>) -> f32 {
        let exponent = exponents.start + (self.next() >> 33) as i32 % (exponents.end - exponents.start);
        f32::from_bits(((exponent + 127) as u32) << 23 | (self.next() >> 41) as u32)
    }
}

/// No instruction set is passed over: each has a kernel, and it does the work of ordinary rows itself.
#[test]
fn every_instruction_set_does_the_work() {
    for isa in Isa::available() {
        for (quantizer, dtype) in QUANTIZERS.into_iter().flat_map(|q| DTYPES.map(|dtype| (q, dtype))) {
            let converter = Converter::new(quantizer, dtype, 300, isa);
            let kernel = match (isa, converter.kernel) {
                (Isa::Plain, None) => continue,
                (Isa::Avx2(_), Some(kernel @ simd::Kernel::Avx2(..))) => kernel,
                (Isa::Avx512(_), Some(kernel @ simd::Kernel::Avx512(..))) => kernel,
                (isa, kernel) => panic!("{isa} has {kernel:?}"),
            };
            let row = simd::Row {
                stored: &stored(dtype, &[0.3; 300]),
                block_scales: &[1e-3; 3][..dtype.row_scales(300)],
                codes: &mut vec![0x5a; quantizer.row_code_bytes(300)],
                scales: &mut vec![0.0; quantizer.row_scales(300)],
            };
            assert_eq!(kernel.convert(converter.rows, row), simd::Outcome::Done, "{quantizer:?} of {dtype:?}, {isa}");
        }
    }
}

/// A row whose largest magnitude is `amax`, then all that may be close to a tie of every level: k + ½ steps, and floats
/// up to three beside it.
fn ties(amax: f32, qmax: f32) -> Vec<f32> {
    let scale = (amax / qmax).max(1e-8);
    let mut row = vec![amax];
    for level in 0..qmax as i32 {
        let tie = (f64::from(scale) * (f64::from(level) + 0.5)) as f32;
        let near = (-3..=3).map(|off: i32| f32::from_bits(tie.to_bits().saturating_add_signed(off)));
        row.extend(near.filter(|value| *value <= amax).flat_map(|value| [value, -value]));
    }
    row
}

#[test]
fn ties_and_their_neighbours() {
    let mut random = Random(1);
    for quantizer in QUANTIZERS {
        let qmax = match quantizer {
            Quantizer::F32 | Quantizer::Int4Grouped { .. } => continue,
            Quantizer::Int8Row { bits } => int8_row::qmax(bits),
            Quantizer::Int4Row => 7.0,
            Quantizer::Int3G64 => 3.0,
            Quantizer::Int2Row => 1.0,
        };
        let mut amaxes: Vec<f32> = (0..20_000 / qmax as usize).map(|_| random.float(-30..97)).collect();
        for exponent in [-26, -20, -1, 0, 1, 60, 95] {
            // Significands at the ends, where quotient and reciprocal are rounded most.
            let power = 2f32.powi(exponent);
            amaxes.extend([power, power.next_up(), power.next_down(), power * 1.5, (power * qmax).next_down()]);
            amaxes.extend((1..40).map(|off| f32::from_bits(power.to_bits() - off)));
            amaxes.extend((1..40).map(|off| f32::from_bits((power * qmax).to_bits() - off)));
        }
        for amax in amaxes {
            let row = ties(amax, qmax);
            // Every group needs its largest magnitude.
            for part in row.chunks(if quantizer == Quantizer::Int3G64 { 63 } else { row.len() }) {
                let part: Vec<f32> = part.iter().copied().chain([amax]).collect();
                assert!(check(quantizer, SourceDtype::F32, &stored(SourceDtype::F32, &part), &[]));
            }
        }
    }
}

/// The same where groups are many: each has other ties.
#[test]
fn ties_of_groups() {
    let mut random = Random(2);
    for group_size in [16, 33, 48, 64, 96, 128, 200] {
        for _ in 0..200 {
            let groups = (0..7).map(|_| ties(random.float(-24..30), 7.0));
            let row: Vec<f32> = groups.flat_map(|ties| ties.into_iter().cycle().take(group_size)).collect();
            let length = row.len() - (random.next() >> 60) as usize;
            assert!(check(
                Quantizer::Int4Grouped { group_size },
                SourceDtype::F32,
                &stored(SourceDtype::F32, &row[..length]),
                &[]
            ));
        }
    }
}

/// All codes with all kinds of block scales, in every format: for every largest code, so that every quotient occurs.
#[test]
fn all_fp8_codes() {
    let mut scales = vec![0.0, -0.0, 1.0, -1.0, 1e-8, -2.5e-4, 7e-8, 3e-9 / 448.0];
    // Subnormal, tiny, about the smallest scale, huge, and what overflows.
    scales.extend([1e-45, 1e-40, f32::MIN_POSITIVE, 1e-30, 1e-10, 2.2e-11, 1e20, 1e28, 1e29, 7e35, 1e38, f32::MAX]);
    let mut random = Random(3);
    scales.extend((0..12).map(|_| random.float(-14..-8)));
    for scale in scales {
        for largest in 0..=0x7e {
            let codes: Vec<u8> = (0..=largest).flat_map(|code| [code, code | 0x80]).collect();
            let block_scales = [scale, scale];
            for quantizer in [
                Quantizer::Int8Row { bits: 8 },
                Quantizer::Int4Row,
                Quantizer::Int4Grouped { group_size: 64 },
                Quantizer::Int3G64,
                Quantizer::Int2Row,
                Quantizer::F32,
            ] {
                // In a group of 64 the largest code stands with all others in turn.
                let row: Vec<u8> = match quantizer {
                    Quantizer::Int4Grouped { .. } | Quantizer::Int3G64 => {
                        codes.chunks(63).flat_map(|part| part.iter().copied().chain([largest])).take(256).collect()
                    }
                    _ => codes.clone(),
                };
                check(quantizer, SourceDtype::Fp8E4m3, &row, &block_scales[..row.len().div_ceil(128)]);
            }
        }
    }
}

/// Rows that hold every half with the same exponent or a smaller one.
#[test]
fn all_halves() {
    for (dtype, mantissa_bits, infinity) in [(SourceDtype::Bf16, 7, 0x7f80_u16), (SourceDtype::F16, 10, 0x7c00)] {
        for quantizer in QUANTIZERS {
            let mut rows = 0;
            for first in (0..infinity).step_by(1 << mantissa_bits) {
                let binade = first..first + (1 << mantissa_bits);
                // Two binades below, every fourth of them.
                let below = (first.saturating_sub(2 << mantissa_bits)..first).step_by(4);
                let row: Vec<u8> = binade
                    .rev()
                    .chain(below)
                    .flat_map(|half| [half, half | 0x8000])
                    .flat_map(u16::to_le_bytes)
                    .collect();
                rows += usize::from(check(quantizer, dtype, &row, &[]));
            }
            assert_eq!(rows, usize::from(infinity >> mantissa_bits));
        }
        for half in (infinity..0x8000).flat_map(|half| [half, half | 0x8000]) {
            let row: Vec<u8> = [0x1234, half, 0x8001].into_iter().flat_map(u16::to_le_bytes).collect();
            assert!(!check(Quantizer::Int4Row, dtype, &row, &[]));
        }
    }
}

/// One value that is not finite, at any place of a row, is found; and so is a scale, and a product.
#[test]
fn what_is_not_finite_is_told() {
    for columns in [1, 2, 63, 64, 65, 127, 128, 129, 191, 300] {
        for (dtype, bytes) in [
            (SourceDtype::Fp8E4m3, &[0x7f][..]),
            (SourceDtype::Fp8E4m3, &[0xff]),
            (SourceDtype::Bf16, &[0x80, 0x7f]),
            (SourceDtype::F16, &[0x01, 0xfc]),
            (SourceDtype::F32, &[0, 0, 0x80, 0xff]),
        ] {
            let scales = [0.5, -0.25, 0.125];
            for place in 0..columns {
                let mut row = stored(dtype, &vec![0.75; columns]);
                row[place * dtype.bytes()..][..dtype.bytes()].copy_from_slice(bytes);
                for quantizer in [Quantizer::F32, Quantizer::Int8Row { bits: 8 }, Quantizer::Int3G64] {
                    assert!(!check(quantizer, dtype, &row, &scales[..dtype.row_scales(columns)]));
                }
            }
        }
    }
    for quantizer in QUANTIZERS {
        for (scale, finite) in
            [(f32::NAN, false), (f32::INFINITY, false), (f32::NEG_INFINITY, false), (f32::MAX, false), (7e35, true)]
        {
            for block in 0..3 {
                let mut scales = [0.5; 3];
                scales[block] = scale;
                assert_eq!(check(quantizer, SourceDtype::Fp8E4m3, &[0x7e; 300], &scales), finite, "{scale}");
            }
            // Zeros stay zeros under the largest scale, and are none under infinity.
            let zeros = check(quantizer, SourceDtype::Fp8E4m3, &[0x80; 300], &[1.0, 1.0, scale]);
            assert_eq!(zeros, scale.is_finite());
        }
    }
}

#[test]
fn every_width_up_to_200() {
    let mut random = Random(4);
    for columns in 0..=200 {
        let values: Vec<f32> = (0..columns).map(|_| (random.next() % 900) as f32 - 450.0).collect();
        for (quantizer, dtype) in QUANTIZERS.into_iter().flat_map(|q| DTYPES.map(|dtype| (q, dtype))) {
            let scales = [-3e-4, 7e-4];
            assert!(check(quantizer, dtype, &stored(dtype, &values), &scales[..dtype.row_scales(columns)]));
        }
    }
}

#[test]
fn rows_as_wide_as_real_ones() {
    let mut random = Random(5);
    for columns in [2048, 6144, 12_289] {
        let values: Vec<f32> = (0..columns).map(|_| (random.next() % 9001) as f32 / 10.0 - 450.0).collect();
        let scales: Vec<f32> = (0usize..columns).step_by(128).map(|_| random.float(-13..-9)).collect();
        for (quantizer, dtype) in QUANTIZERS.into_iter().flat_map(|q| DTYPES.map(|dtype| (q, dtype))) {
            assert!(check(quantizer, dtype, &stored(dtype, &values), &scales[..dtype.row_scales(columns)]));
        }
    }
}

#[test]
#[should_panic(expected = "scales of a row of 129 as Fp8E4m3")]
fn too_few_block_scales_panic() {
    let mut converter = Converter::new(Quantizer::Int4Row, SourceDtype::Fp8E4m3, 129, Isa::detect());
    let _ = converter.convert_row(&[0; 129], &[1.0], &mut [0; 65], &mut [0.0]);
}

#[test]
#[should_panic(expected = "bytes of codes of a row of 5 as int4-row")]
fn codes_of_another_length_panic() {
    let mut converter = Converter::new(Quantizer::Int4Row, SourceDtype::Bf16, 5, Isa::detect());
    let _ = converter.convert_row(&[0; 10], &[], &mut [0; 2], &mut [0.0]);
}

fn quantizer() -> impl Strategy<Value = Quantizer> {
    prop_oneof![
        3 => prop::sample::select(QUANTIZERS.to_vec()),
        1 => (1usize..=300).prop_map(|group_size| Quantizer::Int4Grouped { group_size }),
    ]
}

/// Block scales: any bits; as in checkpoints; of one sign or the other with any exponent.
fn block_scale() -> impl Strategy<Value = f32> {
    prop_oneof![
        1 => any::<f32>(),
        8 => 1e-5f32..1e-2,
        4 => (any::<bool>(), 0u32..0xff, 0u32..1 << 23)
            .prop_map(|(sign, exponent, fraction)| f32::from_bits(u32::from(sign) << 31 | exponent << 23 | fraction)),
    ]
}

/// Bytes of a row: any; or any whose values are finite, with exponents from all over or from close together.
fn row(dtype: SourceDtype) -> impl Strategy<Value = Vec<u8>> {
    let bytes = dtype.bytes();
    let any_bytes = (0usize..300).prop_flat_map(move |columns| prop::collection::vec(any::<u8>(), columns * bytes));
    let keep_finite = move |mut row: Vec<u8>, mask: u8| {
        for element in row.chunks_exact_mut(bytes) {
            let last = element.len() - 1;
            match dtype {
                SourceDtype::Fp8E4m3 if element[0] & 0x7f == 0x7f => element[0] ^= 1,
                SourceDtype::Fp8E4m3 => {}
                SourceDtype::F16 => element[last] &= if element[last] & 0x7c == 0x7c { 0xbf } else { 0xff },
                // The exponents of a row agree in their upper bits, or any does.
                SourceDtype::Bf16 | SourceDtype::F32 => {
                    element[last] = if mask == 0 { element[last] & 0x87 | 0x38 } else { element[last] };
                    element[last] &= if element[last] & 0x7f == 0x7f { 0xbf } else { 0xff };
                }
            }
        }
        row
    };
    prop_oneof![
        1 => any_bytes.clone(),
        6 => (any_bytes, 0u8..2).prop_map(move |(row, mask)| keep_finite(row, mask)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn all_are_the_plain_version(
        (dtype, row) in prop::sample::select(DTYPES.to_vec()).prop_flat_map(|dtype| (Just(dtype), row(dtype))),
        quantizer in quantizer(),
        scales in prop::collection::vec(block_scale(), 3),
    ) {
        check(quantizer, dtype, &row, &scales[..dtype.row_scales(row.len() / dtype.bytes())]);
    }
}
