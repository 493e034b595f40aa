//! Answers in every compression, by the server's setting and by the request's wish, and requests in
//! every compression.

use prost::Message;
use swarm::names;
use swarm::wire::compression::encode;
use swarm::wire::keys;
use swarm::wire::messages::*;
use swarm::wire::metadata::encode_batch_metadata;
use swarm::wire::msgpack::Value;
use swarm::wire::rpc_info::RpcInfo;
use swarm::wire::tensor::{WireDtype, dummy_tensor};

use super::errors::with_key;
use super::rig::*;

const KINDS: [Compression; 6] = [
    Compression::None,
    Compression::MeanStd16Bit,
    Compression::Float16,
    Compression::Quantile8Bit,
    Compression::Uniform8Bit,
    Compression::Blockwise8Bit,
];

/// Enough states that the answer is converted away from the reactor.
const TOKENS: usize = 400;

fn states() -> Tensor {
    hidden(1, &(0..TOKENS).map(|n| (n % 7) as f32).collect::<Vec<_>>())
}

fn in_kind(raw: &Tensor, kind: Compression) -> Tensor {
    let shape: Vec<usize> = raw.size.iter().map(|size| *size as usize).collect();
    encode(&shape, WireDtype::F32, raw.buffer.clone(), kind).unwrap()
}

fn request(tensors: Vec<Tensor>) -> ExpertRequest {
    ExpertRequest {
        uid: uids(0..2),
        metadata: encode_batch_metadata(None, tensors.len()).into(),
        tensors,
    }
}

async fn answers(rig: &Rig, rpc: &'static str, request: ExpertRequest) -> Vec<Tensor> {
    let answer = rig.call(rpc, request).await.unwrap();
    ExpertResponse::decode(answer).unwrap().tensors
}

fn wish(kinds: &[i128]) -> Option<Value> {
    Some(Value::Tuple(kinds.iter().map(|kind| Value::Int(*kind)).collect()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_chooses_the_compression_of_each_tensor_of_its_answer() {
    let rig = Rig::new().await;
    let none = || dummy_tensor(WireDtype::F32);
    let forward = request(vec![states(), none()]);
    let raw = answers(&rig, names::FORWARD, forward.clone()).await.remove(0);
    assert_eq!(raw.compression, 0);
    for kind in KINDS {
        let asked = with_key(forward.clone(), keys::OUTPUT_COMPRESSION, wish(&[kind as i128]));
        let got = answers(&rig, names::FORWARD, asked).await.remove(0);
        assert!(got == in_kind(&raw, kind), "{kind:?}");
    }

    let prompts = Tensor { size: vec![2, 1, 1, HIDDEN as u32], ..hidden(2, &[1.0, 2.0]) };
    let backward = request(vec![states(), states(), prompts]);
    let raw = answers(&rig, names::BACKWARD, backward.clone()).await;
    let kinds = [Compression::Float16, Compression::Blockwise8Bit];
    let asked = with_key(backward.clone(), keys::OUTPUT_COMPRESSION, wish(&[2, 5]));
    let got = answers(&rig, names::BACKWARD, asked).await;
    let expected: Vec<_> = raw.iter().zip(kinds).map(|(t, k)| in_kind(t, k)).collect();
    assert!(got == expected);

    for (codes, text) in [
        (vec![9], "Enum CompressionType has no name defined for value 9"),
        (vec![-1], "Enum CompressionType has no name defined for value -1"),
        (vec![1, 1], "output_compression tuple should have 1 element"),
    ] {
        let asked = with_key(forward.clone(), keys::OUTPUT_COMPRESSION, wish(&codes));
        let refused = rig.call(names::FORWARD, asked).await.unwrap_err();
        assert!(refused.contains(text), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_compression_is_told_and_used_in_every_rpc() {
    let shape = Shape { compression: shared::config::Compression::Float16, ..Shape::default() };
    let rig = Rig::shaped(shape).await;
    let uid = "tiny-llama-hf.0".into();
    let info = rig.call(names::INFO, ExpertUid { uid }).await.unwrap();
    let info = ExpertInfo::decode(info).unwrap();
    let info = RpcInfo::decode(&info.serialized_info).unwrap();
    assert_eq!(info.schema.unwrap().compression, 2);

    let mut session = rig.session().await;
    let answer = session.open(hidden(1, &[1.0]), 30).await.unwrap();
    assert!(answer == in_kind(&hidden_plus(&[1.0], 4.0), Compression::Float16));
    let empty = session.step(hidden(1, &[]), None, None).await.unwrap();
    assert_eq!((empty.compression, empty.buffer.len()), (0, 0));
    session.close().await;

    let none = || dummy_tensor(WireDtype::F32);
    let forward = request(vec![states(), none()]);
    let own = answers(&rig, names::FORWARD, forward.clone()).await.remove(0);
    assert_eq!(own.compression, 2);
    let asked = with_key(forward, keys::OUTPUT_COMPRESSION, wish(&[0]));
    let raw = answers(&rig, names::FORWARD, asked).await.remove(0);
    assert!(own == in_kind(&raw, Compression::Float16));
}

/// Hidden states as the worker leaves them: element 0 given, and everything `more`.
fn hidden_plus(first: &[f32], more: f32) -> Tensor {
    let raw = hidden(1, first);
    let values = raw.buffer.as_chunks().0.iter();
    let bytes: Vec<u8> =
        values.flat_map(|bytes| (f32::from_le_bytes(*bytes) + more).to_le_bytes()).collect();
    Tensor { buffer: bytes.into(), ..raw }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inputs_of_every_compression_are_read() {
    let rig = Rig::new().await;
    for kind in KINDS {
        let mut session = rig.session().await;
        let raw = hidden(1, &[3.0; 20]);
        let answer = session.open(in_kind(&raw, kind), 30).await.unwrap();
        let sums = firsts(&answer);
        for (token, sum) in sums.iter().enumerate() {
            let exact = 3.0 * (token + 1) as f32 + 4.0;
            assert!((sum - exact).abs() <= 0.02 * exact, "{kind:?}: {sums:?}");
        }
        session.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dummies_that_python_compressed_are_dummies() {
    let rig = Rig::new().await;
    // What hivemind makes of `torch.empty(0)` in MEANSTD_16BIT: no values, a mean, and a deviation.
    let dummy = Tensor {
        compression: Compression::MeanStd16Bit as i32,
        buffer: [f32::NAN, f32::EPSILON].into_iter().flat_map(f32::to_le_bytes).collect(),
        ..dummy_tensor(WireDtype::F32)
    };
    let mut session = rig.session().await;
    let mut message = session.message(hidden(1, &[1.0]), Some(30), Some(0), None);
    message.tensors[1] = dummy.clone();
    assert_eq!(firsts(&session.ask(&message).await.unwrap()), [5.0]);
    session.close().await;
    let forward = request(vec![hidden(1, &[1.0]), dummy]);
    let answer = answers(&rig, names::FORWARD, forward).await;
    assert_eq!(firsts(&answer[0]), [3.0]);
}
