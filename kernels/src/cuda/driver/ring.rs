//! Staging of copies between host and device: a ring of pinned memory, and events that tell when a
//! range of it is free again.

use super::calls as cu;

use super::error::check;
use super::host::Pinned;
use super::host_wait::WaitPulse;
use crate::cuda::gpu::GpuError;

/// Bytes of each half of the ring: two hundred rows of hidden states of width 8192.
pub(super) const HALF: usize = 8 << 20;

/// Pinned memory in two halves. A half is written again when the copies out of it are done.
pub(super) struct Ring {
    memory: Pinned,
    used: usize,
    half: usize,
    done: [Option<StreamEvent>; 2],
}

impl Ring {
    pub(super) fn new() -> Result<Ring, GpuError> {
        Ok(Ring { memory: Pinned::new(2 * HALF)?, used: 0, half: 0, done: [None, None] })
    }

    /// Room for `bytes` bytes, at most [`HALF`].
    pub(super) fn room(
        &mut self,
        bytes: usize,
        stream: cu::CUstream,
        waiting: &WaitPulse,
    ) -> Result<*mut u8, GpuError> {
        if self.used + bytes > HALF {
            self.done[self.half] = Some(StreamEvent::record(stream)?);
            self.half = 1 - self.half;
            self.used = 0;
            if let Some(event) = self.done[self.half].take() {
                event.wait(waiting)?;
            }
        }
        let at = self.half * HALF + self.used;
        // What follows begins at a multiple of 64.
        self.used += bytes.next_multiple_of(64);
        Ok(self.memory.pointer().wrapping_add(at))
    }
}

/// A point of the stream.
#[derive(Debug)]
pub struct StreamEvent(pub(super) cu::CUevent);

// SAFETY: as for `Driver`.
unsafe impl Send for StreamEvent {}
// SAFETY: as for `Driver`.
unsafe impl Sync for StreamEvent {}

impl StreamEvent {
    pub(super) fn record(stream: cu::CUstream) -> Result<StreamEvent, GpuError> {
        let mut event = std::ptr::null_mut();
        // SAFETY: a context is current; a place for an event.
        let status = unsafe { cu::cuEventCreate(&raw mut event, 0) };
        check("cuEventCreate", status)?;
        let event = StreamEvent(event);
        // SAFETY: an event and a stream of the same context.
        let status = unsafe { cu::cuEventRecord(event.0, stream) };
        check("cuEventRecord", status)?;
        Ok(event)
    }

    pub(super) fn wait(&self, waiting: &WaitPulse) -> Result<(), GpuError> {
        // SAFETY: an event that was recorded.
        let ask = || unsafe { cu::cuEventQuery(self.0) };
        // SAFETY: as above.
        let status = waiting.wait(ask, || unsafe { cu::cuEventSynchronize(self.0) });
        check("cuEventSynchronize", status)
    }
}

impl Drop for StreamEvent {
    fn drop(&mut self) {
        // SAFETY: made by `record`, and dropped once. A failure leaves it to the end of the
        // process.
        let _ = unsafe { cu::cuEventDestroy_v2(self.0) };
    }
}
