//! One inference session between its steps: shape, page tables, and the steps it has already seen.

use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use shared::block::BlockIndex;

use super::table::SessionTables;

/// Step ids remembered per session. A duplicate comes within a step or two (once from the client
/// and once by push), so that a bounded memory forgets nothing that matters.
pub const STEP_IDS_KEPT: usize = 1024;

/// A session that was admitted.
#[derive(Debug)]
pub struct Session {
    /// Its blocks, in the order in which they run.
    pub blocks: Vec<BlockIndex>,
    /// Adapter, by its index among those of the model; that of the first message (petals
    /// `handler.py`, `rpc_inference`).
    pub adapter: Option<u32>,
    /// Sequences; every step has as many.
    pub batch: u32,
    pub tables: SessionTables,
    /// How often the workers of its blocks had lost their KV pages when it began.
    pub kv_losses: u64,
    /// Hash of the id of the last step that was answered; 0 before the first.
    pub last_step: u64,
    seen: SeenSteps,
}

impl Session {
    /// A session before its first step.
    pub fn new(
        blocks: Vec<BlockIndex>,
        adapter: Option<u32>,
        batch: u32,
        tables: SessionTables,
        kv_losses: u64,
    ) -> Session {
        Session {
            blocks,
            adapter,
            batch,
            tables,
            kv_losses,
            last_step: 0,
            seen: SeenSteps::default(),
        }
    }

    /// Notes a step id; false if the step came before and is to be ignored without an answer
    /// (petals `handler.py`, `rpc_inference`).
    pub fn is_new_step(&mut self, step_id: Option<&str>) -> bool {
        step_id.is_none_or(|id| self.seen.insert(id))
    }

    /// Notes that a step was computed.
    pub fn computed(&mut self, step_id: Option<&str>) {
        self.last_step = step_id.map_or(0, stable_hash);
    }

    /// Whether the last step that was computed had this id: it comes again when its answer was lost
    /// with the stream, and the rows are in its order already.
    pub fn was_last(&self, step_id: Option<&str>) -> bool {
        step_id.is_some_and(|id| self.last_step == stable_hash(id))
    }

    /// Forgets all steps that were noted: a client that comes back may send the last one again.
    pub fn forget_steps(&mut self) {
        self.seen = SeenSteps::default();
    }

    /// Forgets a step that was noted and could not be computed: another copy of it may come.
    pub fn forget_step(&mut self, step_id: Option<&str>) {
        if let Some(id) = step_id {
            self.seen.remove(id);
        }
    }
}

/// The last [`STEP_IDS_KEPT`] step ids, as 64-bit hashes: a false match would need a client to
/// collide with itself.
#[derive(Debug, Default)]
struct SeenSteps {
    known: HashSet<u64>,
    order: VecDeque<u64>,
}

impl SeenSteps {
    fn remove(&mut self, id: &str) {
        let hash = hash(id);
        if self.known.remove(&hash) {
            self.order.retain(|known| *known != hash);
        }
    }

    fn insert(&mut self, id: &str) -> bool {
        let hash = hash(id);
        if !self.known.insert(hash) {
            return false;
        }
        self.order.push_back(hash);
        if self.order.len() > STEP_IDS_KEPT
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        true
    }
}

/// FNV-1a: the same in every build, and never 0 but by chance.
fn stable_hash(id: &str) -> u64 {
    let mix = |sum: u64, byte: u8| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    id.bytes().fold(0xcbf2_9ce4_8422_2325, mix).max(1)
}

fn hash(id: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicates_are_noticed_and_memory_is_bounded() {
        let mut session = Session::new(Vec::new(), None, 1, SessionTables::new(1, 0, &[]), 0);
        assert!(session.is_new_step(None) && session.is_new_step(None));
        for step in 0..5 * STEP_IDS_KEPT {
            assert!(session.is_new_step(Some(&step.to_string())));
            assert!(!session.is_new_step(Some(&step.to_string())));
        }
        assert_eq!(session.seen.known.len(), STEP_IDS_KEPT);
        assert_eq!(session.seen.order.len(), STEP_IDS_KEPT);
        session.forget_step(Some("5119"));
        assert!(session.is_new_step(Some("5119")));
        assert_eq!(session.seen.order.len(), STEP_IDS_KEPT);
    }
}
