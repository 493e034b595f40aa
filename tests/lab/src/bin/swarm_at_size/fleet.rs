//! The servers: they come, choose blocks, load, serve, ask whether to move, and leave. The decisions are those of
//! [`netd::membership::placement`]; what they see of the swarm is five seconds old.
//!
//! It takes two minutes to serve other blocks: 100 s until they are downloaded and converted, 20 s until they are on the device. A server
//! of Petals that moves is offline, chooses within ten seconds, joins, and is online two minutes later. One of Sepal shows where it goes
//! and serves on until the blocks are converted. If memory holds both spans, it serves on while they are loaded, too; else it takes no new
//! sessions, and loads when those that are open have ended, after five minutes at most, or less if the swarm is in need. It calls the move
//! off if that would leave a block without a server.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use netd::membership::placement::hysteresis::{Rebalancer, patience};
use netd::membership::placement::{Decision, best_start_without, should_choose_other_blocks};
use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use rand::{Rng, SeedableRng};
use swarm::health::Pings;
use swarm::routing::RouteCandidate;
use swarm::view::ServerSpan;
use swarm::wire::records::{ServerInfo, ServerState};

use crate::clock;
use crate::directory::Directory;
use crate::population::{BLOCKS, Machine};

const QUALITY: f64 = 0.75;
/// Age of what a server sees of the others.
const VIEW_AGE_S: f64 = 5.0;
/// Longest wait before Petals' choice of blocks.
const CHOICE_DELAY_S: f64 = 10.0;
/// Time until the weights of other blocks are downloaded and converted, and until they are on the device.
const PREPARING_S: f64 = 100.0;
const LOADING_S: f64 = 20.0;
/// Mean time between two checks of the balance.
const CHECK_S: f64 = 60.0;
/// Time that sessions have where memory holds one span only.
const DRAIN_S: f64 = 300.0;
/// Time between two announcements.
const ANNOUNCE_S: f64 = 120.0;
/// Life of a record.
const EXPIRATION_S: f64 = 240.0;
/// Servers pinged among those of the middle blocks, and among those of the block after ours.
const PINGED: usize = 5;
/// Life of a ping.
pub const PING_LIFE_S: f64 = 300.0;

/// Who decides about moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Petals' servers.
    Petals,
    /// Ours.
    Sepal,
    Mix,
}

impl Rule {
    /// All, in the order of the table.
    pub const ALL: [Rule; 3] = [Rule::Petals, Rule::Mix, Rule::Sepal];

    fn is_sepal(self, server: usize) -> bool {
        match self {
            Rule::Petals => false,
            Rule::Sepal => true,
            Rule::Mix => server % 2 == 1,
        }
    }
}

/// What happens to a server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// It looks for blocks.
    Choose,
    /// The weights of its blocks are converted.
    Prepared,
    /// They are on the device.
    Loaded,
    /// It asks whether to move.
    Check,
    /// It renews its records.
    Announce,
    /// Its time is over.
    Leave,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Has not come, or chooses.
    Away,
    Loading,
    Online,
    /// Waits for the end of its sessions before it loads other blocks.
    Draining {
        until: f64,
    },
    Gone,
}

pub struct Server {
    /// What it runs on.
    pub machine: Machine,
    is_sepal: bool,
    phase: Phase,
    /// What clients can use; still that while other blocks load beside it.
    serves: Option<Range<usize>>,
    /// What it is about to serve.
    target: Range<usize>,
    rebalancer: Rebalancer,
    /// Longest time that its sessions have when it moves.
    drain_s: f64,
    rng: StdRng,
    next_pings: Pings<usize>,
    /// Counts what ended its sessions: those of an older number are broken.
    pub epoch: u32,
    /// Cache in use: tokens of K or V of one block.
    pub cache_used: u64,
    /// Sessions that are open.
    pub sessions: u32,
}

impl Server {
    fn new(machine: Machine, number: usize, rule: Rule, seed: u64) -> Server {
        Server {
            is_sepal: rule.is_sepal(number),
            phase: Phase::Away,
            serves: None,
            target: 0..0,
            rebalancer: Rebalancer::new(QUALITY, Duration::ZERO),
            drain_s: DRAIN_S,
            rng: StdRng::seed_from_u64(seed.rotate_left(32) ^ number as u64),
            next_pings: Pings::default(),
            epoch: 0,
            cache_used: 0,
            sessions: 0,
            machine,
        }
    }

    /// Whether a session that was opened in `epoch` goes on.
    pub fn holds(&self, epoch: u32) -> bool {
        self.phase != Phase::Gone && self.epoch == epoch
    }

    /// Whether a new session of these blocks can be opened.
    pub fn takes(&self, blocks: &Range<usize>) -> bool {
        self.serves
            .as_ref()
            .is_some_and(|span| span.start <= blocks.start && blocks.end <= span.end)
    }

    /// Whether it can be reached at all.
    pub fn is_present(&self) -> bool {
        !matches!(self.phase, Phase::Away | Phase::Gone)
    }

    fn cut_sessions(&mut self) {
        self.epoch += 1;
        (self.cache_used, self.sessions) = (0, 0);
    }
}

/// A change of the records of a server, seen later.
struct Change {
    seen_at: f64,
    server: usize,
    /// As Sepal's servers and as Petals' read it.
    spans: [Option<ServerSpan>; 2],
}

/// All servers, and what they see of each other.
pub struct Fleet {
    /// By number.
    pub servers: Vec<Server>,
    changes: VecDeque<Change>,
    /// What Sepal's and Petals' servers see, in the order of PeerIDs.
    views: [Vec<ServerSpan>; 2],
    /// What clients read, and until when.
    records: Vec<Option<(RouteCandidate<usize>, f64)>>,
    /// Moves so far.
    pub moves: u32,
}

impl Fleet {
    /// Servers that have not come yet.
    pub fn new(machines: Vec<Machine>, rule: Rule, seed: u64) -> Fleet {
        let servers: Vec<Server> = machines
            .into_iter()
            .enumerate()
            .map(|(n, machine)| Server::new(machine, n, rule, seed))
            .collect();
        let records = servers.iter().map(|_| None).collect();
        Fleet { servers, changes: VecDeque::new(), views: Default::default(), records, moves: 0 }
    }

    /// What happens next to every server: they come and leave when their machines do.
    pub fn first_events(&self) -> Vec<(f64, usize, Event)> {
        let of = |(number, server): (usize, &Server)| {
            let machine = &server.machine;
            [(machine.comes_at, number, Event::Choose), (machine.leaves_at, number, Event::Leave)]
        };
        self.servers.iter().enumerate().flat_map(of).collect()
    }

    /// Handles an event, and says when which others come.
    pub fn on(
        &mut self,
        now: f64,
        number: usize,
        event: Event,
        directory: &Directory,
    ) -> Vec<(f64, Event)> {
        if self.servers[number].phase == Phase::Gone {
            return Vec::new();
        }
        self.catch_up(now);
        match event {
            Event::Choose => self.choose(now, number),
            Event::Prepared => self.prepared(now, number),
            Event::Loaded => self.loaded(now, number),
            Event::Check => self.check(now, number),
            Event::Announce => self.announce_again(now, number, directory),
            Event::Leave => {
                self.leave(now, number);
                Vec::new()
            }
        }
    }

    /// Throughput of each block for clients.
    pub fn served(&self) -> Vec<f64> {
        let mut served = vec![0.0; BLOCKS];
        for server in &self.servers {
            let span = server.serves.clone().unwrap_or(0..0);
            served[span].iter_mut().for_each(|block| *block += server.machine.throughput);
        }
        served
    }

    /// Servers that are there.
    pub fn present(&self) -> usize {
        self.servers.iter().filter(|server| server.is_present()).count()
    }

    /// What a client reads at `now`.
    pub fn directory(&self, now: f64) -> Directory {
        let live = self.records.iter().flatten().filter(|(_, until)| *until > now);
        Directory::new(live.map(|(record, _)| record.clone()).collect(), BLOCKS)
    }

    /// Begins to load where sessions have ended or had their time; what comes then.
    pub fn end_draining(&mut self, now: f64) -> Vec<(f64, usize, Event)> {
        let mut events = Vec::new();
        for (number, server) in self.servers.iter_mut().enumerate() {
            let Phase::Draining { until } = server.phase else { continue };
            if server.sessions == 0 || until <= now {
                server.cut_sessions();
                server.phase = Phase::Loading;
                events.push((now + LOADING_S, number, Event::Loaded));
            }
        }
        events
    }

    fn catch_up(&mut self, now: f64) {
        while let Some(change) = self.changes.pop_front_if(|change| change.seen_at <= now) {
            for (view, span) in self.views.iter_mut().zip(change.spans) {
                let name = peer_id(change.server);
                match (view.binary_search_by(|seen| seen.peer_id.as_str().cmp(&name)), span) {
                    (Ok(index), Some(span)) => view[index] = span,
                    (Ok(index), None) => drop(view.remove(index)),
                    (Err(index), Some(span)) => view.insert(index, span),
                    (Err(_), None) => {}
                }
            }
        }
    }

    fn view(&self, number: usize) -> &[ServerSpan] {
        &self.views[usize::from(!self.servers[number].is_sepal)]
    }

    fn choose(&mut self, now: f64, number: usize) -> Vec<(f64, Event)> {
        let length = self.servers[number].machine.blocks;
        let start =
            best_start_without(&peer_id(number), self.view(number), BLOCKS, length).unwrap_or(0);
        let server = &mut self.servers[number];
        server.target = start..start + length;
        server.phase = Phase::Loading;
        self.show(now, number);
        vec![(now + PREPARING_S, Event::Prepared)]
    }

    fn prepared(&mut self, now: f64, number: usize) -> Vec<(f64, Event)> {
        let server = &self.servers[number];
        if server.serves.is_none() || server.machine.holds_two_spans {
            return vec![(now + LOADING_S, Event::Loaded)];
        }
        if self.opens_hole(number) {
            return self.loaded(now, number);
        }
        let server = &mut self.servers[number];
        server.serves = None;
        server.phase = Phase::Draining { until: now + server.drain_s };
        self.show(now, number);
        self.record(now, number);
        Vec::new()
    }

    fn loaded(&mut self, now: f64, number: usize) -> Vec<(f64, Event)> {
        if self.servers[number].serves.is_some() && self.opens_hole(number) {
            let server = &mut self.servers[number];
            server.target = server.serves.clone().unwrap_or(0..0);
        }
        let server = &mut self.servers[number];
        let is_first = server.epoch == 0 && server.serves.is_none();
        server.serves = Some(server.target.clone());
        server.phase = Phase::Online;
        let mut events = vec![(now + server.rng.random_range(0.0..2.0 * CHECK_S), Event::Check)];
        if is_first {
            // Sessions of clients begin in the first epoch.
            server.epoch = 1;
            server.rebalancer = Rebalancer::new(QUALITY, Duration::from_secs_f64(now));
            events.push((now + server.rng.random_range(0.0..ANNOUNCE_S), Event::Announce));
        }
        self.show(now, number);
        self.record(now, number);
        events
    }

    /// Whether some block that is left has no other server.
    fn opens_hole(&self, number: usize) -> bool {
        let server = &self.servers[number];
        let left =
            server.serves.clone().unwrap_or(0..0).filter(|block| !server.target.contains(block));
        let others = || self.servers.iter().enumerate().filter(|(other, _)| *other != number);
        left.into_iter().any(|block| {
            !others()
                .any(|(_, other)| other.serves.as_ref().is_some_and(|span| span.contains(&block)))
        })
    }

    fn check(&mut self, now: f64, number: usize) -> Vec<(f64, Event)> {
        if self.servers[number].phase != Phase::Online {
            return Vec::new();
        }
        let (id, time) = (peer_id(number), Duration::from_secs_f64(now));
        let server = &mut self.servers[number];
        let view = &self.views[usize::from(!server.is_sepal)];
        let decision = if server.is_sepal {
            server.rebalancer.on_check(time, &id, view, BLOCKS, &mut server.rng)
        } else {
            should_choose_other_blocks(&id, view, BLOCKS, QUALITY, &mut server.rng)
        };
        if let Decision::Move(reason) = decision {
            server.drain_s = DRAIN_S * patience(reason, QUALITY);
            return self.go_elsewhere(now, number);
        }
        let usual = server.rng.random_range(0.0..2.0 * CHECK_S);
        let wished = server.rebalancer.waits_until().map(|at| at.as_secs_f64() - now);
        vec![(now + wished.unwrap_or(usual).clamp(1.0, 2.0 * CHECK_S), Event::Check)]
    }

    fn go_elsewhere(&mut self, now: f64, number: usize) -> Vec<(f64, Event)> {
        self.moves += 1;
        let length = self.servers[number].machine.blocks;
        let start =
            best_start_without(&peer_id(number), self.view(number), BLOCKS, length).unwrap_or(0);
        let server = &mut self.servers[number];
        if !server.is_sepal {
            server.cut_sessions();
            server.serves = None;
            server.phase = Phase::Away;
            let delay_s = server.rng.random_range(0.0..CHOICE_DELAY_S);
            self.show(now, number);
            self.record(now, number);
            return vec![(now + delay_s, Event::Choose)];
        }
        server.target = start..start + length;
        server.phase = Phase::Loading;
        self.show(now, number);
        vec![(now + PREPARING_S, Event::Prepared)]
    }

    /// So many servers leave at once, all of them from the second half of the model.
    pub fn lose(&mut self, now: f64, count: usize) {
        let is_there = |number: &usize| {
            let server = &self.servers[*number];
            server.is_present() && server.target.start >= BLOCKS / 2
        };
        let lost: Vec<usize> = (0..self.servers.len()).filter(is_there).take(count).collect();
        lost.into_iter().for_each(|number| self.leave(now, number));
    }

    fn leave(&mut self, now: f64, number: usize) {
        let server = &mut self.servers[number];
        server.cut_sessions();
        server.serves = None;
        server.phase = Phase::Gone;
        if server.machine.vanishes {
            let until =
                self.records[number].as_ref().map_or(now + EXPIRATION_S / 2.0, |(_, until)| *until);
            self.changes_at(until, number, [None, None]);
        } else {
            self.records[number] = None;
            self.changes_at(now + VIEW_AGE_S, number, [None, None]);
        }
    }

    fn announce_again(
        &mut self,
        now: f64,
        number: usize,
        directory: &Directory,
    ) -> Vec<(f64, Event)> {
        if self.servers[number].serves.is_some() {
            self.ping(now, number, directory);
            self.record(now, number);
        }
        vec![(now + ANNOUNCE_S, Event::Announce)]
    }

    fn ping(&mut self, now: f64, number: usize, directory: &Directory) {
        let Server { serves, machine, rng, .. } = &mut self.servers[number];
        let span = serves.clone().unwrap_or(0..0);
        let (from, mut found) = (machine.location, Vec::new());
        let is_near = |record: &&RouteCandidate<usize>| {
            (record.blocks.start as usize) < span.end && span.start + 1 < record.blocks.end as usize
        };
        found.extend(
            directory.records().iter().filter(is_near).map(|r| r.peer).choose_multiple(rng, PINGED),
        );
        if span.end < BLOCKS {
            found.extend(directory.holders(span.end).map(|r| r.peer).choose_multiple(rng, PINGED));
        }
        found.retain(|other| *other != number);
        for other in found {
            let is_present = self.servers[other].is_present();
            let way_s = from.round_trip_s(self.servers[other].machine.location);
            let server = &mut self.servers[number];
            let measured =
                if is_present { way_s * server.rng.random_range(1.0..1.2) } else { f64::INFINITY };
            server.next_pings.measured(other, measured, clock::at(now));
        }
    }

    /// Shows the other servers where this one is or goes.
    fn show(&mut self, now: f64, number: usize) {
        let server = &self.servers[number];
        let of = |span: &Range<usize>, state| ServerSpan {
            peer_id: peer_id(number),
            start: span.start,
            end: span.end,
            info: ServerInfo::new(state, server.machine.throughput),
        };
        let going = of(&server.target, ServerState::Joining);
        let serving = server.serves.as_ref().map(|span| of(span, ServerState::Online));
        let spans = match server.phase {
            Phase::Away | Phase::Gone => [None, None],
            Phase::Online => [serving.clone(), serving],
            Phase::Draining { .. } => [Some(going.clone()), Some(going)],
            // Petals' servers see the old span until it changes.
            Phase::Loading => [Some(going.clone()), serving.or(Some(going))],
        };
        self.changes_at(now + VIEW_AGE_S, number, spans);
    }

    fn changes_at(&mut self, seen_at: f64, server: usize, spans: [Option<ServerSpan>; 2]) {
        let index = self.changes.partition_point(|change| change.seen_at <= seen_at);
        self.changes.insert(index, Change { seen_at, server, spans });
    }

    /// Renews what clients read.
    fn record(&mut self, now: f64, number: usize) {
        let server = &self.servers[number];
        let Some(span) = server.serves.clone() else {
            self.records[number] = None;
            return;
        };
        let pings = server.next_pings.known(clock::at(now)).map(|(to, ping_s)| (*to, ping_s));
        let record = RouteCandidate {
            peer: number,
            blocks: span.start as u32..span.end as u32,
            inference_rps: Some(server.machine.inference_rps),
            measured_rps: None,
            has_answered: true,
            cache_tokens_left: Some(server.machine.cache_tokens.saturating_sub(server.cache_used)),
            ping_s: None,
            next_pings_s: Arc::new(pings.collect()),
        };
        self.records[number] = Some((record, now + EXPIRATION_S));
    }
}

/// PeerIDs in the order of numbers.
fn peer_id(number: usize) -> String {
    format!("{number:06}")
}
