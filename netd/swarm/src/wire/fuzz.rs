//! Fuzz targets of everything that comes off the wire; their corpus are the golden bytes of
//! hivemind and Petals.

use bytes::Bytes;
use fuzzing::{Target, outcome};
use prost::Message;
use serde_json::Value as Json;
use shared::dtype::DType;
use testkit::golden;

use super::fields::has_at_most;
use super::messages::*;
use super::metadata::RequestMetadata;
use super::msgpack::{Limits, Value};
use super::packing;
use super::records::{ModelInfo, ServerInfo};
use super::resumption::Resumable;
use super::rpc_info::RpcInfo;
use super::step_times::StepTimes;
use super::stream_parts::{PartAssembler, PartLimits};
use super::tensor::{ShapeLimits, WireTensor};
use super::uid::parse_chain;
use crate::names;

/// Fields of a request, as netd counts them before it decodes.
const MAX_FIELDS: usize = 64;

/// Every hexadecimal text under `key`, however deep.
fn all_under(json: &Json, key: &str) -> Vec<Vec<u8>> {
    match json {
        Json::Array(items) => items.iter().flat_map(|item| all_under(item, key)).collect(),
        Json::Object(entries) => entries
            .iter()
            .flat_map(|(name, value)| match value.as_str() {
                Some(hex) if name == key => vec![golden::unhex(hex)],
                _ => all_under(value, key),
            })
            .collect(),
        _ => Vec::new(),
    }
}

fn corpus(file: &str, key: &str) -> Vec<Vec<u8>> {
    all_under(&golden::file(file), key)
}

/// Golden messages of one protobuf type.
fn messages(file: &str, kind: &str) -> Vec<Vec<u8>> {
    let vectors = golden::vectors(file).into_iter();
    vectors.filter(|v| v["type"] == kind).map(|v| golden::bytes(&v, "hex")).collect()
}

fn decoded<M: Message + Default>(input: &[u8]) -> Option<M> {
    let is_bounded = has_at_most(input, MAX_FIELDS);
    is_bounded.then(|| M::decode(Bytes::copy_from_slice(input)).ok()).flatten()
}

/// Decodes a tensor as a request handler does: into each type of hidden states, and as integers.
fn read_tensor(message: &Tensor) -> String {
    let limits = ShapeLimits { max_rank: 4, max_elements: 1 << 16 };
    let tensor = match WireTensor::parse(message, limits) {
        Ok(tensor) => tensor,
        Err(error) => return error.to_string(),
    };
    assert!(tensor.element_count() <= 1 << 16);
    let values = tensor.to_f32_vec();
    assert!(values.as_ref().is_ok_and(|v| v.len() == tensor.element_count()) || values.is_err());
    let integers = outcome(&tensor.to_i64_vec());
    let blocks = [DType::F32, DType::F16, DType::Bf16].map(|dtype| {
        let mut bytes = vec![0; tensor.element_count() * dtype.size_bytes()];
        outcome(&tensor.write_to(dtype, &mut bytes))
    });
    format!("{} {integers} {blocks:?}", tensor.dtype().name())
}

#[test]
fn fuzz_wire_tensors() {
    let target = Target::new("wire tensors", corpus(golden::TENSORS, "tensor_hex"));
    // Half a million bytes of f32 for one element count, and the copy of the message.
    target.fuzz(move |input| {
        decoded::<Tensor>(input).map_or("no message".into(), |t| read_tensor(&t))
    });
}

#[test]
fn fuzz_packed_tensors() {
    let plain = (0..64u16).flat_map(|n| (0x3f00 + 7 * n).to_le_bytes()).collect();
    let compression = Compression::None as i32;
    let (dtype, size) = ("bfloat16".to_owned(), vec![1, 64]);
    let plain = Tensor { buffer: plain, size, dtype, compression, ..Tensor::default() };
    let packed = packing::pack(&plain).expect("smaller");
    Target::new("packed tensors", [packed.encode_to_vec()]).fuzz(move |input| {
        let Some(tensor) = decoded::<Tensor>(input) else { return "no message".into() };
        let plain = packing::unpack(&tensor);
        if let Ok(plain) = &plain {
            assert_eq!(packing::unpacked_bytes(&tensor), Ok(Some(plain.buffer.len())));
            assert!(plain.buffer.len() <= tensor.buffer.len() * 3 / 2);
            assert!(
                packing::pack(plain)
                    .is_none_or(|again| packing::unpack(&again).as_ref() == Ok(plain))
            );
        }
        outcome(&plain)
    });
}

#[test]
fn fuzz_expert_requests() {
    let seeds = messages(golden::EXPERT_MESSAGES, "ExpertRequest").into_iter();
    let seeds = seeds.chain(corpus(golden::TRANSCRIPTS, "request_hex"));
    Target::new("expert requests", seeds).fuzz(move |input| {
        let Some(request) = decoded::<ExpertRequest>(input) else { return "no message".into() };
        let uid = outcome(&parse_chain(&request.uid));
        let metadata = outcome(&RequestMetadata::parse(&request.metadata, names::INFERENCE));
        format!("{uid} {metadata} {:?}", request.tensors.first().map(read_tensor))
    });
}

#[test]
fn fuzz_answers_of_servers() {
    let seeds = messages(golden::EXPERT_MESSAGES, "ExpertResponse").into_iter();
    let seeds = seeds.chain(corpus(golden::TRANSCRIPTS, "response_hex"));
    Target::new("expert responses", seeds).fuzz(move |input| {
        let Some(response) = decoded::<ExpertResponse>(input) else { return "no message".into() };
        let times = StepTimes::decode(&response.metadata);
        let resumable = Resumable::decode(&response.metadata).is_some();
        let tensor = response.tensors.first().map(read_tensor);
        format!("{} {resumable} {tensor:?}", times == StepTimes::default())
    });
}

#[test]
fn fuzz_parts_of_streamed_requests() {
    let seeds = corpus(golden::SPLIT, "whole_hex").into_iter();
    let seeds = seeds.chain(corpus(golden::TENSORS, "tensor_hex").into_iter().take(4));
    Target::new("streamed parts", seeds).fuzz(move |input| {
        let limits = PartLimits { max_bytes: 4096, max_parts: 16, max_tensors: 4 };
        let mut parts = PartAssembler::new(limits);
        // The same part again and again, then its beginnings.
        for cut in [input.len(), input.len(), input.len() / 2, 0] {
            let Some(part) = decoded::<Tensor>(&input[..cut]) else { continue };
            if let Err(error) = parts.push(part) {
                return error.to_string();
            }
        }
        assert!(parts.held_bytes() <= 4096);
        format!("{} tensors", parts.finish().len())
    });
}

#[test]
fn fuzz_messages_of_the_dht() {
    let kinds = ["PingRequest", "PingResponse", "StoreResponse", "FindResponse"];
    let seeds = kinds.into_iter().flat_map(|kind| messages(golden::DHT_MESSAGES, kind));
    // Each input is decoded four times.
    Target::new("dht messages", seeds).with_bound(1 << 20, 256).fuzz(move |input| {
        let ping = decoded::<PingRequest>(input).is_some();
        let pong = decoded::<PingResponse>(input).is_some();
        let stored = decoded::<StoreResponse>(input).is_some();
        let found = decoded::<FindResponse>(input).map(|found| found.results.len());
        format!("{ping} {pong} {stored} {found:?}")
    });
}

#[test]
fn fuzz_msgpack() {
    let seeds = corpus(golden::MSGPACK, "msgpack_hex");
    // A value is 32 bytes in memory for each byte on the wire, and lists double as they grow.
    Target::new("msgpack", seeds).with_bound(1 << 20, 256).fuzz(move |input| {
        let value = Value::decode(input, Limits::SMALL);
        if let Ok(value) = &value {
            // What we write is what we read; integers and floats may be shorter.
            let again =
                Value::decode(&value.encode(), Limits { max_bytes: 1 << 20, ..Limits::SMALL });
            assert_eq!(again.map(|v| v.repr()), Ok(value.repr()));
        }
        value.map_or_else(|error| error.to_string(), |value| value.repr())
    });
}

#[test]
fn fuzz_metadata_of_requests() {
    let seeds = messages(golden::EXPERT_MESSAGES, "ExpertRequest").into_iter();
    let seeds =
        seeds.filter_map(|m| ExpertRequest::decode(&m[..]).ok()).map(|r| r.metadata.to_vec());
    let rpcs = [names::INFERENCE, names::FORWARD, names::BACKWARD, names::PUSH];
    Target::new("metadata", seeds).with_bound(1 << 20, 256).fuzz(move |input| {
        let parsed = rpcs.map(|rpc| RequestMetadata::parse(input, rpc));
        if let [Ok(metadata), ..] = &parsed {
            let _ = metadata.required_max_length();
            let _ = metadata.output_compression(1);
            let _ = metadata.for_push("session", &metadata.next_servers);
        }
        parsed.iter().map(outcome).collect()
    });
}

#[test]
fn fuzz_announced_records() {
    let mut seeds = corpus(golden::DHT_RECORDS, "value_hex");
    seeds.push(ModelInfo { num_blocks: 80, repository: Some("a/b".into()) }.encode());
    Target::new("announced records", seeds).with_bound(1 << 20, 256).fuzz(move |input| {
        let info = ServerInfo::decode(input);
        if let Ok(info) = &info {
            assert!(info.throughput.is_finite() && info.throughput >= 0.0);
            assert!(ServerInfo::decode(&info.encode()).is_ok());
        }
        outcome(&info) + &outcome(&ModelInfo::decode(input))
    });
}

#[test]
fn fuzz_server_infos() {
    let seeds = messages(golden::EXPERT_MESSAGES, "ExpertInfo").into_iter();
    let seeds = seeds.filter_map(|m| ExpertInfo::decode(&m[..]).ok());
    let seeds = seeds.map(|info| info.serialized_info.to_vec());
    Target::new("rpc_info", seeds).with_bound(1 << 20, 256).fuzz(move |input| {
        let info = RpcInfo::decode(input);
        if let Ok(info) = &info {
            let _ = RpcInfo::decode(&info.encode());
        }
        outcome(&info)
    });
}

#[test]
fn fuzz_module_uids() {
    let seeds = ["a.0", "tiny-llama-hf.0 tiny-llama-hf.1", "a.b.4294967295", ""];
    let seeds = seeds.map(|text| text.as_bytes().to_vec());
    Target::new("module uids", seeds)
        .fuzz(move |input| outcome(&parse_chain(&String::from_utf8_lossy(input))));
}
