//! The bytes of a tensor in each compression, checked and taken apart.

use super::*;

/// How the elements lie in memory; every variant's lengths agree with the tensor's element count.
#[derive(Clone, Debug)]
pub(super) enum Payload {
    /// Raw elements of the tensor's dtype.
    Raw(Bytes),
    /// Raw f32 elements of a bfloat16 tensor (hivemind's own form).
    WideBf16(Bytes),
    /// f16 elements of a float tensor.
    Half(Bytes),
    /// f16 elements scaled per row of `row` elements.
    MeanStd { values: Bytes, means: Vec<f32>, stds: Vec<f32>, row: usize },
    /// Indexes into a codebook, scaled per block of [`BLOCKWISE_ELEMENTS`] elements (one scale of 1
    /// for the unscaled kinds).
    Coded { indexes: Bytes, codebook: Box<[f32; CODEBOOK_ENTRIES]>, scales: Option<Vec<f32>> },
}

/// Entries of the codebook of every 8-bit compression.
pub(super) const CODEBOOK_ENTRIES: usize = 256;
/// Elements that share one scale in the blockwise compression (bitsandbytes' block).
pub(super) const BLOCKWISE_ELEMENTS: usize = 4096;

/// Cuts the buffer into its parts; `None` unless it is exactly as long as they are together.
pub(super) fn split_payload(
    buffer: &Bytes,
    dtype: WireDtype,
    compression: Compression,
    count: usize,
    row: usize,
) -> Option<Payload> {
    let holds = |element_bytes: usize| count.checked_mul(element_bytes) == Some(buffer.len());
    if count == 0 && compression != Compression::None {
        return (buffer.len() <= MAX_EMPTY_BYTES).then(|| Payload::Raw(Bytes::new()));
    }
    match compression {
        Compression::None if holds(dtype.size_bytes()) => Some(Payload::Raw(buffer.clone())),
        Compression::None if dtype == WireDtype::Bf16 && holds(4) => {
            Some(Payload::WideBf16(buffer.clone()))
        }
        Compression::None => None,
        Compression::Float16 => holds(2).then(|| Payload::Half(buffer.clone())),
        Compression::MeanStd16Bit => mean_std(buffer, count, row),
        Compression::Uniform8Bit | Compression::Quantile8Bit => {
            let mut parts = PayloadParts(buffer.clone());
            parts.expect_count(CODEBOOK_ENTRIES)?;
            let codebook = parts.codebook()?;
            let indexes = parts.exactly(count)?;
            Some(Payload::Coded { indexes, codebook, scales: None })
        }
        Compression::Blockwise8Bit => {
            let blocks = count.div_ceil(BLOCKWISE_ELEMENTS);
            let mut parts = PayloadParts(buffer.clone());
            parts.expect_count(blocks)?;
            parts.expect_count(CODEBOOK_ENTRIES)?;
            let scales = parts.floats(blocks)?;
            let codebook = parts.codebook()?;
            let indexes = parts.exactly(count)?;
            Some(Payload::Coded { indexes, codebook, scales: Some(scales) })
        }
    }
}

pub(super) fn mean_std(buffer: &Bytes, count: usize, row: usize) -> Option<Payload> {
    let rows = count.checked_div(row).unwrap_or(0);
    let mut parts = PayloadParts(buffer.clone());
    let values = parts.take(count.checked_mul(2)?)?;
    let means = parts.floats(rows)?;
    let stds = parts.floats(rows)?;
    parts.0.is_empty().then_some(Payload::MeanStd { values, means, stds, row })
}

/// What is left of a compound buffer.
pub(super) struct PayloadParts(Bytes);

impl PayloadParts {
    fn take(&mut self, bytes: usize) -> Option<Bytes> {
        (bytes <= self.0.len()).then(|| self.0.split_to(bytes))
    }

    fn exactly(self, bytes: usize) -> Option<Bytes> {
        (bytes == self.0.len()).then_some(self.0)
    }

    fn expect_count(&mut self, expected: usize) -> Option<()> {
        let bytes = self.take(8)?;
        let count = u64::from_le_bytes(*bytes.first_chunk()?);
        (usize::try_from(count) == Ok(expected)).then_some(())
    }

    fn floats(&mut self, count: usize) -> Option<Vec<f32>> {
        let bytes = self.take(count.checked_mul(4)?)?;
        Some(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }

    fn codebook(&mut self) -> Option<Box<[f32; CODEBOOK_ENTRIES]>> {
        self.floats(CODEBOOK_ENTRIES)?.into_boxed_slice().try_into().ok()
    }
}

/// Decodes elements of `N` bytes from element `start` on.
pub(super) fn read<const N: usize>(
    raw: &[u8],
    start: usize,
    out: &mut [f32],
    decode: impl Fn([u8; N]) -> f32,
) {
    let elements = raw.as_chunks::<N>().0;
    for (value, bytes) in out.iter_mut().zip(elements.get(start..).unwrap_or_default()) {
        *value = decode(*bytes);
    }
}
