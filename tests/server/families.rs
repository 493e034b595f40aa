//! The client with models of several families: transformers' own continuations (`client/golden`), with
//! and without guesses.

use std::path::PathBuf;

use crate::harness::session::join;
use crate::harness::{Sepal, root};
use client::chain::Chain;
use client::decoder::{Continuation, Decoder};
use client::drafts::Drafts;
use client::end_rules::EndRules;
use client::head::Head;
use client::local_layers::LocalModel;
use client::report::GenerationReport;
use client::sampling::{Sampler, SamplingConfig};

/// Most guesses for one step.
const GUESSES: usize = 8;

struct Family {
    name: &'static str,
    folder: PathBuf,
    golden: serde_json::Value,
    sepal: Sepal,
}

impl Family {
    fn serve(name: &'static str) -> Family {
        let folder = root().join("client/golden").join(name);
        let golden = std::fs::read(folder.join("golden.json")).expect("golden.json");
        let golden = serde_json::from_slice(&golden).expect("JSON");
        let sepal = Sepal::serve(&folder, &format!("tiny-{name}"), &["--torch_dtype", "float32"]);
        Family { name, folder, golden, sepal }
    }

    fn tokens(&self, key: &str) -> Vec<u32> {
        serde_json::from_value(self.golden[key].clone()).expect("tokens")
    }

    async fn decode(&self, sampling: SamplingConfig, guesses: usize) -> GenerationReport {
        let model = LocalModel::load(&self.folder, None, 1).expect("the model");
        let prefix = format!("tiny-{}", self.name);
        let swarm = join(&self.sepal.addr(), &prefix, model.num_blocks()).await;
        let prompt = self.tokens("prompt");
        let sampler = Sampler::new(sampling).expect("settings");
        let drafts = Drafts::new(guesses);
        let task = Continuation {
            prompt,
            max_new_tokens: 32,
            ends: EndRules::default(),
            drafts,
            grammar: None,
            top_logprobs: None,
        };
        let head = Head::start(model).expect("a thread");
        let chain = Chain::open(&swarm, 64).await.expect("a chain");
        let mut decoder = Decoder::new(chain, head, sampler, task);
        let mut step = async || {
            let step = decoder.step().await;
            step.unwrap_or_else(|error| panic!("{}: {error}", self.name))
        };
        while !step().await.is_empty() {}
        let (chain, _, report) = decoder.finish();
        chain.close().await;
        swarm.leave().await;
        report
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_family_is_continued_as_by_transformers_with_guesses_and_without() {
    for name in ["mistral", "bloom", "falcon", "qwen2", "qwen3", "mixtral"] {
        let family = Family::serve(name);
        let plain = family.decode(SamplingConfig::default(), 0).await;
        let steps = plain.decode_steps as usize;
        assert_eq!(plain.tokens, family.tokens("greedy"), "{name}");
        assert_eq!((steps, plain.guessed), (plain.tokens.len() - 1, 0), "{name}");

        let guessed = family.decode(SamplingConfig::default(), GUESSES).await;
        assert_eq!(guessed.tokens, plain.tokens, "{name}: guesses changed the text");
        let saved = guessed.accepted as usize;
        assert_eq!(guessed.decode_steps as usize + saved, steps, "{name}: {guessed:?}");
        println!("{name}: {} of {} guesses were right", guessed.accepted, guessed.guessed);

        let penalty = SamplingConfig { repetition_penalty: 1.5, ..SamplingConfig::default() };
        for guesses in [0, GUESSES] {
            let report = family.decode(penalty.clone(), guesses).await;
            assert_eq!(report.tokens, family.tokens("penalized"), "{name}, penalized");
        }
        assert_eq!(family.sepal.terminate().code(), Some(0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guesses_save_steps_where_a_text_repeats_itself_and_keep_what_is_drawn() {
    let family = Family::serve("bloom");
    let greedy = family.decode(SamplingConfig::default(), GUESSES).await;
    assert!(greedy.decode_steps < 26 && greedy.accepted > 5, "{greedy:?}");
    let drawn = |seed| SamplingConfig {
        temperature: Some(0.8),
        top_k: Some(20),
        min_p: Some(0.05),
        seed: Some(seed),
        ..SamplingConfig::default()
    };
    let first = family.decode(drawn(5), 0).await.tokens;
    assert_eq!(family.decode(drawn(5), GUESSES).await.tokens, first);
    assert_ne!(family.decode(drawn(6), GUESSES).await.tokens, first);
    assert_eq!(family.sepal.terminate().code(), Some(0));
}
