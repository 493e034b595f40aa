//! Answers to the requests of other nodes, as far as they need nothing but our own state. Source:
//! `rpc_store` and `rpc_find` in `hivemind/dht/protocol.py`.

use super::id::DhtId;
use super::routing::{BUCKET_SIZE, RoutingTable};
use super::storage::{Item, Owner, Storage, StoredValue};
use crate::wire::messages::{FindRequest, FindResult, ResultType, StoreRequest};
use bytes::Bytes;

/// Items of one store; Petals' own nodes send all that a newcomer should keep at once.
pub(super) const MAX_ITEMS: usize = 1024;
/// Keys of one find; Petals' own nodes ask for 16 at most.
pub(super) const MAX_FOUND_KEYS: usize = 256;
/// Bytes of values in one response: the message must stay under 4 MiB, neighbours included.
pub(super) const MAX_FOUND_BYTES: usize = 2 << 20;
/// Bytes of an encoded dictionary beside its entries, at most.
const DICTIONARY_BYTES: usize = 64;
/// Bytes of values that one find looks at, so that asking again and again for the largest key ends.
pub(super) const MAX_COPIED_BYTES: usize = 32 << 20;

/// Stores what a request of `owner` holds: one flag per item.
///
/// # Errors
/// The text for the caller, if lists are not aligned, too long, or an item is malformed.
pub(super) fn store(
    owner: &Owner,
    request: &StoreRequest,
    storage: &mut Storage,
    cache: &mut Storage,
    now: f64,
) -> Result<Vec<bool>, String> {
    let count = request.keys.len();
    let lengths = [
        request.subkeys.len(),
        request.values.len(),
        request.expiration_time.len(),
        request.in_cache.len(),
    ];
    if lengths.iter().any(|length| *length != count) {
        return Err("ValueError('keys, subkeys, values, expiration times and cache flags differ in length')".into());
    }
    if count > MAX_ITEMS {
        return Err(format!("ValueError('cannot store more than {MAX_ITEMS} items at once')"));
    }
    let aligned = request.keys.iter().zip(&request.subkeys).zip(&request.values);
    let timed = aligned.zip(request.expiration_time.iter().zip(&request.in_cache));
    let mut store_ok = Vec::with_capacity(count);
    for (((key, tag), value), (expiration, in_cache)) in timed {
        let malformed = || "ValueError('malformed item')".to_owned();
        let key = DhtId::from_wire(key).ok_or_else(malformed)?;
        let item = Item::from_wire(tag, value, *expiration).ok_or_else(malformed)?;
        store_ok.push(match in_cache {
            true => cache.store_for(owner, key, item, now),
            false => storage.store_for(owner, key, item, now),
        });
    }
    Ok(store_ok)
}

/// Finds what a request asks for: one result per key, with the nearest nodes known.
///
/// # Errors
/// The text for the caller, if there are too many keys or one is malformed.
pub(super) fn find(
    request: &FindRequest,
    caller: Option<&DhtId>,
    table: &RoutingTable,
    stores: [&Storage; 2],
    now: f64,
) -> Result<Vec<FindResult>, String> {
    if request.keys.len() > MAX_FOUND_KEYS {
        return Err(format!("ValueError('cannot find more than {MAX_FOUND_KEYS} keys at once')"));
    }
    let mut bytes_left = MAX_FOUND_BYTES;
    let mut copied_bytes_left = MAX_COPIED_BYTES;
    let find_one = |key: &Bytes| {
        let key = DhtId::from_wire(key)?;
        let bytes: usize = stores.iter().map(|store| store.bytes_under(&key)).sum();
        copied_bytes_left = copied_bytes_left.saturating_sub(bytes);
        let may_copy = bytes_left > 0 && copied_bytes_left > 0;
        let found = may_copy.then(|| best_of(stores, &key, now)).flatten();
        let nearest = table.nearest(&key, BUCKET_SIZE, caller);
        let mut result = FindResult {
            nearest_node_ids: nearest
                .iter()
                .map(|c| Bytes::copy_from_slice(&c.node_id.0))
                .collect(),
            nearest_peer_ids: nearest.iter().map(|c| c.peer_id.to_bytes().into()).collect(),
            ..FindResult::default()
        };
        if let Some(found) = found.and_then(|found| within(found, bytes_left)) {
            let (_, value) = found.to_wire();
            if let Some(left) = bytes_left.checked_sub(value.len()) {
                bytes_left = left;
                result.set_type(match found {
                    StoredValue::Regular(_) => ResultType::FoundRegular,
                    StoredValue::Dictionary(_) => ResultType::FoundDictionary,
                });
                (result.value, result.expiration_time) = (value, found.expiration());
            }
        }
        Some(result)
    };
    request
        .keys
        .iter()
        .map(find_one)
        .collect::<Option<_>>()
        .ok_or_else(|| "ValueError('malformed key')".into())
}

/// What fits of a value. Large entries do not hide the small ones, which servers' records are.
fn within(mut found: StoredValue, bytes: usize) -> Option<StoredValue> {
    if let StoredValue::Dictionary(dictionary) = &mut found {
        dictionary.shrink_to(bytes.saturating_sub(DICTIONARY_BYTES));
        dictionary.iter().next()?;
    }
    Some(found)
}

/// What both stores have, united.
pub(super) fn best_of(stores: [&Storage; 2], key: &DhtId, now: f64) -> Option<StoredValue> {
    let found = stores.into_iter().filter_map(|store| store.find(key, now));
    found.reduce(|mut best, other| {
        best.merge(other);
        best
    })
}

#[cfg(test)]
mod tests {
    use super::super::storage::{Dictionary, Timed};
    use super::*;
    use crate::wire::msgpack::Value;

    #[test]
    fn large_entries_under_a_key_do_not_hide_the_small_ones() {
        let entry = |name: &str, bytes: usize| {
            let timed = Timed { value: vec![7; bytes].into(), expiration: 1.0 };
            (Bytes::from(Value::str(name).encode()), timed)
        };
        let (tag, record) = entry("server", 300);
        let mut dictionary = Dictionary::single(tag.clone(), record, None);
        for number in 0..4000 {
            let (tag, junk) = entry(&number.to_string(), 1024);
            dictionary.merge_entry(tag, junk, None);
        }
        assert!(dictionary.encode().len() > MAX_FOUND_BYTES);
        let found = within(StoredValue::Dictionary(dictionary), MAX_FOUND_BYTES).expect("some fit");
        assert!(found.to_wire().1.len() <= MAX_FOUND_BYTES);
        let StoredValue::Dictionary(shown) = found else { panic!("{found:?}") };
        assert!(shown.iter().any(|(other, _)| *other == tag));
        assert!(within(StoredValue::Dictionary(shown), 100).is_none(), "nothing fits");
    }
}
