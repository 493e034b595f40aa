//! Faults that a worker inflicts on itself, to test recovery: at a point of a chosen job it dies,
//! stops or lies, between any two effects of the job. Armed only by the settings of the run.

use std::time::Duration;

use nix::sys::signal::{Signal, raise};
use shared::config::{FaultAction, FaultPlan, FaultPoint};
use shared::ids::Generation;

/// The armed fault of this process, if any.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    plan: Option<FaultPlan>,
}

impl Faults {
    /// Arms `plan` in the first `times` generations.
    pub fn new(plan: Option<FaultPlan>, generation: Generation) -> Faults {
        Faults { plan: plan.filter(|p| generation.0 <= p.times) }
    }

    /// Strikes if `point` of the job with number `job` is where it should; most faults do not return
    /// then.
    pub fn at(&self, job: u64, point: FaultPoint) {
        if let Some(plan) = self.plan.filter(|p| p.job == job && p.point == point) {
            tracing::warn!(?plan, "injecting a fault");
            strike(plan.action);
        }
    }

    /// Whether the completion of the job with number `job` is to be posted twice.
    pub fn repeats(&self, job: u64) -> bool {
        self.plan.is_some_and(|plan| plan.action == FaultAction::Repeat && plan.job == job)
    }
}

fn strike(action: FaultAction) {
    match action {
        FaultAction::Kill => {
            // A process cannot refuse SIGKILL; should the call fail, aborting is the next best
            // death.
            let _ = raise(Signal::SIGKILL);
            std::process::abort();
        }
        FaultAction::Abort => std::process::abort(),
        // Whoever posts the completion asks for it.
        FaultAction::Repeat => {}
        FaultAction::Hang => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
    }
}
