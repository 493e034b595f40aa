//! Fuzz targets of requests to a DHT node, with what they leave in the store.

use bytes::Bytes;
use fuzzing::{Target, outcome};
use p2p::PeerId;
use prost::Message;

use super::answer;
use super::id::DhtId;
use super::routing::RoutingTable;
use super::storage::{Dictionary, Owner, Storage, StorageLimits, StoredValue};
use crate::wire::fields::has_at_most;
use crate::wire::messages::{FindRequest, StoreRequest};
use p2p::Net;
use testkit::golden;

/// The time of the records in the golden messages, near enough to be stored.
const NOW: f64 = 1_795_162_000.0;

/// Fields of a DHT request, as netd counts them before it decodes.
const MAX_FIELDS: usize = 6144;

fn seeds(kind: &str) -> Vec<Vec<u8>> {
    let vectors = golden::vectors(golden::DHT_MESSAGES).into_iter();
    vectors.filter(|v| v["type"] == kind).map(|v| golden::bytes(&v, "hex")).collect()
}

/// A store of what the golden records say, for entries that collide.
fn store_seeds() -> Vec<Vec<u8>> {
    let file = golden::file(golden::DHT_RECORDS);
    let records = file["records"].as_array().expect("records").iter();
    let stores = records.map(|record| {
        let mut request = StoreRequest::default();
        for (tag, entry) in record["entries"].as_object().expect("entries") {
            let tag = crate::wire::msgpack::Value::str(tag).encode();
            request.keys.push(golden::bytes(record, "dhtid_hex").into());
            request.subkeys.push(tag.into());
            request.values.push(golden::bytes(entry, "value_hex").into());
            request.expiration_time.push(NOW + 60.0);
            request.in_cache.push(false);
        }
        request.encode_to_vec()
    });
    stores.chain(seeds("StoreRequest")).collect()
}

#[test]
fn fuzz_stores() {
    // A message of 6,144 empty fields is 12 KiB and holds them as `Bytes` of 32 bytes each.
    Target::new("dht stores", store_seeds()).with_bound(2 << 20, 128).fuzz(move |input| {
        if !has_at_most(input, MAX_FIELDS) {
            return "too many fields".into();
        }
        let Ok(request) = StoreRequest::decode(Bytes::copy_from_slice(input)) else {
            return "no message".into();
        };
        let own = PeerId::random();
        let owner = Owner::peer(PeerId::random(), Net::Unknown);
        let limits = StorageLimits {
            max_total_bytes: 64 << 10,
            max_peer_bytes: 8 << 10,
            ..StorageLimits::default()
        };
        let (mut storage, mut cache) = (Storage::new(limits, own), Storage::new(limits, own));
        let stored = answer::store(&owner, &request, &mut storage, &mut cache, NOW);
        assert!(storage.bytes() <= limits.max_peer_bytes && cache.bytes() <= limits.max_peer_bytes);
        let kept: Vec<DhtId> = storage.keys().copied().collect();
        for key in kept {
            let _ = answer::best_of([&storage, &cache], &key, NOW).map(|found| found.to_wire());
        }
        storage.drop_expired(NOW + 1e6);
        assert!(storage.is_empty() && storage.bytes() == 0);
        stored.map_or_else(|text| text, |flags| format!("{flags:?}"))
    });
}

#[test]
fn fuzz_finds() {
    let own = DhtId::of_text("own");
    Target::new("dht finds", seeds("FindRequest")).with_bound(2 << 20, 128).fuzz(move |input| {
        if !has_at_most(input, MAX_FIELDS) {
            return "too many fields".into();
        }
        let Ok(request) = FindRequest::decode(Bytes::copy_from_slice(input)) else {
            return "no message".into();
        };
        let storage = Storage::new(StorageLimits::default(), PeerId::random());
        let table = RoutingTable::new(own);
        let found = answer::find(&request, None, &table, [&storage, &storage], NOW);
        outcome(&found.map(|results| assert_eq!(results.len(), request.keys.len())))
    });
}

#[test]
fn fuzz_dictionaries_of_the_dht() {
    let file = golden::file(golden::DHT_RECORDS);
    let records = file["records"].as_array().expect("records").iter();
    let found = records.filter(|record| record["find_result_value_hex"].is_string());
    let found = found.map(|record| golden::bytes(record, "find_result_value_hex"));
    let seeds = found.chain([golden::msgpack("DictionaryDHTValue")]);
    Target::new("dht dictionaries", seeds).with_bound(1 << 20, 256).fuzz(move |input| {
        let Some(dictionary) = Dictionary::decode(input) else { return "none".into() };
        let again = Dictionary::decode(&dictionary.encode()).expect("our own bytes");
        assert_eq!(again.iter().count(), dictionary.iter().count());
        format!("{:?}", StoredValue::Dictionary(dictionary).live(1e9).is_some())
    });
}
