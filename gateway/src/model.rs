//! One model that the gateway offers: its local part, its tokenizer and template, its servers.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use client::chain::{Chain, ChainError};
use client::grammar::{Grammar, GrammarError, Vocabulary};
use client::text::TextError;
use client::text_model::{TextModel, TextModelError};
use p2p::task;
use serde_json::Value;

use crate::config::{EngineConfig, GatewayModel};
use crate::conversations::Conversations;
use crate::template::{ChatTemplate, TemplateError, TemplateInput};
use crate::view::ModelServers;

/// Sessions are as long as a multiple of this, so that a conversation can go on in them.
const LENGTH_STEP: u32 = 128;
/// How often sessions that nobody uses are looked for.
const IDLE_PERIOD: Duration = Duration::from_secs(10);
/// How long the end of a session may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a model cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error(transparent)]
    Local(#[from] TextModelError),
    #[error(transparent)]
    Template(#[from] TemplateError),
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

/// The files of a model, before the swarm is entered.
pub struct ModelFiles {
    folder: PathBuf,
    model: TextModel,
    template: Option<ChatTemplate>,
    /// Prefix of its module uids.
    pub prefix: String,
}

impl ModelFiles {
    /// Reads the files that `wanted` names.
    ///
    /// # Errors
    /// [`ModelError`] names the file.
    pub fn load(wanted: &GatewayModel, config: &EngineConfig) -> Result<ModelFiles, ModelError> {
        let folder = wanted.folder.clone();
        let model = TextModel::load(&folder, wanted.draft.as_deref(), config.local)?;
        let prefix = wanted.dht_prefix.clone().or_else(|| model.prefix.clone());
        let prefix = prefix.ok_or_else(|| ModelError::NoPrefix(wanted.name.clone()))?;
        let template = ChatTemplate::load(&folder, config.chat_template.as_deref())?;
        Ok(ModelFiles { folder, model, template, prefix })
    }

    /// Blocks of the model.
    pub fn num_blocks(&self) -> u32 {
        self.model.head.num_blocks()
    }

    /// The model over the servers that `view` knows.
    pub fn over(self, view: Arc<ModelServers>, config: &EngineConfig) -> Model {
        let ModelFiles { folder, model, template, prefix: _ } = self;
        Model {
            view,
            folder,
            created: SystemTime::now(),
            local: model,
            template,
            conversations: Conversations::new(config.sessions_kept, config.session_idle),
            vocabulary: OnceLock::new(),
        }
    }
}

/// A model that is offered.
pub struct Model {
    /// Its name in the API, and its servers.
    pub view: Arc<ModelServers>,
    folder: PathBuf,
    /// When it was first offered.
    pub created: SystemTime,
    /// Its head and tokenizer.
    pub local: TextModel,
    /// The chat template, if the folder has one.
    pub template: Option<ChatTemplate>,
    /// Open sessions of earlier turns.
    pub conversations: Conversations<Chain>,
    /// For texts of a form, once one was asked for.
    vocabulary: OnceLock<Result<Vocabulary, GrammarError>>,
}

impl Model {
    /// The tokens of a conversation, after which the assistant speaks.
    pub fn chat_prompt(&self, input: &TemplateInput) -> Result<Vec<u32>, PromptError> {
        let template = self.template.as_ref();
        let template = template.ok_or_else(|| PromptError::NoTemplate(self.view.name.clone()))?;
        Ok(self.local.codec.encode_rendered(&template.prompt(input)?)?)
    }

    /// The form of a text: an object of JSON if there is no `schema`. The first call prepares the
    /// vocabulary.
    pub async fn grammar(self: &Arc<Self>, schema: Option<Value>) -> Result<Grammar, GrammarError> {
        let model = self.clone();
        let prepared = move || {
            let head = &model.local.head;
            let load = || Vocabulary::load(&model.folder, head.vocabulary(), head.eos());
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
        Ok((self.new_session(prompt, more).await?, 0))
    }

    /// A session for `prompt` and `more` tokens that holds none of them.
    ///
    /// # Errors
    /// [`ChainError`] if a block has no server.
    pub async fn new_session(&self, prompt: &[u32], more: u32) -> Result<Chain, ChainError> {
        let needed = u32::try_from(prompt.len()).unwrap_or(u32::MAX).saturating_add(more);
        let room = needed.checked_next_multiple_of(LENGTH_STEP).unwrap_or(needed);
        let most = self.local.max_positions.map_or(room, |most| most.max(needed));
        // A text that would wait goes before the next turn of a conversation.
        if self.view.swarm.is_crowded() {
            close(self.conversations.take_oldest().into_iter().collect());
        }
        Chain::open(&self.view.swarm, room.min(most)).await
    }

    /// Most tokens that a text may add to `prompt`, if nothing but the model and its servers limits it;
    /// at least `least` if the model takes so many.
    pub fn room(&self, prompt: u32, least: u32) -> u32 {
        let of_model = self.local.max_positions.map(|most| most.saturating_sub(prompt));
        let cache = self.view.swarm.longest_session();
        let cache = cache.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
        let of_cache = cache.map(|tokens| tokens.saturating_sub(prompt).max(least));
        match (of_model, of_cache) {
            (Some(model), Some(cache)) => model.min(cache),
            (Some(model), None) => model,
            // Of a model that names no longest text, a session of any length would be asked for.
            (None, _) => least,
        }
    }

    /// Keeps the session of a text that has ended for its next turn.
    pub fn keep(&self, chain: Chain, tokens: Vec<u32>) {
        if self.view.swarm.is_crowded() {
            // Others wait for its place.
            return close(vec![chain]);
        }
        close(self.conversations.keep(chain, tokens, Instant::now()));
    }

    /// Closes sessions that nobody has used for a while, again and again.
    pub async fn close_idle(&self) {
        loop {
            close(self.conversations.expired(Instant::now()));
            tokio::time::sleep(IDLE_PERIOD).await;
        }
    }
}

/// Ends sessions at their servers. Nobody waits for it: a server that does not answer has some time,
/// after which the session is dropped.
fn close(sessions: Vec<Chain>) {
    for session in sessions {
        task::spawn(tokio::time::timeout(CLOSE_TIMEOUT, session.close()));
    }
}
