//! What a check finds: a verdict, reached by a pure function from facts that a thin observer saw.
//! Observers wait in threads of their own, each with a time limit.

use std::fmt::Display;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use serde::Serialize;
use shared::sanitize_text::escaped;

/// How good what a check found is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// A server runs, but worse than it could.
    Warning,
    /// A server does not start, or does not serve.
    Problem,
    /// Not looked at.
    Skipped,
}

impl Status {
    /// Its name in the report.
    pub const fn name(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::Warning => "warning",
            Status::Problem => "problem",
            Status::Skipped => "skipped",
        }
    }
}

/// What a judgement says of the facts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckVerdict {
    /// How good they are.
    pub status: Status,
    pub found: String,
    /// What to do about it; `None` where nothing is to be done.
    pub advice: Option<String>,
}

impl CheckVerdict {
    /// As it should be.
    pub fn ok(found: impl Display) -> CheckVerdict {
        CheckVerdict { status: Status::Ok, found: found.to_string(), advice: None }
    }

    /// Worse than it could be.
    pub fn warning(found: impl Display, advice: impl Display) -> CheckVerdict {
        let (found, advice) = (found.to_string(), Some(advice.to_string()));
        CheckVerdict { status: Status::Warning, found, advice }
    }

    /// Not as it must be.
    pub fn problem(found: impl Display, advice: impl Display) -> CheckVerdict {
        CheckVerdict { status: Status::Problem, ..CheckVerdict::warning(found, advice) }
    }

    /// Not looked at, for this reason.
    pub fn skipped(why: impl Display) -> CheckVerdict {
        CheckVerdict { status: Status::Skipped, ..CheckVerdict::ok(why) }
    }
}

/// One check with its verdict, as `--json` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of the check.
    pub check: &'static str,
    /// How good what it found is.
    pub status: Status,
    pub found: String,
    /// What to do about it.
    pub advice: Option<String>,
}

impl Finding {
    /// A verdict under the name of its check.
    pub fn new(check: &'static str, verdict: CheckVerdict) -> Finding {
        let CheckVerdict { status, found, advice } = verdict;
        Finding { check, status, found, advice }
    }

    /// The same in one line, safe to show on a terminal.
    pub fn line(&self) -> String {
        let Finding { check, status, found, advice } = self;
        let text = match advice {
            Some(advice) => format!("{found}; {advice}"),
            None => found.clone(),
        };
        format!("{:<8} {check:<13} {}", status.name(), escaped(&text))
    }
}

/// An observation under way in a thread of its own.
#[derive(Debug)]
pub struct PendingObservation<T> {
    facts: Receiver<T>,
    limit: Duration,
    deadline: Instant,
}

impl<T: Send + 'static> PendingObservation<T> {
    /// Starts to observe; what has not ended after `limit` is given up.
    pub fn start(
        limit: Duration,
        observe: impl FnOnce() -> T + Send + 'static,
    ) -> PendingObservation<T> {
        let (sender, facts) = sync_channel(1);
        // Fails only when nobody waits any more. A thread that hangs ends with the process.
        std::thread::spawn(move || drop(sender.send(observe())));
        PendingObservation { facts, limit, deadline: Instant::now() + limit }
    }

    /// Waits for the facts.
    ///
    /// # Errors
    /// A sentence, when they did not come in time.
    pub fn wait(self) -> Result<T, String> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let late = |_| format!("no answer within {} s", self.limit.as_secs_f64());
        self.facts.recv_timeout(left).map_err(late)
    }
}

/// A verdict on an observation that did not end.
pub fn late(why: String) -> CheckVerdict {
    CheckVerdict::problem(
        why,
        "run sepal doctor again; a check that hangs again is a fault of the system",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_line_whatever_it_quotes() {
        let finding =
            Finding::new("port", CheckVerdict::problem("in use by a\nb\x1b[2J", "stop it"));
        assert_eq!(finding.line(), "problem  port          in use by a\\nb\\u{1b}[2J; stop it");
        let json = serde_json::to_value(&finding).unwrap();
        assert_eq!((&json["status"], &json["advice"]), (&"problem".into(), &"stop it".into()));
        assert_eq!(
            Finding::new("port", CheckVerdict::ok("free")).line(),
            "ok       port          free"
        );
    }

    #[test]
    fn an_observation_that_hangs_is_given_up() {
        let (hold, held) = sync_channel::<()>(0);
        let hung =
            PendingObservation::start(Duration::from_millis(20), move || held.recv().is_err());
        assert_eq!(hung.wait(), Err("no answer within 0.02 s".to_owned()));
        drop(hold);
        assert_eq!(PendingObservation::start(Duration::from_secs(60), || 5).wait(), Ok(5));
    }
}
