//! Requests to the Hub: what it says of a file before a byte of it is fetched (the commit that a revision
//! stands for, a name for the content, its length), and ranges of its bytes. Names become names of files
//! here, so that they are checked first.
//!
//! # Discrepancies
//! `huggingface_hub` follows redirects to other hosts, which know neither commit nor sum, and joins what a
//! server names into paths as it is.

use std::net::IpAddr;
use std::ops::Range;
use std::time::Duration;

use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, ETAG, HeaderMap, RANGE, RETRY_AFTER,
};
use reqwest::redirect::{Action, Attempt, Policy};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode, Url};
use shared::config::HubConfig;
use shared::error_chain::with_causes;

use super::Trouble;

/// Longest name of a commit or of a content; SHA-256 in hexadecimal.
const MAX_HASH_CHARS: usize = 64;
/// Most redirects within the Hub.
const MAX_REDIRECTS: usize = 10;
/// Most characters that an error quotes of an answer.
const MAX_QUOTED_CHARS: usize = 80;

/// What is known of one file at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Described {
    /// The commit, hexadecimal.
    pub(super) commit: String,
    /// Names the content, hexadecimal: its SHA-256 where it has 64 digits.
    pub(super) etag: String,
    pub(super) bytes: u64,
}

/// Asks the Hub for the heads of files, and for their bytes.
pub(super) struct Asker {
    heads: Client,
    /// Follows redirects, but leaves encryption on none of them.
    downloads: Client,
    endpoint: Url,
    token: Option<String>,
}

impl Asker {
    /// Asks at `endpoint`.
    ///
    /// # Errors
    /// One sentence, for an address that cannot be used.
    pub(super) fn new(endpoint: &str, config: &HubConfig) -> Result<Asker, String> {
        let endpoint = checked_endpoint(endpoint, config.is_plain_http_allowed)?;
        let heads = client(&endpoint, Policy::custom(within_one_host))?;
        let downloads = client(&endpoint, Policy::limited(MAX_REDIRECTS))?;
        let token = config.token.as_ref().map(|token| token.reveal().to_owned());
        Ok(Asker { heads, downloads, endpoint, token })
    }

    /// What the Hub says of `file` of the model `name` at `revision`.
    pub(super) async fn describe(
        &self,
        name: &str,
        revision: &str,
        file: &str,
    ) -> Result<Described, Trouble> {
        let url = self.url(name, revision, file)?;
        let answer = self.send(self.heads.request(Method::HEAD, url)).await?;
        described(answer.headers()).map_err(|reason| {
            Trouble::Answer(format!(
                "the Hub's answer for {file} of {name} cannot be used: {reason}"
            ))
        })
    }

    /// The answer with the bytes `range` of `file`; it may end early, or have more.
    pub(super) async fn bytes(
        &self,
        name: &str,
        commit: &str,
        file: &str,
        range: Range<u64>,
    ) -> Result<Response, Trouble> {
        let url = self.url(name, commit, file)?;
        let wanted = format!("bytes={}-{}", range.start, range.end - 1);
        let answer = self.send(self.downloads.get(url).header(RANGE, wanted)).await?;
        // A Hub that knows no ranges sends the file from its start.
        let is_whole = answer.status() != StatusCode::PARTIAL_CONTENT;
        let is_longer = answer.content_length().is_some_and(|bytes| bytes > range.end);
        if is_whole && (range.start > 0 || is_longer) {
            return Err(Trouble::NoRanges);
        }
        Ok(answer)
    }

    fn url(&self, name: &str, revision: &str, file: &str) -> Result<Url, Trouble> {
        let mut url = self.endpoint.clone();
        let Ok(mut path) = url.path_segments_mut() else {
            return Err(Trouble::Answer(format!("{url} has no paths")));
        };
        path.pop_if_empty().extend(name.split('/')).extend(["resolve", revision]);
        path.extend(file.split('/'));
        drop(path);
        Ok(url)
    }

    /// Sends a request with the token; an answer is a success, or sends to another host.
    async fn send(&self, request: RequestBuilder) -> Result<Response, Trouble> {
        let mut request = request.header(ACCEPT_ENCODING, "identity");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let answer = request.send().await.map_err(|error| Trouble::transit(&error))?;
        let status = answer.status();
        let is_busy = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
        if status.is_server_error() || is_busy {
            let seconds =
                answer.headers().get(RETRY_AFTER).and_then(|v| v.to_str().ok()?.parse().ok());
            let retry_after = seconds.map(Duration::from_secs);
            return Err(Trouble::Transit { why: format!("the Hub answers {status}"), retry_after });
        }
        match status.is_success() || status.is_redirection() {
            true => Ok(answer),
            false => Err(Trouble::Refused(status)),
        }
    }
}

fn client(endpoint: &Url, redirects: Policy) -> Result<Client, String> {
    // One provider for all of TLS; a second call changes nothing.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder()
        .user_agent(concat!("sepal/", env!("CARGO_PKG_VERSION")))
        .https_only(endpoint.scheme() == "https")
        .redirect(redirects)
        .build()
        .map_err(|error| format!("cannot start downloads: {}", with_causes(&error)))
}

/// Follows a redirect to another path of the same host; the answer that sends to another host is the one
/// that knows the file.
fn within_one_host(attempt: Attempt<'_>) -> Action {
    let is_same =
        attempt.previous().last().is_some_and(|last| last.origin() == attempt.url().origin());
    match (is_same, attempt.previous().len() > MAX_REDIRECTS) {
        (true, true) => attempt.error("too many redirects"),
        (true, false) => attempt.follow(),
        (false, _) => attempt.stop(),
    }
}

/// An address of a Hub that may be asked.
fn checked_endpoint(endpoint: &str, is_plain_allowed: bool) -> Result<Url, String> {
    let shown = || endpoint.chars().take(MAX_QUOTED_CHARS).collect::<String>();
    let url = Url::parse(endpoint).map_err(|error| {
        format!(
            "HF_ENDPOINT {:?} is no address ({error}); expected one such as https://huggingface.co",
            shown()
        )
    })?;
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let is_here = host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
    match url.scheme() {
        "https" => Ok(url),
        "http" if is_here || is_plain_allowed => Ok(url),
        "http" => Err(format!(
            "HF_ENDPOINT {:?} is not encrypted: whoever is on the way could change what is downloaded; give an \
             https:// address, or allow it with --allow_plain_http",
            shown()
        )),
        other => Err(format!("HF_ENDPOINT {:?} has the scheme {other:?}; expected https", shown())),
    }
}

/// Reads the headers of an answer.
fn described(headers: &HeaderMap) -> Result<Described, String> {
    let text = |names: &[&str]| {
        names.iter().find_map(|name| headers.get(*name)).map(|value| value.to_str().unwrap_or("?"))
    };
    let hash = |what: &str, value: Option<&str>| {
        let value = value.ok_or_else(|| format!("it names no {what}"))?;
        let digits = value.len() <= MAX_HASH_CHARS && value.chars().all(|c| c.is_ascii_hexdigit());
        match digits && !value.is_empty() {
            true => Ok(value.to_owned()),
            false => Err(format!(
                "it names {:?} as {what}; expected at most {MAX_HASH_CHARS} hexadecimal digits",
                value.chars().take(MAX_QUOTED_CHARS).collect::<String>()
            )),
        }
    };
    let etag = text(&["x-linked-etag", ETAG.as_str()]);
    let etag = etag.map(|etag| etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"'));
    let bytes = text(&["x-linked-size", CONTENT_LENGTH.as_str()]);
    Ok(Described {
        commit: hash("commit (X-Repo-Commit)", text(&["x-repo-commit"]))?,
        etag: hash("content (ETag)", etag)?,
        bytes: bytes
            .and_then(|bytes| bytes.parse().ok())
            .filter(|bytes| i64::try_from(*bytes).is_ok())
            .ok_or_else(|| "it does not say how long the file is".to_owned())?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(given: &[(&'static str, &str)]) -> HeaderMap {
        given.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn only_hexadecimal_names_are_taken() {
        let good = [("x-repo-commit", "0aF"), ("etag", "W/\"12\""), ("content-length", "7")];
        let expected = Described { commit: "0aF".into(), etag: "12".into(), bytes: 7 };
        assert_eq!(described(&headers(&good)).unwrap(), expected);
        let linked =
            [good.as_slice(), &[("x-linked-etag", "\"ab\""), ("x-linked-size", "9")]].concat();
        assert_eq!(described(&headers(&linked)).unwrap().etag, "ab");
        let long = "a".repeat(65);
        let cases = [
            ("x-repo-commit", "../../etc", "../../etc"),
            ("x-repo-commit", "", "commit"),
            ("x-repo-commit", long.as_str(), "64 hexadecimal"),
            ("etag", "\"../../../.bashrc\"", ".bashrc"),
            ("etag", "\"a/b\"", "a/b"),
            ("content-length", "-1", "how long"),
            ("content-length", "18446744073709551615", "how long"),
        ];
        for (name, value, part) in cases {
            let mut given = headers(&good);
            given.insert(name, value.parse().unwrap());
            let error = described(&given).unwrap_err();
            assert!(error.contains(part), "{name} {value}: {error}");
        }
        for missing in ["x-repo-commit", "etag", "content-length"] {
            let mut given = headers(&good);
            given.remove(missing);
            assert!(described(&given).is_err(), "{missing}");
        }
    }

    #[test]
    fn plain_http_needs_loopback_or_a_flag() {
        for good in ["https://a.b", "http://127.0.0.1:1", "http://[::1]:2", "http://localhost"] {
            assert!(checked_endpoint(good, false).is_ok(), "{good}");
        }
        assert!(checked_endpoint("http://mirror.example", true).is_ok());
        let refused = checked_endpoint("http://mirror.example", false).unwrap_err();
        assert!(
            refused.contains("--allow_plain_http") && refused.contains("mirror.example"),
            "{refused}"
        );
        for bad in ["ftp://a.b", "a.b", "", "file:///etc", "http://localhost.example"] {
            assert!(checked_endpoint(bad, false).is_err(), "{bad}");
        }
    }
}
