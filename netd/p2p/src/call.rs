//! RPCs to peers: unary calls and RPC streams, over streams that the swarm's task opens.

use std::{io::ErrorKind, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use libp2p::PeerId;
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

use super::{
    driver::NodeCommand,
    error::CallError,
    frame::{self, Frame, FrameError, FrameReader},
    limits::{CallGuard, LINGER_TIMEOUT},
    node::P2p,
    rpc_streams::OpenStream,
    serve,
    traffic::Stream,
    unary_call,
};
use crate::task;

impl P2p {
    /// Calls a unary RPC of a peer and waits for its answer. The peer is looked up by its id and
    /// dialled if need be. Dropping the future cancels the call.
    ///
    /// # Errors
    ///
    /// [`CallError`]; `timeout` covers everything from the lookup on.
    pub fn call_unary(
        &self,
        peer: PeerId,
        protocol: &'static str,
        data: Bytes,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Bytes, CallError>> {
        Box::pin(async move {
            let call_id = uuid::Uuid::new_v4().into_bytes();
            let request = unary_call::encode_request(call_id, peer, protocol, data)?;
            let deadline = Instant::now() + timeout;
            let _guard = self.calls.begin(peer);
            let call = async {
                let mut stream = self.open(peer, protocol).await?;
                match frame::write_bytes(&mut stream, &request).await {
                    Err(error) if error.kind() == ErrorKind::TimedOut => {
                        return Err(CallError::Closed);
                    }
                    // A peer that rejected the protocol takes no request; its answer says so.
                    _ => {}
                }
                // Our direction stays open until the answer is here: closing it would cancel the call.
                let answer = unary_call::read_response(&mut stream, call_id, protocol).await;
                drop(serve::close(&mut stream).await);
                answer
            };
            timeout_at(deadline, call).await.map_err(|_| CallError::Timeout(timeout))?
        })
    }

    /// Opens an RPC stream to a peer, which is looked up by its id and dialled if need be. The name of
    /// the RPC leaves at once and nobody waits for its confirmation: whether the peer serves it shows
    /// with the first answer.
    ///
    /// # Errors
    ///
    /// [`CallError`]; `timeout` covers lookup and connection.
    pub async fn open_stream(
        &self,
        peer: PeerId,
        protocol: &'static str,
        timeout: Duration,
    ) -> Result<RpcStream, CallError> {
        let deadline = Instant::now() + timeout;
        let guard = self.calls.begin(peer);
        let opening = async {
            let mut stream = self.open(peer, protocol).await?;
            frame::flush(&mut stream).await?;
            Ok::<_, CallError>(stream)
        };
        let opened = timeout_at(deadline, opening).await;
        let stream = opened.map_err(|_| CallError::Timeout(timeout))??;
        Ok(RpcStream { frames: FrameReader::new(stream), protocol, _guard: guard })
    }

    /// A stream without any framing, for callers that keep to no protocol.
    #[cfg(test)]
    pub(super) async fn raw_stream(
        &self,
        peer: PeerId,
        protocol: &'static str,
    ) -> Result<Stream, CallError> {
        self.open(peer, protocol).await
    }

    /// A stream. Its protocol is confirmed if the name has a leading slash. A connection that closes in the very moment is replaced once.
    async fn open(&self, peer: PeerId, protocol: &'static str) -> Result<Stream, CallError> {
        for _ in 0..2 {
            let (reply, opened) = oneshot::channel();
            let command = NodeCommand::Open(OpenStream { peer, protocol, reply });
            self.send(command)
                .await
                .map_err(|error| CallError::Unreachable { peer, reason: error.to_string() })?;
            if let Ok(result) = opened.await {
                return result;
            }
        }
        Err(CallError::Unreachable { peer, reason: "its connections keep closing".to_owned() })
    }
}

/// An RPC stream to a peer, on the caller's side. Dropping it resets the stream, which cancels the
/// RPC.
#[derive(Debug)]
pub struct RpcStream {
    frames: FrameReader<Stream>,
    protocol: &'static str,
    _guard: CallGuard,
}

impl RpcStream {
    /// Sends one request. A small one leaves in one piece.
    ///
    /// # Errors
    ///
    /// [`CallError::Closed`] if the peer has gone or takes nothing any more; an error that it sent
    /// before may still be there to [`recv`](Self::recv).
    pub async fn send(&mut self, message: Bytes) -> Result<(), CallError> {
        Ok(frame::write_message(self.frames.inner_mut(), &message).await?)
    }

    /// Tells the peer that there are no more requests. The stream stays open for its answers.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    pub async fn finish(&mut self) -> Result<(), CallError> {
        Ok(frame::write_end(self.frames.inner_mut()).await?)
    }

    /// The next answer; `None` once the peer has closed the stream. May be dropped and called again
    /// without loss.
    ///
    /// # Errors
    ///
    /// [`CallError::Remote`] with the peer's error text, [`CallError::NotSupported`] if the peer does
    /// not serve the RPC, [`CallError::Closed`] if the stream ends within an answer, others if the
    /// peer breaks the protocol. A connection that breaks
    /// between two answers cannot be told from a proper end.
    pub async fn recv(&mut self) -> Result<Option<Bytes>, CallError> {
        match self.frames.next().await {
            Ok(Some(Frame::Message(message))) => Ok(Some(message)),
            Ok(Some(Frame::Control(payload))) => Err(CallError::Remote(frame::error_text(payload))),
            Ok(None) => Ok(None),
            Err(FrameError::Io(error)) => Err(CallError::of_stream(&error, self.protocol)),
            Err(FrameError::Cut) => Err(CallError::Closed),
            Err(FrameError::Marker(_)) => Err(CallError::Malformed("unknown frame marker")),
            Err(FrameError::TooLarge { bytes, limit }) => Err(CallError::TooLarge { bytes, limit }),
        }
    }

    /// Changes the bound of one answer,
    /// [`DEFAULT_MAX_FRAME_BYTES`](super::DEFAULT_MAX_FRAME_BYTES).
    pub fn set_max_frame_bytes(&mut self, bytes: u64) {
        self.frames.set_limit(bytes);
    }

    /// Closes the stream without losing what was sent. A peer that still works on answers sees its
    /// RPC cancelled.
    pub async fn close(self) {
        let mut stream = self.frames.into_inner();
        if serve::close(&mut stream).await.is_ok() {
            task::spawn(async move { serve::linger_for(&mut stream, LINGER_TIMEOUT).await });
        }
    }
}
