//! The whole server on the CUDA backend, its kernels run by the emulator: what clients get is what
//! the processor gives, and a worker that is killed takes nothing with it, though its pages were in
//! the memory of its device.
//!
//! `.ci/long emulator` runs all of it.

use std::ops::Range;
use std::process::Command;
use std::time::Instant;

use crate::harness::demo::{BLOCKS, HIDDEN, demo_model, run_session};
use crate::harness::peer::PROMPT;
use crate::harness::peer::{Peer, Session, noise};
use crate::harness::session::{assert_close, join};
use crate::harness::{self, SEPAL, Sepal, serve_args, wait_for};
use client::batch::{BatchGradients, backward, forward_kept};
use client::states::{Hidden, Prompts};
use nix::sys::signal::{Signal, kill};
use shared::dtype::DType;

fn serve(device: &str) -> Sepal {
    serve_with(device, &[])
}

fn serve_with(device: &str, more: &[&str]) -> Sepal {
    let flags = ["--device", device, "--torch_dtype", "float32"];
    Sepal::serve(&demo_model(), "demo", &[&flags, more].concat())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
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
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
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
    let lost = session.step(next, None).await.expect_err("no pages are left");
    assert!(lost.to_string().contains("open a new session"), "{lost}");
    // What the client does then.
    let again = run_session(&sepal.addr(), 3, |_| ()).await;
    assert_ne!(sepal.worker(), first, "the worker was replaced");
    assert!(again == expected, "results differ after a replay");
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// The device of the one worker, once clients can come.
fn serving_device(sepal: &Sepal) -> Option<String> {
    let status = sepal.status();
    let mut children = status.pointer("/0/children")?.as_array()?.iter();
    let worker = children.find(|child| child["role"] == "gpu-worker")?;
    let is_ready = status.pointer("/0/ready")?.as_bool()?;
    is_ready.then(|| worker["device"].as_str().map(str::to_owned))?
}

/// The first session that is served, and its output: netd hears of a worker a moment after the
/// supervisor has said that it is there.
async fn first_session(peer: &Peer) -> (Session, Vec<f32>) {
    let end = Instant::now() + harness::DEADLINE;
    loop {
        let mut session = peer.session(BLOCKS, (PROMPT + 3) as u32).await;
        match session.step(noise(&[2, PROMPT, HIDDEN], 5), None).await {
            Ok(output) => return (session, output),
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn the_fallback_serves_for_a_device_that_fails_until_it_works_again() {
    let flags = ["--fallback_device", "cpu", "--max_restarts", "0", "--retry_after", "1"];
    let sepal = serve_with("emu", &flags);
    let netd = sepal.netd();
    let expected = run_session(&sepal.addr(), 3, |_| ()).await;
    let peer = Peer::connect(&sepal.addr(), "demo").await;
    let mut session = peer.session(BLOCKS, (PROMPT + 3) as u32).await;
    session.step(noise(&[2, PROMPT, HIDDEN], 5), None).await.expect("prefill");
    kill(sepal.worker(), Signal::SIGABRT).expect("the worker is there");
    sepal.wait_line("cpu serves blocks 0:8 in its place", 1);
    wait_for("the fallback", || serving_device(&sepal).filter(|device| device == "cpu"));
    let lost = session.step(noise(&[2, 1, HIDDEN], 6), None).await.expect_err("other pages");
    assert!(lost.to_string().contains("open a new session"), "{lost}");
    // An open session keeps the fallback: its blocks do not return under it.
    let (mut session, on_processor) = first_session(&peer).await;
    assert_close(&on_processor, &expected[0]);
    sepal.wait_line("emu:0 works again", 1);
    session.step(noise(&[2, 1, HIDDEN], 6), None).await.expect("a step on the fallback");
    assert_eq!(serving_device(&sepal).as_deref(), Some("cpu"));
    session.close().await;
    wait_for("the device", || serving_device(&sepal).filter(|device| device == "emu:0"));
    first_session(&peer).await.0.close().await;
    let again = run_session(&sepal.addr(), 3, |_| ()).await;
    assert!(again == expected, "results differ on the device that came back");
    assert_eq!(sepal.netd(), netd, "the same netd");
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// Gradients of inputs and prompts.
async fn gradients(sepal: &Sepal, blocks: Range<u32>, tokens: usize) -> BatchGradients {
    let swarm = join(&sepal.addr(), "demo", BLOCKS.end).await;
    let (rows, dtype) = (2, DType::F32);
    let states =
        |seed| Hidden { dtype, rows, tokens, bytes: noise(&[rows, tokens, HIDDEN], seed).buffer };
    let deep = Prompts {
        dtype,
        blocks: blocks.len(),
        rows,
        tokens: 3,
        bytes: noise(&[blocks.len() * rows, 3, HIDDEN], 7).buffer,
    };
    let (_, kept) = forward_kept(&swarm, blocks, &states(5), Some(&deep)).await.expect("forward");
    let got = backward(&swarm, &kept, &states(6)).await;
    swarm.leave().await;
    got.expect("gradients")
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn a_worker_that_dies_on_the_way_back_changes_no_bit_of_a_gradient() {
    let serve = |more: &[&str]| {
        let flags = ["--device", "emu", "--torch_dtype", "bfloat16"];
        Sepal::serve(&demo_model(), "demo", &[&flags, more].concat())
    };
    let calm = serve(&[]);
    let expected = gradients(&calm, BLOCKS, PROMPT).await;
    assert!(expected.prompts.is_some());
    assert_eq!(calm.terminate().code(), Some(0));
    // The second job, at its eleventh of sixteen blocks there and back.
    let sepal = serve(&["--inject_fault", "kill@block:10#1"]);
    let first = sepal.worker();
    let got = gradients(&sepal, BLOCKS, PROMPT).await;
    assert_ne!(sepal.worker(), first, "the fault never struck");
    assert!(got == expected, "gradients differ after a death");
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
        "on emu:0, and 64.0 MiB of its memory are free",
        "--num_blocks",
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
}

/// Blocks of the one worker of a server.
fn served(sepal: &Sepal) -> Range<u32> {
    let spans = sepal.spans();
    let (start, end) = spans.first().and_then(|s| s.split_once(':')).expect("a span");
    let number = |text: &str| text.parse().expect("a block");
    number(start)..number(end)
}

/// Without a number of blocks a server takes as many as fit the memory of its device, and these do:
/// its worker rehearses its largest units and computes gradients in a device that has no more.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn the_blocks_that_are_chosen_fit_and_one_more_would_not() {
    const FIT: usize = 5;
    let model = demo_model();
    let flags = ["--device", "emu", "--torch_dtype", "float32"];
    // What so many blocks need, as the refusal of a device without memory says, in tenths of a MiB.
    let needed = |blocks: usize| {
        let count = blocks.to_string();
        let more = ["--num_blocks", &count, "--device_memory", "1MiB"];
        let args = [&["--new_swarm"], &flags[..], &more].concat();
        let mut sepal = Sepal::start(&serve_args(&model, "demo", &args));
        assert_eq!(sepal.wait().code(), Some(2));
        let log = sepal.log();
        let total = log.split("for work memory = ").nth(1);
        let total = total.and_then(|rest| rest.split(" MiB").next());
        let mib: f64 = total.and_then(|t| t.parse().ok()).expect("a sum");
        (mib * 10.0).round() as u64
    };
    let (fit, more) = (needed(FIT), needed(FIT + 1));
    assert!(more > fit + 4, "{more} and {fit} are rounded to tenths");
    let with = |tenths: u64| (tenths * (1 << 20) / 10).to_string();
    let (enough, little) = (with(fit + 1), with(fit - 1));
    let serve = |memory: &str| {
        let more = ["--device_memory", memory];
        Sepal::serve(&model, "demo", &[&flags[..], &more].concat())
    };
    let sepal = serve(&little);
    assert_eq!(served(&sepal).len(), FIT - 1, "with too little for {FIT}");
    assert_eq!(sepal.terminate().code(), Some(0));
    let sepal = serve(&enough);
    let blocks = served(&sepal);
    assert_eq!(blocks.len(), FIT);
    let worker = sepal.worker();
    // More than one unit.
    gradients(&sepal, blocks, 150).await;
    assert_eq!(sepal.worker(), worker, "no memory was missing");
    // One more is refused.
    let count = (FIT + 1).to_string();
    let more = ["--num_blocks", &count, "--device_memory", &enough];
    let args = [&["--new_swarm"], &flags[..], &more].concat();
    let mut refused = Sepal::start(&serve_args(&model, "demo", &args));
    assert_eq!(refused.wait().code(), Some(2));
    assert!(refused.log().contains(&format!("{FIT} would fit")));
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn selftest_checks_every_kernel_and_measures_every_operation() {
    let folder = tempfile::tempdir().expect("a folder");
    let report = folder.path().join("report.json");
    let done = Command::new(SEPAL)
        .args(["selftest", "--device", "emu", "--report"])
        .arg(&report)
        .output()
        .expect("the executable");
    let table = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{table}");
    assert!(!table.contains("WRONG"), "{table}");
    for row in [
        "matrix peak",
        "products of many rows and attention of many tokens by warpgroups",
        "by warps (mma.sync)",
        "linear bfloat16 nf4 128x256 rows 1 ",
        "attention bfloat16 2/1x128 39+1 x 3 ",
        "layernorm bfloat16 3x256 ",
        "silu_mul_grad 512 ",
        "rope heads 2 bfloat16 2/1x128 0+3 ",
        "kv_append bfloat16 2/1x128 0+1 ",
        "join_qkv 1x2x128 tokens 3 ",
        "adapt_grad bfloat16 256x256 bfloat16 rank 16 rows 1 ",
        "mixture bfloat16 nf4 2 of 8 128x256 tokens 3 ",
        "mixture_grad bfloat16 int8 2 of 8 128x256 tokens 3 ",
        "linear_grad bfloat16 int8 512x256 rows 17 ",
        "attention_grad bfloat16 2/1x128 0+17 ",
        "quantize nf4 of bfloat16 512x256 ",
        "block nf4 decode 40 x 3",
        "block int8 prefill 20",
        "block none decode 40 x 1",
        "2 such blocks, one session",
    ] {
        assert!(table.contains(row), "{row}: {table}");
    }
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&report).expect("a report")).expect("JSON");
    assert_eq!((&report["is_complete"], &report["failure"]), (&true.into(), &().into()));
    let checks = report["checks"].as_array().expect("checks");
    assert!(checks.iter().all(|check| check["failure"].is_null() && check["cases"] != 0));
    assert_eq!(checks.len(), table.matches(" cases  right").count());
    let measured = report["measured"].as_array().expect("rows");
    assert!(measured.iter().any(|row| row["name"] == "block nf4 decode 40 x 3"));
    assert!(measured.iter().all(|row| row["us"].as_f64() > Some(0.0)));
    for figure in
        ["copy_gb_s", "launch_us", "replayed_launch_us", "host_to_device_gb_s", "mirror_gb_s"]
    {
        assert!(report[figure].as_f64() > Some(0.0), "{figure}: {report}");
    }
    let nowhere = folder.path().join("missing/report.json");
    let refused = Command::new(SEPAL)
        .args(["selftest", "--device", "emu", "--report"])
        .arg(&nowhere)
        .output()
        .expect("the executable");
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("missing/report.json"));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn the_device_gives_what_the_processor_gives() {
    let (device, processor) = (serve("emu"), serve("cpu"));
    let got = run_session(&device.addr(), 4, |_| ()).await;
    let expected = run_session(&processor.addr(), 4, |_| ()).await;
    for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
        let size = expected.iter().fold(1.0f32, |m, v| m.max(v.abs()));
        let far = got.iter().zip(expected).find(|(g, e)| (*g - *e).abs() > 1e-3 * size);
        assert!(far.is_none(), "step {step}: {far:?} of {size}");
        assert_eq!(got.len(), expected.len());
    }
}
