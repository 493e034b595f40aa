//! What an operator may ask of a supervisor, and what is answered.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shared::ids::{GroupId, Rank, WorkerId, WorldSize};

use crate::report::InstanceReport;
use crate::tree::Order;

/// Longest time that open sessions may hold up a pause: a day.
pub const MAX_PATIENCE: Duration = Duration::from_secs(86400);

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum InstanceRequest {
    /// What runs. A brief answer is not kept up to date with the swarm for the sake of it.
    Report {
        /// Whether the caller looks at the state of the instance alone.
        #[serde(default)]
        brief: bool,
    },
    /// End the sessions within this time, and the workers after them.
    Pause {
        /// The time, in seconds.
        patience_s: u64,
    },
    /// Start the workers again.
    Resume,
    /// Replace the process of a worker.
    Restart {
        /// Its group and its rank, such as `0.0`.
        worker: String,
    },
    /// Hand the run over to another executable.
    Upgrade {
        /// Its path; that of the running one if there is none.
        #[serde(default)]
        path: Option<PathBuf>,
        /// How long sessions that cannot go on may hold it up, in seconds.
        patience_s: u64,
    },
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstanceAnswer {
    Report(Box<InstanceReport>),
    /// It is being done.
    Accepted,
    /// It cannot be done.
    Refused {
        /// Why, in a sentence.
        error: String,
    },
}

impl InstanceRequest {
    /// Reads a line.
    ///
    /// # Errors
    /// A sentence, for a line that is no request.
    pub fn parse(line: &[u8]) -> Result<InstanceRequest, String> {
        serde_json::from_slice(line).map_err(|error| {
            format!(
                "invalid request: expected {{\"request\": \"report\" | \"pause\" | \"resume\" | \"restart\" | \"upgrade\"}}: {error}"
            )
        })
    }

    /// What the tree is to do.
    ///
    /// # Errors
    /// A sentence, if a value makes no sense. `None` for a request that changes nothing.
    pub fn order(&self) -> Result<Option<Order>, String> {
        match self {
            // The driver carries out an upgrade.
            InstanceRequest::Report { .. } | InstanceRequest::Upgrade { .. } => Ok(None),
            InstanceRequest::Pause { patience_s } => {
                let patience = Duration::from_secs(*patience_s);
                match patience > MAX_PATIENCE {
                    true => Err(format!(
                        "invalid patience of {patience_s} s: expected at most {} s",
                        MAX_PATIENCE.as_secs()
                    )),
                    false => Ok(Some(Order::Pause(patience))),
                }
            }
            InstanceRequest::Resume => Ok(Some(Order::Resume)),
            InstanceRequest::Restart { worker } => {
                let id = worker.split_once('.').and_then(|(group, rank)| {
                    let (group, rank) = (GroupId(group.parse().ok()?), Rank(rank.parse().ok()?));
                    Some(WorkerId { group, rank, world_size: WorldSize(1) })
                });
                let shown: String = worker.chars().take(20).collect();
                id.map(|id| Some(Order::Restart(id))).ok_or_else(|| {
                    format!("invalid worker {shown:?}: expected group and rank, such as 0.0")
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_become_orders() {
        let order = |text: &str| {
            InstanceRequest::parse(text.as_bytes()).and_then(|request| request.order())
        };
        assert_eq!(order(r#"{"request":"report"}"#), Ok(None));
        assert_eq!(order(r#"{"request":"resume"}"#), Ok(Some(Order::Resume)));
        let pause = order(r#"{"request":"pause","patience_s":60}"#);
        assert_eq!(pause, Ok(Some(Order::Pause(Duration::from_secs(60)))));
        let restart = order(r#"{"request":"restart","worker":"1.2"}"#).unwrap();
        let Some(Order::Restart(id)) = restart else { panic!("{restart:?}") };
        assert_eq!(id.to_string(), "1.2");
        for (wrong, said) in [
            (r#"{"request":"pause","patience_s":86401}"#, "86401"),
            (r#"{"request":"pause","patience_s":-1}"#, "invalid request"),
            (r#"{"request":"pause"}"#, "patience_s"),
            (r#"{"request":"restart","worker":"1"}"#, "such as 0.0"),
            (r#"{"request":"restart","worker":"1.99999999"}"#, "such as 0.0"),
        ] {
            let error = order(wrong).unwrap_err();
            assert!(error.contains(said), "{wrong}: {error}");
        }
    }
}
