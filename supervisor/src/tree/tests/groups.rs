//! Groups of several workers, which start, link and end as one.

use super::*;

fn down(generation: u32, cause: DeathCause, restarting: bool) -> Down {
    let group = GroupId(0);
    let worker = WorkerId { group, rank: Rank(0), world_size: WorldSize(2) };
    Netd(ToNetd::WorkerDown { worker, generation: Generation(generation), cause, restarting })
}

fn link(netd: u32) -> Down {
    Down::Link { netd: Generation(netd) }
}

fn exit(reason: ExitReason) -> ExitStatus {
    ExitStatus::Code(i32::from(reason.code()))
}

impl Rig {
    fn aborted(&self) -> Vec<(u16, u32)> {
        let abort = |action: &Action| match action {
            Action::AbortGroup(group, generation) => Some((group.0, generation.0)),
            _ => None,
        };
        self.last.iter().filter_map(abort).collect()
    }

    fn dropped_groups(&self) -> Vec<(u16, u32)> {
        let drop = |action: &Action| match action {
            Action::DropGroup(group, generation) => Some((group.0, generation.0)),
            _ => None,
        };
        self.last.iter().filter_map(drop).collect()
    }

    fn beats(&mut self, id: ChildId, progress: u64, waits_for: Option<Rank>) -> Vec<ChildId> {
        let generation = self.generation(id);
        let beat = Beat { progress, limit: Some(5 * SEC), waits_for };
        self.on(TreeEvent::Beat(id, generation, beat)).killed()
    }
}

#[test]
fn all_ranks_start_together_and_netd_hears_of_rank_0_when_all_are_linked() {
    let mut rig = Rig::of_groups(1).prepared();
    assert_eq!(rig.spawned(), [(rank(0), 1), (rank(1), 1)]);
    for index in [0, 1] {
        let [Down::Init(Init::Worker { placement, rank: told, .. })] = rig.told(rank(index))[..]
        else {
            panic!("{:?}", rig.last)
        };
        assert_eq!((placement.span, told.0), (span(0, 8), index));
        assert_eq!(placement.devices.len(), 2);
    }
    let ready = || Up::Worker(FromWorker::Ready(Capacity::default()));
    let linked = || Up::Worker(FromWorker::Linked { netd_generation: Generation(1) });
    assert!(rig.say(rank(0), ready()).told(rank(0)).is_empty(), "rank 1 is not ready");
    rig.say(rank(1), ready());
    assert_eq!((rig.told(rank(1)), rig.told(rank(0)).len()), (vec![&link(1)], 0));
    rig.say(rank(1), linked());
    assert_eq!(rig.told(rank(0)), [&link(1)]);
    assert!(rig.told(NETD).is_empty());
    rig.say(rank(0), linked());
    let [Down::WorkerUp { placement, generation, .. }] = rig.told(NETD)[..] else {
        panic!("{:?}", rig.last)
    };
    assert_eq!((placement.group, generation.0), (GroupId(0), 1));
}

#[test]
fn the_death_of_a_rank_ends_its_group_which_starts_again_when_all_are_reaped() {
    for (first, second) in [(0, 1), (1, 0)] {
        let mut rig = Rig::groups_online(2);
        rig.die(rank(first), SIGKILL);
        assert_eq!((rig.aborted(), rig.killed()), (vec![(0, 1)], vec![rank(second)]));
        assert!(rig.told(NETD).is_empty() && rig.spawned().is_empty(), "rank {second} is left");
        assert_eq!(rig.state(rank(first)), Lifecycle::Reaped);
        rig.die(rank(second), SIGKILL);
        assert_eq!(rig.told(NETD), [&down(1, DeathCause::Outside, true)]);
        assert_eq!((rig.dropped_groups(), rig.aborted().len()), (vec![(0, 1)], 0));
        assert_eq!(rig.spawned(), [(rank(0), 2), (rank(1), 2)]);
        assert!(matches!(rig.state(rank_of(1, 0)), Lifecycle::Ready { .. }), "the other group");
        rig.group_ready(0);
        assert_eq!(rig.told(NETD).into_iter().filter(is_up).count(), 1);
    }
}

#[test]
fn the_fault_is_that_of_the_rank_that_ended_first() {
    for (first, second, cause) in [
        (SIGSEGV, SIGKILL, DeathCause::SelfInflicted),
        (SIGKILL, SIGSEGV, DeathCause::Outside),
        (SIGKILL, ExitStatus::Code(1), DeathCause::Outside),
        (ExitStatus::Code(1), ExitStatus::Code(1), DeathCause::SelfInflicted),
    ] {
        let mut rig = Rig::groups_online(1);
        rig.die(rank(1), first.clone());
        rig.die(rank(0), second);
        let [Netd(ToNetd::WorkerDown { cause: told, .. })] = rig.told(NETD)[..] else {
            panic!("{first:?}")
        };
        assert_eq!(*told, cause, "{first:?}");
    }
}

#[test]
fn two_ranks_that_die_at_once_are_one_death_of_the_group() {
    let mut rig = Rig::groups_online(1);
    // Both are dead before the tree hears of the first, so that the kill has no effect.
    rig.die(rank(0), SIGKILL);
    rig.die(rank(1), SIGKILL);
    assert_eq!(rig.told(NETD).len(), 1);
    assert_eq!(rig.spawned().len(), 2);
}

#[test]
fn a_rank_that_dies_while_another_loads_or_links_starts_the_group_again() {
    for (ready, linked) in [(false, false), (true, false), (true, true)] {
        let mut rig = Rig::of_groups(1).prepared();
        if ready {
            rig.say(rank(1), Up::Worker(FromWorker::Ready(Capacity::default())));
        }
        if linked {
            rig.say(rank(0), Up::Worker(FromWorker::Ready(Capacity::default())));
            assert_eq!(rig.told(rank(1)), [&link(1)]);
        }
        assert_eq!(rig.die(rank(1), SIGKILL).killed(), [rank(0)]);
        rig.die(rank(0), SIGKILL);
        assert!(rig.told(NETD).is_empty(), "it was never told of the group");
        rig.wait(SEC);
        rig.group_ready(0);
        assert_eq!(rig.told(NETD).into_iter().filter(is_up).count(), 1, "{ready} {linked}");
    }
}

#[test]
fn a_rank_that_dies_during_the_pause_of_its_group_is_no_new_death() {
    let mut rig = Rig::groups_online(1);
    rig.tree.policy.restart.max_restarts = 2;
    for _ in 0..2 {
        rig.die(rank(0), SIGSEGV).die(rank(1), SIGKILL).wait(10 * SEC);
        rig.group_ready(0);
    }
    // The budget is that of the group, however many of its ranks end.
    rig.die(rank(1), SIGSEGV).die(rank(0), SIGKILL);
    assert_eq!(rig.told(NETD), [&down(3, DeathCause::SelfInflicted, false)]);
}

#[test]
fn ranks_that_are_killed_from_outside_put_no_group_aside() {
    let mut rig = Rig::groups_online(1);
    for _ in 0..10 {
        rig.die(rank(0), SIGKILL).die(rank(1), SIGKILL).wait(10 * SEC);
        rig.group_ready(0);
    }
    assert_eq!(rig.tree.rest(), Some(span(0, 8)));
}

#[test]
fn pauses_of_a_group_double_with_the_failures_of_a_rank() {
    let mut rig = Rig::of_groups(1).prepared();
    for pause in [100 * MS, 200 * MS] {
        rig.die(rank(1), SIGSEGV).die(rank(0), SIGKILL);
        assert!(rig.wait(pause - MS).spawned().is_empty());
        assert_eq!(rig.wait(MS).spawned().len(), 2);
    }
}

#[test]
fn a_rank_that_hangs_is_to_blame_and_one_that_waits_for_it_is_not() {
    let mut rig = Rig::groups_online(1);
    let mut killed = Vec::new();
    for second in 0..8 {
        rig.now += SEC;
        // Rank 0 waits, and beats meanwhile.
        assert!(rig.beats(rank(0), second, Some(Rank(1))).is_empty());
        killed = rig.beats(rank(1), 7, None);
        if !killed.is_empty() {
            break;
        }
    }
    assert_eq!((killed, rig.aborted()), (vec![rank(1), rank(0)], vec![(0, 1)]));
    rig.die(rank(0), SIGKILL);
    rig.die(rank(1), SIGKILL);
    assert_eq!(rig.told(NETD), [&down(1, DeathCause::Outside, true)]);
    for (index, expected) in [(0, false), (1, true)] {
        let [Down::Init(Init::Worker { by_warps, .. })] = rig.told(rank(index))[..] else {
            panic!("{:?}", rig.last)
        };
        assert_eq!(*by_warps, expected, "rank {index}");
    }
}

#[test]
fn of_two_frozen_ranks_the_one_that_is_waited_for_is_to_blame() {
    let mut rig = Rig::groups_online(1);
    let why = (0..8).find_map(|_| {
        rig.now += SEC;
        let killed = rig.beats(rank(0), 7, Some(Rank(1)));
        let killed = if killed.is_empty() { rig.beats(rank(1), 7, None) } else { killed };
        let first = |action: &Action| match action {
            Action::Kill(id, _, why) if why.starts_with("hangs") => Some(*id),
            _ => None,
        };
        (!killed.is_empty()).then(|| rig.last.iter().find_map(first))
    });
    assert_eq!(why, Some(Some(rank(1))));
}

#[test]
fn a_rank_that_is_late_is_blamed_for_those_that_wait_for_it() {
    let mut rig = Rig::of_groups(1).prepared();
    rig.say(rank(0), Up::Worker(FromWorker::Ready(Capacity::default())));
    rig.wait(31 * SEC);
    let Some(Action::Kill(id, _, why)) =
        rig.last.iter().find(|action| matches!(action, Action::Kill(..)))
    else {
        panic!("{:?}", rig.last)
    };
    assert!(*id == rank(1) && why.contains("--start_timeout"), "{id} {why}");
    assert_eq!(rig.killed(), [rank(1), rank(0)]);
}

#[test]
fn a_drain_waits_for_rank_0_before_the_others_are_told() {
    let mut rig = Rig::groups_online(1);
    rig.on(TreeEvent::Stop);
    rig.die(NETD, ExitStatus::Code(0));
    assert_eq!((rig.told(rank(0)), rig.told(rank(1)).len()), (vec![&Down::Drain], 0));
    rig.die(rank(0), ExitStatus::Code(0));
    assert_eq!((rig.told(rank(1)), rig.killed().len()), (vec![&Down::Drain], 0));
    assert_eq!(rig.die(rank(1), ExitStatus::Code(0)).finished(), Some(ExitReason::Clean));
}

#[test]
fn a_rank_that_dies_during_the_drain_ends_the_others() {
    let mut rig = Rig::groups_online(1);
    rig.on(TreeEvent::Stop);
    rig.die(NETD, ExitStatus::Code(0));
    assert_eq!(rig.die(rank(1), SIGKILL).killed(), [rank(0)]);
    assert_eq!(rig.die(rank(0), SIGKILL).finished(), Some(ExitReason::Clean));
    assert!(rig.spawned().is_empty());
}

#[test]
fn who_does_not_drain_in_time_is_killed_with_its_group() {
    let mut rig = Rig::groups_online(1);
    rig.on(TreeEvent::Stop);
    rig.die(NETD, ExitStatus::Code(0));
    let mut killed = rig.wait(6 * SEC).killed();
    killed.sort_by_key(|id| id.to_string());
    assert_eq!(killed, [rank(0), rank(1)]);
}

#[test]
fn a_new_netd_gives_every_rank_its_arena_before_rank_0_gets_rings() {
    let mut rig = Rig::groups_online(1);
    rig.die(NETD, SIGKILL);
    assert_eq!((rig.told(rank(1)), rig.told(rank(0)).len()), (vec![&link(2)], 0));
    rig.netd_listens();
    rig.group_links(0);
    assert_eq!(rig.told(NETD).into_iter().filter(is_up).count(), 1);
}

#[test]
fn a_rank_that_is_held_holds_its_group_and_the_rest_of_the_span_is_served() {
    for index in [0, 1] {
        let mut rig = Rig::groups_online(2);
        rig.die(rank_of(1, index), exit(ExitReason::BadConfig));
        rig.die(rank_of(1, 1 - index), SIGKILL);
        for state in [rig.state(rank_of(1, 0)), rig.state(rank_of(1, 1))] {
            assert_eq!(state, Lifecycle::Held { reason: ExitReason::BadConfig });
        }
        let told = rig.told(NETD);
        assert!(
            matches!(told[..], [Netd(ToNetd::WorkerDown { restarting: false, .. }), Netd(ToNetd::Shrink(rest))] if *rest == span(0, 4)),
            "{told:?}"
        );
        assert!(rig.complaints()[0].contains(&format!("gpu-worker 1.{index}")));
    }
}

#[test]
fn nonsense_in_the_rings_ends_the_group_and_is_the_fault_of_rank_0() {
    let mut rig = Rig::groups_online(1);
    let ChildId::Worker(worker) = rank(0) else { panic!() };
    let generation = Generation(1);
    let broken = FromNetd::BrokenRings { worker, generation, message: "ring is corrupt".into() };
    assert_eq!(rig.say(NETD, Up::Netd(broken)).killed(), [rank(0), rank(1)]);
    // Whoever is reaped first.
    rig.die(rank(1), SIGKILL);
    rig.die(rank(0), SIGKILL);
    assert_eq!(rig.told(NETD), [&down(1, DeathCause::SelfInflicted, true)]);
}

#[test]
fn a_rank_that_survives_sigkill_keeps_its_group_from_another_start() {
    let mut rig = Rig::groups_online(2);
    rig.on(TreeEvent::Unruly(rank(1), Generation(1), "floods"));
    assert_eq!(rig.killed(), [rank(1), rank(0)]);
    rig.die(rank(0), SIGKILL);
    rig.wait(11 * SEC);
    assert_eq!(rig.state(rank(1)), Lifecycle::Unkillable);
    assert!(matches!(
        rig.told(NETD)[..],
        [Netd(ToNetd::WorkerUnkillable { .. }), Netd(ToNetd::Shrink(rest))] if *rest == span(4, 8)
    ));
    assert!(rig.wait(1000 * SEC).spawned().is_empty());
    assert!(rig.dropped_groups().is_empty(), "it may still write");
    rig.die(rank(1), SIGKILL);
    assert!(matches!(rig.told(NETD)[..], [Netd(ToNetd::WorkerDown { restarting: false, .. })]));
}

#[test]
fn a_group_moves_as_one() {
    let mut rig = Rig::of_groups(1);
    rig.on(TreeEvent::Start).netd_listens();
    rig.say(PREPARE, surveyed(survey()));
    rig.say(NETD, Up::Netd(FromNetd::ProposedSpan(span(0, 4))));
    rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
    rig.die(PREPARE, ExitStatus::Code(0)).group_ready(0);
    rig.say(NETD, Up::Netd(FromNetd::Online));
    rig.say(NETD, Up::Netd(FromNetd::Move(span(4, 8))));
    rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared)).die(PREPARE, ExitStatus::Code(0));
    rig.on(TreeEvent::Room(span(4, 8), None));
    assert_eq!(rig.spawned(), [(rank_of(1, 0), 1), (rank_of(1, 1), 1)]);
    // A death of the coming group before it serves.
    rig.die(rank_of(1, 1), SIGKILL).die(rank_of(1, 0), SIGKILL);
    rig.wait(SEC);
    rig.group_ready(1);
    assert_eq!(rig.told(NETD).into_iter().filter(is_up).count(), 1);
    rig.say(NETD, Up::Netd(FromNetd::Moved(span(4, 8))));
    rig.say(NETD, Up::Netd(FromNetd::Vacated));
    assert_eq!((rig.told(rank(0)), rig.told(rank(1)).len()), (vec![&Down::Drain], 0));
    rig.die(rank(0), ExitStatus::Code(0));
    assert_eq!(rig.told(rank(1)), [&Down::Drain]);
    rig.die(rank(1), ExitStatus::Code(0));
    let dropped = [rank(0), rank(1)].map(|id| match id {
        ChildId::Worker(worker) => Action::DropWorker(worker),
        _ => panic!("{id}"),
    });
    assert!(dropped.iter().all(|drop| rig.last.contains(drop)), "{:?}", rig.last);
    assert_eq!(rig.tree.worker_count(), 2);
}

#[test]
fn speeds_of_the_ranks_of_a_group_add_up() {
    let mut rig = Rig::of_groups(2);
    rig.on(TreeEvent::Start);
    let rates = vec![3.0, 3.0, 1.0, 1.0];
    let speeds = Some(Speeds { rates, cuts: Vec::new() });
    rig.say(PREPARE, surveyed(Survey { speeds, ..survey() }));
    let rates: Vec<f64> = rig.tree.policy.shares.iter().map(|share| share.rate).collect();
    assert_eq!(rates, [6.0, 2.0]);
}
