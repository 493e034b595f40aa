//! Flags about devices: which serve, and which of them share every block (tensor parallelism).
//! Source: petals `server/server.py` (`tensor_parallel_devices`).
//!
//! # Discrepancies
//! Petals has one group of all its `--tensor_parallel_devices`, and so has Sepal;
//! `--tensor_parallel_size` makes several of the devices of `--device`, which Petals cannot.

use std::thread::available_parallelism;

use shared::config::{Device, UuidPrefix};
use shared::numa;

use super::MAX_DEVICES;
use crate::cli::values;

/// Stands for a device that was named by UUID until its number is known.
const UNNUMBERED: Device = Device::Cuda(u32::MAX);

/// The devices that were named, and how many of them in a row are a group.
#[derive(Debug, PartialEq, Eq)]
pub struct Devices {
    /// In the order of the flags; `None` if they are to be chosen.
    pub named: Option<Vec<Device>>,
    /// Which of them were named by UUID: their numbers are found out at the start.
    pub uuids: Vec<(usize, UuidPrefix)>,
    /// Devices of a group.
    pub world_size: usize,
}

impl Devices {
    /// Reads `--device`, `--tensor_parallel_devices` and `--tensor_parallel_size`, of which the first
    /// two exclude each other.
    pub fn read(
        device: Option<&str>,
        tensor_parallel: &[String],
        size: Option<u32>,
    ) -> Result<Devices, String> {
        let size = size.map_or(1, |size| size as usize);
        let (named, world_size) = if !tensor_parallel.is_empty() {
            let named = serving("--tensor_parallel_devices", &tensor_parallel.join(","))?;
            let count = named.devices.len();
            (Some(named), count)
        } else {
            (device.map(|list| serving("--device", list)).transpose()?, size)
        };
        let (named, uuids) = match named {
            Some(Listed { devices, uuids }) => (Some(devices), uuids),
            None => (None, Vec::new()),
        };
        if world_size > 1 {
            let devices = named.as_deref().ok_or_else(|| {
                format!("--tensor_parallel_size {size} needs the devices: name them with --device")
            })?;
            check_groups(devices, world_size)?;
        }
        Ok(Devices { named, uuids, world_size })
    }
}

/// Whether groups of so many devices can be made of these.
fn check_groups(devices: &[Device], world_size: usize) -> Result<(), String> {
    if !devices.len().is_multiple_of(world_size) {
        return Err(format!(
            "invalid --tensor_parallel_size {world_size}: expected a divisor of the number of devices, {}",
            devices.len()
        ));
    }
    let first = devices.first().map(|device| kind(*device));
    match devices.iter().find(|device| Some(kind(**device)) != first) {
        Some(other) => Err(format!(
            "{other} cannot share blocks with {}: name devices of one kind for tensor parallelism, only cpu and cpu:N, or only cuda:N",
            devices.first().copied().unwrap_or(*other)
        )),
        None => Ok(()),
    }
}

/// What a device is; those of a group are of one kind, so that what they exchange lies in memory
/// that all of them reach.
fn kind(device: Device) -> &'static str {
    match device {
        Device::Cpu | Device::Node(_) => "processor",
        Device::Cuda(_) => "CUDA device",
        Device::Emulator(_) => "emulated device",
    }
}

/// CUDA devices that have several ranks of one group, for the log: each is named once.
pub fn crowded(devices: &[Device], world_size: usize) -> Vec<Device> {
    let mut crowded = Vec::new();
    for group in devices.chunks(world_size.max(1)) {
        for (rank, device) in group.iter().enumerate() {
            let is_again = group[..rank].contains(device) && !crowded.contains(device);
            if is_again && matches!(device, Device::Cuda(_)) {
                crowded.push(*device);
            }
        }
    }
    crowded
}

/// What a list of devices names.
#[derive(Debug, Default)]
struct Listed {
    devices: Vec<Device>,
    uuids: Vec<(usize, UuidPrefix)>,
}

/// The devices of a list, and which of them are named by UUID.
fn serving(flag: &str, list: &str) -> Result<Listed, String> {
    let invalid = |why| format!("invalid {flag} {list}: {why}");
    let Listed { mut devices, mut uuids } = Listed::default();
    for (position, name) in list.split(',').enumerate() {
        match name.trim().strip_prefix("cuda:").filter(|name| name.contains('-')) {
            Some(uuid) => {
                uuids.push((position, uuid.parse().map_err(invalid)?));
                devices.push(UNNUMBERED);
            }
            None => devices.push(values::device(name).map_err(invalid)?),
        }
    }
    if devices.len() > MAX_DEVICES {
        return Err(format!(
            "{flag} lists {} devices: expected at most {MAX_DEVICES}",
            devices.len()
        ));
    }
    check_nodes(&devices, &numa::nodes())?;
    Ok(Listed { devices, uuids })
}

/// Refuses NUMA nodes that this machine does not have.
fn check_nodes(devices: &[Device], nodes: &[u32]) -> Result<(), String> {
    let missing = |device: &&Device| matches!(device, Device::Node(n) if !nodes.contains(n));
    let Some(device) = devices.iter().find(missing) else {
        return Ok(());
    };
    let names: Vec<String> = nodes.iter().map(|node| format!("cpu:{node}")).collect();
    Err(format!("{device} does not exist: the NUMA nodes of this machine are {}", names.join(", ")))
}

/// Compute threads of each worker on `devices`: the cores, divided by the workers that share them.
pub fn threads(asked: Option<u32>, devices: &[Device]) -> u32 {
    let cores_of = |node| numa::cores(node).map(|cores| cores.len());
    threads_of(asked, devices, available_parallelism().map_or(1, usize::from), cores_of)
}

fn threads_of(
    asked: Option<u32>,
    devices: &[Device],
    cores: usize,
    cores_of: impl Fn(u32) -> Option<usize>,
) -> u32 {
    let share = |device: &Device| match device {
        Device::Node(node) => {
            let workers = devices.iter().filter(|other| *other == device).count();
            cores_of(*node).map_or(cores, |of_node| of_node.min(cores)) / workers
        }
        _ => cores / devices.len(),
    };
    let least = devices.iter().map(share).min().unwrap_or(cores);
    let least = u32::try_from(least).unwrap_or(1).max(1);
    asked.filter(|threads| *threads > 0).unwrap_or(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(device: &str, tensor_parallel: &str, size: u32) -> Result<Devices, String> {
        let listed: Vec<String> = tensor_parallel.split_whitespace().map(str::to_owned).collect();
        Devices::read(
            Some(device).filter(|list| !list.is_empty()),
            &listed,
            Some(size).filter(|size| *size > 0),
        )
    }

    #[test]
    fn tensor_parallel_devices_are_one_group() {
        let of = |devices: Vec<Device>, world_size| Devices {
            named: Some(devices),
            uuids: Vec::new(),
            world_size,
        };
        let two = of(vec![Device::Cpu; 2], 2);
        assert_eq!(read("", "cpu cpu", 0), Ok(two));
        let one = of(vec![Device::Cuda(1)], 1);
        assert_eq!(read("", "cuda:1", 0), Ok(one));
        let none = Devices { named: None, uuids: Vec::new(), world_size: 1 };
        assert_eq!(read("", "", 0), Ok(none));
    }

    #[test]
    fn devices_may_be_named_by_uuid() {
        let found = read("cuda:0, cuda:GPU-5d5e,cuda:gpu-01", "", 0).unwrap();
        let numbered = [Device::Cuda(0), UNNUMBERED, UNNUMBERED];
        assert_eq!(found.named.as_deref(), Some(&numbered[..]));
        let uuids = [(1, "GPU-5d5e".parse().unwrap()), (2, "GPU-01".parse().unwrap())];
        assert_eq!(found.uuids, uuids);
        assert_eq!(read("", "cuda:GPU-1 cuda:GPU-2", 0).unwrap().world_size, 2);
        for bad in ["cuda:GPU-", "cuda:GPU-xyz", "cuda:5d5e-1"] {
            let refused = read(bad, "", 0).unwrap_err();
            assert!(refused.contains(bad) && refused.contains("nvidia-smi -L"), "{refused}");
        }
    }

    #[test]
    fn a_size_cuts_the_devices_into_groups() {
        let named = Some(vec![Device::Cpu; 4]);
        let four = Devices { named, uuids: Vec::new(), world_size: 2 };
        assert_eq!(read("cpu,cpu,cpu,cpu", "", 2), Ok(four));
        let odd = read("cpu,cpu,cpu", "", 2).unwrap_err();
        assert!(odd.contains("divisor of the number of devices, 3"), "{odd}");
        assert!(read("", "", 2).unwrap_err().contains("--device"));
    }

    #[test]
    fn devices_of_a_group_are_of_one_kind() {
        for allowed in ["cuda:0 cuda:1", "cuda cuda:0", "emu emu:1", "cpu cpu"] {
            let read = read("", allowed, 0).unwrap();
            assert_eq!((read.named.unwrap().len(), read.world_size), (2, 2), "{allowed}");
        }
        for mixed in ["cpu cuda:1", "cuda:0 emu:0", "emu cpu"] {
            let refused = read("", mixed, 0).unwrap_err();
            assert!(refused.contains("name devices of one kind"), "{refused}");
        }
        let refused = read("cuda:0,cuda:1,cpu,cpu", "", 2).unwrap_err();
        assert!(refused.starts_with("cpu cannot share blocks with cuda:0"), "{refused}");
        assert!(read("cuda:0,cpu,emu:3", "", 0).is_ok());
    }

    #[test]
    fn a_card_with_several_ranks_of_a_group_is_named_once() {
        let one = [Device::Cuda(1); 3];
        assert_eq!(crowded(&one, 3), [Device::Cuda(1)]);
        assert_eq!(crowded(&one, 1), []);
        assert_eq!(crowded(&[Device::Cuda(0), Device::Cuda(1)], 2), []);
        assert_eq!(crowded(&[Device::Cpu; 2], 2), []);
    }

    #[test]
    fn nodes_that_do_not_exist_are_refused_by_name() {
        let devices = [Device::Node(0), Device::Node(3)];
        let refused = check_nodes(&devices, &[0, 1]).unwrap_err();
        assert_eq!(
            refused,
            "cpu:3 does not exist: the NUMA nodes of this machine are cpu:0, cpu:1"
        );
        assert_eq!(check_nodes(&devices, &[0, 3]), Ok(()));
        assert!(read("", "cpu:0 cpu:60000", 0).unwrap_err().starts_with("cpu:60000 does not"));
    }

    #[test]
    fn workers_divide_the_cores_that_they_share() {
        let of_node = |node| [8, 4].get(node as usize).copied();
        let threads = |devices: &[Device]| threads_of(None, devices, 12, of_node);
        assert_eq!(threads(&[Device::Cpu]), 12);
        assert_eq!(threads(&[Device::Cpu; 2]), 6);
        assert_eq!(threads(&[Device::Cpu; 20]), 1);
        assert_eq!(threads(&[Device::Node(0)]), 8);
        assert_eq!(threads(&[Device::Node(0), Device::Node(1)]), 4);
        assert_eq!(threads(&[Device::Node(0); 4]), 2);
        assert_eq!(threads_of(Some(3), &[Device::Node(0); 4], 12, of_node), 3);
    }
}
