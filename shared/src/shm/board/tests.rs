use std::sync::atomic::AtomicBool;
use std::thread;

use super::*;
use crate::figures::server::{DeviceFigures, Micros, WorkFigures};
use crate::figures::{Figures, MAX_SESSIONS, SessionFigures};
use crate::job::WorkKind;

const WORKER: Occupant = Occupant {
    role: Role::Worker,
    generation: Generation(3),
    worker: Some(WorkerId { group: GroupId(1), rank: Rank(2), world_size: WorldSize(4) }),
};
const NETD: Occupant = Occupant { role: Role::Netd, generation: Generation(1), worker: None };

fn writer(board: &Board, slot: u32, generation: u32) -> Result<BoardWriter, BoardError> {
    let seat = BoardSeat { slot, heartbeat: Duration::from_millis(100) };
    BoardWriter::open(board.try_clone().unwrap(), &seat, Generation(generation))
}

#[test]
fn what_supervisor_and_children_write_everybody_reads() {
    let board = Board::create("demo", 1_700_000_000).unwrap();
    board.assign(0, &NETD).unwrap();
    board.assign(5, &WORKER).unwrap();
    board.set_pid(5, 4321).unwrap();
    board.set_state(5, ChildState::Ready).unwrap();
    board.set_span(5, Span::new(4, 12).unwrap()).unwrap();
    let netd = writer(&board, 0, 1).unwrap();
    netd.enter(Phase::Reactor, Duration::from_secs(1));
    netd.set_peer_id("12D3KooWExampleExampleExampleExampleExampleExampleEx").unwrap();
    netd.set_net_port(31330);
    let worker = writer(&board, 5, 3).unwrap();
    let before = monotonic_ns();
    worker.enter(Phase::Unit, Duration::from_millis(1500));
    worker.progress();
    worker.job_done(WorkKind::Decode, 1, 10_000, 200_000);
    worker.job_done(WorkKind::Prefill, 8, 20_000, 300_000);
    worker.decoded(1);
    worker.decoded(65);
    let device = DeviceFigures {
        memory_used: Some(3),
        memory_total: Some(4),
        celsius: Some(0),
        watts: Some(240.5),
    };
    worker.set_device(&device);

    let snapshot = BoardView::open(board.try_clone().unwrap()).unwrap().snapshot();

    assert_eq!((snapshot.instance.as_str(), snapshot.started_unix_s), ("demo", 1_700_000_000));
    assert_eq!(snapshot.supervisor_pid, std::process::id());
    let [netd, worker] = &snapshot.children[..] else { panic!("{:?}", snapshot.children) };
    assert_eq!((netd.slot, netd.role, netd.worker, netd.span), (0, Some(Role::Netd), None, None));
    assert_eq!(
        netd.peer_id.as_deref(),
        Some("12D3KooWExampleExampleExampleExampleExampleExampleEx")
    );
    assert_eq!(netd.net_port, Some(31330));
    assert_eq!((netd.state, netd.phase), (ChildState::Starting, Phase::Reactor));
    assert_eq!((worker.slot, worker.generation, worker.pid), (5, Generation(3), 4321));
    assert_eq!((worker.worker, worker.span), (WORKER.worker, Span::new(4, 12).ok()));
    assert_eq!((worker.state, worker.phase, worker.progress), (ChildState::Ready, Phase::Unit, 2));
    assert_eq!(worker.phase_limit, Duration::from_millis(1500));
    assert!((before..=monotonic_ns()).contains(&worker.phase_started_ns));
    let all = WorkFigures { jobs: 2, tokens: 9, queued_us: Micros(30), computed_us: Micros(500) };
    assert_eq!(worker.work.all(), all);
    assert_eq!(worker.work.kinds[&WorkKind::Prefill].tokens, 8);
    let batches = worker.work.batches.unwrap();
    assert_eq!((batches.units, batches.rows), ([1, 0, 0, 0, 0, 0, 0, 1], 66));
    assert_eq!(worker.work.device, device);
}

#[test]
fn a_new_occupant_starts_from_nothing() {
    let board = Board::create("demo", 0).unwrap();
    board.assign(1, &NETD).unwrap();
    board.set_pid(1, 99).unwrap();
    board.set_span(1, Span::new(0, 2).unwrap()).unwrap();
    let seat = writer(&board, 1, 1).unwrap();
    seat.enter(Phase::Reactor, Duration::from_secs(1));
    seat.job_done(WorkKind::Decode, 1, 1, 1);
    seat.decoded(1);
    seat.set_figures(&Figures { peers: 3, ..Figures::default() }).unwrap();
    seat.set_peer_id("peer").unwrap();
    seat.set_net_port(1);

    board.assign(1, &Occupant { generation: Generation(2), ..NETD }).unwrap();

    let child = board.view().child_snapshot(1).unwrap();
    assert_eq!((child.generation, child.pid, child.span), (Generation(2), 0, None));
    assert_eq!((child.phase, child.progress), (Phase::Idle, 0));
    assert_eq!(child.work.all(), WorkFigures::default());
    assert_eq!(child.work.batches.unwrap().all_units(), 0);
    assert_eq!(child.work.device, DeviceFigures::default());
    assert_eq!(board.view().figures(), Some(Figures::default()));
    assert_eq!((child.peer_id, child.net_port), (None, None));
    board.vacate(1).unwrap();
    assert_eq!(board.view().child_snapshot(1), None);
}

#[test]
fn stale_children_and_missing_slots_are_refused() {
    let board = Board::create("demo", 0).unwrap();
    board.assign(0, &WORKER).unwrap();

    let stale = writer(&board, 0, 2).unwrap_err();
    assert!(matches!(stale, BoardError::Stale { found: Generation(3), .. }), "{stale}");
    assert!(matches!(board.assign(32, &WORKER), Err(BoardError::NoSlot(32))));
    assert!(matches!(writer(&board, 32, 1), Err(BoardError::NoSlot(32))));
    assert_eq!(board.view().child_snapshot(32), None);
}

#[test]
fn texts_are_bounded() {
    let long = "x".repeat(TEXT_BYTES + 1);
    assert!(matches!(Board::create(&long, 0), Err(BoardError::LongText(65))));
    let board = Board::create(&long[1..], 0).unwrap();
    assert_eq!(board.view().snapshot().instance, long[1..]);
}

#[test]
fn a_segment_with_something_else_is_no_board() {
    let segment = SmallSegment::create(BOARD_NAME, BOARD_BYTES).unwrap();
    let opened = BoardView::open(segment.try_clone().unwrap());
    assert!(matches!(opened, Err(BoardError::NoBoard { magic: 0, .. })));
}

#[test]
fn any_bytes_on_the_board_can_be_read() {
    let board = Board::create("demo", 0).unwrap();
    for filler in [u64::MAX, 65, 1 << 40, 0x8080_8080_8080_8080] {
        board.assign(0, &WORKER).unwrap();
        let child = board.view.child(0).unwrap();
        let (seat, report) = (&child.seat, &child.report);
        let words = [&seat.role, &seat.pid, &seat.state, &seat.group, &seat.rank, &seat.world_size];
        let rest = [
            &seat.span_start,
            &seat.span_end,
            &report.phase,
            &report.net_port,
            &report.phase_limit_ms,
        ];
        let text = report.peer_id.words.iter().chain([&report.peer_id.len]);
        let work = [&child.work.kelvin, &child.work.kinds[0].jobs, &child.work.batches[0]];
        for word in words.into_iter().chain(rest).chain(text).chain(work) {
            word.store(filler, Ordering::Relaxed);
        }

        let snapshot = board.view().child_snapshot(0).unwrap();

        assert_eq!(
            (snapshot.role, snapshot.phase, snapshot.state),
            (None, Phase::Unknown, ChildState::Unknown)
        );
        assert_eq!((snapshot.span, snapshot.peer_id), (None, None));
    }
}

#[test]
fn a_snapshot_never_mixes_generations() {
    const GENERATIONS: u32 = 5_000;
    let board = Board::create("demo", 0).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut seen = 0_u32;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                if let Some(child) = board.view().child_snapshot(0) {
                    let rank = child.worker.expect("every generation is a worker").rank;
                    assert_eq!(u32::from(rank.0), child.generation.0);
                    seen += 1;
                }
            }
            seen
        });
        for generation in 1..=GENERATIONS {
            let rank = Rank(u16::try_from(generation).unwrap());
            let worker = WorkerId { group: GroupId(0), rank, world_size: WorldSize(1) };
            let occupant = Occupant {
                generation: Generation(generation),
                worker: Some(worker),
                role: Role::Worker,
            };
            board.assign(0, &occupant).unwrap();
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        reading.join().unwrap();
    });
    assert_eq!(board.view().child_snapshot(0).unwrap().generation, Generation(GENERATIONS));
}

/// A board whose netd shows that it has so many peers.
fn board_of_netd(peers: u64) -> (Board, BoardWriter) {
    let board = Board::create("demo", 0).unwrap();
    board.assign(0, &NETD).unwrap();
    let netd = writer(&board, 0, 1).unwrap();
    netd.set_figures(&Figures { peers, ..Figures::default() }).unwrap();
    (board, netd)
}

#[test]
fn figures_are_read_as_netd_shows_them_while_it_runs() {
    let (board, netd) = board_of_netd(3);
    assert_eq!(netd.viewed_ago(), None);
    board.viewed();
    assert!(netd.viewed_ago().is_some());
    assert_eq!(board.view().figures().unwrap().peers, 3);
    for state in [ChildState::Ready, ChildState::Draining] {
        board.set_state(0, state).unwrap();
        assert_eq!(board.view().snapshot().figures.peers, 3, "{state:?}");
    }
    for state in [ChildState::Unset, ChildState::Backoff, ChildState::Held, ChildState::Gone] {
        board.set_state(0, state).unwrap();
        assert_eq!(board.view().snapshot().figures, Figures::default(), "{state:?}");
    }
    board.set_state(0, ChildState::Ready).unwrap();
    board.vacate(0).unwrap();
    assert_eq!(board.view().figures(), None);
    // A worker that shows some is no netd.
    board.assign(0, &WORKER).unwrap();
    assert_eq!(board.view().figures(), None);
}

#[test]
fn figures_that_cannot_be_read_are_those_before_of_the_same_netd() {
    let (board, netd) = board_of_netd(3);
    assert_eq!(board.view().figures().unwrap().peers, 3);
    let figures = &board.view().layout().figures;
    let session = SessionFigures::default();
    let many = Figures { sessions: vec![session; MAX_SESSIONS + 1], ..Figures::default() };
    for bad in [b"{\"peers\": -1}".to_vec(), b"[".repeat(60_000), vec![0xff; 99], many.encode()] {
        figures.write(&bad).unwrap();
        assert_eq!(board.view().figures().unwrap().peers, 3);
    }
    // It died, or was stopped, while it wrote.
    figures.sequence.store(7, Ordering::Relaxed);
    assert_eq!(board.view().figures().unwrap().peers, 3);
    netd.set_figures(&Figures { peers: 5, ..Figures::default() }).unwrap();
    assert_eq!(board.view().figures().unwrap().peers, 5);
    // The next netd has not shown any.
    figures.sequence.store(9, Ordering::Relaxed);
    board.assign(0, &Occupant { generation: Generation(2), ..NETD }).unwrap();
    assert_eq!(board.view().figures(), Some(Figures::default()));
}

#[test]
fn what_netd_cannot_know_the_supervisor_tells() {
    let (board, netd) = board_of_netd(3);
    let lies = Some("http://elsewhere/".to_owned());
    let restarts = board.view().restarts();
    assert_eq!(restarts.len(), 24);
    let figures = Figures { metrics: lies.clone(), web: lies, restarts, ..Figures::default() };
    netd.set_figures(&figures).unwrap();
    assert_eq!(board.view().snapshot().figures, Figures::default());
}

#[test]
fn restarts_are_counted_by_role_and_reason_over_all_children() {
    let board = Board::create("demo", 0).unwrap();
    board.count_restart(Role::Worker, RestartReason::Signal);
    board.count_restart(Role::Worker, RestartReason::Signal);
    board.count_restart(Role::Netd, RestartReason::Hang);
    board.assign(5, &WORKER).unwrap();
    let of = |role: &str, reason: &str| {
        let all = board.view().restarts();
        all.into_iter().find(|of| of.role == role && of.reason == reason).unwrap().count
    };
    let [worker, netd] = [Role::Worker.name(), Role::Netd.name()];
    assert_eq!((of(worker, "signal"), of(netd, "hang"), of(netd, "signal")), (2, 1, 0));
    let shown = board.view().snapshot().figures.restarts;
    assert_eq!(shown.iter().map(|of| of.count).collect::<Vec<_>>(), [1, 2]);
    let figures = board.view().server_figures();
    assert_eq!(figures.restarts.len(), 24);
    assert!(figures.workers.contains_key(&WORKER.worker.unwrap()));
}
