//! The prepared file of one block in the cache folder: the tensors that had to be converted to the
//! block dtype, or quantized (bytes in the format of `kernels::quant`), as a safetensors file. Its
//! metadata names exactly what it was made from, so that it is reused as long as that is unchanged;
//! it exists only after *all* tensors of the block were checked. A block whose tensors are served
//! from the checkpoint itself gets a file without tensors, the mark that they were checked.

mod check;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use kernels::ops::convert;
use kernels::quant::{int8, nf4};
use model::header::{Header, dtype_word};
use model::manifest::FileEntry;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use shared::block::BlockIndex;
use shared::config::QuantType;
use shared::dtype::DType;
use shared::files::write_atomically;

use crate::disk_cache::touch;
use crate::error::PrepareError;
use crate::source::SourceTensor;
use crate::temp_files::remove_abandoned;
use model::file_lock::hold;

pub use check::check;

/// Raised when the content of prepared files changes for the same source.
pub const FORMAT_VERSION: u32 = 2;

/// Key of the identity in the metadata.
const IDENTITY: &str = "sepal.identity";

/// Key of the SHA-256 of the data in the metadata. Files of earlier versions have none.
const SUM: &str = "sepal.sha256";

/// Length of a SHA-256 in hexadecimal digits.
const SUM_DIGITS: usize = 64;

/// Bytes of a source read at a time; a multiple of every element size.
const PIECE_BYTES: usize = 1 << 20;

/// Data starts at a multiple of this in the file: a cache line, which is also what vector loads
/// like.
const ALIGNMENT: usize = 64;

/// A finished prepared file.
#[derive(Debug)]
pub struct Prepared {
    pub entry: FileEntry,
    pub header: Header,
    /// The open file: in use while it is.
    pub file: File,
}

/// What identifies a prepared file.
#[derive(Debug, Serialize, Deserialize)]
pub struct FileIdentity {
    /// [`FORMAT_VERSION`] of the writer.
    pub format: u32,
    pub block: u32,
    /// Type of hidden states and of what is not quantized.
    pub dtype: String,
    /// File, first byte and format of every tensor.
    pub tensors: BTreeMap<String, (FileEntry, u64, QuantType)>,
}

impl FileIdentity {
    /// What a prepared file says of itself.
    pub fn of(header: &Header) -> Option<FileIdentity> {
        serde_json::from_str(header.metadata.get(IDENTITY)?).ok()
    }
}

/// Which tensors a prepared file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    /// Those that cannot be served from where they lie.
    Converted,
    /// All of them.
    All,
}

/// The name and identity of the prepared file of a block.
#[derive(Debug)]
pub struct StorePlace {
    path: PathBuf,
    identity: String,
    holds: Holds,
}

impl StorePlace {
    /// Where the file for `block`, made of `tensors`, belongs in `cache_dir`.
    pub fn new(
        cache_dir: &Path,
        model: &str,
        block: BlockIndex,
        dtype: DType,
        tensors: &[SourceTensor<'_>],
    ) -> StorePlace {
        StorePlace::in_cache(cache_dir, model, block, dtype, identity(block, dtype, tensors))
    }

    /// The file of this identity in `cache_dir`.
    fn in_cache(
        cache_dir: &Path,
        model: &str,
        block: BlockIndex,
        dtype: DType,
        identity: String,
    ) -> StorePlace {
        let model: String = model
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' })
            .collect();
        let name = format!("block-{block}-{dtype}-{:016x}.safetensors", hash(&identity));
        StorePlace {
            path: cache_dir.join("prepared").join(format!("m-{model}")).join(name),
            identity,
            holds: Holds::Converted,
        }
    }

    /// The file for `block`, made of `tensors` and holding all of them, at `path` in a folder that may
    /// go to another machine: a sum stands for its identity, which names files of this one.
    pub fn whole(
        path: PathBuf,
        block: BlockIndex,
        dtype: DType,
        tensors: &[SourceTensor<'_>],
    ) -> StorePlace {
        let identity = hex(&Sha256::digest(identity(block, dtype, tensors)));
        StorePlace { path, identity, holds: Holds::All }
    }

    /// The finished file, if it is there, whole, and made from the same source.
    pub fn reuse(&self) -> Option<Prepared> {
        let file = File::open(&self.path).ok()?;
        hold(&file, &self.path).ok()?;
        touch(&self.path);
        let entry = FileEntry::of(&self.path, &file).ok()?;
        let header = Header::read(&file, entry.len).ok()?;
        (header.metadata.get(IDENTITY) == Some(&self.identity)).then_some(Prepared {
            entry,
            header,
            file,
        })
    }

    /// Checks every tensor of `tensors` and writes those that need conversion to `dtype`. `done` is
    /// called after each tensor.
    ///
    /// # Errors
    /// [`PrepareError::BadTensor`] for numbers that are none or do not fit, [`PrepareError::Write`]
    /// when the file cannot be written, and what `done` returns.
    pub fn make(
        &self,
        dtype: DType,
        tensors: &[SourceTensor<'_>],
        mut done: impl FnMut(u64) -> Result<(), PrepareError>,
    ) -> Result<Prepared, PrepareError> {
        let is_held = |t: &SourceTensor<'_>| self.holds == Holds::All || !t.usable_as(dtype);
        for tensor in tensors.iter().filter(|t| !is_held(t)) {
            read_pieces(tensor, |_| Ok(()))?;
            done(tensor.len)?;
        }
        let mut converted: Vec<_> = tensors.iter().filter(|t| is_held(t)).collect();
        // Quantized ones have whole cache lines: first, so that all of them begin with one.
        converted.sort_by_key(|t| t.quant == QuantType::None);
        let mut failure = None;
        let head = |sum: &str| head(&self.identity, sum, dtype, &converted);
        let folder = self.path.parent().unwrap_or(Path::new("."));
        remove_abandoned(folder);
        let written = std::fs::create_dir_all(folder).and_then(|()| {
            write_atomically(&self.path, |file| {
                // The sum is known at the end, and as long as these zeros.
                file.write_all(&head(&"0".repeat(SUM_DIGITS)))?;
                let mut summed = Summed { file, sum: Sha256::new() };
                for tensor in &converted {
                    let one = convert_into(&mut summed, tensor, dtype);
                    if let Err(error) = one.and_then(|()| done(tensor.len)) {
                        failure = Some(error);
                        return Err(io::ErrorKind::Other.into());
                    }
                }
                let sum = hex(&summed.sum.finalize());
                file.seek(SeekFrom::Start(0))?;
                file.write_all(&head(&sum))
            })
        });
        if let Some(error) = failure {
            return Err(error);
        }
        written.map_err(|e| PrepareError::write(&self.path, e))?;
        self.reuse().ok_or_else(|| {
            PrepareError::write(
                &self.path,
                io::Error::other("what was written cannot be read back"),
            )
        })
    }
}

/// Type and shape of a tensor of this shape in a prepared file; `len` is its length there.
pub(crate) fn stored_form(
    quant: QuantType,
    dtype: DType,
    shape: &[u64],
    len: u64,
) -> (&'static str, Vec<u64>) {
    match quant {
        QuantType::None => (dtype_word(dtype), shape.to_vec()),
        QuantType::Int8 | QuantType::Nf4 => ("U8", vec![len]),
    }
}

/// A file that sums up what is written to it.
struct Summed<'a> {
    file: &'a mut File,
    sum: Sha256,
}

impl Write for Summed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.sum.update(bytes.get(..written).unwrap_or_default());
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn convert_into(
    file: &mut Summed<'_>,
    tensor: &SourceTensor<'_>,
    dtype: DType,
) -> Result<(), PrepareError> {
    let write = |file: &mut Summed<'_>, bytes: &[u8]| {
        file.write_all(bytes).map_err(|e| PrepareError::write(Path::new("prepared block"), e))
    };
    if tensor.quant == QuantType::None {
        return converted(tensor, dtype, |bytes| write(file, bytes));
    }
    // The scales of scales need the whole matrix: in memory as f32, one matrix at a time.
    let mut weights = Vec::with_capacity(usize::try_from(tensor.elements).unwrap_or(0));
    converted(tensor, dtype, |bytes| {
        let start = weights.len();
        weights.resize(start + bytes.len() / dtype.size_bytes(), 0.0);
        convert::to_f32(dtype, bytes, &mut weights[start..]);
        Ok(())
    })?;
    let inputs = tensor.shape.last().map_or(1, |&inputs| inputs as usize);
    let bytes = match tensor.quant {
        QuantType::Int8 => int8::encode(&weights, inputs),
        QuantType::Nf4 | QuantType::None => nf4::encode(&weights),
    };
    write(file, &bytes)
}

/// Gives `each` the tensor in `dtype`, piece by piece.
fn converted(
    tensor: &SourceTensor<'_>,
    dtype: DType,
    mut each: impl FnMut(&[u8]) -> Result<(), PrepareError>,
) -> Result<(), PrepareError> {
    let most = piece_bytes(tensor) / tensor.dtype.size_bytes();
    let (mut values, mut bytes) = (vec![0.0; most], vec![0; most * dtype.size_bytes()]);
    read_pieces(tensor, |piece| {
        let elements = piece.len() / tensor.dtype.size_bytes();
        let (values, bytes) =
            (&mut values[..elements], &mut bytes[..elements * dtype.size_bytes()]);
        convert::to_f32(tensor.dtype, piece, values);
        convert::from_f32(dtype, values, bytes);
        if !convert::all_finite(dtype, bytes) {
            let reason = format!(
                "holds numbers that do not fit {dtype}; serve it in another type (--torch_dtype)"
            );
            return Err(PrepareError::bad_tensor(tensor.shown, tensor.full_name, reason));
        }
        each(bytes)
    })
}

/// Bytes of the largest piece of `tensor`.
fn piece_bytes(tensor: &SourceTensor<'_>) -> usize {
    PIECE_BYTES.min(usize::try_from(tensor.len).unwrap_or(PIECE_BYTES))
}

/// Reads the data of `tensor` piece by piece and refuses numbers that are none.
fn read_pieces(
    tensor: &SourceTensor<'_>,
    mut each: impl FnMut(&[u8]) -> Result<(), PrepareError>,
) -> Result<(), PrepareError> {
    use std::os::unix::fs::FileExt;
    let path = tensor.shown;
    let mut piece = vec![0; piece_bytes(tensor)];
    let mut at = 0;
    while at < tensor.len {
        let length = (tensor.len - at).min(PIECE_BYTES as u64) as usize;
        let piece = &mut piece[..length];
        tensor
            .source
            .read_exact_at(piece, tensor.offset + at)
            .map_err(|e| PrepareError::read(path, e))?;
        if !convert::all_finite(tensor.dtype, piece) {
            let reason =
                "holds NaN or infinite numbers; the checkpoint is damaged, download it again";
            return Err(PrepareError::bad_tensor(path, tensor.full_name, reason));
        }
        each(piece)?;
        at += length as u64;
    }
    Ok(())
}

/// What a file for `block` is made from, as text.
fn identity(block: BlockIndex, dtype: DType, tensors: &[SourceTensor<'_>]) -> String {
    let of = |t: &SourceTensor<'_>| (t.name.to_owned(), (t.file.clone(), t.offset, t.quant));
    identity_text(block, dtype, tensors.iter().map(of).collect())
}

fn identity_text(
    block: BlockIndex,
    dtype: DType,
    tensors: BTreeMap<String, (FileEntry, u64, QuantType)>,
) -> String {
    let (format, dtype) = (FORMAT_VERSION, dtype.name().to_owned());
    let identity = FileIdentity { format, block: block.0, dtype, tensors };
    serde_json::to_string(&identity).unwrap_or_default()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Length and header of a file with `tensors` in `dtype`, one after the other, whose data have this
/// sum.
fn head(identity: &str, sum: &str, dtype: DType, tensors: &[&SourceTensor<'_>]) -> Vec<u8> {
    let mut json = serde_json::Map::new();
    json.insert("__metadata__".into(), serde_json::json!({ IDENTITY: identity, SUM: sum }));
    let mut at = 0u64;
    for tensor in tensors {
        let len = tensor.stored_bytes(dtype).unwrap_or(u64::MAX);
        let end = at.saturating_add(len);
        let (word, shape) = stored_form(tensor.quant, dtype, tensor.shape, len);
        let value = serde_json::json!({ "dtype": word, "shape": shape, "data_offsets": [at, end] });
        json.insert(tensor.name.to_owned(), value);
        at = end;
    }
    let mut text = serde_json::Value::Object(json).to_string().into_bytes();
    text.resize((8 + text.len()).next_multiple_of(ALIGNMENT) - 8, b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// FNV-1a; only spreads names, the identity itself is compared.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, byte| {
        (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
