//! Text through real servers equals what transformers computes from the same weights.

use std::process::Command;

use crate::harness::demo::{Golden, demo_model, follow, golden};
use crate::harness::peer::{Peer, ids, noise};
use crate::harness::pipe::one_message_pipe;
use crate::harness::session::join;
use crate::harness::{
    Dht, SEPAL, Sepal, children_of, command_line, generate, serve_args, wait_for,
};
use client::batch::forward;
use client::states::Hidden;
use nix::sys::signal::{Signal, kill};
use swarm::wire::tensor::{WireDtype, dummy_tensor};

const HIDDEN: usize = 192;

#[test]
fn one_server_continues_texts_as_transformers_does() {
    let sepal = Sepal::serve(&demo_model(), "demo", &["--torch_dtype", "float32"]);
    for Golden { prompt, text, .. } in golden("float32") {
        assert_eq!(
            generate(&sepal, &demo_model(), "demo", "float32", &prompt, 200),
            text,
            "{prompt}"
        );
    }
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// In bfloat16 the best two logits are often equal or neighbours, and versions of PyTorch disagree
/// about them; so every token that transformers chose must be the best here, too, or at most two
/// bfloat16 steps below it.
#[tokio::test(flavor = "multi_thread")]
async fn in_bfloat16_every_token_of_transformers_is_best_or_next_to_it() {
    let sepal = Sepal::serve(&demo_model(), "demo", &["--torch_dtype", "bfloat16"]);
    let (mut tokens, mut equal) = (0, 0);
    follow(&sepal, &golden("bfloat16"), usize::MAX, |token, logits| {
        let best = logits.iter().copied().fold(f32::MIN, f32::max);
        let gap = best - logits[token as usize];
        assert!(gap <= best.abs() / 64.0, "token {tokens}: {gap} below {best}");
        tokens += 1;
        equal += usize::from(gap == 0.0);
    })
    .await;
    assert!(equal * 100 >= tokens * 97, "only {equal} of {tokens} tokens are the best ones");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn a_chain_of_two_servers_continues_texts_as_transformers_does() {
    let more = |span| ["--torch_dtype", "float32", "--block_indices", span];
    let first = Sepal::serve(&demo_model(), "demo", &more("0:3"));
    let second = Sepal::join(&first, &demo_model(), "demo", &more("3:8"));
    for Golden { prompt, text, .. } in golden("float32") {
        assert_eq!(
            generate(&second, &demo_model(), "demo", "float32", &prompt, 200),
            text,
            "{prompt}"
        );
    }
    assert_eq!(second.terminate().code(), Some(0));
    assert_eq!(first.terminate().code(), Some(0));
}

/// Batches over the streamed and the unary call, on random routes over servers that share blocks:
/// the bits of one server.
#[tokio::test(flavor = "multi_thread")]
async fn batches_go_many_ways_and_survive_the_death_of_a_server() {
    let more = |span| ["--torch_dtype", "float32", "--block_indices", span];
    let first = Sepal::serve(&demo_model(), "demo", &more("0:8"));
    let second = Sepal::join(&first, &demo_model(), "demo", &more("0:5"));
    let _third = Sepal::join(&first, &demo_model(), "demo", &more("5:8"));
    let peer = Peer::connect(&first.addr(), "demo").await;
    let swarm = join(&first.addr(), "demo", 8).await;
    let batch = |rows: usize, tokens: usize| Hidden {
        dtype: shared::dtype::DType::F32,
        rows,
        tokens,
        bytes: noise(&[rows, tokens, HIDDEN], 5).buffer,
    };
    let values = |bytes: &[u8]| -> Vec<f32> {
        let elements = bytes.as_chunks().0.iter();
        elements.map(|b| f32::from_le_bytes(*b)).collect()
    };
    // Six pieces of two sequences, and one sequence that is streamed.
    let (many, long) = (batch(12, 400), batch(1, 1500));
    let want = peer.forward(0..8, noise(&[1, 1500, HIDDEN], 5)).await.unwrap();
    let got = forward(&swarm, 0..8, &long, None).await.unwrap();
    assert!(values(&got.bytes) == want, "streamed");
    let whole = forward(&swarm, 0..8, &many, None).await.unwrap();
    drop(second);
    for _ in 0..3 {
        let again = forward(&swarm, 0..8, &many, None).await.unwrap();
        assert!(again == whole, "after the death of a server");
    }
    swarm.leave().await;
}

#[test]
fn a_text_goes_on_when_every_server_of_the_chain_dies_one_after_another() {
    let dtype = ["--torch_dtype", "float32"];
    let dht = Dht::start();
    let join = |span| {
        let model = demo_model();
        let args = serve_args(
            &model,
            "demo",
            &[&dtype[..], &["--initial_peers", &dht.addr, "--block_indices", span]].concat(),
        )
        .into_iter()
        .map(str::to_owned)
        .collect::<Vec<_>>();
        let sepal = Sepal::start(&args.iter().map(String::as_str).collect::<Vec<_>>());
        sepal.wait_online();
        sepal
    };
    let halves = ["0:4", "4:8"].map(|span| [join(span), join(span)]);
    let Golden { prompt, text: rest, .. } = golden("float32").swap_remove(0);
    let (mut out, stdout) = one_message_pipe();
    let mut child = Command::new(SEPAL)
        .args([
            "generate",
            "--initial_peers",
            &dht.addr,
            "--dht_prefix",
            "demo",
            "--prompt",
            &prompt,
        ])
        .args(["--max_new_tokens", "200", "--torch_dtype", "float32"])
        .arg(demo_model())
        .stdout(stdout)
        .spawn()
        .unwrap();
    let mut text = vec![0; prompt.len() + 10];
    std::io::Read::read_exact(&mut out, &mut text).unwrap();
    // The text has begun, and is never far ahead of what is read of it. Of the two servers of each half
    // one is in use; the text must survive the loss of either.
    for [one, other] in &halves {
        let victim = if used(one) { one } else { other };
        victim.kill();
        let mut more = [0; 20];
        std::io::Read::read_exact(&mut out, &mut more).unwrap();
        text.extend(more);
    }
    std::io::Read::read_to_end(&mut out, &mut text).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(String::from_utf8(text).unwrap().trim_end_matches('\n'), prompt + &rest);
}

/// Whether a server has a session open.
fn used(sepal: &Sepal) -> bool {
    sepal.workers().iter().any(|worker| worker["jobs_done"].as_u64() > Some(0))
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_rollback_beams_and_empty_steps_agree_with_forward() {
    let sepal = Sepal::serve(&demo_model(), "demo", &["--torch_dtype", "float32"]);
    let peer = Peer::connect(&sepal.addr(), "demo").await;
    let (a, b) = (noise(&[1, 40, HIDDEN], 1), noise(&[1, 40, HIDDEN], 2));
    let part = |t: &swarm::wire::messages::Tensor, from: usize, to: usize| {
        let bytes = t.buffer.slice(from * HIDDEN * 4..to * HIDDEN * 4);
        swarm::wire::tensor::raw_tensor(&[1, to - from, HIDDEN], WireDtype::F32, bytes).unwrap()
    };
    let whole = |t: &swarm::wire::messages::Tensor| peer.forward(0..8, t.clone());
    let (whole_a, whole_b) = (whole(&a).await.unwrap(), whole(&b).await.unwrap());

    // Cuts at odd places, an empty step, and a rollback to the middle of a page: the bits of one
    // forward pass.
    let mut session = peer.session(0..8, 64).await;
    let mut out = session.step(part(&a, 0, 7), None).await.unwrap();
    out.extend(session.step(part(&a, 7, 8), None).await.unwrap());
    assert_eq!(session.step(noise(&[1, 0, HIDDEN], 0), None).await.unwrap(), Vec::<f32>::new());
    session.step(part(&b, 8, 30), None).await.unwrap();
    out.extend(session.step(part(&a, 8, 25), Some(8)).await.unwrap());
    out.extend(session.step(part(&a, 25, 40), None).await.unwrap());
    assert!(out == whole_a, "steps and forward differ");
    session.close().await;

    // Two rows that swap and merge: after [1, 0] the rows are b, a; after [1, 1] both are a.
    let both = |x: swarm::wire::messages::Tensor, y: swarm::wire::messages::Tensor| {
        let tokens = x.size[1] as usize;
        let bytes = [x.buffer, y.buffer].concat().into();
        swarm::wire::tensor::raw_tensor(&[2, tokens, HIDDEN], WireDtype::F32, bytes).unwrap()
    };
    let none = || dummy_tensor(WireDtype::F32);
    let mut beams = peer.session(0..8, 64).await;
    beams.step(both(part(&a, 0, 20), part(&b, 0, 20)), None).await.unwrap();
    let swapped = beams
        .step_with(both(part(&b, 20, 21), part(&a, 20, 21)), None, none(), ids(&[1, 0]))
        .await
        .unwrap();
    let at = |out: &[f32], token: usize| out[token * HIDDEN..(token + 1) * HIDDEN].to_vec();
    assert!(swapped == [at(&whole_b, 20), at(&whole_a, 20)].concat(), "swapped rows");
    let merged = beams
        .step_with(both(part(&a, 21, 22), part(&a, 21, 22)), None, none(), ids(&[1, 1]))
        .await
        .unwrap();
    assert!(merged == [at(&whole_a, 21), at(&whole_a, 21)].concat(), "merged rows");
    beams.close().await;
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn the_demo_prints_a_story_and_what_ran_and_survives_the_death_of_a_worker() {
    let Golden { prompt, text: rest, .. } = golden("bfloat16").swap_remove(0);
    let (mut out, stdout) = one_message_pipe();
    let mut child = Command::new(SEPAL)
        .args(["demo", "--prompt", &prompt, "--max_new_tokens", "200"])
        .stdout(stdout)
        .spawn()
        .unwrap();
    let demo = nix::unistd::Pid::from_raw(child.id() as i32);
    let mut text = Vec::new();
    let mut byte = [0];
    while !String::from_utf8_lossy(&text).contains(&format!("\n{prompt} ")) {
        std::io::Read::read_exact(&mut out, &mut byte).expect("the story begins");
        text.push(byte[0]);
    }
    // The story waits for who reads it.
    let supervisor = children_of(demo)[0];
    let worker = wait_for("a worker of the demo", || {
        children_of(supervisor).into_iter().find(|p| command_line(*p).contains("gpu-worker"))
    });
    kill(worker, Signal::SIGKILL).unwrap();
    std::io::Read::read_to_end(&mut out, &mut text).unwrap();
    assert!(child.wait().unwrap().success());
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains(&(prompt + &rest)), "{text}");
    for word in [
        "gpu-worker 0.0",
        "netd",
        "blocks 0:4",
        "blocks 4:8",
        "tokens/s",
        "network",
        "queue",
        "compute",
        "12D3KooW",
    ] {
        assert!(text.contains(word), "no {word:?} in {text}");
    }
    assert!(
        text.lines().any(|l| l.starts_with("gpu-worker") && l.trim_end().ends_with('1')),
        "one restart: {text}"
    );
}
