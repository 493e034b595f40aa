//! Children that keep the treaty with the supervisor and do no work. The script they follow is the
//! name of the model. What they hand over is real: rings, doorbells, arena and kv are opened as the
//! true roles do, and netd comes online only after an entry went to each worker and back.

use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use model::manifest::{MANIFEST_VERSION, Manifest};
use shared::block::Span;
use shared::bootstrap::{Bootstrap, ControlEnds, ControlSender};
use shared::control::{
    FromNetd, FromPrepare, FromWorker, GroupInit, LinkInit, Role, ToNetd, ToPrepare, ToWorker,
    WeightsInit, WorkerInit, WorkerUp,
};
use shared::exit::ExitReason;
use shared::ids::WorkerId;
use shared::model::{ModelFacts, RankShare};
use shared::shm::arena::ArenaMap;
use shared::shm::board::{BoardWriter, Phase};
use shared::shm::doorbell::{Doorbell, Wake};
use shared::shm::group::{GroupMap, GroupMember, GroupShape, WaitPolicy};
use shared::shm::kv::KvMap;
use shared::shm::pair::{RingIdentity, RingPair};
use shared::shm::segment::MemfdSegment;
use shared::survey::{Capacity, Survey};
use tracing::info;

/// A log filter by which a child knows that it shall never connect: the only thing that it knows before
/// it does.
pub const SILENT: &str = "info,silent=off";

const PATIENCE: Duration = Duration::from_secs(60);
const BLOCKS: u32 = 8;

/// `ROLE --bootstrap FD`.
pub fn run(args: &[String]) -> ExitCode {
    let role = [Role::Netd, Role::Worker, Role::Prepare]
        .into_iter()
        .find(|role| role.name() == args[0])
        .unwrap();
    let bootstrap = match Bootstrap::from_fd(args[2].parse().unwrap(), role) {
        Ok(bootstrap) => bootstrap,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(error.exit_reason().code());
        }
    };
    while bootstrap.birth().log.filter == SILENT {
        std::thread::park();
    }
    let reason = match role {
        Role::Prepare => prepare(bootstrap),
        Role::Netd => netd(bootstrap),
        Role::Worker => worker(bootstrap),
    };
    ExitCode::from(reason.code())
}

fn prepare(bootstrap: Bootstrap) -> ExitReason {
    let ends: ControlEnds<ToPrepare, FromPrepare> = bootstrap.connect().unwrap();
    let say = |message| ends.sender.send(message).unwrap();
    let mut name = String::new();
    loop {
        match ends.receiver.recv() {
            Ok(ToPrepare::Init { config, .. }) if config.model == "prepare-refuses" => {
                let reason = ExitReason::BadConfig;
                say(FromPrepare::Failed {
                    reason,
                    message: "there is no such model; give another".into(),
                });
                return reason;
            }
            Ok(ToPrepare::Init { config, groups, .. }) => {
                name.clone_from(&config.model);
                let mut survey = Survey::of(facts(&config.model));
                if groups.iter().any(|devices| devices.len() > 1) {
                    let of = |devices: &Vec<_>| vec![share(devices.len()); devices.len()];
                    survey.ranks = groups.iter().map(of).collect();
                }
                say(FromPrepare::Surveyed(Box::new(survey)));
            }
            Ok(ToPrepare::Span { manifest, .. }) => {
                Manifest {
                    version: MANIFEST_VERSION,
                    model: facts(&name),
                    config: serde_json::Value::Null,
                    files: Vec::new(),
                    blocks: [].into(),
                    adapters: Vec::new(),
                }
                .write(&manifest)
                .unwrap();
                say(FromPrepare::Prepared);
                return ExitReason::Clean;
            }
            Ok(ToPrepare::Drain) => return ExitReason::Clean,
            Err(_) => return ExitReason::ParentGone,
        }
    }
}

/// What each rank of a group of `ranks` holds.
fn share(ranks: usize) -> RankShare {
    let part = 4 / ranks as u32;
    RankShare {
        heads: part,
        kv_heads: part,
        columns: 64,
        block_bytes: 1 << 20,
        copied_bytes: 0,
        is_slow: false,
    }
}

fn facts(name: &str) -> ModelFacts {
    ModelFacts { name: name.into(), num_blocks: BLOCKS, kv_heads: 4, ..testkit::facts::facts() }
}

fn netd(bootstrap: Bootstrap) -> ExitReason {
    let ends: ControlEnds<ToNetd, FromNetd> = bootstrap.connect().unwrap();
    let generation = ends.birth.generation;
    let say = |message| ends.sender.send(message).unwrap();
    let (mut served, mut script, mut up) = (None, String::new(), Vec::<(WorkerId, Span)>::new());
    loop {
        match ends.receiver.recv() {
            Ok(ToNetd::Init(init)) => {
                let fd = ends.descriptors.recv(init.fds, 3, PATIENCE).unwrap().remove(0);
                open_arena(fd, init.arena_bytes);
                served = init.served;
                if let Some(span) = served {
                    info!("serves span {span} again");
                }
                let fresh = || vec!["/ip4/127.0.0.1/tcp/4242/p2p/Fake".to_owned()];
                let addrs = if generation.0 == 1 { fresh() } else { init.previous_addrs };
                say(FromNetd::Listening { peer_id: "Fake".into(), addrs });
            }
            Ok(ToNetd::Model { facts, .. }) => {
                script = facts.name;
                if script == "netd-rambles" && generation.0 == 1 {
                    let message = "x".repeat(1 << 20);
                    let reason = ExitReason::Failed;
                    // The supervisor takes no more than the announcement.
                    let _ = ends.sender.send(FromNetd::Failed { reason, message });
                    loop {
                        std::thread::park();
                    }
                }
                if script == "netd-floods" && generation.0 == 1 {
                    loop {
                        say(FromNetd::ProposedSpan(Span::new(0, BLOCKS).unwrap()));
                    }
                }
                say(FromNetd::ProposedSpan(served.unwrap_or(Span::new(0, BLOCKS).unwrap())));
            }
            Ok(ToNetd::WorkerUp(worker)) => {
                let fds = ends.descriptors.recv(worker.link.fds, 3, PATIENCE).unwrap();
                assert_eq!(worker.link.netd_generation, generation, "rings of this netd");
                round_trip(&worker, fds);
                info!(
                    "told up worker={} generation={}",
                    worker.worker, worker.link.worker_generation
                );
                up.push((worker.worker, worker.span));
                if up.iter().map(|(_, span)| span.block_count()).sum::<usize>() == BLOCKS as usize {
                    say(FromNetd::Online);
                }
            }
            Ok(ToNetd::WorkerDown { worker, generation, cause, restarting }) => {
                info!(
                    "told down worker={worker} generation={generation} cause={cause:?} restarting={restarting}"
                );
                up.retain(|(up, _)| *up != worker);
            }
            Ok(ToNetd::Drain) if script == "netd-is-deaf" => {}
            Ok(ToNetd::Drain | ToNetd::Replace) => return ExitReason::Clean,
            Ok(_) => {}
            Err(_) => return ExitReason::ParentGone,
        }
    }
}

/// Sends an entry to the worker and waits for its echo.
fn round_trip(worker: &WorkerUp, fds: Vec<OwnedFd>) {
    let mut fds = fds.into_iter();
    let rings = fds.next().unwrap();
    let [submission_bell, completion_bell] =
        [(); 2].map(|()| Doorbell::from_fd(fds.next().unwrap()).unwrap());
    let pair = RingPair::open(rings, &identity(worker.worker, &worker.link)).unwrap();
    let (mut submission, mut completion) = pair.netd_end();
    submission.push([7; 8]).unwrap();
    submission.ring_if_sleeping(&submission_bell).unwrap();
    assert_eq!(completion.wait(&completion_bell, Duration::ZERO, PATIENCE).unwrap(), Wake::Ready);
    assert_eq!(completion.pop().unwrap(), Some([7; 8]));
}

fn worker(bootstrap: Bootstrap) -> ExitReason {
    let ends: ControlEnds<ToWorker, FromWorker> = bootstrap.connect().unwrap();
    let (mut me, mut crashes) = (None, false);
    let mut echo: Option<Arc<AtomicBool>> = None;
    loop {
        match ends.receiver.recv() {
            Ok(ToWorker::Init(init)) => {
                let member = init.group.as_ref().map(|group| join(&init, group, &ends));
                let mut fds = ends.descriptors.recv(init.fds, 2, PATIENCE).unwrap();
                let board = fds.pop().unwrap();
                mark_kv(&init, fds.pop().unwrap());
                let WeightsInit { manifest, files, fds } = &init.weights;
                let weights = ends.descriptors.recv_all(*fds, files.len() + 1, PATIENCE).unwrap();
                let file = std::fs::File::from(weights.into_iter().next().unwrap());
                assert_eq!(Manifest::read_open(&file, manifest).unwrap().model, init.model);
                me = Some(init.worker);
                crashes = init.model.name == "worker-crashes";
                if let Some(member) = member {
                    meet(member, &init);
                }
                follow_script(&init, board, &ends.sender);
            }
            Ok(ToWorker::Link(link)) if me.is_some_and(|me| me.rank.0 > 0) => {
                let mut fds = ends.descriptors.recv(link.fds, 1, PATIENCE).unwrap();
                open_arena(fds.remove(0), link.arena_bytes);
                info!("got the arena of netd generation={}", link.netd_generation);
                let netd_generation = link.netd_generation;
                ends.sender.send(FromWorker::Linked { netd_generation }).unwrap();
            }
            Ok(ToWorker::Link(link)) => {
                let mut fds = ends.descriptors.recv(link.fds, 4, PATIENCE).unwrap().into_iter();
                open_arena(fds.next().unwrap(), link.arena_bytes);
                let rings = fds.next().unwrap();
                let bells = fds.map(|fd| Doorbell::from_fd(fd).unwrap()).collect();
                if let Some(old) = echo.take() {
                    old.store(true, Ordering::Relaxed);
                }
                echo = Some(start_echo(me.unwrap(), &link, rings, bells, crashes));
                ends.sender
                    .send(FromWorker::Linked { netd_generation: link.netd_generation })
                    .unwrap();
            }
            Ok(ToWorker::Drain) => return ExitReason::Clean,
            Err(_) => return ExitReason::ParentGone,
        }
    }
}

/// Opens the group of which this worker is a rank.
fn join(
    init: &WorkerInit,
    group: &GroupInit,
    ends: &ControlEnds<ToWorker, FromWorker>,
) -> Arc<GroupMap> {
    let count = 1 + usize::from(init.worker.world_size.0);
    let mut fds = ends.descriptors.recv(group.fds, count, PATIENCE).unwrap();
    let segment = fds.remove(0);
    let shape = GroupShape::of(group, init.worker, init.generation);
    GroupMap::open(segment, fds, &shape, init.worker.rank).unwrap()
}

/// Exchanges a sum with the other ranks: all of them have the same segment. Then waits for others
/// in a thread of its own, until the group is aborted.
fn meet(map: Arc<GroupMap>, init: &WorkerInit) {
    let policy = WaitPolicy {
        spin: Duration::ZERO,
        interval: Duration::from_millis(50),
        heartbeat: Box::new(|| ()),
    };
    let mut member = GroupMember::new(&map, policy).unwrap();
    let mut values = [f32::from(init.worker.rank.0) + 1.0];
    member.all_reduce(&mut values).unwrap();
    let expected: u16 = (1..=init.worker.world_size.0).sum();
    assert_eq!(values, [f32::from(expected)]);
    info!("met the other ranks, generation={}", init.generation);
    if init.worker.rank.0 == 0 {
        // Rank 1 never answers.
        std::thread::spawn(move || {
            let end = member.all_reduce(&mut values);
            info!("waited for the other ranks: {end:?}");
        });
    }
}

fn follow_script(init: &WorkerInit, board: OwnedFd, supervisor: &ControlSender<FromWorker>) {
    let board = BoardWriter::open(board, &init.board, init.generation).unwrap();
    board.enter(Phase::Loading, Duration::from_secs(10));
    supervisor.send(FromWorker::Ready(Capacity::default())).unwrap();
    match init.model.name.as_str() {
        "worker-hangs" if init.generation.0 == 1 => {
            board.enter(Phase::Unit, Duration::ZERO);
            loop {
                std::thread::park();
            }
        }
        _ => {}
    }
    board.enter(Phase::Idle, Duration::ZERO);
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(board.heartbeat());
            board.progress();
        }
    });
}

/// The first value of the cache is the generation that wrote last.
fn mark_kv(init: &WorkerInit, fd: OwnedFd) {
    let model = match &init.group {
        Some(group) => init.model.of_rank(&group.shares[usize::from(init.worker.rank.0)]),
        None => init.model.clone(),
    };
    let bytes = model.kv_segment_bytes(init.span, init.kv_pages);
    let mut kv = KvMap::map(&MemfdSegment::from_fd("sepal-kv", fd, bytes).unwrap()).unwrap();
    let values = kv.values_mut::<u64>();
    info!("kv held the mark of generation {}", values[0]);
    values[0] = u64::from(init.generation.0);
}

fn open_arena(fd: OwnedFd, bytes: u64) {
    let segment =
        MemfdSegment::from_fd("sepal-arena", fd, usize::try_from(bytes).unwrap()).unwrap();
    assert_eq!(ArenaMap::map(&segment).unwrap().len(), bytes);
}

fn identity(worker: WorkerId, link: &LinkInit) -> RingIdentity {
    let LinkInit { worker_generation, netd_generation, .. } = *link;
    RingIdentity { worker, worker_generation, netd_generation }
}

/// Sends back what comes through the rings, until told to stop. One that `crashes` does so once netd knows
/// of this worker.
fn start_echo(
    worker: WorkerId,
    link: &LinkInit,
    rings: OwnedFd,
    bells: Vec<Doorbell>,
    crashes: bool,
) -> Arc<AtomicBool> {
    let pair = RingPair::open(rings, &identity(worker, link)).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    std::thread::spawn(move || {
        let (mut submission, mut completion) = pair.worker_end();
        while !stopped.load(Ordering::Relaxed) {
            submission.wait(&bells[0], Duration::ZERO, Duration::from_millis(50)).unwrap();
            while let Some(entry) = submission.pop().unwrap() {
                completion.push(entry).unwrap();
                completion.ring_if_sleeping(&bells[1]).unwrap();
                if crashes {
                    std::process::abort();
                }
            }
        }
    });
    stop
}
