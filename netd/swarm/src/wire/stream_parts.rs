//! Tensors cut into parts for the streamed RPCs, and put together again. Source:
//! `split_for_streaming` and `combine_from_streaming` in hivemind's `hivemind/utils/streaming.py`.
//!
//! The first part carries the header and the number of parts, later ones only bytes. A part that
//! names a dtype starts a tensor; the number of parts is informative.

use super::messages::Tensor;
use bytes::Bytes;
use thiserror::Error;

/// Bytes of buffer in one part: what Petals uses between client and server.
pub const PART_BYTES: usize = 4 << 20;

/// Cuts a tensor into parts of at most `part_bytes` bytes of buffer each, sharing its memory. A
/// tensor without bytes is one part that says 0 parts.
///
/// # Panics
/// If `part_bytes` is 0.
pub fn split(tensor: Tensor, part_bytes: usize) -> impl Iterator<Item = Tensor> {
    assert!(part_bytes > 0, "a part holds at least one byte");
    let count = tensor.buffer.len().div_ceil(part_bytes);
    let mut rest = tensor.buffer.clone();
    let mut first = Some(Tensor {
        buffer: Bytes::new(),
        chunks: i32::try_from(count).unwrap_or(i32::MAX),
        ..tensor
    });
    std::iter::from_fn(move || {
        if first.is_none() && rest.is_empty() {
            return None;
        }
        let buffer = rest.split_to(rest.len().min(part_bytes));
        Some(Tensor { buffer, ..first.take().unwrap_or_default() })
    })
}

/// What one streamed request may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartLimits {
    pub max_tensors: usize,
    /// Bytes of buffer over all tensors.
    pub max_bytes: usize,
    /// Parts over all tensors; bounds peers that send parts without bytes.
    pub max_parts: usize,
}

/// Why parts do not make tensors.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PartError {
    /// The first part has no header.
    #[error("streamed request starts in the middle of a tensor")]
    NoHeader,
    /// A bound of [`PartLimits`] is exceeded.
    #[error("streamed request exceeds the limit of {limit} {what}")]
    TooLarge { limit: usize, what: &'static str },
}

/// Puts the parts of one streamed request together.
#[derive(Debug)]
pub struct PartAssembler {
    limits: PartLimits,
    bytes: usize,
    parts: usize,
    tensors: Vec<(Tensor, Vec<Bytes>)>,
}

impl PartAssembler {
    /// An assembler of one request.
    #[must_use]
    pub fn new(limits: PartLimits) -> Self {
        Self { limits, bytes: 0, parts: 0, tensors: Vec::new() }
    }

    /// Takes the next part; holds its memory, copies nothing yet.
    ///
    /// # Errors
    /// [`PartError`]; the request is then lost.
    pub fn push(&mut self, mut part: Tensor) -> Result<(), PartError> {
        self.parts += 1;
        self.bytes = self.bytes.saturating_add(part.buffer.len());
        self.check(self.parts, self.limits.max_parts, "parts")?;
        self.check(self.bytes, self.limits.max_bytes, "bytes")?;
        let buffer = std::mem::take(&mut part.buffer);
        if part.dtype.is_empty() {
            let (_, buffers) = self.tensors.last_mut().ok_or(PartError::NoHeader)?;
            buffers.push(buffer);
        } else {
            self.check(self.tensors.len() + 1, self.limits.max_tensors, "tensors")?;
            self.tensors.push((part, vec![buffer]));
        }
        Ok(())
    }

    /// Bytes of buffer held.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.bytes
    }

    /// The tensors, each with its whole buffer; a tensor of one part keeps that part's memory.
    #[must_use]
    pub fn finish(self) -> Vec<Tensor> {
        let whole = |buffers: Vec<Bytes>| match <[Bytes; 1]>::try_from(buffers) {
            Ok([single]) => single,
            Err(many) => many.concat().into(),
        };
        self.tensors
            .into_iter()
            .map(|(head, buffers)| Tensor { buffer: whole(buffers), ..head })
            .collect()
    }

    fn check(&self, value: usize, limit: usize, what: &'static str) -> Result<(), PartError> {
        if value > limit { Err(PartError::TooLarge { limit, what }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use prost::Message;
    use testkit::golden;

    const LIMITS: PartLimits = PartLimits { max_tensors: 3, max_bytes: 1 << 16, max_parts: 100 };

    fn assemble(parts: impl IntoIterator<Item = Tensor>) -> Result<Vec<Tensor>, PartError> {
        let mut assembler = PartAssembler::new(LIMITS);
        for part in parts {
            assembler.push(part)?;
        }
        Ok(assembler.finish())
    }

    #[test]
    fn golden_tensor_splits_and_joins_byte_for_byte() {
        let file = golden::file(golden::SPLIT);
        let whole = Tensor::decode(&golden::bytes(&file, "whole_hex")[..]).unwrap();
        let size = usize::try_from(file["chunk_size_bytes"].as_u64().unwrap()).unwrap();
        let expected: Vec<_> = file["parts_hex"]
            .as_array()
            .unwrap()
            .iter()
            .map(|hex| golden::unhex(hex.as_str().unwrap()))
            .collect();
        let parts: Vec<_> = split(whole.clone(), size).collect();
        assert_eq!(parts.iter().map(Tensor::encode_to_vec).collect::<Vec<_>>(), expected);
        let joined = assemble(parts).unwrap();
        assert_eq!(joined, [Tensor { chunks: 3, ..whole }]);
    }

    #[test]
    fn tensor_without_bytes_is_one_part() {
        let dummy = Tensor { size: vec![0], dtype: "float32".into(), ..Tensor::default() };
        assert_eq!(split(dummy.clone(), 64).collect::<Vec<_>>(), [dummy]);
    }

    #[test]
    fn bounds_hold() {
        let head = |bytes: usize| Tensor {
            dtype: "uint8".into(),
            buffer: vec![0; bytes].into(),
            ..Tensor::default()
        };
        assert_eq!(assemble([Tensor::default()]), Err(PartError::NoHeader));
        let too_large = |limit, what| Err(PartError::TooLarge { limit, what });
        assert_eq!(assemble([head(1), head(1), head(1), head(1)]), too_large(3, "tensors"));
        assert_eq!(assemble([head(1 << 16), head(1)]), too_large(1 << 16, "bytes"));
        assert_eq!(
            assemble(std::iter::once(head(1)).chain(vec![Tensor::default(); 100])),
            too_large(100, "parts")
        );
    }

    proptest! {
        #[test]
        fn any_split_joins_to_the_same(length in 0usize..500, part_bytes in 1usize..100) {
            let buffer: Vec<u8> = (0..length).map(|i| i as u8).collect();
            let tensor = Tensor { buffer: buffer.into(), size: vec![length as u32], dtype: "uint8".into(), ..Tensor::default() };
            let mut assembler = PartAssembler::new(PartLimits { max_parts: 500, ..LIMITS });
            for part in split(tensor.clone(), part_bytes) {
                prop_assert!(part.buffer.len() <= part_bytes);
                assembler.push(part).unwrap();
            }
            let joined = assembler.finish();
            prop_assert_eq!(joined.len(), 1);
            prop_assert_eq!(&joined[0].buffer, &tensor.buffer);
        }
    }
}
