//! Cases of quantization on the device: the bytes are those that the host makes.

use shared::config::QuantType;
use shared::dtype::DType;

use super::linear::{stored, view};
use super::{Bench, Extent, Failure, test_on_devices};
use crate::cuda::ops::quantize::launch;
use crate::cuda::{Cuda, Gpu};
use crate::quant::{int8, nf4};

/// (inputs, outputs): one, odd, a short last group, more than 256 groups.
const SHAPES: [(usize, usize, Extent); 5] = [
    (1, 1, Extent::Small),
    (7, 5, Extent::Small),
    (100, 37, Extent::Small),
    (1024, 33, Extent::Middle),
    (8192, 8192, Extent::Full),
];

pub(super) fn check<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for (inputs, outputs, _) in SHAPES.into_iter().filter(|(_, _, at)| extent.takes(*at)) {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for quant in [QuantType::Int8, QuantType::Nf4] {
                bench.begin(format!("{quant} of {dtype} [{outputs}, {inputs}]"));
                case(&mut bench, quant, dtype, (inputs, outputs))?;
            }
        }
    }
    Ok(bench.cases)
}

fn case<G: Gpu>(
    bench: &mut Bench<'_, G>,
    quant: QuantType,
    dtype: DType,
    shape: (usize, usize),
) -> Result<(), Failure> {
    let bytes = stored(QuantType::None, dtype, shape.0, shape.1);
    let plain = view(QuantType::None, dtype, shape, &bytes);
    let mut values = vec![0.0; shape.0 * shape.1];
    for (index, row) in values.chunks_mut(shape.0).enumerate() {
        plain.row_to_f32(index, row);
    }
    let wanted = match quant {
        QuantType::Nf4 => nf4::encode(&values),
        QuantType::Int8 | QuantType::None => int8::encode(&values, shape.0),
    };
    let matrix = bench.cuda.matrix(plain);
    let matrix = bench.op(matrix)?;
    let mut to = bench.output(wanted.len() / 4)?;
    let done = launch(bench.cuda, &matrix, quant, &mut to);
    bench.op(done)?;
    let got = bench.take(&to, wanted.len() / 4)?;
    let got = got.iter().flat_map(|v| v.to_le_bytes()).map(f32::from);
    let wanted: Vec<f32> = wanted.into_iter().map(f32::from).collect();
    bench.same(&got.collect::<Vec<f32>>(), &wanted)
}

test_on_devices!(super::check);
