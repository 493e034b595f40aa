//! A service on loopback for tests: answers each request with what it is told to, byte by byte if
//! need be.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// What a request gets: bytes as they are on the wire. `None` holds the connection open and says
/// nothing.
pub type Answer = Option<Vec<u8>>;

/// A running service.
pub struct StandIn {
    /// `http://127.0.0.1:PORT`.
    pub url: String,
    requests: Arc<Mutex<Vec<(String, usize)>>>,
}

impl StandIn {
    /// Answers the n-th request (from 0) with `answer(n, path)`.
    pub async fn start(answer: impl Fn(usize, &str) -> Answer + Send + Sync + 'static) -> StandIn {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (seen, answer) = (requests.clone(), Arc::new(answer));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, seen.clone(), answer.clone()));
            }
        });
        StandIn { url, requests }
    }

    /// Method and path of the requests so far, with the bytes of their bodies as they were sent.
    pub fn requests(&self) -> Vec<(String, usize)> {
        self.requests.lock().unwrap().clone()
    }
}

async fn serve(
    mut stream: TcpStream,
    seen: Arc<Mutex<Vec<(String, usize)>>>,
    answer: Arc<impl Fn(usize, &str) -> Answer>,
) -> Option<()> {
    let mut bytes = Vec::new();
    let end = loop {
        let mut piece = [0; 65536];
        match stream.read(&mut piece).await.ok()? {
            0 => return None,
            count => bytes.extend_from_slice(&piece[..count]),
        }
        let headers = bytes.windows(4).position(|four| four == b"\r\n\r\n");
        let Some(end) = headers.map(|at| at + 4) else {
            continue;
        };
        let is_post = bytes.starts_with(b"POST");
        if !is_post || bytes[end..].ends_with(b"0\r\n\r\n") {
            break end;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let line = head.lines().next()?;
    let line = line.trim_end_matches(" HTTP/1.1").to_owned();
    let number = {
        let mut seen = seen.lock().unwrap();
        seen.push((line.clone(), bytes.len() - end));
        seen.len() - 1
    };
    let path = line.split(' ').nth(1)?;
    match answer(number, path) {
        Some(answer) => {
            stream.write_all(&answer).await.ok()?;
            stream.shutdown().await.ok()
        }
        None => std::future::pending().await,
    }
}

/// A port at which nobody listens while the socket lives, and its URL.
pub fn closed_port() -> (TcpSocket, String) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    (socket, url)
}

/// A complete answer.
pub fn answer(status: &str, body: &[u8]) -> Answer {
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    Some([head.as_bytes(), body].concat())
}
