use std::sync::atomic::AtomicBool;
use std::thread;

use super::*;

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
    netd.set_sessions_open(7);
    netd.set_kv_tokens_free(4096);
    netd.set_troubles([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    let worker = writer(&board, 5, 3).unwrap();
    let before = monotonic_ns();
    worker.enter(Phase::Unit, Duration::from_millis(1500));
    worker.progress();
    worker.job_done(10, 200);
    worker.job_done(20, 300);

    let snapshot = BoardView::open(board.try_clone().unwrap()).unwrap().snapshot();

    assert_eq!((snapshot.instance.as_str(), snapshot.started_unix_s), ("demo", 1_700_000_000));
    assert_eq!(snapshot.supervisor_pid, std::process::id());
    let [netd, worker] = &snapshot.children[..] else { panic!("{:?}", snapshot.children) };
    assert_eq!((netd.slot, netd.role, netd.worker, netd.span), (0, Some(Role::Netd), None, None));
    assert_eq!(
        netd.peer_id.as_deref(),
        Some("12D3KooWExampleExampleExampleExampleExampleExampleEx")
    );
    assert_eq!((netd.net_port, netd.sessions_open, netd.kv_tokens_free), (Some(31330), 7, 4096));
    assert_eq!((netd.state, netd.phase), (ChildState::Starting, Phase::Reactor));
    assert_eq!(netd.troubles, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(worker.troubles, [0; 10]);
    assert_eq!((worker.slot, worker.generation, worker.pid), (5, Generation(3), 4321));
    assert_eq!((worker.worker, worker.span), (WORKER.worker, Span::new(4, 12).ok()));
    assert_eq!((worker.state, worker.phase, worker.progress), (ChildState::Ready, Phase::Unit, 2));
    assert_eq!(worker.phase_limit, Duration::from_millis(1500));
    assert!((before..=monotonic_ns()).contains(&worker.phase_started_ns));
    assert_eq!(
        (worker.jobs_done, worker.queued.as_nanos(), worker.computed.as_nanos()),
        (2, 30, 500)
    );
}

#[test]
fn a_new_occupant_starts_from_nothing() {
    let board = Board::create("demo", 0).unwrap();
    board.assign(1, &NETD).unwrap();
    board.set_pid(1, 99).unwrap();
    board.set_span(1, Span::new(0, 2).unwrap()).unwrap();
    let seat = writer(&board, 1, 1).unwrap();
    seat.enter(Phase::Reactor, Duration::from_secs(1));
    seat.job_done(1, 1);
    seat.set_peer_id("peer").unwrap();
    seat.set_net_port(1);

    board.assign(1, &Occupant { generation: Generation(2), ..NETD }).unwrap();

    let child = board.view().child_snapshot(1).unwrap();
    assert_eq!((child.generation, child.pid, child.span), (Generation(2), 0, None));
    assert_eq!((child.phase, child.progress, child.jobs_done), (Phase::Idle, 0, 0));
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
        for word in words.into_iter().chain(rest).chain(text) {
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
