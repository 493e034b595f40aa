//! The clock that all processes of the machine share.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// CLOCK_MONOTONIC in nanoseconds: the clock of all times on the board, in rings and in what one
/// executable of the supervisor hands to the next.
///
/// # Panics
/// On a system without that clock; Linux has it.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has a monotonic clock");
    u64::try_from(Duration::from(now).as_nanos()).unwrap_or(u64::MAX)
}
