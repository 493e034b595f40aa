//! HTTP by hand: requests as a stranger may write them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use super::DEADLINE;

/// Sends `request` as it is; what comes back is read from the stream.
pub fn send(addr: &str, request: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(addr).expect("connect");
    stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
    // A server that refuses what it has read so far may close before all is written.
    let _ = stream.write_all(request);
    stream
}

/// Sends `request` as it is; the status and the body of the answer, or 0 and nothing.
pub fn exchange(addr: &str, request: &[u8]) -> (u16, String) {
    let mut answer = Vec::new();
    let _ = send(addr, request).read_to_end(&mut answer);
    let answer = String::from_utf8(answer).expect("UTF-8");
    let status = answer.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5)?.parse().ok());
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status.unwrap_or(0), body.to_owned())
}

/// A request of HTTP/1.0, whose answer has no chunks to take apart.
pub fn request(method: &str, path: &str, headers: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("{method} {path} HTTP/1.0\r\n{headers}Content-Length: {length}\r\n\r\n{body}").into()
}

/// The first address of loopback in a line of a log.
pub fn address_in(line: &str) -> String {
    let mut words = line.split(|c: char| c.is_whitespace() || "(){}=\"".contains(c));
    let is_address =
        |word: &&str| word.parse().is_ok_and(|addr: SocketAddr| addr.ip().is_loopback());
    words.find(is_address).expect("an address").to_owned()
}
