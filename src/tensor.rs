//! Names, shapes and element types of tensors.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::escaped;

/// A tensor's name: ordered bytewise, escaped when displayed, never used as a path.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct TensorName(Arc<str>);

impl TensorName {
    /// The name as stored.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of the scales that belong to a quantized matrix of a container: `X.qs`.
    pub fn scales(&self) -> TensorName {
        TensorName(format!("{}.qs", self.0).into())
    }
}

impl From<&str> for TensorName {
    fn from(name: &str) -> Self {
        TensorName(name.into())
    }
}

impl From<String> for TensorName {
    fn from(name: String) -> Self {
        TensorName(name.into())
    }
}

impl Borrow<str> for TensorName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        escaped(&self.0).fmt(f)
    }
}

impl fmt::Debug for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

/// Element types that a safetensors header can name, spelled as there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[allow(non_camel_case_types, missing_docs)]
pub enum Dtype {
    BOOL,
    F4,
    F6_E2M3,
    F6_E3M2,
    U8,
    I8,
    F8_E5M2,
    F8_E4M3,
    F8_E8M0,
    F8_E4M3FNUZ,
    F8_E5M2FNUZ,
    I16,
    U16,
    F16,
    BF16,
    I32,
    U32,
    F32,
    C64,
    F64,
    I64,
    U64,
}

impl Dtype {
    /// All element types, in the order of the enumeration.
    pub const ALL: [Dtype; 22] = [
        Dtype::BOOL,
        Dtype::F4,
        Dtype::F6_E2M3,
        Dtype::F6_E3M2,
        Dtype::U8,
        Dtype::I8,
        Dtype::F8_E5M2,
        Dtype::F8_E4M3,
        Dtype::F8_E8M0,
        Dtype::F8_E4M3FNUZ,
        Dtype::F8_E5M2FNUZ,
        Dtype::I16,
        Dtype::U16,
        Dtype::F16,
        Dtype::BF16,
        Dtype::I32,
        Dtype::U32,
        Dtype::F32,
        Dtype::C64,
        Dtype::F64,
        Dtype::I64,
        Dtype::U64,
    ];

    /// Element size in bits.
    pub fn bits(self) -> u64 {
        match self {
            Dtype::F4 => 4,
            Dtype::F6_E2M3 | Dtype::F6_E3M2 => 6,
            Dtype::BOOL
            | Dtype::U8
            | Dtype::I8
            | Dtype::F8_E5M2
            | Dtype::F8_E4M3
            | Dtype::F8_E8M0
            | Dtype::F8_E4M3FNUZ
            | Dtype::F8_E5M2FNUZ => 8,
            Dtype::I16 | Dtype::U16 | Dtype::F16 | Dtype::BF16 => 16,
            Dtype::I32 | Dtype::U32 | Dtype::F32 => 32,
            Dtype::C64 | Dtype::F64 | Dtype::I64 | Dtype::U64 => 64,
        }
    }

    /// The element type of that spelling, if there is one.
    pub fn parse(name: &str) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| dtype.to_string() == name)
    }

    /// Whether the colibri engine opens a file that holds this element type.
    pub fn engine_reads(self) -> bool {
        matches!(
            self,
            Dtype::BF16
                | Dtype::F16
                | Dtype::F32
                | Dtype::U8
                | Dtype::I8
                | Dtype::F8_E4M3
                | Dtype::F8_E8M0
                | Dtype::I64
                | Dtype::U64
        )
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A tensor's dimensions, outermost first; empty for a scalar.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Shape(Vec<u64>);

impl Shape {
    /// The dimensions.
    pub fn dims(&self) -> &[u64] {
        &self.0
    }

    /// Product of the dimensions (1 for a scalar), or `None` beyond 64 bits.
    pub fn elements(&self) -> Option<u64> {
        // A zero anywhere makes the product zero, however large the others are.
        if self.0.contains(&0) {
            return Some(0);
        }
        self.0.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))
    }

    /// Bytes that a tensor of this shape and type takes, or `None` beyond 64 bits or where the bits fill no whole bytes.
    pub fn bytes(&self, dtype: Dtype) -> Option<u64> {
        let bits = self.elements()?.checked_mul(dtype.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// `[rows, columns]` of a matrix.
    pub fn matrix(&self) -> Option<(u64, u64)> {
        match self.0[..] {
            [rows, columns] => Some((rows, columns)),
            _ => None,
        }
    }
}

impl From<Vec<u64>> for Shape {
    fn from(dims: Vec<u64>) -> Self {
        Shape(dims)
    }
}

impl<const N: usize> From<[u64; N]> for Shape {
    fn from(dims: [u64; N]) -> Self {
        Shape(dims.to_vec())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, dim) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]")
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtype_names_round_trip() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::parse(&dtype.to_string()), Some(dtype));
        }
        assert_eq!(Dtype::parse("f32"), None);
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(Shape::from([]).bytes(Dtype::F32), Some(4));
        assert_eq!(Shape::from([0, u64::MAX, 2]).bytes(Dtype::F32), Some(0));
        assert_eq!(Shape::from([u64::MAX, 2]).elements(), None);
        assert_eq!(Shape::from([1 << 61, 4]).bytes(Dtype::F64), None);
        assert_eq!(Shape::from([3]).bytes(Dtype::F4), None);
        assert_eq!(Shape::from([3, 5]).to_string(), "[3, 5]");
    }

    #[test]
    fn names_are_escaped_when_shown() {
        assert_eq!(TensorName::from("a\n\u{1b}[31m").to_string(), "a\\n\\u{1b}[31m");
    }
}
