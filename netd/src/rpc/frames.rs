//! Frames of a peer's stream, the large ones counted for the peer before they are read.

use bytes::Bytes;
use hivemind::p2p::{InboundError, InboundReader, PeerId};
use tokio::sync::OwnedSemaphorePermit;

use super::Service;
use super::budget::COUNTED_BYTES;

/// Takes frames off a stream.
pub(super) struct CountedFrames {
    reader: InboundReader,
    peer: PeerId,
    held: Option<OwnedSemaphorePermit>,
}

impl CountedFrames {
    pub(super) fn new(mut reader: InboundReader, peer: PeerId) -> CountedFrames {
        reader.set_max_frame_bytes(COUNTED_BYTES as u64);
        CountedFrames { reader, peer, held: None }
    }

    /// The stream, for closing it.
    pub(super) fn into_reader(self) -> InboundReader {
        self.reader
    }

    /// The next frame and what it takes of its peer's budget; `None` at the end of input. May be
    /// dropped and called again without loss.
    ///
    /// # Errors
    /// [`InboundError`]; a frame beyond [`Service::max_request_bytes`] is not read.
    pub(super) async fn next(
        &mut self,
        service: &Service,
    ) -> Result<Option<(Bytes, Option<OwnedSemaphorePermit>)>, InboundError> {
        loop {
            match self.reader.recv().await {
                Ok(None) => return Ok(None),
                Ok(Some(frame)) => {
                    self.reader.set_max_frame_bytes(COUNTED_BYTES as u64);
                    return Ok(Some((frame, self.held.take())));
                }
                // Nothing of the frame was read yet: it is read once there is room for it.
                Err(InboundError::TooLarge { bytes, .. }) => {
                    let limit = service.max_request_bytes();
                    if self.held.is_some() || bytes > limit {
                        return Err(InboundError::TooLarge { bytes, limit });
                    }
                    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
                    self.held = service.budget.hold(self.peer, len).await;
                    self.reader.set_max_frame_bytes(bytes);
                }
                Err(error) => return Err(error),
            }
        }
    }
}
