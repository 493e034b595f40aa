//! GPUs of this machine that nothing was said about.

use std::path::Path;

use super::MAX_DEVICES;
use crate::cli::layers::{Layered, Origin};

/// Where NVIDIA's kernel module has a folder for each GPU. Read, because the library of the driver is opened by workers alone.
pub const GPUS: &str = "/proc/driver/nvidia/gpus";

/// A sentence about GPUs that are not used because no device was named, as many as may be named; `folder` is [`GPUS`].
pub fn note(layered: &Layered, folder: &Path) -> Option<String> {
    let is_default = |id| layered.origin(id) == Origin::Default;
    if !is_default("device") || !is_default("tensor_parallel_devices") {
        return None;
    }
    let count = std::fs::read_dir(folder).ok()?.take(MAX_DEVICES).count();
    let all: Vec<String> = (0..count).map(|gpu| format!("cuda:{gpu}")).collect();
    let (has, them) = match count {
        0 => return None,
        1 => ("a GPU", "it"),
        _ => ("GPUs", "them"),
    };
    Some(format!(
        "this machine has {has} and serves on the CPU: --device {} uses {them}, --device cpu says that it is meant so",
        all.join(",")
    ))
}
