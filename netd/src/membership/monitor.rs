//! The last check before a server of the public swarm goes ONLINE: a monitor says whether it can
//! reach it, directly or through a relay. Source: `validate_reachability` in
//! `petals/server/reachability.py`.
//!
//! The monitor is somebody else's service: its answer is bounded in bytes and time, what it says is
//! shown without control characters and cut, and when it fails the server goes on without it.

use std::net::IpAddr;
use std::time::Duration;

use reqwest::Client;
use serde::Deserialize;
use shared::sanitize_text::escaped;
use tracing::{info, warn};

use crate::http;

/// One request (Petals).
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
/// An answer has two sentences.
const MAX_ANSWER_BYTES: usize = 64 << 10;
/// Characters of its message that are shown.
const MAX_MESSAGE: usize = 2000;

/// How patiently the monitor is asked.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Requests.
    pub attempts: u32,
    /// Pause between two.
    pub pause: Duration,
}

impl Patience {
    /// Petals': a server behind a NAT may need minutes to find a relay.
    pub const PETALS: Patience = Patience { attempts: 29, pause: Duration::from_secs(15) };
}

/// An answer of the monitor.
#[derive(Debug, Deserialize)]
struct MonitorAnswer {
    success: bool,
    #[serde(default)]
    message: String,
    #[serde(default)]
    your_ip: String,
}

/// Asks the monitor at `url` until it can reach `peer_id`.
///
/// # Errors
/// What the operator has to change, when the monitor still cannot reach this server after all
/// attempts.
pub async fn validate(url: &str, peer_id: &str, patience: Patience) -> Result<(), String> {
    let url = url.trim_end_matches('/');
    let skip = |error: &dyn std::fmt::Display| {
        warn!("Skipping reachability check because {url} is down: {error}");
    };
    let client = match http::client(REQUEST_LIMIT) {
        Ok(client) => client,
        Err(error) => {
            skip(&error);
            return Ok(());
        }
    };
    let mut last = None;
    for attempt in 0..patience.attempts {
        if attempt > 0 {
            tokio::time::sleep(patience.pause).await;
        }
        let answer = match ask(&client, url, peer_id).await {
            Ok(answer) => answer,
            Err(error) => {
                skip(&error);
                return Ok(());
            }
        };
        if answer.success {
            info!("Server is reachable from the Internet. It will appear at {url} soon");
            return Ok(());
        }
        if attempt == 0 {
            info!(
                "Detected a NAT or a firewall, connecting to libp2p relays. This takes a few minutes"
            );
        }
        last = Some(answer);
    }
    match last {
        Some(answer) => Err(advice(&answer)),
        None => Ok(()),
    }
}

async fn ask(client: &Client, url: &str, peer_id: &str) -> Result<MonitorAnswer, String> {
    let url = format!("{url}/api/v1/is_reachable/{peer_id}");
    let body = http::get(client, &url, MAX_ANSWER_BYTES).await;
    let body = body.map_err(|error| error.to_string())?;
    serde_json::from_slice(&body).map_err(|error| format!("cannot read its answer: {error}"))
}

/// The text of Petals.
fn advice(answer: &MonitorAnswer) -> String {
    let message: String = answer.message.chars().take(MAX_MESSAGE).collect();
    let message = escaped(&message);
    // What a stranger says goes into a command line only if it is an address.
    let ip = match answer.your_ip.parse::<IpAddr>() {
        Ok(ip) => ip.to_string(),
        Err(_) => "YOUR_IP".to_owned(),
    };
    format!(
        "Server has not become reachable from the Internet: {message}. You need to fix your port forwarding and/or firewall \
         settings. How to do that: 1. Choose a specific port for the server, for example, 31337. 2. Ensure that this port is \
         accessible from the Internet and not blocked by your firewall. 3. Add these arguments to explicitly announce your IP \
         address and port to other peers: sepal serve ... --public_ip {ip} --port 31337. Or start without this check: \
         --skip_reachability_check"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::stand_in::{StandIn, answer, closed_port};

    const QUICK: Patience = Patience { attempts: 3, pause: Duration::from_millis(1) };

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let limit = Duration::from_secs(60);
        runtime.block_on(async { tokio::time::timeout(limit, future).await.expect("hangs") })
    }

    #[test]
    fn a_server_that_becomes_reachable_goes_on() {
        block_on(async {
            let monitor = StandIn::start(|number, _| match number {
                2 => answer("200 OK", br#"{"success": true, "message": "", "your_ip": "1.2.3.4"}"#),
                _ => answer(
                    "200 OK",
                    br#"{"success": false, "message": "no", "your_ip": "1.2.3.4"}"#,
                ),
            })
            .await;
            assert_eq!(validate(&monitor.url, "QmMe", QUICK).await, Ok(()));
            let asked: Vec<String> = monitor.requests().into_iter().map(|(line, _)| line).collect();
            assert_eq!(asked, ["GET /api/v1/is_reachable/QmMe"; 3]);
        });
    }

    #[test]
    fn one_that_does_not_ends_with_the_monitors_words_and_petals_advice() {
        block_on(async {
            let monitor = StandIn::start(|_, _| {
                let hostile = format!(
                    r#"{{"success": false, "message": "dial \u001b[31mfailed{}", "your_ip": "1.2.3.4; rm -rf"}}"#,
                    "!".repeat(9000)
                );
                answer("200 OK", hostile.as_bytes())
            })
            .await;
            let message = validate(&monitor.url, "QmMe", QUICK).await.unwrap_err();
            assert_eq!(monitor.requests().len(), 3);
            assert!(
                message.starts_with(
                    r"Server has not become reachable from the Internet: dial \u{1b}[31mfailed!"
                ),
                "{message}"
            );
            assert!(message.contains("--public_ip YOUR_IP --port 31337") && message.len() < 4000);
            let polite =
                MonitorAnswer { success: false, message: "no".into(), your_ip: "1.2.3.4".into() };
            assert!(advice(&polite).contains("--public_ip 1.2.3.4 --port"));
        });
    }

    #[test]
    fn a_monitor_that_is_down_slow_or_talks_nonsense_stops_nobody() {
        block_on(async {
            let endless = vec![b' '; 2 * MAX_ANSWER_BYTES];
            let answers = [
                answer("503 Service Unavailable", b""),
                answer("200 OK", b"<html>"),
                answer("200 OK", br#"{"message": "no success"}"#),
                answer("200 OK", br#"{"success": 1}"#),
                answer("200 OK", &endless),
                answer("200 OK", "[".repeat(60_000).as_bytes()),
                Some(
                    b"HTTP/1.1 301 Moved\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n".to_vec(),
                ),
                Some(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"success\": fal".to_vec()),
                Some(b"\x00\x01\x02".to_vec()),
                Some(Vec::new()),
            ];
            for hostile in answers {
                let shown =
                    hostile.clone().map(|bytes| bytes.iter().take(60).copied().collect::<Vec<_>>());
                let monitor = StandIn::start(move |_, _| hostile.clone()).await;
                let result = validate(&monitor.url, "QmMe", QUICK).await;
                assert_eq!(result, Ok(()), "{shown:?}");
                assert!(monitor.requests().len() <= 4, "asked once, and where it was sent");
            }
            let (_closed, url) = closed_port();
            assert_eq!(validate(&url, "QmMe", QUICK).await, Ok(()));
            assert_eq!(validate("no url", "QmMe", QUICK).await, Ok(()));
            // Says nothing: the bound of a request, shortened.
            let silent = StandIn::start(|_, _| None).await;
            let client = http::client(Duration::from_millis(50)).unwrap();
            assert_eq!(ask(&client, &silent.url, "QmMe").await.unwrap_err(), "no answer in time");
        });
    }
}
