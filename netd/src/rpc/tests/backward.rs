//! Gradients over one worker and two, and what is refused.

use std::sync::atomic::Ordering::SeqCst;

use p2p::CallError;
use prost::Message;
use shared::block::Span;
use shared::control::DeathCause::Outside;
use shared::figures::Trouble;
use shared::job::WorkKind;
use swarm::names;
use swarm::wire::keys;
use swarm::wire::messages::*;
use swarm::wire::metadata::encode_batch_metadata;
use swarm::wire::msgpack::Value;
use swarm::wire::stream_parts::{PartAssembler, PartLimits, split};
use swarm::wire::tensor::{WireDtype, dummy_tensor, raw_tensor};

use super::rig::*;
use crate::clock::skip;
use crate::rpc::Timeouts;
use crate::workers::arena::SlotClass;

fn request(tensors: [Tensor; 3], blocks: std::ops::Range<u32>) -> ExpertRequest {
    ExpertRequest {
        uid: uids(blocks),
        tensors: tensors.into(),
        metadata: encode_batch_metadata(None, 3).into(),
    }
}

fn no_prompts() -> Tensor {
    dummy_tensor(WireDtype::F32)
}

/// Prompts `[firsts.len() / batch, batch, 1, hidden]` of which element 0 is given.
fn prompts(batch: usize, firsts: &[f32]) -> Tensor {
    let states = hidden(1, firsts).buffer;
    let shape = [firsts.len() / batch, batch, 1, HIDDEN];
    raw_tensor(&shape, WireDtype::F32, states).unwrap()
}

async fn two_workers() -> Rig {
    let spans = vec![Span::new(0, 1).unwrap(), Span::new(1, BLOCKS).unwrap()];
    Rig::shaped(Shape { spans, ..Shape::default() }).await
}

async fn unary(rig: &Rig, request: ExpertRequest) -> Result<Vec<Tensor>, String> {
    let answer = rig.call(names::BACKWARD, request).await?;
    Ok(ExpertResponse::decode(answer).unwrap().tensors)
}

async fn streamed(rig: &Rig, request: &ExpertRequest) -> Result<Vec<Tensor>, String> {
    let opened = rig.client.open_stream(rig.server, names::BACKWARD_STREAM, DEADLINE);
    let mut stream = opened.await.unwrap();
    for tensor in request.tensors.clone() {
        for part in split(tensor, 50_000) {
            let part = ExpertRequest { tensors: vec![part], ..request.clone() };
            stream.send(part.encode_to_vec().into()).await.unwrap();
        }
    }
    stream.finish().await.unwrap();
    let mut parts =
        PartAssembler::new(PartLimits { max_tensors: 2, max_bytes: 1 << 20, max_parts: 100 });
    loop {
        match stream.recv().await {
            Ok(Some(bytes)) => {
                for part in ExpertResponse::decode(bytes).unwrap().tensors {
                    parts.push(part).unwrap();
                }
            }
            Ok(None) => {
                let mut tensors = parts.finish();
                // The number of parts is for information only.
                tensors.iter_mut().for_each(|tensor| tensor.chunks = 0);
                return Ok(tensors);
            }
            Err(CallError::Remote(text)) => return Err(text),
            Err(other) => panic!("{other}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gradients_are_the_same_unary_and_streamed() {
    let rig = Rig::new().await;
    let states: Vec<f32> = (0..600).map(|n| n as f32).collect();
    let given: Vec<f32> = (0..600).map(|n| 0.5 * n as f32 - 7.0).collect();
    let tensors = [hidden(2, &states), hidden(2, &given), no_prompts()];
    let request = request(tensors, 1..3);
    let answer = streamed(&rig, &request).await.unwrap();
    let expected: Vec<f32> = states.iter().zip(given).map(|(x, g)| 4.0 * g + x).collect();
    assert_eq!(answer.len(), 1);
    assert_eq!(answer[0].size, [2, 300, HIDDEN as u32]);
    assert_eq!(firsts(&answer[0]), expected);
    assert_eq!(unary(&rig, request).await.unwrap(), answer);
    let jobs = rig.memory().jobs.lock().unwrap();
    assert!(jobs.iter().all(|job| job.kind == WorkKind::Backward));
    assert_eq!((jobs.len(), rig.service.workers.arena().slots_in_use()), (2, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_go_forward_and_come_back() {
    let rig = two_workers().await;
    let tensors = [hidden(2, &[1.0, 2.0]), hidden(2, &[10.0, 20.0]), no_prompts()];
    let answer = unary(&rig, request(tensors, 0..4)).await.unwrap();
    // The second worker's input is 2, 3: 8 × 10 + 2, 8 × 20 + 3; the first one: 2 × 82 + 1, 2 × 163
    // + 2.
    assert_eq!(firsts(&answer[0]), [165.0, 328.0]);
    let kinds = |worker: usize| {
        let jobs = rig.workers[worker].memory.jobs.lock().unwrap();
        jobs.iter().map(|job| (job.kind, job.blocks.len())).collect::<Vec<_>>()
    };
    assert_eq!(kinds(0), [(WorkKind::Forward, 1), (WorkKind::Backward, 1)]);
    assert_eq!(kinds(1), [(WorkKind::Backward, 3)]);
    assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_keeps_no_more_than_it_may_and_the_answer_is_the_same() {
    // What two sequences of one token with a prompt need in a block.
    let block = facts().gradient_block_bytes(2, 1, 1);
    assert_eq!(block, 2 * (64 * 4 + 16 * 256 + 64 * 8));
    let given = prompts(2, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let tensors = [hidden(2, &[1.0, 2.0]), hidden(2, &[10.0, 20.0]), given];
    let request = request(tensors, 0..4);
    let (there, back) = (WorkKind::Forward, WorkKind::Backward);
    for (blocks, expected) in [
        (4, vec![(back, 0..4)]),
        (3, vec![(there, 0..2), (back, 2..4), (back, 0..2)]),
        (
            0,
            vec![
                (there, 0..1),
                (there, 1..2),
                (there, 2..3),
                (back, 3..4),
                (back, 2..3),
                (back, 1..2),
                (back, 0..1),
            ],
        ),
    ] {
        let rig = Rig::shaped(Shape { gradient_bytes: blocks * block, ..Shape::default() }).await;
        let answer = unary(&rig, request.clone()).await.unwrap();
        let jobs = rig.memory().jobs.lock().unwrap();
        let order: Vec<_> = jobs
            .iter()
            .map(|job| (job.kind, job.blocks[0].0..job.blocks[job.blocks.len() - 1].0 + 1))
            .collect();
        assert_eq!(order, expected);
        let prompts = firsts(&answer[1]);
        assert_eq!(prompts, [1.0, 12.0, 103.0, 114.0, 205.0, 216.0, 307.0, 318.0]);
        assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inputs_that_the_arena_does_not_hold_are_computed_again() {
    let rig =
        Rig::shaped(Shape { gradient_bytes: 0, arena_bytes: 1 << 20, ..Shape::default() }).await;
    // Hidden states of 160 KiB: four of them fit into the arena, one of which is the input of a
    // hop.
    let states: Vec<f32> = (0..640).map(|n| n as f32).collect();
    let tensors = [hidden(1, &states), hidden(1, &states), no_prompts()];
    let answer = unary(&rig, request(tensors, 0..4)).await.unwrap();
    assert_eq!(answer[0].size, [1, 640, HIDDEN as u32]);
    let (there, back) = (WorkKind::Forward, WorkKind::Backward);
    let order: Vec<_> = {
        let jobs = rig.memory().jobs.lock().unwrap();
        jobs.iter().map(|job| (job.kind, job.blocks[0].0, job.blocks.len())).collect()
    };
    let expected = [
        (there, 0, 3),
        (back, 3, 1),
        (there, 0, 2),
        (back, 2, 1),
        (there, 0, 1),
        (back, 1, 1),
        (back, 0, 1),
    ];
    assert_eq!(order, expected);
    assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
    // Back through each block alone: twice the gradient and the input, which has grown by one per
    // block.
    let expected: Vec<f32> = states.iter().map(|n| 31.0 * n + 34.0).collect();
    assert_eq!(firsts(&answer[0]), expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_worker_cannot_keep_and_the_arena_cannot_part_is_refused_before_anything_is_taken() {
    let rig =
        Rig::shaped(Shape { gradient_bytes: 1 << 20, arena_bytes: 1 << 20, ..Shape::default() })
            .await;
    // Hidden states of 225 KiB: three of them fit into the arena, and a hop would need a fourth; a
    // block keeps 450 KiB.
    let states = [1.0; 900];
    let tensors = [hidden(1, &states), hidden(1, &states), no_prompts()];
    let held = rig.service.workers.arena().reserve(&[675 << 10], SlotClass::Bulk).await.unwrap();
    let refused = unary(&rig, request(tensors.clone(), 0..4)).await.unwrap_err();
    drop(held);
    for part in [
        "gradients over 4 blocks keep 1.8 MiB in a worker, which keeps at most 1.0 MiB at once",
        "the 1.0 MiB of shared memory (--arena_size) cannot hold the 0.9 MiB",
        "ask for fewer tokens or fewer blocks at a time",
    ] {
        assert!(refused.contains(part), "{refused}");
    }
    assert!(!refused.contains('\n'), "{refused}");
    assert_eq!(rig.service.troubles.of(Trouble::TooLarge), 1);
    assert!(rig.memory().jobs.lock().unwrap().is_empty());
    // Half of the blocks go in one job.
    let answer = unary(&rig, request(tensors, 0..2)).await.unwrap();
    assert_eq!(answer[0].size, [1, 900, HIDDEN as u32]);
    assert_eq!(rig.memory().jobs.lock().unwrap().len(), 1);
    assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_for_which_no_block_has_memory_are_refused() {
    let rig = Rig::shaped(Shape { gradient_bytes: 0, ..Shape::default() }).await;
    // Without prompts 1024 tokens may be in one sequence each, with a page of their own.
    let states = vec![1.0; 1024];
    let long = |batch, given| {
        let tensors = [hidden(batch, &states), hidden(batch, &states), given];
        request(tensors, 0..4)
    };
    assert!(unary(&rig, long(1024, no_prompts())).await.is_ok());
    let given = prompts(1, &[1.0; 4]);
    let refused = unary(&rig, long(1024, given)).await.unwrap_err();
    for part in [
        "gradients of 1024 x 1 tokens, 1 of them with deep prompts, keep 4.8 MiB per block",
        "keeps at most 4.2 MiB (--max_batch_size 1024)",
    ] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(rig.service.troubles.of(Trouble::TooLarge), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_get_their_gradient_in_the_order_of_the_request() {
    for rig in [Rig::new().await, two_workers().await] {
        // Of each row its own prompts, and the same prompts for all rows.
        let own = prompts(2, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        let shared = prompts(1, &[1.0, 3.0, 5.0, 7.0]);
        for (given, second) in
            [(own, [12.0, 114.0, 216.0, 318.0]), (shared, [11.0, 113.0, 215.0, 317.0])]
        {
            let tensors = [hidden(2, &[0.0; 4]), hidden(2, &[1.0; 4]), given];
            let request = request(tensors, 0..4);
            let answer = unary(&rig, request.clone()).await.unwrap();
            assert_eq!(answer[0].size, [2, 2, HIDDEN as u32]);
            assert_eq!(answer[1].size, [4, 2, 1, HIDDEN as u32]);
            let got = firsts(&answer[1]);
            let rows = |row: usize| got.iter().skip(row).step_by(2).copied().collect::<Vec<_>>();
            assert_eq!(rows(0), [1.0, 103.0, 205.0, 307.0]);
            assert_eq!(rows(1), second);
            assert_eq!(streamed(&rig, &request).await.unwrap(), answer);
        }
        assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_computed_gets_its_text() {
    let rig = Rig::new().await;
    let good = || [hidden(1, &[1.0, 2.0]), hidden(1, &[1.0, 1.0]), no_prompts()];
    let text = |tensors: [Tensor; 3]| {
        let request = request(tensors, 0..4);
        async { unary(&rig, request).await.unwrap_err() }
    };
    let [states, _, none] = good();
    assert_eq!(
        text([states.clone(), hidden(1, &[1.0]), none.clone()]).await,
        "ValueError('grad_outputs must have the shape of the inputs [1, 2, 64], got [1, 1, 64]')"
    );
    assert_eq!(
        text([states.clone(), none.clone(), none.clone()]).await,
        "ValueError('grad_outputs must have the shape of the inputs [1, 2, 64], got [0]')"
    );
    let bad = text([states.clone(), hidden(1, &[1.0, f32::NAN]), none.clone()]).await;
    assert!(bad.contains("output gradients hold a value that is not finite"), "{bad}");
    assert!(bad.contains("row 0, token 1, element 0"), "{bad}");
    assert_eq!(
        text([states.clone(), states.clone(), prompts(1, &[1.0; 3])]).await,
        "ValueError('Received 3 prompts for 4 backends')"
    );
    let wide = text([states.clone(), states.clone(), prompts(3, &[1.0; 12])]).await;
    assert!(wide.contains("prompts must have the shape [4, 1 or 1, at most 2, 64]"), "{wide}");
    let long = [hidden(1, &[1.0; 1025]), hidden(1, &[1.0; 1025]), none.clone()];
    assert!(text(long).await.contains("Task size greater than max_batch_size (1024)"));
    let empty = hidden(1, &[]);
    assert!(text([empty.clone(), empty.clone(), prompts(1, &[1.0; 4])]).await.contains("elements"));
    assert!(rig.memory().jobs.lock().unwrap().is_empty());
    let answer = unary(&rig, request([empty.clone(), empty.clone(), none], 0..4)).await.unwrap();
    assert_eq!((answer.len(), &answer[0].size), (1, &empty.size));

    let metadata = |key: &str, value| ExpertRequest {
        metadata: Value::Map(vec![(Value::str(key), value)]).encode().into(),
        ..request(good(), 0..4)
    };
    let codes = |count| Value::List(vec![Value::Int(0); count]);
    for (request, expected) in [
        (
            metadata(keys::POINTS, Value::str("many")),
            "rpc_backward should have number of points as a number or None, got 'many'",
        ),
        (metadata(keys::ACTIVE_ADAPTER, Value::str("nope/x")), "'adapter nope/x not found'"),
        (
            metadata(keys::OUTPUT_COMPRESSION, codes(2)),
            "output_compression tuple should have 1 element, got 2",
        ),
        (request(good(), 0..5), "Remote peer does not serve tiny-llama-hf.4"),
    ] {
        assert_eq!(streamed(&rig, &request).await, Err(expected.into()));
    }
    let mut two = metadata(keys::OUTPUT_COMPRESSION, codes(1));
    two.tensors[2] = prompts(1, &[1.0; 4]);
    let refused = streamed(&rig, &two).await;
    assert_eq!(refused, Err("output_compression tuple should have 2 elements, got 1".into()));
    assert!(rig.memory().jobs.lock().unwrap().is_empty());
    assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gradients_survive_the_death_of_a_worker() {
    let mut rig = two_workers().await;
    rig.workers[1].memory.orders.paused.store(true, SeqCst);
    let tensors = [hidden(1, &[1.0]), hidden(1, &[10.0]), no_prompts()];
    let message = request(tensors, 0..4).encode_to_vec();
    let (client, server) = (rig.client.clone(), rig.server);
    let call = tokio::spawn(async move {
        client.call_unary(server, names::BACKWARD, message.into(), DEADLINE).await
    });
    let first = rig.workers[0].memory.clone();
    until(|| first.jobs.lock().unwrap().len() == 1).await;
    rig.kill(1, Outside, true);
    rig.workers[1].memory.orders.paused.store(false, SeqCst);
    rig.start(1);
    let answer = ExpertResponse::decode(call.await.unwrap().unwrap()).unwrap();
    assert_eq!(firsts(&answer.tensors[0]), [165.0]);
}

#[tokio::test]
async fn a_request_that_takes_too_long_or_is_given_up_gives_its_slots_back() {
    let usual = Shape::default();
    // Before the caller gives up.
    let timeouts = Timeouts { request: DEADLINE / 2, ..usual.timeouts };
    let rig = Rig::shaped(Shape { timeouts, ..usual }).await;
    let slots = || rig.service.workers.arena().slots_in_use();
    rig.memory().orders.paused.store(true, SeqCst);
    let tensors = [hidden(1, &[1.0]), hidden(1, &[1.0]), no_prompts()];
    let request = request(tensors, 0..4);
    let time_passes = async |before: usize| {
        until(|| slots() > before).await;
        skip(timeouts.request).await;
        slots()
    };
    let (answer, held) = tokio::join!(unary(&rig, request.clone()), time_passes(0));
    assert_eq!(answer, Err("TimeoutError()".into()));
    let (answer, all_held) = tokio::join!(streamed(&rig, &request), time_passes(held));
    assert_eq!(answer, Err(String::new()));
    // The worker may still write what a job names until it has answered.
    assert_eq!((all_held, slots()), (2 * held, 2 * held));
    rig.memory().orders.paused.store(false, SeqCst);
    until(|| rig.service.workers.arena().slots_in_use() == 0).await;
}
