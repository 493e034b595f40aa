//! RPCs over loopback against a worker thread behind real rings.

mod backward;
mod errors;
mod recovery;
pub(crate) mod rig;
mod steps;
