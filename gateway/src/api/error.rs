//! Errors in OpenAI's shape: one sentence, a type, the parameter, a code.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use client::chain::ChainError;
use client::decoder::DecodeError;
use client::generation::GenerationError;
use client::swarm::SwarmError;
use serde_json::{Value, json};
use shared::error_chain::with_causes;

use crate::accounts::Refusal;
use crate::engine::Engine;
use crate::model::Model;
use crate::view::ModelServers;

/// Why a request is not served.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<&'static str>,
    message: String,
    /// After how many seconds to try again.
    retry_after: Option<u64>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: String) -> ApiError {
        ApiError { status, kind, code: None, param: None, message, retry_after: None }
    }

    /// A request that cannot be served as it is; `param` is what is wrong with it.
    pub fn bad(message: String, param: Option<&'static str>) -> ApiError {
        let error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        ApiError { param, ..error }
    }

    /// A setting that cannot be used.
    pub fn out_of_range(
        name: &'static str,
        got: impl std::fmt::Display,
        expected: &str,
    ) -> ApiError {
        ApiError::bad(format!("invalid {name} {got}: expected {expected}"), Some(name))
    }

    /// What is wrong, in a sentence.
    #[cfg(test)]
    pub(super) fn text(&self) -> &str {
        &self.message
    }

    /// A request with too many bytes.
    pub fn too_large(max_bytes: usize) -> ApiError {
        let text = format!("the request has more than {max_bytes} bytes, which --max_body allows");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", text)
    }

    /// A request whose body does not come.
    pub fn too_slow(limit: Duration) -> ApiError {
        let text = format!("the body of the request did not come within {} s", limit.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", text)
    }

    /// Nothing has this name.
    pub fn not_found(message: String) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    /// A path that takes other methods.
    pub fn not_allowed(method: &Method) -> ApiError {
        let method: String = method.as_str().chars().take(20).collect();
        let text =
            format!("this path does not take {method}: the header Allow names what it takes");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", text)
    }

    /// A model that is not offered.
    pub fn unknown_model(name: &str, engine: &Engine) -> ApiError {
        let known: Vec<&str> = engine.models().map(|model| model.view.name.as_str()).collect();
        let name: String = name.chars().take(100).collect();
        let text =
            format!("the model {name:?} is not offered here; there are: {}", known.join(", "));
        let error = ApiError::not_found(text);
        ApiError { code: Some("model_not_found"), param: Some("model"), ..error }
    }

    /// No key, or one that is not known.
    pub fn no_key() -> ApiError {
        let text = "this gateway needs an API key: send it as Authorization: Bearer KEY".to_owned();
        let error = ApiError::new(StatusCode::UNAUTHORIZED, "invalid_request_error", text);
        ApiError { code: Some("invalid_api_key"), ..error }
    }

    /// Too much is asked for at once, or in a minute.
    pub fn too_many(message: String, retry_after: u64) -> ApiError {
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        ApiError {
            code: Some("rate_limit_exceeded"),
            retry_after: Some(retry_after.max(1)),
            ..error
        }
    }

    /// A text that is longer than the model or its servers take.
    pub fn too_long(message: String) -> ApiError {
        let error = ApiError::bad(message, Some("messages"));
        ApiError { code: Some("context_length_exceeded"), ..error }
    }

    fn unavailable(message: String) -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        ApiError { code: Some("no_servers"), retry_after: Some(10), ..error }
    }

    fn internal(message: String) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// What a text of `model` failed with.
    pub fn of_text(error: &GenerationError, model: &Model) -> ApiError {
        match error {
            GenerationError::Sampling(error) => ApiError::bad(error.to_string(), None),
            GenerationError::Decode(DecodeError::Grammar(error)) => {
                ApiError::bad(error.to_string(), Some("response_format"))
            }
            GenerationError::Decode(DecodeError::Chain(error)) => match error {
                ChainError::Swarm(SwarmError::Missing { .. }) => {
                    ApiError::unavailable(hole(&model.view))
                }
                ChainError::TooLong { max_length, text, .. } => ApiError::too_long(format!(
                    "prompt and answer have {max_length} tokens together, more than the servers take: {text}"
                )),
                other => ApiError::unavailable(with_causes(other)),
            },
            other => ApiError::internal(with_causes(other)),
        }
    }

    /// The status of the answer.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The object that clients read.
    pub fn body(&self) -> Value {
        let ApiError { message, kind, param, code, .. } = self;
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        ApiError::too_many(refusal.to_string(), refusal.wait_s())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// Which blocks of a model have no server, since when, and what would serve them.
pub fn hole(view: &ModelServers) -> String {
    let holes = view.holes();
    let Some(first) = holes.blocks.first() else {
        return format!("the servers of {} cannot be reached right now; try again", view.name);
    };
    let ranges: Vec<String> =
        holes.blocks.iter().map(|range| format!("{}:{}", range.start, range.end)).collect();
    let since = holes.since.and_then(|since| since.elapsed().ok()).unwrap_or_default();
    format!(
        "no server of {} serves blocks {} (for {} s); this would: sepal serve MODEL --dht_prefix {} --block_indices {}:{} --initial_peers ...",
        view.name,
        ranges.join(", "),
        since.as_secs(),
        view.swarm.prefix(),
        first.start,
        first.end
    )
}
