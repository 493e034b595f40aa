//! Devices that workers own.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::dtype::QuantType;

/// A device that one worker owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Device {
    /// The processor, all cores.
    Cpu,
    /// A NUMA node of the processor (`cpu:N`): its cores, and memory of its own.
    Node(u32),
    /// The CUDA device with this ordinal.
    Cuda(u32),
    /// An emulated CUDA device on the processor (`emu:N`), in builds that have the emulator: for
    /// tests.
    Emulator(u32),
}

impl Device {
    /// Whether it computes on cores of the machine and in its memory.
    pub fn is_processor(self) -> bool {
        match self {
            Device::Cpu | Device::Node(_) => true,
            Device::Cuda(_) | Device::Emulator(_) => false,
        }
    }

    /// How matrices are stored for `devices` unless the operator says so: NF4 on CUDA, as in
    /// Petals, and as in the checkpoint elsewhere.
    pub fn default_quant_type(devices: &[Device]) -> QuantType {
        match devices.iter().any(|device| matches!(device, Device::Cuda(_))) {
            true => QuantType::Nf4,
            false => QuantType::None,
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Node(n) => write!(f, "cpu:{n}"),
            Device::Cuda(n) => write!(f, "cuda:{n}"),
            Device::Emulator(n) => write!(f, "emu:{n}"),
        }
    }
}

impl std::str::FromStr for Device {
    type Err = String;

    /// The name that [`Device`] prints; without a number it is the first device of its kind.
    fn from_str(text: &str) -> Result<Device, String> {
        let text = text.trim();
        let numbered = |kind: &str| match text.strip_prefix(kind)? {
            "" => Some(0),
            ordinal => ordinal.strip_prefix(':')?.parse().ok(),
        };
        let node = || text.strip_prefix("cpu:")?.parse().ok().map(Device::Node);
        let found = match text {
            "cpu" => Some(Device::Cpu),
            _ => numbered("cuda")
                .map(Device::Cuda)
                .or_else(|| numbered("emu").map(Device::Emulator))
                .or_else(node),
        };
        found.ok_or_else(|| format!("unknown device {text:?}: expected cpu, cpu:N or cuda:N"))
    }
}

/// A processor, or the part of it at a NUMA node.
///
/// # Errors
/// A sentence with what is expected.
pub fn processor(text: &str) -> Result<Device, String> {
    let device: Option<Device> = text.parse().ok();
    let found = device.filter(|device| device.is_processor());
    found.ok_or_else(|| "expected cpu or cpu:N".to_owned())
}

/// The first digits of the UUID of a CUDA device, as the driver's tools write it:
/// `GPU-5d5ba0d6-4d3c-...`, in hexadecimal without dashes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UuidPrefix(String);

impl UuidPrefix {
    /// Whether a device with these bytes is meant.
    pub fn is_of(&self, uuid: &[u8; 16]) -> bool {
        Uuid::from_bytes(*uuid).simple().to_string().starts_with(&self.0)
    }
}

impl std::str::FromStr for UuidPrefix {
    type Err = String;

    /// `GPU-` and at least one hexadecimal digit; letters of either case, dashes anywhere.
    fn from_str(text: &str) -> Result<UuidPrefix, String> {
        let rest =
            text.get(..4).filter(|start| start.eq_ignore_ascii_case("GPU-")).map(|_| &text[4..]);
        let digits: String = rest
            .unwrap_or_default()
            .chars()
            .filter(|c| *c != '-')
            .map(|c| c.to_ascii_lowercase())
            .collect();
        match (1..=32).contains(&digits.len()) && digits.chars().all(|c| c.is_ascii_hexdigit()) {
            true => Ok(UuidPrefix(digits)),
            false => Err(
                "expected a UUID as nvidia-smi -L shows it, or its beginning, such as GPU-5d5ba0d6"
                    .to_owned(),
            ),
        }
    }
}

impl std::fmt::Display for UuidPrefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU-{}", self.0)
    }
}

/// A UUID as the driver's tools write it.
pub fn shown_uuid(uuid: &[u8; 16]) -> String {
    format!("GPU-{}", Uuid::from_bytes(*uuid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_meant_by_any_of_its_beginnings() {
        let uuid: [u8; 16] = std::array::from_fn(|n| 0x5d + n as u8);
        let shown = shown_uuid(&uuid);
        assert_eq!(shown, "GPU-5d5e5f60-6162-6364-6566-6768696a6b6c");
        let is_of = |text: &str| text.parse::<UuidPrefix>().map(|prefix| prefix.is_of(&uuid));
        for text in [&*shown, &shown.to_uppercase(), "GPU-5d5e5f60", "gpu-5", "GPU-5d5e5f6061"] {
            assert_eq!(is_of(text), Ok(true), "{text}");
        }
        assert_eq!(is_of("GPU-5d5f"), Ok(false));
        for text in ["", "GPU-", "GPU-xyz", "5d5e", "GPÜ-5", &format!("{shown}0"), "GPU--"] {
            assert!(is_of(text).unwrap_err().contains("nvidia-smi -L"), "{text}");
        }
    }
}
