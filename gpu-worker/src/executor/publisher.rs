//! How rank 0 tells the other ranks of its group what it executes. A worker without a group has
//! nobody to tell: each call is one branch then.

use shared::ids::{Generation, JobId};
use shared::job::JobBody;
use shared::shm::doorbell::Doorbell;
use shared::shm::group::{GroupError, PlanPosition, PlanWriter};
use shared::shm::ring::Armed;

use super::plan_record;
use crate::schedule::{JobKey, Unit};

/// Publishes plans, if there is anybody who follows them.
#[derive(Debug, Default)]
pub(super) struct Publisher(Option<Box<Followed>>);

#[derive(Debug)]
struct Followed {
    plans: PlanWriter,
    /// Bytes of the record at hand.
    record: Vec<u8>,
    last: Option<PlanPosition>,
}

/// What has to be done everywhere before something else may happen; `None`: nothing.
pub(super) type Until = Option<PlanPosition>;

impl Publisher {
    /// Publishes in the log of a group.
    pub(super) fn new(plans: PlanWriter) -> Publisher {
        Publisher(Some(Box::new(Followed { plans, record: Vec::new(), last: None })))
    }

    /// Whether other ranks follow.
    pub(super) fn is_followed(&self) -> bool {
        self.0.is_some()
    }

    /// Drop all jobs; those to come have their tensors in the arena of this netd.
    pub(super) fn link(&mut self, netd_generation: Generation) -> Result<(), GroupError> {
        self.publish(|out| plan_record::link(netd_generation, out))
    }

    /// Make the page copies of a job and read its input.
    pub(super) fn begin(
        &mut self,
        key: JobKey,
        number: u64,
        id: JobId,
        body: &JobBody,
    ) -> Result<(), GroupError> {
        self.publish(|out| plan_record::begin(key, number, id, body, out))
    }

    /// Run a unit of jobs that have begun.
    pub(super) fn unit(&mut self, unit: &Unit) -> Result<(), GroupError> {
        self.publish(|out| plan_record::unit(unit, out))
    }

    /// Forget a job that could not begin.
    pub(super) fn remove(&mut self, key: JobKey) -> Result<(), GroupError> {
        self.publish(|out| plan_record::remove(key, out))
    }

    fn publish(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> Result<(), GroupError> {
        let Some(followed) = &mut self.0 else {
            return Ok(());
        };
        let Followed { plans, record, last } = &mut **followed;
        record.clear();
        write(record);
        *last = Some(plans.publish(record)?);
        Ok(())
    }

    /// That every rank has done what was published so far.
    pub(super) fn until_now(&self) -> Until {
        self.0.as_ref().and_then(|followed| followed.last)
    }

    /// Whether every rank has done what was published before `until`.
    pub(super) fn is_done(&self, until: Until) -> Result<bool, GroupError> {
        match (&self.0, until) {
            (Some(followed), Some(position)) => followed.plans.is_done(position),
            _ => Ok(true),
        }
    }

    /// Waits a moment until every rank has done what was published before `until`; else has them
    /// ring this rank when it is, until [`disarm`](Self::disarm).
    pub(super) fn arm(&self, until: Until) -> Result<Armed, GroupError> {
        match (&self.0, until) {
            (Some(followed), Some(position)) => followed.plans.arm(position),
            _ => Ok(Armed::Ready),
        }
    }

    /// This rank is awake.
    pub(super) fn disarm(&self) {
        if let Some(followed) = &self.0 {
            followed.plans.disarm();
        }
    }

    /// Has waits for `bell` end when another rank or the supervisor rings this one.
    pub(super) fn join(&self, bell: &Doorbell) -> std::io::Result<()> {
        self.0.as_ref().map_or(Ok(()), |followed| followed.plans.join(bell))
    }

    /// Fails once the supervisor ended the group.
    pub(super) fn check_abort(&self) -> Result<(), GroupError> {
        self.0.as_ref().map_or(Ok(()), |followed| followed.plans.check_abort())
    }
}
