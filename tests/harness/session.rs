//! Sessions with the demo model whose every bit counts, on single workers and on groups alike.

use client::swarm::{Swarm, SwarmConfig};
use nix::unistd::Pid;

use super::demo::{demo_model, run_session_with};
use super::peer::Peer;
use super::{DEADLINE, Sepal};

/// Between sums in another order, of values up to 1.
const ROUNDING: f32 = 2e-4;

/// A single worker on the processor, and a group of two: what both can, one test shows.
pub const SHAPES: [&[&str]; 2] =
    [&["--device", "cpu"], &["--tensor_parallel_devices", "cpu", "cpu"]];

/// A server of the demo model in float32, online.
pub fn serve(more: &[&str]) -> Sepal {
    Sepal::serve(&demo_model(), "demo", &[&["--torch_dtype", "float32"], more].concat())
}

/// [A session](run_session_with) that nothing happens to.
pub async fn run_session(peer: &Peer, seed: u32, steps: usize) -> Vec<Vec<f32>> {
    run_session_with(peer, seed, steps, |_| ()).await
}

/// Checks that two results are the same but for the order of sums.
pub fn assert_close(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    let most = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
    let apart = got.iter().zip(expected).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(apart <= ROUNDING * most, "{apart} apart, of values up to {most}");
}

/// The process of a worker (`GROUP.RANK`) of a group of `size`, once it is ready.
pub fn rank(sepal: &Sepal, worker: &str, size: u64) -> Pid {
    sepal.ready_worker(|child| {
        child["worker"] == worker && child["world_size"].as_u64().unwrap_or(1) == size
    })
}

/// A client in the swarm of the server at `addr`, of a model of so many blocks.
pub async fn join(addr: &str, prefix: &str, num_blocks: u32) -> Swarm {
    let joined = Swarm::join(SwarmConfig {
        initial_peers: vec![addr.parse().expect("multiaddr")],
        prefix: prefix.to_owned(),
        num_blocks,
        startup_timeout: DEADLINE,
    });
    joined.await.expect("the swarm")
}
