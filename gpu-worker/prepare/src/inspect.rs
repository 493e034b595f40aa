//! What config.json says: the form of the blocks, the facts that other processes need, and the
//! dtype to serve in.

use std::fs::File;
use std::path::PathBuf;

use kernels::quant;
use model::client_tensors::client_bytes;
use model::{BlockSpec, TensorSpec, context_length};
use serde_json::Value;
use shared::block::is_prefix;
use shared::config::{PrepareConfig, QuantType};
use shared::dtype::DType;
use shared::model::ModelFacts;

use crate::adapter::Adapter;
use crate::checkpoint::{Checkpoint, read_bounded};
use crate::converted_folder::Converted;
use crate::error::PrepareError;
use crate::folder::FolderRecord;
use crate::hub::{Hub, Weights};
use crate::locate::ModelFolder;
use crate::repository::default_dht_prefix;
use crate::store::FORMAT_VERSION;

/// Longest accepted config.json; published ones have a few kilobytes.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// A model that can be served, as far as its config tells.
#[derive(Debug)]
pub struct Inspected {
    /// What netd and the supervisor are told.
    pub facts: ModelFacts,
    /// Form of the blocks.
    pub spec: BlockSpec,
    pub(crate) config: Value,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) adapters: Vec<Adapter>,
    /// Where the checkpoint comes from, unless from a folder.
    pub(crate) hub: Option<Hub>,
    pub(crate) cache_dir: PathBuf,
    pub(crate) folder: PathBuf,
    /// What Sepal wrote of a folder that it made.
    pub(crate) record: Option<FolderRecord>,
    /// Prepared files of the span that was made ready last: open, with a lock each.
    pub(crate) _held: Vec<File>,
}

impl Inspected {
    /// Reads config.json of the model that `config` names, and finds its checkpoint files.
    ///
    /// # Errors
    /// [`PrepareError`] with one sentence for the operator: no such model, an unknown model type,
    /// no weights.
    pub fn new(config: &PrepareConfig) -> Result<Inspected, PrepareError> {
        Inspected::open(config, Weights::Fetched)
    }

    /// The same without a byte of the model's weights: for what headers alone tell
    /// (`survey_model`).
    ///
    /// # Errors
    /// As [`Inspected::new`].
    pub fn headers_only(config: &PrepareConfig) -> Result<Inspected, PrepareError> {
        Inspected::open(config, Weights::Left)
    }

    fn open(config: &PrepareConfig, weights: Weights) -> Result<Inspected, PrepareError> {
        let (folder, mut hub) = ModelFolder::locate(config)?;
        let path = folder.path.join("config.json");
        let json = read_bounded(&path, MAX_CONFIG_BYTES)?;
        let unsupported = |reason: String| PrepareError::Unsupported { path: path.clone(), reason };
        let value: Value =
            serde_json::from_slice(&json).map_err(|e| unsupported(format!("is no JSON: {e}")))?;
        let spec = BlockSpec::from_config(&value).map_err(|e| unsupported(e.to_string()))?;
        let converted = match &folder.record {
            Some(record) => record.served_format(&folder.path, FORMAT_VERSION, config)?,
            None => None,
        };
        let dtype = match (converted, config.dtype) {
            (Some((_, dtype)), _) | (None, Some(dtype)) => dtype,
            (None, None) => checkpoint_dtype(&value).map_err(unsupported)?,
        };
        let checkpoint = match &mut hub {
            Some(hub) => hub.checkpoint(weights)?,
            None if converted.is_some() => Checkpoint::empty(&folder.path),
            None => Checkpoint::find(&folder.path)?,
        };
        let cache_dir = std::path::absolute(&config.cache_dir)
            .map_err(|e| PrepareError::read(&config.cache_dir, e))?;
        let mut facts = facts(&folder, &value, &spec, dtype).map_err(unsupported)?;
        let adapters: Vec<Adapter> = config
            .adapters
            .iter()
            .map(|name| Adapter::open(name, config, &spec))
            .collect::<Result<_, _>>()?;
        facts.adapters.clone_from(&config.adapters);
        let (record, folder) = (folder.record, folder.path);
        let mut inspected = Inspected {
            facts,
            spec,
            config: value,
            checkpoint,
            adapters,
            hub,
            cache_dir,
            folder,
            record,
            _held: Vec::new(),
        };
        inspected.store_as(converted.map_or(config.quant_type.quant_type(), |(quant, _)| quant));
        Ok(inspected)
    }

    /// The folder, if its blocks were converted already.
    pub(crate) fn converted(&self) -> Option<Converted<'_>> {
        let record = self.record.as_ref().filter(|record| record.format.is_some())?;
        let Inspected { spec, facts, folder, .. } = self;
        Some(Converted { folder, record, spec, facts })
    }

    /// Stores matrices as `quant` from now on.
    pub fn store_as(&mut self, quant: QuantType) {
        self.facts.quant_type = quant;
        let own = block_bytes(&self.spec, ServedForm { dtype: self.facts.dtype, quant });
        let served = Adapter::served_dtype(&self.facts);
        let added = self.adapters.iter().map(|adapter| adapter.block_bytes(served));
        self.facts.block_bytes = added.fold(own, u64::saturating_add);
    }
}

/// The checkpoint's own type; float32 and an unnamed one become bfloat16 (petals
/// `server/block_utils.py`, `resolve_block_dtype`). Newer configs say `dtype` for `torch_dtype`.
fn checkpoint_dtype(config: &Value) -> Result<DType, String> {
    let name = config.get("torch_dtype").or_else(|| config.get("dtype")).and_then(Value::as_str);
    match name {
        None | Some("auto") => Ok(DType::Bf16),
        Some(name) => match name.parse::<DType>() {
            Ok(DType::F32) => Ok(DType::Bf16),
            Ok(dtype) => Ok(dtype),
            Err(error) => Err(format!("torch_dtype: {error}; or choose one with --torch_dtype")),
        },
    }
}

/// How weights are served.
#[derive(Clone, Copy)]
struct ServedForm {
    dtype: DType,
    quant: QuantType,
}

/// Bytes of one block; saturates.
fn block_bytes(spec: &BlockSpec, stored: ServedForm) -> u64 {
    let bytes = |tensor: TensorSpec| {
        let quant = spec.quant_of(&tensor.name, tensor.shape.len(), stored.quant);
        let (outputs, inputs) = match tensor.shape.as_slice() {
            [outputs, inputs] => (*outputs, *inputs),
            other => (1, other.iter().product()),
        };
        let held = quant::held_bytes(quant, stored.dtype, [outputs, inputs], outputs, 0..inputs);
        held.unwrap_or(usize::MAX) as u64
    };
    let tensors = spec.tensors(0).into_iter();
    tensors.map(bytes).fold(0, u64::saturating_add)
}

fn facts(
    folder: &ModelFolder,
    config: &Value,
    spec: &BlockSpec,
    dtype: DType,
) -> Result<ModelFacts, String> {
    let model_type =
        config.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let given = config
        .get("dht_prefix")
        .and_then(Value::as_str)
        .filter(|p| is_prefix(p))
        .map(str::to_owned);
    let by_repo = || folder.repo.as_deref().and_then(|repo| default_dht_prefix(&model_type, repo));
    let dht_prefix = given.or_else(by_repo);
    let size =
        |what: &str, n: usize| u32::try_from(n).map_err(|_| format!("{what} {n} is out of bounds"));
    Ok(ModelFacts {
        name: folder.name.clone(),
        repository: folder.repository(),
        model_type,
        dht_prefix,
        num_blocks: size("num_hidden_layers", spec.num_blocks)?,
        hidden_size: size("hidden_size", spec.hidden)?,
        attention_heads: size("num_attention_heads", spec.heads)?,
        kv_heads: size("num_key_value_heads", spec.kv_heads)?,
        head_dim: size("head_dim", spec.head_dim)?,
        context_tokens: context_length(config).map_err(|error| error.to_string())?,
        dtype,
        quant_type: QuantType::None,
        block_bytes: 0,
        client_bytes: client_bytes(config, dtype),
        adapters: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn float32_and_unnamed_checkpoints_are_served_in_bfloat16() {
        for config in [
            json!({}),
            json!({"torch_dtype": "float32"}),
            json!({"torch_dtype": "auto"}),
            json!({"torch_dtype": null}),
        ] {
            assert_eq!(checkpoint_dtype(&config), Ok(DType::Bf16), "{config}");
        }
        assert_eq!(checkpoint_dtype(&json!({"torch_dtype": "float16"})), Ok(DType::F16));
        assert_eq!(checkpoint_dtype(&json!({"dtype": "bfloat16"})), Ok(DType::Bf16));
        assert!(checkpoint_dtype(&json!({"torch_dtype": "int3"})).unwrap_err().contains("int3"));
    }
}
