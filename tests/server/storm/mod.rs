//! Sixteen sessions in a storm of faults: killed, frozen and crashing workers, a killed netd, upgrades.
//! Every session whose netd lives ends with the exact values; those of our own client go on when netd
//! dies, too. `tests/soak storm` lasts ten minutes; the seed repeats one.

mod faults;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::harness::demo::{BLOCKS, HIDDEN};
use crate::harness::peer::{Peer, fed_back, noise};
use crate::harness::rights::ignored;
use crate::harness::session::{join, serve};
use crate::harness::{DEADLINE, Sepal, alive, children_of, command_line, wait_for};
use client::chain::Chain;
use client::states::Hidden;
use client::swarm::Swarm;
use faults::{Fault, MemoryGroup, Script, strike};
use nix::unistd::Pid;
use shared::dtype::DType;
use swarm::wire::tensor::{WireDtype, dummy_tensor};

const SECONDS_VARIABLE: &str = "SEPAL_SOAK_SECONDS";
const SEED_VARIABLE: &str = "SEPAL_STORM_SEED";
/// Faults of the short form: each kind, and some more.
const SHORT: u32 = 9;

/// Sessions of a client that knows no more than Petals', and of ours.
const PLAIN: u32 = 8;
const OWN: u32 = 8;
const PROMPT: usize = 9;
const STEPS: usize = 24;

/// Pause before what failed is tried again.
const PAUSE: Duration = Duration::from_millis(20);

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
    is_over: AtomicBool,
}

impl Tally {
    fn step(&self, began: Instant) {
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.longest_us.fetch_max(began.elapsed().as_micros() as u64, Ordering::Relaxed);
    }

    fn ended(&self, is_exact: bool) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        self.wrong.fetch_add(u64::from(!is_exact), Ordering::Relaxed);
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
    let text = |error: p2p::CallError| Failure::Lost(error.to_string());
    let unopened = |error: p2p::CallError| Failure::Unopened(error.to_string());
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

/// Process id of netd, if there is one that lives.
fn netd_of(supervisor: Pid) -> Option<Pid> {
    let is_netd = |pid: &Pid| {
        let line = command_line(*pid);
        line.contains(" gen ") && line.contains("netd") && alive(*pid)
    };
    children_of(supervisor).into_iter().find(is_netd)
}

/// A connection to a netd, and who that is.
async fn connect(addr: &str, supervisor: Pid) -> Option<(Peer, Pid)> {
    let before = netd_of(supervisor)?;
    let peer = Peer::try_connect(addr, "demo").await.ok()?;
    (netd_of(supervisor) == Some(before)).then_some((peer, before))
}

/// Whether `netd`, which lost a session, has come to its end. If not, it opens another one.
async fn has_ended(netd: Pid, addr: &str, supervisor: Pid) -> bool {
    let decided = async {
        loop {
            if netd_of(supervisor) != Some(netd) {
                return true;
            }
            if let Some((peer, again)) = connect(addr, supervisor).await
                && plain(&peer, 0, |_| ()).await.is_ok()
                && again == netd
                && netd_of(supervisor) == Some(netd)
            {
                return false;
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::time::timeout(DEADLINE, decided).await.expect("netd serves or ends")
}

/// Sessions one after the other, at last one that begins when the storm is over.
async fn plain_sessions(
    addr: String,
    supervisor: Pid,
    seed: u32,
    expected: Vec<Vec<f32>>,
    tally: Arc<Tally>,
) {
    let mut is_done = false;
    while !is_done {
        let Some((peer, netd)) = connect(&addr, supervisor).await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let failure = loop {
            let was_over = !tally.goes_on();
            match plain(&peer, seed, |began| tally.step(began)).await {
                Ok(outputs) => tally.ended(outputs == expected),
                Err(failure) => break Some(failure),
            }
            if was_over {
                is_done = true;
                break None;
            }
        };
        let count = match failure {
            None => continue,
            Some(Failure::Lost(text) | Failure::Unopened(text)) if text.contains("crash") => {
                &tally.suspects
            }
            // In the end every one is opened.
            Some(Failure::Unopened(_)) => &tally.not_opened,
            Some(Failure::Lost(_)) if has_ended(netd, &addr, supervisor).await => &tally.with_netd,
            Some(Failure::Lost(text)) => {
                println!("  lost: {text}");
                &tally.lost
            }
        };
        count.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(PAUSE).await;
    }
}

async fn own_sessions(addr: String, seed: u32, expected: Vec<Vec<f32>>, tally: Arc<Tally>) {
    let swarm = join(&addr, "demo", BLOCKS.end).await;
    let mut was_over = false;
    while !was_over {
        was_over = !tally.goes_on();
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

/// Strikes until the time is over, or as often as the short form does; how often each fault was done.
fn blow(sepal: &Sepal, seed: u64, length: Option<Duration>, tally: &Tally) -> BTreeMap<Fault, u32> {
    let group = MemoryGroup::make();
    if group.is_none() {
        ignored("OOM of a worker", "a memory control group (cgroup v2) that this user may make");
    }
    let mut script = Script::new(seed, group.is_some());
    let (began, mut count, mut done) = (Instant::now(), 0, BTreeMap::new());
    while length.map_or(count < SHORT, |length| began.elapsed() < length) {
        count += 1;
        // All sessions stand still while there is nobody to compute or to answer.
        let wanted = tally.steps.load(Ordering::Relaxed) + script.pause();
        wait_for("the sessions to go on", || {
            (tally.steps.load(Ordering::Relaxed) >= wanted).then_some(())
        });
        let fault = script.fault();
        *done.entry(fault).or_default() += u32::from(strike(sepal, fault, group.as_ref()));
    }
    done
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a soak: .ci/long soak"]
async fn sixteen_sessions_in_a_storm_get_the_bits_of_a_calm() {
    let length = number(SECONDS_VARIABLE).map(Duration::from_secs);
    let seed = number(SEED_VARIABLE).unwrap_or(1);
    let mut tasks = Vec::new();
    let tally = Arc::new(Tally::default());
    let calm = serve(&[]);
    let peer = Peer::connect(&calm.addr(), "demo").await;
    let swarm = join(&calm.addr(), "demo", BLOCKS.end).await;
    let mut expected = Vec::new();
    for seed in 0..PLAIN {
        expected
            .push(plain(&peer, seed, |_| ()).await.unwrap_or_else(|_| panic!("a calm session")));
    }
    for seed in PLAIN..PLAIN + OWN {
        expected.push(own(&swarm, seed, |_| ()).await.expect("a calm session"));
    }
    swarm.leave().await;
    assert_eq!(calm.terminate().code(), Some(0));
    // Here who is slow may be taken for hung: that is part of the storm.
    let sepal = serve(&["--hang_timeout", "2", "--max_restarts", "1000"]);
    let addr = sepal.addr();
    for (seed, expected) in (0..PLAIN + OWN).zip(expected) {
        let (addr, tally) = (addr.clone(), tally.clone());
        tasks.push(match seed < PLAIN {
            true => tokio::spawn(plain_sessions(addr, sepal.pid(), seed, expected, tally)),
            false => tokio::spawn(own_sessions(addr, seed, expected, tally)),
        });
    }
    let began = Instant::now();
    let done = tokio::task::block_in_place(|| blow(&sepal, seed, length, &tally));
    tally.is_over.store(true, Ordering::Relaxed);
    for task in tasks {
        tokio::time::timeout(DEADLINE, task).await.expect("sessions end").expect("no panic");
    }
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let faults: u32 = done.values().sum();
    println!("seed {seed}: {faults} faults in {} s:", began.elapsed().as_secs());
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
    assert!(of(&tally.ended) >= u64::from(PLAIN + OWN), "no session came to its end");
    // An upgrade may be refused while processes are away.
    let was_done = |(fault, count): (&Fault, &u32)| *fault == Fault::Upgrade || *count > 0;
    assert!(done.iter().all(was_done), "{done:?}");
    assert!(!log.contains("put aside") && !log.contains("is not restarted"), "{log}");
    assert_eq!(sepal.terminate().code(), Some(0));
}
