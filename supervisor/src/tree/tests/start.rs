//! From nothing to online: order, what does not fit, mistakes of the configuration.

use super::*;

#[test]
fn prepare_and_netd_start_at_once() {
    let mut rig = Rig::new(1);
    assert_eq!(rig.on(TreeEvent::Start).spawned(), [(PREPARE, 1), (NETD, 1)]);
}

#[test]
fn netd_learns_the_model_when_both_sides_are_there() {
    let mut rig = Rig::new(1);
    rig.on(TreeEvent::Start);
    assert!(rig.say(PREPARE, surveyed(survey())).told(NETD).is_empty());
    assert_eq!(rig.netd_listens().told(NETD), [&model(None)]);
}

#[test]
fn the_proposed_span_is_prepared_and_cut_among_the_devices() {
    let mut rig = Rig::new(2);
    rig.on(TreeEvent::Start).netd_listens();
    rig.say(PREPARE, surveyed(survey()));
    rig.say(NETD, Up::Netd(FromNetd::ProposedSpan(span(2, 8))));
    assert_eq!(rig.told(PREPARE), [&Down::Span(span(2, 8))]);
    rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
    assert_eq!(rig.spawned(), [(worker(0), 1), (worker(1), 1)]);
    let [Down::Init(Init::Worker { placement, .. })] = rig.told(worker(1))[..] else {
        panic!("{:?}", rig.last)
    };
    assert_eq!(placement.span, span(5, 8));
}

#[test]
fn netd_hears_of_a_worker_only_after_it_acknowledged_its_rings() {
    let mut rig = Rig::until_prepared(1);
    rig.say(worker(0), Up::Worker(FromWorker::Ready(Capacity::default())));
    assert_eq!(rig.told(worker(0)), [&Down::Link { netd: Generation(1) }]);
    assert!(rig.told(NETD).is_empty());
    rig.say(worker(0), Up::Worker(FromWorker::Linked { netd_generation: Generation(1) }));
    assert_eq!(rig.told(NETD).into_iter().filter(is_up).count(), 1);
}

#[test]
fn a_mistake_in_the_configuration_ends_the_run_before_it_is_online_and_is_said_once() {
    let mut rig = Rig::new(1);
    rig.on(TreeEvent::Start);
    let message = "folder /x holds no config.json".to_owned();
    rig.say(PREPARE, Up::Prepare(FromPrepare::Failed { reason: ExitReason::BadConfig, message }));
    rig.die(PREPARE, ExitStatus::Code(2));
    assert_eq!(rig.complaints(), ["prepare: folder /x holds no config.json"]);
    assert_eq!(rig.killed(), [NETD]);
    assert_eq!(rig.die(NETD, SIGKILL).finished(), Some(ExitReason::BadConfig));
}

#[test]
fn a_block_range_outside_the_model_is_refused_with_both_numbers() {
    let mut rig = Rig::new(1);
    rig.tree.policy.span = SpanChoice::Fixed(span(4, 40));
    rig.on(TreeEvent::Start);
    rig.say(PREPARE, surveyed(survey()));
    let complaint = rig.complaints().join("");
    assert!(complaint.contains("4:40") && complaint.contains("0:8"), "{complaint}");
}

#[test]
fn a_child_that_does_not_become_ready_is_killed_and_restarted() {
    let mut rig = Rig::until_prepared(1);
    assert_eq!(rig.wait(31 * SEC).killed(), [worker(0)]);
    rig.die(worker(0), SIGKILL);
    assert_eq!(rig.wait(100 * MS).spawned(), [(worker(0), 2)]);
}

#[test]
fn prepare_that_dies_early_is_started_again_and_gets_its_span_again() {
    let mut rig = Rig::new(1);
    rig.on(TreeEvent::Start).netd_listens();
    rig.say(PREPARE, surveyed(survey()));
    rig.say(NETD, Up::Netd(FromNetd::ProposedSpan(span(0, 8))));
    rig.die(PREPARE, SIGKILL);
    assert_eq!(rig.spawned(), [(PREPARE, 2)]);
    assert_eq!(
        rig.told(PREPARE),
        [&Down::Init(Init::Prepare(vec![vec![Device::Cpu]])), &Down::Span(span(0, 8))]
    );
}

#[test]
fn a_model_that_does_not_fit_is_served_in_part() {
    let mut rig = Rig::new(1);
    let need = memory(None).need(&facts());
    rig.tree.policy.memory = memory(Some(need.fixed + 5 * (need.weights + need.kv)));
    rig.on(TreeEvent::Start);
    rig.say(PREPARE, surveyed(survey()));
    rig.netd_listens();
    assert_eq!(rig.told(NETD), [&model(Some(5))]);
}

#[test]
fn what_devices_hold_counts_once_however_often_prepare_tells() {
    let mut rig = Rig::new(1);
    rig.tree.policy.memory = memory(Some(u64::MAX));
    rig.tree.policy.memory.workers = 1;
    let device = |free_bytes| {
        let card = DeviceMemory { device: Device::Emulator(0), free_bytes, work_bytes: 0 };
        surveyed(Survey { devices: vec![card], ..survey() })
    };
    rig.on(TreeEvent::Start);
    rig.say(PREPARE, device(1 << 50));
    rig.say(PREPARE, device(1));
    assert_eq!(rig.tree.policy.memory.devices[0].free_bytes, 1 << 50);
    rig.netd_listens();
    assert_eq!(rig.told(NETD), [&model(None)]);
}

#[test]
fn blocks_that_do_not_fit_end_the_run_with_the_arithmetic() {
    let mut rig = Rig::new(1);
    rig.tree.policy.span = SpanChoice::Count(8);
    let need = memory(None).need(&facts());
    rig.tree.policy.memory = memory(Some(need.fixed + 5 * (need.weights + need.kv)));
    rig.on(TreeEvent::Start);
    rig.say(PREPARE, surveyed(survey()));
    let complaint = rig.complaints().join("");
    assert!(complaint.contains("5 would fit"), "{complaint}");
}
