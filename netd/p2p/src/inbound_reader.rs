//! The requests of a peer's stream. The bytes of a frame are reserved before they are read, and count
//! until what [`Received`] holds is dropped.

use std::sync::Arc;

use bytes::Bytes;
use futures::io::{AsyncRead, AsyncReadExt, ReadHalf};
use libp2p::PeerId;
use resource_manager::{
    memory::MemoryPurpose,
    pools::{MemoryAsk, Reservation},
};
use tokio::time::timeout;

use super::{
    error::InboundError,
    frame::{Frame, FrameError, FrameReader, READ_AHEAD_BYTES},
    limits::{FRAME_STALL_TIMEOUT, InboundLimits, LEAST_FRAME_BYTES},
    traffic::Stream,
};

/// Frames of an open stream up to this size are not counted: the bounds on streams bound them, and steps
/// of single tokens stay off the lock.
const UNCOUNTED_STEP_BYTES: usize = 256 << 10;

/// One request of a stream.
#[derive(Debug)]
pub struct ReceivedRequest {
    pub bytes: Bytes,
    /// What counts for it; `None` if it is small or was counted before.
    pub held: Option<Reservation>,
}

/// The requests of a stream.
#[derive(Debug)]
pub struct InboundReader {
    frames: FrameReader<ReadHalf<Stream>>,
    ended: bool,
    peer: PeerId,
    limits: Arc<InboundLimits>,
    purpose: MemoryPurpose,
    /// Whether what is to come was reserved.
    is_reserved: bool,
    /// The ask for the next frame, and what was granted for it.
    asked: Option<MemoryAsk>,
    held: Option<Reservation>,
}

impl InboundReader {
    pub(super) fn new(peer: PeerId, stream: ReadHalf<Stream>, limits: Arc<InboundLimits>) -> Self {
        Self {
            frames: FrameReader::new(stream),
            ended: false,
            peer,
            limits,
            purpose: MemoryPurpose::Unary,
            is_reserved: false,
            asked: None,
            held: None,
        }
    }

    /// The next request; `None` once the caller has sent its end of input. May be dropped and
    /// called again without loss, and after `None`: it then waits for
    /// [`InboundError::Cancelled`].
    ///
    /// # Errors
    ///
    /// [`InboundError::Cancelled`] if the caller has closed the stream or is gone, others if it
    /// breaks the protocol or is too slow. The stream has no further requests then.
    pub async fn recv(&mut self) -> Result<Option<ReceivedRequest>, InboundError> {
        if self.ended {
            discard(self.frames.inner_mut()).await;
            return Err(InboundError::Cancelled);
        }
        if let Some(announced) =
            self.frames.announced().await.map_err(|error| self.broken(error))?
        {
            self.reserve_frame(announced).await;
        }
        match self.frame().await? {
            Some(Frame::Message(bytes)) => {
                Ok(Some(ReceivedRequest { bytes, held: self.held.take() }))
            }
            // Any control frame from a caller means end of input, whatever its text.
            Some(Frame::Control(_)) => {
                self.held = None;
                self.ended = true;
                Ok(None)
            }
            None => Err(InboundError::Cancelled),
        }
    }

    /// Reserves bytes for everything that is still to come: frames are not counted any more. Waits for
    /// room, with nothing else of this purpose held.
    pub async fn reserve(&mut self, bytes: usize) -> Reservation {
        let reservation = self.limits.resources().ask(self.purpose, self.peer, bytes).await;
        self.is_reserved = true;
        reservation
    }

    /// What frames are for from now on; [`MemoryPurpose::Unary`] at first.
    pub fn set_purpose(&mut self, purpose: MemoryPurpose) {
        if self.purpose != purpose {
            self.purpose = purpose;
            // Nothing of that frame was read.
            self.asked = None;
        }
    }

    /// Changes the bound of one request,
    /// [`DEFAULT_MAX_FRAME_BYTES`](super::DEFAULT_MAX_FRAME_BYTES).
    pub fn set_max_frame_bytes(&mut self, bytes: u64) {
        self.frames.set_limit(bytes);
    }

    /// Whether the caller has sent its end of input.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// The stream; bytes read ahead are lost.
    pub(super) fn into_inner(self) -> ReadHalf<Stream> {
        self.frames.into_inner()
    }

    /// Waits until the frame whose length is known may be read.
    async fn reserve_frame(&mut self, bytes: usize) {
        if self.is_reserved || self.held.is_some() || bytes <= uncounted(self.purpose) {
            return;
        }
        let ask = || self.limits.resources().ask(self.purpose, self.peer, bytes);
        self.held = Some(self.asked.get_or_insert_with(ask).await);
        self.asked = None;
    }

    /// The frame, which has to keep coming if bytes are reserved for it.
    async fn frame(&mut self) -> Result<Option<Frame>, InboundError> {
        loop {
            let before = self.frames.received();
            let read = timeout(FRAME_STALL_TIMEOUT, self.frames.next()).await;
            if let Ok(frame) = read {
                return frame.map_err(|error| self.broken(error));
            }
            let others_wait = self.limits.resources().memory().of(self.purpose).someone_waits();
            let least = match (self.is_reserved || self.held.is_some(), others_wait) {
                (false, _) => 0,
                (true, false) => 1,
                (true, true) => LEAST_FRAME_BYTES,
            };
            let bytes = self.frames.received() - before;
            if bytes < least {
                self.limits.count(|figures| figures.too_slow += 1);
                return Err(InboundError::TooSlow { bytes, least, within: FRAME_STALL_TIMEOUT });
            }
        }
    }

    fn broken(&self, error: FrameError) -> InboundError {
        let error = match error {
            FrameError::Cut | FrameError::Io(_) => return InboundError::Cancelled,
            FrameError::Marker(_) => InboundError::Malformed("unknown frame marker"),
            FrameError::TooLarge { bytes, limit } => InboundError::TooLarge { bytes, limit },
        };
        self.limits.count(|figures| figures.bad_frames += 1);
        error
    }
}

/// Frames up to this size are not counted.
fn uncounted(purpose: MemoryPurpose) -> usize {
    match purpose {
        // What was read ahead with the header is there already.
        MemoryPurpose::Unary | MemoryPurpose::Opening | MemoryPurpose::Whole => READ_AHEAD_BYTES,
        MemoryPurpose::Step => UNCOUNTED_STEP_BYTES,
        // They are kept.
        MemoryPurpose::Push | MemoryPurpose::Window | MemoryPurpose::Growth => 0,
    }
}

/// Reads and forgets until the stream ends or fails.
pub(super) async fn discard<R: AsyncRead + Unpin>(stream: &mut R) {
    let mut scratch = [0; 1024];
    while matches!(stream.read(&mut scratch).await, Ok(1..)) {}
}
