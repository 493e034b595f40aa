//! What is known of a model and of the devices that are to serve it, before any weight is fetched or
//! loaded: prepare finds it out, and the supervisor decides by it which blocks are served.

use serde::{Deserialize, Serialize};

use crate::config::Device;
use crate::model::{ModelFacts, RankShare};

/// A model in one format, on some devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Survey {
    pub facts: ModelFacts,
    /// What each rank of each group holds of a block; nothing for a group of one device, and no
    /// groups where no group has several. Decided at the first start, and the same at every later one.
    pub ranks: Vec<Vec<RankShare>>,
    /// The devices with memory of their own.
    pub devices: Vec<DeviceMemory>,
    /// What workers measured at an earlier start, the slowest group.
    pub kept: Option<Capacity>,
    /// Of several devices: their relative speeds.
    pub speeds: Option<Speeds>,
}

/// Memory of a device that a worker will own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    pub device: Device,
    /// Bytes that a worker may take.
    pub free_bytes: u64,
    /// Of which it needs so many to compute the largest unit of this model.
    pub work_bytes: u64,
}

/// What a worker can do, measured on its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Capacity {
    /// One-token steps of one block per second; 0 when not measured.
    pub inference_rps: f64,
    /// Tokens per second through one block in long batches; 0 when not measured.
    pub forward_rps: f64,
}

/// The relative speeds of several devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Speeds {
    /// In the order of the devices.
    pub rates: Vec<f64>,
    /// How earlier starts cut the model among them (blocks of each group of devices), at most once for
    /// each number of blocks.
    pub cuts: Vec<Vec<u32>>,
}

impl Survey {
    /// A model on one device that was never measured and has no memory of its own.
    pub fn of(facts: ModelFacts) -> Survey {
        Survey { facts, ranks: Vec::new(), devices: Vec::new(), kept: None, speeds: None }
    }
}
