//! The side that proposes.

use std::{
    future::Future,
    io,
    iter::Peekable,
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures::io::{AsyncRead, AsyncWrite};

use crate::{
    Negotiated, NegotiationError, ProtocolError, Version, message::Message, message_io::MessageIo,
};

/// Negotiates as the dialer: proposes `protocols` in their order until the remote confirms one.
///
/// The future yields the confirmed name and the stream. With [`Version::V1Lazy`], and for names
/// without a leading slash, the last name is taken as confirmed at once, see [`Negotiated`].
///
/// # Errors
///
/// [`NegotiationError::Failed`] if the remote wants none of them (or `protocols` is empty),
/// [`ProtocolError::InvalidProtocol`] if a name cannot be sent, other errors if the remote or the
/// stream breaks the negotiation.
pub fn dialer_select_proto<R, I>(
    inner: R,
    protocols: I,
    version: Version,
) -> DialerSelectFuture<R, I::IntoIter>
where
    R: AsyncRead + AsyncWrite,
    I: IntoIterator,
    I::Item: AsRef<str>,
{
    let mut io = MessageIo::new(inner);
    io.queue(&Message::Header);
    DialerSelectFuture {
        protocols: protocols.into_iter().peekable(),
        version,
        header_seen: false,
        state: DialerState::Propose { io },
    }
}

/// Future of [`dialer_select_proto`].
pub struct DialerSelectFuture<R, I: Iterator> {
    protocols: Peekable<I>,
    version: Version,
    header_seen: bool,
    state: DialerState<R, I::Item>,
}

enum DialerState<R, N> {
    /// The next name is to be queued.
    Propose { io: MessageIo<R> },
    /// `name` is queued or sent; its answer is outstanding.
    Await { io: MessageIo<R>, name: N },
    /// The future has ended.
    Done,
}

/// Nothing in here is ever pinned; the future is moved freely between polls.
impl<R, I: Iterator> Unpin for DialerSelectFuture<R, I> {}

impl<R, I> Future for DialerSelectFuture<R, I>
where
    R: AsyncRead + AsyncWrite + Unpin,
    I: Iterator,
    I::Item: AsRef<str>,
{
    type Output = Result<(I::Item, Negotiated<R>), NegotiationError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        loop {
            match mem::replace(&mut this.state, DialerState::Done) {
                DialerState::Propose { mut io } => {
                    let name = this.protocols.next().ok_or(NegotiationError::Failed)?;
                    io.queue(&Message::name(name.as_ref())?);
                    let is_lazy =
                        this.version == Version::V1Lazy || !name.as_ref().starts_with('/');
                    if is_lazy && this.protocols.peek().is_none() {
                        let expected = name.as_ref().to_owned();
                        let stream = Negotiated::expecting(io, expected, this.header_seen);
                        return Poll::Ready(Ok((name, stream)));
                    }
                    this.state = DialerState::Await { io, name };
                }
                DialerState::Await { mut io, name } => {
                    let Poll::Ready(answer) = poll_answer(&mut io, cx, &mut this.header_seen)
                    else {
                        this.state = DialerState::Await { io, name };
                        return Poll::Pending;
                    };
                    match answer? {
                        Message::NotAvailable => this.state = DialerState::Propose { io },
                        Message::Name(answer) if answer == name.as_ref() => {
                            let stream = Negotiated::completed(io.into_inner());
                            return Poll::Ready(Ok((name, stream)));
                        }
                        _ => return Poll::Ready(Err(ProtocolError::InvalidMessage.into())),
                    }
                }
                DialerState::Done => return Poll::Ready(Err(NegotiationError::Failed)),
            }
        }
    }
}

/// Sends what is queued and reads the answer to the proposal, stepping over the remote's header,
/// which may come once.
pub(crate) fn poll_answer<R: AsyncRead + AsyncWrite + Unpin>(
    io: &mut MessageIo<R>,
    cx: &mut Context<'_>,
    header_seen: &mut bool,
) -> Poll<Result<Message, NegotiationError>> {
    match ready!(io.poll_flush(cx)) {
        // The remote reads no more; what it has sent before is still worth reading.
        Err(error) if error.kind() != io::ErrorKind::WriteZero => {
            return Poll::Ready(Err(error.into()));
        }
        _ => {}
    }
    loop {
        match ready!(io.poll_message(cx))? {
            // Not a refusal: a remote that has ended says nothing.
            None => return Poll::Ready(Err(io::Error::from(io::ErrorKind::UnexpectedEof).into())),
            Some(Message::Header) if !*header_seen => *header_seen = true,
            Some(message) => return Poll::Ready(Ok(message)),
        }
    }
}
