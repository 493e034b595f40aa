//! One file per downloaded block, `models--ORG--NAME/sepal/COMMIT/block-N.safetensors`: the block's
//! tensors under their names in the checkpoint, copied byte by byte. It appears under its name only
//! when it is whole, and never changes after that.
//!
//! A download writes `block-N.safetensors.partial`: header first, then the tensors in the order of
//! the file; its length tells where to go on after an interruption, in this process or a later one.
//! Whoever writes it holds a lock on it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::time::Instant;

use model::header::{Header, TensorInfo, header_bytes};
use serde_json::{Value, json};
use tracing::info;

use super::{Hub, is_ranged};
use crate::checkpoint::{self, Checkpoint};
use crate::disk_cache::{touch, wait_for_lock};
use crate::error::PrepareError;
use crate::progress::{PrepareProgress, Watch};
use crate::source::{Wanted, checked};

/// The data of a block file begins at a multiple of this.
const ALIGNMENT: usize = 64;

/// A tensor and where it lies on the Hub.
pub(super) struct RemoteTensor {
    pub(super) name: String,
    pub(super) file: String,
    pub(super) info: TensorInfo,
    /// First byte in the file.
    start: u64,
}

impl RemoteTensor {
    pub(super) fn len(&self) -> u64 {
        self.info.bytes()
    }
}

impl Hub {
    /// The folder of the files of blocks.
    pub(super) fn blocks_folder(&self) -> PathBuf {
        self.root.join("sepal").join(&self.commit)
    }

    /// Whether any block was downloaded.
    pub(super) fn has_blocks(&self) -> bool {
        std::fs::read_dir(self.blocks_folder()).is_ok_and(|mut entries| entries.next().is_some())
    }

    /// The file of a block.
    pub(super) fn block_path(&self, block: u32) -> PathBuf {
        self.blocks_folder().join(format!("block-{block}.safetensors"))
    }

    /// The file of a block, downloaded if need be.
    pub(super) fn block_file(
        &mut self,
        checkpoint: &Checkpoint,
        block: u32,
        wanted: &[Wanted],
        watch: &mut Watch<'_>,
    ) -> Result<PathBuf, PrepareError> {
        self.piece(self.block_path(block), checkpoint, wanted, watch)
    }

    /// The file at `path` with some of the tensors, downloaded if need be.
    pub(super) fn piece(
        &mut self,
        path: PathBuf,
        checkpoint: &Checkpoint,
        wanted: &[Wanted],
        watch: &mut Watch<'_>,
    ) -> Result<PathBuf, PrepareError> {
        if path.is_file() {
            touch(&path);
            return Ok(path);
        }
        if self.offline {
            return Err(self.not_downloaded(path));
        }
        let parts = self.parts(checkpoint, wanted, watch)?;
        let head = head(&parts);
        let total = file_bytes(&head, &parts);
        let write = |error| PrepareError::write(&path, error);
        let folder = self.blocks_folder();
        std::fs::create_dir_all(&folder).map_err(write)?;
        let partial = path.with_extension("safetensors.partial");
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&partial)
            .map_err(write)?;
        wait_for_lock(&file, &partial, watch)?;
        if path.is_file() {
            // Another process was faster.
            return Ok(path);
        }
        let done = resume(&mut file, &head).map_err(write)?.min(total);
        self.disk.make_room(total - done, watch)?;
        let piece = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        info!(model = self.name, piece, bytes = total, from = done, "downloading");
        let (start, mut now_done) = (Instant::now(), done);
        let skip = done.saturating_sub(head.len() as u64);
        self.write_parts(&mut file, &parts, skip, &mut |count| {
            now_done += count;
            watch(PrepareProgress::Download { done: now_done, total })
        })?;
        let bytes = now_done - done;
        let mb_per_s = bytes as f64 / 1e6 / start.elapsed().as_secs_f64().max(1e-9);
        info!(piece, bytes, mb_per_s = (mb_per_s * 10.0).round() / 10.0, "downloaded");
        file.sync_all().and_then(|()| std::fs::rename(&partial, &path)).map_err(write)?;
        Ok(path)
    }

    /// Downloads the data of `parts` but for its first `done` bytes, in runs that lie side by side
    /// on the Hub.
    fn write_parts(
        &self,
        file: &mut File,
        parts: &[RemoteTensor],
        done: u64,
        count: &mut dyn FnMut(u64) -> Result<(), PrepareError>,
    ) -> Result<(), PrepareError> {
        let mut skip = done;
        let mut at = 0;
        while let Some(first) = parts.get(at) {
            let mut end = first.start + first.len();
            at += 1;
            while let Some(next) =
                parts.get(at).filter(|next| next.file == first.file && next.start == end)
            {
                end += next.len();
                at += 1;
            }
            let length = end - first.start;
            if skip >= length {
                skip -= length;
                continue;
            }
            let range = first.start + skip..end;
            skip = 0;
            let mut each = |bytes: &[u8]| {
                let written = file.write_all(bytes);
                written.map_err(|error| PrepareError::write(&self.root, error))?;
                count(bytes.len() as u64)
            };
            self.ranged(&first.file, range, &mut each, &mut |_| Ok(()))?;
        }
        Ok(())
    }

    /// Where the tensors lie, in the order of their files and of their places in them. Each has the
    /// type, the shape and the size that the model needs.
    pub(super) fn parts(
        &mut self,
        checkpoint: &Checkpoint,
        wanted: &[Wanted],
        watch: &mut Watch<'_>,
    ) -> Result<Vec<RemoteTensor>, PrepareError> {
        let mut parts = Vec::with_capacity(wanted.len());
        for Wanted { full_name: name, shape, .. } in wanted {
            let file = checkpoint.file_of(name)?.to_owned();
            let header = self.header_of(&file, watch)?;
            let found = header.tensors.get(name).map(|info| (info.clone(), header.data_start));
            let (info, data_start) = found.ok_or_else(|| {
                PrepareError::bad_tensor(
                    &self.snapshot().join(&file),
                    name,
                    "is missing; the checkpoint is incomplete",
                )
            })?;
            // The size of the file is not known here, so that nothing else bounds what its header
            // says.
            let (begin, end) = info.data_offsets;
            if data_start.checked_add(end).is_none_or(|end| i64::try_from(end).is_err()) {
                let path = self.snapshot().join(&file);
                let reason = format!("would end at byte {end}, which no file has");
                return Err(PrepareError::bad_tensor(&path, name, reason));
            }
            checked(&info, shape, name, &self.snapshot().join(&file))?;
            let start = data_start + begin;
            parts.push(RemoteTensor { name: name.clone(), file, info, start });
        }
        parts.sort_by(|a, b| (&a.file, a.start).cmp(&(&b.file, b.start)));
        Ok(parts)
    }

    /// The header of a safetensors file on the Hub, which is read once.
    pub(super) fn header_of(
        &mut self,
        file: &str,
        watch: &mut Watch<'_>,
    ) -> Result<&Header, PrepareError> {
        if !self.headers.contains_key(file) {
            let header = self.header(file, watch)?;
            self.headers.insert(file.to_owned(), header);
        }
        Ok(&self.headers[file])
    }

    /// The header of a checkpoint file on the Hub. A pickled one is downloaded whole for it.
    fn header(&self, file: &str, watch: &mut Watch<'_>) -> Result<Header, PrepareError> {
        let path = self.snapshot().join(file);
        if !is_ranged(file) {
            self.whole_file(file, watch)?;
            return Ok(checkpoint::open(&path)?.header);
        }
        let mut bytes = Vec::new();
        let mut take = |piece: &[u8]| {
            bytes.extend_from_slice(piece);
            Ok(())
        };
        self.ranged(file, 0..8, &mut take, watch)?;
        let first = <[u8; 8]>::try_from(bytes.as_slice()).unwrap_or_default();
        let length = header_bytes(first).map_err(|e| PrepareError::header(&path, e))?;
        let mut json = Vec::new();
        let mut take = |piece: &[u8]| {
            json.extend_from_slice(piece);
            Ok(())
        };
        self.ranged(file, 8..8 + length, &mut take, watch)?;
        Header::parse(&json).map_err(|e| PrepareError::header(&path, e))
    }
}

/// Length of a file of `parts` that begins with `head`.
pub(super) fn file_bytes(head: &[u8], parts: &[RemoteTensor]) -> u64 {
    parts.iter().map(RemoteTensor::len).fold(head.len() as u64, u64::saturating_add)
}

/// The header of the block file.
pub(super) fn head(parts: &[RemoteTensor]) -> Vec<u8> {
    let mut at = 0u64;
    let mut entries = BTreeMap::new();
    for part in parts {
        let end = at.saturating_add(part.len());
        let entry: Value =
            json!({"dtype": part.info.dtype, "shape": part.info.shape, "data_offsets": [at, end]});
        entries.insert(part.name.as_str(), entry);
        at = end;
    }
    let mut text = serde_json::to_vec(&entries).unwrap_or_default();
    let padded = (8 + text.len()).next_multiple_of(ALIGNMENT) - 8;
    text.resize(padded, b' ');
    let mut head = (text.len() as u64).to_le_bytes().to_vec();
    head.append(&mut text);
    head
}

/// Length of what is already there, if it begins with `head`; else `head` is written. The file is
/// at its end then.
fn resume(file: &mut File, head: &[u8]) -> std::io::Result<u64> {
    let length = file.metadata()?.len();
    let mut start = vec![0; head.len()];
    file.seek(SeekFrom::Start(0))?;
    if length < head.len() as u64 || file.read_exact(&mut start).is_err() || start != head {
        file.set_len(0)?;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(head)?;
    }
    file.seek(SeekFrom::End(0))
}
