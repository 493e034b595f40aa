//! `rpc_forward` and `rpc_forward_stream`: blocks over whole sequences, without a cache.

use shared::job::WorkKind;
use swarm::wire::messages::Tensor;

use super::compute::Arguments;
use super::request::BlockRequest;
use super::{Failure, Service, reply};
use crate::workers::job::Caller;

/// Hidden states after the blocks.
pub(super) async fn forward(
    service: &Service,
    request: &BlockRequest<'_>,
) -> Result<Tensor, Failure> {
    let metadata = &request.metadata;
    let kinds = reply::kinds(metadata.output_compression(1)?, 1, service.compression)?;
    let caller = Caller {
        peer: request.peer,
        points: metadata.points,
        compression: kinds.first().copied().unwrap_or(service.compression),
    };
    let arguments = Arguments::of(request.tensors, metadata.args_structure.as_ref(), false)?;
    if arguments.hidden.is_dummy() {
        return service.echo(&arguments.hidden);
    }
    let (blocks, adapter) = (request.blocks.clone(), request.adapter);
    let job = service.job(|_, _| WorkKind::Forward, blocks, adapter, &arguments, caller)?;
    Ok(service.compute(job, &arguments).await?.0)
}
