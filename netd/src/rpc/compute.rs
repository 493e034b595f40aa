//! From the tensors of a request to a result tensor: arguments are checked and named, written once
//! into the arena in block dtype, computed by the workers, and read back.
//!
//! Conversions of more than [`INLINE_BYTES`] leave the reactor.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use shared::block::BlockIndex;
use shared::dtype::DType;
use shared::job::{JobBody, MAX_ROWS, Prompts, SlotRef, StepPages, WorkKind};
use swarm::wire::messages::Tensor;
use swarm::wire::metadata::ArgsStructure;
use swarm::wire::tensor::{ShapeLimits, TensorError, WireDtype, WireTensor, raw_tensor};

use super::reply::{self, INLINE_BYTES};
use super::{Failure, Service};
use crate::workers::arena::ArenaMemory;
use crate::workers::job::{Caller, Holds, INPUT, Job, NO_SLOT, PROMPTS};
use crate::workers::link::JobTimes;

/// Shapes beyond these are not even looked at; what a request may really have is checked with texts
/// that say more.
const SHAPES: ShapeLimits = ShapeLimits { max_rank: 4, max_elements: 1 << 31 };

/// The named tensors of a request or an inference step.
#[derive(Clone, Debug)]
pub struct Arguments {
    /// Hidden states, of any shape if there are no elements, else `[batch, tokens, hidden]`.
    pub hidden: WireTensor,
    /// Deep prompts `[blocks, batch or 1, tokens, hidden]`.
    pub prompts: Option<WireTensor>,
    /// Beam order `[batch]`.
    pub hypo_ids: Option<Vec<i64>>,
}

impl Arguments {
    /// Names the tensors of a request; an inference step has hypo ids as well.
    ///
    /// # Errors
    /// With the text for the client: too few tensors, one that cannot be read, hypo ids that are
    /// not int64.
    pub fn of(
        tensors: &[Tensor],
        structure: Option<&ArgsStructure>,
        is_step: bool,
    ) -> Result<Arguments, Failure> {
        let tensors = arranged(tensors, structure)?;
        let parse = parser(&tensors, if is_step { 3 } else { 2 })?;
        let hidden = parse(0)?;
        let prompts = Some(parse(1)?).filter(|tensor| !tensor.is_dummy());
        let hypo_ids = if is_step { hypo_ids(&parse(2)?)? } else { None };
        Ok(Arguments { hidden, prompts, hypo_ids })
    }

    /// Names the tensors of a backward request: beside the arguments, the gradient of the output.
    ///
    /// # Errors
    /// With the text for the client: too few tensors, one that cannot be read.
    pub fn of_backward(
        tensors: &[Tensor],
        structure: Option<&ArgsStructure>,
    ) -> Result<(Arguments, WireTensor), Failure> {
        let tensors = arranged(tensors, structure)?;
        let parse = parser(&tensors, 3)?;
        let arguments = Arguments {
            hidden: parse(0)?,
            prompts: Some(parse(2)?).filter(|tensor| !tensor.is_dummy()),
            hypo_ids: None,
        };
        Ok((arguments, parse(1)?))
    }

    /// Batch and tokens of hidden states that are to be computed.
    ///
    /// # Errors
    /// When the shape is not `[batch, tokens, hidden]`, or has more tokens than one request may
    /// have.
    fn batch_and_tokens(&self, service: &Service) -> Result<(u32, u32), Failure> {
        let want = service.facts.hidden_size as usize;
        let &[batch, tokens, hidden] = self.hidden.shape() else {
            let shape = self.hidden.shape();
            return Err(Failure::bad(format!(
                "hidden states must have the shape [batch, tokens, {want}], got {shape:?}"
            )));
        };
        if hidden != want {
            return Err(Failure::bad(format!(
                "hidden states have size {hidden}, the model's hidden size is {want}"
            )));
        }
        let most = service.limits.max_batch_size;
        let (batch, tokens) = (u32::try_from(batch), u32::try_from(tokens));
        match (batch, tokens) {
            (Ok(batch), Ok(tokens)) if u64::from(batch) * u64::from(tokens) <= u64::from(most) => {
                if batch > MAX_ROWS {
                    let text =
                        format!("batch of {batch} sequences is over the limit of {MAX_ROWS}");
                    return Err(Failure::too_large(text));
                }
                Ok((batch, tokens))
            }
            // Text of petals `task_pool.py`.
            _ => Err(Failure::too_large(format!(
                "Task size greater than max_batch_size ({most}), it can't be processed"
            ))),
        }
    }

    /// Sequences and tokens of the prompts, if there are any.
    fn prompt_shape(
        &self,
        blocks: usize,
        batch: u32,
        tokens: u32,
        hidden: u32,
    ) -> Result<Option<(u32, u32)>, Failure> {
        let Some(prompts) = &self.prompts else {
            return Ok(None);
        };
        let shape = prompts.shape();
        if shape.first() != Some(&blocks) {
            let received = shape.first().copied().unwrap_or(0);
            return Err(Failure::bad(format!("Received {received} prompts for {blocks} backends")));
        }
        match *shape {
            [_, rows, length, width]
                if (rows == 1 || rows == batch as usize)
                    && length <= tokens as usize
                    && width == hidden as usize =>
            {
                Ok(Some((rows as u32, length as u32)))
            }
            _ => Err(Failure::bad(format!(
                "prompts must have the shape [{blocks}, {batch} or 1, at most {tokens}, {hidden}], got {shape:?}"
            ))),
        }
    }
}

/// The arguments in the order of the RPC.
fn arranged<'a>(
    tensors: &'a [Tensor],
    structure: Option<&ArgsStructure>,
) -> Result<Cow<'a, [Tensor]>, Failure> {
    Ok(match structure {
        Some(structure) => Cow::Owned(structure.arrange(tensors)?),
        None => Cow::Borrowed(tensors),
    })
}

/// Reads one of `tensors`, of which there must be `expected` or more.
fn parser(
    tensors: &[Tensor],
    expected: usize,
) -> Result<impl Fn(usize) -> Result<WireTensor, Failure>, Failure> {
    let got = tensors.len();
    let missing = move || {
        let text = format!("not enough values to unpack (expected at least {expected}, got {got})");
        Failure::bad(text)
    };
    if got < expected {
        return Err(missing());
    }
    Ok(move |index: usize| {
        let tensor = tensors.get(index).ok_or_else(missing)?;
        WireTensor::parse(tensor, SHAPES).map_err(Failure::from)
    })
}

fn hypo_ids(tensor: &WireTensor) -> Result<Option<Vec<i64>>, Failure> {
    if tensor.dtype() != WireDtype::I64 {
        let name = tensor.dtype().name();
        return Err(Failure::bad(format!("hypo ids must be int64, got torch.{name}")));
    }
    if tensor.is_dummy() {
        return Ok(None);
    }
    Ok(Some(tensor.to_i64_vec()?))
}

impl Service {
    /// The answer to hidden states without elements: the same shape, in block dtype, nothing
    /// computed.
    pub(super) fn echo(&self, hidden: &WireTensor) -> Result<Tensor, Failure> {
        Ok(raw_tensor(hidden.shape(), self.facts.dtype.into(), Bytes::new())?)
    }

    /// The job over `arguments`, which are not empty; `kind` says what it is by its rows and their
    /// tokens. The shapes of the arguments are checked here, and nowhere
    /// else.
    ///
    /// # Errors
    /// With the text for the client.
    pub(super) fn job(
        &self,
        kind: fn(u32, u32) -> WorkKind,
        blocks: Vec<BlockIndex>,
        adapter: Option<u32>,
        arguments: &Arguments,
        caller: Caller,
    ) -> Result<Job, Failure> {
        let (batch, tokens) = arguments.batch_and_tokens(self)?;
        let hidden = self.facts.hidden_size;
        let prompts = arguments.prompt_shape(blocks.len(), batch, tokens, hidden)?;
        let body = JobBody {
            kind: kind(batch, tokens),
            dtype: self.facts.dtype,
            blocks,
            adapter,
            batch,
            tokens,
            hidden,
            pages: StepPages::default(),
            input: NO_SLOT,
            output: NO_SLOT,
            prompts: prompts.map(|(batch, tokens)| Prompts { slot: NO_SLOT, batch, tokens }),
            output_gradient: None,
            prompt_gradient: None,
        };
        Ok(Job { caller, body, lease: None })
    }

    /// Computes `job` over `arguments` and encodes the answer.
    ///
    /// # Errors
    /// With the text for the client: non-finite values, or a failure of the worker.
    pub(super) async fn compute(
        &self,
        mut job: Job,
        arguments: &Arguments,
    ) -> Result<(Tensor, JobTimes), Failure> {
        let arena = self.workers.arena();
        let permit = self.admission_queue.admit(&job).await;
        let slots = arena.reserve(&job.sizes(), job.slot_class()).await?;
        let holds = Arc::new(Holds { slots, pages: job.lease.take() });
        if let Some(prompts) = &arguments.prompts {
            let written = write(arena, &holds, PROMPTS, prompts, job.body.dtype).await;
            written.map_err(|error| explain("prompts", error, 0, 0))?;
        }
        let written = write(arena, &holds, INPUT, &arguments.hidden, job.body.dtype).await;
        let (tokens, hidden) = (job.body.tokens as usize, job.body.hidden as usize);
        written.map_err(|error| explain("hidden states", error, tokens, hidden))?;
        let (output, times) = self.workers.run(&job, &holds).await?;
        let buffer = read(arena, &holds, output).await?;
        drop(permit);
        let (shape, compression) = (arguments.hidden.shape(), job.caller.compression);
        let output = reply::encode(shape, job.body.dtype.into(), buffer, compression).await?;
        Ok((output, times))
    }
}

/// Writes `tensor` into slot `index` of `holds`.
pub(super) async fn write(
    arena: &ArenaMemory,
    holds: &Arc<Holds>,
    index: usize,
    tensor: &WireTensor,
    dtype: DType,
) -> Result<(), TensorError> {
    let slot = holds.slots.slot(index);
    if slot.len <= INLINE_BYTES {
        return write_now(arena, slot, tensor, dtype);
    }
    // The task holds the slot, also if the request is given up meanwhile.
    let (arena, holds, tensor) = (arena.clone(), holds.clone(), tensor.clone());
    let task = tokio::task::spawn_blocking(move || {
        let written = write_now(&arena, slot, &tensor, dtype);
        drop(holds);
        written
    });
    task.await.unwrap_or(Err(TensorError::WrongDestination { needed: 0, actual: 0 }))
}

fn write_now(
    arena: &ArenaMemory,
    slot: SlotRef,
    tensor: &WireTensor,
    dtype: DType,
) -> Result<(), TensorError> {
    let needed = tensor.element_count() * dtype.size_bytes();
    let outside = || TensorError::WrongDestination { needed, actual: slot.len as usize };
    if needed as u64 != slot.len {
        return Err(outside());
    }
    tensor.write_pieces(dtype, |offset, piece| {
        let written = arena.map().write(slot.offset + offset as u64, piece);
        written.map_err(|_| outside())
    })
}

/// Reads slot `slot` of `holds`.
pub(super) async fn read(
    arena: &ArenaMemory,
    holds: &Arc<Holds>,
    slot: SlotRef,
) -> Result<Bytes, Failure> {
    if slot.len <= INLINE_BYTES {
        return read_now(arena, slot);
    }
    let (arena, holds) = (arena.clone(), holds.clone());
    let task = tokio::task::spawn_blocking(move || {
        let read = read_now(&arena, slot);
        drop(holds);
        read
    });
    task.await.unwrap_or_else(|error| Err(Failure::runtime(format!("read the result: {error}"))))
}

fn read_now(arena: &ArenaMemory, slot: SlotRef) -> Result<Bytes, Failure> {
    let mut bytes = vec![0u8; slot.len as usize];
    let read = arena.map().read(slot.offset, &mut bytes);
    read.map_err(|error| Failure::runtime(format!("read the result: {error}")))?;
    Ok(bytes.into())
}

/// Says where a value is not finite, in terms of the request.
pub(super) fn explain(what: &str, error: TensorError, tokens: usize, hidden: usize) -> Failure {
    let TensorError::NotFinite { index, dtype } = error else {
        return Failure::from(error);
    };
    let per_row = tokens * hidden;
    let place = match (index.checked_div(per_row), index.checked_rem(per_row)) {
        (Some(row), Some(rest)) => {
            format!("row {row}, token {}, element {}", rest / hidden, rest % hidden)
        }
        _ => format!("element {index}"),
    };
    Failure::bad(format!(
        "{what} hold a value that is not finite in {dtype} at {place}; this server computes finite values only"
    ))
}
