//! `sepal generate`: text from a prompt, computed by the swarm. Embeddings, head and sampling are
//! local.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use futures::future::BoxFuture;
use p2p::Multiaddr;
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::sanitize_text::escaped;

use crate::chain::{Chain, ChainError};
use crate::config::{ClientConfig, SamplingConfig};
use crate::decoder::{Continuation, Decoder};
use crate::end_rules::EndRules;
use crate::generation::{Generation, GenerationError};
use crate::report::GenerationReport;
use crate::sampling::Sampler;
use crate::swarm::{Swarm, SwarmConfig, SwarmError};
use crate::text_model::{TextModel, TextModelError};

/// Settings of `sepal generate`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(rename_all = "snake_case")]
pub struct GenerateConfig {
    /// Model folder in Hugging Face layout, with tokenizer.json, embeddings and head, or a model of the Hub, of
    /// which just these are downloaded
    pub model: PathBuf,
    /// Text to continue
    #[arg(long, short)]
    pub prompt: String,
    #[command(flatten)]
    pub client: ClientConfig,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_new_tokens: u32,
    #[command(flatten)]
    pub sampling: SamplingConfig,
    /// End the text before this one; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Print speed and step times at the end
    #[arg(long)]
    pub stats: bool,
}

/// Why there is no text.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The local part of the model.
    #[error(transparent)]
    Model(#[from] TextModelError),
    #[error(transparent)]
    Generation(#[from] GenerationError),
    #[error(transparent)]
    Swarm(#[from] SwarmError),
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// An address that cannot be read.
    #[error(
        "invalid --initial_peers {0:?}: expected a multiaddr such as /ip4/127.0.0.1/tcp/31337/p2p/PEER_ID"
    )]
    BadAddress(String),
    /// Nothing to continue.
    #[error("the prompt is empty; give a text to continue with --prompt")]
    EmptyPrompt,
    /// No prefix is known.
    #[error(
        "the model folder names no dht_prefix; give the one that the servers use with --dht_prefix"
    )]
    NoPrefix,
    /// The output cannot be written.
    #[error("cannot write the text")]
    Output(#[from] std::io::Error),
}

impl GenerateError {
    fn exit_reason(&self) -> ExitReason {
        match self {
            GenerateError::Swarm(_)
            | GenerateError::Chain(_)
            | GenerateError::Generation(GenerationError::Decode(_))
            | GenerateError::Output(_) => ExitReason::Failed,
            _ => ExitReason::BadConfig,
        }
    }
}

/// Generates text and hands each piece to `on_text` as it comes.
///
/// # Errors
/// [`GenerateError`]: one sentence that names what is wrong and what to do.
pub fn generate<'a>(
    config: &'a GenerateConfig,
    on_text: &'a mut (dyn FnMut(&str) -> std::io::Result<()> + Send),
) -> BoxFuture<'a, Result<GenerationReport, GenerateError>> {
    Box::pin(async move {
        let client = &config.client;
        let model = TextModel::load(&config.model, client.draft.as_deref(), client.local)?;
        let sampler = Sampler::new(config.sampling.clone()).map_err(GenerationError::from)?;
        let prompt = model.codec.encode(&config.prompt).map_err(GenerationError::from)?;
        if config.prompt.is_empty() || prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let prefix = client.dht_prefix.clone().or_else(|| model.prefix.clone());
        let swarm = Swarm::join(SwarmConfig {
            initial_peers: addresses(&client.initial_peers)?,
            prefix: prefix.ok_or(GenerateError::NoPrefix)?,
            num_blocks: model.head.num_blocks(),
            startup_timeout: client.startup_timeout,
        })
        .await?;
        let report = run(config, &model, &swarm, sampler, prompt, on_text).await;
        swarm.leave().await;
        report
    })
}

async fn run(
    config: &GenerateConfig,
    model: &TextModel,
    swarm: &Swarm,
    sampler: Sampler,
    prompt: Vec<u32>,
    on_text: &mut (dyn FnMut(&str) -> std::io::Result<()> + Send),
) -> Result<GenerationReport, GenerateError> {
    let room = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let chain = Chain::open(swarm, room.saturating_add(config.max_new_tokens)).await?;
    let task = Continuation {
        prompt: prompt.clone(),
        max_new_tokens: config.max_new_tokens,
        ends: EndRules::default(),
        drafts: model.drafts(),
        grammar: None,
        top_logprobs: None,
    };
    let decoder = Decoder::new(chain, model.head.clone(), sampler, task);
    let mut generation = Generation::new(decoder, &model.codec, &prompt, &config.stop);
    while let Some(added) = generation.next().await? {
        on_text(&added.text)?;
    }
    let (_, chain, _, report) = generation.finish();
    chain.close().await;
    Ok(report)
}

fn addresses(texts: &[String]) -> Result<Vec<Multiaddr>, GenerateError> {
    let parse = |text: &String| text.parse().map_err(|_| GenerateError::BadAddress(text.clone()));
    texts.iter().map(parse).collect()
}

/// The command: prints the prompt and the text as it comes; with `stats` also the route and the
/// times.
pub fn run_command(config: &GenerateConfig) -> ExitReason {
    let runtime =
        match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return fail(&GenerateError::Output(error)),
        };
    let mut out = std::io::stdout();
    let mut print = |text: &str| out.write_all(text.as_bytes()).and_then(|()| out.flush());
    let started = print(&config.prompt).map_err(GenerateError::from);
    let result = started.and_then(|()| runtime.block_on(generate(config, &mut print)));
    let ended = print("\n").map_err(GenerateError::from);
    match result.and_then(|report| ended.map(|()| report)) {
        Ok(report) => {
            if config.stats {
                report.lines().iter().for_each(|line| tell(line));
            }
            ExitReason::Clean
        }
        Err(error) => fail(&error),
    }
}

/// Prints the error with its causes and maps it to an exit code.
fn fail(error: &GenerateError) -> ExitReason {
    tell(&format!("sepal: {}", escaped(&with_causes(error))));
    error.exit_reason()
}

/// Prints a line to standard error, if it is still there.
fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
