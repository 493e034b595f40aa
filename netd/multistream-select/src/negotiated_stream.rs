//! A stream whose protocol is agreed upon, or optimistically taken as agreed upon.

use std::{
    future::Future,
    io::{self, IoSlice, IoSliceMut},
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures::io::{AsyncRead, AsyncWrite};

use crate::{
    NegotiationError, ProtocolError, dialer::poll_answer, message::Message, message_io::MessageIo,
};

/// A byte stream after its negotiation.
///
/// After a lazy negotiation ([`Version::V1Lazy`](crate::Version::V1Lazy)) header and name leave
/// with the first write, flush or read, and the first read takes the confirmation off the stream
/// before it returns data. If the remote rejects the protocol, that read and all later ones fail.
#[derive(Debug)]
pub struct Negotiated<R> {
    state: NegotiatedState<R>,
}

#[derive(Debug)]
enum NegotiatedState<R> {
    /// Everything that is read and written is data.
    Completed(R),
    /// The confirmation of `name` is outstanding.
    Expecting { io: MessageIo<R>, name: String, header_seen: bool },
    /// The remote did not confirm.
    Failed,
}

impl<R> Negotiated<R> {
    pub(crate) fn completed(inner: R) -> Self {
        Self { state: NegotiatedState::Completed(inner) }
    }

    pub(crate) fn expecting(io: MessageIo<R>, name: String, header_seen: bool) -> Self {
        Self { state: NegotiatedState::Expecting { io, name, header_seen } }
    }

    /// Waits until the protocol is confirmed; at once unless the negotiation was lazy.
    pub fn complete(self) -> NegotiatedComplete<R> {
        NegotiatedComplete { stream: Some(self) }
    }
}

impl<R: AsyncRead + AsyncWrite + Unpin> Negotiated<R> {
    /// The stream itself once the protocol is confirmed. Sends the proposal if that was not done.
    fn poll_confirmed(&mut self, cx: &mut Context<'_>) -> Poll<Result<&mut R, NegotiationError>> {
        if let NegotiatedState::Expecting { io, name, header_seen } = &mut self.state {
            let answer = ready!(poll_answer(io, cx, header_seen));
            let confirmed = matches!(&answer, Ok(Message::Name(confirmed)) if confirmed == name);
            let state = mem::replace(&mut self.state, NegotiatedState::Failed);
            match (state, answer) {
                (NegotiatedState::Expecting { io, .. }, Ok(_)) if confirmed => {
                    self.state = NegotiatedState::Completed(io.into_inner());
                }
                (_, Ok(Message::NotAvailable)) => {
                    return Poll::Ready(Err(NegotiationError::Failed));
                }
                (_, Ok(_)) => return Poll::Ready(Err(ProtocolError::InvalidMessage.into())),
                (_, Err(error)) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(match &mut self.state {
            NegotiatedState::Completed(inner) => Ok(inner),
            _ => Err(NegotiationError::Failed),
        })
    }
}

fn failed() -> io::Error {
    NegotiationError::Failed.into()
}

impl<R: AsyncRead + AsyncWrite + Unpin> AsyncRead for Negotiated<R> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let inner = ready!(self.get_mut().poll_confirmed(cx))?;
        Pin::new(inner).poll_read(cx, buffer)
    }

    fn poll_read_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        let inner = ready!(self.get_mut().poll_confirmed(cx))?;
        Pin::new(inner).poll_read_vectored(cx, buffers)
    }
}

impl<R: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Negotiated<R> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().state {
            NegotiatedState::Completed(inner) => Pin::new(inner).poll_write(cx, data),
            NegotiatedState::Expecting { io, .. } => io.poll_write(cx, data),
            NegotiatedState::Failed => Poll::Ready(Err(failed())),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().state {
            NegotiatedState::Completed(inner) => Pin::new(inner).poll_write_vectored(cx, slices),
            NegotiatedState::Expecting { io, .. } => {
                let first = slices.iter().find(|slice| !slice.is_empty());
                io.poll_write(cx, first.map_or(&[], |slice| slice))
            }
            NegotiatedState::Failed => Poll::Ready(Err(failed())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().state {
            NegotiatedState::Completed(inner) => Pin::new(inner).poll_flush(cx),
            NegotiatedState::Expecting { io, .. } => io.poll_flush(cx),
            NegotiatedState::Failed => Poll::Ready(Err(failed())),
        }
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().state {
            NegotiatedState::Completed(inner) => Pin::new(inner).poll_close(cx),
            NegotiatedState::Expecting { io, .. } => io.poll_close(cx),
            NegotiatedState::Failed => Poll::Ready(Ok(())),
        }
    }
}

/// Future of [`Negotiated::complete`].
#[derive(Debug)]
pub struct NegotiatedComplete<R> {
    stream: Option<Negotiated<R>>,
}

impl<R: AsyncRead + AsyncWrite + Unpin> Future for NegotiatedComplete<R> {
    type Output = Result<Negotiated<R>, NegotiationError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(stream) = self.stream.as_mut() else {
            return Poll::Ready(Err(NegotiationError::Failed));
        };
        ready!(stream.poll_confirmed(cx))?;
        Poll::Ready(self.stream.take().ok_or(NegotiationError::Failed))
    }
}
