//! From what the operator typed to a folder: a folder in Hugging Face layout, or a repository id,
//! whose folder is in the cache (`models--ORG--NAME/{refs,snapshots}`, as huggingface_hub keeps
//! it). What is not there is downloaded by [`crate::hub`].

use std::path::{Path, PathBuf};

use shared::config::PrepareConfig;

use crate::error::PrepareError;
use crate::folder::FolderRecord;
use crate::hub::Hub;
use crate::repository::is_repo_id;

/// Where a model lies and what it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFolder {
    pub path: PathBuf,
    /// Name for people: the folder's or the repository id.
    pub name: String,
    /// Repository id when it came from the Hub.
    pub repo: Option<String>,
    /// What Sepal wrote of the folder, if Sepal wrote it.
    pub record: Option<FolderRecord>,
}

impl ModelFolder {
    /// Finds the model of `config`; the second value is the way to the Hub, if it is one of its
    /// models.
    ///
    /// # Errors
    /// [`PrepareError::NoFolder`], and what `Hub::open` says.
    pub fn locate(config: &PrepareConfig) -> Result<(ModelFolder, Option<Hub>), PrepareError> {
        let model = config.model.as_str();
        let path = Path::new(model);
        if path.is_dir() {
            let whole = path.canonicalize().map_err(|e| PrepareError::read(path, e))?;
            let name = whole
                .file_name()
                .map_or_else(|| model.to_owned(), |n| n.to_string_lossy().into_owned());
            let record = FolderRecord::read(&whole)?;
            let name = record.as_ref().map_or(name, |record| record.model.clone());
            let repo = record.as_ref().and_then(|record| record.repository.clone());
            return Ok((ModelFolder { path: whole, name, repo, record }, None));
        }
        if !is_repo_id(model) {
            return Err(PrepareError::NoFolder(model.chars().take(200).collect()));
        }
        let hub = Hub::open(config)?;
        let folder = ModelFolder {
            path: hub.snapshot(),
            name: hub.name().to_owned(),
            repo: Some(hub.name().to_owned()),
            record: None,
        };
        Ok((folder, Some(hub)))
    }

    /// Page of the model, for the swarm's index.
    pub fn repository(&self) -> Option<String> {
        self.repo.as_ref().map(|repo| format!("https://huggingface.co/{repo}"))
    }
}
