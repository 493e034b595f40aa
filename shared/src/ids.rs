//! Numbers that name things across processes. Each is its own type so that none is taken for
//! another.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// One unit of work in a ring; unique during the life of a netd generation, answered exactly once.
    JobId,
    u64
);
id!(
    /// The workers that serve one span together (tensor parallelism); a group of one is the usual case.
    GroupId,
    u16
);
id!(
    /// Index of a worker within its group; rank 0 alone is given jobs.
    Rank,
    u16
);
id!(
    /// Number of workers in a group.
    WorldSize,
    u16
);
id!(
    /// How often a child was started, from 1. Whatever carries an old generation is stale.
    Generation,
    u32
);
id!(
    /// A page of the KV cache: the same rows in the pool of every block of a worker.
    PageId,
    u32
);

impl Generation {
    /// The generation after this one.
    pub fn next(self) -> Generation {
        Generation(self.0.saturating_add(1))
    }
}

/// Which worker: its group, its place in it and the size of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerId {
    pub group: GroupId,
    /// Place in the group.
    pub rank: Rank,
    /// Size of the group.
    pub world_size: WorldSize,
}

impl WorkerId {
    /// The only worker of group `group`.
    pub fn solo(group: GroupId) -> WorkerId {
        WorkerId { group, rank: Rank(0), world_size: WorldSize(1) }
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.group, self.rank)
    }
}
