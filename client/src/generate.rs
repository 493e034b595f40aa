//! `sepal generate`: text from a prompt, computed by the swarm. Embeddings, head and sampling are
//! local.

use std::io::Write;
use std::time::{Duration, Instant};

use hivemind::p2p::{Multiaddr, PeerId};
use shared::causes::with_causes;
use shared::config::GenerateConfig;
use shared::escape::escaped;
use shared::exit::ExitReason;

use crate::chain::{Chain, ChainError};
use crate::drafts::Drafts;
use crate::local::{LocalModel, LocalModelError};
use crate::sampling::{Sampler, SamplingError};
use crate::session::StepTiming;
use crate::states::Hidden;
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
    /// The head made nothing that could be sampled.
    #[error(
        "the logits after {0} tokens are not finite: a server of the chain computes wrong values"
    )]
    NoToken(usize),
    /// The output cannot be written.
    #[error("cannot write the text")]
    Output(#[from] std::io::Error),
}

impl GenerateError {
    fn exit_reason(&self) -> ExitReason {
        match self {
            GenerateError::Swarm(_)
            | GenerateError::Chain(_)
            | GenerateError::Output(_)
            | GenerateError::NoToken(_) => ExitReason::Failed,
            _ => ExitReason::BadConfig,
        }
    }
}

/// What a generation did.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, the one that ends the text included.
    pub tokens: Vec<u32>,
    /// The servers in order, with their blocks.
    pub legs: Vec<(PeerId, std::ops::Range<u32>)>,
    /// Times of the first step, which runs the whole prompt.
    pub prefill: StepTiming,
    /// Times of all later steps, summed.
    pub decode: StepTiming,
    /// Steps after the first.
    pub decode_steps: u32,
    /// Tokens that were guessed.
    pub guessed: u64,
    /// Those of them that were right.
    pub accepted: u64,
    /// Wall time from the first step to the last token.
    pub elapsed: Duration,
}

impl Report {
    /// Notes a step that carried so many guesses.
    fn count(&mut self, spent: StepTiming, guesses: usize) {
        self.guessed += guesses as u64;
        if self.tokens.is_empty() {
            self.prefill = spent;
        } else {
            self.decode += spent;
            self.decode_steps += 1;
        }
    }

    /// Lines for people: route, speed, and where the time of a step went.
    pub fn lines(&self) -> Vec<String> {
        let steps = self.decode_steps.max(1);
        let per_step = |d: Duration| d.as_secs_f64() * 1e3 / f64::from(steps);
        let network = self.decode.total.saturating_sub(self.decode.queue + self.decode.compute);
        let speed = self.tokens.len() as f64 / self.elapsed.as_secs_f64().max(1e-9);
        let mut lines: Vec<String> = self
            .legs
            .iter()
            .map(|(peer, b)| format!("server {peer}  blocks {}:{}", b.start, b.end))
            .collect();
        lines.push(format!(
            "{} prompt tokens, {} new tokens, {speed:.1} tokens/s",
            self.prompt_tokens,
            self.tokens.len()
        ));
        lines.push(format!(
            "one step {:.2} ms over {} servers: network {:.2} ms, queue {:.2} ms, compute {:.2} ms",
            per_step(self.decode.total),
            self.legs.len(),
            per_step(network),
            per_step(self.decode.queue),
            per_step(self.decode.compute)
        ));
        if self.guessed > 0 {
            let decoded = self.tokens.len().saturating_sub(1) as f64;
            lines.push(format!(
                "{:.2} tokens per step: {} of {} guessed tokens were right",
                decoded / f64::from(steps),
                self.accepted,
                self.guessed
            ));
        }
        lines
    }
}

/// Generates text and hands each piece to `on_text` as it comes.
///
/// # Errors
/// [`GenerateError`]: one sentence that names what is wrong and what to do.
pub async fn generate(
    config: &GenerateConfig,
    mut on_text: impl FnMut(&str) -> std::io::Result<()>,
) -> Result<Report, GenerateError> {
    let mut model = LocalModel::load(&config.model, config.dtype, LOCAL_THREADS)?;
    let codec = TextCodec::load(&config.model, model.bos())?;
    let mut sampler = Sampler::new(config.sampling.clone())?;
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
    sampler.hear(&prompt);
    let task = Continuation {
        prompt: &prompt,
        max_new_tokens: config.max_new_tokens,
        drafts: Drafts::new(config.speculate),
    };
    let mut is_over = false;
    let report = decode(&swarm, &mut model, &mut sampler, task, |token| {
        let (text, over) = stops.push(&stream.push(token)?);
        is_over = over;
        on_text(&text)?;
        Ok(!over)
    })
    .await;
    if !is_over && report.is_ok() {
        on_text(&stops.rest())?;
    }
    swarm.leave().await;
    report
}

fn addresses(texts: &[String]) -> Result<Vec<Multiaddr>, GenerateError> {
    let parse = |text: &String| text.parse().map_err(|_| GenerateError::BadAddress(text.clone()));
    texts.iter().map(parse).collect()
}

/// What [`decode`] is to do.
#[derive(Debug)]
pub struct Continuation<'a> {
    /// Tokens to go on from.
    pub prompt: &'a [u32],
    /// Most tokens to add.
    pub max_new_tokens: u32,
    /// Guesses of what comes.
    pub drafts: Drafts,
}

/// Adds tokens to a prompt until one ends the text, `on_token` says that it is enough, or there are as
/// many as there may be. Guesses change how many steps that takes, and no token.
///
/// # Errors
/// [`GenerateError`].
pub async fn decode(
    swarm: &Swarm,
    model: &mut LocalModel,
    sampler: &mut Sampler,
    mut task: Continuation<'_>,
    mut on_token: impl FnMut(u32) -> Result<bool, GenerateError>,
) -> Result<Report, GenerateError> {
    let most = task.max_new_tokens;
    let max_length = u32::try_from(task.prompt.len()).unwrap_or(u32::MAX).saturating_add(most);
    let mut chain = Chain::open(swarm, max_length).await?;
    let mut report = Report { prompt_tokens: task.prompt.len(), ..Report::default() };
    let began = Instant::now();
    let (mut text, mut input) = (task.prompt.to_vec(), task.prompt.to_vec());
    let mut goes_on = most > 0;
    while goes_on {
        // The first step carries the prompt alone; the last token of a step is chosen behind its guesses.
        let left = (most as usize).saturating_sub(report.tokens.len() + 1);
        let limit = if report.tokens.is_empty() { 0 } else { left };
        let guesses = task.drafts.guess(&text, limit);
        let kept = chain.position() as usize + input.len();
        input.extend(&guesses);
        let hidden = Hidden {
            dtype: model.dtype(),
            rows: 1,
            tokens: input.len(),
            bytes: model.embed(&input)?.into(),
        };
        let (output, spent) = chain.step(hidden).await?;
        report.count(spent, guesses.len());
        let states = output.last(guesses.len() + 1).to_f32();
        let mut right = 0;
        for state in states.chunks(model.hidden_size()) {
            let logits = model.logits(state)?;
            let token =
                sampler.choose(logits).ok_or(GenerateError::NoToken(report.tokens.len()))?;
            report.tokens.push(token);
            text.push(token);
            goes_on =
                !model.is_eos(token) && on_token(token)? && report.tokens.len() < most as usize;
            let is_right = guesses.get(right) == Some(&token);
            right += usize::from(is_right);
            if !goes_on || !is_right {
                break;
            }
        }
        report.accepted += right as u64;
        task.drafts.learn(guesses.len(), right);
        if right < guesses.len() {
            chain.roll_back(u32::try_from(kept + right).unwrap_or(u32::MAX))?;
        }
        input = text.last().copied().into_iter().collect();
    }
    report.elapsed = began.elapsed();
    report.legs = chain.legs().collect();
    chain.close().await;
    Ok(report)
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
