//! Children that die, hang or misbehave: who is restarted when, who is told what.

use super::*;

#[test]
fn a_dead_worker_that_had_served_is_reported_and_restarted_at_once_with_new_rings() {
    let mut rig = Rig::online(1);
    rig.die(worker(0), SIGKILL);
    let down = Netd(ToNetd::WorkerDown {
        worker: WorkerId::solo(GroupId(0)),
        generation: Generation(1),
        cause: DeathCause::Outside,
        restarting: true,
    });
    assert_eq!(rig.told(NETD), [&down]);
    assert_eq!(rig.spawned(), [(worker(0), 2)]);
    rig.say(worker(0), Up::Worker(FromWorker::Ready(Capacity::default())));
    assert_eq!(rig.told(worker(0)), [&Down::Link { netd: Generation(1) }]);
}

#[test]
fn a_crash_of_its_own_is_told_apart_from_a_kill() {
    for (end, cause) in [
        (SIGSEGV, DeathCause::SelfInflicted),
        (ExitStatus::Code(1), DeathCause::SelfInflicted),
        (ExitStatus::Code(101), DeathCause::SelfInflicted),
        (SIGKILL, DeathCause::Outside),
        (ExitStatus::Signal(nix::libc::SIGTERM), DeathCause::Outside),
    ] {
        let mut rig = Rig::online(1);
        rig.die(worker(0), end.clone());
        let [Netd(ToNetd::WorkerDown { cause: told, .. })] = rig.told(NETD)[..] else {
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
    assert_eq!(rig.state(worker(0)), Lifecycle::Held { reason: ExitReason::RestartLimit });
    assert!(matches!(
        rig.told(NETD)[..],
        [Netd(ToNetd::WorkerDown { restarting: false, .. }), Netd(ToNetd::Shrink(_))]
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
    let [Down::Init(Init::Netd { previous_addrs, served, .. })] = rig.told(NETD)[..] else {
        panic!("{:?}", rig.last)
    };
    assert_eq!((previous_addrs.len(), *served), (1, Some(span(0, 8))));
    for group in 0..2 {
        assert_eq!(rig.told(worker(group)), [&Down::Link { netd: Generation(2) }]);
    }
    let linked = FromWorker::Linked { netd_generation: Generation(2) };
    rig.say(worker(0), Up::Worker(linked.clone()));
    assert!(rig.told(NETD).is_empty(), "netd does not listen yet");
    assert_eq!(
        rig.netd_listens().told(NETD).into_iter().filter(is_up).count(),
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
    rig.say(worker(0), Up::Worker(FromWorker::Linked { netd_generation: Generation(1) }));
    assert!(rig.told(NETD).is_empty());
}

#[test]
fn netd_that_keeps_dying_ends_the_run() {
    let mut rig = Rig::online(1);
    for _ in 0..4 {
        rig.wait(10 * SEC).die(NETD, SIGSEGV);
    }
    assert_eq!(rig.told(worker(0)), [&Down::Drain]);
    assert_eq!(rig.die(worker(0), ExitStatus::Code(0)).finished(), Some(ExitReason::RestartLimit));
}

#[test]
fn a_worker_lost_for_good_shrinks_the_span_of_netd_which_stays() {
    let mut rig = Rig::online(2);
    rig.die(worker(1), ExitStatus::Code(i32::from(ExitReason::BadConfig.code())));
    assert_eq!(rig.state(worker(1)), Lifecycle::Held { reason: ExitReason::BadConfig });
    assert!(matches!(
        rig.told(NETD)[..],
        [
            Netd(ToNetd::WorkerDown {
                restarting: false,
                ..
            }),
            Netd(ToNetd::Shrink(rest))
        ] if *rest == span(0, 4)
    ));
    assert!(matches!(rig.state(NETD), Lifecycle::Ready { .. }));
    rig.die(NETD, SIGKILL);
    let [Down::Init(Init::Netd { served, .. })] = rig.told(NETD)[..] else {
        panic!("{:?}", rig.last)
    };
    assert_eq!(*served, Some(span(0, 4)), "only the rest is served");
    assert_eq!(rig.told(worker(0)), [&Down::Link { netd: rig.generation(NETD) }]);
    assert!(rig.wait(100 * SEC).spawned().is_empty(), "the lost worker stays away");
}

#[test]
fn a_netd_that_was_not_ready_when_a_worker_was_lost_hears_it_with_the_model() {
    let mut rig = Rig::online(2);
    rig.die(NETD, SIGKILL);
    rig.die(worker(0), ExitStatus::Code(i32::from(ExitReason::BadConfig.code())));
    assert!(rig.told(NETD).is_empty(), "it does not know the model yet");
    rig.netd_listens();
    let last: Vec<_> = rig.told(NETD).into_iter().cloned().collect();
    assert!(
        last.contains(&Netd(ToNetd::Shrink(span(4, 8)))),
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
    assert!(rig.say(NETD, broken(7)).killed().is_empty(), "another generation");
    assert_eq!(rig.say(NETD, broken(1)).killed(), [worker(0)]);
    assert!(rig.say(NETD, broken(1)).killed().is_empty(), "once");
    rig.die(worker(0), SIGKILL);
    assert!(matches!(
        rig.told(NETD)[..],
        [Netd(ToNetd::WorkerDown { cause: DeathCause::SelfInflicted, restarting: true, .. })]
    ));
}

#[test]
fn kills_from_outside_are_followed_by_a_restart_at_once_without_limit() {
    let mut rig = Rig::online(1);
    for _ in 0..3 {
        assert_eq!(rig.die(worker(0), SIGKILL).spawned().len(), 1);
        rig.worker_ready(0);
    }
    for _ in 0..30 {
        assert!(rig.die(worker(0), SIGKILL).spawned().is_empty(), "something kills it for good");
        assert_eq!(rig.wait(10 * SEC).spawned().len(), 1);
        rig.worker_ready(0);
    }
    rig.wait(61 * SEC);
    for _ in 0..3 {
        rig.die(worker(0), SIGSEGV).wait(10 * SEC).worker_ready(0);
    }
    rig.die(worker(0), SIGSEGV);
    assert_eq!(rig.state(worker(0)), Lifecycle::Held { reason: ExitReason::RestartLimit });
}

#[test]
fn the_last_worker_that_is_held_ends_the_run() {
    let mut rig = Rig::online(1);
    rig.die(worker(0), ExitStatus::Code(i32::from(ExitReason::Busy.code())));
    assert_eq!(rig.told(NETD).last(), Some(&&Down::Drain));
    assert_eq!(rig.die(NETD, ExitStatus::Code(0)).finished(), Some(ExitReason::Busy));
}

fn beat(rig: &mut Rig, progress: u64, limit: Option<Duration>) -> Vec<ChildId> {
    let generation = rig.generation(worker(0));
    rig.on(TreeEvent::Beat(worker(0), generation, Beat { progress, limit, waits_for: None }))
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
        [Netd(ToNetd::WorkerDown { cause: DeathCause::Outside, .. })]
    ));
}

/// Whether worker 0, dead now, comes back without warpgroups.
fn comes_back_by_warps(rig: &mut Rig) -> bool {
    while !rig.spawned().iter().any(|(id, _)| *id == worker(0)) {
        rig.now += SEC;
        rig.on(TreeEvent::Tick);
    }
    let [Down::Init(Init::Worker { by_warps, .. })] = rig.told(worker(0))[..] else {
        panic!("{:?}", rig.last)
    };
    *by_warps
}

#[test]
fn warpgroups_are_given_up_by_whoever_failed_on_its_device_or_hung_and_by_nobody_else() {
    let lost = ExitStatus::Code(i32::from(ExitReason::DeviceLost.code()));
    for (end, expected) in [(lost, true), (SIGKILL, false), (ExitStatus::Code(1), false)] {
        let mut rig = Rig::online(1);
        rig.die(worker(0), end.clone());
        assert_eq!(comes_back_by_warps(&mut rig), expected, "{end:?}");
    }
    let mut rig = Rig::online(1);
    while beat(&mut rig, 7, Some(5 * SEC)).is_empty() {
        rig.now += SEC;
    }
    rig.die(worker(0), SIGKILL);
    assert!(comes_back_by_warps(&mut rig));
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
    let mut still = |pause: Duration, progress| {
        rig.now += pause;
        beat(&mut rig, progress, Some(5 * SEC))
    };
    for round in 0..3 {
        assert!(still(SEC, round).is_empty());
        assert!(still(2 * SEC, round).is_empty());
        assert!(still(3600 * SEC, round).is_empty());
    }
    // A child that makes no progress in the readings after the gap hangs.
    assert!(still(SEC, 2).is_empty());
    assert_eq!(still(SEC, 2), [worker(0)]);
}

#[test]
fn a_drain_is_limited_by_its_own_deadline_alone() {
    let mut rig = Rig::online(1);
    rig.on(TreeEvent::Stop);
    let generation = rig.generation(NETD);
    for _ in 0..10 {
        rig.now += SEC;
        let still = Beat { progress: 7, limit: Some(5 * SEC), waits_for: None };
        assert!(rig.on(TreeEvent::Beat(NETD, generation, still)).killed().is_empty());
    }
    assert_eq!(rig.wait(10 * SEC).killed(), [NETD]);
}

#[test]
fn what_survives_sigkill_is_quarantined_and_never_restarted() {
    let mut rig = Rig::online(2);
    let generation = rig.generation(worker(0));
    rig.on(TreeEvent::Unruly(worker(0), generation, "floods"));
    rig.wait(11 * SEC);
    assert_eq!(rig.state(worker(0)), Lifecycle::Unkillable);
    assert!(matches!(
        rig.told(NETD)[..],
        [Netd(ToNetd::WorkerUnkillable { .. }), Netd(ToNetd::Shrink(rest))] if *rest == span(4, 8)
    ));
    rig.die(NETD, SIGKILL).netd_listens();
    assert_eq!(rig.tree.deadline(), None);
    assert!(rig.wait(1000 * SEC).spawned().is_empty());
    rig.die(worker(0), SIGKILL);
    assert!(matches!(rig.told(NETD)[..], [Netd(ToNetd::WorkerDown { restarting: false, .. })]));
}

#[test]
fn a_child_that_closes_its_channel_and_stays_is_killed() {
    let mut rig = Rig::online(1);
    let generation = rig.generation(worker(0));
    rig.on(TreeEvent::Closed(worker(0), generation));
    assert_eq!(rig.wait(5 * SEC).killed(), [worker(0)]);
}
