//! Which stream of a connection sends the next frame. Pure.
//!
//! A stream that sends little goes first, so that a token never waits behind a prefill. Streams that send much go one after the other,
//! the oldest first: answers of equal size that share the line all arrive at the end, while answers in a row let the peer go on
//! with the first of them after a part of the time. (A client that sends eight parts of a batch through a chain of three servers
//! then has both directions of its line busy at once.) Every [`SHARE`]th frame goes to those that send much in turn: nobody starves.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Bound::{Excluded, Unbounded},
    time::Instant,
};

/// What a stream sends before it counts as one that sends much.
const ALLOWANCE_BYTES: usize = 64 << 10;
/// How fast a stream without anything to send regains its allowance.
const REGAINED_BYTES_PER_MS: u128 = 8 << 10;
/// One of so many frames is sent by those that send much in turn.
const SHARE: u32 = 8;

/// The streams of a connection that have something to send, each once.
#[derive(Debug, Default)]
pub(super) struct Turns {
    light: VecDeque<u32>,
    /// By age: the number that a stream drew when its allowance was used up.
    heavy: BTreeMap<u64, u32>,
    drawn: u64,
    frames: u32,
    /// Who of the heavy ones sent last when they took turns.
    shared: u64,
}

/// How much a stream has sent lately.
#[derive(Debug)]
pub(super) struct Spending {
    spent: usize,
    /// Since when it has nothing to send; `None` while it has.
    idle_since: Option<Instant>,
    age: Option<u64>,
}

impl Spending {
    pub(super) fn new(now: Instant) -> Self {
        Self { spent: 0, idle_since: Some(now), age: None }
    }

    /// The stream has sent so many bytes and has no more.
    pub(super) fn end(&mut self, bytes: usize, now: Instant) {
        self.spend(bytes);
        self.idle_since = Some(now);
    }

    fn spend(&mut self, bytes: usize) {
        self.spent = self.spent.saturating_add(bytes).min(2 * ALLOWANCE_BYTES);
    }

    fn regain(&mut self, since: Instant, now: Instant) {
        let passed = now.saturating_duration_since(since).as_micros();
        let regained = usize::try_from(passed * REGAINED_BYTES_PER_MS / 1000).unwrap_or(usize::MAX);
        self.spent = self.spent.saturating_sub(regained);
        if self.spent == 0 {
            self.age = None;
        }
    }
}

impl Turns {
    pub(super) fn is_empty(&self) -> bool {
        self.light.is_empty() && self.heavy.is_empty()
    }

    /// A stream that had nothing to send has something; nothing happens if it had.
    pub(super) fn begin(&mut self, id: u32, spending: &mut Spending, now: Instant) {
        let Some(since) = spending.idle_since.take() else { return };
        spending.regain(since, now);
        self.enter(id, spending);
    }

    /// The stream that sends the next frame. [`sent`](Self::sent) or [`Spending::end`] follows.
    pub(super) fn next(&mut self) -> Option<u32> {
        self.frames = self.frames.wrapping_add(1);
        let shares = self.frames.is_multiple_of(SHARE);
        let light = if shares && !self.heavy.is_empty() { None } else { self.light.pop_front() };
        light.or_else(|| {
            let after = if shares { self.shared } else { 0 };
            let mut later = self.heavy.range((Excluded(after), Unbounded));
            let (age, id) = later.next().or_else(|| self.heavy.first_key_value())?;
            let (age, id) = (*age, *id);
            if shares {
                self.shared = age;
            }
            self.heavy.remove(&age);
            Some(id)
        })
    }

    /// A stream has sent so many bytes and has more.
    pub(super) fn sent(&mut self, id: u32, spending: &mut Spending, bytes: usize) {
        spending.spend(bytes);
        self.enter(id, spending);
    }

    /// A stream is gone, whatever it had to send.
    pub(super) fn forget(&mut self, id: u32, spending: &Spending) {
        match (spending.idle_since, spending.age) {
            (Some(_), _) => {}
            (None, Some(age)) => drop(self.heavy.remove(&age)),
            (None, None) => self.light.retain(|other| *other != id),
        }
    }

    fn enter(&mut self, id: u32, spending: &mut Spending) {
        if spending.age.is_none() && spending.spent >= ALLOWANCE_BYTES {
            self.drawn += 1;
            spending.age = Some(self.drawn);
        }
        match spending.age {
            Some(age) => drop(self.heavy.insert(age, id)),
            None => self.light.push_back(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, time::Duration};

    use super::*;

    const FRAME: usize = 16 << 10;

    /// Streams that have so many frames to send.
    struct Line {
        turns: Turns,
        streams: HashMap<u32, (Spending, usize)>,
        now: Instant,
    }

    impl Line {
        fn new() -> Self {
            Self { turns: Turns::default(), streams: HashMap::new(), now: Instant::now() }
        }

        fn write(&mut self, id: u32, frames: usize) {
            let now = self.now;
            let (spending, left) =
                self.streams.entry(id).or_insert_with(|| (Spending::new(now), 0));
            *left += frames;
            self.turns.begin(id, spending, now);
        }

        fn sends(&mut self) -> Option<u32> {
            let id = self.turns.next()?;
            let (spending, left) = self.streams.get_mut(&id).unwrap();
            *left -= 1;
            match *left {
                0 => spending.end(FRAME, self.now),
                _ => self.turns.sent(id, spending, FRAME),
            }
            Some(id)
        }

        fn all(&mut self) -> Vec<u32> {
            std::iter::from_fn(|| self.sends()).collect()
        }
    }

    #[test]
    fn large_answers_leave_one_after_the_other_and_nobody_starves() {
        let mut line = Line::new();
        (1..=8).for_each(|id| line.write(id, 1000));
        let order = line.all();
        assert_eq!(order.len(), 8000);
        let last = |id| order.iter().rposition(|sent| *sent == id).unwrap();
        assert!((1..8).all(|id| last(id) < last(id + 1)), "in the order of their age");
        assert!(last(1) < 1200, "the first had nearly the whole line: {}", last(1));
        assert!(last(4) < 4500, "{}", last(4));
        let in_the_first = |id| order[..1000].iter().filter(|sent| **sent == id).count();
        assert!((2..=8).all(|id| in_the_first(id) >= 15), "every stream goes on meanwhile");
    }

    #[test]
    fn what_sends_little_goes_first_however_long_it_has_been_open() {
        let mut line = Line::new();
        (1..=3).for_each(|id| line.write(id, 1_000_000));
        for _ in 0..100 {
            line.sends();
        }
        for step in 0..1000 {
            line.now += Duration::from_millis(2);
            line.write(9, 1);
            let waited = (0..).find(|_| line.sends() == Some(9)).unwrap();
            assert!(waited <= 1, "step {step} waited for {waited} frames");
        }
    }

    #[test]
    fn many_that_send_little_leave_an_eighth_to_one_that_sends_much() {
        let mut line = Line::new();
        line.write(1, 1_000_000);
        for _ in 0..10 {
            line.sends();
        }
        let mut heavy = 0;
        for id in 2..802 {
            line.write(id, 1);
            heavy += usize::from(line.sends() == Some(1));
        }
        assert_eq!(heavy, 100);
    }

    /// The senders of 70 frames after stream 1 sent much, paused, and goes on beside 2, which has begun meanwhile.
    fn after_a_pause(pause: Duration) -> Vec<u32> {
        let mut line = Line::new();
        line.write(1, 10);
        assert_eq!(line.all().len(), 10);
        line.write(2, 100);
        for _ in 0..20 {
            line.sends();
        }
        line.now += pause;
        line.write(1, 100);
        (0..70).filter_map(|_| line.sends()).collect()
    }

    #[test]
    fn a_stream_that_was_idle_is_young_again_and_one_that_paused_is_not() {
        let of_the_first = |pause| after_a_pause(pause).iter().filter(|id| **id == 1).count();
        let paused = of_the_first(Duration::from_millis(1));
        assert!(paused >= 60, "older than 2: {paused}");
        let idle = of_the_first(Duration::from_secs(1));
        assert!((5..20).contains(&idle), "its allowance and its share: {idle}");
    }

    #[test]
    fn a_stream_that_is_gone_leaves_nothing_behind() {
        let mut line = Line::new();
        // Much, little, and nothing left.
        [(1, 100), (2, 1), (3, 1)].into_iter().for_each(|(id, frames)| line.write(id, frames));
        let sent: Vec<_> = (0..7).filter_map(|_| line.sends()).collect();
        assert!(sent.contains(&2) && sent.contains(&3), "{sent:?}");
        line.write(2, 1);
        for id in [1, 2, 3] {
            line.turns.forget(id, &line.streams[&id].0);
        }
        assert!(line.turns.is_empty(), "{:?}", line.turns);
    }

    #[test]
    fn a_stream_that_has_something_to_send_is_there_once() {
        let mut line = Line::new();
        line.write(1, 2);
        line.write(1, 2);
        assert_eq!(line.all(), [1, 1, 1, 1]);
        assert!(line.turns.is_empty());
    }
}
