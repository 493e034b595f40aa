//! A client: what it has read and measured of the swarm, and whom it avoids. It routes as Sepal's does, by [`swarm::routing`], that is as
//! Petals' does over records that it believes.

use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use rand::{Rng, SeedableRng};
use swarm::health::{Bans, Pings};
use swarm::routing::{Leg, RouteCandidate, max_throughput, min_latency, without_banned};

use crate::clock;
use crate::directory::Directory;
use crate::fleet::{Fleet, PING_LIFE_S};
use crate::population::{BLOCKS, Person};

/// Time between two looks at the records.
const UPDATE_S: f64 = 60.0;
/// Servers pinged among those of the middle blocks, and among those of the last block.
const PINGED: usize = 3;
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

/// One leg of a route: these blocks run on this server.
#[derive(Clone, Debug)]
pub struct Hop {
    pub server: usize,
    /// The blocks it is asked for.
    pub blocks: Range<usize>,
}

impl From<Leg<usize>> for Hop {
    fn from(Leg { peer, blocks }: Leg<usize>) -> Hop {
        Hop { server: peer, blocks: blocks.start as usize..blocks.end as usize }
    }
}

/// A client of the swarm.
pub struct Client {
    pub person: Person,
    rng: StdRng,
    pings: Pings<usize>,
    bans: Bans<usize>,
    updated_at: Option<f64>,
}

impl Client {
    /// Client `number` of a run.
    pub fn new(seed: u64, number: u64) -> Client {
        let rng = StdRng::seed_from_u64(seed.rotate_left(17) ^ number);
        Client {
            person: Person::draw(seed, number),
            rng,
            pings: Pings::default(),
            bans: Bans::default(),
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
        directory
    }

    /// Reads the records at once, since those that it has do not suffice.
    pub fn look_again(&mut self, now: f64) {
        self.updated_at = self.updated_at.map(|at| at.min(now - UPDATE_S));
    }

    fn ping(&mut self, at: f64, directory: &Directory, fleet: &Fleet) {
        // Petals means to ping holders of the first block too, and overwrites that sample.
        let mut sample =
            directory.records().iter().map(|r| r.peer).choose_multiple(&mut self.rng, PINGED);
        sample.extend(
            directory.holders(BLOCKS - 1).map(|r| r.peer).choose_multiple(&mut self.rng, PINGED),
        );
        for server in sample {
            let way_s = self.person.location.round_trip_s(fleet.servers[server].machine.location);
            let jitter = self.rng.random_range(1.0..1.2);
            let measured =
                if fleet.servers[server].is_present() { way_s * jitter } else { f64::INFINITY };
            self.pings.measured(server, measured, clock::at(at));
        }
    }

    /// A route through `blocks` as the client sees the swarm: the fastest for a session of `tokens`, or any for a batch.
    pub fn route(
        &mut self,
        directory: &Directory,
        blocks: Range<usize>,
        tokens: Option<u64>,
        now: f64,
    ) -> Option<Vec<Hop>> {
        let (now, blocks) = (clock::at(now), blocks.start as u32..blocks.end as u32);
        let known = |record: &RouteCandidate<usize>| RouteCandidate {
            ping_s: self.pings.seconds(&record.peer, now),
            ..record.clone()
        };
        let servers: Vec<_> = directory.records().iter().map(known).collect();
        let servers = without_banned(&servers, |server| self.bans.banned(server, now));
        let legs = match tokens {
            Some(_) => min_latency(&servers, blocks, tokens).map(|(legs, _)| legs),
            None => max_throughput(&servers, blocks, self.rng.random()),
        };
        Some(legs.ok()?.into_iter().map(Hop::from).collect())
    }

    /// A server failed.
    pub fn failed(&mut self, server: usize, now: f64) {
        self.bans.failed(server, clock::at(now));
    }

    /// A server did what it was asked for.
    pub fn answered(&mut self, server: usize) {
        self.bans.answered(&server);
    }
}
