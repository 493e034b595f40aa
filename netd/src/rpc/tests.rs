//! RPCs over loopback against a worker thread behind real rings.

mod adapters;
mod backward;
mod chain;
mod compression;
mod errors;
mod hostile;
mod pushes;
mod recovery;
pub(crate) mod rig;
mod steps;
