//! The clients' work: sessions that are opened, step, break and are routed anew, and batches one after the other.

use std::ops::Range;

use swarm::routing::OVERHEAD_S;

use crate::client::{Client, Directories, Hop};
use crate::fleet::Fleet;
use crate::load::{BATCH_TOKENS, Demand, Loads, Visit};
use crate::outcome::Counts;
use crate::population::{BLOCKS, Text};

/// A person waits so long for the next token.
const PATIENCE_S: f64 = 120.0;
/// Pause after the second failure in a row; doubles. After the first there is none.
const FIRST_PAUSE_S: f64 = 1.0;
const LONGEST_PAUSE_S: f64 = 60.0;

/// A server of a session.
struct Leg {
    hop: Hop,
    /// That of the server when it was opened.
    epoch: u32,
}

/// Work under way: a text, or batches without end.
struct Session {
    client: usize,
    text: Option<Text>,
    legs: Vec<Leg>,
    visits: Vec<Visit>,
    /// Seconds of a step that nobody shares.
    way_s: f64,
    /// Steps of the text or of the batches so far; batches have parts.
    done: f64,
    /// Blocks that need other servers, and when they are looked for.
    missing: Option<(Range<usize>, f64)>,
    failures: u32,
    /// Since when there was no step, and until when there is none.
    stalled: Option<(f64, f64)>,
}

/// All clients and what they do.
pub struct Crowd {
    clients: Vec<Client>,
    sessions: Vec<Session>,
    pub counts: Counts,
    /// Seconds in sessions and tokens, of every client.
    used: Vec<(f64, f64)>,
}

/// The moment, and what there is.
pub struct Scene<'a> {
    /// Seconds since the start.
    pub now: f64,
    /// Seconds to the next moment.
    pub step_s: f64,
    pub fleet: &'a mut Fleet,
    /// What clients may have read.
    pub directories: &'a Directories,
}

impl Crowd {
    /// `count` clients.
    pub fn new(count: usize, seed: u64) -> Crowd {
        Crowd {
            clients: (0..count as u64).map(|number| Client::new(seed, number)).collect(),
            sessions: Vec::new(),
            counts: Counts::default(),
            used: vec![(0.0, 0.0); count],
        }
    }

    /// When each client begins.
    pub fn first_events(&mut self) -> Vec<(f64, usize)> {
        self.clients
            .iter_mut()
            .enumerate()
            .map(|(number, client)| (client.person.pause_s(), number))
            .collect()
    }

    /// Forgets what was counted so far.
    pub fn begin_to_measure(&mut self) {
        self.counts = Counts::default();
        self.used.fill((0.0, 0.0));
    }

    /// Sessions under way.
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Tokens per second of every client that had a session for a minute.
    pub fn per_client(&self) -> Vec<f64> {
        let used = self.used.iter().filter(|(seconds, _)| *seconds >= 60.0);
        let mut found: Vec<f64> = used.map(|(seconds, tokens)| tokens / seconds).collect();
        found.sort_unstable_by(f64::total_cmp);
        found
    }

    /// A client wants something.
    pub fn begin(&mut self, client: usize, now: f64) {
        let person = &mut self.clients[client].person;
        let text = (!person.trains).then(|| person.text());
        self.counts.opened += u32::from(text.is_some());
        self.sessions.push(Session {
            client,
            text,
            legs: Vec::new(),
            visits: Vec::new(),
            way_s: 0.0,
            done: 0.0,
            missing: Some((0..BLOCKS, now)),
            failures: 0,
            stalled: Some((now, now)),
        });
    }

    /// Lets all sessions go on until the next moment; the clients whose texts are over, with the time of their next one.
    pub fn advance(&mut self, scene: &mut Scene, loads: &mut Loads) -> Vec<(f64, usize)> {
        let mut ended = Vec::new();
        let mut sessions = std::mem::take(&mut self.sessions);
        sessions.retain_mut(|session| {
            let goes_on = self.go_on(session, scene, loads);
            if !goes_on {
                close(session, 0..session.legs.len(), scene.fleet);
                let pause_s = self.clients[session.client].person.pause_s();
                ended.push((scene.now + scene.step_s + pause_s, session.client));
            }
            goes_on
        });
        self.sessions = sessions;
        loads.end_pass();
        ended
    }

    /// One session until the next moment; whether it goes on after that.
    fn go_on(&mut self, session: &mut Session, scene: &mut Scene, loads: &mut Loads) -> bool {
        let until = scene.now + scene.step_s;
        loop {
            if session.missing.is_none() {
                self.drop_broken(session, scene);
            }
            let Some((blocks, at)) = session.missing.clone().filter(|(_, at)| *at < until) else {
                break;
            };
            self.find_servers(session, blocks, at, scene);
        }
        if session.text.is_some() {
            self.used[session.client].0 += scene.step_s;
        }
        if session.missing.is_some() {
            let is_patient = session.stalled.is_none_or(|(since, _)| until - since < PATIENCE_S);
            self.counts.failed += u32::from(!is_patient && session.text.is_some());
            return is_patient || session.text.is_none();
        }
        let from = session.stalled.map_or(scene.now, |(_, ready_at)| ready_at.max(scene.now));
        if from >= until {
            return true;
        }
        let step_s = loads.step_s(session.way_s, &mut session.visits);
        let steps = (until - from) / step_s;
        match session.text {
            Some(text) => self.count_steps(session, text, steps, step_s),
            None => self.count_batches(session, steps, until),
        }
    }

    fn count_steps(&mut self, session: &mut Session, text: Text, steps: f64, step_s: f64) -> bool {
        let steps = steps.min(text.tokens - session.done);
        // The time to the first token is another matter; a later stall is a step.
        if let Some((since, ready_at)) = session.stalled.take()
            && session.done > 0.0
        {
            self.counts.steps.add(ready_at - since + step_s, 1.0);
        }
        session.done += steps;
        self.counts.steps.add(step_s, steps);
        self.counts.tokens += steps;
        self.used[session.client].1 += steps;
        session.done < text.tokens
    }

    fn count_batches(&mut self, session: &mut Session, steps: f64, until: f64) -> bool {
        self.counts.batch_tokens += steps * BATCH_TOKENS;
        session.stalled = None;
        session.done += steps;
        if session.done >= 1.0 {
            // Each batch takes a route of its own.
            session.done = session.done.fract();
            for leg in session.legs.drain(..) {
                self.clients[session.client].answered(leg.hop.server);
            }
            session.missing = Some((0..BLOCKS, until));
        }
        true
    }

    /// Looks for a leg whose server is gone.
    fn drop_broken(&mut self, session: &mut Session, scene: &Scene) {
        let broken = session
            .legs
            .iter()
            .position(|leg| !scene.fleet.servers[leg.hop.server].holds(leg.epoch));
        let Some(number) = broken else { return };
        let leg = session.legs.remove(number);
        self.clients[session.client].failed(leg.hop.server, scene.now);
        self.counts.rerouted += u32::from(session.text.is_some());
        session.missing = Some((leg.hop.blocks, scene.now));
        session.stalled = session.stalled.or(Some((scene.now, scene.now)));
        session.failures = 0;
    }

    /// Routes `blocks` anew and opens them at the servers of the route.
    fn find_servers(
        &mut self,
        session: &mut Session,
        blocks: Range<usize>,
        at: f64,
        scene: &mut Scene,
    ) {
        let client = &mut self.clients[session.client];
        let directory = client.update(at, scene.directories, scene.fleet);
        let tokens = session.text.map(|text| (text.prompt + text.tokens) as u64);
        let Some(hops) = client.route(&directory, blocks, tokens, at) else {
            client.look_again(at);
            session.failures += 1;
            session.missing =
                session.missing.take().map(|(blocks, _)| (blocks, at + pause_s(session.failures)));
            return;
        };
        let first = session.legs.partition_point(|leg| leg.hop.blocks.start < hops[0].blocks.start);
        for (number, hop) in hops.iter().enumerate() {
            if !open(hop, tokens, scene.fleet) {
                client.failed(hop.server, at);
                self.counts.refused += u32::from(session.text.is_some());
                close(session, first..first + number, scene.fleet);
                session.legs.drain(first..first + number);
                session.failures += 1;
                session.missing = session
                    .missing
                    .take()
                    .map(|(blocks, _)| (blocks, at + pause_s(session.failures)));
                return;
            }
            let epoch = scene.fleet.servers[hop.server].epoch;
            session.legs.insert(first + number, Leg { hop: hop.clone(), epoch });
        }
        if session.text.is_some() {
            hops.iter().for_each(|hop| client.answered(hop.server));
        }
        (session.missing, session.failures) = (None, 0);
        let history = session.text.map_or(0.0, |text| text.prompt + session.done);
        let replay_s: f64 = hops.iter().map(|hop| prefill_s(hop, history, scene.fleet)).sum();
        let since = session.stalled.map_or(at, |(since, _)| since);
        session.stalled = Some((since, at + replay_s));
        self.plan(session, scene.fleet);
    }

    /// What a step asks of the servers, and the time on the way.
    fn plan(&self, session: &mut Session, fleet: &Fleet) {
        let machine = |server: usize| &fleet.servers[server].machine;
        let own = self.clients[session.client].person.location;
        let demand = |hop: &Hop| {
            let (blocks, machine) = (hop.blocks.len() as f64, machine(hop.server));
            match session.text {
                Some(_) => Demand::Step(blocks / machine.inference_rps),
                None => Demand::Batch(
                    BATCH_TOKENS * blocks / machine.forward_rps,
                    BATCH_TOKENS / machine.network_rps,
                ),
            }
        };
        session.visits =
            session.legs.iter().map(|leg| Visit::new(leg.hop.server, demand(&leg.hop))).collect();
        let locations: Vec<_> =
            session.legs.iter().map(|leg| machine(leg.hop.server).location).collect();
        let overhead_s = OVERHEAD_S * locations.len() as f64;
        let way_s: f64 = match session.text {
            // Servers push to each other; one way each.
            Some(_) => {
                let between =
                    locations.windows(2).map(|pair| pair[0].round_trip_s(pair[1])).sum::<f64>();
                let ends = locations.first().into_iter().chain(locations.last());
                (between + ends.map(|location| own.round_trip_s(*location)).sum::<f64>()) / 2.0
            }
            None => locations.iter().map(|location| own.round_trip_s(*location)).sum(),
        };
        session.way_s = way_s + overhead_s;
    }
}

fn pause_s(failures: u32) -> f64 {
    match failures {
        0 | 1 => 0.0,
        more => (FIRST_PAUSE_S * 2f64.powi(more as i32 - 2)).min(LONGEST_PAUSE_S),
    }
}

/// Cache of a leg in tokens of K or V of one block.
fn cache_of(hop: &Hop, tokens: u64) -> u64 {
    2 * tokens * hop.blocks.len() as u64
}

/// Opens a leg at its server; whether it takes it.
fn open(hop: &Hop, tokens: Option<u64>, fleet: &mut Fleet) -> bool {
    let server = &mut fleet.servers[hop.server];
    let need = cache_of(hop, tokens.unwrap_or(0));
    if !server.takes(&hop.blocks) || server.cache_used + need > server.machine.cache_tokens {
        return false;
    }
    if tokens.is_some() {
        server.cache_used += need;
        server.sessions += 1;
    }
    true
}

/// Gives back what legs of a session hold at servers that still know them.
fn close(session: &Session, legs: Range<usize>, fleet: &mut Fleet) {
    let Some(text) = session.text else { return };
    for leg in &session.legs[legs] {
        let server = &mut fleet.servers[leg.hop.server];
        if server.holds(leg.epoch) {
            server.cache_used -= cache_of(&leg.hop, (text.prompt + text.tokens) as u64);
            server.sessions -= 1;
        }
    }
}

/// Seconds in which a server takes in the tokens of a session so far.
fn prefill_s(hop: &Hop, tokens: f64, fleet: &Fleet) -> f64 {
    let machine = &fleet.servers[hop.server].machine;
    tokens * (hop.blocks.len() as f64 / machine.forward_rps + 1.0 / machine.network_rps)
        + OVERHEAD_S
}
