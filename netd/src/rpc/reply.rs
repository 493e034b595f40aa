//! Result tensors on their way out, in the compression that the server announces or that the
//! request asks for.

use bytes::Bytes;
use shared::dtype::DType;
use swarm::wire::compression;
use swarm::wire::messages::{Compression, Tensor};
use swarm::wire::tensor::{WireDtype, raw_tensor, supports};

use super::Failure;

/// Conversions up to this size are done where they come up: about 20 µs.
pub const INLINE_BYTES: u64 = 64 << 10;

/// The tensor of `shape` whose raw elements are `bytes`, in `kind`. A tensor without elements is
/// never compressed.
///
/// # Errors
/// With the text for the client: a compression that is not defined for the dtype.
pub(super) async fn encode(
    shape: &[usize],
    dtype: WireDtype,
    bytes: Bytes,
    kind: Compression,
) -> Result<Tensor, Failure> {
    if kind == Compression::None || bytes.is_empty() {
        return Ok(raw_tensor(shape, dtype, bytes)?);
    }
    if bytes.len() as u64 <= INLINE_BYTES {
        return Ok(compression::encode(shape, dtype, bytes, kind)?);
    }
    let shape = shape.to_vec();
    let task = tokio::task::spawn_blocking(move || compression::encode(&shape, dtype, bytes, kind));
    match task.await {
        Ok(tensor) => Ok(tensor?),
        Err(error) => Err(Failure::runtime(format!("compress the result: {error}"))),
    }
}

/// The compressions of the tensors of an answer: those that the request asks for, else the server's
/// own. There are as many `asked` as tensors (see `RequestMetadata::output_compression`).
///
/// # Errors
/// For a number that names none; the text is that of protobuf in Python.
pub(super) fn kinds(
    asked: Option<&[i128]>,
    count: usize,
    own: Compression,
) -> Result<Vec<Compression>, Failure> {
    let Some(asked) = asked else {
        return Ok(vec![own; count]);
    };
    let kind = |code: &i128| {
        let known = i32::try_from(*code).ok().map(Compression::try_from);
        known.and_then(Result::ok).ok_or_else(|| {
            Failure::bad(format!("Enum CompressionType has no name defined for value {code}"))
        })
    };
    asked.iter().map(kind).collect()
}

/// Whether outputs of `dtype` can be compressed as a server is told to.
pub fn possible(dtype: DType, setting: shared::config::Compression) -> bool {
    supports(dtype.into(), wire(setting))
}

/// The number on the wire of a setting.
pub(super) fn wire(setting: shared::config::Compression) -> Compression {
    use shared::config::Compression as Setting;
    match setting {
        Setting::None => Compression::None,
        Setting::MeanStd16Bit => Compression::MeanStd16Bit,
        Setting::Float16 => Compression::Float16,
        Setting::Quantile8Bit => Compression::Quantile8Bit,
        Setting::Uniform8Bit => Compression::Uniform8Bit,
        Setting::Blockwise8Bit => Compression::Blockwise8Bit,
    }
}
