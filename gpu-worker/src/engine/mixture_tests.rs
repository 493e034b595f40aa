//! Blocks with a mixture of experts and adapters beside all matrices: the kernels, on the emulator,
//! against the processor.

use blocks::kv::page_layout;
use blocks::{GradientWork, SavedActivations, Sums, backward};
use kernels::cuda::Cuda;
use kernels::cuda::emu::Emu;
use kernels::ops::convert;
use kernels::{Cpu, QuantType, StepRow};
use shared::block::BlockIndex;
use shared::ids::PageId;
use testkit::wide_models::{mixture_config, mixture_tensors};

use super::*;
use crate::harness::{BLOCKS, Model, span};

/// Tokens of the rows of a batch, and the adapter of each: over tiles of 8 and of 32 rows, alone,
/// and none.
const ROWS: [(usize, Option<u32>); 4] = [(5, Some(1)), (41, None), (1, Some(0)), (30, Some(1))];

/// Output and gradient of the input of a batch, rows lying one after the other.
fn through<B: DeviceBackend>(
    mut backend: B,
    model: &Model,
    weights: &MappedWeights,
    batch: &[(usize, Option<u32>)],
) -> [Vec<f32>; 2] {
    let (spec, dtype) = (&model.spec, model.facts().dtype);
    let block = block_weights(&mut backend, spec, weights, dtype, BlockIndex(1)).unwrap();
    let mut count = 0;
    let tables: Vec<Vec<PageId>> = batch
        .iter()
        .map(|(tokens, _)| {
            let first = count;
            count += u32::try_from(tokens.div_ceil(PAGE_TOKENS)).unwrap();
            (first..count).map(PageId).collect()
        })
        .collect();
    let rows: Vec<StepRow<'_>> = batch
        .iter()
        .zip(&tables)
        .map(|(&(tokens, adapter), pages)| StepRow { adapter, ..StepRow::new(tokens, 0, pages) })
        .collect();
    let starts: Vec<usize> = batch
        .iter()
        .scan(0, |next, (tokens, _)| {
            let start = *next;
            *next += tokens;
            Some(start)
        })
        .collect();
    let tokens: usize = batch.iter().map(|(tokens, _)| tokens).sum();
    let layout = page_layout(spec, dtype);
    let mut memory = B::PageMemory::default();
    let bytes = count as usize * layout.page_bytes();
    let mut pages = backend.pages_in(&mut memory, layout, bytes).unwrap();
    let values = tokens * spec.hidden;
    let given = |seed: f32| -> Vec<f32> {
        let value = |i: usize| (i as f32 * 0.731 + seed).sin();
        (0..values).map(|i| convert::round(dtype, value(i))).collect()
    };
    let [mut states, mut x, mut gradient] = [(); 3].map(|()| backend.buffer(values));
    backend.upload(&given(0.0), &mut states).unwrap();
    backend.upload(&given(0.0), &mut x).unwrap();
    backend.upload(&given(2.0), &mut gradient).unwrap();
    let mut work = Workspace::new(&mut backend);
    forward(&mut backend, spec, &block, &mut work, &rows, &mut states, &mut pages).unwrap();
    let kv = vec![0.0; tokens * spec.kv_heads * spec.head_dim];
    let [mut keys, mut sums] = [(); 2].map(|()| backend.buffer(kv.len()));
    backend.upload(&kv, &mut keys).unwrap();
    backend.upload(&kv, &mut sums).unwrap();
    let mut work = GradientWork::new(&mut backend);
    backward(
        &mut backend,
        spec,
        &block,
        &mut work,
        &rows,
        &[],
        &x,
        &mut gradient,
        Sums { keys: &mut keys, values: &mut sums, starts: &starts },
        SavedActivations::default(),
        &mut pages,
    )
    .unwrap();
    [states, gradient].map(|buffer| {
        let mut values = vec![f32::NAN; values];
        backend.download(&buffer, &mut values).unwrap();
        values
    })
}

fn model(dtype: DType, quant: QuantType) -> Model {
    let tensors = mixture_tensors(BLOCKS as usize, dtype);
    let config = mixture_config(BLOCKS as usize);
    Model::of_tensors(dtype, quant, &config, &tensors, 2)
}

/// Largest difference within each token, in parts of the largest value of all, largest first.
fn errors(got: &[f32], wanted: &[f32], hidden: usize) -> Vec<f32> {
    let size = wanted.iter().fold(0.0f32, |size, v| size.max(v.abs()));
    assert!(size > 0.0 && got.iter().all(|v| v.is_finite()));
    let tokens = got.chunks(hidden).zip(wanted.chunks(hidden));
    let mut errors: Vec<f32> = tokens
        .map(|(got, wanted)| {
            let differences = got.iter().zip(wanted).map(|(g, w)| (g - w).abs());
            differences.fold(0.0, f32::max) / size
        })
        .collect();
    errors.sort_by(|left, right| right.total_cmp(left));
    errors
}

/// Compares with the processor: all tokens but the worst `others` are within `limit`. Without the
/// adapters they are further away than that by far.
fn compare(dtype: DType, quant: QuantType, limit: f32, others: usize) {
    let model = model(dtype, quant);
    let hidden = model.spec.hidden;
    let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
    let wanted = through(Cpu::new(1), &model, &weights, &ROWS);
    let got = through(Cuda::new(Emu::new(2)), &model, &weights, &ROWS);
    let none = ROWS.map(|(tokens, _)| (tokens, None));
    let plain = through(Cpu::new(1), &model, &weights, &none);
    for (index, what) in ["output", "gradient"].into_iter().enumerate() {
        let error = errors(&got[index], &wanted[index], hidden)[others];
        assert!(error < limit, "{what} in {dtype:?}, {quant:?}: {error}");
        let without = errors(&plain[index], &wanted[index], hidden)[others];
        assert!(without > 2.0 * error, "{what} in {dtype:?}, {quant:?}: {without} and {error}");
    }
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn mixtures_with_adapters_equal_those_of_the_processor_there_and_back() {
    compare(DType::F32, QuantType::None, 1e-4, 0);
    compare(DType::F32, QuantType::Nf4, 1e-4, 0);
    // In bf16, where sums are rounded, a token whose second and third expert are as good as equal
    // may go to the other one.
    compare(DType::Bf16, QuantType::None, 0.02, 1);
    compare(DType::Bf16, QuantType::Nf4, 0.02, 1);
}

#[test]
fn rows_of_a_batch_have_the_bits_that_they_have_alone_there_and_back() {
    let model = model(DType::Bf16, QuantType::Nf4);
    let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
    let all = through(Cuda::new(Emu::new(2)), &model, &weights, &ROWS[..3]);
    // The first row is given the same values alone.
    let first = through(Cuda::new(Emu::new(2)), &model, &weights, &ROWS[..1]);
    for (all, first) in all.iter().zip(&first) {
        assert!(all[..first.len()] == first[..]);
    }
}
