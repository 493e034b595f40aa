//! Requests that a real Petals client sent, through every decoder of this module at once.

use super::messages::{ExpertRequest, ExpertResponse, Tensor};
use super::metadata::RequestMetadata;
use super::tensor::{ShapeLimits, WireDtype, WireTensor};
use super::uid::parse_chain;
use crate::names;
use prost::Message;
use testkit::golden;

const LIMITS: ShapeLimits = ShapeLimits { max_rank: 4, max_elements: 1 << 20 };

/// Payloads of the message frames (`00`, 8-byte length, payload) in one direction's bytes.
fn messages(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut payloads = Vec::new();
    while let Some((header, rest)) = bytes.split_at_checked(9) {
        let length = usize::try_from(u64::from_be_bytes(header[1..].try_into().unwrap())).unwrap();
        if header[0] == 0 {
            payloads.push(&rest[..length]);
        }
        bytes = &rest[length..];
    }
    payloads
}

fn tensors(messages: &[Tensor]) -> Vec<WireTensor> {
    messages.iter().map(|tensor| WireTensor::parse(tensor, LIMITS).unwrap()).collect()
}

#[test]
fn recorded_inference_steps_parse() {
    let file = golden::file(golden::TRANSCRIPTS);
    let mut steps = 0;
    for stream in file["streams"].as_array().unwrap() {
        let events = stream["events"].as_array().unwrap();
        let sent =
            events.iter().filter(|e| e[0] == "c2s").map(|e| golden::unhex(e[1].as_str().unwrap()));
        let sent: Vec<Vec<u8>> = sent.collect();
        for payload in sent.iter().flat_map(|bytes| messages(bytes)) {
            let request = ExpertRequest::decode(payload).unwrap();
            assert_eq!(request.encode_to_vec(), payload);
            if request.tensors.is_empty() {
                continue;
            }
            assert_eq!(parse_chain(&request.uid).unwrap().0, "tiny-llama-hf");
            let metadata = RequestMetadata::parse(&request.metadata, names::INFERENCE).unwrap();
            assert!(metadata.session_id.is_some() && metadata.step_id.is_some());
            assert!(metadata.start_from_position.is_some());
            let arguments =
                metadata.args_structure.unwrap().arrange(&tensors(&request.tensors)).unwrap();
            let [hidden_states, prompts, hypo_ids] = &arguments[..] else {
                panic!("three arguments")
            };
            assert_eq!((hidden_states.shape().len(), hidden_states.shape()[2]), (3, 64));
            assert!(prompts.is_dummy());
            assert_eq!(hypo_ids.dtype(), WireDtype::I64);
            steps += 1;
        }
    }
    assert!(steps >= 7, "only {steps} steps");
}

#[test]
fn recorded_forward_and_backward_parse() {
    let file = golden::file(golden::TRANSCRIPTS);
    let mut requests = 0;
    for call in file["unary_payloads"].as_array().unwrap() {
        if golden::text(call, "protocol").ends_with("rpc_info") {
            continue;
        }
        let request = ExpertRequest::decode(&golden::bytes(call, "request_hex")[..]).unwrap();
        let metadata = RequestMetadata::parse(&request.metadata, names::FORWARD).unwrap();
        let arguments =
            metadata.args_structure.unwrap().arrange(&tensors(&request.tensors)).unwrap();
        let response = ExpertResponse::decode(&golden::bytes(call, "response_hex")[..]).unwrap();
        let outputs = tensors(&response.tensors);
        assert_eq!(outputs[0].shape(), arguments[0].shape());
        assert!(outputs[0].to_f32_vec().unwrap().iter().all(|value| value.is_finite()));
        requests += 1;
    }
    assert!(requests >= 4, "only {requests} requests");
}
