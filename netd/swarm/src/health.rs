//! What a client, or a server of its neighbours, remembers between two looks at the swarm: how far
//! away others are, and which of them failed. Pure: the time is passed in. Source: petals
//! `client/routing/sequence_manager.py` and `utils/ping.py`.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// First ban of a server that failed; doubles with each failure.
const BAN: Duration = Duration::from_secs(15);
/// Doublings of a ban: the longest is a bit over four hours.
const MAX_DOUBLINGS: u32 = 10;
/// Weight of the newest round trip.
const SMOOTHING: f64 = 0.2;
/// A round trip that is older is measured anew before it counts.
const PING_LIFE: Duration = Duration::from_secs(300);

/// Servers whose rates are remembered.
const MAX_RATES: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct Ban {
    until: Instant,
    failures: u32,
}

/// Servers that failed.
#[derive(Debug)]
pub struct Bans<P> {
    bans: HashMap<P, Ban>,
}

impl<P> Default for Bans<P> {
    fn default() -> Bans<P> {
        Bans { bans: HashMap::new() }
    }
}

impl<P: Eq + Hash> Bans<P> {
    /// A server failed: it is avoided for 15 s, twice as long with each failure after a ban. What
    /// fails while the server is banned counts as the same failure.
    pub fn failed(&mut self, peer: P, now: Instant) {
        let ban = self.bans.entry(peer).or_insert(Ban { until: now, failures: 0 });
        if ban.until <= now {
            ban.until = now + BAN * (1 << ban.failures.min(MAX_DOUBLINGS));
            ban.failures += 1;
        }
    }

    /// A server answered: its failures are forgotten.
    pub fn answered(&mut self, peer: &P) {
        self.bans.remove(peer);
    }

    /// Whether a server is to be avoided.
    pub fn banned(&self, peer: &P, now: Instant) -> bool {
        self.bans.get(peer).is_some_and(|ban| ban.until > now)
    }
}

#[derive(Clone, Copy, Debug)]
struct Ping {
    seconds: f64,
    at: Instant,
}

/// Round trips to servers, smoothed.
#[derive(Debug)]
pub struct Pings<P> {
    pings: HashMap<P, Ping>,
}

impl<P> Default for Pings<P> {
    fn default() -> Pings<P> {
        Pings { pings: HashMap::new() }
    }
}

impl<P: Eq + Hash> Pings<P> {
    /// A round trip was measured; infinity for a server that did not answer.
    pub fn measured(&mut self, peer: P, seconds: f64, now: Instant) {
        let old = self.seconds(&peer, now).filter(|old| old.is_finite());
        let seconds = old.map_or(seconds, |old| SMOOTHING * seconds + (1.0 - SMOOTHING) * old);
        self.pings.insert(peer, Ping { seconds, at: now });
        self.pings.retain(|_, ping| now.duration_since(ping.at) < PING_LIFE);
    }

    /// The round trip, if it is known.
    pub fn seconds(&self, peer: &P, now: Instant) -> Option<f64> {
        let ping = self.pings.get(peer)?;
        (now.duration_since(ping.at) < PING_LIFE).then_some(ping.seconds)
    }

    /// All round trips that are known, in any order.
    pub fn known(&self, now: Instant) -> impl Iterator<Item = (&P, f64)> {
        let is_young = move |ping: &Ping| now.duration_since(ping.at) < PING_LIFE;
        let pings = self.pings.iter().filter(move |(_, ping)| is_young(ping));
        pings.map(|(peer, ping)| (peer, ping.seconds))
    }
}

/// Servers that have answered something lately: that they exist is more than a record says.
#[derive(Debug)]
pub struct AnsweringServers<P> {
    last: HashMap<P, Instant>,
}

impl<P> Default for AnsweringServers<P> {
    fn default() -> AnsweringServers<P> {
        AnsweringServers { last: HashMap::new() }
    }
}

impl<P: Eq + Hash> AnsweringServers<P> {
    /// A server has answered.
    pub fn heard(&mut self, peer: P, now: Instant) {
        self.last.retain(|_, last| now.saturating_duration_since(*last) < PING_LIFE);
        self.last.insert(peer, now);
    }

    /// Whether a server has answered within the life of a ping.
    pub fn has_answered(&self, peer: &P, now: Instant) -> bool {
        self.last.get(peer).is_some_and(|last| now.saturating_duration_since(*last) < PING_LIFE)
    }
}

/// Seconds that a block takes for one token on each server, smoothed.
#[derive(Debug)]
pub struct ServerRates<P> {
    seconds: HashMap<P, f64>,
}

impl<P> Default for ServerRates<P> {
    fn default() -> ServerRates<P> {
        ServerRates { seconds: HashMap::new() }
    }
}

impl<P: Eq + Hash> ServerRates<P> {
    /// A block took `seconds`.
    pub fn measured(&mut self, peer: P, seconds: f64) {
        if self.seconds.len() >= MAX_RATES && !self.seconds.contains_key(&peer) {
            self.seconds.clear();
        }
        let smoothed = self.seconds.entry(peer).or_insert(seconds);
        *smoothed = SMOOTHING * seconds + (1.0 - SMOOTHING) * *smoothed;
    }

    /// Blocks per second, if any were measured.
    pub fn per_second(&self, peer: &P) -> Option<f64> {
        self.seconds.get(peer).filter(|seconds| **seconds > 0.0).map(|seconds| seconds.recip())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn bans_double_once_per_ban_and_end_with_an_answer() {
        let (mut bans, start) = (Bans::default(), Instant::now());
        bans.failed('a', start);
        bans.failed('a', start + S);
        assert!(bans.banned(&'a', start + 14 * S) && !bans.banned(&'a', start + 15 * S));
        bans.failed('a', start + 15 * S);
        assert!(bans.banned(&'a', start + 44 * S) && !bans.banned(&'a', start + 45 * S));
        assert!(!bans.banned(&'b', start));
        bans.answered(&'a');
        bans.failed('a', start + 100 * S);
        assert!(!bans.banned(&'a', start + 115 * S));
    }

    #[test]
    fn a_ban_has_a_longest_length() {
        let (mut bans, mut now) = (Bans::default(), Instant::now());
        for _ in 0..100 {
            bans.failed('a', now);
            now += BAN * (1 << MAX_DOUBLINGS);
        }
        assert!(!bans.banned(&'a', now));
    }

    #[test]
    fn answers_grow_old_and_rates_are_smoothed() {
        let (mut answers, mut rates, start) =
            (AnsweringServers::default(), ServerRates::default(), Instant::now());
        assert!(!answers.has_answered(&'a', start));
        answers.heard('a', start);
        assert!(answers.has_answered(&'a', start + 299 * S));
        assert!(!answers.has_answered(&'a', start + 300 * S));
        assert_eq!(rates.per_second(&'a'), None);
        rates.measured('a', 0.5);
        assert_eq!(rates.per_second(&'a'), Some(2.0));
        rates.measured('a', 3.0);
        assert_eq!(rates.per_second(&'a'), Some(1.0));
    }

    #[test]
    fn pings_are_smoothed_and_grow_old() {
        let (mut pings, start) = (Pings::default(), Instant::now());
        pings.measured('a', f64::INFINITY, start);
        assert_eq!(pings.seconds(&'a', start), Some(f64::INFINITY));
        pings.measured('a', 1.0, start + S);
        pings.measured('a', 2.25, start + 2 * S);
        assert_eq!(pings.seconds(&'a', start + 2 * S), Some(1.25));
        assert_eq!(pings.seconds(&'a', start + 302 * S), None);
        pings.measured('a', 3.0, start + 400 * S);
        assert_eq!(pings.seconds(&'a', start + 400 * S), Some(3.0));
        pings.measured('b', 4.0, start + 500 * S);
        assert_eq!(pings.known(start + 500 * S).count(), 2);
        assert_eq!(pings.known(start + 700 * S).collect::<Vec<_>>(), [(&'b', 4.0)]);
    }
}
