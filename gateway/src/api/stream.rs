//! Server-sent events: chunks as they are made, then `[DONE]`.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::Value;

use super::error::ApiError;
use super::texts::{Texts, Usage};
use crate::generation::TextPiece;

/// A stream opens at the latest this long after its texts began, so that no caller and no proxy takes it for
/// dead. Longer than the wait for servers by default: that there are none has a status.
const OPENING: Duration = Duration::from_secs(7);
/// A comment is sent if nothing was for this long, so that proxies keep the connection.
const PULSE: Duration = Duration::from_secs(5);
/// What says that an answer may be sent on as it comes, to nginx and those that do as it does.
const BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// What a kind of completion makes of the pieces of its texts.
pub trait Chunks: Send + 'static {
    /// What comes first.
    fn opening(&mut self) -> Vec<Value>;
    /// The chunk of a piece of the text `index`, which says something.
    fn of(&mut self, index: u32, piece: &TextPiece) -> Value;
    /// The chunk of the numbers of tokens.
    fn usage(&mut self, usage: Usage) -> Value;
}

struct Streaming<C> {
    texts: Texts,
    chunks: C,
    tells_usage: bool,
    ready: VecDeque<Event>,
    has_ended: bool,
}

/// Answers with a stream. The first piece is waited for, so that a request that fails soon has its status;
/// after [`OPENING`] the stream opens without it, and errors are events.
///
/// # Errors
/// Of a text that fails before the stream opens.
pub async fn respond<C: Chunks>(
    mut texts: Texts,
    mut chunks: C,
    tells_usage: bool,
) -> Result<Response, ApiError> {
    let first = tokio::time::timeout(OPENING, texts.next()).await;
    let mut ready: VecDeque<Event> = chunks.opening().iter().map(event).collect();
    match first {
        Ok(first) => {
            let first = first.transpose()?;
            ready.extend(first.and_then(|(index, piece)| chunk(&mut chunks, index, &piece)));
        }
        Err(_) => ready.push_front(Event::default().comment("waiting for the first token")),
    }
    let state = Streaming { texts, chunks, tells_usage, ready, has_ended: false };
    let events = stream::unfold(state, async |mut state| {
        while state.ready.is_empty() && !state.has_ended {
            state.advance().await;
        }
        let event = state.ready.pop_front()?;
        Some((Ok::<_, Infallible>(event), state))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(PULSE)).into_response())
}

/// Asks proxies to send streams on piece by piece; other answers stay as they are.
pub async fn unbuffered(mut response: Response) -> Response {
    let headers = response.headers_mut();
    let kind = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    if kind.is_some_and(|kind| kind.starts_with(b"text/event-stream")) {
        headers.insert(BUFFERING, HeaderValue::from_static("no"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    }
    response
}

impl<C: Chunks> Streaming<C> {
    async fn advance(&mut self) {
        match self.texts.next().await {
            Some(Err(error)) => {
                self.has_ended = true;
                self.ready.push_back(event(&error.body()));
            }
            Some(Ok((index, piece))) => self.ready.extend(chunk(&mut self.chunks, index, &piece)),
            None => {
                self.has_ended = true;
                if self.tells_usage {
                    let mut last = self.chunks.usage(self.texts.usage);
                    last["route"] = self.texts.route();
                    self.ready.push_back(event(&last));
                }
                self.ready.push_back(Event::default().data("[DONE]"));
            }
        }
    }
}

fn chunk(chunks: &mut impl Chunks, index: u32, piece: &TextPiece) -> Option<Event> {
    (!piece.is_empty()).then(|| event(&chunks.of(index, piece)))
}

fn event(chunk: &Value) -> Event {
    Event::default().data(chunk.to_string())
}
