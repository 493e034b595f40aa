//! Chat templates of checkpoints: Jinja, as transformers' `apply_chat_template` runs them.
//!
//! A template is a file of a stranger. It runs without access to anything, with bounds on its steps and on
//! what it writes.

pub mod conversation;
mod python;
mod sources;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use client::local_layers::LocalModelError;
use client::tokenizer_config::{SpecialToken, TokenizerConfig};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value, context};

use self::sources::TemplateSource;

/// Steps that a template may take.
const FUEL: u64 = 5_000_000;
/// Bytes that a template may write.
const MAX_BYTES: usize = 8 << 20;

/// Why there is no prompt.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// A file of the tokenizer.
    #[error(transparent)]
    Config(#[from] LocalModelError),
    #[error("cannot read {path}: {reason}")]
    Read { path: PathBuf, reason: String },
    /// The template does not compile.
    #[error("the chat template in {path} is invalid: {reason}")]
    Syntax { path: PathBuf, reason: String },
    /// The template refuses the messages, or fails on them.
    #[error("the model's chat template refuses these messages: {0}")]
    Render(String),
}

/// How a prompt ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptEnding {
    /// With what an answer begins with.
    #[default]
    Answer,
    /// Behind the last message.
    Messages,
    /// Within the last message, whose text goes on.
    LastMessage,
}

/// What a template makes a prompt of.
#[derive(Clone, Debug)]
pub struct TemplateInput {
    /// The messages, each an object with `role` and `content`.
    pub messages: Value,
    /// The tools that the assistant may call; `none` without.
    pub tools: Value,
    /// An object with more variables of the template.
    pub variables: Value,
    /// How the prompt ends.
    pub ending: PromptEnding,
}

impl TemplateInput {
    /// Messages without tools, before an answer.
    pub fn of(messages: impl serde::Serialize) -> TemplateInput {
        let messages = Value::from(Serde(messages));
        let ending = PromptEnding::Answer;
        TemplateInput { messages, tools: Value::from(()), variables: context! {}, ending }
    }
}

/// The templates of a model, compiled, with the special tokens that they may write.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Their texts, by name.
    sources: BTreeMap<String, TemplateSource>,
    tokens: Value,
}

impl ChatTemplate {
    /// The templates of a model folder, or `file` in their place. `None` if the folder has none.
    ///
    /// # Errors
    /// [`TemplateError`] names the file.
    pub fn load(folder: &Path, file: Option<&Path>) -> Result<Option<ChatTemplate>, TemplateError> {
        let config = TokenizerConfig::load(folder)?;
        let sources = match file {
            Some(file) => BTreeMap::from([(sources::DEFAULT.to_owned(), sources::of_file(file)?)]),
            None => sources::of_folder(folder, &config)?,
        };
        if sources.is_empty() {
            return Ok(None);
        }
        ChatTemplate::compile(sources, &config).map(Some)
    }

    fn compile(
        sources: BTreeMap<String, TemplateSource>,
        config: &TokenizerConfig,
    ) -> Result<ChatTemplate, TemplateError> {
        let mut environment = Environment::new();
        // As transformers sets them.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| TemplateError::Render(error.to_string()))?);
        environment.set_fuel(Some(FUEL));
        python::extend(&mut environment);
        let names = || sources.keys().map(String::as_str);
        // Of the others, which no conversation takes, not a word is read.
        for has_tools in [false, true] {
            let Ok(name) = sources::choice(names(), has_tools) else { continue };
            let Some(TemplateSource { path, text }) = sources.get(name) else { continue };
            environment
                .add_template_owned(name.to_owned(), python::without_marks(text).into_owned())
                .map_err(|error| TemplateError::Syntax {
                    path: path.clone(),
                    reason: error.to_string(),
                })?;
        }
        let text =
            |token: &Option<SpecialToken>| token.as_ref().map_or("", SpecialToken::text).to_owned();
        let tokens = context! {
            bos_token => text(&config.bos_token),
            eos_token => text(&config.eos_token),
            pad_token => text(&config.pad_token),
            unk_token => text(&config.unk_token),
        };
        Ok(ChatTemplate { environment, sources, tokens })
    }

    /// The prompt for a conversation.
    ///
    /// # Errors
    /// [`TemplateError::Render`] with what the template says.
    pub fn prompt(&self, input: &TemplateInput) -> Result<String, TemplateError> {
        let has_tools = input.tools.len().is_some_and(|count| count > 0);
        let name = sources::choice(self.sources.keys().map(String::as_str), has_tools)?;
        let source = self.sources.get(name).map_or("", |source| source.text.as_str());
        let messages = input.messages.try_iter().into_iter().flatten().collect();
        let messages = conversation::known_roles(messages, source);
        match input.ending {
            PromptEnding::LastMessage => {
                let (last, messages) = conversation::marked(messages)?;
                conversation::up_to_mark(self.render(name, messages, input)?, &last)
            }
            PromptEnding::Answer | PromptEnding::Messages => self.render(name, messages, input),
        }
    }

    fn render(
        &self,
        name: &str,
        messages: Vec<Value>,
        input: &TemplateInput,
    ) -> Result<String, TemplateError> {
        let failed = |error: minijinja::Error| {
            let text = match error.kind() {
                ErrorKind::OutOfFuel => "it takes too many steps".to_owned(),
                _ => error.detail().map_or_else(|| error.to_string(), str::to_owned),
            };
            TemplateError::Render(text)
        };
        let template = self.environment.get_template(name).map_err(failed)?;
        let TemplateInput { tools, variables, .. } = input;
        let variables = context! {
            messages => Value::from(messages),
            tools,
            add_generation_prompt => input.ending == PromptEnding::Answer,
            ..context! { ..self.tokens.clone(), ..variables.clone() }
        };
        let mut out = Bounded { text: String::new() };
        match template.render_captured_to(variables, &mut out) {
            Ok(_) => Ok(out.text),
            Err(_) if out.text.len() >= MAX_BYTES => {
                Err(TemplateError::Render(format!("it writes more than {MAX_BYTES} bytes")))
            }
            Err(error) => Err(failed(error)),
        }
    }
}

/// Text up to [`MAX_BYTES`].
struct Bounded {
    text: String,
}

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let text = std::str::from_utf8(bytes)
            .map_err(|_| std::io::Error::from(std::io::ErrorKind::InvalidData))?;
        if self.text.len() + text.len() > MAX_BYTES {
            let room = MAX_BYTES - self.text.len();
            self.text.extend(std::iter::repeat_n('.', room));
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.text
            .write_str(text)
            .map_err(|_| std::io::Error::from(std::io::ErrorKind::InvalidData))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// That of Llama 2, which uses methods of Python and refuses.
    const LLAMA: &str = "{{ bos_token }}{% for message in messages %}\
        {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
        {{ raise_exception('roles must alternate user/assistant') }}{% endif %}\
        {% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}\
        {% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}";

    fn folder(config: &serde_json::Value) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        folder
    }

    fn of(template: &str) -> ChatTemplate {
        let config = json!({"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
        ChatTemplate::load(folder(&config).path(), None).unwrap().unwrap()
    }

    fn chat() -> serde_json::Value {
        json!([{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Hello"},
               {"role": "user", "content": "Bye"}])
    }

    #[test]
    fn a_template_with_methods_of_python_makes_the_prompt() {
        let prompt = of(LLAMA).prompt(&TemplateInput::of(chat())).unwrap();
        assert_eq!(prompt, "<s>[INST] Hi [/INST] Hello </s>[INST] Bye [/INST]");
    }

    #[test]
    fn what_a_template_raises_is_the_error() {
        let two = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]);
        let error = of(LLAMA).prompt(&TemplateInput::of(two)).unwrap_err().to_string();
        assert!(error.contains("roles must alternate"), "{error}");
        let broken = json!({"chat_template": "{% if %}"});
        let error = ChatTemplate::load(folder(&broken).path(), None).unwrap_err().to_string();
        assert!(error.contains("invalid") && error.contains("tokenizer_config.json"), "{error}");
    }

    #[test]
    fn loops_and_floods_end() {
        let endless =
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        let error = of(endless).prompt(&TemplateInput::of(chat())).unwrap_err().to_string();
        assert!(error.contains("too many steps"), "{error}");
        let flood = "{% for a in range(9999) %}{{ 'x' * 10000 }}{% endfor %}";
        let error = of(flood).prompt(&TemplateInput::of(chat())).unwrap_err().to_string();
        assert!(error.contains("writes more than"), "{error}");
    }

    #[test]
    fn tools_reach_the_template_and_several_templates_have_a_default() {
        let config = json!({"chat_template": [
            {"name": "rag", "template": "{% if %}"},
            {"name": "tool_use", "template": "{{ tools[0].function.name }}!"},
            {"name": "default", "template": "{{ tools is none }}!"},
        ]});
        let template = ChatTemplate::load(folder(&config).path(), None).unwrap().unwrap();
        let tools = json!([{"type": "function", "function": {"name": "weather"}}]);
        let with_tools =
            TemplateInput { tools: Value::from(Serde(tools)), ..TemplateInput::of(chat()) };
        assert_eq!(template.prompt(&with_tools).unwrap(), "weather!");
        assert_eq!(template.prompt(&TemplateInput::of(chat())).unwrap(), "True!");
    }

    #[test]
    fn a_developer_speaks_as_system_and_the_start_of_an_answer_goes_on() {
        let template = of("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}\
            {% if add_generation_prompt %}<assistant>{% endif %}");
        let chat = json!([{"role": "developer", "content": "Be brief."}, {"role": "assistant", "content": "It "}]);
        let prompt = |ending| {
            let input = TemplateInput { ending, ..TemplateInput::of(chat.clone()) };
            template.prompt(&input).unwrap()
        };
        let whole = "<system>Be brief.</s><assistant>It </s>";
        assert_eq!(prompt(PromptEnding::Messages), whole);
        assert_eq!(prompt(PromptEnding::Answer), format!("{whole}<assistant>"));
        assert_eq!(prompt(PromptEnding::LastMessage), "<system>Be brief.</s><assistant>It ");
    }

    #[test]
    fn variables_of_a_request_reach_the_template_and_replace_nothing() {
        let template = of("{{ bos_token }}{{ enable_thinking }}{{ messages | length }}");
        let variables = context! { enable_thinking => false, bos_token => "x", messages => 7 };
        let input = TemplateInput { variables, ..TemplateInput::of(chat()) };
        assert_eq!(template.prompt(&input).unwrap(), "<s>False3");
    }

    #[test]
    fn a_file_beside_the_tokenizer_comes_first_and_none_is_none() {
        let folder = folder(&json!({"chat_template": "inner"}));
        std::fs::write(folder.path().join("chat_template.jinja"), "outer").unwrap();
        let load = |file: Option<&Path>| ChatTemplate::load(folder.path(), file).unwrap().unwrap();
        assert_eq!(load(None).prompt(&TemplateInput::of(chat())).unwrap(), "outer");
        let given = folder.path().join("given");
        std::fs::write(&given, "given").unwrap();
        assert_eq!(load(Some(&given)).prompt(&TemplateInput::of(chat())).unwrap(), "given");
        let empty = tempfile::tempdir().unwrap();
        assert!(ChatTemplate::load(empty.path(), None).unwrap().is_none());
    }
}
