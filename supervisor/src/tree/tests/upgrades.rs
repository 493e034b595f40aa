//! Another executable takes the run over: every process is replaced, one after the other.

use super::*;

/// How long sessions may hold netd up.
const PATIENCE: Duration = Duration::from_secs(60);

const CLEAN: ExitStatus = ExitStatus::Code(0);

/// What the tree is after it went from one executable to the next.
fn handed_over(mut rig: Rig) -> Rig {
    assert_eq!(rig.tree.upgrade_waits_for(), None);
    let bytes = postcard::to_allocvec(&rig.tree).unwrap();
    rig.tree = postcard::from_bytes(&bytes).unwrap();
    rig.on(TreeEvent::HandedOver(PATIENCE));
    rig
}

impl Rig {
    fn is_upgraded(&self) -> bool {
        self.last.contains(&Action::Upgraded)
    }

    /// A new netd listens, and every worker is linked to it.
    fn netd_is_back(&mut self, workers: u16) -> &mut Rig {
        self.netd_listens();
        let netd_generation = self.generation(NETD);
        for group in 0..workers {
            self.say(worker(group), Up::Worker(FromWorker::Linked { netd_generation }));
        }
        self
    }
}

#[test]
fn workers_are_replaced_one_by_one_and_netd_last() {
    let mut rig = handed_over(Rig::online(2));
    assert_eq!(rig.killed(), [worker(0)]);
    assert_eq!(rig.tree.replaces().unwrap(), "replacing the workers of group 0");
    rig.die(worker(0), SIGKILL);
    assert_eq!(rig.spawned().len(), 1, "at once");
    assert!(rig.killed().is_empty(), "one at a time");
    rig.worker_ready(0);
    assert_eq!(rig.killed(), [worker(1)]);
    rig.die(worker(1), SIGKILL).worker_ready(1);
    assert!(rig.killed().is_empty(), "sessions are open");
    assert!(rig.tree.waits_for_idle());
    assert!(rig.wait(PATIENCE - SEC).killed().is_empty());
    assert_eq!(rig.wait(SEC).told(NETD), [&Netd(ToNetd::Replace)]);
    assert_eq!(rig.tree.replaces().unwrap(), "replacing netd");
    rig.die(NETD, CLEAN);
    assert_eq!(rig.spawned().len(), 1, "at once");
    assert!(!rig.is_upgraded());
    rig.netd_is_back(2);
    assert!(rig.is_upgraded(), "{:?}", rig.last);
    assert_eq!(rig.tree.replaces(), None);
    assert_eq!(rig.tree.upgrade_waits_for(), None, "once more");
    assert!(rig.complaints().is_empty());
}

#[test]
fn who_dies_meanwhile_is_new_already() {
    let mut rig = handed_over(Rig::online(3));
    rig.die(worker(1), SIGKILL).worker_ready(1);
    rig.die(NETD, SIGKILL).netd_is_back(3);
    rig.die(worker(0), SIGKILL).worker_ready(0);
    assert_eq!(rig.killed(), [worker(2)], "worker 1 and netd are new");
    rig.die(worker(2), SIGKILL).worker_ready(2);
    assert!(rig.is_upgraded(), "{:?}", rig.last);
}

#[test]
fn replacing_counts_for_no_limit() {
    let mut rig = Rig::online(1);
    for _ in 0..20 {
        rig = handed_over(rig);
        assert_eq!(rig.killed(), [worker(0)]);
        rig.die(worker(0), SIGKILL).worker_ready(0);
        assert_eq!(rig.on(TreeEvent::Idle).told(NETD), [&Netd(ToNetd::Replace)]);
        rig.die(NETD, CLEAN).netd_is_back(1);
        assert!(rig.is_upgraded());
    }
    assert!(rig.finished().is_none());
}

#[test]
fn a_netd_that_does_not_end_on_request_is_killed_and_counts_for_no_limit() {
    let mut rig = Rig::online(1);
    for _ in 0..20 {
        rig = handed_over(rig);
        rig.die(worker(0), SIGKILL).worker_ready(0).on(TreeEvent::Idle);
        assert!(rig.wait(SEC).killed().is_empty(), "it has time");
        assert_eq!(rig.wait(SEC).killed(), [NETD]);
        rig.die(NETD, SIGKILL).netd_is_back(1);
        assert!(rig.is_upgraded());
    }
    assert!(rig.finished().is_none());
}

#[test]
fn an_upgrade_waits_for_processes_that_start() {
    let mut rig = Rig::online(2);
    rig.die(worker(1), SIGKILL);
    assert!(rig.tree.upgrade_waits_for().unwrap().contains("group 1 is starting"));
    rig.worker_ready(1);
    assert_eq!(rig.tree.upgrade_waits_for(), None);
    assert!(Rig::until_prepared(1).tree.upgrade_waits_for().is_some());
    rig.on(TreeEvent::Stop);
    assert!(rig.tree.upgrade_waits_for().unwrap().contains("stopping"));
}

#[test]
fn a_stop_ends_the_replacement() {
    let mut rig = handed_over(Rig::online(1));
    rig.on(TreeEvent::Stop);
    assert_eq!(rig.tree.replaces(), None);
}

#[test]
fn a_group_without_a_worker_per_device_is_named() {
    let mut rig = Rig::online(2);
    assert_eq!(rig.tree.incomplete_group(), None);
    rig.tree.groups[1].workers.clear();
    assert_eq!(rig.tree.incomplete_group(), Some(GroupId(1)));
    rig.tree.groups[1].workers = rig.tree.groups[0].workers.clone();
    assert_eq!(rig.tree.incomplete_group(), Some(GroupId(1)), "the worker of another group");
}
