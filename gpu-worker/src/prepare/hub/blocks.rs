//! One file per downloaded block, `models--ORG--NAME/sepal/COMMIT/block-N.safetensors`: the block's tensors under their names
//! in the checkpoint, copied byte by byte. It appears under its name only when it is whole, and never changes after that.
//!
//! A download writes `block-N.safetensors.partial`: header first, then the tensors in the order of the file; its length tells
//! where to go on after an interruption, in this process or a later one. Whoever writes it holds a lock on it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tracing::info;

use super::{Alive, Hub};
use crate::prepare::checkpoint::Checkpoint;
use crate::prepare::disk_cache::touch;
use crate::prepare::error::PrepareError;
use crate::prepare::header::{Header, MAX_HEADER_BYTES, TensorInfo};

/// The data of a block file begins at a multiple of this.
const ALIGNMENT: usize = 64;
/// Time between two looks at another process that downloads the same block.
const LOCK_PERIOD: Duration = Duration::from_millis(100);
/// Time between two lines of progress on a terminal.
const SHOWN_EVERY: Duration = Duration::from_millis(200);

/// A tensor and where it lies on the Hub.
struct Part {
    name: String,
    file: String,
    info: TensorInfo,
    /// First byte in the file.
    start: u64,
}

impl Part {
    fn len(&self) -> u64 {
        self.info.bytes()
    }
}

impl Hub {
    fn blocks_folder(&self) -> PathBuf {
        self.root.join("sepal").join(&self.commit)
    }

    /// Whether any block was downloaded.
    pub(super) fn has_blocks(&self) -> bool {
        std::fs::read_dir(self.blocks_folder()).is_ok_and(|mut entries| entries.next().is_some())
    }

    /// The file of a block, downloaded if need be.
    pub(super) fn block_file(
        &mut self,
        checkpoint: &Checkpoint,
        block: u32,
        tensors: &[String],
        alive: &mut Alive<'_>,
    ) -> Result<PathBuf, PrepareError> {
        let path = self
            .blocks_folder()
            .join(format!("block-{block}.safetensors"));
        if path.is_file() {
            touch(&path);
            return Ok(path);
        }
        if self.offline {
            let cache = self.root.parent().unwrap_or(&self.root).to_owned();
            return Err(PrepareError::NotDownloaded {
                repo: self.name.clone(),
                looked: path,
                cache,
            });
        }
        let parts = self.parts(checkpoint, tensors, alive)?;
        let head = head(&parts);
        let total = parts
            .iter()
            .map(Part::len)
            .fold(head.len() as u64, u64::saturating_add);
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
        lock(&file, &partial, alive)?;
        if path.is_file() {
            // Another process was faster.
            return Ok(path);
        }
        let done = resume(&mut file, &head).map_err(write)?.min(total);
        self.disk.make_room(total - done, alive)?;
        info!(
            model = self.name,
            block,
            bytes = total,
            from = done,
            "downloading"
        );
        let mut shown = Shown::new(block, total, done);
        self.write_parts(
            &mut file,
            &parts,
            done.saturating_sub(head.len() as u64),
            &mut |count| {
                shown.add(count);
                alive()
            },
        )?;
        shown.end();
        file.sync_all()
            .and_then(|()| std::fs::rename(&partial, &path))
            .map_err(write)?;
        Ok(path)
    }

    /// Downloads the data of `parts` but for its first `done` bytes, in runs that lie side by side on the Hub.
    fn write_parts(
        &self,
        file: &mut File,
        parts: &[Part],
        done: u64,
        count: &mut dyn FnMut(u64) -> Result<(), PrepareError>,
    ) -> Result<(), PrepareError> {
        let mut skip = done;
        let mut at = 0;
        while let Some(first) = parts.get(at) {
            let mut end = first.start + first.len();
            at += 1;
            while let Some(next) = parts
                .get(at)
                .filter(|next| next.file == first.file && next.start == end)
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
            self.ranged(&first.file, range, &mut each, &mut || Ok(()))?;
        }
        Ok(())
    }

    /// Where the tensors lie, in the order of their files and of their places in them.
    fn parts(
        &mut self,
        checkpoint: &Checkpoint,
        tensors: &[String],
        alive: &mut Alive<'_>,
    ) -> Result<Vec<Part>, PrepareError> {
        let mut parts = Vec::with_capacity(tensors.len());
        for name in tensors {
            let file = checkpoint.file_of(name)?.to_owned();
            if !self.headers.contains_key(&file) {
                let header = self.header(&file, alive)?;
                self.headers.insert(file.clone(), header);
            }
            let header = self.headers.get(&file);
            let found = header
                .and_then(|header| Some((header.tensors.get(name)?.clone(), header.data_start)));
            let (info, data_start) = found.ok_or_else(|| {
                PrepareError::bad_tensor(
                    &self.snapshot().join(&file),
                    name,
                    "is missing; the checkpoint is incomplete",
                )
            })?;
            // The size of the file is not known here, so that nothing else bounds what its header says.
            let (begin, end) = info.data_offsets;
            if data_start.checked_add(end).is_none() {
                let path = self.snapshot().join(&file);
                let reason = format!("would end at byte {end}, which no file has");
                return Err(PrepareError::bad_tensor(&path, name, reason));
            }
            let start = data_start + begin;
            parts.push(Part {
                name: name.clone(),
                file,
                info,
                start,
            });
        }
        parts.sort_by(|a, b| (&a.file, a.start).cmp(&(&b.file, b.start)));
        Ok(parts)
    }

    /// The header of a safetensors file on the Hub.
    fn header(&self, file: &str, alive: &mut Alive<'_>) -> Result<Header, PrepareError> {
        let path = self.snapshot().join(file);
        let mut bytes = Vec::new();
        let mut take = |piece: &[u8]| {
            bytes.extend_from_slice(piece);
            Ok(())
        };
        self.ranged(file, 0..8, &mut take, alive)?;
        let length = <[u8; 8]>::try_from(bytes.as_slice()).map_or(0, u64::from_le_bytes);
        if length == 0 || length > MAX_HEADER_BYTES {
            let reason = format!(
                "is no safetensors file: its header would have {length} bytes, the limit is {MAX_HEADER_BYTES}"
            );
            return Err(PrepareError::bad_file(&path, reason));
        }
        let mut json = Vec::new();
        let mut take = |piece: &[u8]| {
            json.extend_from_slice(piece);
            Ok(())
        };
        self.ranged(file, 8..8 + length, &mut take, alive)?;
        Header::parse(&json, &path)
    }
}

/// The header of the block file.
fn head(parts: &[Part]) -> Vec<u8> {
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

/// Length of what is already there, if it begins with `head`; else `head` is written. The file is at its end then.
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

/// Waits for another process that downloads the same block.
fn lock(file: &File, path: &std::path::Path, alive: &mut Alive<'_>) -> Result<(), PrepareError> {
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(PrepareError::write(path, error)),
            Err(TryLockError::WouldBlock) => {
                alive()?;
                std::thread::sleep(LOCK_PERIOD);
            }
        }
    }
}

/// Progress: a line that is written over on a terminal, and one line in the log at the end.
struct Shown {
    block: u32,
    total: u64,
    from: u64,
    done: u64,
    start: Instant,
    last: Instant,
    terminal: bool,
}

impl Shown {
    fn new(block: u32, total: u64, done: u64) -> Shown {
        let now = Instant::now();
        Shown {
            block,
            total,
            from: done,
            done,
            start: now,
            last: now,
            terminal: std::io::stderr().is_terminal(),
        }
    }

    fn add(&mut self, count: u64) {
        self.done += count;
        if self.terminal && self.last.elapsed() >= SHOWN_EVERY {
            self.last = Instant::now();
            let percent = 100 * self.done / self.total.max(1);
            eprint!(
                "\rblock {}: {percent} % of {:.1} MB, {:.1} MB/s ",
                self.block,
                self.total as f64 / 1e6,
                self.megabytes_per_s()
            );
        }
    }

    fn megabytes_per_s(&self) -> f64 {
        (self.done - self.from) as f64 / 1e6 / self.start.elapsed().as_secs_f64().max(1e-9)
    }

    fn end(&self) {
        if self.terminal {
            eprint!("\r\x1b[K");
        }
        info!(
            block = self.block,
            bytes = self.done - self.from,
            mb_per_s = self.megabytes_per_s(),
            "downloaded"
        );
    }
}
