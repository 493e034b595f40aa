//! The parts of a model that a client computes itself, in a folder: the one that was named, or one that is made of
//! files and ranges of the Hub.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use clap::Args;
use model::client_tensors::client_tensors;
use serde_json::Value;
use shared::config::{HubConfig, PrepareConfig, QuantChoice, QuantType};

use crate::error::PrepareError;
pub use crate::hub::CLIENT_FILE;
use crate::hub::Hub;
use crate::progress::PrepareProgress;
use crate::repository::{default_dht_prefix, is_repo_id};

/// How the parts of a model that a client computes itself are downloaded, if they are in no folder.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
#[command(rename_all = "snake_case")]
pub struct FetchConfig {
    /// Folder for downloads [env: SEPAL_CACHE] [default: ~/.cache/sepal]
    #[arg(long, value_name = "FOLDER", required = false)]
    pub cache_dir: PathBuf,
    #[command(flatten)]
    pub hub: HubConfig,
}

/// Where a client reads a model from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientFolder {
    pub path: PathBuf,
    /// The prefix that servers announce the model under by its name on the Hub; `None` for a folder, and where
    /// config.json names one.
    pub dht_prefix: Option<String>,
}

/// The folder of `model`: that folder, or one in the cache with what a client needs of this model of the Hub.
/// Shows progress on a terminal.
///
/// # Errors
/// [`PrepareError`] with one sentence for the user.
pub fn folder(model: &Path, fetch: &FetchConfig) -> Result<ClientFolder, PrepareError> {
    let name = model.to_string_lossy();
    if model.is_dir() || !is_repo_id(&name) {
        // What is wrong with it, whoever reads it says.
        return Ok(ClientFolder { path: model.to_owned(), dht_prefix: None });
    }
    let config = PrepareConfig {
        model: name.clone().into_owned(),
        dtype: None,
        quant_type: QuantChoice::ByDevice(QuantType::None),
        adapters: Vec::new(),
        cache_dir: fetch.cache_dir.clone(),
        hub: fetch.hub.clone(),
    };
    let (is_seen, mut shown) = (std::io::stderr().is_terminal(), None);
    let mut hub = Hub::open(&config)?;
    let mut dht_prefix = None;
    let by_config = |config: &Value| {
        let text = |name| config.get(name).and_then(Value::as_str);
        // The client itself reads what config.json says.
        if text("dht_prefix").is_none() {
            dht_prefix = default_dht_prefix(text("model_type").unwrap_or_default(), &name);
        }
        client_tensors(config)
    };
    let path = hub.client_tensors(by_config, &mut |progress| {
        if let PrepareProgress::Download { done, total } = progress
            && is_seen
        {
            let percent = done * 100 / total.max(1);
            if shown.replace(percent) != Some(percent) {
                let mb = total / 1_000_000;
                eprint!("\rsepal: embeddings and head of {name}: {percent} % of {mb} MB");
            }
        }
        Ok(())
    });
    if shown.is_some() {
        eprintln!();
    }
    Ok(ClientFolder { path: path?, dht_prefix })
}
