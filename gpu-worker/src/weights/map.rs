//! Weights where they lie: the files that the manifest names, mapped read-only and never copied.
//! Pages of memory that hold weights belong to the page cache, so that a restarted worker finds
//! them there, and several workers share them.
//!
//! A file is mapped only if it is what prepare checked (length and time of modification). It must
//! not be changed while it is mapped: prepared files never are (they are replaced by renaming, and
//! stay while they are locked: `hold`), a checkpoint is the operator's; cutting one short while it
//! is served ends the worker with a sentence ([`guard`]), and the next start finds the
//! file changed.
#![allow(
    unsafe_code,
    reason = "mapping files is the purpose of this module; every use is behind a safe interface"
)]

pub mod guard;
mod hold;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::ptr::NonNull;

use kernels::WeightView;
use model::manifest::{AdapterBlocks, FileEntry, Manifest, TensorEntry};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use shared::block::{BlockIndex, Span};
use shared::config::QuantType;

use crate::block::AdapterView;

/// Why weights could not be mapped. All of them mean that prepare must run again.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// A file is gone or cannot be mapped.
    #[error("cannot {action} weights file {path:?}")]
    File {
        /// What was attempted.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file is not the one that was checked.
    #[error("weights file {0:?} changed since it was checked; start again")]
    Changed(PathBuf),
    /// The manifest says nothing of a block of the span.
    #[error("the manifest does not describe block {0}")]
    MissingBlock(BlockIndex),
    /// A tensor does not lie within its file, or does not fit its shape.
    #[error("the manifest describes tensor {name} of block {block} wrongly")]
    BadTensor {
        /// The block.
        block: u32,
        /// The tensor.
        name: String,
    },
}

/// The mapped weights of a span.
#[derive(Debug)]
pub struct MappedWeights {
    files: BTreeMap<u32, FileMap>,
    blocks: BTreeMap<u32, BTreeMap<String, TensorEntry>>,
    adapters: Vec<AdapterBlocks>,
}

impl MappedWeights {
    /// Maps what `manifest` names for `span`, and asks the kernel to read it ahead. `mapped` is
    /// called for each tensor.
    ///
    /// # Errors
    /// [`MapError`], which names the file or the tensor.
    pub fn map(
        manifest: &Manifest,
        span: Span,
        mut mapped: impl FnMut(),
    ) -> Result<MappedWeights, MapError> {
        let mut weights = MappedWeights {
            files: BTreeMap::new(),
            blocks: BTreeMap::new(),
            adapters: vec![AdapterBlocks::new(); manifest.adapters.len()],
        };
        for block in span.blocks() {
            let tensors = manifest.block(block).ok_or(MapError::MissingBlock(block))?;
            for (name, tensor) in tensors {
                weights.add(manifest, block, name, tensor)?;
                mapped();
            }
            weights.blocks.insert(block.0, tensors.clone());
            for (index, adapter) in manifest.adapters.iter().enumerate() {
                let Some(parts) = adapter.get(&block.0) else {
                    continue;
                };
                for (name, part) in parts {
                    weights.add(manifest, block, name, &part.a)?;
                    weights.add(manifest, block, name, &part.b)?;
                    mapped();
                }
                if let Some(own) = weights.adapters.get_mut(index) {
                    own.insert(block.0, parts.clone());
                }
            }
        }
        Ok(weights)
    }

    /// A tensor of a block by its name within the block; a vector comes as a matrix of one row.
    pub fn tensor(&self, block: BlockIndex, name: &str) -> Option<WeightView<'_>> {
        let tensor = self.blocks.get(&block.0)?.get(name)?;
        view(self.files.get(&tensor.file)?, tensor)
    }

    /// What adapter `index` adds to the matrix `name` of a block, if it does.
    pub fn adapter(&self, index: usize, block: BlockIndex, name: &str) -> Option<AdapterView<'_>> {
        let part = self.adapters.get(index)?.get(&block.0)?.get(name)?;
        Some(AdapterView {
            a: view(self.files.get(&part.a.file)?, &part.a)?,
            b: view(self.files.get(&part.b.file)?, &part.b)?,
            scale: part.scale,
        })
    }

    /// Number of adapters.
    pub fn adapter_count(&self) -> usize {
        self.adapters.len()
    }

    /// Bytes of the adapters.
    pub fn adapter_bytes(&self) -> u64 {
        let blocks = self.adapters.iter().flat_map(BTreeMap::values);
        blocks.flat_map(BTreeMap::values).map(|part| part.a.len + part.b.len).sum()
    }

    /// Bytes of the tensors of the blocks by how they are stored: plain numbers, INT8, NF4.
    pub fn bytes_by_format(&self) -> [(QuantType, u64); 3] {
        let tensors = || self.blocks.values().flat_map(BTreeMap::values);
        [QuantType::None, QuantType::Int8, QuantType::Nf4].map(|quant| {
            let own = tensors().filter(|t| t.quant == quant).map(|t| t.len);
            (quant, own.sum())
        })
    }

    /// Bytes of the mapped tensors of the blocks.
    pub fn bytes(&self) -> u64 {
        self.blocks.values().flat_map(BTreeMap::values).map(|t| t.len).sum()
    }

    /// Maps the file of a tensor, unless it is mapped, and checks that the tensor lies in it.
    fn add(
        &mut self,
        manifest: &Manifest,
        block: BlockIndex,
        name: &str,
        tensor: &TensorEntry,
    ) -> Result<(), MapError> {
        let bad = || MapError::BadTensor { block: block.0, name: name.to_owned() };
        self.file(manifest, tensor.file).ok_or_else(bad)??;
        let file = self.files.get(&tensor.file).ok_or_else(bad)?;
        file.bytes(tensor).ok_or_else(bad)?;
        view(file, tensor).ok_or_else(bad)?;
        file.read_ahead(tensor);
        Ok(())
    }

    fn file(&mut self, manifest: &Manifest, index: u32) -> Option<Result<(), MapError>> {
        let entry = manifest.files.get(index as usize)?;
        if self.files.contains_key(&index) {
            return Some(Ok(()));
        }
        Some(FileMap::open(entry).map(|file| {
            self.files.insert(index, file);
        }))
    }
}

fn view<'a>(file: &'a FileMap, tensor: &TensorEntry) -> Option<WeightView<'a>> {
    let (outputs, inputs) = match tensor.shape.as_slice() {
        [inputs] => (1, *inputs),
        [outputs, inputs] => (*outputs, *inputs),
        _ => return None,
    };
    let (outputs, inputs) = (usize::try_from(outputs).ok()?, usize::try_from(inputs).ok()?);
    WeightView::quantized(tensor.quant, tensor.dtype, outputs, inputs, file.bytes(tensor)?).ok()
}

/// One file, mapped whole. Only what is used takes memory.
#[derive(Debug)]
struct FileMap {
    base: NonNull<u8>,
    len: usize,
    _known: guard::Known,
    /// Held open for its lock ([`hold`]).
    _file: File,
}

// SAFETY: the mapping is read-only, stays where it is for the life of the value and belongs to no
// thread.
unsafe impl Send for FileMap {}
// SAFETY: as above; it is only ever read.
unsafe impl Sync for FileMap {}

impl FileMap {
    fn open(entry: &FileEntry) -> Result<FileMap, MapError> {
        let failed = |action, source| MapError::File { action, path: entry.path.clone(), source };
        let changed = || MapError::Changed(entry.path.clone());
        let file = File::open(&entry.path).map_err(|e| failed("open", e))?;
        let now = FileEntry::of(&entry.path, &file).map_err(|e| failed("look at", e))?;
        if now != *entry {
            return Err(changed());
        }
        hold::in_use(&file, &entry.path).map_err(|e| failed("lock", e))?;
        let len =
            usize::try_from(entry.len).ok().and_then(NonZeroUsize::new).ok_or_else(changed)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe { mmap(None, len, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, &file, 0) };
        let base = base.map_err(|errno| failed("map", errno.into()))?;
        Ok(FileMap {
            base: base.cast(),
            len: len.get(),
            _known: guard::Known::new(base.addr().get(), len.get(), &entry.path),
            _file: file,
        })
    }

    fn bytes(&self, tensor: &TensorEntry) -> Option<&[u8]> {
        let (start, len) =
            (usize::try_from(tensor.offset).ok()?, usize::try_from(tensor.len).ok()?);
        let end = start.checked_add(len)?;
        // SAFETY: the mapping holds `len` readable bytes for the life of `self`, and nobody in this
        // process writes them; that nobody else does is what the head of this file asks
        // for.
        let all = unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) };
        all.get(start..end)
    }

    /// Only a wish: on failure pages are read when they are touched.
    fn read_ahead(&self, tensor: &TensorEntry) {
        let Some(bytes) = self.bytes(tensor) else {
            return;
        };
        let start = bytes.as_ptr().addr() - self.base.as_ptr().addr();
        let page_start = start & !(PAGE - 1);
        // SAFETY: `page_start <= start < self.len`, since the tensor lies inside the mapping and is
        // not empty.
        let from: NonNull<c_void> = unsafe { self.base.add(page_start) }.cast();
        // SAFETY: the range is inside the mapping; the advice changes no content.
        let _ =
            unsafe { madvise(from, start - page_start + bytes.len(), MmapAdvise::MADV_WILLNEED) };
    }
}

/// madvise wants the start of a page; the largest page size of the supported machines.
const PAGE: usize = 64 << 10;

impl Drop for FileMap {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are what mmap returned, and borrows of the mapping ended with
        // `self`.
        let unmapped = unsafe { munmap(self.base.cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap takes back what mmap gave");
    }
}
