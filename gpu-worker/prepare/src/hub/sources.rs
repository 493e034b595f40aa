//! What a block takes of a checkpoint on the Hub, without fetching it: ranges of headers, sizes of
//! files, and what lies in the cache already.

use std::collections::BTreeMap;
use std::path::PathBuf;

use model::survey::BlockSource;

use super::blocks::{RemoteTensor, file_bytes, head};
use super::{Hub, files_of, is_ranged, names};
use crate::checkpoint::Checkpoint;
use crate::error::PrepareError;
use crate::progress::Watch;
use crate::source::Wanted;

impl Hub {
    /// What must be fetched for `block`; `None` when the files that hold it are in the cache, where
    /// `checkpoint` opens them from now on.
    ///
    /// # Errors
    /// [`PrepareError`], for headers that describe another block too.
    pub fn source(
        &mut self,
        checkpoint: &mut Checkpoint,
        block: u32,
        wanted: &[Wanted],
        watch: &mut Watch<'_>,
    ) -> Result<Option<BlockSource>, PrepareError> {
        let mut files = files_of(checkpoint, wanted)?;
        let snapshot = self.snapshot();
        files.retain(|file| !snapshot.join(file).is_file());
        if files.is_empty() {
            return Ok(None);
        }
        if !files.iter().all(|file| is_ranged(file)) {
            return self.whole_files(files, watch).map(Some);
        }
        let path = self.block_path(block);
        if path.is_file() {
            return checkpoint.adopt(&path, &names(wanted)).map(|()| None);
        }
        if self.offline {
            return Err(self.not_downloaded(path));
        }
        let parts = self.parts(checkpoint, wanted, watch)?;
        let partial = path.with_extension("safetensors.partial");
        let done = std::fs::metadata(partial).map_or(0, |stat| stat.len());
        let left = file_bytes(&head(&parts), &parts).saturating_sub(done);
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Some(BlockSource {
            stored_bytes: parts.iter().map(RemoteTensor::len).fold(0, u64::saturating_add),
            missing: BTreeMap::from([(name, left)]),
        }))
    }

    /// Files without ranges: what they hold of the block is not known before they are there.
    fn whole_files(
        &mut self,
        files: Vec<String>,
        watch: &mut Watch<'_>,
    ) -> Result<BlockSource, PrepareError> {
        let mut missing = BTreeMap::new();
        for file in files {
            if self.offline {
                return Err(self.not_downloaded(self.snapshot().join(file)));
            }
            let bytes = match self.sizes.get(&file) {
                Some(bytes) => *bytes,
                None => self.describe_patiently(&file, watch)?.bytes,
            };
            self.sizes.insert(file.clone(), bytes);
            missing.insert(file, bytes);
        }
        Ok(BlockSource { stored_bytes: 0, missing })
    }

    /// Why a file is not to be had without a download.
    pub(super) fn not_downloaded(&self, looked: PathBuf) -> PrepareError {
        let cache = self.root.parent().unwrap_or(&self.root).to_owned();
        PrepareError::NotDownloaded { repo: self.name.clone(), looked, cache }
    }
}
