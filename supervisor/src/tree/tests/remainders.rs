//! Groups that lose a device for good: the others serve their blocks.

use shared::model::RankShare;
use shared::survey::DeviceMemory;

use super::*;

/// A rank of a group of so many.
fn of(group: u16, rank: u16, world_size: u16) -> ChildId {
    let (group, rank, world_size) = (GroupId(group), Rank(rank), WorldSize(world_size));
    ChildId::Worker(WorkerId { group, rank, world_size })
}

/// What each of so many ranks holds of a block.
fn ranks(count: u32) -> Vec<RankShare> {
    let part = 12 / count;
    let bytes = u64::from(part) << 16;
    vec![
        RankShare {
            heads: part,
            kv_heads: part,
            columns: 64,
            block_bytes: bytes,
            copied_bytes: 0,
            is_slow: false
        };
        count as usize
    ]
}

/// Groups of `size` nodes each that serve all blocks, and may not be started again.
fn online(groups: u16, size: u16) -> Rig {
    let devices: Vec<Device> = (0..u32::from(groups * size)).map(Device::Node).collect();
    let mut policy = policy(0);
    policy.shares = DeviceShare::groups(&devices, size.into());
    policy.restart.max_restarts = 0;
    let mut rig = Rig { tree: Tree::new(policy), ..Rig::new(0) };
    rig.on(TreeEvent::Start).netd_listens();
    let told = vec![ranks(size.into()); groups.into()];
    rig.say(PREPARE, surveyed(Survey { ranks: told, ..survey() }));
    rig.say(NETD, Up::Netd(FromNetd::ProposedSpan(span(0, 8))));
    rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
    rig.die(PREPARE, ExitStatus::Code(0));
    (0..groups).for_each(|group| rig.comes_up(group, size));
    rig.say(NETD, Up::Netd(FromNetd::Online));
    rig
}

impl Rig {
    /// All ranks of a group become ready and link, rank 0 as the last.
    fn comes_up(&mut self, group: u16, size: u16) {
        for rank in 0..size {
            let ready = FromWorker::Ready(Capacity::default());
            self.say(of(group, rank, size), Up::Worker(ready));
        }
        let netd_generation = self.generation(NETD);
        for rank in (0..size).rev() {
            let linked = FromWorker::Linked { netd_generation };
            self.say(of(group, rank, size), Up::Worker(linked));
        }
    }

    /// A rank dies, and the others of its group after it. All actions.
    fn loses(&mut self, group: u16, lost: u16, size: u16) -> Vec<Action> {
        self.die(of(group, lost, size), SIGSEGV);
        let mut actions = self.last.clone();
        for rank in (0..size).filter(|rank| *rank != lost) {
            self.die(of(group, rank, size), SIGKILL);
            actions.append(&mut self.last.clone());
        }
        actions
    }

    /// prepare decides about what is left of a group, and ends.
    fn shares_told(&mut self, count: u32) -> Vec<Action> {
        self.say(PREPARE, surveyed(Survey { ranks: vec![ranks(count)], ..survey() }));
        let actions = self.last.clone();
        assert!(actions.contains(&Action::Tell(PREPARE, Down::Drain)));
        self.die(PREPARE, ExitStatus::Code(0));
        actions
    }
}

fn asked(devices: &[u32]) -> Down {
    Down::Init(Init::Prepare(vec![devices.iter().copied().map(Device::Node).collect()]))
}

fn spawns(actions: &[Action]) -> Vec<ChildId> {
    let spawn = |action: &Action| match action {
        Action::Spawn(id, _) => Some(*id),
        _ => None,
    };
    actions.iter().filter_map(spawn).collect()
}

#[test]
fn the_devices_that_are_left_share_the_blocks_as_prepare_decides() {
    let mut rig = online(1, 3);
    let actions = rig.loses(0, 1, 3);
    assert_eq!(spawns(&actions), [PREPARE]);
    assert_eq!(rig.told(PREPARE), [&asked(&[0, 2])]);
    let told = rig.told(NETD);
    assert!(matches!(told[..], [Netd(ToNetd::WorkerDown { restarting: false, .. })]), "{told:?}");
    assert_eq!(rig.last.iter().filter(|a| matches!(a, Action::DropWorker(_))).count(), 3);
    let complaint = rig.complaints()[0];
    assert!(complaint.contains("rank 1 of group 0 (cpu:1) is not restarted: SIGSEGV"));
    assert!(complaint.ends_with("cpu:0 + cpu:2 share blocks 0:8 from now on"), "{complaint}");

    let actions = rig.shares_told(2);
    assert_eq!(spawns(&actions), [of(0, 0, 2), of(0, 1, 2)]);
    assert_eq!(rig.tree.ranks(), [ranks(2)]);
    rig.comes_up(0, 2);
    let [Down::WorkerUp { placement, generation, .. }] = rig.told(NETD)[..] else {
        panic!("{:?}", rig.last)
    };
    assert_eq!((placement.span, generation.0), (span(0, 8), 2));
    assert_eq!(placement.devices, [Device::Node(0), Device::Node(2)]);

    // Of two devices one is left, which needs no decision.
    let actions = rig.loses(0, 0, 2);
    assert_eq!(spawns(&actions), [worker(0)]);
    assert_eq!(rig.tree.ranks(), [vec![]]);
    rig.worker_ready(0);
    assert!(matches!(rig.told(NETD)[..], [Down::WorkerUp { .. }]));
    rig.die(worker(0), SIGSEGV);
    assert_eq!(rig.told(NETD).last(), Some(&&Down::Drain));
    let [complaint] = rig.complaints()[..] else { panic!("{:?}", rig.complaints()) };
    assert_eq!(complaint, "gpu-worker 0.0 is not restarted: SIGSEGV");
    assert_eq!(rig.die(NETD, ExitStatus::Code(0)).finished(), Some(ExitReason::RestartLimit));
}

#[test]
fn the_rank_for_which_the_group_ended_most_often_is_left_out() {
    for (blamed, last, lost) in [(1, 0, 1), (0, 2, 0), (2, 2, 2)] {
        let mut rig = online(1, 3);
        rig.tree.policy.restart.max_restarts = 2;
        for rank in [blamed, blamed] {
            rig.loses(0, rank, 3);
            rig.wait(SEC).comes_up(0, 3);
        }
        rig.loses(0, last, 3);
        let left: Vec<u32> = (0..3).filter(|node| *node != lost).collect();
        assert_eq!(rig.told(PREPARE), [&asked(&left)], "{blamed} {last}");
    }
}

#[test]
fn faults_of_long_ago_do_not_count() {
    let mut rig = online(1, 3);
    rig.tree.policy.restart.max_restarts = 2;
    for _ in 0..2 {
        rig.loses(0, 1, 3);
        rig.wait(SEC).comes_up(0, 3);
    }
    rig.wait(100 * SEC);
    for _ in 0..2 {
        rig.loses(0, 2, 3);
        rig.wait(SEC).comes_up(0, 3);
    }
    rig.loses(0, 0, 3);
    assert_eq!(rig.told(PREPARE), [&asked(&[0, 1])]);
}

#[test]
fn other_groups_go_on_and_two_losses_are_decided_one_after_the_other() {
    let mut rig = online(3, 3);
    rig.loses(1, 0, 3);
    assert_eq!(rig.told(PREPARE), [&asked(&[4, 5])]);
    let actions = rig.loses(2, 2, 3);
    assert!(spawns(&actions).is_empty(), "prepare works for the other group");
    assert!(
        !rig.last.iter().any(|action| matches!(action, Action::Tell(_, Netd(ToNetd::Shrink(_)))))
    );
    let actions = rig.shares_told(2);
    assert_eq!(spawns(&actions), [of(1, 0, 2), of(1, 1, 2)]);
    assert_eq!(rig.told(PREPARE), [&asked(&[6, 7])], "the second after the first");
    rig.comes_up(1, 2);
    assert!(rig.told(NETD).iter().any(is_up));
    assert_eq!(spawns(&rig.shares_told(2)), [of(2, 0, 2), of(2, 1, 2)]);
    assert_eq!(rig.tree.ranks(), [ranks(3), ranks(2), ranks(2)]);
    for rank in 0..3 {
        assert!(matches!(rig.state(of(0, rank, 3)), Lifecycle::Ready { .. }));
        assert_eq!(rig.generation(of(0, rank, 3)), Generation(1));
    }
    // A later start of all of them is asked for as they are now.
    let groups = [[0, 1, 2].as_slice(), &[4, 5], &[6, 7]];
    let groups = groups.map(|nodes| nodes.iter().copied().map(Device::Node).collect::<Vec<_>>());
    assert_eq!(rig.tree.groups_to_prepare(), groups);
}

#[test]
fn what_does_not_fit_any_more_is_left_beside_the_other_groups() {
    let mut rig = online(2, 3);
    // Two blocks for each group.
    let mut memory = rig.tree.policy.memory.clone();
    memory.ranks = vec![ranks(3), ranks(2)];
    memory.workers -= 1;
    let four = memory.need(&facts()).total(4);
    rig.tree.policy.memory.available_bytes = Some(four);
    rig.loses(1, 1, 3);
    rig.shares_told(2);
    let tells: Vec<_> = rig.witness.told_netd();
    assert!(tells.contains(&Netd(ToNetd::Shrink(span(0, 6)))), "{tells:?}");
    rig.comes_up(1, 2);
    let [Down::WorkerUp { placement, .. }] = rig.told(NETD)[..] else { panic!("{:?}", rig.last) };
    assert_eq!(placement.span, span(4, 6), "beside the blocks of the other group");

    let mut rig = online(1, 3);
    rig.tree.policy.memory.available_bytes = Some(1);
    rig.loses(0, 1, 3);
    rig.say(PREPARE, surveyed(Survey { ranks: vec![ranks(2)], ..survey() }));
    assert_eq!(rig.complaints(), ["no block of 0:8 fits into the memory of cpu:0 + cpu:2"]);
    rig.die(PREPARE, ExitStatus::Code(0));
    assert_eq!(rig.die(NETD, ExitStatus::Code(0)).finished(), Some(ExitReason::OutOfMemory));
}

#[test]
fn what_cannot_be_shared_by_those_that_are_left_is_one_sentence() {
    let failed = || {
        let message = "15 query heads cannot be shared by 2 ranks".to_owned();
        Up::Prepare(FromPrepare::Failed { reason: ExitReason::BadConfig, message })
    };
    let bad = ExitStatus::Code(i32::from(ExitReason::BadConfig.code()));
    let mut rig = online(1, 3);
    rig.loses(0, 1, 3);
    rig.say(PREPARE, failed()).die(PREPARE, bad.clone());
    assert_eq!(rig.complaints(), ["prepare: 15 query heads cannot be shared by 2 ranks"]);
    assert_eq!(rig.die(NETD, ExitStatus::Code(0)).finished(), Some(ExitReason::BadConfig));

    let mut rig = online(2, 3);
    rig.loses(1, 1, 3);
    rig.say(PREPARE, failed()).die(PREPARE, bad);
    assert_eq!(rig.told(NETD), [&Netd(ToNetd::Shrink(span(0, 4)))], "the other group goes on");
    assert!(rig.complaints()[0].contains("15 query heads"));
    assert!(rig.wait(1000 * SEC).spawned().is_empty());
}

#[test]
fn prepare_that_dies_is_asked_again() {
    let mut rig = online(1, 3);
    rig.tree.policy.restart.max_restarts = 3;
    for _ in 0..3 {
        rig.loses(0, 1, 3);
        rig.wait(SEC).comes_up(0, 3);
    }
    rig.loses(0, 1, 3);
    rig.die(PREPARE, SIGKILL).wait(SEC);
    assert_eq!((rig.spawned().len(), rig.told(PREPARE)), (1, vec![&asked(&[0, 2])]));
    assert_eq!(spawns(&rig.shares_told(2)), [of(0, 0, 2), of(0, 1, 2)]);
}

#[test]
fn prepare_tells_what_the_units_of_a_device_that_is_left_need() {
    let card = |ordinal, work_bytes| DeviceMemory {
        device: Device::Cuda(ordinal),
        free_bytes: 1 << 40,
        work_bytes,
    };
    let mut rig = online(2, 2);
    let memory = &mut rig.tree.policy.memory;
    (memory.workers, memory.devices) = (4, (0..4).map(|ordinal| card(ordinal, 10)).collect());
    let actions = rig.loses(1, 0, 2);
    assert_eq!(spawns(&actions), [PREPARE], "also for a device that is alone");
    rig.say(PREPARE, surveyed(Survey { devices: vec![card(3, 25)], ..survey() }));
    assert_eq!(spawns(&rig.last), [of(1, 0, 1)]);
    let needs: Vec<u64> =
        rig.tree.policy.memory.devices.iter().map(|device| device.work_bytes).collect();
    assert_eq!(needs, [10, 10, 25]);
}

#[test]
fn a_stop_while_prepare_decides_ends_the_run() {
    let mut rig = online(1, 3);
    rig.loses(0, 1, 3);
    rig.on(TreeEvent::Stop);
    assert_eq!(rig.killed(), [PREPARE]);
    rig.die(PREPARE, SIGKILL);
    assert_eq!(rig.die(NETD, ExitStatus::Code(0)).finished(), Some(ExitReason::Clean));
}

#[test]
fn a_move_is_given_up_for_a_loss_and_refused_until_it_is_mended() {
    let mut rig = online(1, 3);
    let to = span(0, 4);
    rig.say(NETD, Up::Netd(FromNetd::Move(to)));
    assert_eq!(rig.spawned(), [(PREPARE, 2)]);
    rig.loses(0, 1, 3);
    let failed = |down: &&Down| matches!(down, Netd(ToNetd::MoveFailed { .. }));
    assert!(rig.told(NETD).iter().any(failed), "{:?}", rig.last);
    assert_eq!(rig.killed(), [PREPARE]);
    rig.die(PREPARE, SIGKILL);
    assert_eq!(rig.told(PREPARE), [&asked(&[0, 2])]);
    assert!(rig.say(NETD, Up::Netd(FromNetd::Move(to))).told(NETD).iter().any(failed));
    assert_eq!(spawns(&rig.shares_told(2)), [of(0, 0, 2), of(0, 1, 2)]);
    rig.comes_up(0, 2);
    rig.say(NETD, Up::Netd(FromNetd::Move(to)));
    let groups = vec![vec![Device::Node(0), Device::Node(2)]];
    assert_eq!(rig.told(PREPARE)[0], &Down::Init(Init::Prepare(groups)));
}

#[test]
fn a_rank_that_fails_at_every_start_is_left_out_before_clients_come() {
    let mut rig = online(1, 2);
    rig.tree.was_online = false;
    let actions = rig.loses(0, 1, 2);
    assert_eq!(spawns(&actions), [worker(0)]);
    assert!(
        actions.iter().any(|action| matches!(action, Action::Note(text) if text.contains("cpu:1")))
    );
}
