//! Passes over whole sequences, without a session (petals `client/sequential_autograd.py`): the
//! batch is cut into pieces of about `PIECE_TOKENS` tokens, and each piece goes its own random way
//! through the swarm, all at once. A piece whose server fails goes on from there another way.
//!
//! For training the inputs of every server are kept ([`forward_kept`]), and [`backward`] asks the
//! same servers for the gradients, last to first. When one of them fails, its blocks alone are
//! routed anew and computed again from its inputs, which makes the inputs of the servers that take
//! its place.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use futures::future::join_all;
use p2p::PeerId;

use crate::calls::ModelCaller;
pub use crate::calls::PassError;
use crate::states::{Hidden, Prompts};
use crate::swarm::{RoutePurpose, Swarm, SwarmError};
use swarm::routing::Leg;

/// Tokens of one piece, unless one sequence is longer (`MAX_TOKENS_IN_BATCH`).
const PIECE_TOKENS: usize = 1024;
/// Servers that may fail a piece in a row, without any progress between.
const MAX_FAILURES: u32 = 8;
/// Pause before the second try; doubles with each.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Why a batch could not be computed.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// The servers of a block are gone or cannot be found.
    #[error(transparent)]
    Swarm(#[from] SwarmError),
    /// A piece failed on every server.
    #[error("a part of the batch failed on {failures} servers, the last was {peer}")]
    Failed {
        failures: u32,
        /// The last server.
        peer: PeerId,
        source: Box<PassError>,
    },
    /// No sequences, no tokens, or bytes that do not divide.
    #[error("a batch of {rows} sequences of {tokens} tokens cannot have {bytes} bytes")]
    Shape {
        /// Sequences.
        rows: usize,
        tokens: usize,
        bytes: usize,
    },
    /// Prompts, or gradients of the outputs, for another batch.
    #[error("{what} of shape {got:?} do not belong to a batch of shape {inputs:?}")]
    Mismatch {
        what: &'static str,
        got: Vec<usize>,
        /// That of the inputs.
        inputs: Vec<usize>,
    },
}

/// What a backward pass needs of a forward pass.
#[derive(Clone, Debug)]
pub struct SavedActivations {
    pieces: Vec<Subbatch>,
    shape: [usize; 3],
}

impl SavedActivations {
    /// The servers that computed each piece in order, with their blocks.
    pub fn legs(&self) -> impl Iterator<Item = Vec<(PeerId, Range<u32>)>> + '_ {
        let of = |done: &Done| (done.leg.peer, done.leg.blocks.clone());
        self.pieces.iter().map(move |piece| piece.done.iter().map(of).collect())
    }
}

/// Gradients of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchGradients {
    /// Of the inputs.
    pub inputs: Hidden,
    /// Of the deep prompts, if there were any.
    pub prompts: Option<Prompts>,
}

/// Runs `input` through `blocks`; `prompts` are those of these blocks.
///
/// # Errors
/// [`BatchError`] when a block has no server, or servers keep failing.
pub async fn forward(
    swarm: &Swarm,
    blocks: Range<u32>,
    input: &Hidden,
    prompts: Option<&Prompts>,
) -> Result<Hidden, BatchError> {
    forward_kept(swarm, blocks, input, prompts).await.map(|(output, _)| output)
}

/// As [`forward`], and keeps what a [`backward`] needs.
///
/// # Errors
/// As [`forward`].
pub async fn forward_kept(
    swarm: &Swarm,
    blocks: Range<u32>,
    input: &Hidden,
    prompts: Option<&Prompts>,
) -> Result<(Hidden, SavedActivations), BatchError> {
    let pieces = cut(&blocks, input, prompts)?;
    let way = Way::new(swarm);
    let passes = pieces.into_iter().map(|(input, prompts)| {
        let (way, blocks) = (&way, blocks.clone());
        async move {
            let (output, done) =
                way.forward(blocks.clone(), input, prompts.as_ref(), blocks.start).await?;
            Ok((output, Subbatch { first: blocks.start, prompts, done }))
        }
    });
    let done: Result<Vec<(Hidden, Subbatch)>, BatchError> =
        join_all(passes).await.into_iter().collect();
    let (outputs, pieces): (Vec<Hidden>, Vec<Subbatch>) = done?.into_iter().unzip();
    let shape = input.shape();
    let output = Hidden::join_rows(&outputs).ok_or_else(|| shape_error(input))?;
    Ok((output, SavedActivations { pieces, shape }))
}

/// Gradients of a batch from those of its outputs, along the ways that its forward pass went.
///
/// # Errors
/// [`BatchError`] when a block has no server, or servers keep failing.
pub async fn backward(
    swarm: &Swarm,
    kept: &SavedActivations,
    gradient: &Hidden,
) -> Result<BatchGradients, BatchError> {
    if !gradient.is_whole() || gradient.shape() != kept.shape {
        return Err(BatchError::Mismatch {
            what: "gradients",
            got: gradient.shape().to_vec(),
            inputs: kept.shape.to_vec(),
        });
    }
    let way = Way::new(swarm);
    let mut row = 0;
    let passes = kept.pieces.iter().map(|piece| {
        let rows = piece.done.first().map_or(0, |done| done.inputs.rows);
        let gradient = gradient.rows(row..row + rows);
        row += rows;
        way.backward(piece.clone(), gradient)
    });
    // Collected first: each closure moves `row`.
    let passes: Vec<_> = passes.collect();
    let done: Result<Vec<_>, BatchError> = join_all(passes).await.into_iter().collect();
    let (inputs, prompts): (Vec<Hidden>, Vec<Option<Prompts>>) = done?.into_iter().unzip();
    let prompts: Option<Vec<Prompts>> = prompts.into_iter().collect();
    Ok(BatchGradients {
        inputs: Hidden::join_rows(&inputs).ok_or_else(|| shape_error(gradient))?,
        prompts: prompts.and_then(|parts| Prompts::join_rows(&parts)),
    })
}

/// One server's part of a forward pass.
#[derive(Clone, Debug)]
struct Done {
    leg: Leg<PeerId>,
    inputs: Hidden,
}

/// Sequences that go one way.
#[derive(Clone, Debug)]
struct Subbatch {
    /// The first block, which is that of the first prompts.
    first: u32,
    prompts: Option<Prompts>,
    done: Vec<Done>,
}

/// The swarm as pieces share it.
struct Way {
    swarm: Swarm,
    caller: ModelCaller,
}

impl Way {
    fn new(swarm: &Swarm) -> Way {
        let caller = ModelCaller { p2p: swarm.p2p().clone(), prefix: swarm.prefix().to_owned() };
        Way { swarm: swarm.clone(), caller }
    }

    /// Runs `states` through `blocks`; `prompts` begin with those of block `first`.
    async fn forward(
        &self,
        blocks: Range<u32>,
        mut states: Hidden,
        prompts: Option<&Prompts>,
        first: u32,
    ) -> Result<(Hidden, Vec<Done>), BatchError> {
        let (mut done, mut route, mut failures) = (Vec::new(), VecDeque::new(), 0);
        let mut at = blocks.start;
        while at < blocks.end {
            if route.is_empty() {
                route = self.route(at..blocks.end).await?;
            }
            let Some(leg) = route.pop_front() else {
                continue;
            };
            let own = of_leg(prompts, &leg, first);
            match self.caller.forward(&leg, &states, own.as_ref()).await {
                Ok(output) => {
                    self.swarm.trust(&leg.peer);
                    (at, failures) = (leg.blocks.end, 0);
                    let inputs = std::mem::replace(&mut states, output);
                    done.push(Done { leg, inputs });
                }
                Err(error) => {
                    failures += 1;
                    route.clear();
                    self.failed(leg.peer, error, failures).await?;
                }
            }
        }
        Ok((states, done))
    }

    /// Takes the gradient of what came out of `piece` back to what went in.
    async fn backward(
        &self,
        mut piece: Subbatch,
        mut gradient: Hidden,
    ) -> Result<(Hidden, Option<Prompts>), BatchError> {
        let (prompts, first) = (piece.prompts.as_ref(), piece.first);
        let (mut of_prompts, mut failures) = (Vec::new(), 0);
        while let Some(Done { leg, inputs }) = piece.done.pop() {
            let own = of_leg(prompts, &leg, first);
            match self.caller.backward(&leg, &inputs, &gradient, own.as_ref()).await {
                Ok((of_inputs, own)) => {
                    self.swarm.trust(&leg.peer);
                    failures = 0;
                    gradient = of_inputs;
                    of_prompts.extend(own.map(|own| (leg.blocks.start, own)));
                }
                Err(error) => {
                    failures += 1;
                    self.failed(leg.peer, error, failures).await?;
                    // The servers that take its place may be several: the inputs of each are
                    // computed again.
                    let again = self.forward(leg.blocks, inputs, prompts, first).await?;
                    piece.done.extend(again.1);
                }
            }
        }
        of_prompts.sort_by_key(|(start, _)| *start);
        let parts: Vec<Prompts> = of_prompts.into_iter().map(|(_, part)| part).collect();
        Ok((gradient, Prompts::join_blocks(&parts)))
    }

    async fn route(&self, blocks: Range<u32>) -> Result<VecDeque<Leg<PeerId>>, BatchError> {
        let draw = rand::random();
        let purpose = RoutePurpose::Batch { draw };
        Ok(self.swarm.route(blocks, purpose).await?.into())
    }

    /// Notes that a server failed, and waits before the next try, of which there are not endlessly
    /// many.
    async fn failed(
        &self,
        peer: PeerId,
        error: PassError,
        failures: u32,
    ) -> Result<(), BatchError> {
        tracing::warn!(%peer, %error, "server failed, trying another");
        self.swarm.ban(peer);
        if failures >= MAX_FAILURES {
            return Err(BatchError::Failed { failures, peer, source: Box::new(error) });
        }
        tokio::time::sleep(FIRST_PAUSE * (1 << (failures - 1))).await;
        Ok(())
    }
}

fn of_leg(prompts: Option<&Prompts>, leg: &Leg<PeerId>, first: u32) -> Option<Prompts> {
    let blocks = (leg.blocks.start - first) as usize..(leg.blocks.end - first) as usize;
    prompts.map(|all| all.of_blocks(blocks))
}

fn shape_error(batch: &Hidden) -> BatchError {
    BatchError::Shape { rows: batch.rows, tokens: batch.tokens, bytes: batch.bytes.len() }
}

/// Pieces of whole sequences, with their prompts.
fn cut(
    blocks: &Range<u32>,
    batch: &Hidden,
    prompts: Option<&Prompts>,
) -> Result<Vec<(Hidden, Option<Prompts>)>, BatchError> {
    if !batch.is_whole() {
        return Err(shape_error(batch));
    }
    let belongs = |prompts: &&Prompts| {
        let shape = (prompts.blocks, prompts.rows, prompts.width());
        prompts.is_whole()
            && shape == (blocks.len(), batch.rows, batch.width())
            && prompts.tokens <= batch.tokens
    };
    if let Some(wrong) = prompts.filter(|prompts| !belongs(prompts)) {
        return Err(BatchError::Mismatch {
            what: "prompts",
            got: vec![wrong.blocks, wrong.rows, wrong.tokens, wrong.width()],
            inputs: batch.shape().to_vec(),
        });
    }
    let most = (PIECE_TOKENS / batch.tokens).max(1);
    let piece = |from: usize| {
        let range = from..batch.rows.min(from + most);
        let own = prompts.map(|all| all.of_rows(range.clone()));
        (batch.rows(range), own)
    };
    Ok((0..batch.rows).step_by(most).map(piece).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::dtype::DType;

    fn batch(rows: usize, tokens: usize) -> Hidden {
        let bytes: Vec<u8> =
            (0..rows * tokens * 2).flat_map(|n| (n as f32).to_le_bytes()).collect();
        Hidden { dtype: DType::F32, rows, tokens, bytes: bytes.into() }
    }

    #[test]
    fn batches_are_cut_into_whole_sequences_and_joined_again() {
        for (rows, tokens, pieces) in [(1, 1, 1), (5, 512, 3), (3, 1500, 3), (8, 128, 1)] {
            let whole = batch(rows, tokens);
            let prompts = Prompts {
                dtype: DType::F32,
                blocks: 2,
                rows,
                tokens: 1,
                bytes: batch(2 * rows, 1).bytes,
            };
            let cut = cut(&(3..5), &whole, Some(&prompts)).unwrap();
            assert_eq!(cut.len(), pieces, "{rows} x {tokens}");
            let (states, own): (Vec<_>, Vec<_>) = cut.into_iter().unzip();
            assert_eq!(Hidden::join_rows(&states).unwrap(), whole);
            let own: Vec<Prompts> = own.into_iter().map(Option::unwrap).collect();
            assert_eq!(Prompts::join_rows(&own).unwrap(), prompts);
            assert!(super::cut(&(3..6), &whole, Some(&prompts)).is_err());
        }
    }

    #[test]
    fn what_is_no_batch_is_refused() {
        assert!(cut(&(0..1), &batch(0, 4), None).is_err());
        assert!(cut(&(0..1), &batch(4, 0), None).is_err());
        let odd = Hidden { bytes: vec![0; 30].into(), ..batch(2, 2) };
        assert!(cut(&(0..1), &odd, None).is_err());
    }
}
