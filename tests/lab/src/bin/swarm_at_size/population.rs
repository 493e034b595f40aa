//! Who takes part: servers from a T4 at home to an A100 in a data centre, and where servers and clients are. All of it is drawn from a
//! seed alone, so that every rule of placement meets the same machines, which come and leave at the same times.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Blocks of the model.
pub const BLOCKS: usize = 80;
/// Bits of the hidden states of one token: 8,192 values of 16 bits.
const BITS_PER_TOKEN: f64 = 8192.0 * 16.0;
/// Time in which half of the servers leave.
const HALF_LIFE_S: f64 = 3600.0;
/// Tokens of KV cache that a server has for each of its blocks (`--attn_cache_tokens` of Petals for grouped attention).
const CACHE_TOKENS: u64 = 16_384;
/// Share of the network that counts behind a relay (Petals).
const RELAY_SHARE: f64 = 0.2;
/// What a relay adds to a round trip.
const RELAY_S: f64 = 0.04;
/// The initial servers come within this time.
const START_S: f64 = 60.0;

/// Round trips between western Europe, the east and the west of North America, and East Asia, in milliseconds.
const REGION_MS: [[f64; 4]; 4] = [
    [20.0, 90.0, 150.0, 220.0],
    [90.0, 20.0, 65.0, 180.0],
    [150.0, 65.0, 20.0, 130.0],
    [220.0, 180.0, 130.0, 40.0],
];

/// A kind of machine. Rates are those of one block of 8,192 values in NF4 (estimated from the memory bandwidth of the GPU and from what
/// Petals reaches of it).
struct Kind {
    share: f64,
    /// Blocks that fit, from and to.
    blocks: (usize, usize),
    inference_rps: f64,
    forward_rps: f64,
    /// Network, from and to.
    mbps: (f64, f64),
}

/// T4 or 3060; 3090 or 4090; A6000; A100.
const KINDS: [Kind; 4] = [
    Kind {
        share: 0.35,
        blocks: (4, 10),
        inference_rps: 350.0,
        forward_rps: 12e3,
        mbps: (30.0, 300.0),
    },
    Kind {
        share: 0.35,
        blocks: (8, 18),
        inference_rps: 750.0,
        forward_rps: 40e3,
        mbps: (50.0, 500.0),
    },
    Kind {
        share: 0.2,
        blocks: (20, 36),
        inference_rps: 700.0,
        forward_rps: 45e3,
        mbps: (100.0, 1000.0),
    },
    Kind {
        share: 0.1,
        blocks: (36, 60),
        inference_rps: 900.0,
        forward_rps: 62e3,
        mbps: (300.0, 3000.0),
    },
];

/// Where a peer is.
#[derive(Clone, Copy, Debug)]
pub struct Location {
    region: usize,
    /// What its access adds to every round trip.
    access_s: f64,
}

impl Location {
    fn draw(rng: &mut StdRng, relayed: bool) -> Location {
        let access_s = rng.random_range(0.002..0.03) + if relayed { RELAY_S } else { 0.0 };
        // Asia has half as many peers as any other region.
        Location { region: rng.random_range(0..7) / 2, access_s }
    }

    /// The round trip to another peer, in seconds.
    pub fn round_trip_s(self, other: Location) -> f64 {
        REGION_MS[self.region][other.region] / 1e3 + self.access_s + other.access_s
    }
}

/// A machine that serves for a time.
#[derive(Clone, Debug)]
pub struct Machine {
    pub location: Location,
    /// Blocks that fit.
    pub blocks: usize,
    /// One-token steps of one block per second.
    pub inference_rps: f64,
    /// Tokens of one block per second, in batches.
    pub forward_rps: f64,
    /// Tokens per second that its network carries.
    pub network_rps: f64,
    /// What it announces: the formula of Petals.
    pub throughput: f64,
    /// Room for sessions, in tokens of K or V of one block.
    pub cache_tokens: u64,
    /// Whether it can load other blocks beside those that it serves.
    pub holds_two_spans: bool,
    /// When it comes and when it leaves, in seconds.
    pub comes_at: f64,
    /// The end of its time.
    pub leaves_at: f64,
    /// Whether it leaves without a word: its records live until they expire.
    pub vanishes: bool,
}

/// A random number between 0 and 1 whose logarithm, negated, has mean 1.
fn exponential(rng: &mut StdRng) -> f64 {
    -rng.random_range(f64::EPSILON..1.0).ln()
}

fn log_uniform(rng: &mut StdRng, from: f64, to: f64) -> f64 {
    from * (to / from).powf(rng.random())
}

impl Machine {
    fn draw(rng: &mut StdRng, comes_at: f64) -> Machine {
        let mut left: f64 = rng.random();
        let kind = KINDS.iter().find(|kind| {
            left -= kind.share;
            left < 0.0
        });
        let kind = kind.unwrap_or(&KINDS[0]);
        let blocks = rng.random_range(kind.blocks.0..=kind.blocks.1);
        let relayed = rng.random_bool(0.25);
        let speed = rng.random_range(0.8..1.25);
        let forward_rps = kind.forward_rps * speed;
        let share = if relayed { RELAY_SHARE } else { 1.0 };
        let network_rps = log_uniform(rng, kind.mbps.0, kind.mbps.1) * 1e6 / BITS_PER_TOKEN;
        let compute = forward_rps / ((blocks + 1) as f64 / 2.0);
        Machine {
            location: Location::draw(rng, relayed),
            blocks,
            inference_rps: kind.inference_rps * speed,
            forward_rps,
            network_rps: network_rps * share,
            throughput: compute.min(network_rps * share),
            cache_tokens: 2 * CACHE_TOKENS * blocks as u64,
            holds_two_spans: rng.random_bool(0.25),
            comes_at,
            leaves_at: comes_at + exponential(rng) * HALF_LIFE_S / std::f64::consts::LN_2,
            vanishes: rng.random_bool(0.5),
        }
    }
}

/// The machines of a run: `count` at the start, then as many as leave on average.
pub fn machines(seed: u64, count: usize, seconds: f64) -> Vec<Machine> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut machines: Vec<Machine> = (0..count)
        .map(|_| {
            let comes_at = rng.random_range(0.0..START_S);
            Machine::draw(&mut rng, comes_at)
        })
        .collect();
    let between_s = HALF_LIFE_S / std::f64::consts::LN_2 / count as f64;
    let mut now = START_S;
    loop {
        now += exponential(&mut rng) * between_s;
        if now > seconds {
            return machines;
        }
        machines.push(Machine::draw(&mut rng, now));
    }
}

/// What a person does: sessions with pauses between them, or batches for fine-tuning without end.
pub struct Person {
    /// Where the client runs.
    pub location: Location,
    /// Whether it sends batches.
    pub trains: bool,
    /// Draws pauses and lengths: the same under every rule.
    habits: StdRng,
}

/// A text that somebody wants.
#[derive(Clone, Copy, Debug)]
pub struct Text {
    /// Tokens of the prompt.
    pub prompt: f64,
    /// Tokens that follow, one a step.
    pub tokens: f64,
}

impl Person {
    /// Person `number` of a run; one of twenty trains.
    pub fn draw(seed: u64, number: u64) -> Person {
        let mut habits =
            StdRng::seed_from_u64(seed ^ (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let location = Location::draw(&mut habits, false);
        Person { location, trains: number.is_multiple_of(20), habits }
    }

    /// Seconds until the next text, twenty minutes on average.
    pub fn pause_s(&mut self) -> f64 {
        if self.trains {
            self.habits.random_range(0.0..60.0)
        } else {
            1200.0 * exponential(&mut self.habits)
        }
    }

    /// The next text: a prompt of 32 to 2,048 tokens and 200 tokens on average.
    pub fn text(&mut self) -> Text {
        let prompt = log_uniform(&mut self.habits, 32.0, 2048.0).round();
        Text { prompt, tokens: (10.0 + 190.0 * exponential(&mut self.habits)).min(2048.0).round() }
    }
}
