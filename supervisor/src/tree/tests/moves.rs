//! Moves to other blocks: what serves is never touched before the new place is announced, whoever
//! dies when.

use super::*;

const TO: (u32, u32) = (4, 8);

impl Rig {
    /// Online with the first half of the model on each of `devices` devices together.
    fn online_at_half(devices: usize) -> Rig {
        let mut rig = Rig::new(devices);
        rig.on(TreeEvent::Start);
        rig.netd_listens();
        rig.say(PREPARE, surveyed(survey()));
        rig.say(NETD, Up::Netd(FromNetd::ProposedSpan(span(0, 4))));
        rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
        rig.die(PREPARE, ExitStatus::Code(0));
        (0..devices).for_each(|group| {
            rig.worker_ready(u16::try_from(group).unwrap());
        });
        rig.say(NETD, Up::Netd(FromNetd::Online));
        rig
    }

    fn netd_says(&mut self, message: FromNetd) -> &mut Rig {
        self.say(NETD, Up::Netd(message))
    }

    /// A move until the driver is asked for room.
    fn until_asked(&mut self) -> &mut Rig {
        self.netd_says(FromNetd::Move(span(TO.0, TO.1)));
        self.say(PREPARE, surveyed(survey()));
        self.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
        assert!(self.last.contains(&Action::AskRoom(span(TO.0, TO.1))));
        self.die(PREPARE, ExitStatus::Code(0))
    }

    /// A move until the new workers load.
    fn until_loading(&mut self) -> &mut Rig {
        self.until_asked().on(TreeEvent::Room(span(TO.0, TO.1), None))
    }

    fn dropped(&self) -> Vec<ChildId> {
        let of = |action: &Action| match action {
            Action::DropWorker(worker) => Some(ChildId::Worker(*worker)),
            _ => None,
        };
        self.last.iter().filter_map(of).collect()
    }

    fn failed_move(&self) -> bool {
        let told = self.told(NETD);
        told.iter().any(|down| matches!(down, Netd(ToNetd::MoveFailed { .. })))
    }

    /// What a new netd was told to serve, and what it may still serve for callers who have not
    /// heard of a move.
    fn places_told(&self) -> (Option<Span>, Vec<Span>) {
        let [Down::Init(Init::Netd { served, retired, .. })] = self.told(NETD)[..] else {
            panic!("{:?}", self.last)
        };
        (*served, retired.clone())
    }

    fn wanted(&self, id: ChildId) -> bool {
        self.tree.children().any(|child| child.id == id)
    }
}

#[test]
fn new_workers_start_beside_the_old_ones_which_go_when_their_sessions_are_over() {
    let mut rig = Rig::online_at_half(1);
    rig.netd_says(FromNetd::Move(span(4, 8)));
    assert_eq!(rig.spawned(), [(PREPARE, 2)]);
    assert_eq!(
        rig.told(PREPARE),
        [&Down::Init(Init::Prepare(vec![vec![Device::Cpu]])), &Down::Span(span(4, 8))]
    );
    rig.say(PREPARE, surveyed(survey()));
    rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
    rig.die(PREPARE, ExitStatus::Code(0));
    rig.on(TreeEvent::Room(span(4, 8), None));
    assert_eq!(rig.spawned(), [(worker(1), 1)]);
    let [Down::Init(Init::Worker { placement, whole, .. })] = rig.told(worker(1))[..] else {
        panic!("{:?}", rig.last)
    };
    assert_eq!((placement.span, *whole), (span(4, 8), span(4, 8)));
    rig.worker_ready(1);
    assert_eq!(rig.told(NETD).into_iter().filter(is_up).count(), 1);
    assert!(rig.killed().is_empty());
    rig.netd_says(FromNetd::Moved(span(4, 8)));
    assert!(
        rig.last
            .iter()
            .any(|action| matches!(action, Action::Online { span: s, .. } if *s == span(4, 8)))
    );
    assert!(rig.told(worker(0)).is_empty(), "its sessions go on");
    rig.netd_says(FromNetd::Vacated);
    assert_eq!(rig.told(worker(0)), [&Down::Drain]);
    rig.die(worker(0), ExitStatus::Code(0));
    assert_eq!(rig.dropped(), [worker(0)]);
    assert!(matches!(rig.told(NETD)[..], [Netd(ToNetd::WorkerDown { restarting: false, .. })]));
    assert!(!rig.wanted(worker(0)));
}

#[test]
fn a_second_move_uses_the_names_again_and_never_a_generation() {
    let mut rig = Rig::online_at_half(1);
    rig.until_loading().worker_ready(1);
    rig.netd_says(FromNetd::Moved(span(4, 8)));
    rig.netd_says(FromNetd::Move(span(0, 4)));
    assert!(rig.failed_move(), "while the old worker has sessions");
    rig.netd_says(FromNetd::Vacated);
    rig.die(worker(0), ExitStatus::Code(0));
    rig.netd_says(FromNetd::Move(span(2, 6)));
    rig.say(PREPARE, Up::Prepare(FromPrepare::Prepared));
    rig.die(PREPARE, ExitStatus::Code(0));
    rig.on(TreeEvent::Room(span(2, 6), None));
    assert_eq!(rig.spawned(), [(worker(0), 2)]);
}

#[test]
fn a_killed_new_worker_is_started_again_and_the_move_goes_on() {
    let mut rig = Rig::online_at_half(1);
    rig.until_loading().worker_ready(1);
    rig.die(worker(1), SIGKILL);
    assert_eq!(rig.spawned(), [(worker(1), 2)]);
    rig.worker_ready(1);
    assert_eq!(rig.told(NETD).into_iter().filter(is_up).count(), 1);
    rig.netd_says(FromNetd::Moved(span(4, 8)));
    assert_eq!(rig.tree.rest(), Some(span(4, 8)));
}

#[test]
fn new_workers_that_fail_for_good_leave_the_old_ones_serving() {
    let mut rig = Rig::online_at_half(2);
    rig.until_loading();
    assert_eq!(rig.spawned(), [(worker(2), 1), (worker(3), 1)]);
    let bad = ExitStatus::Code(i32::from(ExitReason::BadConfig.code()));
    rig.die(worker(2), bad);
    assert!(rig.failed_move());
    assert_eq!(rig.killed(), [worker(3)]);
    assert_eq!(rig.dropped(), [worker(2)]);
    rig.die(worker(3), SIGKILL);
    assert_eq!(rig.dropped(), [worker(3)]);
    assert!(rig.complaints().is_empty() && rig.finished().is_none());
    assert_eq!(rig.tree.rest(), Some(span(0, 4)));
    assert!(rig.netd_says(FromNetd::Moved(span(4, 8))).last.is_empty());
}

impl Rig {
    /// A move without room for both until the new workers load.
    fn until_replaced(&mut self) -> &mut Rig {
        self.until_asked();
        self.on(TreeEvent::Room(span(4, 8), Some("no memory".into())));
        assert_eq!(self.told(NETD), [&Netd(ToNetd::MakeRoom(span(4, 8)))]);
        assert!(self.spawned().is_empty());
        self.netd_says(FromNetd::Vacated);
        assert_eq!(self.told(worker(0)), [&Down::Drain]);
        assert!(self.spawned().is_empty());
        self.die(worker(0), ExitStatus::Code(0));
        assert_eq!((self.dropped(), self.spawned()), (vec![worker(0)], vec![(worker(0), 2)]));
        self
    }
}

#[test]
fn without_room_for_both_the_old_workers_end_before_the_new_ones_start() {
    let mut rig = Rig::online_at_half(1);
    rig.until_replaced().worker_ready(0);
    assert_eq!(rig.told(NETD).into_iter().filter(is_up).count(), 1);
    rig.netd_says(FromNetd::Online);
    assert_eq!(rig.tree.rest(), Some(span(4, 8)));
    let bad = ExitStatus::Code(i32::from(ExitReason::BadConfig.code()));
    rig.die(worker(0), bad);
    assert!(!rig.failed_move(), "it has served here");
}

#[test]
fn new_workers_that_fail_where_there_was_no_room_are_followed_by_the_old_ones() {
    let mut rig = Rig::online_at_half(1);
    rig.until_replaced();
    let bad = || ExitStatus::Code(i32::from(ExitReason::BadConfig.code()));
    rig.die(worker(0), bad());
    assert!(rig.failed_move() && rig.finished().is_none());
    assert_eq!(rig.spawned(), [(worker(0), 3)]);
    rig.worker_ready(0);
    rig.netd_says(FromNetd::Online);
    assert_eq!(rig.tree.rest(), Some(span(0, 4)));
    rig.die(worker(0), bad());
    assert!(rig.told(NETD).contains(&&Down::Drain), "there is nothing to go back to");
}

#[test]
fn netd_that_dies_while_workers_are_replaced_is_told_the_new_place() {
    let mut rig = Rig::online_at_half(1);
    rig.until_asked();
    rig.on(TreeEvent::Room(span(4, 8), Some("no memory".into())));
    rig.netd_says(FromNetd::Vacated);
    rig.die(NETD, SIGKILL);
    assert_eq!(rig.places_told(), (Some(span(4, 8)), vec![span(0, 4)]));
    assert_eq!(rig.die(worker(0), SIGKILL).spawned(), [(worker(0), 2)]);
}

#[test]
fn a_move_to_blocks_that_cannot_be_prepared_is_off() {
    let mut rig = Rig::online_at_half(1);
    rig.netd_says(FromNetd::Move(span(4, 8)));
    rig.die(PREPARE, ExitStatus::Code(i32::from(ExitReason::BadConfig.code())));
    assert!(rig.failed_move());
    assert_eq!(rig.state(PREPARE), Lifecycle::Gone);
    assert!(rig.netd_says(FromNetd::Move(span(6, 9))).failed_move());
    assert!(rig.finished().is_none());
}

#[test]
fn an_old_worker_that_dies_during_the_move_is_started_again_before_and_after_it() {
    let mut rig = Rig::online_at_half(1);
    rig.until_loading();
    assert_eq!(rig.die(worker(0), SIGKILL).spawned(), [(worker(0), 2)]);
    rig.worker_ready(0).worker_ready(1);
    rig.netd_says(FromNetd::Moved(span(4, 8)));
    assert_eq!(rig.die(worker(0), SIGKILL).spawned(), [(worker(0), 3)]);
    rig.netd_says(FromNetd::Vacated);
    assert_eq!(rig.killed(), [worker(0)], "it was only starting");
    assert!(rig.die(worker(0), SIGKILL).spawned().is_empty());
}

#[test]
fn netd_that_dies_before_the_new_place_is_announced_serves_the_old_one() {
    let mut rig = Rig::online_at_half(1);
    rig.until_loading().worker_ready(1);
    rig.die(NETD, SIGKILL);
    assert_eq!(rig.places_told(), (Some(span(0, 4)), vec![span(4, 8)]));
    assert!(rig.told(worker(1)).contains(&&Down::Drain));
}

#[test]
fn netd_that_dies_after_the_new_place_is_announced_serves_the_new_one() {
    let mut rig = Rig::online_at_half(1);
    rig.until_loading().worker_ready(1);
    rig.netd_says(FromNetd::Moved(span(4, 8)));
    rig.die(NETD, SIGKILL);
    assert_eq!(rig.places_told(), (Some(span(4, 8)), vec![span(0, 4)]));
    assert!(rig.told(worker(0)).contains(&&Down::Drain), "its sessions are gone");
    assert!(!rig.told(worker(0)).iter().any(|down| matches!(down, Down::Link { .. })));
}

#[test]
fn netd_may_think_better_of_a_move() {
    let mut rig = Rig::online_at_half(1);
    rig.until_loading().worker_ready(1);
    rig.netd_says(FromNetd::Stays);
    assert_eq!(rig.told(worker(1)), [&Down::Drain]);
    assert!(!rig.failed_move());
    assert_eq!(rig.tree.rest(), Some(span(0, 4)));
}

#[test]
fn a_stop_during_a_move_ends_everything() {
    let mut rig = Rig::online_at_half(1);
    rig.until_loading().worker_ready(1);
    rig.on(TreeEvent::Stop);
    rig.die(NETD, ExitStatus::Code(0));
    assert_eq!(rig.told(worker(1)), [&Down::Drain]);
    rig.die(worker(0), ExitStatus::Code(0));
    assert_eq!(rig.die(worker(1), ExitStatus::Code(0)).finished(), Some(ExitReason::Clean));
}
