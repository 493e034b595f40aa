//! The listening sockets of `--metrics` and `--web`. The supervisor takes the port before it starts anything, and
//! passes the socket to each process that answers there: the port stays while that process is replaced. What
//! connects meanwhile waits in the kernel. The supervisor itself reads nothing of it.
//!
//! A port that cannot be taken does not keep the server from serving: one line says so, and it is
//! tried again whenever a process is started that would answer.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use tracing::{error, info, warn};

/// What is served at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// The flag with the address.
    pub flag: &'static str,
    /// What callers find there.
    pub what: &'static str,
}

/// Metrics for Prometheus, which netd answers.
pub const METRICS: Served = Served { flag: "--metrics", what: "metrics at /metrics" };
/// The page of the swarm, which a process of its own answers ([`crate::web`]).
pub const PAGE: Served = Served { flag: "--web", what: "page of the swarm at /" };

/// A socket, where one was asked for.
#[derive(Debug)]
pub struct ListeningSocket {
    served: Served,
    asked_for: Option<SocketAddr>,
    listener: Option<TcpListener>,
}

impl ListeningSocket {
    /// Takes the port, if one was asked for.
    pub fn new(served: Served, asked_for: Option<SocketAddr>) -> ListeningSocket {
        let mut socket = ListeningSocket { served, asked_for, listener: None };
        socket.take();
        socket
    }

    /// The socket that the executable before listened on.
    pub fn adopt(
        served: Served,
        asked_for: Option<SocketAddr>,
        listener: Option<OwnedFd>,
    ) -> ListeningSocket {
        ListeningSocket { served, asked_for, listener: listener.map(TcpListener::from) }
    }

    /// A descriptor for the process that answers; `None` without a port.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn for_child(&mut self) -> io::Result<Option<OwnedFd>> {
        self.take();
        self.try_clone()
    }

    /// A descriptor for the next executable; `None` without a port.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<Option<OwnedFd>> {
        let listener = self.listener.as_ref().map(TcpListener::try_clone).transpose()?;
        Ok(listener.map(OwnedFd::from))
    }

    /// Whether an address was asked for.
    pub fn is_wanted(&self) -> bool {
        self.asked_for.is_some()
    }

    /// Where it listens, with the actual port.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.listener.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    fn take(&mut self) {
        let Some(addr) = self.asked_for.filter(|_| self.listener.is_none()) else {
            return;
        };
        let Served { flag, what } = self.served;
        match TcpListener::bind(addr) {
            Ok(listener) => {
                self.listener = Some(listener);
                match addr.ip().is_loopback() {
                    true => info!(addr = ?self.addr(), "{what}"),
                    false => warn!(
                        addr = ?self.addr(),
                        "{what}, for everybody who can reach this address"
                    ),
                }
            }
            Err(error) => error!(
                "cannot listen on {addr} ({flag}): {error}; serving goes on without it, give another {flag} and start again"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_in_use_is_taken_once_it_is_free() {
        // Another process may take a port that was given back: then another port serves.
        let taken = (0..100).find_map(|_| {
            let other = TcpListener::bind("127.0.0.1:0").unwrap();
            let addr = other.local_addr().unwrap();
            let mut socket = ListeningSocket::new(METRICS, Some(addr));
            assert!(socket.for_child().unwrap().is_none() && socket.addr().is_none());
            drop(other);
            socket.for_child().unwrap().is_some().then_some((socket, addr))
        });
        let (mut socket, addr) = taken.expect("a port that was given back");
        assert_eq!(socket.addr(), Some(addr));
        // The next process gets the same socket.
        assert!(socket.for_child().unwrap().is_some());
    }

    #[test]
    fn nothing_listens_unless_asked() {
        let mut socket = ListeningSocket::new(PAGE, None);
        assert!(socket.for_child().unwrap().is_none() && socket.addr().is_none());
    }
}
