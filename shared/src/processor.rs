//! The processor as Linux describes it under `/sys/devices/system`: its cores, the hyper-threads of each,
//! and which of them share a third-level cache, a socket and a NUMA node. From it follows where the
//! threads of a worker run ([`Seats`]).
//!
//! A worker computes with one thread per core. Hyper-threads of a core share its vector and matrix units,
//! which one thread of a product keeps busy, and its caches; what a second thread gains is not measured.
//! Which thread computes what never changes a result.
//!
//! Files that are missing or make no sense leave something unknown; every CPU that may be used is in
//! exactly one core.

mod list;
mod seats;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

use crate::config::Device;
pub use list::{MAX_CPUS, numbers, shown};
pub use seats::Seats;

/// Where Linux describes the processor.
const SYSTEM: &str = "/sys/devices/system";

/// Longest file that is read: a list of every second of 65,536 CPUs has more, and no machine does.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Caches of a CPU that are looked at; machines have four or five.
const MAX_CACHES: u32 = 16;

/// A core: CPUs that share its arithmetic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Core {
    /// The CPUs of it that may be used, in ascending order; at least one.
    pub cpus: Vec<u32>,
    pub node: u32,
    pub package: u32,
    /// The first CPU that shares its third-level cache; `None` where the system names no such cache.
    pub cache: Option<u32>,
    /// Its speed beside other cores, where the system tells it (ARM: 1024 is the fastest).
    pub capacity: Option<u32>,
}

/// The cores that may be used, by node, socket and cache, so that neighbours share what they can.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processor {
    cores: Vec<Core>,
    /// NUMA nodes that have memory; empty where the system does not tell.
    with_memory: Vec<u32>,
    /// Whether the operator named its CPUs.
    is_named: bool,
}

impl Processor {
    /// The cores of this machine that a worker may use: those of the CPUs in `named`, or if it is empty
    /// all but [slow ones](Self::without_slow).
    pub fn of_worker(named: &[u32]) -> Processor {
        let processor = Processor::of_this_machine();
        match named {
            [] => processor.without_slow(),
            named => processor.only(named),
        }
    }

    /// The cores of this machine, as far as this process may use them.
    pub fn of_this_machine() -> Processor {
        Processor::read(Path::new(SYSTEM), &allowed())
    }

    /// The cores that the files under `system` describe, of the CPUs that are `allowed` and online. All
    /// allowed CPUs count as online if the files say that none of them is.
    pub fn read(system: &Path, allowed: &[u32]) -> Processor {
        let online = read_numbers(&system.join("cpu/online")).unwrap_or_default();
        let mut usable = allowed.to_vec();
        usable.sort_unstable();
        usable.dedup();
        if usable.iter().any(|cpu| online.contains(cpu)) {
            usable.retain(|cpu| online.contains(cpu));
        }
        let nodes = nodes(&system.join("node"));
        let mut cores: Vec<(u32, Core)> = Vec::new();
        for cpu in usable {
            let folder = system.join(format!("cpu/cpu{cpu}"));
            let first = first_sibling(&folder, cpu);
            match cores.iter_mut().find(|(of, _)| *of == first) {
                Some((_, core)) => core.cpus.push(cpu),
                None => cores.push((first, core(&folder, cpu, &nodes))),
            }
        }
        let mut cores: Vec<Core> = cores.into_iter().map(|(_, core)| core).collect();
        cores.sort_by_key(|core| (core.node, core.package, core.cache, core.cpus.first().copied()));
        let with_memory = read_numbers(&system.join("node/has_memory")).unwrap_or_default();
        Processor { cores, with_memory, is_named: false }
    }

    /// The cores, those of one node, socket and cache beside each other.
    pub fn cores(&self) -> &[Core] {
        &self.cores
    }

    /// All CPUs of the cores, in ascending order.
    pub fn cpus(&self) -> Vec<u32> {
        let mut cpus: Vec<u32> = self.cores.iter().flat_map(|core| core.cpus.clone()).collect();
        cpus.sort_unstable();
        cpus
    }

    /// The NUMA nodes that have cores, in ascending order.
    pub fn nodes(&self) -> Vec<u32> {
        let mut nodes: Vec<u32> = self.cores.iter().map(|core| core.node).collect();
        nodes.dedup();
        nodes
    }

    /// The cores of a device; none where it is no processor, or a node without cores.
    pub fn of(&self, device: Device) -> Vec<&Core> {
        let is_part = |core: &&Core| match device {
            Device::Cpu => true,
            Device::Node(node) => core.node == node,
            Device::Cuda(_) | Device::Emulator(_) => false,
        };
        self.cores.iter().filter(is_part).collect()
    }

    /// The devices that serve where none was named: one for each NUMA node, so that weights are read
    /// from memory of their own; all cores as one where there is one node, or one of them has no
    /// memory.
    pub fn devices(&self) -> Vec<Device> {
        let nodes = self.nodes();
        let have_memory = nodes.iter().all(|node| self.with_memory.contains(node));
        match nodes.len() > 1 && have_memory {
            true => nodes.into_iter().map(Device::Node).collect(),
            false => vec![Device::Cpu],
        }
    }

    /// Without cores of less than half the speed of the fastest: all threads wait for the slowest at the
    /// end of each product. Estimated; no machine with such cores was at hand.
    #[must_use]
    pub fn without_slow(mut self) -> Processor {
        let fastest = self.cores.iter().filter_map(|core| core.capacity).max().unwrap_or(0);
        let is_fast = |core: &Core| core.capacity.is_none_or(|own| own >= fastest.div_ceil(2));
        self.cores.retain(is_fast);
        self
    }

    /// With these CPUs alone, which the operator named.
    #[must_use]
    pub fn only(mut self, cpus: &[u32]) -> Processor {
        self.is_named = true;
        for core in &mut self.cores {
            core.cpus.retain(|cpu| cpus.contains(cpu));
        }
        self.cores.retain(|core| !core.cpus.is_empty());
        self
    }

    /// Where the `threads` threads of a worker run: the worker at `index` of `count` on one device, whose
    /// cores they divide. Neighbours stay together, so that two workers of a processor with two
    /// third-level caches get one each. Threads have a CPU each only where the operator named the CPUs:
    /// beside other programs, a thread that may not move waits, and all others wait for it.
    pub fn seats(&self, device: Device, index: usize, count: usize, threads: usize) -> Seats {
        let cores = self.of(device);
        let share = (cores.len() / count.max(1)).max(1);
        let start = (index * share) % cores.len().max(1);
        let own = cores.get(start..(start + share).min(cores.len())).unwrap_or_default();
        if self.is_named { Seats::each(own, threads) } else { Seats::among(own) }
    }

    /// One line for people: `8 cores with 16 CPUs (0-15) on NUMA nodes cpu:0, cpu:1, 4 third-level caches`.
    pub fn summary(&self) -> String {
        let count = |n: usize, one: &str| format!("{n} {one}{}", if n == 1 { "" } else { "s" });
        let (cpus, nodes) = (self.cpus(), self.nodes());
        let mut caches: Vec<u32> = self.cores.iter().filter_map(|core| core.cache).collect();
        caches.sort_unstable();
        caches.dedup();
        let mut text = count(self.cores.len(), "core");
        text += &match cpus.len() > self.cores.len() {
            true => format!(" with {} hyper-threads (CPUs {})", cpus.len(), shown(&cpus)),
            false => format!(" (CPUs {})", shown(&cpus)),
        };
        if nodes.len() > 1 {
            let names: Vec<String> = nodes.iter().map(|&n| Device::Node(n).to_string()).collect();
            text += &format!(" on NUMA nodes {}", names.join(", "));
        }
        if caches.len() > 1 {
            text += &format!(", {}", count(caches.len(), "third-level cache"));
        }
        text
    }
}

/// The CPUs on which this thread may run; those of the machine where the system does not tell.
fn allowed() -> Vec<u32> {
    let list = |set: CpuSet| {
        let count = u32::try_from(CpuSet::count()).unwrap_or(MAX_CPUS);
        (0..count).filter(|&cpu| set.is_set(cpu as usize).unwrap_or(false)).collect()
    };
    let count = || std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    sched_getaffinity(Pid::from_raw(0)).map_or_else(|_| (0..count()).collect(), list)
}

fn core(folder: &Path, cpu: u32, nodes: &[(u32, Vec<u32>)]) -> Core {
    let number = |name: &str| read_text(&folder.join(name))?.trim().parse::<u32>().ok();
    let node = nodes.iter().find(|(_, cpus)| cpus.contains(&cpu));
    Core {
        cpus: vec![cpu],
        node: node.map_or(0, |(node, _)| *node),
        package: number("topology/physical_package_id").unwrap_or(0),
        cache: third_level(folder, cpu),
        capacity: number("cpu_capacity"),
    }
}

/// The first CPU of the core of `cpu`, whether or not it may be used.
fn first_sibling(folder: &Path, cpu: u32) -> u32 {
    let names = ["topology/core_cpus_list", "topology/thread_siblings_list"];
    let lists = names.iter().filter_map(|name| read_numbers(&folder.join(name)));
    let own = lists.filter(|list| list.contains(&cpu)).find_map(|list| list.into_iter().min());
    own.unwrap_or(cpu)
}

/// The first CPU that shares the third-level cache of `cpu`.
fn third_level(folder: &Path, cpu: u32) -> Option<u32> {
    let caches = (0..MAX_CACHES).map(|index| folder.join(format!("cache/index{index}")));
    let is_third = |cache: &std::path::PathBuf| {
        read_text(&cache.join("level")).is_some_and(|level| level.trim() == "3")
    };
    let shared = read_numbers(&caches.into_iter().find(is_third)?.join("shared_cpu_list"))?;
    shared.contains(&cpu).then(|| shared.into_iter().min()).flatten()
}

/// The nodes and their CPUs.
fn nodes(folder: &Path) -> Vec<(u32, Vec<u32>)> {
    let listed = ["has_cpu", "online"].iter().find_map(|name| read_numbers(&folder.join(name)));
    let cpus = |node| read_numbers(&folder.join(format!("node{node}/cpulist")));
    let nodes = listed.unwrap_or_default().into_iter().take(1 << 10);
    nodes.filter_map(|node| Some((node, cpus(node)?))).collect()
}

fn read_numbers(path: &Path) -> Option<Vec<u32>> {
    numbers(&read_text(path)?)
}

/// A short file, or nothing.
fn read_text(path: &Path) -> Option<String> {
    let mut text = String::new();
    let read = File::open(path).ok()?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).ok()?;
    (read as u64 <= MAX_FILE_BYTES).then_some(text)
}

#[cfg(test)]
mod tests;
