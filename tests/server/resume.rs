//! Sessions of our own client over the death of netd: the text goes on, and no token is sent again.

use std::time::{Duration, Instant};

use crate::harness::demo::{Golden, demo_model, golden};
use crate::harness::rights::may_look_into_children;
use crate::harness::session::join;
use crate::harness::{Sepal, wait_for};
use client::chain::Chain;
use client::local_layers::LocalModel;
use client::states::Hidden;
use nix::sys::signal::{Signal, kill};

/// What a text saw.
struct Seen {
    tokens: Vec<u32>,
    longest: Duration,
    sent_again: usize,
    resumed: u32,
}

fn model() -> LocalModel {
    LocalModel::load(&demo_model(), Some(shared::dtype::DType::F32), 1).expect("the demo model")
}

fn states(model: &mut LocalModel, tokens: &[u32]) -> Hidden {
    let bytes = model.embed(tokens).expect("known tokens").into();
    Hidden { dtype: model.dtype(), rows: 1, tokens: tokens.len(), bytes }
}

/// Generates greedily with our client; before each step `between` may do harm.
async fn generate(sepal: &Sepal, golden: &Golden, mut between: impl FnMut(usize)) -> Seen {
    let mut model = model();
    let swarm = join(&sepal.addr(), "demo", model.num_blocks()).await;
    let length = golden.prompt_ids.len() + golden.ids.len();
    let mut chain = Chain::open(&swarm, length as u32).await.expect("a chain");
    let (mut tokens, mut longest) = (Vec::new(), Duration::ZERO);
    let mut input = golden.prompt_ids.clone();
    for step in 0..golden.ids.len() {
        between(step);
        let hidden = states(&mut model, &input);
        let began = Instant::now();
        let (output, _) = chain.step(hidden).await.expect("a step");
        longest = longest.max(began.elapsed());
        let logits = model.logits(&output.last_f32()).expect("logits");
        let best = (0u32..).zip(logits).max_by(|(_, a), (_, b)| a.total_cmp(b));
        let token = best.expect("a token").0;
        tokens.push(token);
        input = vec![token];
    }
    let (sent_again, resumed) = (chain.sent_again(), chain.resumed());
    chain.close().await;
    swarm.leave().await;
    Seen { tokens, longest, sent_again, resumed }
}

/// Longer than any netd takes to start.
const LONG_GRACE: [&str; 2] = ["--session_grace", "600"];

fn serve(more: &[&str]) -> Sepal {
    Sepal::serve(&demo_model(), "demo", &[&["--torch_dtype", "float32"], more].concat())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_goes_on_over_two_deaths_of_netd_and_nothing_is_sent_again() {
    let sepal = serve(&LONG_GRACE);
    let worker = sepal.worker();
    let golden = golden("float32").remove(0);
    let seen = generate(&sepal, &golden, |step| {
        if step == 3 || step == 8 {
            kill(sepal.netd(), Signal::SIGKILL).expect("netd is there");
        }
    })
    .await;
    println!("longest step over the deaths of netd: {:?}", seen.longest);
    assert_eq!(seen.tokens, golden.ids);
    assert_eq!((seen.sent_again, seen.resumed), (0, 2), "{}", sepal.log());
    assert_eq!(sepal.worker(), worker);
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_goes_on_over_upgrades_and_nothing_is_sent_again() {
    let sepal = serve(&LONG_GRACE);
    let golden = golden("float32").remove(0);
    let mut builds = Vec::new();
    let seen = generate(&sepal, &golden, |step| {
        if step == 3 || step == 8 {
            builds.push(sepal.upgrade_to_copy(&format!("sepal-{step}"), &["--patience", "0"]));
        }
    })
    .await;
    if may_look_into_children("which build netd is of") {
        let running = std::fs::read_link(format!("/proc/{}/exe", sepal.netd())).expect("netd");
        assert_eq!(Some(&running), builds.last());
    }
    println!("longest step after an upgrade: {:?}", seen.longest);
    assert_eq!(seen.tokens, golden.ids);
    assert_eq!((seen.sent_again, seen.resumed), (0, 2), "{}", sepal.log());
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_grace_the_client_sends_its_tokens_again() {
    let sepal = serve(&["--session_grace", "0"]);
    let golden = golden("float32").remove(0);
    let seen = generate(&sepal, &golden, |step| {
        if step == 3 {
            kill(sepal.netd(), Signal::SIGKILL).expect("netd is there");
        }
    })
    .await;
    assert_eq!(seen.tokens, golden.ids);
    assert!(seen.sent_again > 0 && seen.resumed == 0);
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_without_its_client_is_parked_until_its_grace_is_over() {
    let sepal = serve(&["--session_grace", "3", "--log", "info,netd=debug"]);
    let parked = || sepal.status().pointer("/0/figures/kv/parked")?.as_u64();
    let mut model = model();
    let swarm = join(&sepal.addr(), "demo", model.num_blocks()).await;
    let mut chain = Chain::open(&swarm, 64).await.expect("a chain");
    chain.step(states(&mut model, &[0, 5, 6])).await.expect("a step");
    assert_eq!(parked(), Some(0));
    swarm.leave().await;
    sepal.wait_line("session parked", 1);
    sepal.wait_line("parked session freed", 1);
    wait_for("no parked session", || (parked()? == 0).then_some(()));
    drop(chain);
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// The grace does not end while this looks.
#[tokio::test(flavor = "multi_thread")]
async fn a_parked_session_is_shown() {
    let sepal = serve(&LONG_GRACE);
    let parked = || sepal.status().pointer("/0/figures/kv/parked")?.as_u64();
    let mut model = model();
    let swarm = join(&sepal.addr(), "demo", model.num_blocks()).await;
    let mut chain = Chain::open(&swarm, 64).await.expect("a chain");
    chain.step(states(&mut model, &[0, 5, 6])).await.expect("a step");
    swarm.leave().await;
    wait_for("a parked session", || (parked()? == 1).then_some(()));
    drop(chain);
    assert_eq!(sepal.terminate().code(), Some(0));
}
