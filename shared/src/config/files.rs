//! Where the model comes from, and what is made of it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::dtype::{DType, QuantType};

/// What prepare makes ready.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PrepareConfig {
    /// Folder in Hugging Face layout, or a Hub repository id.
    pub model: String,
    /// Type to serve in; `None` = the checkpoint's, float32 becoming bfloat16 as in Petals.
    pub dtype: Option<DType>,
    /// How matrices are to be stored.
    pub quant_type: QuantType,
    /// Whether the operator named that; else a model that is stored in another way stays as it is.
    pub is_quant_named: bool,
    /// LoRA adapters: folders in PEFT layout or Hub repository ids, by the names that requests
    /// choose them with.
    pub adapters: Vec<String>,
    /// Folder for downloads and prepared blocks.
    pub cache_dir: PathBuf,
    /// How the Hub is asked for what is not there.
    pub hub: HubConfig,
}

/// How files are downloaded from the Hugging Face Hub.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HubConfig {
    /// Address of the Hub (`HF_ENDPOINT`); `None` = the public one.
    pub endpoint: Option<String>,
    /// Whether that may be an address without encryption, beyond this machine.
    pub is_plain_http_allowed: bool,
    /// What proves that the operator may read the model.
    pub token: Option<Secret>,
    /// Branch, tag or commit; `None` = `main`.
    pub revision: Option<String>,
    /// Whether only what was downloaded earlier may be used (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// Most bytes that downloads and prepared blocks may take in the cache folder; `None` = what
    /// the disk has.
    pub max_disk_bytes: Option<u64>,
}

/// A text that no log and no error shows.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret(String);

impl Secret {
    /// Hides `text`.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// The text, for the one place that needs it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// How the parts of a model that a client computes itself are downloaded, if they are in no folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchConfig {
    /// Folder for downloads.
    pub cache_dir: PathBuf,
    /// How the Hub is asked.
    pub hub: HubConfig,
}
