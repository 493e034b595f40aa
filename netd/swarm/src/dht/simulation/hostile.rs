//! A hostile swarm: liars near a key, Sybils by the thousand on few nets, stale and conflicting
//! records. Every message is kept and read twice: by our rules, and by hivemind's (the latest
//! expiration wins, nobody is first hand, nothing is bounded). Hivemind's rules see the traffic of
//! our nodes, so they are spared what its own nodes would send beside it.
//!
//! `cargo test -p swarm every_attack -- --ignored --nocapture` prints the table of BENCHMARKS.md.

use super::super::node::Response;
use super::super::storage::{Dictionary, tag_of};
use super::*;
use crate::wire::messages::{
    FindRequest, FindResponse, FindResult, NodeInfo, ResultType, StoreRequest, StoreResponse,
};
use bytes::Bytes;

/// Honest nodes, each on a net of its own.
const NODES: usize = 100;
/// Of which the first ones announce themselves.
const SERVERS: usize = 8;
/// Life of an announcement: that of Petals.
const LIFE_S: f64 = 240.0;
/// Life of what attackers write.
const FORGED_LIFE_S: f64 = 20.0 * 86_400.0;
const SYBILS: usize = 2000;
const SYBIL_NETS: usize = 4;
/// Nodes nearest to the key that Sybils flood.
const FLOODED: usize = 20;
/// Bytes of the stores: a sixteenth of the real ones, as there are few Sybils.
const STORE_BYTES: usize = 4 << 20;

/// What attackers do.
#[derive(Clone, Copy, Debug)]
enum Attack {
    Nothing,
    /// So many nodes with ids next to the key keep nothing, and know nobody but each other.
    Eclipse(usize),
    /// So many nodes with ids next to the key say that the servers are offline.
    Lies(usize),
    /// A stranger stores OFFLINE under the servers' names, to end long after their own records.
    Forgeries,
    /// A stranger stores one value in place of the dictionary.
    OneValue,
    /// A stranger stores the servers' records of before, to end later than their own.
    Stale,
    /// Peers on few nets fill the stores, and come with made-up node ids that do not answer.
    Sybils,
}

/// How a node answers finds if it lies.
#[derive(Clone, Debug)]
pub(super) struct Lie {
    found: Option<Dictionary>,
    nearest: Vec<Contact>,
}

impl Lie {
    fn answer(&self, keys: usize, own: NodeInfo) -> Response {
        let result = FindResult {
            r#type: match self.found {
                Some(_) => ResultType::FoundDictionary,
                None => ResultType::NotFound,
            }
            .into(),
            value: self.found.as_ref().map(Dictionary::encode).unwrap_or_default(),
            expiration_time: self.found.as_ref().map_or(0.0, |found| found.latest),
            nearest_node_ids: self.nearest.iter().map(|c| c.node_id.0.to_vec().into()).collect(),
            nearest_peer_ids: self.nearest.iter().map(|c| c.peer_id.to_bytes().into()).collect(),
        };
        let results = vec![result; keys];
        Response::Find(FindResponse { auth: None, results, peer: Some(own) })
    }
}

/// What the nodes would keep by hivemind's rules, and whom the present lookup asked.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    kept: HashMap<(usize, DhtId), ByLatest>,
    bytes: HashMap<usize, usize>,
    asked: Vec<usize>,
}

/// A key by hivemind's rules. Source: `DHTLocalStorage` in `hivemind/dht/storage.py`.
#[derive(Clone, Debug)]
enum ByLatest {
    Regular(f64),
    Dictionary(HashMap<Bytes, Timed>),
}

impl ByLatest {
    fn latest(&self) -> f64 {
        match self {
            Self::Regular(expiration) => *expiration,
            Self::Dictionary(entries) => {
                entries.values().map(|timed| timed.expiration).fold(0.0, f64::max)
            }
        }
    }

    /// Takes what ends later than what is there.
    fn take(&mut self, item: Item) {
        match (&mut *self, item) {
            (_, Item::Regular(timed)) => {
                if timed.expiration > self.latest() {
                    *self = Self::Regular(timed.expiration);
                }
            }
            (Self::Regular(old), Item::Entry(tag, timed)) => {
                if timed.expiration > *old {
                    *self = Self::Dictionary([(tag, timed)].into());
                }
            }
            (Self::Dictionary(entries), Item::Entry(tag, timed)) => {
                let old = entries.get(&tag).map_or(0.0, |old| old.expiration);
                if timed.expiration > old {
                    entries.insert(tag, timed);
                }
            }
            (_, Item::Dictionary(dictionary)) => {
                for (tag, timed) in dictionary.entries {
                    self.take(Item::Entry(tag, timed));
                }
            }
        }
    }

    /// Unites what two nodes answer. Source: `add_candidate` in `hivemind/dht/node.py`.
    fn merge(&mut self, other: Self) {
        match other {
            Self::Regular(expiration) => {
                if expiration > self.latest() {
                    *self = Self::Regular(expiration);
                }
            }
            Self::Dictionary(entries) => {
                for (tag, timed) in entries {
                    self.take(Item::Entry(tag, timed));
                }
            }
        }
    }
}

impl SimulatedSwarm {
    /// Sees an event before the node it is for; true if a liar has taken it.
    pub(super) fn overhear(&mut self, node: usize, event: &DhtEvent) -> bool {
        let DhtEvent::Inbound { id, request, .. } = event else {
            return false;
        };
        let lie = self.liars.get(&node).cloned();
        match (request, lie) {
            (DhtRequest::Find(find), Some(lie)) => {
                self.shadow.asked.push(node);
                let response = lie.answer(find.keys.len(), self.info(node));
                self.act(node, DhtAction::Reply { id: *id, response: Ok(response) });
                true
            }
            (DhtRequest::Store(store), Some(_)) => {
                let store_ok = vec![true; store.keys.len()];
                let response = StoreResponse { auth: None, store_ok, peer: Some(self.info(node)) };
                let response = Ok(Response::Store(response));
                self.act(node, DhtAction::Reply { id: *id, response });
                true
            }
            (DhtRequest::Find(_), None) => {
                self.shadow.asked.push(node);
                false
            }
            (DhtRequest::Store(store), None) => {
                self.shadow.store(node, store);
                false
            }
            (DhtRequest::Ping(_), _) => false,
        }
    }

    fn info(&self, node: usize) -> NodeInfo {
        self.nodes[node].as_ref().expect("lives").node_info()
    }

    /// A node with this id on a net.
    fn add_at(&mut self, node_id: DhtId, net: Net) -> usize {
        let number = self.nodes.len();
        self.nets.insert(number, net);
        self.add_as(node_id, false, (number > 0).then(|| number * 7919 % number.min(NODES)))
            .expect("join")
    }

    /// A request of a peer that is no node.
    fn inject(&mut self, from: PeerId, net: Net, callee: usize, request: DhtRequest) {
        let id = InboundId(self.serial());
        self.deliver(callee, DhtEvent::Inbound { id, from, net, request });
    }
}

impl Shadow {
    fn store(&mut self, node: usize, request: &StoreRequest) {
        let aligned = request.keys.iter().zip(&request.subkeys).zip(&request.values);
        for (((key, tag), value), expiration) in aligned.zip(&request.expiration_time) {
            let key = DhtId::from_wire(key).expect("key");
            let item = Item::from_wire(tag, value, *expiration).expect("item");
            *self.bytes.entry(node).or_default() += tag.len() + value.len();
            match self.kept.get_mut(&(node, key)) {
                Some(kept) => kept.take(item),
                None => {
                    let mut kept = ByLatest::Regular(0.0);
                    kept.take(item);
                    self.kept.insert((node, key), kept);
                }
            }
        }
    }
}

/// A swarm under attack, the key of its servers, and what both rules find.
struct Field {
    swarm: SimulatedSwarm,
    key: DhtId,
    attack: Attack,
    /// The nodes nearest to the key, in the beginning.
    near: Vec<usize>,
}

/// Of the records that lookups could find, how many they did find.
#[derive(Clone, Copy, Debug, Default)]
struct FoundRecords {
    ours: usize,
    /// Of the others, those of which a reader's own store had an older one, first hand.
    older: usize,
    by_latest: usize,
    of: usize,
    /// Most bytes that a node holds.
    bytes: usize,
    bytes_by_latest: usize,
}

fn net(group: u8, number: usize) -> Net {
    let [.., high, low] = number.to_be_bytes();
    Net::of([5, group, high, low].into())
}

/// An id that shares its first bits with the key: nearer than any honest node.
fn next_to(key: &DhtId, number: usize) -> DhtId {
    let mut id = DhtId::of_bytes(format!("attacker {number}").as_bytes());
    id.0[..3].copy_from_slice(&key.0[..3]);
    id
}

impl Field {
    fn new(name: &str, attack: Attack) -> Self {
        let mut swarm = SimulatedSwarm::new();
        swarm.limits.max_total_bytes = STORE_BYTES;
        swarm.limits.max_peer_bytes = STORE_BYTES / 8;
        for number in 0..NODES {
            swarm.add_at(DhtId::of_bytes(format!("node {number}").as_bytes()), net(1, number));
        }
        let key = DhtId::of_text(name);
        let mut near: Vec<usize> = (0..NODES).collect();
        near.sort_by_key(|number| swarm.id(*number).distance(&key));
        near.truncate(FLOODED);
        Self { swarm, key, attack, near }
    }

    fn announce(&mut self, value: &str) {
        let expiration = self.swarm.now() + LIFE_S;
        for server in 0..SERVERS {
            let timed = Timed { value: value.to_owned().into(), expiration };
            let item = Item::Entry(tag_of(&self.swarm.peer(server)), timed);
            self.swarm.store(server, vec![(self.key, item)]);
        }
    }

    /// What attackers claim of all servers.
    fn claim(&self, value: &str, life_s: f64) -> Vec<(Bytes, Timed)> {
        let expiration = self.swarm.now() + life_s;
        let timed = || Timed { value: value.to_owned().into(), expiration };
        (0..SERVERS).map(|server| (tag_of(&self.swarm.peer(server)), timed())).collect()
    }

    /// Before the servers announce themselves again.
    fn prepare(&mut self) {
        let (count, lies) = match self.attack {
            Attack::Eclipse(count) => (count, false),
            Attack::Lies(count) => (count, true),
            _ => return,
        };
        let claims = self.claim("offline", FORGED_LIFE_S).into_iter();
        let found = lies.then(|| {
            let mut claims = claims;
            let (tag, timed) = claims.next().expect("servers");
            let mut found = Dictionary::single(tag, timed, None);
            for (tag, timed) in claims {
                found.merge_entry(tag, timed, None);
            }
            found
        });
        let contacts: Vec<Contact> = (0..count)
            .map(|number| {
                let node_id = next_to(&self.key, number);
                let node = self.swarm.add_at(node_id, net(9, number % SYBIL_NETS));
                Contact { node_id, peer_id: self.swarm.peer(node) }
            })
            .collect();
        for (number, _) in contacts.iter().enumerate() {
            let nearest = if lies { Vec::new() } else { contacts.clone() };
            self.swarm.liars.insert(NODES + number, Lie { found: found.clone(), nearest });
        }
    }

    /// After the servers have announced themselves.
    fn strike(&mut self) {
        let (stranger, abroad) = (PeerId::random(), net(9, 0));
        match self.attack {
            Attack::Forgeries => {
                self.forge(stranger, abroad, self.claim("offline", FORGED_LIFE_S));
            }
            Attack::Stale => self.forge(stranger, abroad, self.claim("before", LIFE_S + 60.0)),
            Attack::OneValue => {
                let expiration = self.swarm.now() + FORGED_LIFE_S;
                let value = Timed { value: Bytes::from_static(b"x"), expiration };
                self.forge(stranger, abroad, vec![(Bytes::from_static(&[0xc0]), value)]);
            }
            Attack::Sybils => (0..SYBILS).for_each(|number| self.flood(number)),
            Attack::Nothing | Attack::Eclipse(_) | Attack::Lies(_) => {}
        }
    }

    /// Stores entries under the key, at all nodes near it.
    fn forge(&mut self, from: PeerId, net: Net, entries: Vec<(Bytes, Timed)>) {
        let mut request = StoreRequest::default();
        for (tag, timed) in entries {
            add(&mut request, &self.key, tag, timed);
        }
        for node in self.near.clone() {
            self.swarm.inject(from, net, node, DhtRequest::Store(request.clone()));
        }
    }

    /// One Sybil: records to fill the stores, and a node id of its own next to the key.
    fn flood(&mut self, number: usize) {
        const JUNK: Bytes = Bytes::from_static(&[0; 1024]);
        let from = peer_of(&next_to(&self.key, number));
        let net = net(9, number % SYBIL_NETS);
        let expiration = self.swarm.now() + FORGED_LIFE_S;
        let mut request = StoreRequest::default();
        let others = (0..3).map(|n| DhtId::of_bytes(format!("junk {number} {n}").as_bytes()));
        for key in others.chain([self.key]) {
            add(&mut request, &key, tag_of(&from), Timed { value: JUNK, expiration });
        }
        let node_id = next_to(&self.key, number).0.to_vec().into();
        request.peer = Some(NodeInfo { node_id });
        let find = FindRequest {
            auth: None,
            keys: vec![self.key.0.to_vec().into()],
            peer: request.peer.clone(),
        };
        for node in self.near.clone() {
            self.swarm.inject(from, net, node, DhtRequest::Store(request.clone()));
            self.swarm.inject(from, net, node, DhtRequest::Find(find.clone()));
        }
    }

    /// Looks the key up at many nodes, and compares what they find with what the servers said last.
    fn look(&mut self, value: &str) -> FoundRecords {
        let mut found = FoundRecords::default();
        for reader in (SERVERS..NODES).step_by(5) {
            self.swarm.shadow.asked.clear();
            let ours = match self.swarm.run(reader, |id| DhtEvent::Get {
                id,
                keys: vec![self.key],
                latest: true,
            }) {
                SearchOutcome::Found(mut found) => found.remove(0).1,
                other => panic!("{other:?}"),
            };
            let by_latest = self.by_latest(reader);
            for server in 0..SERVERS {
                let tag = tag_of(&self.swarm.peer(server));
                let is_current = |timed: Option<&Timed>| {
                    timed.is_some_and(|timed| timed.value == value.as_bytes())
                };
                let of_ours = match &ours {
                    Some(StoredValue::Dictionary(dictionary)) => dictionary.entries.get(&tag),
                    _ => None,
                };
                let of_latest = match &by_latest {
                    ByLatest::Dictionary(entries) => entries.get(&tag),
                    ByLatest::Regular(_) => None,
                };
                let own = self.swarm.nodes[reader]
                    .as_ref()
                    .and_then(|node| node.storage().find(&self.key, self.swarm.now()));
                let has_older = matches!(&own, Some(StoredValue::Dictionary(own))
                    if own.entries.get(&tag).is_some_and(|timed| timed.value == "before"));
                found.of += 1;
                found.older += usize::from(!is_current(of_ours) && has_older);
                found.ours += usize::from(is_current(of_ours));
                found.by_latest += usize::from(is_current(of_latest));
            }
        }
        let held = |node: &Node| node.storage().bytes();
        found.bytes = self.swarm.nodes.iter().flatten().map(held).max().unwrap_or(0);
        found.bytes_by_latest = self.swarm.shadow.bytes.values().copied().max().unwrap_or(0);
        found
    }

    /// What a lookup that asked the same nodes finds by hivemind's rules.
    fn by_latest(&self, reader: usize) -> ByLatest {
        let mut united = ByLatest::Regular(0.0);
        for node in self.swarm.shadow.asked.iter().chain([&reader]) {
            if let Some(lie) = self.swarm.liars.get(node) {
                let entries = lie.found.iter().flat_map(|found| found.entries.clone()).collect();
                united.merge(ByLatest::Dictionary(entries));
            } else if let Some(kept) = self.swarm.shadow.kept.get(&(*node, self.key)) {
                united.merge(kept.clone());
            }
        }
        united
    }
}

fn add(request: &mut StoreRequest, key: &DhtId, tag: Bytes, timed: Timed) {
    request.keys.push(key.0.to_vec().into());
    request.subkeys.push(tag);
    request.values.push(timed.value);
    request.expiration_time.push(timed.expiration);
    request.in_cache.push(false);
}

/// The servers announce themselves, the attack comes, they announce themselves again, and it comes
/// again.
fn found_under(attack: Attack) -> FoundRecords {
    let mut all = FoundRecords::default();
    let names = ["model.0", "model.7", "model.31"];
    // A flood takes seconds.
    let fields = if matches!(attack, Attack::Sybils) { 1 } else { names.len() };
    for name in &names[..fields] {
        let mut field = Field::new(name, attack);
        field.announce("before");
        field.prepare();
        field.strike();
        field.swarm.pass(LIFE_S / 2.0);
        field.announce("now");
        field.strike();
        let found = field.look("now");
        all.ours += found.ours;
        all.older += found.older;
        all.by_latest += found.by_latest;
        all.of += found.of;
        all.bytes = all.bytes.max(found.bytes);
        all.bytes_by_latest = all.bytes_by_latest.max(found.bytes_by_latest);
    }
    all
}

#[test]
fn clients_of_a_hostile_swarm_find_the_records_of_honest_servers() {
    find_honest_servers_under(&[(Attack::Forgeries, 90), (Attack::Eclipse(4), 95)]);
}

#[test]
#[ignore = "every attack: .ci/long simulations"]
fn clients_of_a_hostile_swarm_find_honest_servers_under_every_attack() {
    find_honest_servers_under(&[
        (Attack::Nothing, 100),
        (Attack::Forgeries, 90),
        (Attack::Stale, 90),
        (Attack::OneValue, 100),
        (Attack::Lies(1), 90),
        (Attack::Lies(2), 80),
        (Attack::Lies(4), 0),
        // 91 if readers believed older records in their own stores, first hand, until they end.
        (Attack::Eclipse(4), 95),
        (Attack::Eclipse(10), 0),
        (Attack::Eclipse(20), 0),
        (Attack::Sybils, 80),
    ]);
}

/// Prints a row for each attack, and fails where fewer percent of the records are found than stated.
fn find_honest_servers_under(attacks: &[(Attack, u32)]) {
    println!(
        "| Attack | Sepal | older | hivemind | Bytes of the fullest store | by hivemind's rules |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    let mut missed = Vec::new();
    for &(attack, least) in attacks {
        let found = found_under(attack);
        let share = |count: usize| 100.0 * count as f64 / found.of as f64;
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        println!(
            "| {attack:?} | {:.0} % | {:.0} % | {:.0} % | {:.1} MiB | {:.1} MiB |",
            share(found.ours),
            share(found.older),
            share(found.by_latest),
            mib(found.bytes),
            mib(found.bytes_by_latest),
        );
        if share(found.ours) < f64::from(least) {
            missed.push((attack, found));
        }
    }
    assert!(missed.is_empty(), "{missed:?}");
}
