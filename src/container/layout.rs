//! Where every byte of a weight file goes, known before the first is written.

use std::collections::BTreeMap;

use crate::format::Format;
use crate::header::{self, StoredTensor};
use crate::tensor::{Dtype, Shape, TensorName};

/// A weight as it is to be stored.
#[derive(Debug, Clone)]
pub struct PlannedWeight {
    /// Its name.
    pub name: TensorName,
    /// Logical shape.
    pub shape: Shape,
    /// Stored format; of a matrix, unless it is f32.
    pub format: Format,
}

impl PlannedWeight {
    /// Dtype, shape and bytes of the tensor `X`, and bytes of `X.qs` (0 for none); `None` beyond 64 bits.
    fn stored(&self) -> Option<(Dtype, Shape, u64, u64)> {
        match self.shape.matrix() {
            Some((rows, columns)) if self.format != Format::F32 => {
                let codes = self.format.code_bytes(rows, columns)?;
                Some((Dtype::U8, [codes].into(), codes, self.format.scale_bytes(rows, columns)?))
            }
            _ => Some((Dtype::F32, self.shape.clone(), self.shape.bytes(Dtype::F32)?, 0)),
        }
    }
}

/// The layout of one file.
#[derive(Debug, Clone)]
pub struct FileLayout {
    /// The first bytes of the file: length and header.
    pub head: Vec<u8>,
    /// The tensors in data order; offsets count from the start of the file.
    pub tensors: Vec<StoredTensor>,
    /// Size of the file.
    pub bytes: u64,
    /// For each weight, the indices in `tensors` of `X` and of `X.qs`.
    pub places: Vec<(usize, Option<usize>)>,
}

impl FileLayout {
    /// Lays out weights: all F32 tensors by name, then all U8 tensors by name, without gaps.
    /// `None` where sizes leave 64 bits.
    pub fn new(weights: &[PlannedWeight], metadata: Option<&BTreeMap<String, String>>) -> Option<FileLayout> {
        let mut tensors = Vec::with_capacity(2 * weights.len());
        for (number, weight) in weights.iter().enumerate() {
            let (dtype, shape, bytes, scale_bytes) = weight.stored()?;
            tensors.push((StoredTensor { name: weight.name.clone(), dtype, shape, offset: 0, bytes }, number, false));
            if scale_bytes > 0 || dtype == Dtype::U8 {
                let shape = Shape::from([scale_bytes / 4]);
                let name = weight.name.scales();
                let scales = StoredTensor { name, dtype: Dtype::F32, shape, offset: 0, bytes: scale_bytes };
                tensors.push((scales, number, true));
            }
        }
        tensors.sort_by(|(a, ..), (b, ..)| (a.dtype == Dtype::U8, &a.name).cmp(&(b.dtype == Dtype::U8, &b.name)));
        let mut places = vec![(0, None); weights.len()];
        let mut end: u64 = 0;
        for (index, (tensor, number, is_scales)) in tensors.iter_mut().enumerate() {
            tensor.offset = end;
            end = end.checked_add(tensor.bytes)?;
            if *is_scales {
                places[*number].1 = Some(index);
            } else {
                places[*number].0 = index;
            }
        }
        let mut tensors: Vec<StoredTensor> = tensors.into_iter().map(|(tensor, ..)| tensor).collect();
        let head = header::encode(metadata, &tensors);
        for tensor in &mut tensors {
            tensor.offset += head.len() as u64;
        }
        let bytes = end.checked_add(head.len() as u64)?;
        Some(FileLayout { head, tensors, bytes, places })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::Header;

    #[test]
    fn f32_before_u8_each_by_name_without_gaps() {
        let weight = |name: &str, shape: &[u64], format| PlannedWeight {
            name: name.into(),
            shape: shape.to_vec().into(),
            format,
        };
        let weights = [
            weight("b", &[3, 5], Format::Int4Row),
            weight("a.norm", &[7], Format::F32),
            weight("a", &[2, 2], Format::Int8Row),
            weight("c", &[2, 3], Format::F32),
        ];
        let layout = FileLayout::new(&weights, None).unwrap();
        let names: Vec<&str> = layout.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["a.norm", "a.qs", "b.qs", "c", "a", "b"]);
        assert_eq!(layout.places, [(5, Some(2)), (0, None), (4, Some(1)), (3, None)]);
        assert_eq!(layout.bytes - layout.head.len() as u64, 28 + 8 + 12 + 24 + 4 + 9);
        let header = Header::parse(std::path::Path::new("f"), &layout.head[8..], layout.bytes).unwrap();
        assert_eq!(header.tensors(), layout.tensors);
    }
}
