//! RPCs over loopback against a worker thread behind real rings.

mod adapters;
mod backward;
mod chain;
mod compression;
mod errors;
#[path = "../../hivemind/src/wire/golden.rs"]
#[expect(dead_code, reason = "the tests of the wire use the rest of it")]
mod golden;
mod hostile;
mod pushes;
mod recovery;
pub(crate) mod rig;
mod steps;
