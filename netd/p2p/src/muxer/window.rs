//! How much a peer may send unread on a stream, and how that grows. Pure.
//!
//! Every stream begins with the protocol's window. The window grows only while its reader drains: when three quarters of it are read
//! within one round trip, it doubles. It ends between 1.3 and 2.7 times what the line carries in a round trip. More would do harm: what
//! the peer has in flight then overflows the queue of the line, and a TCP that always waits for its program never learns its rate (BBR
//! stays in its start-up, at 2.9 times the rate of the line). A stream whose connection has carried a larger window before jumps to that one as soon as its
//! reader has drained a few frames within a round trip, because a new stream of a warm connection meets the same line.
//!
//! What a window has grown by is memory that the peer can make us hold. It counts twice: in the bound of the connection and in the
//! pools of the peer, its net and the process. It is given back when the stream ends. A window that stays nearly empty is halved every
//! [`SLACK_PERIOD`]. Credit cannot be taken back, so the peer gets none until it has used up what is above the smaller window, and what
//! counts falls as it does.

use std::{
    cmp::max,
    time::{Duration, Instant},
};

use resource_manager::pools::Reservation;

use super::{
    super::limits::{MAX_WINDOW_GROWTH_BYTES, MAX_WINDOW_GROWTH_OF_STREAM_BYTES},
    Quota,
};

/// The window of a stream at first, by the protocol.
pub(super) const FIRST_WINDOW: u32 = 256 << 10;
/// Credit of this size is worth a frame even if an eighth of the window is more. Larger parts would slow a paced sender down: with half
/// a window, it gets half a window per round trip.
const WORTHY_CREDIT: u32 = 1 << 20;
/// A stream that has drained so much within a round trip is one of those that carry much.
const BULK_BYTES: u32 = 32 << 10;
/// Growth that is not worth the trouble.
const LEAST_GROWTH: u32 = 64 << 10;
/// How long a window must have been nearly empty before it is halved.
const SLACK_PERIOD: Duration = Duration::from_secs(10);
/// A window is nearly empty if no round trip drained this part of it.
const SLACK_PART: u32 = 8;
/// No line is longer: a peer that answers pings late gains nothing.
const LONGEST_ROUND_TRIP: Duration = Duration::from_secs(1);

/// What the windows of a connection may still grow by.
#[derive(Debug)]
pub(super) struct Growth {
    left: usize,
    /// The largest window that a reader has drained.
    proven: u32,
    quota: Option<Quota>,
}

/// The window of one stream.
#[derive(Debug)]
pub(super) struct Window {
    size: u32,
    /// What the peer may still send.
    left: u32,
    unread: u32,
    /// Since when `drained` counts.
    since: Instant,
    drained: u32,
    /// The most that a round trip drained since the window was last resized, or nearly empty for a period.
    peak: u32,
    resized: Instant,
    /// What counts beyond the first window: as much as the peer may leave unread.
    counted: u32,
    held: Option<Reservation>,
}

impl Growth {
    pub(super) fn new(quota: Option<Quota>) -> Self {
        Self { left: MAX_WINDOW_GROWTH_BYTES, proven: FIRST_WINDOW, quota }
    }

    /// Takes bytes from the connection and from the pools; false, and nothing changes, if there is no room.
    fn take(&mut self, held: &mut Option<Reservation>, bytes: u32) -> bool {
        let bytes = bytes as usize;
        if bytes > self.left {
            return false;
        }
        let has_room = match (&self.quota, held.as_mut()) {
            (None, _) => true,
            (Some(_), Some(held)) => held.try_grow(bytes),
            (Some(quota), None) => {
                *held = quota.grow(bytes);
                held.is_some()
            }
        };
        if has_room {
            self.left -= bytes;
        }
        has_room
    }

    /// Takes bytes back.
    fn give_back(&mut self, held: &mut Option<Reservation>, bytes: u32) {
        self.left += bytes as usize;
        if let Some(held) = held {
            held.shrink(bytes as usize);
        }
    }
}

impl Window {
    pub(super) fn new(now: Instant) -> Self {
        let (size, left) = (FIRST_WINDOW, FIRST_WINDOW);
        let (since, resized) = (now, now);
        Self { size, left, unread: 0, since, drained: 0, peak: 0, resized, counted: 0, held: None }
    }

    /// Counts bytes that are about to be received; false if the peer may not send them.
    #[must_use]
    pub(super) fn receive(&mut self, bytes: u32) -> bool {
        let Some(left) = self.left.checked_sub(bytes) else {
            return false;
        };
        self.left = left;
        self.unread += bytes;
        true
    }

    /// Counts bytes that were read, and returns the credit that the peer gets now: zero for none.
    pub(super) fn drain(
        &mut self,
        bytes: u32,
        now: Instant,
        round_trip: Option<Duration>,
        growth: &mut Growth,
    ) -> u32 {
        self.unread = self.unread.saturating_sub(bytes);
        self.drained = self.drained.saturating_add(bytes);
        if let Some(round_trip) = round_trip {
            self.adapt(bytes, now, round_trip.min(LONGEST_ROUND_TRIP), growth);
        }
        self.count_less(growth);
        let credit = self.size.saturating_sub(self.left).saturating_sub(self.unread);
        if credit < WORTHY_CREDIT.min(self.size / 8) {
            return 0;
        }
        self.left += credit;
        credit
    }

    /// Whether the peer may send anything now.
    pub(super) fn has_room(&self) -> bool {
        self.left > 0
    }

    /// Gives back what the window has grown by.
    pub(super) fn end(&mut self, growth: &mut Growth) {
        growth.left += self.counted as usize;
        (self.size, self.counted) = (FIRST_WINDOW, 0);
        self.held = None;
    }

    fn adapt(&mut self, bytes: u32, now: Instant, round_trip: Duration, growth: &mut Growth) {
        let passed = now.saturating_duration_since(self.since);
        let is_bulk = self.drained >= BULK_BYTES && self.size < growth.proven;
        let is_filled = self.is_filled(passed, round_trip);
        if is_filled || is_bulk && passed <= round_trip {
            let wanted = if is_filled { self.size.saturating_mul(2) } else { self.size };
            self.grow(max(wanted, growth.proven), growth);
            growth.proven = max(growth.proven, if is_filled { self.size } else { 0 });
            (self.since, self.drained) = (now, 0);
            (self.resized, self.peak) = (now, 0);
        } else if passed > round_trip {
            self.peak = max(self.peak, self.drained);
            (self.since, self.drained) = (now, bytes);
            self.halve_if_slack(now);
        }
    }

    /// Halves a window of which every round trip of a period drained little.
    fn halve_if_slack(&mut self, now: Instant) {
        if now.saturating_duration_since(self.resized) < SLACK_PERIOD {
            return;
        }
        if self.peak < self.size / SLACK_PART {
            self.size = max(FIRST_WINDOW, self.size / 2);
        }
        (self.resized, self.peak) = (now, 0);
    }

    /// Gives back what the peer can no longer make us hold.
    fn count_less(&mut self, growth: &mut Growth) {
        let largest = max(self.size, self.left.saturating_add(self.unread));
        let needed = largest.saturating_sub(FIRST_WINDOW);
        let over = self.counted.saturating_sub(needed);
        if over > 0 {
            growth.give_back(&mut self.held, over);
            self.counted = needed;
        }
    }

    /// Whether three quarters of the window were drained within a round trip, or as fast over a longer time.
    fn is_filled(&self, passed: Duration, round_trip: Duration) -> bool {
        let round_trips = (passed.as_secs_f64() / round_trip.as_secs_f64().max(1e-6)).max(1.0);
        f64::from(self.drained) >= 0.75 * f64::from(self.size) * round_trips
    }

    /// Grows to `size`, or by as large a part of the difference as there is room for. A stream takes at most half of what the connection
    /// has for it, because a window of a stream that is silent is not taken back.
    fn grow(&mut self, size: u32, growth: &mut Growth) {
        let largest = FIRST_WINDOW + MAX_WINDOW_GROWTH_OF_STREAM_BYTES;
        let half = u32::try_from((growth.left + self.counted as usize) / 2).unwrap_or(u32::MAX);
        let wanted = size.min(largest).saturating_sub(self.size);
        // What still counts of a larger window of before needs no room again.
        let uncounted = |more: u32| (self.size + more - FIRST_WINDOW).saturating_sub(self.counted);
        let mut more = wanted.min((FIRST_WINDOW + half).saturating_sub(self.size));
        while more >= LEAST_GROWTH {
            let extra = uncounted(more);
            if extra == 0 || growth.take(&mut self.held, extra) {
                self.counted += extra;
                self.size += more;
                return;
            }
            more /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_TRIP: Duration = Duration::from_millis(100);

    /// A peer that sends all that it may, `times` round trips of `each`, to a reader that drains all: the bytes of each round trip.
    fn bursts(window: &mut Window, growth: &mut Growth, times: u32, each: Duration) -> Vec<u32> {
        let start = Instant::now();
        let burst = |time| {
            let (now, sent) = (start + each * time, window.left);
            assert!(window.receive(sent));
            let mut left = sent;
            while left > 0 {
                let part = left.min(16 << 10);
                window.drain(part, now, Some(ROUND_TRIP), growth);
                left -= part;
            }
            sent
        };
        (0..times).map(burst).collect()
    }

    #[test]
    fn a_window_doubles_each_round_trip_while_it_is_drained_and_no_further_than_its_bound() {
        let (mut window, mut growth) = (Window::new(Instant::now()), Growth::new(None));
        let sent = bursts(&mut window, &mut growth, 12, ROUND_TRIP);
        assert!(
            sent.iter().zip(sent.iter().skip(1)).take(6).all(|(one, next)| *next >= *one * 3 / 2),
            "{sent:?}"
        );
        assert_eq!(window.size, FIRST_WINDOW + MAX_WINDOW_GROWTH_OF_STREAM_BYTES);
        window.end(&mut growth);
        assert_eq!(growth.left, MAX_WINDOW_GROWTH_BYTES);
    }

    #[test]
    fn a_window_stays_where_nobody_reads_or_little_comes() {
        let (mut window, mut growth) = (Window::new(Instant::now()), Growth::new(None));
        assert!(window.receive(FIRST_WINDOW));
        assert!(!window.receive(1), "everything is unread");
        assert_eq!(window.size, FIRST_WINDOW);

        let mut slow = Window::new(Instant::now());
        for second in 0..100 {
            assert!(slow.receive(100 << 10));
            let now = Instant::now() + Duration::from_secs(second);
            slow.drain(100 << 10, now, Some(ROUND_TRIP), &mut growth);
        }
        assert_eq!(slow.size, FIRST_WINDOW);

        let mut unmeasured = Window::new(Instant::now());
        assert!(unmeasured.receive(FIRST_WINDOW));
        unmeasured.drain(FIRST_WINDOW, Instant::now(), None, &mut growth);
        assert_eq!(unmeasured.size, FIRST_WINDOW);
    }

    #[test]
    fn a_window_that_stays_nearly_empty_is_taken_back_as_its_credit_is_used() {
        let (mut window, mut growth) = (Window::new(Instant::now()), Growth::new(None));
        bursts(&mut window, &mut growth, 12, ROUND_TRIP);
        let grown = MAX_WINDOW_GROWTH_OF_STREAM_BYTES;
        assert_eq!(growth.left, MAX_WINDOW_GROWTH_BYTES - grown as usize);
        // Decode steps of 16 KiB, ten a second: in a hundred seconds, the peer uses up as much as the window has grown by.
        let (start, step) = (Instant::now() + 12 * ROUND_TRIP, 16 << 10);
        for number in 1..=1100 {
            assert!(window.receive(step), "step {number}");
            let now = start + (ROUND_TRIP + Duration::from_millis(1)) * number;
            window.drain(step, now, Some(ROUND_TRIP), &mut growth);
            let may_hold = window.left + window.unread;
            assert!(window.counted >= may_hold.saturating_sub(FIRST_WINDOW), "step {number}");
        }
        assert_eq!((window.size, window.counted), (FIRST_WINDOW, 0));
        assert_eq!(growth.left, MAX_WINDOW_GROWTH_BYTES);
        assert!(window.left <= FIRST_WINDOW, "{}", window.left);
        // It grows again when much comes.
        bursts(&mut window, &mut growth, 12, ROUND_TRIP);
        assert_eq!(window.counted, grown);
        window.end(&mut growth);
        assert_eq!(growth.left, MAX_WINDOW_GROWTH_BYTES);
    }

    #[test]
    fn a_window_of_which_a_good_part_is_used_is_left_alone() {
        let (mut window, mut growth) = (Window::new(Instant::now()), Growth::new(None));
        bursts(&mut window, &mut growth, 12, ROUND_TRIP);
        let (size, start) = (window.size, Instant::now() + 12 * ROUND_TRIP);
        for number in 1..=300 {
            assert!(window.receive(size / 6));
            let now = start + (ROUND_TRIP + Duration::from_millis(1)) * number;
            window.drain(size / 6, now, Some(ROUND_TRIP), &mut growth);
        }
        assert_eq!(window.size, size);
    }

    #[test]
    fn a_new_stream_of_a_warm_connection_has_its_window_after_a_few_frames() {
        let mut growth = Growth::new(None);
        let mut first = Window::new(Instant::now());
        bursts(&mut first, &mut growth, 8, ROUND_TRIP);
        let warm = first.size;
        first.end(&mut growth);
        let mut next = Window::new(Instant::now());
        assert!(next.receive(BULK_BYTES));
        assert!(next.drain(BULK_BYTES, Instant::now(), Some(ROUND_TRIP), &mut growth) > warm / 2);
        assert_eq!(next.size, warm);
    }

    #[test]
    fn windows_of_a_connection_share_its_growth_and_leave_some_to_the_next() {
        let mut growth = Growth::new(None);
        let mut windows: Vec<_> = (0..6).map(|_| Window::new(Instant::now())).collect();
        for window in &mut windows {
            bursts(window, &mut growth, 12, ROUND_TRIP);
        }
        let grown: Vec<_> = windows.iter().map(|window| window.size - FIRST_WINDOW).collect();
        assert!(grown.iter().all(|grown| *grown >= 1 << 20), "{grown:?}");
        assert!(grown.iter().sum::<u32>() as usize <= MAX_WINDOW_GROWTH_BYTES, "{grown:?}");
        let largest = windows[0].size;
        for mut window in windows {
            window.end(&mut growth);
        }
        assert_eq!(growth.left, MAX_WINDOW_GROWTH_BYTES);
        assert_eq!(largest, FIRST_WINDOW + MAX_WINDOW_GROWTH_OF_STREAM_BYTES);
    }
}
