//! What fits into the memory of NUMA nodes: workers on a node (`cpu:N`) copy their weights into its
//! memory, and their KV pages lie there. The rest of [`super`] counts the memory of the whole machine.

use model::sizing::Need;
use serde::{Deserialize, Serialize};
use shared::config::{Device, SpanChoice};
use shared::model::ModelFacts;

use super::{InstanceMemory, arithmetic, mib, numa, refusal, wanted};
use crate::placement::DeviceShare;

/// What a NUMA node has for workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeMemory {
    pub node: u32,
    /// Bytes that are free or can be freed.
    pub free_bytes: u64,
}

/// Memory of the nodes among `devices`; nodes of which the system does not tell are left out.
pub fn node_memory(devices: &[Device]) -> Vec<NodeMemory> {
    let nodes = devices.iter().filter_map(|device| match device {
        Device::Node(node) => Some(*node),
        _ => None,
    });
    let mut nodes: Vec<u32> = nodes.collect();
    nodes.sort_unstable();
    nodes.dedup();
    let memory = |node| Some(NodeMemory { node, free_bytes: numa::free_bytes(node)? });
    nodes.into_iter().filter_map(memory).collect()
}

/// What a group finds on one node.
struct OnNode {
    memory: NodeMemory,
    /// What its ranks there need.
    need: Need,
    /// Most blocks that fit into its part of what is free.
    most: u32,
}

impl InstanceMemory {
    /// Most blocks that can be served, at most all of the model, by the memory of nodes alone.
    ///
    /// # Errors
    /// A sentence that names the node, what is needed there and what there is.
    pub fn fit_nodes(
        &self,
        choice: SpanChoice,
        facts: &ModelFacts,
        groups: &[DeviceShare],
    ) -> Result<u32, String> {
        if self.nodes.is_empty() {
            return Ok(facts.num_blocks);
        }
        let least = (0..groups.len()).map(|index| self.least_place(facts, groups, index));
        let least: Vec<Option<OnNode>> = least.collect();
        let held = |place: &Option<OnNode>| place.as_ref().map_or(u32::MAX, |place| place.most);
        let most = least.iter().map(held).fold(0, u32::saturating_add).min(facts.num_blocks);
        let (wanted, tightest) = (wanted(choice, facts), least.iter().flatten());
        let Some(place) = tightest.min_by_key(|place| place.most).filter(|_| wanted > most) else {
            return Ok(most);
        };
        let groups = u32::try_from(groups.len().max(1)).unwrap_or(u32::MAX);
        let sum = arithmetic(&place.need, wanted.div_ceil(groups), "processes");
        let NodeMemory { node, free_bytes } = place.memory;
        let sum =
            format!("{sum} on NUMA node {node}, and {} of its memory are free", mib(free_bytes));
        Err(refusal(wanted, facts, &sum, most))
    }

    /// Most blocks that the nodes of group `index` hold.
    pub(super) fn most_on_nodes(
        &self,
        facts: &ModelFacts,
        groups: &[DeviceShare],
        index: usize,
    ) -> u32 {
        self.least_place(facts, groups, index).map_or(u32::MAX, |place| place.most)
    }

    /// Where the fewest blocks of a group fit; `None` if it has no rank on a node whose memory is
    /// known. Groups on one node share its memory evenly.
    fn least_place(
        &self,
        facts: &ModelFacts,
        groups: &[DeviceShare],
        index: usize,
    ) -> Option<OnNode> {
        let limits = self.netd.limits(facts);
        let group = groups.get(index)?;
        let places = self.nodes.iter().filter_map(|memory| {
            let is_here = |device: &Device| *device == Device::Node(memory.node);
            let ranks = group.devices.iter().enumerate().filter(|(_, device)| is_here(device));
            let share = |rank: usize| match self.ranks.get(index).and_then(|ranks| ranks.get(rank))
            {
                Some(rank) => facts.of_rank(rank),
                None => facts.clone(),
            };
            let shares: Vec<ModelFacts> = ranks.map(|(rank, _)| share(rank)).collect();
            if shares.is_empty() {
                return None;
            }
            let here = groups.iter().filter(|group| group.devices.iter().any(is_here)).count();
            let need = Need::of_node(facts, &limits, &shares);
            let most = need.most_blocks(memory.free_bytes / here.max(1) as u64);
            Some(OnNode { memory: *memory, need, most })
        });
        places.min_by_key(|place| place.most)
    }
}

#[cfg(test)]
mod tests {
    use shared::model::RankShare;

    use testkit::facts::llama_70b;

    use super::super::tests::memory;
    use super::*;

    fn rank(mib: u64) -> RankShare {
        RankShare {
            heads: 32,
            kv_heads: 4,
            columns: 14336,
            block_bytes: mib << 20,
            copied_bytes: 0,
            is_slow: false,
        }
    }

    /// Groups of two devices, with so many MiB on nodes 0 and 1.
    fn on_nodes(mib: [u64; 2], devices: &[Device]) -> (InstanceMemory, Vec<DeviceShare>) {
        let groups = DeviceShare::groups(devices, 2);
        let nodes = [0, 1].map(|node| NodeMemory { node, free_bytes: mib[node as usize] << 20 });
        let ranks = vec![vec![rank(220), rank(221)]; groups.len()];
        (InstanceMemory { nodes: nodes.to_vec(), ranks, ..memory(1 << 50) }, groups)
    }

    const TWO: [Device; 2] = [Device::Node(0), Device::Node(1)];

    #[test]
    fn the_node_with_the_least_memory_decides_and_is_named() {
        let facts = llama_70b();
        // Each rank has half of the 96 MiB of pages.
        let fixed = |memory: &InstanceMemory| {
            Need::of_node(&facts, &memory.netd.limits(&facts), std::slice::from_ref(&facts)).fixed
        };
        let (memory, groups) = on_nodes([1 << 20, 1 << 20], &TWO);
        let fixed = fixed(&memory) >> 20;
        assert_eq!(memory.fit_nodes(SpanChoice::All, &facts, &groups), Ok(80));
        let (memory, groups) = on_nodes([1 << 20, fixed + 5 * 269], &TWO);
        assert_eq!(memory.fit_nodes(SpanChoice::All, &facts, &groups), Ok(5));
        assert_eq!(memory.most_per_group(&facts, &groups), [5]);
        let refused = memory.fit_nodes(SpanChoice::Count(6), &facts, &groups).unwrap_err();
        for part in [
            "6 blocks of llama-70b need 6 x (221.0 MiB of weights + 48.0 MiB of KV cache)",
            &format!(
                "on NUMA node 1, and {}.0 MiB of its memory are free: 5 would fit",
                fixed + 5 * 269
            ),
        ] {
            assert!(refused.contains(part), "{refused}");
        }
    }

    #[test]
    fn all_copies_on_a_node_are_counted_there() {
        let facts = llama_70b();
        let (memory, groups) = on_nodes([1 << 20, 1 << 20], &[Device::Node(0); 2]);
        let shares = [facts.of_rank(&rank(220)), facts.of_rank(&rank(221))];
        let need = Need::of_node(&facts, &memory.netd.limits(&facts), &shares);
        assert_eq!((need.weights, need.kv), (441 << 20, 96 << 20));
        let with = |blocks: u64| InstanceMemory {
            nodes: vec![NodeMemory { node: 0, free_bytes: need.total(blocks) }],
            ..memory.clone()
        };
        assert_eq!(with(7).fit_nodes(SpanChoice::All, &facts, &groups), Ok(7));
        // Two groups there share it.
        let groups = DeviceShare::groups(&[Device::Node(0); 4], 2);
        let two = InstanceMemory { ranks: vec![memory.ranks[0].clone(); 2], ..with(7) };
        let double = vec![NodeMemory { node: 0, free_bytes: 2 * need.total(3) }];
        assert_eq!(InstanceMemory { nodes: double, ..two }.most_per_group(&facts, &groups), [3, 3]);
        // Mapped weights and single workers elsewhere are not.
        let (memory, groups) = on_nodes([0, 0], &[Device::Cpu; 2]);
        assert_eq!(memory.fit_nodes(SpanChoice::All, &facts, &groups), Ok(80));
        let single = InstanceMemory { ranks: Vec::new(), ..with(7) };
        let alone = DeviceShare::groups(&[Device::Node(0)], 1);
        let most = single.fit_nodes(SpanChoice::All, &facts, &alone).unwrap();
        assert_eq!(most, 10, "one worker, and no page twice");
    }

    #[test]
    fn nodes_of_the_machine_have_memory() {
        let node = shared::processor::Processor::of_this_machine().nodes()[0];
        let found = node_memory(&[Device::Cpu, Device::Node(node), Device::Node(node)]);
        assert_eq!(found.len(), usize::from(numa::free_bytes(node).is_some()));
        assert!(node_memory(&[Device::Node(60_000)]).is_empty());
    }
}
