//! Headers of safetensors files (format: huggingface/safetensors README). A file is an allegation like everything that was
//! not written by this process: the length of the header, the ranges of the data and the size of the file must fit.
//!
//! ```text
//! 0      8 bytes   N, little-endian
//! 8      N bytes   JSON: name -> { dtype, shape, data_offsets: [begin, end] }, "__metadata__" -> { text: text }
//! 8 + N            data; offsets count from here, the last end is the end of the file
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::Deserialize;
use shared::dtype::DType;

use super::error::PrepareError;

/// Longest accepted header; the reference implementation has the same limit.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Most tensors of one file; the largest published checkpoints have a few thousand in all.
const MAX_TENSORS: usize = 1 << 20;

/// What a header says of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct TensorInfo {
    /// Type of the elements in the format's own words, for example `BF16`.
    pub dtype: String,
    /// Shape, slowest dimension first.
    pub shape: Vec<u64>,
    /// First byte and one past the last, counted from the start of the data.
    pub data_offsets: (u64, u64),
}

/// A checked header.
#[derive(Debug)]
pub struct Header {
    /// The tensors by name.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// Free text of the writer.
    pub metadata: BTreeMap<String, String>,
    /// Offset of the data in the file.
    pub data_start: u64,
}

#[derive(Deserialize)]
struct RawHeader {
    #[serde(rename = "__metadata__", default)]
    metadata: Option<BTreeMap<String, String>>,
    #[serde(flatten)]
    tensors: BTreeMap<String, TensorInfo>,
}

impl Header {
    /// Reads and checks the header of `file`, which is `file_len` bytes long; `path` is for messages.
    ///
    /// # Errors
    /// [`PrepareError::BadFile`] when the file is no safetensors file or was cut short, [`PrepareError::Read`] when it cannot be
    /// read.
    pub fn read(file: &File, path: &Path, file_len: u64) -> Result<Header, PrepareError> {
        let data_start = data_start(file, path, file_len)?;
        // Bounded by MAX_HEADER_BYTES above.
        let mut json = vec![0; (data_start - 8) as usize];
        file.read_exact_at(&mut json, 8)
            .map_err(|e| PrepareError::read(path, e))?;
        let header = Header {
            data_start,
            ..Header::parse(&json, path)?
        };
        header.check_ranges(path, file_len)?;
        Ok(header)
    }

    /// Reads the JSON of a header. What the ranges say of the length of the file is not checked.
    ///
    /// # Errors
    /// [`PrepareError::BadFile`], and [`PrepareError::BadTensor`] for a range that ends before it begins.
    pub fn parse(json: &[u8], path: &Path) -> Result<Header, PrepareError> {
        let bad = |reason: String| PrepareError::bad_file(path, reason);
        let raw: RawHeader = serde_json::from_slice(json).map_err(|e| {
            bad(format!(
                "has a header that cannot be read ({e}); download the file again"
            ))
        })?;
        if raw.tensors.len() > MAX_TENSORS {
            return Err(bad(format!(
                "names {} tensors, more than {MAX_TENSORS}",
                raw.tensors.len()
            )));
        }
        let header = Header {
            tensors: raw.tensors,
            metadata: raw.metadata.unwrap_or_default(),
            data_start: 8 + json.len() as u64,
        };
        header.last_byte(path)?;
        Ok(header)
    }

    /// One past the last byte that a tensor has, counted from the start of the data.
    fn last_byte(&self, path: &Path) -> Result<u64, PrepareError> {
        let mut last = 0;
        for (name, tensor) in &self.tensors {
            let (begin, end) = tensor.data_offsets;
            if begin > end {
                let reason = format!("ends at {end} before it begins at {begin}");
                return Err(PrepareError::bad_tensor(path, name, reason));
            }
            last = last.max(end);
        }
        Ok(last)
    }

    fn check_ranges(&self, path: &Path, file_len: u64) -> Result<(), PrepareError> {
        let data_len = file_len - self.data_start;
        let last = self.last_byte(path)?;
        if last == data_len {
            return Ok(());
        }
        let what = if last > data_len {
            "was cut short"
        } else {
            "has bytes that no tensor claims"
        };
        let whole = self.data_start.saturating_add(last);
        let reason = format!(
            "{what}: it has {file_len} bytes where its header describes {whole}; download it again"
        );
        Err(PrepareError::bad_file(path, reason))
    }
}

fn data_start(file: &File, path: &Path, file_len: u64) -> Result<u64, PrepareError> {
    let bad = |reason: String| PrepareError::bad_file(path, reason);
    if file_len < 8 {
        return Err(bad(format!(
            "was cut short: {file_len} bytes are no safetensors file; download it again"
        )));
    }
    let mut len = [0; 8];
    file.read_exact_at(&mut len, 0)
        .map_err(|e| PrepareError::read(path, e))?;
    let len = u64::from_le_bytes(len);
    if len > MAX_HEADER_BYTES {
        return Err(bad(format!(
            "is no safetensors file: its header would have {len} bytes, the limit is {MAX_HEADER_BYTES}"
        )));
    }
    if len > file_len - 8 {
        return Err(bad(format!(
            "was cut short: its header alone has {len} bytes, the file {file_len}; download it again"
        )));
    }
    Ok(8 + len)
}

impl TensorInfo {
    /// The element type, if it is one that blocks know.
    pub fn block_dtype(&self) -> Option<DType> {
        match self.dtype.as_str() {
            "F32" => Some(DType::F32),
            "BF16" => Some(DType::Bf16),
            "F16" => Some(DType::F16),
            _ => None,
        }
    }

    /// Number of elements; `None` when it does not fit a `u64`.
    pub fn elements(&self) -> Option<u64> {
        self.shape
            .iter()
            .try_fold(1u64, |n, &side| n.checked_mul(side))
    }

    /// Bytes of the data.
    pub fn bytes(&self) -> u64 {
        self.data_offsets.1 - self.data_offsets.0
    }
}

/// The format's own word for a block dtype.
pub fn dtype_word(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::Bf16 => "BF16",
        DType::F16 => "F16",
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    const GOOD: &[u8] =
        br#"{"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},"__metadata__":{"k":"v"}}"#;

    fn read(bytes: &[u8]) -> Result<Header, PrepareError> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Header::read(&file, Path::new("x.safetensors"), bytes.len() as u64)
    }

    fn file(json: &[u8], data: usize) -> Vec<u8> {
        [&(json.len() as u64).to_le_bytes()[..], json, &vec![0; data]].concat()
    }

    #[test]
    fn a_header_tells_tensors_metadata_and_where_the_data_begins() {
        let header = read(&file(GOOD, 8)).unwrap();
        assert_eq!(header.data_start, 8 + GOOD.len() as u64);
        assert_eq!(header.metadata["k"], "v");
        let tensor = &header.tensors["a"];
        assert_eq!(
            (tensor.block_dtype(), tensor.elements(), tensor.bytes()),
            (Some(DType::Bf16), Some(4), 8)
        );
    }

    #[test]
    fn data_that_no_tensor_claims_is_refused() {
        let error = read(&file(GOOD, 9)).unwrap_err().to_string();
        assert!(error.contains("no tensor claims"), "{error}");
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }

        #[test]
        fn no_changed_byte_panics(at in 0usize..100, byte in any::<u8>(), data in 0usize..20) {
            let mut bytes = file(GOOD, data);
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(header) = read(&bytes) {
                prop_assert!(header.tensors.values().all(|t| t.bytes() <= data as u64));
            }
        }
    }
}
