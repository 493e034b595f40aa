//! How the host waits for the device. Usually the driver does; a rank of a group asks it again and
//! again, and calls its [`Pulse`] in between, since the device may wait for those of other ranks.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::calls::{NOT_READY, Status};
use crate::cuda::gpu::Pulse;

/// How long the host asks without a pause, about as long as a sleep takes to end.
const SPIN: Duration = Duration::from_micros(20);

/// Pause between two questions after that.
const PAUSE: Duration = Duration::from_micros(30);

/// The pulse of whoever waits, if there is one.
#[derive(Default)]
pub(super) struct WaitPulse(OnceLock<Pulse>);

impl WaitPulse {
    /// Calls `pulse` in all waits from now on; the first one stays.
    pub(super) fn pulse(&self, pulse: Pulse) {
        let _ = self.0.set(pulse);
    }

    /// Waits by `block`, or until `ask` gives something else than [`NOT_READY`].
    pub(super) fn wait(&self, ask: impl Fn() -> Status, block: impl FnOnce() -> Status) -> Status {
        let Some(pulse) = self.0.get() else {
            return block();
        };
        let start = Instant::now();
        loop {
            match ask() {
                NOT_READY if start.elapsed() < SPIN => std::hint::spin_loop(),
                NOT_READY => {
                    pulse();
                    std::thread::sleep(PAUSE);
                }
                status => return status,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn without_a_pulse_the_driver_waits_and_with_one_it_is_asked() {
        let waiting = WaitPulse::default();
        assert_eq!(waiting.wait(|| unreachable!(), || 7), 7);
        let (beat, beats) = sync_channel(1);
        waiting.pulse(Box::new(move || {
            let _ = beat.try_send(());
        }));
        // Done after a beat.
        let ask = || if beats.try_recv().is_ok() { 719 } else { NOT_READY };
        assert_eq!(waiting.wait(ask, || unreachable!()), 719);
    }
}
