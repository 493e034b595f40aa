use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use blocks::map::MappedWeights;
use kernels::Cpu;
use shared::block::BlockIndex;
use shared::control::Role;
use shared::dtype::DType;
use shared::ids::{Generation, PageId, Rank, WorldSize};
use shared::job::{PageCopy, Prompts, SlotRef, WorkKind};
use shared::shm::doorbell::Doorbell;
use shared::shm::segment::MemfdSegment;

use super::*;
use crate::engine::EngineShape;
use crate::harness::*;

mod adapters;
mod bits;
mod gradients;
mod groups;

const FIRST: Generation = Generation(1);

/// Runs `client` against a fresh executor over `kv`; tells how the executor ended.
fn with_executor(
    model: &Model,
    kv: &MemfdSegment,
    client: impl FnOnce(&mut Netd, &SyncSender<ExecutorCommand>),
) -> Exit {
    let (end, ()) = with_drain_time(model, kv, DRAIN_TIME, client);
    end
}

/// As [`with_executor`], with another time for a drain, and what the client returns.
fn with_drain_time<Out>(
    model: &Model,
    kv: &MemfdSegment,
    drain_time: Duration,
    client: impl FnOnce(&mut Netd, &SyncSender<ExecutorCommand>) -> Out,
) -> (Exit, Out) {
    let seat = Seat::of(Role::Worker, FIRST);
    let (commands, inbox) = sync_channel(8);
    let parts = LinkParts::new(FIRST, FIRST);
    commands.send(ExecutorCommand::Link(Box::new(open(&parts)))).unwrap();
    let mut netd = Netd::of(parts);
    thread::scope(|scope| {
        let (seat, board) = (&seat.seat, seat.board.try_clone().unwrap());
        let executor = scope.spawn(move || {
            let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
            let engine = engine(model, &weights, kv);
            let board = BoardWriter::open(board, seat, FIRST).unwrap();
            let faults = Faults::new(None, FIRST);
            let mut executor = Executor::new(engine, model.limits(), faults, board);
            executor.drain_time = drain_time;
            executor.run(&inbox, |_| ())
        });
        let ending = Ending(&commands, netd.bell());
        let out = client(&mut netd, &commands);
        drop(ending);
        (executor.join().unwrap(), out)
    })
}

/// The engine of a worker over `kv`.
fn engine<'w>(model: &'w Model, weights: &'w MappedWeights, kv: &MemfdSegment) -> Engine<'w, Cpu> {
    let shape = EngineShape {
        span: span(),
        dtype: model.facts().dtype,
        kv_pages: KV_PAGES,
        gradient_bytes: model.gradient_bytes,
        kv_survives: true,
    };
    Engine::new(Cpu::new(2), &model.spec, weights, alone(kv), shape).unwrap()
}

/// Ends the executor, also when the client panics.
struct Ending<'a>(&'a SyncSender<ExecutorCommand>, Doorbell);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let _ = self.0.send(ExecutorCommand::Drain);
        let _ = self.1.ring();
    }
}

fn open(parts: &LinkParts) -> NetdLink {
    let (init, fds) = parts.for_worker();
    NetdLink::open(&init, worker_id(), FIRST, fds).unwrap()
}

/// A session that prefills `first` tokens and then decodes one token at a time; all outputs in a
/// row.
fn decode(
    netd: &mut Netd,
    limits: &JobLimits,
    session: &mut Session,
    free: &mut Vec<PageId>,
    parts: &[Vec<f32>],
) -> Vec<u8> {
    let mut outputs = Vec::new();
    for part in parts {
        let body = session.step(netd, limits, free, part);
        outputs.extend(netd.call(&body).unwrap());
    }
    outputs
}

/// `tokens` hidden states cut into steps of the given lengths.
fn cut(input: &[f32], lengths: &[usize]) -> Vec<Vec<f32>> {
    let mut rest = input;
    lengths
        .iter()
        .map(|n| {
            let (part, after) = rest.split_at(n * 64);
            rest = after;
            part.to_vec()
        })
        .collect()
}

#[test]
fn steps_over_shuffled_pages_give_the_bits_of_one_forward() {
    for dtype in [DType::F32, DType::Bf16] {
        let model = Model::new(dtype);
        let (limits, whole) = (model.limits(), input(45, 3));
        let end = with_executor(&model, &kv_segment(model.facts()), |netd, _| {
            let forward = netd.job(WorkKind::Forward, &limits, 1, &whole);
            let expected = netd.call(&forward).unwrap();
            let mut free = shuffled_pages();
            for lengths in
                [&[45][..], &[37, 1, 1, 1, 1, 1, 1, 1, 1], &[1, 15, 1, 16, 12], &[33, 12]]
            {
                let parts = cut(&whole, lengths);
                let got = decode(netd, &limits, &mut Session::new(), &mut free, &parts);
                assert!(got == expected, "{dtype}, steps of {lengths:?}");
            }
        });
        assert_eq!(end, Exit::clean());
    }
}

#[test]
fn alternating_between_two_fresh_executors_over_one_kv_segment_changes_no_bit() {
    let model = Model::new(DType::Bf16);
    let (limits, kv) = (model.limits(), kv_segment(model.facts()));
    let parts = cut(&input(26, 9), &[20, 1, 1, 1, 1, 1, 1]);
    let mut undisturbed = Vec::new();
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        undisturbed = decode(netd, &limits, &mut Session::new(), &mut shuffled_pages(), &parts);
    });
    let (mut session, mut free, mut got) = (Session::new(), shuffled_pages(), Vec::new());
    for part in &parts {
        with_executor(&model, &kv, |netd, _| {
            got.extend(decode(netd, &limits, &mut session, &mut free, std::slice::from_ref(part)));
        });
    }
    assert!(got == undisturbed);
}

#[test]
fn decode_steps_computed_together_have_the_bits_of_each_alone() {
    let model = Model::new(DType::Bf16);
    let limits = model.limits();
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let mut free = shuffled_pages();
        let prefills: Vec<_> = (0..6).map(|s| input(3 + 2 * s, s)).collect();
        let steps: Vec<_> = (0..6).map(|s| input(1, 50 + s)).collect();
        let mut alone = Vec::new();
        for (prefill, step) in prefills.iter().zip(&steps) {
            let mut session = Session::new();
            decode(netd, &limits, &mut session, &mut free, std::slice::from_ref(prefill));
            alone.push(decode(netd, &limits, &mut session, &mut free, std::slice::from_ref(step)));
            free.extend(session.table);
        }
        let mut sessions: Vec<_> = prefills
            .iter()
            .map(|prefill| {
                let mut session = Session::new();
                decode(netd, &limits, &mut session, &mut free, std::slice::from_ref(prefill));
                session
            })
            .collect();
        let jobs: Vec<_> = sessions
            .iter_mut()
            .zip(&steps)
            .enumerate()
            .map(|(i, (session, step))| {
                let mut body = session.step(netd, &limits, &mut free, step);
                // Every second one enters at the second block, and so joins a running batch.
                if i % 2 == 1 {
                    body.blocks.truncate(2);
                }
                let id = netd.push(&body);
                (id, body)
            })
            .collect();
        netd.wake();
        for (i, (id, body)) in jobs.into_iter().enumerate() {
            netd.answer(id).unwrap();
            if body.blocks.len() == BLOCKS as usize {
                assert!(netd.read(body.output) == alone[i], "session {i}");
            }
        }
    });
}

#[test]
fn a_decode_step_overtakes_a_long_forward() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let mut free = shuffled_pages();
        let long: Vec<_> = (0..20).map(|s| netd_forward(netd, &limits, s)).collect();
        let step = Session::new().step(netd, &limits, &mut free, &input(1, 1));
        let step = netd.push(&step);
        netd.wake();
        let order: Vec<_> = (0..21).map(|_| netd.next(DEADLINE).unwrap().id).collect();
        let place = order.iter().position(|&id| id == step).unwrap();
        assert!(place < 20, "the step was answered last");
        assert!(long.iter().all(|id| order.contains(id)));
    });
}

fn netd_forward(netd: &mut Netd, limits: &JobLimits, seed: usize) -> JobId {
    let body = netd.job(WorkKind::Forward, limits, 1, &input(60, seed));
    netd.push(&body)
}

#[test]
fn page_copies_come_before_the_step_and_leave_the_source_alone() {
    let model = Model::new(DType::Bf16);
    let limits = model.limits();
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let mut free = shuffled_pages();
        let (shared_part, left, right) = (input(20, 1), input(1, 2), input(1, 3));
        let mut alone = |netd: &mut Netd, step: &[f32]| {
            let parts = [shared_part.clone(), step.to_vec()];
            decode(netd, &limits, &mut Session::new(), &mut free, &parts).split_off(20 * 64 * 2)
        };
        let expected = [alone(netd, &left), alone(netd, &right)];

        let mut first = Session::new();
        decode(netd, &limits, &mut first, &mut free, std::slice::from_ref(&shared_part));
        // Two beams: both share the full first page, each gets a copy of the page that they write.
        let mut beams = [first.clone(), first.clone()];
        for beam in &mut beams {
            let copy = free.pop().unwrap();
            beam.copies = vec![PageCopy { source: first.table[1], destination: copy, tokens: 4 }];
            beam.table[1] = copy;
        }
        for (beam, (step, expected)) in
            beams.iter_mut().zip([&left, &right].into_iter().zip(&expected))
        {
            assert!(
                &decode(netd, &limits, beam, &mut free, std::slice::from_ref(step)) == expected
            );
        }
        // The original goes on as if nothing had happened.
        assert!(
            decode(netd, &limits, &mut first, &mut free, std::slice::from_ref(&right))
                == expected[1]
        );
    });
}

#[test]
fn deep_prompts_are_added_before_their_block_at_the_first_tokens() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let (tokens, prompt) = (input(50, 1), input(40, 2));
        let mut sum = tokens.clone();
        sum.iter_mut().zip(&prompt).for_each(|(x, p)| *x += p);
        let mut expected = netd.job(WorkKind::Forward, &limits, 1, &sum);
        expected.blocks = first_block();
        let expected = netd.call(&expected).unwrap();

        let slot = SlotRef { offset: 1 << 20, len: 40 * 64 * 4 };
        netd.write(slot, DType::F32, &prompt);
        let mut free = shuffled_pages();
        let mut step = Session::new().step(netd, &limits, &mut free, &tokens);
        step.blocks = first_block();
        step.prompts = Some(Prompts { slot, batch: 1, tokens: 40 });
        assert!(netd.call(&step).unwrap() == expected);
    });
}

#[test]
fn a_batch_gives_every_row_the_bits_of_that_row_alone() {
    let model = Model::new(DType::Bf16);
    let limits = model.limits();
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let rows: Vec<_> = (0..3).map(|r| input(30, r)).collect();
        let alone: Vec<_> = rows
            .iter()
            .map(|row| {
                let body = netd.job(WorkKind::Forward, &limits, 1, row);
                netd.call(&body).unwrap()
            })
            .collect();
        let batch = netd.job(WorkKind::Forward, &limits, 3, &rows.concat());
        assert!(netd.call(&batch).unwrap() == alone.concat());
    });
}

#[test]
fn refused_jobs_say_why_and_the_next_job_is_served() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let good = netd.job(WorkKind::Forward, &limits, 1, &input(2, 1));
        let expected = netd.call(&good).unwrap();
        type Change = fn(&mut JobBody);
        let cases: [(Change, JobError); 6] = [
            (|b| b.blocks = vec![BlockIndex(3)], JobError::BlockNotServed { block: 3 }),
            (|b| b.hidden = 65, JobError::WrongHidden { got: 65, want: 64 }),
            (|b| b.dtype = DType::Bf16, JobError::WrongDType { got: 1, want: 0 }),
            (|b| b.adapter = Some(0), JobError::UnknownAdapter { adapter: 0, loaded: 0 }),
            (|b| b.output = b.input, JobError::Aliased { offset: 0, other: 0 }),
            (|b| b.input.offset = 4 << 20, JobError::BadSlot { offset: 4 << 20, len: 512 }),
        ];
        for (change, error) in cases {
            let mut body = good.clone();
            (body.input.offset, body.output.offset) = (0, 16384);
            change(&mut body);
            assert_eq!(netd.call(&body), Err(error));
        }
        let mut free = shuffled_pages();
        let mut step = Session::new().step(netd, &limits, &mut free, &input(1, 1));
        step.pages.tables = vec![vec![PageId(KV_PAGES)]];
        let outside = JobError::BadPage { page: u64::from(KV_PAGES), pages: u64::from(KV_PAGES) };
        assert_eq!(netd.call(&step), Err(outside));
        let again = netd.job(WorkKind::Forward, &limits, 1, &input(2, 1));
        assert!(netd.call(&again).unwrap() == expected);
    });
}

#[test]
fn stale_and_unsupported_jobs_are_refused() {
    let model = Model::new(DType::F32);
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let slot = SlotRef { offset: 0, len: 0 };
        let mut refused = |id: u64, change: fn(&mut JobDescriptor)| {
            let mut descriptor = netd.descriptor(JobId(id), WorkKind::Forward, slot);
            change(&mut descriptor);
            netd.push_entry(descriptor.encode());
            netd.wake();
            netd.answer(JobId(id)).unwrap_err()
        };
        assert_eq!(
            refused(70, |d| d.worker_generation = Generation(9)),
            JobError::Stale { got: 9, want: 1 }
        );
        assert_eq!(
            refused(71, |d| d.netd_generation = Generation(0)),
            JobError::Stale { got: 0, want: 1 }
        );
        assert_eq!(refused(72, |d| d.kind = WorkKind::Backward), JobError::BadBody { at: 0 });
        assert_eq!(refused(73, |_| ()), JobError::BadBody { at: 0 });
        let other_rank = |d: &mut JobDescriptor| d.worker.rank = Rank(1);
        assert!(matches!(refused(75, other_rank), JobError::WrongWorker { .. }));
        let larger_group = |d: &mut JobDescriptor| d.worker.world_size = WorldSize(2);
        assert!(matches!(refused(76, larger_group), JobError::WrongWorker { .. }));
        let far = |d: &mut JobDescriptor| d.body = SlotRef { offset: u64::MAX - 1, len: 8 };
        assert_eq!(refused(74, far), JobError::BadSlot { offset: u64::MAX - 1, len: 8 });
    });
}

#[test]
fn garbage_in_the_ring_and_in_bodies_is_answered_and_harms_nothing() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let good = netd.job(WorkKind::Forward, &limits, 1, &input(4, 1));
        let expected = netd.call(&good).unwrap();
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for round in 0..200u64 {
            let mut entry: Entry = std::array::from_fn(|_| random());
            entry[1] = 1_000_000 + round;
            if round % 2 == 0 {
                entry[0] = netd.descriptor(JobId(0), WorkKind::Decode, good.input).encode()[0];
            }
            netd.push_entry(entry);
            netd.wake();
            netd.answer(JobId(entry[1])).unwrap_err();
        }
        let mut free = shuffled_pages();
        let bytes = Session::new().step(netd, &limits, &mut free, &input(4, 1)).encode();
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << (random() % 8);
            let id = netd.push_bytes(WorkKind::Decode, &bytes);
            netd.wake();
            // Some changes leave a job that makes sense; each is answered once.
            let _ = netd.answer(id);
        }
        let again = netd.job(WorkKind::Forward, &limits, 1, &input(4, 1));
        assert!(netd.call(&again).unwrap() == expected);
    });
}

#[test]
fn answers_wait_for_room_in_the_ring_and_none_is_lost() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let body = netd.job(WorkKind::Forward, &limits, 1, &input(1, 1));
        // More than the completion ring holds, before any answer is taken.
        let jobs: Vec<_> = (0..400).map(|_| netd.push(&body)).collect();
        netd.wake();
        let mut ids: Vec<_> =
            jobs.iter().map(|_| netd.next(DEADLINE).expect("an answer in time").id).collect();
        ids.sort_unstable();
        assert_eq!(ids, jobs);
    });
}

#[test]
fn a_new_link_drops_what_the_old_one_asked_for() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    let end = with_executor(&model, &kv_segment(model.facts()), |old, commands| {
        let parts = LinkParts::new(FIRST, Generation(2));
        let long: Vec<_> = (0..100).map(|s| netd_forward(old, &limits, s)).collect();
        commands.send(ExecutorCommand::Link(Box::new(open(&parts)))).unwrap();
        old.wake_always();
        let mut new = Netd::of(parts);
        let body = new.job(WorkKind::Forward, &limits, 1, &input(1, 1));
        new.call(&body).unwrap();
        let answered = std::iter::from_fn(|| old.next(Duration::ZERO)).count();
        assert!(answered < long.len(), "all jobs of the old link were served");
        commands.send(ExecutorCommand::Drain).unwrap();
        new.wake_always();
    });
    assert_eq!(end, Exit::clean());
}

#[test]
fn a_drain_serves_what_was_submitted_before_it() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    let end = with_executor(&model, &kv_segment(model.facts()), |netd, commands| {
        let ids: Vec<_> = (0..10).map(|s| netd_forward(netd, &limits, s)).collect();
        commands.send(ExecutorCommand::Drain).unwrap();
        netd.wake_always();
        assert!(ids.into_iter().all(|id| netd.answer(id).is_ok()));
    });
    assert_eq!(end, Exit::clean());
}

#[test]
fn a_corrupt_ring_ends_the_worker() {
    let model = Model::new(DType::F32);
    let end = with_executor(&model, &kv_segment(model.facts()), |netd, _| netd.corrupt());
    assert_eq!(end.reason, ExitReason::Failed);
    assert!(end.message.contains("corrupt"), "{}", end.message);
}

#[test]
fn the_end_of_the_control_thread_ends_the_executor() {
    let model = Model::new(DType::F32);
    let end = with_executor(&model, &kv_segment(model.facts()), |netd, commands| {
        commands.send(ExecutorCommand::End(ExitReason::ParentGone, String::new())).unwrap();
        netd.wake_always();
    });
    assert_eq!(end.reason, ExitReason::ParentGone);
}

#[test]
fn a_drain_without_time_refuses_what_is_left_and_answers_it() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    let kv = kv_segment(model.facts());
    let (end, refused) = with_drain_time(&model, &kv, Duration::ZERO, |netd, commands| {
        let body = netd.job(WorkKind::Forward, &limits, 1, &input(60, 1));
        netd.call(&body).unwrap();
        let jobs: Vec<_> = (0..200).map(|_| netd.push(&body)).collect();
        commands.send(ExecutorCommand::Drain).unwrap();
        netd.wake_always();
        let answers = jobs.iter().map(|&job| netd.answer(job));
        answers.filter(|a| *a == Err(JobError::Draining)).count()
    });
    assert_eq!(end, Exit::clean());
    assert!(refused > 0, "all jobs were computed");
}
