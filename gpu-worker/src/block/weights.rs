//! The weights of one block, checked against its spec and placed where the backend reads them.

use kernels::ops::{OpError, convert};
use kernels::{Backend, DType, WeightView};

use super::spec::{BlockSpec, LinearSpec, Mlp};

/// Why weights do not make a block.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// There is no tensor of that name.
    #[error("tensor {0} is missing")]
    Missing(String),
    /// A tensor has another shape than the config says.
    #[error("tensor {name} has shape {found:?}, the config says {wanted:?}")]
    Shape {
        /// Its name.
        name: String,
        /// `[outputs, inputs]` found.
        found: [usize; 2],
        /// And wanted; a vector is one row.
        wanted: [usize; 2],
    },
    /// A matrix is not in the block dtype.
    #[error("tensor {name} is {found}, the block computes in {wanted}")]
    DType {
        /// Its name.
        name: String,
        /// Its dtype.
        found: DType,
        /// The block dtype.
        wanted: DType,
    },
    /// The device did not take a tensor.
    #[error("place tensor {name}")]
    Place {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: OpError,
    },
}

/// The weights of one block.
pub struct BlockWeights<'w, B: Backend> {
    pub(super) dtype: DType,
    pub(super) attention_norm: B::Buffer,
    pub(super) mlp_norm: B::Buffer,
    pub(super) q: Linear<'w, B>,
    pub(super) k: Linear<'w, B>,
    pub(super) v: Linear<'w, B>,
    pub(super) o: Linear<'w, B>,
    pub(super) gate: Linear<'w, B>,
    pub(super) up: Linear<'w, B>,
    pub(super) down: Linear<'w, B>,
}

/// One matrix and its bias.
pub(super) struct Linear<'w, B: Backend> {
    pub(super) weight: B::Matrix<'w>,
    pub(super) bias: Option<B::Buffer>,
}

impl<'w, B: Backend> BlockWeights<'w, B> {
    /// The weights of a block that computes in `dtype`. `tensor` finds a tensor by its name within the block; a vector is a
    /// matrix of one row. Matrices stay where they are, vectors are copied and may have any dtype.
    ///
    /// # Errors
    /// [`WeightsError`] names the first tensor that is missing, of a wrong shape or (matrices) of another dtype.
    pub fn new(
        backend: &mut B,
        spec: &BlockSpec,
        dtype: DType,
        tensor: impl Fn(&str) -> Option<WeightView<'w>>,
    ) -> Result<Self, WeightsError> {
        let mut placing = Placing {
            backend,
            dtype,
            tensor,
        };
        let Mlp::GatedSilu(mlp) = spec.mlp;
        let [q, k, v, o] = &spec.qkv_o;
        Ok(BlockWeights {
            dtype,
            attention_norm: placing.vector(spec.attention_norm.to_owned(), spec.hidden)?,
            mlp_norm: placing.vector(spec.mlp_norm.to_owned(), spec.hidden)?,
            q: placing.linear(q)?,
            k: placing.linear(k)?,
            v: placing.linear(v)?,
            o: placing.linear(o)?,
            gate: placing.linear(&mlp.gate)?,
            up: placing.linear(&mlp.up)?,
            down: placing.linear(&mlp.down)?,
        })
    }

    /// The block dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

struct Placing<'b, B, T> {
    backend: &'b mut B,
    dtype: DType,
    tensor: T,
}

impl<'w, B: Backend, T: Fn(&str) -> Option<WeightView<'w>>> Placing<'_, B, T> {
    fn linear(&mut self, spec: &LinearSpec) -> Result<Linear<'w, B>, WeightsError> {
        let name = spec.weight_name();
        let view = self.find(&name, [spec.outputs, spec.inputs])?;
        if view.dtype() != self.dtype {
            return Err(WeightsError::DType {
                name,
                found: view.dtype(),
                wanted: self.dtype,
            });
        }
        let weight = self
            .backend
            .matrix(view)
            .map_err(|source| WeightsError::Place { name, source })?;
        let bias = if spec.bias {
            Some(self.vector(spec.bias_name(), spec.outputs)?)
        } else {
            None
        };
        Ok(Linear { weight, bias })
    }

    fn vector(&mut self, name: String, len: usize) -> Result<B::Buffer, WeightsError> {
        let view = self.find(&name, [1, len])?;
        let mut buffer = self.backend.buffer(len);
        let values = convert::to_vec(view.dtype(), view.bytes());
        self.backend
            .upload(&values, &mut buffer)
            .map_err(|source| WeightsError::Place { name, source })?;
        Ok(buffer)
    }

    fn find(&self, name: &str, wanted: [usize; 2]) -> Result<WeightView<'w>, WeightsError> {
        let view = (self.tensor)(name).ok_or_else(|| WeightsError::Missing(name.to_owned()))?;
        let found = [view.outputs(), view.inputs()];
        if found == wanted {
            Ok(view)
        } else {
            Err(WeightsError::Shape {
                name: name.to_owned(),
                found,
                wanted,
            })
        }
    }
}
