//! Counts the fields of a protobuf message before it is decoded. An empty element of a repeated
//! field takes two bytes on the wire and a hundred in memory.

/// Whether a message has at most `most` fields, repeated ones counted by element. Bytes that are no
/// message count as far as they can be read: the decoder refuses them.
#[must_use]
pub fn has_at_most(mut bytes: &[u8], most: usize) -> bool {
    let mut fields = 0;
    while let Some(rest) = after_field(bytes) {
        fields += 1;
        if fields > most {
            return false;
        }
        bytes = rest;
    }
    true
}

/// What follows the first field.
fn after_field(bytes: &[u8]) -> Option<&[u8]> {
    let (key, rest) = varint(bytes)?;
    let skip = match key & 7 {
        0 => return Some(varint(rest)?.1),
        1 => 8,
        2 => {
            let (length, rest) = varint(rest)?;
            return rest.get(usize::try_from(length).ok()?..);
        }
        5 => 4,
        // Groups: markers of their own, their fields follow.
        3 | 4 => 0,
        _ => return None,
    };
    rest.get(skip..)
}

fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0;
    for (at, byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return Some((value, bytes.get(at + 1..)?));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::messages::{ExpertRequest, StoreRequest, Tensor};
    use bytes::Bytes;
    use proptest::prelude::*;
    use prost::Message;

    #[test]
    fn elements_of_repeated_fields_count() {
        let tensors = vec![Tensor::default(); 7];
        let request = ExpertRequest { uid: "a.0".into(), tensors, ..ExpertRequest::default() };
        let bytes = request.encode_to_vec();
        assert!(has_at_most(&bytes, 8) && !has_at_most(&bytes, 7));
        let keys = vec![Bytes::new(); 100];
        let request = StoreRequest { keys, ..StoreRequest::default() };
        assert!(!has_at_most(&request.encode_to_vec(), 99));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), most in 0usize..50) {
            let _ = has_at_most(&bytes, most);
        }
    }
}
