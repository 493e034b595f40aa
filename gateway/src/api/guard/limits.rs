//! What a caller has left, in the headers that OpenAI's API has for it.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use crate::accounts::Left;

const REQUESTS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKENS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

/// All of them.
pub fn names() -> impl Iterator<Item = HeaderName> {
    REQUESTS.into_iter().chain(TOKENS)
}

/// Writes what is left of requests and of tokens into `headers`.
pub fn tell(headers: &mut HeaderMap, left: [Option<Left>; 2]) {
    for (names, left) in [REQUESTS, TOKENS].into_iter().zip(left) {
        let Some(Left { limit, remaining, reset }) = left else { continue };
        let values = [limit.to_string(), remaining.to_string(), written(reset)];
        for (name, value) in names.into_iter().zip(values) {
            headers.extend(HeaderValue::try_from(value).ok().map(|value| (name, value)));
        }
    }
}

/// A time as OpenAI writes it: `120ms`, `7s`, `6m0s`. Rounded up.
fn written(time: Duration) -> String {
    let ms = time.as_micros().div_ceil(1000);
    let seconds = ms.div_ceil(1000);
    match ms {
        0..1000 => format!("{ms}ms"),
        1000..=59_000 => format!("{seconds}s"),
        _ => format!("{}m{}s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_limited_has_its_three_headers() {
        let mut headers = HeaderMap::new();
        let left = Left { limit: 60, remaining: 7, reset: Duration::from_secs(53) };
        tell(&mut headers, [None, Some(left)]);
        let found = names().map(|name| headers.get(name).cloned());
        let found: Vec<_> =
            found.map(|value| value.map(|v| v.to_str().unwrap().to_owned())).collect();
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(found, [None, None, None, some("60"), some("7"), some("53s")]);
    }

    #[test]
    fn times_are_written_as_openai_does() {
        for (ms, text) in [
            (0, "0ms"),
            (120, "120ms"),
            (1000, "1s"),
            (1001, "2s"),
            (360_000, "6m0s"),
            (59_001, "1m0s"),
        ] {
            assert_eq!(written(Duration::from_millis(ms)), text);
        }
    }
}
