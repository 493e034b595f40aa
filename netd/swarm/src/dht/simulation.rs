//! A swarm of nodes in one process, on a simulated clock and network: every test is deterministic
//! and takes no real time.

use super::id::DhtId;
use super::node::{
    CallId, DhtAction, DhtEvent, DhtRequest, InboundId, JoinError, Node, NodeConfig, OperationId,
};
use super::routing::Contact;
use super::storage::{Item, StorageLimits, StoredValue, Timed};
use crate::wire::msgpack::Value;
use p2p::Net;
use p2p::PeerId;
use std::collections::{BTreeMap, HashMap};

mod churn;
mod hostile;

use hostile::{Lie, Shadow};

const START: f64 = 1_700_000_000.0;
const CALL_TIMEOUT_S: f64 = 3.0;
/// The reply of a call that runs forever would be a bug: no operation takes this long.
const DEADLINE_S: f64 = 600.0;

struct SimulatedSwarm {
    nodes: Vec<Option<Node>>,
    peers: Vec<PeerId>,
    index: HashMap<PeerId, usize>,
    /// Events to come, by time in microseconds and order of creation.
    queue: BTreeMap<(u64, u64), (usize, DhtEvent)>,
    inbound: HashMap<u64, (usize, CallId)>,
    /// Requests of each node, and those that came to it.
    sent: Vec<u64>,
    received: Vec<u64>,
    /// The timeout of each call under way.
    open: HashMap<(usize, CallId), (u64, u64)>,
    serial: u64,
    now_us: u64,
    /// Time of every message; `None`: each takes another.
    constant_us: Option<u64>,
    calls: usize,
    finds: usize,
    results: HashMap<u64, SearchOutcome>,
    /// Where nodes are; [`Net::Unknown`] unless it is said.
    nets: HashMap<usize, Net>,
    limits: StorageLimits,
    /// Nodes that lie.
    liars: HashMap<usize, Lie>,
    shadow: Shadow,
}

#[derive(Debug)]
enum SearchOutcome {
    Joined(Result<(), JoinError>),
    Found(Vec<(DhtId, Option<StoredValue>)>),
    Stored(Vec<usize>),
}

impl SimulatedSwarm {
    fn new() -> Self {
        Self {
            nodes: Vec::new(),
            peers: Vec::new(),
            sent: Vec::new(),
            received: Vec::new(),
            index: HashMap::new(),
            queue: BTreeMap::new(),
            inbound: HashMap::new(),
            open: HashMap::new(),
            serial: 0,
            now_us: 0,
            constant_us: None,
            calls: 0,
            finds: 0,
            results: HashMap::new(),
            nets: HashMap::new(),
            limits: StorageLimits::default(),
            liars: HashMap::new(),
            shadow: Shadow::default(),
        }
    }

    /// A swarm of `count` nodes, each of which joined through an earlier one.
    fn of(count: usize) -> Self {
        let mut swarm = Self::new();
        for number in 0..count {
            let through = (number > 0).then(|| number * 7919 % number);
            swarm.add(false, through).expect("join");
        }
        swarm
    }

    fn now(&self) -> f64 {
        START + self.now_us as f64 / 1e6
    }

    fn serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// 10 to 90 ms, different for each message, the same in each run.
    fn latency_us(&mut self) -> u64 {
        if let Some(constant) = self.constant_us {
            return constant;
        }
        10_000 + self.serial().wrapping_mul(0x9e37_79b9_7f4a_7c15) % 80_000
    }

    fn push(&mut self, delay_us: u64, node: usize, event: DhtEvent) -> (u64, u64) {
        let key = (self.now_us + delay_us, self.serial());
        self.queue.insert(key, (node, event));
        key
    }

    fn add(&mut self, client_mode: bool, through: Option<usize>) -> Result<usize, JoinError> {
        let number = self.nodes.len();
        let node_id = DhtId::of_bytes(format!("node {number}").as_bytes());
        self.add_as(node_id, client_mode, through)
    }

    fn add_as(
        &mut self,
        node_id: DhtId,
        client_mode: bool,
        through: Option<usize>,
    ) -> Result<usize, JoinError> {
        let number = self.place(node_id, client_mode);
        let peers = through.map(|other| self.peer(other)).into_iter().collect();
        match self.run(number, |id| DhtEvent::Join { id, peers }) {
            SearchOutcome::Joined(result) => result.map(|()| number),
            other => panic!("{other:?}"),
        }
    }

    /// A node that has not joined.
    fn place(&mut self, node_id: DhtId, client_mode: bool) -> usize {
        let number = self.nodes.len();
        let own = Contact { node_id, peer_id: peer_of(&node_id) };
        let limits = self.limits;
        self.nodes.push(Some(Node::new(NodeConfig {
            own,
            client_mode,
            workers: 8,
            strict: true,
            limits,
        })));
        self.index.insert(own.peer_id, number);
        self.peers.push(own.peer_id);
        self.sent.push(0);
        self.received.push(0);
        number
    }

    fn peer(&self, number: usize) -> PeerId {
        self.peers[number]
    }

    fn id(&self, number: usize) -> DhtId {
        let info = self.nodes[number].as_ref().expect("lives").node_info();
        DhtId::from_wire(&info.node_id).expect("an id")
    }

    /// Starts an operation at a node and runs the swarm until it ends.
    fn run(&mut self, node: usize, event: impl FnOnce(OperationId) -> DhtEvent) -> SearchOutcome {
        let id = self.serial();
        self.deliver(node, event(OperationId(id)));
        let deadline = self.now_us + (DEADLINE_S * 1e6) as u64;
        while !self.results.contains_key(&id) {
            let ((time, _), (node, event)) =
                self.queue.pop_first().expect("operation hangs with nothing under way");
            assert!(time < deadline, "operation takes too long");
            self.now_us = time;
            self.deliver(node, event);
        }
        self.results.remove(&id).expect("result")
    }

    fn pass(&mut self, seconds: f64) {
        let until = self.now_us + (seconds * 1e6) as u64;
        while let Some(entry) = self.queue.first_entry().filter(|entry| entry.key().0 <= until) {
            let ((time, _), (node, event)) = entry.remove_entry();
            self.now_us = time;
            self.deliver(node, event);
        }
        self.now_us = until;
        (0..self.nodes.len()).for_each(|node| self.deliver(node, DhtEvent::Tick));
    }

    fn deliver(&mut self, node: usize, event: DhtEvent) {
        if let DhtEvent::Answered { call, .. } = &event
            && let Some(timeout) = self.open.remove(&(node, *call))
        {
            self.queue.remove(&timeout);
        }
        if self.overhear(node, &event) {
            return;
        }
        let now = self.now();
        let actions = self.nodes[node].as_mut().map(|n| n.on(event, now)).unwrap_or_default();
        for action in actions {
            self.act(node, action);
        }
    }

    fn act(&mut self, node: usize, action: DhtAction) {
        match action {
            DhtAction::Call { call, peer, request } => {
                self.calls += 1;
                self.sent[node] += 1;
                self.finds += usize::from(matches!(request, DhtRequest::Find(_)));
                let timeout = self.push(
                    (CALL_TIMEOUT_S * 1e6) as u64,
                    node,
                    DhtEvent::Answered { call, response: None },
                );
                self.open.insert((node, call), timeout);
                let Some(&callee) = self.index.get(&peer) else {
                    return;
                };
                let from = self.peer(node);
                let id = self.serial();
                self.inbound.insert(id, (node, call));
                let delay = self.latency_us();
                let net = self.nets.get(&node).copied().unwrap_or(Net::Unknown);
                self.received[callee] += 1;
                self.push(
                    delay,
                    callee,
                    DhtEvent::Inbound { id: InboundId(id), from, net, request },
                );
            }
            DhtAction::Reply { id, response } => {
                let Some((caller, call)) = self.inbound.remove(&id.0) else {
                    return;
                };
                let delay = self.latency_us();
                if self.open.contains_key(&(caller, call)) {
                    self.push(delay, caller, DhtEvent::Answered { call, response: response.ok() });
                }
            }
            DhtAction::Joined { id, result } => {
                drop(self.results.insert(id.0, SearchOutcome::Joined(result)))
            }
            DhtAction::Found { id, found } => {
                drop(self.results.insert(id.0, SearchOutcome::Found(found)))
            }
            DhtAction::Stored { id, accepted } => {
                drop(self.results.insert(id.0, SearchOutcome::Stored(accepted)))
            }
        }
    }

    fn store(&mut self, node: usize, items: Vec<(DhtId, Item)>) -> Vec<usize> {
        match self.run(node, |id| DhtEvent::Store { id, items }) {
            SearchOutcome::Stored(accepted) => accepted,
            other => panic!("{other:?}"),
        }
    }

    fn get(&mut self, node: usize, keys: &[DhtId]) -> Vec<Vec<(String, String)>> {
        match self.run(node, |id| DhtEvent::Get { id, keys: keys.to_vec(), latest: true }) {
            SearchOutcome::Found(found) => {
                assert!(found.iter().map(|(key, _)| key).eq(keys));
                found.into_iter().map(|(_, stored)| stored.map(texts).unwrap_or_default()).collect()
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The PeerID that a node id gets.
fn peer_of(node_id: &DhtId) -> PeerId {
    let mut multihash = vec![0x12, 32];
    multihash.extend_from_slice(&[&node_id.0[..], &[0; 12]].concat());
    PeerId::from_bytes(&multihash).expect("a sha2-256 multihash")
}

fn texts(stored: StoredValue) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| {
        String::from_utf8_lossy(bytes)
            .trim_start_matches(|c: char| !c.is_ascii_alphanumeric())
            .to_owned()
    };
    match stored {
        StoredValue::Regular(timed) => vec![(String::new(), text(&timed.value))],
        StoredValue::Dictionary(dictionary) => {
            dictionary.iter().map(|(tag, timed)| (text(tag), text(&timed.value))).collect()
        }
    }
}

fn entry(key: &str, subkey: &str, value: &str, expiration: f64) -> (DhtId, Item) {
    let timed = Timed { value: value.to_owned().into(), expiration };
    (DhtId::of_text(key), Item::Entry(Value::str(subkey).encode().into(), timed))
}

fn block(number: usize) -> String {
    format!("model.{number}")
}

fn keys(count: usize) -> Vec<DhtId> {
    (0..count).map(|n| DhtId::of_text(&block(n))).collect()
}

#[test]
fn records_of_many_servers_are_found_whole_from_everywhere() {
    let mut swarm = SimulatedSwarm::of(100);
    let expiration = swarm.now() + 1000.0;
    for server in 0..4 {
        let name = format!("server{server}");
        let items =
            (0..24).map(|n| entry(&block(n), &name, &format!("{name}at{n}"), expiration)).collect();
        let accepted = swarm.store(server * 20 + 3, items);
        assert!(accepted.iter().all(|count| *count == 5), "{accepted:?}");
    }
    for reader in (0..100).step_by(9) {
        for (n, found) in swarm.get(reader, &keys(24)).into_iter().enumerate() {
            let expected: Vec<_> =
                (0..4).map(|s| (format!("server{s}"), format!("server{s}at{n}"))).collect();
            assert_eq!(found, expected, "block {n} read at {reader}");
        }
    }
    assert_eq!(swarm.get(5, &[DhtId::of_text("nothing")]), [vec![]]);
}

#[test]
fn clients_read_and_write_but_stay_unknown() {
    let mut swarm = SimulatedSwarm::of(30);
    let client = swarm.add(true, Some(4)).unwrap();
    let expiration = swarm.now() + 100.0;
    swarm.store(client, vec![entry("model.0", "me", "here", expiration)]);
    assert_eq!(swarm.get(17, &keys(1)), [vec![("me".to_owned(), "here".to_owned())]]);
    let peer = swarm.peer(client);
    let knows = |node: &Node| node.table().contacts().any(|contact| contact.peer_id == peer);
    assert!(!swarm.nodes.iter().flatten().any(knows));
}

#[test]
fn newer_record_of_a_server_wins_and_older_copies_do_not_come_back() {
    let mut swarm = SimulatedSwarm::of(60);
    let now = swarm.now();
    swarm.store(1, vec![entry("model.0", "s", "joining", now + 100.0)]);
    swarm.store(1, vec![entry("model.0", "s", "online", now + 101.0)]);
    assert_eq!(swarm.store(30, vec![entry("model.0", "s", "stale", now + 50.0)]), [0]);
    for reader in [0, 29, 59] {
        assert_eq!(swarm.get(reader, &keys(1)), [vec![("s".to_owned(), "online".to_owned())]]);
    }
}

#[test]
fn records_end_when_they_expire() {
    let mut swarm = SimulatedSwarm::of(40);
    let now = swarm.now();
    swarm.store(
        1,
        vec![
            entry("model.0", "a", "short", now + 60.0),
            entry("model.0", "b", "long", now + 200.0),
        ],
    );
    assert_eq!(swarm.get(20, &keys(1))[0].len(), 2);
    swarm.pass(100.0);
    assert_eq!(swarm.get(20, &keys(1)), [vec![("b".to_owned(), "long".to_owned())]]);
    swarm.pass(150.0);
    assert_eq!(swarm.get(20, &keys(1)), [vec![]]);
    assert!(swarm.nodes.iter().flatten().all(|node| node.storage().is_empty()));
}

#[test]
fn records_survive_the_loss_of_nodes() {
    let mut swarm = SimulatedSwarm::of(100);
    let expiration = swarm.now() + 5000.0;
    swarm.store(0, (0..20).map(|n| entry(&block(n), "s", "v", expiration)).collect());
    // A third of the swarm dies at once, without a word.
    (0..100).filter(|n| n % 3 == 1).for_each(|n| swarm.nodes[n] = None);
    let found = swarm.get(2, &keys(20));
    let lost = found.iter().filter(|entries| entries.is_empty()).count();
    assert_eq!(lost, 0, "five replicas of 20 keys, a third of the nodes dead");
    // Refreshing restores five live replicas.
    let accepted =
        swarm.store(0, (0..20).map(|n| entry(&block(n), "s", "v", expiration + 1.0)).collect());
    assert!(accepted.iter().all(|count| *count == 5), "{accepted:?}");
    let dead = |contact: &Contact| swarm.nodes[swarm.index[&contact.peer_id]].is_none();
    let known_dead = swarm.nodes[0].as_ref().unwrap().table().contacts().filter(dead).count();
    assert!(known_dead < 12, "node 0 still lists {known_dead} of 33 dead nodes");
}

#[test]
fn newcomers_receive_the_records_they_are_nearest_to() {
    let mut swarm = SimulatedSwarm::of(10);
    let expiration = swarm.now() + 5000.0;
    swarm.store(0, (0..40).map(|n| entry(&block(n), "s", "v", expiration)).collect());
    (10..40).for_each(|n| {
        swarm.add(false, Some(n % 10)).unwrap();
    });
    swarm.pass(10.0);
    let holders = |key: &DhtId| {
        swarm
            .nodes
            .iter()
            .flatten()
            .filter(|node| node.storage().find(key, swarm.now()).is_some())
            .count()
    };
    let newcomers_holding =
        swarm.nodes[10..].iter().flatten().filter(|node| !node.storage().is_empty()).count();
    assert!(keys(40).iter().all(|key| holders(key) >= 5));
    assert!(newcomers_holding >= 20, "{newcomers_holding} of 30 newcomers hold something");
    // The ten first nodes die; the copies suffice.
    (0..10).for_each(|n| swarm.nodes[n] = None);
    let lost = swarm.get(25, &keys(40)).iter().filter(|entries| entries.is_empty()).count();
    assert_eq!(lost, 0);
}

#[test]
fn lookups_cost_about_a_beam_even_in_a_large_swarm() {
    let mut swarm = SimulatedSwarm::of(200);
    let expiration = swarm.now() + 1000.0;
    swarm.store(7, vec![entry("model.0", "s", "v", expiration)]);
    let (before, start_us) = (swarm.finds, swarm.now_us);
    assert_eq!(swarm.get(150, &keys(1))[0].len(), 1);
    let (finds, took_ms) = (swarm.finds - before, (swarm.now_us - start_us) / 1000);
    assert!((20..=40).contains(&finds), "{finds} finds for one key");
    assert!(took_ms < 2000, "{took_ms} ms");
    let before = swarm.finds;
    assert!(swarm.get(150, &keys(80))[1..].iter().all(Vec::is_empty));
    let finds = swarm.finds - before;
    assert!(finds < 80 * 25 / 2, "{finds} finds for 80 keys");
}

#[test]
fn joining_through_a_dead_peer_says_so() {
    let mut swarm = SimulatedSwarm::of(3);
    swarm.nodes[1] = None;
    assert_eq!(swarm.add(false, Some(1)), Err(JoinError::NoAnswer(1)));
    assert!(swarm.calls > 0);
}

/// Rounds of calls that wait for each other: with one and the same time for every message, what a
/// lookup takes over that of one call.
#[test]
fn two_hundred_nodes_find_every_record_in_no_more_hops_than_hivemind() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("testdata/hops.json")).expect("json");
    let figure = |of: &str, name: &str| golden[of][name].as_f64().expect("a number");
    let mut swarm = SimulatedSwarm::of(200);
    let (one_way_us, expiration) = (10_000, swarm.now() + 100_000.0);
    let names = ["a", "b", "c", "d", "e"];
    for (number, name) in names.iter().enumerate() {
        let items = (0..24).map(|n| entry(&block(n), name, &format!("{name}{n}"), expiration));
        let accepted = swarm.store(number * 37 + 1, items.collect());
        assert!(accepted.iter().all(|count| *count == 5), "{accepted:?}");
    }
    swarm.constant_us = Some(one_way_us);
    let mut lookup = |reader: usize, numbers: &[usize]| {
        let wanted: Vec<DhtId> = numbers.iter().map(|n| DhtId::of_text(&block(*n))).collect();
        let (finds, start_us) = (swarm.finds, swarm.now_us);
        let found = swarm.get(reader, &wanted);
        let rounds = (swarm.now_us - start_us) as f64 / (2 * one_way_us) as f64;
        for (n, found) in numbers.iter().zip(found) {
            let expected = names.map(|name| (name.to_owned(), format!("{name}{n}")));
            assert_eq!(found, expected, "block {n} read at {reader}");
        }
        ((swarm.finds - finds) as f64, rounds)
    };
    let (mut one_key, mut all_keys) = (Vec::new(), Vec::new());
    for reader in (0..200).step_by(9) {
        one_key.extend((0..24).map(|n| lookup(reader, &[n])));
        all_keys.push(lookup(reader, &(0..24).collect::<Vec<_>>()));
    }
    let mean = |of: &[(f64, f64)]| {
        let sum = of.iter().fold((0.0, 0.0), |sum, x| (sum.0 + x.0, sum.1 + x.1));
        (sum.0 / of.len() as f64, sum.1 / of.len() as f64)
    };
    for (name, results) in [("one_key", &one_key), ("all_keys", &all_keys)] {
        let (calls, rounds) = mean(results);
        let most = results.iter().map(|result| result.1).fold(0.0, f64::max);
        println!(
            "{name}: {calls:.2} calls, {rounds:.2} rounds, at most {most:.2}; hivemind: {:.2}, {:.2}, {:.2}",
            figure(name, "mean_calls"),
            figure(name, "mean_rounds"),
            figure(name, "max_rounds"),
        );
        assert!(rounds <= figure(name, "mean_rounds"), "{name}: {rounds} rounds");
        assert!(most <= figure(name, "max_rounds"), "{name}: {most} rounds");
    }
}
