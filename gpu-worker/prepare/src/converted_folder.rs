//! A folder that `sepal convert` wrote: its blocks are mapped as they are.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use model::BlockSpec;
use model::header::Header;
use model::manifest::{FileEntry, TensorEntry};
use shared::block::BlockIndex;
use shared::config::QuantType;
use shared::model::ModelFacts;
use tracing::warn;

use crate::error::PrepareError;
use crate::files::Files;
use crate::folder::{BlockFile, FolderRecord};
use crate::progress::Watch;
use crate::source::stored_bytes;
use crate::store::{self, StorePlace, stored_form};
use model::file_lock::hold;

/// Quantized tensors begin with a cache line.
const ALIGNMENT: u64 = 64;

/// The folder, and what its blocks must be.
#[derive(Clone, Copy, Debug)]
pub struct Converted<'a> {
    pub folder: &'a Path,
    pub record: &'a FolderRecord,
    /// Form of the blocks.
    pub spec: &'a BlockSpec,
    pub facts: &'a ModelFacts,
}

impl Converted<'_> {
    /// Where the tensors of a block lie, by the header of its file.
    ///
    /// # Errors
    /// [`PrepareError::BadFile`] and [`PrepareError::BadTensor`] when the file is not what the record
    /// and the model say.
    pub fn block(
        &self,
        block: BlockIndex,
        files: &mut Files,
    ) -> Result<BTreeMap<String, TensorEntry>, PrepareError> {
        let known = self.known(block)?;
        let path = self.folder.join(&known.file);
        let failed = |e| PrepareError::read(&path, e);
        let file = File::open(&path).map_err(failed)?;
        // Keeps the file from being deleted by commands of Sepal.
        hold(&file, &path).map_err(failed)?;
        let entry = FileEntry::of(&path, &file).map_err(failed)?;
        if entry.len != known.bytes {
            let reason = format!(
                "has {} bytes where {} were written; copy it again",
                entry.len, known.bytes
            );
            return Err(PrepareError::bad_file(&path, reason));
        }
        let header = Header::read(&file, entry.len).map_err(|e| PrepareError::header(&path, e))?;
        let index = files.index(&entry);
        files.keep(file);
        let tensors = self.spec.tensors(block.0 as usize).into_iter().map(|tensor| {
            let shape: Vec<u64> = tensor.shape.iter().map(|&side| side as u64).collect();
            let quant = self.spec.quant_of(&tensor.name, shape.len(), self.facts.quant_type);
            let entry = self.tensor(&header, &tensor.name, shape, quant).ok_or_else(|| {
                let reason = "is not as this model has it; convert the model again";
                PrepareError::bad_tensor(&path, &tensor.name, reason)
            })?;
            Ok((tensor.name, TensorEntry { file: index, ..entry }))
        });
        tensors.collect()
    }

    /// Checks the values of a block by the SHA-256 in the header of its file. A file that was checked
    /// is remembered in `cache_dir` as long as it does not change.
    ///
    /// # Errors
    /// [`PrepareError::BadFile`] when the values are others, [`PrepareError::Read`] when they cannot
    /// be read, and what `watch` returns.
    pub fn check(
        &self,
        block: BlockIndex,
        cache_dir: &Path,
        files: &mut Files,
        watch: &mut Watch<'_>,
    ) -> Result<(), PrepareError> {
        let path = self.folder.join(&self.known(block)?.file);
        let failed = |e| PrepareError::read(&path, e);
        let entry =
            File::open(&path).and_then(|file| FileEntry::of(&path, &file)).map_err(failed)?;
        let ModelFacts { name, dtype, .. } = self.facts;
        let mark = StorePlace::mark(cache_dir, name, block, *dtype, &entry);
        if let Some(checked) = mark.reuse() {
            files.keep(checked.file);
            return Ok(());
        }
        if let Some(wrong) = store::check(&path, watch)? {
            return Err(PrepareError::bad_file(&path, format!("{wrong}; copy it again")));
        }
        match mark.make(*dtype, &[], |_| Ok(())) {
            Ok(checked) => files.keep(checked.file),
            Err(error) => {
                warn!(%error, "cannot save the check of the weights; the next start repeats it");
            }
        }
        Ok(())
    }

    fn known(&self, block: BlockIndex) -> Result<&BlockFile, PrepareError> {
        self.record.blocks.get(&block.0).ok_or_else(|| {
            PrepareError::bad_file(self.folder, format!("does not hold block {block}"))
        })
    }

    fn tensor(
        &self,
        header: &Header,
        name: &str,
        shape: Vec<u64>,
        quant: QuantType,
    ) -> Option<TensorEntry> {
        let (dtype, info) = (self.facts.dtype, header.tensors.get(name)?);
        let len = stored_bytes(quant, dtype, &shape)?;
        let (word, stored_shape) = stored_form(quant, dtype, &shape, len);
        let offset = header.data_start.checked_add(info.data_offsets.0)?;
        let alignment = match quant {
            QuantType::None => dtype.size_bytes() as u64,
            QuantType::Int8 | QuantType::Nf4 => ALIGNMENT,
        };
        let fits = info.dtype == word && info.shape == stored_shape && info.bytes() == len;
        let entry = TensorEntry { file: 0, offset, len, dtype, quant, shape };
        (fits && offset.is_multiple_of(alignment)).then_some(entry)
    }
}
