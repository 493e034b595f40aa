//! The memory of the NUMA nodes of this machine; [`processor`](shared::processor) knows their cores.

use std::path::Path;

/// Where Linux describes the nodes.
const NODES: &str = "/sys/devices/system/node";

/// Bytes of a node that are free or can be freed: those of the page cache count as free. `None` when
/// the machine does not tell.
pub fn free_bytes(node: u32) -> Option<u64> {
    let path = Path::new(NODES).join(format!("node{node}/meminfo"));
    free_of(&std::fs::read_to_string(path).ok()?)
}

/// The same of a node's `meminfo`.
fn free_of(meminfo: &str) -> Option<u64> {
    let kilobytes = |name: &str| {
        let line = meminfo.lines().find(|line| line.contains(name))?;
        line.split(':').nth(1)?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    let cached = [" Active(file):", " Inactive(file):", " SReclaimable:"];
    let cached = cached.iter().filter_map(|name| kilobytes(name)).fold(0, u64::saturating_add);
    kilobytes(" MemFree:")?.saturating_add(cached).checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::processor::Processor;

    #[test]
    fn what_a_node_can_free_counts_as_free() {
        let text = "Node 0 MemTotal: 90 kB\nNode 0 MemFree:    8 kB\nNode 0 Active: 70 kB\n\
                    Node 0 Active(anon): 9 kB\nNode 0 Active(file): 16 kB\nNode 0 Inactive(file): 2 kB\n\
                    Node 0 SReclaimable: 1 kB\n";
        assert_eq!(free_of(text), Some(27 * 1024));
        assert_eq!(free_of("Node 0 MemFree: 3 kB\n"), Some(3 * 1024));
        for bad in ["", "Node 0 MemFree: x kB", "Node 0 MemFree: 3", "Node 0 MemFree:"] {
            assert_eq!(free_of(bad), None, "{bad}");
        }
        let node = Processor::of_this_machine().nodes()[0];
        if Path::new(NODES).join(format!("node{node}/meminfo")).exists() {
            assert!(free_bytes(node).is_some_and(|free| free > 0));
        }
        assert_eq!(free_bytes(60_000), None);
    }
}
