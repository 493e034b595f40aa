//! The form of a block as data: everything about a block but the values of its weights.

use std::borrow::Cow;

use shared::config::QuantType;
use shared::model::BlockDimensions;

use crate::rope::RopeScaling;

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
    /// Width of one head; even where heads are rotated.
    pub head_dim: usize,
    /// Kind of all norms over the hidden width.
    pub norm: Norm,
    /// How attention knows positions.
    pub position: Position,
    /// Positions that a token sees, its own included; `None` for all before it.
    pub window: Option<usize>,
    /// How the two halves of a block are joined.
    pub residual: Residual,
    /// The norm before attention, by name within the block without `.weight`.
    pub attention_norm: &'static str,
    /// The norm before the MLP; `None` when it is fed what attention is fed.
    pub mlp_norm: Option<&'static str>,
    /// Queries, keys and values.
    pub qkv: Qkv,
    /// Norms over each head of the queries and of the keys (root mean square), before they are
    /// rotated.
    pub head_norms: Option<[&'static str; 2]>,
    /// The projection of what attention returns.
    pub o: LinearSpec,
    pub mlp: Mlp,
    /// What comes before the block's index in a checkpoint, for example `model.layers`.
    pub checkpoint_prefix: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// Root mean square, with this number added to the mean square; a scale, no bias.
    Rms { eps: f32 },
    /// Layer norm, with this number added to the variance; a scale and a bias.
    Layer { eps: f32 },
}

impl Norm {
    /// The number that keeps it from dividing by zero.
    pub fn eps(self) -> f32 {
        match self {
            Norm::Rms { eps } | Norm::Layer { eps } => eps,
        }
    }
}

/// A position encoding.
#[derive(Clone, Debug, PartialEq)]
pub enum Position {
    /// Rotation of queries and keys in the half-split form.
    Rope {
        /// Inverse frequencies `[head_dim / 2]`, scaling applied.
        inverse_frequencies: Vec<f32>,
        /// Base of the frequencies.
        theta: f32,
        /// The scaling that was applied.
        scaling: RopeScaling,
    },
    /// A bias of the scores by the position of the key.
    Alibi {
        /// Of each head `[heads]`.
        slopes: Vec<f32>,
        /// Multiplies the bias.
        scale: f32,
    },
}

/// How attention and MLP are added to the hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// `h = x + attention(norm(x)); y = h + mlp(norm(h))`.
    Sequential,
    /// `a = norm(x); b = norm(a + attention(a)); y = b + mlp(b)`: what was normed is what is added.
    Normed,
    /// `y = x + attention(norm(x)) + mlp(norm(x))`, with one norm or two.
    Parallel,
}

/// The projections before attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Qkv {
    Separate([LinearSpec; 3]),
    /// One matrix: per key/value head the queries of its group, then its key, then its value.
    Fused(LinearSpec),
}

/// The second half of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mlp {
    /// `down(silu(gate(x)) * up(x))`.
    Gated(GatedMlp),
    /// `down(gelu(up(x)))`.
    Plain(PlainMlp),
    /// Some of many gated MLPs, weighed by a router.
    Experts(Experts),
}

/// Matrices of a gated MLP.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// Matrices of a plain MLP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlainMlp {
    /// Width in the middle.
    pub intermediate: usize,
    /// What is done there.
    pub activation: Gelu,
    /// To the middle.
    pub up: LinearSpec,
    /// Back to the hidden width.
    pub down: LinearSpec,
}

/// The form of GELU in a plain MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// By a hyperbolic tangent.
    Tanh,
    /// By the error function.
    Erf,
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Logits of all experts.
    pub router: LinearSpec,
    /// Experts of each token.
    pub chosen: usize,
    /// The experts, all of one width.
    pub experts: Vec<GatedMlp>,
}

/// One matrix of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearSpec {
    /// Name within the block without `.weight` or `.bias`.
    pub name: Cow<'static, str>,
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

impl BlockSpec {
    /// The dimensions that the operations of a block depend on.
    pub fn dimensions(&self) -> BlockDimensions {
        BlockDimensions {
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            intermediate: self.mlp.intermediate(),
            experts_per_token: match &self.mlp {
                Mlp::Experts(mlp) => mlp.chosen,
                Mlp::Gated(_) | Mlp::Plain(_) => 1,
            },
            is_fused: matches!(self.qkv, Qkv::Fused(_)),
            is_parallel: self.residual == Residual::Parallel,
        }
    }

    /// Query heads per key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// How the tensor `name` of a block is stored when matrices are stored as `quant`: vectors (one
    /// of `sides`) stay as they are, and so does the router of a mixture of experts, which is
    /// small and whose errors choose other experts (Petals quantizes it).
    pub fn quant_of(&self, name: &str, sides: usize, quant: QuantType) -> QuantType {
        let router = match &self.mlp {
            Mlp::Experts(experts) => experts.router.weight_name() == name,
            _ => false,
        };
        if sides == 2 && !router { quant } else { QuantType::None }
    }

    /// All tensors that block `block` needs.
    pub fn tensors(&self, block: usize) -> Vec<TensorSpec> {
        let tensor = |name: String, shape: Vec<usize>| TensorSpec {
            full_name: format!("{}.{block}.{name}", self.checkpoint_prefix),
            name,
            shape,
        };
        let mut tensors = Vec::new();
        for name in [Some(self.attention_norm), self.mlp_norm].into_iter().flatten() {
            tensors.push(tensor(format!("{name}.weight"), vec![self.hidden]));
            if let Norm::Layer { .. } = self.norm {
                tensors.push(tensor(format!("{name}.bias"), vec![self.hidden]));
            }
        }
        for name in self.head_norms.into_iter().flatten() {
            tensors.push(tensor(format!("{name}.weight"), vec![self.head_dim]));
        }
        for linear in self.linears() {
            tensors.push(tensor(linear.weight_name(), vec![linear.outputs, linear.inputs]));
            if linear.bias {
                tensors.push(tensor(linear.bias_name(), vec![linear.outputs]));
            }
        }
        tensors
    }

    /// All matrices of a block.
    pub fn linears(&self) -> Vec<&LinearSpec> {
        let mut linears: Vec<&LinearSpec> = match &self.qkv {
            Qkv::Separate(qkv) => qkv.iter().collect(),
            Qkv::Fused(qkv) => vec![qkv],
        };
        linears.push(&self.o);
        match &self.mlp {
            Mlp::Gated(mlp) => linears.extend(mlp.linears()),
            Mlp::Plain(mlp) => linears.extend([&mlp.up, &mlp.down]),
            Mlp::Experts(mlp) => {
                linears.push(&mlp.router);
                linears.extend(mlp.experts.iter().flat_map(GatedMlp::linears));
            }
        }
        linears
    }
}

impl Mlp {
    /// Width in the middle.
    pub fn intermediate(&self) -> usize {
        match self {
            Mlp::Gated(mlp) => mlp.intermediate,
            Mlp::Plain(mlp) => mlp.intermediate,
            Mlp::Experts(mlp) => mlp.experts.first().map_or(0, |e| e.intermediate),
        }
    }
}

impl GatedMlp {
    fn linears(&self) -> [&LinearSpec; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

impl LinearSpec {
    /// A matrix `[outputs, inputs]`.
    pub fn new(
        name: impl Into<Cow<'static, str>>,
        outputs: usize,
        inputs: usize,
        bias: bool,
    ) -> LinearSpec {
        LinearSpec { name: name.into(), outputs, inputs, bias }
    }

    /// Name of the matrix within the block.
    pub fn weight_name(&self) -> String {
        format!("{}.weight", self.name)
    }

    /// Name of the bias within the block.
    pub fn bias_name(&self) -> String {
        format!("{}.bias", self.name)
    }
}
