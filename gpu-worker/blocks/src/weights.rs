//! The weights of one block, checked against its spec and placed where the backend reads them.

use kernels::ops::{Adapter, Expert, GeluKind, OpError, convert};
use kernels::{Backend, DType, WeightView};

use model::{BlockSpec, Experts, GatedMlp, Gelu, LinearSpec, Mlp, Norm, Qkv};

/// Why weights do not make a block.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// There is no tensor of that name.
    #[error("tensor {0} is missing")]
    Missing(String),
    /// A tensor has another shape than the config says.
    #[error("tensor {name} has shape {found:?}, the config says {wanted:?}")]
    Shape {
        name: String,
        /// `[outputs, inputs]` found.
        found: [usize; 2],
        /// And wanted; a vector is one row.
        wanted: [usize; 2],
    },
    /// A matrix is not in the block dtype.
    #[error("tensor {name} is {found}, the block computes in {wanted}")]
    DType { name: String, found: DType, wanted: DType },
    /// The device did not take a tensor.
    #[error("cannot load tensor {name} onto the device")]
    Upload {
        name: String,
        #[source]
        source: OpError,
    },
}

/// The weights of one block, in the form of its spec.
pub struct BlockWeights<'w, B: Backend> {
    pub(super) dtype: DType,
    pub(super) attention_norm: NormWeights<B>,
    pub(super) mlp_norm: Option<NormWeights<B>>,
    pub(super) qkv: QkvWeights<'w, B>,
    pub(super) head_norms: Option<[B::Buffer; 2]>,
    pub(super) o: Linear<'w, B>,
    pub(super) mlp: MlpWeights<'w, B>,
    /// Largest rank of the adapters; 0 without any.
    pub(super) largest_rank: usize,
}

/// Scale of a norm, and its bias if its kind has one.
pub(super) struct NormWeights<B: Backend> {
    pub(super) scale: B::Buffer,
    pub(super) bias: Option<B::Buffer>,
}

/// The projections before attention.
pub(super) enum QkvWeights<'w, B: Backend> {
    Separate([Linear<'w, B>; 3]),
    Fused(Linear<'w, B>),
}

/// The second half.
pub(super) enum MlpWeights<'w, B: Backend> {
    Gated(GatedWeights<'w, B>),
    Plain {
        activation: GeluKind,
        up: Linear<'w, B>,
        down: Linear<'w, B>,
    },
    Experts {
        router: Linear<'w, B>,
        chosen: usize,
        experts: Vec<GatedWeights<'w, B>>,
        /// The same, to be computed together.
        together: B::Experts<'w>,
        /// And the adapters of their matrices: gate, up, down, each `[experts, adapters]`; nothing
        /// when all of them leave it alone.
        adapters: [Option<B::Adapters<'w>>; 3],
    },
}

/// Matrices of a gated MLP.
pub(super) struct GatedWeights<'w, B: Backend> {
    pub(super) gate: Linear<'w, B>,
    pub(super) up: Linear<'w, B>,
    pub(super) down: Linear<'w, B>,
}

/// One matrix and its bias.
pub(super) struct Linear<'w, B: Backend> {
    pub(super) weight: B::Matrix<'w>,
    pub(super) bias: Option<B::Buffer>,
    /// By index of the adapter; nothing where an adapter leaves the matrix alone.
    pub(super) adapters: Vec<Option<Adapter<B::Matrix<'w>>>>,
    /// The same, to be added together; nothing when all of them leave it alone.
    pub(super) together: Option<B::Adapters<'w>>,
}

impl<'w, B: Backend> BlockWeights<'w, B> {
    /// The weights of a block that computes in `dtype`. `tensor` finds a tensor by its name within
    /// the block; a vector is a matrix of one row. Matrices stay where they are, vectors are
    /// copied and may have any dtype.
    ///
    /// # Errors
    /// [`WeightsError`] names the first tensor that is missing, of a wrong shape or (matrices) of
    /// another dtype.
    pub fn new(
        backend: &mut B,
        spec: &BlockSpec,
        dtype: DType,
        tensor: impl Fn(&str) -> Option<WeightView<'w>>,
    ) -> Result<Self, WeightsError> {
        let mut placing = Placing { backend, dtype, tensor };
        let mlp_norm = spec.mlp_norm.map(|name| placing.norm(spec, name));
        Ok(BlockWeights {
            dtype,
            attention_norm: placing.norm(spec, spec.attention_norm)?,
            mlp_norm: mlp_norm.transpose()?,
            qkv: placing.qkv(&spec.qkv)?,
            head_norms: match spec.head_norms {
                Some([q, k]) => Some([
                    placing.vector(format!("{q}.weight"), spec.head_dim)?,
                    placing.vector(format!("{k}.weight"), spec.head_dim)?,
                ]),
                None => None,
            },
            o: placing.linear(&spec.o)?,
            mlp: placing.mlp(&spec.mlp)?,
            largest_rank: 0,
        })
    }

    /// All matrices, in the order of [`BlockSpec::linears`].
    pub(super) fn linears_mut(&mut self) -> Vec<&mut Linear<'w, B>> {
        let mut linears: Vec<_> = match &mut self.qkv {
            QkvWeights::Separate(qkv) => qkv.iter_mut().collect(),
            QkvWeights::Fused(qkv) => vec![qkv],
        };
        linears.push(&mut self.o);
        match &mut self.mlp {
            MlpWeights::Gated(mlp) => linears.extend(mlp.linears_mut()),
            MlpWeights::Plain { up, down, .. } => linears.extend([up, down]),
            MlpWeights::Experts { router, experts, .. } => {
                linears.push(router);
                linears.extend(experts.iter_mut().flat_map(GatedWeights::linears_mut));
            }
        }
        linears
    }

    /// Largest rank of its adapters; 0 without any.
    pub fn largest_rank(&self) -> usize {
        self.largest_rank
    }

    /// The block dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

impl<'w, B: Backend> GatedWeights<'w, B> {
    fn linears_mut(&mut self) -> [&mut Linear<'w, B>; 3] {
        [&mut self.gate, &mut self.up, &mut self.down]
    }
}

struct Placing<'b, B, T> {
    backend: &'b mut B,
    dtype: DType,
    tensor: T,
}

impl<'w, B: Backend, T: Fn(&str) -> Option<WeightView<'w>>> Placing<'_, B, T> {
    fn norm(&mut self, spec: &BlockSpec, name: &str) -> Result<NormWeights<B>, WeightsError> {
        let scale = self.vector(format!("{name}.weight"), spec.hidden)?;
        let bias = match spec.norm {
            Norm::Rms { .. } => None,
            Norm::Layer { .. } => Some(self.vector(format!("{name}.bias"), spec.hidden)?),
        };
        Ok(NormWeights { scale, bias })
    }

    fn qkv(&mut self, spec: &Qkv) -> Result<QkvWeights<'w, B>, WeightsError> {
        Ok(match spec {
            Qkv::Separate([q, k, v]) => {
                QkvWeights::Separate([self.linear(q)?, self.linear(k)?, self.linear(v)?])
            }
            Qkv::Fused(qkv) => QkvWeights::Fused(self.linear(qkv)?),
        })
    }

    fn mlp(&mut self, spec: &Mlp) -> Result<MlpWeights<'w, B>, WeightsError> {
        Ok(match spec {
            Mlp::Gated(mlp) => MlpWeights::Gated(self.gated(mlp)?),
            Mlp::Plain(mlp) => MlpWeights::Plain {
                activation: match mlp.activation {
                    Gelu::Tanh => GeluKind::Tanh,
                    Gelu::Erf => GeluKind::Erf,
                },
                up: self.linear(&mlp.up)?,
                down: self.linear(&mlp.down)?,
            },
            Mlp::Experts(mlp) => self.experts(mlp)?,
        })
    }

    fn experts(&mut self, spec: &Experts) -> Result<MlpWeights<'w, B>, WeightsError> {
        let router = self.linear(&spec.router)?;
        let experts =
            spec.experts.iter().map(|expert| self.gated(expert)).collect::<Result<Vec<_>, _>>()?;
        let matrices = experts.iter().map(|expert| Expert {
            gate: expert.gate.weight.clone(),
            up: expert.up.weight.clone(),
            down: expert.down.weight.clone(),
        });
        let name = || spec.router.name.to_string();
        let together = self.backend.experts(matrices.collect());
        Ok(MlpWeights::Experts {
            router,
            chosen: spec.chosen,
            together: together.map_err(|source| WeightsError::Upload { name: name(), source })?,
            experts,
            adapters: [None, None, None],
        })
    }

    fn gated(&mut self, spec: &GatedMlp) -> Result<GatedWeights<'w, B>, WeightsError> {
        Ok(GatedWeights {
            gate: self.linear(&spec.gate)?,
            up: self.linear(&spec.up)?,
            down: self.linear(&spec.down)?,
        })
    }

    fn linear(&mut self, spec: &LinearSpec) -> Result<Linear<'w, B>, WeightsError> {
        let name = spec.weight_name();
        let view = self.find(&name, [spec.outputs, spec.inputs])?;
        if view.dtype() != self.dtype {
            return Err(WeightsError::DType { name, found: view.dtype(), wanted: self.dtype });
        }
        let weight =
            self.backend.matrix(view).map_err(|source| WeightsError::Upload { name, source })?;
        let bias =
            if spec.bias { Some(self.vector(spec.bias_name(), spec.outputs)?) } else { None };
        Ok(Linear { weight, bias, adapters: Vec::new(), together: None })
    }

    fn vector(&mut self, name: String, len: usize) -> Result<B::Buffer, WeightsError> {
        let view = self.find(&name, [1, len])?;
        let mut buffer = self.backend.buffer(len);
        let values = convert::to_vec(view.dtype(), view.bytes());
        self.backend
            .upload(&values, &mut buffer)
            .map_err(|source| WeightsError::Upload { name, source })?;
        Ok(buffer)
    }

    fn find(&self, name: &str, wanted: [usize; 2]) -> Result<WeightView<'w>, WeightsError> {
        let view = (self.tensor)(name).ok_or_else(|| WeightsError::Missing(name.to_owned()))?;
        let found = [view.outputs(), view.inputs()];
        if found == wanted {
            Ok(view)
        } else {
            Err(WeightsError::Shape { name: name.to_owned(), found, wanted })
        }
    }
}
