//! The ranks of a group, as threads over a real segment, against the whole block: every family, stored
//! in every way, cut for 2, 3 and 4 ranks, from the manifest on. What a rank maps and copies is what
//! its shard names.

#[cfg(feature = "emu")]
mod devices;
mod model;
mod runner;

use std::thread;
use std::time::{Duration, Instant};

use ::model::shards::{Shard, Shares, Slice, SliceShape};
use ::model::weight_files::WeightFiles;
use blocks::map::{Keep, MappedWeights};
use kernels::quant::{held_bytes, slice_bytes};
use shared::ids::{Generation, GroupId, Rank, WorldSize};
use shared::shm::group::{GroupMap, GroupMember, GroupOwner, GroupShape, WaitPolicy};

use crate::*;
use model::{Model, names};
use runner::{Results, Runner};

/// Values of an exchange buffer: fewer than most messages have, so that they cross in pieces.
const EXCHANGE_VALUES: usize = 700;
/// Capacities of the ranks: equal ones, and a rank of three times the other.
static RANKS: [&[f64]; 4] = [&[1.0; 2], &[1.0; 3], &[1.0; 4], &[3.0, 1.0]];
const QUANTS: [QuantType; 3] = [QuantType::None, QuantType::Int8, QuantType::Nf4];

/// Most that half precision may be off: what the golden tests allow beside transformers.
const MOST_ROUNDING: f64 = 3e-2;

/// What the whole block gives, and how far from it the ranks may be. In half precision sums in
/// another order are now and then rounded to the other neighbour: two computations that round in
/// other places differ by no more than rounding has put the whole block away from float32.
struct Whole {
    results: Results,
    bounds: [f64; 3],
}

/// The group of these ranks.
fn shape_of(shards: &[Shard]) -> GroupShape {
    GroupShape {
        group: GroupId(0),
        generation: Generation(1),
        world_size: WorldSize(shards.len().try_into().unwrap()),
        exchange_values: EXCHANGE_VALUES,
        log_bytes: 64,
    }
}

impl Model {
    /// The whole block, on one thread.
    fn whole(&self) -> Whole {
        let run = |model: &Model| {
            let weights = MappedWeights::map(&model.manifest, model.span, || ()).unwrap();
            Runner::new(model, &model.spec, &weights, Cpu::new(1)).results()
        };
        let results = run(self);
        let bounds = match self.dtype {
            DType::F32 => [1e-5; 3],
            _ => results.errors(&run(&self.in_f32())).map(|error| error.min(MOST_ROUNDING)),
        };
        Whole { results, bounds }
    }

    /// Every rank of a group, a thread each.
    fn group(&self, shards: &[Shard]) -> Vec<Results> {
        let shape = shape_of(shards);
        let group = GroupOwner::create("sepal-test-shards", &shape).unwrap();
        let rank = |shard: &Shard| {
            let (segment, bells) = (group.try_clone().unwrap(), group.doorbells().unwrap());
            let rank = Rank(shard.rank.try_into().unwrap());
            let map = GroupMap::open(segment, bells, &shape, rank).unwrap();
            let mut cpu = Cpu::new(1);
            cpu.join(GroupMember::new(&map, policy()).unwrap());
            // The second rank is on a NUMA node, as it were.
            let keep = if shard.rank == 1 { Keep::Copied } else { Keep::Mapped };
            let (manifest, span) = (&self.manifest, self.span);
            let open = WeightFiles::open(manifest, span).unwrap();
            let weights = MappedWeights::map_shard(manifest, span, open, Some(shard), keep, || ());
            let weights = weights.unwrap();
            self.check_bytes(shard, keep, &weights);
            Runner::new(self, &shard.spec, &weights, cpu).results()
        };
        thread::scope(|scope| {
            let ranks: Vec<_> = shards.iter().map(|shard| scope.spawn(|| rank(shard))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// A rank holds what is planned for it, and copies what does not lie in one piece.
    fn check_bytes(&self, shard: &Shard, keep: Keep, weights: &MappedWeights) {
        let blocks = self.spec.num_blocks as u64;
        let held = |quant, part: SliceShape| {
            held_bytes(quant, self.dtype, part.whole, part.rows, part.columns)
        };
        let bytes = |quant, part: SliceShape| {
            slice_bytes(quant, self.dtype, part.whole, part.rows, part.columns)
        };
        // Vectors of a checkpoint in the block dtype: those of the golden data are.
        let planned = shard.weight_bytes(self.quant, held).unwrap() * blocks;
        assert_eq!(weights.bytes(), planned, "{} rank {}", self.name, shard.rank);
        if keep == Keep::Copied {
            let all = shard.weight_bytes(self.quant, bytes).unwrap() * blocks;
            let all = all + weights.adapter_bytes();
            return assert_eq!(weights.copied_bytes(), all, "{}", self.name);
        }
        let is_copied = |slice: &Slice| match slice {
            Slice::Columns(_) => true,
            Slice::Rows(ranges) => ranges.len() > 1,
            Slice::All | Slice::None => false,
        };
        let copied: usize = self
            .spec
            .tensors(0)
            .iter()
            .filter_map(|tensor| {
                let slice = shard.slice(&tensor.name).filter(|slice| is_copied(slice))?;
                let part = slice.of(&tensor.shape).unwrap();
                bytes(self.spec.quant_of(&tensor.name, tensor.shape.len(), self.quant), part)
            })
            .sum();
        if self.manifest.adapters.is_empty() {
            assert_eq!(weights.copied_bytes(), copied as u64 * blocks, "{}", self.name);
        }
    }
}

fn policy() -> WaitPolicy {
    let start = Instant::now();
    let heartbeat =
        move || assert!(start.elapsed() < Duration::from_secs(120), "a wait does not end");
    let (spin, interval) = (Duration::ZERO, Duration::from_millis(100));
    WaitPolicy { spin, interval, heartbeat: Box::new(heartbeat) }
}

/// Cuts a model for some ranks and compares; the sentence of a cut that is refused.
fn compare(model: &Model, capacities: &[f64], whole: &Whole) -> Result<(), String> {
    let shares = Shares::by_capacity(&model.spec, capacities).map_err(|e| e.to_string())?;
    let shards = shares.shards(&model.spec).map_err(|e| e.to_string())?;
    let ranks = model.group(&shards);
    for (rank, results) in ranks.iter().enumerate() {
        let what = format!("{} rank {rank} of {capacities:?}", model.name);
        assert!(*results == ranks[0], "{what} differs from rank 0");
    }
    let what = format!("{} by {capacities:?}", model.name);
    let errors = ranks[0].errors(&whole.results);
    println!("{what}: relative errors {errors:?} of {:?}", whole.bounds);
    let is_near = errors.iter().zip(whole.bounds).all(|(error, bound)| *error <= bound);
    assert!(is_near, "{what}: relative errors {errors:?} exceed {:?}", whole.bounds);
    assert!(model.group(&shards)[0] == ranks[0], "{what}: another run");
    Ok(())
}

/// Which cuts the model of this number is tried with.
type Cuts = fn(usize) -> &'static [&'static [f64]];

fn one_by_number(model: usize) -> &'static [&'static [f64]] {
    let cut = model % RANKS.len();
    &RANKS[cut..=cut]
}

fn every_one(_: usize) -> &'static [&'static [f64]] {
    &RANKS
}

fn families(cuts: Cuts) {
    let names = names("blocks", 34);
    let models = names.iter().flat_map(|name| QUANTS.map(|quant| (name, quant)));
    for (number, (name, quant)) in models.enumerate() {
        let model = Model::new(name, &[], quant);
        let whole = model.whole();
        for capacities in cuts(number) {
            let (heads, ranks) = (model.spec.heads, capacities.len());
            let refused = format!(
                "{heads} query heads cannot be shared by {ranks} ranks: each needs at least one"
            );
            let wanted = if heads < ranks { Err(refused) } else { Ok(()) };
            assert_eq!(compare(&model, capacities, &whole), wanted, "{}", model.name);
        }
    }
}

fn adapters(cuts: Cuts) {
    let names = names("adapters", 14);
    let models =
        names.iter().flat_map(|name| [QuantType::None, QuantType::Nf4].map(|quant| (name, quant)));
    for (number, (name, quant)) in models.enumerate() {
        let model = Model::new(name.split('.').next().unwrap(), &[name], quant);
        let whole = model.whole();
        for capacities in cuts(number).iter().filter(|ranks| ranks.len() <= model.spec.heads) {
            assert_eq!(compare(&model, capacities, &whole), Ok(()), "{}", model.name);
        }
    }
}

fn cuts_at_multiples_of_64(cuts: Cuts) {
    let models = [
        ("llama", DType::F32),
        ("llama", DType::Bf16),
        ("mixtral", DType::Bf16),
        ("falcon-7b", DType::Bf16),
        ("bloom", DType::F32),
    ];
    let models = models.iter().flat_map(|model| QUANTS.map(|quant| (model, quant)));
    for (number, ((name, dtype), quant)) in models.enumerate() {
        let model = Model::wide(name, *dtype, quant);
        let whole = model.whole();
        for capacities in cuts(number) {
            let shares = Shares::by_capacity(&model.spec, capacities).unwrap();
            let shards = shares.shards(&model.spec).unwrap();
            assert!(!shards.iter().any(Shard::is_slow), "{} by {capacities:?}", model.name);
            assert_eq!(compare(&model, capacities, &whole), Ok(()), "{}", model.name);
        }
    }
}

#[test]
fn shards_of_every_family_and_format_give_what_the_whole_block_gives() {
    families(one_by_number);
}

#[test]
fn adapters_are_cut_with_their_matrices() {
    adapters(one_by_number);
}

#[test]
fn cuts_at_multiples_of_64_take_the_fast_paths_to_the_same_results() {
    cuts_at_multiples_of_64(one_by_number);
}

#[test]
#[ignore = "every cut of every model: .ci/long emulator"]
fn every_cut_of_every_model() {
    families(every_one);
    adapters(every_one);
    cuts_at_multiples_of_64(every_one);
}
