//! A model of the cache as a folder in Hugging Face layout, which can go to another machine: config
//! and the like, whole checkpoint files, files of blocks, an index over all of them, and the record
//! of [`crate::folder`]. It is written beside its place and renamed when it is whole.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use model::BlockSpec;
use model::header::Header;
use serde_json::{Value, json};
use shared::files::write_atomically;

use super::Said;
use super::inventory::block_of;
use crate::checkpoint::{Checkpoint, read_bounded};
use crate::client_tensors::CLIENT_FILE;
use crate::error::PrepareError;
use crate::folder::{BlockFile, FolderRecord, RECORD};
use crate::repository::{is_repo_id, map_repo, repo_folder};
use crate::staging::Staging;
use crate::table::decimal;

/// Longest accepted config.json.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// Longest accepted name of a commit.
const MAX_REF_BYTES: u64 = 200;

/// Weights of PyTorch are described by their own index alone.
const PICKLED: &str = "pytorch_model";

/// The index that is written.
const INDEX: &str = "model.safetensors.index.json";

/// Writes `model` as it is in the cache to the folder `out`.
pub(super) fn run(
    cache: &Path,
    model: &str,
    revision: Option<&str>,
    out: &Path,
) -> Result<Said, PrepareError> {
    let found = ExportFiles::look(cache, model, revision)?;
    let staging = Staging::begin(out, found.bytes())?;
    for file in found.files.iter().chain(found.blocks.values()) {
        staging.copy(file)?;
    }
    if !found.blocks.is_empty() {
        write_index(staging.folder())?;
    }
    let record = found.record(staging.folder())?;
    if record.blocks.is_empty() {
        return Err(found.refuse(cache, "has no weights of a block"));
    }
    record.write(&staging.folder().join(RECORD))?;
    let (ranges, command) = (record.ranges(), record.serve_command(out));
    let (bytes, blocks) = (decimal(found.bytes()), record.num_blocks);
    staging.finish()?;
    Ok(Said::well(format!(
        "{} holds blocks {ranges} of {blocks} of {} ({bytes}); serve them with: {command}\n",
        out.display(),
        found.name
    )))
}

/// What the cache has of a model.
struct ExportFiles {
    name: String,
    commit: String,
    /// Files of its snapshot, links resolved by their names there.
    files: Vec<PathBuf>,
    /// Files of blocks.
    blocks: BTreeMap<u32, PathBuf>,
}

impl ExportFiles {
    fn look(
        cache: &Path,
        model: &str,
        revision: Option<&str>,
    ) -> Result<ExportFiles, PrepareError> {
        let mut found = ExportFiles {
            name: map_repo(model),
            commit: String::new(),
            files: Vec::new(),
            blocks: BTreeMap::new(),
        };
        let revision = revision.unwrap_or("main");
        let root = cache.join(repo_folder(&found.name));
        if !is_repo_id(&found.name) || !root.is_dir() {
            return Err(found.refuse(cache, "is not in it"));
        }
        let named = read_bounded(&root.join("refs").join(revision), MAX_REF_BYTES).ok();
        let named = named.and_then(|bytes| String::from_utf8(bytes).ok());
        let commit = named.map_or_else(|| revision.to_owned(), |name| name.trim().to_owned());
        let plain = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_alphanumeric());
        let snapshot = root.join("snapshots").join(&commit);
        if !plain || !snapshot.join("config.json").is_file() {
            return Err(found.refuse(cache, &format!("is not in it at revision {revision}")));
        }
        found.commit = commit;
        found.files = files_in(&snapshot);
        found.files.retain(|path| path.file_name().is_none_or(|name| name != CLIENT_FILE));
        let of_blocks = files_in(&root.join("sepal").join(&found.commit));
        let complete = of_blocks
            .into_iter()
            .filter(|path| path.extension().is_some_and(|of| of == "safetensors"));
        found.blocks = complete.filter_map(|path| Some((block_of(&path)?, path))).collect();
        // An index over files that are not there would promise them.
        if !found.blocks.is_empty() {
            found.files.retain(|path| path.file_name().is_none_or(|name| name != INDEX));
        }
        Ok(found)
    }

    fn refuse(&self, cache: &Path, why: &str) -> PrepareError {
        PrepareError::bad_file(
            cache,
            format!(
                "cannot give model {}: it {why}; `sepal cache ls` lists what there is",
                self.name
            ),
        )
    }

    fn bytes(&self) -> u64 {
        let length = |path: &PathBuf| std::fs::metadata(path).map_or(0, |stat| stat.len());
        self.files.iter().chain(self.blocks.values()).map(length).fold(0, u64::saturating_add)
    }

    /// What the copied files hold.
    fn record(&self, folder: &Path) -> Result<FolderRecord, PrepareError> {
        let path = folder.join("config.json");
        let json = read_bounded(&path, MAX_CONFIG_BYTES)?;
        let unsupported = |reason: String| PrepareError::Unsupported { path: path.clone(), reason };
        let config: Value =
            serde_json::from_slice(&json).map_err(|e| unsupported(format!("is no JSON: {e}")))?;
        let spec = BlockSpec::from_config(&config).map_err(|e| unsupported(e.to_string()))?;
        let count = u32::try_from(spec.num_blocks).unwrap_or(u32::MAX);
        let mut record = FolderRecord::new(self.name.clone(), count, None);
        record.repository = Some(self.name.clone());
        record.commit = Some(self.commit.clone());
        let Ok(mut checkpoint) = Checkpoint::find(folder) else {
            return Ok(record);
        };
        for block in 0..count {
            let mut files: Vec<String> = Vec::new();
            let is_here = spec.tensors(block as usize).iter().all(|tensor| {
                let name = checkpoint.name_of(&tensor.full_name);
                let file = name.and_then(|name| checkpoint.file_of(&name).map(str::to_owned));
                file.is_ok_and(|file| {
                    let is_file = folder.join(&file).is_file();
                    files.push(file);
                    is_file
                })
            });
            if let Some(file) = files.first().filter(|_| is_here) {
                let bytes = std::fs::metadata(folder.join(file)).map_or(0, |stat| stat.len());
                record.blocks.insert(block, BlockFile { file: file.clone(), bytes });
            }
        }
        Ok(record)
    }
}

/// The files in a folder, by name; those of folders in it are not looked at.
fn files_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    files
}

/// An index over all safetensors files of a folder, by their headers.
fn write_index(folder: &Path) -> Result<(), PrepareError> {
    let mut weight_map: BTreeMap<String, String> = BTreeMap::new();
    for path in files_in(folder) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.ends_with(".safetensors") || name.starts_with(PICKLED) {
            continue;
        }
        let file = File::open(&path).map_err(|e| PrepareError::read(&path, e))?;
        let len = file.metadata().map_err(|e| PrepareError::read(&path, e))?.len();
        let header = Header::read(&file, len).map_err(|e| PrepareError::header(&path, e))?;
        weight_map.extend(header.tensors.into_keys().map(|tensor| (tensor, name.clone())));
    }
    let path = folder.join(INDEX);
    let text = json!({ "metadata": {}, "weight_map": weight_map }).to_string();
    write_atomically(&path, |file| std::io::Write::write_all(file, text.as_bytes()))
        .map_err(|e| PrepareError::write(&path, e))
}
