//! The state of one stream: chunks that wait for their reader, frames that wait for the line, and how each direction ends.

use std::{
    collections::VecDeque,
    io,
    task::Waker,
    time::{Duration, Instant},
};

use super::{
    header::{FIN, FrameKind, Header, RST, SYN, broken},
    turns::Spending,
    window::{FIRST_WINDOW, Growth, Window},
};

/// Data of one frame that we send: another stream may go on after so much.
pub(super) const FRAME_BYTES: usize = 16 << 10;
/// Bytes that a stream has queued at most.
const MAX_QUEUED_BYTES: usize = 128 << 10;
/// Small frames that were received share a chunk up to this size: a peer that sends single bytes makes us hold little more than those.
const CHUNK_BYTES: usize = 16 << 10;

/// One stream of a connection.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) window: Window,
    chunks: VecDeque<Vec<u8>>,
    /// What was read of the first chunk.
    start: usize,
    pub(super) reader: Option<Waker>,
    /// What the peer lets us send.
    credit: u32,
    /// Credit that the peer is to be told of.
    granted: u32,
    frames: VecDeque<Vec<u8>>,
    queued: usize,
    pub(super) writer: Option<Waker>,
    /// What the first frame that we send says besides: SYN or ACK.
    introduction: u16,
    pub(super) spending: Spending,
    is_finishing: bool,
    is_finished: bool,
    has_theirs_ended: bool,
    is_broken: bool,
    pub(super) is_abandoned: bool,
}

impl Stream {
    pub(super) fn new(introduction: u16, now: Instant) -> Self {
        Self {
            window: Window::new(now),
            chunks: VecDeque::new(),
            start: 0,
            reader: None,
            credit: FIRST_WINDOW,
            granted: 0,
            frames: VecDeque::new(),
            queued: 0,
            writer: None,
            introduction,
            spending: Spending::new(now),
            is_finishing: false,
            is_finished: false,
            has_theirs_ended: false,
            is_broken: false,
            is_abandoned: false,
        }
    }

    /// Keeps data for the reader.
    pub(super) fn receive(&mut self, data: Vec<u8>) {
        if data.is_empty() || self.is_abandoned || self.is_broken {
            return;
        }
        match self.chunks.back_mut() {
            Some(last) if last.len() + data.len() <= CHUNK_BYTES => last.extend_from_slice(&data),
            _ => self.chunks.push_back(data),
        }
        self.reader.take().inspect(Waker::wake_by_ref);
    }

    /// Copies what was received, and forgets it.
    pub(super) fn read(&mut self, mut buffer: &mut [u8]) -> usize {
        let mut count = 0;
        while let Some(chunk) = self.chunks.front()
            && !buffer.is_empty()
        {
            let ready = chunk.get(self.start..).unwrap_or_default();
            let part = ready.len().min(buffer.len());
            let (room, rest) = buffer.split_at_mut(part);
            room.copy_from_slice(ready.get(..part).unwrap_or_default());
            buffer = rest;
            count += part;
            self.start += part;
            if self.start >= chunk.len() {
                self.chunks.pop_front();
                self.start = 0;
            }
        }
        count
    }

    /// Counts bytes that were read; true if the stream is to be asked for [`grant`](Self::grant).
    pub(super) fn drained(
        &mut self,
        bytes: usize,
        round_trip: Option<Duration>,
        growth: &mut Growth,
    ) -> bool {
        if self.is_ended() {
            return false;
        }
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let credit = self.window.drain(bytes, Instant::now(), round_trip, growth);
        let is_first = self.granted == 0;
        self.granted += credit;
        credit > 0 && is_first
    }

    /// The frame that tells the peer of its credit.
    pub(super) fn grant(&mut self, id: u32) -> Option<Header> {
        let credit = std::mem::take(&mut self.granted);
        let is_due = credit > 0 && !self.is_broken && !self.is_abandoned;
        is_due.then(|| {
            Header::of(FrameKind::Window, std::mem::take(&mut self.introduction), id, credit)
        })
    }

    /// # Errors
    ///
    /// If the credit exceeds what a header can say.
    pub(super) fn add_credit(&mut self, bytes: u32) -> io::Result<()> {
        let credit = self.credit.checked_add(bytes);
        self.credit = credit.ok_or_else(|| broken("more credit than there can be"))?;
        self.writer.take().inspect(Waker::wake_by_ref);
        Ok(())
    }

    /// Queues bytes in frames; fewer than there are, or none, if credit or room is missing.
    pub(super) fn write(&mut self, bytes: &[u8]) -> usize {
        let room = MAX_QUEUED_BYTES.saturating_sub(self.queued);
        let count = bytes.len().min(room).min(self.credit as usize);
        let bytes = bytes.get(..count).unwrap_or_default();
        self.frames.extend(bytes.chunks(FRAME_BYTES).map(<[u8]>::to_vec));
        self.queued += count;
        self.credit -= count as u32;
        count
    }

    /// Appends the next frame with data, or with the end; false if there is none.
    ///
    /// The end never comes with data: go-yamux (`Stream.readData`) lets its reader see the end of a frame before its data, and p2pd
    /// then takes the answer for missing.
    pub(super) fn next_data(&mut self, id: u32, out: &mut Vec<u8>) -> bool {
        if !self.has_more() {
            return false;
        }
        let mut flags = std::mem::take(&mut self.introduction);
        let data = self.frames.pop_front().unwrap_or_else(|| {
            self.is_finished = true;
            flags |= FIN;
            Vec::new()
        });
        self.queued -= data.len();
        out.extend_from_slice(&Header::of(FrameKind::Data, flags, id, data.len() as u32).encode());
        out.extend_from_slice(&data);
        if self.queued <= MAX_QUEUED_BYTES / 2 && self.credit > 0 {
            self.writer.take().inspect(Waker::wake_by_ref);
        }
        true
    }

    /// Whether there is something to send.
    pub(super) fn has_more(&self) -> bool {
        !self.is_broken && (!self.frames.is_empty() || self.is_finishing && !self.is_finished)
    }

    pub(super) fn can_write(&self) -> bool {
        !self.is_broken && !self.is_finishing
    }

    /// Whether nothing more is received.
    pub(super) fn is_ended(&self) -> bool {
        self.has_theirs_ended || self.is_broken
    }

    /// Ends our direction; true if the peer is to be told.
    pub(super) fn finish(&mut self) -> bool {
        !self.is_broken && !std::mem::replace(&mut self.is_finishing, true)
    }

    /// The peer sends no more.
    pub(super) fn end_of_theirs(&mut self) {
        self.has_theirs_ended = true;
        self.reader.take().inspect(Waker::wake_by_ref);
    }

    /// The peer has reset the stream: what was received stays readable.
    pub(super) fn break_off(&mut self) {
        self.is_broken = true;
        self.frames.clear();
        self.queued = 0;
        self.wake();
    }

    /// Nobody reads any more.
    pub(super) fn abandon(&mut self) {
        self.is_abandoned = true;
        self.chunks.clear();
        self.reader = None;
        self.writer = None;
    }

    /// What the peer is told when the stream is dropped: that it ends if the peer has ended it, else that it is reset. A peer that was
    /// told of our end is told nothing, unless it waits for credit; nor is one that never heard of the stream.
    pub(super) fn last_words(&self, id: u32) -> Option<Header> {
        let knows = self.is_finished && (self.has_theirs_ended || self.window.has_room());
        if self.is_broken || knows || self.introduction == SYN {
            return None;
        }
        let flags = self.introduction | if self.has_theirs_ended { FIN } else { RST };
        let kind = if self.has_theirs_ended { FrameKind::Data } else { FrameKind::Window };
        Some(Header::of(kind, flags, id, 0))
    }

    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        self.chunks.iter().map(Vec::capacity).sum()
    }

    pub(super) fn wake(&mut self) {
        self.reader.take().inspect(Waker::wake_by_ref);
        self.writer.take().inspect(Waker::wake_by_ref);
    }
}
