//! Every file that the cache folder holds of models, and what it is.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use model::header::Header;
use shared::config::QuantType;

use crate::disk_cache::{DiskCache, is_in_use};
use crate::error::PrepareError;
use crate::folder::ranges;
use crate::peek::open_quietly;
use crate::store::FileIdentity;
use crate::temp_files::is_being_written;

/// Format of blocks as they were downloaded.
pub const CHECKPOINT: &str = "checkpoint";
/// Of whole files of the Hub.
pub const FILES: &str = "files";
/// Of downloads that are not finished.
pub const PARTIAL: &str = "partial";
/// Of marks that a block of the checkpoint was checked.
pub const CHECKED: &str = "checked";
/// Of prepared files that do not say what they are.
pub const UNKNOWN: &str = "unknown";

/// One file.
#[derive(Clone, Debug)]
pub struct Item {
    pub path: PathBuf,
    pub bytes: u64,
    /// When it was used last.
    pub used: SystemTime,
    pub model: String,
    /// Its commit, if the file tells.
    pub revision: Option<String>,
    /// [`CHECKPOINT`] and the like, or a quant type with a dtype.
    pub format: String,
    /// The block, of a file of one.
    pub block: Option<u32>,
    /// Whether a running instance holds a lock on it.
    pub is_in_use: bool,
}

/// The files of the cache folder.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    /// By path.
    pub items: Vec<Item>,
}

/// Files of one model, revision and format.
#[derive(Clone, Debug)]
pub struct CachedModel<'a> {
    pub model: &'a str,
    pub revision: Option<&'a str>,
    pub format: &'a str,
    /// The latest use of any.
    pub used: SystemTime,
    pub items: Vec<&'a Item>,
}

impl Inventory {
    /// What is in `folder`; nothing if there is no such folder.
    ///
    /// # Errors
    /// [`PrepareError::Read`] when it cannot be read.
    pub fn read(folder: &Path) -> Result<Inventory, PrepareError> {
        let whole = std::path::absolute(folder).map_err(|e| PrepareError::read(folder, e))?;
        if let Err(error) = std::fs::read_dir(&whole)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(PrepareError::read(folder, error));
        }
        let files = DiskCache::new(&whole, None).files();
        let mut items: Vec<Item> = files
            .into_iter()
            // What another process writes just now is not whole yet, and not damaged either.
            .filter(|file| !is_being_written(&file.path))
            .map(|file| {
                let (model, revision, format) = describe(&whole, &file.path);
                Item {
                    model,
                    revision,
                    format,
                    block: block_of(&file.path),
                    is_in_use: is_in_use(&file.path),
                    path: file.path,
                    bytes: file.bytes,
                    used: file.used,
                }
            })
            .collect();
        items.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Inventory { items })
    }

    /// The files by model, revision and format.
    pub fn groups(&self) -> Vec<CachedModel<'_>> {
        let mut groups: BTreeMap<(&str, Option<&str>, &str), CachedModel<'_>> = BTreeMap::new();
        for item in &self.items {
            let key = (item.model.as_str(), item.revision.as_deref(), item.format.as_str());
            let (model, revision, format) = key;
            let group = groups.entry(key).or_insert_with(|| CachedModel {
                model,
                revision,
                format,
                used: item.used,
                items: Vec::new(),
            });
            group.used = group.used.max(item.used);
            group.items.push(item);
        }
        groups.into_values().collect()
    }
}

impl CachedModel<'_> {
    /// The blocks, as ranges.
    pub fn blocks(&self) -> String {
        let mut blocks: Vec<u32> = self.items.iter().filter_map(|item| item.block).collect();
        blocks.sort_unstable();
        blocks.dedup();
        if blocks.is_empty() { "-".to_owned() } else { ranges(blocks) }
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.items.iter().map(|item| item.bytes).sum()
    }

    /// How many files running instances hold.
    pub fn in_use(&self) -> usize {
        self.items.iter().filter(|item| item.is_in_use).count()
    }
}

/// Model, commit and format of the file at `path`.
fn describe(folder: &Path, path: &Path) -> (String, Option<String>, String) {
    let names = names_below(folder, path);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    match names[..] {
        [root, "sepal", commit, file] if root.starts_with("models--") => {
            let format = if file.ends_with(".partial") { PARTIAL } else { CHECKPOINT };
            (repository(root), Some(commit.to_owned()), format.to_owned())
        }
        [root, ..] if root.starts_with("models--") => (repository(root), None, FILES.to_owned()),
        ["prepared", of_model, ..] => prepared(folder, path, of_model),
        _ => (names.first().map_or("-", |name| name).to_owned(), None, UNKNOWN.to_owned()),
    }
}

fn names_below(folder: &Path, path: &Path) -> Vec<String> {
    let below = path.strip_prefix(folder).unwrap_or(path);
    let plain = below.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_string_lossy().into_owned()),
        _ => None,
    });
    plain.collect()
}

/// `models--org--name` as `org/name`.
fn repository(root: &str) -> String {
    root.trim_start_matches("models--").replacen("--", "/", 1)
}

/// A prepared file says what it was made from.
fn prepared(folder: &Path, path: &Path, of_model: &str) -> (String, Option<String>, String) {
    let fallback = of_model.trim_start_matches("m-").to_owned();
    let identity = open_quietly(path).ok().and_then(|file| {
        let len = file.metadata().ok()?.len();
        let header = Header::read(&file, len).ok()?;
        let is_mark = header.tensors.is_empty();
        FileIdentity::of(&header).map(|identity| (identity, is_mark))
    });
    let Some((identity, is_mark)) = identity else {
        return (fallback, None, UNKNOWN.to_owned());
    };
    let source = identity.tensors.values().next().map(|(file, ..)| file.path.clone());
    let names = source.map(|source| names_below(folder, &source)).unwrap_or_default();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (model, revision) = match names[..] {
        [root, "sepal", commit, _] if root.starts_with("models--") => {
            (repository(root), Some(commit.to_owned()))
        }
        [root, ..] if root.starts_with("models--") => (repository(root), None),
        _ => (fallback, None),
    };
    let quant = identity.tensors.values().map(|(_, _, quant)| *quant);
    let quant = quant.fold(QuantType::None, |found, one| match found {
        QuantType::None => one,
        other => other,
    });
    let format = match (is_mark, quant) {
        (true, _) => CHECKED.to_owned(),
        (false, QuantType::None) => identity.dtype,
        (false, quant) => format!("{quant}, {}", identity.dtype),
    };
    (model, revision, format)
}

/// The number in `block-N...`.
pub fn block_of(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_str()?.strip_prefix("block-")?;
    let end = name.find(|c: char| !c.is_ascii_digit()).unwrap_or(name.len());
    name.get(..end)?.parse().ok()
}
