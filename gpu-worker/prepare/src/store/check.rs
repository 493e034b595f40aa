//! Whether a prepared file has the values that its header says, and the mark that it was checked.

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use model::header::Header;
use model::manifest::FileEntry;
use sha2::{Digest, Sha256};
use shared::block::BlockIndex;
use shared::config::QuantType;
use shared::dtype::DType;

use super::{IDENTITY, PIECE_BYTES, SUM, StorePlace, hex, identity_text};
use crate::error::PrepareError;
use crate::peek::open_quietly;
use crate::progress::{PrepareProgress, Watch};

/// What is wrong with the prepared file at `path`, for a sentence about it: whether it is whole and
/// has the sum that its header names. `None`: nothing.
///
/// # Errors
/// What `watch` returns, which is called for every piece that was read.
pub fn check(path: &Path, watch: &mut Watch<'_>) -> Result<Option<String>, PrepareError> {
    let mut stopped = None;
    let sum = has_sum(path, &mut || match watch(PrepareProgress::Alive) {
        Ok(()) => true,
        Err(error) => {
            stopped = Some(error);
            false
        }
    });
    match stopped {
        Some(error) => Err(error),
        None => Ok(sum.err()),
    }
}

/// Ends early, without a meaning, when `goes_on` does not.
fn has_sum(path: &Path, goes_on: &mut dyn FnMut() -> bool) -> Result<(), String> {
    let mut file = open_quietly(path).map_err(|error| error.to_string())?;
    let len = file.metadata().map_err(|error| error.to_string())?.len();
    let header = Header::read(&file, len).map_err(|error| error.to_string())?;
    if !header.metadata.contains_key(IDENTITY) {
        return Err("does not say what it was made from".to_owned());
    }
    let Some(wanted) = header.metadata.get(SUM) else {
        return Ok(());
    };
    file.seek(SeekFrom::Start(header.data_start)).map_err(|error| error.to_string())?;
    let (mut sum, mut piece) = (Sha256::new(), vec![0; PIECE_BYTES]);
    while goes_on() {
        match file.read(&mut piece).map_err(|error| error.to_string())? {
            0 => break,
            length => sum.update(piece.get(..length).unwrap_or_default()),
        }
    }
    match hex(&sum.finalize()) == *wanted {
        true => Ok(()),
        false => Err("does not have the SHA-256 that its header names".to_owned()),
    }
}

impl StorePlace {
    /// Where the cache remembers that `file`, which holds `block` and was made elsewhere, was checked:
    /// a file without tensors, which [`make`](StorePlace::make) writes of none.
    pub fn mark(
        cache_dir: &Path,
        model: &str,
        block: BlockIndex,
        dtype: DType,
        file: &FileEntry,
    ) -> StorePlace {
        let whole = BTreeMap::from([(String::new(), (file.clone(), 0, QuantType::None))]);
        let identity = identity_text(block, dtype, whole);
        StorePlace::in_cache(cache_dir, model, block, dtype, identity)
    }
}
