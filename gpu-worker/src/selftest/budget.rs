//! What the budget of the kernels computes for whole blocks on known devices
//! (`kernels/prebuilt/budget.py --write`).

use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Microseconds by device, format and sessions.
type Blocks = BTreeMap<String, BTreeMap<String, BTreeMap<String, f64>>>;

static BLOCKS: LazyLock<Blocks> =
    LazyLock::new(|| serde_json::from_str(kernels::cuda::BUDGET).unwrap_or_default());

/// Microseconds of the row `name` of a device, such as `block nf4 decode 2048 x 1` of `NVIDIA H200`; `None` for
/// another device or row.
pub(super) fn block_us(device: &str, name: &str) -> Option<f64> {
    let (format, sessions) = name.strip_prefix("block ")?.split_once(" decode 2048 x ")?;
    let format = if format == "none" { "bf16" } else { format };
    let of_device = BLOCKS.iter().find(|(known, _)| is_of(device, known))?.1;
    of_device.get(format)?.get(sessions).copied()
}

/// Whether a device has the name of a known one in its own, and is not a variant of it.
fn is_of(device: &str, known: &str) -> bool {
    const VARIANTS: [&str; 4] = ["Ti", "SUPER", "Laptop", "D"];
    let words: Vec<&str> = device.split([' ', '-']).collect();
    let known: Vec<&str> = known.split(' ').collect();
    let at = words.windows(known.len()).position(|some| *some == known[..]);
    let next = at.map(|at| words.get(at + known.len()));
    next.is_some_and(|next| next.is_none_or(|word| !VARIANTS.contains(word)))
}

#[cfg(test)]
mod tests {
    use shared::config::QuantType;

    use super::*;

    #[test]
    fn known_devices_have_blocks_of_every_format() {
        for quant in [QuantType::None, QuantType::Int8, QuantType::Nf4] {
            for sessions in [1, 8, 32] {
                let name = format!("block {quant} decode 2048 x {sessions}");
                for device in [
                    "NVIDIA H200",
                    "NVIDIA H100 80GB HBM3",
                    "NVIDIA A100-SXM4-80GB",
                    "NVIDIA GeForce RTX 4090",
                    "NVIDIA L4",
                ] {
                    assert!(block_us(device, &name) > Some(10.0), "{device} {name}");
                }
                for other in ["NVIDIA GeForce GTX 1080", "NVIDIA GeForce RTX 3060 Ti"] {
                    assert_eq!(block_us(other, &name), None);
                }
            }
        }
        assert_eq!(block_us("NVIDIA H200", "block nf4 decode 512 x 1"), None);
        assert_eq!(block_us("NVIDIA H200", "mixture nf4 decode 2048 x 1"), None);
    }
}
