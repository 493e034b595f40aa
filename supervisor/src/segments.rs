//! The shared memory of a run. The supervisor alone makes and drops segments; it maps board and rings,
//! and hands all of them on as descriptors whose size is sealed.
//!
//! | segment | made | dropped |
//! | --- | --- | --- |
//! | board | at the start | at the end |
//! | session records (memfd) | at the start | at the end: they outlive netd |
//! | arena (memfd) | with a generation of netd | when the next one begins |
//! | kv (memfd) | with the first generation of a worker | at the end, or when its blocks were left: it outlives the worker |
//! | group, a doorbell per rank | with a generation of a group of several workers | when all of them are reaped |
//! | a socket per two ranks of devices | with the group | each end when its rank has it |
//! | rings, two doorbells | with a pair of generations (worker, netd) | when one of the two is reaped |

use std::io;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use shared::block::Span;
use shared::bootstrap::PeerSocket;
use shared::config::{Device, KvMirror};
use shared::ids::{Generation, GroupId, Rank, WorkerId};
use shared::shm::board::{Board, BoardError};
use shared::shm::doorbell::Doorbell;
use shared::shm::group::{GroupMapError, GroupOwner, GroupShape};
use shared::shm::pair::{PairError, RingIdentity, RingPair};
use shared::shm::segment::{MemfdSegment, SegmentError};
use shared::shm::sessions::SESSIONS_BYTES;
use tracing::{info, warn};

use crate::inherited_fds::{Fd, Handed};
use crate::instance::Instance;
use crate::sizing::available_bytes;
use crate::weights::WeightsError;

/// Why a segment could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    #[error(transparent)]
    Segment(#[from] SegmentError),
    #[error(transparent)]
    Rings(#[from] PairError),
    #[error(transparent)]
    Board(#[from] BoardError),
    /// What the ranks of a group share.
    #[error(transparent)]
    Group(#[from] GroupMapError),
    /// prepare, which decides it, has not told how a group shares a block.
    #[error("it is not known how the ranks of group {0} share a block")]
    NoShares(GroupId),
    /// The files of the weights, which go with the segments of a worker.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("the weights of {0} are not open")]
    NoWeights(Span),
    #[error("cannot create a doorbell")]
    Doorbell(#[source] io::Error),
    /// A socket between two ranks.
    #[error("cannot create a socket between the ranks of a group")]
    Socket(#[source] io::Error),
    /// A descriptor to hand on.
    #[error("cannot duplicate the descriptor of a segment")]
    Descriptor(#[source] io::Error),
    /// A size is beyond what can be addressed.
    #[error("a segment of {0} bytes is larger than this machine can address")]
    TooLarge(u64),
    /// The KV cache is larger than the memory that is left.
    #[error(
        "the KV cache of worker {worker} needs {needed_bytes} bytes and {available_bytes} are available; \
         lower --attn_cache_tokens or serve fewer blocks"
    )]
    NoMemory { worker: WorkerId, needed_bytes: u64, available_bytes: u64 },
}

/// What a worker needs for its KV pages in host memory.
#[derive(Debug)]
pub struct Kv {
    worker: WorkerId,
    /// Whether the pages of a generation are there for the next; the same for all of them.
    pub survives: bool,
    /// Tells this segment from all others of the run.
    number: u32,
    /// The segment; of no use where the pages do not survive.
    pub segment: MemfdSegment,
}

/// One pair of rings with its doorbells.
#[derive(Debug)]
pub struct Rings {
    identity: RingIdentity,
    pub pair: RingPair,
    /// Rung by netd.
    pub submission: Doorbell,
    /// Rung by the worker.
    pub completion: Doorbell,
}

/// What the ranks of a generation of a group share.
#[derive(Debug)]
struct GroupSegments {
    shape: GroupShape,
    group: GroupOwner,
    /// By rank the ends of its sockets to the others, until it gets them; none before the first
    /// rank asks.
    sockets: Vec<Vec<OwnedFd>>,
}

impl GroupSegments {
    fn is_of(&self, group: GroupId, generation: Generation) -> bool {
        (self.shape.group, self.shape.generation) == (group, generation)
    }
}

/// All segments of a run.
#[derive(Debug)]
pub struct Segments {
    pub board: Board,
    /// Records of the sessions of netd, whatever its generation.
    pub sessions: MemfdSegment,
    arena: Option<(Generation, MemfdSegment)>,
    kv: Vec<Kv>,
    kv_made: u32,
    rings: Vec<Rings>,
    groups: Vec<GroupSegments>,
}

impl Segments {
    /// Makes the board and the segment of session records.
    ///
    /// # Errors
    /// [`MakeError::Board`] or [`MakeError::Segment`] when the system refuses.
    pub fn new(instance: &Instance, started_unix_s: u64) -> Result<Segments, MakeError> {
        let board = Board::create(instance.name(), started_unix_s)?;
        let sessions = MemfdSegment::create(&instance.segment("sessions"), SESSIONS_BYTES)?;
        Ok(Segments {
            board,
            sessions,
            arena: None,
            kv: Vec::new(),
            kv_made: 0,
            rings: Vec::new(),
            groups: Vec::new(),
        })
    }

    /// The arena of a generation of netd, made if this is its first use; the one before is dropped.
    ///
    /// # Errors
    /// [`MakeError::Segment`].
    pub fn arena(
        &mut self,
        instance: &Instance,
        netd: Generation,
        bytes: u64,
    ) -> Result<&MemfdSegment, MakeError> {
        if self.arena.as_ref().is_none_or(|(generation, _)| *generation != netd) {
            let len = usize::try_from(bytes).map_err(|_| MakeError::TooLarge(bytes))?;
            self.arena = None;
            let name = instance.segment(&format!("arena.n{netd}"));
            self.arena = Some((netd, MemfdSegment::create(&name, len)?));
        }
        match &self.arena {
            Some((_, arena)) => Ok(arena),
            None => Err(MakeError::TooLarge(bytes)),
        }
    }

    /// The kv segment of a worker, made at its first use and the same for all its generations.
    ///
    /// # Errors
    /// [`MakeError::NoMemory`] when it exceeds the memory of the machine.
    pub fn kv(
        &mut self,
        instance: &Instance,
        worker: WorkerId,
        choice: KvChoice,
        bytes: impl Fn(bool) -> usize,
    ) -> Result<&Kv, MakeError> {
        let index = match self.kv.iter().position(|kv| kv.worker == worker) {
            Some(index) => index,
            None => {
                let survives = choice.survives(worker, bytes(true) as u64, available_bytes());
                let bytes = bytes(survives);
                check_memory(worker, bytes as u64)?;
                let name = instance.segment(&format!("kv.{worker}"));
                let segment = MemfdSegment::create(&name, bytes)?;
                self.kv_made += 1;
                self.kv.push(Kv { worker, survives, number: self.kv_made, segment });
                self.kv.len() - 1
            }
        };
        self.kv.get(index).ok_or(MakeError::TooLarge(bytes(true) as u64))
    }

    /// The kv segment of a worker, if it was made.
    pub fn made_kv(&self, worker: WorkerId) -> Option<&Kv> {
        self.kv.iter().find(|kv| kv.worker == worker)
    }

    /// Whether the KV pages of a worker survive it.
    pub fn kv_survives(&self, worker: WorkerId) -> bool {
        self.made_kv(worker).is_none_or(|kv| kv.survives)
    }

    /// Which pages a generation of a worker has: another number where it does not have those of an
    /// earlier one.
    pub fn kv_version(&self, worker: WorkerId, generation: Generation) -> u64 {
        self.made_kv(worker).map_or(0, |kv| {
            let generation = if kv.survives { 0 } else { generation.0 };
            u64::from(kv.number) << 32 | u64::from(generation)
        })
    }

    /// Drops the kv segment of a worker that has ended for good.
    pub fn drop_kv(&mut self, worker: WorkerId) {
        self.kv.retain(|kv| kv.worker != worker);
    }

    /// What the ranks of a generation of a group share, made for the first of them.
    ///
    /// # Errors
    /// [`MakeError::Group`].
    pub fn group(
        &mut self,
        instance: &Instance,
        shape: &GroupShape,
    ) -> Result<&GroupOwner, MakeError> {
        Ok(&self.shared(instance, shape)?.group)
    }

    /// The ends of the sockets of `rank` of a generation of a group to its other ranks, in their
    /// order. Each rank gets them once: no other process holds them, so that the others see its
    /// end.
    ///
    /// # Errors
    /// [`MakeError::Group`] or [`MakeError::Socket`].
    pub fn take_sockets(
        &mut self,
        instance: &Instance,
        shape: &GroupShape,
        rank: Rank,
    ) -> Result<Vec<OwnedFd>, MakeError> {
        let shared = self.shared(instance, shape)?;
        if shared.sockets.is_empty() {
            let ranks = usize::from(shape.world_size.0);
            shared.sockets = sockets(ranks).map_err(MakeError::Socket)?;
        }
        let own = shared.sockets.get_mut(usize::from(rank.0));
        Ok(own.map(std::mem::take).unwrap_or_default())
    }

    fn shared(
        &mut self,
        instance: &Instance,
        shape: &GroupShape,
    ) -> Result<&mut GroupSegments, MakeError> {
        let index = match self.groups.iter().position(|made| made.shape == *shape) {
            Some(index) => index,
            None => {
                let name = group_name(instance, shape);
                let group = GroupOwner::create(&name, shape)?;
                self.groups.push(GroupSegments { shape: *shape, group, sockets: Vec::new() });
                self.groups.len() - 1
            }
        };
        self.groups.get_mut(index).ok_or(MakeError::TooLarge(0))
    }

    /// What the ranks of a generation of a group share, if it was made.
    pub fn made_group(&self, group: GroupId, generation: Generation) -> Option<&GroupOwner> {
        let made = self.groups.iter().find(|made| made.is_of(group, generation));
        made.map(|made| &made.group)
    }

    /// Drops what the ranks of a generation of a group shared.
    pub fn drop_group(&mut self, group: GroupId, generation: Generation) {
        self.groups.retain(|made| !made.is_of(group, generation));
    }

    /// Makes the rings of a pair of generations.
    ///
    /// # Errors
    /// [`MakeError::Rings`] when the system refuses, [`MakeError::Doorbell`] when descriptors are
    /// used up.
    pub fn make_rings(
        &mut self,
        instance: &Instance,
        identity: RingIdentity,
    ) -> Result<&Rings, MakeError> {
        let name = rings_name(instance, identity);
        let rings = Rings {
            identity,
            pair: RingPair::create(&name, &identity)?,
            submission: Doorbell::new().map_err(MakeError::Doorbell)?,
            completion: Doorbell::new().map_err(MakeError::Doorbell)?,
        };
        self.rings.push(rings);
        self.rings.last().ok_or(MakeError::TooLarge(0))
    }

    /// The rings of a pair of generations, if they exist.
    pub fn rings(&self, identity: RingIdentity) -> Option<&Rings> {
        self.rings.iter().find(|rings| rings.identity == identity)
    }

    /// Drops the rings of a pair of generations.
    pub fn drop_rings(&mut self, identity: RingIdentity) {
        self.rings.retain(|rings| rings.identity != identity);
    }
}

/// All segments of a run, by descriptors that survive the change of the executable.
#[derive(Debug, Serialize, Deserialize)]
pub struct HandedSegments {
    board: Fd,
    sessions: Fd,
    arena: Option<(Generation, Fd, u64)>,
    kv: Vec<HandedKv>,
    kv_made: u32,
    rings: Vec<(RingIdentity, [Fd; 3])>,
    groups: Vec<(GroupShape, Vec<Fd>)>,
}

#[derive(Debug, Serialize, Deserialize)]
struct HandedKv {
    worker: WorkerId,
    survives: bool,
    number: u32,
    segment: Fd,
    bytes: u64,
}

impl Segments {
    /// Duplicates every descriptor for the next executable.
    ///
    /// # Errors
    /// When the process is out of descriptors, or a rank has not taken its sockets yet.
    pub fn hand_over(&self, handed: &mut Handed) -> io::Result<HandedSegments> {
        let arena = self.arena.as_ref().map(|(generation, arena)| {
            Ok::<_, io::Error>((*generation, handed.put(arena.try_clone()?), arena.len() as u64))
        });
        let kv = self.kv.iter().map(|kv| {
            let (worker, survives, number) = (kv.worker, kv.survives, kv.number);
            let (segment, bytes) = (handed.put(kv.segment.try_clone()?), kv.segment.len() as u64);
            Ok(HandedKv { worker, survives, number, segment, bytes })
        });
        let (arena, kv) = (arena.transpose()?, kv.collect::<io::Result<_>>()?);
        let rings = self.rings.iter().map(|rings| {
            let bells = [rings.submission.try_clone()?, rings.completion.try_clone()?];
            let [submission, completion] = bells.map(|bell| handed.put(bell));
            Ok((rings.identity, [handed.put(rings.pair.try_clone()?), submission, completion]))
        });
        let rings = rings.collect::<io::Result<_>>()?;
        let groups = self.groups.iter().map(|shared| {
            if shared.sockets.iter().any(|left| !left.is_empty()) {
                return Err(io::Error::other("a group is starting"));
            }
            let fds = std::iter::once(shared.group.try_clone()?).chain(shared.group.doorbells()?);
            Ok((shared.shape, fds.map(|fd| handed.put(fd)).collect()))
        });
        let groups = groups.collect::<io::Result<_>>()?;
        let (board, sessions) = (self.board.try_clone()?, self.sessions.try_clone()?);
        let [board, sessions] = [board, sessions].map(|fd| handed.put(fd));
        let kv_made = self.kv_made;
        Ok(HandedSegments { board, sessions, arena, kv, kv_made, rings, groups })
    }

    /// The segments that the executable before handed over.
    ///
    /// # Errors
    /// [`MakeError`] when one of them is not what was said.
    pub fn adopt(instance: &Instance, handed: HandedSegments) -> Result<Segments, MakeError> {
        let take = |mut fd: Fd| fd.take().map_err(MakeError::Descriptor);
        let length = |bytes| usize::try_from(bytes).map_err(|_| MakeError::TooLarge(bytes));
        let mut segments = Segments {
            board: Board::adopt(take(handed.board)?)?,
            sessions: MemfdSegment::from_fd(
                &instance.segment("sessions"),
                take(handed.sessions)?,
                SESSIONS_BYTES,
            )?,
            arena: None,
            kv: Vec::new(),
            kv_made: handed.kv_made,
            rings: Vec::new(),
            groups: Vec::new(),
        };
        if let Some((netd, fd, bytes)) = handed.arena {
            let name = instance.segment(&format!("arena.n{netd}"));
            let arena = MemfdSegment::from_fd(&name, take(fd)?, length(bytes)?)?;
            segments.arena = Some((netd, arena));
        }
        for HandedKv { worker, survives, number, segment, bytes } in handed.kv {
            let name = instance.segment(&format!("kv.{worker}"));
            let segment = MemfdSegment::from_fd(&name, take(segment)?, length(bytes)?)?;
            segments.kv.push(Kv { worker, survives, number, segment });
        }
        for (identity, [pair, submission, completion]) in handed.rings {
            let bell = |fd| Doorbell::from_fd(take(fd)?).map_err(MakeError::Doorbell);
            segments.rings.push(Rings {
                identity,
                pair: RingPair::adopt(&rings_name(instance, identity), take(pair)?, &identity)?,
                submission: bell(submission)?,
                completion: bell(completion)?,
            });
        }
        for (shape, fds) in handed.groups {
            let mut fds = fds.into_iter().map(take);
            let segment = fds.next().ok_or(MakeError::TooLarge(0))??;
            let bells = fds.collect::<Result<Vec<_>, _>>()?;
            let name = group_name(instance, &shape);
            let group = GroupOwner::adopt(&name, &shape, segment, bells)?;
            segments.groups.push(GroupSegments { shape, group, sockets: Vec::new() });
        }
        Ok(segments)
    }
}

fn rings_name(instance: &Instance, identity: RingIdentity) -> String {
    let RingIdentity { worker, worker_generation, netd_generation } = identity;
    instance.segment(&format!("rings.{worker}.w{worker_generation}.n{netd_generation}"))
}

fn group_name(instance: &Instance, shape: &GroupShape) -> String {
    let GroupShape { group, generation, .. } = shape;
    instance.segment(&format!("group.{group}.w{generation}"))
}

/// A socket for every two of `ranks`: by rank, its ends of those to the others in their order.
fn sockets(ranks: usize) -> io::Result<Vec<Vec<OwnedFd>>> {
    let mut ends: Vec<Vec<OwnedFd>> = (0..ranks).map(|_| Vec::new()).collect();
    // Every rank gets those to lower ranks first, in their order, since the outer loop is over the
    // lower one.
    for lower in 0..ranks {
        for higher in lower + 1..ranks {
            let (one, other) = PeerSocket::pair()?;
            ends[lower].push(one);
            ends[higher].push(other);
        }
    }
    Ok(ends)
}

/// Where the KV pages of a worker are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvChoice {
    /// In the segment, and nowhere else: a processor's.
    Segment,
    /// On the device, and in the segment as asked for.
    Mirrored(KvMirror),
}

/// Memory that a mirror chosen by `auto` leaves to the machine.
const SPARE_BYTES: u64 = 1 << 30;

impl KvChoice {
    /// That of a device.
    pub fn of(device: Device, asked: KvMirror) -> KvChoice {
        match device {
            Device::Cpu | Device::Node(_) => KvChoice::Segment,
            Device::Cuda(_) | Device::Emulator(_) => KvChoice::Mirrored(asked),
        }
    }

    /// Whether the segment, of `bytes` bytes then, holds the pages. Says why not, and what that
    /// means.
    fn survives(self, worker: WorkerId, bytes: u64, available: Option<u64>) -> bool {
        let asked = match self {
            KvChoice::Segment => return true,
            KvChoice::Mirrored(asked) => asked,
        };
        let fits = available.is_none_or(|available| bytes.saturating_add(SPARE_BYTES) <= available);
        let survives = match asked {
            KvMirror::On => true,
            KvMirror::Off => false,
            KvMirror::Auto => fits,
        };
        if survives {
            info!(%worker, bytes, ?asked, "KV cache mirrored in host memory: sessions survive the death of a worker");
        } else {
            warn!(%worker, bytes, available, ?asked, "KV cache not mirrored: sessions end when their worker dies");
        }
        survives
    }
}

/// Memory of a memfd is taken page by page when touched, and its lack shows as a killed process:
/// better to say so at once.
fn check_memory(worker: WorkerId, needed_bytes: u64) -> Result<(), MakeError> {
    match available_bytes() {
        Some(available_bytes) if needed_bytes > available_bytes => {
            Err(MakeError::NoMemory { worker, needed_bytes, available_bytes })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use shared::ids::GroupId;

    use super::*;

    fn identity(worker: u32, netd: u32) -> RingIdentity {
        RingIdentity {
            worker: WorkerId::solo(GroupId(0)),
            worker_generation: Generation(worker),
            netd_generation: Generation(netd),
        }
    }

    fn segments() -> (tempfile::TempDir, Instance, Segments) {
        let dir = tempfile::tempdir().unwrap();
        let instance = Instance::claim(dir.path(), None).unwrap();
        let segments = Segments::new(&instance, 0).unwrap();
        (dir, instance, segments)
    }

    fn inode(segment: &MemfdSegment) -> u64 {
        nix::sys::stat::fstat(segment).unwrap().st_ino
    }

    #[test]
    fn kv_outlives_a_worker_and_the_arena_goes_with_its_netd() {
        let (_dir, instance, mut segments) = segments();
        let worker = WorkerId::solo(GroupId(0));
        let mut kv = || {
            let kv = segments.kv(&instance, worker, KvChoice::Segment, |_| 4096);
            inode(&kv.unwrap().segment)
        };
        assert_eq!(kv(), kv());
        let arena = inode(segments.arena(&instance, Generation(1), 4096).unwrap());
        assert_eq!(inode(segments.arena(&instance, Generation(1), 4096).unwrap()), arena);
        assert_ne!(inode(segments.arena(&instance, Generation(2), 4096).unwrap()), arena);
    }

    #[test]
    fn a_generation_of_a_group_has_one_segment_and_the_next_another() {
        let (_dir, instance, mut segments) = segments();
        let shape = |generation| GroupShape {
            group: GroupId(3),
            generation: Generation(generation),
            world_size: shared::ids::WorldSize(2),
            exchange_values: 16,
            log_bytes: 64,
        };
        let mut inode = |generation| {
            let group = segments.group(&instance, &shape(generation)).unwrap();
            nix::sys::stat::fstat(group.try_clone().unwrap()).unwrap().st_ino
        };
        let first = inode(1);
        assert_eq!(inode(1), first);
        assert_ne!(inode(2), first);
        segments.drop_group(GroupId(3), Generation(1));
        assert!(segments.made_group(GroupId(3), Generation(1)).is_none());
        assert!(segments.made_group(GroupId(3), Generation(2)).is_some());
    }

    #[test]
    fn every_two_ranks_are_connected_once_and_no_end_is_kept() {
        let (_dir, instance, mut segments) = segments();
        let shape = GroupShape {
            group: GroupId(0),
            generation: Generation(1),
            world_size: shared::ids::WorldSize(3),
            exchange_values: 16,
            log_bytes: 64,
        };
        let mut take = |rank| -> Vec<PeerSocket> {
            let ends = segments.take_sockets(&instance, &shape, Rank(rank)).unwrap();
            ends.into_iter().map(PeerSocket::from).collect()
        };
        let (ranks, again) = ([take(0), take(1), take(2)], take(1));
        assert!(again.is_empty());
        let others = |rank: usize| (0..3usize).filter(move |other| *other != rank);
        for (rank, sockets) in ranks.iter().enumerate() {
            for (socket, other) in sockets.iter().zip(others(rank)) {
                socket.send(&[rank as u8, other as u8], None).unwrap();
            }
        }
        let soon = std::time::Duration::from_secs(60);
        for (rank, sockets) in ranks.iter().enumerate() {
            for (socket, other) in sockets.iter().zip(others(rank)) {
                let got = socket.recv(soon).unwrap().unwrap().bytes;
                assert_eq!(got, [other as u8, rank as u8]);
            }
        }
        let [first, second, _third] = ranks;
        drop(second);
        let gone = first[0].recv(soon).unwrap_err();
        assert!(matches!(gone, shared::bootstrap::PeerError::Closed), "{gone}");
        assert!(first[1].recv(std::time::Duration::ZERO).unwrap().is_none());
    }

    #[test]
    fn rings_exist_until_one_end_is_dead() {
        let (_dir, instance, mut segments) = segments();
        let rings = segments.make_rings(&instance, identity(1, 1)).unwrap().pair.try_clone();
        segments.make_rings(&instance, identity(2, 1)).unwrap();
        assert!(RingPair::open(rings.unwrap(), &identity(1, 1)).is_ok());
        segments.drop_rings(identity(1, 1));
        assert!(
            segments.rings(identity(1, 1)).is_none() && segments.rings(identity(2, 1)).is_some()
        );
    }

    #[test]
    fn a_cache_larger_than_the_machine_is_refused_with_the_flag_to_lower() {
        let (_dir, instance, mut segments) = segments();
        let error = segments
            .kv(&instance, WorkerId::solo(GroupId(0)), KvChoice::Segment, |_| 1 << 60)
            .unwrap_err();
        assert!(error.to_string().contains("--attn_cache_tokens"), "{error}");
    }

    #[test]
    fn a_mirror_is_made_when_asked_for_or_when_it_fits() {
        let worker = WorkerId::solo(GroupId(0));
        let survives = |device, asked, available| {
            KvChoice::of(device, asked).survives(worker, 5 << 30, available)
        };
        assert!(survives(Device::Cpu, KvMirror::Off, Some(0)));
        assert!(survives(Device::Cuda(0), KvMirror::On, Some(0)));
        assert!(!survives(Device::Emulator(0), KvMirror::Off, Some(u64::MAX)));
        assert!(survives(Device::Cuda(0), KvMirror::Auto, Some(6 << 30)));
        assert!(!survives(Device::Cuda(0), KvMirror::Auto, Some((6 << 30) - 1)));
    }

    #[test]
    fn a_choice_holds_for_all_generations_of_a_worker() {
        let (_dir, instance, mut segments) = segments();
        let worker = WorkerId::solo(GroupId(0));
        let bytes = |survives| if survives { 1 << 20 } else { 4096 };
        for asked in [KvMirror::Off, KvMirror::On] {
            let choice = KvChoice::Mirrored(asked);
            let kv = segments.kv(&instance, worker, choice, bytes).unwrap();
            assert_eq!((kv.survives, kv.segment.len()), (false, 4096));
        }
        assert!(!segments.kv_survives(worker));
    }
}
