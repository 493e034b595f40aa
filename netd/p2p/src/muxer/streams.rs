//! The streams of one connection: what was received and is not read, what is to be sent, and credit in both directions. No I/O.
//!
//! ```text
//!   Substream ── write ──> queue of the stream ── next_frame ──> Link ──> socket      resets and pongs first, then credit,
//!   Substream <── read ── chunks of the stream <── receive ──── Link <── socket       then frames in the order of Turns
//! ```
//!
//! The task of the connection and the tasks of its streams share it under a lock that is held for copies of at most
//! [`MAX_COPY_BYTES`].

use std::{
    collections::{HashMap, VecDeque},
    io,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use super::{
    super::limits::MAX_STREAMS_PER_CONNECTION,
    header::{ACK, FIN, FrameKind, Header, RST, SYN, broken},
    stream::Stream,
    turns::Turns,
    window::Growth,
};

/// One read or write takes at most so much under the lock.
pub(super) const MAX_COPY_BYTES: usize = 256 << 10;
/// Resets and pongs that wait to be sent; with more of them, nothing is read.
const MAX_CONTROL: usize = 512;
/// How often the round trip is measured.
const PING_PERIOD: Duration = Duration::from_secs(10);

/// The streams of a connection.
#[derive(Debug)]
pub(super) struct Streams {
    is_client: bool,
    next_id: u32,
    all: HashMap<u32, Stream>,
    control: VecDeque<Header>,
    /// Streams with credit to announce, each once.
    granting: VecDeque<u32>,
    /// Streams with something to send.
    sending: Turns,
    driver: Option<Waker>,
    /// Who waits for room to open a stream.
    opener: Option<Waker>,
    growth: Growth,
    round_trip: RoundTrip,
    is_over: bool,
    /// The last frame of the connection, which leaves after all others.
    farewell: Option<Header>,
    has_left: bool,
}

/// The shortest round trip that was measured.
#[derive(Debug)]
struct RoundTrip {
    shortest: Option<Duration>,
    next: Instant,
    sent: Option<(u32, Instant)>,
    count: u32,
}

impl Streams {
    pub(super) fn new(is_client: bool, growth: Growth, now: Instant) -> Self {
        Self {
            is_client,
            next_id: if is_client { 1 } else { 2 },
            all: HashMap::new(),
            control: VecDeque::new(),
            granting: VecDeque::new(),
            sending: Turns::default(),
            driver: None,
            opener: None,
            growth,
            round_trip: RoundTrip { shortest: None, next: now, sent: None, count: 0 },
            is_over: false,
            farewell: None,
            has_left: false,
        }
    }

    /// Whom to wake when there is something to send.
    pub(super) fn drive_by(&mut self, waker: &Waker) {
        self.driver.get_or_insert_with(|| waker.clone()).clone_from(waker);
    }

    /// Opens a stream; waits while there are too many.
    pub(super) fn poll_open(&mut self, cx: &Context<'_>) -> Poll<io::Result<u32>> {
        if self.is_over {
            return Poll::Ready(Err(closed()));
        }
        if self.all.len() >= MAX_STREAMS_PER_CONNECTION {
            self.opener = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let id = self.next_id;
        let Some(next) = id.checked_add(2) else {
            return Poll::Ready(Err(io::Error::other("no more stream ids")));
        };
        self.next_id = next;
        self.all.insert(id, Stream::new(SYN, Instant::now()));
        Poll::Ready(Ok(id))
    }

    /// Whether so much waits to be sent that nothing more may be read.
    pub(super) fn is_choked(&self) -> bool {
        self.control.len() >= MAX_CONTROL
    }

    /// Takes a header in, before the data that it announces. Returns the stream that it opens, if it does.
    ///
    /// # Errors
    ///
    /// If the peer breaks the protocol or ends the connection.
    pub(super) fn begin(&mut self, header: Header) -> io::Result<Option<u32>> {
        match header.kind {
            FrameKind::GoAway => return Err(closed()),
            FrameKind::Ping => {
                self.ping(header);
                return Ok(None);
            }
            FrameKind::Data | FrameKind::Window => {}
        }
        let arrived = if header.has(SYN) { Some(self.accept(header.stream)?) } else { None };
        let Some(stream) = self.all.get_mut(&header.stream) else {
            return Ok(None);
        };
        match header.kind {
            FrameKind::Data if !stream.window.receive(header.length) => {
                return Err(broken("more data than the window of its stream"));
            }
            FrameKind::Window => {
                stream.add_credit(header.length)?;
                self.end_as_told(header);
            }
            _ => {}
        }
        Ok(arrived)
    }

    /// Takes data of a frame in, and after the last of it what the flags say.
    pub(super) fn receive(&mut self, header: Header, data: Vec<u8>, is_last: bool) {
        if let Some(stream) = self.all.get_mut(&header.stream) {
            stream.receive(data);
        }
        if is_last {
            self.end_as_told(header);
        }
    }

    fn accept(&mut self, id: u32) -> io::Result<u32> {
        let is_theirs = id != 0 && id.is_multiple_of(2) == self.is_client;
        if !is_theirs || self.all.contains_key(&id) {
            return Err(broken("a stream id that is not free"));
        }
        if self.all.len() >= MAX_STREAMS_PER_CONNECTION {
            return Err(broken("too many streams"));
        }
        self.all.insert(id, Stream::new(ACK, Instant::now()));
        Ok(id)
    }

    fn end_as_told(&mut self, header: Header) {
        if let Some(stream) = self.all.get_mut(&header.stream) {
            if header.has(RST) {
                stream.break_off();
            } else if header.has(FIN) {
                stream.end_of_theirs();
            }
            if header.has(RST) && stream.is_abandoned {
                self.remove(header.stream);
            }
        }
    }

    fn ping(&mut self, header: Header) {
        let of_us = &mut self.round_trip;
        if !header.has(ACK) {
            self.control.push_back(Header { flags: ACK, ..header });
        } else if let Some((_, sent)) = of_us.sent.take_if(|(number, _)| *number == header.length) {
            let measured = sent.elapsed();
            of_us.shortest = Some(of_us.shortest.map_or(measured, |least| least.min(measured)));
        }
    }

    /// Appends the next frame to `out`; false if there is none.
    pub(super) fn next_frame(&mut self, out: &mut Vec<u8>) -> bool {
        if let Some(header) = self.due_ping().or_else(|| self.control.pop_front()) {
            out.extend_from_slice(&header.encode());
            return true;
        }
        while let Some(id) = self.granting.pop_front() {
            if let Some(header) = self.all.get_mut(&id).and_then(|stream| stream.grant(id)) {
                out.extend_from_slice(&header.encode());
                return true;
            }
        }
        while let Some(id) = self.sending.next() {
            let Some(stream) = self.all.get_mut(&id) else { continue };
            let before = out.len();
            let sent = stream.next_data(id, out);
            let bytes = out.len() - before;
            if stream.has_more() {
                self.sending.sent(id, &mut stream.spending, bytes);
            } else {
                stream.spending.end(bytes, Instant::now());
                if stream.is_abandoned {
                    self.conclude(id);
                }
            }
            if sent {
                return true;
            }
        }
        let farewell = self.farewell.take().filter(|_| !self.has_left);
        if let Some(header) = farewell {
            self.has_left = true;
            out.extend_from_slice(&header.encode());
        }
        farewell.is_some()
    }

    /// Measures the round trip: at first, and later with the next frames of a connection that carries something.
    fn due_ping(&mut self) -> Option<Header> {
        let is_idle = self.sending.is_empty() && self.granting.is_empty();
        let has_work = !is_idle || self.round_trip.count == 0;
        let now = has_work.then(Instant::now).filter(|now| *now >= self.round_trip.next)?;
        let of_us = &mut self.round_trip;
        of_us.next = now + PING_PERIOD;
        of_us.count = of_us.count.wrapping_add(1);
        of_us.sent = Some((of_us.count, now));
        Some(Header::of(FrameKind::Ping, SYN, 0, of_us.count))
    }

    /// Reads what was received. Zero is the end.
    pub(super) fn poll_read(
        &mut self,
        id: u32,
        cx: &Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let Some(stream) = self.all.get_mut(&id) else {
            return Poll::Ready(Ok(0));
        };
        let most = buffer.len().min(MAX_COPY_BYTES);
        let count = stream.read(buffer.get_mut(..most).unwrap_or_default());
        if count == 0 && most > 0 && !stream.is_ended() && !self.is_over {
            stream.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let shortest = self.round_trip.shortest;
        if count > 0 && stream.drained(count, shortest, &mut self.growth) {
            self.granting.push_back(id);
            self.wake_driver();
        }
        Poll::Ready(Ok(count))
    }

    /// Queues bytes, as many as the peer's credit and the queue have room for.
    pub(super) fn poll_write(
        &mut self,
        id: u32,
        cx: &Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let stream = self.all.get_mut(&id).filter(|stream| stream.can_write());
        let Some(stream) = stream.filter(|_| !self.is_over) else {
            return Poll::Ready(Err(closed()));
        };
        let count = stream.write(bytes);
        if count == 0 && !bytes.is_empty() {
            stream.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        self.send(id);
        Poll::Ready(Ok(count))
    }

    /// Ends our direction after what is queued.
    pub(super) fn finish(&mut self, id: u32) {
        if self.all.get_mut(&id).is_some_and(Stream::finish) {
            self.send(id);
        }
    }

    /// The stream is not used any more. What is queued leaves first.
    pub(super) fn abandon(&mut self, id: u32) {
        let Some(stream) = self.all.get_mut(&id) else { return };
        stream.abandon();
        let is_broken_off = self.is_over && self.farewell.is_none();
        if is_broken_off || !stream.has_more() {
            self.conclude(id);
        }
    }

    /// Tells the peer that a stream is gone, unless it knows, and forgets the stream.
    fn conclude(&mut self, id: u32) {
        let told = self.all.get(&id).and_then(|stream| stream.last_words(id));
        if let Some(header) = told.filter(|_| !self.is_over) {
            self.control.push_back(header);
            self.wake_driver();
        }
        self.remove(id);
    }

    fn remove(&mut self, id: u32) {
        if let Some(mut stream) = self.all.remove(&id) {
            stream.window.end(&mut self.growth);
            // A peer that takes nothing cannot make these grow by streams that come and go.
            self.sending.forget(id, &stream.spending);
            self.granting.retain(|other| *other != id);
        }
        self.opener.take().inspect(Waker::wake_by_ref);
    }

    /// Nothing is written from now on. What is queued leaves, and then the last frame of the connection.
    pub(super) fn say_goodbye(&mut self) {
        self.farewell = Some(Header::of(FrameKind::GoAway, 0, 0, 0));
        self.end();
    }

    /// The connection is over: readers see the end after what was received, writers an error.
    pub(super) fn end(&mut self) {
        self.is_over = true;
        self.all.values_mut().for_each(Stream::wake);
        self.opener.take().inspect(Waker::wake_by_ref);
    }

    /// Memory that unread data of a stream takes.
    #[cfg(test)]
    pub(super) fn held_bytes(&self, id: u32) -> usize {
        self.all.get(&id).map_or(0, Stream::held_bytes)
    }

    fn send(&mut self, id: u32) {
        if let Some(stream) = self.all.get_mut(&id) {
            self.sending.begin(id, &mut stream.spending, Instant::now());
        }
        self.wake_driver();
    }

    fn wake_driver(&self) {
        if let Some(driver) = &self.driver {
            driver.wake_by_ref();
        }
    }
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::WriteZero, "the connection is closed")
}
