//! What the Hub says of itself, of the token and of the model. It is somebody else's service: each
//! answer is bounded in bytes and time.

use std::time::{Duration, SystemTime};

use futures::StreamExt;
use reqwest::{Client, Response, StatusCode, header};
use serde::Deserialize;
use shared::error_chain::root_cause;

use super::facts::{HubFacts, HubQuestion, ModelState, TokenState};
use crate::http;

/// The public Hub (`huggingface_hub`, `constants.py`, `_HF_DEFAULT_ENDPOINT`).
const PUBLIC: &str = "https://huggingface.co";
/// How long answers are waited for.
const PATIENCE: Patience =
    Patience { request: Duration::from_secs(8), round_trip: Duration::from_secs(2) };
/// The largest models have some hundred files.
const MAX_ANSWER_BYTES: usize = 4 << 20;
/// Characters of an account's name that are shown.
const MAX_NAME: usize = 100;
/// Endings of files with weights, in the order in which they are taken (`prepare`).
const WEIGHTS: [&str; 2] = [".safetensors", ".bin"];

/// Asks the Hub; the three answers are waited for together.
///
/// # Errors
/// Why the Hub did not answer.
pub fn observe(question: &HubQuestion) -> Result<HubFacts, String> {
    observe_within(question, PATIENCE)
}

#[derive(Clone, Copy, Debug)]
struct Patience {
    /// Time for one request.
    request: Duration,
    /// Longest round trip after which the Hub's clock counts: an answer that is late on one way only
    /// makes an error of half of it.
    round_trip: Duration,
}

fn observe_within(question: &HubQuestion, patience: Patience) -> Result<HubFacts, String> {
    let failed = |error: std::io::Error| format!("cannot start a request: {error}");
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let client = http::client(patience.request).map_err(|error| error.to_string())?;
    let max_round_trip = patience.round_trip;
    runtime.block_on(Asker { client, question, max_round_trip }.ask())
}

struct Asker<'a> {
    client: Client,
    question: &'a HubQuestion,
    max_round_trip: Duration,
}

/// The model's entry in the Hub's interface.
#[derive(Deserialize)]
struct Listing {
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    #[serde(default)]
    size: Option<u64>,
}

#[derive(Deserialize)]
struct Account {
    name: String,
}

impl Asker<'_> {
    async fn ask(&self) -> Result<HubFacts, String> {
        let (clock, token, model, model_bytes) =
            tokio::join!(self.clock(), self.token(), self.model(), self.model_bytes());
        let (endpoint, clock_ahead_s) = (self.endpoint().to_owned(), clock?);
        Ok(HubFacts { endpoint, clock_ahead_s, token, model, model_bytes })
    }

    fn endpoint(&self) -> &str {
        self.question.hub.endpoint.as_deref().unwrap_or(PUBLIC).trim_end_matches('/')
    }

    /// Whether the Hub answers at all, and how far its clock is behind ours.
    async fn clock(&self) -> Result<Option<f64>, String> {
        // The first request also resolves the name and opens a connection, which takes the time of
        // the request alone. The second one uses that connection.
        let first = self.client.head(self.endpoint()).send().await;
        drop(first.map_err(|error| why(&error))?);
        let sent = now();
        let second = self.client.head(self.endpoint()).send();
        let Ok(Ok(answer)) = tokio::time::timeout(self.max_round_trip, second).await else {
            return Ok(None);
        };
        Ok(ahead(answer.headers(), sent, now()))
    }

    async fn token(&self) -> Option<TokenState> {
        self.question.hub.token.as_ref()?;
        let url = format!("{}/api/whoami-v2", self.endpoint());
        Some(match self.get(&url).await {
            Ok((StatusCode::OK, body)) => match serde_json::from_slice::<Account>(&body) {
                Ok(account) => TokenState::Valid(account.name.chars().take(MAX_NAME).collect()),
                Err(error) => TokenState::Unknown(format!("cannot read its answer: {error}")),
            },
            Ok((StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _)) => TokenState::Refused,
            Ok((status, _)) => TokenState::Unknown(format!("it answered with status {status}")),
            Err(why) => TokenState::Unknown(why),
        })
    }

    /// Whether the model's config can be read, which is the first thing that a start reads.
    async fn model(&self) -> Option<ModelState> {
        let model = self.question.model.as_deref()?;
        let url = format!("{}/{model}/resolve/{}/config.json", self.endpoint(), self.revision());
        let sent = self.request(self.client.head(url)).send().await;
        Some(match sent.map(|answer| answer.status()) {
            Ok(status) if status.is_success() || status.is_redirection() => ModelState::Readable,
            Ok(StatusCode::NOT_FOUND) => ModelState::Missing,
            Ok(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => ModelState::Forbidden,
            Ok(status) => ModelState::Unknown(format!("it answered with status {status}")),
            Err(error) => ModelState::Unknown(why(&error)),
        })
    }

    /// Bytes of the weights, of the first format that the model has; `None` if the Hub does not say.
    async fn model_bytes(&self) -> Option<u64> {
        let model = self.question.model.as_deref()?;
        let revision = self.revision();
        let url = format!("{}/api/models/{model}/revision/{revision}?blobs=true", self.endpoint());
        let (status, body) = self.get(&url).await.ok()?;
        let listing: Listing =
            serde_json::from_slice(&body).ok().filter(|_| status.is_success())?;
        let sum = |ending: &str| {
            let of = listing.siblings.iter().filter(|file| file.rfilename.ends_with(ending));
            of.filter_map(|file| file.size).fold(0, u64::saturating_add)
        };
        WEIGHTS.into_iter().map(sum).find(|bytes| *bytes > 0)
    }

    fn revision(&self) -> &str {
        self.question.hub.revision.as_deref().unwrap_or("main")
    }

    fn request(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.question.hub.token {
            Some(token) => request.bearer_auth(token.reveal()),
            None => request,
        }
    }

    async fn get(&self, url: &str) -> Result<(StatusCode, Vec<u8>), String> {
        let answer = self.request(self.client.get(url)).send().await;
        let answer = answer.map_err(|error| why(&error))?;
        Ok((answer.status(), body(answer).await?))
    }
}

/// How many seconds our clock is ahead of the one that an answer names, which was asked for and came at
/// these times of ours; `None` if it names none of its own.
fn ahead(headers: &header::HeaderMap, sent: f64, received: f64) -> Option<f64> {
    // Of a cache, which keeps the date of an earlier answer.
    if headers.contains_key(header::AGE) {
        return None;
    }
    let date = headers.get(header::DATE).and_then(|date| date.to_str().ok())?;
    let date = httpdate::parse_http_date(date.trim()).ok()?;
    // A date is cut to whole seconds.
    Some(sent.midpoint(received) - (unix_seconds(date) + 0.5))
}

async fn body(answer: Response) -> Result<Vec<u8>, String> {
    let (mut body, mut pieces) = (Vec::new(), answer.bytes_stream());
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| why(&error))?;
        if body.len() + piece.len() > MAX_ANSWER_BYTES {
            return Err(format!("its answer has more than {MAX_ANSWER_BYTES} bytes"));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

fn why(error: &reqwest::Error) -> String {
    match error.is_timeout() {
        true => "no answer in time".to_owned(),
        false => root_cause(error),
    }
}

fn now() -> f64 {
    unix_seconds(SystemTime::now())
}

fn unix_seconds(time: SystemTime) -> f64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use shared::config::{HubConfig, Secret};

    use super::*;
    use crate::http::stand_in::{StandIn, answer, closed_port};

    /// No answer here takes that long; nothing is asserted about it.
    const LONG: Patience =
        Patience { request: Duration::from_secs(120), round_trip: Duration::from_secs(120) };
    const DATE: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
    const DATE_S: f64 = 784_111_777.0;

    /// An answer with this date and header.
    fn dated(date: &str, header: &str) -> Option<Vec<u8>> {
        let head = format!("HTTP/1.1 200 OK\r\nDate: {date}\r\n{header}\r\n");
        Some(format!("{head}Connection: close\r\nContent-Length: 0\r\n\r\n").into())
    }

    /// Asks a Hub that answers each path as `status` says.
    fn asked(
        token: Option<&str>,
        status: impl Fn(&str) -> Option<Vec<u8>> + Send + Sync + 'static,
    ) -> Result<HubFacts, String> {
        asked_within(token, status, LONG)
    }

    fn asked_within(
        token: Option<&str>,
        status: impl Fn(&str) -> Option<Vec<u8>> + Send + Sync + 'static,
        patience: Patience,
    ) -> Result<HubFacts, String> {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let hub = runtime.block_on(StandIn::start(move |_, path| status(path)));
        let config = HubConfig {
            endpoint: Some(format!("{}/", hub.url)),
            token: token.map(Secret::new),
            ..HubConfig::default()
        };
        let question = HubQuestion { hub: config, model: Some("org/name".to_owned()) };
        observe_within(&question, patience)
    }

    #[test]
    fn a_hub_that_knows_token_and_model_tells_them_its_clock_and_the_size() {
        let before = now();
        let facts = asked(Some("hf_good"), |path| {
            match path {
                "/api/whoami-v2" => answer("200 OK", br#"{"name": "ada", "more": [1]}"#),
                "/api/models/org/name/revision/main?blobs=true" => answer(
                    "200 OK",
                    br#"{"siblings": [{"rfilename": "a.safetensors", "size": 5}, {"rfilename": "b.bin", "size": 9},
                        {"rfilename": "c.safetensors", "size": 7}, {"rfilename": "README.md"}]}"#,
                ),
                "/" => dated(DATE, "Server: a"),
                "/org/name/resolve/main/config.json" => answer("200 OK", b""),
                _ => answer("404 Not Found", b""),
            }
        });
        let facts = facts.unwrap();
        assert_eq!(facts.token, Some(TokenState::Valid("ada".to_owned())));
        assert_eq!((facts.model, facts.model_bytes), (Some(ModelState::Readable), Some(12)));
        let possible = before - DATE_S - 0.5..=now() - DATE_S - 0.5;
        let ahead = facts.clock_ahead_s.unwrap();
        assert!(possible.contains(&ahead), "{ahead}");
    }

    #[test]
    fn only_a_prompt_second_answer_of_the_hub_itself_tells_the_time() {
        // The answers to what is asked for the clock, in this order.
        let clock = |answers: [Option<Vec<u8>>; 2], patience| {
            let count = AtomicUsize::new(0);
            let hub = move |path: &str| match path {
                "/" => answers[count.fetch_add(1, Ordering::Relaxed)].clone(),
                _ => answer("404 Not Found", b""),
            };
            asked_within(None, hub, patience).unwrap().clock_ahead_s
        };
        let other_date = dated("Mon, 07 Nov 1994 08:49:37 GMT", "Server: a");
        let ahead = clock([other_date, dated(DATE, "Server: a")], LONG).unwrap();
        let error = now() - DATE_S - ahead;
        assert!(error.abs() < 43_200.0, "that of the first answer, {error} s");
        assert_eq!(clock([dated(DATE, "Server: a"), dated(DATE, "Age: 7")], LONG), None);
        let hasty = Patience { round_trip: Duration::from_millis(1), ..LONG };
        assert_eq!(clock([dated(DATE, "Server: a"), None], hasty), None, "no second answer");
    }

    #[test]
    fn the_middle_of_a_round_trip_is_compared_with_the_middle_of_a_second() {
        let dated = |date: &'static str, name: header::HeaderName| {
            let fields = [(header::DATE, date), (name, "7")];
            let fields =
                fields.map(|(name, value)| (name, header::HeaderValue::from_static(value)));
            header::HeaderMap::from_iter(fields)
        };
        let headers = |name| dated(DATE, name);
        let [sent, received] = [DATE_S + 9.0, DATE_S + 10.0];
        assert_eq!(ahead(&headers(header::SERVER), sent, received), Some(9.0));
        assert_eq!(ahead(&headers(header::AGE), sent, received), None);
        assert_eq!(ahead(&header::HeaderMap::new(), sent, received), None);
        for bad in [
            "",
            "Sun, 06 Nov 1994",
            "Sun, 06 Nov 1994 08:49:37 CET",
            "Sun, 06 Brumaire 1994 08:49:37 GMT",
            "Sun, -6 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 99999999999999999999 08:49:37 GMT",
            "Sun, 06 Nov 1994 25:00:00 GMT",
        ] {
            assert_eq!(ahead(&dated(bad, header::SERVER), sent, received), None, "{bad}");
        }
    }

    #[test]
    fn refusals_are_told_apart_and_nonsense_is_no_answer() {
        for (status, token, model) in [
            ("401 Unauthorized", TokenState::Refused, ModelState::Forbidden),
            ("403 Forbidden", TokenState::Refused, ModelState::Forbidden),
            (
                "404 Not Found",
                TokenState::Unknown("it answered with status 404 Not Found".into()),
                ModelState::Missing,
            ),
        ] {
            let facts = asked(Some("hf_bad"), move |_| answer(status, b""));
            let facts = facts.unwrap();
            assert_eq!((facts.token, facts.model), (Some(token), Some(model)), "{status}");
            assert_eq!(facts.model_bytes, None);
        }
        let facts = asked(None, |_| answer("200 OK", b"<html>"));
        let facts = facts.unwrap();
        assert_eq!((facts.token, facts.model_bytes), (None, None), "no token, no question");
        let endless = vec![b' '; 2 * MAX_ANSWER_BYTES];
        let facts = asked(Some("hf_x"), move |_| answer("200 OK", &endless));
        assert!(matches!(facts.unwrap().token, Some(TokenState::Unknown(_))));
    }

    #[test]
    fn a_hub_that_is_down_is_an_error() {
        let (_closed, url) = closed_port();
        let hub = HubConfig { endpoint: Some(url), ..HubConfig::default() };
        let question = HubQuestion { hub, model: None };
        assert!(observe(&question).unwrap_err().to_lowercase().contains("refused"));
    }
}
