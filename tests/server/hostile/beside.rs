//! A genuine client that goes on beside an attack, and what the processes of the server used.

use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::unistd::Pid;
use swarm::wire::tensor::{WireDtype, dummy_tensor};

use crate::harness::Sepal;
use crate::harness::demo::{BLOCKS, HIDDEN};
use crate::harness::peer::{Peer, fed_back, noise};
use crate::harness::rights::ignored;

const PROMPT: usize = 5;
const STEPS: usize = 12;
/// Pause between two steps of the genuine client.
const PAUSE: Duration = Duration::from_millis(10);

/// Sessions beside what the attack has built up.
const SESSIONS_AFTER: u64 = 3;

/// One session; `each` hears how long each step took.
async fn session(peer: &Peer, mut each: impl FnMut(Duration)) -> Result<Vec<Vec<f32>>, String> {
    let text = |error: p2p::CallError| error.to_string();
    let mut began = Instant::now();
    let mut session = peer.try_session(BLOCKS, (PROMPT + STEPS) as u32).await.map_err(text)?;
    let mut outputs = vec![session.step(noise(&[2, PROMPT, HIDDEN], 7), None).await.map_err(text)?];
    each(began.elapsed());
    for step in 0..STEPS {
        tokio::time::sleep(PAUSE).await;
        began = Instant::now();
        let (hidden, order) = fed_back(outputs.last().expect("an output"), HIDDEN, step);
        let none = dummy_tensor(WireDtype::F32);
        outputs.push(session.step_with(hidden, None, none, order).await.map_err(text)?);
        each(began.elapsed());
    }
    session.close().await;
    Ok(outputs)
}

/// A figure of /proc/PID/status, in MiB.
fn mib(pid: Pid, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or_else(|| panic!("no {name} in {text}")) / 1024
}

/// Memory of one process.
struct Memory {
    name: &'static str,
    pid: Pid,
    before: u64,
}

impl Memory {
    fn of(name: &'static str, pid: Pid) -> Memory {
        // The peak counts from now on, or from the highest one so far.
        let is_cleared = std::fs::write(PathBuf::from(format!("/proc/{pid}/clear_refs")), "5");
        if is_cleared.is_err() {
            ignored("a peak of memory below that of the start", "the right to clear_refs");
        }
        let figure = if is_cleared.is_ok() { "VmRSS" } else { "VmHWM" };
        Memory { name, pid, before: mib(pid, figure) }
    }
}

/// What an attack did to the server.
pub struct Harm {
    pub attack: &'static str,
    /// Growth of netd, in MiB: its peak against its size before.
    pub netd_mib: u64,
    /// Memory of each process before and at its peak, in MiB.
    memory: Vec<(&'static str, u64, u64)>,
    /// Steps of the genuine client meanwhile.
    pub steps: u64,
    longest: Duration,
}

impl fmt::Display for Harm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.attack)?;
        for (name, before, peak) in &self.memory {
            write!(f, "{name} {before} -> {peak} MiB, ")?;
        }
        let longest = self.longest.as_millis();
        write!(f, "{} genuine steps, the longest took {longest} ms", self.steps)
    }
}

/// Runs `attack` beside a genuine client, whose sessions must all be exact, and prints the harm. What the
/// attack holds in its result stands for some sessions more.
pub async fn beside<T>(
    sepal: &Sepal,
    attack: &'static str,
    run: impl Future<Output = T>,
) -> (Harm, T) {
    let genuine = Peer::connect(&sepal.addr(), "demo").await;
    let calm = session(&genuine, |_| ()).await.expect("a calm session");
    let processes =
        [("supervisor", sepal.pid()), ("netd", sepal.netd()), ("worker", sepal.worker())];
    let memory: Vec<_> = processes.map(|(name, pid)| Memory::of(name, pid)).into_iter().collect();
    let (over, sessions, steps, longest) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicU64::new(0)),
    );
    let goes_on = {
        let (over, sessions) = (over.clone(), sessions.clone());
        let (steps, longest) = (steps.clone(), longest.clone());
        tokio::spawn(async move {
            while !over.load(Ordering::SeqCst) {
                let outputs = session(&genuine, |took| {
                    steps.fetch_add(1, Ordering::SeqCst);
                    longest.fetch_max(took.as_micros() as u64, Ordering::SeqCst);
                });
                assert_eq!(outputs.await.expect("the genuine session fails"), calm);
                sessions.fetch_add(1, Ordering::SeqCst);
            }
        })
    };
    let result = run.await;
    let ended = sessions.load(Ordering::SeqCst);
    while sessions.load(Ordering::SeqCst) < ended + SESSIONS_AFTER && !goes_on.is_finished() {
        tokio::time::sleep(PAUSE).await;
    }
    over.store(true, Ordering::SeqCst);
    goes_on.await.unwrap_or_else(|error| panic!("{attack}: {error}"));
    let memory: Vec<_> =
        memory.iter().map(|of| (of.name, of.before, mib(of.pid, "VmHWM"))).collect();
    let netd = memory.iter().find(|(name, ..)| *name == "netd");
    let harm = Harm {
        attack,
        netd_mib: netd.map(|(_, before, peak)| peak.saturating_sub(*before)).expect("netd"),
        memory,
        steps: steps.load(Ordering::SeqCst),
        longest: Duration::from_micros(longest.load(Ordering::SeqCst)),
    };
    println!("{harm}");
    (harm, result)
}
