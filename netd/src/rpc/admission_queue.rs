//! The order of large jobs before the rings: prefills have one queue, forward and backward jobs
//! another, each fair among peers. Short steps go straight to the workers.

use shared::job::WorkKind;

use crate::sessions::fair_permits::{FairPermits, Permit};
use crate::workers::arena::SlotClass;
use crate::workers::job::Job;

/// Rows × tokens up to which a forward job needs no permit: no more than decode steps are.
const TINY_TOKENS: u64 = 8;

/// Large jobs of one kind that are with the workers at once: one is computed, one goes there or
/// comes back, and as many again for a second device.
const AT_ONCE: usize = 4;

/// What a gradient costs beside a forward pass: the blocks forward again, and twice that backward.
const BACKWARD_COST: u64 = 3;

/// Permits of both kinds.
#[derive(Debug)]
pub struct AdmissionQueue {
    prefill: FairPermits,
    whole: FairPermits,
}

impl Default for AdmissionQueue {
    fn default() -> AdmissionQueue {
        AdmissionQueue { prefill: FairPermits::new(AT_ONCE), whole: FairPermits::new(AT_ONCE) }
    }
}

impl AdmissionQueue {
    /// Waits until `job` may go to the workers; `None` if it needs no permit.
    pub(super) async fn admit(&self, job: &Job) -> Option<Permit> {
        let tokens = job.body.total_tokens();
        let cost = tokens.saturating_mul(job.body.blocks.len() as u64);
        let (permits, cost) = match job.body.kind {
            _ if job.slot_class() == SlotClass::Short => return None,
            WorkKind::Decode | WorkKind::Prefill => (&self.prefill, cost),
            WorkKind::Forward if tokens <= TINY_TOKENS => return None,
            WorkKind::Backward => (&self.whole, cost.saturating_mul(BACKWARD_COST)),
            WorkKind::Forward => (&self.whole, cost),
        };
        Some(permits.acquire(job.caller.peer, job.caller.points, cost).await)
    }

    /// Jobs that wait for a permit.
    pub fn waiting(&self) -> usize {
        self.prefill.waiting() + self.whole.waiting()
    }
}
