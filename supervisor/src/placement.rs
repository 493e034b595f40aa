//! Which group of devices serves which part of the span: pure arithmetic, no processes. Most groups
//! are a single device.

use std::thread::available_parallelism;

use serde::{Deserialize, Serialize};
use shared::block::Span;
use shared::config::Device;
use shared::ids::{GroupId, Rank, WorkerId, WorldSize};
use shared::processor::Processor;

/// Most workers of an instance: the board has 32 seats, two of which are not for workers.
pub const MAX_DEVICES: usize = 15;

/// A group of devices that can serve, and how fast it is beside the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceShare {
    /// The devices, in the order of ranks.
    pub devices: Vec<Device>,
    /// Relative speed; equal speeds get equal parts. Values that are not positive and finite count
    /// as 1.
    pub rate: f64,
}

/// Devices that serve together, as a person reads them.
pub fn names(devices: &[Device]) -> String {
    devices.iter().map(Device::to_string).collect::<Vec<_>>().join(" + ")
}

impl DeviceShare {
    /// `devices` in groups of `world_size`, all of one speed.
    pub fn groups(devices: &[Device], world_size: usize) -> Vec<DeviceShare> {
        let groups = devices.chunks(world_size.max(1));
        groups.map(|devices| DeviceShare { devices: devices.to_vec(), rate: 1.0 }).collect()
    }

    /// Gives `groups` the speeds of their devices, which are in the order of the groups. Ranks share
    /// each block, so that their speeds add up.
    pub fn set_rates(groups: &mut [DeviceShare], rates: &[f64]) {
        let mut rates = rates.iter();
        for group in groups {
            group.rate = rates.by_ref().take(group.devices.len()).sum();
        }
    }
}

/// A group of workers that is to exist: its devices and its blocks, for life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Its name; groups count from 0 in the order of the devices.
    pub group: GroupId,
    /// Its place among the groups of devices.
    pub share: usize,
    /// Its devices, in the order of ranks.
    pub devices: Vec<Device>,
    pub span: Span,
}

impl Placement {
    /// The workers, in the order of ranks. netd knows the group by the first.
    pub fn workers(&self) -> impl Iterator<Item = WorkerId> {
        let count = u16::try_from(self.devices.len()).unwrap_or(u16::MAX);
        let (group, world_size) = (self.group, WorldSize(count));
        (0..count).map(move |rank| WorkerId { group, rank: Rank(rank), world_size })
    }
}

/// Cuts `span` into contiguous parts, in the order of the groups: as an earlier start did
/// (`decided`, blocks of each group), if that still fits, else by [`share_out`]. `most` is the
/// number of blocks that the memory of each group holds.
pub fn cut(
    span: Span,
    shares: &[DeviceShare],
    most: &[u32],
    decided: &[Vec<u32>],
) -> Vec<Placement> {
    let blocks = span.block_count();
    let holds = |(index, count): (usize, &u32)| most.get(index).is_none_or(|most| count <= most);
    let known = decided.iter().find(|cut| {
        let total: u64 = cut.iter().map(|&count| u64::from(count)).sum();
        let used = shares.len().min(blocks);
        total == blocks as u64 && cut.len() == used && cut.iter().enumerate().all(holds)
    });
    let counts = match known {
        Some(cut) => cut.iter().map(|&count| count as usize).collect(),
        None => share_out(blocks, shares, most),
    };
    let mut start = 0;
    let mut placements = Vec::with_capacity(counts.len());
    for (index, (share, count)) in shares.iter().zip(counts).enumerate() {
        placements.extend(placement(index, share, span, start..start + count));
        start += count;
    }
    placements
}

/// Blocks of each group: in proportion to their rates, but no more than the memory of a group
/// holds, and at least one. When there are fewer blocks than groups, the last groups get none and
/// are left out. If all groups together hold too little, memory does not count.
pub fn share_out(blocks: usize, shares: &[DeviceShare], most: &[u32]) -> Vec<usize> {
    let used = shares.get(..shares.len().min(blocks)).unwrap_or(shares);
    let limit = |index: usize| most.get(index).map_or(blocks, |&most| (most as usize).max(1));
    let mut limits: Vec<usize> = (0..used.len()).map(limit).collect();
    if limits.iter().fold(0, |sum: usize, &limit| sum.saturating_add(limit)) < blocks {
        limits.fill(blocks);
    }
    let mut counts = in_proportion(blocks, used);
    // What exceeds the memory of one group goes, block by block, to the one that is the least busy
    // with one more.
    while let Some(over) = (0..used.len()).find(|&index| counts[index] > limits[index]) {
        let busy = |index: &usize| (counts[*index] + 1) as f64 / rate(&used[*index]);
        let fits = (0..used.len()).filter(|&index| counts[index] < limits[index]);
        let Some(next) = fits.min_by(|a, b| busy(a).total_cmp(&busy(b))) else {
            break;
        };
        counts[over] -= 1;
        counts[next] += 1;
    }
    counts
}

fn rate(share: &DeviceShare) -> f64 {
    if share.rate.is_finite() && share.rate > 0.0 { share.rate } else { 1.0 }
}

fn in_proportion(blocks: usize, used: &[DeviceShare]) -> Vec<usize> {
    let total: f64 = used.iter().map(rate).sum();
    let (mut start, mut seen) = (0, 0.0);
    let mut counts = Vec::with_capacity(used.len());
    for (index, share) in used.iter().enumerate() {
        seen += rate(share);
        let after = used.len() - index - 1;
        let wanted = (blocks as f64 * seen / total).round() as usize;
        let end = if after == 0 { blocks } else { wanted.clamp(start + 1, blocks - after) };
        counts.push(end - start);
        start = end;
    }
    counts
}

fn placement(
    index: usize,
    share: &DeviceShare,
    whole: Span,
    part: std::ops::Range<usize>,
) -> Option<Placement> {
    let group = GroupId(u16::try_from(index).ok()?);
    let start = whole.start().0 + u32::try_from(part.start).ok()?;
    let end = whole.start().0 + u32::try_from(part.end).ok()?;
    let (devices, span) = (share.devices.clone(), Span::new(start, end).ok()?);
    Some(Placement { group, share: index, devices, span })
}

/// The longest run of blocks that the spans in `parts` cover without a gap; of equal ones the
/// first. This is what an instance can still announce when some of its devices are lost for good,
/// since a peer announces one span.
pub fn longest_rest(parts: impl IntoIterator<Item = Span>) -> Option<Span> {
    let mut parts: Vec<Span> = parts.into_iter().collect();
    parts.sort_by_key(|span| (span.start(), span.end()));
    let mut runs: Vec<Span> = Vec::new();
    for part in parts {
        match runs.last_mut() {
            Some(run) if part.start() <= run.end() => {
                let end = run.end().0.max(part.end().0);
                *run = Span::new(run.start().0, end).unwrap_or(*run);
            }
            _ => runs.push(part),
        }
    }
    runs.into_iter().reduce(
        |best, run| {
            if run.block_count() > best.block_count() { run } else { best }
        },
    )
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

/// Compute threads of each worker on `devices`: the cores, divided by the workers that share them.
pub fn threads(asked: Option<u32>, devices: &[Device], processor: &Processor) -> u32 {
    threads_of(asked, devices, available_parallelism().map_or(1, usize::from), processor)
}

/// The same, where no more than `most` threads run at once.
fn threads_of(asked: Option<u32>, devices: &[Device], most: usize, processor: &Processor) -> u32 {
    let share = |device: &Device| match device {
        Device::Node(_) => {
            let workers = devices.iter().filter(|other| *other == device).count();
            processor.of(*device).len().min(most) / workers
        }
        _ => processor.cores().len().min(most) / devices.len(),
    };
    let least = devices.iter().map(share).min().unwrap_or(1);
    let least = u32::try_from(least).unwrap_or(1).max(1);
    asked.filter(|threads| *threads > 0).unwrap_or(least)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use testkit::span;

    use super::*;
    use testkit::processor::two_nodes;

    fn shares(rates: &[f64]) -> Vec<DeviceShare> {
        rates.iter().map(|&rate| DeviceShare { devices: vec![Device::Cpu], rate }).collect()
    }

    /// The spans of devices without a limit, decided for the first time.
    fn spans(span: Span, rates: &[f64]) -> Vec<String> {
        let placements = cut(span, &shares(rates), &[], &[]);
        placements.iter().map(|placement| placement.span.to_string()).collect()
    }

    #[test]
    fn equal_devices_get_equal_parts_in_order() {
        assert_eq!(spans(span(4, 12), &[1.0, 1.0]), ["4:8", "8:12"]);
        assert_eq!(spans(span(0, 7), &[0.0, f64::NAN, 1.0]), ["0:2", "2:5", "5:7"]);
    }

    #[test]
    fn a_faster_device_gets_more_but_every_device_gets_some() {
        assert_eq!(spans(span(0, 8), &[3.0, 1.0]), ["0:6", "6:8"]);
        assert_eq!(spans(span(0, 3), &[100.0, 1.0, 1.0]), ["0:1", "1:2", "2:3"]);
        // Four H200 (4.8 TB/s) beside an A100 (2.0 TB/s).
        let rates = [4.8e12, 4.8e12, 4.8e12, 4.8e12, 2e12];
        assert_eq!(share_out(80, &shares(&rates), &[]), [18, 18, 18, 18, 8]);
    }

    #[test]
    fn what_exceeds_the_memory_of_a_device_goes_to_those_with_most_time() {
        let devices = shares(&[3.0, 1.0, 2.0]);
        assert_eq!(share_out(12, &devices, &[20, 20, 20]), [6, 2, 4]);
        assert_eq!(share_out(12, &devices, &[3, 20, 20]), [3, 3, 6]);
        assert_eq!(share_out(12, &devices, &[3, 2, 7]), [3, 2, 7]);
        assert_eq!(share_out(12, &devices, &[3, 2, 6]), [6, 2, 4], "memory does not suffice");
    }

    #[test]
    fn an_earlier_decision_holds_as_long_as_it_fits() {
        let devices = shares(&[1.0, 1.0]);
        let counts = |blocks, most: &[u32], decided: &[Vec<u32>]| -> Vec<usize> {
            let placements = cut(span(0, blocks), &devices, most, decided);
            placements.iter().map(|placement| placement.span.block_count()).collect()
        };
        let decided = [vec![5, 3], vec![12, 4]];
        assert_eq!(counts(16, &[16, 16], &decided), [12, 4]);
        assert_eq!(counts(8, &[16, 16], &decided), [5, 3]);
        assert_eq!(counts(10, &[16, 16], &decided), [5, 5], "decided for the first time");
        assert_eq!(counts(16, &[11, 16], &decided), [8, 8], "another process took memory");
        assert_eq!(counts(16, &[16, 16], &[vec![16], vec![8, 4, 4]]), [8, 8]);
    }

    #[test]
    fn groups_of_devices_get_parts_like_single_ones() {
        let devices = [0, 1, 2, 3].map(Device::Cuda);
        let placements = cut(span(0, 8), &DeviceShare::groups(&devices, 2), &[], &[]);
        let [first, second] = &placements[..] else { panic!("{placements:?}") };
        assert_eq!((&first.devices[..], first.span), (&devices[..2], span(0, 4)));
        assert_eq!((&second.devices[..], second.span), (&devices[2..], span(4, 8)));
        let workers: Vec<String> = second.workers().map(|worker| worker.to_string()).collect();
        assert_eq!(workers, ["1.0", "1.1"]);
        assert!(second.workers().all(|worker| worker.world_size == WorldSize(2)));
        assert_eq!(DeviceShare::groups(&devices, 1).len(), 4);
    }

    #[test]
    fn devices_without_a_block_are_left_out() {
        assert_eq!(spans(span(0, 1), &[1.0, 1.0]), ["0:1"]);
        assert_eq!(spans(span(0, 1), &[]), [""; 0]);
    }

    #[test]
    fn the_longest_contiguous_rest_is_what_remains() {
        assert_eq!(longest_rest([span(0, 4), span(8, 16)]), Some(span(8, 16)));
        assert_eq!(longest_rest([span(4, 8), span(0, 4), span(12, 16)]), Some(span(0, 8)));
        assert_eq!(longest_rest([]), None);
    }

    proptest! {
        #[test]
        fn every_block_is_placed_exactly_once_and_fits_if_it_can(
            start in 0u32..100,
            len in 1u32..200,
            devices in prop::collection::vec((-1.0f64..50.0, 1u32..100), 1..20),
        ) {
            let whole = span(start, start + len);
            let (rates, most): (Vec<f64>, Vec<u32>) = devices.into_iter().unzip();
            let placements = cut(whole, &shares(&rates), &most, &[]);
            prop_assert_eq!(longest_rest(placements.iter().map(|p| p.span)), Some(whole));
            let blocks: usize = placements.iter().map(|p| p.span.block_count()).sum();
            prop_assert_eq!(blocks, whole.block_count());
            let held: u32 = most.iter().take(placements.len()).sum();
            let fits = |(p, most): (&Placement, &u32)| p.span.block_count() <= *most as usize;
            prop_assert!(held < len || placements.iter().zip(&most).all(fits));
            // The same cut again, from what was kept of it.
            let counts: Vec<u32> = placements.iter().map(|p| p.span.block_count() as u32).collect();
            let slow = shares(&vec![1.0; rates.len()]);
            if held >= len {
                prop_assert_eq!(cut(whole, &slow, &most, &[counts]), placements);
            }
        }
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
    fn workers_divide_the_cores_that_they_share() {
        let threads = |devices: &[Device]| threads_of(None, devices, 64, &two_nodes());
        assert_eq!(threads(&[Device::Cpu]), 12);
        assert_eq!(threads(&[Device::Cpu; 2]), 6);
        assert_eq!(threads(&[Device::Cpu; 20]), 1);
        assert_eq!(threads(&[Device::Node(0)]), 8);
        assert_eq!(threads(&[Device::Node(0), Device::Node(3)]), 4);
        assert_eq!(threads(&[Device::Node(0); 4]), 2);
        assert_eq!(threads_of(Some(3), &[Device::Node(0); 4], 64, &two_nodes()), 3);
        assert_eq!(threads_of(None, &[Device::Cpu], 5, &two_nodes()), 5, "a quota");
    }
}
