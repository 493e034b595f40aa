//! `sepal generate`: text from a prompt, computed by the swarm. Embeddings, head and sampling are
//! local.

use std::io::Write;

use futures::future::BoxFuture;
use hivemind::p2p::Multiaddr;
use shared::causes::with_causes;
use shared::config::GenerateConfig;
use shared::escape::escaped;
use shared::exit::ExitReason;

use crate::chain::{Chain, ChainError};
use crate::decoder::{Continuation, DecodeError, Decoder};
use crate::drafts::{DraftError, DraftModel, Drafts};
use crate::head::Head;
use crate::local::{LocalModel, LocalModelError};
use crate::report::Report;
use crate::sampling::{Sampler, SamplingError};
use crate::stops::Stops;
use crate::swarm::{Swarm, SwarmConfig, SwarmError};
use crate::text::{TextCodec, TextError, TextStream};

/// Threads for the head: one row times a matrix of tens to hundreds of megabytes.
const LOCAL_THREADS: usize = 2;

/// Why there is no text.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The model folder.
    #[error(transparent)]
    Model(#[from] LocalModelError),
    /// The model that guesses.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// The tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The sampling settings.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The swarm.
    #[error(transparent)]
    Swarm(#[from] SwarmError),
    /// The servers.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// A step of the text.
    #[error(transparent)]
    Decode(#[from] DecodeError),
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
            | GenerateError::Decode(_)
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
) -> BoxFuture<'a, Result<Report, GenerateError>> {
    Box::pin(async move {
        let local = config.local;
        let model = LocalModel::load(&config.model, local.dtype, LOCAL_THREADS)?;
        let model = model.with_head(local.head)?;
        let draft = config.draft.as_deref();
        let draft = draft.map(|small| DraftModel::start(small, &config.model, LOCAL_THREADS));
        let draft = draft.transpose()?;
        let codec = TextCodec::load(&config.model, model.bos())?;
        let sampler = Sampler::new(config.sampling.clone())?;
        let prompt = codec.encode(&config.prompt)?;
        if config.prompt.is_empty() || prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let prefix = config.dht_prefix.clone().or_else(|| model.dht_prefix().map(str::to_owned));
        let swarm = Swarm::join(SwarmConfig {
            initial_peers: addresses(&config.initial_peers)?,
            prefix: prefix.ok_or(GenerateError::NoPrefix)?,
            num_blocks: model.num_blocks(),
            startup_timeout: config.startup_timeout,
        })
        .await?;
        let (mut stream, mut stops) = (TextStream::new(&codec, &prompt), Stops::new(&config.stop));
        let task = Continuation {
            prompt,
            max_new_tokens: config.max_new_tokens,
            drafts: Drafts::new(local.speculate).with_model(draft.as_ref()),
            grammar: None,
            top_logprobs: None,
        };
        let head = Head::start(model)?;
        let mut is_over = false;
        let mut take = |token: u32| {
            let (text, over) = stops.push(&stream.push(token)?);
            is_over = over;
            on_text(&text)?;
            Ok(!over)
        };
        let report = decode(&swarm, &head, sampler, task, &mut take).await;
        if !is_over && report.is_ok() {
            on_text(&stops.rest())?;
        }
        swarm.leave().await;
        report
    })
}

fn addresses(texts: &[String]) -> Result<Vec<Multiaddr>, GenerateError> {
    let parse = |text: &String| text.parse().map_err(|_| GenerateError::BadAddress(text.clone()));
    texts.iter().map(parse).collect()
}

/// Adds tokens to a prompt over a session of its own, until one ends the text, `on_token` says that it is
/// enough, or there are as many as there may be.
///
/// # Errors
/// [`GenerateError`].
pub fn decode<'a>(
    swarm: &'a Swarm,
    head: &'a Head,
    sampler: Sampler,
    task: Continuation,
    on_token: &'a mut (dyn FnMut(u32) -> Result<bool, GenerateError> + Send),
) -> BoxFuture<'a, Result<Report, GenerateError>> {
    Box::pin(async move {
        let prompt = u32::try_from(task.prompt.len()).unwrap_or(u32::MAX);
        let chain = Chain::open(swarm, prompt.saturating_add(task.max_new_tokens)).await?;
        let mut decoder = Decoder::new(chain, head.clone(), sampler, task);
        'text: loop {
            let step = decoder.step().await?;
            if step.is_empty() {
                break;
            }
            for one in step {
                if !one.is_eos && !on_token(one.token)? {
                    break 'text;
                }
            }
        }
        let (chain, _, report) = decoder.finish();
        chain.close().await;
        Ok(report)
    })
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
                report.lines().iter().for_each(|line| eprintln!("{line}"));
            }
            ExitReason::Clean
        }
        Err(error) => fail(&error),
    }
}

/// Prints the error with its causes and maps it to an exit code.
fn fail(error: &GenerateError) -> ExitReason {
    eprintln!("sepal: {}", escaped(&with_causes(error)));
    error.exit_reason()
}
