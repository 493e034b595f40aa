//! Where the chat templates of a model folder are, and which of them a conversation takes (transformers
//! `tokenization_utils_base.py`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use client::tokenizer_config::{TemplateField, TokenizerConfig};

use super::TemplateError;

/// The template of conversations.
pub const DEFAULT: &str = "default";
/// The template of conversations with tools, if there is one.
pub const TOOL_USE: &str = "tool_use";
/// Largest file of a template.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// Most files of `additional_chat_templates`.
const MAX_FILES: usize = 64;

/// A template with the file that it stands in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateSource {
    pub path: PathBuf,
    pub text: String,
}

/// The templates of a model folder by name: `chat_template.jinja` is the default one, and
/// `additional_chat_templates/NAME.jinja` are the others; they come before those of tokenizer_config.json, and
/// these before chat_template.json.
///
/// # Errors
/// [`TemplateError`] names the file.
pub fn of_folder(
    folder: &Path,
    config: &TokenizerConfig,
) -> Result<BTreeMap<String, TemplateSource>, TemplateError> {
    let mut all = BTreeMap::new();
    let beside = folder.join("chat_template.jinja");
    if beside.exists() {
        all.insert(DEFAULT.to_owned(), of_file(&beside)?);
    }
    for (name, path) in additional(folder)? {
        all.insert(name, of_file(&path)?);
    }
    if all.contains_key(DEFAULT) {
        return Ok(all);
    }
    let (file, field) = match &config.chat_template {
        Some(field) => ("tokenizer_config.json", Some(field.clone())),
        None => ("chat_template.json", TokenizerConfig::processor_templates(folder)?),
    };
    let source = |text: String| TemplateSource { path: folder.join(file), text };
    match field {
        None => {}
        Some(TemplateField::One(text)) => drop(all.insert(DEFAULT.to_owned(), source(text))),
        Some(TemplateField::Named(named)) => named.into_iter().for_each(|template| {
            all.entry(template.name).or_insert_with(|| source(template.template));
        }),
    }
    Ok(all)
}

/// A template in a file of its own.
///
/// # Errors
/// It cannot be read, or is too long.
pub fn of_file(path: &Path) -> Result<TemplateSource, TemplateError> {
    let failed = |reason: String| TemplateError::Read { path: path.to_owned(), reason };
    let length = std::fs::metadata(path).map_err(|error| failed(error.to_string()))?.len();
    if length > MAX_FILE_BYTES {
        return Err(failed(format!("it has {length} bytes, at most {MAX_FILE_BYTES} are read")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    Ok(TemplateSource { path: path.to_owned(), text })
}

/// Names and paths of the files of `additional_chat_templates`.
fn additional(folder: &Path) -> Result<Vec<(String, PathBuf)>, TemplateError> {
    let folder = folder.join("additional_chat_templates");
    let Ok(entries) = std::fs::read_dir(&folder) else { return Ok(Vec::new()) };
    let paths = entries.flatten().map(|entry| entry.path());
    let templates = paths.filter(|path| path.extension().is_some_and(|end| end == "jinja"));
    let name = |path: PathBuf| Some((path.file_stem()?.to_str()?.to_owned(), path));
    let found: Vec<_> = templates.take(MAX_FILES + 1).filter_map(name).collect();
    match found.len() > MAX_FILES {
        true => {
            let reason = format!("it has more than {MAX_FILES} templates");
            Err(TemplateError::Read { path: folder, reason })
        }
        false => Ok(found),
    }
}

/// The name of the template that a conversation takes, of those called `names`: an only one is for all.
///
/// # Errors
/// There are several, and none for this conversation.
pub fn choice<'a>(
    names: impl Iterator<Item = &'a str> + Clone,
    has_tools: bool,
) -> Result<&'a str, TemplateError> {
    let find = |wanted: &str| names.clone().find(|name| *name == wanted);
    let tools = if has_tools { find(TOOL_USE) } else { None };
    let only = || names.clone().next().filter(|_| names.clone().count() == 1);
    tools.or_else(|| find(DEFAULT)).or_else(only).ok_or_else(|| {
        let names: Vec<&str> = names.clone().collect();
        TemplateError::Render(format!(
            "its templates are {}, and none is called {DEFAULT}; start the gateway with --chat_template FILE",
            names.join(", ")
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Folder {
            Folder(tempfile::tempdir().unwrap())
        }

        fn with(self, name: &str, text: &str) -> Folder {
            let path = self.0.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
            self
        }

        fn texts(&self) -> Result<Vec<(String, String)>, String> {
            let config = TokenizerConfig::load(self.0.path()).map_err(|error| error.to_string())?;
            let all = of_folder(self.0.path(), &config).map_err(|error| error.to_string())?;
            Ok(all.into_iter().map(|(name, source)| (name, source.text)).collect())
        }
    }

    fn named(texts: &[(&str, &str)]) -> Vec<(String, String)> {
        texts.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn files_come_before_tokenizer_config_and_that_before_the_file_of_a_processor() {
        let folder = Folder::new().with("chat_template.json", r#"{"chat_template": "p"}"#);
        assert_eq!(folder.texts().unwrap(), named(&[("default", "p")]));
        let list =
            json!([{"name": "default", "template": "c"}, {"name": "tool_use", "template": "t"}]);
        let folder =
            folder.with("tokenizer_config.json", &json!({"chat_template": list}).to_string());
        assert_eq!(folder.texts().unwrap(), named(&[("default", "c"), ("tool_use", "t")]));
        let folder = folder.with("additional_chat_templates/tool_use.jinja", "file");
        let folder = folder.with("additional_chat_templates/README.md", "no template");
        assert_eq!(folder.texts().unwrap(), named(&[("default", "c"), ("tool_use", "file")]));
        let folder = folder.with("chat_template.jinja", "d");
        assert_eq!(folder.texts().unwrap(), named(&[("default", "d"), ("tool_use", "file")]));
        assert!(Folder::new().texts().unwrap().is_empty());
    }

    #[test]
    fn a_conversation_with_tools_takes_tool_use_and_an_only_template_is_for_all() {
        let choose = |names: &[&'static str], has_tools| {
            choice(names.iter().copied(), has_tools).map_err(|error| error.to_string())
        };
        assert_eq!(choose(&["default", "tool_use"], true).unwrap(), "tool_use");
        assert_eq!(choose(&["default", "tool_use"], false).unwrap(), "default");
        assert_eq!(choose(&["default", "rag"], true).unwrap(), "default");
        assert_eq!(choose(&["rag", "tool_use"], true).unwrap(), "tool_use");
        assert_eq!(choose(&["chatml"], true).unwrap(), "chatml");
        let error = choose(&["rag", "tool_use"], false).unwrap_err();
        assert!(error.contains("rag, tool_use") && error.contains("--chat_template"), "{error}");
    }

    #[test]
    fn too_large_and_too_many_files_are_refused_by_name() {
        let folder = Folder::new().with("chat_template.jinja", "");
        let path = folder.0.path().join("chat_template.jinja");
        std::fs::File::create(path).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        let error = folder.texts().unwrap_err();
        assert!(error.contains("chat_template.jinja") && error.contains("16777217"), "{error}");
        let many = (0..=MAX_FILES).fold(Folder::new(), |folder, number| {
            folder.with(&format!("additional_chat_templates/{number}.jinja"), "x")
        });
        let error = many.texts().unwrap_err();
        assert!(error.contains("additional_chat_templates") && error.contains("64"), "{error}");
    }
}
