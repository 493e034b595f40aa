//! How the ranks of a group share the blocks of a model (tensor parallelism). Pure arithmetic over a
//! [`BlockSpec`]: the supervisor plans memory with it, prepare stores the decision, and each worker
//! finds in it what to hold.
//!
//! ```text
//! q, k, v, fused qkv, gate, up   by outputs     whole heads; columns of the MLP, of every expert alike
//! o, down                        by inputs      their products are partial: all ranks' sum is the result
//! biases of q, k, v, gate, up    with outputs   biases of o and down: rank 0 alone
//! norms, router                  every rank
//! LoRA: A like the inputs of its matrix, B like the outputs
//! ```
//! Heads are cut at borders of key/value heads, or a rank has query heads of a single key/value head,
//! which all ranks that read it hold: attention knows one uniform number of query heads per key/value
//! head. A cut of inputs falls on a multiple of [`ALIGNMENT`] where any cut of the heads does;
//! elsewhere the products of the rank are slow ([`Shard::is_slow`]).

mod shares;
mod slice;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;

use shared::config::QuantType;
use shared::model::ModelFacts;

use crate::spec::{BlockSpec, Experts, GatedMlp, LinearSpec, Mlp, Position, Qkv};

pub use shared::shm::group::MAX_RANKS;
pub use shares::{ShareError, Shares};
pub use slice::{Slice, SliceShape};

/// Cuts of inputs fall on multiples of this where possible: the weights of an NF4 group, and of a
/// step of the fast products.
pub const ALIGNMENT: usize = 64;

/// What one rank of a group holds of every block.
#[derive(Clone, Debug, PartialEq)]
pub struct Shard {
    /// Index of the rank.
    pub rank: usize,
    /// Ranks of the group.
    pub world: usize,
    pub heads: Range<usize>,
    /// The key/value heads that they read; other ranks may hold the same one.
    pub kv_heads: Range<usize>,
    /// Its columns of the middle of the MLP, or of each expert.
    pub columns: Range<usize>,
    /// The form of its part of a block; hidden states keep their width.
    pub spec: BlockSpec,
    /// By name of the tensor within the block, with the shape of the whole tensor.
    slices: BTreeMap<String, (Vec<usize>, Slice)>,
}

impl Shard {
    /// What the rank holds of the tensor `name` of a block; `None` when blocks have no such tensor.
    pub fn slice(&self, name: &str) -> Option<&Slice> {
        self.slices.get(name).map(|(_, slice)| slice)
    }

    /// The shape of the whole tensor `name` of a block; `None` when blocks have no such tensor.
    pub fn whole_shape(&self, name: &str) -> Option<&[usize]> {
        self.slices.get(name).map(|(shape, _)| &shape[..])
    }

    /// What the rank holds of an adapter's factors A `[rank, inputs]` and B `[outputs, rank]`
    /// beside the matrix `name` (without `.weight`).
    pub fn adapter_slices(&self, name: &str) -> Option<[Slice; 2]> {
        Some(match self.slice(&format!("{name}.weight"))? {
            Slice::Columns(columns) => [Slice::Columns(columns.clone()), Slice::All],
            rows => [Slice::All, rows.clone()],
        })
    }

    /// Whether a product of the rank is slow, because its inputs are cut beside a multiple of
    /// [`ALIGNMENT`].
    pub fn is_slow(&self) -> bool {
        let is_odd = |(_, slice): &(_, Slice)| match slice {
            Slice::Columns(columns) => {
                [columns.start, columns.end].iter().any(|end| !end.is_multiple_of(ALIGNMENT))
            }
            _ => false,
        };
        self.slices.values().any(is_odd)
    }

    /// Bytes of the rank's share of one block's weights when matrices are stored as `quant`;
    /// `None` when that is no size. `bytes` tells those of one tensor (package `kernels`,
    /// `quant::held_bytes`).
    pub fn weight_bytes(
        &self,
        quant: QuantType,
        bytes: impl Fn(QuantType, SliceShape) -> Option<usize>,
    ) -> Option<u64> {
        self.sum_bytes(quant, bytes, |_| true)
    }

    /// Those of [`weight_bytes`](Self::weight_bytes) that do not lie in one piece where the block is
    /// stored.
    pub fn copied_bytes(
        &self,
        quant: QuantType,
        bytes: impl Fn(QuantType, SliceShape) -> Option<usize>,
    ) -> Option<u64> {
        self.sum_bytes(quant, bytes, Slice::is_copied)
    }

    fn sum_bytes(
        &self,
        quant: QuantType,
        bytes: impl Fn(QuantType, SliceShape) -> Option<usize>,
        counts: impl Fn(&Slice) -> bool,
    ) -> Option<u64> {
        let mut slices = self.slices.iter().filter(|(_, (_, slice))| counts(slice));
        slices.try_fold(0u64, |sum, (name, (shape, slice))| {
            let bytes = match slice.of(shape) {
                Some(part) => bytes(self.spec.quant_of(name, shape.len(), quant), part)?,
                None => 0,
            };
            sum.checked_add(bytes as u64)
        })
    }

    /// The facts of the model as far as the memory of this rank depends on them: its heads, and
    /// `block_bytes` for its weights.
    pub fn facts(&self, whole: &ModelFacts, block_bytes: u64) -> ModelFacts {
        // Not more than the facts of the whole model, which fit.
        let count = |part: &Range<usize>, whole: u32| {
            u32::try_from(part.len()).map_or(whole, |part| part.min(whole))
        };
        ModelFacts {
            attention_heads: count(&self.heads, whole.attention_heads),
            kv_heads: count(&self.kv_heads, whole.kv_heads),
            block_bytes,
            ..whole.clone()
        }
    }
}

impl Shares {
    /// What each rank holds of the blocks of `spec`.
    ///
    /// # Errors
    /// [`ShareError`] when these are not shares of such blocks.
    pub fn shards(&self, spec: &BlockSpec) -> Result<Vec<Shard>, ShareError> {
        let (ranges, world) = (self.ranges(spec)?, self.ranks());
        let shard = |(rank, ranges): (usize, [Range<usize>; 3])| {
            let [heads, kv_heads, columns] = ranges;
            Ranges { rank, world, heads, kv_heads, columns }.shard(spec)
        };
        Ok(ranges.into_iter().enumerate().map(shard).collect())
    }
}

/// The ranges of one rank, from which its shard follows.
struct Ranges {
    rank: usize,
    world: usize,
    heads: Range<usize>,
    kv_heads: Range<usize>,
    columns: Range<usize>,
}

impl Ranges {
    fn shard(self, whole: &BlockSpec) -> Shard {
        let spec = self.spec(whole);
        let slices = match self.world {
            1 => BTreeMap::new(),
            _ => self.slices(whole),
        };
        let tensors = whole.tensors(0).into_iter();
        let slices = tensors.map(|tensor| {
            let slice = match slices.get(&tensor.name) {
                Some(slice) if !slice.is_all(tensor.shape[0]) => slice.clone(),
                _ => Slice::All,
            };
            (tensor.name, (tensor.shape, slice))
        });
        let slices = slices.collect();
        let Ranges { rank, world, heads, kv_heads, columns } = self;
        Shard { rank, world, heads, kv_heads, columns, spec, slices }
    }

    fn spec(&self, whole: &BlockSpec) -> BlockSpec {
        let d = whole.head_dim;
        let (q, kv, middle) = (self.heads.len() * d, self.kv_heads.len() * d, self.columns.len());
        BlockSpec {
            heads: self.heads.len(),
            kv_heads: self.kv_heads.len(),
            position: match &whole.position {
                Position::Alibi { slopes, scale } => {
                    let own = slopes.get(self.heads.clone()).unwrap_or_default();
                    Position::Alibi { slopes: own.to_vec(), scale: *scale }
                }
                rotated => rotated.clone(),
            },
            qkv: match &whole.qkv {
                Qkv::Separate([q_spec, k_spec, v_spec]) => Qkv::Separate([
                    by_outputs(q_spec, q),
                    by_outputs(k_spec, kv),
                    by_outputs(v_spec, kv),
                ]),
                Qkv::Fused(qkv) => Qkv::Fused(by_outputs(qkv, q + 2 * kv)),
            },
            o: self.by_inputs(&whole.o, q),
            mlp: match &whole.mlp {
                Mlp::Gated(mlp) => Mlp::Gated(self.gated(mlp)),
                Mlp::Plain(mlp) => {
                    let mut mlp = mlp.clone();
                    mlp.intermediate = middle;
                    mlp.up = by_outputs(&mlp.up, middle);
                    mlp.down = self.by_inputs(&mlp.down, middle);
                    Mlp::Plain(mlp)
                }
                Mlp::Experts(mlp) => Mlp::Experts(Experts {
                    experts: mlp.experts.iter().map(|expert| self.gated(expert)).collect(),
                    ..mlp.clone()
                }),
            },
            ..whole.clone()
        }
    }

    fn gated(&self, mlp: &GatedMlp) -> GatedMlp {
        let middle = self.columns.len();
        GatedMlp {
            intermediate: middle,
            gate: by_outputs(&mlp.gate, middle),
            up: by_outputs(&mlp.up, middle),
            down: self.by_inputs(&mlp.down, middle),
        }
    }

    fn by_inputs(&self, whole: &LinearSpec, inputs: usize) -> LinearSpec {
        LinearSpec { inputs, bias: whole.bias && self.rank == 0, ..whole.clone() }
    }

    /// Of the tensors that no rank holds whole.
    fn slices(&self, whole: &BlockSpec) -> BTreeMap<String, Slice> {
        let mut slices = BTreeMap::new();
        let mut rows = |linear: &LinearSpec, ranges: Vec<Range<usize>>| {
            let slice = slice::rows(ranges);
            slices.insert(linear.bias_name(), slice.clone());
            slices.insert(linear.weight_name(), slice);
        };
        let times = |heads: &Range<usize>| heads.start * whole.head_dim..heads.end * whole.head_dim;
        match &whole.qkv {
            Qkv::Separate([q, k, v]) => {
                rows(q, vec![times(&self.heads)]);
                rows(k, vec![times(&self.kv_heads)]);
                rows(v, vec![times(&self.kv_heads)]);
            }
            Qkv::Fused(qkv) => rows(qkv, self.fused_rows(whole)),
        }
        let mut downs = vec![(&whole.o, times(&self.heads))];
        let mut gated = |mlp: &GatedMlp| {
            rows(&mlp.gate, vec![self.columns.clone()]);
            rows(&mlp.up, vec![self.columns.clone()]);
        };
        match &whole.mlp {
            Mlp::Gated(mlp) => {
                gated(mlp);
                downs.push((&mlp.down, self.columns.clone()));
            }
            Mlp::Plain(mlp) => {
                rows(&mlp.up, vec![self.columns.clone()]);
                downs.push((&mlp.down, self.columns.clone()));
            }
            Mlp::Experts(mlp) => {
                mlp.experts.iter().for_each(&mut gated);
                downs.extend(mlp.experts.iter().map(|e| (&e.down, self.columns.clone())));
            }
        }
        for (linear, columns) in downs {
            slices.insert(linear.weight_name(), Slice::Columns(columns));
            let bias = if self.rank == 0 { Slice::All } else { Slice::None };
            slices.insert(linear.bias_name(), bias);
        }
        slices
    }

    /// Rows of the fused projection: per key/value head the queries of its group, its key, its
    /// value.
    fn fused_rows(&self, whole: &BlockSpec) -> Vec<Range<usize>> {
        let (group, d) = (whole.group(), whole.head_dim);
        // Key and value stand behind the queries as two more heads would.
        let head = |head: usize| (head / group * (group + 2) + head % group) * d;
        self.kv_heads
            .clone()
            .flat_map(|kv| {
                let first = self.heads.start.max(kv * group);
                let last = self.heads.end.min((kv + 1) * group) - 1;
                let key = (kv * (group + 2) + group) * d;
                [head(first)..head(last) + d, key..key + 2 * d]
            })
            .collect()
    }
}

fn by_outputs(whole: &LinearSpec, outputs: usize) -> LinearSpec {
    LinearSpec { outputs, ..whole.clone() }
}
