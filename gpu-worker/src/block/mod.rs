//! One transformer block over any spec and any backend. A family is data ([`BlockSpec`], filled in by a file of
//! `family/`); the forward pass is written once and knows neither families nor devices.

mod adapters;
mod backward;
mod family;
mod forward;
mod kept;
mod rope;
mod spec;
mod weights;

pub use adapters::AdapterView;
pub use backward::{GradientWork, Sums, backward};
pub use forward::{
    BlockInput, PromptPart, Workspace, close_run, forward, forward_joined, forward_keeping,
    open_run, prepare,
};
pub use kept::{Kept, Level, Store, keys, levels, token_bytes};
pub use rope::RopeScaling;
pub use spec::{
    BlockSpec, Experts, GatedMlp, LinearSpec, Mlp, Norm, PlainMlp, Position, Qkv, Residual,
    SpecError, TensorSpec,
};
pub use weights::{BlockWeights, WeightsError};
