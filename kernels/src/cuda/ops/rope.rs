//! Launches `rope.cu`.

use super::by_dtype;
use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Params};
use crate::kv::total_tokens;
use crate::ops::{OpError, Rope, RopeTable};

pub(crate) fn launch_table<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: RopeTable<'_, Floats>,
) -> Result<(), OpError> {
    args.check()?;
    let (tokens, half) = (total_tokens(args.rows), args.inverse_frequencies.len());
    if tokens * half == 0 {
        return Ok(());
    }
    let frequencies = cuda.constants(args.inverse_frequencies)?;
    let batch = cuda.batch(args.rows)?;
    let names = ["rope_table_f32", "rope_table_bf16", "rope_table_f16"];
    let launch = Launch {
        kernel: by_dtype(names, args.round),
        grid: [ctas((tokens * half).div_ceil(256)), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new().address(batch).address(frequencies).write(args.out).count(half),
    };
    // SAFETY: `check` has made sure that `out` holds a table of all tokens.
    unsafe { cuda.launch(launch)? }
    // All blocks read the table before they wait.
    cuda.end_before_next();
    Ok(())
}

pub(crate) fn launch<G: Gpu>(cuda: &mut Cuda<G>, args: Rope<'_, Floats>) -> Result<(), OpError> {
    args.check()?;
    let half = args.head_dim / 2;
    let width = if half.is_multiple_of(4) { 4 } else { 1 };
    let threads = args.tokens * args.heads * (half / width);
    if threads == 0 {
        return Ok(());
    }
    let launch = Launch {
        kernel: by_dtype(["rope_f32", "rope_bf16", "rope_f16"], args.round),
        grid: [ctas(threads.div_ceil(256)), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .write(args.x)
            .read(args.table)
            .count(args.tokens)
            .count(args.heads)
            .count(args.head_dim)
            .float(if args.inverse { -1.0 } else { 1.0 }),
    };
    // SAFETY: `check` has made sure that `x` and the table hold all tokens.
    unsafe { cuda.launch(launch) }
}
