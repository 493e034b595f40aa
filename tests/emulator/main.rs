//! Whole servers whose CUDA kernels run on the emulator of devices.

mod driver;
mod emulated;
mod emulated_groups;
#[path = "../harness/mod.rs"]
mod harness;
mod restarts;
