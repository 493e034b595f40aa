//! One run: events of servers and clients in the order of their times, and all sessions from moment to moment between them.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use crate::client::{DIRECTORY_S, Directories};
use crate::crowd::{Crowd, Scene};
use crate::fleet::{self, Fleet, Rule};
use crate::load::Loads;
use crate::outcome::Outcome;
use crate::population::{BLOCKS, machines};

/// Time between two moments of the sessions.
const STEP_S: f64 = 5.0;
/// Measurements begin here: the swarm has converged and its clients have pinged.
const MEASURED_FROM_S: f64 = 900.0;

/// What is run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Servers at any time.
    pub servers: usize,
    pub clients: usize,
    pub seconds: f64,
    /// Share of the servers that leaves at once at half time, all from the second half of the model.
    pub loss: f64,
    /// How servers decide about moves.
    pub rule: Rule,
    /// Draws everything.
    pub seed: u64,
}

#[derive(PartialEq)]
enum What {
    Server(usize, fleet::Event),
    Begins(usize),
}

/// Something that happens, in the order of times.
#[derive(PartialEq)]
struct Event {
    at: f64,
    serial: u64,
    what: What,
}

impl Eq for Event {}

impl Ord for Event {
    fn cmp(&self, other: &Event) -> Ordering {
        other.at.total_cmp(&self.at).then(other.serial.cmp(&self.serial))
    }
}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Event) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[derive(Default)]
struct Queue {
    events: BinaryHeap<Event>,
    serial: u64,
}

impl Queue {
    fn push(&mut self, at: f64, what: What) {
        self.serial += 1;
        self.events.push(Event { at, serial: self.serial, what });
    }

    fn pop_before(&mut self, until: f64) -> Option<Event> {
        self.events.peek().is_some_and(|event| event.at < until).then(|| self.events.pop())?
    }
}

/// Sums over the time that is measured.
#[derive(Default)]
struct Sums {
    moves_before: u32,
    server_s: f64,
    weakest: f64,
    sessions: f64,
    moments: f64,
    broken_s: f64,
}

impl Sums {
    fn add(&mut self, fleet: &Fleet) {
        let served = fleet.served();
        let weakest = served.iter().copied().fold(f64::INFINITY, f64::min);
        let mean = served.iter().sum::<f64>() / BLOCKS as f64;
        self.weakest += weakest / mean.max(f64::EPSILON);
        self.broken_s += if weakest <= 0.0 { STEP_S } else { 0.0 };
        self.server_s += fleet.present() as f64 * STEP_S;
        self.moments += 1.0;
    }
}

/// Runs it.
pub fn simulate(settings: &Settings) -> Outcome {
    let Settings { servers, clients, seconds, loss, rule, seed } = *settings;
    let mut fleet = Fleet::new(machines(seed, servers, seconds), rule, seed);
    let mut crowd = Crowd::new(clients, seed);
    let mut loads = Loads::new(fleet.servers.iter().map(|server| server.machine.forward_rps));
    let (mut queue, mut directories, mut sums) =
        (Queue::default(), Directories::default(), Sums::default());
    fleet
        .first_events()
        .into_iter()
        .for_each(|(at, server, event)| queue.push(at, What::Server(server, event)));
    crowd.first_events().into_iter().for_each(|(at, client)| queue.push(at, What::Begins(client)));
    let (mut now, mut read_at) = (0.0, f64::NEG_INFINITY);
    let measured_from = MEASURED_FROM_S.min(seconds / 2.0);
    let (mut measures, mut lost) = (false, loss <= 0.0);
    while now < seconds {
        if now - read_at >= DIRECTORY_S {
            directories.push(now, fleet.directory(now));
            read_at = now;
        }
        if !measures && now >= measured_from {
            measures = true;
            crowd.begin_to_measure();
            sums.moves_before = fleet.moves;
        }
        if !lost && now >= seconds / 2.0 {
            lost = true;
            fleet.lose(now, (loss * servers as f64) as usize);
        }
        let newest = directories.at(now);
        while let Some(Event { at, what, .. }) = queue.pop_before(now + STEP_S) {
            match what {
                What::Server(server, event) => {
                    let later = fleet.on(at, server, event, &newest);
                    later
                        .into_iter()
                        .for_each(|(at, event)| queue.push(at, What::Server(server, event)));
                }
                What::Begins(client) => crowd.begin(client, at),
            }
        }
        let loading = fleet.end_draining(now + STEP_S);
        loading
            .into_iter()
            .for_each(|(at, server, event)| queue.push(at, What::Server(server, event)));
        let mut scene = Scene { now, step_s: STEP_S, fleet: &mut fleet, directories: &directories };
        for (at, client) in crowd.advance(&mut scene, &mut loads) {
            queue.push(at, What::Begins(client));
        }
        now += STEP_S;
        if measures {
            sums.add(&fleet);
            sums.sessions += crowd.sessions() as f64;
        }
    }
    outcome(settings, &fleet, &crowd, &sums, seconds - measured_from)
}

fn outcome(
    settings: &Settings,
    fleet: &Fleet,
    crowd: &Crowd,
    sums: &Sums,
    seconds: f64,
) -> Outcome {
    let (counts, clients) = (&crowd.counts, crowd.per_client());
    let client =
        |share: f64| clients.get((clients.len() as f64 * share) as usize).copied().unwrap_or(0.0);
    Outcome {
        rule: settings.rule,
        seed: settings.seed,
        tokens_per_s: counts.tokens / seconds,
        batch_tokens_per_s: counts.batch_tokens / seconds,
        per_client: (client(0.5), client(0.05)),
        step_s: [0.5, 0.95, 0.99].map(|share| counts.steps.quantile(share)),
        sessions: sums.sessions / sums.moments.max(1.0),
        opened: counts.opened,
        rerouted: counts.rerouted,
        failed: counts.failed,
        refused: counts.refused,
        moves_per_hour: f64::from(fleet.moves - sums.moves_before) / (sums.server_s / 3600.0),
        weakest: sums.weakest / sums.moments.max(1.0),
        broken_s: sums.broken_s,
    }
}
