//! Ranks on emulated devices that share every block, with the real kernels: they compute what
//! transformers does, and the death of any of them, inside an exchange or elsewhere, costs no session
//! a bit.
//!
//! `.ci/long emulator` runs all of it.

use std::time::Duration;

use crate::harness::golden::{Golden, HIDDEN, close, run_session};
use crate::harness::peer::PROMPT;
use crate::harness::peer::{Peer, noise};
use crate::harness::session::join;
use crate::harness::{Sepal, alive, rank, wait_for};
use client::batch::{backward, forward_kept};
use nix::sys::signal::{Signal, kill};

const TWO: [&str; 3] = ["--tensor_parallel_devices", "emu:0", "emu:1"];

fn serve(model: &str, devices: &[&str], more: &[&str]) -> Sepal {
    let all = [&["--torch_dtype", "float32"], devices, more].concat();
    Sepal::serve(&Golden::of(model).folder, "golden", &all)
}

/// Blocks of 3 heads and of 2 key/value heads, over 2 ranks: forward, gradients and deep prompts, and a
/// session that outlives a rank. Of all scenarios on the emulator the one that always runs.
#[tokio::test(flavor = "multi_thread")]
async fn two_emulated_ranks_compute_what_transformers_does() {
    for model in ["llama", "bloom"] {
        let golden = Golden::of(model);
        let sepal = serve(model, &TWO, &[]);
        let joined = sepal.wait_line("exchanging sums with the other ranks", 2);
        assert!(joined.contains("path=device memory"), "{joined}");
        let swarm = join(&sepal.addr(), "golden", 2).await;
        let deep = golden.prompts("prompts");
        let (input, gradient) = (golden.states("input"), golden.states("output_gradient"));
        let (output, _) = forward_kept(&swarm, 0..2, &input, None).await.unwrap();
        let (_, all) = golden.tensor("forward");
        close(model, &output.bytes, &all[all.len() / 2..]);
        let (output, kept) = forward_kept(&swarm, 0..2, &input, Some(&deep)).await.unwrap();
        close(model, &output.bytes, &golden.states("prompted").bytes);
        let got = backward(&swarm, &kept, &gradient).await.unwrap();
        close(model, &got.inputs.bytes, &golden.states("prompted_input_gradient").bytes);
        close(model, &got.prompts.unwrap().bytes, &golden.prompts("prompt_gradient").bytes);
        swarm.leave().await;
        let calm = run_session(&sepal.addr(), 3, |_| ()).await;
        let first = rank(&sepal, 1);
        let got = run_session(&sepal.addr(), 3, |step| {
            if step == 1 {
                kill(rank(&sepal, 1), Signal::SIGKILL).expect("a rank");
            }
        })
        .await;
        assert_ne!(rank(&sepal, 1), first, "{model}: the rank was replaced");
        assert!(got == calm, "{model}: results differ after a kill");
        assert_eq!(sepal.terminate().code(), Some(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn groups_of_a_size_serve_a_part_of_the_blocks_each() {
    let devices = ["--device", "emu:0,emu:1,emu:2,emu:3", "--tensor_parallel_size", "2"];
    let (two, one) = (serve("llama", &devices, &[]), serve("llama", &TWO, &[]));
    let apart = run_session(&two.addr(), 3, |_| ()).await;
    let whole = run_session(&one.addr(), 3, |_| ()).await;
    assert!(apart == whole, "the bits depend on the cut of a block alone");
    assert_eq!(two.spans(), ["0:1", "0:1", "1:2", "1:2"]);
    assert_eq!(two.terminate().code(), Some(0));
    assert_eq!(one.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn a_rank_that_dies_at_any_point_of_a_job_changes_nothing() {
    let calm = serve("llama", &TWO, &[]);
    let expected = run_session(&calm.addr(), 4, |_| ()).await;
    assert_eq!(calm.terminate().code(), Some(0));
    for fault in [
        "kill@taken#2r1",
        "abort@copies#3r0",
        "kill@block:0#2r1",
        "abort@block:1#1r1",
        "kill@output#2r0",
        "kill@block:0#2",
    ] {
        let sepal = serve("llama", &TWO, &["--inject_fault", fault]);
        let (netd, ranks) = (sepal.netd(), [rank(&sepal, 0), rank(&sepal, 1)]);
        let got = run_session(&sepal.addr(), 4, |_| ()).await;
        assert!(got == expected, "{fault}: results differ from an undisturbed run");
        assert_ne!([rank(&sepal, 0), rank(&sepal, 1)], ranks, "{fault}: it never struck");
        assert_eq!(sepal.netd(), netd, "{fault}");
        assert_eq!(sepal.terminate().code(), Some(0), "{fault}");
    }
}

/// One rank is stopped, so that the other waits for it inside an exchange or for its plan; there
/// the other dies, both die, or neither does and the stopped one is found out.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn a_rank_that_dies_or_stops_inside_an_exchange_changes_nothing() {
    let calm = serve("llama", &TWO, &[]);
    let expected = run_session(&calm.addr(), 3, |_| ()).await;
    assert_eq!(calm.terminate().code(), Some(0));
    for stopped in [0, 1] {
        for harm in [Some(Signal::SIGKILL), Some(Signal::SIGABRT), None] {
            // Found out late enough that a loaded machine is not taken for a rank that hangs.
            let limit = if harm.is_some() { "600" } else { "10" };
            let sepal = serve("llama", &TWO, &["--hang_timeout", limit]);
            let addr = sepal.addr();
            let victims = [rank(&sepal, stopped), rank(&sepal, 1 - stopped)];
            let running = tokio::spawn(async move {
                run_session(&addr, 3, |step| {
                    if step == 1 {
                        kill(victims[0], Signal::SIGSTOP).expect("a rank");
                        // In the step that comes now the other waits.
                        if let Some(signal) = harm {
                            std::thread::spawn(move || {
                                std::thread::sleep(Duration::from_millis(300));
                                kill(victims[1], signal).expect("the other rank");
                            });
                        }
                    }
                })
                .await
            });
            let got = running.await.expect("a session");
            assert!(got == expected, "{stopped}, {harm:?}: results differ");
            for victim in victims {
                wait_for("both ranks to be replaced", || (!alive(victim)).then_some(()));
            }
            let log = sepal.log();
            let hung = log.lines().filter(|line| line.contains("hangs: no progress"));
            let hung: Vec<&str> = hung.collect();
            match harm {
                Some(_) => assert!(hung.is_empty(), "{log}"),
                None => {
                    let named = format!("gpu-worker 0.{stopped}");
                    assert!(hung.iter().any(|line| line.contains(&named)), "{log}");
                }
            }
            assert_eq!(sepal.terminate().code(), Some(0));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn without_a_mirror_the_death_of_a_rank_ends_the_sessions() {
    let sepal = serve("llama", &TWO, &["--kv_mirror", "off"]);
    let expected = run_session(&sepal.addr(), 2, |_| ()).await;
    let peer = Peer::connect(&sepal.addr(), "golden").await;
    let mut session = peer.session(0..2, (PROMPT + 2) as u32).await;
    session.step(noise(&[2, PROMPT, HIDDEN], 5), None).await.expect("prefill");
    kill(rank(&sepal, 1), Signal::SIGKILL).expect("a rank");
    let next = noise(&[2, 1, HIDDEN], 6);
    let lost = session.step(next, None).await.expect_err("no pages are left");
    assert!(lost.to_string().contains("open a new session"), "{lost}");
    let again = run_session(&sepal.addr(), 2, |_| ()).await;
    assert!(again == expected, "results differ after a replay");
    assert_eq!(sepal.terminate().code(), Some(0));
}
