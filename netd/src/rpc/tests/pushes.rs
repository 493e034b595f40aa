//! Pushed steps beside the client's copies: whichever comes first is computed, once, and they must
//! be the same.

use std::sync::atomic::Ordering;

use p2p::{P2p, RpcStream};
use prost::Message;
use shared::figures::{PushedStep, Trouble};
use swarm::names;
use swarm::wire::compression::encode;
use swarm::wire::keys;
use swarm::wire::messages::*;
use swarm::wire::msgpack::Value;
use swarm::wire::packing::pack;
use swarm::wire::tensor::{WireDtype, raw_tensor};

use super::errors::with_key;
use super::rig::*;

/// Another server, and its standing stream.
async fn standing(rig: &Rig) -> (P2p, RpcStream) {
    let stranger = rig.peer().await;
    let stream = stranger.open_stream(rig.server, names::PUSH_STREAM, DEADLINE).await.unwrap();
    (stranger, stream)
}

/// A session after its first step, and another server with its standing stream.
async fn pushing() -> (Rig, Client, P2p, RpcStream) {
    let (rig, session) = Rig::with_session().await;
    let (stranger, stream) = standing(&rig).await;
    (rig, session, stranger, stream)
}

async fn push(stream: &mut RpcStream, request: &ExpertRequest) {
    stream.send(request.encode_to_vec().into()).await.unwrap();
}

/// Sends the client's copy of a step, and waits until the server has read it. Nothing else is under way.
async fn send_copy(rig: &Rig, session: &mut Client, message: &ExpertRequest) {
    /// Before each message: its kind, and its length.
    const HEADER_BYTES: usize = 1 + 8;
    let received = || rig.node.figures().direct.received;
    let with_copy = received() + (HEADER_BYTES + message.encoded_len()) as u64;
    session.send(message).await;
    until(|| received() >= with_copy).await;
}

fn counts(rig: &Rig) -> [u64; PushedStep::ALL.len()] {
    let pushed = rig.service.telemetry.served().pushed;
    PushedStep::ALL.map(|outcome| pushed[&outcome])
}

fn holding(request: &ExpertRequest, states: Tensor) -> ExpertRequest {
    let mut other = request.clone();
    other.tensors[0] = states;
    other
}

fn exact(request: &ExpertRequest) -> ExpertRequest {
    with_key(request.clone(), keys::SEPAL_EXACT, Some(Value::Bool(true)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_stream_carries_all_steps_of_a_session_and_copies_are_dropped() {
    let (rig, mut session, _stranger, mut stream) = pushing().await;
    let mut sum = 1.0;
    for step in 0..6 {
        let message = session.message(hidden(1, &[2.0]), None, None, None);
        push(&mut stream, &message).await;
        sum += 2.0;
        assert_eq!(firsts(&session.answer().await.unwrap()), [sum + 4.0], "step {step}");
        session.send(&message).await;
    }
    // The copy first: the push is dropped.
    let message = session.message(hidden(1, &[2.0]), None, None, None);
    assert_eq!(firsts(&session.ask(&message).await.unwrap()), [sum + 2.0 + 4.0]);
    push(&mut stream, &message).await;
    until(|| counts(&rig) == [6, 1, 0]).await;
    assert_eq!(rig.service.troubles.of(Trouble::Push), 0);
    session.close().await;
    stream.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_in_another_encoding_is_the_same_step() {
    let (rig, mut session, _stranger, mut stream) = pushing().await;
    let message = session.message(hidden(1, &[2.0]), None, None, None);
    let raw = hidden(1, &[2.0]).buffer;
    let half = encode(&[1, 1, HIDDEN], WireDtype::F32, raw, Compression::Float16).unwrap();
    push(&mut stream, &holding(&message, half)).await;
    assert_eq!(firsts(&session.answer().await.unwrap()), [7.0]);
    session.send(&message).await;
    assert_eq!(firsts(&session.step(hidden(1, &[1.0]), None, None).await.unwrap()), [8.0]);
    assert_eq!(counts(&rig), [1, 0, 0]);
    session.close().await;
}

/// Packed states whose element 0 is given for every token.
fn packed(firsts: &[f32]) -> Tensor {
    let plain = hidden(1, firsts);
    // The upper half of a float32.
    let bytes = plain.buffer.as_chunks::<4>().0.iter().flat_map(|bytes| [bytes[2], bytes[3]]);
    let shape = [1, firsts.len(), HIDDEN];
    let plain = raw_tensor(&shape, WireDtype::Bf16, bytes.collect::<Vec<u8>>().into()).unwrap();
    pack(&plain).expect("mostly zeros")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packed_states_are_those_of_the_copy_and_come_over_standing_streams_alone() {
    let (rig, mut session, stranger, mut stream) = pushing().await;
    let message = session.message(hidden(1, &[2.0]), None, None, None);
    push(&mut stream, &holding(&message, packed(&[2.0]))).await;
    assert_eq!(firsts(&session.answer().await.unwrap()), [7.0]);
    session.send(&message).await;
    until(|| counts(&rig) == [1, 0, 0]).await;

    let message = session.message(hidden(1, &[1.0]), None, None, None);
    let pushed = holding(&message, packed(&[1.0])).encode_to_vec();
    stranger.call_unary(rig.server, names::PUSH, pushed.into(), DEADLINE).await.unwrap();
    assert_eq!(firsts(&session.ask(&message).await.unwrap()), [8.0], "that of the copy");
    assert_eq!(counts(&rig), [1, 0, 0]);
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_differs_before_the_answer_has_left_is_computed() {
    let (rig, mut session, _stranger, mut stream) = pushing().await;
    let paused = &rig.memory().orders.paused;
    let message = session.message(hidden(1, &[2.0]), None, None, None);
    paused.store(true, Ordering::SeqCst);
    push(&mut stream, &holding(&message, hidden(1, &[50.0]))).await;
    until(|| rig.service.workers.arena().slots_in_use() > 0).await;
    // While the push is computed.
    send_copy(&rig, &mut session, &message).await;
    paused.store(false, Ordering::SeqCst);
    assert_eq!(firsts(&session.answer().await.unwrap()), [7.0]);
    assert_eq!(counts(&rig), [0, 0, 1]);

    // Pushes are not believed any more, also right ones; the client's steps go on.
    let message = session.message(hidden(1, &[3.0]), None, None, None);
    push(&mut stream, &message).await;
    assert_eq!(firsts(&session.ask(&message).await.unwrap()), [10.0]);
    assert_eq!(counts(&rig), [0, 0, 1]);
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_differs_after_the_answer_ends_the_session() {
    let (rig, mut bystander, _stranger, mut stream) = pushing().await;
    type Change = fn(&ExpertRequest) -> ExpertRequest;
    let changes: [Change; 3] = [
        |message| holding(message, hidden(1, &[50.0])),
        |message| with_key(message.clone(), keys::START_FROM_POSITION, Some(Value::Int(0))),
        // A value that rounds to the same in no type.
        |message| holding(message, hidden(1, &[2.000_001])),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut session = rig.session().await;
        session.open(hidden(1, &[1.0]), 30).await.unwrap();
        let message = session.message(hidden(1, &[2.0]), None, None, None);
        push(&mut stream, &change(&message)).await;
        session.answer().await.unwrap();
        let text = session.ask(&message).await.unwrap_err();
        assert!(text.contains("pushed other values"), "change {number}: {text}");
    }
    assert_eq!(counts(&rig), [3, 0, 3]);
    assert_eq!(firsts(&bystander.step(hidden(1, &[2.0]), None, None).await.unwrap()), [7.0]);
    bystander.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_cannot_undo_tokens_of_the_session() {
    let (rig, mut session, _stranger, mut stream) = pushing().await;
    // Without hidden states it would only roll back.
    let message = session.message(hidden(1, &[2.0]), None, None, None);
    let empty =
        Tensor { size: vec![1, 0, HIDDEN as u32], buffer: Default::default(), ..hidden(1, &[]) };
    let back = with_key(holding(&message, empty), keys::START_FROM_POSITION, Some(Value::Int(0)));
    push(&mut stream, &back).await;
    until(|| rig.service.troubles.of(Trouble::Push) == 1).await;
    assert_eq!(firsts(&session.ask(&message).await.unwrap()), [7.0]);
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beams_are_pushed_only_by_those_who_push_their_order() {
    let rig = Rig::new().await;
    let mut session = rig.session().await;
    session.open(hidden(2, &[1.0, 10.0]), 30).await.unwrap();
    let (_stranger, mut stream) = standing(&rig).await;
    let message = session.message(hidden(2, &[2.0, 2.0]), None, None, Some(&[1, 1]));
    // A Petals server has the beam order of the first step.
    let first_order = session.message(hidden(2, &[2.0, 2.0]), None, None, Some(&[0, 1]));
    let mut of_petals = message.clone();
    of_petals.tensors[2] = first_order.tensors[2].clone();
    push(&mut stream, &of_petals).await;
    assert_eq!(firsts(&session.ask(&message).await.unwrap()), [16.0, 16.0]);
    assert_eq!(counts(&rig)[PushedStep::First as usize], 0);

    let message = session.message(hidden(2, &[2.0, 3.0]), None, None, Some(&[0, 0]));
    push(&mut stream, &exact(&message)).await;
    assert_eq!(firsts(&session.answer().await.unwrap()), [18.0, 19.0]);
    session.send(&message).await;
    until(|| counts(&rig)[PushedStep::First as usize] == 1).await;
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_with_another_beam_order_counts_or_ends_the_session() {
    // Rows that were moved cannot be moved back; rows that stayed can.
    for (pushed_order, is_mended) in [(None, true), (Some([0, 0]), false)] {
        let rig = Rig::new().await;
        let mut session = rig.session().await;
        session.open(hidden(2, &[1.0, 10.0]), 30).await.unwrap();
        let (_stranger, mut stream) = standing(&rig).await;
        let message = session.message(hidden(2, &[2.0, 2.0]), None, None, Some(&[1, 1]));
        let order = pushed_order.as_ref().map(|order| order.as_slice());
        let pushed = session.message(hidden(2, &[2.0, 2.0]), None, None, order);
        let mut other = message.clone();
        other.tensors[2] = pushed.tensors[2].clone();
        let paused = &rig.memory().orders.paused;
        paused.store(true, Ordering::SeqCst);
        push(&mut stream, &exact(&other)).await;
        until(|| rig.service.workers.arena().slots_in_use() > 0).await;
        // While the push is computed.
        send_copy(&rig, &mut session, &message).await;
        paused.store(false, Ordering::SeqCst);
        let answer = session.answer().await;
        match is_mended {
            true => assert_eq!(firsts(&answer.unwrap()), [16.0, 16.0]),
            false => assert!(answer.unwrap_err().contains("pushed other values")),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_compresses_computes_the_copies_only() {
    let compression = shared::config::Compression::Float16;
    let rig = Rig::shaped(Shape { compression, ..Shape::default() }).await;
    let mut session = rig.session().await;
    session.open(hidden(1, &[1.0]), 30).await.unwrap();
    let (_stranger, mut stream) = standing(&rig).await;
    let message = session.message(hidden(1, &[2.0]), None, None, None);
    push(&mut stream, &message).await;
    session.ask(&message).await.unwrap();
    assert_eq!(counts(&rig)[PushedStep::First as usize], 0);
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_ends_the_standing_stream_and_not_the_session() {
    let (rig, mut session, _stranger, mut stream) = pushing().await;
    stream.send(vec![0xff; 100].into()).await.unwrap();
    assert!(stream.recv().await.is_err());
    let message = session.message(hidden(1, &[2.0]), None, None, None);
    let (_stranger, mut stream) = standing(&rig).await;
    let lying = Tensor { size: vec![1, 1000, 64], ..packed(&[2.0]) };
    push(&mut stream, &holding(&message, lying)).await;
    assert!(stream.recv().await.unwrap_err().to_string().contains("[1, 1000, 64]"));
    let (_stranger, mut stream) = standing(&rig).await;
    push(&mut stream, &ExpertRequest { uid: uids(1..2), ..message.clone() }).await;
    assert!(stream.recv().await.unwrap_err().to_string().contains("other blocks"));
    assert_eq!(firsts(&session.ask(&message).await.unwrap()), [7.0]);
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_for_unknown_sessions_end_no_stream_and_a_drain_does() {
    let (rig, mut session, _stranger, mut stream) = pushing().await;
    let message = session.message(hidden(1, &[2.0]), None, None, None);
    let unknown = with_key(message.clone(), keys::SESSION_ID, Some(Value::str("nobody")));
    push(&mut stream, &unknown).await;
    push(&mut stream, &message).await;
    assert_eq!(firsts(&session.answer().await.unwrap()), [7.0]);
    session.close().await;
    rig.draining.send_replace(true);
    assert!(!matches!(stream.recv().await, Ok(Some(_))));
}
