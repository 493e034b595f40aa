//! Load on one server over the real protocol: many sessions at once, each a prompt and single-token
//! steps, begun again when it is full, until the time is over. Measures the latency of every step,
//! and checks that every session gets the bits that a session alone gets. Used by the soak test,
//! and as a stand-in for many clients beside any server of the swarm.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use p2p::task;
use p2p::{CallError, Multiaddr, P2p, P2pConfig, P2pError, PeerId, Traversal};
use parking_lot::Mutex;
use prost::Message;
use shared::dtype::DType;
use swarm::names;
use swarm::wire::messages::{ExpertInfo, ExpertUid};
use swarm::wire::rpc_info::{InfoError, RpcInfo};
use swarm::wire::uid;

use crate::session::{ServerSession, SessionError, StepInput};
use crate::states::Hidden;
use swarm::routing::Leg;

const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause before a session that failed is begun again.
const PAUSE: Duration = Duration::from_millis(100);
/// Errors that are kept by their text; all are counted.
const MAX_TEXTS: usize = 20;

/// What is to be done.
#[derive(Clone, Debug)]
pub struct LoadConfig {
    /// Full address of the server, with its PeerID.
    pub server: Multiaddr,
    /// Prefix of the model's module uids.
    pub prefix: String,
    /// The blocks to run.
    pub blocks: Range<u32>,
    /// Sessions at once.
    pub sessions: usize,
    /// Peers that they are divided among, each with a connection of its own.
    pub peers: usize,
    /// For how long.
    pub duration: Duration,
    /// Tokens of the first step of a session.
    pub prompt_tokens: usize,
    /// Single-token steps after it.
    pub steps: usize,
}

/// Why there was no load.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A setting that cannot work.
    #[error("{0}")]
    BadConfig(&'static str),
    /// The network node, or the way to the server.
    #[error(transparent)]
    Network(#[from] P2pError),
    #[error("cannot ask the server for its shapes")]
    Info(#[from] CallError),
    #[error("cannot read the server's shapes")]
    Shapes(#[from] InfoError),
    /// The session alone, with which the others are compared.
    #[error("cannot run one session alone")]
    Alone(#[from] SessionError),
}

/// What happened.
#[derive(Clone, Debug, Default)]
pub struct LoadReport {
    /// Sessions that ran to their end.
    pub sessions: u64,
    /// Single-token steps answered.
    pub steps: u64,
    /// Steps and sessions that failed.
    pub errors: u64,
    /// The texts of the first of them.
    pub texts: Vec<String>,
    /// Outputs that were not the bits of a session alone.
    pub differing: u64,
    /// Time of the load.
    pub elapsed: Duration,
    /// Median latency of a step.
    pub p50: Duration,
    /// 99th percentile.
    pub p99: Duration,
    /// The longest.
    pub longest: Duration,
}

impl LoadReport {
    /// Single-token steps per second over all sessions.
    pub fn steps_per_s(&self) -> f64 {
        self.steps as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        format!(
            "{:.1} steps/s, {} steps in {} sessions, {} errors, {} differing; step p50 {:.2} ms, p99 {:.2} ms, longest {:.2} ms",
            self.steps_per_s(),
            self.steps,
            self.sessions,
            self.errors,
            self.differing,
            ms(self.p50),
            ms(self.p99),
            ms(self.longest)
        )
    }
}

/// Puts the load on the server.
///
/// # Errors
/// [`LoadError`] when it cannot begin; what fails later is in the report.
pub async fn run(config: &LoadConfig) -> Result<LoadReport, LoadError> {
    if config.blocks.is_empty() || config.prompt_tokens == 0 {
        return Err(LoadError::BadConfig(
            "give at least one block and a prompt of at least one token",
        ));
    }
    let mut peers = Vec::new();
    for _ in 0..config.peers.max(1) {
        peers.push(node(&config.server).await?);
    }
    let Some((p2p, server)) = peers.first() else {
        return Err(LoadError::BadConfig("give at least one peer"));
    };
    let script = Script::new(p2p, *server, config).await?;
    let script = Arc::new(script.alone(p2p).await?);
    let tally = Arc::new(Mutex::new(Tally::default()));
    let began = Instant::now();
    let until = began + config.duration;
    let tasks: Vec<_> = (0..config.sessions)
        .map(|number| {
            let (p2p, _) = peers[number % peers.len()].clone();
            task::spawn(keep_going(p2p, script.clone(), tally.clone(), until))
        })
        .collect();
    for task in tasks {
        let _ = task.await;
    }
    let elapsed = began.elapsed();
    for (p2p, _) in &peers {
        p2p.shutdown().await;
    }
    let tally = std::mem::take(&mut *tally.lock());
    Ok(tally.report(elapsed))
}

async fn node(server: &Multiaddr) -> Result<(P2p, PeerId), P2pError> {
    let config = P2pConfig::of_caller(vec![server.clone()], CALL_TIMEOUT);
    let config = P2pConfig { traversal: Traversal::CLIENT, ..config };
    let (p2p, _nothing_is_served) = P2p::start(config).await?;
    let peer = p2p.connect(server.clone()).await?;
    Ok((p2p, peer))
}

/// What every session sends, and what it has to get.
#[derive(Debug)]
struct Script {
    leg: Leg<PeerId>,
    prefix: String,
    inputs: Vec<Hidden>,
    max_length: u32,
    /// Outputs of a session alone.
    expected: Vec<Hidden>,
}

impl Script {
    async fn new(p2p: &P2p, server: PeerId, config: &LoadConfig) -> Result<Script, LoadError> {
        let uid = uid::module_uid(&config.prefix, config.blocks.start);
        let request = ExpertUid { uid }.encode_to_vec().into();
        let answer = p2p.call_unary(server, names::INFO, request, CALL_TIMEOUT).await?;
        let info = ExpertInfo::decode(answer)
            .map_err(|_| CallError::Malformed("the server's figures are no message"))?;
        let schema =
            RpcInfo::decode(&info.serialized_info)?.schema.ok_or(InfoError::Key("schema"))?;
        let dtype = schema.dtype.block_dtype();
        let width = schema.hidden_size as usize;
        let lengths = std::iter::once(config.prompt_tokens).chain(vec![1; config.steps]);
        let inputs =
            lengths.enumerate().map(|(step, tokens)| states(dtype, tokens, width, step)).collect();
        let tokens = config.prompt_tokens + config.steps;
        Ok(Script {
            leg: Leg { peer: server, blocks: config.blocks.clone() },
            prefix: config.prefix.clone(),
            inputs,
            max_length: u32::try_from(tokens).unwrap_or(u32::MAX),
            expected: Vec::new(),
        })
    }

    /// Runs one session alone and keeps what it got.
    async fn alone(mut self, p2p: &P2p) -> Result<Script, SessionError> {
        let mut session = self.open(p2p).await?;
        let mut outputs = Vec::new();
        for input in &self.inputs {
            outputs.push(session.step(&StepInput::plain(input, &step_id())).await?.0);
        }
        session.close().await?;
        self.expected = outputs;
        Ok(self)
    }

    async fn open(&self, p2p: &P2p) -> Result<ServerSession, SessionError> {
        ServerSession::open(p2p, &self.prefix, self.leg.clone(), self.max_length).await
    }

    /// Runs one session until it is full or the time is over.
    async fn session(
        &self,
        p2p: &P2p,
        tally: &Mutex<Tally>,
        until: Instant,
    ) -> Result<(), SessionError> {
        let mut session = self.open(p2p).await?;
        for (at, (input, expected)) in self.inputs.iter().zip(&self.expected).enumerate() {
            let began = Instant::now();
            let (output, _) = session.step(&StepInput::plain(input, &step_id())).await?;
            let took = began.elapsed();
            let mut tally = tally.lock();
            tally.differing += u64::from(output != *expected);
            if at > 0 {
                tally.took.push(took);
            }
            if Instant::now() >= until {
                break;
            }
        }
        session.close().await?;
        tally.lock().sessions += 1;
        Ok(())
    }
}

async fn keep_going(p2p: P2p, script: Arc<Script>, tally: Arc<Mutex<Tally>>, until: Instant) {
    while Instant::now() < until {
        if let Err(error) = script.session(&p2p, &tally, until).await {
            tally.lock().failed(&error);
            tokio::time::sleep(PAUSE).await;
        }
    }
}

#[derive(Debug, Default)]
struct Tally {
    sessions: u64,
    errors: u64,
    differing: u64,
    texts: Vec<String>,
    took: Vec<Duration>,
}

impl Tally {
    fn failed(&mut self, error: &SessionError) {
        self.errors += 1;
        if self.texts.len() < MAX_TEXTS {
            self.texts.push(error.to_string());
        }
    }

    fn report(mut self, elapsed: Duration) -> LoadReport {
        self.took.sort_unstable();
        let at = |share: f64| {
            let rank = (self.took.len() as f64 * share).ceil() as usize;
            let found = self.took.get(rank.saturating_sub(1));
            found.copied().unwrap_or_default()
        };
        LoadReport {
            sessions: self.sessions,
            steps: self.took.len() as u64,
            errors: self.errors,
            differing: self.differing,
            elapsed,
            p50: at(0.5),
            p99: at(0.99),
            longest: at(1.0),
            texts: self.texts,
        }
    }
}

fn step_id() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// Hidden states `[1, tokens, width]` between -1 and 1 that depend on `seed`.
fn states(dtype: DType, tokens: usize, width: usize, seed: usize) -> Hidden {
    let values: Vec<f32> =
        (0..tokens * width).map(|i| (i as f32 * 0.37 + seed as f32 * 1.7).sin()).collect();
    let mut bytes = vec![0; values.len() * dtype.size_bytes()];
    kernels::ops::convert::from_f32(dtype, &values, &mut bytes);
    Hidden { dtype, rows: 1, tokens, bytes: bytes.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_sorted_steps() {
        let tally = Tally {
            took: (1..=200).rev().map(Duration::from_millis).collect(),
            ..Tally::default()
        };
        let report = tally.report(Duration::from_secs(2));
        assert_eq!((report.steps, report.steps_per_s()), (200, 100.0));
        let ms = Duration::from_millis;
        assert_eq!((report.p50, report.p99, report.longest), (ms(100), ms(198), ms(200)));
        assert!(report.line().starts_with("100.0 steps/s, 200 steps"));
    }
}
