//! The times of one inference step, which a Sepal server tells a client that asks for them.

use super::keys;
use super::msgpack::{Limits, Value};

/// Where the time of one step on one server went, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// From submission to the start of the work.
    pub queue_ns: u64,
    /// From the start of the work to its end.
    pub compute_ns: u64,
    /// From the last byte of the request to the encoding of the answer.
    pub server_ns: u64,
}

impl StepTimes {
    /// The metadata of the answer.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let entry = |key: &str, value: u64| (Value::str(key), Value::uint(value));
        Value::Map(vec![
            entry(keys::QUEUE_NS, self.queue_ns),
            entry(keys::COMPUTE_NS, self.compute_ns),
            entry(keys::SERVER_NS, self.server_ns),
        ])
        .encode()
    }

    /// The times in the metadata of an answer; a time that is missing or makes no sense is 0.
    #[must_use]
    pub fn decode(metadata: &[u8]) -> StepTimes {
        let map = Value::decode(metadata, Limits::SMALL).unwrap_or(Value::Nil);
        let field = |key| match map.get(key) {
            Some(Value::Int(ns)) => u64::try_from(*ns).unwrap_or(0),
            _ => 0,
        };
        StepTimes {
            queue_ns: field(keys::QUEUE_NS),
            compute_ns: field(keys::COMPUTE_NS),
            server_ns: field(keys::SERVER_NS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_back_and_without_trust() {
        let times = StepTimes { queue_ns: 1, compute_ns: u64::MAX, server_ns: 3 };
        assert_eq!(StepTimes::decode(&times.encode()), times);
        let told = Value::Map(vec![
            (Value::str(keys::QUEUE_NS), Value::Int(-5)),
            (Value::str(keys::COMPUTE_NS), Value::Int(7_000)),
        ]);
        let read = StepTimes { compute_ns: 7_000, ..StepTimes::default() };
        assert_eq!(StepTimes::decode(&told.encode()), read);
        assert_eq!(StepTimes::decode(b"\xc1"), StepTimes::default());
        assert_eq!(StepTimes::decode(b""), StepTimes::default());
    }
}
