//! Times of the simulation for code that has a clock.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// The start of every run; clients look back from there.
static START: LazyLock<Instant> = LazyLock::new(|| Instant::now() + Duration::from_secs(86_400));

/// So many seconds after the start, or before it.
pub fn at(seconds: f64) -> Instant {
    let apart = Duration::from_secs_f64(seconds.abs());
    if seconds < 0.0 { *START - apart } else { *START + apart }
}
