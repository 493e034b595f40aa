//! One transformer block over any spec and any backend. A family is data
//! ([`BlockSpec`](model::BlockSpec)); the forward pass is written once and knows neither families nor
//! devices.

//!
//! ```text
//! manifest ──map──> MappedWeights ──load──> BlockWeights ─┐
//!                   map.rs                  weights.rs    ├─> forward, backward ──> hidden states
//! kv segment ─────────────────────────────> pages, kv.rs ─┘
//! ```
//! The worker's executor runs blocks, and so does a client whose draft model guesses tokens.
#![deny(unsafe_code)]

mod activations;
mod adapters;
mod backward;
mod forward;
pub mod kv;
pub mod map;
mod rope;
mod weights;

pub use activations::{ActivationStore, SaveLevel, SavedActivations, levels, token_bytes};
pub use adapters::AdapterView;
pub use backward::{GradientWork, Sums, backward};
pub use forward::{
    PromptPart, Workspace, add_prompts, close_run, forward, forward_joined, forward_saving, keys,
    open_run, prepare,
};
pub use weights::{BlockWeights, WeightsError};
