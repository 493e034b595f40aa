//! The form of a block as data, read from a model's config.json.

use kernels::{DType, PageLayout};
use serde_json::Value;

use super::family;
use super::rope::RopeScaling;

/// Everything that the forward pass of a block depends on besides its weights.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSpec {
    /// Blocks of the whole model.
    pub num_blocks: usize,
    /// Width of the hidden states.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head, even.
    pub head_dim: usize,
    /// Kind of both norms.
    pub norm: Norm,
    /// How attention knows positions.
    pub position: Position,
    /// How the two halves of a block are joined.
    pub residual: Residual,
    /// The second half.
    pub mlp: Mlp,
    /// Scale of the norm before attention, by name within the block.
    pub attention_norm: &'static str,
    /// Scale of the norm before the MLP.
    pub mlp_norm: &'static str,
    /// Queries, keys, values, and the projection of what attention returns.
    pub qkv_o: [LinearSpec; 4],
    /// What comes before the block's index in a checkpoint, for example `model.layers`.
    pub checkpoint_prefix: &'static str,
}

/// A norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// Root mean square, with this number added to the mean square.
    Rms {
        /// The number.
        eps: f32,
    },
}

/// A position encoding.
#[derive(Clone, Debug, PartialEq)]
pub enum Position {
    /// Rotation of queries and keys in the half-split form.
    Rope {
        /// Inverse frequencies `[head_dim / 2]`, scaling applied.
        inverse_frequencies: Vec<f32>,
        /// The scaling that was applied.
        scaling: RopeScaling,
    },
}

/// How attention and MLP are added to the hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// `h = x + attention(norm(x)); y = h + mlp(norm(h))`.
    Sequential,
}

/// The second half of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlp {
    /// `down(silu(gate(x)) * up(x))`.
    GatedSilu(GatedMlp),
}

/// Matrices of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedMlp {
    /// Width in the middle.
    pub intermediate: usize,
    /// Activated.
    pub gate: LinearSpec,
    /// Multiplied with it.
    pub up: LinearSpec,
    /// Back to the hidden width.
    pub down: LinearSpec,
}

/// One matrix of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearSpec {
    /// Name within the block without `.weight` or `.bias`.
    pub name: &'static str,
    /// Features that come out.
    pub outputs: usize,
    /// Features that go in.
    pub inputs: usize,
    /// Whether it has a bias.
    pub bias: bool,
}

/// A tensor that a block needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name within the block.
    pub name: String,
    /// Name in the checkpoint.
    pub full_name: String,
    /// Its shape: one side for a vector, `[outputs, inputs]` for a matrix.
    pub shape: Vec<usize>,
}

/// Why config.json describes no block that can be served.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// A family that is not there.
    #[error("model_type {found:?} is not supported; supported are: {}", family::NAMES.join(", "))]
    UnknownModelType {
        /// What the config says, shortened.
        found: String,
    },
    /// A field that must be there is not.
    #[error("{field} is missing")]
    Missing {
        /// Its name.
        field: &'static str,
    },
    /// A field with a value that makes no sense.
    #[error("{field} is {value}, but must be {wanted}")]
    Bad {
        /// Its name.
        field: &'static str,
        /// What the config says, shortened.
        value: String,
        /// What would be accepted.
        wanted: String,
    },
}

impl BlockSpec {
    /// The form of the blocks of the model that `config` (a config.json) describes.
    ///
    /// # Errors
    /// [`SpecError`] names the field, its value and what is accepted: unknown families, missing or absurd numbers, heads that do
    /// not divide, features that are not supported.
    pub fn from_config(config: &Value) -> Result<BlockSpec, SpecError> {
        family::read(config)
    }

    /// Query heads per key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Shape of the KV pages of one block.
    pub fn page_layout(&self, dtype: DType) -> PageLayout {
        PageLayout {
            dtype,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
        }
    }

    /// All tensors that block `block` needs.
    pub fn tensors(&self, block: usize) -> Vec<TensorSpec> {
        let tensor = |name: String, shape: Vec<usize>| TensorSpec {
            full_name: format!("{}.{block}.{name}", self.checkpoint_prefix),
            name,
            shape,
        };
        let norms = [self.attention_norm, self.mlp_norm]
            .map(|name| tensor(name.to_owned(), vec![self.hidden]));
        let mut tensors = Vec::from(norms);
        for linear in self.linears() {
            tensors.push(tensor(
                linear.weight_name(),
                vec![linear.outputs, linear.inputs],
            ));
            if linear.bias {
                tensors.push(tensor(linear.bias_name(), vec![linear.outputs]));
            }
        }
        tensors
    }

    fn linears(&self) -> impl Iterator<Item = LinearSpec> {
        let Mlp::GatedSilu(mlp) = self.mlp;
        self.qkv_o.into_iter().chain([mlp.gate, mlp.up, mlp.down])
    }
}

impl LinearSpec {
    /// Name of the matrix within the block.
    pub fn weight_name(&self) -> String {
        format!("{}.weight", self.name)
    }

    /// Name of the bias within the block.
    pub fn bias_name(&self) -> String {
        format!("{}.bias", self.name)
    }
}
