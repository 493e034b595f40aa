//! What a worker shares with the other ranks of its group.

use std::borrow::Cow;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use model::BlockSpec;
use model::shards::{Shard, Shares};
use shared::bootstrap::DescriptorSocket;
use shared::config::Device;
use shared::control::WorkerInit;
use shared::exit::ExitReason;
use shared::ids::Rank;
use shared::model::ModelFacts;
use shared::shm::board::BoardWriter;
use shared::shm::group::{GroupMap, GroupShape, Member, PlanReader, PlanWriter, WaitPolicy};

use super::control::Arenas;
use super::{DESCRIPTOR_TIMEOUT, bad, mismatch, out_of_order};
use crate::executor::{Exit, wait_policy};

/// The group of a rank.
#[derive(Debug)]
pub(super) struct Group {
    map: Arc<GroupMap>,
    rank: Rank,
    may_spin: bool,
    board: Arc<BoardWriter>,
}

/// Opens the segment of the worker's group; `None` for a worker that is alone. Its descriptors come
/// before all others.
pub(super) fn open(
    init: &WorkerInit,
    descriptors: &DescriptorSocket,
) -> Result<Option<Arc<GroupMap>>, Exit> {
    let Some(group) = &init.group else {
        return Ok(None);
    };
    let count = 1 + usize::from(init.worker.world_size.0);
    let fds = descriptors.recv(group.fds, count, DESCRIPTOR_TIMEOUT).map_err(|e| mismatch(&e))?;
    let mut fds = fds.into_iter();
    let segment = fds.next().ok_or_else(out_of_order)?;
    let bells: Vec<OwnedFd> = fds.collect();
    let shape = GroupShape::of(group, init.worker, init.generation);
    let map = GroupMap::open(segment, bells, &shape, init.worker.rank).map_err(|e| mismatch(&e))?;
    Ok(Some(map))
}

impl Group {
    pub(super) fn new(map: Arc<GroupMap>, init: &WorkerInit, board: &Arc<BoardWriter>) -> Group {
        let may_spin = init.group.as_ref().is_some_and(|group| group.may_spin);
        Group { map, rank: init.worker.rank, may_spin, board: Arc::clone(board) }
    }

    /// With what the device exchanges sums.
    pub(super) fn member(&self) -> Result<Member, Exit> {
        Member::new(&self.map, self.policy()).map_err(no_descriptor)
    }

    /// Where rank 0 publishes its plans.
    pub(super) fn writer(&self) -> Result<PlanWriter, Exit> {
        PlanWriter::new(&self.map, self.policy()).map_err(no_descriptor)
    }

    /// Where the other ranks read them.
    pub(super) fn reader(&self) -> Result<PlanReader, Exit> {
        PlanReader::new(&self.map, self.policy()).map_err(no_descriptor)
    }

    /// How a rank other than 0 opens what it is sent.
    pub(super) fn opener(&self) -> Arenas {
        Arenas { map: Arc::clone(&self.map), rank: self.rank }
    }

    fn policy(&self) -> WaitPolicy {
        wait_policy(self.may_spin, &self.board)
    }
}

fn no_descriptor(error: io::Error) -> Exit {
    let message = format!("cannot join the group: {error}");
    Exit { reason: ExitReason::Failed, message }
}

/// What this rank holds of the blocks of `spec`; `None` for a worker that is alone.
pub(super) fn shard(init: &WorkerInit, spec: &BlockSpec) -> Result<Option<Shard>, Exit> {
    let Some(group) = &init.group else {
        return Ok(None);
    };
    let shares = Shares {
        heads: group.shares.iter().map(|rank| rank.heads as usize).collect(),
        columns: group.shares.iter().map(|rank| rank.columns as usize).collect(),
    };
    let mut shards = shares.shards(spec).map_err(|e| bad(&e))?.into_iter();
    shards.nth(usize::from(init.worker.rank.0)).map(Some).ok_or_else(out_of_order)
}

/// The facts of the model as far as the pages of this worker depend on them.
pub(super) fn kv_facts(init: &WorkerInit) -> Cow<'_, ModelFacts> {
    let group = init.group.as_ref();
    match group.and_then(|group| group.shares.get(usize::from(init.worker.rank.0))) {
        Some(rank) => Cow::Owned(init.model.of_rank(rank)),
        None => Cow::Borrowed(&init.model),
    }
}

/// The devices that compute a block together, in the order of ranks.
pub(super) fn devices(init: &WorkerInit) -> &[Device] {
    match &init.group {
        Some(group) => &group.devices,
        None => std::slice::from_ref(&init.device),
    }
}
