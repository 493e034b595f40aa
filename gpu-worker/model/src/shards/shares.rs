//! How many query heads and MLP columns each rank has: decided by the capacities of the ranks, or
//! read from where an earlier decision is stored, and checked against the model.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::spec::BlockSpec;

use super::{ALIGNMENT, MAX_RANKS};

/// How many query heads and MLP columns each rank has. What is stored of a cut: everything else
/// follows from it and the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shares {
    /// Query heads of each rank.
    pub heads: Vec<usize>,
    /// Columns of the middle of the MLP, or of each expert, of each rank.
    pub columns: Vec<usize>,
}

/// Why blocks cannot be cut among the ranks of a group.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ShareError {
    /// No group has so many ranks.
    #[error("a group has 1 to {MAX_RANKS} ranks, not {0}")]
    Ranks(usize),
    /// Two lists that do not name the same ranks.
    #[error("shares name {heads} ranks for query heads and {columns} for columns of the MLP")]
    Lists {
        /// Ranks with query heads.
        heads: usize,
        /// Ranks with columns.
        columns: usize,
    },
    /// A capacity that is no positive number.
    #[error("the capacity of rank {rank} is {capacity}, but must be a positive number")]
    Capacity { rank: usize, capacity: f64 },
    /// Too few for every rank to have one.
    #[error("{count} {what} cannot be shared by {ranks} ranks: each needs at least one")]
    TooFew {
        what: &'static str,
        /// How many there are.
        count: usize,
        ranks: usize,
    },
    /// A rank without a share.
    #[error("rank {rank} has no {what}")]
    Empty { rank: usize, what: &'static str },
    /// Shares of another model.
    #[error("the shares of the ranks are {shared} {what} together, the model has {count}")]
    Sum {
        what: &'static str,
        /// How many the ranks have.
        shared: usize,
        /// How many the model has.
        count: usize,
    },
    /// A cut inside of a key/value head's queries, beside queries of another one.
    #[error(
        "query heads {start} to {last} of rank {rank} are not all queries of whole key/value heads ({group} \
         each), nor of a single one"
    )]
    Border {
        rank: usize,
        /// Its first query head.
        start: usize,
        /// Its last query head.
        last: usize,
        /// Query heads per key/value head.
        group: usize,
    },
}

const HEADS: &str = "query heads";
const COLUMNS: &str = "columns of the MLP";

impl Shares {
    /// Shares in proportion to `capacities`, one per rank, as closely as heads and multiples of
    /// [`ALIGNMENT`] allow; equal capacities for equal shares. What cannot be equal is more for later
    /// ranks, as rank 0 plans the work too.
    ///
    /// # Errors
    /// [`ShareError`] when the model cannot be cut among so many ranks.
    pub fn by_capacity(spec: &BlockSpec, capacities: &[f64]) -> Result<Shares, ShareError> {
        let (ranks, columns) = (capacities.len(), spec.mlp.intermediate());
        check_counts(spec, ranks)?;
        let is_positive = |capacity: f64| capacity.is_finite() && capacity > 0.0;
        if let Some(rank) = capacities.iter().position(|&capacity| !is_positive(capacity)) {
            return Err(ShareError::Capacity { rank, capacity: capacities[rank] });
        }
        // Heads whose inputs to `o` begin and end at multiples of the alignment.
        let aligned = (1..=ALIGNMENT).find(|n| (n * spec.head_dim).is_multiple_of(ALIGNMENT));
        let heads =
            [aligned.unwrap_or(1), 1].iter().find_map(|&unit| cut_heads(spec, capacities, unit));
        let unit = if columns.div_ceil(ALIGNMENT) >= ranks { ALIGNMENT } else { 1 };
        Ok(Shares {
            // One head for each rank is always possible.
            heads: heads.unwrap_or_default(),
            columns: cut_columns(columns, capacities, unit),
        })
    }

    /// Ranks of the group.
    pub fn ranks(&self) -> usize {
        self.heads.len()
    }

    /// Ranges of query heads, of the key/value heads that they read, and of columns of each rank.
    pub(super) fn ranges(&self, spec: &BlockSpec) -> Result<Vec<[Range<usize>; 3]>, ShareError> {
        let (heads, columns) = (self.heads.len(), self.columns.len());
        if heads != columns {
            return Err(ShareError::Lists { heads, columns });
        }
        check_counts(spec, heads)?;
        let heads = ranges(HEADS, &self.heads, spec.heads)?;
        let columns = ranges(COLUMNS, &self.columns, spec.mlp.intermediate())?;
        let group = spec.group();
        heads
            .into_iter()
            .zip(columns)
            .enumerate()
            .map(|(rank, (heads, columns))| {
                let (start, last) = (heads.start, heads.end - 1);
                let kv = start / group..last / group + 1;
                match is_uniform(&heads, group) {
                    true => Ok([heads, kv, columns]),
                    false => Err(ShareError::Border { rank, start, last, group }),
                }
            })
            .collect()
    }
}

fn check_counts(spec: &BlockSpec, ranks: usize) -> Result<(), ShareError> {
    if !(1..=MAX_RANKS).contains(&ranks) {
        return Err(ShareError::Ranks(ranks));
    }
    for (what, count) in [(HEADS, spec.heads), (COLUMNS, spec.mlp.intermediate())] {
        if count < ranks {
            return Err(ShareError::TooFew { what, count, ranks });
        }
    }
    Ok(())
}

/// The ranges that follow from the counts of the ranks, which must be `count` together.
fn ranges(
    what: &'static str,
    shares: &[usize],
    count: usize,
) -> Result<Vec<Range<usize>>, ShareError> {
    if let Some(rank) = shares.iter().position(|&share| share == 0) {
        return Err(ShareError::Empty { rank, what });
    }
    let shared = shares.iter().fold(0usize, |sum, &share| sum.saturating_add(share));
    if shared != count {
        return Err(ShareError::Sum { what, shared, count });
    }
    let mut start = 0;
    let next = |&share: &usize| {
        start += share;
        start - share..start
    };
    Ok(shares.iter().map(next).collect())
}

/// Whether query heads are those of whole key/value heads, or of a single one.
fn is_uniform(heads: &Range<usize>, group: usize) -> bool {
    let is_border = |head: usize| head.is_multiple_of(group);
    (is_border(heads.start) && is_border(heads.end))
        || heads.start / group == (heads.end - 1) / group
}

/// Query heads of each rank, with cuts at multiples of `unit`: the largest share for its capacity
/// is as small as it can be. `None` when there is no such cut.
fn cut_heads(spec: &BlockSpec, capacities: &[f64], unit: usize) -> Option<Vec<usize>> {
    let borders: Vec<usize> = (0..spec.heads).step_by(unit).chain([spec.heads]).collect();
    // Of the ranks so far, by where their heads end: the largest share and the sum of all shares
    // squared, and where the heads of the last one begin.
    let mut best = vec![vec![None; borders.len()]; capacities.len() + 1];
    best[0][0] = Some(((0.0f64, 0.0f64), 0));
    for (rank, capacity) in capacities.iter().enumerate() {
        for from in 0..borders.len() {
            let Some(((largest, sum), _)) = best[rank][from] else {
                continue;
            };
            for to in from + 1..borders.len() {
                let heads = borders[from]..borders[to];
                if !is_uniform(&heads, spec.group()) {
                    continue;
                }
                let share = heads.len() as f64 / capacity;
                let cost = (share.max(largest), sum + share * share * capacity);
                let known = &mut best[rank + 1][to];
                if known.is_none_or(|(known, _)| cost < known) {
                    *known = Some((cost, from));
                }
            }
        }
    }
    let mut to = borders.len() - 1;
    let mut heads = Vec::with_capacity(capacities.len());
    for ends in best[1..].iter().rev() {
        let (_, from) = ends[to]?;
        heads.push(borders[to] - borders[from]);
        to = from;
    }
    heads.reverse();
    Some(heads)
}

/// Columns of each rank, cut at multiples of `unit`, of which every rank has one at least.
fn cut_columns(columns: usize, capacities: &[f64], unit: usize) -> Vec<usize> {
    let units = columns.div_ceil(unit);
    let total: f64 = capacities.iter().sum();
    let floor = |capacity: &f64| ((units as f64 * (capacity / total)) as usize).clamp(1, units);
    let mut shares: Vec<usize> = capacities.iter().map(floor).collect();
    let rank_of = |shares: &[usize], score: &dyn Fn(f64, f64) -> f64| {
        let scores = shares.iter().zip(capacities).map(|(&n, &capacity)| score(n as f64, capacity));
        let ranks = scores.enumerate().collect::<Vec<_>>().into_iter().rev();
        ranks.min_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(0, |(rank, _)| rank)
    };
    while shares.iter().sum::<usize>() < units {
        let rank = rank_of(&shares, &|n, capacity| (n + 1.0) / capacity);
        shares[rank] += 1;
    }
    while shares.iter().sum::<usize>() > units {
        let rank = rank_of(&shares, &|n, capacity| if n > 1.0 { -n / capacity } else { f64::MAX });
        shares[rank] -= 1;
    }
    let last = shares.len() - 1;
    for share in &mut shares {
        *share *= unit;
    }
    // The last unit may be short.
    shares[last] -= units * unit - columns;
    shares
}
