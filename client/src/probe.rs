//! `sepal probe`: one token through a server, as a client would send it. The supervisor takes such a
//! step before it says that the server is ready.

use std::time::Duration;

use clap::Args;
use p2p::{Multiaddr, P2p, P2pConfig, P2pError, PeerId, Protocol};
use shared::block::Span;
use shared::bootstrap::die_with_parent;
use shared::dtype::DType;
use shared::error_chain::with_causes;
use shared::exit::ExitReason;

use crate::session::{ServerSession, SessionError, StepInput};
use crate::states::Hidden;
use swarm::routing::Leg;

/// Time to reach the server.
const REACH_TIMEOUT: Duration = Duration::from_secs(10);

/// Settings of `sepal probe`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
#[command(rename_all = "snake_case")]
pub struct ProbeConfig {
    /// Addresses of the server
    // All of them end in its PeerID.
    #[arg(long, num_args = 1.., required = true)]
    pub peers: Vec<String>,
    /// Prefix under which it announces the model
    #[arg(long)]
    pub dht_prefix: String,
    /// Its blocks
    #[arg(long)]
    pub blocks: Span,
    /// Width of the hidden states
    #[arg(long)]
    pub hidden_size: u32,
    /// The process that waits for the outcome
    #[arg(long)]
    pub parent: u32,
}

/// Why the step failed.
#[derive(Debug, thiserror::Error)]
enum ProbeError {
    #[error("invalid --peers {0:?}: expected a multiaddr that ends in /p2p/PEER_ID")]
    BadAddress(String),
    #[error("the server cannot be reached")]
    Unreachable(#[from] P2pError),
    #[error("a step through blocks {start}:{end} failed")]
    Step { start: u32, end: u32, source: SessionError },
    #[error("a step through blocks {start}:{end} gave values that are not finite")]
    NotFinite { start: u32, end: u32 },
    #[error("no runtime for the network")]
    Runtime(#[from] std::io::Error),
}

/// Sends zeros through all blocks of the server and reads the answer; ends with its parent.
pub fn run_command(config: &ProbeConfig) -> ExitReason {
    if let Err(error) = die_with_parent(config.parent) {
        eprintln!("{error}");
        return error.exit_reason();
    }
    match probe(config) {
        Ok(()) => ExitReason::Clean,
        Err(error) => {
            eprintln!("{}", with_causes(&error));
            ExitReason::Failed
        }
    }
}

fn probe(config: &ProbeConfig) -> Result<(), ProbeError> {
    let addresses: Vec<Multiaddr> =
        config.peers.iter().map(|text| address(text)).collect::<Result<_, _>>()?;
    let named = || ProbeError::BadAddress(config.peers.join(" "));
    let server = addresses.iter().find_map(peer).ok_or_else(named)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let node = P2pConfig::of_caller(addresses, REACH_TIMEOUT);
        let (p2p, _nothing_is_served) = P2p::start(node).await?;
        let stepped = step(&p2p, server, config).await;
        p2p.shutdown().await;
        stepped
    })
}

async fn step(p2p: &P2p, peer: PeerId, config: &ProbeConfig) -> Result<(), ProbeError> {
    let (start, end) = (config.blocks.start().0, config.blocks.end().0);
    let failed = |source| ProbeError::Step { start, end, source };
    let leg = Leg { peer, blocks: start..end };
    let mut session = ServerSession::open(p2p, &config.dht_prefix, leg, 1).await.map_err(failed)?;
    let width = config.hidden_size as usize;
    let bytes = vec![0; width * DType::F32.size_bytes()].into();
    let hidden = Hidden { dtype: DType::F32, rows: 1, tokens: 1, bytes };
    let (output, _) = session.step(&StepInput::plain(&hidden, "probe")).await.map_err(failed)?;
    session.close().await.map_err(failed)?;
    match output.last_f32().iter().all(|value| value.is_finite()) {
        true => Ok(()),
        false => Err(ProbeError::NotFinite { start, end }),
    }
}

fn address(text: &str) -> Result<Multiaddr, ProbeError> {
    text.parse().map_err(|_| ProbeError::BadAddress(text.to_owned()))
}

fn peer(address: &Multiaddr) -> Option<PeerId> {
    match address.iter().last() {
        Some(Protocol::P2p(peer)) => Some(peer),
        _ => None,
    }
}
