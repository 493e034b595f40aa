use shared::config::{Device, RestartConfig, SpanChoice};
use shared::control::DeathCause;
use shared::ids::{GroupId, Rank, WorldSize};
use shared::survey::{Capacity, DeviceMemory, Speeds, Survey};
use testkit::facts::facts;
use testkit::span;

use std::time::Duration;

use self::invariants::Witness;
use super::action::Down::Netd;
use super::*;
use crate::placement::DeviceShare;
use crate::sizing::InstanceMemory;

mod asides;
mod deaths;
mod fallbacks;
mod groups;
mod invariants;
mod moves;
mod pauses;
mod remainders;
mod start;
mod stops;
mod upgrades;

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const SIGSEGV: ExitStatus = ExitStatus::Signal(nix::libc::SIGSEGV);
const SIGKILL: ExitStatus = ExitStatus::Signal(nix::libc::SIGKILL);
const NETD: ChildId = ChildId::Netd;
const PREPARE: ChildId = ChildId::Prepare;

fn policy(devices: usize) -> Policy {
    let restart = RestartConfig {
        backoff_min: 100 * MS,
        backoff_max: 10 * SEC,
        max_restarts: 3,
        window: 60 * SEC,
        retry_after: Some(100 * SEC),
        hang_timeout: 5 * SEC,
        start_timeout: 30 * SEC,
    };
    Policy {
        restart,
        drain_timeout: 20 * SEC,
        shares: DeviceShare::groups(&vec![Device::Cpu; devices], 1),
        cuts: Vec::new(),
        span: SpanChoice::All,
        fallback: None,
        memory: memory(None),
        pace: SEC,
    }
}

/// Memory with so many bytes available.
fn memory(available_bytes: Option<u64>) -> InstanceMemory {
    InstanceMemory { available_bytes, workers: 2, ..crate::sizing::tests::memory(0) }
}

fn survey() -> Survey {
    Survey::of(facts())
}

fn surveyed(survey: Survey) -> Up {
    Up::Prepare(FromPrepare::Surveyed(Box::new(survey)))
}

/// What netd is told of the model.
fn model(fits: Option<u32>) -> Down {
    Netd(ToNetd::Model { facts: facts(), fits, kept: None })
}

fn worker(group: u16) -> ChildId {
    ChildId::Worker(WorkerId::solo(GroupId(group)))
}

/// A rank of the first of groups of two.
fn rank(rank: u16) -> ChildId {
    rank_of(0, rank)
}

fn rank_of(group: u16, rank: u16) -> ChildId {
    let (group, rank) = (GroupId(group), Rank(rank));
    ChildId::Worker(WorkerId { group, rank, world_size: WorldSize(2) })
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
        Rig { tree, now: Instant::now(), last: Vec::new(), witness: Witness::default() }
    }

    fn on(&mut self, event: TreeEvent) -> &mut Rig {
        if let TreeEvent::Ended(id, generation, _) = &event {
            self.witness.live.retain(|live| live != &(*id, *generation));
        }
        self.last = self.tree.on(event, self.now);
        self.last.iter().for_each(|action| self.witness.see(action));
        self
    }

    fn wait(&mut self, time: Duration) -> &mut Rig {
        self.now += time;
        self.on(TreeEvent::Tick)
    }

    fn generation(&self, id: ChildId) -> Generation {
        self.tree.children().find(|child| child.id == id).unwrap().generation
    }

    fn state(&self, id: ChildId) -> Lifecycle {
        self.tree.children().find(|child| child.id == id).unwrap().state
    }

    fn say(&mut self, id: ChildId, up: Up) -> &mut Rig {
        let generation = self.generation(id);
        self.on(TreeEvent::Said(id, generation, up))
    }

    fn die(&mut self, id: ChildId, end: ExitStatus) -> &mut Rig {
        let generation = self.generation(id);
        self.on(TreeEvent::Ended(id, generation, end))
    }

    fn worker_ready(&mut self, group: u16) -> &mut Rig {
        self.say(worker(group), Up::Worker(FromWorker::Ready(Capacity::default())));
        let netd_generation = self.generation(NETD);
        self.say(worker(group), Up::Worker(FromWorker::Linked { netd_generation }))
    }

    fn netd_listens(&mut self) -> &mut Rig {
        let addrs = vec!["/ip4/127.0.0.1/tcp/9/p2p/Qm".to_owned()];
        self.say(NETD, Up::Netd(FromNetd::Listening { peer_id: "Qm".into(), addrs }))
    }

    /// A tree of `groups` groups of two devices.
    fn of_groups(groups: usize) -> Rig {
        let mut policy = policy(0);
        policy.shares = DeviceShare::groups(&vec![Device::Cpu; 2 * groups], 2);
        Rig { tree: Tree::new(policy), ..Rig::new(0) }
    }

    /// Both ranks of a group become ready and link.
    fn group_ready(&mut self, group: u16) -> &mut Rig {
        for index in [0, 1] {
            let ready = FromWorker::Ready(Capacity::default());
            self.say(rank_of(group, index), Up::Worker(ready));
        }
        self.group_links(group)
    }

    fn group_links(&mut self, group: u16) -> &mut Rig {
        let netd_generation = self.generation(NETD);
        for index in [1, 0] {
            let linked = FromWorker::Linked { netd_generation };
            self.say(rank_of(group, index), Up::Worker(linked));
        }
        self
    }

    /// Groups of two devices, from the start until clients can come.
    fn groups_online(groups: u16) -> Rig {
        let mut rig = Rig::of_groups(usize::from(groups)).prepared();
        rig.die(PREPARE, ExitStatus::Code(0));
        (0..groups).for_each(|group| {
            rig.group_ready(group);
        });
        rig.say(NETD, Up::Netd(FromNetd::Online));
        rig
    }

    /// Start until the workers load.
    fn until_prepared(devices: usize) -> Rig {
        Rig::new(devices).prepared()
    }

    fn prepared(self) -> Rig {
        let mut rig = self;
        rig.on(TreeEvent::Start);
        rig.netd_listens();
        rig.say(PREPARE, surveyed(survey()));
        rig.say(NETD, Up::Netd(FromNetd::ProposedSpan(span(0, 8))));
        rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
        rig
    }

    /// Start until clients can come.
    fn online(devices: usize) -> Rig {
        let mut rig = Rig::until_prepared(devices);
        rig.die(PREPARE, ExitStatus::Code(0));
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
