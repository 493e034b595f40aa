//! Inference sessions: the KV memory they hold, the page tables of their rows, and what is
//! remembered between steps. Everything here but [`admission`] and [`fair_permits`] is pure: no clock, no
//! socket, no task.
//!
//! ```text
//!   admission       who may hold KV memory, and who waits for it  (async driver over queue)
//!   queue           order among those that wait                   pure
//!   shares          how much of it one peer may take              pure
//!   eviction        which silent sessions end for others          pure
//!   pool            budget and pages of every block               pure
//!   table           page tables of one session, copy on write     pure
//!   session_record  a session as bytes that outlive netd          pure
//!   session         one session between its steps                 pure
//!   fair_queue      whose large request is computed next          pure
//!   fair_permits    waits for that                                (async driver over fair_queue)
//! ```

pub mod admission;
pub mod eviction;
pub mod fair_permits;
pub mod fair_queue;
#[cfg(test)]
mod fuzz;
pub mod pool;
pub mod pressure;
pub mod queue;
pub mod session;
pub mod session_record;
pub mod shares;
pub mod table;
