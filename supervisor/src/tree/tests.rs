use proptest::prelude::*;
use shared::config::{Device, RestartConfig};
use shared::control::{DeathCause, DeviceMemory};
use shared::dtype::DType;
use shared::ids::GroupId;

use super::*;
use crate::plan::Share;
use crate::sizing::Memory;

mod moves;

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const SIGSEGV: End = End::Signal(nix::libc::SIGSEGV);
const SIGKILL: End = End::Signal(nix::libc::SIGKILL);
const NETD: ChildId = ChildId::Netd;
const PREPARE: ChildId = ChildId::Prepare;

fn policy(devices: usize) -> Policy {
    let restart = RestartConfig {
        backoff_min: 100 * MS,
        backoff_max: 10 * SEC,
        max_restarts: 3,
        window: 60 * SEC,
        hang_timeout: 5 * SEC,
        start_timeout: 30 * SEC,
    };
    Policy {
        restart,
        drain_timeout: 20 * SEC,
        shares: vec![
            Share {
                device: Device::Cpu,
                weight: 1.0
            };
            devices
        ],
        span: SpanChoice::All,
        memory: memory(None),
        pace: SEC,
    }
}

/// Memory with so many bytes available.
fn memory(available_bytes: Option<u64>) -> Memory {
    let netd = crate::sizing::tests::netd_config();
    Memory {
        available_bytes,
        workers: 2,
        netd,
        kv_mirror: shared::config::KvMirror::Auto,
        devices: Vec::new(),
    }
}

fn facts() -> ModelFacts {
    ModelFacts {
        name: "tiny".into(),
        repository: None,
        model_type: "llama".into(),
        dht_prefix: None,
        num_blocks: 8,
        hidden_size: 64,
        attention_heads: 4,
        kv_heads: 2,
        head_dim: 16,
        dtype: DType::F32,
        quant_type: shared::config::QuantType::None,
        block_bytes: 1 << 20,
        adapters: Vec::new(),
    }
}

fn worker(group: u16) -> ChildId {
    ChildId::Worker(WorkerId::solo(GroupId(group)))
}

fn span(start: u32, end: u32) -> Span {
    Span::new(start, end).unwrap()
}

/// A tree with a clock, the actions of the last event, and a witness of them all.
struct Rig {
    tree: Tree,
    now: Instant,
    last: Vec<Action>,
    witness: Witness,
}

impl Rig {
    fn new(devices: usize) -> Rig {
        let tree = Tree::new(policy(devices));
        Rig {
            tree,
            now: Instant::now(),
            last: Vec::new(),
            witness: Witness::default(),
        }
    }

    fn on(&mut self, event: Event) -> &mut Rig {
        if let Event::Ended(id, generation, _) = &event {
            self.witness.live.retain(|live| live != &(*id, *generation));
        }
        self.last = self.tree.on(event, self.now);
        self.last.iter().for_each(|action| self.witness.see(action));
        self
    }

    fn wait(&mut self, time: Duration) -> &mut Rig {
        self.now += time;
        self.on(Event::Tick)
    }

    fn generation(&self, id: ChildId) -> Generation {
        self.tree
            .children()
            .find(|child| child.id == id)
            .unwrap()
            .generation
    }

    fn state(&self, id: ChildId) -> State {
        self.tree
            .children()
            .find(|child| child.id == id)
            .unwrap()
            .state
    }

    fn say(&mut self, id: ChildId, up: Up) -> &mut Rig {
        let generation = self.generation(id);
        self.on(Event::Said(id, generation, up))
    }

    fn die(&mut self, id: ChildId, end: End) -> &mut Rig {
        let generation = self.generation(id);
        self.on(Event::Ended(id, generation, end))
    }

    fn worker_ready(&mut self, group: u16) -> &mut Rig {
        self.say(
            worker(group),
            Up::Worker(FromWorker::Ready(Capacity::default())),
        );
        let netd_generation = self.generation(NETD);
        self.say(
            worker(group),
            Up::Worker(FromWorker::Linked { netd_generation }),
        )
    }

    fn netd_listens(&mut self) -> &mut Rig {
        let addrs = vec!["/ip4/127.0.0.1/tcp/9/p2p/Qm".to_owned()];
        self.say(
            NETD,
            Up::Netd(FromNetd::Listening {
                peer_id: "Qm".into(),
                addrs,
            }),
        )
    }

    /// Start until the workers load.
    fn until_prepared(devices: usize) -> Rig {
        let mut rig = Rig::new(devices);
        rig.on(Event::Start);
        rig.netd_listens();
        rig.say(PREPARE, Up::Prepare(FromPrepare::Inspected(facts())));
        rig.say(NETD, Up::Netd(FromNetd::ProposedSpan(span(0, 8))));
        rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
        rig
    }

    /// Start until clients can come.
    fn online(devices: usize) -> Rig {
        let mut rig = Rig::until_prepared(devices);
        rig.die(PREPARE, End::Code(0));
        (0..devices).for_each(|group| {
            rig.worker_ready(u16::try_from(group).unwrap());
        });
        rig.say(NETD, Up::Netd(FromNetd::Online));
        rig
    }

    fn told(&self, id: ChildId) -> Vec<&Down> {
        let tell = |action| match action {
            &Action::Tell(to, ref down) if to == id => Some(down),
            _ => None,
        };
        self.last.iter().filter_map(tell).collect()
    }

    fn spawned(&self) -> Vec<(ChildId, u32)> {
        let spawn = |action: &Action| match action {
            Action::Spawn(id, generation) => Some((*id, generation.0)),
            _ => None,
        };
        self.last.iter().filter_map(spawn).collect()
    }

    fn killed(&self) -> Vec<ChildId> {
        let kill = |action: &Action| match action {
            Action::Kill(id, ..) => Some(*id),
            _ => None,
        };
        self.last.iter().filter_map(kill).collect()
    }

    fn finished(&self) -> Option<ExitReason> {
        match self.last.last() {
            Some(Action::Finish(reason)) => Some(*reason),
            _ => None,
        }
    }

    fn complaints(&self) -> Vec<&str> {
        let mut texts = Vec::new();
        for action in &self.last {
            if let Action::Complain(text) = action {
                texts.push(text.as_str());
            }
        }
        texts
    }
}

fn is_up(down: &&Down) -> bool {
    matches!(down, Down::WorkerUp { .. })
}

#[test]
fn prepare_and_netd_start_at_once() {
    let mut rig = Rig::new(1);
    assert_eq!(rig.on(Event::Start).spawned(), [(PREPARE, 1), (NETD, 1)]);
}

#[test]
fn netd_learns_the_model_when_both_sides_are_there() {
    let mut rig = Rig::new(1);
    rig.on(Event::Start);
    assert!(
        rig.say(PREPARE, Up::Prepare(FromPrepare::Inspected(facts())))
            .told(NETD)
            .is_empty()
    );
    assert_eq!(rig.netd_listens().told(NETD), [&Down::Model(facts())]);
}

#[test]
fn the_proposed_span_is_prepared_and_cut_among_the_devices() {
    let mut rig = Rig::new(2);
    rig.on(Event::Start).netd_listens();
    rig.say(PREPARE, Up::Prepare(FromPrepare::Inspected(facts())));
    rig.say(NETD, Up::Netd(FromNetd::ProposedSpan(span(2, 8))));
    assert_eq!(rig.told(PREPARE), [&Down::Span(span(2, 8))]);
    rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
    assert_eq!(rig.spawned(), [(worker(0), 1), (worker(1), 1)]);
    let [Down::Init(Init::Worker { placement, .. })] = rig.told(worker(1))[..] else {
        panic!("{:?}", rig.last)
    };
    assert_eq!(placement.span, span(5, 8));
}

#[test]
fn netd_hears_of_a_worker_only_after_it_acknowledged_its_rings() {
    let mut rig = Rig::until_prepared(1);
    rig.say(
        worker(0),
        Up::Worker(FromWorker::Ready(Capacity::default())),
    );
    assert_eq!(
        rig.told(worker(0)),
        [&Down::Link {
            netd: Generation(1)
        }]
    );
    assert!(rig.told(NETD).is_empty());
    rig.say(
        worker(0),
        Up::Worker(FromWorker::Linked {
            netd_generation: Generation(1),
        }),
    );
    assert_eq!(rig.told(NETD).into_iter().filter(is_up).count(), 1);
}

#[test]
fn a_dead_worker_that_had_served_is_reported_and_restarted_at_once_with_new_rings() {
    let mut rig = Rig::online(1);
    rig.die(worker(0), SIGKILL);
    let down = Down::WorkerDown {
        worker: WorkerId::solo(GroupId(0)),
        generation: Generation(1),
        cause: DeathCause::Outside,
        restarting: true,
    };
    assert_eq!(rig.told(NETD), [&down]);
    assert_eq!(rig.spawned(), [(worker(0), 2)]);
    rig.say(
        worker(0),
        Up::Worker(FromWorker::Ready(Capacity::default())),
    );
    assert_eq!(
        rig.told(worker(0)),
        [&Down::Link {
            netd: Generation(1)
        }]
    );
}

#[test]
fn a_crash_of_its_own_is_told_apart_from_a_kill() {
    for (end, cause) in [
        (SIGSEGV, DeathCause::SelfInflicted),
        (End::Code(1), DeathCause::SelfInflicted),
        (End::Code(101), DeathCause::SelfInflicted),
        (SIGKILL, DeathCause::Outside),
        (End::Signal(nix::libc::SIGTERM), DeathCause::Outside),
    ] {
        let mut rig = Rig::online(1);
        rig.die(worker(0), end.clone());
        let [Down::WorkerDown { cause: told, .. }] = rig.told(NETD)[..] else {
            panic!("{end:?}")
        };
        assert_eq!(*told, cause, "{end:?}");
    }
}

#[test]
fn pauses_double_and_too_many_deaths_hold_the_worker() {
    let mut rig = Rig::online(2);
    rig.die(worker(0), SIGSEGV);
    for pause in [200 * MS, 400 * MS] {
        rig.die(worker(0), SIGSEGV);
        assert!(rig.wait(pause - MS).spawned().is_empty());
        assert_eq!(rig.wait(MS).spawned().len(), 1);
    }
    rig.die(worker(0), SIGSEGV);
    assert_eq!(
        rig.state(worker(0)),
        State::Held {
            reason: ExitReason::RestartLimit
        }
    );
    assert!(matches!(
        rig.told(NETD)[..],
        [
            Down::WorkerDown {
                restarting: false,
                ..
            },
            Down::Shrink(_)
        ]
    ));
    assert_eq!(rig.finished(), None, "the other worker goes on");
}

#[test]
fn deaths_outside_the_window_are_forgotten() {
    let mut rig = Rig::online(1);
    for _ in 0..20 {
        assert_eq!(rig.die(worker(0), SIGKILL).spawned().len(), 1);
        rig.worker_ready(0);
        rig.wait(61 * SEC);
    }
}

#[test]
fn a_new_netd_keeps_addresses_and_span_and_gets_every_worker_again() {
    let mut rig = Rig::online(2);
    rig.die(NETD, SIGKILL);
    let [
        Down::Init(Init::Netd {
            previous_addrs,
            served,
            ..
        }),
    ] = rig.told(NETD)[..]
    else {
        panic!("{:?}", rig.last)
    };
    assert_eq!((previous_addrs.len(), *served), (1, Some(span(0, 8))));
    for group in 0..2 {
        assert_eq!(
            rig.told(worker(group)),
            [&Down::Link {
                netd: Generation(2)
            }]
        );
    }
    let linked = FromWorker::Linked {
        netd_generation: Generation(2),
    };
    rig.say(worker(0), Up::Worker(linked.clone()));
    assert!(rig.told(NETD).is_empty(), "netd does not listen yet");
    assert_eq!(
        rig.netd_listens()
            .told(NETD)
            .into_iter()
            .filter(is_up)
            .count(),
        1,
        "one acknowledged"
    );
    rig.say(worker(1), Up::Worker(linked));
    assert_eq!(rig.told(NETD).into_iter().filter(is_up).count(), 1);
}

#[test]
fn an_acknowledgement_of_an_older_netd_counts_for_nothing() {
    let mut rig = Rig::online(1);
    rig.die(NETD, SIGKILL);
    rig.netd_listens();
    rig.say(
        worker(0),
        Up::Worker(FromWorker::Linked {
            netd_generation: Generation(1),
        }),
    );
    assert!(rig.told(NETD).is_empty());
}

#[test]
fn netd_that_keeps_dying_ends_the_run() {
    let mut rig = Rig::online(1);
    for _ in 0..4 {
        rig.wait(10 * SEC).die(NETD, SIGSEGV);
    }
    assert_eq!(rig.told(worker(0)), [&Down::Drain]);
    assert_eq!(
        rig.die(worker(0), End::Code(0)).finished(),
        Some(ExitReason::RestartLimit)
    );
}

#[test]
fn a_mistake_in_the_configuration_ends_the_run_before_it_is_online_and_is_said_once() {
    let mut rig = Rig::new(1);
    rig.on(Event::Start);
    let message = "folder /x holds no config.json".to_owned();
    rig.say(
        PREPARE,
        Up::Prepare(FromPrepare::Failed {
            reason: ExitReason::BadConfig,
            message,
        }),
    );
    rig.die(PREPARE, End::Code(2));
    assert_eq!(
        rig.complaints(),
        ["prepare: folder /x holds no config.json"]
    );
    assert_eq!(rig.killed(), [NETD]);
    assert_eq!(
        rig.die(NETD, SIGKILL).finished(),
        Some(ExitReason::BadConfig)
    );
}

#[test]
fn a_block_range_outside_the_model_is_refused_with_both_numbers() {
    let mut rig = Rig::new(1);
    rig.tree.policy.span = SpanChoice::Fixed(span(4, 40));
    rig.on(Event::Start);
    rig.say(PREPARE, Up::Prepare(FromPrepare::Inspected(facts())));
    let complaint = rig.complaints().join("");
    assert!(
        complaint.contains("4:40") && complaint.contains("0:8"),
        "{complaint}"
    );
}

#[test]
fn a_worker_lost_for_good_shrinks_the_span_of_netd_which_stays() {
    let mut rig = Rig::online(2);
    rig.die(
        worker(1),
        End::Code(i32::from(ExitReason::BadConfig.code())),
    );
    assert_eq!(
        rig.state(worker(1)),
        State::Held {
            reason: ExitReason::BadConfig
        }
    );
    assert!(matches!(
        rig.told(NETD)[..],
        [
            Down::WorkerDown {
                restarting: false,
                ..
            },
            Down::Shrink(rest)
        ] if *rest == span(0, 4)
    ));
    assert!(matches!(rig.state(NETD), State::Ready { .. }));
    rig.die(NETD, SIGKILL);
    let [Down::Init(Init::Netd { served, .. })] = rig.told(NETD)[..] else {
        panic!("{:?}", rig.last)
    };
    assert_eq!(*served, Some(span(0, 4)), "only the rest is served");
    assert_eq!(
        rig.told(worker(0)),
        [&Down::Link {
            netd: rig.generation(NETD)
        }]
    );
    assert!(
        rig.wait(100 * SEC).spawned().is_empty(),
        "the lost worker stays away"
    );
}

#[test]
fn a_netd_that_was_not_ready_when_a_worker_was_lost_hears_it_with_the_model() {
    let mut rig = Rig::online(2);
    rig.die(NETD, SIGKILL);
    rig.die(
        worker(0),
        End::Code(i32::from(ExitReason::BadConfig.code())),
    );
    assert!(rig.told(NETD).is_empty(), "it does not know the model yet");
    rig.netd_listens();
    let last: Vec<_> = rig.told(NETD).into_iter().cloned().collect();
    assert!(
        last.contains(&Down::Shrink(span(4, 8))),
        "it was started with all blocks: {last:?}"
    );
}

#[test]
fn a_worker_that_wrote_nonsense_is_killed_once_and_is_to_blame() {
    let mut rig = Rig::online(1);
    let broken = |generation| {
        Up::Netd(FromNetd::BrokenRings {
            worker: WorkerId::solo(GroupId(0)),
            generation: Generation(generation),
            message: "ring is corrupt".into(),
        })
    };
    assert!(
        rig.say(NETD, broken(7)).killed().is_empty(),
        "another generation"
    );
    assert_eq!(rig.say(NETD, broken(1)).killed(), [worker(0)]);
    assert!(rig.say(NETD, broken(1)).killed().is_empty(), "once");
    rig.die(worker(0), SIGKILL);
    assert!(matches!(
        rig.told(NETD)[..],
        [Down::WorkerDown {
            cause: DeathCause::SelfInflicted,
            restarting: true,
            ..
        }]
    ));
}

#[test]
fn kills_from_outside_are_followed_by_a_restart_at_once_up_to_the_limit() {
    let mut rig = Rig::online(1);
    for _ in 0..3 {
        assert_eq!(rig.die(worker(0), SIGKILL).spawned().len(), 1);
        rig.worker_ready(0);
    }
    rig.die(worker(0), SIGKILL);
    assert_eq!(
        rig.state(worker(0)),
        State::Held {
            reason: ExitReason::RestartLimit
        }
    );
}

#[test]
fn the_last_worker_that_is_held_ends_the_run() {
    let mut rig = Rig::online(1);
    rig.die(worker(0), End::Code(i32::from(ExitReason::Busy.code())));
    assert_eq!(rig.told(NETD).last(), Some(&&Down::Drain));
    assert_eq!(
        rig.die(NETD, End::Code(0)).finished(),
        Some(ExitReason::Busy)
    );
}

fn beat(rig: &mut Rig, progress: u64, limit: Option<Duration>) -> Vec<ChildId> {
    let generation = rig.generation(worker(0));
    rig.on(Event::Beat(worker(0), generation, Beat { progress, limit }))
        .killed()
}

#[test]
fn a_worker_without_progress_is_killed_and_blames_nobody() {
    let mut rig = Rig::online(1);
    let killed = (0..8).find_map(|_| {
        rig.now += SEC;
        let killed = beat(&mut rig, 7, Some(5 * SEC));
        (!killed.is_empty()).then_some(killed)
    });
    assert_eq!(killed, Some(vec![worker(0)]));
    rig.die(worker(0), SIGKILL);
    assert!(matches!(
        rig.told(NETD)[..],
        [Down::WorkerDown {
            cause: DeathCause::Outside,
            ..
        }]
    ));
}

#[test]
fn an_idle_or_moving_worker_is_never_killed() {
    let mut rig = Rig::online(1);
    for second in 0..100 {
        rig.now += SEC;
        let limit = (second % 10 > 5).then_some(5 * SEC);
        assert!(beat(&mut rig, second / 20, limit).is_empty());
    }
    for progress in 100..200 {
        rig.now += SEC;
        assert!(beat(&mut rig, progress, Some(MS)).is_empty());
    }
}

#[test]
fn after_a_gap_in_its_own_clock_the_tree_reads_again() {
    let mut rig = Rig::online(1);
    beat(&mut rig, 7, Some(5 * SEC));
    rig.now += 3600 * SEC;
    assert!(beat(&mut rig, 7, Some(5 * SEC)).is_empty());
}

#[test]
fn a_child_that_does_not_become_ready_is_killed_and_restarted() {
    let mut rig = Rig::until_prepared(1);
    assert_eq!(rig.wait(31 * SEC).killed(), [worker(0)]);
    rig.die(worker(0), SIGKILL);
    assert_eq!(rig.wait(100 * MS).spawned(), [(worker(0), 2)]);
}

#[test]
fn what_survives_sigkill_is_quarantined_and_never_restarted() {
    let mut rig = Rig::online(2);
    let generation = rig.generation(worker(0));
    rig.on(Event::Unruly(worker(0), generation, "floods"));
    rig.wait(11 * SEC);
    assert_eq!(rig.state(worker(0)), State::Unkillable);
    assert!(matches!(
        rig.told(NETD)[..],
        [Down::WorkerUnkillable { .. }, Down::Shrink(rest)] if *rest == span(4, 8)
    ));
    rig.die(NETD, SIGKILL).netd_listens();
    assert_eq!(rig.tree.deadline(), None);
    assert!(rig.wait(1000 * SEC).spawned().is_empty());
    rig.die(worker(0), SIGKILL);
    assert!(matches!(
        rig.told(NETD)[..],
        [Down::WorkerDown {
            restarting: false,
            ..
        }]
    ));
}

#[test]
fn a_stop_drains_netd_first_and_then_the_workers_and_is_clean() {
    let mut rig = Rig::online(1);
    rig.on(Event::Stop);
    assert_eq!(
        (rig.told(NETD), rig.told(worker(0)).len()),
        (vec![&Down::Drain], 0)
    );
    assert_eq!(rig.die(NETD, End::Code(0)).told(worker(0)), [&Down::Drain]);
    assert_eq!(
        rig.die(worker(0), End::Code(0)).finished(),
        Some(ExitReason::Clean)
    );
}

#[test]
fn a_worker_that_dies_while_netd_drains_is_reported_and_not_restarted() {
    let mut rig = Rig::online(1);
    rig.on(Event::Stop);
    rig.die(worker(0), SIGKILL);
    assert!(matches!(
        rig.told(NETD)[..],
        [Down::WorkerDown {
            restarting: false,
            ..
        }]
    ));
    assert!(rig.wait(10 * SEC).spawned().is_empty());
}

#[test]
fn who_does_not_drain_in_time_is_killed_and_the_run_is_not_clean() {
    let mut rig = Rig::online(1);
    rig.on(Event::Stop);
    assert_eq!(rig.wait(20 * SEC).killed(), [NETD]);
    rig.die(NETD, SIGKILL);
    rig.die(worker(0), End::Code(0));
    assert_eq!(rig.finished(), Some(ExitReason::Failed));
}

#[test]
fn a_second_stop_kills_at_once_but_an_echo_of_the_first_does_not() {
    let mut rig = Rig::online(1);
    rig.on(Event::Stop);
    assert!(rig.on(Event::Stop).killed().is_empty());
    rig.now += SEC;
    assert_eq!(rig.on(Event::Stop).killed(), [NETD, worker(0)]);
}

#[test]
fn a_stop_before_anything_serves_is_clean_and_quick() {
    let mut rig = Rig::new(1);
    rig.on(Event::Start);
    assert_eq!(rig.on(Event::Stop).killed(), [PREPARE, NETD]);
    rig.die(PREPARE, SIGKILL);
    assert_eq!(rig.die(NETD, SIGKILL).finished(), Some(ExitReason::Clean));
}

#[test]
fn a_child_that_closes_its_channel_and_stays_is_killed() {
    let mut rig = Rig::online(1);
    let generation = rig.generation(worker(0));
    rig.on(Event::Closed(worker(0), generation));
    assert_eq!(rig.wait(5 * SEC).killed(), [worker(0)]);
}

#[test]
fn prepare_that_dies_early_is_started_again_and_gets_its_span_again() {
    let mut rig = Rig::new(1);
    rig.on(Event::Start).netd_listens();
    rig.say(PREPARE, Up::Prepare(FromPrepare::Inspected(facts())));
    rig.say(NETD, Up::Netd(FromNetd::ProposedSpan(span(0, 8))));
    rig.die(PREPARE, SIGKILL);
    assert_eq!(rig.spawned(), [(PREPARE, 2)]);
    assert_eq!(
        rig.told(PREPARE),
        [&Down::Init(Init::Prepare), &Down::Span(span(0, 8))]
    );
}

/// What any run of events must keep, followed over all actions.
#[derive(Default)]
struct Witness {
    live: Vec<(ChildId, Generation)>,
    links: Vec<(ChildId, Generation, Generation)>,
    rings: Vec<(ChildId, Generation, Generation)>,
    finished: bool,
}

impl Witness {
    fn see(&mut self, action: &Action) {
        assert!(!self.finished, "nothing follows the end: {action:?}");
        match action {
            Action::Spawn(id, generation) => {
                assert!(
                    self.live.iter().all(|(live, _)| live != id),
                    "two live processes of {id}"
                );
                self.live.push((*id, *generation));
            }
            Action::Kill(id, generation, _) => assert!(
                self.live.contains(&(*id, *generation)),
                "kill of the reaped {id}"
            ),
            Action::Tell(id, down) => self.see_tell(*id, down),
            Action::DropRings {
                worker,
                generation,
                netd,
            } => {
                let rings = (ChildId::Worker(*worker), *generation, *netd);
                let index = self
                    .rings
                    .iter()
                    .position(|&made| made == rings)
                    .expect("rings that exist");
                self.rings.remove(index);
            }
            Action::Finish(_) => {
                self.finished = true;
                let left = |(worker, of_worker, of_netd): &(ChildId, Generation, Generation)| {
                    self.live.contains(&(*worker, *of_worker))
                        && self.live.contains(&(NETD, *of_netd))
                };
                assert!(
                    self.rings.iter().all(left),
                    "rings of the dead are left: {:?}",
                    self.rings
                );
            }
            _ => {}
        }
    }

    fn see_tell(&mut self, to: ChildId, down: &Down) {
        let generation = self
            .live
            .iter()
            .find(|(id, _)| *id == to)
            .map(|(_, generation)| *generation);
        let generation =
            generation.unwrap_or_else(|| panic!("{to} does not live and is told {down:?}"));
        match down {
            Down::Link { netd } => {
                let link = (to, generation, *netd);
                assert!(!self.links.contains(&link), "rings used twice: {link:?}");
                self.links.push(link);
                self.rings.push(link);
            }
            Down::WorkerUp {
                placement,
                generation,
                ..
            } => {
                assert!(
                    self.live
                        .contains(&(ChildId::Worker(placement.worker), *generation))
                );
            }
            Down::WorkerDown {
                worker, generation, ..
            } => {
                assert!(
                    !self.live.contains(&(ChildId::Worker(*worker), *generation)),
                    "down before the reap"
                );
            }
            _ => {}
        }
    }
}

fn any_child() -> impl Strategy<Value = ChildId> {
    prop_oneof![Just(PREPARE), Just(NETD), (0u16..6).prop_map(worker)]
}

fn any_end() -> impl Strategy<Value = End> {
    prop_oneof![
        prop_oneof![9 => 0i32..2, 1 => 0i32..20].prop_map(End::Code),
        (0i32..70).prop_map(End::Signal),
        Just(End::NotStarted {
            reason: ExitReason::Failed,
            message: "no memory".into()
        }),
    ]
}

fn any_up() -> impl Strategy<Value = (ChildId, Up)> {
    let failed = || (ExitReason::BadConfig, "bad".to_owned());
    prop_oneof![
        Just((PREPARE, Up::Prepare(FromPrepare::Inspected(facts())))),
        Just((PREPARE, Up::Prepare(FromPrepare::Prepared))),
        Just((
            PREPARE,
            Up::Prepare(FromPrepare::Progress { done: 1, total: 2 })
        )),
        Just((
            NETD,
            Up::Netd(FromNetd::Listening {
                peer_id: "Qm".into(),
                addrs: vec!["/ip4/1".into()]
            })
        )),
        (0u32..4, 1u32..6).prop_map(|(start, len)| (
            NETD,
            Up::Netd(FromNetd::ProposedSpan(span(start, start + len)))
        )),
        Just((NETD, Up::Netd(FromNetd::Online))),
        prop_oneof![
            (0u32..2).prop_map(|start| FromNetd::Move(span(start, start + 4))),
            (0u32..2).prop_map(|start| FromNetd::Moved(span(start, start + 4))),
            Just(FromNetd::Vacated),
            Just(FromNetd::Stays),
        ]
        .prop_map(|message| (NETD, Up::Netd(message))),
        (0u16..3, 1u32..3).prop_map(|(group, generation)| (
            NETD,
            Up::Netd(FromNetd::BrokenRings {
                worker: WorkerId::solo(GroupId(group)),
                generation: Generation(generation),
                message: "nonsense".into(),
            })
        )),
        Just(failed())
            .prop_map(|(reason, message)| (NETD, Up::Netd(FromNetd::Failed { reason, message }))),
        (0u16..6).prop_map(|group| (
            worker(group),
            Up::Worker(FromWorker::Ready(Capacity::default()))
        )),
        (0u16..6, 1u32..4).prop_map(|(group, netd)| {
            (
                worker(group),
                Up::Worker(FromWorker::Linked {
                    netd_generation: Generation(netd),
                }),
            )
        }),
    ]
}

/// An event; its generation is that of the live process plus an offset, so that most events count and some are stale.
fn any_event() -> impl Strategy<Value = (Event, u32)> {
    let none = Generation(0);
    let event = prop_oneof![
        48 => any_up().prop_map(move |(id, up)| Event::Said(id, none, up)),
        6 => (any_child(), any_end()).prop_map(move |(id, end)| Event::Ended(id, none, end)),
        1 => any_child().prop_map(move |id| Event::Closed(id, none)),
        1 => any_child().prop_map(move |id| Event::Unruly(id, none, "loud")),
        3 => (any_child(), 0u64..2)
            .prop_map(move |(id, progress)| Event::Beat(id, none, Beat { progress, limit: Some(2 * SEC) })),
        1 => Just(Event::Stop),
        4 => Just(Event::Tick),
        6 => (0u32..2, prop::bool::weighted(0.8)).prop_map(|(start, fits)| {
            Event::Room(span(start, start + 4), (!fits).then(|| "no room".to_owned()))
        }),
    ];
    (event, prop_oneof![9 => Just(0u32), 1 => 1u32..3])
}

fn with_generation(event: Event, of: impl Fn(ChildId) -> Generation) -> Event {
    match event {
        Event::Said(id, _, up) => Event::Said(id, of(id), up),
        Event::Ended(id, _, end) => Event::Ended(id, of(id), end),
        Event::Closed(id, _) => Event::Closed(id, of(id)),
        Event::Unruly(id, _, what) => Event::Unruly(id, of(id), what),
        Event::Beat(id, _, beat) => Event::Beat(id, of(id), beat),
        other => other,
    }
}

/// Mostly short, at times longer than every timeout.
fn any_pause() -> impl Strategy<Value = Duration> {
    prop_oneof![
        12 => (0u64..50).prop_map(Duration::from_millis),
        3 => (50u64..2_000).prop_map(Duration::from_millis),
        1 => (2u64..70).prop_map(Duration::from_secs),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_run_of_events_breaks_the_invariants(
        devices in 1usize..4,
        begin in 0u8..4,
        events in prop::collection::vec((any_event(), any_pause(), prop::bool::weighted(0.95)), 1..200),
    ) {
        let mut rig = match begin {
            0 => Rig::new(devices),
            1 => Rig::until_prepared(devices),
            2 => Rig::online(devices),
            _ => {
                let mut rig = Rig::online(devices);
                rig.say(NETD, Up::Netd(FromNetd::Move(span(1, 5))));
                rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
                rig.die(PREPARE, End::Code(0));
                rig.on(Event::Room(span(1, 5), None));
                rig
            }
        };
        rig.tree.policy.restart.max_restarts = 10;
        if begin == 0 {
            rig.on(Event::Start);
        }
        for ((event, stale), pause, obedient) in events {
            rig.now += pause;
            let live: Vec<_> = rig.tree.live().collect();
            let generation = |id| {
                let present = live.iter().find(|(live, _)| *live == id);
                Generation(present.map_or(1, |(_, generation)| generation.0).saturating_sub(stale))
            };
            rig.on(with_generation(event, generation));
            while let Some(Action::Kill(id, generation, _)) =
                rig.last.iter().find(|action| obedient && matches!(action, Action::Kill(..))).cloned()
            {
                rig.on(Event::Ended(id, generation, SIGKILL));
            }
            let due = rig.tree.deadline();
            prop_assert!(
                rig.tree.finished || due.is_none_or(|due| due > rig.now),
                "a deadline that has passed would spin the loop"
            );
        }
        // Whatever happened, a stop with every process reaped comes to an end.
        rig.on(Event::Stop);
        for _ in 0..8 {
            for (id, generation) in rig.tree.live().collect::<Vec<_>>() {
                rig.on(Event::Ended(id, generation, SIGKILL));
            }
        }
        prop_assert!(rig.witness.finished);
    }
}

#[test]
fn a_model_that_does_not_fit_is_served_in_part() {
    let mut rig = Rig::new(1);
    let need = memory(None).need(&facts());
    rig.tree.policy.memory = memory(Some(need.fixed + 5 * (need.weights + need.kv)));
    rig.on(Event::Start);
    rig.say(PREPARE, Up::Prepare(FromPrepare::Inspected(facts())));
    rig.netd_listens();
    assert_eq!(rig.told(NETD), [&Down::Fits(5), &Down::Model(facts())]);
}

#[test]
fn what_devices_hold_counts_once_however_often_prepare_tells() {
    let mut rig = Rig::new(1);
    rig.tree.policy.memory = memory(Some(u64::MAX));
    rig.tree.policy.memory.workers = 1;
    let device = |free_bytes| {
        Up::Prepare(FromPrepare::Devices(vec![DeviceMemory {
            device: Device::Emulator,
            free_bytes,
            work_bytes: 0,
        }]))
    };
    rig.on(Event::Start);
    rig.say(PREPARE, device(1 << 50));
    rig.say(PREPARE, device(1));
    rig.say(PREPARE, Up::Prepare(FromPrepare::Inspected(facts())));
    rig.netd_listens();
    assert_eq!(rig.told(NETD), [&Down::Model(facts())]);
}

#[test]
fn blocks_that_do_not_fit_end_the_run_with_the_arithmetic() {
    let mut rig = Rig::new(1);
    rig.tree.policy.span = SpanChoice::Count(8);
    let need = memory(None).need(&facts());
    rig.tree.policy.memory = memory(Some(need.fixed + 5 * (need.weights + need.kv)));
    rig.on(Event::Start);
    rig.say(PREPARE, Up::Prepare(FromPrepare::Inspected(facts())));
    let complaint = rig.complaints().join("");
    assert!(complaint.contains("5 would fit"), "{complaint}");
}
