//! OpenAI's API over HTTP.

mod chat;
mod completions;
mod ends;
mod error;
#[cfg(test)]
mod fuzz;
mod guard;
mod messages;
mod numbers;
mod page;
#[cfg(test)]
mod real_tokenizers;
mod request;
mod state;
mod stream;
mod texts;
mod tokens;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use serde_json::json;
use tower_http::cors::{AllowHeaders, AllowOrigin, AllowPrivateNetwork, CorsLayer};

use self::error::ApiError;
pub use self::guard::KeysError;
use self::guard::{Guard, GuardConfig};
use crate::accounts::CallerAllowance;
use crate::config::GatewayConfig;
use crate::engine::Engine;
use crate::metrics;
use crate::model::Model;

/// How long a browser need not ask again whether a page may call.
const PREFLIGHT_AGE: Duration = Duration::from_secs(600);

/// What handlers share.
#[derive(Clone)]
struct ApiState {
    engine: Arc<Engine>,
    guard: Arc<Guard>,
    default_max_tokens: u32,
    max_body_bytes: usize,
}

impl ApiState {
    /// The answer to a request for a `kind` of text, counted.
    fn answered(&self, kind: &'static str, answer: Result<Response, ApiError>) -> Response {
        let response = answer.unwrap_or_else(IntoResponse::into_response);
        self.engine.metrics.answered(kind, response.status().as_u16());
        response
    }
}

/// All routes over `engine`.
///
/// # Errors
/// [`KeysError`] if the file of keys cannot be read.
pub fn router(engine: Arc<Engine>, config: &GatewayConfig) -> Result<Router, KeysError> {
    let guard = GuardConfig {
        keys: config.api_keys.as_deref(),
        allowance: CallerAllowance {
            requests: config.requests_per_minute,
            tokens: config.tokens_per_minute,
        },
        trusted_proxies: &config.trusted_proxies,
    };
    let guard = Arc::new(Guard::new(guard, &engine.metrics)?);
    let GatewayConfig { default_max_tokens, max_body_bytes, .. } = *config;
    let shared = ApiState { engine, guard, default_max_tokens, max_body_bytes };
    let guarded = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/embeddings", any(embeddings))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/api/v1/state", get(state::snapshot))
        .route("/api/v1/events", get(state::events))
        .layer(middleware::from_fn_with_state(shared.clone(), guard::admit))
        .layer(DefaultBodyLimit::disable());
    let open = Router::new()
        .route("/", get(page::index))
        .route("/page/{version}/{*path}", get(page::file))
        .route("/livez", get(async || StatusCode::OK))
        .route("/readyz", get(ready))
        .route("/health", get(ready))
        .route("/metrics", get(scrape));
    let router = guarded.merge(open).fallback(unknown).method_not_allowed_fallback(not_allowed);
    let router = router.with_state(shared).layer(middleware::map_response(stream::unbuffered));
    Ok(router.layer(cors(&config.cors_origins)))
}

/// Lets web pages of these origins call the API; without any, browsers refuse. Clients send headers of
/// their own, ever new ones: whichever the browser asks for may come.
fn cors(origins: &[String]) -> CorsLayer {
    let allowed = match origins.iter().any(|origin| origin == "*") {
        true => AllowOrigin::any(),
        false => AllowOrigin::list(origins.iter().filter_map(|o| HeaderValue::from_str(o).ok())),
    };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(guard::told().collect::<Vec<_>>())
        // A page of the web may call a gateway of this machine or of its net.
        .allow_private_network(AllowPrivateNetwork::yes())
        .max_age(PREFLIGHT_AGE)
}

fn entry(model: &Model) -> serde_json::Value {
    let created = request::unix_seconds(model.created);
    // As in vLLM; null where the model names no length.
    let max_model_len = model.local.max_positions;
    let name = &model.view.name;
    json!({
        "id": name, "object": "model", "created": created, "owned_by": "swarm",
        "max_model_len": max_model_len,
    })
}

async fn models(State(shared): State<ApiState>) -> Response {
    let data: Vec<_> = shared.engine.models().map(|model| entry(model)).collect();
    axum::Json(json!({"object": "list", "data": data})).into_response()
}

async fn model(State(shared): State<ApiState>, Path(name): Path<String>) -> Response {
    match shared.engine.model(&name) {
        Some(model) => axum::Json(entry(model)).into_response(),
        None => ApiError::unknown_model(&name, &shared.engine).into_response(),
    }
}

async fn ready(State(shared): State<ApiState>) -> Response {
    let holes = shared.engine.views().filter(|view| !view.holes().blocks.is_empty());
    let texts: Vec<String> = holes.map(|view| error::hole(view)).collect();
    match texts.is_empty() {
        true => (StatusCode::OK, "ready\n").into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, texts.join("\n") + "\n").into_response(),
    }
}

async fn scrape(State(shared): State<ApiState>) -> Response {
    match shared.engine.metrics.page() {
        Ok(text) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn unknown() -> ApiError {
    ApiError::not_found("there is nothing at this path; the API is at /v1/chat/completions".into())
}

/// The header `Allow` of the answer names the methods.
async fn not_allowed(method: Method) -> ApiError {
    ApiError::not_allowed(&method)
}

async fn embeddings() -> ApiError {
    let text = "there are no embeddings here: the models of a swarm write texts, and the gateway offers no model \
                that makes embeddings";
    ApiError::not_found(text.into())
}
