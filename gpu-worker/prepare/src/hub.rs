//! Models of the Hugging Face Hub. Of a model only what the served blocks need is downloaded: its
//! config and index into the hub's own cache layout (`models--ORG--NAME/{refs,blobs,snapshots}`, see
//! [`transfer`]), and of its safetensors files the ranges with the tensors of each block, which
//! [`blocks`] keeps as one file per block. Checkpoint files that are in the cache already
//! are used as they are. Pickled checkpoints have no ranges: their files are downloaded whole and
//! checked against the Hub's SHA-256.
//!
//! What fails in transit is tried again from where it stopped, with growing pauses; what trying
//! cannot change (no such model, no right to read it) ends the process with a sentence. The one
//! reactor here is the HTTP client's, on this thread.
//!
//! # Discrepancies
//! Petals downloads whole files, tries again every 30 s for ever whatever the reason, and asks for
//! the index of `main` whatever the revision.

mod blocks;
mod client_tensors;
mod requests;
mod sources;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::{Stream, StreamExt};
use hf_hub::{Cache, CacheRepo, Repo};
use model::checkpoint::CHECKPOINTS;
use model::header::Header;
use reqwest::StatusCode;
use sha2::{Digest, Sha256};
use shared::config::PrepareConfig;
use shared::error_chain::with_causes;
use tracing::warn;

pub use self::client_tensors::CLIENT_FILE;
use self::requests::Asker;
use crate::checkpoint::Checkpoint;
use crate::disk_cache::DiskCache;
use crate::error::PrepareError;
use crate::peek::open_quietly;
use crate::progress::{PrepareProgress, Watch};
use crate::repository::{map_repo, repo_folder};
use crate::source::Wanted;

/// Where models are when no other place is named.
const PUBLIC_HUB: &str = "https://huggingface.co";
/// The first pause after a failure; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Failures in a row, without a byte in between, after which this process gives up. The supervisor
/// starts another one later.
const MAX_FAILURES: u32 = 8;
/// As many failures of the very first request mean that the Hub cannot be reached.
const MAX_FIRST_FAILURES: u32 = 4;
/// A connection that brings nothing for this long is dropped.
const STALL: Duration = Duration::from_secs(30);
/// Config, index and tokenizer of the largest models are smaller.
const SMALL_BYTES: u64 = 64 << 20;

/// One model of the Hub at one revision.
pub struct Hub {
    runtime: tokio::runtime::Runtime,
    /// Where hf-hub, and `huggingface_hub`, keep this model.
    cached: CacheRepo,
    asker: Asker,
    name: String,
    revision: String,
    offline: bool,
    /// Folder of the model in the cache.
    root: PathBuf,
    /// Commit that `revision` stands for.
    commit: String,
    disk: DiskCache,
    headers: BTreeMap<String, Header>,
    /// Lengths of files that were asked for.
    sizes: BTreeMap<String, u64>,
    pauses: Pauses,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub").field("name", &self.name).field("commit", &self.commit).finish()
    }
}

/// What becomes of the weights of a model that is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// They are fetched as they are needed.
    Fetched,
    /// Not a byte of them is fetched.
    Left,
}

/// How long to wait between two tries.
#[derive(Clone, Copy, Debug)]
struct Pauses {
    first: Duration,
    longest: Duration,
    failures: u32,
    stall: Duration,
}

const PAUSES: Pauses =
    Pauses { first: FIRST_PAUSE, longest: LONGEST_PAUSE, failures: MAX_FAILURES, stall: STALL };

impl Hub {
    /// Finds out what `config.model` is on the Hub, and fetches its config and its index.
    ///
    /// # Errors
    /// [`PrepareError::Hub`], [`PrepareError::NotDownloaded`] when offline.
    pub fn open(config: &PrepareConfig) -> Result<Hub, PrepareError> {
        Hub::with_pauses(config, PAUSES)
    }

    /// Folder of the adapter `name`, with its `config_file` and the first of `weights` that it has.
    ///
    /// # Errors
    /// As [`Hub::open`].
    pub fn adapter(
        config: &PrepareConfig,
        name: &str,
        config_file: &str,
        weights: &[&str],
    ) -> Result<PathBuf, PrepareError> {
        let mut config = config.clone();
        // The revision given is that of the model.
        config.hub.revision = None;
        let hub = Hub::connect(&config, name.to_owned(), config_file, PAUSES)?;
        for file in weights {
            match hub.whole_file(file, &mut |_| Ok(())) {
                Ok(()) => return Ok(hub.snapshot()),
                Err(PrepareError::NotOnHub { .. } | PrepareError::NotDownloaded { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Err(hub.lasting(format!("adapter {name} has none of {}", weights.join(", "))))
    }

    fn with_pauses(config: &PrepareConfig, pauses: Pauses) -> Result<Hub, PrepareError> {
        Hub::connect(config, map_repo(&config.model), "config.json", pauses)
    }

    fn connect(
        config: &PrepareConfig,
        name: String,
        first: &str,
        pauses: Pauses,
    ) -> Result<Hub, PrepareError> {
        let cache = std::path::absolute(&config.cache_dir)
            .map_err(|e| PrepareError::read(&config.cache_dir, e))?;
        let started = |reason: String| PrepareError::Hub { reason, lasting: false };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| started(format!("cannot start downloads: {error}")))?;
        let refused = |reason: String| PrepareError::Hub { reason, lasting: true };
        let endpoint = config.hub.endpoint.as_deref().unwrap_or(PUBLIC_HUB);
        let asker = Asker::new(endpoint, &config.hub).map_err(refused)?;
        let repo = Repo::model(name.clone());
        let root = cache.join(repo_folder(&name));
        let mut hub = Hub {
            cached: Cache::new(cache.clone()).repo(repo),
            asker,
            runtime,
            revision: config.hub.revision.clone().unwrap_or_else(|| "main".to_owned()),
            offline: config.hub.offline,
            root,
            commit: String::new(),
            disk: DiskCache::new(&cache, config.hub.max_disk_bytes),
            headers: BTreeMap::new(),
            sizes: BTreeMap::new(),
            pauses,
            name,
        };
        hub.find_commit(first)?;
        hub.small_file(first)?;
        Ok(hub)
    }

    /// Repository id, after upstream's mapping.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Folder with config and index.
    pub fn snapshot(&self) -> PathBuf {
        self.snapshot_of(&self.commit)
    }

    fn snapshot_of(&self, commit: &str) -> PathBuf {
        self.cached.pointer_path(commit)
    }

    /// Commit of the revision that was asked for.
    pub fn commit(&self) -> &str {
        &self.commit
    }

    /// The checkpoint, without a file of it yet: of the four names of Petals the first that the
    /// model has. A pickled one that is a single file is downloaded, unless its `weights` are left.
    ///
    /// # Errors
    /// [`PrepareError::Hub`] when it has none.
    pub fn checkpoint(&mut self, weights: Weights) -> Result<Checkpoint, PrepareError> {
        for (index, single) in CHECKPOINTS {
            match self.small_file(index) {
                Ok(_) => return Checkpoint::find(&self.snapshot()),
                Err(PrepareError::NotOnHub { .. } | PrepareError::NotDownloaded { .. }) => {}
                Err(error) => return Err(error),
            }
            if !self.has(single)? {
                continue;
            }
            if is_ranged(single) || weights == Weights::Left {
                return Ok(Checkpoint::single(&self.snapshot(), single));
            }
            self.whole_file(single, &mut |_| Ok(()))?;
            return Checkpoint::find(&self.snapshot());
        }
        let [(index, single), (pickled_index, pickled)] = CHECKPOINTS;
        Err(self.lasting(format!(
            "model {} has none of {index}, {single}, {pickled_index} and {pickled}; give a model with weights",
            self.name
        )))
    }

    /// Makes the tensors of a block available in `checkpoint`: those of the files that are in the
    /// cache as they are, else by downloading the block.
    ///
    /// # Errors
    /// [`PrepareError`]; what is not on the disk afterwards is named.
    pub fn fetch(
        &mut self,
        checkpoint: &mut Checkpoint,
        block: u32,
        wanted: &[Wanted],
        watch: &mut Watch<'_>,
    ) -> Result<(), PrepareError> {
        let files = files_of(checkpoint, wanted)?;
        let snapshot = self.snapshot();
        if files.iter().all(|file| snapshot.join(file).is_file()) {
            return Ok(());
        }
        if files.iter().all(|file| is_ranged(file)) {
            let path = self.block_file(checkpoint, block, wanted, watch)?;
            return checkpoint.adopt(&path, &names(wanted));
        }
        files.iter().try_for_each(|file| self.whole_file(file, watch))
    }

    /// Whether the model has a file, by its first bytes.
    fn has(&self, file: &str) -> Result<bool, PrepareError> {
        if self.snapshot().join(file).is_file() {
            return Ok(true);
        }
        if self.offline {
            // A block that was downloaded earlier proves that the file is there.
            return Ok(is_ranged(file) && self.has_blocks());
        }
        match self.ranged(file, 0..8, &mut |_| Ok(()), &mut |_| Ok(())) {
            Ok(()) => Ok(true),
            Err(PrepareError::NotOnHub { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives `each` the bytes of `range` in order, going on after an interruption where it came.
    fn ranged(
        &self,
        file: &str,
        range: Range<u64>,
        each: &mut dyn FnMut(&[u8]) -> Result<(), PrepareError>,
        watch: &mut Watch<'_>,
    ) -> Result<(), PrepareError> {
        let (mut at, mut failures) = (range.start, 0);
        while at < range.end {
            let before = at;
            let once = self.once(file, at..range.end, &mut |bytes| {
                each(bytes)?;
                at += bytes.len() as u64;
                watch(PrepareProgress::Alive)
            });
            match once {
                Ok(()) => {}
                Err(Trouble::Ours(error)) => return Err(error),
                Err(trouble) => {
                    if at > before {
                        failures = 0;
                    }
                    self.pause(&mut failures, file, trouble, watch)?;
                }
            }
        }
        Ok(())
    }

    /// One request for `range`.
    fn once(
        &self,
        file: &str,
        range: Range<u64>,
        each: &mut dyn FnMut(&[u8]) -> Result<(), PrepareError>,
    ) -> Result<(), Trouble> {
        let left = range.end - range.start;
        self.runtime.block_on(async {
            let asked = self.asker.bytes(&self.name, &self.commit, file, range);
            let sent = tokio::time::timeout(2 * self.pauses.stall, asked).await;
            let answer = sent.map_err(|_| Trouble::Stalled)??;
            body(answer.bytes_stream(), left, self.pauses.stall, each).await
        })
    }

    /// Waits after a failure, or gives up.
    fn pause(
        &self,
        failures: &mut u32,
        file: &str,
        trouble: Trouble,
        watch: &mut Watch<'_>,
    ) -> Result<(), PrepareError> {
        if let Some(error) = self.lasting_trouble(file, &trouble) {
            return Err(error);
        }
        *failures += 1;
        let asked = match &trouble {
            Trouble::Transit { retry_after, .. } => *retry_after,
            _ => None,
        };
        let why = trouble.text();
        if self.commit.is_empty() && *failures >= self.pauses.failures.min(MAX_FIRST_FAILURES) {
            return Err(PrepareError::Unreachable { repo: self.name.clone(), why });
        }
        if *failures >= self.pauses.failures {
            return Err(PrepareError::Hub {
                reason: format!(
                    "download {file} of {}: {why}; gave up after {failures} failures",
                    self.name
                ),
                lasting: false,
            });
        }
        let doubled = self.pauses.first * 2u32.saturating_pow(*failures - 1);
        let mut left = asked.unwrap_or(doubled).min(self.pauses.longest);
        warn!(file, why, pause = ?left, "download interrupted, retrying");
        while !left.is_zero() {
            watch(PrepareProgress::Alive)?;
            let slice = left.min(Duration::from_millis(100));
            std::thread::sleep(slice);
            left -= slice;
        }
        Ok(())
    }

    /// What trying again cannot change.
    fn lasting_trouble(&self, file: &str, trouble: &Trouble) -> Option<PrepareError> {
        let (name, revision) = (&self.name, &self.revision);
        Some(match trouble {
            Trouble::Refused(StatusCode::UNAUTHORIZED) => self.lasting(format!(
                "the Hub wants to know who reads {name} (401): the model does not exist, is private, or the token is wrong; check the name, give --token, or run huggingface-cli login"
            )),
            Trouble::Refused(StatusCode::FORBIDDEN) => self.lasting(format!(
                "the Hub does not let this token read {name} (403); ask for access on https://huggingface.co/{name}, then give its token with --token"
            )),
            Trouble::Refused(StatusCode::NOT_FOUND) => PrepareError::NotOnHub {
                repo: name.clone(),
                file: file.to_owned(),
                revision: revision.clone(),
            },
            Trouble::Refused(status) => {
                self.lasting(format!("the Hub refuses {file} of {name}: {status}"))
            }
            Trouble::NoRanges => self.lasting(format!(
                "the Hub sends more of {file} than was asked for; give an endpoint that knows ranges, or a folder"
            )),
            Trouble::Answer(reason) => self.lasting(reason.clone()),
            _ => return None,
        })
    }

    fn lasting(&self, reason: String) -> PrepareError {
        PrepareError::Hub { reason, lasting: true }
    }
}

/// Gives `each` the `left` bytes of an answer, which may take as long as it likes while no piece takes
/// longer than `stall`.
async fn body<B: AsRef<[u8]>>(
    mut pieces: impl Stream<Item = Result<B, reqwest::Error>> + Unpin,
    mut left: u64,
    stall: Duration,
    each: &mut dyn FnMut(&[u8]) -> Result<(), PrepareError>,
) -> Result<(), Trouble> {
    while left > 0 {
        let next = tokio::time::timeout(stall, pieces.next()).await;
        let next = next.map_err(|_| Trouble::Stalled)?;
        let bytes = next.ok_or(Trouble::CutShort)?.map_err(|e| Trouble::transit(&e))?;
        let bytes = bytes.as_ref();
        if bytes.len() as u64 > left {
            return Err(Trouble::NoRanges);
        }
        left -= bytes.len() as u64;
        each(bytes).map_err(Trouble::Ours)?;
    }
    Ok(())
}

/// Why a download stopped.
#[derive(Debug)]
enum Trouble {
    /// The disk, or told to stop.
    Ours(PrepareError),
    /// The Hub says no, and will again.
    Refused(StatusCode),
    /// The way to the Hub, or a Hub that is busy: the pause that it asks for.
    Transit { why: String, retry_after: Option<Duration> },
    /// An answer that makes no sense, and will not the next time.
    Answer(String),
    /// Nothing came for too long.
    Stalled,
    /// Fewer bytes came than asked for.
    CutShort,
    /// More came.
    NoRanges,
}

impl Trouble {
    fn transit(error: &reqwest::Error) -> Trouble {
        Trouble::Transit { why: with_causes(error), retry_after: None }
    }

    fn text(&self) -> String {
        match self {
            Trouble::Ours(error) => error.to_string(),
            Trouble::Refused(status) => format!("the Hub answers {status}"),
            Trouble::Transit { why, .. } | Trouble::Answer(why) => why.clone(),
            Trouble::Stalled => "nothing came for too long".to_owned(),
            Trouble::CutShort => "the connection ended early".to_owned(),
            Trouble::NoRanges => "more came than was asked for".to_owned(),
        }
    }
}

/// The files that hold tensors, each once.
fn files_of(checkpoint: &Checkpoint, wanted: &[Wanted]) -> Result<Vec<String>, PrepareError> {
    let mut files: Vec<String> = wanted
        .iter()
        .map(|tensor| checkpoint.file_of(&tensor.full_name).map(str::to_owned))
        .collect::<Result<_, _>>()?;
    files.sort();
    files.dedup();
    Ok(files)
}

/// Names of tensors in the checkpoint.
fn names(wanted: &[Wanted]) -> Vec<String> {
    wanted.iter().map(|tensor| tensor.full_name.clone()).collect()
}

/// Whether the tensors of a file can be read without the rest of it.
fn is_ranged(file: &str) -> bool {
    file.ends_with(".safetensors")
}

/// Whether a file of the cache has the SHA-256 that its blob is named after. Names of another form
/// say nothing.
pub fn sum_fits(path: &Path, watch: &mut Watch<'_>) -> Result<bool, PrepareError> {
    let read = |e| PrepareError::read(path, e);
    let blob = path.canonicalize().map_err(read)?;
    let name = blob.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    sum_is(&blob, name, watch)
}

/// Whether a file has the SHA-256 `name`. Names of another form say nothing.
fn sum_is(path: &Path, name: &str, watch: &mut Watch<'_>) -> Result<bool, PrepareError> {
    let read = |e| PrepareError::read(path, e);
    if name.len() != 64 || !name.chars().all(|c| c.is_ascii_hexdigit()) {
        return Ok(true);
    }
    let (mut file, mut sum) = (open_quietly(path).map_err(read)?, Sha256::new());
    let mut piece = vec![0; 1 << 20];
    loop {
        let length = file.read(&mut piece).map_err(read)?;
        if length == 0 {
            break;
        }
        sum.update(piece.get(..length).unwrap_or_default());
        watch(PrepareProgress::Alive)?;
    }
    let hex: String = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(hex.eq_ignore_ascii_case(name))
}
