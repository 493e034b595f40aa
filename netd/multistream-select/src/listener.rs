//! The side that answers.

use std::{
    future::Future,
    io, mem,
    pin::Pin,
    task::{Context, Poll},
};

use futures::io::{AsyncRead, AsyncWrite};

use crate::{
    Negotiated, NegotiationError, ProtocolError,
    message::{Message, is_valid_name},
    message_io::MessageIo,
};

/// How many proposals of one dialer are answered before it is refused. Dialers of libp2p and
/// hivemind propose one to four.
pub const MAX_PROPOSALS: usize = 64;

/// Negotiates as the listener: confirms the first proposal that is one of `protocols`.
///
/// The future yields the confirmed name and the stream. Names in `protocols` that cannot be
/// negotiated (empty, several lines, reserved, too long) are never confirmed.
///
/// # Errors
///
/// [`NegotiationError::Failed`] if the dialer gave up, [`ProtocolError::TooManyProtocols`] after
/// [`MAX_PROPOSALS`] rejections, other errors if the remote or the stream breaks the negotiation.
pub fn listener_select_proto<R, I>(inner: R, protocols: I) -> ListenerSelectFuture<R, I::Item>
where
    R: AsyncRead + AsyncWrite,
    I: IntoIterator,
    I::Item: AsRef<str>,
{
    let protocols = protocols.into_iter().filter(|name| is_valid_name(name.as_ref())).collect();
    ListenerSelectFuture {
        protocols,
        rejected: 0,
        state: ListenerState::Header { io: MessageIo::new(inner) },
    }
}

/// Future of [`listener_select_proto`].
pub struct ListenerSelectFuture<R, N> {
    protocols: Vec<N>,
    rejected: usize,
    state: ListenerState<R, N>,
}

enum ListenerState<R, N> {
    /// The dialer's header is outstanding.
    Header { io: MessageIo<R> },
    /// Our header is queued or sent; a proposal is outstanding.
    Proposal { io: MessageIo<R> },
    /// The rejection of a proposal is being sent.
    Reject { io: MessageIo<R> },
    /// The confirmation of `name` is being sent.
    Confirm { io: MessageIo<R>, name: N },
    /// The future has ended.
    Done,
}

/// Nothing in here is ever pinned; the future is moved freely between polls.
impl<R, N> Unpin for ListenerSelectFuture<R, N> {}

impl<R, N> Future for ListenerSelectFuture<R, N>
where
    R: AsyncRead + AsyncWrite + Unpin,
    N: AsRef<str> + Clone,
{
    type Output = Result<(N, Negotiated<R>), NegotiationError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        loop {
            match mem::replace(&mut this.state, ListenerState::Done) {
                ListenerState::Header { mut io } => match io.poll_message(cx) {
                    Poll::Pending => {
                        this.state = ListenerState::Header { io };
                        return Poll::Pending;
                    }
                    Poll::Ready(message) => match message? {
                        Some(Message::Header) => {
                            io.queue(&Message::Header);
                            this.state = ListenerState::Proposal { io };
                        }
                        Some(_) => return Poll::Ready(Err(ProtocolError::InvalidMessage.into())),
                        None => return Poll::Ready(Err(NegotiationError::Failed)),
                    },
                },
                ListenerState::Proposal { mut io } => match io.poll_message(cx) {
                    // Only now is there nothing to wait for that could leave in the same write.
                    Poll::Pending => {
                        let flushed = io.poll_flush(cx);
                        this.state = ListenerState::Proposal { io };
                        if let Poll::Ready(Err(error)) = flushed {
                            this.state = ListenerState::Done;
                            return Poll::Ready(Err(error.into()));
                        }
                        return Poll::Pending;
                    }
                    Poll::Ready(message) => {
                        let message = message.map_err(|error| this.explain(error))?;
                        this.state = this.answer(io, message)?;
                    }
                },
                // A lazy dialer's data may follow, which ends the negotiation: it must have the answer.
                ListenerState::Reject { mut io } => match io.poll_flush(cx)? {
                    Poll::Pending => {
                        this.state = ListenerState::Reject { io };
                        return Poll::Pending;
                    }
                    Poll::Ready(()) => this.state = ListenerState::Proposal { io },
                },
                ListenerState::Confirm { mut io, name } => match io.poll_flush(cx)? {
                    Poll::Pending => {
                        this.state = ListenerState::Confirm { io, name };
                        return Poll::Pending;
                    }
                    Poll::Ready(()) => {
                        return Poll::Ready(Ok((name, Negotiated::completed(io.into_inner()))));
                    }
                },
                ListenerState::Done => return Poll::Ready(Err(NegotiationError::Failed)),
            }
        }
    }
}

impl<R, N: AsRef<str> + Clone> ListenerSelectFuture<R, N> {
    /// Queues the answer to one message of the dialer.
    fn answer(
        &mut self,
        mut io: MessageIo<R>,
        message: Option<Message>,
    ) -> Result<ListenerState<R, N>, NegotiationError> {
        let proposal = match message {
            None => return Err(NegotiationError::Failed),
            Some(Message::Name(name)) => Some(name),
            Some(Message::List) => None,
            Some(Message::Header | Message::NotAvailable) => {
                return Err(ProtocolError::InvalidMessage.into());
            }
        };
        let served = self.protocols.iter().find(|name| proposal.as_deref() == Some(name.as_ref()));
        if let Some(name) = served {
            io.queue(&Message::name(name.as_ref())?);
            return Ok(ListenerState::Confirm { io, name: name.clone() });
        }
        self.rejected += 1;
        if self.rejected >= MAX_PROPOSALS {
            return Err(ProtocolError::TooManyProtocols.into());
        }
        io.queue(&Message::NotAvailable);
        Ok(ListenerState::Reject { io })
    }

    /// Garbage after a rejection is data that a lazy dialer sent after its only proposal: the
    /// negotiation has failed properly, nobody broke a rule.
    fn explain(&self, error: ProtocolError) -> NegotiationError {
        let broken = match &error {
            ProtocolError::IoError(error) => error.kind() != io::ErrorKind::UnexpectedEof,
            _ => false,
        };
        if self.rejected > 0 && !broken {
            return NegotiationError::Failed;
        }
        error.into()
    }
}
