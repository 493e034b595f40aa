//! What holds for every run of events, whatever they are.

use proptest::prelude::*;
use shared::control::{PrepareStage, Progress};

use super::*;

const PROGRESS: Progress = Progress {
    stage: PrepareStage::Converting,
    block: 1,
    blocks: 2,
    bytes_done: 0,
    bytes_total: 0,
};

/// What any run of events must keep, followed over all actions.
#[derive(Default)]
pub(super) struct Witness {
    pub(super) live: Vec<(ChildId, Generation)>,
    links: Vec<(ChildId, Generation, Generation)>,
    rings: Vec<(ChildId, Generation, Generation)>,
    finished: bool,
    aborted: Vec<(GroupId, Generation)>,
    told: Vec<Down>,
}

fn group_of(id: ChildId) -> Option<GroupId> {
    match id {
        ChildId::Worker(worker) => Some(worker.group),
        ChildId::Prepare | ChildId::Netd => None,
    }
}

impl Witness {
    /// What netd was told, from the beginning.
    pub(super) fn told_netd(&self) -> Vec<Down> {
        self.told.clone()
    }

    pub(super) fn see(&mut self, action: &Action) {
        assert!(!self.finished, "nothing follows the end: {action:?}");
        match action {
            Action::Spawn(id, generation) => {
                assert!(self.live.iter().all(|(live, _)| live != id), "two live processes of {id}");
                let of_group = |(live, of): &&(ChildId, Generation)| {
                    of != generation && group_of(*id).is_some() && group_of(*live) == group_of(*id)
                };
                assert_eq!(self.live.iter().find(of_group), None, "left of the last generation");
                self.live.push((*id, *generation));
            }
            Action::AbortGroup(group, generation) => {
                let ranks = self
                    .live
                    .iter()
                    .filter(|(live, of)| of == generation && group_of(*live) == Some(*group));
                assert!(ranks.count() > 0, "nobody is left to see the abort");
                assert!(!self.aborted.contains(&(*group, *generation)), "aborted twice");
                self.aborted.push((*group, *generation));
            }
            Action::DropGroup(group, generation) => {
                let of_group = |(live, of): &(ChildId, Generation)| {
                    of == generation && group_of(*live) == Some(*group)
                };
                assert!(!self.live.iter().any(of_group), "the segment is still used");
            }
            Action::Kill(id, generation, _) => {
                assert!(self.live.contains(&(*id, *generation)), "kill of the reaped {id}")
            }
            Action::Tell(id, down) => self.see_tell(*id, down),
            Action::DropRings { worker, generation, netd } => {
                let rings = (ChildId::Worker(*worker), *generation, *netd);
                let index =
                    self.rings.iter().position(|&made| made == rings).expect("rings that exist");
                self.rings.remove(index);
            }
            Action::Paused => {
                assert!(self.live.iter().all(|(id, _)| group_of(*id).is_none()), "paused");
            }
            Action::Finish(_) => {
                self.finished = true;
                // The rings of a group stay until all of it is reaped, which never comes when a rank
                // cannot be killed.
                let left = |(worker, of_worker, of_netd): &(ChildId, Generation, Generation)| {
                    let is_mate = |(live, of): &(ChildId, Generation)| {
                        of == of_worker && group_of(*live) == group_of(*worker)
                    };
                    self.live.iter().any(is_mate) && self.live.contains(&(NETD, *of_netd))
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
        let generation =
            self.live.iter().find(|(id, _)| *id == to).map(|(_, generation)| *generation);
        let generation =
            generation.unwrap_or_else(|| panic!("{to} does not live and is told {down:?}"));
        if to == NETD {
            self.told.push(down.clone());
        }
        match down {
            Down::Link { netd } => {
                let link = (to, generation, *netd);
                assert!(!self.links.contains(&link), "rings used twice: {link:?}");
                self.links.push(link);
                if let ChildId::Worker(WorkerId { rank: Rank(0), .. }) = to {
                    self.rings.push(link);
                }
            }
            Down::WorkerUp { placement, generation, .. } => {
                for worker in placement.workers() {
                    assert!(
                        self.live.contains(&(ChildId::Worker(worker), *generation)),
                        "{worker}"
                    );
                }
            }
            Netd(ToNetd::WorkerDown { worker, generation, .. }) => {
                let of_group = |(live, of): &(ChildId, Generation)| {
                    of == generation && group_of(*live) == Some(worker.group)
                };
                assert!(!self.live.iter().any(of_group), "down before all of it is reaped");
            }
            _ => {}
        }
    }
}

fn any_child() -> impl Strategy<Value = ChildId> {
    prop_oneof![
        2 => Just(PREPARE),
        2 => Just(NETD),
        1 => (0u16..6).prop_map(worker),
        1 => (0u16..4, 0u16..2).prop_map(|(group, rank)| rank_of(group, rank)),
    ]
}

fn any_end() -> impl Strategy<Value = ExitStatus> {
    prop_oneof![
        prop_oneof![9 => 0i32..2, 1 => 0i32..20].prop_map(ExitStatus::Code),
        (0i32..70).prop_map(ExitStatus::Signal),
        Just(ExitStatus::NotStarted { reason: ExitReason::Failed, message: "no memory".into() }),
    ]
}

fn any_up() -> impl Strategy<Value = (ChildId, Up)> {
    let failed = || (ExitReason::BadConfig, "bad".to_owned());
    prop_oneof![
        Just((PREPARE, surveyed(survey()))),
        Just((PREPARE, Up::Prepare(FromPrepare::Prepared))),
        Just((PREPARE, Up::Prepare(FromPrepare::Progress(PROGRESS)))),
        Just((
            NETD,
            Up::Netd(FromNetd::Listening { peer_id: "Qm".into(), addrs: vec!["/ip4/1".into()] })
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
        (0u16..6)
            .prop_map(|group| (worker(group), Up::Worker(FromWorker::Ready(Capacity::default())))),
        (0u16..6, 1u32..4).prop_map(|(group, netd)| {
            (worker(group), Up::Worker(FromWorker::Linked { netd_generation: Generation(netd) }))
        }),
        (0u16..4, 0u16..2).prop_map(|(group, rank)| {
            (rank_of(group, rank), Up::Worker(FromWorker::Ready(Capacity::default())))
        }),
        (0u16..4, 0u16..2, 1u32..4).prop_map(|(group, rank, netd)| {
            let linked = FromWorker::Linked { netd_generation: Generation(netd) };
            (rank_of(group, rank), Up::Worker(linked))
        }),
    ]
}

/// An event; its generation is that of the live process plus an offset, so that most events count
/// and some are stale.
fn any_event() -> impl Strategy<Value = (TreeEvent, u32)> {
    let none = Generation(0);
    let event = prop_oneof![
        48 => any_up().prop_map(move |(id, up)| TreeEvent::Said(id, none, up)),
        6 => (any_child(), any_end()).prop_map(move |(id, end)| TreeEvent::Ended(id, none, end)),
        1 => any_child().prop_map(move |id| TreeEvent::Closed(id, none)),
        1 => any_child().prop_map(move |id| TreeEvent::Unruly(id, none, "loud")),
        3 => (any_child(), 0u64..2)
            .prop_map(move |(id, progress)| TreeEvent::Beat(id, none, Beat { progress, limit: Some(2 * SEC), waits_for: (progress == 1).then_some(Rank(0)) })),
        2 => any_order().prop_map(TreeEvent::Ordered),
        1 => Just(TreeEvent::Stop),
        2 => prop::bool::ANY.prop_map(|passed| {
            TreeEvent::Examined(Device::Cpu, (!passed).then(|| "no answer".to_owned()))
        }),
        2 => Just(TreeEvent::Idle),
        4 => Just(TreeEvent::Tick),
        6 => (0u32..2, prop::bool::weighted(0.8)).prop_map(|(start, fits)| {
            TreeEvent::Room(span(start, start + 4), (!fits).then(|| "no room".to_owned()))
        }),
    ];
    (event, prop_oneof![9 => Just(0u32), 1 => 1u32..3])
}

fn any_order() -> impl Strategy<Value = Order> {
    prop_oneof![
        2 => (0u64..3).prop_map(|patience| Order::Pause(Duration::from_secs(patience))),
        2 => Just(Order::Resume),
        1 => (0u16..4).prop_map(|group| Order::Restart(WorkerId::solo(GroupId(group)))),
    ]
}

fn with_generation(event: TreeEvent, of: impl Fn(ChildId) -> Generation) -> TreeEvent {
    match event {
        TreeEvent::Said(id, _, up) => TreeEvent::Said(id, of(id), up),
        TreeEvent::Ended(id, _, end) => TreeEvent::Ended(id, of(id), end),
        TreeEvent::Closed(id, _) => TreeEvent::Closed(id, of(id)),
        TreeEvent::Unruly(id, _, what) => TreeEvent::Unruly(id, of(id), what),
        TreeEvent::Beat(id, _, beat) => TreeEvent::Beat(id, of(id), beat),
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

/// So many cases, multiplied as `PROPTEST_CASES` multiplies the usual 256.
fn cases(short: u32) -> ProptestConfig {
    let config = ProptestConfig::default();
    ProptestConfig { cases: short.saturating_mul(config.cases).div_ceil(256), ..config }
}

proptest! {
    #![proptest_config(cases(150))]

    #[test]
    fn no_run_of_events_breaks_the_invariants(
        (devices, begin, falls_back, events) in (1usize..4, 0u8..4, prop::bool::ANY, any_events())
    ) {
        let mut rig = match begin {
            0 => Rig::new(devices),
            1 => Rig::until_prepared(devices),
            2 => Rig::online(devices),
            _ => {
                let mut rig = Rig::online(devices);
                rig.begin_to_load();
                rig
            }
        };
        rig.tree.policy.fallback = falls_back.then_some(Device::Node(0));
        if begin == 0 {
            rig.on(TreeEvent::Start);
        }
        rig.goes_through(events)?;
    }

    #[test]
    fn no_run_of_events_breaks_the_invariants_of_groups(
        (groups, begin, events) in (1u16..3, 0u8..4, any_events())
    ) {
        let mut rig = match begin {
            0 => Rig::of_groups(groups.into()),
            1 => Rig::of_groups(groups.into()).prepared(),
            2 => Rig::groups_online(groups),
            _ => {
                let mut rig = Rig::groups_online(groups);
                rig.begin_to_load();
                rig
            }
        };
        if begin == 0 {
            rig.on(TreeEvent::Start);
        }
        rig.goes_through(events)?;
    }
}

/// Events, each after a pause, and whether what is killed by it ends at once.
type Events = Vec<((TreeEvent, u32), Duration, bool)>;

fn any_events() -> impl Strategy<Value = Events> {
    prop::collection::vec((any_event(), any_pause(), prop::bool::weighted(0.95)), 1..200)
}

impl Rig {
    /// A move until the new workers load.
    fn begin_to_load(&mut self) {
        self.say(NETD, Up::Netd(FromNetd::Move(span(1, 5))));
        self.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
        self.die(PREPARE, ExitStatus::Code(0));
        self.on(TreeEvent::Room(span(1, 5), None));
    }

    /// Takes in `events` and a stop at the end, after which every process is reaped.
    fn goes_through(&mut self, events: Events) -> Result<(), TestCaseError> {
        self.tree.policy.restart.max_restarts = 10;
        for ((event, stale), pause, obedient) in events {
            self.now += pause;
            let live: Vec<_> = self.tree.live().collect();
            let generation = |id| {
                let present = live.iter().find(|(live, _)| *live == id);
                Generation(present.map_or(1, |(_, generation)| generation.0).saturating_sub(stale))
            };
            self.on(with_generation(event, generation));
            let mut killed = self.killed_now();
            while obedient && !killed.is_empty() {
                let (id, generation) = killed.remove(0);
                self.on(TreeEvent::Ended(id, generation, SIGKILL));
                killed.extend(self.killed_now());
            }
            let due = self.tree.deadline();
            prop_assert!(
                self.tree.finished || due.is_none_or(|due| due > self.now),
                "a deadline that has passed would spin the loop"
            );
        }
        // Whatever happened, a stop with every process reaped comes to an end.
        self.on(TreeEvent::Stop);
        for _ in 0..8 {
            for (id, generation) in self.tree.live().collect::<Vec<_>>() {
                self.on(TreeEvent::Ended(id, generation, SIGKILL));
            }
        }
        prop_assert!(self.witness.finished);
        Ok(())
    }

    /// The processes that the last event had killed.
    fn killed_now(&self) -> Vec<(ChildId, Generation)> {
        let kill = |action: &Action| match action {
            Action::Kill(id, generation, _) => Some((*id, *generation)),
            _ => None,
        };
        self.last.iter().filter_map(kill).collect()
    }
}
