//! What sessions and requests compute.

use p2p::{CallError, PeerId};
use prost::Message;
use shared::block::Span;
use shared::job::WorkKind;
use swarm::names;
use swarm::wire::keys;
use swarm::wire::messages::*;
use swarm::wire::metadata::encode_batch_metadata;
use swarm::wire::msgpack::{Limits, Value};
use swarm::wire::rpc_info::RpcInfo;
use swarm::wire::stream_parts::{PART_BYTES, split};
use swarm::wire::tensor::{WireDtype, dummy_tensor, raw_tensor};
use testkit::golden;

use super::rig::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_remembers_its_tokens_and_gives_its_memory_back() {
    let rig = Rig::new().await;
    let before = rig.service.kv.figures();
    let mut session = rig.session().await;
    let answer = session.open(hidden(1, &[1.0, 2.0, 3.0]), 20).await.unwrap();
    assert_eq!((answer.size.as_slice(), answer.dtype.as_str()), ([1, 3, 64].as_slice(), "float32"));
    assert_eq!(firsts(&answer), [5.0, 7.0, 10.0]);
    assert_eq!(rig.service.kv.figures().tokens_free, before.tokens_free - 20 * 4);
    for token in 4..=20u32 {
        let answer = session.step(hidden(1, &[token as f32]), Some(token - 1), None).await.unwrap();
        assert_eq!(firsts(&answer), [(token * (token + 1) / 2) as f32 + 4.0]);
    }
    session.close().await;
    until(|| rig.service.kv.figures() == before && rig.service.open_sessions() == 0).await;
    assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
    assert_eq!(rig.service.telemetry.figures().count, 18);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_and_beam_order_reach_the_pages() {
    let rig = Rig::new().await;
    let mut session = rig.session().await;
    let answer = session.open(hidden(2, &[1.0, 2.0, 10.0, 20.0]), 40).await.unwrap();
    assert_eq!(firsts(&answer), [5.0, 7.0, 14.0, 34.0]);
    let answer = session.step(hidden(2, &[100.0, 200.0]), None, Some(&[1, 1])).await.unwrap();
    assert_eq!(firsts(&answer), [134.0, 234.0]);
    let answer = session.step(hidden(2, &[0.5, 0.25]), None, Some(&[1, 0])).await.unwrap();
    assert_eq!(firsts(&answer), [234.5, 134.25]);
    let answer = session.step(hidden(2, &[7.0, 8.0]), Some(1), None).await.unwrap();
    assert_eq!(firsts(&answer), [21.0, 22.0]);
    let copies: usize =
        rig.memory().jobs.lock().unwrap().iter().map(|job| job.pages.copies.len()).sum();
    assert!(copies > 0);
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zero_token_steps_are_answered_and_compute_nothing() {
    let rig = Rig::new().await;
    let mut session = rig.session().await;
    let empty = || raw_tensor(&[1, 0, HIDDEN], WireDtype::F32, Default::default()).unwrap();
    let answer = session.open(empty(), 30).await.unwrap();
    assert_eq!((answer.size.as_slice(), answer.buffer.len()), ([1, 0, 64].as_slice(), 0));
    assert!(rig.memory().jobs.lock().unwrap().is_empty());
    assert_eq!(
        firsts(&session.step(hidden(1, &[2.0, 3.0]), None, None).await.unwrap()),
        [6.0, 9.0]
    );
    session.step(empty(), Some(1), None).await.unwrap();
    assert_eq!(firsts(&session.step(hidden(1, &[1.0]), None, None).await.unwrap()), [7.0]);
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_step_is_ignored_without_an_answer() {
    let (_rig, mut session) = Rig::with_session().await;
    let second = session.message(hidden(1, &[2.0]), None, None, None);
    let third = session.message(hidden(1, &[3.0]), None, None, None);
    for message in [&second, &second, &third] {
        session.send(message).await;
    }
    assert_eq!(firsts(&session.answer().await.unwrap()), [7.0]);
    assert_eq!(firsts(&session.answer().await.unwrap()), [10.0]);
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pushed_step_is_computed_once_and_answered_on_the_clients_stream() {
    let (rig, mut session) = Rig::with_session().await;
    let second = session.message(hidden(1, &[2.0]), None, None, None);
    assert_eq!(rig.call(names::PUSH, second.clone()).await.unwrap(), "");
    assert_eq!(firsts(&session.answer().await.unwrap()), [7.0]);
    session.send(&second).await;
    assert_eq!(firsts(&session.step(hidden(1, &[3.0]), None, None).await.unwrap()), [10.0]);
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_span_over_two_workers_is_computed_hop_by_hop() {
    let spans = vec![Span::new(0, 1).unwrap(), Span::new(1, BLOCKS).unwrap()];
    let rig = Rig::shaped(Shape { spans, ..Shape::default() }).await;
    let mut session = rig.session().await;
    let answer = session.open(hidden(1, &[1.0, 2.0]), 30).await.unwrap();
    // First hop: 1 + 1, 3 + 1; second hop sums those: 2 + 3, 2 + 4 + 3.
    assert_eq!(firsts(&answer), [5.0, 9.0]);
    for (worker, blocks) in [(0, 1), (1, 3)] {
        let jobs = rig.workers[worker].memory.jobs.lock().unwrap();
        assert_eq!((jobs.len(), jobs[0].blocks.len()), (1, blocks));
    }
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deep_prompts_travel_in_block_order_and_are_counted() {
    let rig = Rig::new().await;
    let mut session = rig.session().await;
    let mut message = session.message(hidden(1, &[1.0, 2.0]), Some(30), Some(0), None);
    let prompts = |blocks: usize, tokens: usize| {
        let bytes = vec![0u8; blocks * tokens * HIDDEN * 4];
        raw_tensor(&[blocks, 1, tokens, HIDDEN], WireDtype::F32, bytes.into()).unwrap()
    };
    message.tensors[1] = prompts(4, 2);
    session.ask(&message).await.unwrap();
    let job = rig.memory().jobs.lock().unwrap()[0].clone();
    let got = job.prompts.unwrap();
    assert_eq!((got.batch, got.tokens, got.slot.len), (1, 2, 4 * 2 * 64 * 4));
    let mut wrong = session.message(hidden(1, &[1.0]), None, None, None);
    wrong.tensors[1] = prompts(3, 1);
    assert_eq!(session.ask(&wrong).await, Err("Received 3 prompts for 4 backends".into()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_real_clients_bytes_are_served() {
    let rig = Rig::new().await;
    let file = golden::file(golden::TRANSCRIPTS);
    let mut steps = 0;
    for transcript in file["streams"].as_array().unwrap() {
        let stream = rig.client.open_stream(rig.server, names::INFERENCE, DEADLINE).await.unwrap();
        let mut client = Client::of(stream);
        for event in transcript["events"].as_array().unwrap() {
            let bytes = golden::unhex(event[1].as_str().unwrap());
            match event[0].as_str().unwrap() {
                "c2s" => {
                    for (marker, payload) in frames(&bytes) {
                        match marker {
                            0 => client.stream.send(payload.into()).await.unwrap(),
                            _ => client.stream.finish().await.unwrap(),
                        }
                    }
                }
                "s2c" => {
                    for (marker, payload) in frames(&bytes) {
                        let answer = client.answer().await;
                        if marker == 1 {
                            let text = String::from_utf8_lossy(&payload[2..]).into_owned();
                            assert_eq!(answer, Err(text));
                        } else {
                            let golden = ExpertResponse::decode(&payload[..]).unwrap();
                            let answer = answer.unwrap();
                            assert_eq!(answer.size, golden.tensors[0].size);
                            assert_eq!(answer.dtype, golden.tensors[0].dtype);
                            assert_eq!(answer.buffer.len(), golden.tensors[0].buffer.len());
                            steps += 1;
                        }
                    }
                }
                _ => {}
            }
        }
    }
    assert!(steps >= 6, "only {steps} steps in the transcripts");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unary_calls_of_the_real_client_are_served() {
    let rig = Rig::new().await;
    let file = golden::file(golden::TRANSCRIPTS);
    let mut checked = 0;
    for call in file["unary_payloads"].as_array().unwrap() {
        let request = golden::bytes(call, "request_hex");
        let golden_answer = golden::bytes(call, "response_hex");
        match call["protocol"].as_str().unwrap() {
            names::INFO => {
                let request = ExpertUid::decode(&request[..]).unwrap();
                let answer = rig.call(names::INFO, request).await.unwrap();
                assert_eq!(answer, golden_answer, "rpc_info byte for byte");
                checked += 1;
            }
            names::FORWARD => {
                let request = ExpertRequest::decode(&request[..]).unwrap();
                let answer = rig.call(names::FORWARD, request).await.unwrap();
                let answer = ExpertResponse::decode(answer).unwrap();
                let golden = ExpertResponse::decode(&golden_answer[..]).unwrap();
                assert_eq!(answer.tensors[0].size, golden.tensors[0].size);
                checked += 1;
            }
            _ => {}
        }
    }
    assert!(checked >= 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forward_takes_unary_and_streamed_requests() {
    let rig = Rig::new().await;
    let states: Vec<f32> = (0..600).map(|n| n as f32).collect();
    let tensor = hidden(2, &states);
    let request = ExpertRequest {
        uid: uids(1..3),
        tensors: vec![tensor.clone(), dummy_tensor(WireDtype::F32)],
        metadata: encode_batch_metadata(None, 2).into(),
    };
    let answer =
        ExpertResponse::decode(rig.call(names::FORWARD, request.clone()).await.unwrap()).unwrap();
    let expected: Vec<f32> = states.iter().map(|value| value + 2.0).collect();
    assert_eq!(firsts(&answer.tensors[0]), expected);

    let mut stream =
        rig.client.open_stream(rig.server, names::FORWARD_STREAM, DEADLINE).await.unwrap();
    for tensor in request.tensors.clone() {
        for part in split(tensor, 10_000) {
            let part = ExpertRequest { tensors: vec![part], ..request.clone() };
            stream.send(part.encode_to_vec().into()).await.unwrap();
        }
    }
    stream.finish().await.unwrap();
    let bytes = stream.recv().await.unwrap().unwrap();
    let part = ExpertResponse::decode(bytes).unwrap();
    assert!(part.tensors[0].buffer.len() <= PART_BYTES);
    assert_eq!(firsts(&part.tensors[0]), expected);
    assert_eq!(stream.recv().await, Ok(None));
    assert!(rig.memory().jobs.lock().unwrap().iter().all(|job| job.kind == WorkKind::Forward));
    assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_own_client_gets_times() {
    let rig = Rig::new().await;
    let mut session = rig.session().await;
    let mut message = session.message(hidden(1, &[1.0]), Some(30), Some(0), None);
    let Value::Map(mut entries) = Value::decode(&message.metadata, Limits::SMALL).unwrap() else {
        panic!("no map")
    };
    entries.push((Value::str(keys::SEPAL_TIMING), Value::Bool(true)));
    message.metadata = Value::Map(entries).encode().into();
    session.send(&message).await;
    let bytes = session.stream.recv().await.unwrap().unwrap();
    let response = ExpertResponse::decode(bytes).unwrap();
    let times = Value::decode(&response.metadata, Limits::SMALL).unwrap();
    assert_eq!(times.get(keys::QUEUE_NS), Some(&Value::Int(1)));
    assert_eq!(times.get(keys::COMPUTE_NS), Some(&Value::Int(2)));
    assert!(matches!(times.get(keys::SERVER_NS), Some(Value::Int(1..))));
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn info_without_uid_has_figures_only_and_reachability_answers_for_itself() {
    let rig = Rig::new().await;
    let answer = rig.call(names::INFO, ExpertUid::default()).await.unwrap();
    let info = RpcInfo::decode(&ExpertInfo::decode(answer).unwrap().serialized_info).unwrap();
    assert_eq!((info.cache_tokens_available, info.schema), (65536, None));
    for (peer, available) in [(rig.server, true), (PeerId::random(), false)] {
        let peer = Some(NodeInfo { node_id: peer.to_bytes().into() });
        let answer = rig
            .call(names::REACHABILITY_CHECK, PingRequest { peer, ..PingRequest::default() })
            .await
            .unwrap();
        assert_eq!(PingResponse::decode(answer).unwrap().available, available);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_sessions_run_at_once_and_do_not_mix() {
    let rig = std::sync::Arc::new(Rig::new().await);
    let clients: Vec<_> = (0..64u32)
        .map(|number| {
            let rig = rig.clone();
            tokio::spawn(async move {
                let mut session = rig.session().await;
                let mut sum = number as f32;
                let answer = session.open(hidden(1, &[sum]), 24).await.unwrap();
                assert_eq!(firsts(&answer), [sum + 4.0]);
                for step in 1..24 {
                    sum += step as f32;
                    let answer =
                        session.step(hidden(1, &[step as f32]), Some(step), None).await.unwrap();
                    assert_eq!(firsts(&answer), [sum + 4.0]);
                }
                session.close().await;
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }
    until(|| rig.service.open_sessions() == 0).await;
    assert_eq!(rig.service.kv.figures().tokens_free, 65536);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_goes_away_frees_its_session_when_its_job_ends() {
    let rig = Rig::new().await;
    rig.memory().orders.paused.store(true, std::sync::atomic::Ordering::SeqCst);
    let mut session = rig.session().await;
    let message = session.message(hidden(1, &[1.0]), Some(30), Some(0), None);
    session.send(&message).await;
    until(|| rig.service.workers.arena().slots_in_use() == 3).await;
    drop(session);
    until(|| rig.service.open_sessions() == 0).await;
    // The job still names pages and slots.
    assert_eq!(rig.service.workers.arena().slots_in_use(), 3);
    assert_eq!(rig.service.kv.figures().tokens_free, 65536 - 120);
    rig.memory().orders.paused.store(false, std::sync::atomic::Ordering::SeqCst);
    until(|| rig.service.workers.arena().slots_in_use() == 0).await;
    assert_eq!(rig.service.kv.figures().tokens_free, 65536);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_lets_the_running_step_finish() {
    let (rig, mut session) = Rig::with_session().await;
    rig.memory().orders.paused.store(true, std::sync::atomic::Ordering::SeqCst);
    let message = session.message(hidden(1, &[2.0]), None, None, None);
    session.send(&message).await;
    until(|| rig.service.workers.arena().slots_in_use() == 3).await;
    rig.draining.send(true).unwrap();
    rig.memory().orders.paused.store(false, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(firsts(&session.answer().await.unwrap()), [7.0]);
    assert_eq!(session.answer().await, Err("this server is shutting down".into()));
    let mut late = rig.session().await;
    assert_eq!(late.open(hidden(1, &[1.0]), 30).await, Err("this server is shutting down".into()));
}

fn frames(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut frames = Vec::new();
    while !bytes.is_empty() {
        let length = u64::from_be_bytes(bytes[1..9].try_into().unwrap()) as usize;
        frames.push((bytes[0], bytes[9..9 + length].to_vec()));
        bytes = &bytes[9 + length..];
    }
    frames
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_protocol_is_not_served() {
    let rig = Rig::new().await;
    let call =
        rig.client.call_unary(rig.server, "Nobody.knows", Default::default(), DEADLINE).await;
    assert!(matches!(call, Err(CallError::NotSupported(_))), "{call:?}");
}

/// Prints what a step costs inside the server, for `--nocapture`; nothing is asserted about time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_of_a_step_in_this_server_is_recorded() {
    let rig = Rig::new().await;
    let mut session = rig.session().await;
    session.open(hidden(1, &[1.0]), 2000).await.unwrap();
    for step in 1..1000 {
        session.step(hidden(1, &[1.0]), Some(step), None).await.unwrap();
    }
    let figures = rig.service.telemetry.figures();
    assert_eq!(figures.count, 1000);
    println!("step in the server: {figures:?}");
    session.close().await;
}
