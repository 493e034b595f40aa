//! Ranks on emulated CUDA devices, a thread each, against the whole block on one such device.

use std::sync::{Barrier, Mutex};

use kernels::cuda::emu::Emu;
use kernels::cuda::group::Offer;
use kernels::cuda::{Cuda, Pages};

use super::model::Model;
use super::*;

/// What a device gives: hidden states behind the last block, and the gradient of the input.
#[derive(Clone, PartialEq)]
struct Given {
    output: Vec<u32>,
    gradient: Vec<u32>,
}

/// What a block of a decode step costs.
#[derive(Debug)]
struct Cost {
    launches: u64,
}

impl Model {
    /// All tokens through all blocks in one step and the last of them once more as a decode step,
    /// then back.
    fn through(
        &self,
        cuda: &mut Cuda<Emu>,
        spec: &BlockSpec,
        weights: &MappedWeights,
    ) -> (Given, Cost) {
        let blocks = mapped_blocks(cuda, spec, self.dtype, weights);
        let (tables, pages) = shuffled_tables(BATCH, self.tokens);
        let layout = page_layout(spec, self.dtype);
        let bytes = pages * layout.page_bytes();
        let mut memory: Vec<_> = blocks.iter().map(|_| cuda.reserve(bytes).unwrap()).collect();
        let adapters = self.adapters_of_rows();
        let (mut work, mut gradients) = (Workspace::new(cuda), GradientWork::new(cuda));
        let len = BATCH * self.tokens * spec.hidden;
        let upload = |cuda: &mut Cuda<Emu>, values: &[f32]| {
            let mut buffer = cuda.buffer(values.len());
            cuda.upload(values, &mut buffer).unwrap();
            buffer
        };
        let rows = |tokens: usize, prefix: usize| -> Vec<StepRow<'_>> {
            let rows = tables.iter().zip(&adapters);
            rows.map(|(pages, adapter)| StepRow {
                adapter: *adapter,
                ..StepRow::new(tokens, prefix, pages)
            })
            .collect()
        };
        let all = rows(self.tokens, 0);
        let mut states = upload(cuda, &self.given["input"]);
        let mut inputs = Vec::new();
        for (block, memory) in blocks.iter().zip(&mut memory) {
            let mut before = cuda.buffer(len);
            cuda.copy(&states, &mut before, len).unwrap();
            inputs.push(before);
            let mut pages = Pages::new(layout, memory, 0, bytes);
            let saved = SavedActivations::default();
            forward_saving(cuda, spec, block, &mut work, &all, &mut states, &mut pages, saved)
                .unwrap();
        }
        // The same last tokens as a decode step have the same bits.
        let mut output = vec![0.0; len];
        cuda.download(&states, &mut output).unwrap();
        let last = rows(1, self.tokens - 1);
        let row = self.tokens * spec.hidden;
        let tokens = |values: &[f32]| cut_out(values, row, row - spec.hidden..row);
        let mut step = upload(cuda, &tokens(&self.given["input"]));
        let before = cuda.launches();
        for (block, memory) in blocks.iter().zip(&mut memory) {
            let mut pages = Pages::new(layout, memory, 0, bytes);
            let saved = SavedActivations::default();
            forward_saving(cuda, spec, block, &mut work, &last, &mut step, &mut pages, saved)
                .unwrap();
        }
        let launches = (cuda.launches() - before) / blocks.len() as u64;
        let mut decoded = vec![0.0; BATCH * spec.hidden];
        cuda.download(&step, &mut decoded).unwrap();
        assert!(bits(&decoded) == bits(&tokens(&output)), "{}: a decode step", self.name);

        let mut gradient = upload(cuda, &self.given["output_gradient"]);
        let starts: Vec<usize> = (0..BATCH).map(|row| row * self.tokens).collect();
        let kv = vec![0.0; BATCH * self.tokens * spec.kv_heads * spec.head_dim];
        for ((block, memory), x) in blocks.iter().zip(&mut memory).zip(&inputs).rev() {
            let [mut keys, mut values] = [(); 2].map(|()| upload(cuda, &kv));
            let sums = Sums { keys: &mut *keys, values: &mut *values, starts: &starts };
            let mut pages = Pages::new(layout, memory, 0, bytes);
            let saved = SavedActivations::default();
            let work = &mut gradients;
            let gradient = &mut gradient;
            backward(cuda, spec, block, work, &all, &[], x, gradient, sums, saved, &mut pages)
                .unwrap();
        }
        let mut back = vec![0.0; len];
        cuda.download(&gradient, &mut back).unwrap();
        (Given { output: bits(&output), gradient: bits(&back) }, Cost { launches })
    }

    /// Every rank of a group, a device each, which reach each other's memory or not.
    fn on_devices(&self, shards: &[Shard], has_peers: bool) -> Vec<(Given, Cost)> {
        let shape = shape_of(shards);
        let group = GroupOwner::create("sepal-test-shards", &shape).unwrap();
        let offers = Mutex::new(shards.iter().map(|_| None).collect::<Vec<Option<Offer>>>());
        let barrier = Barrier::new(shards.len());
        let rank = |shard: &Shard| {
            let (segment, bells) = (group.try_clone().unwrap(), group.doorbells().unwrap());
            let rank = Rank(shard.rank.try_into().unwrap());
            let map = GroupMap::open(segment, bells, &shape, rank).unwrap();
            let emu = Emu::new(1).with_ordinal(shard.rank as u32).with_peers(has_peers);
            let mut cuda = Cuda::new(emu);
            let own = cuda.offer(&map).unwrap();
            offers.lock().unwrap()[shard.rank] = Some(own);
            barrier.wait();
            let others = offers
                .lock()
                .unwrap()
                .iter()
                .enumerate()
                .map(|(rank, offer)| {
                    let offer = offer.as_ref().filter(|_| rank != shard.rank)?;
                    let memory = offer.memory.as_ref().map(|fd| fd.try_clone().unwrap());
                    Some(Offer { device: offer.device, memory })
                })
                .collect();
            cuda.join(map, others, has_peers).unwrap();
            let weights = MappedWeights::map_shard(
                &self.manifest,
                self.span,
                WeightFiles::open(&self.manifest, self.span).unwrap(),
                Some(shard),
                Keep::Mapped,
                || (),
            )
            .unwrap();
            self.through(&mut cuda, &shard.spec, &weights)
        };
        thread::scope(|scope| {
            let ranks: Vec<_> = shards.iter().map(|shard| scope.spawn(|| rank(shard))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}

fn error(got: &[u32], wanted: &[u32]) -> f64 {
    let value = |bits: &u32| f64::from(f32::from_bits(*bits));
    let pairs = || got.iter().map(value).zip(wanted.iter().map(value));
    let difference: f64 = pairs().map(|(got, wanted)| (got - wanted).powi(2)).sum();
    (difference / pairs().map(|(_, wanted)| wanted.powi(2)).sum::<f64>()).sqrt()
}

/// Compares ranks on devices with the whole block on one; the launches of a decode step and a block.
fn compare(model: &Model, world: usize, has_peers: bool, bound: f64) {
    let weights = MappedWeights::map(&model.manifest, model.span, || ()).unwrap();
    let (whole, cost) = model.through(&mut Cuda::new(Emu::new(1)), &model.spec, &weights);
    let shares = Shares::by_capacity(&model.spec, &vec![1.0; world]).unwrap();
    let ranks = model.on_devices(&shares.shards(&model.spec).unwrap(), has_peers);
    let (first, of_rank) = &ranks[0];
    assert!(ranks.iter().all(|(given, _)| given == first), "{}: ranks differ", model.name);
    let errors = [error(&first.output, &whole.output), error(&first.gradient, &whole.gradient)];
    let exchanges = of_rank.launches - cost.launches;
    println!(
        "{} on {world} devices: relative errors {errors:?}, launches of a block {} (alone: {})",
        model.name, of_rank.launches, cost.launches
    );
    assert!((1..=8).contains(&exchanges), "{}: {of_rank:?} beside {cost:?}", model.name);
    let is_near = errors.iter().all(|error| *error <= bound);
    assert!(is_near, "{} on {world} devices: relative errors {errors:?}", model.name);
}

/// The smallest shape, with adapters. Larger ones follow.
#[test]
fn two_ranks_on_devices_give_what_the_whole_block_gives() {
    let model = Model::new("llama", &["llama.all"], QuantType::None);
    compare(&model, 2, true, 1e-5);
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn ranks_on_devices_give_what_the_whole_block_gives() {
    for (name, dtype, bound) in [
        ("llama", DType::F32, 1e-5),
        ("falcon-7b", DType::F32, 1e-5),
        ("mixtral", DType::F32, 1e-5),
        ("llama", DType::Bf16, MOST_ROUNDING),
        ("mixtral", DType::Bf16, MOST_ROUNDING),
    ] {
        let model = Model::wide(name, dtype, QuantType::None);
        for (world, has_peers) in [(2, true), (3, false)] {
            compare(&model, world, has_peers, bound);
        }
    }
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn ranks_on_devices_have_slices_of_quantized_matrices() {
    for name in ["llama", "bloom", "falcon-7b", "mixtral"] {
        for quant in [QuantType::Int8, QuantType::Nf4] {
            compare(&Model::wide(name, DType::F32, quant), 2, true, 1e-5);
        }
    }
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn adapters_on_devices_are_summed_between_their_matrices() {
    for name in ["llama.all", "falcon-7b.all", "mixtral.all"] {
        let model = Model::new(name.split('.').next().unwrap(), &[name], QuantType::None);
        compare(&model, 2, true, if model.dtype == DType::F32 { 1e-5 } else { MOST_ROUNDING });
    }
}
