//! A pushed step and the client's copy of it: they must be the same step.
//!
//! ```text
//!   copy first            computed; the push is late and dropped
//!   push first            computed, and kept until the copy comes
//!     copy is the same    dropped
//!     copy differs        answer not sent: computed again from the copy, later pushes are ignored
//!                         answer sent: the session ends with an error
//! ```

use std::collections::VecDeque;

use shared::dtype::DType;
use swarm::wire::messages::Tensor;
use swarm::wire::metadata::ArgsStructure;
use swarm::wire::tensor::{TensorError, WireTensor};

use crate::rpc::Failure;
use crate::rpc::compute::Arguments;
use crate::rpc::reply::INLINE_BYTES;
use crate::rpc::request::StepMessage;

/// Pushed steps kept for their copies. The next step of a client starts after it has sent all
/// copies of the one before, so that more than one is rare.
pub(crate) const MAX_UNCONFIRMED: usize = 4;

/// Steps that were answered from a push and whose copies are outstanding.
#[derive(Debug, Default)]
pub(super) struct Unconfirmed {
    steps: VecDeque<StepMessage>,
    distrusts: bool,
}

impl Unconfirmed {
    /// Whether another push may be computed.
    pub(super) fn takes_pushes(&self) -> bool {
        !self.distrusts && self.steps.len() < MAX_UNCONFIRMED
    }

    /// Takes no pushes any more.
    pub(super) fn distrust(&mut self) {
        self.distrusts = true;
    }

    /// Keeps a step that was computed from a push.
    pub(super) fn keep(&mut self, pushed: StepMessage) {
        self.steps.push_back(pushed);
    }

    /// The pushed step of this id. Steps before it have no copy to come: clients send them in order.
    pub(super) fn take(&mut self, step_id: Option<&str>) -> Option<StepMessage> {
        let is_it = |step: &StepMessage| step.metadata.step_id.as_deref() == step_id;
        let index = self.steps.iter().position(is_it)?;
        self.steps.drain(..=index).next_back()
    }
}

/// Whether a pushed step and the client's copy have the same position, the same beam order and the
/// same hidden states in `dtype`, however they are encoded.
///
/// # Errors
/// With the text for the client: a copy that cannot be read.
pub(super) async fn is_same(
    pushed: &StepMessage,
    copy: &StepMessage,
    structure: Option<&ArgsStructure>,
    dtype: DType,
) -> Result<bool, Failure> {
    if pushed.metadata.start_from_position != copy.metadata.start_from_position {
        return Ok(false);
    }
    let ours = Arguments::of(&pushed.request.tensors, structure, true)?;
    let theirs = Arguments::of(&copy.request.tensors, structure, true)?;
    if ours.hypo_ids != theirs.hypo_ids
        || theirs.prompts.is_some()
        || ours.hidden.shape() != theirs.hidden.shape()
    {
        return Ok(false);
    }
    let first = |step: &StepMessage| step.request.tensors.first().cloned();
    if let (Some(ours), Some(theirs)) = (first(pushed), first(copy))
        && structure.is_none_or(ArgsStructure::is_in_order)
        && has_same_bytes(&ours, &theirs)
    {
        return Ok(true);
    }
    let values = move || have_same_values(&ours.hidden, &theirs.hidden, dtype);
    let bytes = copy.request.tensors.iter().map(|tensor| tensor.buffer.len() as u64).sum::<u64>();
    if bytes <= INLINE_BYTES {
        return Ok(values()?);
    }
    match tokio::task::spawn_blocking(values).await {
        Ok(same) => Ok(same?),
        Err(error) => Err(Failure::runtime(format!("compare a pushed step: {error}"))),
    }
}

fn has_same_bytes(ours: &Tensor, theirs: &Tensor) -> bool {
    ours.compression == theirs.compression
        && ours.dtype == theirs.dtype
        && ours.size == theirs.size
        && ours.buffer == theirs.buffer
}

/// Decodes both; their shapes are the same.
fn have_same_values(
    ours: &WireTensor,
    theirs: &WireTensor,
    dtype: DType,
) -> Result<bool, TensorError> {
    let mut values = Vec::with_capacity(ours.element_count() * dtype.size_bytes());
    ours.write_pieces(dtype, |_, piece| {
        values.extend_from_slice(piece);
        Ok(())
    })?;
    let mut same = true;
    theirs.write_pieces(dtype, |offset, piece| {
        same &= values.get(offset..offset + piece.len()) == Some(piece);
        Ok(())
    })?;
    Ok(same)
}
