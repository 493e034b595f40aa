//! Points in time as they cross from one executable of the supervisor to the next: both run on one
//! machine between two boots, whose monotonic clock goes on.
//!
//! A point is written as nanoseconds of that clock: `#[serde(with = "crate::instants")]`. [`option`] and
//! [`list`] are the same for fields that hold none, or several.

use std::time::{Duration, Instant};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use shared::clock::monotonic_ns;

/// One moment on both clocks.
#[derive(Clone, Copy)]
struct Now {
    instant: Instant,
    ns: u64,
}

impl Now {
    fn read() -> Now {
        Now { instant: Instant::now(), ns: monotonic_ns() }
    }
}

fn to_ns(at: Instant) -> u64 {
    ns_of(at, Now::read())
}

fn from_ns(at: u64) -> Instant {
    instant_of(at, Now::read())
}

fn ns_of(at: Instant, Now { instant: now, ns: now_ns }: Now) -> u64 {
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    match at.checked_duration_since(now) {
        Some(ahead) => now_ns.saturating_add(ns(ahead)),
        None => now_ns.saturating_sub(ns(now.duration_since(at))),
    }
}

fn instant_of(at: u64, Now { instant: now, ns: now_ns }: Now) -> Instant {
    let moved = match at.checked_sub(now_ns) {
        Some(ahead) => now.checked_add(Duration::from_nanos(ahead)),
        None => now.checked_sub(Duration::from_nanos(now_ns - at)),
    };
    moved.unwrap_or(now)
}

/// Writes a point in time.
pub fn serialize<S: Serializer>(at: &Instant, to: S) -> Result<S::Ok, S::Error> {
    to_ns(*at).serialize(to)
}

/// Reads a point in time.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Instant, D::Error> {
    u64::deserialize(from).map(from_ns)
}

/// The same for a point that may be missing.
pub mod option {
    use super::*;

    /// Writes it.
    pub fn serialize<S: Serializer>(at: &Option<Instant>, to: S) -> Result<S::Ok, S::Error> {
        at.map(to_ns).serialize(to)
    }

    /// Reads it.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Instant>, D::Error> {
        Ok(Option::<u64>::deserialize(from)?.map(from_ns))
    }
}

/// The same for a list of points.
pub mod list {
    use super::*;

    /// Writes it.
    pub fn serialize<'a, L, S>(list: &'a L, to: S) -> Result<S::Ok, S::Error>
    where
        &'a L: IntoIterator<Item = &'a Instant>,
        S: Serializer,
    {
        list.into_iter().map(|at| to_ns(*at)).collect::<Vec<_>>().serialize(to)
    }

    /// Reads it.
    pub fn deserialize<'de, L: FromIterator<Instant>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<L, D::Error> {
        Ok(Vec::<u64>::deserialize(from)?.into_iter().map(from_ns).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Times {
        #[serde(with = "crate::instants")]
        one: Instant,
        #[serde(with = "crate::instants::option")]
        none: Option<Instant>,
        #[serde(with = "crate::instants::list")]
        many: VecDeque<Instant>,
    }

    #[test]
    fn a_point_in_time_is_the_same_whenever_it_is_written_and_read() {
        let start = Now { instant: Instant::now(), ns: 7_000_000_000 };
        let after = |seconds| Now {
            instant: start.instant + Duration::from_secs(seconds),
            ns: start.ns + seconds * 1_000_000_000,
        };
        let (past, future) = (start.instant - Duration::from_secs(2), after(3600).instant);
        for at in [past, start.instant, future] {
            for (written, read) in [(start, start), (start, after(60)), (after(5), after(9))] {
                assert_eq!(instant_of(ns_of(at, written), read), at);
            }
        }
    }

    #[test]
    fn points_in_time_are_written_in_every_form() {
        let now = Instant::now();
        let (past, future) = (now - Duration::from_secs(2), now + Duration::from_secs(3600));
        let times = Times { one: past, none: None, many: VecDeque::from([past, future]) };
        let text = serde_json::to_string(&times).unwrap();
        let read: Times = serde_json::from_str(&text).unwrap();
        let apart = |a: Instant, b: Instant| {
            a.checked_duration_since(b).unwrap_or_else(|| b.duration_since(a))
        };
        // The two clocks are read one after the other, which shifts a point by no more than that takes.
        let longest = now.elapsed();
        for (was, is) in [(past, read.one), (past, read.many[0]), (future, read.many[1])] {
            assert!(apart(was, is) <= longest);
        }
        assert_eq!(read.none, None);
    }
}
