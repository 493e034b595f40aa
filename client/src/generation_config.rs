//! generation_config.json of a model folder: the tokens that end a text, and how the model's authors sample.
//! The only reader of that file.

use std::path::Path;

use serde::Deserialize;

use crate::checkpoint::{LocalModelError, parse, read_at_most};

/// Name of the file.
const FILE: &str = "generation_config.json";
/// Longest accepted file; real ones have less than a kilobyte.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Most tokens that can end a text; real models name up to six.
const MAX_EOS: usize = 256;

/// What the authors of a model recommend. Fields that the file leaves out, or sets to null, are `None`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct GenerationConfig {
    /// Tokens that end a text.
    #[serde(rename = "eos_token_id")]
    pub eos: TokenIds,
    /// Whether tokens are sampled; greedy decoding otherwise.
    pub do_sample: Option<bool>,
    /// Divisor of the logits.
    pub temperature: Option<f32>,
    /// Sum of the probabilities of the tokens that are sampled from.
    pub top_p: Option<f32>,
    /// Number of tokens that are sampled from; 0 stands for all.
    pub top_k: Option<i64>,
    /// Least probability of a token, relative to the most probable one.
    pub min_p: Option<f32>,
    /// Divisor of the logits of tokens that occurred.
    pub repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Reads the file of `folder`; without one, all fields are empty.
    ///
    /// # Errors
    /// [`LocalModelError`] names the file: it is too long, or a field has another type.
    pub fn load(folder: &Path) -> Result<GenerationConfig, LocalModelError> {
        let path = folder.join(FILE);
        if !path.exists() {
            return Ok(GenerationConfig::default());
        }
        let config: GenerationConfig = parse(&path, &read_at_most(&path, MAX_FILE_BYTES)?)?;
        config.eos.check(&path)?;
        Ok(config)
    }
}

/// Token ids, written as one number, as a list, or as null. Negative numbers stand for no token.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "Option<OneOrMany>")]
pub struct TokenIds(pub Vec<u32>);

impl TokenIds {
    /// Refuses a list that no model has; `path` is the file that names it.
    ///
    /// # Errors
    /// [`LocalModelError::Content`] with the count and the limit.
    pub(crate) fn check(&self, path: &Path) -> Result<(), LocalModelError> {
        match self.0.len() {
            0..=MAX_EOS => Ok(()),
            count => Err(LocalModelError::Content {
                path: path.to_owned(),
                reason: format!(
                    "eos_token_id lists {count} tokens, at most {MAX_EOS} are accepted"
                ),
            }),
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(i64),
    Many(Vec<i64>),
}

impl From<Option<OneOrMany>> for TokenIds {
    fn from(ids: Option<OneOrMany>) -> TokenIds {
        let ids = match ids {
            None => Vec::new(),
            Some(OneOrMany::One(id)) => vec![id],
            Some(OneOrMany::Many(ids)) => ids,
        };
        TokenIds(ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<GenerationConfig, String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), text).unwrap();
        GenerationConfig::load(folder.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn fields_are_read_as_models_write_them_and_none_without_a_file() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(GenerationConfig::load(folder.path()).unwrap(), GenerationConfig::default());
        // That of Qwen3.
        let qwen = r#"{"bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643],
            "pad_token_id": 151643, "temperature": 0.6, "top_k": 20, "top_p": 0.95}"#;
        let expected = GenerationConfig {
            eos: TokenIds(vec![151_645, 151_643]),
            do_sample: Some(true),
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            ..GenerationConfig::default()
        };
        assert_eq!(load(qwen).unwrap(), expected);
        let other =
            r#"{"eos_token_id": 2, "min_p": 0.05, "repetition_penalty": 1.05, "top_k": null}"#;
        let other = load(other).unwrap();
        assert_eq!((other.eos.0, other.min_p, other.top_k), (vec![2], Some(0.05), None));
        assert_eq!(other.repetition_penalty, Some(1.05));
        for none in ["{}", r#"{"eos_token_id": null}"#, r#"{"eos_token_id": -1}"#] {
            assert_eq!(load(none).unwrap(), GenerationConfig::default(), "{none}");
        }
    }

    #[test]
    fn hostile_files_are_refused_by_name() {
        let many = format!(r#"{{"eos_token_id": {:?}}}"#, vec![1; MAX_EOS + 1]);
        assert!(load(&many).unwrap_err().contains("lists 257 tokens, at most 256"));
        let long = " ".repeat(1 << 20) + "{}";
        let error = load(&long).unwrap_err();
        assert!(error.contains("1048578 bytes") && error.contains("1048576"), "{error}");
        for bad in ["[", r#"{"eos_token_id": "x"}"#, r#"{"top_p": "x"}"#] {
            assert!(load(bad).unwrap_err().contains(FILE), "{bad}");
        }
    }
}
