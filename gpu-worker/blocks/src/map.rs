//! Weights where they lie: the files that the manifest names, mapped read-only. A rank of a group
//! copies what of its shard does not lie in one piece (`tensor_part.rs`), a worker on a NUMA node everything
//! ([`Keep`]); nothing else is ever copied.
//! Pages of memory that hold weights belong to the page cache, so that a restarted worker finds
//! them there, and several workers share them.
//!
//! A worker gets the files as descriptors, which the supervisor opened ([`WeightFiles`]).
//!
//! A file is mapped only if it is what prepare checked (length and time of modification). It must
//! not be changed while it is mapped: prepared files never are (they are replaced by renaming, and
//! stay while they are locked: `shared::hold`), a checkpoint is the operator's; cutting one short while it
//! is served ends the worker with a sentence ([`guard`]), and the next start finds the
//! file changed.
#![allow(
    unsafe_code,
    reason = "mapping files is the purpose of this module; every use is behind a safe interface"
)]

pub mod guard;
mod tensor_part;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fs::File;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use kernels::WeightView;
use model::manifest::{AdapterEntry, FileEntry, Manifest, TensorEntry};
use model::shards::{Shard, Slice};
use model::weight_files::{self, WeightFileError, WeightFiles};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use shared::block::{BlockIndex, Span};
use shared::config::QuantType;
use tensor_part::HeldTensor;

use crate::AdapterView;

/// Why weights could not be mapped. All of them mean that prepare must run again.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// A file is gone, is not the one that was checked, or cannot be mapped.
    #[error(transparent)]
    File(#[from] WeightFileError),
    /// The manifest says nothing of a block of the span.
    #[error("the manifest does not describe block {0}")]
    MissingBlock(BlockIndex),
    /// A tensor does not lie within its file, or does not fit its shape.
    #[error("the manifest describes tensor {name} of block {block} wrongly")]
    BadTensor { block: u32, name: String },
}

/// Where weights lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// In the page cache, as far as they lie there in one piece.
    Mapped,
    /// In memory of this process, taken from its NUMA node.
    Copied,
}

/// The mapped weights of a span.
#[derive(Debug)]
pub struct MappedWeights {
    keep: Keep,
    /// Open, and not mapped yet.
    open: WeightFiles,
    files: BTreeMap<u32, FileMap>,
    blocks: BTreeMap<u32, BTreeMap<String, HeldTensor>>,
    adapters: Vec<BTreeMap<u32, BTreeMap<String, HeldAdapter>>>,
}

/// What is held of an adapter's matrices beside one matrix.
#[derive(Debug)]
struct HeldAdapter {
    a: HeldTensor,
    b: HeldTensor,
    scale: f32,
}

impl MappedWeights {
    /// Opens and maps what `manifest` names for `span`, and asks the kernel to read it ahead. `mapped`
    /// is called for each tensor.
    ///
    /// # Errors
    /// [`MapError`], which names the file or the tensor.
    pub fn map(
        manifest: &Manifest,
        span: Span,
        mapped: impl FnMut(),
    ) -> Result<MappedWeights, MapError> {
        let files = WeightFiles::open(manifest, span)?;
        MappedWeights::map_shard(manifest, span, files, None, Keep::Mapped, mapped)
    }

    /// [`map`](Self::map) of what the rank of `shard` holds, from files that are open already: unless
    /// all is to be copied, rows that follow each other are mapped where they lie, and other parts of
    /// matrices are copied.
    ///
    /// # Errors
    /// As there.
    pub fn map_shard(
        manifest: &Manifest,
        span: Span,
        open: WeightFiles,
        shard: Option<&Shard>,
        keep: Keep,
        mut mapped: impl FnMut(),
    ) -> Result<MappedWeights, MapError> {
        let mut weights = MappedWeights {
            keep,
            open,
            files: BTreeMap::new(),
            blocks: BTreeMap::new(),
            adapters: manifest.adapters.iter().map(|_| BTreeMap::new()).collect(),
        };
        for block in span.blocks() {
            let tensors = manifest.block(block).ok_or(MapError::MissingBlock(block))?;
            let mut own = BTreeMap::new();
            for (name, tensor) in tensors {
                let slice = slice_of(shard, name, tensor).ok_or_else(|| bad(block, name))?;
                if let Some(held) = weights.hold(manifest, block, name, tensor, slice)? {
                    own.insert(name.clone(), held);
                }
                mapped();
            }
            weights.blocks.insert(block.0, own);
            for (index, adapter) in manifest.adapters.iter().enumerate() {
                let mut own = BTreeMap::new();
                for (name, part) in adapter.get(&block.0).into_iter().flatten() {
                    let held = weights.hold_adapter(manifest, block, name, part, shard)?;
                    if let Some(held) = held {
                        own.insert(name.clone(), held);
                    }
                    mapped();
                }
                if let Some(blocks) = weights.adapters.get_mut(index) {
                    blocks.insert(block.0, own);
                }
            }
        }
        Ok(weights)
    }

    /// A tensor of a block by its name within the block; a vector comes as a matrix of one row.
    pub fn tensor(&self, block: BlockIndex, name: &str) -> Option<WeightView<'_>> {
        self.blocks.get(&block.0)?.get(name)?.view(&self.files)
    }

    /// What adapter `index` adds to the matrix `name` of a block, if it does.
    pub fn adapter(&self, index: usize, block: BlockIndex, name: &str) -> Option<AdapterView<'_>> {
        let part = self.adapters.get(index)?.get(&block.0)?.get(name)?;
        let (a, b) = (part.a.view(&self.files)?, part.b.view(&self.files)?);
        Some(AdapterView { a, b, scale: part.scale })
    }

    /// Number of adapters.
    pub fn adapter_count(&self) -> usize {
        self.adapters.len()
    }

    /// Bytes of the adapters.
    pub fn adapter_bytes(&self) -> u64 {
        let blocks = self.adapters.iter().flat_map(BTreeMap::values);
        blocks.flat_map(BTreeMap::values).map(|part| part.a.bytes() + part.b.bytes()).sum()
    }

    /// Bytes of the tensors of the blocks by how they are stored: plain numbers, INT8, NF4.
    pub fn bytes_by_format(&self) -> [(QuantType, u64); 3] {
        let tensors = || self.blocks.values().flat_map(BTreeMap::values);
        [QuantType::None, QuantType::Int8, QuantType::Nf4].map(|quant| {
            let own = tensors().filter(|t| t.quant() == quant).map(HeldTensor::bytes);
            (quant, own.sum())
        })
    }

    /// Bytes of the tensors of the blocks, as far as they are held.
    pub fn bytes(&self) -> u64 {
        self.blocks.values().flat_map(BTreeMap::values).map(HeldTensor::bytes).sum()
    }

    /// Bytes of copies, which are this process's own.
    pub fn copied_bytes(&self) -> u64 {
        let tensors = self.blocks.values().flat_map(BTreeMap::values);
        let adapters = self.adapters.iter().flat_map(BTreeMap::values).flat_map(BTreeMap::values);
        let factors = adapters.flat_map(|adapter| [&adapter.a, &adapter.b]);
        tensors.chain(factors).map(HeldTensor::copied_bytes).sum()
    }

    /// Holds `slice` of a tensor; `None` when that is nothing of it.
    fn hold(
        &mut self,
        manifest: &Manifest,
        block: BlockIndex,
        name: &str,
        tensor: &TensorEntry,
        slice: &Slice,
    ) -> Result<Option<HeldTensor>, MapError> {
        let bad = || bad(block, name);
        if *slice == Slice::None {
            return Ok(None);
        }
        self.file(manifest, tensor.file).ok_or_else(bad)??;
        let file = self.files.get(&tensor.file).ok_or_else(bad)?;
        let held = HeldTensor::new(file, tensor, slice, self.keep).ok_or_else(bad)?;
        held.read_ahead(file);
        Ok(Some(held))
    }

    /// Holds what `shard` has of the part of an adapter beside the matrix `name`.
    fn hold_adapter(
        &mut self,
        manifest: &Manifest,
        block: BlockIndex,
        name: &str,
        part: &AdapterEntry,
        shard: Option<&Shard>,
    ) -> Result<Option<HeldAdapter>, MapError> {
        let slices = match shard {
            Some(shard) => shard.adapter_slices(name),
            None => Some([Slice::All, Slice::All]),
        };
        let Some([a, b]) = slices else {
            return Ok(None);
        };
        let a = self.hold(manifest, block, name, &part.a, &a)?;
        let b = self.hold(manifest, block, name, &part.b, &b)?;
        let scale = part.scale;
        Ok(a.zip(b).map(|(a, b)| HeldAdapter { a, b, scale }))
    }

    fn file(&mut self, manifest: &Manifest, index: u32) -> Option<Result<(), MapError>> {
        let entry = manifest.files.get(index as usize)?;
        if self.files.contains_key(&index) {
            return Some(Ok(()));
        }
        let file = self.open.take(index)?;
        Some(FileMap::new(file, entry).map(|file| {
            self.files.insert(index, file);
        }))
    }
}

fn bad(block: BlockIndex, name: &str) -> MapError {
    MapError::BadTensor { block: block.0, name: name.to_owned() }
}

/// What is held of a tensor; `None` when it has another shape than the shard was cut for. A tensor
/// that blocks do not need is no rank's.
fn slice_of<'s>(shard: Option<&'s Shard>, name: &str, tensor: &TensorEntry) -> Option<&'s Slice> {
    let Some(shard) = shard else {
        return Some(&Slice::All);
    };
    let (Some(slice), Some(whole)) = (shard.slice(name), shard.whole_shape(name)) else {
        return Some(&Slice::None);
    };
    let shape = tensor.shape.iter().map(|&side| usize::try_from(side).ok());
    shape.eq(whole.iter().map(|&side| Some(side))).then_some(slice)
}

/// One file, mapped whole. Only what is used takes memory.
#[derive(Debug)]
struct FileMap {
    base: NonNull<u8>,
    len: usize,
    _known: guard::KnownMapping,
    /// Held open for its lock (`shared::hold`).
    _file: File,
}

// SAFETY: the mapping is read-only, stays where it is for the life of the value and belongs to no
// thread.
unsafe impl Send for FileMap {}
// SAFETY: as above; it is only ever read.
unsafe impl Sync for FileMap {}

impl FileMap {
    /// Maps a file. Its check is repeated: it may have been opened long ago.
    fn new(file: File, entry: &FileEntry) -> Result<FileMap, MapError> {
        weight_files::check(&file, entry)?;
        let len = usize::try_from(entry.len).ok().and_then(NonZeroUsize::new);
        let len = len.ok_or_else(|| WeightFileError::Changed(entry.path.clone()))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe { mmap(None, len, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, &file, 0) };
        let base = base.map_err(|errno| WeightFileError::File {
            action: "map",
            path: entry.path.clone(),
            source: errno.into(),
        })?;
        Ok(FileMap {
            base: base.cast(),
            len: len.get(),
            _known: guard::KnownMapping::new(base.addr().get(), len.get(), &entry.path),
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

    /// Asks for bytes of this file. Only a wish: on failure pages are read when they are touched.
    fn read_ahead(&self, bytes: &[u8]) {
        let start = bytes.as_ptr().addr().wrapping_sub(self.base.as_ptr().addr());
        if bytes.is_empty() || start.checked_add(bytes.len()).is_none_or(|end| end > self.len) {
            return;
        }
        let page_start = start & !(PAGE - 1);
        // SAFETY: `page_start <= start < self.len`, since the bytes lie inside the mapping and there
        // are some.
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
