//! A client: what it has read and measured of the swarm, and whom it avoids. Source: petals `client/routing/sequence_manager.py` and
//! `utils/ping.py`.

use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use rand::{Rng, SeedableRng};

use crate::fleet::{Fleet, PING_LIFE_S, remember};
use crate::population::{BLOCKS, Person};
use crate::routing::{Directory, Hop, Knowledge, Router, max_throughput};

/// Time between two looks at the records.
const UPDATE_S: f64 = 60.0;
/// Servers pinged among those of the middle blocks, and among those of the last block.
const PINGED: usize = 3;
/// First ban; doubles with each failure after it.
const BAN_S: f64 = 15.0;
const MAX_DOUBLINGS: i32 = 10;
/// Time between two of the directories that are remembered.
pub const DIRECTORY_S: f64 = 10.0;

/// Directories of the last minute, the newest last.
#[derive(Default)]
pub struct Directories(VecDeque<(f64, Rc<Directory>)>);

impl Directories {
    /// Adds the present one.
    pub fn push(&mut self, now: f64, directory: Directory) {
        self.0.push_back((now, Rc::new(directory)));
        while self.0.front().is_some_and(|(at, _)| *at < now - UPDATE_S - DIRECTORY_S) {
            self.0.pop_front();
        }
    }

    /// What somebody knows who has read the records at `time`.
    pub fn at(&self, time: f64) -> Rc<Directory> {
        let known = self.0.partition_point(|(at, _)| *at <= time).max(1) - 1;
        self.0.get(known).map(|(_, directory)| Rc::clone(directory)).unwrap_or_default()
    }
}

struct Ban {
    server: usize,
    until: f64,
    failures: i32,
}

/// A client of the swarm.
pub struct Client {
    pub person: Person,
    rng: StdRng,
    pings: Vec<(usize, f64, f64)>,
    bans: Vec<Ban>,
    updated_at: Option<f64>,
}

/// What a client knows, by the numbers of servers.
#[derive(Default)]
struct Known {
    pings: Vec<Option<f64>>,
    banned: Vec<bool>,
}

impl Knowledge for Known {
    fn ping_s(&self, server: usize) -> Option<f64> {
        self.pings[server]
    }

    fn is_banned(&self, server: usize) -> bool {
        self.banned[server]
    }
}

/// Finds routes for one client after the other.
pub struct Guide {
    router: Router,
    known: Known,
}

impl Guide {
    /// For a swarm of so many servers.
    pub fn new(servers: usize) -> Guide {
        Guide {
            router: Router::default(),
            known: Known { pings: vec![None; servers], banned: vec![false; servers] },
        }
    }

    /// A route through `blocks` as `client` sees the swarm: the fastest for a session of `tokens`, or any for a batch.
    pub fn route(
        &mut self,
        client: &mut Client,
        directory: &Directory,
        blocks: Range<usize>,
        tokens: Option<u64>,
        now: f64,
    ) -> Option<Vec<Hop>> {
        let fresh = client.pings.iter().filter(|(_, _, at)| now - at < PING_LIFE_S);
        fresh.for_each(|(server, ping, _)| self.known.pings[*server] = Some(*ping));
        let banned = client.bans.iter().filter(|ban| ban.until > now);
        banned.for_each(|ban| self.known.banned[ban.server] = true);
        let route = match tokens {
            Some(_) => self
                .router
                .min_latency(directory, blocks, tokens, &self.known)
                .map(|(hops, _)| hops),
            None => max_throughput(directory, blocks, &self.known, &mut client.rng),
        };
        client.pings.iter().for_each(|(server, _, _)| self.known.pings[*server] = None);
        client.bans.iter().for_each(|ban| self.known.banned[ban.server] = false);
        route
    }
}

impl Client {
    /// Client `number` of a run.
    pub fn new(seed: u64, number: u64) -> Client {
        let rng = StdRng::seed_from_u64(seed.rotate_left(17) ^ number);
        Client {
            person: Person::draw(seed, number),
            rng,
            pings: Vec::new(),
            bans: Vec::new(),
            updated_at: None,
        }
    }

    /// Makes up for the looks since the last one, and gives what the client has read.
    pub fn update(&mut self, now: f64, directories: &Directories, fleet: &Fleet) -> Rc<Directory> {
        let first = self.updated_at.unwrap_or(now - UPDATE_S);
        let looks = ((now - first) / UPDATE_S).floor();
        let last = first + looks * UPDATE_S;
        let directory = directories.at(last);
        // What older looks measured is forgotten.
        let remembered =
            looks.min(if self.updated_at.is_some() { PING_LIFE_S / UPDATE_S } else { 1.0 });
        for ago in (0..remembered as u32).rev() {
            self.ping(last - f64::from(ago) * UPDATE_S, &directory, fleet);
        }
        self.updated_at = Some(last);
        self.bans.retain(|ban| ban.until + PING_LIFE_S > now);
        directory
    }

    /// Reads the records at once, since those that it has do not suffice.
    pub fn look_again(&mut self, now: f64) {
        self.updated_at = self.updated_at.map(|at| at.min(now - UPDATE_S));
    }

    fn ping(&mut self, at: f64, directory: &Directory, fleet: &Fleet) {
        // Petals means to ping holders of the first block too, and overwrites that sample.
        let mut sample =
            directory.records().iter().map(|r| r.server).choose_multiple(&mut self.rng, PINGED);
        sample.extend(
            directory.holders(BLOCKS - 1).map(|r| r.server).choose_multiple(&mut self.rng, PINGED),
        );
        for server in sample {
            let way_s = self.person.location.round_trip_s(fleet.servers[server].machine.location);
            let jitter = self.rng.random_range(1.0..1.2);
            let measured =
                if fleet.servers[server].is_present() { way_s * jitter } else { f64::INFINITY };
            remember(&mut self.pings, server, measured, at);
        }
    }

    /// A server failed.
    pub fn failed(&mut self, server: usize, now: f64) {
        match self.bans.iter_mut().find(|ban| ban.server == server) {
            Some(ban) if ban.until > now => {}
            Some(ban) => {
                ban.until = now + BAN_S * 2f64.powi(ban.failures.min(MAX_DOUBLINGS));
                ban.failures += 1;
            }
            None => self.bans.push(Ban { server, until: now + BAN_S, failures: 1 }),
        }
    }

    /// A server did what it was asked for.
    pub fn answered(&mut self, server: usize) {
        self.bans.retain(|ban| ban.server != server);
    }
}
