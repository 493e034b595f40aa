//! Two servers of one chain: what the first computes reaches the second by push, and the client's
//! own copy is dropped there.

use prost::Message;
use shared::figures::Trouble;
use swarm::names;
use swarm::wire::keys;
use swarm::wire::messages::*;
use swarm::wire::msgpack::Value;

use super::errors::with_key;
use super::rig::*;

/// The step of `session` over `blocks`, with the next servers of the chain.
fn step(
    session: &mut Client,
    states: Tensor,
    blocks: std::ops::Range<u32>,
    next: Vec<Value>,
) -> ExpertRequest {
    let open = (session.steps() == 0).then_some(30);
    let message = session.message(states, open, None, None);
    let message = ExpertRequest { uid: uids(blocks), ..message };
    with_key(message, keys::NEXT_SERVERS, (!next.is_empty()).then_some(Value::List(next)))
}

fn server(rig: &Rig, session: &Client, start: u32, end: u32) -> Value {
    Value::Tuple(vec![
        Value::str(rig.server.to_string()),
        Value::str(&session.id),
        Value::uint(start),
        Value::uint(end),
    ])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_output_goes_on_to_the_next_server_and_is_computed_there_once() {
    let (first, second) = (Rig::new().await, Rig::new().await);
    let address = second.address.clone().with_p2p(second.server).unwrap();
    first.node.connect(address).await.unwrap();
    let (mut a, mut b) = (first.session().await, second.session().await);
    let message = step(&mut a, hidden(1, &[1.0]), 0..1, Vec::new());
    let states = a.ask(&message).await.unwrap();
    assert_eq!(firsts(&states), [2.0]);
    let message = step(&mut b, states, 1..4, Vec::new());
    assert_eq!(firsts(&b.ask(&message).await.unwrap()), [5.0]);

    // The second step: block 0 sums 1 + 2 and adds 1; blocks 1 to 3 sum 2 + 4 and add 3.
    let message = step(&mut a, hidden(1, &[2.0]), 0..1, vec![server(&second, &b, 1, 4)]);
    let states = a.ask(&message).await.unwrap();
    assert_eq!(firsts(&states), [4.0]);
    // Nobody but the first server has sent it; the answer comes on the client's stream.
    assert_eq!(firsts(&b.answer().await.unwrap()), [9.0]);
    let own_copy = step(&mut b, states, 1..4, Vec::new());
    b.send(&own_copy).await;

    // The copy was dropped: the next answer is that of the third step.
    let message = step(&mut a, hidden(1, &[3.0]), 0..1, Vec::new());
    let states = a.ask(&message).await.unwrap();
    let message = step(&mut b, states, 1..4, Vec::new());
    assert_eq!(firsts(&b.ask(&message).await.unwrap()), [2.0 + 4.0 + 7.0 + 3.0]);
    a.close().await;
    b.close().await;
    assert_eq!(first.service.troubles.of(Trouble::Push), 0);
    assert_eq!(second.service.troubles.of(Trouble::Push), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_nobody_takes_is_counted_and_hurts_nobody() {
    let rig = Rig::new().await;
    let mut session = rig.session().await;
    let message = step(&mut session, hidden(1, &[1.0]), 0..4, Vec::new());
    session.ask(&message).await.unwrap();
    let nobody = p2p::PeerId::random().to_string();
    let next = |peer: &str, start: u32, end: u32| {
        Value::Tuple(vec![Value::str(peer), Value::str("s"), Value::uint(start), Value::uint(end)])
    };
    // A peer that does not exist is looked for in the background; the others are refused at once.
    let cases = [
        next(&nobody, 0, 4),
        next("not a peer", 0, 4),
        next(&rig.server.to_string(), 0, 4),
        next(&nobody, 4, 4),
        next(&nobody, 0, u32::MAX),
    ];
    for (number, case) in cases.into_iter().enumerate() {
        let message = step(&mut session, hidden(1, &[0.0]), 0..4, vec![case]);
        assert_eq!(firsts(&session.ask(&message).await.unwrap()), [5.0], "step {number}");
    }
    until(|| rig.service.troubles.of(Trouble::Push) == 5).await;
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_strangers_push_is_dropped_and_the_session_goes_on() {
    let (rig, mut session) = Rig::with_session().await;
    let good = session.message(hidden(1, &[2.0]), None, None, None);
    let stranger = rig.peer().await;
    let push = async |request: &ExpertRequest| {
        let bytes = request.encode_to_vec().into();
        let answer = stranger.call_unary(rig.server, names::PUSH, bytes, DEADLINE);
        answer.await.map_err(|error| error.to_string())
    };

    // Of another session, over other blocks, and without tensors: never with the session.
    let unknown = with_key(good.clone(), keys::SESSION_ID, Some(Value::str("nobody")));
    assert_eq!(push(&unknown).await, Ok(Default::default()));
    let other_blocks = ExpertRequest { uid: uids(1..2), ..good.clone() };
    let refused = push(&other_blocks).await.unwrap_err();
    assert!(refused.contains("other blocks"), "{refused}");
    let empty = ExpertRequest { tensors: Vec::new(), ..good.clone() };
    let refused = push(&empty).await.unwrap_err();
    assert!(refused.contains("must have tensors"), "{refused}");
    let unnamed = with_key(good.clone(), keys::SESSION_ID, None);
    let refused = push(&unnamed).await.unwrap_err();
    assert!(refused.contains("KeyError('session_id')"), "{refused}");
    assert_eq!(rig.service.troubles.of(Trouble::Push), 2);

    // With the session's id and blocks, but not computable: dropped there, also under the id of the
    // step to come.
    let mut two_rows = good.clone();
    two_rows.tensors[0] = hidden(2, &[7.0, 7.0]);
    push(&two_rows).await.unwrap();
    until(|| rig.service.troubles.of(Trouble::Push) == 3).await;
    assert_eq!(firsts(&session.ask(&good).await.unwrap()), [7.0]);
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_id_in_use_is_refused_until_its_session_ends() {
    let (rig, mut session) = Rig::with_session().await;
    let mut twin = rig.session().await;
    twin.id = session.id.clone();
    let text = twin.open(hidden(1, &[1.0]), 30).await.unwrap_err();
    let expected = format!("session id {} is in use by another open session", session.id);
    assert_eq!(text, expected);
    assert_eq!(rig.service.troubles.of(Trouble::Malformed), 1);
    let id = session.id.clone();
    assert_eq!(firsts(&session.step(hidden(1, &[2.0]), None, None).await.unwrap()), [7.0]);
    session.close().await;
    until(|| rig.service.open_sessions() == 0).await;
    let mut heir = rig.session().await;
    heir.id = id;
    heir.open(hidden(1, &[1.0]), 30).await.unwrap();
    heir.close().await;
}
