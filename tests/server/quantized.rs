//! The demo model served in fewer bits, through real servers: the texts that it was trained on stay
//! likely.

use crate::harness::Sepal;
use crate::harness::demo::{demo_model, follow, golden};

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
    let (mut loss, mut best, mut tokens) = (0.0, 0, 0);
    follow(&sepal, &golden("float32"), 60, |token, logits| {
        let top = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from(l - top).exp()).sum();
        loss += sum.ln() - f64::from(logits[token as usize] - top);
        best += usize::from(logits[token as usize] == top);
        tokens += 1;
    })
    .await;
    assert_eq!(sepal.terminate().code(), Some(0));
    Score { loss: loss / f64::from(tokens), best: best as f64 / f64::from(tokens) }
}

/// The bounds say what eight and four bits may cost this small model (192 wide, so more than they
/// cost large ones): loss per token beside float32, and share of greedy tokens that stay.
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
