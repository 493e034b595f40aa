//! Tensors of bfloat16 in about 11 bits a value, without loss, for pushes between Sepal servers.
//!
//! A step's hidden states wait less if they fit into the ten packets (14 KB) that TCP sends at once after
//! a pause: 8,192 values take 16 KiB plain, two round trips, and about 11.4 KB packed, one.
//!
//! Sign and mantissa of hidden states are noise, but most exponents lie close together. Seven
//! neighbouring exponents, those that cover most values, get a code of three bits; a value of another
//! exponent has code 7, and its exponent follows in a byte.
//!
//! ```text
//!   first exponent | sign and mantissa, a byte each | codes, eight in three bytes | other exponents, a byte each
//! ```
//! All are little-endian: the first of eight codes is in the lowest bits. Unused codes at the end are 0.

use bytes::Bytes;
use thiserror::Error;

use super::messages::{Compression, Tensor};
use super::tensor::WireDtype;

/// The number of this form in [`Tensor::compression`], where a message says that it may be there. It is
/// none of hivemind's, so that no other message can hold it.
pub const PACKED_BFLOAT16: i32 = 1011;

/// Bytes that are packed at most. More take too long to pack, and fill their connection anyway.
pub const MAX_PACKED_BYTES: usize = 256 << 10;

/// Exponents that have a code.
const WINDOW: u8 = 7;

/// Why a packed tensor cannot be unpacked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("packed tensor of shape {shape:?} and type {dtype} has a buffer of {bytes} bytes")]
pub struct PackingError {
    shape: Vec<u32>,
    dtype: String,
    bytes: usize,
}

/// The tensor in fewer bytes; `None` if it is no plain bfloat16, too large, or would not shrink.
#[must_use]
pub fn pack(tensor: &Tensor) -> Option<Tensor> {
    let is_plain = tensor.compression == Compression::None as i32
        && tensor.dtype == WireDtype::Bf16.name()
        && tensor.buffer.len() <= MAX_PACKED_BYTES
        && plain_bytes(&tensor.size) == Some(tensor.buffer.len());
    let buffer = is_plain.then(|| pack_values(&tensor.buffer)).flatten()?;
    Some(Tensor { buffer, compression: PACKED_BFLOAT16, ..tensor.clone() })
}

/// How many bytes a packed tensor has plain; `None` if it is not packed.
///
/// # Errors
/// Unless the buffer has at least the bytes that so many values take.
pub fn unpacked_bytes(tensor: &Tensor) -> Result<Option<usize>, PackingError> {
    if tensor.compression != PACKED_BFLOAT16 {
        return Ok(None);
    }
    let plain = plain_bytes(&tensor.size).filter(|plain| {
        let is_long_enough = parts(plain / 2).is_some_and(|(end, _)| end <= tensor.buffer.len());
        tensor.dtype == WireDtype::Bf16.name() && *plain <= MAX_PACKED_BYTES && is_long_enough
    });
    plain.map(Some).ok_or_else(|| error(tensor))
}

/// The plain tensor of a packed one. At most 1.5 times as long.
///
/// # Errors
/// As [`unpacked_bytes`]; if it is not packed; or if the buffer is longer than its values.
pub fn unpack(tensor: &Tensor) -> Result<Tensor, PackingError> {
    let plain = unpacked_bytes(tensor)?.ok_or_else(|| error(tensor))?;
    let buffer = unpack_values(&tensor.buffer, plain / 2).ok_or_else(|| error(tensor))?;
    Ok(Tensor { buffer: buffer.into(), compression: Compression::None as i32, ..tensor.clone() })
}

fn error(tensor: &Tensor) -> PackingError {
    PackingError {
        shape: tensor.size.iter().take(8).copied().collect(),
        dtype: tensor.dtype.chars().take(32).collect(),
        bytes: tensor.buffer.len(),
    }
}

fn plain_bytes(size: &[u32]) -> Option<usize> {
    size.iter().try_fold(2usize, |bytes, length| bytes.checked_mul(*length as usize))
}

/// Where signs and mantissas of so many values end, and how long their codes are; the first includes
/// the codes.
fn parts(count: usize) -> Option<(usize, usize)> {
    let codes = count.div_ceil(8).checked_mul(3)?;
    Some((count.checked_add(1)?.checked_add(codes)?, codes))
}

fn exponent(value: u16) -> u8 {
    (value >> 7).to_le_bytes()[0]
}

/// The first of the neighbouring exponents that cover most values, and how many they leave.
fn window(values: impl Iterator<Item = u16>) -> (u8, usize) {
    let mut counts = [0usize; 256];
    let mut all = 0;
    for value in values {
        counts[usize::from(exponent(value))] += 1;
        all += 1;
    }
    let covered = counts.windows(usize::from(WINDOW)).map(|of| of.iter().sum::<usize>());
    let (most, first) = (0u8..).zip(covered).fold((0, 0), |best, (first, covered)| match best {
        (most, _) if most >= covered => best,
        _ => (covered, first),
    });
    (first, all - most)
}

fn pack_values(plain: &[u8]) -> Option<Bytes> {
    let values = || plain.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
    let (first, others) = window(values());
    let (end, _) = parts(plain.len() / 2)?;
    if end + others >= plain.len() {
        return None;
    }
    let mut packed = Vec::with_capacity(end + others);
    packed.push(first);
    packed.extend(values().map(|value| {
        let [low, high] = value.to_le_bytes();
        (high & 0x80) | (low & 0x7f)
    }));
    let code = |value: u16| exponent(value).wrapping_sub(first).min(WINDOW);
    let mut codes = values().map(code);
    for _ in 0..(plain.len() / 2).div_ceil(8) {
        let eight = (0..8).filter_map(|place| Some(u32::from(codes.next()?) << (3 * place)));
        packed.extend_from_slice(&eight.fold(0, |all, code| all | code).to_le_bytes()[..3]);
    }
    packed.extend(values().filter(|value| code(*value) == WINDOW).map(exponent));
    Some(packed.into())
}

fn unpack_values(packed: &[u8], count: usize) -> Option<Vec<u8>> {
    let (end, codes) = parts(count)?;
    let (packed, others) = packed.split_at_checked(end)?;
    let (first, packed) = packed.split_first()?;
    let (signs, codes) = packed.split_at_checked(packed.len() - codes)?;
    let mut others = others.iter();
    let mut plain = Vec::with_capacity(2 * count);
    for (signs, codes) in signs.chunks(8).zip(codes.as_chunks::<3>().0) {
        let codes = u32::from_le_bytes([codes[0], codes[1], codes[2], 0]);
        for (place, sign) in signs.iter().enumerate() {
            let exponent = match (codes >> (3 * place)).to_le_bytes()[0] & 7 {
                WINDOW => *others.next()?,
                code => first.checked_add(code)?,
            };
            let [sign, mantissa] = [sign & 0x80, sign & 0x7f].map(u16::from);
            plain.extend(((sign << 8) | (u16::from(exponent) << 7) | mantissa).to_le_bytes());
        }
    }
    others.next().is_none().then_some(plain)
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;

    fn tensor(values: &[u16]) -> Tensor {
        Tensor {
            buffer: values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            size: vec![1, 1, u32::try_from(values.len()).unwrap()],
            requires_grad: true,
            dtype: "bfloat16".to_owned(),
            compression: Compression::None as i32,
            chunks: 1,
        }
    }

    /// Sums of twelve values of a fixed sequence: nearly normal.
    fn normal(count: usize) -> Vec<u16> {
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        (0..count).map(|_| bf16::from_f32((0..12).map(|_| uniform()).sum()).to_bits()).collect()
    }

    #[test]
    fn the_states_of_a_large_model_fit_into_what_tcp_sends_at_once() {
        let plain = tensor(&normal(8192));
        let packed = pack(&plain).expect("smaller");
        assert!(packed.buffer.len() < 11_700, "{} bytes", packed.buffer.len());
        assert_eq!(unpacked_bytes(&packed), Ok(Some(16_384)));
        assert_eq!(unpack(&packed), Ok(plain));
    }

    #[test]
    fn a_small_tensor_lies_as_described() {
        let values = [0x3f80, 0xbf81, 0x3f00, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x0001];
        let packed = pack(&tensor(&values)).expect("smaller");
        // The first window that covers exponents 126 and 127 begins at 121: codes 6, 6, 5, 6, ... and 7.
        let mut bytes = vec![121, 0, 0x81, 0, 0, 0, 0, 0, 0, 1];
        bytes.extend([0b0111_0110, 0b0110_1101, 0b1101_1011, 7, 0, 0, 0]);
        assert_eq!(packed.buffer, bytes);
    }

    #[test]
    fn what_would_not_shrink_or_is_something_else_stays_as_it_is() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        assert_eq!(pack(&tensor(&all)), None, "every exponent as often");
        assert_eq!(pack(&tensor(&[])), None);
        let plain = tensor(&normal(64));
        let others = [
            Tensor { dtype: "float16".to_owned(), ..plain.clone() },
            Tensor { compression: Compression::Float16 as i32, ..plain.clone() },
            Tensor { size: vec![1, 1, 65], ..plain.clone() },
            Tensor { size: vec![u32::MAX; 4], ..plain.clone() },
        ];
        assert_eq!(others.each_ref().map(pack), [None, None, None, None]);
        assert_eq!(unpacked_bytes(&plain), Ok(None));
        assert_eq!(pack(&tensor(&normal(MAX_PACKED_BYTES / 2 + 1))), None, "large");
    }

    #[test]
    fn a_buffer_that_is_not_what_its_shape_says_is_refused_before_it_is_unpacked() {
        let packed = pack(&tensor(&normal(64))).expect("smaller");
        let with = |size: Vec<u32>| Tensor { size, ..packed.clone() };
        let cut = |bytes: usize| Tensor { buffer: packed.buffer.slice(..bytes), ..packed.clone() };
        let longer = [&packed.buffer[..], &[0]].concat();
        for wrong in [
            with(vec![1, 1, 1 << 19]),
            with(vec![u32::MAX; 4]),
            cut(0),
            cut(88),
            Tensor { dtype: "float32".to_owned(), ..packed.clone() },
        ] {
            assert_eq!(unpacked_bytes(&wrong), Err(error(&wrong)));
            assert_eq!(unpack(&wrong), Err(error(&wrong)));
        }
        for wrong in [
            with(vec![1, 1, 40]),
            Tensor { buffer: longer.into(), ..packed.clone() },
            Tensor { buffer: [&[255][..], &packed.buffer[1..]].concat().into(), ..packed.clone() },
        ] {
            assert_eq!(unpack(&wrong), Err(error(&wrong)));
        }
    }

    proptest! {
        #[test]
        fn every_value_comes_back(
            values in proptest::collection::vec(any::<u16>(), 0..100),
            near in proptest::collection::vec(0x3c00u16..0x4000, 0..300),
        ) {
            let plain = tensor(&[values, near].concat());
            if let Some(packed) = pack(&plain) {
                prop_assert!(packed.buffer.len() < plain.buffer.len());
                prop_assert_eq!(unpack(&packed), Ok(plain));
            }
        }

        #[test]
        fn any_bytes_are_unpacked_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            count in 0u32..200,
        ) {
            let packed = Tensor { buffer: bytes.into(), compression: PACKED_BFLOAT16, ..tensor(&[]) };
            let packed = Tensor { size: vec![count], ..packed };
            if let Ok(plain) = unpack(&packed) {
                prop_assert_eq!(plain.buffer.len(), 2 * count as usize);
            }
        }
    }
}
