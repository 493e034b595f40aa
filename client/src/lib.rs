//! The other end of the swarm: finds servers, chains their spans, runs the model's embedding and
//! head, and generates text. Used by `sepal generate`, by the demo and by the tests.
#![forbid(unsafe_code)]

pub mod batch;
mod calls;
pub mod chain;
mod checkpoint;
pub mod config;
pub mod decoder;
pub mod demo;
pub mod drafts;
pub mod end_rules;
pub mod generate;
pub mod generation;
pub mod generation_config;
pub mod grammar;
pub mod head;
pub mod history;
pub mod load;
pub mod local_layers;
pub mod probe;
pub mod prompt_scores;
pub mod report;
pub mod sampling;
pub mod session;
pub mod states;
pub mod stops;
pub mod swarm;
pub mod text;
pub mod text_model;
pub mod tokenizer_config;
