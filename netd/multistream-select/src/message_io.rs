//! Messages over a byte stream: an output buffer, and a reader that takes not one byte too many.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures::io::{AsyncRead, AsyncWrite};

use crate::{
    ProtocolError,
    message::{MAX_MESSAGE_BYTES, Message},
};

/// A byte stream during its negotiation.
///
/// Reading never goes beyond the end of a message, so that [`into_inner`](Self::into_inner) loses
/// nothing. The output buffer is bounded by the number of messages that its user queues.
#[derive(Debug)]
pub(crate) struct MessageIo<R> {
    inner: R,
    outgoing: Vec<u8>,
    sent: usize,
    incoming: Incoming,
}

/// What is known of the message being read.
#[derive(Debug)]
enum Incoming {
    /// Nothing yet.
    Start,
    /// The first byte of a length of two bytes: its seven low bits.
    Length { low: usize },
    /// The line; `line.len()` is the announced length.
    Line { line: Vec<u8>, filled: usize },
}

impl<R> MessageIo<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self { inner, outgoing: Vec::new(), sent: 0, incoming: Incoming::Start }
    }

    /// Adds a message to what the next flush sends.
    pub(crate) fn queue(&mut self, message: &Message) {
        message.encode(&mut self.outgoing);
    }

    /// Ends the negotiation. To be called once everything queued was sent.
    pub(crate) fn into_inner(self) -> R {
        self.inner
    }
}

impl<R: AsyncRead + AsyncWrite + Unpin> MessageIo<R> {
    /// Reads the next message; `None` if the stream ended between two messages.
    pub(crate) fn poll_message(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Message>, ProtocolError>> {
        loop {
            match &mut self.incoming {
                Incoming::Start => {
                    let Some(byte) = ready!(read_byte(&mut self.inner, cx))? else {
                        return Poll::Ready(Ok(None));
                    };
                    let low = usize::from(byte & 0x7f);
                    self.incoming =
                        if byte & 0x80 == 0 { expect_line(low)? } else { Incoming::Length { low } };
                }
                Incoming::Length { low } => {
                    let low = *low;
                    let byte = ready!(read_byte(&mut self.inner, cx))?.ok_or_else(ended_early)?;
                    // Zero would be a longer form of a shorter number; more than two bytes, too
                    // long.
                    if byte == 0 || byte & 0x80 != 0 {
                        return Poll::Ready(Err(ProtocolError::InvalidMessage));
                    }
                    self.incoming = expect_line(usize::from(byte) << 7 | low)?;
                }
                Incoming::Line { line, filled } => {
                    let rest = line.get_mut(*filled..).unwrap_or_default();
                    if !rest.is_empty() {
                        match ready!(Pin::new(&mut self.inner).poll_read(cx, rest))? {
                            0 => return Poll::Ready(Err(ended_early())),
                            read => *filled += read,
                        }
                        continue;
                    }
                    let message = Message::decode(line)?;
                    self.incoming = Incoming::Start;
                    return Poll::Ready(Ok(Some(message)));
                }
            }
        }
    }

    /// Hands everything queued to the stream, without flushing the stream itself.
    pub(crate) fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(rest) = self.outgoing.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match ready!(Pin::new(&mut self.inner).poll_write(cx, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.sent += written,
            }
        }
        self.outgoing.clear();
        self.sent = 0;
        Poll::Ready(Ok(()))
    }

    /// Sends everything queued.
    pub(crate) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(cx))?;
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    /// Writes data of the negotiated protocol, after everything queued.
    pub(crate) fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_drain(cx))?;
        Pin::new(&mut self.inner).poll_write(cx, data)
    }

    /// Sends everything queued, then closes the sending direction.
    pub(crate) fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(cx))?;
        Pin::new(&mut self.inner).poll_close(cx)
    }
}

/// Prepares for a line of `length` bytes.
fn expect_line(length: usize) -> Result<Incoming, ProtocolError> {
    if length == 0 || length > MAX_MESSAGE_BYTES {
        return Err(ProtocolError::InvalidMessage);
    }
    Ok(Incoming::Line { line: vec![0; length], filled: 0 })
}

/// Reads one byte; `None` at the end of the stream.
fn read_byte<R: AsyncRead + Unpin>(
    inner: &mut R,
    cx: &mut Context<'_>,
) -> Poll<io::Result<Option<u8>>> {
    let mut byte = [0];
    let read = ready!(Pin::new(inner).poll_read(cx, &mut byte))?;
    Poll::Ready(Ok((read > 0).then_some(byte[0])))
}

fn ended_early() -> ProtocolError {
    ProtocolError::IoError(io::ErrorKind::UnexpectedEof.into())
}
