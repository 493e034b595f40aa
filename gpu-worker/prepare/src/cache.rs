//! `sepal cache`: what the cache folder holds, and what can be done with it without a server. Files
//! that a running instance holds a lock on are never touched.
//!
//! | module | is |
//! | --- | --- |
//! | `config` | its flags |
//! | `inventory` | every file of the folder: model, revision, format, block, last use |
//! | `prune` | which files go |
//! | `verify` | whether a file is what is recorded of it |
//! | `export` | a model of the cache as a folder of its own |

mod config;
mod export;
mod inventory;
mod prune;
mod verify;

use std::io::{self, Write};
use std::path::Path;
use std::time::UNIX_EPOCH;

use serde::Serialize;
use shared::exit::ExitReason;
use shared::sanitize_text::{Escaped, escaped};

use crate::error::PrepareError;
use crate::table::{age, aligned, decimal};
pub use config::{CacheAction, CacheConfig, PruneConfig};
use inventory::{CachedModel, Inventory};

/// Runs the command; what it says goes to standard output, errors to standard error.
pub fn run_command(config: &CacheConfig) -> ExitReason {
    let outcome = match &config.action {
        CacheAction::List { json } => list(&config.cache_dir, *json),
        CacheAction::Prune(wanted) => prune::run(&config.cache_dir, wanted),
        CacheAction::Verify { repair, json } => verify::run(&config.cache_dir, *repair, *json),
        CacheAction::Export { model, revision, out } => {
            export::run(&config.cache_dir, model, revision.as_deref(), out)
        }
    };
    match outcome {
        Ok(Said { text, reason }) => match io::stdout().lock().write_all(text.as_bytes()) {
            Ok(()) => reason,
            Err(error) => {
                eprintln!("sepal: cannot write the answer: {error}");
                ExitReason::Failed
            }
        },
        Err(error) => {
            eprintln!("sepal: {}", Escaped(&error));
            error.exit_reason()
        }
    }
}

/// What a command says, and how it ends.
struct Said {
    text: String,
    reason: ExitReason,
}

impl Said {
    fn well(text: String) -> Said {
        Said { text, reason: ExitReason::Clean }
    }
}

/// What `sepal cache ls --json` prints; `deploy/TOOLS.md` describes the keys.
#[derive(Serialize)]
struct Listing<'a> {
    version: u32,
    cache_dir: &'a Path,
    bytes: u64,
    entries: Vec<CacheEntry<'a>>,
}

/// Files of one model in one format.
#[derive(Serialize)]
struct CacheEntry<'a> {
    model: &'a str,
    revision: Option<&'a str>,
    format: &'a str,
    blocks: String,
    files: usize,
    bytes: u64,
    last_used_unix_s: u64,
    files_in_use: usize,
}

fn list(folder: &Path, json: bool) -> Result<Said, PrepareError> {
    let inventory = Inventory::read(folder)?;
    let groups = inventory.groups();
    let bytes = inventory.items.iter().map(|item| item.bytes).sum();
    if json {
        let entries = groups.iter().map(entry).collect();
        let listing = Listing { version: 1, cache_dir: folder, bytes, entries };
        let text = serde_json::to_string_pretty(&listing).unwrap_or_default();
        return Ok(Said::well(text + "\n"));
    }
    if groups.is_empty() {
        return Ok(Said::well(format!("nothing is kept in {}\n", folder.display())));
    }
    let head = ["MODEL", "REVISION", "FORMAT", "BLOCKS", "SIZE", "LAST USED", "IN USE"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(groups.iter().map(row));
    let total = format!("{} in {}\n", decimal(bytes), folder.display());
    Ok(Said::well(aligned(&rows) + &total))
}

fn entry<'a>(group: &'a CachedModel<'a>) -> CacheEntry<'a> {
    let used = group.used.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    CacheEntry {
        model: group.model,
        revision: group.revision,
        format: group.format,
        blocks: group.blocks(),
        files: group.items.len(),
        bytes: group.bytes(),
        last_used_unix_s: used,
        files_in_use: group.in_use(),
    }
}

fn row(group: &CachedModel<'_>) -> Vec<String> {
    let revision: String = group.revision.unwrap_or("-").chars().take(12).collect();
    // Names of folders, and what headers of files say.
    vec![
        escaped(group.model).into_owned(),
        escaped(&revision).into_owned(),
        escaped(group.format).into_owned(),
        group.blocks(),
        decimal(group.bytes()),
        format!("{} ago", age(group.used)),
        match group.in_use() {
            0 => "no".to_owned(),
            files => format!("{files} of {} files", group.items.len()),
        },
    ]
}

#[cfg(test)]
mod tests;
