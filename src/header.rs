//! The header of a .safetensors file: read, validated once, and written.
//!
//! [`Header::parse`] is the only way to a [`Header`], so whoever holds one knows: names are unique, every tensor lies
//! inside the file, spans match dtype and shape, and the data are covered without overlap, gap or tail.
//! The safetensors crate merges duplicate names silently, hence a reader of our own; the writer's output is checked
//! against that crate.

use std::collections::BTreeMap;
use std::path::Path;

use byteorder::{ByteOrder, LittleEndian};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::error::{Fault, FaultKind, Faults, Place, Result, is_unprintable};
use crate::io::SourceFile;
use crate::json::Object;
use crate::limits;
use crate::tensor::{Dtype, Shape, TensorName};

/// Key of the free-form strings in a header.
pub const METADATA: &str = "__metadata__";

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// Its name.
    pub name: TensorName,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Shape,
    /// First byte in the file.
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// A validated header.
#[derive(Debug, Clone)]
pub struct Header {
    tensors: Vec<StoredTensor>,
    metadata: Option<BTreeMap<String, String>>,
    file_bytes: u64,
    sha256: [u8; 32],
    misaligned: Option<usize>,
    unprintable: Vec<usize>,
}

/// What a Git LFS pointer begins with, where a header's length should be.
const GIT_LFS: &[u8; 8] = b"version ";

impl Header {
    /// Reads and validates the header of an open file; limits are checked before anything is allocated.
    pub fn read(file: &SourceFile) -> Result<Header, Faults> {
        let place = || Place::file(file.path());
        let fail = |kind| Err(Fault::new(place(), kind).into());
        let file_bytes = file.bytes();
        if file_bytes < 8 {
            return fail(FaultKind::HeaderTruncated { file_bytes });
        }
        let mut length = [0; 8];
        file.read_at(&mut length, 0)?;
        if length == *GIT_LFS {
            return fail(FaultKind::GitLfsPointer);
        }
        let length = u64::from_le_bytes(length);
        if length > limits::MAX_HEADER_BYTES {
            return fail(FaultKind::HeaderTooLarge { found: length, limit: limits::MAX_HEADER_BYTES });
        }
        if length > file_bytes - 8 {
            return fail(FaultKind::HeaderLength { found: length, available: file_bytes - 8 });
        }
        let mut text = vec![0; length as usize];
        file.read_at(&mut text, 8)?;
        Header::parse(file.path(), &text, file_bytes)
    }

    /// Validates the text of a header (without its length) of a file of `file_bytes`; `path` is for messages only.
    pub fn parse(path: &Path, text: &[u8], file_bytes: u64) -> Result<Header, Faults> {
        let members = members(path, text)?;
        let twice = |name| match name {
            METADATA => Fault::new(Place::file(path), FaultKind::MetadataTwice),
            name => Fault::new(Place::tensor(path, name), FaultKind::DuplicateInHeader),
        };
        let mut faults: Vec<Fault> = members.duplicates().into_iter().map(twice).collect();
        let data_start = 8 + text.len() as u64;
        let data_bytes = file_bytes.saturating_sub(data_start);
        let mut tensors = Vec::with_capacity(members.0.len());
        let mut metadata = None;
        for (name, value) in &members.0 {
            if name == METADATA {
                match strings(value.get()) {
                    Ok(strings) => metadata = Some(strings),
                    Err(kind) => faults.push(Fault::new(Place::file(path), kind)),
                }
                continue;
            }
            match entry(name, value.get(), data_start) {
                Ok(tensor) => tensors.push(tensor),
                Err(kind) => faults.push(Fault::new(Place::tensor(path, name.as_str()), kind)),
            }
        }
        if faults.is_empty() {
            tensors.sort_by(|a, b| (a.offset, a.bytes, &a.name).cmp(&(b.offset, b.bytes, &b.name)));
            check_cover(path, &tensors, data_start, data_bytes, &mut faults);
        }
        Faults::check(faults)?;
        let misaligned =
            tensors.iter().position(|t| t.bytes > 0 && !t.offset.is_multiple_of(t.dtype.bits().div_ceil(8)));
        let unprintable = |t: &StoredTensor| t.name.as_str().chars().any(is_unprintable);
        let unprintable = (0..tensors.len()).filter(|&t| unprintable(&tensors[t])).collect();
        let sha256 = Sha256::digest(text).into();
        Ok(Header { tensors, metadata, file_bytes, sha256, misaligned, unprintable })
    }

    /// The tensors in the order of their data.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// The free-form strings, if there are any.
    pub fn metadata(&self) -> Option<&BTreeMap<String, String>> {
        self.metadata.as_ref()
    }

    /// Size of the whole file.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// SHA-256 of the header's text.
    pub fn sha256(&self) -> [u8; 32] {
        self.sha256
    }

    /// What is unusual but read all the same: data that do not start at a multiple of their element size.
    pub fn misaligned(&self, path: &Path) -> Option<Fault> {
        let StoredTensor { name, dtype, offset, .. } = &self.tensors[self.misaligned?];
        let kind = FaultKind::Misaligned { dtype: *dtype, offset: *offset, alignment: dtype.bits().div_ceil(8) };
        Some(Fault::new(Place::tensor(path, name.clone()).at(*offset), kind))
    }

    /// Names that are read and must be escaped to be shown.
    pub fn odd_names(&self, path: &Path) -> Vec<Fault> {
        let fault =
            |&t: &usize| Fault::new(Place::tensor(path, self.tensors[t].name.clone()), FaultKind::NameUnprintable);
        self.unprintable.iter().map(fault).collect()
    }
}

/// The object of the header's text: UTF-8, `{` first, spaces only behind it.
fn members<'a>(path: &Path, text: &'a [u8]) -> Result<Object<'a>> {
    let fail = |kind| Fault::new(Place::file(path), kind);
    let text = std::str::from_utf8(text)
        .map_err(|e| Fault::new(Place::file(path).at(8 + e.valid_up_to() as u64), FaultKind::HeaderNotUtf8))?;
    if !text.starts_with('{') {
        return Err(fail(FaultKind::HeaderNotObject { found: text.chars().next() }));
    }
    let end = text.trim_end_matches(' ').len();
    if let Some(&found @ (0..=b' ' | 0x7f)) = text.as_bytes()[..end].last() {
        return Err(Fault::new(Place::file(path).at(7 + end as u64), FaultKind::HeaderPadding { found }));
    }
    let members = Object::parse(&text[..end])
        .map_err(|e| Fault::new(Place::file(path), FaultKind::HeaderSyntax { message: e.to_string() }))?;
    if members.0.len() > limits::MAX_TENSORS_PER_FILE {
        let kind = FaultKind::TooManyTensors { found: members.0.len(), limit: limits::MAX_TENSORS_PER_FILE };
        return Err(fail(kind));
    }
    Ok(members)
}

/// An object of strings without duplicate keys.
fn strings(text: &str) -> Result<BTreeMap<String, String>, FaultKind> {
    let object =
        Object::parse(text).map_err(|_| FaultKind::MetadataNotStrings { key: None, found: text.to_owned() })?;
    if let Some(key) = object.duplicates().first() {
        return Err(FaultKind::MetadataKeyTwice { key: (*key).to_owned() });
    }
    let string = |(key, value): (String, &serde_json::value::RawValue)| match serde_json::from_str(value.get()) {
        Ok(string) => Ok((key, string)),
        Err(_) => Err(FaultKind::MetadataNotStrings { key: Some(key), found: value.get().to_owned() }),
    };
    object.0.into_iter().map(string).collect()
}

/// One entry: `{"dtype": …, "shape": […], "data_offsets": [begin, end]}`.
fn entry(name: &str, text: &str, data_start: u64) -> Result<StoredTensor, FaultKind> {
    if name.is_empty() || name.len() > limits::MAX_NAME_BYTES {
        return Err(FaultKind::NameLength { found: name.len(), limit: limits::MAX_NAME_BYTES });
    }
    let object = Object::parse(text).map_err(|e| FaultKind::EntrySyntax { message: e.to_string() })?;
    if let Some(key) = object.duplicates().first() {
        return Err(FaultKind::EntryKeyTwice { key: (*key).to_owned() });
    }
    if let Some((key, _)) = object.0.iter().find(|(key, _)| !matches!(&**key, "dtype" | "shape" | "data_offsets")) {
        return Err(FaultKind::EntryKeyUnknown { key: key.clone() });
    }
    let dtype: String = member(&object, "dtype")?;
    let dtype = Dtype::parse(&dtype).ok_or(FaultKind::UnknownDtype { found: dtype })?;
    let dims: Vec<u64> = member(&object, "shape")?;
    if dims.len() > limits::MAX_RANK {
        return Err(FaultKind::RankTooLarge { found: dims.len(), limit: limits::MAX_RANK });
    }
    let shape = Shape::from(dims);
    let [begin, end]: [u64; 2] = member(&object, "data_offsets")?;
    let Some(expected) = shape.bytes(dtype) else {
        return Err(FaultKind::SizeOverflow { dtype, shape });
    };
    if begin > end {
        return Err(FaultKind::OffsetsBackwards { begin, end });
    }
    if end - begin != expected {
        return Err(FaultKind::SpanMismatch { dtype, shape, expected, found: end - begin });
    }
    let offset = data_start.checked_add(begin).filter(|offset| offset.checked_add(expected).is_some());
    let offset = offset.ok_or(FaultKind::OffsetsOverflow { begin, end })?;
    Ok(StoredTensor { name: name.into(), dtype, shape, offset, bytes: expected })
}

/// A member of an entry.
fn member<'a, T: Deserialize<'a>>(entry: &Object<'a>, key: &'static str) -> Result<T, FaultKind> {
    let value = entry.get(key).ok_or(FaultKind::EntryKeyMissing { key })?.get();
    serde_json::from_str(value).map_err(|e| FaultKind::EntrySyntax { message: format!("`{key}`: {e}") })
}

/// Every byte of the data belongs to exactly one tensor. Offsets in messages count from the start of the data.
fn check_cover(path: &Path, tensors: &[StoredTensor], data_start: u64, data_bytes: u64, faults: &mut Vec<Fault>) {
    let file_bytes = data_start + data_bytes;
    let mut covered = data_start;
    let mut last: Option<&StoredTensor> = None;
    for tensor in tensors.iter().filter(|t| t.bytes > 0) {
        let place = || Place::tensor(path, tensor.name.clone()).at(tensor.offset);
        if tensor.offset < covered {
            let other = last.expect("something covers the bytes before").name.clone();
            let end = (tensor.offset + tensor.bytes).min(covered) - data_start;
            faults.push(Fault::new(place(), FaultKind::Overlap { begin: tensor.offset - data_start, end, other }));
        } else if tensor.offset > covered {
            let kind = FaultKind::Gap { begin: covered - data_start, end: tensor.offset - data_start };
            faults.push(Fault::new(Place::file(path).at(covered), kind));
        }
        if tensor.offset + tensor.bytes > covered {
            covered = tensor.offset + tensor.bytes;
            last = Some(tensor);
        }
    }
    for tensor in tensors.iter().filter(|t| t.bytes == 0 && t.offset > file_bytes.max(covered)) {
        let begin = tensor.offset - data_start;
        let kind = FaultKind::OffsetsOutside { begin, end: begin, data_bytes };
        faults.push(Fault::new(Place::tensor(path, tensor.name.clone()), kind));
    }
    if covered > file_bytes {
        let cut: Vec<&StoredTensor> =
            tensors.iter().filter(|t| t.bytes > 0 && t.offset + t.bytes > file_bytes).collect();
        let kind = FaultKind::DataTruncated { expected: covered, found: file_bytes, tensors: cut.len() };
        faults.push(Fault::new(Place::tensor(path, cut[0].name.clone()).at(cut[0].offset), kind));
    } else if covered < file_bytes {
        let kind = FaultKind::TrailingBytes { data_end: covered, file_bytes };
        faults.push(Fault::new(Place::file(path).at(covered), kind));
    }
}

/// The first bytes of a .safetensors file: length, compact JSON in the order of `tensors`, spaces up to a multiple of 8.
///
/// `tensors` are given in data order without gaps; their `offset` counts from the start of the data. With `metadata`
/// the `__metadata__` member comes first.
pub fn encode(metadata: Option<&BTreeMap<String, String>>, tensors: &[StoredTensor]) -> Vec<u8> {
    use std::fmt::Write;
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let mut text = String::from("{");
    if let Some(metadata) = metadata {
        let members: Vec<String> = metadata.iter().map(|(k, v)| format!("{}:{}", quoted(k), quoted(v))).collect();
        write!(text, "{}:{{{}}}", quoted(METADATA), members.join(",")).expect("a String takes it");
    }
    for tensor in tensors {
        let separator = if text.len() > 1 { "," } else { "" };
        let dims: Vec<String> = tensor.shape.dims().iter().map(u64::to_string).collect();
        write!(
            text,
            "{separator}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
            quoted(tensor.name.as_str()),
            tensor.dtype,
            dims.join(","),
            tensor.offset,
            tensor.offset + tensor.bytes
        )
        .expect("a String takes it");
    }
    text.push('}');
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    let mut bytes = vec![0; 8];
    LittleEndian::write_u64(&mut bytes, text.len() as u64);
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, data_bytes: u64) -> Result<Header, Faults> {
        Header::parse(Path::new("f"), text.as_bytes(), 8 + text.len() as u64 + data_bytes)
    }

    fn kinds(text: &str, data_bytes: u64) -> Vec<&'static str> {
        parse(text, data_bytes).unwrap_err().iter().map(|f| f.kind.name()).collect()
    }

    #[test]
    fn what_encode_writes_parse_and_the_safetensors_crate_read() {
        let tensor = |name: &str, offset, dims: Vec<u64>, bytes| StoredTensor {
            name: name.into(),
            dtype: Dtype::F32,
            shape: dims.into(),
            offset,
            bytes,
        };
        let tensors = [tensor("a\n\"b", 0, vec![2, 3], 24), tensor("é", 24, vec![], 4), tensor("z", 28, vec![0], 0)];
        for metadata in [None, Some(BTreeMap::from([("k\"".to_owned(), "{\"x\": 1}".to_owned())]))] {
            let bytes = encode(metadata.as_ref(), &tensors);
            assert!(bytes.len().is_multiple_of(8));
            let header = Header::parse(Path::new("f"), &bytes[8..], bytes.len() as u64 + 28).unwrap();
            assert_eq!(header.metadata(), metadata.as_ref());
            for (read, written) in header.tensors().iter().zip(&tensors) {
                assert_eq!((&read.name, read.dtype, &read.shape), (&written.name, written.dtype, &written.shape));
                assert_eq!(read.offset, written.offset + bytes.len() as u64);
            }
            let mut whole = bytes.clone();
            whole.resize(bytes.len() + 28, 0);
            let theirs = safetensors::SafeTensors::deserialize(&whole).unwrap();
            assert_eq!(theirs.tensor("a\n\"b").unwrap().shape(), [2, 3]);
            assert_eq!(theirs.len(), 3);
        }
    }

    #[test]
    fn broken_headers_are_told_apart() {
        let t = |dtype: &str, shape: &str, offsets: &str| {
            format!("{{\"t\":{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":{offsets}}}}}")
        };
        assert_eq!(kinds("[]", 0), ["header-not-object"]);
        assert_eq!(kinds("{\"a\"", 0), ["header-syntax"]);
        assert_eq!(kinds("{}\0\0", 0), ["header-padding"]);
        assert_eq!(kinds("{}", 1), ["trailing-bytes"]);
        assert_eq!(kinds("{\"a\":1}", 0), ["entry-syntax"]);
        assert_eq!(kinds("{\"__metadata__\":{\"a\":1}}", 0), ["metadata-not-strings"]);
        assert_eq!(kinds(&t("F33", "[1]", "[0,4]"), 4), ["unknown-dtype"]);
        assert_eq!(kinds(&t("F32", "[2]", "[0,4]"), 4), ["span-mismatch"]);
        assert_eq!(kinds(&t("F32", "[1]", "[4,0]"), 4), ["offsets-backwards"]);
        assert_eq!(kinds(&t("F32", "[1]", "[0,4]"), 3), ["data-truncated"]);
        assert_eq!(kinds(&t("F32", "[1]", "[4,8]"), 8), ["gap"]);
        assert_eq!(kinds(&t("F32", "[-1]", "[0,4]"), 4), ["entry-syntax"]);
        assert_eq!(kinds(&t("F32", "[1.0]", "[0,4]"), 4), ["entry-syntax"]);
        assert_eq!(kinds(&t("F32", "[4611686018427387904,4]", "[0,4]"), 4), ["size-overflow"]);
        assert_eq!(kinds(&t("U8", "[1]", "[18446744073709551614,18446744073709551615]"), 4), ["offsets-overflow"]);
        assert_eq!(kinds(&t("U8", "[9007199254740993]", "[0,9007199254740992]"), 4), ["span-mismatch"]);
        let two = "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}";
        assert_eq!(kinds(two, 3), ["overlap"]);
        assert_eq!(kinds(&two.replace("\"b\"", "\"a\""), 3), ["duplicate-in-header"]);
        assert_eq!(kinds(&two.replace("[1,3]", "[0,2]"), 2), ["overlap"]);
    }

    #[test]
    fn empty_and_scalar_tensors_are_fine() {
        assert_eq!(parse("{}", 0).unwrap().tensors().len(), 0);
        assert_eq!(parse("{\"__metadata__\":{}}      ", 0).unwrap().tensors().len(), 0);
        let text = "{\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},\"z\":{\"dtype\":\"F32\",\"shape\":[0,5],\"data_offsets\":[2,2]}}";
        assert_eq!(parse(text, 4).unwrap().tensors().len(), 2);
    }
}
