//! What `sepal plan` says, in the form that `--json` prints. The names of the fields are kept from
//! version to version of Sepal as long as [`VERSION`] is; `deploy/TOOLS.md` describes them.

use serde::Serialize;

/// Raised when a field changes its meaning or goes away. New fields do not raise it.
pub const VERSION: u32 = 1;

/// What a run would serve.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// [`VERSION`].
    pub version: u32,
    /// Folder name or repository of the model.
    pub model: String,
    /// `model_type` of config.json.
    pub model_type: String,
    /// Commit of the revision, of a model of the Hub.
    pub commit: Option<String>,
    /// Blocks of the whole model.
    pub model_blocks: u32,
    /// Type of hidden states, KV cache and unquantized weights.
    pub dtype: String,
    /// Most tokens of a text of the model; `None` when config.json names no length.
    pub max_model_len: Option<u32>,
    /// Most tokens of a session.
    pub inference_max_length: u32,
    /// KV cache per block, in tokens.
    pub attn_cache_tokens: u32,
    /// Memory of the machine that the run may use; `None` when the system does not tell.
    pub memory_bytes: Option<u64>,
    /// What the network carries each way, in megabits per second.
    pub network_mbps: f64,
    /// How that is known.
    pub network_source: String,
    /// One for each format.
    pub formats: Vec<FormatPlan>,
}

/// What a run would serve in one format.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FormatPlan {
    /// `none`, `int8` or `nf4`.
    pub quant_type: String,
    /// Whether it is the one that `serve` takes with these flags.
    pub is_default: bool,
    /// Weights of one block, with its parts of all adapters.
    pub block_bytes: u64,
    /// Keys and values of one token in one block.
    pub kv_token_bytes: u64,
    /// Blocks that `serve` serves; 0 when it refuses.
    pub blocks: u32,
    pub refusal: Option<String>,
    /// What it announces as its throughput, in tokens per second; `None` when that is not known.
    pub throughput_rps: Option<f64>,
    /// How the speed of the devices is known.
    pub throughput_origin: RateOrigin,
    /// What an estimate is computed from.
    pub estimate_basis: Option<String>,
    /// Steps of one token through one block per second.
    pub inference_rps: Option<f64>,
    /// Tokens of long batches through one block per second.
    pub forward_rps: Option<f64>,
    /// Tokens per second that the network carries.
    pub network_rps: f64,
    /// Bytes to download; of blocks that the swarm chooses, of those that need most.
    pub download_bytes: u64,
    /// Seconds that the download takes at the network's rate.
    pub download_s: f64,
    /// One for each group of devices, most of which are a single device.
    pub groups: Vec<GroupPlan>,
}

/// What one group of devices would serve.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupPlan {
    /// Its devices, in the order of ranks.
    pub devices: Vec<String>,
    /// Memory that counts for it: of the device that holds the fewest blocks, or of the machine.
    pub free_bytes: Option<u64>,
    /// Weights of one block there; of a rank, its share.
    pub weights_bytes: u64,
    /// KV cache of one block there.
    pub kv_bytes: u64,
    /// Recorded decode steps of one block.
    pub recorded_bytes: u64,
    /// What is needed there however many blocks are served.
    pub workspace_bytes: u64,
    /// Most blocks that its memory holds.
    pub most_blocks: u32,
    /// Blocks that it serves.
    pub blocks: u32,
}

/// How a speed is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RateOrigin {
    /// The operator says so (`--throughput RPS`).
    Given,
    /// Workers measured it at an earlier start.
    Measured,
    /// It is computed from rates of memory and arithmetic.
    Estimated,
    /// Nobody knows.
    Unknown,
}
