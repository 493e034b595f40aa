//! Settings of the commands that work on files beside a server: `sepal cache` and `sepal convert`.

use std::path::PathBuf;
use std::time::Duration;

use super::PrepareConfig;
use crate::block::Span;

/// Settings of `sepal cache`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    pub cache_dir: PathBuf,
    /// What to do with it.
    pub action: CacheAction,
}

/// What `sepal cache` does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheAction {
    /// List what is there.
    List {
        /// Print JSON instead of a table.
        json: bool,
    },
    /// Delete what no running instance uses.
    Prune(PruneConfig),
    /// Compare every file with what is recorded of it.
    Verify {
        /// Delete damaged files.
        repair: bool,
        /// Print JSON instead of text.
        json: bool,
    },
    /// Write a model as a folder of its own.
    Export {
        /// Repository id.
        model: String,
        /// Branch, tag or commit; `None` = `main`.
        revision: Option<String>,
        /// The folder to make.
        out: PathBuf,
    },
}

/// What `sepal cache prune` deletes: files that meet all conditions given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PruneConfig {
    /// The least recently used files, until so many bytes are left.
    pub max_bytes: Option<u64>,
    /// Files that were not used for so long.
    pub older_than: Option<Duration>,
    /// Files of this model.
    pub model: Option<String>,
    /// Only say what would be deleted.
    pub dry_run: bool,
}

/// Settings of `sepal convert`.
#[derive(Clone, Debug)]
pub struct ConvertConfig {
    /// The model, and how its matrices are to be stored.
    pub prepare: PrepareConfig,
    /// The blocks; `None` = all.
    pub blocks: Option<Span>,
    /// The folder to make.
    pub out: PathBuf,
}
