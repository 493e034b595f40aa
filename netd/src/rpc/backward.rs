//! `rpc_backward` and `rpc_backward_stream`: gradients of the inputs, and of deep prompts if there
//! are any, without a cache. They travel as [`super::whole`] says.
//!
//! Nothing is kept between a forward and a backward request: the inputs come again, and the blocks
//! are computed again from them (petals `block_functions.py`, `run_rpc_backward`). Weights are
//! frozen.
//!
//! # Discrepancies
//! Gradients that are not finite are refused.

use std::sync::Arc;

use shared::job::{JobBody, WorkKind};
use swarm::wire::messages::{Compression, Tensor};
use swarm::wire::tensor::WireTensor;

use super::compute::{Arguments, explain, read, write};
use super::request::BlockRequest;
use super::{Failure, Service, reply};
use crate::workers::arena::SlotClass;
use crate::workers::gradients::{Bound, OUTPUT_GRADIENT, mib};
use crate::workers::job::{Caller, Holds, INPUT, PROMPTS};

/// Gradients of the inputs `[batch, tokens, hidden]` and of the prompts `[blocks, batch, prompt
/// tokens, hidden]`, both in block dtype.
pub(super) async fn backward(
    service: &Service,
    request: &BlockRequest<'_>,
) -> Result<Vec<Tensor>, Failure> {
    let structure = request.metadata.args_structure.as_ref();
    let (arguments, gradient) = Arguments::of_backward(request.tensors, structure)?;
    let prompts = usize::from(arguments.prompts.is_some());
    let count = 1 + prompts;
    let own = service.compression;
    let kinds = reply::kinds(request.metadata.output_compression(count)?, count, own)?;
    if gradient.shape() != arguments.hidden.shape() {
        return Err(Failure::bad(format!(
            "grad_outputs must have the shape of the inputs {:?}, got {:?}",
            arguments.hidden.shape(),
            gradient.shape()
        )));
    }
    if arguments.hidden.is_dummy() {
        if arguments.prompts.is_some() {
            return Err(Failure::bad("prompts need inputs that have elements"));
        }
        return Ok(vec![service.echo(&arguments.hidden)?]);
    }
    let caller = Caller { peer: request.peer, points: request.metadata.points, compression: own };
    gradients(service, request, &arguments, &gradient, caller, &kinds).await
}

async fn gradients(
    service: &Service,
    request: &BlockRequest<'_>,
    arguments: &Arguments,
    gradient: &WireTensor,
    caller: Caller,
    kinds: &[Compression],
) -> Result<Vec<Tensor>, Failure> {
    let kind = |index: usize| kinds.get(index).copied().unwrap_or(caller.compression);
    let (blocks, adapter) = (request.blocks.clone(), request.adapter);
    let job = service.job(|_, _| WorkKind::Backward, blocks, adapter, arguments, caller)?;
    let JobBody { batch, tokens, hidden, dtype, .. } = job.body;
    let (count, length) = (job.body.blocks.len(), job.body.prompts.map(|prompts| prompts.tokens));
    let bound = bound(service, batch, tokens, length.unwrap_or(0))?;
    let permit = service.admission_queue.admit(&job).await;
    let workers = &service.workers;
    // Only now, as workers come and go meanwhile.
    let gradients = workers.gradients(job, bound)?;
    let arena = workers.arena();
    let slots = arena.reserve(&gradients.sizes(), SlotClass::Bulk).await?;
    let holds = Arc::new(Holds { slots, pages: None });
    let (tokens, hidden) = (tokens as usize, hidden as usize);
    if let Some(prompts) = &arguments.prompts {
        let written = write(arena, &holds, PROMPTS, prompts, dtype).await;
        written.map_err(|error| explain("prompts", error, 0, 0))?;
    }
    for (index, tensor, what) in [
        (INPUT, &arguments.hidden, "hidden states"),
        (OUTPUT_GRADIENT, gradient, "output gradients"),
    ] {
        let written = write(arena, &holds, index, tensor, dtype).await;
        written.map_err(|error| explain(what, error, tokens, hidden))?;
    }
    let result = gradients.run(workers, &holds).await?;
    let bytes = read(arena, &holds, result.input).await?;
    let shape = arguments.hidden.shape();
    let mut tensors = vec![reply::encode(shape, dtype.into(), bytes, kind(0)).await?];
    if let (Some(slot), Some(length)) = (result.prompts, length) {
        let bytes = read(arena, &holds, slot).await?;
        let shape = [count, batch as usize, length as usize, hidden];
        tensors.push(reply::encode(&shape, dtype.into(), bytes, kind(1)).await?);
    }
    drop(permit);
    Ok(tensors)
}

/// What a worker may keep for gradients over `batch` sequences of `tokens` tokens.
///
/// # Errors
/// [`Failure`] when it is not enough for one block.
fn bound(service: &Service, batch: u32, tokens: u32, prompts: u32) -> Result<Bound, Failure> {
    let (facts, most_bytes) = (&service.facts, service.gradient_bytes);
    let block_bytes = facts.gradient_block_bytes(batch, tokens, prompts);
    let planned = facts.most_gradient_block_bytes(service.limits.max_batch_size);
    let most = most_bytes.max(planned);
    if block_bytes > most {
        return Err(Failure::too_large(format!(
            "gradients of {batch} x {tokens} tokens, {prompts} of them with deep prompts, keep {} per block, and this server keeps at \
             most {} (--max_batch_size {}); ask for fewer sequences at a time",
            mib(block_bytes),
            mib(most),
            service.limits.max_batch_size
        )));
    }
    Ok(Bound { block_bytes, most_bytes })
}
