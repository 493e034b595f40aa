//! Beam search for the nodes nearest to keys, and for what they store. Source:
//! `hivemind/dht/traverse.py` and `_SearchState` in `hivemind/dht/node.py`.
//!
//! Per key the nearest node not asked yet is asked, as long as it is among the [`BEAM`] nearest
//! known; answers bring nearer nodes and values. One call asks one node about several keys. A
//! lookup ends when every beam is exhausted, or earlier for a key whose value expires late enough.
//!
//! Where nodes contradict each other about an entry of a dictionary, the [`REPLICAS`] nearest ones
//! decide by majority: announcements are stored at those, and they refuse what others say of a peer
//! that spoke for itself. Anybody can write at nodes that are farther away. What a peer itself has
//! stored here, or answers now, needs no majority; but once it should have renewed a record that is
//! stored here and did not, later ones count too (`Dictionary::decide_by`).
//!
//! Pure: [`Lookup::next_call`] says whom to ask, the owner reports answers and failures. A node is
//! asked once per key at most; peers that invent ever nearer nodes are stopped by [`MAX_VISITS`].

use super::id::{DhtId, Distance};
use super::routing::{BUCKET_SIZE, Contact};
use super::storage::{Dictionary, StoredValue, tag_of};
use p2p::PeerId;
use std::collections::{BTreeMap, HashSet};

/// Nodes that keep each value.
pub const REPLICAS: usize = 5;

/// Nodes per key that a search keeps in view.
pub const BEAM: usize = BUCKET_SIZE;
/// Nodes that are asked about one key at most; honest swarms need a few more than the beam.
pub const MAX_VISITS: usize = 100;
/// Keys in one call at most.
const MAX_KEYS_PER_CALL: usize = 16;
/// Nodes beyond the beam that are remembered, as replacements for those that fail.
const MAX_CANDIDATES: usize = 3 * BEAM;

/// What is looked for.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub key: DhtId,
    /// Best known nodes to start from.
    pub seeds: Vec<Contact>,
    /// What this node itself has.
    pub known: Option<StoredValue>,
}

/// What a lookup found out about one key.
#[derive(Clone, Debug)]
pub struct KeyResult {
    pub key: DhtId,
    /// Its value, united from all nodes asked; parts may have ended meanwhile.
    pub found: Option<StoredValue>,
    /// Which node had the value that expires latest; `None` if it is ours.
    pub source: Option<DhtId>,
    /// The nearest nodes that answered, nearest first.
    pub nearest: Vec<Contact>,
}

/// One answer about one key.
#[derive(Clone, Debug, Default)]
pub struct LookupAnswer {
    /// What the node has.
    pub found: Option<StoredValue>,
    /// Whom it knows nearer to the key.
    pub nearest: Vec<Contact>,
}

/// A search for several keys at once.
#[derive(Debug)]
pub struct Lookup {
    searches: Vec<Search>,
    own: Contact,
    /// An expiration from which on a value is good enough to stop.
    sufficient: f64,
    workers: usize,
    keys_per_call: usize,
    in_flight: usize,
}

/// A call to make: whom, and about which keys (by index).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FindCall {
    pub contact: Contact,
    /// Indexes of the keys, to be given back with the answer.
    pub searches: Vec<usize>,
}

#[derive(Debug)]
struct Search {
    key: DhtId,
    candidates: BTreeMap<Distance, LookupCandidate>,
    /// Nodes that failed, which must not come back.
    failed: HashSet<DhtId>,
    found: Option<StoredValue>,
    /// What the nearest nodes that have entries answered.
    nearest: BTreeMap<Distance, Dictionary>,
    source: Option<DhtId>,
    asked: usize,
    visits: usize,
}

#[derive(Debug)]
struct LookupCandidate {
    contact: Contact,
    state: CandidateState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CandidateState {
    New,
    Asked,
    Answered,
}

impl Lookup {
    /// A search with at most `workers` calls under way. `sufficient` is the expiration that ends
    /// the search for a key; infinity asks the whole beam and unites what it says.
    #[must_use]
    pub fn new(own: Contact, wanted: Vec<Wanted>, sufficient: f64, workers: usize) -> Self {
        let keys_per_call = wanted.len().isqrt().clamp(1, MAX_KEYS_PER_CALL);
        let searches = wanted.into_iter().map(|wanted| Search::new(wanted, &own)).collect();
        Self { searches, own, sufficient, workers: workers.max(1), keys_per_call, in_flight: 0 }
    }

    /// The next call to make now, if any. Nodes for which `banned` holds count as failed.
    pub fn next_call(&mut self, banned: impl Fn(&PeerId) -> bool) -> Option<FindCall> {
        if self.in_flight >= self.workers {
            return None;
        }
        let sufficient = self.sufficient;
        let contact =
            self.searches.iter_mut().find_map(|search| search.next(sufficient, &banned))?;
        let asks = |(_, search): &(usize, &mut Search)| search.wants(&contact, sufficient);
        let chosen = self.searches.iter_mut().enumerate().filter(asks).take(self.keys_per_call);
        let searches = chosen.map(|(index, search)| search.ask(&contact, index)).collect();
        self.in_flight += 1;
        Some(FindCall { contact, searches })
    }

    /// Keys of a call, in its order.
    #[must_use]
    pub fn keys(&self, call: &FindCall) -> Vec<DhtId> {
        call.searches
            .iter()
            .filter_map(|&index| self.searches.get(index))
            .map(|search| search.key)
            .collect()
    }

    /// Takes the answers to a call, one per key.
    pub fn on_answers(&mut self, call: &FindCall, answers: Vec<LookupAnswer>) {
        self.in_flight = self.in_flight.saturating_sub(1);
        for (index, answer) in call.searches.iter().zip(answers) {
            if let Some(search) = self.searches.get_mut(*index) {
                search.on_answer(&call.contact, answer, &self.own);
            }
        }
    }

    /// Takes the news that a call failed.
    pub fn on_failure(&mut self, call: &FindCall) {
        self.in_flight = self.in_flight.saturating_sub(1);
        for index in &call.searches {
            if let Some(search) = self.searches.get_mut(*index) {
                search.on_failure(&call.contact);
            }
        }
    }

    /// Whether nothing is under way and, after [`Self::next_call`] had nothing to offer, nothing is
    /// left.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// The results at `now`, Unix seconds, in the order in which the keys were given.
    #[must_use]
    pub fn finish(self, now: f64) -> Vec<KeyResult> {
        self.searches.into_iter().map(|search| search.finish(now)).collect()
    }
}

impl Search {
    fn new(wanted: Wanted, own: &Contact) -> Self {
        let mut search = Self {
            key: wanted.key,
            candidates: BTreeMap::new(),
            failed: HashSet::new(),
            found: wanted.known,
            nearest: BTreeMap::new(),
            source: None,
            asked: 0,
            visits: 0,
        };
        search.add(wanted.seeds, own);
        search
    }

    /// The nearest node of the beam that nobody asked yet.
    fn next(&mut self, sufficient: f64, banned: impl Fn(&PeerId) -> bool) -> Option<Contact> {
        loop {
            if self.is_satisfied(sufficient) || self.visits >= MAX_VISITS {
                return None;
            }
            let mut beam = self.candidates.values().take(BEAM);
            let contact = beam.find(|candidate| candidate.state == CandidateState::New)?.contact;
            if !banned(&contact.peer_id) {
                return Some(contact);
            }
            self.drop_candidate(&contact);
        }
    }

    fn wants(&self, contact: &Contact, sufficient: f64) -> bool {
        let is_new = |candidate: &LookupCandidate| {
            candidate.contact == *contact && candidate.state == CandidateState::New
        };
        !self.is_satisfied(sufficient)
            && self.visits < MAX_VISITS
            && self.candidates.values().take(BEAM).any(is_new)
    }

    fn ask(&mut self, contact: &Contact, index: usize) -> usize {
        if let Some(candidate) = self.candidates.get_mut(&contact.node_id.distance(&self.key)) {
            candidate.state = CandidateState::Asked;
        }
        self.asked += 1;
        self.visits += 1;
        index
    }

    fn on_answer(&mut self, contact: &Contact, answer: LookupAnswer, own: &Contact) {
        self.asked = self.asked.saturating_sub(1);
        if let Some(candidate) = self.candidates.get_mut(&contact.node_id.distance(&self.key)) {
            candidate.state = CandidateState::Answered;
        }
        self.add(answer.nearest, own);
        let Some(mut found) = answer.found else { return };
        found.heard_from(&tag_of(&contact.peer_id));
        let later = self.found.as_ref().is_none_or(|old| found.expiration() > old.expiration());
        if later {
            self.source = Some(contact.node_id);
        }
        if let StoredValue::Dictionary(dictionary) = &found {
            let distance = contact.node_id.distance(&self.key);
            self.nearest.insert(distance, dictionary.clone());
            if self.nearest.len() > REPLICAS {
                self.nearest.pop_last();
            }
        }
        match &mut self.found {
            Some(old) => old.merge(found),
            None => self.found = Some(found),
        }
    }

    fn on_failure(&mut self, contact: &Contact) {
        self.asked = self.asked.saturating_sub(1);
        self.drop_candidate(contact);
    }

    fn drop_candidate(&mut self, contact: &Contact) {
        self.candidates.remove(&contact.node_id.distance(&self.key));
        self.failed.insert(contact.node_id);
    }

    fn add(&mut self, contacts: Vec<Contact>, own: &Contact) {
        for contact in contacts.into_iter().take(BUCKET_SIZE.max(BEAM)) {
            let is_own = contact.node_id == own.node_id || contact.peer_id == own.peer_id;
            if is_own || self.failed.contains(&contact.node_id) {
                continue;
            }
            let distance = contact.node_id.distance(&self.key);
            self.candidates
                .entry(distance)
                .or_insert(LookupCandidate { contact, state: CandidateState::New });
        }
        while self.candidates.len() > MAX_CANDIDATES {
            self.candidates.pop_last();
        }
    }

    fn is_satisfied(&self, sufficient: f64) -> bool {
        self.found.as_ref().is_some_and(|found| found.expiration() >= sufficient)
    }

    fn finish(mut self, now: f64) -> KeyResult {
        let answered = self
            .candidates
            .into_values()
            .filter(|candidate| candidate.state == CandidateState::Answered);
        let nearest: Vec<Contact> =
            answered.map(|candidate| candidate.contact).take(BEAM).collect();
        if let Some(StoredValue::Dictionary(found)) = &mut self.found {
            let distances = nearest.iter().take(REPLICAS).map(|c| c.node_id.distance(&self.key));
            let voters: Vec<&Dictionary> =
                distances.filter_map(|distance| self.nearest.get(&distance)).collect();
            found.decide_by(&voters, now);
        }
        KeyResult { key: self.key, found: self.found, source: self.source, nearest }
    }
}

#[cfg(test)]
mod tests {
    use super::super::storage::Timed;
    use super::*;
    use bytes::Bytes;

    fn contact(number: u32) -> Contact {
        Contact { node_id: DhtId::of_bytes(&number.to_be_bytes()), peer_id: PeerId::random() }
    }

    fn lookup(seeds: Vec<Contact>, keys: u32, sufficient: f64, workers: usize) -> Lookup {
        let key = |n: u32| DhtId::of_text(&format!("key {n}"));
        let wanted =
            (0..keys).map(|n| Wanted { key: key(n), seeds: seeds.clone(), known: None }).collect();
        Lookup::new(contact(u32::MAX), wanted, sufficient, workers)
    }

    const NOW: f64 = 40.0;

    fn value(expiration: f64) -> Option<StoredValue> {
        Some(StoredValue::Regular(Timed { value: "v".into(), expiration }))
    }

    fn nobody(_: &PeerId) -> bool {
        false
    }

    #[test]
    fn asks_the_nearest_first_and_each_once() {
        let seeds: Vec<_> = (0..5).map(contact).collect();
        let mut lookup = lookup(seeds.clone(), 1, f64::INFINITY, 10);
        let mut expected = seeds;
        expected.sort_by_key(|c| c.node_id.distance(&DhtId::of_text("key 0")));
        let calls: Vec<_> = std::iter::from_fn(|| lookup.next_call(nobody)).collect();
        assert_eq!(calls.iter().map(|c| c.contact).collect::<Vec<_>>(), expected);
        for call in &calls[1..] {
            lookup.on_answers(call, vec![LookupAnswer { found: None, nearest: expected.clone() }]);
        }
        lookup.on_failure(&calls[0]);
        assert_eq!(lookup.next_call(nobody), None);
        assert!(lookup.is_idle());
        assert_eq!(lookup.finish(NOW)[0].nearest, expected[1..]);
    }

    #[test]
    fn workers_bound_the_calls_under_way() {
        let mut lookup = lookup((0..9).map(contact).collect(), 1, f64::INFINITY, 3);
        let calls: Vec<_> = std::iter::from_fn(|| lookup.next_call(nobody)).collect();
        assert_eq!(calls.len(), 3);
        lookup.on_failure(&calls[0]);
        assert!(lookup.next_call(nobody).is_some());
        assert!(lookup.next_call(nobody).is_none());
    }

    #[test]
    fn sufficient_value_ends_the_search_for_its_key() {
        let mut lookup = lookup((0..9).map(contact).collect(), 1, 50.0, 1);
        let call = lookup.next_call(nobody).unwrap();
        lookup.on_answers(&call, vec![LookupAnswer { found: value(49.0), nearest: vec![] }]);
        let call = lookup.next_call(nobody).unwrap();
        lookup.on_answers(&call, vec![LookupAnswer { found: value(50.0), nearest: vec![] }]);
        assert_eq!(lookup.next_call(nobody), None);
        let result = lookup.finish(NOW).remove(0);
        assert_eq!((result.found, result.source), (value(50.0), Some(call.contact.node_id)));
    }

    #[test]
    fn one_call_asks_about_several_keys() {
        let mut lookup = lookup((0..3).map(contact).collect(), 9, f64::INFINITY, 100);
        let calls: Vec<_> = std::iter::from_fn(|| lookup.next_call(nobody)).collect();
        assert_eq!(calls.len(), 9, "3 nodes, 9 keys, 3 keys a call");
        assert!(calls.iter().all(|call| lookup.keys(call).len() == 3));
    }

    #[test]
    fn the_nearest_nodes_decide_what_an_entry_is_and_later_claims_of_others_do_not() {
        let tag = tag_of(&PeerId::random());
        let entry = |value: &'static str, expiration: f64| {
            let timed = Timed { value: value.into(), expiration };
            Some(StoredValue::Dictionary(Dictionary::single(tag.clone(), timed, None)))
        };
        let mut lookup = lookup((0..15).map(contact).collect(), 1, f64::INFINITY, 20);
        let calls: Vec<_> = std::iter::from_fn(|| lookup.next_call(nobody)).collect();
        assert_eq!(calls.len(), 15);
        for (number, call) in calls.iter().enumerate() {
            let found = match number {
                1 | 2 | 4 => entry("online", 50.0),
                3 => None,
                // One of the nearest lies, and so do all that are far.
                _ => entry("offline", 1000.0),
            };
            lookup.on_answers(call, vec![LookupAnswer { found, nearest: vec![] }]);
        }
        let found = lookup.finish(NOW).remove(0).found;
        let Some(StoredValue::Dictionary(dictionary)) = found else { panic!("{found:?}") };
        assert_eq!(
            dictionary.iter().next().map(|(_, timed)| &timed.value[..]),
            Some(&b"online"[..])
        );
    }

    /// What a reader believes of a server whose record, first hand, is in its own store and counts
    /// alone until `until`, where the nearest nodes say `nearest`, and nodes that are far lie.
    fn believed(until: f64, nearest: &[Option<(&'static str, f64)>]) -> Bytes {
        believed_beside(until, nearest, None)
    }

    /// The same, if the server itself is among the nodes that are far and says something.
    fn believed_beside(
        until: f64,
        nearest: &[Option<(&'static str, f64)>],
        itself: Option<(&'static str, f64)>,
    ) -> Bytes {
        let mut seeds: Vec<_> = (0..9).map(contact).collect();
        seeds.sort_by_key(|contact| contact.node_id.distance(&DhtId::of_text("key 0")));
        let tag = tag_of(&seeds[8].peer_id);
        let dictionary = |(value, expiration): (&'static str, f64), first_hand| {
            let timed = Timed { value: value.into(), expiration };
            StoredValue::Dictionary(Dictionary::single(tag.clone(), timed, first_hand))
        };
        let known = Some(dictionary(("ours", 50.0), Some(until)));
        let wanted = Wanted { key: DhtId::of_text("key 0"), seeds, known };
        let mut lookup = Lookup::new(contact(u32::MAX), vec![wanted], f64::INFINITY, 20);
        let calls: Vec<_> = std::iter::from_fn(|| lookup.next_call(nobody)).collect();
        for (number, call) in calls.iter().enumerate() {
            let far = if number == 8 { itself } else { Some(("forged", 1000.0)) };
            let said = nearest.get(number).copied().unwrap_or(far);
            let found = said.map(|said| dictionary(said, None));
            lookup.on_answers(call, vec![LookupAnswer { found, nearest: vec![] }]);
        }
        let found = lookup.finish(NOW).remove(0).found;
        let Some(StoredValue::Dictionary(dictionary)) = found else { panic!("{found:?}") };
        dictionary.iter().next().expect("an entry").1.value.clone()
    }

    #[test]
    fn our_record_of_a_peer_gives_way_to_a_later_one_when_its_renewal_is_due() {
        let (newer, forged) = (Some(("newer", 60.0)), Some(("forged", 1000.0)));
        let (same, older) = (Some(("ours", 50.0)), Some(("older", 45.0)));
        let (fresh, due) = (NOW + 1.0, NOW - 1.0);
        for (until, nearest, expected) in [
            (fresh, [newer; 5], "ours"),
            (fresh, [forged; 5], "ours"),
            (due, [newer; 5], "newer"),
            (due, [newer, newer, newer, forged, forged], "newer"),
            (due, [None, None, None, None, newer], "newer"),
            (due, [same, same, same, same, forged], "ours"),
            (due, [same, same, None, forged, forged], "ours"),
            (due, [older; 5], "ours"),
            (due, [None; 5], "ours"),
        ] {
            assert_eq!(believed(until, &nearest), expected, "until {until}: {nearest:?}");
        }
    }

    #[test]
    fn what_a_peer_answers_itself_needs_no_majority() {
        let forged = [Some(("forged", 1000.0)); 5];
        for said in [("ours", 50.0), ("newer", 60.0)] {
            assert_eq!(believed_beside(NOW, &forged, Some(said)), said.0);
        }
    }

    #[test]
    fn nodes_that_cut_a_long_life_at_other_times_agree_on_its_value() {
        let cut = |seconds: f64| Some(("newer", 900.0 + seconds));
        let nearest = [cut(0.1), cut(0.2), cut(0.3), Some(("forged", 1000.0)), None];
        assert_eq!(believed(NOW, &nearest), "newer");
    }

    #[test]
    fn banned_peers_are_not_asked() {
        let seeds: Vec<_> = (0..3).map(contact).collect();
        let mut lookup = lookup(seeds.clone(), 1, f64::INFINITY, 10);
        let calls = std::iter::from_fn(|| lookup.next_call(|peer| *peer == seeds[1].peer_id));
        assert!(calls.map(|call| call.contact).all(|contact| contact != seeds[1]));
    }

    #[test]
    fn peer_that_invents_nearer_nodes_is_stopped() {
        let mut lookup = lookup(vec![contact(0)], 1, f64::INFINITY, 1);
        let mut calls = 0;
        while let Some(call) = lookup.next_call(nobody) {
            calls += 1;
            // Ever nearer to the key: more and more leading bytes of it.
            let mut near = DhtId::of_text("key 0");
            near.0[19] ^= 255 - calls as u8;
            let fake = Contact { node_id: near, peer_id: PeerId::random() };
            lookup.on_answers(&call, vec![LookupAnswer { found: None, nearest: vec![fake] }]);
        }
        assert_eq!(calls, MAX_VISITS);
    }
}
