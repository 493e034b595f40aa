//! The order of large requests before the rings: prefills, and forward and backward requests, take turns apart, each fairly
//! among peers. Decode steps go straight to the workers, which batch them.

use shared::job::JobKind;

use super::compute::Asked;
use crate::sessions::turns::{Turn, Turns};
use crate::workers::Computation;

/// Rows × tokens up to which a step takes no turn; Petals calls as many a short request (`backend.py`).
const SHORT_TOKENS: u64 = 128;

/// Rows × tokens up to which a forward request takes no turn: no more than decode steps are.
const TINY_TOKENS: u64 = 8;

/// Large requests of one kind that are with the workers at once: one is computed, one goes there or comes back, and as many
/// again for a second device.
const AT_ONCE: usize = 4;

/// What a gradient costs beside a forward pass: the blocks forward again, and twice that backward.
const BACKWARD_COST: u64 = 3;

/// Turns of both kinds.
#[derive(Debug)]
pub struct Order {
    prefill: Turns,
    whole: Turns,
}

impl Default for Order {
    fn default() -> Order {
        Order {
            prefill: Turns::new(AT_ONCE),
            whole: Turns::new(AT_ONCE),
        }
    }
}

impl Order {
    /// Waits for the turn of `work`; `None` if it needs none.
    pub(super) async fn of(&self, work: &Computation, asked: &Asked) -> Option<Turn> {
        let tokens = u64::from(work.batch) * u64::from(work.tokens);
        let cost = tokens.saturating_mul(work.blocks.len() as u64);
        let (turns, cost) = match work.kind {
            JobKind::Step if tokens <= SHORT_TOKENS => return None,
            JobKind::Step => (&self.prefill, cost),
            JobKind::Forward if tokens <= TINY_TOKENS => return None,
            JobKind::Backward => (&self.whole, cost.saturating_mul(BACKWARD_COST)),
            JobKind::Forward => (&self.whole, cost),
        };
        Some(turns.take(asked.peer, asked.points, cost).await)
    }

    /// Requests that wait for their turn.
    pub fn waiting(&self) -> usize {
        self.prefill.waiting() + self.whole.waiting()
    }
}
