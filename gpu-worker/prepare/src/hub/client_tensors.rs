//! What a client computes itself (embeddings, last norm, head) and its small files: of the weights only those
//! tensors are downloaded, into `models--ORG--NAME/sepal/COMMIT/client.safetensors`, which the folder of the
//! commit links to. Pickled files that hold them are downloaded whole.

use std::path::{Path, PathBuf};

use model::header::NamedTensor;
use serde_json::Value;

use super::{Hub, Weights, files_of};
use crate::checkpoint::{Checkpoint, read_bounded};
use crate::error::PrepareError;
use crate::progress::Watch;
use crate::source::Wanted;

/// The file with the tensors of a client, where the folder has no whole checkpoint.
pub const CLIENT_FILE: &str = "client.safetensors";

/// Files beside the weights that a client reads if they are there; it needs the first.
const SMALL_FILES: [&str; 7] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
];
/// Longest accepted config.json.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

impl Hub {
    /// A folder with all that a client reads. `tensors_of` tells by config.json which tensors those are.
    ///
    /// # Errors
    /// As [`Hub::open`]; [`PrepareError::Unsupported`] with what `tensors_of` says.
    pub fn client_tensors(
        &mut self,
        tensors_of: impl FnOnce(&Value) -> Result<Vec<NamedTensor>, String>,
        watch: &mut Watch<'_>,
    ) -> Result<PathBuf, PrepareError> {
        let snapshot = self.snapshot();
        let path = snapshot.join("config.json");
        let json = read_bounded(&path, MAX_CONFIG_BYTES)?;
        let unsupported = |reason| PrepareError::Unsupported { path: path.clone(), reason };
        let value: Value = serde_json::from_slice(&json)
            .map_err(|error| unsupported(format!("is no JSON: {error}")))?;
        let tensors = tensors_of(&value).map_err(unsupported)?;
        for (number, file) in SMALL_FILES.into_iter().enumerate() {
            match self.small_file(file) {
                Err(PrepareError::NotOnHub { .. } | PrepareError::NotDownloaded { .. })
                    if number > 0 => {}
                other => drop(other?),
            }
        }
        let checkpoint = self.checkpoint(Weights::Left)?;
        let link = snapshot.join(CLIENT_FILE);
        if self.offline && link.is_file() {
            return Ok(snapshot);
        }
        let wanted = self.wanted(&checkpoint, tensors, watch)?;
        let files = files_of(&checkpoint, &wanted)?;
        if files.iter().all(|file| snapshot.join(file).is_file()) {
            return Ok(snapshot);
        }
        let piece = self.blocks_folder().join(CLIENT_FILE);
        self.piece(piece, &checkpoint, &wanted, watch)?;
        let target = Path::new("../../sepal").join(self.commit()).join(CLIENT_FILE);
        self.link(&link, &target).map_err(|error| PrepareError::write(&link, error))?;
        Ok(snapshot)
    }

    /// The tensors by the names that this checkpoint has for them.
    fn wanted(
        &mut self,
        checkpoint: &Checkpoint,
        tensors: Vec<NamedTensor>,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<Wanted>, PrepareError> {
        let mut wanted = Vec::with_capacity(tensors.len());
        for NamedTensor { names, shape } in tensors {
            let mut found = None;
            for name in &names {
                let Ok(file) = checkpoint.file_of(name) else { continue };
                let file = file.to_owned();
                if self.header_of(&file, watch)?.tensors.contains_key(name) {
                    found = Some(name.clone());
                    break;
                }
            }
            let full_name = found.ok_or_else(|| {
                self.lasting(format!("{} has no tensor {}", self.name, names.join(" or ")))
            })?;
            wanted.push(Wanted { name: full_name.clone(), full_name, shape });
        }
        Ok(wanted)
    }
}
