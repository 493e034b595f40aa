//! Texts of a form: which tokens may come next, so that a text is JSON of a schema. `llguidance` decides;
//! it knows a token by its bytes, which the tokenizer's file tells.

use std::path::Path;
use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory, token_bytes_from_tokenizer_json};
use serde_json::{Value, json};

/// Largest schema, as text.
const MAX_SCHEMA_BYTES: usize = 128 << 10;
/// Between two words of JSON stands at most so much white space: a model may write it without end.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,20}";
/// Characters of what the library says about a schema.
const MAX_REASON: usize = 300;
/// What one schema may cost: a state of the lexer takes 1 to 2 kB.
const MAX_LEXER_STATES: usize = 20_000;
const MAX_GRAMMAR_SIZE: usize = 100_000;

/// Why a text cannot have a form.
#[derive(Clone, Debug, thiserror::Error)]
pub enum GrammarError {
    /// The tokenizer's file.
    #[error("the tokenizer {path} cannot be used for texts of a form: {reason}")]
    Tokenizer { path: String, reason: String },
    #[error("the JSON schema cannot be used: {0}")]
    Schema(String),
    /// No token may come next, or it takes too much to find out.
    #[error("the text cannot go on in the form of its schema: {0}")]
    Text(String),
}

/// The vocabulary of a model, prepared for texts of a form.
pub struct Vocabulary {
    factory: ParserFactory,
}

impl Vocabulary {
    /// Reads `tokenizer.json` of a model folder; takes some tenths of a second for a large vocabulary.
    /// The head has `size` tokens, of which those of `eos` end a text.
    ///
    /// # Errors
    /// [`GrammarError::Tokenizer`]: it is not made of bytes, or by pieces with a stand-in for them.
    pub fn load(folder: &Path, size: usize, eos: &[u32]) -> Result<Vocabulary, GrammarError> {
        let path = folder.join("tokenizer.json");
        let refuse = |reason: String| {
            let path = path.display().to_string();
            GrammarError::Tokenizer { path, reason: first_words(&reason) }
        };
        let text = std::fs::read(&path).map_err(|error| refuse(error.to_string()))?;
        let file: Value = serde_json::from_slice(&text).map_err(|e| refuse(e.to_string()))?;
        let factory = catch_unwind(|| {
            let mut tokens = token_bytes_from_tokenizer_json(&file)?;
            tokens.resize(tokens.len().max(size), Vec::new());
            let mut eos: Vec<u32> = eos.to_vec();
            eos.retain(|token| (*token as usize) < tokens.len());
            if eos.is_empty() {
                // A token that no head chooses: such a text ends where nothing can follow.
                eos.push(u32::try_from(tokens.len())?);
                tokens.push([&[TokTrie::SPECIAL_TOKEN_MARKER], "end".as_bytes()].concat());
            }
            let info = TokRxInfo::new(u32::try_from(tokens.len())?, eos[0]);
            let trie = TokTrie::from(&info, &tokens).with_eos_tokens(&eos);
            let mut factory =
                ParserFactory::new_simple(&(Arc::new(ApproximateTokEnv::new(trie)) as _))?;
            *factory.quiet().limits_mut() = ParserLimits {
                max_lexer_states: MAX_LEXER_STATES,
                max_grammar_size: MAX_GRAMMAR_SIZE,
                verbose_errors: false,
                ..ParserLimits::default()
            };
            Ok(factory)
        });
        Ok(Vocabulary { factory: factory.map_err(|error| refuse(error.to_string()))? })
    }

    /// The form of one text: an object of JSON, if there is no `schema`. Takes some milliseconds, for large
    /// schemas some tens.
    ///
    /// # Errors
    /// [`GrammarError::Schema`] says what cannot be used.
    pub fn grammar(&self, schema: Option<&Value>) -> Result<Grammar, GrammarError> {
        let mut schema = schema.cloned().unwrap_or_else(|| json!({"type": "object"}));
        if !schema.is_object() {
            return Err(GrammarError::Schema("expected an object".into()));
        }
        let bytes = schema.to_string().len();
        if bytes > MAX_SCHEMA_BYTES {
            let text = format!("it has {bytes} bytes, {MAX_SCHEMA_BYTES} are allowed");
            return Err(GrammarError::Schema(text));
        }
        let options = JsonCompileOptions {
            whitespace_pattern: Some(WHITESPACE.into()),
            ..JsonCompileOptions::default()
        };
        let parser = catch_unwind(std::panic::AssertUnwindSafe(|| {
            options.apply_to(&mut schema);
            self.factory.create_parser(TopLevelGrammar::from_json_schema(schema))
        }));
        let mut matcher = Matcher::new(parser);
        // The first tokens tell what compiling left for later.
        let _ = matcher.compute_mask();
        match matcher.get_error() {
            Some(reason) => Err(GrammarError::Schema(first_words(&reason))),
            None => Ok(Grammar { matcher, is_over: false }),
        }
    }
}

/// The form of one text, and how far the text is.
pub struct Grammar {
    matcher: Matcher,
    is_over: bool,
}

impl Grammar {
    /// The same form for another text.
    #[must_use]
    pub fn another(&self) -> Grammar {
        Grammar { matcher: self.matcher.deep_clone(), is_over: self.is_over }
    }

    /// Takes away every token of `logits` `[vocabulary]` that may not come next.
    ///
    /// # Errors
    /// [`GrammarError::Text`].
    pub fn limit(&mut self, logits: &mut [f32]) -> Result<(), GrammarError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(text_error)?;
        for (token, logit) in logits.iter_mut().enumerate() {
            if token >= mask.len() || !mask.get(token) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Takes the token that was chosen.
    ///
    /// # Errors
    /// [`GrammarError::Text`]: it may not come next.
    pub fn push(&mut self, token: u32) -> Result<(), GrammarError> {
        self.matcher.consume_token(token).map_err(text_error)?;
        self.is_over = self.matcher.is_stopped();
        Ok(())
    }

    /// Whether nothing can follow.
    pub fn is_over(&self) -> bool {
        self.is_over
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").field("is_over", &self.is_over).finish_non_exhaustive()
    }
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn text_error(error: impl ToString) -> GrammarError {
    GrammarError::Text(first_words(&error.to_string()))
}

/// The first line of what a library says, not too long: traces follow it.
fn first_words(reason: &str) -> String {
    reason.lines().next().unwrap_or_default().chars().take(MAX_REASON).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::TextCodec;

    fn folder() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("model")
    }

    fn vocabulary() -> Vocabulary {
        let codec = TextCodec::load(&folder()).unwrap();
        let eos = codec.encode_rendered("</s>").unwrap();
        Vocabulary::load(&folder(), 600, &eos).unwrap()
    }

    /// The text that a model would write that likes each token as much as `likes` says.
    fn write(grammar: &mut Grammar, most: usize, likes: impl Fn(usize, usize) -> f32) -> String {
        let codec = TextCodec::load(&folder()).unwrap();
        let mut tokens = Vec::new();
        while !grammar.is_over() && tokens.len() < most {
            let mut logits: Vec<f32> = (0..600).map(|token| likes(tokens.len(), token)).collect();
            grammar.limit(&mut logits).unwrap();
            let best = (0..600).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            assert!(logits[best].is_finite(), "nothing may follow {:?}", codec.decode(&tokens));
            tokens.push(best as u32);
            grammar.push(best as u32).unwrap();
        }
        codec.decode(&tokens).unwrap()
    }

    fn noise(seed: u64) -> impl Fn(usize, usize) -> f32 {
        move |at, token| {
            let mixed =
                (seed ^ (at as u64) << 32 ^ token as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed >> 40) as f32 / 1e6
        }
    }

    proptest! {
        // PROPTEST_CASES, which is 256 by default, scales the number.
        #![proptest_config(ProptestConfig::with_cases((24 * ProptestConfig::default().cases).div_ceil(256)))]
        #[test]
        fn whatever_a_model_likes_its_text_has_the_form_of_the_schema(seed: u64) {
            let schema = json!({
                "type": "object",
                "properties": {
                    "kind": {"enum": ["fox", "hare"]},
                    "size": {"type": "integer", "minimum": 3, "maximum": 77},
                    "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                },
                "required": ["kind", "size", "tags"],
                "additionalProperties": false,
            });
            let mut grammar = vocabulary().grammar(Some(&schema)).unwrap();
            let text = write(&mut grammar, 1000, noise(seed));
            let value: Value = serde_json::from_str(&text).expect(&text);
            prop_assert!(value["kind"] == "fox" || value["kind"] == "hare", "{text}");
            prop_assert!((3..=77).contains(&value["size"].as_i64().unwrap()), "{text}");
            prop_assert!(value["tags"].as_array().unwrap().iter().all(Value::is_boolean), "{text}");
        }
    }

    #[test]
    fn without_a_schema_an_object_is_written() {
        let mut grammar = vocabulary().grammar(None).unwrap();
        let (brace, end) = (b'{', b'}');
        let codec = TextCodec::load(&folder()).unwrap();
        let of = |byte: u8| codec.encode_rendered(&char::from(byte).to_string()).unwrap()[0];
        let mut other = grammar.another();
        let logits = &mut [0.0; 600];
        grammar.limit(logits).unwrap();
        assert!(logits[of(brace) as usize].is_finite());
        assert!(!logits[of(end) as usize].is_finite());
        for byte in [brace, end] {
            grammar.push(of(byte)).unwrap();
        }
        assert!(grammar.is_over());
        assert!(!other.is_over());
        assert!(other.push(of(end)).is_err());
    }

    #[test]
    fn schemas_that_cannot_be_used_are_refused_in_a_line() {
        let vocabulary = vocabulary();
        let refused = |schema: Value| vocabulary.grammar(Some(&schema)).unwrap_err().to_string();
        assert!(refused(json!(true)).contains("expected an object"));
        assert!(refused(json!({"type": "elephant"})).contains("elephant"));
        assert!(refused(json!({"$ref": "https://example.org/schema"})).contains("cannot be used"));
        assert!(refused(json!({"enum": []})).contains("cannot be used"));
        assert!(refused(json!({"pattern": "(", "type": "string"})).contains("cannot be used"));
        let long = "x".repeat(MAX_SCHEMA_BYTES);
        assert!(refused(json!({"description": long})).contains("are allowed"));
        let huge = json!({"type": "string", "pattern": "(((a{1,500}){1,500}){1,500}){1,500}"});
        let mut endless = vocabulary.grammar(Some(&huge)).unwrap();
        assert!(write(&mut endless, 30, noise(1)).starts_with('"'), "one step after the other");
        assert!(vocabulary.grammar(None).is_ok(), "and others go on");
    }

    #[test]
    fn a_tokenizer_without_bytes_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let refused = || Vocabulary::load(folder.path(), 600, &[1]).err().unwrap().to_string();
        assert!(refused().contains("tokenizer.json"));
        std::fs::write(folder.path().join("tokenizer.json"), b"{}").unwrap();
        assert!(refused().contains("decoder"), "{}", refused());
        let bad = r#"{"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
            "added_tokens": [], "model": {"vocab": {"<0xZZ>": 0}}}"#;
        std::fs::write(folder.path().join("tokenizer.json"), bad).unwrap();
        assert!(refused().lines().count() == 1, "a panic of the library is an error");
    }
}
