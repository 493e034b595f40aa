//! What a worker shares with the other ranks of its group.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use shared::bootstrap::DescriptorSocket;
use shared::control::WorkerInit;
use shared::shm::group::{GroupMap, GroupShape};

use super::{DESCRIPTOR_TIMEOUT, mismatch};
use crate::executor::Exit;

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
    let segment = fds.next().ok_or_else(super::out_of_order)?;
    let bells: Vec<OwnedFd> = fds.collect();
    let shape = GroupShape::of(group, init.worker, init.generation);
    let map = GroupMap::open(segment, bells, &shape, init.worker.rank).map_err(|e| mismatch(&e))?;
    Ok(Some(map))
}
