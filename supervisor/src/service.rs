//! What a service manager is told of the run (systemd's `Type=notify`, man 3 sd_notify): READY once a
//! step went through the whole server and back, STATUS as it changes, STOPPING, and WATCHDOG as long
//! as the run can go on. Without `NOTIFY_SOCKET` nothing is told, and no step is taken.
//!
//! ```text
//! starting --online--> probing --step came back--> ready --stop--> stopping
//!                        ^  |
//!                        +--+ step failed: again after PROBE_PAUSE
//! ```
//! [`Service`] is pure but for the socket; [`crate::events`] takes the steps and feeds it.

use std::time::{Duration, Instant};

use sd_notify::NotifyState;
use tracing::{info, warn};

/// Pause after a step that failed.
const PROBE_PAUSE: Duration = Duration::from_secs(5);

/// Longest STATUS in bytes; a line of `systemctl status` shows no more.
const MAX_STATUS: usize = 400;

/// Where the start has got to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Starting,
    /// Clients can come, and a step is due then.
    Online {
        probe_at: Instant,
    },
    /// A step is on its way.
    Probing,
    Ready,
    Stopping,
}

/// What a service manager was told.
#[derive(Debug)]
pub struct Service {
    stage: Stage,
    status: String,
    /// Between two signs of life: half of what the manager waits.
    pace: Option<Duration>,
    next_feed: Instant,
    /// Whether the last message could not be sent.
    is_mute: bool,
}

impl Service {
    /// The service that this process is, if a service manager wants to hear of it.
    pub fn of_environment(now: Instant) -> Option<Service> {
        std::env::var_os("NOTIFY_SOCKET")?;
        Some(Service::new(sd_notify::watchdog_enabled(), now))
    }

    /// A service that starts, whose manager ends it after `patience` without a sign of life.
    fn new(patience: Option<Duration>, now: Instant) -> Service {
        Service {
            stage: Stage::Starting,
            status: String::new(),
            pace: patience.map(|patience| patience / 2),
            next_feed: now,
            is_mute: false,
        }
    }

    /// Clients can come: a step is due.
    pub fn online(&mut self, now: Instant) {
        if self.stage == Stage::Starting {
            self.stage = Stage::Online { probe_at: now };
        }
    }

    /// Whether a step is to be taken now; then it is on its way.
    pub fn starts_probe(&mut self, now: Instant) -> bool {
        let is_due = matches!(self.stage, Stage::Online { probe_at } if now >= probe_at);
        if is_due {
            self.stage = Stage::Probing;
        }
        is_due
    }

    /// The step came back, or why it did not.
    pub fn probed(&mut self, outcome: Result<(), String>, now: Instant) {
        if self.stage != Stage::Probing {
            return;
        }
        match outcome {
            Ok(()) => {
                self.stage = Stage::Ready;
                info!("ready: a step went through the server and back");
                self.tell(&[NotifyState::Ready]);
            }
            Err(why) => {
                self.stage = Stage::Online { probe_at: now + PROBE_PAUSE };
                warn!(why, "not ready: a step through the server failed, trying again");
            }
        }
    }

    /// The run ends.
    pub fn stopping(&mut self) {
        if self.stage != Stage::Stopping {
            self.stage = Stage::Stopping;
            self.tell(&[NotifyState::Stopping]);
        }
    }

    /// Tells `status`, if it is news.
    pub fn show(&mut self, status: String) {
        let mut status = match self.stage {
            Stage::Online { .. } | Stage::Probing => format!("trying a step; {status}"),
            Stage::Stopping => format!("stopping; {status}"),
            Stage::Starting | Stage::Ready => status,
        };
        status.truncate(status.floor_char_boundary(MAX_STATUS));
        if status != self.status {
            self.tell(&[NotifyState::Status(&status)]);
            self.status = status;
        }
    }

    /// Gives a sign of life when one is due. `goes_on` says whether the run makes progress.
    pub fn feed(&mut self, goes_on: bool, now: Instant) {
        let Some(pace) = self.pace.filter(|_| now >= self.next_feed) else {
            return;
        };
        if goes_on {
            self.next_feed = now + pace;
            self.tell(&[NotifyState::Watchdog]);
        }
    }

    /// When something is due.
    pub fn deadline(&self) -> Option<Instant> {
        let probe = match self.stage {
            Stage::Online { probe_at } => Some(probe_at),
            _ => None,
        };
        self.pace.map(|_| self.next_feed).into_iter().chain(probe).min()
    }

    /// A manager that does not listen costs a warning, not the run.
    fn tell(&mut self, news: &[NotifyState<'_>]) {
        match sd_notify::notify(news) {
            Ok(()) => self.is_mute = false,
            Err(error) if !self.is_mute => {
                warn!(%error, "the service manager does not listen at NOTIFY_SOCKET, going on");
                self.is_mute = true;
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_comes_after_a_step_and_a_failed_step_is_taken_again() {
        let start = Instant::now();
        let mut service = Service::new(None, start);
        assert!(!service.starts_probe(start), "nothing is online");
        service.online(start);
        assert!(service.starts_probe(start) && !service.starts_probe(start), "one step at a time");
        service.probed(Err("refused".to_owned()), start);
        let next = service.deadline().expect("a step is due");
        assert!(next > start && !service.starts_probe(start) && service.starts_probe(next));
        service.probed(Ok(()), next);
        assert_eq!(service.stage, Stage::Ready);
        service.online(next);
        assert!(!service.starts_probe(next + PROBE_PAUSE), "ready is said once");
    }

    #[test]
    fn signs_of_life_keep_half_of_the_patience_and_stop_with_the_progress() {
        let (start, patience) = (Instant::now(), Duration::from_secs(10));
        let mut service = Service::new(Some(patience), start);
        assert_eq!(service.deadline(), Some(start));
        service.feed(true, start);
        assert_eq!(service.deadline(), Some(start + patience / 2));
        let late = start + patience;
        service.feed(false, late);
        assert_eq!(service.deadline(), Some(start + patience / 2), "still due");
        service.feed(true, late);
        assert_eq!(service.deadline(), Some(late + patience / 2));
    }

    #[test]
    fn a_step_that_ends_after_the_stop_changes_nothing() {
        let start = Instant::now();
        let mut service = Service::new(None, start);
        service.online(start);
        assert!(service.starts_probe(start));
        service.stopping();
        service.probed(Ok(()), start);
        assert_eq!(service.stage, Stage::Stopping);
    }

    #[test]
    fn a_long_status_is_cut_between_characters() {
        let mut service = Service::new(None, Instant::now());
        service.show("ä".repeat(MAX_STATUS));
        assert!(service.status.len() <= MAX_STATUS && service.status.ends_with('ä'));
    }
}
