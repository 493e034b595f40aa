//! Peers that take too much, send without end, or take nothing: each is bounded, told, and counted,
//! and others are served.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use p2p::CallError;
use prost::Message;
use shared::figures::Trouble;
use swarm::names;
use swarm::wire::keys;
use swarm::wire::messages::*;
use swarm::wire::metadata::encode_batch_metadata;
use swarm::wire::msgpack::Value;
use swarm::wire::tensor::{WireDtype, dummy_tensor};

use super::rig::*;
use crate::clock::skip;
use crate::rpc::Timeouts;
use crate::sessions::eviction::MAX_SILENCE;

fn forward(tokens: usize) -> ExpertRequest {
    ExpertRequest {
        uid: uids(0..BLOCKS),
        tensors: vec![hidden(1, &vec![0.0; tokens]), dummy_tensor(WireDtype::F32)],
        metadata: encode_batch_metadata(None, 2).into(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_peer_with_many_large_requests_does_not_hold_up_another() {
    const FLOOD: usize = 24;
    let rig = Rig::new().await;
    let quiet = rig.peer().await;
    rig.memory().orders.paused.store(true, SeqCst);
    let ask = |node: p2p::P2p, tokens| {
        let server = rig.server;
        tokio::spawn(async move {
            let bytes = forward(tokens).encode_to_vec().into();
            node.call_unary(server, names::FORWARD, bytes, DEADLINE).await
        })
    };
    let flood: Vec<_> = (0..FLOOD).map(|_| ask(rig.client.clone(), 300)).collect();
    until(|| rig.service.admission_queue.waiting() == FLOOD - 4).await;
    let other = ask(quiet, 200);
    until(|| rig.service.admission_queue.waiting() == FLOOD - 3).await;
    rig.memory().orders.paused.store(false, SeqCst);
    other.await.unwrap().unwrap();
    for request in flood {
        request.await.unwrap().unwrap();
    }
    let jobs = rig.memory().jobs.lock().unwrap();
    let place = jobs.iter().position(|job| job.tokens == 200).unwrap();
    // Behind the four that were with the worker, and those whose tasks run before its own does: far
    // from the end, where it came.
    assert!(place <= FLOOD / 2, "served as number {place} of {}", jobs.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_of_parts_without_end_is_cut_off() {
    let rig = Rig::new().await;
    let open = rig.client.open_stream(rig.server, names::FORWARD_STREAM, DEADLINE);
    let mut stream = open.await.unwrap();
    let first = ExpertRequest {
        tensors: vec![Tensor {
            dtype: "float32".into(),
            size: vec![1, 1, HIDDEN as u32],
            ..Tensor::default()
        }],
        ..forward(1)
    };
    stream.send(first.encode_to_vec().into()).await.unwrap();
    let next = ExpertRequest { tensors: vec![Tensor::default()], ..forward(1) };
    // The server stops reading at some point, so that not all of it can be sent.
    for _ in 0..100 {
        if stream.send(next.encode_to_vec().into()).await.is_err() {
            break;
        }
    }
    match stream.recv().await {
        Err(CallError::Remote(text)) => assert!(text.contains("limit of 18 parts"), "{text}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(rig.service.troubles.of(Trouble::TooLarge), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_says_less_and_less_is_given_up_when_its_time_is_over() {
    let shape = Shape {
        timeouts: Timeouts {
            request: Duration::from_millis(300),
            session: DEADLINE,
            step: DEADLINE,
            max_alloc: DEADLINE,
        },
        ..Shape::default()
    };
    let rig = Rig::shaped(shape).await;
    let open = rig.client.open_stream(rig.server, names::FORWARD_STREAM, DEADLINE);
    let mut stream = open.await.unwrap();
    let mut part = forward(1);
    part.tensors = vec![Tensor { chunks: 2, ..hidden(1, &[1.0]) }];
    stream.send(part.encode_to_vec().into()).await.unwrap();
    assert_eq!(stream.recv().await, Err(CallError::Remote(String::new())));
    assert_eq!(rig.service.troubles.of(Trouble::TimedOut), 1);
    assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_with_all_the_kv_memory_gets_no_more_while_another_wants_some() {
    let rig = Rig::new().await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut session = rig.session().await;
        session.open(hidden(1, &[1.0]), 8000).await.unwrap();
        held.push(session);
    }
    let other = rig.peer().await;
    let ask = async || {
        let stream = other.open_stream(rig.server, names::INFERENCE, DEADLINE);
        let mut session = Client::of(stream.await.unwrap());
        let answer = session.open(hidden(1, &[1.0]), 4000).await;
        answer.map(|_| session)
    };
    let text = ask().await.err().unwrap();
    assert!(text.ends_with("immediately: out of memory"), "{text}");
    held.pop().unwrap().close().await;
    until(|| rig.service.open_sessions() == 1).await;
    let mut more = rig.session().await;
    let text = more.open(hidden(1, &[1.0]), 500).await.unwrap_err();
    assert!(text.contains("this peer holds"), "{text}");
    assert_eq!(rig.service.troubles.of(Trouble::OverShare), 1);
    let others = ask().await.unwrap();
    // The other has what it wanted, so that the first may go on beyond its share.
    let mut more = rig.session().await;
    more.open(hidden(1, &[1.0]), 500).await.unwrap();
    for session in [more, others] {
        session.close().await;
    }
}

#[tokio::test]
async fn a_silent_session_above_its_share_gives_way_to_another_peer() {
    let rig = Rig::new().await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut session = rig.session().await;
        session.open(hidden(1, &[1.0]), 8000).await.unwrap();
        held.push(session);
    }
    let other = rig.peer().await;
    let ask = async || {
        let stream = other.open_stream(rig.server, names::INFERENCE, DEADLINE);
        let mut session = Client::of(stream.await.unwrap());
        let answer = session.open(hidden(1, &[1.0]), 4000).await;
        answer.map(|_| session)
    };
    let text = ask().await.err().unwrap();
    assert!(text.ends_with("immediately: out of memory"), "{text}");
    // One of the two goes on, the other is silent.
    let (mut silent, mut busy) = (held.remove(0), held.remove(0));
    skip(MAX_SILENCE / 2).await;
    busy.step(hidden(1, &[1.0]), None, None).await.unwrap();
    skip(MAX_SILENCE / 2).await;
    ask().await.unwrap().close().await;
    let text = silent.answer().await.unwrap_err();
    assert!(text.contains("was silent for 5 s"), "{text}");
    assert_eq!(rig.service.troubles.of(Trouble::OverShare), 1);
    busy.step(hidden(1, &[1.0]), None, None).await.unwrap();
    busy.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metadata_of_wrong_depth_size_or_kind_is_refused() {
    let rig = Rig::new().await;
    let nested = (0..200).fold(Value::Nil, |inner, _| Value::List(vec![inner]));
    let map = |value| Value::Map(vec![(Value::str(keys::MAX_LENGTH), value)]).encode();
    let cases = [
        (map(nested), "metadata"),
        (map(Value::str("9")), "must contain int max_length, got '9'"),
        (map(Value::Float(9.0)), "must contain int max_length, got 9.0"),
        (Value::Int(7).encode(), "must be a map"),
        (vec![0xdf, 0xff, 0xff, 0xff, 0xff], "metadata"),
        (vec![0xc6, 0xff, 0xff, 0xff, 0xff], "metadata"),
    ];
    let count = cases.len() as u64;
    for (metadata, words) in cases {
        let mut session = rig.session().await;
        let message = session.message(hidden(1, &[1.0]), None, None, None);
        let message = ExpertRequest { metadata: metadata.into(), ..message };
        let text = session.ask(&message).await.unwrap_err();
        assert!(text.contains(words), "{text}");
    }
    until(|| rig.service.open_sessions() == 0).await;
    assert_eq!(rig.service.troubles.of(Trouble::Malformed), count);
}

#[tokio::test]
async fn a_peer_that_stops_reading_loses_its_session_and_nobody_else() {
    // Over before a write that makes no progress is given up.
    let limit = DEADLINE / 2;
    let timeouts = Timeouts { session: limit, ..Shape::default().timeouts };
    let rig = Rig::shaped(Shape { timeouts, ..Shape::default() }).await;
    let deaf = rig.peer().await;
    let stream = deaf.open_stream(rig.server, names::INFERENCE, DEADLINE);
    let mut session = Client::of(stream.await.unwrap());
    let states = || hidden(1, &[1.0; 500]);
    let first = session.message(states(), Some(600), Some(0), None);
    session.send(&first).await;
    let flood = async {
        loop {
            let step = session.message(states(), None, Some(0), None);
            let bytes = step.encode_to_vec().into();
            if session.stream.send(bytes).await.is_err() {
                return;
            }
        }
    };
    // Both directions fill up: the server cannot answer, so that it reads no more. Its answers have as many
    // bytes as the steps, and the window of a stream that is not read has 256 KiB.
    let answer_bytes = 4 * HIDDEN as u64 * 500;
    let is_full = until(|| rig.node.figures().direct.sent > 2 * answer_bytes);
    tokio::select! {
        () = flood => panic!("the stream stays open while nothing is read"),
        () = is_full => {}
    }
    let mut calm = rig.session().await;
    calm.open(hidden(1, &[1.0]), 30).await.unwrap();
    calm.close().await;
    skip(limit).await;
    until(|| rig.service.open_sessions() == 0).await;
    until(|| rig.service.kv.figures().tokens_free == 65536).await;
    assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
    assert_eq!(rig.service.troubles.of(Trouble::TimedOut), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trouble_is_counted_by_kind() {
    let rig = Rig::new().await;
    let open = async |states: Tensor, length: u32| {
        let mut session = rig.session().await;
        session.open(states, length).await.map(|_| session)
    };
    let of = |kind| rig.service.troubles.of(kind);
    let holder = open(hidden(2, &[1.0, 1.0]), 8000).await.ok().unwrap();
    assert!(open(hidden(1, &[1.0]), 8000).await.is_err());
    assert_eq!(of(Trouble::NoMemory), 1);
    assert!(open(hidden(1, &[1.0]), 9000).await.is_err());
    assert_eq!(of(Trouble::TooLarge), 1);
    let strange = ExpertRequest { uid: uids(0..BLOCKS + 1), ..forward(1) };
    rig.call(names::FORWARD, strange).await.unwrap_err();
    assert_eq!(of(Trouble::NotServed), 1);
    drop(holder);
    until(|| of(Trouble::Abandoned) == 1).await;
    assert_eq!(rig.service.troubles.counts().iter().sum::<u64>(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_is_kept_for_the_client_of_a_session_and_not_for_one_that_was_refused() {
    let rig = Rig::new().await;
    let client = rig.client.peer_id();
    let mut refused = rig.session().await;
    refused.open(hidden(1, &[1.0]), 9000).await.unwrap_err();
    assert!(!rig.node.keeps_place_for(&client));
    let mut session = rig.session().await;
    session.open(hidden(1, &[1.0]), 30).await.unwrap();
    assert!(rig.node.keeps_place_for(&client));
    drop(session);
    until(|| rig.service.open_sessions() == 0).await;
    assert!(rig.node.keeps_place_for(&client), "it may come back");
}
