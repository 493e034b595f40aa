//! Launches `kv_append.cu`.

use super::by_dtype;
use crate::cuda::gpu::ctas;
use crate::cuda::{Cuda, Floats, Gpu, Launch, Pages, Params};
use crate::kv::total_tokens;
use crate::ops::{KvAppend, OpError, PagePool};

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: KvAppend<'_, Floats, Pages<'_>>,
) -> Result<(), OpError> {
    args.check()?;
    let layout = args.pages.layout();
    let per_head = match layout.head_dim.is_multiple_of(8) {
        true => layout.head_dim / 8,
        false => layout.head_dim,
    };
    let threads = total_tokens(args.rows) * layout.kv_heads * per_head * 2;
    if threads == 0 {
        return Ok(());
    }
    let batch = cuda.batch(args.rows)?;
    let names = ["kv_append_f32", "kv_append_bf16", "kv_append_f16"];
    let launch = Launch {
        kernel: by_dtype(names, layout.dtype),
        grid: [ctas(threads.div_ceil(256)), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .read(args.keys)
            .read(args.values)
            .address(batch)
            .address(args.pages.address())
            .address(args.pages.outlet().address)
            .count(args.pages.outlet().block)
            .count(layout.kv_heads)
            .count(layout.head_dim),
    };
    // SAFETY: `check` has made sure that keys and values hold all tokens and that every page that
    // they go to exists; the outbox has a slot for each of them.
    unsafe { cuda.launch(launch) }
}
