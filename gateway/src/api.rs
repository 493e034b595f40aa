//! OpenAI's API over HTTP.

mod chat;
mod completions;
mod error;
#[cfg(test)]
mod fuzz;
mod guard;
mod messages;
mod page;
mod request;
mod state;
mod stream;
mod texts;

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::json;
use tower_http::cors::{AllowOrigin, CorsLayer};

use self::error::ApiError;
use self::guard::Guard;
pub use self::guard::KeysError;
use crate::config::GatewayConfig;
use crate::engine::Engine;
use crate::metrics;
use crate::model::Model;

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
    let guard = Arc::new(Guard::new(config.api_keys.as_deref(), config.requests_per_minute)?);
    let GatewayConfig { default_max_tokens, max_body_bytes, .. } = *config;
    let shared = ApiState { engine, guard, default_max_tokens, max_body_bytes };
    let guarded = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/api/v1/state", get(state::snapshot))
        .route("/api/v1/events", get(state::events))
        .layer(middleware::from_fn_with_state(shared.clone(), guard::admit))
        .layer(DefaultBodyLimit::disable());
    let open = Router::new()
        .route("/", get(page::index))
        .route("/page/{version}/{*path}", get(page::file))
        .route("/livez", get(async || StatusCode::OK))
        .route("/readyz", get(ready))
        .route("/metrics", get(scrape));
    let router = guarded.merge(open).fallback(unknown).method_not_allowed_fallback(not_allowed);
    Ok(router.with_state(shared).layer(cors(&config.cors_origins)))
}

/// Lets web pages of these origins call the API; without any, browsers refuse.
fn cors(origins: &[String]) -> CorsLayer {
    let allowed = match origins {
        [one] if one == "*" => AllowOrigin::any(),
        some => AllowOrigin::list(some.iter().filter_map(|o| HeaderValue::from_str(o).ok())),
    };
    let headers = [header::AUTHORIZATION, header::CONTENT_TYPE];
    let named = ["x-stainless-lang", "x-stainless-runtime"].map(HeaderName::from_static);
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(headers.into_iter().chain(named).collect::<Vec<_>>())
}

fn entry(model: &Model) -> serde_json::Value {
    let created = request::unix_seconds(model.created);
    json!({"id": model.view.name, "object": "model", "created": created, "owned_by": "swarm"})
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

async fn not_allowed() -> ApiError {
    ApiError::bad("this path takes another method".into(), None)
}
