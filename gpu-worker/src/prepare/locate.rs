//! From what the operator typed to a folder: a folder in Hugging Face layout, or a repository id, whose folder is in the cache
//! (`models--ORG--NAME/{refs,snapshots}`, as huggingface_hub keeps it). What is not there is downloaded by [`super::hub`].

use std::path::{Path, PathBuf};

use shared::block::is_prefix;
use shared::config::PrepareConfig;

use super::error::PrepareError;
use super::hub::Hub;

/// Longest repository id of the Hub.
const MAX_REPO_BYTES: usize = 96;

/// Where a model lies and what it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFolder {
    /// The folder.
    pub path: PathBuf,
    /// Name for people: the folder's or the repository id.
    pub name: String,
    /// Repository id when it came from the Hub.
    pub repo: Option<String>,
}

impl ModelFolder {
    /// Finds the model of `config`; the second value is the way to the Hub, if it is one of its models.
    ///
    /// # Errors
    /// [`PrepareError::NoFolder`], and what `Hub::open` says.
    pub fn locate(config: &PrepareConfig) -> Result<(ModelFolder, Option<Hub>), PrepareError> {
        let model = config.model.as_str();
        let path = Path::new(model);
        if path.is_dir() {
            let whole = path
                .canonicalize()
                .map_err(|e| PrepareError::read(path, e))?;
            let name = whole
                .file_name()
                .map_or_else(|| model.to_owned(), |n| n.to_string_lossy().into_owned());
            let folder = ModelFolder {
                path: whole,
                name,
                repo: None,
            };
            return Ok((folder, None));
        }
        if !is_repo_id(model) {
            return Err(PrepareError::NoFolder(model.chars().take(200).collect()));
        }
        let hub = Hub::open(config)?;
        let folder = ModelFolder {
            path: hub.snapshot(),
            name: hub.name().to_owned(),
            repo: Some(hub.name().to_owned()),
        };
        Ok((folder, Some(hub)))
    }

    /// Page of the model, for the swarm's index.
    pub fn repository(&self) -> Option<String> {
        self.repo
            .as_ref()
            .map(|repo| format!("https://huggingface.co/{repo}"))
    }
}

/// `org/name` or `name`, of letters, digits, `-`, `_` and `.` (huggingface_hub `validate_repo_id`).
pub(super) fn is_repo_id(text: &str) -> bool {
    let part = |p: &str| {
        let edges = !p.starts_with(['-', '.']) && !p.ends_with(['-', '.']);
        !p.is_empty()
            && edges
            && p.chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    text.len() <= MAX_REPO_BYTES
        && text.split('/').count() <= 2
        && text.split('/').all(part)
        && !text.contains("--")
        && !text.contains("..")
}

/// `bigscience/<name>-petals` stands for `bigscience/<name>` (petals `utils/auto_config.py`, `get_compatible_model_repo`).
pub(super) fn map_repo(repo: &str) -> String {
    match repo
        .strip_prefix("bigscience/")
        .and_then(|name| name.strip_suffix("-petals"))
    {
        Some(name) if !name.is_empty() => format!("bigscience/{name}"),
        _ => repo.to_owned(),
    }
}

/// Folder of a repository in the cache.
pub(super) fn repo_folder(repo: &str) -> String {
    format!("models--{}", repo.replace('/', "--"))
}

/// The prefix of the module uids that Petals takes for a repository by default, if its family has a rule
/// (petals `models/FAMILY/config.py`, `from_pretrained`). A dot becomes a dash.
pub fn default_dht_prefix(model_type: &str, repo: &str) -> Option<String> {
    let last = repo.rsplit('/').next().unwrap_or(repo);
    let prefix = match model_type {
        "llama" if last.ends_with("-hf") => last.to_owned(),
        "llama" => format!("{last}-hf"),
        "bloom" => format!("{repo}-petals"),
        "falcon" => last.to_owned(),
        "mixtral" => repo.to_owned(),
        _ => return None,
    };
    Some(prefix.replace('.', "-")).filter(|p| is_prefix(p))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_follow_the_families() {
        let cases = [
            (
                "llama",
                "meta-llama/Meta-Llama-3.1-405B-Instruct",
                "Meta-Llama-3-1-405B-Instruct-hf",
            ),
            ("llama", "huggyllama/llama-7b-hf", "llama-7b-hf"),
            ("bloom", "bigscience/bloom", "bigscience/bloom-petals"),
            ("falcon", "tiiuae/falcon-180B", "falcon-180B"),
            (
                "mixtral",
                "mistralai/Mixtral-8x7B-Instruct-v0.1",
                "mistralai/Mixtral-8x7B-Instruct-v0-1",
            ),
        ];
        for (family, repo, prefix) in cases {
            assert_eq!(default_dht_prefix(family, repo).as_deref(), Some(prefix));
        }
        assert_eq!(default_dht_prefix("gpt2", "gpt2"), None);
    }

    #[test]
    fn only_plain_names_are_repository_ids() {
        for good in ["gpt2", "org/name", "Org-1/na.me_2"] {
            assert!(is_repo_id(good), "{good}");
        }
        for bad in [
            "",
            "/etc",
            "a/b/c",
            "../x",
            "a/..",
            "a b",
            "./x",
            "a//b",
            "-a/b",
            &"x".repeat(97),
        ] {
            assert!(!is_repo_id(bad), "{bad}");
        }
        assert_eq!(map_repo("bigscience/bloom-petals"), "bigscience/bloom");
        assert_eq!(map_repo("bigscience/bloom"), "bigscience/bloom");
    }
}
