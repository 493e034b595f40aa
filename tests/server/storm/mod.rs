//! Sixteen sessions in a storm of faults: killed, frozen and crashing workers, a killed netd, upgrades.
//! Every session whose netd lives ends with the exact values; those of our own client go on when netd
//! dies, too. `tests/soak storm` lasts ten minutes; the seed repeats one.

mod faults;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::harness::demo::{BLOCKS, HIDDEN};
use crate::harness::peer::{Peer, fed_back, noise};
use crate::harness::session::serve;
use crate::harness::{DEADLINE, Sepal};
use client::chain::Chain;
use client::states::Hidden;
use client::swarm::{Swarm, SwarmConfig};
use faults::{Fault, MemoryGroup, Script, strike};
use hivemind::wire::tensor::{WireDtype, dummy_tensor};
use shared::dtype::DType;

const SECONDS_VARIABLE: &str = "SEPAL_SOAK_SECONDS";
const SEED_VARIABLE: &str = "SEPAL_STORM_SEED";
const SHORT: Duration = Duration::from_secs(25);

/// Sessions of a client that knows no more than Petals', and of ours.
const PLAIN: u32 = 8;
const OWN: u32 = 8;
const PROMPT: usize = 9;
const STEPS: usize = 40;

/// What the sessions met.
#[derive(Default)]
struct Tally {
    ended: AtomicU64,
    steps: AtomicU64,
    wrong: AtomicU64,
    /// Sessions of the plain client that ended with their netd, as they do with Petals' servers.
    with_netd: AtomicU64,
    /// Sessions whose job was refused, because it was alone at two crashes of its worker.
    suspects: AtomicU64,
    /// Sessions that were not opened, since netd was away or starting.
    not_opened: AtomicU64,
    /// Sessions that ended for any other reason.
    lost: AtomicU64,
    longest_us: AtomicU64,
    /// Times that netd was killed or replaced.
    netd_ends: AtomicU64,
    last_netd_end: Mutex<Option<Instant>>,
    /// Whether netd is being replaced at a moment that only the server knows.
    is_upgrading: AtomicBool,
    is_over: AtomicBool,
}

/// How long a new netd may take until it opens sessions.
const NEW_NETD: Duration = Duration::from_secs(5);

impl Tally {
    fn step(&self, began: Instant) {
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.longest_us.fetch_max(began.elapsed().as_micros() as u64, Ordering::Relaxed);
    }

    fn ended(&self, is_exact: bool) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        self.wrong.fetch_add(u64::from(!is_exact), Ordering::Relaxed);
    }

    /// netd is about to end.
    fn netd_ends(&self) {
        *self.last_netd_end.lock().expect("no panic") = Some(Instant::now());
        self.netd_ends.fetch_add(1, Ordering::SeqCst);
    }

    fn netd_is_new(&self) -> bool {
        let last = *self.last_netd_end.lock().expect("no panic");
        last.is_some_and(|last| last.elapsed() < NEW_NETD)
    }

    fn goes_on(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }
}

/// Why a session did not come to its end.
enum Failure {
    /// It had no answer yet.
    Unopened(String),
    Lost(String),
}

/// A session of the plain client, step by step.
async fn plain(
    peer: &Peer,
    seed: u32,
    mut each: impl FnMut(Instant),
) -> Result<Vec<Vec<f32>>, Failure> {
    let text = |error: hivemind::p2p::CallError| Failure::Lost(error.to_string());
    let unopened = |error: hivemind::p2p::CallError| Failure::Unopened(error.to_string());
    let mut session = peer.try_session(BLOCKS, (PROMPT + STEPS) as u32).await.map_err(unopened)?;
    let began = Instant::now();
    let prompt = noise(&[2, PROMPT, HIDDEN], seed);
    let mut outputs = vec![session.step(prompt, None).await.map_err(unopened)?];
    each(began);
    for step in 0..STEPS {
        let (hidden, order) = fed_back(outputs.last().expect("an output"), HIDDEN, step);
        let (none, began) = (dummy_tensor(WireDtype::F32), Instant::now());
        outputs.push(session.step_with(hidden, None, none, order).await.map_err(text)?);
        each(began);
    }
    let end = session.try_close().await.map_err(text)?;
    assert_eq!(end, None, "nothing follows the end of a session");
    Ok(outputs)
}

/// A session of our client, which survives the death of netd.
async fn own(
    swarm: &Swarm,
    seed: u32,
    mut each: impl FnMut(Instant),
) -> Result<Vec<Vec<f32>>, String> {
    let text = |error: client::chain::ChainError| error.to_string();
    let length = (PROMPT + STEPS) as u32;
    let mut chain = Chain::open(swarm, length).await.map_err(text)?;
    let mut hidden = Hidden {
        dtype: DType::F32,
        rows: 1,
        tokens: PROMPT,
        bytes: noise(&[1, PROMPT, HIDDEN], seed).buffer,
    };
    let mut outputs = Vec::new();
    for _ in 0..=STEPS {
        let began = Instant::now();
        let (output, _) = chain.step(hidden).await.map_err(text)?;
        each(began);
        outputs.push(output.last_f32());
        let bytes =
            outputs.last().into_iter().flatten().flat_map(|x| x.sin().to_le_bytes()).collect();
        hidden = Hidden { dtype: DType::F32, rows: 1, tokens: 1, bytes };
    }
    chain.close().await;
    Ok(outputs)
}

async fn join(addr: &str) -> Result<Swarm, client::swarm::SwarmError> {
    Swarm::join(SwarmConfig {
        initial_peers: vec![addr.parse().expect("multiaddr")],
        prefix: "demo".to_owned(),
        num_blocks: BLOCKS.end,
        startup_timeout: DEADLINE,
    })
    .await
}

async fn plain_sessions(addr: String, seed: u32, expected: Vec<Vec<f32>>, tally: Arc<Tally>) {
    while tally.goes_on() {
        let Ok(peer) = Peer::try_connect(&addr, "demo").await else { continue };
        while tally.goes_on() {
            let before = tally.netd_ends.load(Ordering::SeqCst);
            let failure = match plain(&peer, seed, |began| tally.step(began)).await {
                Ok(outputs) => {
                    tally.ended(outputs == expected);
                    continue;
                }
                Err(failure) => failure,
            };
            let netd_ended = tally.is_upgrading.load(Ordering::SeqCst)
                || tally.netd_ends.load(Ordering::SeqCst) != before;
            let count = match &failure {
                Failure::Lost(text) | Failure::Unopened(text) if text.contains("crash") => {
                    &tally.suspects
                }
                Failure::Unopened(_) if netd_ended || tally.netd_is_new() => &tally.not_opened,
                Failure::Lost(_) if netd_ended => &tally.with_netd,
                Failure::Lost(text) | Failure::Unopened(text) => {
                    println!("  lost: {text}");
                    &tally.lost
                }
            };
            count.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(20)).await;
            // Another connection.
            break;
        }
    }
}

async fn own_sessions(addr: String, seed: u32, expected: Vec<Vec<f32>>, tally: Arc<Tally>) {
    let swarm = join(&addr).await.expect("the swarm");
    while tally.goes_on() {
        match own(&swarm, seed, |began| tally.step(began)).await {
            Ok(outputs) => tally.ended(outputs == expected),
            Err(text) if text.contains("crash") => {
                tally.suspects.fetch_add(1, Ordering::Relaxed);
            }
            Err(text) => {
                println!("  lost by our client: {text}");
                tally.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    swarm.leave().await;
}

/// Strikes until the time is over; how often each fault was done.
fn blow(sepal: &Sepal, seed: u64, duration: Duration, tally: &Tally) -> BTreeMap<Fault, u32> {
    let group = MemoryGroup::make();
    if group.is_none() {
        println!("skipped: OOM of a worker, since no memory control group can be made here");
    }
    let mut script = Script::new(seed, group.is_some());
    let (began, mut done) = (Instant::now(), BTreeMap::new());
    while began.elapsed() < duration {
        std::thread::sleep(script.pause());
        let fault = script.fault(Instant::now());
        if matches!(fault, Fault::KillNetd | Fault::Upgrade) {
            // Noted before, so that no session ends with its netd and knows of no reason.
            tally.netd_ends();
        }
        tally.is_upgrading.store(fault == Fault::Upgrade, Ordering::SeqCst);
        *done.entry(fault).or_default() += u32::from(strike(sepal, fault, group.as_ref()));
        if fault == Fault::Upgrade {
            // Counted before the mark goes.
            tally.netd_ends();
            tally.is_upgrading.store(false, Ordering::SeqCst);
        }
    }
    done
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_sessions_in_a_storm_get_the_bits_of_a_calm() {
    let duration = number(SECONDS_VARIABLE).map_or(SHORT, Duration::from_secs);
    let seed = number(SEED_VARIABLE).unwrap_or(1);
    let flags = ["--hang_timeout", "2", "--max_restarts", "1000"];
    let sepal = serve(&flags);
    let addr = sepal.addr();
    let mut tasks = Vec::new();
    let tally = Arc::new(Tally::default());
    let peer = Peer::connect(&addr, "demo").await;
    let swarm = join(&addr).await.expect("the swarm");
    let mut expected = Vec::new();
    for seed in 0..PLAIN {
        expected
            .push(plain(&peer, seed, |_| ()).await.unwrap_or_else(|_| panic!("a calm session")));
    }
    for seed in PLAIN..PLAIN + OWN {
        expected.push(own(&swarm, seed, |_| ()).await.expect("a calm session"));
    }
    swarm.leave().await;
    for (seed, expected) in (0..PLAIN + OWN).zip(expected) {
        let (addr, tally) = (addr.clone(), tally.clone());
        tasks.push(match seed < PLAIN {
            true => tokio::spawn(plain_sessions(addr, seed, expected, tally)),
            false => tokio::spawn(own_sessions(addr, seed, expected, tally)),
        });
    }
    let done = tokio::task::block_in_place(|| blow(&sepal, seed, duration, &tally));
    tally.is_over.store(true, Ordering::Relaxed);
    for task in tasks {
        tokio::time::timeout(DEADLINE, task).await.expect("sessions end").expect("no panic");
    }
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let faults: u32 = done.values().sum();
    println!("seed {seed}: {faults} faults in {} s:", duration.as_secs());
    done.iter().for_each(|(fault, count)| println!("  {count} x {}", fault.name()));
    println!(
        "{} sessions ended, {} steps, longest {} ms; {} wrong, {} lost; {} ended with their netd, {} not opened while it was away, {} refused as suspects",
        of(&tally.ended),
        of(&tally.steps),
        of(&tally.longest_us) / 1000,
        of(&tally.wrong),
        of(&tally.lost),
        of(&tally.with_netd),
        of(&tally.not_opened),
        of(&tally.suspects)
    );
    let log = sepal.log();
    assert_eq!((of(&tally.wrong), of(&tally.lost)), (0, 0), "seed {seed}");
    assert!(of(&tally.ended) > 0, "no session came to its end");
    assert!(!log.contains("put aside") && !log.contains("is not restarted"), "{log}");
    assert_eq!(sepal.terminate().code(), Some(0));
}
