//! Whole files of a model in the layout of the Hub's own cache, so that `huggingface_hub` finds them:
//! `refs/REVISION` holds the commit, `blobs/ETAG` the content, and `snapshots/COMMIT/FILE` is a link to
//! it. All names are made here of what [`requests`](super::requests) has checked.
//!
//! A download writes `blobs/ETAG.partial` under a lock and goes on after an interruption where it
//! stopped, in this process or a later one.

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use shared::files::write_atomically;
use tracing::{info, warn};

use super::requests::Described;
use super::{Hub, SMALL_BYTES, Trouble, sum_is};
use crate::disk_cache::wait_for_lock;
use crate::error::PrepareError;
use crate::progress::Watch;

/// Longest file with the commit of a revision.
const MAX_REF_BYTES: u64 = 64;

impl Hub {
    /// Finds the commit of the revision: by asking for `first`, or from an earlier time when the Hub
    /// is not to be asked or cannot be reached.
    pub(super) fn find_commit(&mut self, first: &str) -> Result<(), PrepareError> {
        if is_commit(&self.revision) && self.snapshot_of(&self.revision).join(first).is_file() {
            self.commit = self.revision.clone();
            return Ok(());
        }
        let known =
            self.known_commit().filter(|commit| self.snapshot_of(commit).join(first).is_file());
        if self.offline {
            self.commit = known.ok_or_else(|| self.not_downloaded(PathBuf::from(first)))?;
            return Ok(());
        }
        let mut failures = 0;
        self.commit = loop {
            match (self.describe(&self.revision, first), &known) {
                (Ok(found), _) => break found.commit,
                (Err(Trouble::Transit { why, .. }), Some(known)) => {
                    warn!(
                        why,
                        commit = known,
                        "the Hub cannot be reached, using what was downloaded earlier"
                    );
                    break known.clone();
                }
                (Err(trouble), _) => self.pause(&mut failures, first, trouble, &mut |_| Ok(()))?,
            }
        };
        if self.commit != self.revision {
            let path = self.root.join("refs").join(&self.revision);
            let write = |error| PrepareError::write(&path, error);
            std::fs::create_dir_all(path.parent().unwrap_or(&self.root)).map_err(write)?;
            write_atomically(&path, |file| file.write_all(self.commit.as_bytes()))
                .map_err(write)?;
        }
        Ok(())
    }

    /// A file of a few kilobytes: config, index, tokenizer.
    pub(super) fn small_file(&self, file: &str) -> Result<PathBuf, PrepareError> {
        self.cached_file(file, Some(SMALL_BYTES), &mut |_| Ok(()))
    }

    /// A checkpoint file that cannot be read in parts.
    pub(super) fn whole_file(&self, file: &str, watch: &mut Watch<'_>) -> Result<(), PrepareError> {
        self.cached_file(file, None, watch).map(drop)
    }

    /// A file of the cache, of at most `limit` bytes, downloaded if need be.
    fn cached_file(
        &self,
        file: &str,
        limit: Option<u64>,
        watch: &mut Watch<'_>,
    ) -> Result<PathBuf, PrepareError> {
        let path = self.snapshot().join(file);
        if path.is_file() {
            return Ok(path);
        }
        if self.offline {
            return Err(self.not_downloaded(PathBuf::from(file)));
        }
        let found = self.describe_patiently(file, watch)?;
        if let Some(limit) = limit.filter(|limit| found.bytes > *limit) {
            return Err(self.lasting(format!(
                "{file} of {} would have {} bytes, the limit is {limit}; check the model or the mirror",
                self.name, found.bytes
            )));
        }
        let blob = self.root.join("blobs").join(&found.etag);
        if !blob.is_file() {
            self.download(file, &found, &blob, watch)?;
        }
        let up = "../".repeat(2 + file.matches('/').count());
        let target = Path::new(&up).join("blobs").join(&found.etag);
        self.link(&path, &target).map_err(|error| PrepareError::write(&path, error))?;
        Ok(path)
    }

    /// What the Hub says of a file of the commit.
    pub(super) fn describe_patiently(
        &self,
        file: &str,
        watch: &mut Watch<'_>,
    ) -> Result<Described, PrepareError> {
        let mut failures = 0;
        loop {
            match self.describe(&self.commit, file) {
                Ok(found) => return Ok(found),
                Err(trouble) => self.pause(&mut failures, file, trouble, watch)?,
            }
        }
    }

    /// What the Hub says of a file, or its own reason for saying nothing.
    fn describe(&self, revision: &str, file: &str) -> Result<Described, Trouble> {
        let asked = self.asker.describe(&self.name, revision, file);
        self.runtime.block_on(async {
            let answer = tokio::time::timeout(2 * self.pauses.stall, asked).await;
            answer.unwrap_or(Err(Trouble::Stalled))
        })
    }

    /// Writes `blob`, checked against the sum that it is named after.
    fn download(
        &self,
        file: &str,
        found: &Described,
        blob: &Path,
        watch: &mut Watch<'_>,
    ) -> Result<(), PrepareError> {
        let write = |error| PrepareError::write(blob, error);
        std::fs::create_dir_all(blob.parent().unwrap_or(&self.root)).map_err(write)?;
        let partial = blob.with_extension("partial");
        let mut open = OpenOptions::new();
        let mut out = open
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&partial)
            .map_err(write)?;
        wait_for_lock(&out, &partial, watch)?;
        if blob.is_file() {
            // Another process was faster.
            return Ok(());
        }
        if found.bytes > SMALL_BYTES {
            info!(
                file,
                bytes = found.bytes,
                "downloading a whole file: it cannot be read in parts"
            );
        }
        for _ in 0..2 {
            let mut done = out.seek(SeekFrom::End(0)).map_err(write)?;
            if done > found.bytes {
                out.set_len(0).and_then(|()| out.rewind()).map_err(write)?;
                done = 0;
            }
            self.disk.make_room(found.bytes - done, watch)?;
            let mut each = |bytes: &[u8]| out.write_all(bytes).map_err(write);
            self.ranged(file, done..found.bytes, &mut each, watch)?;
            if sum_is(&partial, &found.etag, watch)? {
                return out
                    .sync_all()
                    .and_then(|()| std::fs::rename(&partial, blob))
                    .map_err(write);
            }
            warn!(file, "downloaded file has another SHA-256 than the Hub's, retrying");
            out.set_len(0).map_err(write)?;
        }
        let _ = std::fs::remove_file(&partial);
        Err(PrepareError::Hub {
            reason: format!(
                "file {file} of {} does not have the SHA-256 that the Hub gives for it; check the connection or the mirror",
                self.name
            ),
            lasting: false,
        })
    }

    /// Puts a link to the blob `etag` at `path`, in one step for those who look.
    pub(super) fn link(&self, path: &Path, target: &Path) -> std::io::Result<()> {
        let folder = path.parent().unwrap_or(&self.root);
        std::fs::create_dir_all(folder)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let staged = folder.join(format!(".{name}.{}.tmp", std::process::id()));
        let _ = std::fs::remove_file(&staged);
        std::os::unix::fs::symlink(target, &staged)?;
        std::fs::rename(&staged, path)
    }

    /// The commit that the revision stood for when it was asked for last.
    fn known_commit(&self) -> Option<String> {
        if is_commit(&self.revision) {
            return Some(self.revision.clone());
        }
        let path = self.root.join("refs").join(&self.revision);
        let is_short = std::fs::metadata(&path).is_ok_and(|stat| stat.len() <= MAX_REF_BYTES + 1);
        let text = is_short.then(|| std::fs::read_to_string(path).ok()).flatten()?;
        Some(text.trim().to_owned()).filter(|commit| is_hexadecimal(commit))
    }
}

fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && is_hexadecimal(revision)
}

fn is_hexadecimal(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_hexdigit())
}
