//! An inference session over a chain of servers. A server that fails is replaced: its blocks are routed anew, and the new
//! servers are given the whole history of its inputs as one long first step, so that the text goes on as if nothing had
//! happened.

use std::time::Duration;

use netd::p2p::PeerId;

use crate::session::{Hidden, ServerSession, SessionError, StepTiming};
use crate::swarm::{Purpose, Swarm, SwarmError};

/// Failures of servers that one step survives.
const MAX_FAILURES_PER_STEP: usize = 12;

/// Pause after the first server that could not be reached; doubles with each. A server that has just joined may not be
/// known to the peers that tell its addresses.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Longest of these pauses, as in Petals' client.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Why a session over the chain cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// The servers of a block are gone or cannot be found.
    #[error(transparent)]
    Swarm(#[from] SwarmError),
    /// Servers kept failing.
    #[error("{failures} servers failed during one step, the last was {peer}")]
    TooManyFailures {
        /// How many.
        failures: usize,
        /// The last.
        peer: PeerId,
        /// Its error.
        source: Box<SessionError>,
    },
    /// The session is as long as it may be.
    #[error("the session holds {position} of {max_length} tokens and cannot take {tokens} more")]
    Full {
        /// Tokens so far.
        position: u32,
        /// Limit given when it was opened.
        max_length: u32,
        /// Tokens of the step.
        tokens: usize,
    },
}

/// One server of the chain with all it was ever sent.
struct Link {
    session: ServerSession,
    history: Vec<Hidden>,
}

/// A session over a chain of servers.
pub struct Chain<'a> {
    swarm: &'a mut Swarm,
    links: Vec<Link>,
    max_length: u32,
    position: u32,
}

impl<'a> Chain<'a> {
    /// Routes a session of at most `max_length` tokens through the swarm and opens it on every server.
    ///
    /// # Errors
    /// [`ChainError`] when a block has no server that answers.
    pub async fn open(swarm: &'a mut Swarm, max_length: u32) -> Result<Chain<'a>, ChainError> {
        let blocks = 0..swarm.num_blocks();
        let mut chain = Chain {
            swarm,
            links: Vec::new(),
            max_length,
            position: 0,
        };
        chain.links = chain.connect(blocks).await?;
        Ok(chain)
    }

    /// The servers in order, with their blocks.
    pub fn legs(&self) -> impl Iterator<Item = (PeerId, std::ops::Range<u32>)> + '_ {
        self.links
            .iter()
            .map(|link| (link.session.leg().peer, link.session.leg().blocks.clone()))
    }

    /// Runs `input` through all blocks and returns what comes out, with the times summed over the servers.
    ///
    /// # Errors
    /// [`ChainError`]; failures of single servers are repaired as long as others serve their blocks.
    pub async fn step(&mut self, input: Hidden) -> Result<(Hidden, StepTiming), ChainError> {
        let tokens = input.tokens;
        let after = u64::from(self.position) + tokens as u64;
        if after > u64::from(self.max_length) {
            return Err(ChainError::Full {
                position: self.position,
                max_length: self.max_length,
                tokens,
            });
        }
        let step_id = uuid::Uuid::new_v4().to_string();
        let (mut flowing, mut timing, mut at, mut failures) = (input, StepTiming::default(), 0, 0);
        while at < self.links.len() {
            let fresh = self.links[at].session.position() == 0 && self.position > 0;
            // A fresh server behind another fresh one is handed its whole history by that one.
            let part = if fresh {
                flowing.clone()
            } else {
                flowing.last(tokens)
            };
            let link = &mut self.links[at];
            match link.session.step(&part, &step_id).await {
                Ok((output, spent)) => {
                    timing += spent;
                    link.history.push(part);
                    self.swarm.trust(&link.session.leg().peer);
                    flowing = output;
                    at += 1;
                }
                Err(error) => {
                    failures += 1;
                    flowing = self.replace(at, part, error, failures).await?;
                }
            }
        }
        self.position = u32::try_from(after).unwrap_or(u32::MAX);
        Ok((flowing.last(tokens), timing))
    }

    /// Puts new servers in place of the one at `at`, and returns what to send to the first of them: all inputs that the old
    /// one was ever sent, and `part`, which it did not answer.
    async fn replace(
        &mut self,
        at: usize,
        part: Hidden,
        error: SessionError,
        failures: usize,
    ) -> Result<Hidden, ChainError> {
        let failed = self.links.remove(at);
        let leg = failed.session.leg().clone();
        tracing::warn!(peer = %leg.peer, blocks = ?leg.blocks, %error, "server failed, looking for another");
        if failures > MAX_FAILURES_PER_STEP {
            return Err(ChainError::TooManyFailures {
                failures,
                peer: leg.peer,
                source: Box::new(error),
            });
        }
        self.swarm.ban(leg.peer);
        pause(failures - 1).await;
        let links = self.connect(leg.blocks).await?;
        self.links.splice(at..at, links);
        Ok(join(failed.history.into_iter().chain([part])))
    }

    /// Opens sessions along the best route through `blocks`; servers that cannot be reached are banned and routed around.
    async fn connect(&mut self, blocks: std::ops::Range<u32>) -> Result<Vec<Link>, ChainError> {
        let mut failures = 0;
        loop {
            let mut links = Vec::new();
            let mut failed = None;
            let purpose = Purpose::Session {
                max_length: self.max_length,
            };
            for leg in self.swarm.route(blocks.clone(), purpose).await? {
                match ServerSession::open(
                    self.swarm.p2p(),
                    self.swarm.prefix(),
                    leg.clone(),
                    self.max_length,
                )
                .await
                {
                    Ok(session) => links.push(Link {
                        session,
                        history: Vec::new(),
                    }),
                    Err(error) => {
                        failed = Some((leg.peer, error));
                        break;
                    }
                }
            }
            let Some((peer, source)) = failed else {
                return Ok(links);
            };
            failures += 1;
            if failures > MAX_FAILURES_PER_STEP {
                let source = Box::new(source);
                return Err(ChainError::TooManyFailures {
                    failures,
                    peer,
                    source,
                });
            }
            tracing::warn!(%peer, error = %source, "server cannot be reached, looking for another");
            self.swarm.ban(peer);
            pause(failures).await;
        }
    }

    /// Ends the session on every server.
    pub async fn close(self) {
        for link in self.links {
            let peer = link.session.leg().peer;
            if let Err(error) = link.session.close().await {
                tracing::debug!(%peer, %error, "session did not close cleanly");
            }
        }
    }
}

/// The pause before the next try after `failures` others; none after the first server of a step.
async fn pause(failures: usize) {
    if failures > 0 {
        let doublings = (failures - 1).min(MAX_FAILURES_PER_STEP) as u32;
        tokio::time::sleep((FIRST_PAUSE * (1 << doublings)).min(LONGEST_PAUSE)).await;
    }
}

/// Hidden states one after the other. All have the dtype of the first, since one server made them all.
fn join(parts: impl Iterator<Item = Hidden>) -> Hidden {
    let parts: Vec<Hidden> = parts.collect();
    let tokens = parts.iter().map(|p| p.tokens).sum();
    let dtype = parts.first().map_or(shared::dtype::DType::F32, |p| p.dtype);
    let bytes = parts
        .iter()
        .flat_map(|p| convert(p, dtype))
        .collect::<Vec<u8>>();
    Hidden {
        dtype,
        tokens,
        bytes: bytes.into(),
    }
}

/// Bytes of `part` in `dtype`; another dtype comes from a replaced server before this one.
fn convert(part: &Hidden, dtype: shared::dtype::DType) -> Vec<u8> {
    if part.dtype == dtype {
        return part.bytes.to_vec();
    }
    let mut values = vec![0.0; part.bytes.len() / part.dtype.size_bytes()];
    kernels::ops::convert::to_f32(part.dtype, &part.bytes, &mut values);
    let mut bytes = vec![0; values.len() * dtype.size_bytes()];
    kernels::ops::convert::from_f32(dtype, &values, &mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::dtype::DType;

    #[test]
    fn histories_join_in_order_and_in_the_first_dtype() {
        let part = |values: &[f32], dtype: DType| {
            let mut bytes = vec![0; values.len() * dtype.size_bytes()];
            kernels::ops::convert::from_f32(dtype, values, &mut bytes);
            Hidden {
                dtype,
                tokens: values.len(),
                bytes: bytes.into(),
            }
        };
        let joined = join([part(&[1.0, 2.0], DType::Bf16), part(&[3.0], DType::F32)].into_iter());
        assert_eq!(joined, part(&[1.0, 2.0, 3.0], DType::Bf16));
    }
}
