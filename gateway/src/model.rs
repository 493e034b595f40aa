//! One model that the gateway offers: its local part, its tokenizer and template, its servers.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use client::chain::{Chain, ChainError};
use client::drafts::{DraftError, DraftModel, Drafts};
use client::grammar::{Grammar, GrammarError, Vocabulary};
use client::head::Head;
use client::local::{LocalModel, LocalModelError};
use client::text::{TextCodec, TextError};
use hivemind::task;
use serde_json::Value;
use shared::config::{GatewayConfig, GatewayModel};

use crate::conversations::Conversations;
use crate::template::{ChatTemplate, TemplateError, TemplateInput};
use crate::view::View;

/// Threads for the head of each model.
const HEAD_THREADS: usize = 2;
/// Sessions are as long as a multiple of this, so that a conversation can go on in them.
const LENGTH_STEP: u32 = 128;
/// How often sessions that nobody uses are looked for.
const IDLE_PERIOD: Duration = Duration::from_secs(10);
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

/// The files of a model, before the swarm is entered.
pub struct Local {
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
        let folder = wanted.folder.clone();
        Ok(Local { folder, head, codec, template, max_positions, draft, prefix })
    }

    /// Blocks of the model.
    pub fn num_blocks(&self) -> u32 {
        self.head.num_blocks()
    }

    /// The model over the servers that `view` knows.
    pub fn over(self, view: Arc<View>, config: &GatewayConfig) -> Model {
        let Local { folder, head, codec, template, max_positions, draft, prefix: _ } = self;
        Model {
            view,
            folder,
            created: SystemTime::now(),
            head,
            codec,
            template,
            max_positions,
            conversations: Conversations::new(config.sessions_kept, config.session_idle),
            speculate: config.local.speculate,
            draft,
            vocabulary: OnceLock::new(),
        }
    }
}

/// A model that is offered.
pub struct Model {
    /// Its name in the API, and its servers.
    pub view: Arc<View>,
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
    /// Open sessions of earlier turns.
    pub conversations: Conversations<Chain>,
    speculate: usize,
    draft: Option<DraftModel>,
    /// For texts of a form, once one was asked for.
    vocabulary: OnceLock<Result<Vocabulary, GrammarError>>,
}

impl Model {
    /// The tokens of a conversation, after which the assistant speaks.
    ///
    /// # Errors
    /// [`PromptError`].
    pub fn chat_prompt(&self, input: &TemplateInput) -> Result<Vec<u32>, PromptError> {
        let template = self.template.as_ref();
        let template = template.ok_or_else(|| PromptError::NoTemplate(self.view.name.clone()))?;
        Ok(self.codec.encode_rendered(&template.prompt(input)?)?)
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
        Ok((Chain::open(&self.view.swarm, room.min(most)).await?, 0))
    }

    /// Keeps the session of a text that has ended for its next turn.
    pub fn keep(&self, chain: Chain, tokens: Vec<u32>) {
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
