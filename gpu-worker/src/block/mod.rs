//! One transformer block over any spec and any backend. A family is data
//! ([`BlockSpec`](model::BlockSpec)); the forward pass is written once and knows neither families nor
//! devices.

mod adapters;
mod backward;
mod forward;
mod rope;
mod saved;
mod weights;

pub use adapters::AdapterView;
pub use backward::{GradientWork, Sums, backward};
pub use forward::{
    BlockInput, PromptPart, Workspace, close_run, forward, forward_joined, forward_saving, keys,
    open_run, prepare,
};
pub use saved::{ActivationStore, SaveLevel, SavedActivations, levels, token_bytes};
pub use weights::{BlockWeights, WeightsError};
