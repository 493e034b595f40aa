//! The caller's messages of a session.

use p2p::{InboundError, InboundReader, MemoryPurpose, PeerId};
use tokio::time::Instant;

use super::SessionEnd;
use crate::rpc::request::{StepMessage, decode};
use crate::rpc::{Failure, Service};

/// The caller's messages. While a step is computed one more is read, so that the end of the stream
/// is seen.
pub(super) struct Requests {
    pub peer: PeerId,
    reader: InboundReader,
    ahead: Option<Result<StepMessage, Failure>>,
    broken: Option<InboundError>,
    ended: bool,
    /// Whether the session was admitted.
    is_open: bool,
}

impl Requests {
    pub(super) fn new(service: &Service, peer: PeerId, mut reader: InboundReader) -> Requests {
        reader.set_max_frame_bytes(service.max_request_bytes());
        reader.set_purpose(MemoryPurpose::Opening);
        Requests { peer, reader, ahead: None, broken: None, ended: false, is_open: false }
    }

    /// The stream, for closing it.
    pub(super) fn into_reader(self) -> InboundReader {
        self.reader
    }

    /// The session was admitted: what comes from now on are its steps.
    pub(super) fn opened(&mut self) {
        self.is_open = true;
        self.reader.set_purpose(MemoryPurpose::Step);
    }

    /// The next message; `None` after the caller's end of input, or a message without tensors that
    /// ends the open session. May be dropped and called again without loss.
    pub(super) async fn next(&mut self) -> Result<Option<StepMessage>, SessionEnd> {
        while self.ahead.is_none() && self.broken.is_none() && !self.ended {
            self.read().await;
        }
        if let Some(message) = self.ahead.take() {
            let message = message?;
            let closes = self.is_open && message.request.tensors.is_empty();
            return Ok(Some(message).filter(|_| !closes));
        }
        match self.broken.take() {
            Some(InboundError::Cancelled) => Err(SessionEnd::Gone),
            Some(error) => Err(Failure::from(error).into()),
            None => Ok(None),
        }
    }

    /// The message that was read ahead, if it is the caller's copy of the step.
    pub(super) fn copy_of(&self, step: &StepMessage) -> Option<&StepMessage> {
        let ahead = self.ahead.as_ref()?.as_ref().ok()?;
        let is_copy = !ahead.request.tensors.is_empty()
            && ahead.metadata.step_id.is_some()
            && ahead.metadata.step_id == step.metadata.step_id;
        is_copy.then_some(ahead)
    }

    /// Runs `work` unless the caller goes away meanwhile.
    pub(super) async fn watch<T>(
        &mut self,
        work: impl Future<Output = T>,
    ) -> Result<T, SessionEnd> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = self.cancelled() => Err(SessionEnd::Gone),
        }
    }

    async fn cancelled(&mut self) {
        while self.ahead.is_none() && self.broken.is_none() {
            self.read().await;
        }
        if self.broken != Some(InboundError::Cancelled) {
            std::future::pending().await
        }
    }

    async fn read(&mut self) {
        match self.reader.recv().await {
            Ok(Some(received)) => {
                let arrived = Instant::now();
                let message = decode(received.bytes);
                self.ahead = Some(
                    message.and_then(|request| StepMessage::sent(request, arrived, received.held)),
                );
            }
            Ok(None) => self.ended = true,
            Err(error) => self.broken = Some(error),
        }
    }
}
