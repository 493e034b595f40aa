//! Groups in this process: the executor of rank 0 and those of its followers are threads over one
//! segment. Every rank holds whole blocks and nothing is exchanged, so that each computes what a
//! worker alone computes.

use std::os::unix::fs::FileExt;

use shared::ids::GroupId;
use shared::job::MAX_BODY_BYTES;
use shared::shm::group::{GroupMap, GroupOwner, GroupShape, PlanReader};

use super::*;
use crate::link::ArenaLink;

mod answering;
mod cost;
mod hostile;
mod same_bits;

/// Bytes of a plan log.
const PLAN_LOG_BYTES: usize = 2 * MAX_BODY_BYTES;

/// What a supervisor makes for a group.
struct Parts {
    group: GroupOwner,
    shape: GroupShape,
}

impl Parts {
    fn new(world: usize, log_bytes: usize) -> Parts {
        let shape = GroupShape {
            group: GroupId(0),
            generation: FIRST,
            world_size: WorldSize(world as u16),
            exchange_values: 16,
            log_bytes,
        };
        Parts { group: GroupOwner::create(&unique("group"), &shape).unwrap(), shape }
    }

    fn map(&self, rank: usize) -> Arc<GroupMap> {
        let (segment, bells) = (self.group.try_clone().unwrap(), self.group.doorbells().unwrap());
        GroupMap::open(segment, bells, &self.shape, Rank(rank as u16)).unwrap()
    }

    fn writer(&self, board: &Arc<BoardWriter>) -> PlanWriter {
        PlanWriter::new(&self.map(0), wait_policy(false, board)).unwrap()
    }

    fn reader(&self, rank: usize, board: &Arc<BoardWriter>) -> PlanReader {
        PlanReader::new(&self.map(rank), wait_policy(false, board)).unwrap()
    }

    /// Returns when rank 0 waits for rank 1.
    fn until_rank_0_waits(&self) {
        let start = Instant::now();
        while self.group.waits()[0] != Some(Rank(1)) {
            assert!(start.elapsed() < DEADLINE, "rank 0 does not wait");
            thread::yield_now();
        }
    }
}

/// A board of its own for one rank.
fn board() -> Arc<BoardWriter> {
    let Seat { board, seat } = Seat::of(Role::Worker, FIRST);
    Arc::new(BoardWriter::open(board.try_clone().unwrap(), &seat, FIRST).unwrap())
}

/// The control threads of the ranks.
struct Controls<'a> {
    rank_0: SyncSender<ExecutorCommand>,
    followers: Vec<SyncSender<ExecutorCommand<ArenaLink>>>,
    /// What the followers say of the links that they got.
    acknowledged: Receiver<Generation>,
    bell: Doorbell,
    parts: &'a Parts,
}

impl Controls<'_> {
    /// A new netd: the followers get its arena, then rank 0 its link.
    fn link(&self, parts: &LinkParts) {
        self.link_followers(parts);
        self.link_rank_0(parts);
    }

    fn link_rank_0(&self, parts: &LinkParts) {
        self.rank_0.send(ExecutorCommand::Link(Box::new(open(parts)))).unwrap();
        self.bell.ring().unwrap();
    }

    fn link_followers(&self, parts: &LinkParts) {
        for (follower, rank) in self.followers.iter().zip(1..) {
            follower.send(ExecutorCommand::Link(Box::new(arena_link(parts)))).unwrap();
            self.parts.map(rank).ring(Rank(rank as u16)).unwrap();
        }
        let netd = parts.identity.netd_generation;
        for _ in &self.followers {
            assert_eq!(self.acknowledged.recv_timeout(DEADLINE), Ok(netd));
        }
    }
}

/// Ends the group, also when the client panics.
impl Drop for Controls<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = self.parts.group.abort();
        }
        let _ = self.rank_0.send(ExecutorCommand::Drain);
        let _ = self.bell.ring();
    }
}

fn arena_link(parts: &LinkParts) -> ArenaLink {
    let (init, mut fds) = parts.for_worker();
    fds.truncate(1);
    ArenaLink::open(&init, FIRST, fds).unwrap()
}

/// Runs `client` against a group with a rank for each of `kvs`, which aborts when one of its ranks
/// fails; tells how each ended. One rank is a worker without a group.
fn with_group<Out>(
    model: &Model,
    kvs: &[MemfdSegment],
    client: impl FnOnce(&mut Netd, &Controls<'_>) -> Out,
) -> (Vec<Exit>, Out) {
    let group = Parts::new(kvs.len().max(2), PLAN_LOG_BYTES);
    let link = LinkParts::new(FIRST, FIRST);
    thread::scope(|scope| {
        let (rank_0, inbox) = sync_channel(8);
        let (mut ranks, mut followers) = (Vec::new(), Vec::new());
        let (acknowledge, acknowledged) = sync_channel(16);
        for (rank, kv) in kvs.iter().enumerate().skip(1) {
            let (commands, inbox) = sync_channel(8);
            followers.push(commands);
            let (parts, acknowledge) = (&group, acknowledge.clone());
            ranks.push(scope.spawn(move || {
                parts.ending(run_follower(model, kv, parts, rank, &inbox, acknowledge))
            }));
        }
        ranks.insert(
            0,
            scope.spawn({
                let (group, others) = (&group, followers.clone());
                move || {
                    let parts = (kvs.len() > 1).then_some(group);
                    let end = run_rank_0(model, &kvs[0], parts, &inbox);
                    // The others are told to drain when rank 0 has ended.
                    for (commands, rank) in others.iter().zip(1..) {
                        let _ = commands.send(ExecutorCommand::Drain);
                        group.map(rank).ring(Rank(rank as u16)).unwrap();
                    }
                    group.ending(end)
                }
            }),
        );
        let bell = another(&link.submission_bell);
        let controls = Controls { rank_0, followers, acknowledged, bell, parts: &group };
        controls.link(&link);
        // The control threads go on for as long as their ranks.
        let _threads = (controls.rank_0.clone(), controls.followers.clone());
        let out = client(&mut Netd::of(link), &controls);
        drop(controls);
        (ranks.into_iter().map(|rank| rank.join().unwrap()).collect(), out)
    })
}

impl Parts {
    /// What the supervisor does when a rank ends.
    fn ending(&self, end: Exit) -> Exit {
        if end != Exit::clean() {
            self.group.abort().unwrap();
        }
        end
    }
}

fn run_rank_0(
    model: &Model,
    kv: &MemfdSegment,
    group: Option<&Parts>,
    inbox: &Receiver<ExecutorCommand>,
) -> Exit {
    let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
    let (engine, board) = (engine(model, &weights, kv), board());
    let plans = group.map(|parts| parts.writer(&board));
    let executor = Executor::new(engine, model.limits(), Faults::new(None, FIRST), board);
    match plans {
        Some(plans) => executor.publishing(plans).run(inbox, |_| ()),
        None => executor.run(inbox, |_| ()),
    }
}

fn run_follower(
    model: &Model,
    kv: &MemfdSegment,
    parts: &Parts,
    rank: usize,
    inbox: &Receiver<ExecutorCommand<ArenaLink>>,
    acknowledge: SyncSender<Generation>,
) -> Exit {
    let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
    let board = board();
    let plans = parts.reader(rank, &board);
    let faults = Faults::new(None, FIRST);
    Follower::new(engine(model, &weights, kv), model.limits(), faults, board, plans).run(
        inbox,
        |message| match message {
            FromWorker::Linked { netd_generation } => acknowledge.send(netd_generation).unwrap(),
            other => panic!("{other:?}"),
        },
    )
}

fn kv_segments(model: &Model, world: usize) -> Vec<MemfdSegment> {
    (0..world).map(|_| kv_segment(model.facts())).collect()
}

/// The bytes of a segment: all pages of a rank.
fn contents(segment: &MemfdSegment) -> Vec<u8> {
    let mut bytes = vec![0; segment.len()];
    let file = std::fs::File::from(segment.try_clone().unwrap());
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}
