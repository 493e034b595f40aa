//! Makes the blocks of a span ready: every tensor found, checked, and either left in the checkpoint
//! or converted.

use std::collections::BTreeMap;

use model::manifest::{AdapterBlocks, AdapterEntry, MANIFEST_VERSION, Manifest, TensorEntry};
use shared::block::{BlockIndex, Span};
use shared::dtype::DType;
use tracing::warn;

use crate::adapter::Adapter;
use crate::error::PrepareError;
use crate::files::Files;
use crate::inspect::Inspected;
use crate::progress::PrepareProgress;
use crate::source::{SourceTensor, Wanted};
use crate::store::{Prepared, StorePlace, stored_form};

impl Inspected {
    /// Checks all blocks of `span`, converts what needs it, and describes where everything lies.
    /// `progress` is called before each block, after each tensor and during downloads; its error
    /// stops the work. Prepared files stay marked as in use as long as this value lives.
    ///
    /// # Errors
    /// [`PrepareError`], which names the file, the tensor and what is wrong with it.
    pub fn make_ready(
        &mut self,
        span: Span,
        mut progress: impl FnMut(PrepareProgress) -> Result<(), PrepareError>,
    ) -> Result<Manifest, PrepareError> {
        if span.end().0 > self.facts.num_blocks {
            return Err(PrepareError::BadSpan { span, num_blocks: self.facts.num_blocks });
        }
        if let Some(record) = &self.record {
            record.check_span(&self.folder, span)?;
        }
        let total = span.end().0 - span.start().0;
        let (mut files, mut blocks) = (Files::default(), BTreeMap::new());
        let mut adapters = vec![AdapterBlocks::new(); self.adapters.len()];
        for (number, block) in (1..).zip(span.blocks()) {
            progress(PrepareProgress::Block { block: number, blocks: total })?;
            blocks.insert(block.0, self.block(block, &mut files, &mut progress)?);
            for (index, parts) in adapters.iter_mut().enumerate() {
                let own = self.adapter(index, block, &mut files, &mut progress)?;
                parts.insert(block.0, own);
            }
        }
        let (files, held) = files.into_parts();
        self._held = held;
        Ok(Manifest {
            version: MANIFEST_VERSION,
            model: self.facts.clone(),
            config: self.config.clone(),
            files,
            blocks,
            adapters,
        })
    }

    /// The tensors of a block under the names that they have in the checkpoint.
    pub(crate) fn wanted(&mut self, block: BlockIndex) -> Result<Vec<Wanted>, PrepareError> {
        let mut wanted: Vec<Wanted> =
            self.spec.tensors(block.0 as usize).into_iter().map(Wanted::from).collect();
        for tensor in &mut wanted {
            tensor.full_name = self.checkpoint.name_of(&tensor.full_name)?;
        }
        Ok(wanted)
    }

    /// Makes the tensors of a block available in the checkpoint.
    pub(crate) fn fetch(
        &mut self,
        block: BlockIndex,
        progress: &mut impl FnMut(PrepareProgress) -> Result<(), PrepareError>,
    ) -> Result<Vec<Wanted>, PrepareError> {
        let wanted = self.wanted(block)?;
        if let Some(hub) = &mut self.hub {
            hub.fetch(&mut self.checkpoint, block.0, &wanted, progress)?;
        }
        wanted.iter().try_for_each(|t| self.checkpoint.open(&t.full_name))?;
        Ok(wanted)
    }

    /// The tensors of a block that was fetched, each with how it is to be stored.
    pub(crate) fn sources<'a>(
        &'a self,
        wanted: &'a [Wanted],
    ) -> Result<Vec<SourceTensor<'a>>, PrepareError> {
        let source = |t: &'a Wanted| {
            let (file, info) = self.checkpoint.tensor(&t.full_name)?;
            let tensor = SourceTensor::new(&t.name, &t.full_name, &t.shape, file, info)?;
            let quant = self.facts.quant_type;
            Ok(tensor.stored_as(self.spec.quant_of(&t.name, t.shape.len(), quant)))
        };
        wanted.iter().map(source).collect()
    }

    fn block(
        &mut self,
        block: BlockIndex,
        files: &mut Files,
        progress: &mut impl FnMut(PrepareProgress) -> Result<(), PrepareError>,
    ) -> Result<BTreeMap<String, TensorEntry>, PrepareError> {
        if let Some(converted) = self.converted() {
            let tensors = converted.block(block, files)?;
            converted.check(block, &self.cache_dir, files, progress)?;
            return Ok(tensors);
        }
        let wanted = self.fetch(block, progress)?;
        let sources = self.sources(&wanted)?;
        let dtype = self.facts.dtype;
        let place = StorePlace::new(&self.cache_dir, &self.facts.name, block, dtype, &sources);
        stored(&place, dtype, &sources, files, progress)
    }

    /// The parts of adapter `index` for a block.
    fn adapter(
        &self,
        index: usize,
        block: BlockIndex,
        files: &mut Files,
        progress: &mut impl FnMut(PrepareProgress) -> Result<(), PrepareError>,
    ) -> Result<BTreeMap<String, AdapterEntry>, PrepareError> {
        let Some(adapter) = self.adapters.get(index) else {
            return Ok(BTreeMap::new());
        };
        let dtype = Adapter::served_dtype(&self.facts);
        let sources = adapter.sources(block)?;
        if sources.is_empty() {
            return Ok(BTreeMap::new());
        }
        let model = format!("{}-adapter-{}", self.facts.name, adapter.short_name());
        let place = StorePlace::new(&self.cache_dir, &model, block, dtype, &sources);
        let mut entries = stored(&place, dtype, &sources, files, progress)?;
        let parts = adapter.parts(block).map(|(name, part)| {
            let entry = AdapterEntry {
                a: entries.remove(&part.a)?,
                b: entries.remove(&part.b)?,
                scale: part.scale,
            };
            Some((name.to_owned(), entry))
        });
        let parts: Option<_> = parts.collect();
        parts.ok_or_else(|| PrepareError::bad_file(&adapter.file.shown, "was not read whole"))
    }
}

/// Checks and converts the tensors of a block, unless that is done, and tells where each lies.
fn stored(
    place: &StorePlace,
    dtype: DType,
    sources: &[SourceTensor<'_>],
    files: &mut Files,
    progress: &mut impl FnMut(PrepareProgress) -> Result<(), PrepareError>,
) -> Result<BTreeMap<String, TensorEntry>, PrepareError> {
    let prepared = match place.reuse() {
        Some(prepared) => Some(prepared),
        None => {
            match place.make(dtype, sources, |bytes| progress(PrepareProgress::Tensor { bytes })) {
                Ok(prepared) => Some(prepared),
                // Nothing had to be converted and all was checked: only the mark of it is missing.
                Err(PrepareError::Write { path, source })
                    if sources.iter().all(|t| t.usable_as(dtype)) =>
                {
                    warn!(path = %path.display(), %source, "cannot save the check of the weights; the next start repeats it");
                    None
                }
                Err(error) => return Err(error),
            }
        }
    };
    let entries: Result<_, PrepareError> = sources
        .iter()
        .map(|t| Ok((t.name.to_owned(), entry(t, dtype, prepared.as_ref(), files)?)))
        .collect();
    // In use for as long as this process runs, so that workers find it.
    if let Some(prepared) = prepared {
        files.keep(prepared.file);
    }
    entries
}

/// Where the tensor is to be mapped from.
fn entry(
    tensor: &SourceTensor<'_>,
    dtype: DType,
    prepared: Option<&Prepared>,
    files: &mut Files,
) -> Result<TensorEntry, PrepareError> {
    let shape = tensor.shape.to_vec();
    if tensor.usable_as(dtype) {
        let file = files.index(tensor.file);
        return Ok(TensorEntry {
            file,
            offset: tensor.offset,
            len: tensor.len,
            dtype,
            quant: tensor.quant,
            shape,
        });
    }
    let len = tensor.stored_bytes(dtype).unwrap_or(u64::MAX);
    let found = prepared.and_then(|p| {
        let info = p.header.tensors.get(tensor.name)?;
        let (word, stored_shape) = stored_form(tensor.quant, dtype, tensor.shape, len);
        let fits = info.dtype == word && info.shape == stored_shape && info.bytes() == len;
        fits.then_some((p, p.header.data_start + info.data_offsets.0))
    });
    let (prepared, offset) = found.ok_or_else(|| {
        PrepareError::bad_tensor(
            tensor.shown,
            tensor.full_name,
            "was not converted; remove the cache folder and try again",
        )
    })?;
    Ok(TensorEntry {
        file: files.index(&prepared.entry),
        offset,
        len,
        dtype,
        quant: tensor.quant,
        shape,
    })
}
