//! Which blocks a new server should serve: where the swarm is weakest. Pure. Source: `petals/server/block_selection.py`.

use super::view::ServerSpan;
use std::cmp::Ordering;

/// Throughput of each of `count` blocks: the sum over the servers that cover it, each with the throughput of its record. Summed
/// in the order of `spans`, which is that of PeerIDs, so that every server gets the same floats.
#[must_use]
pub fn block_throughput(spans: &[ServerSpan], count: usize) -> Vec<f64> {
    let mut throughput = vec![0.0; count];
    for span in spans {
        let covered = throughput
            .get_mut(span.start..span.end.min(count))
            .unwrap_or_default();
        covered
            .iter_mut()
            .for_each(|block| *block += span.info.throughput);
    }
    throughput
}

/// Where a server of `length` blocks helps most: the window whose weakest block is weakest, ties by the second weakest and so on,
/// then the first. `None` if the model is shorter than that, or if `length` is 0.
#[must_use]
pub fn best_start(throughput: &[f64], length: usize) -> Option<usize> {
    if length == 0 {
        return None;
    }
    let sorted = |window: &[f64]| {
        let mut window = window.to_vec();
        window.sort_unstable_by(f64::total_cmp);
        window
    };
    let windows = throughput.windows(length).map(sorted).enumerate();
    windows
        .min_by(|(_, a), (_, b)| lexicographic(a, b))
        .map(|(start, _)| start)
}

/// Compares windows of equal length; `min_by` keeps the first of equal ones.
fn lexicographic(a: &[f64], b: &[f64]) -> Ordering {
    let differing = a
        .iter()
        .zip(b)
        .map(|(a, b)| a.total_cmp(b))
        .find(|order| order.is_ne());
    differing.unwrap_or(Ordering::Equal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::records::{ServerInfo, ServerState};

    fn span(peer: u8, start: usize, end: usize, throughput: f64) -> ServerSpan {
        let info = ServerInfo::new(ServerState::Online, throughput);
        ServerSpan {
            peer_id: peer.to_string(),
            start,
            end,
            info,
        }
    }

    /// Cases run through Petals' own code: blocks, servers, expected throughput, and (length, start) pairs.
    #[test]
    fn cases_of_the_reference_come_out_the_same() {
        type Case = (Vec<ServerSpan>, Vec<f64>, Vec<(usize, usize)>);
        let cases: Vec<Case> = vec![
            (vec![], vec![0.0; 8], vec![(3, 0)]),
            (
                vec![span(1, 0, 4, 10.0), span(2, 2, 6, 5.0)],
                vec![10.0, 10.0, 15.0, 15.0, 5.0, 5.0, 0.0, 0.0],
                vec![(2, 6), (3, 5), (4, 4)],
            ),
            (
                vec![span(1, 0, 4, 10.0), span(2, 4, 8, 10.0), span(3, 0, 3, 4.0)],
                vec![14.0, 14.0, 14.0, 10.0, 10.0, 10.0, 10.0, 10.0],
                vec![(3, 3), (5, 3)],
            ),
            (
                vec![
                    span(1, 0, 6, 100.0),
                    span(2, 4, 12, 50.0),
                    span(3, 2, 8, 30.0),
                ],
                vec![
                    100.0, 100.0, 130.0, 130.0, 180.0, 180.0, 80.0, 80.0, 50.0, 50.0, 50.0, 50.0,
                ],
                vec![(2, 8), (3, 8), (4, 8), (6, 6), (12, 0)],
            ),
            (
                vec![span(1, 0, 6, 100.0), span(2, 4, 12, 50.0)],
                vec![
                    100.0, 100.0, 100.0, 100.0, 150.0, 150.0, 50.0, 50.0, 50.0, 50.0, 50.0, 50.0,
                ],
                vec![(2, 6), (3, 6), (4, 6), (6, 6)],
            ),
            (
                vec![span(1, 0, 10, 7.0), span(2, 3, 5, 1.0)],
                vec![7.0, 7.0, 7.0, 8.0, 8.0, 7.0, 7.0, 7.0, 7.0, 7.0],
                vec![(2, 0), (3, 0), (4, 5), (5, 5)],
            ),
        ];
        for (spans, expected, choices) in cases {
            let throughput = block_throughput(&spans, expected.len());
            assert_eq!(throughput, expected);
            for (length, start) in choices {
                assert_eq!(
                    best_start(&throughput, length),
                    Some(start),
                    "{length} blocks in {throughput:?}"
                );
            }
        }
    }

    #[test]
    fn impossible_lengths_have_no_start() {
        assert_eq!(best_start(&[1.0, 2.0], 3), None);
        assert_eq!(best_start(&[1.0, 2.0], 0), None);
        assert_eq!(best_start(&[], 1), None);
    }

    #[test]
    fn claims_that_cover_nothing_count_nothing() {
        assert_eq!(
            block_throughput(&[span(1, 3, 1, 5.0), span(2, 9, 12, 5.0)], 4),
            [0.0; 4]
        );
    }
}
