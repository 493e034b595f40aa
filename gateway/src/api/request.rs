//! What both kinds of completions have in common: reading the body, checking the settings.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use client::grammar::{Grammar, GrammarError};
use client::sampling::SamplingConfig;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::ends::EndSettings;
use super::error::ApiError;
use super::numbers::whole;
use crate::engine::Engine;
use crate::generation::TextRequest;
use crate::model::Model;

/// Most texts of one request, of all its prompts together.
const MAX_CHOICES: u32 = 16;
/// Most texts that end a text, and the longest of them.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1 << 10;
/// Most tokens with a bias, as in OpenAI's API.
const MAX_BIASES: usize = 1024;
/// Most tokens named beside each, as in OpenAI's API.
pub const MAX_TOP_LOGPROBS: u32 = 20;
const MAX_TEMPERATURE: f32 = 2.0;

/// One text, or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum OneOrMany {
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// The settings of a request that both endpoints have. Unknown ones are ignored, as clients send ever new
/// ones; `null` is as if it were not there.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct GenerationSettings {
    #[serde(deserialize_with = "whole")]
    pub n: Option<u32>,
    /// Whether pieces come as they are made.
    pub stream: Option<bool>,
    /// What else a stream tells.
    pub stream_options: Option<StreamOptions>,
    /// -1 is as many as the model takes.
    #[serde(deserialize_with = "whole")]
    max_tokens: Option<i64>,
    #[serde(deserialize_with = "whole")]
    max_completion_tokens: Option<i64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    #[serde(deserialize_with = "whole")]
    top_k: Option<i64>,
    min_p: Option<f32>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    repetition_penalty: Option<f32>,
    logit_bias: Option<BTreeMap<String, f32>>,
    #[serde(deserialize_with = "whole")]
    seed: Option<i64>,
    stop: Option<OneOrMany>,
    response_format: Option<ResponseFormat>,
    #[serde(flatten)]
    ends: EndSettings,
    /// Whether 0 tokens may be asked for, because the answer has the prompt, too.
    #[serde(skip)]
    pub may_add_nothing: bool,
}

/// The form of an answer.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: NamedSchema },
}

/// A schema; its name and its description say nothing to the gateway.
#[derive(Clone, Debug, Deserialize)]
struct NamedSchema {
    schema: Value,
}

/// What else a stream tells.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamOptions {
    /// Whether its last chunk has the numbers of tokens.
    pub include_usage: Option<bool>,
}

impl GenerationSettings {
    /// Whether pieces come as they are made.
    pub fn streams(&self) -> bool {
        self.stream == Some(true)
    }

    /// Whether the last chunk of a stream has the numbers of tokens.
    pub fn tells_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|o| o.include_usage) == Some(true)
    }

    /// How many texts are asked for.
    ///
    /// # Errors
    /// Out of range.
    pub fn choices(&self) -> Result<u32, ApiError> {
        match self.n.unwrap_or(1) {
            n @ 1..=MAX_CHOICES => Ok(n),
            n => Err(ApiError::out_of_range("n", n, &format!("1 to {MAX_CHOICES}"))),
        }
    }

    /// The form that each text is to have; `None` for any.
    ///
    /// # Errors
    /// A schema that cannot be used, or a model whose tokenizer cannot.
    pub async fn grammar(&self, model: &Arc<Model>) -> Result<Option<Grammar>, ApiError> {
        let schema = match self.response_format.clone() {
            None | Some(ResponseFormat::Text) => return Ok(None),
            Some(ResponseFormat::JsonObject) => None,
            Some(ResponseFormat::JsonSchema { json_schema }) => Some(json_schema.schema),
        };
        let refuse =
            |error: GrammarError| ApiError::bad(error.to_string(), Some("response_format"));
        model.grammar(schema).await.map(Some).map_err(refuse)
    }

    /// What is asked of each text: for each prompt in turn `n` texts that differ in the seed.
    ///
    /// # Errors
    /// A setting out of range, a prompt that is empty or too long, too many prompts.
    pub fn asks(
        &self,
        prompts: Vec<Vec<u32>>,
        grammar: Option<&Grammar>,
        model: &Model,
        default_max_tokens: u32,
        top_logprobs: Option<u32>,
    ) -> Result<Vec<TextRequest>, ApiError> {
        let (count, choices) = (prompts.len(), self.choices()?);
        if !(1..=(MAX_CHOICES / choices) as usize).contains(&count) {
            let text = format!(
                "{count} prompts with n {choices}: expected 1 to {MAX_CHOICES} texts in one request"
            );
            return Err(ApiError::bad(text, Some("prompt")));
        }
        let (sampling, stop) = (self.sampling()?, self.stops()?);
        let top_logprobs = match top_logprobs {
            Some(n) if n > MAX_TOP_LOGPROBS => {
                return Err(ApiError::out_of_range(
                    "top_logprobs",
                    n,
                    &format!("0 to {MAX_TOP_LOGPROBS}"),
                ));
            }
            n => n.map(|n| n as usize),
        };
        let mut asks = Vec::with_capacity(count * choices as usize);
        for prompt in prompts {
            if prompt.is_empty() {
                return Err(ApiError::bad("the prompt is empty".to_owned(), Some("prompt")));
            }
            check_tokens(&prompt, model.local.head.vocabulary(), "prompt")?;
            let max_new_tokens = self.max_new_tokens(prompt.len(), model, default_max_tokens)?;
            let ends = self.ends.rules(model.local.head.vocabulary(), max_new_tokens)?;
            let prompt: Arc<[u32]> = prompt.into();
            asks.extend((0..choices).map(|choice| TextRequest {
                prompt: prompt.clone(),
                max_new_tokens,
                sampling: SamplingConfig {
                    seed: sampling.seed.map(|seed| seed.wrapping_add(u64::from(choice))),
                    ..sampling.clone()
                },
                ends: ends.clone(),
                stop: stop.clone(),
                grammar: grammar.map(Grammar::another),
                top_logprobs,
                echo: None,
                account: None,
            }));
        }
        Ok(asks)
    }

    /// Checks all that depends on no model.
    #[cfg(test)]
    pub(super) fn checked(&self) -> Result<(), ApiError> {
        let (choices, sampling, stops) = (self.choices()?, self.sampling()?, self.stops()?);
        assert!((1..=MAX_CHOICES).contains(&choices));
        assert!(sampling.logit_bias.len() <= MAX_BIASES);
        self.ends.rules(1024, 64)?;
        assert!(stops.len() <= MAX_STOPS && stops.iter().all(|stop| stop.len() <= MAX_STOP_BYTES));
        Ok(())
    }

    fn max_new_tokens(&self, prompt: usize, model: &Model, default: u32) -> Result<u32, ApiError> {
        let prompt = u32::try_from(prompt).unwrap_or(u32::MAX);
        let room = model.local.max_positions.map(|most| most.saturating_sub(prompt));
        let asked = match self.max_completion_tokens.or(self.max_tokens) {
            None => default.min(room.unwrap_or(default)),
            Some(-1) => model.room(prompt, default),
            Some(asked) => u32::try_from(asked).map_err(|_| {
                let expected = "1 to the length of the model, or -1 for as many as fit";
                ApiError::out_of_range("max_tokens", asked, expected)
            })?,
        };
        if let Some(most) = model.local.max_positions
            && (room.is_some_and(|room| asked > room) || room == Some(0) && !self.may_add_nothing)
        {
            return Err(ApiError::too_long(format!(
                "the prompt has {prompt} tokens and the answer {asked} at most; {} takes {most} together",
                model.view.name
            )));
        }
        match asked {
            0 if self.may_add_nothing => Ok(0),
            0 => Err(ApiError::out_of_range("max_tokens", 0, "1 or more")),
            asked => Ok(asked),
        }
    }

    fn sampling(&self) -> Result<SamplingConfig, ApiError> {
        let temperature = self.temperature.unwrap_or(1.0);
        if !(0.0..=MAX_TEMPERATURE).contains(&temperature) {
            return Err(ApiError::out_of_range(
                "temperature",
                temperature,
                &format!("0 to {MAX_TEMPERATURE}"),
            ));
        }
        let config = SamplingConfig {
            temperature: (temperature > 0.0).then_some(temperature),
            // -1 and 0 mean all tokens, as in vLLM.
            top_k: self.top_k.and_then(|k| usize::try_from(k).ok()).filter(|k| *k > 0),
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            logit_bias: self.biases()?,
            seed: self.seed.map(i64::cast_unsigned),
        };
        // The sampler names what is wrong.
        client::sampling::Sampler::new(config.clone())
            .map_err(|error| ApiError::bad(error.to_string(), None))?;
        Ok(config)
    }

    fn biases(&self) -> Result<Vec<(u32, f32)>, ApiError> {
        let biases = self.logit_bias.iter().flatten();
        if biases.clone().count() > MAX_BIASES {
            return Err(ApiError::out_of_range(
                "logit_bias",
                "too many tokens",
                &format!("{MAX_BIASES} at most"),
            ));
        }
        let parse = |(token, bias): (&String, &f32)| match token.parse() {
            Ok(token) => Ok((token, *bias)),
            Err(_) => Err(ApiError::out_of_range(
                "logit_bias",
                format!("token {token:?}"),
                "numbers of tokens",
            )),
        };
        biases.map(parse).collect()
    }

    fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match self.stop.clone() {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop],
            Some(OneOrMany::Many(stops)) => stops,
        };
        if stops.len() > MAX_STOPS || stops.iter().any(|stop| stop.len() > MAX_STOP_BYTES) {
            let limit = format!("at most {MAX_STOPS} texts of {MAX_STOP_BYTES} bytes");
            return Err(ApiError::out_of_range("stop", format!("{} texts", stops.len()), &limit));
        }
        Ok(stops)
    }
}

/// Checks tokens that a caller sends as `name`.
///
/// # Errors
/// One that the model does not have.
pub fn check_tokens(tokens: &[u32], vocabulary: usize, name: &'static str) -> Result<(), ApiError> {
    match tokens.iter().find(|token| **token as usize >= vocabulary) {
        Some(token) => {
            let text = format!("token {token} is outside the vocabulary of {vocabulary}");
            Err(ApiError::bad(text, Some(name)))
        }
        None => Ok(()),
    }
}

/// Runs work whose time grows with a request outside of the reactor, so that other texts go on.
///
/// # Errors
/// The gateway is shutting down.
pub async fn outside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| ApiError::too_many("the gateway is shutting down".to_owned(), 1))
}

/// Reads a body.
///
/// # Errors
/// Too many bytes, or not what is expected; the text says where.
pub fn parse<T: DeserializeOwned>(body: &Bytes) -> Result<T, ApiError> {
    serde_json::from_slice(body)
        .map_err(|error| ApiError::bad(format!("cannot read the body as JSON: {error}"), None))
}

/// The model that a request names; the only one if it names none.
///
/// # Errors
/// It is not offered here.
pub fn model<'a>(engine: &'a Engine, name: &str) -> Result<&'a Arc<Model>, ApiError> {
    let mut all = engine.models();
    if let (true, Some(only), None) = (name.is_empty(), all.next(), all.next()) {
        return Ok(only);
    }
    engine.model(name).ok_or_else(|| ApiError::unknown_model(name, engine))
}

/// Seconds since 1970.
pub fn unix_seconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
