//! What planning for other ranks costs, and what it costs a worker that has none.

use super::*;
use crate::schedule::{JobKey, Unit, UnitMember};

const STEPS: usize = 2000;

/// Nanoseconds of what the executor does beyond its work for a decode step of one unit.
fn bookkeeping(publisher: &mut Publisher, mut done: impl FnMut(), body: &JobBody) -> u128 {
    let member = UnitMember { job: JobKey(0), position: 0, pieces: 0..1 };
    let unit = Unit { block: 0, count: 1, members: vec![member] };
    let mut times: Vec<_> = (0..STEPS as u64)
        .map(|number| {
            let start = Instant::now();
            publisher.begin(JobKey(number), number, JobId(number), body).unwrap();
            publisher.unit(&unit).unwrap();
            publisher.check_abort().unwrap();
            let until = std::hint::black_box(publisher.until_now());
            std::hint::black_box(publisher.is_done(until).unwrap());
            let time = start.elapsed().as_nanos();
            done();
            time
        })
        .collect();
    times.sort_unstable();
    times[STEPS / 2]
}

/// Median of the time from a decode step's submission to its answer, in microseconds.
fn round_trip(model: &Model, world: usize) -> f64 {
    let limits = model.limits();
    let (_, mut times) = with_group(model, &kv_segments(model, world), |netd, _| {
        let mut free = shuffled_pages();
        let body = Session::new().step(netd, &limits, &mut free, &input(1, 1));
        let step = |_| {
            let start = Instant::now();
            netd.call(&body).unwrap();
            start.elapsed()
        };
        (0..STEPS).map(step).collect::<Vec<_>>()
    });
    times.sort_unstable();
    times[STEPS / 2].as_secs_f64() * 1e6
}

#[test]
#[ignore = "prints a measurement"]
fn what_a_plan_costs() {
    let model = Model::new(DType::F32);
    let mut clock: Vec<_> = (0..STEPS).map(|_| Instant::now().elapsed().as_nanos()).collect();
    clock.sort_unstable();
    let clock = clock[STEPS / 2];
    let netd = Netd::of(LinkParts::new(FIRST, FIRST));
    let body = Session::new().step(&netd, &model.limits(), &mut shuffled_pages(), &input(1, 1));
    let alone = bookkeeping(&mut Publisher::default(), || (), &body);

    let (parts, mut record) = (Parts::new(2, PLAN_LOG_BYTES), Vec::new());
    let mut reader = parts.reader(1, &board());
    let done = || {
        while let Some(position) = reader.next(&mut record, Duration::ZERO).unwrap() {
            reader.done(position).unwrap();
        }
    };
    let followed = bookkeeping(&mut Publisher::new(parts.writer(&board())), done, &body);
    println!(
        "plan of a decode step: {alone} ns without a group, {followed} ns in a group of two; {clock} ns of each are the clock's"
    );
    let [one, two] = [1, 2].map(|world| round_trip(&model, world));
    println!(
        "decode step of {BLOCKS} tiny blocks: {one:.1} us without a group, {two:.1} us with two ranks that do all of it each"
    );
}
