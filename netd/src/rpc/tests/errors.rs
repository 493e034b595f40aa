//! Bad requests: each gets one clear text, and a session beside it goes on.

use p2p::CallError;
use prost::Message;
use swarm::names;
use swarm::wire::keys;
use swarm::wire::messages::*;
use swarm::wire::msgpack::{Limits, Value};
use swarm::wire::tensor::{WireDtype, dummy_tensor, raw_tensor};

use shared::figures::Trouble;

use super::rig::*;

/// `message` with `key` of its metadata set, or taken away.
pub fn with_key(mut message: ExpertRequest, key: &str, value: Option<Value>) -> ExpertRequest {
    let Value::Map(mut entries) = Value::decode(&message.metadata, Limits::SMALL).unwrap() else {
        panic!("no map")
    };
    entries.retain(|(name, _)| name.as_str() != Some(key));
    entries.extend(value.map(|value| (Value::str(key), value)));
    message.metadata = Value::Map(entries).encode().into();
    message
}

/// The text that a first step gets after `change`.
async fn refused(rig: &Rig, change: impl FnOnce(ExpertRequest) -> ExpertRequest) -> String {
    let mut session = rig.session().await;
    let message = session.message(hidden(1, &[1.0, 2.0]), Some(30), Some(0), None);
    session.ask(&change(message)).await.unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_bad_step_has_its_text_and_disturbs_nobody() {
    let rig = Rig::new().await;
    let mut bystander = rig.session().await;
    bystander.open(hidden(1, &[1.0]), 60).await.unwrap();

    let text = refused(&rig, |m| ExpertRequest { uid: uids(0..5), ..m }).await;
    assert_eq!(text, "Remote peer does not serve tiny-llama-hf.4");
    for uid in
        ["", "other.0", "tiny-llama-hf", "tiny-llama-hf.", "tiny-llama-hf.+1", "tiny-llama-hf.0 "]
    {
        let text = refused(&rig, |m| ExpertRequest { uid: uid.into(), ..m }).await;
        assert!(text.starts_with("Remote peer does not serve "), "{uid:?}: {text}");
    }
    let text =
        refused(&rig, |m| ExpertRequest { uid: "tiny-llama-hf.1 tiny-llama-hf.1".into(), ..m })
            .await;
    assert_eq!(text, "block 1 is not served or is named twice");
    let text = refused(&rig, |m| with_key(m, keys::MAX_LENGTH, None)).await;
    assert_eq!(text, "rpc_inference metadata must contain int max_length, got None");
    for (length, shown) in [(100_000, "100000"), (-1, "-1")] {
        let text = refused(&rig, |m| with_key(m, keys::MAX_LENGTH, Some(Value::Int(length)))).await;
        assert_eq!(text, format!("Cannot allocate KV cache for {shown} tokens, max = 8192"));
    }
    let text = refused(&rig, |m| with_key(m, keys::MAX_LENGTH, Some(Value::Int(1)))).await;
    assert_eq!(
        text,
        "Maximum length exceeded: prefix 0 + current 2 exceeds pre-allocated maximum 1"
    );
    let text = refused(&rig, |mut m| {
        m.tensors[0].size = vec![4_000_000_000, 0, 64];
        m.tensors[0].buffer.clear();
        with_key(m, keys::MAX_LENGTH, Some(Value::Int(0)))
    })
    .await;
    assert_eq!(text, "batch of 4000000000 sequences is over the limit of 4096");
    let text = refused(&rig, |m| with_key(m, keys::POINTS, Some(Value::str("many")))).await;
    assert_eq!(text, "rpc_inference should have number of points as a number or None, got 'many'");
    let text =
        refused(&rig, |m| with_key(m, keys::ACTIVE_ADAPTER, Some(Value::str("nope/x")))).await;
    assert_eq!(text, "'adapter nope/x not found'");
    let text = refused(&rig, |m| with_key(m, keys::START_FROM_POSITION, Some(Value::Int(1)))).await;
    assert_eq!(text, "start_from_position 1 is beyond the 0 tokens in the cache of this session");
    let text = refused(&rig, |m| {
        let m = with_key(m, keys::ARGS_STRUCTURE, None);
        ExpertRequest { tensors: m.tensors[..1].to_vec(), ..m }
    })
    .await;
    assert_eq!(text, "not enough values to unpack (expected at least 3, got 1)");
    let text = refused(&rig, |mut m| {
        m.tensors[2] = dummy_tensor(WireDtype::F32);
        m
    })
    .await;
    assert_eq!(text, "hypo ids must be int64, got torch.float32");
    let text = refused(&rig, |mut m| {
        m.tensors[0] = raw_tensor(&[1, 2, 32], WireDtype::F32, vec![0; 256].into()).unwrap();
        m
    })
    .await;
    assert_eq!(text, "hidden states have size 32, the model's hidden size is 64");
    let text = refused(&rig, |mut m| {
        m.tensors[0].buffer = m.tensors[0].buffer.slice(4..);
        m
    })
    .await;
    assert_eq!(text, "tensor of shape [1, 2, 64] and type float32 has a buffer of 508 bytes");
    let text = refused(&rig, |m| ExpertRequest { metadata: vec![0xc1].into(), ..m }).await;
    assert!(text.contains("metadata"), "{text}");

    let answer = bystander.step(hidden(1, &[2.0]), Some(1), None).await.unwrap();
    assert_eq!(firsts(&answer), [7.0]);
    bystander.close().await;
    until(|| rig.service.open_sessions() == 0).await;
    assert_eq!(rig.service.kv.figures().tokens_free, 65536);
    assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_that_are_not_finite_are_named_by_row_and_token() {
    let rig = Rig::new().await;
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut session = rig.session().await;
        let text = session.open(hidden(2, &[1.0, 2.0, 3.0, bad]), 30).await.unwrap_err();
        assert!(
            text.contains("not finite") && text.contains("row 1, token 1, element 0"),
            "{text}"
        );
    }
    assert!(rig.memory().jobs.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_over_the_batch_limit_and_of_another_batch_are_refused() {
    let rig = Rig::new().await;
    let mut session = rig.session().await;
    let text = session.open(hidden(1, &[1.0; 1025]), 2000).await.unwrap_err();
    assert_eq!(text, "Task size greater than max_batch_size (1024), it can't be processed");
    let mut session = rig.session().await;
    session.open(hidden(1, &[1.0; 1024]), 1024).await.unwrap();
    let mut session = rig.session().await;
    session.open(hidden(2, &[1.0, 1.0]), 30).await.unwrap();
    let text = session.step(hidden(1, &[1.0]), None, None).await.unwrap_err();
    assert_eq!(text, "batch of 1 sequences in a session of 2");
    let mut session = rig.session().await;
    session.open(hidden(2, &[1.0, 1.0]), 30).await.unwrap();
    let text = session.step(hidden(2, &[1.0, 1.0]), None, Some(&[0, 2])).await.unwrap_err();
    assert_eq!(text, "hypo_ids element 1 is 2, which is not a row of a batch of 2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_cache_refuses_at_once_and_waiting_is_possible() {
    let rig = Rig::new().await;
    let mut first = rig.session().await;
    first.open(hidden(2, &[1.0, 1.0]), 8000).await.unwrap();
    let mut second = rig.session().await;
    let text = second.open(hidden(1, &[1.0]), 8000).await.unwrap_err();
    // 8000 tokens in 4 blocks, keys and values of 2 heads of 16 float32.
    assert_eq!(text, "Could not allocate 8192000 bytes immediately: out of memory");
    let mut third = rig.session().await;
    let message = third.message(hidden(1, &[1.0]), Some(8000), Some(0), None);
    third.send(&with_key(message, keys::ALLOC_TIMEOUT, Some(Value::Float(50.0)))).await;
    until(|| rig.service.kv.figures().waiting == 1).await;
    first.close().await;
    assert_eq!(firsts(&third.answer().await.unwrap()), [5.0]);
    third.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_ends_its_own_stream_only() {
    let rig = Rig::new().await;
    let mut session = rig.session().await;
    session.stream.send(vec![0xff; 100].into()).await.unwrap();
    assert!(session.answer().await.unwrap_err().contains("cannot read the request"));
    let mut session = rig.session().await;
    session.open(hidden(1, &[1.0]), 30).await.unwrap();
    session.stream.send(vec![0x0a, 0xff].into()).await.unwrap();
    assert!(session.answer().await.unwrap_err().contains("cannot read the request"));
    let garbage =
        rig.client.call_unary(rig.server, names::FORWARD, vec![0xff; 9].into(), DEADLINE).await;
    assert!(matches!(garbage, Err(CallError::Remote(_))), "{garbage:?}");
    let mut session = rig.session().await;
    session.open(hidden(1, &[1.0]), 30).await.unwrap();
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unary_errors_have_the_form_of_python() {
    let rig = Rig::new().await;
    let info = rig.call(names::INFO, ExpertUid { uid: "nope.0".into() }).await.unwrap_err();
    assert_eq!(info, "KeyError('nope.0')");
    let request = |uid: &str, tensors| ExpertRequest {
        uid: uid.into(),
        tensors,
        metadata: Default::default(),
    };
    let forward = rig.call(names::FORWARD, request("x.0", Vec::new())).await.unwrap_err();
    assert_eq!(forward, "RuntimeError('Remote peer does not serve x.0')");
    let forward =
        rig.call(names::FORWARD, request("tiny-llama-hf.0", Vec::new())).await.unwrap_err();
    assert_eq!(forward, "ValueError('not enough values to unpack (expected at least 2, got 0)')");
    let backward =
        rig.call(names::BACKWARD, request("tiny-llama-hf.0", Vec::new())).await.unwrap_err();
    assert_eq!(backward, "ValueError('not enough values to unpack (expected at least 3, got 0)')");
    let push = rig.call(names::PUSH, request("tiny-llama-hf.0", Vec::new())).await.unwrap_err();
    assert_eq!(push, "ValueError('Unpack failed: incomplete input')");
    for (value, text) in [
        (Value::Int(1), "ValueError('output_compression must be a tuple/list')"),
        (
            Value::List(Vec::new()),
            "ValueError('output_compression tuple should have 1 element, got 0')",
        ),
    ] {
        let metadata =
            Value::Map(vec![(Value::str(keys::OUTPUT_COMPRESSION), value)]).encode().into();
        let request = ExpertRequest { metadata, ..request("tiny-llama-hf.0", Vec::new()) };
        assert_eq!(rig.call(names::FORWARD, request).await.unwrap_err(), text);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streamed_requests_with_bad_parts_get_their_text() {
    let rig = Rig::new().await;
    let part = |uid: &str, dtype: &str| ExpertRequest {
        uid: uid.into(),
        tensors: vec![Tensor { dtype: dtype.into(), ..Tensor::default() }],
        metadata: Default::default(),
    };
    for (parts, expected) in [
        (vec![], "the request is empty"),
        (vec![part("tiny-llama-hf.0", "")], "starts in the middle"),
        (vec![part("tiny-llama-hf.0", "float32"), part("tiny-llama-hf.1", "float32")], "same uids"),
    ] {
        let mut stream =
            rig.client.open_stream(rig.server, names::FORWARD_STREAM, DEADLINE).await.unwrap();
        for part in parts {
            stream.send(part.encode_to_vec().into()).await.unwrap();
        }
        let _ = stream.finish().await;
        match stream.recv().await {
            Err(CallError::Remote(text)) => assert!(text.contains(expected), "{text}"),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_over_the_limit_is_refused_before_it_is_read() {
    let rig = Rig::new().await;
    let mut session = rig.session().await;
    let message = vec![0u8; 5 << 20];
    // The server stops reading, so that sending may fail before the text is there.
    let _ = session.stream.send(message.into()).await;
    let text = session.answer().await.unwrap_err();
    assert_eq!(text, "request of 5242880 bytes exceeds the limit of 4194304 bytes");
    assert_eq!(rig.service.troubles.of(Trouble::TooLarge), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_steps_of_one_peer_wait_for_its_budget_and_all_are_served() {
    let limits = shared::limits::Limits { max_batch_size: 4096, ..limits() };
    let shape = Shape { limits, arena_bytes: 16 << 20, ..Shape::default() };
    let rig = std::sync::Arc::new(Rig::shaped(shape).await);
    let clients: Vec<_> = (0..16)
        .map(|_| {
            let rig = rig.clone();
            tokio::spawn(async move {
                let mut session = rig.session().await;
                let states = vec![1.0; 1000];
                for _ in 0..2 {
                    let answer = if session.steps() == 0 {
                        session.open(hidden(1, &states), 1000).await
                    } else {
                        session.step(hidden(1, &states), Some(0), None).await
                    };
                    assert_eq!(firsts(&answer.unwrap())[999], 1004.0);
                }
                session.close().await;
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }
}
