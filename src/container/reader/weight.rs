//! Pairs codes with scales and resolves the format of each weight.

use std::collections::{BTreeMap, HashMap};

use super::{StoredWeight, Survey, apply};
use crate::container::resolve::resolve;
use crate::error::{FaultKind, Place};
use crate::format::{ByteCounts, Format};
use crate::header::StoredTensor;
use crate::roles::Class;
use crate::tensor::{Dtype, TensorName};

/// Ending of the names of scales.
const SCALES: &str = ".qs";

type Located = HashMap<TensorName, (usize, usize)>;

impl Survey {
    fn stored(&self, located: &Located, name: &str) -> Option<(usize, StoredTensor)> {
        let &(file, tensor) = located.get(name)?;
        Some((file, self.files[file].header.tensors()[tensor].clone()))
    }

    /// Makes a weight of each tensor that is not the scales of another, and checks how it is stored.
    pub(super) fn pair(&mut self, located: &Located, stamps: &BTreeMap<TensorName, String>) {
        let mut names: Vec<&TensorName> = located.keys().collect();
        names.sort_unstable();
        for name in names {
            if let Some(codes) = name.as_str().strip_suffix(SCALES) {
                let quantized = self.stored(located, codes).is_some_and(|(_, codes)| codes.dtype == Dtype::U8);
                if !quantized {
                    let place = self.place(located[name].0, name);
                    self.error(place, FaultKind::QuantizedScaleOrphan { codes: codes.into() });
                }
                continue;
            }
            let (file, codes) = self.stored(located, name.as_str()).expect("listed");
            let scales = self.stored(located, name.scales().as_str());
            let role = self.census.as_ref().and_then(|census| census.role(name.as_str())).cloned();
            let mut weight = StoredWeight { role, file, codes, scales, format: None, candidates: Vec::new() };
            self.check_weight(name, &mut weight, stamps.get(name).map(String::as_str));
            self.weights.insert(name.clone(), weight);
        }
    }

    fn check_weight(&mut self, name: &TensorName, weight: &mut StoredWeight, stamp: Option<&str>) {
        let place = self.place(weight.file, name);
        match weight.codes.dtype {
            Dtype::F32 | Dtype::BF16 | Dtype::F16 => self.check_raw(place, weight),
            Dtype::U8 => self.check_quantized(place, name, weight, stamp),
            found => {
                let matrix = weight.role.as_ref().is_none_or(|role| role.matrix);
                let expected = if matrix { "U8 (or F32)" } else { "F32" };
                self.error(place, FaultKind::StoredDtype { expected, found });
            }
        }
    }

    /// A tensor that is stored as plain numbers has the shape that config.json implies. One of another shape gets no
    /// format, so that nothing reads it.
    fn check_raw(&mut self, place: Place, weight: &mut StoredWeight) {
        let found = &weight.codes.shape;
        if let Some(expected) = weight.role.as_ref().map(|role| &role.shape).filter(|shape| *shape != found) {
            let kind = FaultKind::ShapeMismatch { expected: expected.clone(), found: found.clone() };
            return self.error(place, kind);
        }
        weight.format = Some(Format::F32);
    }

    fn check_quantized(&mut self, place: Place, name: &TensorName, weight: &mut StoredWeight, stamp: Option<&str>) {
        let Some((scale_file, scales)) = weight.scales.clone() else {
            return self.error(place, FaultKind::QuantizedScaleMissing { scales: name.scales() });
        };
        if weight.codes.shape.dims().len() != 1 {
            let kind = FaultKind::StoredShape { expected: weight.codes.bytes, found: weight.codes.shape.clone() };
            self.warning(place.clone(), kind);
        }
        if scale_file != weight.file {
            let (codes, scales) = (self.files[weight.file].name.clone(), self.files[scale_file].name.clone());
            self.warning(place.clone(), FaultKind::ScalesApart { codes, scales });
        }
        let scale_place = self.place(scale_file, &scales.name);
        if scales.dtype != Dtype::F32 {
            return self.error(scale_place, FaultKind::StoredDtype { expected: "F32", found: scales.dtype });
        }
        if scales.shape.dims().len() != 1 {
            let kind = FaultKind::StoredShape { expected: scales.bytes / 4, found: scales.shape.clone() };
            self.warning(scale_place, kind);
        }
        let Some(role) = weight.role.clone() else { return };
        let Some((rows, columns)) = role.shape.matrix().filter(|_| role.matrix) else {
            return self.error(place, FaultKind::StoredDtype { expected: "F32", found: weight.codes.dtype });
        };
        let bytes = ByteCounts { codes: weight.codes.bytes, scales: scales.bytes };
        let stamp = stamp.filter(|_| role.resident());
        let manifest = self.manifest_format(name);
        let resolution = resolve(rows, columns, bytes, manifest, stamp);
        apply(weight, &resolution);
        for (severity, kind) in resolution.findings {
            self.found(severity, place.clone(), kind);
        }
        if let (Class::Mtp, Some(format @ (Format::Int4Row | Format::Int2Row))) = (role.class, weight.format) {
            self.warning(place, FaultKind::HeadFormat { format });
        }
    }

    /// The format that the manifest gives a weight; that one does not exist is told with the manifest.
    fn manifest_format(&self, name: &TensorName) -> Option<Format> {
        let record = self.manifest.as_ref()?.tensors.get(name)?;
        Format::parse(&record.format, record.group_size)
    }
}
