//! Keeps the threads of a worker on its CPUs, and its memory on its NUMA node.

use kernels::Cpu;
use shared::config::Device;
use shared::processor::Seats;
use shared::shm::numa_memory::prefer_node;
use tracing::warn;

/// Has this thread, and the threads that it will start, run on the CPUs of `seats`, and take memory of the
/// node if `device` is one. What the system refuses costs speed alone, and is logged.
pub fn stay_on(seats: &Seats, device: Device) {
    if let Err(error) = seats.take_all() {
        warn!(%error, %seats, "cannot keep the worker on its CPUs");
    }
    if let Device::Node(node) = device
        && let Err(error) = prefer_node(node)
    {
        warn!(%error, node, "cannot take memory of the NUMA node alone");
    }
}

/// A processor of `threads` threads, each on its seat; this thread is the first.
pub fn seated(seats: &Seats, threads: usize) -> Cpu {
    let sit = |seats: &Seats, index| {
        if let Err(error) = seats.take(index) {
            warn!(%error, %seats, index, "cannot keep a thread on its CPU");
        }
    };
    let helpers = seats.clone();
    let cpu = Cpu::started(threads, move |index| sit(&helpers, index));
    sit(seats, 0);
    cpu
}
