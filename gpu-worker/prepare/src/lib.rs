//! Makes a model ready for the workers: reads a model folder or the Hub, checks it, converts what
//! is not in the block dtype, and leaves a [`Manifest`](model::manifest::Manifest) that workers map.
//! The short-lived role `prepare` ([`run`]) does it in one thread. It alone reads checkpoints, so
//! that a malformed one ends a process that nobody depends on. It never writes into the model
//! folder.
//!
//! ```text
//! model name -> folder (locate), or the Hub (hub, disk_cache) -> config.json -> BlockSpec, ModelFacts
//!            -> checkpoint files (checkpoint, header) -> tensors (source) -> prepared blocks (store) -> manifest
//! ```
#![forbid(unsafe_code)]

mod adapter;
pub mod cache;
mod checkpoint;
pub mod client_tensors;
pub mod convert;
mod converted_folder;
mod devices;
pub mod disk_cache;
mod error;
mod estimate;
mod files;
mod folder;
mod groups;
mod hub;
mod inspect;
mod locate;
mod peek;
mod preparation;
mod progress;
mod repository;
mod role;
mod source;
mod staging;
mod store;
mod survey;
mod table;
mod temp_files;

pub use error::PrepareError;
pub use inspect::Inspected;
pub use locate::ModelFolder;
pub use progress::PrepareProgress;
pub use role::run;
pub use survey::survey_model;

#[cfg(test)]
mod tests;
