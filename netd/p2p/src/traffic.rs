//! What passes the node: bytes of RPCs, counted where their streams are read and written, and peers.
//! Many streams write the counters; anybody reads them without asking the task of the swarm.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::{fmt, io};

use futures::io::{AsyncRead, AsyncWrite, IoSlice, IoSliceMut};

/// Bytes of RPCs on connections of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathFigures {
    /// Read from peers.
    pub received: u64,
    /// Written to peers.
    pub sent: u64,
}

/// What has passed a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficFigures {
    /// Peers that are connected.
    pub peers: u64,
    /// On connections straight to the peer.
    pub direct: PathFigures,
    /// On connections through relays.
    pub relayed: PathFigures,
    /// Circuits that this node has opened for others, as their relay.
    pub circuits: u64,
    /// What those circuits carried, both directions together.
    pub circuit_bytes: u64,
}

/// The counters of connections of one kind.
#[derive(Debug, Default)]
pub(super) struct Path {
    received: AtomicU64,
    sent: AtomicU64,
}

/// All counters of a node.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    pub(super) peers: AtomicU64,
    pub(super) circuits: AtomicU64,
    pub(super) direct: Arc<Path>,
    pub(super) relayed: Arc<Path>,
}

impl Traffic {
    pub(super) fn figures(&self, circuit_bytes: u64) -> TrafficFigures {
        let path = |path: &Path| PathFigures {
            received: path.received.load(Ordering::Relaxed),
            sent: path.sent.load(Ordering::Relaxed),
        };
        TrafficFigures {
            peers: self.peers.load(Ordering::Relaxed),
            direct: path(&self.direct),
            relayed: path(&self.relayed),
            circuits: self.circuits.load(Ordering::Relaxed),
            circuit_bytes,
        }
    }
}

/// A stream whose bytes are counted.
pub struct Stream {
    inner: libp2p::Stream,
    path: Arc<Path>,
}

impl Stream {
    pub(super) fn counted(inner: libp2p::Stream, path: Arc<Path>) -> Stream {
        Stream { inner, path }
    }

    fn read(&self, result: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(bytes)) = result {
            self.path.received.fetch_add(*bytes as u64, Ordering::Relaxed);
        }
    }

    fn wrote(&self, result: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(bytes)) = result {
            self.path.sent.fetch_add(*bytes as u64, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_read(cx, buffer);
        self.read(&result);
        result
    }

    fn poll_read_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_read_vectored(cx, buffers);
        self.read(&result);
        result
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.wrote(&result);
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write_vectored(cx, buffers);
        self.wrote(&result);
        result
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_close(cx)
    }
}
