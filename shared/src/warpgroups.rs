//! What is known of the warpgroups (`wgmma`) of a CUDA device. A short-lived process that the
//! supervisor starts finds it out, the supervisor keeps it, and a worker follows it.

use serde::{Deserialize, Serialize};

/// Whether the kernels for warpgroups of a device give the same bits as those for warps
/// (`mma.sync`). Only then products of many rows and attention of many tokens use them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Warpgroups {
    /// The device has none.
    Missing,
    /// The bits are the same: they are used.
    SameBits,
    /// The bits differ: they are not used.
    OtherBits,
    /// They failed, or nothing is known of them. Says why, and they are not used.
    Failed(String),
}

impl std::fmt::Display for Warpgroups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Warpgroups::Missing => f.write_str("by warps"),
            Warpgroups::SameBits => f.write_str("by warpgroups"),
            Warpgroups::OtherBits => f.write_str("by warps, as warpgroups round otherwise"),
            Warpgroups::Failed(why) => write!(f, "by warps, not by warpgroups: {why}"),
        }
    }
}

/// A line of JSON on standard output of `sepal sample`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SampleLine {
    /// This kernel is launched next.
    Launches(String),
    /// The outcome, in the last line.
    Found(Warpgroups),
}
