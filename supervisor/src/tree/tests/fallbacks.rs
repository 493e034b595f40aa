//! Devices that keep failing while another takes their blocks over.

use super::*;

const FIRST: Duration = Duration::from_secs(100);
const CARD: Device = Device::Cuda(0);

/// A card that serves all blocks and may fail three times, with the processor in its back.
fn online() -> Rig {
    let mut policy = policy(1);
    policy.shares = DeviceShare::groups(&[CARD], 1);
    policy.fallback = Some(Device::Cpu);
    let mut rig = Rig { tree: Tree::new(policy), ..Rig::new(0) };
    rig.on(TreeEvent::Start).netd_listens();
    rig.say(PREPARE, surveyed(survey()));
    rig.say(NETD, Up::Netd(FromNetd::ProposedSpan(span(0, 8))));
    rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
    rig.die(PREPARE, ExitStatus::Code(0));
    rig.worker_ready(0);
    rig.say(NETD, Up::Netd(FromNetd::Online));
    rig
}

impl Rig {
    fn device(&self) -> Option<Device> {
        let ChildId::Worker(worker) = worker(0) else { return None };
        self.tree.has(worker).map(|held| held.device)
    }

    /// The card fails as often as it may, and once more.
    fn fails(&mut self) -> &mut Rig {
        for _ in 0..3 {
            self.die(worker(0), SIGSEGV).wait(10 * SEC).worker_ready(0);
        }
        self.die(worker(0), SIGSEGV)
    }

    fn examines(&self) -> bool {
        self.last.contains(&Action::Examine(CARD))
    }
}

#[test]
fn the_fallback_takes_over_what_a_device_served() {
    let mut rig = online();
    rig.fails();
    assert_eq!(rig.spawned().iter().map(|(id, _)| *id).collect::<Vec<_>>(), [worker(0)]);
    assert_eq!(rig.device(), Some(Device::Cpu));
    let ChildId::Worker(id) = worker(0) else { panic!("a worker") };
    assert!(rig.last.contains(&Action::DropWorker(id)), "other pages: {:?}", rig.last);
    let told = rig.told(NETD);
    assert!(matches!(told[..], [Netd(ToNetd::WorkerDown { restarting: false, .. })]), "{told:?}");
    let [complaint] = rig.complaints()[..] else { panic!("{:?}", rig.complaints()) };
    assert!(complaint.contains("cuda:0 failed too often"), "{complaint}");
    assert!(complaint.contains("cpu serves blocks 0:8 in its place"), "{complaint}");
    rig.worker_ready(0);
    assert!(matches!(rig.told(NETD)[..], [Down::WorkerUp { .. }]), "{:?}", rig.last);
    assert!(rig.tree.standing().ready);
}

#[test]
fn a_device_that_works_again_gets_its_blocks_back_when_no_session_is_open() {
    let mut rig = online();
    rig.fails().worker_ready(0);
    assert!(!rig.wait(FIRST - SEC).examines());
    assert!(rig.wait(SEC).examines());
    assert!(!rig.tree.waits_for_idle());
    rig.on(TreeEvent::Examined(CARD, None));
    assert!(rig.tree.waits_for_idle());
    rig.on(TreeEvent::Idle);
    assert!(matches!(rig.last[..], [Action::Kill(id, ..)] if id == worker(0)), "{:?}", rig.last);
    rig.die(worker(0), SIGKILL);
    assert_eq!(rig.device(), Some(CARD));
    assert!(rig.complaints().is_empty());
    rig.worker_ready(0);
    assert!(matches!(rig.told(NETD)[0], Down::WorkerUp { .. }), "{:?}", rig.last);
    assert_eq!(rig.tree.rest(), Some(span(0, 8)));
    // It has as many failures left as any other; after them it rests twice as long.
    rig.fails();
    assert_eq!(rig.device(), Some(Device::Cpu));
    assert!(rig.complaints()[0].ends_with("examined in 200 s"), "{:?}", rig.complaints());
}

#[test]
fn the_operator_returns_the_blocks_by_a_restart() {
    let mut rig = online();
    rig.fails().worker_ready(0);
    rig.wait(FIRST).on(TreeEvent::Examined(CARD, None));
    let ChildId::Worker(id) = worker(0) else { panic!("a worker") };
    rig.on(TreeEvent::Ordered(Order::Restart(id))).die(worker(0), SIGKILL);
    assert_eq!(rig.device(), Some(CARD));
    // On trial: one failure is enough.
    rig.die(worker(0), SIGSEGV);
    assert_eq!(rig.device(), Some(Device::Cpu));
}

#[test]
fn a_device_that_fails_its_test_is_tested_again_after_growing_pauses() {
    let mut rig = online();
    rig.fails().worker_ready(0);
    let mut pause = FIRST;
    for _ in 0..8 {
        assert!(!rig.wait(pause - SEC).examines());
        assert!(rig.wait(SEC).examines());
        rig.on(TreeEvent::Examined(CARD, Some("no answer".to_owned())));
        assert!(!rig.tree.waits_for_idle());
        rig.on(TreeEvent::Idle);
        assert_eq!(rig.device(), Some(Device::Cpu));
        pause = (2 * pause).min(3600 * SEC);
    }
}

#[test]
fn a_fallback_that_fails_too_often_ends_the_run() {
    let mut rig = online();
    rig.fails().worker_ready(0).fails();
    assert_eq!(rig.told(NETD).last(), Some(&&Down::Drain));
}
