//! How the ranks of a group share the blocks of a model: decided by the speeds of their devices at the
//! first start, kept for later ones, and counted in bytes.

use kernels::quant;
use model::cuts::ShareFile;
use model::shards::{Shard, ShareError, Shares, Slice};
use shared::model::RankShare;

use crate::adapter::Adapter;
use crate::error::PrepareError;
use crate::inspect::Inspected;

/// The shard of a block that each rank of a group holds; `devices` are the names of its devices,
/// `rates` their relative speeds.
///
/// # Errors
/// [`PrepareError::Unshared`] when the blocks cannot be shared by so many ranks.
pub fn shards(
    inspected: &Inspected,
    devices: &[String],
    rates: &[f64],
) -> Result<Vec<Shard>, PrepareError> {
    let Inspected { facts, spec, cache_dir, .. } = inspected;
    let refused = |source: ShareError| PrepareError::Unshared { model: facts.name.clone(), source };
    let file = ShareFile::new(cache_dir, facts, devices);
    let fits = |kept: &Shares| kept.ranks() == devices.len() && kept.shards(spec).is_ok();
    // A device whose speed is not known counts as one of average speed.
    let known = |rate: f64| if rate.is_finite() && rate > 0.0 { rate } else { 1.0 };
    let capacities: Vec<f64> = rates.iter().map(|&rate| known(rate)).collect();
    let shares = file.shares(fits, || Shares::by_capacity(spec, &capacities)).map_err(refused)?;
    shares.shards(spec).map_err(refused)
}

/// What a rank holds of a block, in numbers.
pub fn of_rank(inspected: &Inspected, shard: &Shard) -> RankShare {
    // Each is a part of what the facts of the whole model hold in 32 bits.
    let count = |part: usize| u32::try_from(part).unwrap_or(u32::MAX);
    RankShare {
        heads: count(shard.heads.len()),
        kv_heads: count(shard.kv_heads.len()),
        columns: count(shard.columns.len()),
        block_bytes: block_bytes(inspected, shard),
        copied_bytes: copied_bytes(inspected, shard),
        is_slow: shard.is_slow(),
    }
}

/// Bytes of the rank's share of a block's own weights that do not lie in one piece. Those of
/// adapters are small beside them.
fn copied_bytes(inspected: &Inspected, shard: &Shard) -> u64 {
    let facts = &inspected.facts;
    let copied = shard.copied_bytes(facts.quant_type, |quant, part| {
        quant::slice_bytes(quant, facts.dtype, part.whole, part.rows, part.columns)
    });
    copied.unwrap_or(u64::MAX)
}

/// Bytes of the rank's share of a block with its parts of all adapters.
fn block_bytes(inspected: &Inspected, shard: &Shard) -> u64 {
    let facts = &inspected.facts;
    let weights = shard.weight_bytes(facts.quant_type, |quant, part| {
        quant::held_bytes(quant, facts.dtype, part.whole, part.rows, part.columns)
    });
    let element = Adapter::served_dtype(facts).size_bytes() as u64;
    let held = |slice: Slice, whole: [usize; 2]| {
        slice.of(&whole).map_or(0, |part| part.rows as u64 * part.columns.len() as u64)
    };
    let added = inspected.adapters.iter().map(|adapter| {
        adapter.most_bytes(|name, rank, [outputs, inputs]| {
            let Some([a, b]) = shard.adapter_slices(name) else {
                return 0;
            };
            let values = held(a, [rank, inputs]).saturating_add(held(b, [outputs, rank]));
            values.saturating_mul(element)
        })
    });
    added.fold(weights.unwrap_or(u64::MAX), u64::saturating_add)
}
