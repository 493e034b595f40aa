//! Training and rollback through chains of real servers: gradients are those of PyTorch and survive
//! the loss of a server between the forward and the backward pass; a session that was rolled back
//! goes on elsewhere with what it kept.

use crate::harness::demo::demo_model;
use crate::harness::golden::{Golden, close};
use crate::harness::peer::noise;
use crate::harness::session::{SHAPES, join};
use crate::harness::{Dht, Sepal, all_at_once, block_on};
use client::batch::{BatchGradients, backward, forward, forward_kept};
use client::chain::{Chain, ChainError, ChainStep};
use client::states::{Hidden, Prompts};
use p2p::PeerId;
use shared::dtype::DType;

const F32: [&str; 2] = ["--torch_dtype", "float32"];

fn states(rows: usize, tokens: usize, width: usize, seed: u32) -> Hidden {
    Hidden { dtype: DType::F32, rows, tokens, bytes: noise(&[rows, tokens, width], seed).buffer }
}

fn prompts(blocks: usize, rows: usize, tokens: usize, width: usize, seed: u32) -> Prompts {
    Prompts {
        dtype: DType::F32,
        blocks,
        rows,
        tokens,
        bytes: noise(&[blocks * rows, tokens, width], seed).buffer,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn gradients_through_a_chain_of_two_are_those_of_pytorch() {
    for devices in SHAPES {
        gradients_are_those_of_pytorch(devices).await;
    }
}

async fn gradients_are_those_of_pytorch(devices: &[&str]) {
    let golden = Golden::of("llama");
    let more = |span| [&F32[..], devices, &["--block_indices", span]].concat();
    let first = Sepal::serve(&golden.folder, "golden", &more("0:1"));
    let _second = Sepal::join(&first, &golden.folder, "golden", &more("1:2"));
    let swarm = join(&first.addr(), "golden", 2).await;
    let (input, gradient) = (golden.states("input"), golden.states("output_gradient"));

    let (output, kept) = forward_kept(&swarm, 0..2, &input, None).await.unwrap();
    assert_eq!(kept.legs().map(|legs| legs.len()).collect::<Vec<_>>(), [2]);
    let (_, all) = golden.tensor("forward");
    close("output", &output.bytes, &all[all.len() / 2..]);
    let got = backward(&swarm, &kept, &gradient).await.unwrap();
    let want = golden.states("input_gradient");
    close("gradient of the input", &got.inputs.bytes, &want.bytes);
    assert_eq!(got.prompts, None);

    let deep = golden.prompts("prompts");
    let (output, kept) = forward_kept(&swarm, 0..2, &input, Some(&deep)).await.unwrap();
    close("prompted output", &output.bytes, &golden.states("prompted").bytes);
    let got = backward(&swarm, &kept, &gradient).await.unwrap();
    let want = golden.states("prompted_input_gradient");
    close("gradient of the input", &got.inputs.bytes, &want.bytes);
    let (want, got) = (golden.prompts("prompt_gradient"), got.prompts.unwrap());
    assert_eq!((got.blocks, got.rows, got.tokens), (want.blocks, want.rows, want.tokens));
    close("gradient of the prompts", &got.bytes, &want.bytes);
    swarm.leave().await;
}

/// Several pieces on their own ways; the servers of the first half die after the forward pass, and
/// a part of what they computed is made again on others that cut the blocks differently.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_dies_before_the_backward_pass_is_replaced_and_the_gradients_are_the_same() {
    const WIDTH: usize = 192;
    let more = |span| [&F32[..], &["--block_indices", span]].concat();
    let whole = Sepal::serve(&demo_model(), "demo", &more("0:8"));
    let input = states(5, 300, WIDTH, 1);
    let gradient = states(5, 300, WIDTH, 2);
    let deep = prompts(8, 5, 3, WIDTH, 3);
    let swarm = join(&whole.addr(), "demo", 8).await;
    let (output, kept) = forward_kept(&swarm, 0..8, &input, Some(&deep)).await.unwrap();
    let want = backward(&swarm, &kept, &gradient).await.unwrap();
    swarm.leave().await;
    drop(whole);

    let bottom = Sepal::serve(&demo_model(), "demo", &more("0:5"));
    let top = Sepal::join(&bottom, &demo_model(), "demo", &more("5:8"));
    let swarm = join(&top.addr(), "demo", 8).await;
    let (chained, kept) = forward_kept(&swarm, 0..8, &input, Some(&deep)).await.unwrap();
    assert!(chained == output, "a chain has the bits of one server");
    assert_eq!(kept.legs().map(|legs| legs.len()).collect::<Vec<_>>(), [2, 2]);
    let got = backward(&swarm, &kept, &gradient).await.unwrap();
    assert!(got == want, "so have its gradients");

    let spare = Sepal::join(&top, &demo_model(), "demo", &more("0:2"));
    let _rest = Sepal::join(&top, &demo_model(), "demo", &more("2:5"));
    bottom.kill();
    swarm.refresh().await.unwrap();
    let got = backward(&swarm, &kept, &gradient).await.unwrap();
    assert!(got == want, "after the loss of a server");
    // What was kept still names the lost server; a pass forward knows it no more.
    let again = forward(&swarm, 0..8, &input, Some(&deep)).await.unwrap();
    assert!(again == output, "forward after the loss");
    let lost: PeerId = bottom.peer_id().parse().unwrap();
    let (_, kept) = forward_kept(&swarm, 0..8, &input, None).await.unwrap();
    assert!(kept.legs().flatten().all(|(peer, _)| peer != lost));
    let BatchGradients { inputs, .. } = backward(&swarm, &kept, &gradient).await.unwrap();
    assert_eq!(inputs.shape(), input.shape());
    swarm.leave().await;
    drop(spare);
}

/// A beam search of three rows with deep prompts that is rolled back twice; then every server dies
/// and is replaced. The same steps on a session that nothing happened to have the same bits.
#[test]
fn a_session_that_was_rolled_back_and_reordered_goes_on_after_a_failover() {
    all_at_once(&[
        ("workers alone", || block_on(rolled_back_and_reordered(SHAPES[0]))),
        ("groups of two", || block_on(rolled_back_and_reordered(SHAPES[1]))),
    ]);
}

async fn rolled_back_and_reordered(devices: &[&str]) {
    const WIDTH: usize = 192;
    let more = |span| [&F32[..], devices, &["--block_indices", span]].concat();
    let dht = Dht::start();
    let serve = |span| Sepal::join_at(&dht.addr, &demo_model(), "demo", &more(span));
    let [first, second] = ["0:4", "4:8"].map(serve);
    let swarm = join(&dht.addr, "demo", 8).await;
    let undisturbed_swarm = join(&dht.addr, "demo", 8).await;
    let mut chain = Chain::open(&swarm, 64).await.unwrap();
    let used: Vec<PeerId> = chain.legs().map(|(peer, _)| peer).collect();
    let mut undisturbed = Chain::open(&undisturbed_swarm, 64).await.unwrap();
    let step = |tokens, seed, hypo_ids: Option<[i64; 3]>| ChainStep {
        hidden: states(3, tokens, WIDTH, seed),
        hypo_ids: hypo_ids.map(Vec::from),
        prompts: (seed == 0).then(|| prompts(8, 3, 4, WIDTH, 50)),
    };
    let script = [
        (step(20, 0, None), None),
        (step(1, 1, Some([2, 0, 0])), None),
        (step(3, 2, Some([1, 1, 2])), Some(19)),
        (step(1, 3, Some([2, 0, 1])), None),
        (step(2, 4, None), Some(3)),
        (step(1, 5, Some([0, 2, 0])), None),
    ];
    for (step, back) in &script {
        let want = undisturbed.step(step.clone()).await.unwrap().0;
        assert!(chain.step(step.clone()).await.unwrap().0 == want);
        if let Some(position) = back {
            chain.roll_back(*position).unwrap();
            undisturbed.roll_back(*position).unwrap();
        }
    }
    assert_eq!(chain.position(), 4);
    assert!(matches!(chain.roll_back(5), Err(ChainError::NotBehind { position: 4, asked: 5 })));
    let last = step(2, 6, Some([1, 0, 2]));
    let want = undisturbed.step(last.clone()).await.unwrap().0;
    undisturbed.close().await;

    let _all = serve("0:8");
    // It is known by then: nobody looks for what was killed.
    swarm.refresh().await.unwrap();
    for sepal in [&first, &second] {
        sepal.kill();
    }
    let got = chain.step(last).await.unwrap().0;
    assert!(chain.legs().all(|(peer, _)| !used.contains(&peer)));
    close("after the failover", &got.bytes, &want.bytes);
    chain.close().await;
}
