//! Why a model could not be made ready, by what the operator can do about it. Each text is one
//! sentence that names the value and the way out.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use model::header::HeaderError;
use model::shards::ShareError;
use shared::block::Span;
use shared::exit::ExitReason;

/// Why a model could not be inspected or made ready.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The name is neither a folder nor a repository id.
    #[error(
        "there is no model folder {0:?}; give a folder in Hugging Face layout or a repository id like org/name"
    )]
    NoFolder(String),
    /// The repository was never downloaded.
    #[error(
        "model {repo} is not in the cache ({looked:?} is missing) and may not be downloaded (--offline, HF_HUB_OFFLINE); \
         allow that, download it there (huggingface-cli download {repo} --cache-dir {cache:?}), or give a folder"
    )]
    NotDownloaded {
        /// Repository id.
        repo: String,
        /// What was looked for.
        looked: PathBuf,
        cache: PathBuf,
    },
    /// The Hub has no such model, revision or file.
    #[error(
        "the Hub has no file {file} of model {repo} at revision {revision} (404); check the name and --revision, or give a folder"
    )]
    NotOnHub {
        /// Repository id.
        repo: String,
        /// The file asked for.
        file: String,
        revision: String,
    },
    /// The Hub or the way to it failed.
    #[error("{reason}")]
    Hub {
        /// What happened and what to do.
        reason: String,
        /// Whether trying again cannot change it.
        lasting: bool,
    },
    /// The Hub did not answer the first request for the model.
    #[error(
        "cannot reach the Hub for model {repo}: {why}; check the network, the proxy and HF_ENDPOINT, or give a folder"
    )]
    Unreachable {
        /// Repository id.
        repo: String,
        why: String,
    },
    /// A download does not fit on the disk.
    #[error(
        "{needed_bytes} bytes have to be downloaded and {available_bytes} are available in {folder:?} after deleting all that \
         is not in use{}; serve fewer blocks or allow more",
        limit(*max_bytes)
    )]
    NoRoom { needed_bytes: u64, available_bytes: u64, max_bytes: Option<u64>, folder: PathBuf },
    /// A folder does not fit on its disk.
    #[error(
        "{needed_bytes} bytes are needed and {free_bytes} are free on the disk of {folder:?}; free some, or give --out on \
         another disk"
    )]
    NoSpace {
        /// What is to be written.
        needed_bytes: u64,
        free_bytes: u64,
        /// A folder of the disk.
        folder: PathBuf,
    },
    /// A file of the model cannot be read.
    #[error("cannot read {path:?}: {source}")]
    Read { path: PathBuf, source: io::Error },
    /// A file of the model is missing, too long or not what its name says.
    #[error("{path:?} {reason}")]
    BadFile {
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// config.json describes a model that cannot be served.
    #[error("{path:?}: {reason}")]
    Unsupported {
        path: PathBuf,
        /// What is wrong with the model.
        reason: String,
    },
    /// The blocks cannot be shared by the ranks of a group.
    #[error("the blocks of {model} cannot be shared by the devices of a group: {source}")]
    Unshared { model: String, source: ShareError },
    /// A tensor is missing, of a wrong shape or type, or holds numbers that are none.
    #[error("{path:?}: tensor {tensor} {reason}")]
    BadTensor {
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        reason: String,
    },
    /// The span does not lie within the model.
    #[error(
        "blocks {span} are outside the model, which has blocks 0:{num_blocks}; choose a range within it"
    )]
    BadSpan {
        /// What was asked for.
        span: Span,
        /// Blocks of the model.
        num_blocks: u32,
    },
    /// A prepared file cannot be written.
    #[error(
        "cannot write {path:?}: {source}; check the free space and the permissions of the cache folder"
    )]
    Write { path: PathBuf, source: io::Error },
    /// Another process works in the cache folder.
    #[error(
        "the cache folder {folder:?} is in use by another process, likely a download, for more than {} s; try again when it \
         has ended",
        waited.as_secs()
    )]
    Busy {
        folder: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A device cannot be used.
    #[error("{message}")]
    Device {
        /// For the exit code.
        reason: ExitReason,
        /// What is wrong and what to do.
        message: String,
    },
    /// Told to stop.
    #[error("told to stop before the model was ready")]
    Stopped,
}

fn limit(max_bytes: Option<u64>) -> String {
    max_bytes.map_or_else(String::new, |max| format!(" (--max_disk_space {max})"))
}

impl PrepareError {
    /// What the process says in its exit code: nothing but a failed read or write is worth another
    /// try.
    pub fn exit_reason(&self) -> ExitReason {
        match self {
            PrepareError::Read { .. } | PrepareError::Write { .. } => ExitReason::Failed,
            PrepareError::Hub { lasting: false, .. } | PrepareError::Busy { .. } => {
                ExitReason::Failed
            }
            PrepareError::Unreachable { .. } => ExitReason::Unreachable,
            PrepareError::Device { reason, .. } => *reason,
            PrepareError::Stopped => ExitReason::Clean,
            _ => ExitReason::BadConfig,
        }
    }

    pub(crate) fn bad_file(path: &Path, reason: impl Into<String>) -> PrepareError {
        PrepareError::BadFile { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn bad_tensor(path: &Path, tensor: &str, reason: impl Into<String>) -> PrepareError {
        PrepareError::BadTensor {
            path: path.to_owned(),
            tensor: tensor.to_owned(),
            reason: reason.into(),
        }
    }

    /// What is wrong with the header of the file at `path`.
    pub(crate) fn header(path: &Path, error: HeaderError) -> PrepareError {
        match error {
            HeaderError::Read(source) => PrepareError::read(path, source),
            HeaderError::File(reason) => PrepareError::bad_file(path, reason),
            HeaderError::Tensor { name, reason } => PrepareError::bad_tensor(path, &name, reason),
        }
    }

    /// A read that ran into the end of a file or was refused.
    pub(crate) fn read(path: &Path, source: io::Error) -> PrepareError {
        PrepareError::Read { path: path.to_owned(), source }
    }

    pub(crate) fn write(path: &Path, source: io::Error) -> PrepareError {
        PrepareError::Write { path: path.to_owned(), source }
    }
}
