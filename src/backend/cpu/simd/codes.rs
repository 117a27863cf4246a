//! Rows of codes as chunks of 64 columns.

use super::{CHUNK, Lanes, WORDS};

/// How a chunk is stored.
pub(super) trait Codes {
    /// The bytes of 64 columns.
    type Chunk: Copy;
    /// Whether there are scales.
    const SCALED: bool;
    /// Whether decoding takes so many registers that only few weight rows are decoded at once.
    const HEAVY: bool = false;
    /// Whether the words of a chunk have scales of their own: then [`Codes::decode_words`] decodes, else [`Codes::decode`].
    const BY_WORD: bool = false;

    /// Whole chunks of a row, and the bytes of the columns after them.
    fn split(row: &[u8]) -> (&[Self::Chunk], &[u8]);
    /// The bytes of fewer columns, filled up with zeros.
    fn padded(rest: &[u8]) -> Self::Chunk;
    /// Bytes from a chunk on, for what they are near.
    fn bytes(chunk: &Self::Chunk) -> &[u8];
    /// Its weights.
    fn decode<L: Lanes>(lanes: L, chunk: &Self::Chunk, scale: f32) -> [L::Vector; 4];
    /// The same where each word has a scale.
    #[inline(always)]
    fn decode_words<L: Lanes>(lanes: L, chunk: &Self::Chunk, scales: &[f32; WORDS]) -> [L::Vector; 4] {
        Self::decode(lanes, chunk, scales[0])
    }
}

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident, $bytes:expr, $scaled:literal, $heavy:literal, ($lanes:ident, $chunk:ident, $scale:ident) => $decode:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub(super) struct $name;

        impl Codes for $name {
            type Chunk = [u8; $bytes];
            const SCALED: bool = $scaled;
            const HEAVY: bool = $heavy;

            #[inline(always)]
            fn split(row: &[u8]) -> (&[Self::Chunk], &[u8]) {
                row.as_chunks()
            }

            #[inline(always)]
            fn padded(rest: &[u8]) -> Self::Chunk {
                let mut chunk = [0; $bytes];
                chunk[..rest.len()].copy_from_slice(rest);
                chunk
            }

            #[inline(always)]
            fn bytes(chunk: &Self::Chunk) -> &[u8] {
                chunk
            }

            #[inline(always)]
            fn decode<L: Lanes>($lanes: L, $chunk: &Self::Chunk, $scale: f32) -> [L::Vector; 4] {
                $decode
            }
        }
    };
}

codes!(
    /// Little-endian f32.
    F32, 4 * CHUNK, false, false, (lanes, chunk, _scale) => lanes.f32(chunk)
);
codes!(
    /// Two's complement bytes.
    Int8, CHUNK, true, false, (lanes, chunk, scale) => lanes.int8(chunk, scale)
);
codes!(
    /// Nibbles, the even column low.
    Int4, CHUNK / 2, true, false, (lanes, chunk, scale) => lanes.int4(chunk, scale)
);
codes!(
    /// 16 bytes of low pairs, 8 bytes of third bits.
    Int3, 24, true, true, (lanes, chunk, scale) => lanes.int3(chunk, scale)
);
codes!(
    /// Pairs of bits, the first column lowest.
    Int2, CHUNK / 4, true, false, (lanes, chunk, scale) => lanes.int2(chunk, scale)
);
codes!(
    /// e4m3 bytes.
    Fp8, CHUNK, true, false, (lanes, chunk, scale) => lanes.fp8(chunk, scale)
);

/// Nibbles, the even column low, with a scale for each word of eight columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Int4Words;

impl Codes for Int4Words {
    type Chunk = <Int4 as Codes>::Chunk;
    const SCALED: bool = true;
    const BY_WORD: bool = true;

    #[inline(always)]
    fn split(row: &[u8]) -> (&[Self::Chunk], &[u8]) {
        Int4::split(row)
    }

    #[inline(always)]
    fn padded(rest: &[u8]) -> Self::Chunk {
        Int4::padded(rest)
    }

    #[inline(always)]
    fn bytes(chunk: &Self::Chunk) -> &[u8] {
        Int4::bytes(chunk)
    }

    #[inline(always)]
    fn decode<L: Lanes>(lanes: L, chunk: &Self::Chunk, scale: f32) -> [L::Vector; 4] {
        Int4::decode(lanes, chunk, scale)
    }

    #[inline(always)]
    fn decode_words<L: Lanes>(lanes: L, chunk: &Self::Chunk, scales: &[f32; WORDS]) -> [L::Vector; 4] {
        lanes.int4_words(chunk, scales)
    }
}
