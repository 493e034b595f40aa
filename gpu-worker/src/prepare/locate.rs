//! From what the operator typed to a folder: a folder in Hugging Face layout, or a repository id that is looked up in the
//! local hub cache (`models--ORG--NAME/{refs,snapshots}`, as huggingface_hub keeps it). Nothing is downloaded here.

use std::path::{Path, PathBuf};

use shared::block::is_prefix;

use super::error::PrepareError;

/// Longest repository id of the Hub.
const MAX_REPO_BYTES: usize = 96;

/// A commit hash has 40 digits; a refs file holds nothing else.
const MAX_REF_BYTES: u64 = 256;

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
    /// Finds `model`.
    ///
    /// # Errors
    /// [`PrepareError::NoFolder`] or [`PrepareError::NotDownloaded`].
    pub fn locate(model: &str, cache_dir: &Path) -> Result<ModelFolder, PrepareError> {
        let path = Path::new(model);
        if path.is_dir() {
            let whole = path
                .canonicalize()
                .map_err(|e| PrepareError::read(path, e))?;
            let name = whole
                .file_name()
                .map_or_else(|| model.to_owned(), |n| n.to_string_lossy().into_owned());
            return Ok(ModelFolder {
                path: whole,
                name,
                repo: None,
            });
        }
        if !is_repo_id(model) {
            return Err(PrepareError::NoFolder(model.chars().take(200).collect()));
        }
        let repo = map_repo(model);
        let path = snapshot(&repo, cache_dir)?;
        Ok(ModelFolder {
            path,
            name: repo.clone(),
            repo: Some(repo),
        })
    }

    /// Page of the model, for the swarm's index.
    pub fn repository(&self) -> Option<String> {
        self.repo
            .as_ref()
            .map(|repo| format!("https://huggingface.co/{repo}"))
    }
}

/// `org/name` or `name`, of letters, digits, `-`, `_` and `.` (huggingface_hub `validate_repo_id`).
fn is_repo_id(text: &str) -> bool {
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
fn map_repo(repo: &str) -> String {
    match repo
        .strip_prefix("bigscience/")
        .and_then(|name| name.strip_suffix("-petals"))
    {
        Some(name) if !name.is_empty() => format!("bigscience/{name}"),
        _ => repo.to_owned(),
    }
}

fn snapshot(repo: &str, cache_dir: &Path) -> Result<PathBuf, PrepareError> {
    let root = cache_dir.join(format!("models--{}", repo.replace('/', "--")));
    let missing = |looked: PathBuf| PrepareError::NotDownloaded {
        repo: repo.to_owned(),
        looked,
        cache: cache_dir.to_owned(),
    };
    let reference = root.join("refs/main");
    let known =
        std::fs::metadata(&reference).is_ok_and(|m| m.is_file() && m.len() <= MAX_REF_BYTES);
    let commit = if known {
        std::fs::read_to_string(&reference).unwrap_or_default()
    } else {
        String::new()
    };
    let commit = commit.trim();
    if commit.is_empty() || !commit.chars().all(|c| c.is_ascii_alphanumeric()) {
        return Err(missing(reference));
    }
    let folder = root.join("snapshots").join(commit);
    if folder.is_dir() {
        Ok(folder)
    } else {
        Err(missing(folder))
    }
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

    #[test]
    fn a_snapshot_is_found_through_its_reference() {
        let cache = tempfile::tempdir().unwrap();
        let missing = ModelFolder::locate("org/name", cache.path())
            .unwrap_err()
            .to_string();
        assert!(
            missing.contains("org/name") && missing.contains("download"),
            "{missing}"
        );

        let root = cache.path().join("models--org--name");
        std::fs::create_dir_all(root.join("snapshots/abc123")).unwrap();
        std::fs::create_dir_all(root.join("refs")).unwrap();
        std::fs::write(root.join("refs/main"), "abc123\n").unwrap();
        let folder = ModelFolder::locate("org/name", cache.path()).unwrap();
        assert_eq!(folder.path, root.join("snapshots/abc123"));
        assert_eq!(
            folder.repository().as_deref(),
            Some("https://huggingface.co/org/name")
        );

        std::fs::write(root.join("refs/main"), "../../outside").unwrap();
        assert!(matches!(
            ModelFolder::locate("org/name", cache.path()),
            Err(PrepareError::NotDownloaded { .. })
        ));
    }
}
