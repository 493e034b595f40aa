//! Flags about devices: which serve, and which of them share every block (tensor parallelism).
//! Source: petals `server/server.py` (`tensor_parallel_devices`).
//!
//! # Discrepancies
//! Petals has one group of all its `--tensor_parallel_devices`, and so has Sepal;
//! `--tensor_parallel_size` makes several of the devices of `--device`, which Petals cannot.

use clap::Args;
use shared::config::{AutomaticDevices, Device, QuantChoice, QuantType, ServeConfig, UuidPrefix};
use shared::processor::{Processor, numbers, shown};
use supervisor::placement::{self, MAX_DEVICES};

/// Which devices, and what is computed on them.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct DeviceArgs {
    /// Devices, one worker each: cpu, cpu:N (a NUMA node), cuda:N in the order of the PCI bus,
    /// cuda:GPU-UUID or the beginning of a UUID (nvidia-smi -L), or a list such as cuda:0,cuda:1
    /// [default: every CUDA device that passes `sepal selftest --quick`, else one cpu:N for
    /// each NUMA node, or cpu where there is one]
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Devices of one kind that share every block, as one group (tensor parallelism), such as
    /// cuda:0 cuda:1 or cpu:0 cpu:1
    #[arg(long, num_args = 1.., value_name = "DEVICE", conflicts_with = "device")]
    tensor_parallel_devices: Vec<String>,
    /// Devices of a group that shares every block: cuts the devices of --device into groups, each of
    /// which serves a part of the blocks [default: 1, each device serves blocks of its own]
    #[arg(long, value_name = "N", conflicts_with = "tensor_parallel_devices", value_parser = clap::value_parser!(u32).range(1..=15))]
    tensor_parallel_size: Option<u32>,
    /// How matrices are stored: none, int8 or nf4 [default: nf4 on CUDA devices, none on the CPU]
    #[arg(long, value_name = "TYPE")]
    quant_type: Option<QuantType>,
    /// Compute threads of each worker [default: the cores divided by the workers; hyper-threads of a core
    /// count as one]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// CPUs on which workers of the processor compute, such as 0-7,16; as many threads as cores stay on
    /// one core each [default: all but those much slower than others]
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    cpus: Option<String>,
}

impl DeviceArgs {
    /// Fills in the devices and what depends on them.
    ///
    /// # Errors
    /// A sentence about devices or CPUs that there are not, or that cannot be a group.
    pub fn fill(self, serve: &mut ServeConfig) -> Result<(), String> {
        let DeviceArgs { device, tensor_parallel_devices, threads, quant_type, .. } = &self;
        let listed =
            Devices::read(device.as_deref(), tensor_parallel_devices, self.tensor_parallel_size)?;
        let Devices { named, uuids, world_size } = listed;
        let threads = *threads;
        serve.automatic = named.is_none().then_some(AutomaticDevices { threads });
        serve.devices = named.unwrap_or_else(|| vec![Device::Cpu]);
        (serve.uuids, serve.world_size) = (uuids, world_size);
        serve.worker.cpus = cpus(self.cpus.as_deref())?;
        let processor = Processor::of_worker(&serve.worker.cpus);
        check_nodes(&serve.devices, &processor)?;
        serve.worker.threads = placement::threads(threads, &serve.devices, &processor);
        let default = Device::default_quant_type(&serve.devices);
        serve.prepare.quant_type =
            quant_type.map_or(QuantChoice::ByDevice(default), QuantChoice::Named);
        Ok(())
    }
}

/// Stands for a device that was named by UUID until its number is known.
const UNNUMBERED: Device = Device::Cuda(u32::MAX);

/// The devices that were named, and how many of them in a row are a group.
#[derive(Debug, PartialEq, Eq)]
struct Devices {
    /// In the order of the flags; `None` if they are to be chosen.
    named: Option<Vec<Device>>,
    /// Which of them were named by UUID: their numbers are found out at the start.
    uuids: Vec<(usize, UuidPrefix)>,
    /// Devices of a group.
    world_size: usize,
}

impl Devices {
    /// Reads `--device`, `--tensor_parallel_devices` and `--tensor_parallel_size`, of which the first
    /// two exclude each other.
    fn read(
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
            None => devices.push(name.parse().map_err(invalid)?),
        }
    }
    if devices.len() > MAX_DEVICES {
        return Err(format!(
            "{flag} lists {} devices: expected at most {MAX_DEVICES}",
            devices.len()
        ));
    }
    Ok(Listed { devices, uuids })
}

/// The CPUs of `--cpus`; none if it is not given.
///
/// # Errors
/// A sentence with the value and the CPUs that there are.
fn cpus(list: Option<&str>) -> Result<Vec<u32>, String> {
    list.map_or(Ok(Vec::new()), |list| cpus_of(list, &Processor::of_this_machine()))
}

fn cpus_of(list: &str, machine: &Processor) -> Result<Vec<u32>, String> {
    let there = machine.cpus();
    let invalid = |which: &str| {
        format!("invalid --cpus {list}: {which}expected CPUs among {}, such as 0-1", shown(&there))
    };
    let named = numbers(list).filter(|named| !named.is_empty()).ok_or_else(|| invalid(""))?;
    match named.iter().find(|cpu| !there.contains(cpu)) {
        Some(cpu) => Err(invalid(&format!("this process may not run on CPU {cpu}, "))),
        None => Ok(named),
    }
}

/// Refuses NUMA nodes without a core that may be used.
fn check_nodes(devices: &[Device], processor: &Processor) -> Result<(), String> {
    let is_missing =
        |device: &&Device| matches!(device, Device::Node(_)) && processor.of(**device).is_empty();
    let Some(device) = devices.iter().find(is_missing) else {
        return Ok(());
    };
    let names: Vec<String> =
        processor.nodes().into_iter().map(|node| Device::Node(node).to_string()).collect();
    Err(format!(
        "invalid device {device}: the NUMA nodes with usable CPUs are {}",
        names.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::processor::two_nodes;

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
    fn nodes_and_cpus_that_do_not_exist_are_refused_by_name() {
        let devices = [Device::Node(0), Device::Node(1)];
        let refused = check_nodes(&devices, &two_nodes()).unwrap_err();
        assert_eq!(
            refused,
            "invalid device cpu:1: the NUMA nodes with usable CPUs are cpu:0, cpu:3"
        );
        assert_eq!(check_nodes(&[Device::Node(0), Device::Node(3)], &two_nodes()), Ok(()));
        assert_eq!(cpus_of("8,0-1", &two_nodes()), Ok(vec![0, 1, 8]));
        assert_eq!(
            cpus_of("3,12", &two_nodes()).unwrap_err(),
            "invalid --cpus 3,12: this process may not run on CPU 12, expected CPUs among 0-11, such as 0-1"
        );
        for bad in ["", "x", "3-1", "0-99999999", "-1", ","] {
            let refused = cpus_of(bad, &two_nodes()).unwrap_err();
            assert!(refused.starts_with(&format!("invalid --cpus {bad}: expected")), "{refused}");
        }
        assert_eq!(cpus(None), Ok(Vec::new()));
    }
}
