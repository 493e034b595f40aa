//! A client for the two things that speak HTTP: the monitor of a public swarm and a speed test of
//! the operator's choice. Both are services of strangers: answers are bounded in bytes and time.

use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, StreamExt};
use reqwest::{Body, Client, Response, redirect::Policy};
use shared::error_chain::root_cause;

/// Redirections followed.
const MAX_REDIRECTIONS: usize = 3;

/// Name and version for the service's log.
const AGENT: &str = concat!("sepal/", env!("CARGO_PKG_VERSION"));

/// A request came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// It was not sent, or not answered.
    #[error("{}", reason(.0))]
    Request(#[from] reqwest::Error),
    /// The service says that it failed.
    #[error("the service answered with status {0}")]
    Status(reqwest::StatusCode),
    /// More than is taken.
    #[error("the answer has more than {0} bytes")]
    TooLarge(usize),
}

/// A client whose requests, from the connection to the last byte, take at most `limit`.
///
/// # Errors
/// When the system has no descriptors or certificates.
pub fn client(limit: Duration) -> Result<Client, HttpError> {
    // One provider for all of TLS; a second call changes nothing.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = Client::builder()
        .timeout(limit)
        .connect_timeout(limit)
        .redirect(Policy::limited(MAX_REDIRECTIONS))
        .user_agent(AGENT);
    Ok(client.build()?)
}

/// The body of `url`.
///
/// # Errors
/// [`HttpError`]; more than `max_bytes` are not read.
pub async fn get(client: &Client, url: &str, max_bytes: usize) -> Result<Vec<u8>, HttpError> {
    let mut body = Vec::new();
    let mut answer = pieces(client, url).await?;
    while let Some(piece) = answer.chunk().await? {
        if body.len() + piece.len() > max_bytes {
            return Err(HttpError::TooLarge(max_bytes));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

/// The body of `url`, to be read piece by piece.
pub async fn pieces(client: &Client, url: &str) -> Result<Response, HttpError> {
    accepted(client.get(url).send().await?)
}

/// Sends `count` times `piece` to `url` and waits for an answer.
pub async fn post(client: &Client, url: &str, piece: Bytes, count: usize) -> Result<(), HttpError> {
    let pieces = stream::iter(std::iter::repeat_n(piece, count)).map(Ok::<_, std::io::Error>);
    let request = client.post(url).body(Body::wrap_stream(pieces));
    accepted(request.send().await?).map(drop)
}

fn accepted(response: Response) -> Result<Response, HttpError> {
    match response.status() {
        status if status.is_success() => Ok(response),
        status => Err(HttpError::Status(status)),
    }
}

/// What the system or the service said, without the layers between and without the address, which
/// the caller names.
fn reason(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return "no answer in time".to_owned();
    }
    root_cause(error)
}

#[cfg(test)]
pub(crate) mod stand_in;
