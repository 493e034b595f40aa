//! A deadline for the first byte of a connection that somebody else opened. Whoever dials speaks
//! first, so that one who says nothing only takes the place of another.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use futures::io::{AsyncRead, AsyncWrite};
use libp2p::core::ConnectedPoint;
use tokio::time::{Sleep, sleep};

/// An inbound connection must say something by then: whoever dials speaks first.
pub const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(3);

/// A connection, and until its first byte has come the deadline for it.
pub struct FirstByte<C> {
    inner: C,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<C> FirstByte<C> {
    /// Connections that this node dialled have no deadline: there it speaks first.
    pub fn of(inner: C, endpoint: &ConnectedPoint) -> FirstByte<C> {
        let deadline = endpoint.is_listener().then(|| Box::pin(sleep(FIRST_BYTE_TIMEOUT)));
        FirstByte { inner, deadline }
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for FirstByte<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let read = Pin::new(&mut self.inner).poll_read(cx, buffer);
        let Some(deadline) = &mut self.deadline else {
            return read;
        };
        if read.is_ready() {
            self.deadline = None;
            return read;
        }
        deadline.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<C: AsyncWrite + Unpin> AsyncWrite for FirstByte<C> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buffer)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, buffers)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_close(cx)
    }
}
