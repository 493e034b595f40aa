//! The files of the weights that are served, open. They are opened by their paths once, when the first
//! worker of a prepared span starts; every worker gets descriptors of them, at each restart the same
//! ones. A model folder may therefore be moved or deleted while it is served.
//!
//! Opening a file of a network file system may take any time, so a thread does it, and rings the poll
//! loop when it is done:
//!
//! ```text
//!   begin --> opening --thread rings--> arrived: open, or why not
//!                |
//!                +--hangs: workers of the span wait until --start_timeout ends them
//! ```
//!
//! A manifest that prepare has written anew takes the place of the one that is open. The files stay
//! locked ([`model::file_lock::hold`]) until the tree has no worker of the span any more.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use model::manifest::{Manifest, ManifestError};
use model::weight_files::{FilesOfBlocks, WeightFileError, WeightFiles};
use serde::{Deserialize, Serialize};
use shared::block::Span;

use crate::channel::Wake;
use crate::inherited_fds::{Fd, Handed};

/// Spans whose files are being opened at once. An instance serves one and moves to another; the rest
/// are threads that a file system does not answer.
const MAX_OPENING: usize = 8;

/// The operator hears of an opening that takes longer.
const SLOW: Duration = Duration::from_secs(10);

/// Why the weights of a span could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The manifest that prepare wrote.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A file that it names.
    #[error(transparent)]
    File(#[from] WeightFileError),
    /// The thread that opens them.
    #[error("cannot start a thread that opens the weights")]
    Thread(#[source] io::Error),
    /// A file system does not answer.
    #[error(
        "the files of {0} other spans are still being opened: their file system does not answer"
    )]
    Stuck(usize),
}

impl WeightsError {
    /// Whether another attempt may succeed.
    pub fn is_passing(&self) -> bool {
        match self {
            WeightsError::File(failure) => failure.is_passing(),
            WeightsError::Thread(_) | WeightsError::Stuck(_) => true,
            WeightsError::Manifest(_) => false,
        }
    }
}

/// The open files of one prepared span.
#[derive(Debug)]
pub struct OpenWeights {
    whole: Span,
    manifest: File,
    of_blocks: FilesOfBlocks,
    files: WeightFiles,
}

impl OpenWeights {
    fn open(whole: Span, path: &Path) -> Result<OpenWeights, WeightsError> {
        let failed = |source| ManifestError::Io { action: "open", path: path.to_owned(), source };
        let file = shared::files::open_regular(path).map_err(failed)?;
        let manifest = Manifest::read_open(&file, path)?;
        let files = WeightFiles::open(&manifest, whole)?;
        Ok(OpenWeights { whole, manifest: file, of_blocks: FilesOfBlocks::of(&manifest), files })
    }

    /// Indexes in the manifest of the files that hold `span`, and the descriptors for its worker: the
    /// manifest, then these files.
    pub fn of_span(&self, span: Span) -> (Vec<u32>, Vec<BorrowedFd<'_>>) {
        let files = self.files.descriptors(&self.of_blocks.of_span(span));
        let (indexes, files): (Vec<u32>, Vec<_>) = files.into_iter().unzip();
        (indexes, std::iter::once(self.manifest.as_fd()).chain(files).collect())
    }

    /// Whether the manifest at `path` is another one by now.
    fn is_replaced(&self, path: &Path) -> bool {
        let Ok(ours) = self.manifest.metadata() else { return true };
        // One that is gone takes no place: what is open is all there is.
        let now = path.metadata();
        now.is_ok_and(|now| (now.dev(), now.ino()) != (ours.dev(), ours.ino()))
    }
}

/// Opens the files of a span by its manifest.
type Opener = fn(Span, &Path) -> Result<OpenWeights, WeightsError>;

/// A thread that opens the files of a span.
#[derive(Debug)]
struct Opening {
    whole: Span,
    since: Instant,
    is_told_of: bool,
    result: Receiver<Result<OpenWeights, WeightsError>>,
}

/// The open files of all spans that have workers; two while the instance moves.
#[derive(Debug)]
pub struct Weights {
    open: Vec<OpenWeights>,
    opening: Vec<Opening>,
    opener: Opener,
}

impl Default for Weights {
    fn default() -> Weights {
        Weights { open: Vec::new(), opening: Vec::new(), opener: OpenWeights::open }
    }
}

impl Weights {
    /// Whether the files of `whole` are open, and the manifest at `path` is the one that names them.
    pub fn has(&self, whole: Span, path: &Path) -> bool {
        self.of(whole).is_some_and(|open| !open.is_replaced(path))
    }

    /// The files of the span `whole`, if they are open.
    pub fn of(&self, whole: Span) -> Option<&OpenWeights> {
        self.open.iter().find(|open| open.whole == whole)
    }

    /// Begins to open the files of `whole` by the manifest at `path`, unless that is under way. `wake`
    /// rings once they have [`arrived`](Self::arrived).
    ///
    /// # Errors
    /// [`WeightsError::Stuck`] and [`WeightsError::Thread`].
    pub fn begin(&mut self, whole: Span, path: PathBuf, wake: &Wake) -> Result<(), WeightsError> {
        if self.opening.iter().any(|opening| opening.whole == whole) {
            return Ok(());
        }
        if self.opening.len() >= MAX_OPENING {
            return Err(WeightsError::Stuck(self.opening.len()));
        }
        let (sender, result) = sync_channel(1);
        let (opener, wake) = (self.opener, wake.clone());
        let open = move || {
            // A run that has ended does not listen.
            let _ = sender.send(opener(whole, &path));
            wake.ring();
        };
        let thread = thread::Builder::new().name("weights".to_owned());
        thread.spawn(open).map_err(WeightsError::Thread)?;
        let since = Instant::now();
        self.opening.push(Opening { whole, since, is_told_of: false, result });
        Ok(())
    }

    /// The spans whose files were opened since the last call, or could not be.
    pub fn arrived(&mut self) -> Vec<(Span, Result<(), WeightsError>)> {
        let mut arrived = Vec::new();
        let mut opened = Vec::new();
        self.opening.retain(|opening| {
            let result = match opening.result.try_recv() {
                Err(TryRecvError::Empty) => return true,
                Ok(Ok(open)) => {
                    opened.push(open);
                    Ok(())
                }
                Ok(Err(error)) => Err(error),
                Err(TryRecvError::Disconnected) => {
                    Err(WeightsError::Thread(io::Error::other("it ended without an answer")))
                }
            };
            arrived.push((opening.whole, result));
            false
        });
        for open in opened {
            self.open.retain(|old| old.whole != open.whole);
            self.open.push(open);
        }
        arrived
    }

    /// The spans whose files take long to open, each once.
    pub fn slow(&mut self, now: Instant) -> Vec<Span> {
        let is_slow = |opening: &&mut Opening| !opening.is_told_of && now >= opening.since + SLOW;
        let slow = self.opening.iter_mut().filter(is_slow);
        slow.map(|opening| {
            opening.is_told_of = true;
            opening.whole
        })
        .collect()
    }

    /// Closes the files of all spans but `used`.
    pub fn keep(&mut self, used: &[Span]) {
        self.open.retain(|open| used.contains(&open.whole));
    }
}

/// The open files of a span, by descriptors that survive the change of the executable.
#[derive(Debug, Serialize, Deserialize)]
pub struct HandedWeights {
    whole: Span,
    manifest: Fd,
    files: Vec<(u32, Fd)>,
}

impl Weights {
    /// Duplicates every descriptor for the next executable.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn hand_over(&self, handed: &mut Handed) -> io::Result<Vec<HandedWeights>> {
        let mut one = |open: &OpenWeights| {
            let mut put = |file: &File| Ok::<_, io::Error>(handed.put(file.try_clone()?.into()));
            let manifest = put(&open.manifest)?;
            let files = open.files.iter().map(|(index, file)| Ok((index, put(file)?)));
            let files = files.collect::<io::Result<_>>()?;
            Ok(HandedWeights { whole: open.whole, manifest, files })
        };
        self.open.iter().map(&mut one).collect()
    }

    /// The files that the executable before handed over. `path` tells where the manifest of a span was
    /// opened.
    ///
    /// # Errors
    /// When a descriptor is missing or a manifest cannot be read.
    pub fn adopt(
        handed: Vec<HandedWeights>,
        path: impl Fn(Span) -> PathBuf,
    ) -> io::Result<Weights> {
        let one = |HandedWeights { whole, mut manifest, files }: HandedWeights| {
            let take = |(index, mut fd): (u32, Fd)| Ok::<_, io::Error>((index, fd.take()?));
            let files = files.into_iter().map(take).collect::<io::Result<Vec<(u32, OwnedFd)>>>()?;
            let file = File::from(manifest.take()?);
            let read = Manifest::read_open(&file, &path(whole)).map_err(io::Error::other)?;
            let (of_blocks, files) = (FilesOfBlocks::of(&read), WeightFiles::received(files));
            Ok(OpenWeights { whole, manifest: file, of_blocks, files })
        };
        let open = handed.into_iter().map(one).collect::<io::Result<_>>()?;
        Ok(Weights { open, ..Weights::default() })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use testkit::span;

    use super::*;

    /// Prepared blocks 0 and 1, each in a file of its own, and where their manifest is.
    fn prepared(folder: &Path) -> PathBuf {
        let entry = |index: u32| {
            let path = folder.join(format!("block-{index}"));
            std::fs::write(&path, [index as u8; 64]).unwrap();
            let file = File::open(&path).unwrap();
            model::manifest::FileEntry::of(&path, &file).unwrap()
        };
        let tensor = |file| {
            let tensor = model::manifest::TensorEntry {
                file,
                offset: 0,
                len: 64,
                dtype: shared::dtype::DType::F32,
                quant: shared::config::QuantType::None,
                shape: vec![16],
            };
            [("norm.weight".to_owned(), tensor)].into()
        };
        let manifest = Manifest {
            version: model::manifest::MANIFEST_VERSION,
            model: testkit::facts::llama_70b(),
            config: serde_json::Value::Null,
            files: vec![entry(0), entry(1)],
            blocks: [(0, tensor(0)), (1, tensor(1))].into(),
            adapters: Vec::new(),
        };
        let path = folder.join("manifest.json");
        manifest.write(&path).unwrap();
        path
    }

    impl Weights {
        /// Opens the files of a span and waits for that.
        fn open_now(&mut self, whole: Span, path: &Path) -> Result<&OpenWeights, WeightsError> {
            if !self.has(whole, path) {
                let wake = Wake::new().unwrap();
                self.begin(whole, path.to_owned(), &wake).unwrap();
                wait_for(&wake);
                let (arrived, result) = self.arrived().remove(0);
                assert_eq!(arrived, whole);
                result?;
            }
            Ok(self.of(whole).unwrap())
        }
    }

    fn wait_for(wake: &Wake) {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        let mut fds = [PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut fds, PollTimeout::from(60_000u16)), Ok(1), "the thread does not ring");
    }

    fn first_byte(file: BorrowedFd<'_>) -> u8 {
        let file = File::from(file.try_clone_to_owned().unwrap());
        let mut byte = [0];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, 0).unwrap();
        byte[0]
    }

    #[test]
    fn files_that_are_open_outlive_their_folder_and_stay_locked() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("model");
        std::fs::create_dir(&folder).unwrap();
        let path = prepared(&folder);
        let mut weights = Weights::default();
        weights.open_now(span(0, 2), &path).unwrap();
        let other = File::open(folder.join("block-1")).unwrap();
        assert!(other.try_lock().is_err(), "another instance may not delete it");

        std::fs::remove_dir_all(&folder).unwrap();
        let open = weights.open_now(span(0, 2), &path).unwrap();
        let (indexes, descriptors) = open.of_span(span(1, 2));
        assert_eq!((indexes, descriptors.len()), (vec![1], 2), "the manifest and one file");
        assert_eq!(first_byte(descriptors[1]), 1);

        weights.keep(&[span(3, 4)]);
        // Nothing of the span is served any more. A process that another test has just forked holds a copy of
        // the descriptor until it executes.
        other.lock().unwrap();
        let error = weights.open_now(span(0, 2), &path).unwrap_err();
        assert!(error.to_string().contains("manifest.json") && !error.is_passing(), "{error}");
    }

    #[test]
    fn a_manifest_that_was_written_anew_takes_the_place_of_the_open_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = prepared(folder.path());
        let mut weights = Weights::default();
        let number = |open: &OpenWeights| open.manifest.metadata().unwrap().ino();
        let first = number(weights.open_now(span(0, 2), &path).unwrap());
        assert_eq!(number(weights.open_now(span(0, 2), &path).unwrap()), first);
        prepared(folder.path());
        assert_ne!(number(weights.open_now(span(0, 2), &path).unwrap()), first);
        assert_eq!(weights.open.len(), 1);
    }

    #[test]
    fn a_file_system_that_does_not_answer_keeps_nobody_waiting_but_its_own_span() {
        use std::sync::Mutex;
        // Nobody opens the files of spans that begin above 0 until it is unlocked.
        static GATE: Mutex<()> = Mutex::new(());
        let folder = tempfile::tempdir().unwrap();
        let path = prepared(folder.path());
        let opener: Opener = |whole, path| {
            let _passed = (whole.start().0 > 0).then(|| GATE.lock().unwrap());
            OpenWeights::open(whole, path)
        };
        let mut weights = Weights { opener, ..Weights::default() };
        let wake = Wake::new().unwrap();
        let gate = GATE.lock().unwrap();
        weights.begin(span(1, 2), path.clone(), &wake).unwrap();
        weights.begin(span(1, 2), path.clone(), &wake).unwrap();
        assert_eq!(weights.opening.len(), 1, "one thread for a span");
        weights.open_now(span(0, 2), &path).unwrap();
        assert!(!weights.has(span(1, 2), &path) && weights.of(span(1, 2)).is_none());
        let later = Instant::now() + SLOW;
        assert_eq!((weights.slow(later), weights.slow(later)), (vec![span(1, 2)], vec![]));

        for start in 2.. {
            match weights.begin(span(start, start + 1), path.clone(), &wake) {
                Ok(()) => assert!((start as usize) <= MAX_OPENING),
                Err(error) => {
                    assert!(matches!(error, WeightsError::Stuck(MAX_OPENING)), "{error}");
                    assert!(error.is_passing());
                    break;
                }
            }
        }
        drop(gate);
        let mut arrived = Vec::new();
        while arrived.len() < MAX_OPENING {
            wait_for(&wake);
            wake.clear();
            arrived.extend(weights.arrived());
        }
        assert!(arrived.iter().all(|(_, result)| result.is_ok()));
        assert!(weights.has(span(1, 2), &path) && weights.opening.is_empty());
    }

    #[test]
    fn a_manifest_that_is_a_pipe_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("manifest.json");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = Weights::default().open_now(span(0, 2), &path).map(drop).unwrap_err();
        assert!(matches!(error, WeightsError::Manifest(_)), "{error}");
    }

    #[test]
    fn the_next_executable_finds_every_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = prepared(folder.path());
        let mut weights = Weights::default();
        weights.open_now(span(0, 2), &path).unwrap();
        let mut handed = Handed::default();
        let state = weights.hand_over(&mut handed).unwrap();
        let state = serde_json::to_string(&state).unwrap();
        handed.keep_open().unwrap();
        // The next executable owns the numbers.
        std::mem::forget(handed);
        drop(weights);
        std::fs::remove_file(folder.path().join("block-1")).unwrap();
        let state: Vec<HandedWeights> = serde_json::from_str(&state).unwrap();
        let weights = Weights::adopt(state, |_| path.clone()).unwrap();
        let (indexes, descriptors) = weights.open[0].of_span(span(0, 2));
        assert_eq!(indexes, [0, 1]);
        assert!(descriptors.iter().all(|fd| fd.as_raw_fd() > 2));
        assert_eq!(descriptors[1..].iter().map(|fd| first_byte(*fd)).collect::<Vec<_>>(), [0, 1]);
    }
}
