//! How probable a model finds the tokens of a text that is given, as evaluations ask.

use futures::future::BoxFuture;

use crate::chain::Chain;
use crate::decoder::{DecodeError, Logprobs};
use crate::head::Head;
use crate::states::Hidden;

/// Rows of logits that are held at once: with a vocabulary of 152,000 they take 10 MB.
const ROWS: usize = 16;

/// The probabilities of `prompt[1..]`, each after the tokens before it, with the `count` most probable
/// tokens in its place. The session must be new; afterwards it holds all of the prompt but the last token,
/// from which a [`Decoder`](crate::decoder::Decoder) can go on.
///
/// # Errors
/// [`DecodeError`]; the session is of no use afterwards.
pub fn of_prompt<'a>(
    chain: &'a mut Chain,
    head: &'a Head,
    prompt: &'a [u32],
    count: usize,
) -> BoxFuture<'a, Result<Vec<Logprobs>, DecodeError>> {
    Box::pin(async move {
        let (read, next) = match prompt {
            [read @ .., _] if !read.is_empty() => (read, prompt.get(1..).unwrap_or_default()),
            _ => return Ok(Vec::new()),
        };
        let bytes = head.embed(read.to_vec()).await?.into();
        let hidden = Hidden { dtype: head.dtype(), rows: 1, tokens: read.len(), bytes };
        let (output, _) = chain.step(hidden).await?;
        let mut scores = Vec::with_capacity(read.len());
        for tokens in next.chunks(ROWS) {
            let states = output.first(scores.len() + tokens.len()).last(tokens.len()).to_f32();
            let logits = head.logits(states).await?;
            let (tokens, width, before) = (tokens.to_vec(), head.vocabulary(), scores.len());
            // Each row is a walk over the vocabulary: other texts go on meanwhile.
            let rows = tokio::task::spawn_blocking(move || {
                let rows = (before..).zip(logits.chunks(width)).zip(tokens);
                rows.map(|((at, row), token)| score(row, token, count, at + 1)).collect()
            });
            let rows: Result<Vec<Logprobs>, _> = rows.await.map_err(|_| DecodeError::Stopped)?;
            scores.extend(rows?);
        }
        Ok(scores)
    })
}

fn score(logits: &[f32], token: u32, count: usize, at: usize) -> Result<Logprobs, DecodeError> {
    match logits.iter().any(|logit| logit.is_finite()) {
        true => Ok(Logprobs::of(logits, token, count)),
        false => Err(DecodeError::NoToken(at)),
    }
}
