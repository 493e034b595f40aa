//! What a text needs of a model on this machine: head, tokenizer, and a small model that guesses.

use std::path::Path;

use crate::config::LocalConfig;
use crate::drafts::{DraftError, DraftModel, Drafts};
use crate::head::Head;
use crate::local_layers::{LocalModel, LocalModelError};
use crate::text::{TextCodec, TextError};

/// Threads for the head: one row times a matrix of tens to hundreds of megabytes.
const THREADS: usize = 2;

/// Why a model cannot be brought up.
#[derive(Debug, thiserror::Error)]
pub enum TextModelError {
    #[error(transparent)]
    Local(#[from] LocalModelError),
    /// The model that guesses.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// The tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The thread of the head.
    #[error("cannot start a thread for the head")]
    Thread(#[from] std::io::Error),
}

/// The local part of a model whose blocks the swarm has.
pub struct TextModel {
    /// Embeddings, final norm and head.
    pub head: Head,
    /// The tokenizer.
    pub codec: TextCodec,
    /// Prefix of the module uids, if the folder names one.
    pub prefix: Option<String>,
    /// Most tokens of a text, if the model says so.
    pub max_positions: Option<u32>,
    draft: Option<DraftModel>,
    speculate: usize,
}

impl TextModel {
    /// Reads the model of `folder`, and that of `draft` if it names a folder.
    ///
    /// # Errors
    /// [`TextModelError`] names the file.
    pub fn load(
        folder: &Path,
        draft: Option<&Path>,
        config: LocalConfig,
    ) -> Result<TextModel, TextModelError> {
        let model = LocalModel::load(folder, config.dtype, THREADS)?.with_head(config.head)?;
        let codec = TextCodec::load(folder)?;
        let model = model.ending_at(codec.eos());
        let draft = draft.map(|small| DraftModel::start(small, folder, THREADS)).transpose()?;
        Ok(TextModel {
            codec,
            prefix: model.dht_prefix().map(str::to_owned),
            max_positions: model.max_positions(),
            head: Head::start(model)?,
            draft,
            speculate: config.speculate,
        })
    }

    /// Guesses for one text.
    pub fn drafts(&self) -> Drafts {
        Drafts::new(self.speculate).with_model(self.draft.as_ref())
    }
}
