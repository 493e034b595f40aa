//! The demo model: what transformers makes of its texts (`client/model/golden.json`), and how a
//! server goes along with it.

use std::path::{Path, PathBuf};

use client::chain::Chain;
use client::local_layers::LocalModel;
use client::states::Hidden;

use super::Sepal;
use super::peer::Peer;
use super::session::join;

/// Width of its hidden states, and its blocks.
pub const HIDDEN: usize = 192;
pub const BLOCKS: std::ops::Range<u32> = 0..8;

/// Its folder: a trained Llama of eight blocks with its tokenizer.
pub fn demo_model() -> PathBuf {
    super::root().join("client/model")
}

/// A copy of the demo model within `place`, which a test may move or delete.
pub fn copy_of_demo_model(place: &Path) -> PathBuf {
    let folder = place.join("model");
    std::fs::create_dir(&folder).expect("a folder");
    for file in std::fs::read_dir(demo_model()).expect("the demo model").flatten() {
        if file.path().is_file() {
            std::fs::copy(file.path(), folder.join(file.file_name())).expect("copy a file");
        }
    }
    folder
}

/// A session of its own peer, [as here](run_session_with).
pub async fn run_session(addr: &str, steps: usize, between: impl FnMut(usize)) -> Vec<Vec<f32>> {
    run_session_with(&Peer::connect(addr, "demo").await, 5, steps, between).await
}

/// [A session](Peer::run_fed_back) over all blocks.
pub async fn run_session_with(
    peer: &Peer,
    seed: u32,
    steps: usize,
    between: impl FnMut(usize),
) -> Vec<Vec<f32>> {
    peer.run_fed_back(BLOCKS, (HIDDEN, seed), steps, between).await
}

/// A greedy continuation by transformers.
pub struct Golden {
    pub prompt: String,
    pub prompt_ids: Vec<u32>,
    /// What comes after the prompt.
    pub text: String,
    pub ids: Vec<u32>,
}

/// All continuations that transformers computed in `dtype`.
pub fn golden(dtype: &str) -> Vec<Golden> {
    let text = std::fs::read_to_string(demo_model().join("golden.json")).expect("golden.json");
    let golden: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let ids = |value: &serde_json::Value| serde_json::from_value(value.clone()).expect("ids");
    let word = |value: &serde_json::Value| value.as_str().expect("a text").to_owned();
    let cases = golden["cases"].as_array().expect("cases").iter();
    let cases: Vec<_> = cases
        .filter(|case| case["dtype"] == dtype)
        .map(|case| {
            let (prompt, whole) = (word(&case["prompt"]), word(&case["text"]));
            Golden {
                text: whole.strip_prefix(&prompt).expect("the prompt first").to_owned(),
                prompt,
                prompt_ids: ids(&case["prompt_ids"]),
                ids: ids(&case["greedy_ids"]),
            }
        })
        .collect();
    assert!(cases.len() >= 3, "golden data is missing");
    cases
}

/// Feeds the texts of transformers to a server of the demo model, at most `most` tokens of each
/// continuation, and shows `each` of them with the logits of its place.
pub async fn follow(
    sepal: &Sepal,
    golden: &[Golden],
    most: usize,
    mut each: impl FnMut(u32, &[f32]),
) {
    let mut model = LocalModel::load(&demo_model(), None, 1).expect("the demo model");
    let swarm = join(&sepal.addr(), "demo", model.num_blocks()).await;
    for Golden { prompt_ids, ids, .. } in golden {
        let all = [prompt_ids.as_slice(), ids].concat();
        let chain = Chain::open(&swarm, all.len() as u32).await;
        let mut chain = chain.expect("a chain");
        let mut fed = 0;
        for (at, token) in ids.iter().enumerate().take(most) {
            let input = &all[fed..prompt_ids.len() + at];
            fed = prompt_ids.len() + at;
            let hidden = Hidden {
                dtype: model.dtype(),
                rows: 1,
                tokens: input.len(),
                bytes: model.embed(input).expect("known tokens").into(),
            };
            let (output, _) = chain.step(hidden).await.expect("a step");
            let logits = model.logits(&output.last_f32()).expect("logits");
            each(*token, logits);
        }
        chain.close().await;
    }
}
