//! 160-bit ids of nodes and keys, and their XOR distance. Source: `DHTID` in
//! `hivemind/dht/routing.py`.

use crate::wire::msgpack::Value;
use sha1::{Digest, Sha1};
use std::fmt;

/// Bytes of an id.
pub const ID_BYTES: usize = 20;

/// Id of a node or of a key, big-endian.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DhtId(pub [u8; ID_BYTES]);

/// XOR of two ids; orders as the unsigned number that it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Distance(u128, u32);

impl DhtId {
    /// Id of a text key, such as a module uid.
    #[must_use]
    pub fn of_text(key: &str) -> Self {
        Self::of_value(&Value::str(key))
    }

    /// Id of any key but raw bytes: the hash of its msgpack form.
    #[must_use]
    pub fn of_value(key: &Value) -> Self {
        Self::of_bytes(&key.encode())
    }

    /// Id of a key of raw bytes.
    #[must_use]
    pub fn of_bytes(key: &[u8]) -> Self {
        Self(Sha1::digest(key).into())
    }

    /// An id from a message; `None` unless it has 20 bytes.
    #[must_use]
    pub fn from_wire(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// XOR distance to `other`.
    #[must_use]
    pub fn distance(&self, other: &Self) -> Distance {
        let ((high, low), (other_high, other_low)) = (self.number(), other.number());
        Distance(high ^ other_high, low ^ other_low)
    }

    /// The upper 128 bits and the lower 32 of the number that it is.
    fn number(&self) -> (u128, u32) {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, low @ ..] = self.0;
        let high = [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p];
        (u128::from_be_bytes(high), u32::from_be_bytes(low))
    }

    /// Bit number `index`, 0 the most significant; `false` beyond the last.
    #[must_use]
    pub fn bit(&self, index: usize) -> bool {
        self.0.get(index / 8).is_some_and(|byte| byte >> (7 - index % 8) & 1 == 1)
    }
}

impl fmt::Debug for DhtId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::msgpack::Limits;
    use testkit::golden;

    #[test]
    fn golden_keys_have_the_ids_of_the_reference() {
        let vectors = golden::vectors(golden::DHTID);
        assert!(vectors.len() >= 15);
        for vector in vectors {
            let expected = DhtId::from_wire(&golden::bytes(&vector, "dhtid_hex"));
            let id = match vector["msgpack_hex"].as_str() {
                Some(hex) => {
                    DhtId::of_value(&Value::decode(&golden::unhex(hex), Limits::SMALL).unwrap())
                }
                None => DhtId::of_bytes(&golden::bytes(&vector, "key_hex")),
            };
            assert_eq!(Some(id), expected, "{}", golden::text(&vector, "key_repr"));
        }
        assert_eq!(
            format!("{:?}", DhtId::of_text("tiny-llama-hf.0")),
            "084f787cbb843355269cdfb823fddf547eee7f38"
        );
    }

    #[test]
    fn golden_distance_is_the_xor() {
        let xor = &golden::file(golden::DHTID)["xor"];
        let id = |key: &str| DhtId::from_wire(&golden::bytes(xor, key)).unwrap();
        let xor = id("xor").distance(&DhtId([0; ID_BYTES]));
        assert_eq!(id("a").distance(&id("b")), xor);
    }

    #[test]
    fn bits_are_counted_from_the_most_significant() {
        let mut id = DhtId([0; ID_BYTES]);
        id.0[1] = 0b0100_0000;
        assert_eq!((0..200).filter(|&i| id.bit(i)).collect::<Vec<_>>(), [9]);
        assert_eq!(DhtId::from_wire(&[0; 19]), None);
    }
}
