//! The arithmetic that all quantizers share: one scale, one level.
//!
//! Source of the formulas: container format description, "Quantizers, bit for bit":
//!
//! ```text
//! amax = max |w| over the row or group
//! s    = max(amax / qmax, 1e-8)
//! q    = clamp(round_ties_even(w / s), -qmax - 1, qmax)
//! ```
//!
//! Every operation is one IEEE f32 operation in this order. Division and ties-to-even are part of the format: a product
//! with a reciprocal, or halves rounded away from zero, gives other bytes.

/// The smallest scale: a zero row has this one, and no quotient `w / s` overflows.
pub(super) const MIN_SCALE: f32 = 1e-8;

/// Largest magnitude in `values` (any length); 0 if there are none.
///
/// Values must be finite: then the bits of magnitudes are ordered as the magnitudes are.
pub(super) fn amax(values: &[f32]) -> f32 {
    f32::from_bits(values.iter().fold(0, |largest, value| largest.max(value.abs().to_bits())))
}

/// The step between two levels of a row or group whose largest magnitude is `amax`.
pub(super) fn scale(amax: f32, qmax: f32) -> f32 {
    (amax / qmax).max(MIN_SCALE)
}

/// The level of one element: an integer from `-qmax - 1` to `qmax`, to be multiplied by `scale`.
pub(super) fn level(value: f32, scale: f32, qmax: f32) -> i8 {
    (value / scale).round_ties_even().clamp(-qmax - 1.0, qmax) as i8
}

/// Quantizes `group`, whose elements share a scale, into as many `levels`, and returns the scale.
pub(super) fn quantize_group(group: &[f32], qmax: f32, levels: &mut [i8]) -> f32 {
    assert_eq!(levels.len(), group.len(), "one level an element");
    debug_assert!(group.iter().all(|value| value.is_finite()), "values must be finite");
    let scale = scale(amax(group), qmax);
    for (out, &value) in levels.iter_mut().zip(group) {
        *out = level(value, scale, qmax);
    }
    scale
}

/// The elements that `levels` of one group stand for: the level as f32 times the scale, one f32 multiply.
pub(super) fn dequantize_group(levels: &[i8], scale: f32, out: &mut [f32]) {
    assert_eq!(out.len(), levels.len(), "one element a level");
    for (out, &level) in out.iter_mut().zip(levels) {
        *out = f32::from(level) * scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amax_is_the_largest_magnitude() {
        assert_eq!(amax(&[]).to_bits(), 0);
        assert_eq!(amax(&[-0.0]).to_bits(), 0);
        assert_eq!(amax(&[1.0, -3.5, 2.0]), 3.5);
        let smallest = f32::from_bits(1);
        assert_eq!(amax(&[-smallest, 0.0]), smallest);
        assert_eq!(amax(&[f32::MIN, f32::MAX]), f32::MAX);
    }

    #[test]
    fn scales_are_quotients_and_at_least_1e_8() {
        assert_eq!(scale(7.0, 7.0), 1.0);
        assert_eq!(scale(0.0, 7.0), 1e-8);
        assert_eq!(scale(f32::from_bits(1), 1.0), 1e-8);
        assert_eq!(scale(7e-8, 7.0), 7e-8 / 7.0);
        // a product with 1/7 is another number
        let amax = 1.3;
        assert_eq!(scale(amax, 7.0), amax / 7.0);
        assert_ne!(scale(amax, 7.0), amax * (1.0 / 7.0));
    }

    #[test]
    fn halves_go_to_the_even_level() {
        for (value, expected) in [
            (0.5, 0),
            (1.5, 2),
            (2.5, 2),
            (3.5, 4),
            (5.5, 6),
            (6.5, 6),
            (-0.5, 0),
            (-1.5, -2),
            (-2.5, -2),
            (-6.5, -6),
            (0.5_f32.next_up(), 1),
            (0.5_f32.next_down(), 0),
            (2.5_f32.next_up(), 3),
            (1.5_f32.next_down(), 1),
            (-0.0, 0),
        ] {
            assert_eq!(level(value, 1.0, 7.0), expected, "{value}");
        }
    }

    #[test]
    fn levels_are_clamped_to_the_storage() {
        for qmax in [1.0, 3.0, 7.0, 127.0] {
            assert_eq!(f32::from(level(1e30, 1e-8, qmax)), qmax);
            assert_eq!(f32::from(level(-1e30, 1e-8, qmax)), -qmax - 1.0);
            assert_eq!(f32::from(level(qmax, 1.0, qmax)), qmax);
            assert_eq!(f32::from(level(-qmax, 1.0, qmax)), -qmax);
        }
    }

    /// The quotient of the largest element and its scale may round to just above qmax, the level never does: this is why
    /// the clamp, and the smallest storable level, are out of reach.
    #[test]
    fn the_largest_element_has_the_largest_level() {
        for qmax in [1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 127.0] {
            // Every 997th float above the smallest scale, through all binades, and the last one.
            let smallest = (MIN_SCALE * qmax).to_bits();
            for bits in (smallest..=f32::MAX.to_bits()).step_by(997).chain([f32::MAX.to_bits()]) {
                let amax = f32::from_bits(bits);
                let quotient = amax / scale(amax, qmax);
                assert_eq!(quotient.round_ties_even(), qmax, "{amax:e} over {qmax}");
            }
        }
    }
}
