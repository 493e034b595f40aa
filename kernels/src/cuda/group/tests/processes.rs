//! Ranks as processes that pass real descriptors, on the emulator and on the driver that stands in
//! for one; one of them is killed between two sums.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use shared::bootstrap::DescriptorSocket;
use shared::control::FdTag;

use super::*;
use crate::cuda::driver::CudaDriver;
use crate::cuda::emu::DRIVER_FOLDER;

/// How the environment tells a child what it is: kind, rank, and path.
const CHILD: &str = "SEPAL_TEST_DEVICE_RANK";

const TAG: FdTag = FdTag(1);

/// Values of a sum, and sums before one rank is killed.
const LEN: usize = 3000;
const SUMS: usize = 5;

/// Starts a rank; its socket.
fn start(kind: &str, rank: usize, path: &str) -> (Child, DescriptorSocket) {
    let (ours, theirs) = DescriptorSocket::pair().unwrap();
    let libraries = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cuda::group::tests::processes::rank", "--include-ignored"])
        .env(CHILD, format!("{kind} {rank} {path}"))
        .env("LD_LIBRARY_PATH", format!("{DRIVER_FOLDER}:{libraries}"))
        .env("EMU_CUDA_DEVICES", "2")
        .env("EMU_CUDA_PEERS", if path == "device" { "1" } else { "0" })
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    (child, ours)
}

#[test]
fn processes_sum_through_each_others_memory_until_one_is_killed() {
    for kind in ["emulator", "driver"] {
        for path in ["device", "host"] {
            let shape = shape(2, 4096);
            let group = GroupOwner::create("sepal-test-devices", &shape).unwrap();
            let (children, sockets): (Vec<_>, Vec<_>) =
                (0..2).map(|rank| start(kind, rank, path)).unzip();
            for socket in &sockets {
                let (segment, bells) = (group.try_clone().unwrap(), group.doorbells().unwrap());
                let fds = [segment.as_fd(), bells[0].as_fd(), bells[1].as_fd()];
                socket.send(TAG, &fds).unwrap();
            }
            // What a rank shares goes to the other.
            let shared = sockets.iter().map(|socket| socket.recv(TAG, 1, DEADLINE).unwrap());
            let shared: Vec<_> = shared.collect();
            for (socket, fds) in sockets.iter().rev().zip(&shared) {
                socket.send(TAG, &[fds[0].as_fd()]).unwrap();
            }
            let [mut living, mut killed]: [Child; 2] = children.try_into().unwrap();
            let status = killed.wait().unwrap();
            assert_eq!(status.signal(), Some(9), "{kind}, {path}: {status}");
            let start = Instant::now();
            while group.waits()[0] != Some(Rank(1)) {
                assert!(start.elapsed() < DEADLINE, "{kind}, {path}: rank 0 does not wait");
                assert!(living.try_wait().unwrap().is_none(), "{kind}, {path}: rank 0 ended");
                thread::sleep(Duration::from_millis(1));
            }
            group.abort().unwrap();
            let start = Instant::now();
            let status = loop {
                if let Some(status) = living.try_wait().unwrap() {
                    break status;
                }
                if start.elapsed() > DEADLINE {
                    living.kill().unwrap();
                    panic!("{kind}, {path}: rank 0 waits on after the abort");
                }
                thread::sleep(Duration::from_millis(1));
            };
            assert!(status.success(), "{kind}, {path}: {status}");
        }
    }
}

#[test]
#[ignore = "the child of processes_sum_through_each_others_memory_until_one_is_killed"]
fn rank() {
    let Ok(what) = std::env::var(CHILD) else {
        return;
    };
    let [kind, rank, path]: [&str; 3] = what.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let (rank, has_peers): (usize, bool) = (rank.parse().unwrap(), path == "device");
    if kind == "driver" {
        let device = CudaDriver::open(rank as u32).unwrap();
        run(Cuda::new(device), CudaDriver::uuid_of(1 - rank as u32).unwrap(), rank, has_peers);
    } else {
        let device = |rank: usize| Emu::new(1).with_ordinal(rank as u32).with_peers(has_peers);
        run(Cuda::new(device(rank)), device(1 - rank).uuid().unwrap(), rank, has_peers);
    }
}

fn run<G: Gpu>(mut cuda: Cuda<G>, other: [u8; 16], rank: usize, has_peers: bool) {
    let socket = DescriptorSocket::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut fds = socket.recv(TAG, 3, DEADLINE).unwrap();
    let bells = fds.split_off(1);
    let map = GroupMap::open(fds.remove(0), bells, &shape(2, 4096), Rank(rank as u16)).unwrap();
    let offer = cuda.offer(&map).unwrap();
    socket.send(TAG, &[offer.memory.unwrap().as_fd()]).unwrap();
    let memory = socket.recv(TAG, 1, DEADLINE).unwrap().pop();
    let device = DeviceIdentity { uuid: other, ..offer.device };
    let mut offers = vec![Some(Offer { device, memory })];
    offers.insert(rank, None);
    assert_eq!(cuda.reach(&offers), has_peers);
    cuda.join(map, offers, has_peers).unwrap();
    for round in 0.. {
        if rank == 1 && round == SUMS {
            nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).unwrap();
        }
        let mut own = cuda.buffer(LEN);
        cuda.upload(&values(rank, round, LEN), &mut own).unwrap();
        crate::Backend::all_reduce(&mut cuda, &mut [&mut *own], LEN).unwrap();
        let mut sum = vec![0.0; LEN];
        match cuda.download(&own, &mut sum) {
            Ok(()) => {
                let expected =
                    (0..LEN).map(|index| value(0, round, index) + value(1, round, index));
                assert_eq!(bits(&sum), bits(&expected.collect::<Vec<_>>()));
            }
            Err(error) => {
                assert_eq!((error, round), (OpError::Group(GroupFailure::Aborted), SUMS));
                return;
            }
        }
    }
}
