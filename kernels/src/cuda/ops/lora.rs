//! Launches `lora.cu`.

use shared::config::QuantType;

use super::linear::bytes_of;
use crate::cuda::adapters::code;
use crate::cuda::gpu::ctas;
use crate::cuda::step::NO_ADAPTER;
use crate::cuda::{Adapters, Address, Cuda, Floats, Gpu, Launch, Matrix, Memory, Params};
use crate::ops::{Adapt, LoraGrad, LoraPart, MatrixShape, OpError};

/// Rows of a tile.
const ROWS: usize = 8;
/// Most rank of an adapter: what shared memory holds of 8 rows.
const MAX_RANK: usize = 1024;

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: Adapt<'_, Floats, Adapters<G>>,
) -> Result<(), OpError> {
    let sizes = args.adapters.sizes();
    args.check(sizes)?;
    let rows = args.of_rows.len();
    if rows == 0 {
        return Ok(());
    }
    // Of a recorded step adapters and the number of rows lie in fixed memory.
    let fixed = cuda.fixed().map(|fixed| (fixed.adapters(), fixed.tokens()));
    let listed = match fixed {
        Some(_) => None,
        None => {
            let number = |adapter: &Option<u32>| adapter.unwrap_or(NO_ADAPTER);
            let words: Vec<u32> = args.of_rows.iter().map(number).collect();
            Some(cuda.words(&words)?)
        }
    };
    let (of_rows, there) = match (&listed, fixed) {
        (Some(memory), _) => (memory.address(), Address(0)),
        (None, Some(fixed)) => fixed,
        (None, None) => return Ok(()),
    };
    let params = || {
        Params::new()
            .address(args.adapters.table().address())
            .address(of_rows)
            .address(there)
            .count(args.adapters.count())
            .count(rows)
    };
    let down = Launch {
        kernel: "lora_down",
        grid: [ctas(sizes.rank.div_ceil(8)), ctas(rows.div_ceil(ROWS)), 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: params()
            .read(args.x)
            .write(args.middle)
            .count(sizes.inputs)
            .count(sizes.rank),
    };
    // SAFETY: `check` has made sure that input, middle and output hold all rows; the table names matrices that it keeps.
    unsafe { cuda.launch(down)? };
    let up = Launch {
        kernel: "lora_up",
        grid: [
            ctas(sizes.outputs.div_ceil(256)),
            ctas(rows.div_ceil(ROWS)),
            1,
        ],
        cta: [256, 1, 1],
        shared_bytes: ctas(ROWS * sizes.rank * 4),
        params: params()
            .read(args.middle)
            .write(args.out)
            .count(sizes.outputs)
            .count(sizes.rank)
            .count(code(args.round) as usize),
    };
    // SAFETY: as above.
    unsafe { cuda.launch(up) }
}

pub(crate) fn launch_grad<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: LoraGrad<'_, Floats, Matrix<G>>,
) -> Result<(), OpError> {
    args.check()?;
    let Some(plan) = Plan::new(cuda, "lora grad", args.parts)? else {
        return Ok(());
    };
    let down = plan.launch(
        "lora_grad_down",
        plan.rank,
        ROWS * 32 * 4,
        plan.tiles()
            .read(args.grad)
            .write(args.middle)
            .count(plan.outputs)
            .count(plan.rank),
    );
    // SAFETY: as in `launch`.
    unsafe { cuda.launch(down)? };
    let up = plan.launch(
        "lora_grad_up",
        plan.inputs.div_ceil(256),
        0,
        plan.tiles()
            .read(args.middle)
            .write(args.out)
            .count(plan.inputs)
            .count(plan.rank),
    );
    // SAFETY: as in `launch`.
    unsafe { cuda.launch(up) }
}

/// The tiles of all parts on the device.
struct Plan<G: Gpu> {
    memory: Memory<G>,
    count: usize,
    /// Largest rank.
    rank: usize,
    inputs: usize,
    outputs: usize,
}

impl<G: Gpu> Plan<G> {
    /// The plan of `parts`; `None` when they have no rows.
    fn new(
        cuda: &mut Cuda<G>,
        op: &'static str,
        parts: &[LoraPart<Matrix<G>>],
    ) -> Result<Option<Plan<G>>, OpError> {
        let (mut words, mut rank) = (Vec::new(), 0);
        for part in parts {
            if part.a.quant() != QuantType::None || part.b.quant() != QuantType::None {
                let what = "the matrices of an adapter are quantized";
                return Err(OpError::Shape { op, what });
            }
            rank = rank.max(part.a.outputs());
            write_tiles(part, &mut words);
        }
        if rank > MAX_RANK {
            let what = "an adapter of a rank above 1,024";
            return Err(OpError::Shape { op, what });
        }
        let Some(first) = parts.first().filter(|_| !words.is_empty()) else {
            return Ok(None);
        };
        Ok(Some(Plan {
            count: words.len() / TILE_WORDS,
            memory: cuda.words(&words)?,
            rank,
            inputs: first.a.inputs(),
            outputs: first.b.outputs(),
        }))
    }

    fn tiles(&self) -> Params {
        Params::new().address(self.memory.address())
    }

    fn launch(
        &self,
        kernel: &'static str,
        columns: usize,
        shared_bytes: usize,
        params: Params,
    ) -> Launch {
        Launch {
            kernel,
            grid: [ctas(columns), ctas(self.count), 1],
            cta: [256, 1, 1],
            shared_bytes: ctas(shared_bytes),
            params,
        }
    }
}

/// Words of `struct Tile` in `lora.cu`.
const TILE_WORDS: usize = 10;

fn write_tiles<G: Gpu>(part: &LoraPart<Matrix<G>>, words: &mut Vec<u32>) {
    let (a, b) = (bytes_of(&part.a).0, bytes_of(&part.b).0);
    // `check` has made sure of the rows; what does not fit a word would be refused with the width of the buffers.
    let word = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    for from in (0..part.rows).step_by(ROWS) {
        words.extend([a as u32, (a >> 32) as u32, b as u32, (b >> 32) as u32]);
        words.extend([word(part.a.outputs()), word(part.first + from)]);
        words.extend([word(ROWS.min(part.rows - from)), code(part.a.dtype())]);
        words.extend([part.scale.to_bits(), 0]);
    }
}
