//! The model: a folder that can be served, or a repository of the Hub.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use model::BlockSpec;
use serde_json::Value;

use super::check::CheckVerdict;

/// Longest config.json that is read.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// What MODEL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelKind {
    /// Nothing was named.
    None,
    /// A folder with a model.
    Folder(FolderFacts),
    /// A repository of the Hub.
    Repository(String),
    /// Neither a folder nor a name that a repository can have.
    Neither(String),
}

/// A model folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderFacts {
    /// Its path as given.
    pub path: String,
    /// Family and number of blocks, or why config.json describes no model that can be served.
    pub config: Result<(String, usize), String>,
    /// Bytes of its checkpoint files.
    pub weight_bytes: u64,
}

/// Looks at the folder, or tells a repository by its name.
pub fn observe(model: Option<&str>) -> ModelKind {
    match model {
        None => ModelKind::None,
        Some(path) if Path::new(path).is_dir() => ModelKind::Folder(FolderFacts {
            path: path.to_owned(),
            config: config(&Path::new(path).join("config.json")),
            weight_bytes: weights(Path::new(path)),
        }),
        Some(name) if is_repository(name) => ModelKind::Repository(name.to_owned()),
        Some(name) => ModelKind::Neither(name.to_owned()),
    }
}

/// `org/name` or `name`; the Hub itself decides about the rest.
fn is_repository(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let part = |part: &str| !part.is_empty() && part.chars().all(plain) && !part.starts_with('.');
    name.split('/').count() <= 2 && name.split('/').all(part)
}

fn config(path: &Path) -> Result<(String, usize), String> {
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_CONFIG_BYTES).read_to_end(&mut text));
    read.map_err(|error| format!("config.json cannot be read: {error}"))?;
    let config: Value = serde_json::from_slice(&text)
        .map_err(|error| format!("config.json cannot be read: {error}"))?;
    let spec = BlockSpec::from_config(&config).map_err(|error| format!("config.json: {error}"))?;
    let family = config.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned();
    Ok((family, spec.num_blocks))
}

/// Bytes of the files that hold weights, as prepare finds them.
fn weights(folder: &Path) -> u64 {
    let is_one = |name: &str| {
        name.ends_with(".safetensors")
            || name.starts_with("pytorch_model") && name.ends_with(".bin")
    };
    let bytes = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let stat = fs::metadata(entry.path()).ok()?;
        (is_one(name.to_str()?) && stat.is_file()).then_some(stat.len())
    };
    fs::read_dir(folder).into_iter().flatten().flatten().filter_map(bytes).sum()
}

/// Whether a folder can be served, as far as its config and the names of its files tell.
pub fn judge_folder(facts: &FolderFacts) -> CheckVerdict {
    let FolderFacts { path, config, weight_bytes } = facts;
    match config {
        Err(why) => CheckVerdict::problem(
            format!("{path}: {why}"),
            "give a folder in Hugging Face layout with a model of a family that Sepal serves",
        ),
        Ok(_) if *weight_bytes == 0 => CheckVerdict::problem(
            format!("{path} has no *.safetensors and no pytorch_model*.bin"),
            "download the weights there",
        ),
        Ok((family, blocks)) => CheckVerdict::ok(format!(
            "{path}: {family} with {blocks} blocks, {} of checkpoint files",
            super::system::size(*weight_bytes)
        )),
    }
}

/// A name that is neither a folder nor a repository.
pub fn judge_neither(name: &str) -> CheckVerdict {
    CheckVerdict::problem(
        format!("there is no model folder {name:?}"),
        "give a folder in Hugging Face layout or a repository like org/name",
    )
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    #[test]
    fn a_folder_needs_a_known_family_and_weights() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let verdict = |expected: Status, word: &str| {
            let ModelKind::Folder(facts) = observe(Some(path)) else { panic!() };
            let verdict = judge_folder(&facts);
            assert_eq!(verdict.status, expected, "{verdict:?}");
            assert!(verdict.found.contains(word), "{verdict:?}");
        };
        verdict(Status::Problem, "config.json cannot be read");
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("config.json", "{\"model_type\": \"gpt9\"}");
        verdict(Status::Problem, "gpt9");
        write(
            "config.json",
            r#"{"model_type": "bloom", "n_embed": 48, "n_layer": 2, "num_attention_heads": 3}"#,
        );
        verdict(Status::Problem, "no *.safetensors");
        write("model.safetensors", "12345");
        verdict(Status::Ok, "bloom with 2 blocks, 5 bytes");
    }

    #[test]
    fn names_are_told_from_paths() {
        assert_eq!(observe(None), ModelKind::None);
        for name in ["gpt2", "org/name", "Qwen/Qwen3-8B"] {
            assert_eq!(observe(Some(name)), ModelKind::Repository(name.to_owned()));
        }
        for name in ["/nonexistent/model", "./model", "a/b/c", "a b"] {
            let kind = observe(Some(name));
            assert_eq!(kind, ModelKind::Neither(name.to_owned()));
            assert_eq!(judge_neither(name).status, Status::Problem);
        }
    }
}
