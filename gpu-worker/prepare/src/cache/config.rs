//! Settings of `sepal cache`: its flags.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use shared::config::revision;
use shared::config::values::size_bytes;

/// Settings of `sepal cache`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
#[command(rename_all = "snake_case")]
pub struct CacheConfig {
    /// What to do with the cache.
    #[command(subcommand)]
    pub action: CacheAction,
    /// The cache folder [env: SEPAL_CACHE, PETALS_CACHE] [default: ~/.cache/sepal]
    #[arg(long, value_name = "DIR", global = true, required = false)]
    pub cache_dir: PathBuf,
}

/// What `sepal cache` does.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum CacheAction {
    /// List models, formats and blocks with their size, last use, and whether a server uses them
    #[command(name = "ls")]
    List {
        /// Print JSON instead of a table; deploy/TOOLS.md describes its keys
        #[arg(long)]
        json: bool,
    },
    /// Delete files that no running server uses
    Prune(PruneConfig),
    /// Check every file against its recorded size, header and SHA-256
    Verify {
        /// Delete damaged files, so that the next start fetches or converts them again
        #[arg(long)]
        repair: bool,
        /// Print JSON instead of text; deploy/TOOLS.md describes its keys
        #[arg(long)]
        json: bool,
    },
    /// Copy a downloaded model into a folder for another machine: `sepal serve DIR` serves it
    Export {
        /// Repository of the Hub, such as bigscience/bloom
        model: String,
        /// Branch, tag or commit of the model [default: main]
        #[arg(long, value_name = "REVISION", value_parser = revision)]
        revision: Option<String>,
        /// Folder to make; it must not exist yet, or be empty
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
}

/// What `sepal cache prune` deletes: files that meet all conditions given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(rename_all = "snake_case")]
#[command(group = clap::ArgGroup::new("condition").required(true).multiple(true))]
pub struct PruneConfig {
    /// Delete the least recently used files until the cache takes at most this, such as 300GB
    #[arg(id = "max_disk_space", long = "max_disk_space", value_name = "SIZE", value_parser = size_bytes, group = "condition")]
    pub max_bytes: Option<u64>,
    /// Delete only files that were not used for this long, such as 12h, 30d or 8w
    #[arg(long, value_name = "AGE", value_parser = age, group = "condition")]
    pub older_than: Option<Duration>,
    /// Delete only files of this model
    #[arg(long, value_name = "MODEL", group = "condition")]
    pub model: Option<String>,
    /// Say what would be deleted, and delete nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// An age: a whole number of seconds, or with a unit: `12h`, `30d`, `8w`.
fn age(text: &str) -> Result<Duration, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let seconds = match unit {
        "" | "s" => Some(1),
        "m" | "min" => Some(60),
        "h" => Some(3600),
        "d" => Some(86400),
        "w" => Some(7 * 86400),
        _ => None,
    };
    let whole: Option<u64> = number.parse().ok();
    whole
        .zip(seconds)
        .and_then(|(whole, seconds)| whole.checked_mul(seconds))
        .map(Duration::from_secs)
        .ok_or_else(|| "expected an age such as 12h, 30d or 8w".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_units() {
        for (text, seconds) in [("90", 90), ("5min", 300), ("12h", 43_200), ("2w", 1_209_600)] {
            assert_eq!(age(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for bad in ["", "d", "-1d", "1.5h", "3x", "99999999999999999999w", "9999999999999999999w"] {
            assert!(age(bad).unwrap_err().contains("30d"), "{bad}");
        }
    }
}
