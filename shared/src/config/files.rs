//! Where the model comes from, and what is made of it.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::values::size_bytes;
use crate::dtype::{DType, QuantChoice, QuantType, dtype_or_auto};

/// What prepare makes ready.
#[derive(Clone, Debug, Serialize, Deserialize, Args)]
#[command(rename_all = "snake_case")]
pub struct PrepareConfig {
    /// Folder in Hugging Face layout, or a Hub repository id.
    #[arg(skip)]
    pub model: String,
    /// Type of hidden states and unquantized weights: auto, float32, bfloat16 or float16; auto is
    /// the type of the checkpoint, bfloat16 if that is float32
    // The path has clap take `auto` for a value.
    #[arg(id = "torch_dtype", long = "torch_dtype", value_name = "TYPE", default_value = "auto", value_parser = dtype_or_auto, help_heading = None::<&str>)]
    #[serde(rename = "torch_dtype")]
    pub dtype: std::option::Option<DType>,
    /// How matrices are to be stored.
    #[arg(skip = QuantChoice::ByDevice(QuantType::None))]
    pub quant_type: QuantChoice,
    /// Folders of LoRA adapters in PEFT layout (adapter_config.json and
    /// adapter_model.safetensors); clients choose an adapter by the name given here
    // Or repositories of the Hub.
    #[arg(long, num_args = 0.., value_name = "ADAPTER", value_parser = adapter, help_heading = None::<&str>)]
    pub adapters: Vec<String>,
    /// Folder for prepared models [env: SEPAL_CACHE, PETALS_CACHE] [default: ~/.cache/sepal]
    #[arg(long, value_name = "DIR", required = false, help_heading = None::<&str>)]
    pub cache_dir: PathBuf,
    #[command(flatten)]
    pub hub: HubConfig,
}

/// Longest name of an adapter: that of a path.
const MAX_ADAPTER_BYTES: usize = 4096;

fn adapter(text: &str) -> Result<String, String> {
    match (1..=MAX_ADAPTER_BYTES).contains(&text.len()) {
        true => Ok(text.to_owned()),
        false => Err("expected the path of a folder".to_owned()),
    }
}

/// How files are downloaded from the Hugging Face Hub.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Hugging Face Hub")]
pub struct HubConfig {
    /// Address of the Hub (`HF_ENDPOINT`); `None` = the public one.
    #[arg(skip)]
    pub endpoint: Option<String>,
    /// Accept an address of the Hub in HF_ENDPOINT that is not encrypted (http://) on other machines than
    /// this one; whoever is on the way can then change what is downloaded
    #[arg(id = "allow_plain_http", long = "allow_plain_http")]
    #[serde(rename = "allow_plain_http")]
    pub is_plain_http_allowed: bool,
    /// Access token of the Hub for gated models [env: HF_TOKEN] [default: the token saved by
    /// huggingface-cli login]
    #[arg(long, value_name = "TOKEN", conflicts_with = "use_auth_token")]
    pub token: Option<Secret>,
    /// Use the token that `huggingface-cli login` saved, and fail if there is none
    #[arg(long)]
    #[serde(skip)]
    pub use_auth_token: bool,
    /// Branch, tag or commit of the model [default: main]
    #[arg(long, value_name = "REVISION", value_parser = revision)]
    pub revision: Option<String>,
    /// Download nothing; use files from earlier downloads [env: HF_HUB_OFFLINE]
    #[arg(long)]
    pub offline: bool,
    /// Maximum disk space for downloads and prepared blocks, such as 300GB or 100GiB; the least
    /// recently used blocks are evicted first [default: the whole disk]
    #[arg(id = "max_disk_space", long = "max_disk_space", value_name = "SIZE", value_parser = size_bytes)]
    #[serde(rename = "max_disk_space")]
    pub max_disk_bytes: Option<u64>,
}

/// Longest accepted revision.
const MAX_REVISION_BYTES: usize = 200;

/// A revision that is safe in a path and an address.
///
/// # Errors
/// A sentence with an example.
pub fn revision(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    let safe = !text.is_empty() && text.len() <= MAX_REVISION_BYTES && text.chars().all(plain);
    let inside = !text.starts_with(['/', '-', '.']) && !text.ends_with('/') && !text.contains("..");
    match safe && inside {
        true => Ok(text.to_owned()),
        false => Err("expected a branch, tag or commit such as main".to_owned()),
    }
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

impl From<String> for Secret {
    fn from(text: String) -> Secret {
        Secret(text)
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}
