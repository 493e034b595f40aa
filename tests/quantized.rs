//! The demo model served in fewer bits, through real servers: the texts that it was trained on stay likely.

mod harness;

use client::chain::Chain;
use client::local::LocalModel;
use client::session::Hidden;
use client::swarm::{Swarm, SwarmConfig};
use harness::{Sepal, demo_model};

/// What transformers chose for the prompts of the golden file in float32, as tokens: (prompt, continuation).
fn golden() -> Vec<(Vec<u32>, Vec<u32>)> {
    let text = std::fs::read_to_string(demo_model().join("golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids = |value: &serde_json::Value| serde_json::from_value(value.clone()).unwrap();
    let cases = golden["cases"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|case| case["dtype"] == "float32");
    cases
        .map(|case| (ids(&case["prompt_ids"]), ids(&case["greedy_ids"])))
        .collect()
}

/// How a server continues the golden texts.
#[derive(Debug)]
struct Score {
    /// Mean of -ln p of the tokens that transformers chose in float32.
    loss: f64,
    /// Share of them that are the best here, too.
    best: f64,
}

async fn score(quant: &str, dtype: &str) -> Score {
    let flags = ["--torch_dtype", dtype, "--quant_type", quant];
    let sepal = Sepal::serve(&demo_model(), "demo", &flags);
    let mut model = LocalModel::load(&demo_model(), None, 1).unwrap();
    let mut swarm = Swarm::join(SwarmConfig {
        initial_peers: vec![sepal.addr().parse().unwrap()],
        prefix: "demo".to_owned(),
        num_blocks: model.num_blocks(),
        startup_timeout: harness::DEADLINE,
    })
    .await
    .unwrap();
    let (mut loss, mut best, mut tokens) = (0.0, 0, 0);
    for (prompt, chosen) in golden() {
        let all = [prompt.as_slice(), &chosen].concat();
        let mut chain = Chain::open(&mut swarm, all.len() as u32).await.unwrap();
        let mut fed = 0;
        for (at, token) in chosen.iter().enumerate().take(60) {
            let input = &all[fed..prompt.len() + at];
            fed = prompt.len() + at;
            let hidden = Hidden {
                dtype: model.dtype(),
                tokens: input.len(),
                bytes: model.embed(input).unwrap().into(),
            };
            let (output, _) = chain.step(hidden).await.unwrap();
            let logits = model.logits(&output.last_f32()).unwrap();
            let top = logits.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = logits.iter().map(|l| f64::from(l - top).exp()).sum();
            loss += sum.ln() - f64::from(logits[*token as usize] - top);
            best += usize::from(logits[*token as usize] == top);
            tokens += 1;
        }
        chain.close().await;
    }
    assert_eq!(sepal.terminate().code(), Some(0));
    Score {
        loss: loss / f64::from(tokens),
        best: best as f64 / f64::from(tokens),
    }
}

/// The bounds say what eight and four bits may cost this small model (192 wide, so more than they cost large ones): loss
/// per token beside float32, and share of greedy tokens that stay.
#[tokio::test(flavor = "multi_thread")]
async fn texts_stay_likely_in_int8_and_nf4() {
    let exact = score("none", "float32").await;
    assert!(exact.best > 0.99, "{exact:?}");
    for (quant, dtype, more_loss, best) in [
        ("int8", "float32", 0.05, 0.95),
        ("int8", "bfloat16", 0.05, 0.93),
        ("nf4", "float32", 0.5, 0.7),
        ("nf4", "bfloat16", 0.5, 0.7),
    ] {
        let got = score(quant, dtype).await;
        eprintln!("{quant} {dtype}: {got:?} beside {exact:?}");
        assert!(
            got.loss < exact.loss + more_loss && got.best > best,
            "{quant} {dtype}: {got:?} beside {exact:?}"
        );
    }
}
