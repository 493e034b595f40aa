//! RPCs from peers: what a handler gets, and how it answers.
//!
//! Every inbound stream has a task of its own until its request is with the handler. A stream
//! counts against the bounds of its protocol until it has lingered out.

use std::{io::ErrorKind, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt, WriteHalf};
use libp2p::PeerId;
use resource_manager::{memory::MemoryPurpose, pools::Reservation, stall_timeout::StallTimeout};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};
use tracing::debug;

use super::{
    config::ProtocolKind,
    error::{CallError, InboundError},
    frame,
    inbound_reader::{InboundReader, ReceivedRequest, discard},
    limits::{
        CALLER_END_TIMEOUT, LINGER_TIMEOUT, Permit, UNARY_REQUEST_TIMEOUT, UNARY_STALL_TIMEOUT,
        WRITE_STALL_TIMEOUT,
    },
    traffic::Stream,
    unary_call::{self, UnaryError},
};
use crate::task;

/// An RPC from a peer.
#[derive(Debug)]
pub enum Inbound {
    /// One request that wants one answer.
    Unary {
        peer: PeerId,
        /// The name in its [`ProtocolSpec`](super::ProtocolSpec).
        protocol: &'static str,
        /// The request message of the RPC.
        request: Bytes,
        /// Takes the answer.
        responder: UnaryResponder,
    },
    /// A stream of requests that wants a stream of answers; nothing of it was read.
    Stream {
        peer: PeerId,
        /// The name in its [`ProtocolSpec`](super::ProtocolSpec).
        protocol: &'static str,
        /// Requests and answers.
        stream: InboundStream,
    },
}

/// Brings a negotiated stream to the handlers.
pub(super) async fn accept(
    kind: ProtocolKind,
    peer: PeerId,
    protocol: &'static str,
    mut stream: Stream,
    permit: Permit,
    inbound: mpsc::Sender<Inbound>,
) {
    let rpc = match kind {
        ProtocolKind::Unary => {
            let limits = Arc::clone(permit.limits());
            let reserve = |bytes| limits.resources().ask(MemoryPurpose::Unary, peer, bytes);
            let mut reader = StallTimeout::new(&mut stream, UNARY_STALL_TIMEOUT);
            let request = unary_call::read_request(&mut reader, reserve);
            let request = timeout(UNARY_REQUEST_TIMEOUT, request);
            let (request, held) = match request.await {
                Ok(Ok(request)) => request,
                Ok(Err(error)) => {
                    permit.limits().count(|figures| match &error {
                        UnaryError::TooLarge(_) => figures.too_large += 1,
                        UnaryError::Malformed(_) => figures.malformed += 1,
                        UnaryError::Io(error) => {
                            figures.too_slow += u64::from(error.kind() == ErrorKind::TimedOut);
                        }
                    });
                    return debug!(%peer, protocol, %error, "cannot read a request");
                }
                Err(_) => {
                    permit.limits().count(|figures| figures.too_slow += 1);
                    return debug!(%peer, protocol, "request timed out");
                }
            };
            let call_id = request.call_id;
            let responder = UnaryResponder { stream, call_id, permit, _held: held };
            Inbound::Unary { peer, protocol, request: request.data, responder }
        }
        ProtocolKind::Stream => {
            Inbound::Stream { peer, protocol, stream: InboundStream::new(peer, stream, permit) }
        }
    };
    // Fails only when the daemon ends; the stream is reset then.
    drop(inbound.send(rpc).await);
}

/// Answers one unary call. Dropping it resets the stream: the caller sees the call broken off.
#[derive(Debug)]
pub struct UnaryResponder {
    stream: Stream,
    call_id: Bytes,
    permit: Permit,
    /// The bytes of the request.
    _held: Reservation,
}

impl UnaryResponder {
    /// Sends the answer, or the text of an error. Python callers expect `repr` of an exception
    /// there.
    ///
    /// # Errors
    ///
    /// [`CallError::TooLarge`] if the answer exceeds [`MAX_UNARY_BYTES`](super::MAX_UNARY_BYTES);
    /// the caller gets an error that says so. [`CallError::Closed`] if the caller has gone.
    pub async fn respond(mut self, outcome: Result<Bytes, String>) -> Result<(), CallError> {
        let mut too_large = Ok(());
        let message = match unary_call::encode_response(self.call_id.clone(), outcome) {
            Ok(message) => message,
            Err(error) => {
                let text = format!("ValueError('{error}')");
                too_large = Err(error);
                unary_call::encode_response(self.call_id, Err(text))?
            }
        };
        let limits = self.permit.limits();
        limits.written(frame::write_all(&mut self.stream, &message).await)?;
        limits.written(close(&mut self.stream).await)?;
        linger(self.stream, self.permit);
        too_large
    }

    /// Ends when the caller has given up: it closed its side before the answer.
    pub async fn cancelled(&mut self) {
        discard(&mut self.stream).await;
    }
}

/// One RPC stream of a caller. Dropping it resets the stream; end it by [`finish`](Self::finish) or
/// [`fail`](Self::fail).
#[derive(Debug)]
pub struct InboundStream {
    reader: InboundReader,
    writer: InboundWriter,
}

/// The answers of a stream.
#[derive(Debug)]
pub struct InboundWriter {
    stream: WriteHalf<Stream>,
    permit: Permit,
}

impl InboundStream {
    fn new(peer: PeerId, stream: Stream, permit: Permit) -> Self {
        let (read, write) = stream.split();
        Self {
            reader: InboundReader::new(peer, read, Arc::clone(permit.limits())),
            writer: InboundWriter { stream: write, permit },
        }
    }

    /// See [`InboundReader::recv`].
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn recv(&mut self) -> Result<Option<ReceivedRequest>, InboundError> {
        self.reader.recv().await
    }

    /// See [`InboundWriter::send`].
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn send(&mut self, message: Bytes) -> Result<(), CallError> {
        self.writer.send(message).await
    }

    /// See [`InboundWriter::finish`].
    pub async fn finish(self) {
        self.writer.finish(self.reader).await;
    }

    /// See [`InboundWriter::fail`].
    pub async fn fail(self, text: &str) {
        self.writer.fail(self.reader, text).await;
    }

    /// Both directions, for a task that reads while another answers. The writer takes the reader
    /// back when the stream ends.
    pub fn into_split(self) -> (InboundReader, InboundWriter) {
        (self.reader, self.writer)
    }
}

impl InboundWriter {
    /// Sends one answer. A small one leaves in one piece.
    ///
    /// # Errors
    ///
    /// [`CallError::Closed`] if the caller has gone or takes nothing any more.
    pub async fn send(&mut self, message: Bytes) -> Result<(), CallError> {
        let written = frame::write_message(&mut self.stream, &message).await;
        Ok(self.permit.limits().written(written)?)
    }

    /// Ends the stream properly. Returns once everything is under way; a task waits for the
    /// caller's end.
    pub async fn finish(mut self, reader: InboundReader) {
        if frame::flush(&mut self.stream).await.is_ok() {
            self.end(reader).await;
        }
    }

    /// Ends the stream with the text of an error, for which Python callers expect `str` of an
    /// exception.
    pub async fn fail(mut self, reader: InboundReader, text: &str) {
        if frame::write_error(&mut self.stream, text).await.is_ok() {
            self.end(reader).await;
        }
    }

    /// Closes the stream when the caller has sent its own end, or after a second.
    ///
    /// p2pd takes a stream apart as soon as one side has closed it. A Python caller that is still
    /// writing, be it its end of input after the empty request that ends a session, then gets a
    /// broken pipe, and with it loses what it had not read yet.
    async fn end(self, mut reader: InboundReader) {
        if reader.has_ended() {
            return self.close(reader).await;
        }
        task::spawn(async move {
            drop(timeout(CALLER_END_TIMEOUT, drain_requests(&mut reader)).await);
            self.close(reader).await;
        });
    }

    async fn close(mut self, reader: InboundReader) {
        if close(&mut self.stream).await.is_ok() {
            rejoin(self.stream, reader, self.permit);
        }
    }
}

/// Reads requests until the caller's end of input, or its end of stream.
async fn drain_requests(reader: &mut InboundReader) {
    while !reader.has_ended() && matches!(reader.recv().await, Ok(Some(_))) {}
}

fn rejoin(write: WriteHalf<Stream>, reader: InboundReader, permit: Permit) {
    if let Ok(stream) = reader.into_inner().reunite(write) {
        linger(stream, permit);
    }
}

/// Flushes and closes our direction, so that nothing sent is lost.
pub(super) async fn close<W: AsyncWrite + Unpin>(stream: &mut W) -> std::io::Result<()> {
    frame::flush(stream).await?;
    timeout(WRITE_STALL_TIMEOUT, stream.close()).await?
}

/// Keeps a closed stream until the peer has closed it too, in a task of its own.
fn linger(mut stream: Stream, permit: Permit) {
    task::spawn(async move {
        linger_for(&mut stream, LINGER_TIMEOUT).await;
        drop(permit);
    });
}

/// Waits for the end of the stream, at most so long.
pub(super) async fn linger_for<R: AsyncRead + Unpin>(stream: &mut R, at_most: Duration) {
    drop(timeout_at(Instant::now() + at_most, discard(stream)).await);
}
