//! The listening socket of `--metrics`. The supervisor takes the port before it starts anything, and
//! passes the socket to each generation of netd, which answers: the port stays while netd is replaced.
//! What connects meanwhile waits in the kernel. The supervisor itself reads nothing of it.
//!
//! A port that cannot be taken does not keep the server from serving: one line says so, and it is
//! tried again whenever netd is started.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use tracing::{error, info, warn};

/// The socket, where one was asked for.
#[derive(Debug)]
pub struct MetricsSocket {
    asked_for: Option<SocketAddr>,
    listener: Option<TcpListener>,
}

impl MetricsSocket {
    /// Takes the port, if one was asked for.
    pub fn new(asked_for: Option<SocketAddr>) -> MetricsSocket {
        let mut socket = MetricsSocket { asked_for, listener: None };
        socket.take();
        socket
    }

    /// The socket that the executable before listened on.
    pub fn adopt(asked_for: Option<SocketAddr>, listener: Option<OwnedFd>) -> MetricsSocket {
        MetricsSocket { asked_for, listener: listener.map(TcpListener::from) }
    }

    /// A descriptor for netd; `None` without a port.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn for_netd(&mut self) -> io::Result<Option<OwnedFd>> {
        self.take();
        let listener = self.listener.as_ref().map(TcpListener::try_clone).transpose()?;
        Ok(listener.map(OwnedFd::from))
    }

    /// A descriptor for the next executable; `None` without a port.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<Option<OwnedFd>> {
        let listener = self.listener.as_ref().map(TcpListener::try_clone).transpose()?;
        Ok(listener.map(OwnedFd::from))
    }

    /// Where metrics are served, with the actual port.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.listener.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    fn take(&mut self) {
        let Some(addr) = self.asked_for.filter(|_| self.listener.is_none()) else {
            return;
        };
        match TcpListener::bind(addr) {
            Ok(listener) => {
                self.listener = Some(listener);
                match addr.ip().is_loopback() {
                    true => info!(addr = ?self.addr(), "metrics at /metrics"),
                    false => warn!(
                        addr = ?self.addr(),
                        "metrics at /metrics, for everybody who can reach this address"
                    ),
                }
            }
            Err(error) => error!(
                "cannot serve metrics at {addr}: {error}; serving goes on without them, give another --metrics and start again"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_in_use_is_taken_once_it_is_free() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = other.local_addr().unwrap();
        let mut socket = MetricsSocket::new(Some(addr));
        assert!(socket.for_netd().unwrap().is_none() && socket.addr().is_none());
        drop(other);
        assert!(socket.for_netd().unwrap().is_some());
        assert_eq!(socket.addr(), Some(addr));
        // The next netd gets the same socket.
        assert!(socket.for_netd().unwrap().is_some());
    }

    #[test]
    fn nothing_listens_unless_asked() {
        let mut socket = MetricsSocket::new(None);
        assert!(socket.for_netd().unwrap().is_none() && socket.addr().is_none());
    }
}
