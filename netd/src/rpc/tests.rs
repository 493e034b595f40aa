//! RPCs over loopback against a worker thread behind real rings.

mod errors;
mod recovery;
mod rig;
mod steps;
