//! Pauses: what the operator asks for, what netd and the workers are told, and who dies when.

use super::*;

const PATIENCE: Duration = Duration::from_secs(7);

impl Rig {
    fn ordered(&mut self, order: Order) -> &mut Rig {
        assert_eq!(self.tree.refusal(order), None);
        self.on(TreeEvent::Ordered(order))
    }

    /// Online with two workers, until these are told to end.
    fn until_vacated() -> Rig {
        let mut rig = Rig::online(2);
        rig.ordered(Order::Pause(PATIENCE));
        assert_eq!(rig.told(NETD), [&Netd(ToNetd::Pause { patience: PATIENCE })]);
        assert!(rig.told(worker(0)).is_empty(), "sessions may go on");
        rig.say(NETD, Up::Netd(FromNetd::Vacated));
        assert_eq!(rig.told(worker(0)), [&Down::Drain]);
        assert_eq!(rig.told(worker(1)), [&Down::Drain]);
        rig
    }

    fn paused() -> Rig {
        let mut rig = Rig::until_vacated();
        rig.die(worker(0), ExitStatus::Code(0));
        assert!(
            !rig.last.contains(&Action::Paused) && rig.tree.standing().pause == Pause::Draining
        );
        rig.die(worker(1), ExitStatus::Code(0));
        assert!(rig.last.contains(&Action::Paused) && rig.tree.standing().pause == Pause::Paused);
        assert!(rig.spawned().is_empty());
        rig
    }

    fn refused(&self, order: Order) -> String {
        self.tree.refusal(order).expect("a refusal")
    }
}

#[test]
fn a_pause_ends_the_workers_and_its_end_is_a_new_start_of_them() {
    let mut rig = Rig::paused();
    assert!(rig.wait(3600 * SEC).spawned().is_empty());
    assert!(rig.tree.goes_on() && rig.finished().is_none() && !rig.tree.standing().ready);
    rig.ordered(Order::Resume);
    assert_eq!(rig.told(NETD), [&Netd(ToNetd::Resume(span(0, 8)))]);
    assert_eq!(rig.spawned(), [(PREPARE, 2)], "blocks may have left the cache");
    rig.say(PREPARE, surveyed(survey()));
    rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
    assert_eq!(rig.spawned(), [(worker(0), 2), (worker(1), 2)]);
    assert!(rig.refused(Order::Pause(PATIENCE)).contains("not online yet"));
    rig.die(PREPARE, ExitStatus::Code(0));
    rig.worker_ready(0).worker_ready(1);
    assert!(rig.told(NETD).iter().any(is_up));
    rig.say(NETD, Up::Netd(FromNetd::Online));
    assert_eq!((rig.tree.rest(), rig.tree.standing().ready), (Some(span(0, 8)), true));
    rig.ordered(Order::Pause(PATIENCE));
}

#[test]
fn a_pause_that_is_taken_back_while_sessions_end_replaces_the_workers() {
    let mut rig = Rig::until_vacated();
    rig.ordered(Order::Resume);
    rig.die(worker(0), ExitStatus::Code(0));
    rig.die(worker(1), ExitStatus::Code(0));
    assert!(!rig.last.contains(&Action::Paused));
    assert_eq!(rig.spawned(), [(worker(0), 2), (worker(1), 2)]);
}

#[test]
fn the_same_order_twice_changes_nothing() {
    let mut rig = Rig::paused();
    assert!(rig.ordered(Order::Pause(PATIENCE)).last.is_empty());
    let mut rig = Rig::online(1);
    assert!(rig.ordered(Order::Resume).last.is_empty());
}

#[test]
fn netd_that_dies_during_a_pause_is_told_of_it_at_its_start() {
    let is_paused = |rig: &Rig| {
        rig.told(NETD)
            .iter()
            .any(|down| matches!(down, Down::Init(Init::Netd { paused: true, .. })))
    };
    let mut rig = Rig::paused();
    rig.die(NETD, SIGKILL);
    assert!(is_paused(&rig));
    rig.netd_listens();
    assert!(
        !rig.told(NETD)
            .iter()
            .any(|down| matches!(down, Netd(ToNetd::Pause { .. }) | Netd(ToNetd::Resume(_))))
    );
    rig.ordered(Order::Resume);
    assert!(rig.told(NETD).contains(&&Netd(ToNetd::Resume(span(0, 8)))));

    let mut rig = Rig::online(1);
    rig.ordered(Order::Pause(PATIENCE));
    rig.die(NETD, SIGKILL);
    assert!(is_paused(&rig) && rig.told(worker(0)) == [&Down::Drain], "its sessions are gone");
    rig.ordered(Order::Resume);
    assert!(rig.told(NETD).is_empty(), "it does not know the model yet");
    rig.netd_listens();
    let told = rig.told(NETD);
    assert!(
        matches!(told[..], [Netd(ToNetd::Model { .. }), .., Netd(ToNetd::Resume(_))]),
        "{told:?}"
    );
}

#[test]
fn a_worker_that_dies_while_sessions_end_is_replaced_for_them() {
    let mut rig = Rig::online(2);
    rig.ordered(Order::Pause(PATIENCE));
    assert_eq!(rig.die(worker(0), SIGKILL).spawned(), [(worker(0), 2)]);
    rig.say(NETD, Up::Netd(FromNetd::Vacated));
    assert_eq!((rig.killed(), rig.told(worker(1))), (vec![worker(0)], vec![&Down::Drain]));
    rig.die(worker(0), SIGKILL);
    rig.die(worker(1), ExitStatus::Code(0));
    assert_eq!(rig.tree.standing().pause, Pause::Paused);
}

#[test]
fn a_paused_instance_stops_in_order() {
    let mut rig = Rig::paused();
    rig.on(TreeEvent::Stop);
    assert_eq!(rig.told(NETD), [&Down::Drain]);
    assert!(rig.refused(Order::Resume).contains("stopping"));
    assert_eq!(rig.die(NETD, ExitStatus::Code(0)).finished(), Some(ExitReason::Clean));
}

#[test]
fn orders_that_cannot_be_followed_are_refused_with_a_sentence() {
    let mut rig = Rig::until_prepared(2);
    assert!(rig.refused(Order::Pause(PATIENCE)).contains("not online yet"));
    let restart = |group| Order::Restart(WorkerId::solo(GroupId(group)));
    assert!(rig.refused(restart(0)).contains("starting"));
    assert!(rig.refused(restart(7)).contains("expected one of 0.0, 1.0"));
    assert!(rig.on(TreeEvent::Ordered(restart(0))).last.is_empty());
    let mut rig = Rig::online(2);
    rig.die(NETD, SIGKILL);
    assert!(rig.refused(Order::Pause(PATIENCE)).contains("netd is starting"));
}

#[test]
fn a_worker_is_restarted_with_its_group() {
    let restart = Order::Restart(WorkerId::solo(GroupId(0)));
    let mut rig = Rig::online(2);
    rig.ordered(restart);
    assert_eq!(rig.killed(), [worker(0)]);
    assert_eq!(rig.die(worker(0), SIGKILL).spawned(), [(worker(0), 2)]);
    let mut rig = Rig::groups_online(1);
    rig.ordered(restart);
    assert_eq!(rig.killed(), [rank(0), rank(1)]);
}
