//! Exchanges between ranks, on one device: the other ranks have done their share before. Their
//! values lie in their exchange memory and their flags are raised, so nothing waits, and the order
//! of the sums, the addresses and the flags are those of a real group. Real groups are tested in
//! `cuda/group/tests.rs`.

use std::sync::Arc;

use shared::ids::{Generation, GroupId, Rank, WorldSize};
use shared::shm::group::{GroupMap, GroupOwner, GroupShape};

use super::*;
use crate::cuda::ops::exchange::{Exchange, Grid, launch};
use crate::cuda::{Cuda, Gpu, PooledMemory};
use crate::sizes::exchange::{FLAG_BYTES, MAX_LANES};

/// Ranks of a group, the one that is launched, and what it does.
const CASES: [(u16, u16, Exchange); 9] = [
    (2, 0, Exchange::SumAtOnce),
    (2, 1, Exchange::Copy),
    (3, 1, Exchange::SumAtOnce),
    (4, 3, Exchange::SumInTwoShots),
    (5, 2, Exchange::SumAtOnce),
    (7, 0, Exchange::SumInTwoShots),
    (16, 15, Exchange::SumAtOnce),
    (16, 8, Exchange::SumInTwoShots),
    (16, 15, Exchange::Copy),
];

/// A case, ready for a launch.
struct Ghosts {
    world: usize,
    rank: usize,
    how: Exchange,
    len: usize,
    /// The values of every rank, and what all have afterwards.
    values: Vec<Vec<f32>>,
    expected: Vec<f32>,
}

/// Every exchange, for lengths of one lane and of several.
pub(super) fn check<G: Gpu>(
    _: &str,
    devices: &mut [Cuda<G>],
    class: Class,
) -> Result<usize, Failure> {
    let lengths: &[usize] = if class == Class::Smallest { &[1030] } else { &[1, 5, 1030, 4099] };
    let mut cases = 0;
    for device in devices {
        for (world, rank, how) in CASES {
            for &len in lengths {
                let case = format!("exchange {how:?} rank {rank} of {world} {len}");
                let ghosts = Ghosts::new(usize::from(world), usize::from(rank), how, len);
                let mut cuda = device.beside();
                let mut bench = Bench::checking(&mut cuda, &case, class);
                ghosts.run(&mut bench)?;
                cases += 1;
            }
        }
    }
    Ok(cases)
}

impl Ghosts {
    fn new(world: usize, rank: usize, how: Exchange, len: usize) -> Ghosts {
        let values: Vec<Vec<f32>> = (0..world).map(|rank| noise(rank as u64 + 1, len)).collect();
        let sum = |at: usize| values.iter().skip(1).fold(values[0][at], |sum, v| sum + v[at]);
        let expected = match how {
            Exchange::Copy => values[0].clone(),
            _ => (0..len).map(sum).collect(),
        };
        Ghosts { world, rank, how, len, values, expected }
    }

    fn run<G: Gpu>(&self, bench: &mut Bench<'_, Cuda<G>>) -> Result<(), Failure> {
        let shape = GroupShape {
            group: GroupId(0),
            generation: Generation(0),
            world_size: WorldSize(self.world as u16),
            exchange_values: 1 << 14,
            log_bytes: 64,
        };
        let group = GroupOwner::create("sepal-case-exchange", &shape).expect("a group");
        let (segment, bells) =
            (group.try_clone().expect("descriptors"), group.doorbells().expect("descriptors"));
        let map = GroupMap::open(segment, bells, &shape, Rank(self.rank as u16)).expect("a map");
        let mut out = bench.output(self.len)?;
        bench.launch(|cuda, _| {
            cuda.upload(&self.values[self.rank], &mut out)?;
            let mut memory = cuda.reserve(self.world * shape.device_bytes())?;
            self.join(cuda, Arc::clone(&map), &mut memory, &shape)?;
            launch(cuda, self.how, &mut [&mut out], self.len)?;
            cuda.wait()
        })?;
        let actual = bench.take(&out, self.len)?;
        bench.same(&actual, &self.expected)
    }

    /// Joins a group whose other ranks have raised their flags.
    fn join<G: Gpu>(
        &self,
        cuda: &mut Cuda<G>,
        map: Arc<GroupMap>,
        memory: &mut PooledMemory<G>,
        shape: &GroupShape,
    ) -> Result<(), OpError> {
        cuda.join_over(map, memory)?;
        let member = cuda.member().expect("it has joined");
        let (lanes, groups) = (member.lanes, self.len.div_ceil(4));
        let grid = Grid::new(lanes, groups);
        assert!(groups <= grid.lanes * grid.chunk, "a chunk for each lane");
        // The kind of the last exchange, and its epoch: those before are not looked at any more.
        let (kind, epoch) = match self.how {
            Exchange::SumAtOnce => (1u64, 1u64),
            Exchange::SumInTwoShots => (3, 2),
            Exchange::Copy => (4, 1),
        };
        let flag = epoch << 32 | kind << 29 | groups as u64;
        for (rank, values) in self.values.iter().enumerate().filter(|(rank, _)| *rank != self.rank)
        {
            let flags: Vec<u8> = (0..grid.lanes).flat_map(|_| flag.to_le_bytes()).collect();
            let own = self.rank * shape.device_bytes();
            cuda.upload_bytes(&flags, memory, own + rank * MAX_LANES * 8)?;
            let of_rank = rank * shape.device_bytes() + FLAG_BYTES;
            for lane in 0..grid.lanes {
                let at = |epoch: usize| of_rank + (2 * lane + epoch % 2) * lanes.capacity * 16;
                let first = lane * grid.chunk * 4;
                let last = (first + grid.chunk * 4).min(self.len);
                let bytes = |of: &[f32]| -> Vec<u8> {
                    of[first..last].iter().flat_map(|v| v.to_le_bytes()).collect()
                };
                cuda.upload_bytes(&bytes(values), memory, at(1))?;
                if self.how == Exchange::SumInTwoShots {
                    cuda.upload_bytes(&bytes(&self.expected), memory, at(2))?;
                }
            }
        }
        Ok(())
    }
}
