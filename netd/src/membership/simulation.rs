//! A swarm of a hundred servers on one clock, under the real decisions of [`super::placement`]:
//! upstream's rule and ours in the same swarms. Run with `--nocapture` for the table.
//!
//! A server asks at random times, 60 s apart on average (upstream's jitter); it sees the swarm as
//! it was five seconds ago. Upstream: one that moves is offline, chooses within ten seconds
//! (upstream's delay), joins, and is online two minutes later. Ours: one that moves goes on
//! serving, shows where it goes, and changes over two minutes later, unless that would leave a
//! block without a server.

use super::placement::hysteresis::Rebalancer;
use super::placement::{Decision, best_start_without, should_choose_other_blocks};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::VecDeque;
use std::time::Duration;
use swarm::view::ServerSpan;
use swarm::wire::records::{ServerInfo, ServerState};

const BLOCKS: usize = 80;
const SERVERS: usize = 100;
const QUALITY: f64 = 0.75;
const VIEW_AGE_SECONDS: usize = 5;
const LOADING_SECONDS: u64 = 120;
/// Averages begin here: before, nobody has loaded.
const STARTED_SECONDS: u64 = 300;

/// Times of a run in seconds.
#[derive(Clone, Copy)]
struct Plan {
    /// A third of the servers leaves, all of them from the second half of the model.
    loss: u64,
    end: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    Upstream,
    Sepal,
}

/// What a server is doing, with the time at which that ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Choosing(u64),
    Loading(u64),
    Online { asks_at: u64 },
    Gone,
}

struct Server {
    /// Where it is, or where it is going.
    span: ServerSpan,
    /// First block of what it serves while it goes elsewhere.
    serves: Option<usize>,
    length: usize,
    phase: Phase,
    rebalancer: Rebalancer,
    moves: u32,
}

#[derive(Debug)]
struct Outcome {
    moves: u32,
    most_moves: u32,
    last_move_s: u64,
    weakest: f64,
    mean_weakest: f64,
    broken_s: u64,
}

fn simulate(rule: Rule, plan: Plan, seed: u64) -> Outcome {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut servers: Vec<Server> = (0..SERVERS).map(|number| newcomer(number, &mut rng)).collect();
    let mut views: VecDeque<Vec<ServerSpan>> = VecDeque::new();
    let (mut last_move_s, mut total, mut broken_s, mut weakest) = (0, 0.0, 0, 0.0);
    for now in 0..plan.end {
        if now == plan.loss {
            let leaves = |server: &&mut Server| server.span.start >= BLOCKS / 2;
            servers
                .iter_mut()
                .filter(leaves)
                .take(SERVERS / 3)
                .for_each(|server| server.phase = Phase::Gone);
        }
        change_over(&mut servers, now);
        views.push_back(seen(&servers));
        if views.len() > VIEW_AGE_SECONDS {
            views.pop_front();
        }
        let view = views.front().cloned().unwrap_or_default();
        for server in &mut servers {
            if step(server, rule, now, &view, &mut rng) {
                last_move_s = now;
            }
        }
        weakest = served(&servers).into_iter().fold(f64::INFINITY, f64::min);
        if now >= STARTED_SECONDS {
            total += weakest;
            broken_s += u64::from(weakest <= 0.0);
        }
    }
    Outcome {
        moves: servers.iter().map(|server| server.moves).sum(),
        most_moves: servers.iter().map(|server| server.moves).max().unwrap_or(0),
        last_move_s,
        weakest,
        mean_weakest: total / (plan.end - STARTED_SECONDS) as f64,
        broken_s,
    }
}

/// A server that was started within the first minute.
fn newcomer(number: usize, rng: &mut StdRng) -> Server {
    let started_at = rng.random_range(0..60);
    let rate = rng.random_range(2.0..30.0);
    Server {
        span: ServerSpan {
            // Three digits, so that the order of names is that of numbers.
            peer_id: format!("{number:03}"),
            start: 0,
            end: 0,
            info: ServerInfo::new(ServerState::Offline, rate),
        },
        serves: None,
        length: rng.random_range(4..=24),
        phase: Phase::Choosing(started_at),
        rebalancer: Rebalancer::new(QUALITY, Duration::from_secs(started_at)),
        moves: 0,
    }
}

/// Throughput of each block for clients.
fn served(servers: &[Server]) -> Vec<f64> {
    let mut throughput = vec![0.0; BLOCKS];
    for server in servers.iter().filter(|s| s.phase != Phase::Gone) {
        let online = server.span.info.state == ServerState::Online;
        if let Some(start) = server.serves.or(online.then_some(server.span.start)) {
            throughput[start..start + server.length]
                .iter_mut()
                .for_each(|block| *block += server.span.info.throughput);
        }
    }
    throughput
}

/// Lets those who have loaded leave their old place, unless that would leave a block without a
/// server.
fn change_over(servers: &mut [Server], now: u64) {
    let mut throughput = served(servers);
    for server in servers {
        let (Some(old), Phase::Loading(until)) = (server.serves, server.phase) else {
            continue;
        };
        if until > now {
            continue;
        }
        let rate = server.span.info.throughput;
        let new = server.span.start..server.span.end;
        let left = (old..old + server.length).filter(|block| !new.contains(block));
        if left.clone().any(|block| throughput[block] <= rate * 1.000_001) {
            (server.span.start, server.span.end) = (old, old + server.length);
        } else {
            left.for_each(|block| throughput[block] -= rate);
        }
        server.serves = None;
    }
}

fn seen(servers: &[Server]) -> Vec<ServerSpan> {
    let announced = |s: &&Server| matches!(s.phase, Phase::Loading(_) | Phase::Online { .. });
    servers.iter().filter(announced).map(|server| server.span.clone()).collect()
}

/// One second of one server; whether it left its place.
fn step(server: &mut Server, rule: Rule, now: u64, view: &[ServerSpan], rng: &mut StdRng) -> bool {
    match server.phase {
        Phase::Choosing(at) if at <= now => {
            let id = &server.span.peer_id;
            let start = best_start_without(id, view, BLOCKS, server.length).unwrap_or(0);
            (server.span.start, server.span.end) = (start, start + server.length);
            server.span.info.state = ServerState::Joining;
            server.phase = Phase::Loading(now + LOADING_SECONDS);
            false
        }
        Phase::Loading(until) if until <= now => {
            server.span.info.state = ServerState::Online;
            server.phase = Phase::Online { asks_at: now + rng.random_range(0..120) };
            false
        }
        Phase::Online { asks_at } if asks_at <= now => {
            let (id, time) = (server.span.peer_id.clone(), Duration::from_secs(now));
            let decision = match rule {
                Rule::Upstream => should_choose_other_blocks(&id, view, BLOCKS, QUALITY, rng),
                Rule::Sepal => server.rebalancer.on_check(time, &id, view, BLOCKS, rng),
            };
            let moves = matches!(decision, Decision::Move(_));
            let target = best_start_without(&id, view, BLOCKS, server.length);
            if let (true, Rule::Sepal, Some(start)) = (moves, rule, target) {
                server.moves += 1;
                server.serves = Some(server.span.start);
                (server.span.start, server.span.end) = (start, start + server.length);
                server.span.info.state = ServerState::Joining;
                server.phase = Phase::Loading(now + LOADING_SECONDS);
            } else if moves {
                server.moves += 1;
                server.span.info.state = ServerState::Offline;
                server.phase = Phase::Choosing(now + rng.random_range(0..=10));
            } else {
                let usual = now + rng.random_range(1..=120);
                let wished = server.rebalancer.waits_until().map_or(usual, |at| at.as_secs() + 1);
                server.phase = Phase::Online { asks_at: wished.clamp(now + 1, now + 120) };
            }
            moves
        }
        _ => false,
    }
}

/// Runs both rules in the same swarms, prints a row for each, and gives moves, and weakest block at
/// the end, per rule.
fn compare(plan: Plan, seeds: std::ops::RangeInclusive<u64>) -> [(u32, f64); 2] {
    println!(
        "| rule | seed | moves | most of one | last move, s | weakest at end | weakest on average | broken, s |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    let mut totals = [(0, 0.0); 2];
    for seed in seeds {
        for (rule, (moves, weakest)) in [Rule::Upstream, Rule::Sepal].into_iter().zip(&mut totals) {
            let o = simulate(rule, plan, seed);
            println!(
                "| {rule:?} | {seed} | {} | {} | {} | {:.1} | {:.1} | {} |",
                o.moves, o.most_moves, o.last_move_s, o.weakest, o.mean_weakest, o.broken_s
            );
            assert!(o.weakest > 0.0, "{rule:?} leaves a hole");
            *moves += o.moves;
            *weakest += o.weakest;
        }
    }
    totals
}

#[test]
fn hundred_servers_converge_without_herding() {
    let plan = Plan { loss: 600, end: 1500 };
    let [upstream, steady] = compare(plan, 1..=1);
    assert!(steady.0 < upstream.0, "moves more: {steady:?} {upstream:?}");
    assert!(steady.1 > 0.7 * upstream.1, "ends worse: {steady:?} {upstream:?}");
}

#[test]
#[ignore = "a minute; prints the table of three hours in three swarms"]
fn hundred_servers_for_three_hours() {
    let plan = Plan { loss: 3600, end: 10_800 };
    let [upstream, steady] = compare(plan, 1..=3);
    assert!(steady.0 < upstream.0, "moves more: {steady:?} {upstream:?}");
}
