//! What the gateway counts, for Prometheus.

use std::fmt;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Of the OpenMetrics text format.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Bounds of times, in seconds.
const SECONDS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Answer {
    endpoint: &'static str,
    code: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Kind {
    model: String,
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KeyTokens {
    key: String,
    kind: &'static str,
}

/// Counters; their labels are names of endpoints, models and keys, whose number is bounded.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    answers: Family<Answer, Counter>,
    tokens: Family<Kind, Counter>,
    key_tokens: Family<KeyTokens, Counter>,
    streams: Gauge,
    first: Histogram,
    first_step: Histogram,
}

impl Default for Metrics {
    fn default() -> Metrics {
        let mut registry = Registry::with_prefix("sepal_gateway");
        let (answers, tokens) = (Family::default(), Family::default());
        let key_tokens = Family::default();
        let streams = Gauge::default();
        let (first, first_step) = (Histogram::new(SECONDS), Histogram::new(SECONDS));
        registry.register("requests", "Requests answered, by endpoint and status", answers.clone());
        let help = "Tokens: prompt, cached (of the prompt, held by an open session), completion";
        registry.register("tokens", help, tokens.clone());
        let help = "Tokens of the callers with a key: prompt, completion; a key by the start of its SHA-256";
        registry.register("key_tokens", help, key_tokens.clone());
        registry.register("texts", "Texts under way", streams.clone());
        let help = "Time from a request to its first piece of text";
        registry.register_with_unit("first_text", help, Unit::Seconds, first.clone());
        let help = "Time of the first step of a text, which carries the new tokens of its prompt";
        registry.register_with_unit("first_step", help, Unit::Seconds, first_step.clone());
        Metrics { registry, answers, tokens, key_tokens, streams, first, first_step }
    }
}

impl Metrics {
    /// A request was answered.
    pub fn answered(&self, endpoint: &'static str, code: u16) {
        self.answers.get_or_create(&Answer { endpoint, code }).inc();
    }

    /// Tokens of a text that has ended.
    pub fn tokens(&self, model: &str, kind: &'static str, count: usize) {
        let kind = Kind { model: model.to_owned(), kind };
        self.tokens.get_or_create(&kind).inc_by(count as u64);
    }

    /// Where the tokens of the key `name` are counted.
    pub fn key(&self, name: String) -> KeyUsage {
        let of = |kind| {
            let tokens = KeyTokens { key: name.clone(), kind };
            self.key_tokens.get_or_create(&tokens).clone()
        };
        KeyUsage { prompt: of("prompt"), completion: of("completion") }
    }

    /// The first piece of a text came after this time.
    pub fn first_text(&self, after: Duration) {
        self.first.observe(after.as_secs_f64());
    }

    /// The servers took so long for the first step of a text.
    pub fn first_step(&self, took: Duration) {
        self.first_step.observe(took.as_secs_f64());
    }

    /// A text is under way until the value is dropped.
    pub fn text(&self) -> UnderWay {
        self.streams.inc();
        UnderWay(self.streams.clone())
    }

    /// Everything, as text.
    ///
    /// # Errors
    /// Of the formatter.
    pub fn page(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// The tokens of one key.
#[derive(Clone, Debug)]
pub struct KeyUsage {
    prompt: Counter,
    completion: Counter,
}

impl KeyUsage {
    /// Counts tokens of prompts.
    pub fn prompt(&self, tokens: usize) {
        self.prompt.inc_by(tokens as u64);
    }

    /// Counts tokens of answers.
    pub fn completion(&self, tokens: usize) {
        self.completion.inc_by(tokens as u64);
    }
}

/// One text under way.
#[derive(Debug)]
pub struct UnderWay(Gauge);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.dec();
    }
}
