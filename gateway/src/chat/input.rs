//! Lines of a person: with editing and a history on a terminal, as they are from a pipe.

use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

/// Most bytes of one message.
const MAX_BYTES: usize = 1 << 20;

/// What was entered.
#[derive(Debug, PartialEq, Eq)]
pub enum ChatInput {
    /// A message or a command.
    Text(String),
    /// An empty line, or one that was given up with Ctrl-C.
    Nothing,
    /// There is no more.
    End,
}

/// Where lines come from.
pub struct Input {
    editor: Option<DefaultEditor>,
    history: Option<PathBuf>,
}

impl Input {
    /// The terminal if there is one, with what was entered before; else a pipe.
    pub fn open(history: Option<&Path>) -> Input {
        let editor = std::io::stdin().is_terminal().then(DefaultEditor::new);
        let mut editor = editor.and_then(Result::ok);
        if let (Some(editor), Some(path)) = (&mut editor, history) {
            // Nothing was entered before the first time.
            let _ = editor.load_history(path);
        }
        Input { editor, history: history.map(Path::to_owned) }
    }

    /// Whether a person sits there.
    pub fn is_terminal(&self) -> bool {
        self.editor.is_some()
    }

    /// The next message. A line that ends with a backslash goes on in the next one.
    ///
    /// # Errors
    /// Of the terminal or the pipe.
    pub fn read(&mut self) -> Result<ChatInput, std::io::Error> {
        let mut text = String::new();
        loop {
            let prompt = if text.is_empty() { "> " } else { ". " };
            let line = match &mut self.editor {
                Some(editor) => match editor.readline(prompt) {
                    Ok(line) => Some(line),
                    Err(ReadlineError::Interrupted) => return Ok(ChatInput::Nothing),
                    Err(ReadlineError::Eof) => None,
                    Err(error) => return Err(std::io::Error::other(error)),
                },
                None => line_of(&mut std::io::stdin().lock())?,
            };
            let Some(line) = line else {
                return Ok(if text.is_empty() { ChatInput::End } else { self.entered(text) });
            };
            let goes_on = line.strip_suffix('\\');
            text.push_str(goes_on.unwrap_or(&line));
            if text.len() > MAX_BYTES {
                return Err(std::io::Error::other(format!(
                    "a message has more than {MAX_BYTES} bytes"
                )));
            }
            match goes_on {
                Some(_) => text.push('\n'),
                None => return Ok(self.entered(text)),
            }
        }
    }

    fn entered(&mut self, text: String) -> ChatInput {
        let text = text.trim();
        if text.is_empty() {
            return ChatInput::Nothing;
        }
        if let Some(editor) = &mut self.editor {
            // A history that cannot be written is none.
            let _ = editor.add_history_entry(text);
            if let Some(path) = &self.history {
                let _ = path.parent().map(std::fs::create_dir_all);
                let _ = editor.save_history(path);
            }
        }
        ChatInput::Text(text.to_owned())
    }
}

/// A line of a pipe without its end; `None` at the end of the pipe.
fn line_of(input: &mut impl BufRead) -> Result<Option<String>, std::io::Error> {
    let mut bytes = Vec::new();
    let limit = MAX_BYTES as u64 + 2;
    let count = std::io::Read::take(input, limit).read_until(b'\n', &mut bytes)?;
    if count == 0 {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&bytes);
    Ok(Some(text.trim_end_matches(['\n', '\r']).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_pipe_end_at_line_feeds_and_are_bounded() {
        let mut input: &[u8] = b"one\r\ntwo\nthree";
        let mut next = || line_of(&mut input).unwrap();
        assert_eq!(next().as_deref(), Some("one"));
        assert_eq!(next().as_deref(), Some("two"));
        assert_eq!(next().as_deref(), Some("three"));
        assert_eq!(next(), None);
        let endless = vec![b'x'; 3 * MAX_BYTES];
        assert!(line_of(&mut endless.as_slice()).unwrap().unwrap().len() <= MAX_BYTES + 2);
    }
}
