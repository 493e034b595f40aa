//! Stops: drained in order, killed when they take too long.

use super::*;

#[test]
fn a_stop_drains_netd_first_and_then_the_workers_and_is_clean() {
    let mut rig = Rig::online(1);
    rig.on(TreeEvent::Stop);
    assert_eq!((rig.told(NETD), rig.told(worker(0)).len()), (vec![&Down::Drain], 0));
    assert_eq!(rig.die(NETD, ExitStatus::Code(0)).told(worker(0)), [&Down::Drain]);
    assert_eq!(rig.die(worker(0), ExitStatus::Code(0)).finished(), Some(ExitReason::Clean));
}

#[test]
fn a_worker_that_dies_while_netd_drains_is_reported_and_not_restarted() {
    let mut rig = Rig::online(1);
    rig.on(TreeEvent::Stop);
    rig.die(worker(0), SIGKILL);
    assert!(matches!(rig.told(NETD)[..], [Netd(ToNetd::WorkerDown { restarting: false, .. })]));
    assert!(rig.wait(10 * SEC).spawned().is_empty());
}

#[test]
fn who_does_not_drain_in_time_is_killed_and_the_run_is_not_clean() {
    let mut rig = Rig::online(1);
    rig.on(TreeEvent::Stop);
    assert_eq!(rig.wait(20 * SEC).killed(), [NETD]);
    rig.die(NETD, SIGKILL);
    rig.die(worker(0), ExitStatus::Code(0));
    assert_eq!(rig.finished(), Some(ExitReason::Failed));
}

#[test]
fn a_second_stop_kills_at_once_but_an_echo_of_the_first_does_not() {
    let mut rig = Rig::online(1);
    rig.on(TreeEvent::Stop);
    assert!(rig.on(TreeEvent::Stop).killed().is_empty());
    rig.now += SEC;
    assert_eq!(rig.on(TreeEvent::Stop).killed(), [NETD, worker(0)]);
}

#[test]
fn a_stop_before_anything_serves_is_clean_and_quick() {
    let mut rig = Rig::new(1);
    rig.on(TreeEvent::Start);
    assert_eq!(rig.on(TreeEvent::Stop).killed(), [PREPARE, NETD]);
    rig.die(PREPARE, SIGKILL);
    assert_eq!(rig.die(NETD, SIGKILL).finished(), Some(ExitReason::Clean));
}
