//! One stream of a connection, as its readers and writers see it.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures::io::{AsyncRead, AsyncWrite};
use parking_lot::Mutex;
use resource_manager::{circuits::Pace, pools::Reservation};

use super::streams::Streams;

/// The streams of a connection, shared by its task and those of the streams.
pub(super) type SharedStreams = Arc<Mutex<Streams>>;

/// One stream of a connection. Dropping it resets the stream, unless both directions have ended.
#[derive(Debug)]
pub(crate) struct Substream {
    id: u32,
    streams: SharedStreams,
    /// The first window of a stream that the peer opened.
    _window: Option<Reservation>,
    pace: Pace,
}

impl Substream {
    pub(super) fn new(
        id: u32,
        streams: SharedStreams,
        window: Option<Reservation>,
        pace: Pace,
    ) -> Self {
        Self { id, streams, _window: window, pace }
    }
}

impl Drop for Substream {
    fn drop(&mut self) {
        self.streams.lock().abandon(self.id);
    }
}

impl AsyncRead for Substream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let granted = ready!(self.pace.poll_read(cx, buffer.len()));
        let part = buffer.get_mut(..granted).unwrap_or_default();
        let read = self.streams.lock().poll_read(self.id, cx, part);
        if let Poll::Ready(Ok(bytes)) = &read {
            self.pace.read(*bytes);
        }
        read
    }
}

impl AsyncWrite for Substream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let granted = ready!(self.pace.poll_write(cx, bytes.len()));
        let part = bytes.get(..granted).unwrap_or_default();
        let written = self.streams.lock().poll_write(self.id, cx, part);
        if let Poll::Ready(Ok(count)) = &written {
            self.pace.wrote(part.get(..*count).unwrap_or_default());
        }
        written
    }

    /// What was written leaves without being asked to.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.streams.lock().finish(self.id);
        Poll::Ready(Ok(()))
    }
}
