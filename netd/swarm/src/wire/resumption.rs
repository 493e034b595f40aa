//! How a Sepal client asks a Sepal server to keep its session over a broken connection, and what the
//! server answers. Other clients never send these keys, and get no answer to them.

use super::keys;
use super::msgpack::{Limits, Value};

/// Bytes of the secret.
pub const SECRET_BYTES: usize = 32;

/// The error of a server that starts: a client that resumes a session asks again.
pub const NOT_SERVING: &str = "this server does not serve any block now: it starts or is paused";

/// The secret with which a client resumes its session.
pub type Secret = [u8; SECRET_BYTES];

/// What a server tells of a session that it keeps, in the metadata of the first answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumable {
    /// Proves that a client is the one of the session.
    pub secret: Secret,
    /// For how long the session is kept after its stream broke.
    pub grace_ms: u64,
}

impl Resumable {
    /// The metadata of an answer, with this added.
    #[must_use]
    pub fn add_to(&self, metadata: &[u8]) -> Vec<u8> {
        let mut entries = match Value::decode(metadata, Limits::SMALL) {
            Ok(Value::Map(entries)) => entries,
            _ => Vec::new(),
        };
        entries.push((Value::str(keys::SEPAL_SECRET), Value::Bin(self.secret.to_vec())));
        entries.push((Value::str(keys::SEPAL_GRACE_MS), Value::uint(self.grace_ms)));
        Value::Map(entries).encode()
    }

    /// What the metadata of an answer says; `None` if the session is not kept.
    #[must_use]
    pub fn decode(metadata: &[u8]) -> Option<Resumable> {
        let map = Value::decode(metadata, Limits::SMALL).ok()?;
        let secret = secret(map.get(keys::SEPAL_SECRET)?)?;
        match map.get(keys::SEPAL_GRACE_MS)? {
            Value::Int(ms) => Some(Resumable { secret, grace_ms: u64::try_from(*ms).ok()? }),
            _ => None,
        }
    }
}

pub(super) fn secret(value: &Value) -> Option<Secret> {
    match value {
        Value::Bin(bytes) => bytes.as_slice().try_into().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::step_times::StepTimes;

    #[test]
    fn the_secret_travels_beside_the_times_and_nothing_else_is_a_secret() {
        let told = Resumable { secret: [9; SECRET_BYTES], grace_ms: 30_000 };
        let times = StepTimes { queue_ns: 1, compute_ns: 2, server_ns: 3 };
        let metadata = told.add_to(&times.encode());
        assert_eq!(Resumable::decode(&metadata), Some(told));
        assert_eq!(StepTimes::decode(&metadata), times);
        assert_eq!(Resumable::decode(&told.add_to(b"")), Some(told));
        assert_eq!(Resumable::decode(&times.encode()), None);
        assert_eq!(Resumable::decode(b"\xc1"), None);
        assert_eq!(secret(&Value::Bin(vec![0; 31])), None);
    }
}
