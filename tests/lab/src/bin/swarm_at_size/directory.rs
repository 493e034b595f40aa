//! The records of all servers that are ONLINE at one time, as clients read them.

use swarm::routing::RouteCandidate;

/// Records by what is looked for.
#[derive(Debug, Default)]
pub struct Directory {
    records: Vec<RouteCandidate<usize>>,
    /// Records that hold a block.
    holders: Vec<Vec<usize>>,
}

impl Directory {
    /// The directory of a model with `blocks` blocks.
    pub fn new(records: Vec<RouteCandidate<usize>>, blocks: usize) -> Directory {
        let mut holders = vec![Vec::new(); blocks];
        for (number, record) in records.iter().enumerate() {
            for block in record.blocks.clone() {
                holders[block as usize].push(number);
            }
        }
        Directory { records, holders }
    }

    /// The servers that are ONLINE; what clients have measured of them is not in there.
    pub fn records(&self) -> &[RouteCandidate<usize>] {
        &self.records
    }

    /// The servers that hold a block.
    pub fn holders(&self, block: usize) -> impl ExactSizeIterator<Item = &RouteCandidate<usize>> {
        self.holders[block].iter().map(|number| &self.records[*number])
    }
}
