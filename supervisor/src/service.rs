//! What a service manager is told of the run (systemd's `Type=notify`, man 3 sd_notify): READY once a
//! step went through the whole server and back, STATUS as it changes, STOPPING, and WATCHDOG as long
//! as the run can go on. Without `NOTIFY_SOCKET` nothing is told, and no step is taken.
//!
//! ```text
//! starting --online--> probing --step came back--> ready --stop--> stopping
//!                        ^  |
//!                        +--+ step failed: again after PAUSE
//! ```
//! What could not be sent is sent again after PAUSE. [`Service`] is pure but for the socket;
//! [`crate::events`] takes the steps and feeds it.

mod socket;

use std::time::{Duration, Instant};

use shared::clock::monotonic_ns;
use tracing::{info, warn};

use socket::Manager;

/// Pause after a step that failed, and after a message that nobody took.
const PAUSE: Duration = Duration::from_secs(2);

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
pub struct Service<M = Manager> {
    manager: M,
    stage: Stage,
    /// The stage that the manager knows: READY or STOPPING.
    told: Option<Stage>,
    status: String,
    /// Between two signs of life: half of what the manager waits.
    pace: Option<Duration>,
    next_feed: Instant,
    /// When what could not be sent is tried again.
    again_at: Option<Instant>,
}

/// Takes messages, without waiting.
pub trait Listener {
    /// Whether `message` was taken.
    fn tell(&mut self, message: &str) -> std::io::Result<()>;
}

impl Service {
    /// The service that this process is, if a service manager wants to hear of it.
    pub fn of_environment(now: Instant) -> Option<Service> {
        let manager = Manager::of_environment()?;
        Some(Service::new(manager, socket::patience(), now))
    }
}

impl<M: Listener> Service<M> {
    /// A service that starts, whose manager ends it after `patience` without a sign of life.
    fn new(manager: M, patience: Option<Duration>, now: Instant) -> Service<M> {
        Service {
            manager,
            stage: Stage::Starting,
            told: None,
            status: String::new(),
            pace: patience.map(|patience| patience / 2),
            next_feed: now,
            again_at: None,
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
            }
            Err(why) => {
                self.stage = Stage::Online { probe_at: now + PAUSE };
                warn!(why, "not ready: a step through the server failed, trying again");
            }
        }
    }

    /// The settings are read again; READY follows with the next sign of life.
    pub fn reloading(&mut self, now: Instant) {
        if self.stage == Stage::Ready && self.told == Some(Stage::Ready) {
            let micros = monotonic_ns() / 1000;
            if self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"), now) {
                self.told = None;
            }
        }
    }

    /// Whether the run was called ready.
    pub fn is_ready(&self) -> bool {
        self.stage == Stage::Ready
    }

    /// Another executable takes the run over; it tells READY again, once it was told.
    pub fn taken_over(&mut self, was_ready: bool, now: Instant) {
        self.stage = if was_ready { Stage::Ready } else { Stage::Online { probe_at: now } };
    }

    /// The run ends.
    pub fn stopping(&mut self) {
        self.stage = Stage::Stopping;
    }

    /// Whether the run ends.
    pub fn is_stopping(&self) -> bool {
        self.stage == Stage::Stopping
    }

    /// Tells `status`, if it is news.
    pub fn show(&mut self, status: String, now: Instant) {
        let mut status = match self.stage {
            Stage::Online { .. } | Stage::Probing => format!("trying a step; {status}"),
            Stage::Stopping => format!("stopping; {status}"),
            Stage::Starting | Stage::Ready => status,
        };
        status.truncate(status.floor_char_boundary(MAX_STATUS));
        if status != self.status && self.tell(&format!("STATUS={status}"), now) {
            self.status = status;
        }
    }

    /// Tells the stage, and gives a sign of life when one is due. `goes_on` says whether the run
    /// makes progress.
    pub fn feed(&mut self, goes_on: bool, now: Instant) {
        let news = match self.stage {
            Stage::Ready => Some("READY=1"),
            Stage::Stopping => Some("STOPPING=1"),
            _ => None,
        };
        if let Some(news) = news.filter(|_| self.told != Some(self.stage))
            && self.tell(news, now)
        {
            self.told = Some(self.stage);
        }
        let Some(pace) = self.pace.filter(|_| now >= self.next_feed) else {
            return;
        };
        let is_fed = goes_on && self.tell("WATCHDOG=1", now);
        self.next_feed = now + if is_fed { pace } else { pace.min(PAUSE) };
    }

    /// When something is due.
    pub fn deadline(&self) -> Option<Instant> {
        let probe = match self.stage {
            Stage::Online { probe_at } => Some(probe_at),
            _ => None,
        };
        let feed = self.pace.map(|_| self.next_feed);
        feed.into_iter().chain(probe).chain(self.again_at).min()
    }

    /// A manager that does not listen costs a warning, not the run.
    fn tell(&mut self, news: &str, now: Instant) -> bool {
        if self.again_at.is_some_and(|at| now < at) {
            return false;
        }
        let was_mute = self.again_at.is_some();
        match self.manager.tell(news) {
            Ok(()) => self.again_at = None,
            Err(error) => {
                self.again_at = Some(now + PAUSE);
                if !was_mute {
                    warn!(%error, "the service manager does not listen at NOTIFY_SOCKET, going on");
                }
            }
        }
        self.again_at.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was told; deaf: takes nothing.
    #[derive(Default)]
    struct Heard {
        lines: Vec<String>,
        is_deaf: bool,
    }

    impl Listener for Heard {
        fn tell(&mut self, message: &str) -> std::io::Result<()> {
            if self.is_deaf {
                return Err(std::io::ErrorKind::WouldBlock.into());
            }
            self.lines.push(message.to_owned());
            Ok(())
        }
    }

    fn service(patience: Option<Duration>, now: Instant) -> Service<Heard> {
        Service::new(Heard::default(), patience, now)
    }

    #[test]
    fn ready_comes_after_a_step_and_a_failed_step_is_taken_again() {
        let start = Instant::now();
        let mut service = service(None, start);
        assert!(!service.starts_probe(start), "nothing is online");
        service.online(start);
        assert!(service.starts_probe(start) && !service.starts_probe(start), "one step at a time");
        service.probed(Err("refused".to_owned()), start);
        let next = service.deadline().expect("a step is due");
        assert!(next > start && !service.starts_probe(start) && service.starts_probe(next));
        service.feed(true, next);
        assert!(service.manager.lines.is_empty());
        service.probed(Ok(()), next);
        service.feed(true, next);
        service.feed(true, next);
        assert_eq!(service.manager.lines, ["READY=1"]);
        service.online(next);
        assert!(!service.starts_probe(next + PAUSE), "ready is said once");
    }

    #[test]
    fn a_reload_is_told_between_two_ready() {
        let now = Instant::now();
        let mut service = service(None, now);
        service.reloading(now);
        assert!(service.manager.lines.is_empty(), "it is not ready yet");
        service.online(now);
        assert!(service.starts_probe(now));
        service.probed(Ok(()), now);
        service.feed(true, now);
        service.reloading(now);
        service.feed(true, now);
        service.feed(true, now);
        let [ready, reloading, again] = &service.manager.lines[..] else {
            panic!("{:?}", service.manager.lines)
        };
        assert_eq!((ready.as_str(), again.as_str()), ("READY=1", "READY=1"));
        let micros = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect("a time");
        assert!(micros.parse::<u64>().is_ok_and(|micros| micros > 0));
    }

    #[test]
    fn signs_of_life_keep_half_of_the_patience_and_stop_with_the_progress() {
        let (start, patience) = (Instant::now(), Duration::from_secs(10));
        let mut service = service(Some(patience), start);
        assert_eq!(service.deadline(), Some(start));
        service.feed(true, start);
        assert_eq!(service.deadline(), Some(start + patience / 2));
        let late = start + patience;
        service.feed(false, late);
        assert_eq!(service.manager.lines.len(), 1);
        assert_eq!(service.deadline(), Some(late + PAUSE), "looked at again, and not at once");
        service.feed(true, late + PAUSE);
        assert_eq!(service.manager.lines, ["WATCHDOG=1", "WATCHDOG=1"]);
    }

    #[test]
    fn what_nobody_took_is_told_again() {
        let start = Instant::now();
        let mut service = service(Some(Duration::from_secs(60)), start);
        service.manager.is_deaf = true;
        service.online(start);
        assert!(service.starts_probe(start));
        service.probed(Ok(()), start);
        service.feed(true, start);
        service.show("x".to_owned(), start);
        let again = service.deadline().expect("a try");
        assert!(again > start);
        service.manager.is_deaf = false;
        service.feed(true, start);
        assert!(service.manager.lines.is_empty(), "not at once");
        service.feed(true, again);
        service.show("x".to_owned(), again);
        assert_eq!(service.manager.lines, ["READY=1", "WATCHDOG=1", "STATUS=x"]);
    }

    #[test]
    fn a_step_that_ends_after_the_stop_changes_nothing() {
        let start = Instant::now();
        let mut service = service(None, start);
        service.online(start);
        assert!(service.starts_probe(start));
        service.stopping();
        service.probed(Ok(()), start);
        service.feed(true, start);
        assert_eq!(service.manager.lines, ["STOPPING=1"]);
    }

    #[test]
    fn a_long_status_is_cut_between_characters() {
        let now = Instant::now();
        let mut service = service(None, now);
        service.show("ä".repeat(MAX_STATUS), now);
        assert!(service.status.len() <= MAX_STATUS && service.status.ends_with('ä'));
    }
}
