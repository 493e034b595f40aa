//! Names of repositories of the Hub: which names are ids, where they lie in the cache, and what the
//! swarm calls their models.

use shared::block::is_prefix;

/// Longest repository id of the Hub.
const MAX_REPO_BYTES: usize = 96;

/// `org/name` or `name`, of letters, digits, `-`, `_` and `.` (huggingface_hub `validate_repo_id`).
pub(crate) fn is_repo_id(text: &str) -> bool {
    let part = |p: &str| {
        let edges = !p.starts_with(['-', '.']) && !p.ends_with(['-', '.']);
        !p.is_empty() && edges && p.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    text.len() <= MAX_REPO_BYTES
        && text.split('/').count() <= 2
        && text.split('/').all(part)
        && !text.contains("--")
        && !text.contains("..")
}

/// `bigscience/<name>-petals` stands for `bigscience/<name>` (petals `utils/auto_config.py`,
/// `get_compatible_model_repo`).
pub(crate) fn map_repo(repo: &str) -> String {
    match repo.strip_prefix("bigscience/").and_then(|name| name.strip_suffix("-petals")) {
        Some(name) if !name.is_empty() => format!("bigscience/{name}"),
        _ => repo.to_owned(),
    }
}

/// Folder of a repository in the cache.
pub(crate) fn repo_folder(repo: &str) -> String {
    hf_hub::Repo::model(repo.to_owned()).folder_name()
}

/// The prefix of the module uids that Petals takes for a model of the Hub by default, if its family
/// has a rule ([`model::dht_prefix`]). A dot becomes a dash.
pub fn default_dht_prefix(model_type: &str, repo: &str) -> Option<String> {
    let prefix = model::dht_prefix(model_type, repo)?;
    Some(prefix.replace('.', "-")).filter(|p| is_prefix(p))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_follow_the_families() {
        let cases = [
            ("llama", "meta-llama/Meta-Llama-3.1-405B-Instruct", "Meta-Llama-3-1-405B-Instruct-hf"),
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
        for bad in
            ["", "/etc", "a/b/c", "../x", "a/..", "a b", "./x", "a//b", "-a/b", &"x".repeat(97)]
        {
            assert!(!is_repo_id(bad), "{bad}");
        }
        assert_eq!(map_repo("bigscience/bloom-petals"), "bigscience/bloom");
        assert_eq!(map_repo("bigscience/bloom"), "bigscience/bloom");
    }
}
