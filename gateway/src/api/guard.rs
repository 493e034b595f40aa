//! Who may call, and how often.

mod caller_address;
mod limits;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, HeaderName, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use ipnet::IpNet;
use sha2::{Digest, Sha256};

use super::ApiState;
use super::error::ApiError;
use crate::accounts::{CallerAccount, CallerAllowance, CallerKey, CallerRates, KeyHash};
use crate::metrics::{KeyUsage, Metrics};

/// How long the body of a request may take.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Shortest key: shorter ones can be guessed.
const MIN_KEY_CHARS: usize = 16;
/// Keys that `/metrics` tells apart, the first ones of the file.
const MAX_NAMED_KEYS: usize = 1000;

/// Why the keys cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the file of API keys {path}: {reason}")]
pub struct KeysError {
    path: PathBuf,
    reason: String,
}

/// What callers are held to.
#[derive(Clone, Copy, Debug, Default)]
pub struct GuardConfig<'a> {
    /// File of keys; without one everybody may call.
    pub keys: Option<&'a Path>,
    pub allowance: CallerAllowance,
    /// Proxies whose word on the caller's address is taken.
    pub trusted_proxies: &'a [IpNet],
}

/// Keys and rates.
#[derive(Debug)]
pub struct Guard {
    /// The usage of each key, by its SHA-256: looking one up tells nothing of the others.
    keys: Option<HashMap<KeyHash, KeyUsage>>,
    rates: Arc<CallerRates>,
    trusted_proxies: Vec<IpNet>,
}

impl Guard {
    /// Reads the keys, one a line; empty lines and those that begin with `#` do not count.
    ///
    /// # Errors
    /// [`KeysError`]: the file, no key in it, or one that is too short.
    pub fn new(config: GuardConfig<'_>, metrics: &Metrics) -> Result<Guard, KeysError> {
        let keys = config.keys.map(read_keys).transpose()?;
        let usage = |(index, hash): (usize, KeyHash)| {
            let name = format!("{:02x}{:02x}{:02x}{:02x}", hash[0], hash[1], hash[2], hash[3]);
            let name = if index < MAX_NAMED_KEYS { name } else { "others".to_owned() };
            (hash, metrics.key(name))
        };
        let keys = keys.map(|keys| keys.into_iter().enumerate().map(usage).collect());
        let trusted_proxies = config.trusted_proxies.to_vec();
        Ok(Guard { keys, rates: Arc::new(CallerRates::new(config.allowance)), trusted_proxies })
    }

    /// Who calls.
    fn account(&self, headers: &HeaderMap, peer: IpAddr) -> Result<CallerAccount, ApiError> {
        let (caller, usage) = match &self.keys {
            None => {
                let ip = caller_address::caller(headers, peer, &self.trusted_proxies);
                (CallerKey::Address(ip), None)
            }
            Some(keys) => {
                let hash: KeyHash = Sha256::digest(given_key(headers).unwrap_or_default()).into();
                let usage = keys.get(&hash).ok_or_else(ApiError::no_key)?;
                (CallerKey::Key(hash), Some(usage.clone()))
            }
        };
        Ok(CallerAccount::new(self.rates.clone(), caller, usage))
    }

    /// Lets a request in, or says why not.
    #[cfg(test)]
    fn admit(&self, headers: &HeaderMap, peer: IpAddr, now: Instant) -> Result<(), ApiError> {
        Ok(self.account(headers, peer)?.request(now)?)
    }
}

/// The key that a request comes with. Names of schemes have no case (RFC 9110, 11.1).
fn given_key(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = value.trim().split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// In the order of the file.
fn read_keys(path: &Path) -> Result<Vec<KeyHash>, KeysError> {
    let failed = |reason: String| KeysError { path: path.to_owned(), reason };
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let mut keys: Vec<KeyHash> = Vec::new();
    for (line, key) in (1..).zip(text.lines().map(str::trim)) {
        if key.is_empty() || key.starts_with('#') {
            continue;
        }
        if key.chars().count() < MIN_KEY_CHARS {
            return Err(failed(format!(
                "line {line}: a key has at least {MIN_KEY_CHARS} characters"
            )));
        }
        keys.push(Sha256::digest(key).into());
    }
    match keys.is_empty() {
        true => Err(failed("it has no key; write one a line".to_owned())),
        false => Ok(keys),
    }
}

/// Headers that tell a caller how often it may call.
pub(super) fn told() -> impl Iterator<Item = HeaderName> {
    limits::names().chain([header::RETRY_AFTER])
}

/// Lets requests in that the guard lets in.
pub(super) async fn admit(
    State(shared): State<ApiState>,
    ConnectInfo(address): ConnectInfo<SocketAddr>,
    request: Request,
    next: Next,
) -> Response {
    let account = match shared.guard.account(request.headers(), address.ip()) {
        Ok(account) => account,
        Err(error) => return refused(&shared, error),
    };
    let whole = match account.request(Instant::now()) {
        Ok(()) => with_whole_body(request, shared.max_body_bytes).await,
        Err(refusal) => Err(refusal.into()),
    };
    let mut response = match whole {
        Ok(request) => account.answering(next.run(request)).await,
        Err(error) => refused(&shared, error),
    };
    limits::tell(response.headers_mut(), account.left());
    response
}

fn refused(shared: &ApiState, error: ApiError) -> Response {
    shared.engine.metrics.answered("refused", error.status().as_u16());
    error.into_response()
}

/// The request after all of its body has come: at most `max_bytes`, within [`BODY_TIMEOUT`].
async fn with_whole_body(request: Request, max_bytes: usize) -> Result<Request, ApiError> {
    let (head, body) = request.into_parts();
    let reading = tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, max_bytes).collect());
    let read = reading.await.map_err(|_| ApiError::too_slow(BODY_TIMEOUT))?;
    let body = read.map_err(|error| match error.is::<LengthLimitError>() {
        true => ApiError::too_large(max_bytes),
        false => ApiError::bad(format!("cannot read the body: {error}"), None),
    })?;
    Ok(Request::from_parts(head, Body::from(body.to_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounts::MAX_CALLERS;
    use axum::http::HeaderValue;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn bearer(key: &str) -> HeaderMap {
        let value = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
        HeaderMap::from_iter([(header::AUTHORIZATION, value)])
    }

    fn keys(text: &str) -> Result<Guard, KeysError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, text).unwrap();
        let config = GuardConfig { keys: Some(&path), ..GuardConfig::default() };
        Guard::new(config, &Metrics::default())
    }

    fn limited(per_minute: u32, trusted_proxies: &[IpNet]) -> Guard {
        let allowance = CallerAllowance { requests: Some(per_minute), tokens: None };
        let config = GuardConfig { allowance, trusted_proxies, ..GuardConfig::default() };
        Guard::new(config, &Metrics::default()).unwrap()
    }

    #[test]
    fn the_name_of_the_scheme_has_no_case() {
        let guard = keys("0123456789abcdef\n").unwrap();
        let admit = |value: &str| {
            let value = HeaderValue::from_str(value).unwrap();
            let headers = HeaderMap::from_iter([(header::AUTHORIZATION, value)]);
            guard.admit(&headers, HERE, Instant::now()).is_ok()
        };
        for scheme in ["Bearer", "bearer", "BEARER", "bEaReR"] {
            assert!(admit(&format!("{scheme} 0123456789abcdef")), "{scheme}");
            assert!(admit(&format!("{scheme}   0123456789abcdef  ")), "{scheme}");
        }
        for wrong in ["0123456789abcdef", "Basic 0123456789abcdef", "Bearer0123456789abcdef"] {
            assert!(!admit(wrong), "{wrong}");
        }
    }

    #[test]
    fn callers_behind_a_trusted_proxy_have_rates_of_their_own() {
        let admit = |guard: &Guard, value: &'static str| {
            let value = HeaderValue::from_static(value);
            let name = axum::http::HeaderName::from_static("x-forwarded-for");
            guard.admit(&HeaderMap::from_iter([(name, value)]), HERE, Instant::now()).is_ok()
        };
        let guard = limited(1, &[HERE.into()]);
        assert!(admit(&guard, "1.2.3.4") && admit(&guard, "1.2.3.5"));
        assert!(!admit(&guard, "9.9.9.9, 1.2.3.4"));
        let alone = limited(1, &[]);
        assert!(admit(&alone, "1.2.3.4") && !admit(&alone, "1.2.3.5"));
    }

    #[test]
    fn only_keys_of_the_file_are_let_in() {
        let guard = keys("# of Ann\n0123456789abcdef\n\n  fedcba9876543210 \n").unwrap();
        let admit = |headers| guard.admit(&headers, HERE, Instant::now());
        assert!(admit(bearer("0123456789abcdef")).is_ok());
        assert!(admit(bearer("fedcba9876543210")).is_ok());
        for headers in [HeaderMap::new(), bearer(""), bearer("# of Ann"), bearer("0123456789abcde")]
        {
            assert_eq!(admit(headers).unwrap_err().status(), 401);
        }
    }

    #[test]
    fn files_without_keys_and_short_keys_are_refused() {
        assert!(keys("# none\n").unwrap_err().to_string().contains("no key"));
        assert!(keys("\nshort\n").unwrap_err().to_string().contains("line 2"));
        let keys = Some(Path::new("/nonexistent"));
        let config = GuardConfig { keys, ..GuardConfig::default() };
        assert!(Guard::new(config, &Metrics::default()).is_err());
    }

    #[test]
    fn a_caller_has_its_requests_of_a_minute_and_others_theirs() {
        let guard = limited(3, &[]);
        let now = Instant::now();
        let admit =
            |ip: IpAddr, at| guard.admit(&HeaderMap::new(), ip, now + Duration::from_secs(at));
        for _ in 0..3 {
            assert!(admit(HERE, 0).is_ok());
        }
        assert_eq!(admit(HERE, 0).unwrap_err().status(), 429);
        assert!(admit("10.0.0.1".parse().unwrap(), 0).is_ok());
        assert!(admit(HERE, 19).is_err());
        assert!(admit(HERE, 21).is_ok());
        assert!(admit(HERE, 22).is_err());
    }

    #[test]
    fn the_number_of_callers_is_bounded() {
        let guard = limited(1, &[]);
        let now = Instant::now();
        for number in 0..MAX_CALLERS as u32 + 50 {
            let ip = IpAddr::from(number.to_be_bytes());
            assert!(guard.admit(&HeaderMap::new(), ip, now).is_ok());
        }
        assert_eq!(guard.rates.len(), MAX_CALLERS);
    }
}
