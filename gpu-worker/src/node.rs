//! Keeps a process on one NUMA node of the processor.

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use shared::numa;
use shared::shm::local::prefer_node;
use tracing::warn;

/// Has this thread, and the threads that it will start, run on the cores of `node` and take memory
/// there.
///
/// # Errors
/// A sentence, when none of the cores may be used.
pub fn stay_on(node: u32) -> Result<(), String> {
    let Some(cores) = numa::cores(node) else {
        return Err(format!("cannot find the cores of NUMA node {node}"));
    };
    let this_thread = Pid::from_raw(0);
    let allowed = sched_getaffinity(this_thread).unwrap_or_default();
    let mut pinned = CpuSet::new();
    let usable = cores.iter().map(|&core| core as usize);
    let usable = usable.filter(|&core| allowed.is_set(core).unwrap_or(false));
    let count = usable.filter(|&core| pinned.set(core).is_ok()).count();
    if count == 0 {
        return Err(format!("this process may not run on any core of NUMA node {node}"));
    }
    sched_setaffinity(this_thread, &pinned)
        .map_err(|error| format!("cannot run on the cores of NUMA node {node}: {error}"))?;
    // Memory of other nodes is slower, and nothing else.
    if let Err(error) = prefer_node(node) {
        warn!(%error, node, "cannot take memory of the NUMA node alone");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_on_the_cores_of_its_node() {
        let node = numa::nodes()[0];
        let Some(cores) = numa::cores(node) else {
            return;
        };
        std::thread::spawn(move || {
            stay_on(node).unwrap();
            let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
            let pinned: Vec<u32> =
                (0..1024).filter(|&core| allowed.is_set(core as usize).unwrap_or(false)).collect();
            assert!(!pinned.is_empty());
            assert!(pinned.iter().all(|core| cores.contains(core)), "{pinned:?} of {cores:?}");
        })
        .join()
        .unwrap();
        assert!(stay_on(60_000).unwrap_err().contains("60000"));
    }
}
