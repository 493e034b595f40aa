//! HTTP for metrics: a handful of short answers to `GET`. Whoever connects may be hostile: bounded
//! are connections, those of one address, header bytes, headers, the time for a request's head and for
//! all of a connection. Bodies are not read. A connection has one request.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use p2p::task;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::debug;

use super::text::Pages;

/// Connections at once; more wait in the kernel.
pub(crate) const MAX_CONNECTIONS: usize = 32;
/// Connections at once of one address; more are closed. So one host alone cannot take all.
pub(crate) const MAX_PER_ADDRESS: usize = 8;
/// Bytes of a request's head, and of what is buffered of a connection.
pub(crate) const MAX_HEAD_BYTES: usize = 8 << 10;
/// Headers of a request.
const MAX_HEADERS: usize = 64;
/// Time for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for all of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(15);
/// Pause after a connection could not be taken, for lack of descriptors perhaps.
const PAUSE: Duration = Duration::from_millis(200);

/// Serves for ever.
pub(super) async fn serve(listener: TcpListener, pages: Arc<Pages>) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let addresses = Arc::new(Addresses::default());
    loop {
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                debug!(%error, "cannot accept a connection for metrics");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let Some(counted) = addresses.count(peer.ip()) else {
            debug!(%peer, "too many connections for metrics from one address");
            continue;
        };
        let pages = pages.clone();
        task::spawn(async move {
            let _held = (permit, counted);
            if timeout(CONNECTION_TIMEOUT, connection(stream, pages)).await.is_err() {
                debug!("connection for metrics took too long");
            }
        });
    }
}

/// Open connections by address.
#[derive(Debug, Default)]
struct Addresses(Mutex<HashMap<IpAddr, usize>>);

/// An open connection of an address; counted until it is dropped.
#[derive(Debug)]
struct Counted {
    addresses: Arc<Addresses>,
    address: IpAddr,
}

impl Addresses {
    /// Counts a connection; `None` if its address has [`MAX_PER_ADDRESS`] already.
    fn count(self: &Arc<Self>, address: IpAddr) -> Option<Counted> {
        let address = network_of(address);
        let mut counts = self.0.lock();
        let count = counts.entry(address).or_insert(0);
        if *count >= MAX_PER_ADDRESS {
            return None;
        }
        *count += 1;
        Some(Counted { addresses: self.clone(), address })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut counts = self.addresses.0.lock();
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

/// The address, or for IPv6 its network of 64 bits: a host has all addresses of it.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

async fn connection(stream: TcpStream, pages: Arc<Pages>) {
    let answering = service_fn(move |request: Request<Incoming>| {
        let pages = pages.clone();
        async move { Ok::<_, Infallible>(answer(&request, &pages)) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .keep_alive(false)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), answering)
        .await;
    if let Err(error) = served {
        debug!(%error, "connection for metrics failed");
    }
}

fn answer<B>(request: &Request<B>, pages: &Pages) -> Response<Full<Bytes>> {
    const PLAIN: &str = "text/plain; charset=utf-8";
    let page = |status, body: String| (status, PLAIN, body);
    let is_read = request.method() == Method::GET || request.method() == Method::HEAD;
    let (status, kind, body) = match request.uri().path() {
        _ if !is_read => page(StatusCode::METHOD_NOT_ALLOWED, "use GET\n".to_owned()),
        "/metrics" => match pages.metrics() {
            Ok(text) => (StatusCode::OK, super::text::CONTENT_TYPE, text),
            Err(_) => page(StatusCode::INTERNAL_SERVER_ERROR, "cannot write metrics\n".to_owned()),
        },
        "/livez" => page(StatusCode::OK, "alive\n".to_owned()),
        "/readyz" => match pages.ready() {
            Ok(()) => page(StatusCode::OK, "ready\n".to_owned()),
            Err(why) => page(StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")),
        },
        _ => page(StatusCode::NOT_FOUND, "try /metrics, /livez or /readyz\n".to_owned()),
    };
    let response = Response::builder()
        .status(status)
        .header(CONTENT_TYPE, kind)
        .header(CACHE_CONTROL, "no-store");
    let response = match is_read {
        true => response,
        false => response.header(ALLOW, "GET, HEAD"),
    };
    // The parts above are constants that make a response.
    response.body(Full::new(Bytes::from(body))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::watch;

    use super::*;
    use crate::telemetry::Telemetry;

    #[test]
    fn connections_are_counted_by_host_and_forgotten_when_they_end() {
        let addresses = Arc::new(Addresses::default());
        let count = |address: &str| addresses.count(address.parse().unwrap());
        let mut held: Vec<_> = (0..MAX_PER_ADDRESS).filter_map(|_| count("192.0.2.1")).collect();
        assert_eq!(held.len(), MAX_PER_ADDRESS);
        assert!(count("192.0.2.1").is_none() && count("::ffff:192.0.2.1").is_none());
        held.pop();
        held.extend(count("192.0.2.1"));
        held.extend((0..MAX_PER_ADDRESS as u32).filter_map(|n| count(&format!("2001:db8::{n:x}"))));
        assert_eq!(held.len(), 2 * MAX_PER_ADDRESS);
        assert!(count("2001:db8::ffff").is_none(), "another address of the same network");
        assert!(count("2001:db8:0:1::1").is_some());
        drop(held);
        assert!(addresses.0.lock().is_empty());
    }

    #[tokio::test]
    async fn silent_connections_of_one_host_leave_room_for_others() {
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (_sender, service) = watch::channel(None);
        let pages = Arc::new(Pages::new(Arc::new(Telemetry::default()), service));
        tokio::spawn(serve(listener, pages));
        // No silent connection is closed for its silence.
        let _clock = crate::clock::stop();
        let mut silent = Vec::new();
        for _ in 0..2 * MAX_CONNECTIONS {
            silent.push(TcpStream::connect(("127.0.0.1", port)).await.unwrap());
        }
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        let mut other = socket.connect(([127, 0, 0, 1], port).into()).await.unwrap();
        other.write_all(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        other.read_to_string(&mut answer).await.unwrap();
        assert!(answer.contains("alive"), "{answer}");
    }
}
