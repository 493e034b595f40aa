//! `sepal gateway`: OpenAI's API over models that a swarm serves. Programs that speak this API use the
//! swarm unchanged. `sepal chat` is a conversation on the terminal, on the same engine.
//!
//! ```text
//!   HTTP (api) -> prompt by the chat template (template), tokens (model)
//!              -> a session of an earlier turn or a new one (conversations)
//!              -> one task per text (generation): steps over the chain, pieces of text into a bounded queue
//!              -> JSON, or server-sent events, as fast as the caller reads
//! ```
//!
//! A caller that goes away drops the queue; the task ends, and its session with it.
#![forbid(unsafe_code)]

mod accounts;
mod api;
pub mod chat;
pub mod config;
mod conversations;
mod engine;
mod generation;
mod metrics;
mod model;
mod server;
mod template;
mod view;

pub use server::run_command;
