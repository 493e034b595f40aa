//! CUDA devices under test, and cases of kernels that are no operation of a backend.

use super::*;
use shared::warpgroups::WarpgroupKernel;

use crate::cuda::ops::wgmma::{Args, COLUMNS, launch};
use crate::cuda::ops::{attention_grad, linear_grad, quantize, route};
use crate::cuda::{Buffer, Cuda, Floats, Gpu, Matrix, Pages};

/// Pages, and an outbox that has a slot for as many tokens as they have.
#[derive(Debug)]
pub struct PageMemory<G: Gpu> {
    pages: Buffer<G>,
    outbox: Buffer<G>,
    bytes: usize,
}

impl<G: Gpu> Subject for Cuda<G> {
    type PageMemory = PageMemory<G>;
    const IS_HOST: bool = false;
    const SEGMENTS: &'static [Option<usize>] = &[None, Some(1), Some(2)];

    fn arithmetic(&self) -> Arithmetic {
        Arithmetic::TensorCores
    }

    fn alternate(&mut self) -> Option<bool> {
        // Warpgroups are used where they give the bits of warps. Kernels that are not used promise
        // none, so a device with one of them compares with tolerances alone.
        let (harmless, used) = (self.harmless_warpgroups(), self.used_warpgroups());
        let others = harmless.without(used);
        if !harmless.is_empty() {
            self.use_warpgroups(others);
        }
        (!harmless.is_empty()).then_some(used == harmless)
    }

    fn page_memory(&mut self, bytes: &[u8]) -> Result<PageMemory<G>, OpError> {
        let words: Vec<f32> =
            bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
        let mut both = [self.buffer(words.len()), self.buffer(words.len())];
        for buffer in &mut both {
            self.upload(&words, buffer)?;
        }
        let [pages, outbox] = both;
        Ok(PageMemory { pages, outbox, bytes: bytes.len() })
    }

    fn pages<'p>(memory: &'p mut PageMemory<G>, layout: PageLayout) -> Pages<'p> {
        Pages::over(layout, &memory.pages, Some(&memory.outbox), memory.bytes)
    }

    fn page_bytes(
        &mut self,
        memory: &PageMemory<G>,
        layout: PageLayout,
        rows: &[StepRow<'_>],
    ) -> Result<[Vec<u8>; 2], OpError> {
        let mut read = |from: &Buffer<G>| -> Result<Vec<u8>, OpError> {
            let mut words = vec![0.0; memory.bytes / 4];
            self.download(from, &mut words)?;
            Ok(words.iter().flat_map(|v| v.to_le_bytes()).collect())
        };
        let (pages, mut appended) = (read(&memory.pages)?, read(&memory.outbox)?);
        appended.truncate(total_tokens(rows) * layout.slot_bytes());
        Ok([pages, appended])
    }

    fn route(&mut self, args: Route<'_, Floats>) -> Result<(), OpError> {
        route::launch(self, args)
    }

    fn route_grad(&mut self, args: RouteGrad<'_, Floats>) -> Result<(), OpError> {
        route::launch_grad(self, args)
    }

    fn quantize(
        &mut self,
        from: &Matrix<G>,
        quant: QuantType,
        to: &mut Floats,
    ) -> Result<(), OpError> {
        quantize::launch(self, from, quant, to)
    }

    fn linear_grad_by(
        &mut self,
        args: LinearGrad<'_, Floats, Matrix<G>>,
        segment: Option<usize>,
    ) -> Result<(), OpError> {
        match segment {
            Some(segment) => linear_grad::tiled(self, args, segment),
            None => linear_grad::launch(self, args),
        }
    }

    fn attention_grad_tight(
        &mut self,
        args: AttentionGrad<'_, Floats, Pages<'_>>,
    ) -> Result<(), OpError> {
        attention_grad::launch_within(self, args, 0)
    }
}

/// All operations of a CUDA device.
pub fn cuda_operations<G: Gpu>() -> Vec<Operation<Cuda<G>>> {
    let mut all = operations();
    all.push(Operation {
        name: "wgmma",
        check: check_warpgroups,
        measure: |_, _, _| Ok(()),
        digest: |_, _, _, _| Ok(()),
    });
    all.push(Operation {
        name: "repack",
        check: repack::check,
        measure: |_, _, _| Ok(()),
        digest: |_, _, _, _| Ok(()),
    });
    all.push(Operation {
        name: "append_attention",
        check: append_attention::check,
        measure: |_, _, _| Ok(()),
        digest: |_, _, _, _| Ok(()),
    });
    all.push(Operation {
        name: "exchange",
        check: exchange::check,
        measure: |_, _, _| Ok(()),
        digest: |_, _, _, _| Ok(()),
    });
    all
}

/// Products of a warpgroup by themselves: every size, both layouts of B, but those of kernels that
/// may not be launched. There are none where the device has no such products.
fn check_warpgroups<G: Gpu>(
    _: &str,
    devices: &mut [Cuda<G>],
    class: Class,
) -> Result<usize, Failure> {
    let sizes = if class == Class::Smallest { &COLUMNS[1..2] } else { &COLUMNS[..] };
    let mut cases = 0;
    for device in devices {
        let harmless = device.harmless_warpgroups();
        for dtype in [DType::Bf16, DType::F16] {
            for by_columns in [false, true] {
                for &columns in sizes {
                    let like = WarpgroupKernel::attention(columns, dtype);
                    if !like.is_some_and(|kernel| harmless.contains(kernel)) {
                        continue;
                    }
                    let layout = if by_columns { "columns" } else { "rows" };
                    let case = format!("wgmma {dtype} {layout} 64x{columns}");
                    let mut bench = Bench::checking(device, &case, class);
                    product(&mut bench, dtype, by_columns, columns)?;
                    cases += 1;
                }
            }
        }
    }
    Ok(cases)
}

fn product<G: Gpu>(
    bench: &mut Bench<'_, Cuda<G>>,
    dtype: DType,
    by_columns: bool,
    columns: usize,
) -> Result<(), Failure> {
    const INPUTS: usize = 128;
    let stored = |values: &[f32]| {
        let mut bytes = vec![0; 2 * values.len()];
        convert::from_f32(dtype, values, &mut bytes);
        let rounded = convert::to_vec(dtype, &bytes);
        (bytes, rounded)
    };
    let (a_bytes, a) = stored(&noise(1, 64 * INPUTS));
    let (b_bytes, b) = stored(&noise(2, columns * INPUTS));
    let expected: Vec<f32> = (0..64 * columns)
        .map(|at| {
            let (row, column) = (at / columns, at % columns);
            let product = |k: usize| {
                let of_b = if by_columns { k * columns + column } else { column * INPUTS + k };
                f64::from(a[row * INPUTS + k]) * f64::from(b[of_b])
            };
            (0..INPUTS).map(product).sum::<f64>() as f32
        })
        .collect();
    let mut out = bench.output(64 * columns)?;
    bench.launch(|device, _| {
        let (a, b, out) = (&a_bytes[..], &b_bytes[..], &mut *out);
        launch(device, Args { a, b, out, inputs: INPUTS, columns, by_columns, dtype })
    })?;
    let actual = bench.take(&out, 64 * columns)?;
    bench.close(&actual, &expected, 1e-5)
}
