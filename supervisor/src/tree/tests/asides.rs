//! Devices that keep failing: put aside, tried again after growing pauses, and back.

use super::*;

/// The first pause of the tests' policy.
const FIRST: Duration = Duration::from_secs(100);

impl Rig {
    /// Worker 1 of two fails as often as it may.
    fn put_aside() -> Rig {
        let mut rig = Rig::online(2);
        for _ in 0..3 {
            rig.die(worker(1), SIGSEGV).wait(10 * SEC).worker_ready(1);
        }
        rig.die(worker(1), SIGSEGV);
        assert_eq!(rig.state(worker(1)), Lifecycle::Held { reason: ExitReason::RestartLimit });
        assert_eq!(rig.told(NETD).last(), Some(&&Netd(ToNetd::Shrink(span(0, 4)))));
        assert!(rig.complaints()[0].ends_with("; its device is tried again in 100 s"));
        rig
    }

    /// After a pause, worker 1 is started.
    fn tried(&mut self, pause: Duration) -> &mut Rig {
        assert!(self.wait(pause - SEC).spawned().is_empty());
        assert_eq!(self.wait(SEC).spawned().iter().map(|(id, _)| *id).next(), Some(worker(1)));
        self
    }
}

#[test]
fn a_device_that_was_put_aside_is_tried_again_and_serves() {
    let mut rig = Rig::put_aside();
    rig.tried(FIRST);
    assert_eq!(rig.tree.rest(), Some(span(0, 4)), "not before it is linked");
    assert!(rig.tree.standing().ready);
    rig.worker_ready(1);
    assert!(
        matches!(rig.told(NETD)[..], [Down::WorkerUp { .. }, Netd(ToNetd::Grow(grown))] if *grown == span(0, 8))
    );
    assert_eq!(rig.tree.rest(), Some(span(0, 8)));
    // From now on it may fail as often as any other.
    assert_eq!(rig.die(worker(1), SIGSEGV).spawned().len(), 1);
}

#[test]
fn a_device_whose_worker_cannot_start_does_not_stop_the_tree() {
    let mut rig = Rig::put_aside();
    // Only a damaged state of an upgrade says this.
    rig.tree.facts = None;
    assert!(rig.wait(FIRST).spawned().is_empty());
    assert!(rig.finished().is_none());
}

#[test]
fn pauses_grow_while_it_fails_and_the_rest_serves() {
    let mut rig = Rig::put_aside();
    let mut pause = FIRST;
    for _ in 0..8 {
        rig.tried(pause);
        rig.die(worker(1), SIGSEGV);
        assert!(
            rig.told(NETD)
                .iter()
                .all(|down| !matches!(down, Netd(ToNetd::Shrink(_)) | Netd(ToNetd::Grow(_))))
        );
        pause = (2 * pause).min(3600 * SEC);
        let said = format!("tried again in {} s", pause.as_secs());
        assert!(rig.complaints()[0].ends_with(&said), "{:?}", rig.complaints());
    }
    assert!(rig.finished().is_none());
}

#[test]
fn the_last_device_is_not_put_aside() {
    let mut rig = Rig::put_aside();
    for _ in 0..3 {
        rig.die(worker(0), SIGSEGV).wait(10 * SEC).worker_ready(0);
    }
    rig.die(worker(0), SIGSEGV);
    assert_eq!(rig.told(NETD).last(), Some(&&Down::Drain));
    assert_eq!(rig.tree.deadline().map(|at| at - rig.now), Some(20 * SEC), "the drain's alone");
}

#[test]
fn a_netd_that_starts_meanwhile_learns_what_may_come_back() {
    let mut rig = Rig::put_aside();
    rig.die(NETD, SIGKILL);
    let [Down::Init(Init::Netd { served, whole, .. })] = rig.told(NETD)[..] else {
        panic!("{:?}", rig.last)
    };
    assert_eq!((*served, *whole), (Some(span(0, 4)), Some(span(0, 8))));
    rig.netd_listens();
    rig.wait(FIRST).worker_ready(1);
    assert_eq!(rig.told(NETD).last(), Some(&&Netd(ToNetd::Grow(span(0, 8)))));
}

#[test]
fn what_kills_from_outside_puts_no_device_aside() {
    let mut rig = Rig::online(2);
    for _ in 0..30 {
        assert_eq!(rig.die(worker(1), SIGKILL).wait(10 * SEC).tree.rest(), Some(span(0, 8)));
        rig.worker_ready(1);
    }
}

#[test]
fn without_a_pause_it_stays_away() {
    let mut rig = Rig::online(2);
    rig.tree.policy.restart.retry_after = None;
    rig.tree.policy.restart.max_restarts = 0;
    rig.die(worker(1), SIGSEGV);
    assert!(rig.complaints()[0].ends_with("is not restarted: SIGSEGV"), "{:?}", rig.complaints());
    assert_eq!(rig.tree.deadline(), None);
}
