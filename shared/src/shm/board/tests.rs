use std::sync::atomic::AtomicBool;
use std::thread;

use super::super::layout::{COVERED_BLOCKS, SESSION_ROWS, STEP_PARTS};
use super::*;
use crate::job::WorkKind;

const WORKER: Occupant = Occupant {
    role: Role::Worker,
    generation: Generation(3),
    worker: Some(WorkerId { group: GroupId(1), rank: Rank(2), world_size: WorldSize(4) }),
};
const NETD: Occupant = Occupant { role: Role::Netd, generation: Generation(1), worker: None };

const SESSION: SessionShape =
    SessionShape { number: 7, first_block: 4, blocks: 8, rows: 2, max_length: 128 };

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
    worker.job_done(WorkKind::Decode, 1, 10, 200);
    worker.job_done(WorkKind::Prefill, 8, 20, 300);
    worker.decoded(1);
    worker.decoded(65);
    let device = DeviceFigures { memory: Some((3, 4)), celsius: Some(0), milliwatts: None };
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
    assert_eq!((netd.net_port, netd.sessions_open, netd.kv_tokens_free), (Some(31330), 7, 4096));
    assert_eq!((netd.state, netd.phase), (ChildState::Starting, Phase::Reactor));
    assert_eq!(netd.troubles, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(worker.troubles, [0; 10]);
    assert_eq!((worker.slot, worker.generation, worker.pid), (5, Generation(3), 4321));
    assert_eq!((worker.worker, worker.span), (WORKER.worker, Span::new(4, 12).ok()));
    assert_eq!((worker.state, worker.phase, worker.progress), (ChildState::Ready, Phase::Unit, 2));
    assert_eq!(worker.phase_limit, Duration::from_millis(1500));
    assert!((before..=monotonic_ns()).contains(&worker.phase_started_ns));
    let all = worker.work.all();
    assert_eq!(
        (all.jobs, all.tokens, all.queued.as_nanos(), all.computed.as_nanos()),
        (2, 9, 30, 500)
    );
    assert_eq!(worker.work.kinds[WorkKind::Prefill as usize].tokens, 8);
    assert_eq!((worker.work.batches, worker.work.batch_rows), ([1, 0, 0, 0, 0, 0, 0, 1], 66));
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
    seat.open_session(0, &SESSION);
    seat.set_figures(&NetdFigures { peers: 3, ..NetdFigures::default() });
    seat.set_coverage(&[BlockCoverage::default(); 3]);
    seat.set_peer_id("peer").unwrap();
    seat.set_net_port(1);

    board.assign(1, &Occupant { generation: Generation(2), ..NETD }).unwrap();

    let child = board.view().child_snapshot(1).unwrap();
    assert_eq!((child.generation, child.pid, child.span), (Generation(2), 0, None));
    assert_eq!(
        (child.phase, child.progress, child.work),
        (Phase::Idle, 0, WorkSnapshot::default())
    );
    assert_eq!(board.view().netd(), NetdSnapshot::default());
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
        let netd = &board.view.layout().netd;
        let figures = &netd.figures;
        let figures = [
            &figures.announced_state,
            &figures.announced_blocks,
            &figures.throughput,
            &figures.model_blocks,
            &figures.covered_ns,
            &child.work.kelvin,
        ];
        let session = &netd.sessions[3];
        let session = [&session.number, &session.started_ns, &session.blocks, &session.length];
        let netd = figures.into_iter().chain(session).chain(&netd.coverage);
        for word in words.into_iter().chain(rest).chain(text).chain(netd) {
            word.store(filler, Ordering::Relaxed);
        }

        let snapshot = board.view().child_snapshot(0).unwrap();

        assert_eq!(
            (snapshot.role, snapshot.phase, snapshot.state),
            (None, Phase::Unknown, ChildState::Unknown)
        );
        assert_eq!((snapshot.span, snapshot.peer_id), (None, None));
        let netd = board.view().netd();
        assert_eq!((netd.sessions.len(), netd.figures.announced.state), (1, Announcement::Nothing));
        assert!(netd.figures.announced.throughput.is_finite());
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

#[test]
fn sessions_figures_and_the_swarm_are_read_as_netd_shows_them() {
    let board = Board::create("demo", 0).unwrap();
    board.assign(0, &NETD).unwrap();
    let netd = writer(&board, 0, 1).unwrap();
    netd.open_session(SESSION_ROWS - 1, &SESSION);
    netd.stepped(SESSION_ROWS - 1, 9, 2);
    netd.set_rate(SESSION_ROWS - 1, 1500);
    netd.open_session(0, &SessionShape { number: 8, ..SESSION });
    // There is no such row: nothing happens.
    netd.open_session(SESSION_ROWS, &SESSION);
    let quantiles = Quantiles { p50: Duration::from_millis(3), p99: Duration::from_millis(5) };
    let announced = Announced {
        state: Announcement::Online,
        span: Span::new(4, 12).ok(),
        throughput: 12.5,
        ..Announced::default()
    };
    let minute = Minute { steps: 5, quantiles: [quantiles; STEP_PARTS], ..Minute::default() };
    let figures = NetdFigures { minute, announced, peers: 3, ..NetdFigures::default() };
    netd.set_figures(&figures);
    netd.set_coverage(&[BlockCoverage { servers: 2, throughput: 1.5 }; 300]);
    assert_eq!(netd.viewed_ago(), None);
    board.viewed();
    assert!(netd.viewed_ago().is_some());

    let shown = board.view().netd();

    assert_eq!(shown.figures, figures);
    let [old, new] = shown.sessions[..] else { panic!("{:?}", shown.sessions) };
    assert_eq!((old.shape, old.length, old.steps, old.rate_milli), (SESSION, 9, 2, 1500));
    assert_eq!((new.shape.number, new.length), (8, 0));
    assert_eq!(
        shown.coverage.blocks,
        [BlockCoverage { servers: 2, throughput: 1.5 }; COVERED_BLOCKS]
    );
    netd.close_session(0);
    netd.close_session(SESSION_ROWS - 1);
    assert_eq!(board.view().netd().sessions, []);
}

#[test]
fn restarts_are_counted_by_role_and_reason_over_all_children() {
    let board = Board::create("demo", 0).unwrap();
    board.count_restart(Role::Worker, RestartReason::Signal);
    board.count_restart(Role::Worker, RestartReason::Signal);
    board.count_restart(Role::Netd, RestartReason::Hang);
    board.assign(5, &WORKER).unwrap();
    let restarts = board.view().snapshot().restarts;
    assert_eq!(restarts.of(Role::Worker, RestartReason::Signal), 2);
    assert_eq!(restarts.of(Role::Netd, RestartReason::Hang), 1);
    assert_eq!(restarts.of(Role::Netd, RestartReason::Signal), 0);
}

#[test]
fn a_session_row_never_mixes_two_sessions() {
    const SESSIONS: u32 = 5_000;
    let board = Board::create("demo", 0).unwrap();
    board.assign(0, &NETD).unwrap();
    let netd = writer(&board, 0, 1).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                for session in board.view().netd().sessions {
                    let shape = session.shape;
                    assert_eq!(
                        (u64::from(shape.rows), u64::from(shape.blocks)),
                        (shape.number, shape.number)
                    );
                }
            }
        });
        for number in 1..=SESSIONS {
            netd.open_session(
                0,
                &SessionShape { number: number.into(), rows: number, blocks: number, ..SESSION },
            );
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
