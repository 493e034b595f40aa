//! The files that a checkpoint may have, of safetensors and of PyTorch.

use std::fs::File;
use std::path::Path;

use crate::header::{Header, HeaderError};
use crate::torch;

/// The index of a checkpoint and the single file that is there without one, in the order of preference
/// (petals `server/from_pretrained.py`).
pub const CHECKPOINTS: [(&str, &str); 2] = [
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
];

/// Reads what the checkpoint file at `path`, `file_len` bytes long, holds: one of PyTorch if its name ends with
/// `.bin` or `.pt`, else of safetensors.
///
/// # Errors
/// As [`Header::read`] and [`torch::read`].
pub fn header_of(path: &Path, file: &File, file_len: u64) -> Result<Header, HeaderError> {
    match path.extension().is_some_and(|end| end == "bin" || end == "pt") {
        true => torch::read(file, file_len),
        false => Header::read(file, file_len),
    }
}
