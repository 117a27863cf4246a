//! BF16 and F16 to f32. Both widen exactly.

use half::{bf16, f16};

/// `stored` [2 · n] little-endian bf16 → `out` [n].
pub(super) fn bf16_row(stored: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(stored.as_chunks().0) {
        *out = bf16::from_le_bytes(*bytes).to_f32();
    }
}

/// `stored` [2 · n] little-endian IEEE binary16 → `out` [n].
pub(super) fn f16_row(stored: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(stored.as_chunks().0) {
        *out = f16::from_le_bytes(*bytes).to_f32();
    }
}
