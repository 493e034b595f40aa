//! Sessions with the demo model whose every bit counts, on single workers and on groups alike.

use hivemind::wire::tensor::{WireDtype, dummy_tensor};
use nix::unistd::Pid;

use super::demo::demo_model;
pub use super::demo::{BLOCKS, HIDDEN, PROMPT};
use super::peer::{Peer, fed_back, noise};
use super::{Sepal, wait_for};

/// Between sums in another order, of values up to 1.
const ROUNDING: f32 = 2e-4;

/// A server of the demo model in float32, online.
pub fn serve(more: &[&str]) -> Sepal {
    Sepal::serve(&demo_model(), "demo", &[&["--torch_dtype", "float32"], more].concat())
}

/// [`run_session_with`] without harm.
pub async fn run_session(peer: &Peer, seed: u32, steps: usize) -> Vec<Vec<f32>> {
    run_session_with(peer, seed, steps, |_| ()).await
}

/// A session that feeds its outputs back, so that one wrong bit anywhere changes everything after
/// it: a prompt of 21 tokens, then decode steps of two rows, every third of which swaps or shares
/// rows as beam search does. Before each step, `between` may do harm.
pub async fn run_session_with(
    peer: &Peer,
    seed: u32,
    steps: usize,
    mut between: impl FnMut(usize),
) -> Vec<Vec<f32>> {
    let mut session = peer.session(BLOCKS, (PROMPT + steps) as u32).await;
    let mut outputs =
        vec![session.step(noise(&[2, PROMPT, HIDDEN], seed), None).await.expect("prefill")];
    for step in 0..steps {
        between(step);
        let (hidden, order) = fed_back(outputs.last().unwrap(), HIDDEN, step);
        let none = dummy_tensor(WireDtype::F32);
        let output = session.step_with(hidden, None, none, order).await;
        outputs.push(output.expect("a decode step"));
    }
    session.close().await;
    outputs
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
