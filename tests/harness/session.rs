//! Sessions with the demo model whose every bit counts, on single workers and on groups alike.

use nix::unistd::Pid;

use super::demo::{demo_model, run_session_with};
use super::peer::Peer;
use super::{Sepal, wait_for};

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
    wait_for("a ready rank", || {
        let status = sepal.status();
        let is_rank = |child: &&serde_json::Value| {
            let of = child["world_size"].as_u64().unwrap_or(1);
            child["worker"] == worker && of == size && child["state"] == "ready"
        };
        let children = status.pointer("/0/children")?.as_array()?;
        let pid = children.iter().find(is_rank)?["pid"].as_i64()?;
        Some(Pid::from_raw(i32::try_from(pid).ok()?))
    })
}
