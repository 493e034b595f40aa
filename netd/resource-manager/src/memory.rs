//! Bytes that requests of peers may hold in this process, by what they are for. Each purpose has
//! pools of its own, so that none waits for another that waits for it:
//!
//! ```text
//!   opening      waits for KV memory, which open sessions hold
//!   step         of an open session: waits for nothing but its computation
//!   push         is kept until the client's copy of the step, which is a step
//!   whole        a forward or backward request: waits for its computation
//!   window       of streams that peers open, whether they send anything or not
//!   growth       of windows beyond the first, while they are drained
//!   unary        calls, and the first frame of a whole request until the rest of it has room
//! ```

use std::sync::Arc;

use libp2p::PeerId;

use super::{
    nets::Net,
    pools::{PoolBounds, Pools, Reservation},
};

/// Bytes of unary requests that are read or not yet answered. One peer may have eight of the
/// largest at once, an IP net sixteen; more wait unread.
pub const UNARY_BYTES: PoolBounds = PoolBounds::of(128 << 20);
/// The window of a stream at first, by the protocol.
pub const FIRST_WINDOW_BYTES: usize = 256 << 10;
/// First windows of streams that peers open: 4096 streams, 1024 of one peer.
pub const WINDOW_BYTES: PoolBounds = PoolBounds::of(1 << 30);
/// What windows have grown by: eight connections of one peer with a line of 1 Gbit/s each.
pub const GROWTH_BYTES: PoolBounds = PoolBounds::of(1 << 30);

/// What bytes of a peer are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPurpose {
    /// A unary call, or a frame that stands for no more than itself.
    Unary,
    /// The first message of a session.
    Opening,
    /// A message of an open session.
    Step,
    /// A step that another server sends ahead of the client.
    Push,
    /// A request over whole sequences.
    Whole,
    /// What a peer may send unread on a stream that it opened.
    Window,
    /// What a peer may send unread beyond that, on streams whose readers drain.
    Growth,
}

/// The pools of all purposes.
#[derive(Debug)]
pub struct RequestMemory {
    unary: Arc<Pools>,
    opening: Arc<Pools>,
    steps: Arc<Pools>,
    pushes: Arc<Pools>,
    wholes: Arc<Pools>,
    windows: Arc<Pools>,
    growth: Arc<Pools>,
}

impl RequestMemory {
    /// Pools of so many bytes in all, those for unary calls apart.
    pub fn new(bytes: u64) -> Self {
        let quarter = usize::try_from(bytes / 4).unwrap_or(usize::MAX);
        let pools = || Pools::new(PoolBounds::of(quarter));
        let unary = Pools::new(UNARY_BYTES);
        let windows = Pools::new(WINDOW_BYTES);
        let growth = Pools::new(GROWTH_BYTES);
        Self {
            unary,
            opening: pools(),
            steps: pools(),
            pushes: pools(),
            wholes: pools(),
            windows,
            growth,
        }
    }

    pub fn of(&self, purpose: MemoryPurpose) -> &Arc<Pools> {
        match purpose {
            MemoryPurpose::Unary => &self.unary,
            MemoryPurpose::Opening => &self.opening,
            MemoryPurpose::Step => &self.steps,
            MemoryPurpose::Push => &self.pushes,
            MemoryPurpose::Whole => &self.wholes,
            MemoryPurpose::Window => &self.windows,
            MemoryPurpose::Growth => &self.growth,
        }
    }

    /// Makes room for one request of so many bytes, whatever the purpose.
    pub fn make_room_for(&self, bytes: u64) {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        for pools in [&self.opening, &self.steps, &self.pushes, &self.wholes] {
            pools.make_room_for(bytes);
        }
    }

    /// Counts a step that was pushed by a unary call and is kept; `None` if there is no room.
    pub fn keep_push(&self, peer: PeerId, net: Net, bytes: usize) -> Option<Reservation> {
        self.pushes.try_reserve(peer, net, bytes)
    }
}
