//! The whole server on the CUDA backend, its kernels run by the emulator: what clients get is what the processor gives, and a worker
//! that is killed takes nothing with it, though its pages were in the memory of its device.
//!
//!     cargo test --features emu --test emulated
#![cfg(feature = "emu")]

mod harness;

use std::process::Command;

use harness::demo::demo_model;
use harness::peer::{Peer, fed_back, noise};
use harness::{SEPAL, Sepal, serve_args};
use netd::wire::tensor::{WireDtype, dummy_tensor};
use nix::sys::signal::{Signal, kill};

const HIDDEN: usize = 192;
const BLOCKS: std::ops::Range<u32> = 0..8;
const PROMPT: usize = 19;

fn serve(device: &str) -> Sepal {
    serve_with(device, &[])
}

fn serve_with(device: &str, more: &[&str]) -> Sepal {
    let flags = ["--device", device, "--torch_dtype", "float32"];
    Sepal::serve(&demo_model(), "demo", &[&flags, more].concat())
}

/// A prompt of two rows, then steps that feed the outputs back and swap or share rows now and then, so that one wrong bit changes
/// everything after it. Before each step, `between` may do harm.
async fn run_session(addr: &str, steps: usize, mut between: impl FnMut(usize)) -> Vec<Vec<f32>> {
    let peer = Peer::connect(addr, "demo").await;
    let mut session = peer.session(BLOCKS, (PROMPT + steps) as u32).await;
    let prompt = noise(&[2, PROMPT, HIDDEN], 5);
    let mut outputs = vec![session.step(prompt, None).await.expect("prefill")];
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

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_on_a_device_is_killed_and_nothing_changes() {
    let sepal = serve("emu");
    let first = sepal.worker();
    let expected = run_session(&sepal.addr(), 6, |_| ()).await;
    assert_eq!(sepal.worker(), first, "an undisturbed run");
    let got = run_session(&sepal.addr(), 6, |step| {
        if step % 2 == 1 {
            kill(sepal.worker(), Signal::SIGKILL).expect("the worker is there");
        }
    })
    .await;
    assert_ne!(sepal.worker(), first, "the worker was replaced");
    assert!(got == expected, "results differ after a kill");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_mirror_a_death_ends_the_sessions_and_the_same_tokens_give_the_same_again() {
    let sepal = serve_with("emu", &["--kv_mirror", "off"]);
    let first = sepal.worker();
    let expected = run_session(&sepal.addr(), 3, |_| ()).await;
    let peer = Peer::connect(&sepal.addr(), "demo").await;
    let mut session = peer.session(BLOCKS, (PROMPT + 3) as u32).await;
    let prompt = noise(&[2, PROMPT, HIDDEN], 5);
    session.step(prompt, None).await.expect("prefill");
    kill(first, Signal::SIGKILL).expect("the worker is there");
    let next = noise(&[2, 1, HIDDEN], 6);
    let lost = session
        .step(next, None)
        .await
        .expect_err("no pages are left");
    assert!(lost.to_string().contains("open a new session"), "{lost}");
    // What the client does then.
    let again = run_session(&sepal.addr(), 3, |_| ()).await;
    assert_ne!(sepal.worker(), first, "the worker was replaced");
    assert!(again == expected, "results differ after a replay");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn blocks_are_as_many_as_the_memory_of_the_device_holds() {
    let model = demo_model();
    let flags = ["--new_swarm", "--device", "emu", "--torch_dtype", "float32"];
    let with = |more: &[&str]| {
        let args = [&flags[..], more].concat();
        let mut sepal = Sepal::start(&serve_args(&model, "demo", &args));
        let code = sepal.wait().code().expect("an exit code");
        (code, sepal.log())
    };
    let (code, log) = with(&["--num_blocks", "8", "--device_memory", "64MiB"]);
    assert_eq!(code, 2, "{log}");
    for part in [
        "8 blocks of ",
        "of weights + ",
        "for work memory",
        "on emu, and 64.0 MiB of its memory are free",
        "--num_blocks",
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
}

#[test]
fn selftest_checks_every_kernel_and_measures_every_operation() {
    let done = Command::new(SEPAL)
        .args(["selftest", "--device", "emu"])
        .output()
        .expect("the executable");
    let table = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{table}");
    assert!(!table.contains("WRONG"), "{table}");
    for row in [
        "matrix peak",
        "products of a block nf4 x 1",
        "attention decode 40 x 3",
        "layernorm 256 x 3",
        "silu_mul gradient 512 x 1",
        "rope 2 heads x 3",
        "append 1 heads x 1",
        "join of fused heads x 3",
        "adapter gradient 256 x 1",
        "router gradient x 3",
        "gradient of a share 512 x 1",
        "linear gradient int8 256 <- 512 x 17",
        "attention gradient 17",
        "quantize nf4 512 x 256",
        "block nf4 decode 40 x 3",
        "block int8 prefill 20",
        "block none decode 40 x 1",
        "2 such blocks, one session",
    ] {
        assert!(table.contains(row), "{row}: {table}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_device_gives_what_the_processor_gives() {
    let (device, processor) = (serve("emu"), serve("cpu"));
    let got = run_session(&device.addr(), 4, |_| ()).await;
    let expected = run_session(&processor.addr(), 4, |_| ()).await;
    for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
        let size = expected.iter().fold(1.0f32, |m, v| m.max(v.abs()));
        let far = got
            .iter()
            .zip(expected)
            .find(|(g, e)| (*g - *e).abs() > 1e-3 * size);
        assert!(far.is_none(), "step {step}: {far:?} of {size}");
        assert_eq!(got.len(), expected.len());
    }
}
