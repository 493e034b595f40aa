//! Access of tests to the golden bytes in `netd/swarm/tests/data`.

use serde_json::Value;

pub const DHT_MESSAGES: &str = include_str!("../../../netd/swarm/tests/data/dht_messages.json");
pub const DHT_RECORDS: &str = include_str!("../../../netd/swarm/tests/data/dht_records.json");
pub const DHTID: &str = include_str!("../../../netd/swarm/tests/data/dhtid.json");
pub const EXPERT_MESSAGES: &str =
    include_str!("../../../netd/swarm/tests/data/expert_messages.json");
pub const MSGPACK: &str = include_str!("../../../netd/swarm/tests/data/msgpack.json");
pub const SPLIT: &str = include_str!("../../../netd/swarm/tests/data/split_for_streaming.json");
pub const TENSORS: &str = include_str!("../../../netd/swarm/tests/data/tensors.json");
pub const TRANSCRIPTS: &str = include_str!("../../../netd/swarm/tests/data/transcripts.json");

/// The whole file.
pub fn file(text: &str) -> Value {
    serde_json::from_str(text).expect("golden file is JSON")
}

/// The list under `vectors`.
pub fn vectors(text: &str) -> Vec<Value> {
    file(text)["vectors"].as_array().expect("golden file has vectors").clone()
}

/// The vector called `name`.
pub fn named<'a>(vectors: &'a [Value], name: &str) -> &'a Value {
    vectors.iter().find(|v| v["name"] == name).unwrap_or_else(|| panic!("no golden vector {name}"))
}

/// Text under `key`.
pub fn text(vector: &Value, key: &str) -> String {
    vector[key].as_str().unwrap_or_else(|| panic!("no text under {key}")).to_owned()
}

/// Bytes written as hex under `key`.
pub fn bytes(vector: &Value, key: &str) -> Vec<u8> {
    unhex(&text(vector, key))
}

/// Bytes of a msgpack vector.
pub fn msgpack(name: &str) -> Vec<u8> {
    bytes(named(&vectors(MSGPACK), name), "msgpack_hex")
}

/// Bytes of a hex text.
pub fn unhex(hex: &str) -> Vec<u8> {
    assert!(hex.len().is_multiple_of(2), "odd hex");
    (0..hex.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).expect("hex"))
        .collect()
}
