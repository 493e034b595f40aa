//! tokenizer_config.json of a model folder, with special_tokens_map.json beside it: special tokens, chat
//! templates, and what transformers adds to tokenizer.json. The only reader of both files.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::checkpoint::{LocalModelError, parse, read_at_most};

/// Longest accepted file; that of Gemma 3 has 1.1 MB.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// The class of tokenizers that transformers builds anew of the words of tokenizer.json.
pub const LLAMA: &str = "LlamaTokenizer";

/// A special token: its text, or an object with it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum SpecialToken {
    Text(String),
    /// A token with rules of how it is found in a text, which `added_tokens_decoder` repeats.
    Object {
        content: String,
    },
}

impl SpecialToken {
    /// How the token is written.
    pub fn text(&self) -> &str {
        match self {
            SpecialToken::Text(text) | SpecialToken::Object { content: text } => text,
        }
    }
}

/// A token that is found in a text before the text is cut into others.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct AddedToken {
    pub content: String,
    #[serde(default)]
    pub single_word: bool,
    #[serde(default)]
    pub lstrip: bool,
    #[serde(default)]
    pub rstrip: bool,
    #[serde(default)]
    pub normalized: Option<bool>,
    #[serde(default)]
    pub special: bool,
}

/// One chat template, or several by name.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum TemplateField {
    One(String),
    Named(Vec<NamedTemplate>),
}

/// A chat template with its name.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct NamedTemplate {
    pub name: String,
    /// The source, in Jinja.
    pub template: String,
}

/// What a model folder says of its tokenizer beside tokenizer.json.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct TokenizerConfig {
    /// The class of transformers that reads the tokenizer.
    pub tokenizer_class: Option<String>,
    /// Whether the words of a [`LLAMA`] tokenizer begin behind every special token.
    pub legacy: Option<bool>,
    /// Whether the text of a [`LLAMA`] tokenizer begins with a space.
    pub add_prefix_space: Option<bool>,
    pub bos_token: Option<SpecialToken>,
    pub eos_token: Option<SpecialToken>,
    pub pad_token: Option<SpecialToken>,
    pub unk_token: Option<SpecialToken>,
    /// Tokens that tokenizer.json may lack, by their numbers.
    pub added_tokens_decoder: BTreeMap<String, AddedToken>,
    pub chat_template: Option<TemplateField>,
}

impl TokenizerConfig {
    /// Reads the files of `folder`; without them, all fields are empty.
    ///
    /// # Errors
    /// [`LocalModelError`] names the file: it is too long, or a field has another type.
    pub fn load(folder: &Path) -> Result<TokenizerConfig, LocalModelError> {
        let mut config: TokenizerConfig = of_file(&folder.join("tokenizer_config.json"))?;
        let map: TokenizerConfig = of_file(&folder.join("special_tokens_map.json"))?;
        config.bos_token = config.bos_token.or(map.bos_token);
        config.eos_token = config.eos_token.or(map.eos_token);
        config.pad_token = config.pad_token.or(map.pad_token);
        config.unk_token = config.unk_token.or(map.unk_token);
        Ok(config)
    }

    /// The chat templates of chat_template.json, which processors of images have.
    ///
    /// # Errors
    /// As [`TokenizerConfig::load`].
    pub fn processor_templates(folder: &Path) -> Result<Option<TemplateField>, LocalModelError> {
        let file: TokenizerConfig = of_file(&folder.join("chat_template.json"))?;
        Ok(file.chat_template)
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ModelType {
    model_type: Option<String>,
    tokenizer_class: Option<String>,
}

impl TokenizerConfig {
    /// Whether transformers reads the tokenizer as a [`LLAMA`] one, as it chooses for the model types that
    /// servers know: by model type and class (`AutoTokenizer` of 5.24).
    ///
    /// # Errors
    /// As [`TokenizerConfig::load`].
    pub fn is_llama(&self, folder: &Path) -> Result<bool, LocalModelError> {
        let model: ModelType = of_file(&folder.join("config.json"))?;
        let class = self.tokenizer_class.as_ref().or(model.tokenizer_class.as_ref());
        let is_named = class.is_some_and(|class| class.trim_end_matches("Fast") == LLAMA);
        Ok(is_named && model.model_type.as_deref() == Some("llama"))
    }
}

fn of_file<T: Default + DeserializeOwned>(path: &Path) -> Result<T, LocalModelError> {
    match path.exists() {
        true => parse(path, &read_at_most(path, MAX_FILE_BYTES)?),
        false => Ok(T::default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_tokens_are_texts_or_objects_of_either_file() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(TokenizerConfig::load(folder.path()).unwrap(), TokenizerConfig::default());
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write(
            "tokenizer_config.json",
            r#"{"bos_token": null, "eos_token": {"content": "<e>", "lstrip": true}}"#,
        );
        write("special_tokens_map.json", r#"{"bos_token": "<b>", "eos_token": "<other>"}"#);
        let config = TokenizerConfig::load(folder.path()).unwrap();
        let text =
            |token: &Option<SpecialToken>| token.as_ref().map(|token| token.text().to_owned());
        assert_eq!(text(&config.bos_token).as_deref(), Some("<b>"));
        assert_eq!(text(&config.eos_token).as_deref(), Some("<e>"));
        assert_eq!(text(&config.pad_token), None);
    }

    #[test]
    fn hostile_files_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer_config.json");
        let refused = || TokenizerConfig::load(folder.path()).unwrap_err().to_string();
        std::fs::write(&path, "{").unwrap();
        assert!(refused().contains("tokenizer_config.json"));
        std::fs::File::create(&path).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        assert!(refused().contains("16777217 bytes, at most 16777216"), "{}", refused());
    }
}
