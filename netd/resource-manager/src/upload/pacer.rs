//! Who may send how much, and when: a token bucket over all connections with fair queueing. Pure;
//! the time is passed in.
//!
//! Tokens are bytes; those of a time that the limit names are saved up. While there are some, whoever
//! asks is served at once, up to [`CHUNK`] bytes.
//! Otherwise requests wait in the order of their finish tags. The start tag of a request is the finish
//! tag of the connection's request before it, or the virtual time if that is more; its finish tag is
//! the start tag plus its bytes. The virtual time is the least start tag of the requests that wait.
//!
//! So busy connections get the same share. A small request of a connection that was idle, such as the
//! answer of a decode step, has the least finish tag: it waits for the chunk that is being sent, and
//! for requests that are smaller still. This holds for any number of busy connections. Order by start
//! tags would put a newcomer behind all busy connections with the same start tag, up to a round.
//!
//! Frame headers of yamux are written on their own. They are charged and do not wait, or a small answer
//! would wait for one chunk before its header and for another before its body.
//!
//! Source: WF2Q+ (Bennett, Zhang 1997), without its test whether a request is eligible.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Bytes given at once at most; a frame of yamux.
pub const CHUNK: usize = 16 << 10;

/// Bytes given at once at least: a packet.
const LEAST_CHUNK: usize = 1 << 10;

/// Requests of at most so many bytes do not wait: frame headers (12 bytes) and pings.
const HEADER: usize = 64;

/// How long a chunk of a slow network may take, and the least unused time that is made up for.
pub const SLICE: Duration = Duration::from_millis(20);

/// Names a request that waits.
pub type Ticket = u64;

/// Whether a connection may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// So many bytes, now.
    Now(usize),
    /// Later; [`Pacer::release`] says when.
    Wait(Ticket),
}

/// What was given so far to a connection, or to several that count as one, on the scale of all shares.
#[derive(Debug, Default)]
pub struct UploadShare {
    /// Where its next request begins.
    end: AtomicU64,
}

/// A request in the queue.
#[derive(Clone, Copy, Debug)]
struct QueuedSend {
    start: u64,
    bytes: usize,
}

/// The bucket and the queue.
#[derive(Debug)]
pub struct Pacer {
    bytes_per_s: f64,
    /// How much unused time is made up for.
    saved: Duration,
    /// Bytes that may be sent; below 0 while a chunk that was given is paid off.
    tokens: f64,
    /// When `tokens` was right.
    at: Instant,
    /// Virtual time.
    now: u64,
    tickets: Ticket,
    /// The requests that wait, by finish tag.
    queue: BTreeMap<(u64, Ticket), QueuedSend>,
    /// Start tags of the requests that wait.
    starts: BTreeSet<(u64, Ticket)>,
}

impl Pacer {
    /// A full bucket of so many bytes per second, at least one, that holds those of the time `saved`.
    pub fn new(bytes_per_s: u64, saved: Duration, at: Instant) -> Pacer {
        let mut pacer = Pacer {
            bytes_per_s: bytes_per_s.max(1) as f64,
            saved: saved.max(SLICE),
            tokens: 0.0,
            at,
            now: 0,
            tickets: 0,
            queue: BTreeMap::new(),
            starts: BTreeSet::new(),
        };
        pacer.tokens = pacer.most();
        pacer
    }

    /// Another rate from now on. What was given stays given.
    pub fn set_rate(&mut self, bytes_per_s: u64, now: Instant) {
        self.fill(now);
        self.bytes_per_s = bytes_per_s.max(1) as f64;
        self.tokens = self.tokens.min(self.most());
    }

    /// Bytes that the bucket holds.
    fn most(&self) -> f64 {
        (self.bytes_per_s * self.saved.as_secs_f64()).max(LEAST_CHUNK as f64)
    }

    /// Bytes that are given at once.
    fn chunk(&self) -> usize {
        // Within the bounds of a chunk, so nothing is cut.
        ((self.bytes_per_s * SLICE.as_secs_f64()) as usize).clamp(LEAST_CHUNK, CHUNK)
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens = (self.tokens + passed * self.bytes_per_s).min(self.most());
        self.at = self.at.max(now);
    }

    /// A connection wants to send `bytes`.
    pub fn ask(&mut self, share: &UploadShare, bytes: usize, now: Instant) -> Grant {
        let bytes = bytes.min(self.chunk());
        let start = share.end.load(Ordering::Relaxed).max(self.now);
        let end = start.saturating_add(bytes as u64);
        share.end.store(end, Ordering::Relaxed);
        self.fill(now);
        if self.queue.is_empty() && self.tokens > 0.0 {
            self.tokens -= bytes as f64;
            self.now = start;
            return Grant::Now(bytes);
        }
        // The debt has a bound, so that headers alone cannot exceed the limit either.
        if bytes <= HEADER && self.tokens > -2.0 * self.chunk() as f64 {
            self.tokens -= bytes as f64;
            return Grant::Now(bytes);
        }
        self.tickets += 1;
        self.queue.insert((end, self.tickets), QueuedSend { start, bytes });
        self.starts.insert((start, self.tickets));
        Grant::Wait(self.tickets)
    }

    /// The requests that may be served now with their bytes, in order, and when to ask again if
    /// others wait.
    pub fn release(&mut self, now: Instant) -> (Vec<(Ticket, usize)>, Option<Instant>) {
        self.fill(now);
        let mut served = Vec::new();
        while self.tokens > 0.0
            && let Some(((_, ticket), QueuedSend { start, bytes })) = self.queue.pop_first()
        {
            // The request that is served counts: its connection asks again only later.
            let least = self.starts.first().map_or(start, |(least, _)| *least);
            self.starts.remove(&(start, ticket));
            self.now = self.now.max(least);
            self.tokens -= bytes as f64;
            served.push((ticket, bytes));
        }
        // A little later than the last debt is paid, so that there is a token then.
        let paid = Duration::from_secs_f64((1.0 - self.tokens.min(0.0)) / self.bytes_per_s);
        (served, (!self.queue.is_empty()).then(|| self.at + paid))
    }

    /// A connection did not send so many of its bytes.
    pub fn give_back(&mut self, bytes: usize) {
        self.tokens = (self.tokens + bytes as f64).min(self.most());
    }

    /// A connection that waited is gone.
    pub fn forget(&mut self, ticket: Ticket) {
        self.queue.retain(|(_, waiting), _| *waiting != ticket);
        self.starts.retain(|(_, waiting)| *waiting != ticket);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const MB_PER_S: u64 = 1_000_000;

    /// One for each of so many connections.
    fn shares(count: usize) -> Vec<UploadShare> {
        (0..count).map(|_| UploadShare::default()).collect()
    }

    /// Connections that want to send so many bytes, served until `time` has passed; the bytes that
    /// each has sent, and when each was done.
    struct Run {
        sent: Vec<usize>,
        done: Vec<Option<Duration>>,
    }

    fn run(bytes_per_s: u64, wants: &[(Duration, usize)], time: Duration) -> Run {
        let own: Vec<usize> = (0..wants.len()).collect();
        run_shared(bytes_per_s, wants, &own, time)
    }

    /// The same; connections with the same number share a share.
    fn run_shared(
        bytes_per_s: u64,
        wants: &[(Duration, usize)],
        share_of: &[usize],
        time: Duration,
    ) -> Run {
        let start = Instant::now();
        let mut pacer = Pacer::new(bytes_per_s, SLICE, start);
        let shares = shares(wants.len());
        let mut waiting: HashMap<Ticket, usize> = HashMap::new();
        let mut run = Run { sent: vec![0; wants.len()], done: vec![None; wants.len()] };
        let mut idle: Vec<usize> = (0..wants.len()).collect();
        let mut now = start;
        while now < start + time {
            let (served, next) = pacer.release(now);
            for (ticket, bytes) in served {
                let connection = waiting.remove(&ticket).unwrap();
                run.sent[connection] += bytes;
                idle.push(connection);
            }
            let asks = |c: &usize| wants[*c].0 <= now - start && run.done[*c].is_none();
            let (ready, later): (Vec<usize>, Vec<usize>) = idle.into_iter().partition(asks);
            idle = later;
            let mut went = false;
            for connection in ready {
                let left = wants[connection].1 - run.sent[connection];
                if left == 0 {
                    run.done[connection] = Some(now - start);
                    continue;
                }
                match pacer.ask(&shares[share_of[connection]], left, now) {
                    Grant::Now(bytes) => {
                        run.sent[connection] += bytes;
                        idle.push(connection);
                        went = true;
                    }
                    Grant::Wait(ticket) => drop(waiting.insert(ticket, connection)),
                }
            }
            if !went {
                now = next
                    .unwrap_or(now + Duration::from_millis(1))
                    .min(now + Duration::from_millis(1))
                    .max(now + Duration::from_micros(50));
            }
        }
        run
    }

    #[test]
    fn no_more_goes_out_than_allowed_and_no_less_is_used() {
        for rate in [20_000, MB_PER_S, 125 * MB_PER_S] {
            let second = Duration::from_secs(1);
            let run = run(rate, &[(Duration::ZERO, usize::MAX / 2); 3], second);
            let sent: usize = run.sent.iter().sum();
            let most = rate as f64 * 1.02 + 2.0 * CHUNK as f64;
            assert!((sent as f64) <= most, "{rate}: {sent}");
            assert!(sent as f64 >= rate as f64 * 0.95, "{rate}: {sent}");
        }
    }

    #[test]
    fn connections_that_send_much_get_the_same() {
        let run = run(MB_PER_S, &[(Duration::ZERO, usize::MAX / 2); 4], Duration::from_secs(2));
        let (least, most) = (run.sent.iter().min().unwrap(), run.sent.iter().max().unwrap());
        assert!(most - least <= 2 * CHUNK, "{:?}", run.sent);
    }

    #[test]
    fn connections_with_one_share_get_as_much_as_one_and_what_the_others_leave() {
        let (busy, second) = ((Duration::ZERO, usize::MAX / 2), Duration::from_secs(1));
        let short = (Duration::ZERO, 300_000);
        let run = run_shared(MB_PER_S, &[short, busy, busy, busy], &[0, 1, 1, 1], second);
        // Half of the rate, until it has sent all.
        let done = run.done[0].unwrap();
        assert!(done.abs_diff(Duration::from_millis(600)) < Duration::from_millis(80), "{done:?}");
        let shared: usize = run.sent[1..].iter().sum();
        assert!(shared.abs_diff(700_000) < 80_000, "{:?}", run.sent);
    }

    #[test]
    fn a_small_answer_goes_before_bulk_that_came_first() {
        let late = Duration::from_millis(500);
        let mut wants = vec![(Duration::ZERO, usize::MAX / 2); 8];
        wants.push((late, 4096));
        let run = run(MB_PER_S, &wants, Duration::from_secs(1));
        let waited = run.done[8].unwrap() - late;
        // A chunk of another connection, and its own.
        let chunks = Duration::from_secs_f64(2.5 * CHUNK as f64 / MB_PER_S as f64);
        assert!(waited <= chunks, "{waited:?}");
    }

    /// Bytes of others that are sent before the 4 KB of a newcomer, which asks after so many grants to
    /// `busy` connections. These begin at the same tag, or at tags that are spread over a chunk.
    fn bytes_before_a_newcomer(busy: usize, grants: usize, is_spread: bool) -> usize {
        let mut now = Instant::now();
        let mut pacer = Pacer::new(MB_PER_S, SLICE, now);
        let shares = shares(busy);
        let mut waiting: HashMap<Ticket, usize> = HashMap::new();
        let first = |n: usize| if is_spread { (n + 1) * CHUNK / busy } else { CHUNK };
        let mut ready: Vec<(usize, usize)> = (0..busy).map(|n| (n, first(n))).collect();
        let (mut granted, mut before, mut small) = (0, 0, None);
        loop {
            while let Some((connection, bytes)) = ready.pop() {
                // As yamux writes: a header, and then a body.
                pacer.ask(&shares[connection], 12, now);
                match pacer.ask(&shares[connection], bytes, now) {
                    Grant::Now(_) => ready.push((connection, CHUNK)),
                    Grant::Wait(ticket) => drop(waiting.insert(ticket, connection)),
                }
            }
            if granted >= grants && small.is_none() {
                let share = UploadShare::default();
                assert_eq!(pacer.ask(&share, 12, now), Grant::Now(12), "a header waits");
                let Grant::Wait(ticket) = pacer.ask(&share, 4096, now) else { return 0 };
                small = Some(ticket);
            }
            let (served, next) = pacer.release(now);
            for (ticket, bytes) in served {
                if small == Some(ticket) {
                    return before;
                }
                granted += 1;
                before += if small.is_some() { bytes } else { 0 };
                ready.extend(waiting.remove(&ticket).map(|connection| (connection, CHUNK)));
            }
            now = next.unwrap_or(now);
        }
    }

    #[test]
    fn a_newcomer_waits_for_at_most_one_chunk_in_any_phase_of_a_round() {
        for busy in [8, 64] {
            for (grants, is_spread) in (busy..3 * busy).flat_map(|n| [(n, false), (n, true)]) {
                let before = bytes_before_a_newcomer(busy, grants, is_spread);
                assert!(before <= CHUNK, "{busy} busy, {grants} grants, {is_spread}: {before}");
            }
        }
    }

    #[test]
    fn headers_do_not_wait_while_the_debt_is_small() {
        let start = Instant::now();
        let mut pacer = Pacer::new(MB_PER_S, SLICE, start);
        let share = UploadShare::default();
        let headers =
            (0..10_000).take_while(|_| matches!(pacer.ask(&share, 12, start), Grant::Now(12)));
        // The bucket of 20 ms, and a debt of two chunks.
        assert!((4000..=4400).contains(&headers.count()));
    }

    #[test]
    fn a_connection_that_was_silent_saves_nothing_up() {
        let late = Duration::from_millis(500);
        let wants = [(Duration::ZERO, usize::MAX / 2), (late, usize::MAX / 2)];
        let run = run(MB_PER_S, &wants, Duration::from_millis(1500));
        let alone = 500_000;
        let shared = run.sent[0] - alone;
        assert!(shared.abs_diff(run.sent[1]) <= 3 * CHUNK, "{:?}", run.sent);
    }

    #[test]
    fn unused_time_is_made_up_for_in_chunks_of_the_same_size_and_no_longer_than_said() {
        let (start, saved) = (Instant::now(), Duration::from_secs(3));
        let mut pacer = Pacer::new(MB_PER_S, saved, start);
        let share = UploadShare::default();
        let at_once = |pacer: &mut Pacer, now| {
            let granted = std::iter::from_fn(|| match pacer.ask(&share, usize::MAX, now) {
                Grant::Now(bytes) => Some(bytes),
                Grant::Wait(ticket) => {
                    pacer.forget(ticket);
                    None
                }
            });
            let granted: Vec<usize> = granted.collect();
            assert!(granted.iter().all(|bytes| *bytes <= CHUNK));
            granted.into_iter().sum::<usize>()
        };
        let about = |bytes: usize, wanted: usize| bytes.abs_diff(wanted) <= 2 * CHUNK;
        let bytes = at_once(&mut pacer, start);
        assert!(about(bytes, 3_000_000), "{bytes} of a full bucket");
        let bytes = at_once(&mut pacer, start + Duration::from_secs(1));
        assert!(about(bytes, 1_000_000), "{bytes} after a second");
        let bytes = at_once(&mut pacer, start + Duration::from_secs(60));
        assert!(about(bytes, 3_000_000), "{bytes} after a minute");
        pacer.set_rate(MB_PER_S / 10, start + Duration::from_secs(120));
        let bytes = at_once(&mut pacer, start + Duration::from_secs(120));
        assert!(about(bytes, 300_000), "{bytes} at a tenth of the rate");
    }

    #[test]
    fn what_was_not_sent_is_given_back_and_who_is_gone_waits_no_more() {
        let start = Instant::now();
        let mut pacer = Pacer::new(MB_PER_S, SLICE, start);
        let (one, two) = (UploadShare::default(), UploadShare::default());
        assert_eq!(pacer.ask(&one, CHUNK, start), Grant::Now(CHUNK));
        assert_eq!(pacer.ask(&one, CHUNK, start), Grant::Now(CHUNK));
        let Grant::Wait(ticket) = pacer.ask(&one, CHUNK, start) else { panic!("empty") };
        let Grant::Wait(gone) = pacer.ask(&two, CHUNK, start) else { panic!("empty") };
        pacer.forget(gone);
        pacer.give_back(2 * CHUNK);
        assert_eq!(pacer.release(start), (vec![(ticket, CHUNK)], None));
    }
}
