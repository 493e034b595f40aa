//! Launches `lora.cu`.

use super::exchange;
use crate::cuda::adapters::{OfRows, code};
use crate::cuda::gpu::ctas;
use crate::cuda::{Adapters, Address, Cuda, Floats, Gpu, Launch, Params};
use crate::ops::{Adapt, AdaptGrad, OpError, RankInputs};
use crate::sizes::lora::{DOWN_SHARED, RANK_STEP, RANKS, ROWS, UP_SHARED_PER_RANK};
use shared::dtype::DType;

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: Adapt<'_, Floats, Adapters<G>>,
) -> Result<(), OpError> {
    args.check(args.adapters.sizes())?;
    if args.of_rows.is_empty() {
        return Ok(());
    }
    let rows = AdaptedRows {
        own: cuda.adapters_of(args.of_rows)?,
        sources: Address(0),
        count: args.of_rows.len(),
    };
    let operands = AdapterOperands { x: args.x, middle: args.middle, out: args.out };
    // SAFETY: `check` has made sure that input, middle and output hold all rows.
    unsafe { rows.add(cuda, args.adapters, operands, args.inputs, args.round) }
}

pub(crate) fn launch_grad<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: AdaptGrad<'_, Floats, Adapters<G>>,
) -> Result<(), OpError> {
    args.check(args.adapters.sizes())?;
    if args.of_rows.is_empty() {
        return Ok(());
    }
    let rows = AdaptedRows {
        own: cuda.adapters_of(args.of_rows)?,
        sources: Address(0),
        count: args.of_rows.len(),
    };
    let operands = AdapterOperands { x: args.grad, middle: args.middle, out: args.out };
    // SAFETY: `check` has made sure that both gradients and the middle hold all rows.
    unsafe { rows.add_grad(cuda, args.adapters, operands) }
}

/// The rows that adapters are added to, as they are listed on the device.
#[derive(Clone, Copy)]
pub(super) struct AdaptedRows {
    /// Which adapter each goes through, and how many there are.
    pub(super) own: OfRows,
    /// `uint32_t [count]`: the row of the input that each takes; null where that is its own.
    pub(super) sources: Address,
    /// Most rows.
    pub(super) count: usize,
}

/// What adapters read and write.
pub(super) struct AdapterOperands<'a> {
    /// Their input, or the gradient of their output.
    pub(super) x: &'a Floats,
    /// What lies between their two matrices; its content before is not read.
    pub(super) middle: &'a mut Floats,
    /// What is added to: their output, or the gradient of their input.
    pub(super) out: &'a mut Floats,
}

impl AdaptedRows {
    /// Adds what adapters make of the rows of `x` to `out`. Ranks of a group that have parts of the
    /// inputs sum the middle.
    ///
    /// # Safety
    /// The lists hold `count` words; `x` holds the rows that they name, `out` and `middle` `count`
    /// rows, each of the width of the adapters.
    pub(super) unsafe fn add<G: Gpu>(
        self,
        cuda: &mut Cuda<G>,
        adapters: &Adapters<G>,
        operands: AdapterOperands<'_>,
        inputs: RankInputs,
        round: DType,
    ) -> Result<(), OpError> {
        let (AdapterOperands { x, middle, out }, sizes) = (operands, adapters.sizes());
        let down = self.down("lora_down", adapters, x, sizes.inputs, middle);
        // SAFETY: the caller's; the table names matrices that it keeps.
        unsafe { cuda.launch(down)? };
        if inputs == RankInputs::Cut {
            exchange::all_reduce(cuda, &mut [&mut *middle], self.count * sizes.rank)?;
        }
        let up = self.up("lora_up", adapters, middle, out, sizes.outputs);
        let params = up.params.count(code(round) as usize);
        // SAFETY: as above.
        unsafe { cuda.launch(Launch { params, ..up }) }
    }

    /// Adds the gradient through adapters to `out`, `x` being that of their output.
    ///
    /// # Safety
    /// As of [`add`](Self::add).
    pub(super) unsafe fn add_grad<G: Gpu>(
        self,
        cuda: &mut Cuda<G>,
        adapters: &Adapters<G>,
        operands: AdapterOperands<'_>,
    ) -> Result<(), OpError> {
        let (AdapterOperands { x, middle, out }, sizes) = (operands, adapters.sizes());
        let down = self.down("lora_grad_down", adapters, x, sizes.outputs, middle);
        // SAFETY: the caller's; the table names matrices that it keeps.
        unsafe { cuda.launch(down)? };
        let up = self.up("lora_grad_up", adapters, middle, out, sizes.inputs);
        // SAFETY: as above.
        unsafe { cuda.launch(up) }
    }

    fn params<G: Gpu>(self, adapters: &Adapters<G>) -> Params {
        Params::new()
            .address(adapters.table().address())
            .address(self.own.numbers)
            .address(self.own.there)
            .count(adapters.count())
            .count(self.count)
    }

    fn down<G: Gpu>(
        self,
        kernel: &'static str,
        adapters: &Adapters<G>,
        x: &Floats,
        width: usize,
        middle: &mut Floats,
    ) -> Launch {
        let rank = adapters.sizes().rank;
        Launch {
            kernel,
            grid: [ctas(rank.div_ceil(RANKS)), ctas(self.count.div_ceil(ROWS)), 1],
            cta: [256, 1, 1],
            shared_bytes: ctas(DOWN_SHARED),
            params: self
                .params(adapters)
                .address(self.sources)
                .read(x)
                .write(middle)
                .count(width)
                .count(rank),
        }
    }

    fn up<G: Gpu>(
        self,
        kernel: &'static str,
        adapters: &Adapters<G>,
        middle: &Floats,
        out: &mut Floats,
        width: usize,
    ) -> Launch {
        let rank = adapters.sizes().rank;
        Launch {
            kernel,
            grid: [ctas(width.div_ceil(256)), ctas(self.count.div_ceil(ROWS)), 1],
            cta: [256, 1, 1],
            shared_bytes: ctas(UP_SHARED_PER_RANK * rank.next_multiple_of(RANK_STEP)),
            params: self.params(adapters).read(middle).write(out).count(width).count(rank),
        }
    }
}
