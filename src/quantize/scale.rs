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
