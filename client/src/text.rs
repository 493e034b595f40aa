//! The model's tokenizer (`tokenizer.json`), and text that appears token by token.

use std::path::Path;

use tokenizers::Tokenizer;

/// Why text could not be turned into tokens or back.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The file is missing or not a tokenizer.
    #[error(
        "cannot read the tokenizer {path}: {reason}; the model folder needs the tokenizer.json of its model"
    )]
    Load {
        path: String,
        /// What the tokenizer library says.
        reason: String,
    },
    /// The text could not be encoded, or tokens not decoded.
    #[error("cannot tokenize: {0}")]
    Tokenize(String),
}

/// The model's tokenizer, with the special token that starts a sequence.
#[derive(Debug)]
pub struct TextCodec {
    tokenizer: Tokenizer,
    bos: Option<u32>,
}

impl TextCodec {
    /// Loads `tokenizer.json` of a model folder. `bos` is put before a prompt unless the tokenizer
    /// does it itself.
    ///
    /// # Errors
    /// [`TextError::Load`] names the file.
    pub fn load(folder: &Path, bos: Option<u32>) -> Result<TextCodec, TextError> {
        let path = folder.join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path).map_err(|e| TextError::Load {
            path: path.display().to_string(),
            reason: e.to_string(),
        })?;
        Ok(TextCodec { tokenizer, bos })
    }

    /// Tokens of a prompt, beginning with the token that starts a sequence.
    ///
    /// # Errors
    /// [`TextError::Tokenize`].
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, TextError> {
        let encoding =
            self.tokenizer.encode(prompt, true).map_err(|e| TextError::Tokenize(e.to_string()))?;
        let ids = encoding.get_ids();
        let bos = self.bos.filter(|bos| ids.first() != Some(bos));
        Ok(bos.into_iter().chain(ids.iter().copied()).collect())
    }

    /// Tokens of a prompt in which special tokens are written out, as chat templates write them.
    ///
    /// # Errors
    /// [`TextError::Tokenize`].
    pub fn encode_rendered(&self, prompt: &str) -> Result<Vec<u32>, TextError> {
        let encoding = self.tokenizer.encode(prompt, false);
        let encoding = encoding.map_err(|e| TextError::Tokenize(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// What a token reads as, alone; special tokens by their names.
    pub fn piece(&self, token: u32) -> String {
        self.tokenizer.decode(&[token], false).unwrap_or_default()
    }

    /// The entry of the vocabulary that `token` stands for; `None` outside of it.
    pub fn name(&self, token: u32) -> Option<String> {
        self.tokenizer.id_to_token(token)
    }

    /// Text of `tokens`, special tokens by their names.
    ///
    /// # Errors
    /// [`TextError::Tokenize`].
    pub fn decode_all(&self, tokens: &[u32]) -> Result<String, TextError> {
        self.tokenizer.decode(tokens, false).map_err(|e| TextError::Tokenize(e.to_string()))
    }

    /// Text of `tokens` without special tokens.
    ///
    /// # Errors
    /// [`TextError::Tokenize`].
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TextError> {
        self.tokenizer.decode(tokens, true).map_err(|e| TextError::Tokenize(e.to_string()))
    }
}

/// Tokens before a text that goes on, of which the first characters of its next token may depend. As in
/// text-generation-inference.
const CONTEXT: usize = 8;

/// Turns tokens into text as they come. Text is held back while its last character is incomplete (a
/// character may take several tokens).
#[derive(Debug)]
pub struct TextStream<'a> {
    codec: &'a TextCodec,
    tokens: Vec<u32>,
    /// Tokens before this one are no longer needed to decode what follows.
    context: usize,
    /// Tokens before this one were printed.
    printed: usize,
}

impl<'a> TextStream<'a> {
    /// A stream that continues after `prompt`.
    pub fn new(codec: &'a TextCodec, prompt: &[u32]) -> TextStream<'a> {
        let tokens = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        TextStream { codec, context: 0, printed: tokens.len(), tokens }
    }

    /// The text that `token` completes; empty while a character is incomplete.
    ///
    /// # Errors
    /// [`TextError::Tokenize`].
    pub fn push(&mut self, token: u32) -> Result<String, TextError> {
        self.tokens.push(token);
        let before = self.codec.decode(&self.tokens[self.context..self.printed])?;
        let after = self.codec.decode(&self.tokens[self.context..])?;
        // A prompt of tokens can end in the middle of a character, which then changes.
        let whole = before.trim_end_matches('\u{fffd}');
        match after.strip_prefix(before.as_str()).or_else(|| after.strip_prefix(whole)) {
            Some(new) if !after.ends_with('\u{fffd}') => {
                self.context = self.printed;
                self.printed = self.tokens.len();
                Ok(new.to_owned())
            }
            _ => Ok(String::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codec() -> TextCodec {
        TextCodec::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("model"), Some(0)).unwrap()
    }

    #[test]
    fn prompts_begin_with_the_start_token_as_in_transformers() {
        assert_eq!(codec().encode("Once upon a time").unwrap(), [0, 484, 485, 260, 486]);
    }

    #[test]
    fn streamed_pieces_add_up_to_the_whole_text() {
        let codec = codec();
        let text = "Once upon a time a fox met « café » 🦊 by the sea.";
        let tokens = codec.encode(text).unwrap();
        let mut stream = TextStream::new(&codec, &tokens[..3]);
        let rest: String = tokens[3..].iter().map(|t| stream.push(*t).unwrap()).collect();
        assert_eq!(codec.decode(&tokens[..3]).unwrap() + &rest, text);
    }

    #[test]
    fn a_text_goes_on_in_the_middle_of_a_character_and_behind_a_long_prompt() {
        let codec = codec();
        let tokens = codec.encode("the sea ".repeat(50).as_str()).unwrap();
        let fox = codec.encode("🦊 by the sea.").unwrap();
        let cut =
            (1..fox.len()).find(|cut| codec.decode(&fox[..*cut]).unwrap().contains('\u{fffd}'));
        let cut = cut.expect("the character has several tokens");
        let mut stream = TextStream::new(&codec, &[&tokens[..], &fox[1..cut]].concat());
        let rest: String = fox[cut..].iter().map(|t| stream.push(*t).unwrap()).collect();
        assert_eq!(rest, "🦊 by the sea.");
    }

    #[test]
    fn a_missing_tokenizer_names_the_file() {
        let error = TextCodec::load(Path::new("/nonexistent"), None).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/tokenizer.json"), "{error}");
    }
}
