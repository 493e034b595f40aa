//! The local part of a model on a thread of its own, so that many sessions share one copy of it and none
//! blocks the reactor. Rows that wait are computed together.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use shared::dtype::DType;
use tokio::sync::{mpsc, oneshot};

use crate::local_layers::{LocalModel, LocalModelError};

/// Requests that wait; more wait with their callers.
const QUEUE: usize = 256;
/// Rows of the head that are computed together.
const MAX_ROWS: usize = 32;

type Reply<T> = oneshot::Sender<Result<T, LocalModelError>>;

enum HeadRequest {
    Embed { tokens: Vec<u32>, reply: Reply<Vec<u8>> },
    Logits { states: Vec<f32>, reply: Reply<Vec<f32>> },
}

/// What is known of the model without asking its thread.
#[derive(Debug)]
struct Facts {
    hidden_size: usize,
    vocabulary: usize,
    num_blocks: u32,
    dtype: DType,
    eos: Vec<u32>,
    path: PathBuf,
}

/// A handle of the local part of a model. Its thread ends with the last one.
#[derive(Clone, Debug)]
pub struct Head {
    requests: mpsc::Sender<HeadRequest>,
    facts: Arc<Facts>,
}

impl Head {
    /// Gives `model` a thread.
    ///
    /// # Errors
    /// If the system has no thread.
    pub fn start(model: LocalModel) -> Result<Head, std::io::Error> {
        let facts = Facts {
            hidden_size: model.hidden_size(),
            vocabulary: model.vocabulary(),
            num_blocks: model.num_blocks(),
            dtype: model.dtype(),
            eos: model.eos().to_vec(),
            path: model.path().to_owned(),
        };
        let (requests, queue) = mpsc::channel(QUEUE);
        std::thread::Builder::new().name("head".into()).spawn(move || run(model, queue))?;
        Ok(Head { requests, facts: Arc::new(facts) })
    }

    /// Width of the hidden states.
    pub fn hidden_size(&self) -> usize {
        self.facts.hidden_size
    }

    /// Tokens of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.facts.vocabulary
    }

    /// Blocks of the whole model.
    pub fn num_blocks(&self) -> u32 {
        self.facts.num_blocks
    }

    /// Type of the hidden states that the client sends.
    pub fn dtype(&self) -> DType {
        self.facts.dtype
    }

    /// Tokens that end a text.
    pub fn eos(&self) -> &[u32] {
        &self.facts.eos
    }

    /// Hidden states of `tokens`, see [`LocalModel::embed`].
    ///
    /// # Errors
    /// As there.
    pub async fn embed(&self, tokens: Vec<u32>) -> Result<Vec<u8>, LocalModelError> {
        self.ask(|reply| HeadRequest::Embed { tokens, reply }).await
    }

    /// Logits `[rows, vocabulary]` for hidden states `[rows, hidden]`, see [`LocalModel::logits`].
    ///
    /// # Errors
    /// As there.
    pub async fn logits(&self, states: Vec<f32>) -> Result<Vec<f32>, LocalModelError> {
        self.ask(|reply| HeadRequest::Logits { states, reply }).await
    }

    async fn ask<T>(
        &self,
        request: impl FnOnce(Reply<T>) -> HeadRequest,
    ) -> Result<T, LocalModelError> {
        let (reply, answer) = oneshot::channel();
        // Without a thread, the answer says so.
        let _ = self.requests.send(request(reply)).await;
        answer.await.unwrap_or_else(|_| {
            let reason = "the thread that computes embeddings and head has ended".to_owned();
            Err(LocalModelError::Content { path: self.facts.path.clone(), reason })
        })
    }
}

fn run(mut model: LocalModel, mut queue: mpsc::Receiver<HeadRequest>) {
    let width = model.hidden_size();
    let is_whole = |states: &[f32]| !states.is_empty() && states.len().is_multiple_of(width);
    while let Some(first) = queue.blocking_recv() {
        let (mut all, mut replies) = (Vec::new(), Vec::new());
        let mut next = Some(first);
        while let Some(request) = next.take() {
            match request {
                // A caller that has gone wants no answer.
                HeadRequest::Embed { tokens, reply } => drop(reply.send(model.embed(&tokens))),
                // Alone, it gets its error alone.
                HeadRequest::Logits { states, reply } if !is_whole(&states) => {
                    drop(reply.send(model.logits(&states).map(<[f32]>::to_vec)));
                }
                HeadRequest::Logits { states, reply } => {
                    replies.push((all.len()..all.len() + states.len(), reply));
                    all.extend(states);
                }
            }
            if all.len() < MAX_ROWS * width {
                next = queue.try_recv().ok();
            }
        }
        answer(&mut model, &all, replies);
    }
}

/// Computes rows together. A failure is told to each by computing it again.
fn answer(model: &mut LocalModel, states: &[f32], replies: Vec<(Range<usize>, Reply<Vec<f32>>)>) {
    let (width, vocabulary) = (model.hidden_size(), model.vocabulary());
    if replies.is_empty() {
        return;
    }
    let all = model.logits(states).map(<[f32]>::to_vec).unwrap_or_default();
    for (values, reply) in replies {
        let rows = values.start / width * vocabulary..values.end / width * vocabulary;
        let logits = match all.get(rows) {
            Some(logits) => Ok(logits.to_vec()),
            None => {
                let states = states.get(values).unwrap_or_default();
                model.logits(states).map(<[f32]>::to_vec)
            }
        };
        // As above.
        drop(reply.send(logits));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[tokio::test]
    async fn rows_that_are_computed_together_have_the_bits_that_they_have_alone() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("model");
        let mut alone = LocalModel::load(&folder, None, 1).unwrap();
        let head = Head::start(LocalModel::load(&folder, None, 1).unwrap()).unwrap();
        let state = |seed: usize| -> Vec<f32> {
            (0..head.hidden_size())
                .map(|at| ((at * 7 + seed * 13) % 29) as f32 / 7.0 - 2.0)
                .collect()
        };
        let rows = futures::future::join_all((0..50).map(|seed| head.logits(state(seed)))).await;
        for (seed, row) in rows.into_iter().enumerate() {
            assert_eq!(row.unwrap(), alone.logits(&state(seed)).unwrap(), "row {seed}");
        }
        let three = head.logits([state(1), state(2), state(3)].concat()).await.unwrap();
        assert_eq!(three, alone.logits(&[state(1), state(2), state(3)].concat()).unwrap());
        assert_eq!(three[..head.vocabulary()], *alone.logits(&state(1)).unwrap());
        assert_eq!(head.embed(vec![3, 4]).await.unwrap(), alone.embed(&[3, 4]).unwrap());
    }

    #[tokio::test]
    async fn a_bad_row_or_token_fails_alone() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("model");
        let head = Head::start(LocalModel::load(&folder, None, 1).unwrap()).unwrap();
        let good = vec![0.5; head.hidden_size()];
        let (bad, fine) = tokio::join!(head.logits(vec![1.0; 3]), head.logits(good));
        assert!(bad.unwrap_err().to_string().contains("3 values"));
        assert_eq!(fine.unwrap().len(), head.vocabulary());
        assert!(head.embed(vec![u32::MAX]).await.is_err());
    }
}
