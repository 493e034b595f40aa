use std::fs;

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;
use proptest::prelude::*;

use super::*;

/// Files of a machine: `PATH CONTENT`, one a line.
fn machine(files: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for line in files.lines().filter(|line| !line.trim().is_empty()) {
        let (path, content) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
        write(folder.path(), path, content);
    }
    folder
}

fn write(folder: &Path, path: &str, content: impl AsRef<[u8]>) {
    let path = folder.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

/// Describes CPUs: siblings, socket and what shares the third-level cache, by number.
fn cpus(count: u32, of: impl Fn(u32) -> (String, u32, String)) -> String {
    let cpu = |cpu| {
        let (siblings, package, cache) = of(cpu);
        format!(
            "cpu/cpu{cpu}/topology/core_cpus_list {siblings}\ncpu/cpu{cpu}/topology/physical_package_id {package}\n\
             cpu/cpu{cpu}/cache/index0/level 1\ncpu/cpu{cpu}/cache/index0/shared_cpu_list {siblings}\n\
             cpu/cpu{cpu}/cache/index3/level 3\ncpu/cpu{cpu}/cache/index3/shared_cpu_list {cache}\n"
        )
    };
    (0..count).map(cpu).collect()
}

/// Two sockets of four cores; the second hyper-threads follow all first ones, as on Xeons.
fn xeon() -> tempfile::TempDir {
    let of = |cpu: u32| {
        let (core, package) = (cpu % 8, cpu % 8 / 4);
        let cache = ["0-3,8-11", "4-7,12-15"][package as usize];
        (format!("{core},{}", core + 8), package, cache.to_owned())
    };
    machine(&format!(
        "cpu/online 0-15\nnode/has_cpu 0-1\nnode/has_memory 0-1\nnode/node0/cpulist 0-3,8-11\n\
         node/node1/cpulist 4-7,12-15\n{}",
        cpus(16, of)
    ))
}

/// One socket and node, two third-level caches of four cores with neighbours as hyper-threads.
fn ryzen() -> tempfile::TempDir {
    let of = |cpu: u32| {
        let first = cpu & !1;
        (format!("{first}-{}", first + 1), 0, ["0-7", "8-15"][cpu as usize / 8].to_owned())
    };
    machine(&format!(
        "cpu/online 0-15\nnode/has_cpu 0\nnode/has_memory 0\nnode/node0/cpulist 0-15\n{}",
        cpus(16, of)
    ))
}

fn firsts(processor: &Processor) -> Vec<u32> {
    processor.cores().iter().map(|core| core.cpus[0]).collect()
}

#[test]
fn a_xeon_of_two_sockets_has_a_node_for_each() {
    let all: Vec<u32> = (0..16).collect();
    let processor = Processor::read(xeon().path(), &all);
    assert_eq!(firsts(&processor), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(processor.cores()[5].cpus, [5, 13]);
    assert_eq!((processor.cores()[5].node, processor.cores()[5].package), (1, 1));
    assert_eq!(processor.devices(), [Device::Node(0), Device::Node(1)]);
    assert_eq!(
        processor.seats(Device::Node(1), 0, 1, 4),
        Seats::Among(vec![4, 5, 6, 7, 12, 13, 14, 15])
    );
    let named = processor.clone().only(&all);
    assert_eq!(
        named.seats(Device::Node(1), 0, 1, 4),
        Seats::Each(vec![4, 5, 6, 7]),
        "one thread per core, and no second hyper-thread"
    );
    assert_eq!(named.seats(Device::Node(1), 1, 2, 2), Seats::Each(vec![6, 7]));
    assert_eq!(
        processor.summary(),
        "8 cores with 16 hyper-threads (CPUs 0-15) on NUMA nodes cpu:0, cpu:1, 2 third-level caches"
    );
}

#[test]
fn workers_on_a_ryzen_get_a_third_level_cache_each() {
    let all: Vec<u32> = (0..16).collect();
    let processor = Processor::read(ryzen().path(), &all);
    assert_eq!(firsts(&processor), [0, 2, 4, 6, 8, 10, 12, 14]);
    assert_eq!(processor.devices(), [Device::Cpu], "one node");
    let of = |index| processor.seats(Device::Cpu, index, 2, 4);
    assert_eq!([of(0), of(1)], [Seats::Among((0..8).collect()), Seats::Among((8..16).collect())]);
    let named = processor.clone().only(&all);
    let seats = |index| named.seats(Device::Cpu, index, 2, 4);
    assert_eq!(seats(0), Seats::Each(vec![0, 2, 4, 6]));
    assert_eq!(seats(1), Seats::Each(vec![8, 10, 12, 14]));
    assert_eq!(seats(1).to_string(), "one thread on each of CPUs 8,10,12,14");
    let caches: Vec<_> = processor.cores().iter().map(|core| core.cache).collect();
    assert_eq!(caches[3..5], [Some(0), Some(8)]);
}

#[test]
fn little_cores_are_left_out_unless_they_are_named() {
    let capacities = [446, 446, 446, 446, 1024, 1024];
    let mut files = "cpu/online 0-5\n".to_owned();
    for (cpu, capacity) in capacities.iter().enumerate() {
        files += &format!("cpu/cpu{cpu}/cpu_capacity {capacity}\n");
        // Older kernels have only this name.
        files += &format!("cpu/cpu{cpu}/topology/thread_siblings_list {cpu}\n");
        files += &format!("cpu/cpu{cpu}/topology/physical_package_id -1\n");
    }
    let processor = Processor::read(machine(&files).path(), &[0, 1, 2, 3, 4, 5]);
    assert_eq!(firsts(&processor), [0, 1, 2, 3, 4, 5]);
    assert_eq!((processor.cores()[0].package, processor.cores()[0].cache), (0, None));
    assert_eq!(firsts(&processor.clone().without_slow()), [4, 5]);
    assert_eq!(firsts(&processor.only(&[1, 5])), [1, 5]);
}

#[test]
fn cores_that_are_offline_or_not_allowed_are_not_used() {
    let xeon = xeon();
    write(xeon.path(), "cpu/online", "0-2,4-15\n");
    let all: Vec<u32> = (0..16).collect();
    let processor = Processor::read(xeon.path(), &all);
    assert_eq!(processor.cores()[3].cpus, [11], "its sibling is offline");
    // A container with the second hyper-threads of one socket, and a CPU that is not there.
    let processor = Processor::read(xeon.path(), &[12, 13, 3, 99]);
    assert_eq!(processor.cpus(), [12, 13]);
    assert_eq!(processor.nodes(), [1]);
    assert_eq!(processor.devices(), [Device::Cpu]);
    assert_eq!(processor.seats(Device::Cpu, 0, 1, 2), Seats::Among(vec![12, 13]));
    assert_eq!(processor.summary(), "2 cores (CPUs 12-13)");
}

#[test]
fn as_many_threads_as_named_cores_are_pinned_and_others_are_not() {
    let all: Vec<u32> = (0..16).collect();
    let processor = Processor::read(ryzen().path(), &all).only(&[0, 1, 2, 3]);
    let seats = |threads| processor.seats(Device::Cpu, 0, 1, threads);
    assert_eq!(seats(2), Seats::Each(vec![0, 2]));
    for threads in [1, 3, 4, 9] {
        assert_eq!(seats(threads), Seats::Among(vec![0, 1, 2, 3]), "{threads}");
    }
    // More workers than cores.
    let of = |index| processor.seats(Device::Cpu, index, 3, 1);
    assert_eq!([of(0), of(1), of(2)], [0, 2, 0].map(|cpu| Seats::Each(vec![cpu])));
    for device in [Device::Node(7), Device::Cuda(0), Device::Emulator(0)] {
        assert_eq!(processor.seats(device, 0, 1, 1), Seats::Anywhere);
    }
    assert_eq!(Seats::Among(vec![0, 1]).to_string(), "threads on any of CPUs 0-1");
}

#[test]
fn a_node_without_memory_makes_all_cores_one_device() {
    let xeon = xeon();
    let all: Vec<u32> = (0..16).collect();
    for content in ["0\n", "", "nonsense"] {
        write(xeon.path(), "node/has_memory", content);
        assert_eq!(Processor::read(xeon.path(), &all).devices(), [Device::Cpu], "{content}");
    }
}

#[test]
fn a_machine_that_tells_nothing_has_a_core_for_each_cpu() {
    let empty = tempfile::tempdir().unwrap();
    let processor = Processor::read(empty.path(), &[3, 1, 1]);
    assert_eq!(firsts(&processor), [1, 3]);
    assert_eq!((processor.nodes(), processor.devices()), (vec![0], vec![Device::Cpu]));
    let none = Processor::read(empty.path(), &[]);
    assert_eq!((none.cores().len(), none.seats(Device::Cpu, 0, 0, 4)), (0, Seats::Anywhere));
    assert_eq!(none.summary(), "0 cores (CPUs )");
}

#[test]
fn files_that_make_no_sense_are_as_if_they_were_missing() {
    let huge = "0,".repeat(1 << 16);
    for bad in [&b"\xff\xfe"[..], b"", b"9-3", b"0-4294967295", b"-1", huge.as_bytes()] {
        let xeon = xeon();
        for path in ["cpu/online", "node/has_cpu", "node/node0/cpulist"] {
            write(xeon.path(), path, bad);
        }
        for path in ["core_cpus_list", "physical_package_id"] {
            write(xeon.path(), &format!("cpu/cpu0/topology/{path}"), bad);
        }
        write(xeon.path(), "cpu/cpu0/cache/index3/shared_cpu_list", bad);
        let processor = Processor::read(xeon.path(), &[0, 1, 8]);
        assert_eq!(processor.cpus(), [0, 1, 8], "{bad:?}");
        let first = processor.cores().iter().find(|core| core.cpus.contains(&0)).unwrap();
        assert_eq!((first.cache, first.package), (None, 0), "{bad:?}");
    }
    // A list without the CPU that it describes.
    let xeon = xeon();
    write(xeon.path(), "cpu/cpu0/topology/core_cpus_list", "1,9");
    assert_eq!(Processor::read(xeon.path(), &[0, 1]).cores().len(), 2);
}

proptest! {
    #[test]
    fn each_usable_cpu_is_in_exactly_one_core(
        siblings in proptest::collection::vec("[0-9,-]{0,6}", 8),
        nodes in proptest::collection::vec("[0-9,-]{0,6}", 2),
        allowed in proptest::collection::btree_set(0u32..12, 0..8),
    ) {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "node/has_cpu", "0-1");
        for (node, cpus) in nodes.iter().enumerate() {
            write(folder.path(), &format!("node/node{node}/cpulist"), cpus);
        }
        for (cpu, list) in siblings.iter().enumerate() {
            write(folder.path(), &format!("cpu/cpu{cpu}/topology/core_cpus_list"), list);
        }
        let allowed: Vec<u32> = allowed.into_iter().collect();
        let processor = Processor::read(folder.path(), &allowed);
        prop_assert_eq!(processor.cpus(), allowed.clone());
        prop_assert!(processor.cores().iter().all(|core| !core.cpus.is_empty()));
        let by_node: usize = processor.nodes().iter().map(|&n| processor.of(Device::Node(n)).len()).sum();
        prop_assert_eq!(by_node, processor.cores().len());
    }
}

#[test]
fn a_thread_runs_where_it_sits() {
    let processor = Processor::of_this_machine();
    let cpus = processor.cpus();
    let on = |set: CpuSet| -> Vec<u32> {
        (0..1024).filter(|&cpu| set.is_set(cpu as usize).unwrap_or(false)).collect()
    };
    let now = move || on(sched_getaffinity(Pid::from_raw(0)).unwrap());
    std::thread::spawn(move || {
        let last = *cpus.last().unwrap();
        let seats = Seats::Each(vec![cpus[0], last]);
        seats.take(1).unwrap();
        assert_eq!(now(), [last]);
        seats.take_all().unwrap();
        assert_eq!(now(), if last == cpus[0] { vec![last] } else { vec![cpus[0], last] });
        Seats::Among(cpus.clone()).take(0).unwrap();
        Seats::Among(cpus.clone()).take_all().unwrap();
        assert_eq!(now(), cpus);
        for none in [vec![], vec![60_000], vec![1023]] {
            assert!(cpus.contains(&1023) || Seats::Among(none).take_all().is_err());
        }
        assert_eq!(now(), cpus);
    })
    .join()
    .unwrap();
}
