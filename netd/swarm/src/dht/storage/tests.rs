use super::*;
use proptest::prelude::*;
use std::net::Ipv4Addr;
use std::sync::LazyLock;
use testkit::golden;

const NOW: f64 = 1_000.0;
static OWN: LazyLock<PeerId> = LazyLock::new(PeerId::random);

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
    Storage::new(StorageLimits::default(), *OWN)
}

fn values(stored: &StoredValue) -> Vec<&[u8]> {
    match stored {
        StoredValue::Regular(timed) => vec![&timed.value],
        StoredValue::Dictionary(dictionary) => {
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
fn whole_dictionary_is_merged_entry_by_entry() {
    let mut storage = storage();
    storage.store(key(), entry("a", b"1", NOW + 5.0), NOW);
    let mut incoming =
        Dictionary::single(Value::str("b").encode().into(), timed(b"2", NOW + 2.0), None);
    assert!(storage.store(key(), Item::Dictionary(incoming.clone()), NOW));
    incoming.merge_entry(Value::str("a").encode().into(), timed(b"old", NOW + 4.0), None);
    assert!(!storage.store(key(), Item::Dictionary(incoming), NOW));
    assert_eq!(found(&storage, NOW), [b"1", b"2"]);
}

#[test]
fn what_exceeds_a_bound_or_never_expires_is_refused_and_counted() {
    let limits = StorageLimits {
        max_keys: 2,
        max_subkeys: 2,
        max_value_bytes: 10,
        max_total_bytes: 4 * ENTRY_OVERHEAD,
        max_peer_bytes: 4 * ENTRY_OVERHEAD,
        max_horizon_s: 100.0,
    };
    let mut storage = Storage::new(limits, *OWN);
    let number = |n: u32| DhtId::of_bytes(&n.to_be_bytes());
    assert!(!storage.store(number(0), regular(b"12345678901", NOW + 1.0), NOW));
    assert!(!storage.store(number(0), regular(b"x", f64::NAN), NOW));
    assert!(!storage.store(number(0), regular(b"x", f64::INFINITY), NOW));
    assert!(storage.store(number(0), entry("a", b"x", NOW + 1.0), NOW));
    assert!(storage.store(number(0), entry("b", b"x", NOW + 1.0), NOW));
    assert!(!storage.store(number(0), entry("c", b"x", NOW + 1.0), NOW));
    assert!(storage.store(number(1), regular(b"x", NOW + 1.0), NOW));
    assert!(!storage.store(number(2), regular(b"x", NOW + 1.0), NOW));
    assert_eq!(storage.refused(), 5);
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
                    all.merge_entry(tag, timed, None);
                }
                None => all = Some(Dictionary::single(tag, timed, None)),
            }
        }
        StoredValue::Dictionary(all.unwrap())
    };
    let mut merged = dictionary(&[("a", b"1", 5.0), ("b", b"2", 9.0)]);
    merged.merge(dictionary(&[("a", b"3", 6.0), ("b", b"4", 8.0), ("c", b"5", 1.0)]));
    assert_eq!(values(&merged), [b"3", b"2", b"5"]);
    assert_eq!(values(&merged.clone().live(2.0).unwrap()), [b"3", b"2"]);
    assert_eq!(merged.clone().live(10.0), None);
    merged.merge(StoredValue::Regular(timed(b"r", 8.5)));
    merged.merge(StoredValue::Regular(timed(b"r", 9.5)));
    assert_eq!(values(&merged).len(), 3, "one value hides no dictionary");
    let mut regular = StoredValue::Regular(timed(b"r", 9.5));
    regular.merge(merged);
    assert_eq!(values(&regular).len(), 3);
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
            prop_assert!(storage.ledger.is_consistent());
            prop_assert_eq!(storage.bytes(), bytes_of(&storage));
        }
        storage.drop_expired(now + 100.0);
        prop_assert_eq!((storage.bytes(), storage.len()), (0, 0));
    }
}

#[test]
fn one_peer_cannot_fill_the_store_and_gets_its_room_back() {
    let limits =
        StorageLimits { max_peer_bytes: 2 * ENTRY_OVERHEAD + 50, ..StorageLimits::default() };
    let mut storage = Storage::new(limits, *OWN);
    let (greedy, other) = (PeerId::random(), PeerId::random());
    let number = |n: u8| DhtId::of_bytes(&[n]);
    let store = |storage: &mut Storage, who, n, item, now| {
        storage.store_for(&Owner::peer(who, Net::Unknown), number(n), item, now)
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
    assert_eq!((storage.len(), storage.bytes(), storage.ledger.peers()), (0, 0, 0));
    assert!(store(&mut storage, greedy, 0, regular(b"r", NOW + 50.0), NOW + 30.0));
    assert!(store(&mut storage, greedy, 0, entry("s", b"v", NOW + 51.0), NOW + 30.0));
    assert_eq!(storage.ledger.held_by(&(Net::Unknown, greedy)), ENTRY_OVERHEAD + 3);
}

/// Bytes of all entries, counted anew.
fn bytes_of(storage: &Storage) -> usize {
    let of = |stored: &StoredValue| match stored {
        StoredValue::Regular(timed) => ENTRY_OVERHEAD + timed.value.len(),
        StoredValue::Dictionary(dictionary) => dictionary
            .iter()
            .map(|(tag, timed)| ENTRY_OVERHEAD + tag.len() + timed.value.len())
            .sum(),
    };
    storage.items.values().map(of).sum()
}

fn address(last: u8) -> Net {
    Net::V4(Ipv4Addr::new(5, 6, 7, last))
}

/// A record under the PeerID of `peer`.
fn record(peer: &PeerId, value: &'static [u8], expiration: f64) -> Item {
    Item::Entry(tag_of(peer), timed(value, expiration))
}

#[test]
fn what_a_peer_says_of_itself_beats_what_others_say_of_it() {
    let mut storage = storage();
    let (server, liar) = (PeerId::random(), PeerId::random());
    let [honest, forged] = [server, liar].map(|peer| Owner::peer(peer, address(1)));
    assert!(storage.store_for(&forged, key(), record(&server, b"forged", NOW + 800.0), NOW));
    assert!(storage.store_for(&honest, key(), record(&server, b"true", NOW + 240.0), NOW));
    assert_eq!(found(&storage, NOW), [b"true"]);
    assert!(!storage.store_for(&forged, key(), record(&server, b"forged", NOW + 900.0), NOW));
    let whole = Dictionary::single(tag_of(&server), timed(b"forged", NOW + 900.0), None);
    assert!(!storage.store_for(&forged, key(), Item::Dictionary(whole), NOW));
    assert!(!storage.store_for(&forged, key(), regular(b"forged", NOW + 900.0), NOW));
    assert!(storage.store_for(&honest, key(), record(&server, b"newer", NOW + 360.0), NOW + 1.0));
    assert_eq!(found(&storage, NOW), [b"newer"]);
    // A single value that came first does not keep the dictionary out.
    let other = DhtId::of_text("other");
    assert!(storage.store_for(&forged, other, regular(b"forged", NOW + 900.0), NOW));
    assert!(storage.store_for(&honest, other, record(&server, b"true", NOW + 240.0), NOW));
    // Nor does the word of a peer outlive its record.
    assert!(storage.store_for(&forged, key(), record(&server, b"copy", NOW + 800.0), NOW + 361.0));
    assert!(storage.ledger.is_consistent());
}

#[test]
fn nobody_else_stores_under_our_own_name() {
    let mut storage = storage();
    let liar = Owner::peer(PeerId::random(), address(1));
    assert!(!storage.store_for(&liar, key(), record(&OWN, b"forged", NOW + 800.0), NOW));
    assert!(storage.store(key(), record(&OWN, b"true", NOW + 240.0), NOW));
    let copies = Owner::copies(*OWN);
    assert!(!storage.store_for(&copies, key(), record(&OWN, b"forged", NOW + 800.0), NOW));
    assert_eq!((found(&storage, NOW), storage.refused()), (vec![b"true".to_vec()], 2));
}

#[test]
fn expirations_far_ahead_are_cut_but_our_own_are_not() {
    let mut storage = storage();
    let month = NOW + 29.0 * 86_400.0;
    let peer = Owner::peer(PeerId::random(), address(1));
    assert!(storage.store_for(&peer, key(), entry("s", b"x", month), NOW));
    assert_eq!(storage.find(&key(), NOW).unwrap().expiration(), NOW + 900.0);
    assert!(storage.store(DhtId::of_text("own"), entry("s", b"x", month), NOW));
    storage.drop_expired(NOW + 901.0);
    assert_eq!(storage.len(), 1);
}

#[test]
fn full_store_evicts_from_the_largest_holder_and_keeps_our_own() {
    let limits = StorageLimits { max_keys: 20, ..StorageLimits::default() };
    let mut storage = Storage::new(limits, *OWN);
    let number = |n: u8| DhtId::of_bytes(&[n]);
    assert!(storage.store(number(0), entry("own", b"x", NOW + 1.0), NOW));
    // Eight PeerIDs of one address fill the store.
    for n in 1..20 {
        let owner = Owner::peer(PeerId::random(), address(1));
        assert!(storage.store_for(&owner, number(n), regular(b"x", NOW + 800.0), NOW));
    }
    let honest = Owner::peer(PeerId::random(), address(2));
    for n in 20..28 {
        assert!(storage.store_for(&honest, number(n), regular(b"y", NOW + 240.0), NOW));
    }
    assert_eq!((storage.len(), storage.evicted()), (20, 8));
    let left = |from: u8, to: u8| (from..to).filter(|n| storage.find(&number(*n), NOW).is_some());
    assert_eq!((left(20, 28).count(), left(1, 20).count(), left(0, 1).count()), (8, 11, 1));
    assert!(storage.ledger.is_consistent());
}

#[test]
fn full_dictionary_takes_what_a_peer_says_of_itself() {
    let limits = StorageLimits { max_subkeys: 2, ..StorageLimits::default() };
    let mut storage = Storage::new(limits, *OWN);
    let liar = Owner::peer(PeerId::random(), address(1));
    for value in [b"1", b"2"] {
        let forged = record(&PeerId::random(), value, NOW + 800.0);
        assert!(storage.store_for(&liar, key(), forged, NOW));
    }
    assert!(!storage.store_for(&liar, key(), record(&PeerId::random(), b"3", NOW + 900.0), NOW));
    let server = PeerId::random();
    let honest = Owner::peer(server, address(2));
    assert!(storage.store_for(&honest, key(), record(&server, b"true", NOW + 240.0), NOW));
    assert_eq!(storage.evicted(), 1);
}

/// A stranger's attempt to block the store by making it look at everything, again and again.
#[test]
fn the_entries_of_a_full_key_are_shared_among_nets() {
    let limits = StorageLimits { max_subkeys: 8, ..StorageLimits::default() };
    let mut storage = Storage::new(limits, *OWN);
    let mut announce = |net: u8, expiration: f64| {
        let peer = PeerId::random();
        let stored = storage.store_for(
            &Owner::peer(peer, address(net)),
            key(),
            record(&peer, b"x", expiration),
            0.0,
        );
        assert!(storage.ledger.is_consistent());
        stored.then_some(peer)
    };
    let attackers: Vec<_> = (0..8).map(|n| announce(1, 50.0 + f64::from(n)).unwrap()).collect();
    assert!(announce(1, 90.0).is_none(), "the net has all there is");
    let others: Vec<_> = std::iter::from_fn(|| announce(2, 90.0)).take(20).collect();
    assert_eq!(others.len(), 4, "half each");
    assert!(announce(1, 90.0).is_none() && announce(2, 90.0).is_none());
    let third = announce(3, 90.0).expect("a third net has fewer");
    let stored = storage.find(&key(), 0.0).unwrap();
    let StoredValue::Dictionary(dictionary) = stored else { panic!() };
    let has = |peer: &PeerId| dictionary.entries.contains_key(&tag_of(peer));
    assert!(has(&third) && dictionary.entries.len() == 8);
    assert!(attackers[..4].iter().all(|peer| !has(peer)), "those that end first went");
    // What others say of a peer takes nobody's place.
    let hearsay = record(&PeerId::random(), b"y", 90.0);
    let teller = Owner::peer(PeerId::random(), address(4));
    assert!(!storage.store_for(&teller, key(), hearsay, 0.0));
    // Our own does.
    let own = record(&OWN, b"z", 90.0);
    assert!(storage.store(key(), own, 0.0) && storage.ledger.is_consistent());
}

#[test]
fn an_older_record_of_a_peer_never_replaces_a_newer_one_of_its_own() {
    let peer = PeerId::random();
    let heard = |value: &'static [u8], expiration| {
        let Item::Entry(tag, timed) = record(&peer, value, expiration) else { panic!() };
        let mut stored = StoredValue::Dictionary(Dictionary::single(tag.clone(), timed, None));
        stored.heard_from(&tag);
        stored
    };
    for (mut first, second) in
        [(heard(b"new", 60.0), heard(b"old", 50.0)), (heard(b"old", 50.0), heard(b"new", 60.0))]
    {
        first.merge(second);
        assert_eq!(values(&first), [b"new"]);
    }
}

#[test]
fn storing_into_a_full_store_takes_no_look_at_all_keys() {
    let limits = StorageLimits { max_keys: 10_000, ..StorageLimits::default() };
    let mut storage = Storage::new(limits, *OWN);
    let owner = Owner::peer(PeerId::random(), address(1));
    for n in 0u32..60_000 {
        let item = regular(b"x", NOW + 100.0 + f64::from(n) / 1000.0);
        storage.store_for(&owner, DhtId::of_bytes(&n.to_be_bytes()), item, NOW);
    }
    assert_eq!((storage.len(), storage.evicted()), (10_000, 50_000));
    // Each store takes two searches in an index and each eviction two more.
    let comparisons = crowd::COMPARISONS.get() / 60_000;
    assert!((10..400).contains(&comparisons), "{comparisons} comparisons per store");
}
