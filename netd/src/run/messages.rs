//! What the supervisor says, in order, also while something else is done.

use std::collections::VecDeque;

use shared::control::ToNetd;
use shared::exit::ExitReason;

use super::{Fatal, Stop};
use crate::control::{FromSupervisor, Inbox};

/// The supervisor's messages, in order.
pub(super) struct Messages {
    inbox: Inbox,
    /// Came while something else was done that no message but an end interrupts.
    early: VecDeque<FromSupervisor>,
}

/// Messages that may come early; more are a supervisor that went mad.
const MAX_EARLY: usize = 256;

impl Messages {
    pub(super) fn new(inbox: Inbox) -> Messages {
        Messages { inbox, early: VecDeque::new() }
    }

    /// The next message; `None` if the supervisor is gone. May be dropped and called again without
    /// loss.
    pub(super) async fn next(&mut self) -> Option<FromSupervisor> {
        match self.early.pop_front() {
            Some(message) => Some(message),
            None => self.inbox.recv().await,
        }
    }

    /// Does `work` unless the supervisor ends the daemon or is gone. Other messages wait.
    pub(super) async fn meanwhile<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Stop> {
        let mut work = std::pin::pin!(work);
        loop {
            let message = tokio::select! {
                done = &mut work => return Ok(done),
                message = self.inbox.recv() => message.ok_or(Stop::ParentGone)?,
            };
            match message {
                FromSupervisor { message: ToNetd::Drain | ToNetd::Replace, .. } => {
                    return Err(Stop::Drained);
                }
                FromSupervisor { message, .. } if self.early.len() == MAX_EARLY => {
                    return Err(unexpected(&message, "fewer messages").into());
                }
                message => self.early.push_back(message),
            }
        }
    }
}

/// An end because of a message out of order.
pub(super) fn unexpected(message: &ToNetd, expected: &str) -> Fatal {
    let got = format!("{message:?}");
    let name = got.split([' ', '(', '{']).next().unwrap_or_default();
    let message =
        format!("message {name} of the supervisor came out of order, expected {expected}");
    Fatal { reason: ExitReason::ProtocolMismatch, message }
}
