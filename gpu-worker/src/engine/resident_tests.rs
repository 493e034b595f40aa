//! Jobs without cache on the emulator: what is kept on the device, on the host or partly, and how
//! much of a job is one unit, changes no bit.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use blocks::map::MappedWeights;
use kernels::cuda::emu::Emu;
use kernels::cuda::{Cuda, Taken};
use shared::config::QuantType;
use shared::dtype::DType;
use shared::ids::JobId;
use shared::job::{JobBody, Prompts, SlotRef, WorkKind};
use testkit::jobs::job_body;

use super::tests::{Bench, HIDDEN, SLOT, mixture, model};
use super::{Begun, Engine};
use crate::device::CudaStates;
use crate::harness::planned_work;
use crate::harness::{BLOCKS, KV_PAGES, Model, span};
use crate::job::Job;
use crate::schedule::{Schedule, UnitTimes};

const BATCH: u32 = 2;
/// Over several pages, not ending with one.
const TOKENS: u32 = 53;
const PROMPT_TOKENS: u32 = 3;

fn slot(number: u64, values: u32) -> SlotRef {
    SlotRef { offset: number * SLOT, len: u64::from(values) * 2 }
}

/// A job with deep prompts; its values depend on nothing but their places.
fn body(bench: &Bench<'_>, kind: WorkKind) -> JobBody {
    let states = BATCH * TOKENS * HIDDEN as u32;
    let prompts = BLOCKS * BATCH * PROMPT_TOKENS * HIDDEN as u32;
    let body = JobBody {
        dtype: DType::Bf16,
        hidden: HIDDEN as u32,
        input: slot(0, states),
        output: slot(1, states),
        prompts: Some(Prompts { slot: slot(2, prompts), batch: BATCH, tokens: PROMPT_TOKENS }),
        output_gradient: (kind == WorkKind::Backward).then(|| slot(3, states)),
        prompt_gradient: (kind == WorkKind::Backward).then(|| slot(4, prompts)),
        ..job_body(kind, BATCH, TOKENS, BLOCKS)
    };
    for (number, len) in [(0, states), (2, prompts), (3, states)] {
        let value = |i: u32| half::bf16::from_f32((i as f32 * 0.731 + number as f32).sin());
        let bytes: Vec<u8> = (0..len).flat_map(|i| value(i).to_le_bytes()).collect();
        bench.arena.write(slot(number, len).offset, &bytes).unwrap();
    }
    for number in [1, 4] {
        let nothing = vec![0xff; SLOT as usize];
        bench.arena.write(number * SLOT, &nothing).unwrap();
    }
    body
}

/// Runs a job in units of about `time`; what it wrote, and whether pages of it were on the host.
fn run(bench: &mut Bench<'_>, kind: WorkKind, time: Duration) -> (Vec<u8>, bool) {
    let body = body(bench, kind);
    let mut schedule = Schedule::new(UnitTimes { bulk: time, decode: Duration::ZERO });
    let job = Job::new(JobId(1), body.clone(), 16);
    let begun = bench.engine.begin(&job, 0).unwrap();
    assert!(matches!(begun.hidden, CudaStates::Device(_)));
    let is_on_host = begun.memory.as_ref().unwrap().has_host_pages();
    let key = schedule.accept(job.walk());
    let (jobs, mut begun) = (HashMap::from([(key, job)]), HashMap::from([(key, begun)]));
    while let Some(unit) = schedule.next(Instant::now()) {
        bench.engine.unit(&unit, &jobs, &mut begun).unwrap();
        for advance in schedule.done(&unit, Duration::from_millis(1)) {
            if advance.finished {
                bench.engine.output(&jobs[&key], &begun[&key]).unwrap();
            }
        }
    }
    bench.engine.synchronize().unwrap();
    let mut written = Vec::new();
    for slot in [Some(body.output), body.prompt_gradient].into_iter().flatten() {
        let mut bytes = vec![0u8; slot.len as usize];
        bench.arena.read(slot.offset, &mut bytes).unwrap();
        written.extend(bytes);
    }
    (written, is_on_host)
}

impl Engine<'_, Cuda<Emu>> {
    fn taken(&self) -> Taken {
        self.backend.taken()
    }
}

/// Bytes of one block of a job for gradients that are resident: its pages, and its input.
fn block_bytes(engine: &Engine<'_, Cuda<Emu>>) -> usize {
    let pages = BATCH * TOKENS.div_ceil(16);
    let input = (BATCH * TOKENS) as usize * HIDDEN * 2;
    pages as usize * engine.page_bytes() + input.next_multiple_of(256)
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn what_is_resident_on_the_device_changes_no_bit() {
    let model = model(0);
    let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
    let (whole, pieces) = (Duration::from_secs(3600), Duration::ZERO);
    for kind in [WorkKind::Forward, WorkKind::Backward] {
        let mut bench = Bench::new(&model, &weights, 1);
        let (resident, is_on_host) = run(&mut bench, kind, pieces);
        assert!(!is_on_host, "all is on the device");
        assert!(resident.iter().any(|&byte| byte != 0));
        // Again, over what the first left behind.
        assert!(run(&mut bench, kind, pieces).0 == resident, "{kind:?} again");
        assert!(run(&mut bench, kind, whole).0 == resident, "{kind:?} at once");
        let most = block_bytes(&bench.engine);
        for bytes in [0, most + most / 2] {
            let mut bench = Bench::new(&model, &weights, 1);
            bench.engine.passes.limit_regions(bytes);
            let (got, is_on_host) = run(&mut bench, kind, pieces);
            assert_eq!(is_on_host, bytes == 0 || kind == WorkKind::Backward);
            assert!(got == resident, "{kind:?} with {bytes} bytes on the device");
        }
    }
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn jobs_take_no_more_memory_than_was_planned() {
    for model in [model(0), mixture(QuantType::Nf4, 0)] {
        take_no_more_than_planned(&model);
    }
}

fn take_no_more_than_planned(model: &Model) {
    let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
    let mut bench = Bench::new(model, &weights, 1);
    bench.engine.rehearse().unwrap();
    let rehearsed = bench.engine.taken();
    let cache = model.facts().kv_segment_bytes(span(), KV_PAGES) as u64;
    let planned = weights.bytes() + cache + planned_work(&model.spec);
    for kind in [WorkKind::Forward, WorkKind::Backward, WorkKind::Forward] {
        run(&mut bench, kind, Duration::from_secs(3600));
    }
    let taken = bench.engine.taken();
    assert!(taken.bytes <= planned, "{taken:?} of {planned}");
    assert_eq!(taken.allocations, rehearsed.allocations, "{taken:?}");
}

#[test]
fn a_region_is_for_one_job_at_a_time() {
    let model = model(0);
    let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
    let mut bench = Bench::new(&model, &weights, 1);
    let body = body(&bench, WorkKind::Backward);
    let job = Job::new(JobId(1), body, 16);
    let first = bench.engine.begin(&job, 0).unwrap();
    let second = bench.engine.begin(&job, 0).unwrap();
    let is_resident = |begun: &Begun<Cuda<Emu>>| begun.memory.as_ref().unwrap().is_resident();
    assert!(is_resident(&first) && !is_resident(&second));
    drop(first);
    let third = bench.engine.begin(&job, 0).unwrap();
    assert!(is_resident(&third), "the region is free again");
}
