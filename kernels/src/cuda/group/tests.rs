//! Groups of emulated devices, a thread each, over a real segment, against the processors' sums.

use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use shared::ids::{Generation, GroupId, Rank, WorldSize};
use shared::shm::group::{GroupMember as HostMember, GroupOwner, GroupShape, WaitPolicy};

use super::*;
use crate::GroupFailure;
use crate::cuda::emu::Emu;
use crate::cuda::ops::exchange::{Exchange, launch};
use crate::cuda::{Buffer, Pages};
use crate::kv::PageLayout;

mod processes;

const DEADLINE: Duration = Duration::from_secs(60);

fn shape(world: usize, exchange_values: usize) -> GroupShape {
    GroupShape {
        group: GroupId(3),
        generation: Generation(1),
        world_size: WorldSize(world as u16),
        exchange_values,
        log_bytes: 64,
    }
}

fn map_of(group: &GroupOwner, shape: &GroupShape, rank: usize) -> Arc<GroupMap> {
    let (segment, bells) = (group.try_clone().unwrap(), group.doorbells().unwrap());
    GroupMap::open(segment, bells, shape, Rank(rank as u16)).unwrap()
}

/// The ranks of a group, a thread each. `has_peers` says of each device whether it reaches others.
struct Ranks {
    shape: GroupShape,
    has_peers: Vec<bool>,
    group: GroupOwner,
    /// Sums of the same values by processors.
    hosts: GroupOwner,
    offers: Mutex<Vec<Option<Offer>>>,
    reached: Mutex<Vec<bool>>,
    barrier: Barrier,
}

impl Ranks {
    fn new(world: usize, exchange_values: usize, has_peers: &[bool]) -> Ranks {
        let shape = shape(world, exchange_values);
        let create = || GroupOwner::create("sepal-test-devices", &shape).unwrap();
        Ranks {
            has_peers: has_peers.iter().copied().cycle().take(world).collect(),
            group: create(),
            hosts: create(),
            offers: Mutex::new((0..world).map(|_| None).collect()),
            reached: Mutex::default(),
            barrier: Barrier::new(world),
            shape,
        }
    }

    /// What each rank returns, in their order.
    fn run<Out: Send>(
        &self,
        work: impl Fn(usize, &mut Cuda<Emu>, &mut HostMember) -> Out + Sync,
    ) -> Vec<Out> {
        let rank = |rank: usize| {
            let mut cuda = self.join(rank);
            let start = Instant::now();
            let heartbeat = move || assert!(start.elapsed() < DEADLINE, "a wait does not end");
            let (spin, interval) = (Duration::ZERO, Duration::from_millis(20));
            let policy = WaitPolicy { spin, interval, heartbeat: Box::new(heartbeat) };
            let map = map_of(&self.hosts, &self.shape, rank);
            work(rank, &mut cuda, &mut HostMember::new(&map, policy).unwrap())
        };
        thread::scope(|scope| {
            let (rank, world) = (&rank, self.shape.world());
            let ranks: Vec<_> = (0..world).map(|index| scope.spawn(move || rank(index))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Offers, agrees and joins, as a worker does.
    fn join(&self, rank: usize) -> Cuda<Emu> {
        let peers = self.has_peers[rank];
        let emu = Emu::new(1).with_ordinal(rank as u32).with_peers(peers);
        let mut cuda = Cuda::new(emu);
        let map = map_of(&self.group, &self.shape, rank);
        let offer = cuda.offer(&map).unwrap();
        self.offers.lock().unwrap()[rank] = Some(offer);
        self.barrier.wait();
        let copy = |(index, offer): (usize, &Option<Offer>)| {
            let offer = offer.as_ref().filter(|_| index != rank)?;
            let memory = offer.memory.as_ref().map(|fd| fd.try_clone().unwrap());
            let device = DeviceIdentity::from_bytes(&offer.device.to_bytes()).unwrap();
            Some(Offer { device, memory })
        };
        let offers: Vec<_> = self.offers.lock().unwrap().iter().enumerate().map(copy).collect();
        self.reached.lock().unwrap().push(cuda.reach(&offers));
        self.barrier.wait();
        let use_peer = self.reached.lock().unwrap().iter().all(|reaches| *reaches);
        assert_eq!(use_peer, self.has_peers.iter().all(|has| *has));
        let path = cuda.join(map, offers, use_peer).unwrap();
        assert_eq!(path.to_string(), if use_peer { "device memory" } else { "host memory" });
        cuda
    }
}

/// A value in which rounding shows the order of additions.
fn value(rank: usize, round: usize, index: usize) -> f32 {
    let hash = [rank, round, index].iter().fold(0x9e37_79b9u32, |hash, &part| {
        (hash ^ part as u32).wrapping_mul(0x85eb_ca6b).rotate_left(13)
    });
    let exponent = (hash % 40) as i32 - 20;
    ((hash >> 8) as f32 / 8_388_608.0 - 1.0) * 2f32.powi(exponent)
}

fn values(rank: usize, round: usize, len: usize) -> Vec<f32> {
    (0..len).map(|index| value(rank, round, index)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn uploaded(cuda: &mut Cuda<Emu>, values: &[f32]) -> Buffer<Emu> {
    let mut buffer = cuda.buffer(values.len() + 1);
    cuda.upload(values, &mut buffer).unwrap();
    buffer
}

fn downloaded(cuda: &mut Cuda<Emu>, from: &Buffer<Emu>, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    cuda.download(from, &mut values).unwrap();
    values
}

/// Both ways, and a group of which one device reaches no other.
const PATHS: [&[bool]; 3] = [&[true], &[false], &[false, true]];

#[test]
fn sums_have_the_bits_of_the_processors_for_every_length_and_way() {
    for world in [2, 3, 4] {
        for (has_peers, exchange_values) in PATHS.into_iter().zip([9000, 4096, 5]) {
            let ranks = Ranks::new(world, exchange_values, has_peers);
            ranks.run(|rank, cuda, host| {
                for (round, len) in
                    [1, 3, 4, 7, 1023, 1024, 1025, 4100, 20_000, 36_001].into_iter().enumerate()
                {
                    let values = values(rank, round, len);
                    let mut expected = values.clone();
                    host.all_reduce(&mut expected).unwrap();
                    for how in [Exchange::SumAtOnce, Exchange::SumInTwoShots] {
                        let mut own = uploaded(cuda, &values);
                        launch(cuda, how, &mut [&mut own], len).unwrap();
                        let got = downloaded(cuda, &own, len);
                        let what = format!("{how:?} of {len} by rank {rank} of {world}");
                        assert!(bits(&got) == bits(&expected), "{what}");
                    }
                }
            });
        }
    }
}

#[test]
fn parts_at_any_address_cross_at_once() {
    let (first, len) = (3, 1031);
    let ranks = Ranks::new(3, 4096, &[true]);
    ranks.run(|rank, cuda, host| {
        let mut parts: Vec<_> =
            (0..4).map(|part| uploaded(cuda, &values(rank, part, first + len))).collect();
        let before = cuda.launches();
        let mut places: Vec<_> =
            parts.iter_mut().map(|part| part.part_mut(first..first + len).unwrap()).collect();
        sum_all(cuda, &mut places, len);
        // Three share a launch.
        assert_eq!(cuda.launches() - before, 2);
        for (part, buffer) in parts.iter().enumerate() {
            let mut expected = values(rank, part, first + len);
            host.all_reduce(&mut expected[first..]).unwrap();
            assert_eq!(bits(&downloaded(cuda, buffer, first + len)), bits(&expected), "{part}");
        }
    });
}

fn sum_all(cuda: &mut Cuda<Emu>, parts: &mut [&mut crate::cuda::Floats], len: usize) {
    crate::Backend::all_reduce(cuda, parts, len).unwrap();
}

#[test]
fn many_exchanges_in_a_row_stay_apart() {
    for has_peers in [&[true][..], &[false]] {
        let ranks = Ranks::new(3, 3000, has_peers);
        ranks.run(|rank, cuda, host| {
            for round in 0..120 {
                // Lengths of one lane and of several take turns.
                let len = [5, 2500, 40, 1200][round % 4] + round;
                let values = values(rank, round, len);
                let mut expected = values.clone();
                let mut own = uploaded(cuda, &values);
                if round % 7 == 3 {
                    host.broadcast_values(&mut expected).unwrap();
                    crate::Backend::broadcast(cuda, &mut own, len).unwrap();
                } else {
                    host.all_reduce(&mut expected).unwrap();
                    sum_all(cuda, &mut [&mut *own], len);
                }
                assert!(bits(&downloaded(cuda, &own, len)) == bits(&expected), "round {round}");
            }
        });
    }
}

#[test]
fn recorded_exchanges_are_right_at_every_replay() {
    const LEN: usize = 2100;
    let ranks = Ranks::new(2, 8192, &[true]);
    ranks.run(|rank, cuda, host| {
        let mut sum = cuda.buffer(LEN);
        let mut first = cuda.buffer(LEN);
        cuda.open_steps([1, 1], 32, 1, 64).unwrap();
        let layout = PageLayout { kv_heads: 1, head_dim: 32, dtype: crate::DType::F32 };
        let memory = cuda.buffer(layout.page_bytes() / 4);
        let mut pages = [Pages::over(layout, &memory, None, layout.page_bytes())];
        let recorded = cuda
            .record(&mut pages, |cuda, _| {
                crate::Backend::all_reduce(cuda, &mut [&mut *sum], LEN)?;
                crate::Backend::broadcast(cuda, &mut first, LEN)
            })
            .unwrap()
            .expect("both can be recorded");
        assert_eq!(recorded.launches(), 2);
        for round in 0..9 {
            let values = values(rank, round, LEN);
            let [mut sums, mut firsts] = [values.clone(), values.clone()];
            host.all_reduce(&mut sums).unwrap();
            host.broadcast_values(&mut firsts).unwrap();
            cuda.upload(&values, &mut sum).unwrap();
            cuda.upload(&values, &mut first).unwrap();
            if round % 3 == 2 {
                // Not all of them come from the recording.
                sum_all(cuda, &mut [&mut *sum], LEN);
                crate::Backend::broadcast(cuda, &mut first, LEN).unwrap();
            } else {
                cuda.replay(&recorded, &mut pages).unwrap();
            }
            assert!(bits(&downloaded(cuda, &sum, LEN)) == bits(&sums), "sum of round {round}");
            assert!(bits(&downloaded(cuda, &first, LEN)) == bits(&firsts), "copy of {round}");
        }
    });
}

#[test]
fn an_abort_ends_every_wait_and_the_supervisor_sees_for_whom() {
    for has_peers in [true, false] {
        let ranks = Ranks::new(3, 4096, &[has_peers]);
        ranks.run(|rank, cuda, _| {
            let mut own = uploaded(cuda, &values(rank, 0, 3000));
            sum_all(cuda, &mut [&mut *own], 3000);
            downloaded(cuda, &own, 1);
            if rank == 1 {
                // It never comes again.
                let start = Instant::now();
                let waits = || [0, 2].map(|rank| ranks.group.waits()[rank]);
                while waits() != [Some(Rank(1)); 2] {
                    assert!(start.elapsed() < DEADLINE, "{:?}", ranks.group.waits());
                    thread::yield_now();
                }
                ranks.group.abort().unwrap();
                return;
            }
            // What is enqueued after the exchange that waits is launched and waits for nobody, for
            // rank 1 will never come: else this does not end.
            let before = cuda.launches();
            for _ in 0..50 {
                sum_all(cuda, &mut [&mut *own], 3000);
            }
            let error = cuda.download(&own, &mut [0.0]).unwrap_err();
            assert_eq!(error, OpError::Group(GroupFailure::Aborted));
            assert_eq!(cuda.launches() - before, 50);
            assert_eq!(cuda.wait(), Err(OpError::Group(GroupFailure::Aborted)));
        });
        assert_eq!(ranks.group.waits(), [None; 3], "who waits no longer says so");
    }
}

#[test]
fn ranks_that_follow_different_plans_get_an_error() {
    let ranks = Ranks::new(2, 4096, &[true]);
    let errors = ranks.run(|rank, cuda, _| {
        let len = [3000, 5000][rank];
        let mut own = uploaded(cuda, &values(rank, 0, len));
        sum_all(cuda, &mut [&mut *own], len);
        cuda.wait().unwrap_err()
    });
    for (rank, error) in errors.into_iter().enumerate() {
        let OpError::Group(GroupFailure::Fault(why)) = error else { panic!("{error}") };
        let other = 1 - rank;
        assert_eq!(
            why,
            format!("rank {other} runs another operation than the device of this rank")
        );
    }
}

#[test]
fn a_device_that_is_alone_launches_nothing() {
    let mut cuda = Cuda::new(Emu::new(1));
    let mut own = uploaded(&mut cuda, &[1.0; 8]);
    sum_all(&mut cuda, &mut [&mut *own], 8);
    crate::Backend::broadcast(&mut cuda, &mut own, 8).unwrap();
    assert_eq!(cuda.launches(), 0);
}

#[test]
fn offers_that_do_not_fit_are_refused() {
    let shape = shape(2, 64);
    let group = GroupOwner::create("sepal-test-devices", &shape).unwrap();
    let map = map_of(&group, &shape, 0);
    let device =
        DeviceIdentity { uuid: Emu::new(1).with_ordinal(1).uuid().unwrap(), multiprocessors: 4 };
    let offer = |memory: Option<OwnedFd>| vec![None, Some(Offer { device, memory })];
    let offered = || {
        let mut cuda = Cuda::new(Emu::new(1));
        let fd = cuda.offer(&map).unwrap().memory;
        (cuda, fd)
    };
    let refused = |offers: Vec<Option<Offer>>, use_peer: bool| {
        let (mut cuda, _) = offered();
        cuda.join(Arc::clone(&map), offers, use_peer).unwrap_err().to_string()
    };
    let mut early = Cuda::new(Emu::new(1));
    assert!(early.join(Arc::clone(&map), offer(None), false).is_err(), "it has offered nothing");
    for offers in [vec![], vec![None], vec![None, None], offer(None).into_iter().rev().collect()] {
        assert_eq!(refused(offers, false), "join: the offers are not those of all other ranks");
    }
    assert_eq!(refused(offer(None), true), "join: a device shares no memory");
    let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let why = refused(offer(Some(null())), true);
    assert!(why.contains("cannot map device memory of another process"), "{why}");

    let (cuda, fd) = offered();
    assert!(cuda.reach(&offer(Some(null()))));
    assert!(!cuda.reach(&offer(None)), "no memory is offered");
    let foreign = DeviceIdentity { uuid: [7; 16], ..device };
    assert!(!cuda.reach(&[None, Some(Offer { device: foreign, memory: fd })]), "never seen");
    assert!(!early.reach(&offer(Some(null()))), "it has offered nothing");
    assert_eq!(DeviceIdentity::from_bytes(&device.to_bytes()), Some(device));
    assert_eq!(DeviceIdentity::from_bytes(&[0; 19]), None);
    assert_eq!(DeviceIdentity::from_bytes(&[0; 21]), None);
}

#[test]
fn lanes_share_the_memory_and_are_no_more_than_the_smallest_device_runs() {
    for (values, multiprocessors) in [(1, 4), (5, 108), (1 << 14, 4), (1 << 18, 132), (1 << 22, 6)]
    {
        let bytes = shape(4, values).device_bytes();
        let Lanes { lanes, capacity } = Lanes::new(bytes, multiprocessors);
        assert!((1..=multiprocessors.min(64)).contains(&lanes), "{lanes}");
        assert!(DEVICE_FLAG_BYTES + lanes * capacity * 32 <= bytes);
        assert!((capacity + 1) * lanes * 4 > values, "memory for {values} values is used");
    }
}
