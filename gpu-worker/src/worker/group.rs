//! What a worker shares with the other ranks of its group.

use std::borrow::Cow;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use kernels::cuda::group::{DeviceIdentity, Offer, Path};
use kernels::cuda::{Cuda, Gpu};
use kernels::ops::OpError;
use model::BlockSpec;
use model::shards::{Shard, Shares};
use shared::bootstrap::{DescriptorSocket, PeerMessage};
use shared::config::Device;
use shared::control::WorkerInit;
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::ids::Rank;
use shared::model::ModelFacts;
use shared::shm::board::BoardWriter;
use shared::shm::group::{GroupMap, GroupMember, GroupShape, PlanReader, PlanWriter, WaitPolicy};
use tracing::{info, warn};

use super::control::Arenas;
use super::peers::Peers;
use super::{DESCRIPTOR_TIMEOUT, bad, mismatch, out_of_order, unplaced};
use crate::executor::{Exit, wait_policy};

/// What the supervisor gave a rank to join its group.
pub(super) struct Joining {
    map: Arc<GroupMap>,
    /// To the other ranks, where devices have memory of their own.
    sockets: Vec<OwnedFd>,
}

/// The group of a rank.
#[derive(Debug)]
pub(super) struct RankGroup {
    map: Arc<GroupMap>,
    rank: Rank,
    may_spin: bool,
    board: Arc<BoardWriter>,
    peers: Peers,
}

/// Opens the segment of the worker's group; `None` for a worker that is alone. Its descriptors come
/// before all others.
pub(super) fn open(
    init: &WorkerInit,
    descriptors: &DescriptorSocket,
) -> Result<Option<Joining>, Exit> {
    let Some(group) = &init.group else {
        return Ok(None);
    };
    let ranks = usize::from(init.worker.world_size.0);
    let sockets = if group.has_sockets() { ranks.saturating_sub(1) } else { 0 };
    let count = 1 + ranks + sockets;
    let fds = descriptors.recv(group.fds, count, DESCRIPTOR_TIMEOUT).map_err(|e| mismatch(&e))?;
    let mut fds = fds.into_iter();
    let segment = fds.next().ok_or_else(out_of_order)?;
    let bells: Vec<OwnedFd> = fds.by_ref().take(ranks).collect();
    let shape = GroupShape::of(group, init.worker, init.generation);
    let map = GroupMap::open(segment, bells, &shape, init.worker.rank).map_err(|e| mismatch(&e))?;
    Ok(Some(Joining { map, sockets: fds.collect() }))
}

impl RankGroup {
    pub(super) fn new(joining: Joining, init: &WorkerInit, board: &Arc<BoardWriter>) -> RankGroup {
        let Joining { map, sockets } = joining;
        let may_spin = init.group.as_ref().is_some_and(|group| group.may_spin);
        let rank = init.worker.rank;
        let peers = Peers::new(rank, sockets, &map, board);
        RankGroup { map, rank, may_spin, board: Arc::clone(board), peers }
    }

    /// With what the device exchanges sums.
    pub(super) fn member(&self) -> Result<GroupMember, Exit> {
        GroupMember::new(&self.map, self.policy()).map_err(no_descriptor)
    }

    /// Has a device exchange with those of the other ranks: each tells the others what it offers, and
    /// they use device memory if every device reaches that of every other.
    ///
    /// # Errors
    /// [`ExitReason::GroupAborted`] when the group ended meanwhile, another reason when a device or a
    /// rank is at fault.
    pub(super) fn join<G: Gpu>(&self, cuda: &mut Cuda<G>) -> Result<(), Exit> {
        let (map, board) = (Arc::clone(&self.map), Arc::clone(&self.board));
        // Only while its device waits for others: one that computes without end is at fault itself.
        cuda.pulse(Box::new(move || {
            if map.is_waiting() {
                board.progress();
            }
        }));
        let own = cuda.offer(&self.map).map_err(failed)?;
        let said = [&[OFFER][..], &own.device.to_bytes()].concat();
        let offers = self.peers.round(&said, own.memory.as_ref().map(AsFd::as_fd), offer)?;
        let reaches = cuda.reach(&offers);
        let mut use_peer = self.all(reaches)?;
        // Without the descriptors, for host memory.
        let devices: Vec<Option<DeviceIdentity>> =
            offers.iter().map(|offer| offer.as_ref().map(|offer| offer.device)).collect();
        if use_peer {
            let joined = cuda.join(Arc::clone(&self.map), offers, true);
            if let Err(error) = &joined {
                warn!(error = with_causes(error), "cannot map the memory of the other ranks");
            }
            use_peer = self.all(joined.is_ok())?;
        }
        if !use_peer {
            let bare = |device| Offer { device, memory: None };
            let offers = devices.into_iter().map(|device| device.map(bare)).collect();
            cuda.offer(&self.map).map_err(failed)?;
            cuda.join(Arc::clone(&self.map), offers, false).map_err(failed)?;
        }
        match use_peer {
            true => info!(path = %Path::Device, "exchanging sums with the other ranks"),
            false => warn!(
                path = %Path::Host,
                "exchanging sums with the other ranks: no peer access between all devices"
            ),
        }
        Ok(())
    }

    /// Whether all ranks say yes.
    fn all(&self, yes: bool) -> Result<bool, Exit> {
        let said = self.peers.round(&[ANSWER, u8::from(yes)], None, answer)?;
        Ok(yes && said.into_iter().flatten().all(|yes| yes))
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

/// First byte of what a rank says of its device: its offer, or yes (1) or no (0).
const OFFER: u8 = 1;
const ANSWER: u8 = 2;

/// The offer of another rank.
fn offer(message: PeerMessage) -> Option<Offer> {
    let (&OFFER, device) = message.bytes.split_first()? else {
        return None;
    };
    Some(Offer { device: DeviceIdentity::from_bytes(device)?, memory: message.fd })
}

/// The answer of another rank.
fn answer(message: PeerMessage) -> Option<bool> {
    match (&message.bytes[..], message.fd) {
        (&[ANSWER, word @ (0 | 1)], None) => Some(word == 1),
        _ => None,
    }
}

fn failed(failure: OpError) -> Exit {
    unplaced(&failure.into())
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
