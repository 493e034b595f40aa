//! Servers that come and go without a word, and clients that look all blocks up: whether lookups find who is there, and what it costs.
//!
//! `cargo test --release -p swarm thousand_nodes -- --ignored --nocapture` prints a table; it takes more than twenty minutes.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::storage::tag_of;
use super::*;

/// Blocks of a large model. A server has a twentieth of a model, as a T4 has of this one, to six of them, as an A100.
const BLOCKS: usize = 80;
/// How often servers announce themselves, and how long that holds: as Petals.
const UPDATE_S: f64 = 120.0;
const LIFE_S: f64 = 240.0;
/// How often a client looks all blocks up: as Petals.
const LOOK_S: f64 = 60.0;
/// Bytes of an announcement.
const RECORD_BYTES: usize = 150;
const TICK_S: f64 = 10.0;
/// Time until servers have announced themselves several times.
const WARM_UP_S: f64 = 300.0;

/// A swarm to be simulated.
#[derive(Clone, Copy, Debug)]
struct Churn {
    blocks: usize,
    servers: usize,
    clients: usize,
    /// Half of the servers leave in that time, as many come.
    half_life_s: f64,
    /// Measured time, after [`WARM_UP_S`] with churn.
    measured_s: f64,
    seed: u64,
}

/// What happens of itself.
#[derive(Clone, Copy, Debug)]
enum Due {
    Announce(usize),
    Leave(usize),
    Look(usize),
    Tick,
}

/// An operation under way.
#[derive(Debug)]
enum UnderWay {
    Join(usize),
    Store {
        server: usize,
        since_us: u64,
    },
    /// The servers that had announced themselves and lived when it began.
    Look {
        since_us: u64,
        there: Vec<usize>,
    },
}

/// A server while it lives.
#[derive(Clone, Debug)]
struct ChurnServer {
    span: std::ops::Range<usize>,
    is_announced: bool,
}

/// What was measured.
#[derive(Debug, Default)]
struct ChurnFigures {
    lookups: usize,
    /// Records of living servers that had announced themselves, and those of them that lookups found.
    records: usize,
    found: usize,
    /// Records found of servers that had left.
    gone: usize,
    /// Blocks with a living server, and those of them with no record of one found.
    blocks: usize,
    blocks_missed: usize,
    look_ms: Vec<u64>,
    store_ms: Vec<u64>,
    stores: usize,
    replicas: usize,
    joins_failed: usize,
    left: usize,
    /// Requests per second of servers that stayed, and those that came to each of them.
    sent: f64,
    received: Vec<f64>,
    /// Requests of clients.
    sent_by_clients: u64,
}

struct Field {
    churn: Churn,
    swarm: SimulatedSwarm,
    rng: StdRng,
    agenda: BTreeMap<(u64, u64), Due>,
    running: HashMap<u64, UnderWay>,
    servers: BTreeMap<usize, ChurnServer>,
    is_measuring: bool,
    figures: ChurnFigures,
}

impl Field {
    fn new(churn: Churn) -> Self {
        let rng = StdRng::seed_from_u64(churn.seed);
        let mut field = Self {
            churn,
            swarm: SimulatedSwarm::new(),
            rng,
            agenda: BTreeMap::new(),
            running: HashMap::new(),
            servers: BTreeMap::new(),
            is_measuring: false,
            figures: ChurnFigures::default(),
        };
        for _ in 0..churn.servers {
            let through = field.someone();
            let number = field.place(false);
            let peers = through.map(|other| field.swarm.peer(other)).into_iter().collect();
            let joined = field.swarm.run(number, |id| DhtEvent::Join { id, peers });
            assert!(matches!(joined, SearchOutcome::Joined(Ok(()))), "{joined:?}");
            field.joined(number);
        }
        for _ in 0..churn.clients {
            let through = field.someone();
            let id = DhtId::of_bytes(format!("client {}", field.swarm.nodes.len()).as_bytes());
            let number = field.swarm.add_as(id, true, through).expect("join");
            let first = field.rng.random_range(0.0..LOOK_S);
            field.plan(WARM_UP_S + first, Due::Look(number));
        }
        field.plan(TICK_S, Due::Tick);
        field
    }

    /// A living server.
    fn someone(&mut self) -> Option<usize> {
        let count = self.servers.len();
        (count > 0)
            .then(|| *self.servers.keys().nth(self.rng.random_range(0..count)).expect("servers"))
    }

    fn place(&mut self, client_mode: bool) -> usize {
        let id = DhtId::of_bytes(
            format!("node {} of {}", self.swarm.nodes.len(), self.churn.seed).as_bytes(),
        );
        self.swarm.place(id, client_mode)
    }

    fn plan(&mut self, seconds: f64, due: Due) {
        let key = (self.swarm.now_us + (seconds * 1e6) as u64, self.swarm.serial());
        self.agenda.insert(key, due);
    }

    /// A server is in the swarm: it gets blocks, announces them, and leaves one day.
    fn joined(&mut self, number: usize) {
        let all = self.churn.blocks;
        let blocks = self.rng.random_range(all / 20..=all * 6 / 20);
        let start = self.rng.random_range(0..=all - blocks);
        self.servers
            .insert(number, ChurnServer { span: start..start + blocks, is_announced: false });
        let first = self.rng.random_range(0.0..5.0);
        self.plan(first, Due::Announce(number));
        let share: f64 = self.rng.random_range(f64::MIN_POSITIVE..1.0);
        self.plan(-share.log2() * self.churn.half_life_s, Due::Leave(number));
    }

    fn start(
        &mut self,
        node: usize,
        event: impl FnOnce(OperationId) -> DhtEvent,
        running: UnderWay,
    ) {
        let id = self.swarm.serial();
        self.running.insert(id, running);
        self.swarm.deliver(node, event(OperationId(id)));
        self.collect();
    }

    fn on(&mut self, due: Due) {
        match due {
            Due::Announce(number) => self.announce(number),
            Due::Leave(number) => self.leave(number),
            Due::Look(number) => self.look(number),
            Due::Tick => {
                let living: Vec<usize> = self.living();
                living.into_iter().for_each(|node| self.swarm.deliver(node, DhtEvent::Tick));
                self.plan(TICK_S, Due::Tick);
            }
        }
    }

    fn living(&self) -> Vec<usize> {
        (0..self.swarm.nodes.len()).filter(|node| self.swarm.nodes[*node].is_some()).collect()
    }

    fn announce(&mut self, number: usize) {
        let Some(server) = self.servers.get(&number).cloned() else {
            return;
        };
        let tag = tag_of(&self.swarm.peer(number));
        let value: bytes::Bytes = vec![7; RECORD_BYTES].into();
        let timed = Timed { value, expiration: self.swarm.now() + LIFE_S };
        let item =
            |number| (DhtId::of_text(&block(number)), Item::Entry(tag.clone(), timed.clone()));
        let items = server.span.map(item).collect();
        let since_us = self.swarm.now_us;
        self.start(
            number,
            |id| DhtEvent::Store { id, items },
            UnderWay::Store { server: number, since_us },
        );
        self.plan(UPDATE_S, Due::Announce(number));
    }

    /// A server goes without a word, and another comes.
    fn leave(&mut self, number: usize) {
        self.swarm.nodes[number] = None;
        self.servers.remove(&number);
        self.figures.left += usize::from(self.is_measuring);
        self.come();
    }

    fn come(&mut self) {
        let through = self.someone();
        let number = self.place(false);
        let peers = through.map(|other| self.swarm.peer(other)).into_iter().collect();
        self.start(number, |id| DhtEvent::Join { id, peers }, UnderWay::Join(number));
    }

    fn look(&mut self, number: usize) {
        let announced = self.servers.iter().filter(|(_, server)| server.is_announced);
        let there = announced.map(|(number, _)| *number).collect();
        let keys = (0..self.churn.blocks).map(|number| DhtId::of_text(&block(number))).collect();
        let running = UnderWay::Look { since_us: self.swarm.now_us, there };
        self.start(number, |id| DhtEvent::Get { id, keys, latest: true }, running);
        self.plan(LOOK_S, Due::Look(number));
    }

    /// Looks at what ended.
    fn collect(&mut self) {
        let ended: Vec<u64> = self.swarm.results.keys().copied().collect();
        for id in ended {
            let outcome = self.swarm.results.remove(&id).expect("ended");
            let Some(running) = self.running.remove(&id) else {
                continue;
            };
            match (running, outcome) {
                (UnderWay::Join(number), SearchOutcome::Joined(Ok(()))) => self.joined(number),
                (UnderWay::Join(number), SearchOutcome::Joined(Err(_))) => {
                    // It tries once more through another one.
                    self.swarm.nodes[number] = None;
                    self.figures.joins_failed += 1;
                    self.come();
                }
                (UnderWay::Store { server, since_us }, SearchOutcome::Stored(accepted)) => {
                    if let Some(server) = self.servers.get_mut(&server) {
                        server.is_announced = true;
                    }
                    if self.is_measuring {
                        self.figures.stores += accepted.len();
                        self.figures.replicas += accepted.iter().sum::<usize>();
                        self.figures.store_ms.push((self.swarm.now_us - since_us) / 1000);
                    }
                }
                (UnderWay::Look { since_us, there }, SearchOutcome::Found(found))
                    if self.is_measuring =>
                {
                    self.figures.look_ms.push((self.swarm.now_us - since_us) / 1000);
                    self.compare(&there, &found);
                }
                (UnderWay::Look { .. }, SearchOutcome::Found(_)) => {}
                (running, outcome) => panic!("{running:?} ended as {outcome:?}"),
            }
        }
    }

    /// Counts what a lookup found of those that were there at its begin and still are.
    fn compare(&mut self, there: &[usize], found: &[(DhtId, Option<StoredValue>)]) {
        let figures = &mut self.figures;
        figures.lookups += 1;
        let tags = self.servers.keys().map(|number| (*number, tag_of(&self.swarm.peers[*number])));
        let tags: BTreeMap<usize, bytes::Bytes> = tags.collect();
        let live_tags: std::collections::HashSet<_> = tags.values().collect();
        for (block, (_, stored)) in found.iter().enumerate() {
            let entries = match stored {
                Some(StoredValue::Dictionary(dictionary)) => Some(&dictionary.entries),
                _ => None,
            };
            let of_block = there.iter().filter(|number| {
                self.servers.get(number).is_some_and(|server| server.span.contains(&block))
            });
            let mut living = 0;
            let mut seen = 0;
            for number in of_block {
                living += 1;
                let tag = &tags[number];
                seen += usize::from(entries.is_some_and(|entries| entries.contains_key(tag)));
            }
            figures.records += living;
            figures.found += seen;
            figures.blocks += usize::from(living > 0);
            figures.blocks_missed += usize::from(living > 0 && seen == 0);
            let found = entries.into_iter().flat_map(|entries| entries.keys());
            figures.gone += found.filter(|tag| !live_tags.contains(tag)).count();
        }
    }

    /// Runs both clocks for so long.
    fn pass(&mut self, seconds: f64) {
        let until = self.swarm.now_us + (seconds * 1e6) as u64;
        loop {
            let of_swarm = self.swarm.queue.first_key_value().map(|(key, _)| *key);
            let of_agenda = self.agenda.first_key_value().map(|(key, _)| *key);
            let next = [of_swarm, of_agenda].into_iter().flatten().min();
            let Some((time, _)) = next.filter(|(time, _)| *time <= until) else {
                break;
            };
            self.swarm.now_us = time;
            if next == of_swarm {
                let (_, (node, event)) = self.swarm.queue.pop_first().expect("first");
                self.swarm.deliver(node, event);
                self.collect();
            } else {
                let (_, due) = self.agenda.pop_first().expect("first");
                self.on(due);
            }
        }
        self.swarm.now_us = until;
    }

    fn run(mut self) -> ChurnFigures {
        self.pass(WARM_UP_S);
        self.is_measuring = true;
        let (sent, received, servers) =
            (self.swarm.sent.clone(), self.swarm.received.clone(), self.servers.clone());
        self.pass(self.churn.measured_s);
        let stayed: Vec<usize> =
            servers.into_keys().filter(|number| self.servers.contains_key(number)).collect();
        let seconds = self.churn.measured_s;
        let came =
            |number: &usize| (self.swarm.received[*number] - received[*number]) as f64 / seconds;
        self.figures.received = stayed.iter().map(came).collect();
        let of_servers: u64 =
            stayed.iter().map(|number| self.swarm.sent[*number] - sent[*number]).sum();
        self.figures.sent = of_servers as f64 / stayed.len().max(1) as f64 / seconds;
        let clients = self.churn.servers..self.churn.servers + self.churn.clients;
        self.figures.sent_by_clients =
            clients.map(|number| self.swarm.sent[number] - sent[number]).sum();
        self.figures.received.sort_by(f64::total_cmp);
        self.figures.look_ms.sort_unstable();
        self.figures.store_ms.sort_unstable();
        self.figures
    }
}

/// The value below which `percent` of the sorted values lie.
fn percentile<T: Copy + Default>(sorted: &[T], percent: usize) -> T {
    sorted
        .get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or_default()
}

fn share(part: usize, whole: usize) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

#[test]
fn lookups_find_who_is_there_while_half_of_the_servers_leave() {
    lookups_find_who_is_there(20, 30, 1, 300.0);
}

#[test]
#[ignore = "a larger swarm: .ci/long simulations"]
fn lookups_find_who_is_there_while_half_of_many_servers_leave() {
    lookups_find_who_is_there(BLOCKS, 120, 4, 600.0);
}

fn lookups_find_who_is_there(blocks: usize, servers: usize, clients: usize, measured_s: f64) {
    let half_life_s = 1.5 * measured_s;
    let churn = Churn { blocks, servers, clients, half_life_s, measured_s, seed: 1 };
    let figures = Field::new(churn).run();
    assert!(figures.left > servers / 6, "{figures:?}");
    assert!(share(figures.found, figures.records) > 97.0, "{figures:?}");
    assert!(share(figures.blocks_missed, figures.blocks) < 1.0, "{figures:?}");
    // Who left stays for the life of a record.
    assert!(share(figures.gone, figures.found) < 25.0, "{figures:?}");
}

#[test]
#[ignore = "takes more than twenty minutes; prints a table"]
fn thousand_nodes_while_half_of_them_leave_within_an_hour() {
    println!(
        "| half-life | servers that left | records of living servers found | blocks whose servers were all missed | found records of servers that left | lookup of 80 blocks p50, p99, s | requests of it | replicas of a record | requests of a server per second: sent | came: mean, p99, most |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    for half_life_s in [3600.0, 900.0] {
        let (servers, clients, measured_s) = (1000, 20, 600.0);
        let churn = Churn { blocks: BLOCKS, servers, clients, half_life_s, measured_s, seed: 1 };
        let figures = Field::new(churn).run();
        let seconds = |ms: u64| ms as f64 / 1e3;
        let came: f64 = figures.received.iter().sum::<f64>() / figures.received.len().max(1) as f64;
        println!(
            "| {:.0} min | {} | {:.2} % | {:.3} % | {:.1} % | {:.1}, {:.1} | {:.0} | {:.2} | {:.2} | {came:.2}, {:.2}, {:.2} |",
            half_life_s / 60.0,
            figures.left,
            share(figures.found, figures.records),
            share(figures.blocks_missed, figures.blocks),
            share(figures.gone, figures.found + figures.gone),
            seconds(percentile(&figures.look_ms, 50)),
            seconds(percentile(&figures.look_ms, 99)),
            figures.sent_by_clients as f64 / figures.lookups.max(1) as f64,
            figures.replicas as f64 / figures.stores.max(1) as f64,
            figures.sent,
            percentile(&figures.received, 99),
            percentile(&figures.received, 100),
        );
        assert!(share(figures.found, figures.records) > 95.0, "{churn:?}");
    }
}
