use super::*;
use crate::wire::golden;
use proptest::prelude::*;

const NOW: f64 = 1_000.0;

fn key() -> DhtId {
    DhtId::of_text("key")
}

fn timed(value: &'static [u8], expiration: f64) -> Timed {
    Timed { value: Bytes::from_static(value), expiration }
}

fn regular(value: &'static [u8], expiration: f64) -> Item {
    Item::Regular(timed(value, expiration))
}

fn entry(subkey: &str, value: &'static [u8], expiration: f64) -> Item {
    Item::Entry(Value::str(subkey).encode().into(), timed(value, expiration))
}

fn storage() -> Storage {
    Storage::new(StorageLimits::default())
}

fn values(stored: &Stored) -> Vec<&[u8]> {
    match stored {
        Stored::Regular(timed) => vec![&timed.value],
        Stored::Dictionary(dictionary) => {
            dictionary.iter().map(|(_, timed)| &timed.value[..]).collect()
        }
    }
}

fn found(storage: &Storage, now: f64) -> Vec<Vec<u8>> {
    storage.find(&key(), now).iter().flat_map(|stored| values(stored)).map(<[u8]>::to_vec).collect()
}

#[test]
fn golden_dictionary_decodes_and_reencodes() {
    let bytes = golden::msgpack("DictionaryDHTValue");
    let dictionary = Dictionary::decode(&bytes).unwrap();
    assert_eq!((dictionary.entries.len(), dictionary.latest), (2, 1_700_000_099.25));
    assert_eq!(dictionary.encode(), bytes);
    let record = &golden::file(golden::DHT_RECORDS)["records"][0];
    let bytes = golden::bytes(record, "find_result_value_hex");
    assert_eq!(Dictionary::decode(&bytes).unwrap().encode(), bytes);
}

#[test]
fn regular_value_gives_way_to_a_strictly_later_one_only() {
    let mut storage = storage();
    assert!(!storage.store(key(), regular(b"late", NOW - 1.0), NOW));
    assert!(storage.store(key(), regular(b"a", NOW + 5.0), NOW));
    assert!(!storage.store(key(), regular(b"b", NOW + 5.0), NOW));
    assert!(storage.store(key(), regular(b"c", NOW + 6.0), NOW));
    assert_eq!(found(&storage, NOW), [b"c"]);
    assert_eq!(found(&storage, NOW + 7.0), Vec::<Vec<u8>>::new());
    // After it ended, anything still alive is welcome.
    assert!(storage.store(key(), regular(b"d", NOW + 7.5), NOW + 7.0));
}

#[test]
fn entry_into_a_regular_value_needs_a_later_expiration() {
    let mut storage = storage();
    storage.store(key(), regular(b"r", NOW + 5.0), NOW);
    assert!(!storage.store(key(), entry("s", b"x", NOW + 5.0), NOW));
    assert!(storage.store(key(), entry("s", b"x", NOW + 6.0), NOW));
    assert_eq!(found(&storage, NOW), [b"x"]);
    assert!(!storage.store(key(), regular(b"r", NOW + 6.0), NOW));
    assert!(storage.store(key(), regular(b"r", NOW + 6.5), NOW));
    assert_eq!(found(&storage, NOW), [b"r"]);
}

#[test]
fn entries_of_a_dictionary_live_apart() {
    let mut storage = storage();
    assert!(storage.store(key(), entry("a", b"1", NOW + 5.0), NOW));
    assert!(storage.store(key(), entry("b", b"2", NOW + 3.0), NOW));
    assert!(!storage.store(key(), entry("a", b"3", NOW + 5.0), NOW));
    assert!(storage.store(key(), entry("a", b"4", NOW + 6.0), NOW));
    assert_eq!(found(&storage, NOW), [b"4", b"2"]);
    assert_eq!(found(&storage, NOW + 4.0), [b"4"]);
    assert_eq!(storage.find(&key(), NOW).unwrap().expiration(), NOW + 6.0);
}

#[test]
fn whole_dictionary_is_merged_and_stops_at_the_first_refusal() {
    let mut storage = storage();
    storage.store(key(), entry("a", b"1", NOW + 5.0), NOW);
    let mut incoming = Dictionary::single(Value::str("b").encode().into(), timed(b"2", NOW + 2.0));
    assert!(storage.store(key(), Item::Dictionary(incoming.clone()), NOW));
    incoming.merge_entry(Value::str("a").encode().into(), timed(b"old", NOW + 4.0));
    assert!(!storage.store(key(), Item::Dictionary(incoming), NOW));
    assert_eq!(found(&storage, NOW), [b"1", b"2"]);
}

#[test]
fn what_exceeds_a_bound_or_never_expires_is_refused_and_counted() {
    let limits = StorageLimits {
        max_keys: 2,
        max_subkeys: 2,
        max_value_bytes: 10,
        max_total_bytes: 4096,
        max_peer_bytes: 4096,
        max_horizon_s: 100.0,
    };
    let mut storage = Storage::new(limits);
    let number = |n: u32| DhtId::of_bytes(&n.to_be_bytes());
    assert!(!storage.store(number(0), regular(b"12345678901", NOW + 1.0), NOW));
    assert!(!storage.store(number(0), regular(b"x", NOW + 101.0), NOW));
    assert!(!storage.store(number(0), regular(b"x", f64::NAN), NOW));
    assert!(!storage.store(number(0), regular(b"x", f64::INFINITY), NOW));
    assert!(storage.store(number(0), entry("a", b"x", NOW + 1.0), NOW));
    assert!(storage.store(number(0), entry("b", b"x", NOW + 1.0), NOW));
    assert!(!storage.store(number(0), entry("c", b"x", NOW + 1.0), NOW));
    assert!(storage.store(number(1), regular(b"x", NOW + 1.0), NOW));
    assert!(!storage.store(number(2), regular(b"x", NOW + 1.0), NOW));
    assert_eq!(storage.refused(), 6);
    storage.drop_expired(NOW + 2.0);
    assert_eq!((storage.len(), storage.bytes()), (0, 0));
}

#[test]
fn merge_keeps_the_newest_entry_of_each_subkey() {
    let dictionary = |items: &[(&str, &'static [u8], f64)]| {
        let mut all: Option<Dictionary> = None;
        for (subkey, value, expiration) in items {
            let (tag, timed): (Bytes, _) =
                (Value::str(*subkey).encode().into(), timed(value, *expiration));
            match &mut all {
                Some(all) => {
                    all.merge_entry(tag, timed);
                }
                None => all = Some(Dictionary::single(tag, timed)),
            }
        }
        Stored::Dictionary(all.unwrap())
    };
    let mut merged = dictionary(&[("a", b"1", 5.0), ("b", b"2", 9.0)]);
    merged.merge(dictionary(&[("a", b"3", 6.0), ("b", b"4", 8.0), ("c", b"5", 1.0)]));
    assert_eq!(values(&merged), [b"3", b"2", b"5"]);
    assert_eq!(values(&merged.clone().live(2.0).unwrap()), [b"3", b"2"]);
    assert_eq!(merged.clone().live(10.0), None);
    merged.merge(Stored::Regular(timed(b"r", 8.5)));
    assert_eq!(values(&merged).len(), 3);
    merged.merge(Stored::Regular(timed(b"r", 9.5)));
    assert_eq!(values(&merged), [b"r"]);
}

proptest! {
    #[test]
    fn no_item_from_the_wire_panics(
        tag in prop::collection::vec(any::<u8>(), 0..20),
        value in prop::collection::vec(any::<u8>(), 0..200),
        expiration in any::<f64>(),
    ) {
        if let Some(item) = Item::from_wire(&tag.into(), &value.into(), expiration) {
            let mut storage = storage();
            storage.store(key(), item, NOW);
            let _ = storage.find(&key(), NOW).map(|stored| stored.to_wire());
        }
    }

    #[test]
    fn bytes_are_counted_exactly(steps in prop::collection::vec((0u8..4, 0u8..5, 0u8..40, any::<bool>()), 0..100)) {
        let mut storage = storage();
        let mut now = NOW;
        for (number, subkey, life, is_regular) in steps {
            now += 1.0;
            let expiration = now + f64::from(life);
            let item = if is_regular { regular(b"value", expiration) } else { entry(&"s".repeat(subkey.into()), b"val", expiration) };
            storage.store(DhtId::of_bytes(&[number]), item, now);
            prop_assert_eq!(storage.bytes(), storage.items.values().map(Stored::bytes).sum::<usize>());
        }
        storage.drop_expired(now + 100.0);
        prop_assert_eq!((storage.bytes(), storage.len()), (0, 0));
    }
}

#[test]
fn one_peer_cannot_fill_the_store_and_gets_its_room_back() {
    let limits = StorageLimits { max_peer_bytes: 4 * ENTRY_OVERHEAD, ..StorageLimits::default() };
    let mut storage = Storage::new(limits);
    let (greedy, other) = (PeerId::random(), PeerId::random());
    let number = |n: u8| DhtId::of_bytes(&[n]);
    let store = |storage: &mut Storage, who, n, item, now| {
        storage.store_for(Some(who), number(n), item, now)
    };
    let item = |end: f64| entry("s", b"value", NOW + end);
    assert!(store(&mut storage, greedy, 0, item(10.0), NOW));
    assert!(store(&mut storage, greedy, 1, item(10.0), NOW));
    assert!(!store(&mut storage, greedy, 2, item(10.0), NOW), "no room left");
    assert_eq!(storage.refused(), 1);
    // It may still renew what it has, others have room of their own, and so have we.
    assert!(store(&mut storage, greedy, 1, item(20.0), NOW));
    assert!(store(&mut storage, other, 2, item(10.0), NOW));
    assert!(storage.store(number(3), item(10.0), NOW));
    // An entry that another peer renews is charged to that one.
    assert!(store(&mut storage, other, 0, item(20.0), NOW));
    assert!(store(&mut storage, greedy, 4, item(20.0), NOW));
    // When all has ended, nobody is charged.
    storage.drop_expired(NOW + 30.0);
    assert_eq!((storage.len(), storage.bytes(), storage.charges.peers()), (0, 0, 0));
    assert!(store(&mut storage, greedy, 0, regular(b"r", NOW + 50.0), NOW + 30.0));
    assert!(store(&mut storage, greedy, 0, entry("s", b"v", NOW + 51.0), NOW + 30.0));
    assert_eq!(storage.charges.held_by(&greedy), ENTRY_OVERHEAD + 3);
}
