//! The model's tokenizer (`tokenizer.json`), and text that appears token by token.

mod llama;

use std::path::Path;

use tokenizers::{AddedToken, Tokenizer};

use crate::checkpoint::{LocalModelError, read_at_most};
use crate::tokenizer_config::{SpecialToken, TokenizerConfig};

/// Longest accepted tokenizer.json; that of Gemma 3 has 33 MB.
const MAX_FILE_BYTES: u64 = 128 << 20;

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
    /// A file beside the tokenizer.
    #[error(transparent)]
    Config(#[from] LocalModelError),
    /// The text could not be encoded, or tokens not decoded.
    #[error("cannot tokenize: {0}")]
    Tokenize(String),
}

/// The model's tokenizer, as transformers' `AutoTokenizer` has it.
///
/// # Discrepancies
/// transformers 4 replaces the post-processor of Llama, Gemma and Cohere tokenizers by `add_bos_token` and
/// `add_eos_token` of tokenizer_config.json. Since version 5, tokenizer.json alone decides, here too.
#[derive(Debug)]
pub struct TextCodec {
    tokenizer: Tokenizer,
    eos: Option<u32>,
}

impl TextCodec {
    /// Loads `tokenizer.json` of a model folder, with what tokenizer_config.json adds to it.
    ///
    /// # Errors
    /// [`TextError`] names the file.
    pub fn load(folder: &Path) -> Result<TextCodec, TextError> {
        let path = folder.join("tokenizer.json");
        let failed = |reason: String| TextError::Load { path: path.display().to_string(), reason };
        let bytes =
            read_at_most(&path, MAX_FILE_BYTES).map_err(|error| failed(reason_of(&error)))?;
        let config = TokenizerConfig::load(folder)?;
        let bytes = match config.is_llama(folder)? {
            true => llama::rebuilt(bytes, &config).map_err(|error| failed(error.to_string()))?,
            false => bytes,
        };
        let mut tokenizer =
            Tokenizer::from_bytes(&bytes).map_err(|error| failed(error.to_string()))?;
        // A file may tell to cut texts, or to fill them up, which training needs.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| failed(error.to_string()))?;
        add_tokens(&mut tokenizer, &config).map_err(failed)?;
        let eos = config.eos_token.and_then(|token| tokenizer.token_to_id(token.text()));
        Ok(TextCodec { tokenizer, eos })
    }

    /// The token that the tokenizer's files name as the end of a text.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Tokens of a text, with the special tokens that the post-processor of tokenizer.json adds.
    ///
    /// # Errors
    /// [`TextError::Tokenize`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.tokens(text, true)
    }

    /// Tokens of a prompt in which special tokens are written out, as chat templates write them.
    ///
    /// # Errors
    /// [`TextError::Tokenize`].
    pub fn encode_rendered(&self, prompt: &str) -> Result<Vec<u32>, TextError> {
        self.tokens(prompt, false)
    }

    fn tokens(&self, text: &str, is_processed: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self.tokenizer.encode_fast(text, is_processed);
        let encoding = encoding.map_err(|error| TextError::Tokenize(error.to_string()))?;
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

/// Adds the tokens that tokenizer_config.json names and tokenizer.json lacks.
fn add_tokens(tokenizer: &mut Tokenizer, config: &TokenizerConfig) -> Result<(), String> {
    let mut listed: Vec<_> = config.added_tokens_decoder.iter().collect();
    listed.sort_by_key(|(number, _)| number.parse::<u32>().unwrap_or(u32::MAX));
    let listed = listed.into_iter().map(|(_, token)| AddedToken {
        content: token.content.clone(),
        single_word: token.single_word,
        lstrip: token.lstrip,
        rstrip: token.rstrip,
        normalized: token.normalized.unwrap_or(!token.special),
        special: token.special,
    });
    tokenizer.add_tokens(listed).map_err(|error| error.to_string())?;
    let added = tokenizer.get_added_tokens_decoder();
    let known: Vec<&str> = added.values().map(|token| token.content.as_str()).collect();
    let named = [&config.bos_token, &config.eos_token, &config.unk_token, &config.pad_token];
    let texts = named.into_iter().flatten().map(SpecialToken::text);
    let new = texts.filter(|text| !known.contains(text));
    let new: Vec<_> = new.map(|text| AddedToken::from(text, true)).collect();
    tokenizer.add_tokens(new).map(drop).map_err(|error| error.to_string())
}

/// What is wrong with a file, without its path.
fn reason_of(error: &LocalModelError) -> String {
    match error {
        LocalModelError::Read { source, .. } => source.to_string(),
        LocalModelError::Content { reason, .. } => reason.clone(),
        other => other.to_string(),
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
        TextCodec::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("model")).unwrap()
    }

    #[test]
    fn prompts_begin_with_the_start_token_as_in_transformers() {
        assert_eq!(codec().encode("Once upon a time").unwrap(), [0, 484, 485, 260, 486]);
    }

    /// Written by transformers, see `tests/golden/generate_tokenizers.py`.
    #[test]
    fn tokens_of_every_kind_of_tokenizer_are_those_of_transformers() {
        let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/tokenizers.json");
        let table: Vec<serde_json::Value> =
            serde_json::from_slice(&std::fs::read(table).unwrap()).unwrap();
        assert!(table.len() >= 12);
        for row in table {
            let folder = tempfile::tempdir().unwrap();
            for (name, content) in row["files"].as_object().unwrap() {
                std::fs::write(folder.path().join(name), content.to_string()).unwrap();
            }
            let (kind, codec) = (&row["kind"], TextCodec::load(folder.path()).unwrap());
            assert_eq!(codec.eos().map(u64::from), row["eos"].as_u64(), "{kind}");
            for case in row["cases"].as_array().unwrap() {
                let text = case["text"].as_str().unwrap();
                let ids =
                    |name: &str| serde_json::from_value::<Vec<u32>>(case[name].clone()).unwrap();
                assert_eq!(codec.encode(text).unwrap(), ids("ids"), "{kind}: {text:?}");
                let rendered = codec.encode_rendered(text).unwrap();
                assert_eq!(rendered, ids("rendered"), "{kind}: {text:?}");
            }
        }
    }

    #[test]
    fn broken_and_huge_tokenizers_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let refused = || TextCodec::load(folder.path()).unwrap_err().to_string();
        std::fs::write(
            folder.path().join("config.json"),
            r#"{"model_type": "llama", "tokenizer_class": "LlamaTokenizer"}"#,
        )
        .unwrap();
        for broken in ["{", "7", "[]", "{}", r#"{"model": {"type": "BPE"}}"#, r#"{"model": 7}"#] {
            std::fs::write(&path, broken).unwrap();
            assert!(refused().contains("tokenizer.json"), "{broken}: {}", refused());
        }
        std::fs::File::create(&path).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        assert!(refused().contains("134217729 bytes"), "{}", refused());
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
        let error = TextCodec::load(Path::new("/nonexistent")).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/tokenizer.json"), "{error}");
    }
}
