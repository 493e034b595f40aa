//! `sepal chat`: a conversation on the terminal, on the engine of the gateway.

mod config;
mod input;
mod markdown;

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use client::end_rules::EndRules;
use client::generation::Finish;
use serde_json::{Value, json};
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::sanitize_text::escaped;

pub use self::config::ChatConfig;
use self::input::{ChatInput, Input};
use self::markdown::Markdown;
use crate::engine::{Engine, EngineError};
use crate::generation::{Ended, TextPiece, TextRequest, start};
use crate::model::Model;
use crate::template::TemplateInput;

const HELP: &str = "\
/system TEXT  what the assistant is told first; without TEXT, nothing
/save FILE    write the conversation to a file (Markdown)
/stats        speed and route of the last answer
/clear        forget the conversation
/quit         end, as Ctrl-D does
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer.";

/// Why the conversation cannot begin.
#[derive(Debug, thiserror::Error)]
enum ChatError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(
        "{0} has no chat template, so it cannot hold a conversation; give one with --chat_template FILE"
    )]
    NoTemplate(String),
    #[error("cannot use the terminal")]
    Terminal(#[from] std::io::Error),
}

impl ChatError {
    fn exit_reason(&self) -> ExitReason {
        match self {
            ChatError::Engine(error) if error.is_of_settings() => ExitReason::BadConfig,
            ChatError::NoTemplate(_) => ExitReason::BadConfig,
            _ => ExitReason::Failed,
        }
    }
}

/// Talks until the end of input.
pub fn run_command(config: &ChatConfig) -> ExitReason {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(talk(config)),
        Err(error) => Err(error.into()),
    };
    match ended {
        Ok(()) => ExitReason::Clean,
        Err(error) => {
            complain(&with_causes(&error));
            error.exit_reason()
        }
    }
}

async fn talk(config: &ChatConfig) -> Result<(), ChatError> {
    let engine = Engine::start(&config.engine()).await?;
    let Some(model) = engine.models().next().cloned() else {
        return Ok(());
    };
    if model.template.is_none() {
        return Err(ChatError::NoTemplate(model.view.name.clone()));
    }
    // The first step does not wait for the records; a failure shows when the first message is sent.
    let _ = model.view.swarm.refresh().await;
    let mut conversation = Conversation {
        model,
        config: config.clone(),
        messages: Vec::new(),
        last: None,
        is_styled: std::io::stdout().is_terminal(),
    };
    let mut input = Input::open(config.history.as_deref());
    if input.is_terminal() {
        print(&format!(
            "Talking to {}. /help lists the commands.\n",
            conversation.model.view.name
        ))?;
    }
    loop {
        let read = tokio::task::spawn_blocking(move || {
            let line = input.read();
            (input, line)
        });
        let (back, line) = read.await.map_err(std::io::Error::other)?;
        input = back;
        match line? {
            ChatInput::End => break,
            ChatInput::Nothing => {}
            ChatInput::Text(text) => match text.strip_prefix('/') {
                Some("quit") => break,
                Some(command) => print(&format!("{}\n", conversation.command(command)))?,
                None => conversation.say(text).await?,
            },
        }
    }
    engine.leave().await;
    Ok(())
}

/// How the last answer went.
#[derive(Clone, Debug)]
struct Stats {
    ended: Option<Ended>,
    tokens: usize,
    first: Duration,
    whole: Duration,
}

struct Conversation {
    model: Arc<Model>,
    config: ChatConfig,
    messages: Vec<Value>,
    last: Option<Stats>,
    is_styled: bool,
}

impl Conversation {
    /// Carries out a command; returns what to say of it.
    fn command(&mut self, command: &str) -> String {
        let (name, rest) = command.split_once(' ').unwrap_or((command, ""));
        match (name, rest.trim()) {
            ("help", _) => HELP.to_owned(),
            ("system", "") => {
                self.config.system = None;
                "The assistant is told nothing first.".to_owned()
            }
            ("system", text) => {
                self.config.system = Some(text.to_owned());
                "The assistant is told this first from now on.".to_owned()
            }
            ("clear", _) => {
                self.messages.clear();
                "The conversation is forgotten.".to_owned()
            }
            ("stats", _) => self.stats(),
            ("save", "") => "/save needs the name of a file".to_owned(),
            ("save", path) => match self.save(Path::new(path)) {
                Ok(()) => format!("Saved to {path}."),
                Err(error) => format!("cannot write {path}: {error}"),
            },
            (other, _) => format!("/{other} is no command; /help lists them"),
        }
    }

    /// What is sent: what the assistant is told first, and all messages.
    fn all_messages(&self) -> Value {
        let system =
            self.config.system.iter().map(|text| json!({"role": "system", "content": text}));
        Value::Array(system.chain(self.messages.iter().cloned()).collect())
    }

    /// Sends a message and prints the answer as it comes. A failure is printed, and the message forgotten.
    async fn say(&mut self, text: String) -> Result<(), std::io::Error> {
        self.messages.push(json!({"role": "user", "content": text}));
        let prompt = self.model.chat_prompt(&TemplateInput::of(self.all_messages()));
        let answer = match prompt {
            Ok(prompt) => self.answer(prompt).await?,
            Err(error) => Err(error.to_string()),
        };
        match answer {
            Ok(answer) => self.messages.push(json!({"role": "assistant", "content": answer})),
            Err(failure) => {
                self.messages.pop();
                complain(&failure);
            }
        }
        Ok(())
    }

    /// The text of the answer, or why there is none.
    async fn answer(&mut self, prompt: Vec<u32>) -> Result<Result<String, String>, std::io::Error> {
        let room = self.model.local.max_positions.unwrap_or(u32::MAX);
        let room = room.saturating_sub(u32::try_from(prompt.len()).unwrap_or(u32::MAX));
        if room == 0 {
            return Ok(Err(
                "the conversation is as long as the model takes; /clear begins anew".into()
            ));
        }
        let ask = TextRequest {
            grammar: None,
            prompt: prompt.into(),
            max_new_tokens: self.config.max_tokens.min(room),
            sampling: self.config.sampling(),
            ends: EndRules::default(),
            stop: Vec::new(),
            top_logprobs: None,
            echo: None,
            account: None,
        };
        let (began, mut first) = (Instant::now(), None);
        let mut pieces = start(self.model.clone(), ask);
        let (mut said, mut tokens, mut ended, mut failure) = (String::new(), 0, None, None);
        let mut style = self.is_styled.then(Markdown::new);
        loop {
            let piece = tokio::select! {
                piece = pieces.recv() => piece,
                _ = tokio::signal::ctrl_c() => None,
            };
            match piece {
                Some(Ok(TextPiece::Text { text, .. })) => {
                    first.get_or_insert_with(|| began.elapsed());
                    tokens += 1;
                    let shown =
                        style.as_mut().map_or_else(|| text.clone(), |style| style.push(&text));
                    print(&shown)?;
                    said.push_str(&text);
                }
                Some(Ok(TextPiece::End(end))) => {
                    ended = Some(end);
                    break;
                }
                Some(Err(error)) => {
                    failure = Some(with_causes(&error));
                    break;
                }
                None => break,
            }
        }
        if ended.is_none() && said.is_empty() {
            failure.get_or_insert_with(|| "stopped before the answer began".to_owned());
        }
        print(&style.map(Markdown::end).unwrap_or_default())?;
        print("\n")?;
        let tokens = ended.as_ref().map_or(tokens, |ended: &Ended| ended.completion_tokens);
        let whole = began.elapsed();
        self.last = Some(Stats { ended, tokens, first: first.unwrap_or(whole), whole });
        Ok(failure.map_or(Ok(said), Err))
    }

    fn stats(&self) -> String {
        let Some(Stats { ended, tokens, first, whole }) = &self.last else {
            return "There is no answer yet.".to_owned();
        };
        let speed = *tokens as f64 / whole.as_secs_f64().max(1e-9);
        let mut text = format!(
            "{tokens} tokens in {:.1} s ({speed:.1} tokens/s), the first after {:.0} ms",
            whole.as_secs_f64(),
            first.as_secs_f64() * 1e3
        );
        if let Some(ended) = ended {
            let why = match ended.finish {
                Finish::Stop => "the model ended it",
                Finish::Length => "it is as long as --max_tokens allows",
            };
            text += &format!(
                "; {} tokens of the conversation were not sent again; {why}",
                ended.cached_tokens
            );
        } else {
            text += "; it was stopped";
        }
        for leg in self.model.view.swarm.route_now().map(|(legs, _)| legs).unwrap_or_default() {
            text +=
                &format!("\nserver {}  blocks {}:{}", leg.peer, leg.blocks.start, leg.blocks.end);
        }
        text
    }

    fn save(&self, path: &Path) -> Result<(), std::io::Error> {
        let all = self.all_messages();
        let each = all.as_array().into_iter().flatten().map(|message| {
            let text = |key: &str| message[key].as_str().unwrap_or_default().to_owned();
            format!("## {}\n\n{}\n\n", text("role"), text("content"))
        });
        std::fs::write(path, each.collect::<String>())
    }
}

/// Says what went wrong, if standard error is still there to say it to.
fn complain(failure: &str) {
    let _ = writeln!(std::io::stderr(), "sepal: {}", escaped(failure));
}

fn print(text: &str) -> Result<(), std::io::Error> {
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes())?;
    out.flush()
}
