//! `sepal cache`: commands for the cache folder.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use shared::config::{CacheAction, CacheConfig, PruneConfig};

use super::Env;
use super::serve::{cache_dir, checked_revision};
use super::values::{age, size_bytes};

#[derive(Debug, Args)]
pub struct CacheArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
#[command(rename_all = "snake_case")]
enum Action {
    /// List models, formats and blocks with their size, last use, and whether a server uses them
    Ls {
        #[command(flatten)]
        folder: FolderArgs,
        /// Print JSON instead of a table; deploy/TOOLS.md describes its keys
        #[arg(long)]
        json: bool,
    },
    /// Delete files that no running server uses
    #[command(group = clap::ArgGroup::new("condition").required(true).multiple(true))]
    Prune {
        #[command(flatten)]
        folder: FolderArgs,
        /// Delete the least recently used files until the cache takes at most this, such as 300GB
        #[arg(long = "max_disk_space", value_name = "SIZE", value_parser = size_bytes, group = "condition")]
        max_disk_space: Option<u64>,
        /// Delete only files that were not used for this long, such as 12h, 30d or 8w
        #[arg(long = "older_than", value_name = "AGE", value_parser = age, group = "condition")]
        older_than: Option<Duration>,
        /// Delete only files of this model
        #[arg(long, value_name = "MODEL", group = "condition")]
        model: Option<String>,
        /// Say what would be deleted, and delete nothing
        #[arg(long = "dry_run")]
        dry_run: bool,
    },
    /// Check every file against its recorded size, header and SHA-256
    Verify {
        #[command(flatten)]
        folder: FolderArgs,
        /// Delete damaged files, so that the next start fetches or converts them again
        #[arg(long)]
        repair: bool,
        /// Print JSON instead of text; deploy/TOOLS.md describes its keys
        #[arg(long)]
        json: bool,
    },
    /// Copy a downloaded model into a folder for another machine: `sepal serve DIR` serves it
    Export {
        #[command(flatten)]
        folder: FolderArgs,
        /// Repository of the Hub, such as bigscience/bloom
        model: String,
        /// Branch, tag or commit of the model [default: main]
        #[arg(long, value_name = "REVISION")]
        revision: Option<String>,
        /// Folder to make; it must not exist yet, or be empty
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
struct FolderArgs {
    /// The cache folder [env: SEPAL_CACHE, PETALS_CACHE] [default: ~/.cache/sepal]
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
}

/// Turns flags and environment into settings.
pub fn resolve(args: CacheArgs, env: Env<'_>) -> Result<CacheConfig, String> {
    let (folder, action) = match args.action {
        Action::Ls { folder, json } => (folder, CacheAction::List { json }),
        Action::Prune { folder, max_disk_space, older_than, model, dry_run } => {
            let wanted = PruneConfig { max_bytes: max_disk_space, older_than, model, dry_run };
            (folder, CacheAction::Prune(wanted))
        }
        Action::Verify { folder, repair, json } => (folder, CacheAction::Verify { repair, json }),
        Action::Export { folder, model, revision, out } => {
            let revision = revision.map(checked_revision).transpose()?;
            (folder, CacheAction::Export { model, revision, out })
        }
    };
    let cache_dir = folder.cache_dir.unwrap_or_else(|| cache_dir(env));
    Ok(CacheConfig { cache_dir, action })
}
