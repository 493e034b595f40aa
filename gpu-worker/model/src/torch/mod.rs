//! Checkpoint files of PyTorch (`torch.save`, format of torch 1.6 and later): a zip archive of a
//! pickle, which says what tensors there are, and of their storages, which are served from where
//! they lie. Nothing of the file is executed: the pickle is read by an interpreter of our own
//! (`pickle.rs`) that knows the few names which tensors need, and refuses every other.
//!
//! ```text
//! NAME/data.pkl     { tensor name: _rebuild_tensor_v2(storage KEY of TYPE, offset, shape, strides, ...) }
//! NAME/data/KEY     bytes of a storage, stored (not compressed), little-endian
//! NAME/byteorder    "little", in newer files
//! ```
//! A file is an allegation like any other. What it says is checked against the archive (`zip.rs`),
//! whose entries must be stored, distinct, inside the file and apart from each other, and a tensor
//! must lie within its storage. The format before 1.6 (a row of pickles without an archive) is
//! refused.

#[cfg(test)]
mod fuzz;
mod pickle;
mod zip;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use pickle::{StoredTensor, storage_type};
use zip::{Archive, ZipError};

use crate::header::{Header, HeaderError, TensorInfo};

/// Longest accepted pickle: about 100 times that of a checkpoint file with a thousand tensors.
const MAX_PICKLE_BYTES: u64 = 16 << 20;

/// First bytes of the old format: a pickle of protocol 2 of the magic number
/// 0x1950a86a20f9469cfc6c.
const OLD_MAGIC: [u8; 14] =
    [0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];

/// Why a file cannot be used, as the end of a sentence about it.
type Reason = String;

/// What `file`, `file_len` bytes long, holds, in the form of a safetensors header whose data begins at
/// 0.
///
/// # Errors
/// [`HeaderError::File`] when it is no such file, was cut short or wants to import what tensors do not
/// need, [`HeaderError::Tensor`] for a tensor that does not lie in its storage, [`HeaderError::Read`]
/// when it cannot be read.
pub fn read(file: &File, file_len: u64) -> Result<Header, HeaderError> {
    let bad = |reason: Reason| HeaderError::File(reason);
    let failed = |error: ZipError| match error {
        ZipError::Io(source) => HeaderError::Read(source),
        ZipError::Bad(reason) => bad(reason),
    };
    refuse_old(file, file_len)?;
    let archive = Archive::read(file, file_len).map_err(failed)?;
    let root = archive.root("data.pkl").map_err(bad)?;
    if let Some(order) = archive.bytes(file, &format!("{root}byteorder"), 16).map_err(failed)?
        && order != b"little"
    {
        return Err(bad("was written on a big-endian machine".to_owned()));
    }
    let pickle =
        archive.bytes(file, &format!("{root}data.pkl"), MAX_PICKLE_BYTES).map_err(failed)?;
    let pickle = pickle.ok_or_else(|| bad("has no data.pkl".to_owned()))?;
    let mut tensors = BTreeMap::new();
    for (name, tensor) in pickle::tensors(&pickle).map_err(|e| bad(e.to_string()))? {
        let entry = archive.entry(&format!("{root}data/{}", tensor.key));
        let info = place(&tensor, entry).map_err(|reason| {
            let name = name.chars().take(200).collect();
            HeaderError::Tensor { name, reason }
        })?;
        tensors.insert(name, info);
    }
    Ok(Header { tensors, metadata: BTreeMap::new(), data_start: 0 })
}

fn refuse_old(file: &File, file_len: u64) -> Result<(), HeaderError> {
    let mut first = [0; OLD_MAGIC.len()];
    if file_len < first.len() as u64 {
        return Err(HeaderError::File(format!(
            "was cut short: {file_len} bytes are no checkpoint; download it again"
        )));
    }
    file.read_exact_at(&mut first, 0).map_err(HeaderError::Read)?;
    if first == OLD_MAGIC {
        let why = "has the format of torch before 1.6, which is not supported; load it with torch and save it again, or convert it to safetensors";
        return Err(HeaderError::File(why.to_owned()));
    }
    Ok(())
}

/// Where the bytes of a tensor lie, `storage` being first byte and length of its storage.
fn place(tensor: &StoredTensor, storage: Option<(u64, u64)>) -> Result<TensorInfo, Reason> {
    let (start, len) = storage.ok_or_else(|| {
        format!(
            "lies in storage {:?}, which the file lacks; the file is incomplete, download it again",
            tensor.key
        )
    })?;
    let kind =
        storage_type(&tensor.storage).ok_or_else(|| format!("has type {:?}", tensor.storage))?;
    if tensor.elements.checked_mul(kind.bytes).is_none_or(|bytes| bytes > len) {
        return Err(format!(
            "lies in a storage of {} elements where the file has {len} bytes",
            tensor.elements
        ));
    }
    let outside = || format!("is outside of its storage of {} elements", tensor.elements);
    let count =
        tensor.shape.iter().try_fold(1u64, |n, side| n.checked_mul(*side)).ok_or_else(outside)?;
    if count > 0 && !is_contiguous(&tensor.shape, &tensor.strides) {
        return Err(format!(
            "has shape {:?} with strides {:?}, only tensors without gaps are supported; save it again with .contiguous()",
            tensor.shape, tensor.strides
        ));
    }
    let end = tensor.offset.checked_add(count).filter(|end| *end <= tensor.elements);
    let end = end.ok_or_else(outside)?;
    // No overflow: what lies inside the storage lies inside the file.
    let at = |element: u64| start + element * kind.bytes;
    Ok(TensorInfo {
        dtype: kind.word.to_owned(),
        shape: tensor.shape.clone(),
        data_offsets: (at(tensor.offset), at(end)),
    })
}

/// Row by row without gaps; the stride of a side of one element does not matter.
fn is_contiguous(shape: &[u64], strides: &[u64]) -> bool {
    let mut wanted = 1u64;
    for (side, stride) in shape.iter().zip(strides).rev() {
        if *side != 1 && *stride != wanted {
            return false;
        }
        wanted = wanted.saturating_mul(*side);
    }
    shape.len() == strides.len()
}

#[cfg(test)]
mod tests;
