//! Whether the files of the cache are what is recorded of them: whole files of the Hub have its
//! SHA-256, prepared blocks have their own in their header, and every block file has the length and
//! the tensors that its header describes.

use std::path::Path;

use model::header::Header;
use serde::Serialize;
use shared::exit::ExitReason;
use shared::sanitize_text::escaped;

use super::Said;
use super::inventory::{CHECKPOINT, FILES, Inventory, Item, PARTIAL};
use crate::disk_cache;
use crate::error::PrepareError;
use crate::hub::sum_fits;
use crate::peek::open_quietly;
use crate::store;

/// What `sepal cache verify --json` prints; `deploy/TOOLS.md` describes the keys.
#[derive(Serialize)]
struct VerifyReport {
    version: u32,
    files: usize,
    damaged: Vec<Damage>,
}

/// A damaged file.
#[derive(Serialize)]
struct Damage {
    path: String,
    model: String,
    problem: String,
    /// Whether it is gone now.
    deleted: bool,
}

/// Checks every file. Ends with [`ExitReason::Failed`] when a damaged one stays.
pub(super) fn run(folder: &Path, repair: bool, json: bool) -> Result<Said, PrepareError> {
    let inventory = Inventory::read(folder)?;
    let mut damaged = Vec::new();
    for item in &inventory.items {
        if let Some(problem) = problem(item) {
            damaged.push(Damage {
                path: item.path.display().to_string(),
                model: item.model.clone(),
                problem,
                deleted: repair && disk_cache::delete(&item.path),
            });
        }
    }
    let is_well = damaged.iter().all(|damage| damage.deleted);
    let reason = if is_well { ExitReason::Clean } else { ExitReason::Failed };
    let report = VerifyReport { version: 1, files: inventory.items.len(), damaged };
    let text = match json {
        true => serde_json::to_string_pretty(&report).unwrap_or_default() + "\n",
        false => text(&report, repair),
    };
    Ok(Said { text, reason })
}

fn text(report: &VerifyReport, repair: bool) -> String {
    let mut text = String::new();
    for Damage { path, problem, deleted, .. } in &report.damaged {
        let what = match (deleted, repair) {
            (true, _) => "; deleted, the next start fetches or converts it again",
            (false, true) => "; in use, stop the server and try again",
            (false, false) => "; `sepal cache verify --repair` deletes it",
        };
        text.push_str(&format!("{}: {}{what}\n", escaped(path), escaped(problem)));
    }
    let (files, damaged) = (report.files, report.damaged.len());
    text.push_str(&format!("{files} files checked, {damaged} damaged\n"));
    text
}

/// What is wrong with a file.
fn problem(item: &Item) -> Option<String> {
    match item.format.as_str() {
        // The next download goes on where it stopped, after a look at what is there.
        PARTIAL => None,
        FILES => match sum_fits(&item.path, &mut |_| Ok(())) {
            Ok(true) => None,
            Ok(false) => Some("does not have the SHA-256 that the Hub gave for it".to_owned()),
            Err(error) => Some(error.to_string()),
        },
        CHECKPOINT => header(&item.path).and_then(|header| tensors(&header)).err(),
        _ => store::check(&item.path, &mut |_| Ok(()))
            .unwrap_or_else(|error| Some(error.to_string())),
    }
}

fn header(path: &Path) -> Result<Header, String> {
    let file = open_quietly(path).map_err(|error| error.to_string())?;
    let len = file.metadata().map_err(|error| error.to_string())?.len();
    Header::read(&file, len).map_err(|error| error.to_string())
}

/// Whether every tensor has the bytes of its shape.
fn tensors(header: &Header) -> Result<(), String> {
    if header.tensors.is_empty() {
        return Err("holds no tensor".to_owned());
    }
    for (name, tensor) in &header.tensors {
        let fits = tensor.block_dtype().and_then(|dtype| tensor.block_elements(dtype));
        if fits.is_none() {
            let shown: String = name.chars().take(100).collect();
            return Err(format!("tensor {shown} does not have the bytes of its shape"));
        }
    }
    Ok(())
}
