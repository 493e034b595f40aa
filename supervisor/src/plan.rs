//! Which device serves which part of the span: pure arithmetic, no processes.

use shared::block::Span;
use shared::config::Device;
use shared::ids::{GroupId, WorkerId};

/// A device that can serve, and how much of the span it should get relative to the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// The device.
    pub device: Device,
    /// Relative capacity; equal numbers get equal parts. Values that are not positive and finite count as 1.
    pub weight: f64,
}

/// A worker that is to exist: its device and its blocks, for life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Its name; groups count from 0 in the order of the devices.
    pub worker: WorkerId,
    /// Its device.
    pub device: Device,
    /// Its blocks.
    pub span: Span,
}

/// Cuts `span` into contiguous parts, in the order of the devices and in proportion to their weights. Each device gets at
/// least one block; when there are fewer blocks than devices, the last devices get none and are left out.
pub fn cut(span: Span, shares: &[Share]) -> Vec<Placement> {
    let blocks = span.block_count();
    let used = shares.get(..shares.len().min(blocks)).unwrap_or(shares);
    let weight = |share: &Share| {
        if share.weight.is_finite() && share.weight > 0.0 {
            share.weight
        } else {
            1.0
        }
    };
    let total: f64 = used.iter().map(weight).sum();
    let (mut start, mut seen) = (0, 0.0);
    let mut placements = Vec::with_capacity(used.len());
    for (index, share) in used.iter().enumerate() {
        seen += weight(share);
        let after = used.len() - index - 1;
        let wanted = (blocks as f64 * seen / total).round() as usize;
        let end = if after == 0 {
            blocks
        } else {
            wanted.clamp(start + 1, blocks - after)
        };
        placements.extend(placement(index, share.device, span, start..end));
        start = end;
    }
    placements
}

fn placement(
    index: usize,
    device: Device,
    whole: Span,
    part: std::ops::Range<usize>,
) -> Option<Placement> {
    let group = GroupId(u16::try_from(index).ok()?);
    let start = whole.start().0 + u32::try_from(part.start).ok()?;
    let end = whole.start().0 + u32::try_from(part.end).ok()?;
    Some(Placement {
        worker: WorkerId::solo(group),
        device,
        span: Span::new(start, end).ok()?,
    })
}

/// The longest run of blocks that the spans in `parts` cover without a gap; of equal ones the first. This is what an
/// instance can still announce when some of its devices are lost for good, since a peer announces one span.
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
    runs.into_iter().reduce(|best, run| {
        if run.block_count() > best.block_count() {
            run
        } else {
            best
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span(start: u32, end: u32) -> Span {
        Span::new(start, end).unwrap()
    }

    fn shares(weights: &[f64]) -> Vec<Share> {
        weights
            .iter()
            .map(|&weight| Share {
                device: Device::Cpu,
                weight,
            })
            .collect()
    }

    fn spans(placements: &[Placement]) -> Vec<String> {
        placements.iter().map(|p| p.span.to_string()).collect()
    }

    #[test]
    fn equal_devices_get_equal_parts_in_order() {
        assert_eq!(
            spans(&cut(span(4, 12), &shares(&[1.0, 1.0]))),
            ["4:8", "8:12"]
        );
        assert_eq!(
            spans(&cut(span(0, 7), &shares(&[0.0, f64::NAN, 1.0]))),
            ["0:2", "2:5", "5:7"]
        );
    }

    #[test]
    fn a_stronger_device_gets_more_but_nobody_gets_nothing() {
        assert_eq!(
            spans(&cut(span(0, 8), &shares(&[3.0, 1.0]))),
            ["0:6", "6:8"]
        );
        assert_eq!(
            spans(&cut(span(0, 3), &shares(&[100.0, 1.0, 1.0]))),
            ["0:1", "1:2", "2:3"]
        );
    }

    #[test]
    fn devices_without_a_block_are_left_out() {
        assert_eq!(spans(&cut(span(0, 1), &shares(&[1.0, 1.0]))), ["0:1"]);
        assert_eq!(spans(&cut(span(0, 1), &[])), [""; 0]);
    }

    #[test]
    fn the_longest_contiguous_rest_is_what_remains() {
        assert_eq!(longest_rest([span(0, 4), span(8, 16)]), Some(span(8, 16)));
        assert_eq!(
            longest_rest([span(4, 8), span(0, 4), span(12, 16)]),
            Some(span(0, 8))
        );
        assert_eq!(longest_rest([]), None);
    }

    proptest! {
        #[test]
        fn every_block_is_placed_exactly_once(start in 0u32..100, len in 1u32..200, weights in prop::collection::vec(-1.0f64..50.0, 1..20)) {
            let whole = span(start, start + len);
            let placements = cut(whole, &shares(&weights));
            prop_assert_eq!(longest_rest(placements.iter().map(|p| p.span)), Some(whole));
            let blocks: usize = placements.iter().map(|p| p.span.block_count()).sum();
            prop_assert_eq!(blocks, whole.block_count());
        }
    }
}
