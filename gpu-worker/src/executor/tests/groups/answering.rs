//! When rank 0 answers: after every rank is done, and without holding up what comes next. The other
//! rank is the test, which reads the plan log by hand.

use shared::shm::group::PlanPosition;

use super::*;
use crate::executor::plan_record::{self, Record};
use crate::schedule::JobKey;

/// Runs `client` against rank 0 of a group of two.
fn with_rank_0<Out>(
    model: &Model,
    kv: &MemfdSegment,
    log_bytes: usize,
    client: impl FnOnce(&mut Netd, &Controls<'_>, &mut PlanReader) -> Out,
) -> (Exit, Out) {
    let parts = Parts::new(2, log_bytes);
    let link = LinkParts::new(FIRST, FIRST);
    let mut reader = parts.reader(1, &board());
    thread::scope(|scope| {
        let (rank_0, inbox) = sync_channel(8);
        let executor = scope.spawn(|| run_rank_0(model, kv, Some(&parts), &{ inbox }));
        let bell = another(&link.submission_bell);
        let (_, acknowledged) = sync_channel(1);
        let followers = Vec::new();
        let controls = Controls { rank_0, followers, acknowledged, bell, parts: &parts };
        controls.link(&link);
        let _thread = controls.rank_0.clone();
        let out = client(&mut Netd::of(link), &controls, &mut reader);
        drop(controls);
        // Whatever is left is done with, up to the end.
        let mut record = Vec::new();
        while !executor.is_finished() {
            if let Ok(Some(position)) = reader.next(&mut record, Duration::from_millis(1)) {
                reader.done(position).unwrap();
            }
        }
        (executor.join().unwrap(), out)
    })
}

/// The next record.
fn read<'a>(reader: &mut PlanReader, bytes: &'a mut Vec<u8>) -> (Record<'a>, PlanPosition) {
    let start = Instant::now();
    let position = loop {
        assert!(start.elapsed() < DEADLINE, "no record");
        if let Some(position) = reader.next(bytes, DEADLINE).unwrap() {
            break position;
        }
    };
    (Record::decode(bytes).unwrap(), position)
}

/// Where the last unit of a forward of one unit per block ends, whose records come next.
fn read_forward(reader: &mut PlanReader, key: u64) -> PlanPosition {
    let mut bytes = Vec::new();
    let (begin, _) = read(reader, &mut bytes);
    assert!(matches!(begin, Record::Begin(begin) if begin.key == JobKey(key)));
    let mut last = None;
    for block in 0..BLOCKS {
        let (unit, position) = read(reader, &mut bytes);
        let Record::Unit(unit) = unit else { panic!("{unit:?}") };
        assert_eq!((unit.block, unit.count, unit.members.len()), (block, 1, 1));
        assert_eq!(unit.members[0].job, JobKey(key));
        last = Some(position);
    }
    last.unwrap()
}

#[test]
fn answers_wait_for_the_slowest_rank_and_hold_up_no_unit() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    let kv = kv_segment(model.facts());
    let (end, ()) = with_rank_0(&model, &kv, PLAN_LOG_BYTES, |netd, controls, reader| {
        let forward = |netd: &mut Netd, seed| {
            let body = netd.job(WorkKind::Forward, &limits, 1, &input(2, seed));
            netd.submit(&body)
        };
        assert_eq!(read(reader, &mut Vec::new()).0, Record::Link { netd_generation: FIRST });
        let one = forward(netd, 1);
        let done_one = read_forward(reader, 0);
        controls.parts.until_rank_0_waits();
        assert!(netd.next(Duration::ZERO).is_none(), "answered before rank 1 was done");
        // Rank 0 sleeps, and wakes for the next job while the first is not answered.
        let two = forward(netd, 2);
        let done_two = read_forward(reader, 1);
        assert!(netd.next(Duration::from_millis(20)).is_none(), "answered before rank 1 was done");
        reader.done(done_one).unwrap();
        assert_eq!(netd.next(DEADLINE).unwrap().id, one);
        assert!(netd.next(Duration::from_millis(20)).is_none(), "answered before rank 1 was done");
        // A refusal keeps its place behind the answers before it.
        let mut refused = netd.job(WorkKind::Forward, &limits, 1, &input(2, 3));
        refused.hidden = 65;
        let three = netd.submit(&refused);
        assert!(netd.next(Duration::from_millis(20)).is_none());
        reader.done(done_two).unwrap();
        assert_eq!([(); 2].map(|()| netd.next(DEADLINE).unwrap().id), [two, three]);
    });
    assert_eq!(end, Exit::clean());
}

#[test]
fn a_job_that_cannot_begin_is_dropped_everywhere_before_it_is_refused() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    let (parts, link) = (Parts::new(2, PLAN_LOG_BYTES), LinkParts::new(FIRST, FIRST));
    let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
    let kvs = kv_segments(&model, 2);
    let (board, faults) = (board(), Faults::new(None, FIRST));
    let (plans, reader) = (parts.writer(&board), parts.reader(1, &board));
    let mut hand = parts.reader(1, &board);
    let mut rank_0 =
        Executor::new(engine(&model, &weights, &kvs[0]), limits, faults, Arc::clone(&board))
            .publishing(plans);
    let mut rank_1 =
        Follower::new(engine(&model, &weights, &kvs[1]), limits, faults, board, reader);
    let mut rings = open(&link);
    rank_0.link(&rings).unwrap();
    rank_1.link(&arena_link(&link));
    let mut netd = Netd::of(link);
    // As if the arena were larger than it is.
    (rank_0.limits.arena_bytes, rank_1.limits.arena_bytes) = (8 << 20, 8 << 20);
    let mut body = netd.job(WorkKind::Forward, &limits, 1, &input(2, 1));
    body.input.offset = 5 << 20;
    let refused = JobError::BadSlot { offset: 5 << 20, len: body.input.len };
    let id = netd.submit(&body);

    rank_0.take_jobs(&mut rings).unwrap();
    let unit = rank_0.plan_unit(&rings).unwrap().unwrap();
    rank_0.run_unit(&mut rings, &unit).unwrap();

    let mut bytes = Vec::new();
    assert_eq!(read(&mut hand, &mut bytes).0, Record::Link { netd_generation: FIRST });
    let (begin, _) = read(&mut hand, &mut bytes);
    rank_1.follow(&begin).unwrap();
    assert!(rank_1.follow(&Record::Unit(unit)).is_err(), "it has not begun");
    let (drop, position) = read(&mut hand, &mut bytes);
    assert_eq!(drop, Record::Drop(JobKey(0)));
    rank_1.follow(&drop).unwrap();
    assert!(rank_1.follow(&drop).is_err(), "it is gone");
    rank_0.post_answers(&mut rings).unwrap();
    assert!(netd.next(Duration::ZERO).is_none(), "refused before rank 1 was done");
    hand.done(position).unwrap();
    rank_0.post_answers(&mut rings).unwrap();
    assert_eq!(netd.answer(id), Err(refused));
    assert!(rank_0.plan_unit(&rings).unwrap().is_none(), "the job is forgotten");
}

#[test]
fn the_longest_body_fits_the_log() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    let parts = Parts::new(2, PLAN_LOG_BYTES);
    let netd = Netd::of(LinkParts::new(FIRST, FIRST));
    let mut body = netd.job(WorkKind::Decode, &limits, 1, &input(1, 1));
    let fixed = body.encode().len();
    body.pages.tables = vec![vec![PageId(0); (shared::job::MAX_BODY_BYTES - fixed) / 4]];
    let mut bytes = Vec::new();
    plan_record::begin(JobKey(0), 0, JobId(0), &body, &mut bytes);
    assert!(bytes.len() > shared::job::MAX_BODY_BYTES);
    parts.writer(&board()).publish(&bytes).unwrap();
}

#[test]
fn an_abort_ends_rank_0_wherever_it_waits() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    let submit = |netd: &mut Netd, seed| {
        let body = netd.job(WorkKind::Forward, &limits, 1, &input(2, seed));
        netd.submit(&body);
    };
    type Client<'a> = &'a dyn Fn(&mut Netd, &Controls<'_>);
    let points: [(&str, usize, Client<'_>); 3] = [
        ("idle on its ring", PLAN_LOG_BYTES, &|_, _| ()),
        ("for rank 1 to be done", PLAN_LOG_BYTES, &|netd, controls| {
            submit(netd, 1);
            controls.parts.until_rank_0_waits();
        }),
        ("for room in the log", 512, &|netd, controls| {
            (0..20).for_each(|seed| submit(netd, seed));
            controls.parts.until_rank_0_waits();
        }),
    ];
    for (point, log_bytes, client) in points {
        let kv = kv_segment(model.facts());
        let (end, ()) = with_rank_0(&model, &kv, log_bytes, |netd, controls, reader| {
            let (_, position) = read(reader, &mut Vec::new());
            reader.done(position).unwrap();
            client(netd, controls);
            controls.parts.group.abort().unwrap();
        });
        assert_eq!(end.reason, ExitReason::GroupAborted, "{point}");
        assert_eq!(end.message, "another worker of the group died or hung", "{point}");
    }
}

#[test]
fn an_abort_ends_rank_0_that_has_no_link() {
    let model = Model::new(DType::F32);
    let (parts, kv) = (Parts::new(2, PLAN_LOG_BYTES), kv_segment(model.facts()));
    parts.group.abort().unwrap();
    let (_commands, inbox) = sync_channel(8);
    let end = run_rank_0(&model, &kv, Some(&parts), &inbox);
    assert_eq!(end.reason, ExitReason::GroupAborted);
}
