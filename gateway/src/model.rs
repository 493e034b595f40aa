//! One model that the gateway offers: its local part, its tokenizer and template, its swarm.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use client::chain::{Chain, ChainError};
use client::drafts::{DraftError, DraftModel, Drafts};
use client::grammar::{Grammar, GrammarError, Vocabulary};
use client::head::Head;
use client::local::{LocalModel, LocalModelError};
use client::swarm::Swarm;
use client::text::{TextCodec, TextError};
use serde_json::Value;
use shared::config::{GatewayConfig, GatewayModel};

use crate::conversations::Conversations;
use crate::template::{ChatTemplate, TemplateError};

/// Threads for the head of each model.
const HEAD_THREADS: usize = 2;
/// Sessions are as long as a multiple of this, so that a conversation can go on in them.
const LENGTH_STEP: u32 = 128;
/// How often the records of the servers are read.
const REFRESH_PERIOD: Duration = Duration::from_secs(10);
/// How long the end of a session may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a model cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The model folder.
    #[error(transparent)]
    Local(#[from] LocalModelError),
    /// The model that guesses.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// The tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The thread of the head.
    #[error("cannot start a thread for the head")]
    Thread(#[from] std::io::Error),
    /// No prefix is known.
    #[error("the folder of model {0} names no dht_prefix; give it with --dht_prefix {0}=PREFIX")]
    NoPrefix(String),
}

/// Why a conversation has no prompt.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The folder has no template.
    #[error(
        "{0} has no chat template: use /v1/completions, or start the gateway with --chat_template FILE"
    )]
    NoTemplate(String),
    /// The template refuses it.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// Blocks that no server serves, and since when.
#[derive(Clone, Debug, Default)]
pub struct Holes {
    /// Ranges of blocks; empty if there is a route.
    pub blocks: Vec<Range<u32>>,
    /// When the first of them was found.
    pub since: Option<SystemTime>,
}

/// The files of a model, before the swarm is entered.
pub struct Local {
    name: String,
    folder: PathBuf,
    head: Head,
    codec: TextCodec,
    template: Option<ChatTemplate>,
    max_positions: Option<u32>,
    draft: Option<DraftModel>,
    /// Prefix of its module uids.
    pub prefix: String,
}

impl Local {
    /// Reads the files that `wanted` names.
    ///
    /// # Errors
    /// [`ModelError`] names the file.
    pub fn load(wanted: &GatewayModel, config: &GatewayConfig) -> Result<Local, ModelError> {
        let local = config.local;
        let model = LocalModel::load(&wanted.folder, local.dtype, HEAD_THREADS)?;
        let model = model.with_head(local.head)?;
        let draft = wanted.draft.as_deref();
        let draft = draft.map(|small| DraftModel::start(small, &wanted.folder, HEAD_THREADS));
        let draft = draft.transpose()?;
        let prefix = wanted.dht_prefix.clone().or_else(|| model.dht_prefix().map(str::to_owned));
        let prefix = prefix.ok_or_else(|| ModelError::NoPrefix(wanted.name.clone()))?;
        let codec = TextCodec::load(&wanted.folder, model.bos())?;
        let template = ChatTemplate::load(&wanted.folder, config.chat_template.as_deref())?;
        let max_positions = model.max_positions();
        let head = Head::start(model)?;
        let (name, folder) = (wanted.name.clone(), wanted.folder.clone());
        Ok(Local { name, folder, head, codec, template, max_positions, draft, prefix })
    }

    /// Blocks of the model.
    pub fn num_blocks(&self) -> u32 {
        self.head.num_blocks()
    }

    /// The model over a swarm.
    pub fn over(self, swarm: Swarm, config: &GatewayConfig) -> Model {
        let Local { name, folder, head, codec, template, max_positions, draft, prefix: _ } = self;
        let all = 0..head.num_blocks();
        let unknown = Holes { blocks: vec![all], since: Some(SystemTime::now()) };
        Model {
            name,
            folder,
            created: SystemTime::now(),
            head,
            codec,
            template,
            max_positions,
            swarm,
            conversations: Conversations::new(config.sessions_kept, config.session_idle),
            speculate: config.local.speculate,
            draft,
            vocabulary: OnceLock::new(),
            holes: Mutex::new(unknown),
        }
    }
}

/// A model that is offered.
pub struct Model {
    /// Its name in the API.
    pub name: String,
    folder: PathBuf,
    /// When it was first offered.
    pub created: SystemTime,
    /// Embeddings, final norm and head.
    pub head: Head,
    /// The tokenizer.
    pub codec: TextCodec,
    /// The chat template, if the folder has one.
    pub template: Option<ChatTemplate>,
    /// Most tokens of a text, if the model says so.
    pub max_positions: Option<u32>,
    /// The servers.
    pub swarm: Swarm,
    /// Open sessions of earlier turns.
    pub conversations: Conversations<Chain>,
    speculate: usize,
    draft: Option<DraftModel>,
    /// For texts of a form, once one was asked for.
    vocabulary: OnceLock<Result<Vocabulary, GrammarError>>,
    holes: Mutex<Holes>,
}

impl Model {
    /// The tokens of a conversation, after which the assistant speaks.
    ///
    /// # Errors
    /// [`PromptError`].
    pub fn chat_prompt(
        &self,
        messages: &Value,
        tools: Option<&Value>,
    ) -> Result<Vec<u32>, PromptError> {
        let template = self.template.as_ref();
        let template = template.ok_or_else(|| PromptError::NoTemplate(self.name.clone()))?;
        Ok(self.codec.encode_rendered(&template.prompt(messages, tools)?)?)
    }

    /// Guesses for one text.
    pub fn drafts(&self) -> Drafts {
        Drafts::new(self.speculate).with_model(self.draft.as_ref())
    }

    /// The form of a text: an object of JSON if there is no `schema`. The first call prepares the
    /// vocabulary.
    ///
    /// # Errors
    /// [`GrammarError`].
    pub async fn grammar(self: &Arc<Self>, schema: Option<Value>) -> Result<Grammar, GrammarError> {
        let model = self.clone();
        let prepared = move || {
            let load =
                || Vocabulary::load(&model.folder, model.head.vocabulary(), model.head.eos());
            let vocabulary = model.vocabulary.get_or_init(load);
            vocabulary.as_ref().map_err(Clone::clone)?.grammar(schema.as_ref())
        };
        let stopped = |error| GrammarError::Schema(format!("{error}"));
        tokio::task::spawn_blocking(prepared).await.map_err(stopped)?
    }

    /// A session for `prompt` and `more` tokens, and how many tokens of the prompt it holds already.
    ///
    /// # Errors
    /// [`ChainError`] if a block has no server.
    pub async fn session(&self, prompt: &[u32], more: u32) -> Result<(Chain, usize), ChainError> {
        if let Some((mut chain, common)) = self.conversations.take(prompt, more) {
            chain.roll_back(u32::try_from(common).unwrap_or(u32::MAX))?;
            return Ok((chain, common));
        }
        let needed = u32::try_from(prompt.len()).unwrap_or(u32::MAX).saturating_add(more);
        let room = needed.checked_next_multiple_of(LENGTH_STEP).unwrap_or(needed);
        let most = self.max_positions.map_or(room, |most| most.max(needed));
        Ok((Chain::open(&self.swarm, room.min(most)).await?, 0))
    }

    /// Keeps the session of a text that has ended for its next turn.
    pub fn keep(&self, chain: Chain, tokens: Vec<u32>) {
        close(self.conversations.keep(chain, tokens, Instant::now()));
    }

    /// Blocks that nobody serves, as last read.
    pub fn holes(&self) -> Holes {
        self.holes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the records of the servers again and again, and closes sessions that are not used.
    pub async fn keep_up(&self) {
        loop {
            if let Err(error) = self.swarm.refresh().await {
                tracing::warn!(model = self.name, %error, "cannot read the servers' records");
            }
            self.find_holes();
            close(self.conversations.expired(Instant::now()));
            tokio::time::sleep(REFRESH_PERIOD).await;
        }
    }

    fn find_holes(&self) {
        let servers = self.swarm.servers();
        let covered =
            |block: u32| servers.iter().any(|s| (s.start..s.end).contains(&(block as usize)));
        let mut blocks: Vec<Range<u32>> = Vec::new();
        for block in (0..self.head.num_blocks()).filter(|block| !covered(*block)) {
            match blocks.last_mut() {
                Some(last) if last.end == block => last.end += 1,
                _ => blocks.push(block..block + 1),
            }
        }
        let mut holes = self.holes.lock().unwrap_or_else(PoisonError::into_inner);
        if holes.blocks.is_empty() != blocks.is_empty() {
            holes.since = (!blocks.is_empty()).then(SystemTime::now);
            let (model, missing) = (&self.name, format!("{blocks:?}"));
            match blocks.is_empty() {
                true => tracing::info!(model, "every block has a server"),
                false => tracing::warn!(model, missing, "blocks have no server"),
            }
        }
        holes.blocks = blocks;
    }
}

/// Ends sessions at their servers. Nobody waits for it: a server that does not answer has some time,
/// after which the session is dropped.
fn close(sessions: Vec<Chain>) {
    for session in sessions {
        tokio::spawn(tokio::time::timeout(CLOSE_TIMEOUT, session.close()));
    }
}
