//! Launches `exchange.cu`. A backend that joined no group launches nothing.

use crate::cuda::gpu::ctas;
use crate::cuda::group::{CudaMember, Lanes};
use crate::cuda::{Address, Cuda, Floats, Gpu, Launch, Params};
use crate::ops::{OpError, check_len};
use crate::sizes::exchange::{MAX_PARTS, THREADS};
use crate::tuning;

/// What an exchange does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exchange {
    /// A sum for which every rank reads the values of all others.
    SumAtOnce,
    /// A sum for which every rank sums a segment, then reads the other segments.
    SumInTwoShots,
    /// The values of rank 0.
    Copy,
}

/// Replaces the first `len` values of each of `parts` by their sums over the ranks, all at once.
pub(crate) fn all_reduce<G: Gpu>(
    cuda: &mut Cuda<G>,
    parts: &mut [&mut Floats],
    len: usize,
) -> Result<(), OpError> {
    let Some(member) = cuda.member() else {
        return Ok(());
    };
    let values = parts.len().min(MAX_PARTS).saturating_mul(len);
    let how = match tuning::cuda_exchange_takes_two_shots(member.world(), values) {
        true => Exchange::SumInTwoShots,
        false => Exchange::SumAtOnce,
    };
    launch(cuda, how, parts, len)
}

/// Replaces the first `len` values by those of rank 0.
pub(crate) fn broadcast<G: Gpu>(
    cuda: &mut Cuda<G>,
    values: &mut Floats,
    len: usize,
) -> Result<(), OpError> {
    launch(cuda, Exchange::Copy, &mut [values], len)
}

/// Up to [`MAX_PARTS`] parts share a launch.
pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    how: Exchange,
    parts: &mut [&mut Floats],
    len: usize,
) -> Result<(), OpError> {
    if cuda.member().is_none() {
        return Ok(());
    }
    parts.iter().try_for_each(|part| check_len("exchange", "part", part.len(), 1, len))?;
    if len == 0 {
        return Ok(());
    }
    parts.chunks_mut(MAX_PARTS).try_for_each(|parts| {
        let mut at = [Address(0); MAX_PARTS];
        at.iter_mut().zip(parts.iter()).for_each(|(at, part)| *at = part.address());
        let Some(member) = cuda.member() else {
            return Ok(());
        };
        let launch = launch_of(member, how, at, parts.len(), len)?;
        // SAFETY: every part holds `len` values; the table names exchange memory of the lanes, which
        // `Member` keeps mapped.
        unsafe { cuda.launch(launch) }
    })
}

/// For `count` parts of `len` values, which `parts` begins with.
fn launch_of<G: Gpu>(
    member: &CudaMember<G>,
    how: Exchange,
    parts: [Address; MAX_PARTS],
    count: usize,
    len: usize,
) -> Result<Launch, OpError> {
    let (world, groups) = (member.world(), len.div_ceil(4).saturating_mul(count));
    if groups >= MAX_GROUPS {
        return Err(OpError::Shape { op: "exchange", what: "the message is too long" });
    }
    let Grid { lanes, chunk } = Grid::new(member.lanes, groups);
    let mut params = Params::new().address(member.table.address()).address(member.state.address());
    for part in parts {
        params = params.address(part);
    }
    Ok(Launch {
        kernel: kernel(how, world),
        grid: [ctas(lanes), 1, 1],
        cta: [ctas(THREADS), 1, 1],
        shared_bytes: 0,
        params: params
            .count(len)
            .count(count)
            .count(member.rank())
            .count(world)
            .count(member.lanes.capacity)
            .count(chunk),
    })
}

/// Groups of 4 values have numbers below this.
const MAX_GROUPS: usize = 1 << 29;

/// How a message is spread over lanes: a function of its length and the group, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) lanes: usize,
    /// Groups that a lane takes at a time.
    pub(crate) chunk: usize,
}

impl Grid {
    pub(crate) fn new(of: Lanes, groups: usize) -> Grid {
        // A group per thread at least, and no more than a buffer holds.
        let chunk = groups.div_ceil(of.lanes).max(THREADS).min(of.capacity).max(1);
        Grid { lanes: groups.div_ceil(chunk).clamp(1, of.lanes), chunk }
    }
}

fn kernel(how: Exchange, world: usize) -> &'static str {
    let size = match world {
        0..=2 => 0,
        3..=4 => 1,
        5..=8 => 2,
        _ => 3,
    };
    match how {
        Exchange::SumAtOnce => {
            ["exchange_once_n2", "exchange_once_n4", "exchange_once_n8", "exchange_once_n16"][size]
        }
        // Two shots are of no use to two ranks.
        Exchange::SumInTwoShots => {
            ["exchange_twice_n4", "exchange_twice_n4", "exchange_twice_n8", "exchange_twice_n16"]
                [size]
        }
        Exchange::Copy => "exchange_copy",
    }
}
