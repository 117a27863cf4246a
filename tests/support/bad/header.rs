//! Single .safetensors files: what a header can say wrongly, and what is odd but right.

use std::fs;
use std::path::Path;

use super::Make;

/// A file: the true length of the header, its text, and that many bytes of data.
pub fn wrapped(text: impl AsRef<[u8]>, data_bytes: usize) -> Vec<u8> {
    let text = text.as_ref();
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text);
    file.extend((0..data_bytes).map(|i| i as u8));
    file
}

fn write(path: &Path, text: impl AsRef<[u8]>, data_bytes: usize) {
    fs::write(path, wrapped(text, data_bytes)).unwrap();
}

/// The header of one tensor `t`; the three values are JSON.
fn one(dtype: &str, shape: &str, offsets: &str) -> String {
    format!("{{\"t\":{}}}", entry(dtype, shape, offsets))
}

fn entry(dtype: &str, shape: &str, offsets: &str) -> String {
    format!("{{\"dtype\":{dtype},\"shape\":{shape},\"data_offsets\":{offsets}}}")
}

/// A header of two U8 tensors `a` and `b` of four bytes each, at these offsets.
fn two(a: &str, b: &str) -> String {
    format!("{{\"a\":{},\"b\":{}}}", entry("\"U8\"", "[4]", a), entry("\"U8\"", "[4]", b))
}

/// A header of one good U8 tensor of that name, which is JSON text without quotes.
fn named(name: &str) -> String {
    format!("{{\"{name}\":{}}}", entry("\"U8\"", "[1]", "[0,1]"))
}

/// A good file with another length before its header.
fn with_length(path: &Path, length: u64) {
    let mut file = wrapped(one("\"U8\"", "[4]", "[0,4]"), 4);
    file[..8].copy_from_slice(&length.to_le_bytes());
    fs::write(path, file).unwrap();
}

/// A good file cut to that many bytes; a negative number cuts so many from its end.
fn cut(path: &Path, bytes: i64) {
    let mut file = wrapped(two("[0,4]", "[4,8]"), 8);
    let keep = if bytes < 0 { file.len() as i64 + bytes } else { bytes };
    file.truncate(keep as usize);
    fs::write(path, file).unwrap();
}

/// `depth` times an opening, and as often its closing.
fn nested(open: &str, close: &str, depth: usize) -> String {
    open.repeat(depth) + &close.repeat(depth)
}

pub fn bad() -> Vec<(&'static str, Make)> {
    let mut cases = lengths();
    cases.extend(objects());
    cases.extend(entries());
    cases.extend(sizes());
    cases.extend(covers());
    cases.extend(names());
    cases
}

/// The first eight bytes, and files cut off.
fn lengths() -> Vec<(&'static str, Make)> {
    vec![
        ("empty-file.safetensors", |p| cut(p, 0)),
        ("cut-in-the-length.safetensors", |p| cut(p, 5)),
        ("cut-after-the-length.safetensors", |p| cut(p, 8)),
        ("cut-in-the-header.safetensors", |p| cut(p, 40)),
        ("cut-before-the-data.safetensors", |p| cut(p, -8)),
        ("cut-in-the-data.safetensors", |p| cut(p, -2)),
        ("length-zero.safetensors", |p| with_length(p, 0)),
        ("length-beyond-the-file.safetensors", |p| with_length(p, 1000)),
        ("length-one-too-large.safetensors", |p| {
            let file = wrapped("{}", 0);
            fs::write(p, [&3u64.to_le_bytes()[..], &file[8..]].concat()).unwrap();
        }),
        ("length-2-to-40.safetensors", |p| with_length(p, 1 << 40)),
        ("length-2-to-63.safetensors", |p| with_length(p, 1 << 63)),
        ("length-all-ones.safetensors", |p| with_length(p, u64::MAX)),
        ("length-big-endian.safetensors", |p| with_length(p, 60u64.swap_bytes())),
        ("git-lfs-pointer.safetensors", |p| {
            let text = format!(
                "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 5360319456\n",
                "4d7a2146".repeat(8)
            );
            fs::write(p, text).unwrap();
        }),
        ("web-page.safetensors", |p| fs::write(p, "<!DOCTYPE html>\n<html><body>404</body></html>\n").unwrap()),
    ]
}

/// The header's text as a whole.
fn objects() -> Vec<(&'static str, Make)> {
    vec![
        ("array.safetensors", |p| write(p, "[]", 0)),
        ("number.safetensors", |p| write(p, "7", 0)),
        ("string.safetensors", |p| write(p, "\"{}\"", 0)),
        ("spaces-only.safetensors", |p| write(p, "        ", 0)),
        ("space-first.safetensors", |p| write(p, " {}", 0)),
        ("byte-order-mark.safetensors", |p| write(p, "\u{feff}{}", 0)),
        ("utf-16.safetensors", |p| write(p, b"{\0}\0", 0)),
        ("latin-1.safetensors", |p| {
            let mut text = named("_").into_bytes();
            text[2] = 0xe9;
            write(p, text, 1);
        }),
        ("invalid-utf-8-in-metadata.safetensors", |p| write(p, b"{\"__metadata__\":{\"a\":\"\xff\xfe\"}}", 0)),
        ("overlong-utf-8.safetensors", |p| write(p, b"{\"\xc0\xaf\":1}", 0)),
        ("unclosed.safetensors", |p| write(p, &one("\"U8\"", "[1]", "[0,1]")[..20], 0)),
        ("trailing-comma.safetensors", |p| write(p, one("\"U8\"", "[1]", "[0,1]").replace("}}", "},}"), 1)),
        ("single-quotes.safetensors", |p| write(p, one("\"U8\"", "[1]", "[0,1]").replace('"', "'"), 1)),
        ("comment.safetensors", |p| write(p, "{/* none */}", 0)),
        ("two-objects.safetensors", |p| write(p, "{}{}", 0)),
        ("nul-padding.safetensors", |p| write(p, "{}\0\0\0\0\0\0", 0)),
        ("nul-then-space-padding.safetensors", |p| write(p, "{}\0     ", 0)),
        ("newline-padding.safetensors", |p| write(p, "{}\n", 0)),
        ("nested-arrays.safetensors", |p| write(p, nested("[", "]", 400), 0)),
        ("nested-arrays-in-an-entry.safetensors", |p| {
            write(p, format!("{{\"t\":{}}}", nested("[", "]", 400)), 0);
        }),
        ("nested-arrays-unclosed.safetensors", |p| write(p, format!("{{\"t\":{}", "[".repeat(400)), 0)),
        ("nested-objects.safetensors", |p| write(p, nested("{\"t\":", "}", 400).replace(":}", ":{}}"), 0)),
        ("nested-shape.safetensors", |p| write(p, one("\"U8\"", &nested("[", "]", 400), "[0,1]"), 1)),
        ("nested-metadata.safetensors", |p| write(p, "{\"__metadata__\":{\"a\":{\"b\":\"c\"}}}", 0)),
    ]
}

/// Members of an entry.
fn entries() -> Vec<(&'static str, Make)> {
    vec![
        ("entry-number.safetensors", |p| write(p, "{\"t\":1}", 0)),
        ("entry-null.safetensors", |p| write(p, "{\"t\":null}", 0)),
        ("entry-array.safetensors", |p| write(p, "{\"t\":[\"U8\",[1],[0,1]]}", 1)),
        ("no-dtype.safetensors", |p| write(p, "{\"t\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1)),
        ("no-shape.safetensors", |p| write(p, "{\"t\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1)),
        ("no-offsets.safetensors", |p| write(p, "{\"t\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1)),
        ("shape-twice.safetensors", |p| {
            write(p, one("\"U8\"", "[1],\"shape\":[2]", "[0,1]"), 1);
        }),
        ("offsets-twice-escaped.safetensors", |p| {
            write(p, one("\"U8\"", "[1],\"data\\u005foffsets\":[0,2]", "[0,1]"), 1);
        }),
        ("unknown-key.safetensors", |p| write(p, one("\"U8\"", "[1],\"strides\":[2]", "[0,1]"), 1)),
        ("dtype-unknown.safetensors", |p| write(p, one("\"F33\"", "[1]", "[0,4]"), 4)),
        ("dtype-lower-case.safetensors", |p| write(p, one("\"f32\"", "[1]", "[0,4]"), 4)),
        ("dtype-escape-sequence.safetensors", |p| write(p, one("\"\\u001b[31mF32\"", "[1]", "[0,4]"), 4)),
        ("dtype-number.safetensors", |p| write(p, one("32", "[1]", "[0,4]"), 4)),
        ("shape-null.safetensors", |p| write(p, one("\"U8\"", "null", "[0,1]"), 1)),
        ("shape-number.safetensors", |p| write(p, one("\"U8\"", "1", "[0,1]"), 1)),
        ("shape-of-strings.safetensors", |p| write(p, one("\"U8\"", "[\"1\"]", "[0,1]"), 1)),
        ("shape-negative.safetensors", |p| write(p, one("\"U8\"", "[-1]", "[0,1]"), 1)),
        ("shape-minus-zero.safetensors", |p| write(p, one("\"U8\"", "[-0]", "[0,0]"), 0)),
        ("shape-float.safetensors", |p| write(p, one("\"U8\"", "[1.0]", "[0,1]"), 1)),
        ("shape-exponent.safetensors", |p| write(p, one("\"U8\"", "[1e2]", "[0,100]"), 100)),
        ("shape-leading-zero.safetensors", |p| write(p, one("\"U8\"", "[01]", "[0,1]"), 1)),
        ("shape-nan.safetensors", |p| write(p, one("\"U8\"", "[NaN]", "[0,1]"), 1)),
        ("shape-of-9-dimensions.safetensors", |p| write(p, one("\"U8\"", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1)),
        ("offsets-one.safetensors", |p| write(p, one("\"U8\"", "[1]", "[1]"), 1)),
        ("offsets-three.safetensors", |p| write(p, one("\"U8\"", "[1]", "[0,1,2]"), 1)),
        ("offsets-object.safetensors", |p| write(p, one("\"U8\"", "[1]", "{\"begin\":0,\"end\":1}"), 1)),
        ("offsets-negative.safetensors", |p| write(p, one("\"U8\"", "[1]", "[-1,0]"), 1)),
        ("offsets-float.safetensors", |p| write(p, one("\"U8\"", "[1]", "[0.0,1.0]"), 1)),
    ]
}

/// Numbers too large, and spans that do not fit.
fn sizes() -> Vec<(&'static str, Make)> {
    vec![
        ("shape-2-to-64.safetensors", |p| write(p, one("\"U8\"", "[18446744073709551616]", "[0,1]"), 1)),
        ("shape-product-overflows.safetensors", |p| {
            write(p, one("\"U8\"", "[4294967296,4294967296]", "[0,0]"), 0);
        }),
        ("shape-bytes-overflow.safetensors", |p| write(p, one("\"F32\"", "[4611686018427387905]", "[0,4]"), 4)),
        // 2^53 + 1, which a double rounds to 2^53: the span would seem to fit.
        ("shape-no-double-holds.safetensors", |p| {
            write(p, one("\"U8\"", "[9007199254740993]", "[0,9007199254740992]"), 1);
        }),
        ("offsets-no-double-holds.safetensors", |p| {
            write(p, one("\"U8\"", "[1]", "[9007199254740992,9007199254740993]"), 1);
        }),
        ("half-a-byte.safetensors", |p| write(p, one("\"F4\"", "[3]", "[0,2]"), 2)),
        ("offsets-backwards.safetensors", |p| write(p, one("\"U8\"", "[1]", "[1,0]"), 1)),
        ("offsets-overflow.safetensors", |p| {
            write(p, one("\"U8\"", "[1]", "[18446744073709551614,18446744073709551615]"), 1);
        }),
        ("span-too-short.safetensors", |p| write(p, one("\"F32\"", "[2]", "[0,4]"), 4)),
        ("span-too-long.safetensors", |p| write(p, one("\"BF16\"", "[2]", "[0,8]"), 8)),
        ("span-of-another-dtype.safetensors", |p| write(p, one("\"F16\"", "[2,3]", "[0,24]"), 24)),
        ("span-of-a-scalar.safetensors", |p| write(p, one("\"F32\"", "[]", "[0,0]"), 0)),
        ("span-of-nothing.safetensors", |p| write(p, one("\"F32\"", "[0,3]", "[0,12]"), 12)),
    ]
}

/// Bytes of the data that belong to none or to several.
fn covers() -> Vec<(&'static str, Make)> {
    vec![
        ("overlap.safetensors", |p| write(p, two("[0,4]", "[2,6]"), 6)),
        ("alias.safetensors", |p| write(p, two("[0,4]", "[0,4]"), 4)),
        ("one-inside-another.safetensors", |p| {
            let text = format!(
                "{{\"a\":{},\"b\":{},\"c\":{}}}",
                entry("\"U8\"", "[8]", "[0,8]"),
                entry("\"U8\"", "[2]", "[1,3]"),
                entry("\"U8\"", "[2]", "[4,6]")
            );
            write(p, text, 8);
        }),
        ("gap-first.safetensors", |p| write(p, two("[2,6]", "[6,10]"), 10)),
        ("gap-between.safetensors", |p| write(p, two("[0,4]", "[5,9]"), 9)),
        ("trailing-bytes.safetensors", |p| write(p, two("[0,4]", "[4,8]"), 11)),
        ("trailing-bytes-without-tensors.safetensors", |p| write(p, "{}", 16)),
        ("beyond-the-file.safetensors", |p| write(p, two("[0,4]", "[1000,1004]"), 8)),
        ("nothing-beyond-the-file.safetensors", |p| write(p, one("\"U8\"", "[0]", "[100,100]"), 0)),
    ]
}

/// Names that repeat or are no names.
fn names() -> Vec<(&'static str, Make)> {
    vec![
        ("name-twice.safetensors", |p| write(p, two("[0,4]", "[4,8]").replace("\"b\"", "\"a\""), 8)),
        ("name-twice-same-bytes.safetensors", |p| write(p, two("[0,4]", "[0,4]").replace("\"b\"", "\"a\""), 4)),
        ("name-twice-escaped.safetensors", |p| write(p, two("[0,4]", "[4,8]").replace("\"b\"", "\"\\u0061\""), 8)),
        ("name-empty.safetensors", |p| write(p, named(""), 1)),
        ("name-too-long.safetensors", |p| write(p, named(&"n".repeat(513)), 1)),
        ("name-half-a-surrogate.safetensors", |p| write(p, named("\\ud800"), 1)),
        ("name-with-a-raw-newline.safetensors", |p| write(p, named("a\nb"), 1)),
        ("metadata-as-a-tensor.safetensors", |p| write(p, named("__metadata__"), 1)),
        ("metadata-as-a-tensor-escaped.safetensors", |p| write(p, named("\\u005f_metadata__"), 1)),
        ("metadata-null.safetensors", |p| write(p, "{\"__metadata__\":null}", 0)),
        ("metadata-array.safetensors", |p| write(p, "{\"__metadata__\":[\"pt\"]}", 0)),
        ("metadata-number.safetensors", |p| write(p, "{\"__metadata__\":{\"format\":1}}", 0)),
        ("metadata-twice.safetensors", |p| {
            write(p, "{\"__metadata__\":{\"a\":\"1\"},\"__metadata__\":{\"a\":\"2\"}}", 0);
        }),
        ("metadata-key-twice.safetensors", |p| write(p, "{\"__metadata__\":{\"a\":\"1\",\"\\u0061\":\"2\"}}", 0)),
    ]
}

/// Too large to be committed.
pub fn large() -> Vec<(&'static str, Make)> {
    vec![
        ("100000-nested-arrays.safetensors", |p| write(p, nested("[", "]", 100_000), 0)),
        ("100000-nested-arrays-in-an-entry.safetensors", |p| {
            write(p, format!("{{\"t\":{}}}", nested("[", "]", 100_000)), 0);
        }),
        ("100000-nested-arrays-unclosed.safetensors", |p| write(p, format!("{{\"t\":{}", "[".repeat(100_000)), 0)),
        ("100000-nested-objects.safetensors", |p| {
            write(p, nested("{\"t\":", "}", 100_000).replace(":}", ":{}}"), 0);
        }),
        ("100000-nested-shape.safetensors", |p| write(p, one("\"U8\"", &nested("[", "]", 100_000), "[0,1]"), 1)),
        ("100000-nested-metadata.safetensors", |p| {
            write(p, format!("{{\"__metadata__\":{{\"a\":{}}}}}", nested("[", "]", 100_000)), 0);
        }),
    ]
}

/// Unusual and right: to be accepted and listed.
pub fn odd() -> Vec<(&'static str, Make)> {
    vec![
        ("no-tensors.safetensors", |p| write(p, "{}", 0)),
        ("no-tensors-padded.safetensors", |p| write(p, format!("{{}}{}", " ".repeat(70)), 0)),
        ("metadata-only.safetensors", |p| write(p, "{\"__metadata__\":{\"format\":\"pt\"}}", 0)),
        ("empty-metadata.safetensors", |p| write(p, "{\"__metadata__\":{}}", 0)),
        ("zero-dimensional.safetensors", |p| write(p, format!("{:<64}", one("\"F32\"", "[]", "[0,4]")), 4)),
        ("zero-size.safetensors", |p| write(p, one("\"F32\"", "[3,0,5]", "[0,0]"), 0)),
        ("zero-size-of-huge-dimensions.safetensors", |p| {
            write(p, one("\"F64\"", "[18446744073709551615,18446744073709551615,0]", "[0,0]"), 0);
        }),
        ("zero-size-between.safetensors", |p| {
            let text = format!(
                "{{\"a\":{},\"b\":{},\"c\":{},\"d\":{}}}",
                entry("\"U8\"", "[2]", "[0,2]"),
                entry("\"F32\"", "[0]", "[2,2]"),
                entry("\"U8\"", "[2]", "[2,4]"),
                entry("\"I64\"", "[0,7]", "[4,4]")
            );
            write(p, text, 4);
        }),
        ("misaligned-header.safetensors", |p| write(p, one("\"F32\"", "[2]", "[0,8]"), 8)),
        ("misaligned-after-a-byte.safetensors", |p| {
            let text =
                format!("{{\"a\":{},\"b\":{}}}", entry("\"U8\"", "[1]", "[0,1]"), entry("\"BF16\"", "[2]", "[1,5]"));
            write(p, format!("{text:<128}"), 5);
        }),
        ("unsorted-names.safetensors", |p| write(p, two("[4,8]", "[0,4]"), 8)),
        ("spaces-inside.safetensors", |p| {
            write(p, "{ \"t\" :\n{ \"data_offsets\": [0 ,1], \"shape\" :[ 1 ],\t\"dtype\": \"U8\" } }", 1);
        }),
        ("nibbles.safetensors", |p| write(p, one("\"F4\"", "[3,2]", "[0,3]"), 3)),
        ("eight-dimensions.safetensors", |p| write(p, one("\"U8\"", "[1,1,1,1,1,1,1,2]", "[0,2]"), 2)),
        ("name-like-a-path.safetensors", |p| write(p, named("../../etc/passwd"), 1)),
        ("name-with-a-newline.safetensors", |p| write(p, named("a\\nmodel.norm.weight"), 1)),
        ("name-with-an-escape.safetensors", |p| write(p, named("\\u001b[31mred\\u001b[0m"), 1)),
        ("name-with-a-nul.safetensors", |p| write(p, named("a\\u0000b"), 1)),
        ("name-that-reads-backwards.safetensors", |p| write(p, named("a\\u202eb"), 1)),
        ("name-of-512-bytes.safetensors", |p| write(p, named(&"n".repeat(512)), 1)),
        ("name-of-a-space.safetensors", |p| write(p, named(" "), 1)),
        ("name-like-metadata.safetensors", |p| write(p, named("__METADATA__"), 1)),
    ]
}
