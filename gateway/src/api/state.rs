//! What is known of the swarm, for programs and for the page: `/api/v1/state`, and the same again and again
//! as `/api/v1/events`.

use std::convert::Infallible;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::{Value, json};
use swarm::view::ServerSpan;
use swarm::wire::records::ServerState;

use super::request::unix_seconds;
use super::{ApiState, error};
use crate::engine::Engine;
use crate::view::ModelServers;

/// How often the page is told.
const PERIOD: Duration = Duration::from_secs(5);
/// Characters shown of what a server says of itself.
const MAX_CHARS: usize = 80;
/// Servers shown of each model.
const MAX_SERVERS: usize = 2000;

pub(super) async fn snapshot(State(shared): State<ApiState>) -> Response {
    Json(state(&shared.engine)).into_response()
}

pub(super) async fn events(State(shared): State<ApiState>) -> Response {
    let ticks = tokio::time::interval(PERIOD);
    let events = stream::unfold((shared, ticks), async |(shared, mut ticks)| {
        ticks.tick().await;
        let event = Event::default().data(state(&shared.engine).to_string());
        Some((Ok::<_, Infallible>(event), (shared, ticks)))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

fn state(engine: &Engine) -> Value {
    let models: Vec<Value> = engine.views().map(|view| of_view(view, engine)).collect();
    json!({"at": unix_seconds(SystemTime::now()), "models": models})
}

fn of_view(view: &ModelServers, engine: &Engine) -> Value {
    let (swarm, model) = (&view.swarm, engine.model(&view.name));
    // In this order: no server is shown whose blocks are missing.
    let servers = swarm.all_servers();
    let holes = view.holes();
    let shown: Vec<Value> = servers.iter().take(MAX_SERVERS).map(of_server).collect();
    let route = swarm.route_now().map(|(legs, seconds)| {
        let legs: Vec<Value> = legs
            .iter()
            .map(|leg| json!({"peer": leg.peer.to_string(), "start": leg.blocks.start, "end": leg.blocks.end}))
            .collect();
        let per_second = (seconds > 0.0).then(|| 1.0 / seconds);
        json!({"legs": legs, "step_seconds": seconds, "tokens_per_second": per_second})
    });
    let missing = (!holes.blocks.is_empty()).then(|| error::hole(view));
    json!({
        "name": view.name,
        "dht_prefix": swarm.prefix(),
        "blocks": swarm.num_blocks(),
        "holes": holes.blocks.iter().map(|range| [range.start, range.end]).collect::<Vec<_>>(),
        "holes_since": holes.since.map(unix_seconds),
        "what_is_missing": missing,
        "can_chat": model.is_some_and(|model| model.template.is_some()),
        "servers": shown,
        "servers_in_all": servers.len(),
        "route": route,
        "sessions_kept": model.map_or(0, |model| model.conversations.len()),
    })
}

fn of_server(server: &ServerSpan) -> Value {
    let info = &server.info;
    let short = |text: &Option<String>| {
        text.as_ref().map(|text| text.chars().take(MAX_CHARS).collect::<String>())
    };
    let state = match info.state {
        ServerState::Online => "online",
        ServerState::Joining => "joining",
        ServerState::Offline => "offline",
    };
    let adapters = info.adapters.iter().take(8).map(|name| short(&Some(name.clone())));
    json!({
        "peer": server.peer_id,
        "start": server.start,
        "end": server.end,
        "state": state,
        "throughput": info.throughput,
        "inference_rps": info.inference_rps,
        "public_name": short(&info.public_name),
        "version": short(&info.version),
        "torch_dtype": short(&info.torch_dtype),
        "quant_type": short(&info.quant_type),
        "using_relay": info.using_relay,
        "cache_tokens_left": info.cache_tokens_left,
        "adapters": adapters.collect::<Vec<_>>(),
    })
}
