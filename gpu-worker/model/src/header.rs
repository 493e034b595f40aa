//! Headers of safetensors files (format: huggingface/safetensors README). A file is an allegation
//! like everything that was not written by this process: the length of the header, the ranges of
//! the data and the size of the file must fit.
//!
//! ```text
//! 0      8 bytes   N, little-endian
//! 8      N bytes   JSON: name -> { dtype, shape, data_offsets: [begin, end] }, "__metadata__" -> { text: text }
//! 8 + N            data; offsets count from here, the last end is the end of the file
//! ```
//!
//! The JSON is read in one pass and counted while it is read: memory is bounded by the header's
//! length and the number of entries.
//!
//! # Discrepancies
//! Tests compare this reader with the crate `safetensors`, the reference implementation. Ours is
//! stricter: it refuses a name that appears twice, more than `MAX_ENTRIES` tensors or lines of
//! metadata, and more than `MAX_DIMENSIONS` dimensions. It is looser on types: a tensor may have a
//! type that is unknown here, so whoever reads a tensor compares its size with its shape
//! ([`TensorInfo::block_elements`]). It skips unknown fields of a tensor without reading them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use shared::dtype::DType;

/// Longest accepted header. The largest published ones have less than 2 MB; the reference implementation
/// takes 100 MB, which cost twenty times as much memory to read.
const MAX_HEADER_BYTES: u64 = 16 << 20;

/// Most tensors of one file, and most lines of metadata; the largest published checkpoints have
/// about 100,000 tensors in all.
const MAX_ENTRIES: usize = 1 << 18;

/// Most dimensions of a tensor, as in PyTorch.
const MAX_DIMENSIONS: usize = 64;

/// Most characters that an error quotes of a file.
const MAX_QUOTED_CHARS: usize = 200;

/// The entry that is no tensor.
const METADATA: &str = "__metadata__";

/// What a header says of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct TensorInfo {
    /// Type of the elements in the format's own words, for example `BF16`.
    pub dtype: String,
    /// Shape, slowest dimension first.
    #[serde(deserialize_with = "dimensions")]
    pub shape: Vec<u64>,
    /// First byte and one past the last, counted from the start of the data.
    pub data_offsets: (u64, u64),
}

/// A tensor that a checkpoint is to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedTensor {
    /// Its names, of which a checkpoint has one.
    pub names: Vec<String>,
    /// Its shape, slowest dimension first.
    pub shape: Vec<u64>,
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

/// Why the header of a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The file cannot be read.
    #[error("cannot be read")]
    Read(#[source] io::Error),
    /// The file is not a safetensors file or was cut short.
    #[error("{0}")]
    File(String),
    /// The header describes a tensor that cannot exist.
    #[error("tensor {name} {reason}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        reason: String,
    },
}

impl Header {
    /// Reads and checks the header of `file`, which is `file_len` bytes long.
    ///
    /// # Errors
    /// [`HeaderError`], whose text continues a sentence that begins with the name of the file.
    pub fn read(file: &File, file_len: u64) -> Result<Header, HeaderError> {
        let data_start = data_start(file, file_len)?;
        // Bounded by MAX_HEADER_BYTES above.
        let mut json = vec![0; (data_start - 8) as usize];
        file.read_exact_at(&mut json, 8).map_err(HeaderError::Read)?;
        let header = Header::parse(&json)?;
        let described = data_start.saturating_add(header.data_bytes()?);
        if described == file_len {
            return Ok(header);
        }
        let is_short = described > file_len;
        let what = if is_short { "was cut short" } else { "has bytes that no tensor claims" };
        Err(HeaderError::File(format!(
            "{what}: it has {file_len} bytes where its header describes {described}; download it again"
        )))
    }

    /// Reads the JSON of a header. The ranges are not compared with the length of the file.
    ///
    /// # Errors
    /// [`HeaderError::File`], and [`HeaderError::Tensor`] for a range that does not begin where the
    /// one before it ends.
    pub fn parse(json: &[u8]) -> Result<Header, HeaderError> {
        let bad = |error: &dyn fmt::Display| {
            let reason = quoted(&error.to_string());
            HeaderError::File(format!(
                "has a header that cannot be read ({reason}); download the file again"
            ))
        };
        let text = std::str::from_utf8(json).map_err(|e| bad(&e))?;
        let entries: Entries = serde_json::from_str(text).map_err(|e| bad(&e))?;
        let Entries { tensors, metadata } = entries;
        let header = Header { tensors, metadata, data_start: (8 + json.len()) as u64 };
        header.data_bytes()?;
        Ok(header)
    }

    /// Bytes of all tensors, which lie one after the other.
    fn data_bytes(&self) -> Result<u64, HeaderError> {
        let mut tensors: Vec<_> = self.tensors.iter().collect();
        tensors.sort_by_key(|(_, tensor)| tensor.data_offsets);
        let mut last = 0;
        for (name, tensor) in tensors {
            let (begin, end) = tensor.data_offsets;
            let reason = if begin > end {
                format!("ends at {end} before it begins at {begin}")
            } else if begin != last {
                format!("begins at {begin}, but the tensors before it end at {last}")
            } else {
                last = end;
                continue;
            };
            return Err(HeaderError::Tensor { name: quoted(name), reason });
        }
        Ok(last)
    }
}

/// The entries of a header as they are written.
#[derive(Default)]
struct Entries {
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Entries, D::Error> {
        struct Reader;

        impl<'de> Visitor<'de> for Reader {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with an entry for each tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Entries::default();
                let mut has_metadata = false;
                while let Some(name) = map.next_key::<String>()? {
                    if name != METADATA {
                        add(&mut entries.tensors, name, &mut map)?;
                    } else if std::mem::replace(&mut has_metadata, true) {
                        return Err(A::Error::duplicate_field(METADATA));
                    } else if let Some(Texts(texts)) = map.next_value()? {
                        entries.metadata = texts;
                    }
                }
                Ok(entries)
            }
        }

        deserializer.deserialize_map(Reader)
    }
}

/// Lines of metadata.
struct Texts(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Texts, D::Error> {
        struct Reader;

        impl<'de> Visitor<'de> for Reader {
            type Value = Texts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Texts, A::Error> {
                let mut texts = BTreeMap::new();
                while let Some(name) = map.next_key()? {
                    add(&mut texts, name, &mut map)?;
                }
                Ok(Texts(texts))
            }
        }

        deserializer.deserialize_map(Reader)
    }
}

/// Adds the next value of `map`, unless there is one of this name or there are too many.
fn add<'de, A: MapAccess<'de>, V: Deserialize<'de>>(
    entries: &mut BTreeMap<String, V>,
    name: String,
    map: &mut A,
) -> Result<(), A::Error> {
    if entries.len() == MAX_ENTRIES {
        return Err(A::Error::custom(format!("more than {MAX_ENTRIES} entries")));
    }
    match entries.entry(name) {
        Entry::Vacant(entry) => entry.insert(map.next_value()?),
        Entry::Occupied(entry) => {
            return Err(A::Error::custom(format!("{:?} appears twice", quoted(entry.key()))));
        }
    };
    Ok(())
}

/// A shape of at most [`MAX_DIMENSIONS`].
fn dimensions<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    struct Reader;

    impl<'de> Visitor<'de> for Reader {
        type Value = Vec<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of dimensions")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
            let mut shape = Vec::new();
            while let Some(side) = seq.next_element()? {
                if shape.len() == MAX_DIMENSIONS {
                    return Err(A::Error::custom(format!("more than {MAX_DIMENSIONS} dimensions")));
                }
                shape.push(side);
            }
            Ok(shape)
        }
    }

    deserializer.deserialize_seq(Reader)
}

/// Text from a file, cut to what an error may quote.
fn quoted(text: &str) -> String {
    text.chars().take(MAX_QUOTED_CHARS).collect()
}

/// Length of a header from the first eight bytes of a file.
///
/// # Errors
/// [`HeaderError::File`] when no header is that long.
pub fn header_bytes(first: [u8; 8]) -> Result<u64, HeaderError> {
    let len = u64::from_le_bytes(first);
    if len == 0 || len > MAX_HEADER_BYTES {
        return Err(HeaderError::File(format!(
            "is no safetensors file: its header would have {len} bytes, the limit is {MAX_HEADER_BYTES}"
        )));
    }
    Ok(len)
}

fn data_start(file: &File, file_len: u64) -> Result<u64, HeaderError> {
    if file_len < 8 {
        return Err(HeaderError::File(format!(
            "was cut short: {file_len} bytes are no safetensors file; download it again"
        )));
    }
    let mut first = [0; 8];
    file.read_exact_at(&mut first, 0).map_err(HeaderError::Read)?;
    let len = header_bytes(first)?;
    if len > file_len - 8 {
        return Err(HeaderError::File(format!(
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

    /// Number of elements of type `dtype`; `None` when the shape does not describe [`TensorInfo::bytes`].
    pub fn block_elements(&self, dtype: DType) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1u64, |n, &side| n.checked_mul(side))?;
        let bytes = elements.checked_mul(dtype.size_bytes() as u64)?;
        (bytes == self.bytes()).then_some(elements)
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
mod tests;
