//! An inference session over a chain of servers. A server that fails is replaced: its blocks are
//! routed anew, and the new servers are given the whole history of its inputs as one long first
//! step, so that the text goes on as if nothing had happened.

use std::time::Duration;

use futures::future::BoxFuture;
use p2p::PeerId;
use swarm::wire::metadata::NextServer;

use crate::history::History;
use crate::session::{ServerSession, SessionError, StepInput, StepTiming};
use crate::states::{Hidden, Prompts};
use crate::swarm::capacity::SessionSlot;
use crate::swarm::{RoutePurpose, Swarm, SwarmError};

/// Failures of servers that one step survives.
const MAX_FAILURES_PER_STEP: usize = 12;

/// Pause after the first server that could not be reached; doubles with each. A server that has
/// just joined may not be known to the peers that tell its addresses.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// How long a session waits for a place on servers that have as many sessions of this node as they take.
const PATIENCE: Duration = Duration::from_secs(600);

/// The same for servers in place of others: meanwhile the session holds its places on those that are left.
const PATIENCE_OF_OPEN: Duration = Duration::from_secs(30);

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
        failures: usize,
        /// The last.
        peer: PeerId,
        source: Box<SessionError>,
    },
    /// A server takes no session of this length; others are not asked.
    #[error("{peer} takes no session of {max_length} tokens: {text}")]
    TooLong {
        peer: PeerId,
        max_length: u32,
        /// What the server says.
        text: String,
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
    /// A position that the session has not reached.
    #[error("the session holds {position} tokens and cannot go back to {asked}")]
    NotBehind {
        /// Tokens so far.
        position: u32,
        /// Where it was to go.
        asked: u32,
    },
    /// What was given to a step contradicts itself or the session.
    #[error("{0}")]
    BadStep(&'static str),
}

/// One step of a session.
#[derive(Clone, Debug, PartialEq)]
pub struct ChainStep {
    /// Hidden states; all steps of a session have as many rows.
    pub hidden: Hidden,
    /// Which row each row goes on from (beam search); `None` for the same.
    pub hypo_ids: Option<Vec<i64>>,
    /// Deep prompts for all blocks; only with the first tokens of a session.
    pub prompts: Option<Prompts>,
}

impl From<Hidden> for ChainStep {
    fn from(hidden: Hidden) -> ChainStep {
        ChainStep { hidden, hypo_ids: None, prompts: None }
    }
}

/// One server of the chain with all it was ever sent.
struct ChainLink {
    session: ServerSession,
    _slot: SessionSlot,
    history: History,
    /// Whether its server takes tokens back.
    rolls_back: bool,
    /// Whether the session holds tokens that were taken back: another takes its place.
    is_stale: bool,
}

/// A session over a chain of servers.
pub struct Chain {
    swarm: Swarm,
    links: Vec<ChainLink>,
    max_length: u32,
    position: u32,
    /// Deep prompts of the first tokens, and which row of theirs each row has now.
    prompts: Option<(Prompts, Vec<usize>)>,
    /// Rows of all steps; zero before the first.
    rows: usize,
    sent_again: usize,
}

impl Chain {
    /// Routes a session of at most `max_length` tokens through the swarm and opens it on every
    /// server.
    ///
    /// # Errors
    /// [`ChainError`] when a block has no server that answers.
    pub fn open(swarm: &Swarm, max_length: u32) -> BoxFuture<'_, Result<Chain, ChainError>> {
        Box::pin(async move {
            let blocks = 0..swarm.num_blocks();
            let mut chain = Chain {
                swarm: swarm.clone(),
                links: Vec::new(),
                max_length,
                position: 0,
                prompts: None,
                rows: 0,
                sent_again: 0,
            };
            chain.links = chain.connect(blocks).await?;
            Ok(chain)
        })
    }

    /// The servers in order, with their blocks.
    pub fn legs(&self) -> impl Iterator<Item = (PeerId, std::ops::Range<u32>)> + '_ {
        self.links.iter().map(|link| (link.session.leg().peer, link.session.leg().blocks.clone()))
    }

    /// Tokens that servers were sent again in place of others that failed.
    pub fn sent_again(&self) -> usize {
        self.sent_again
    }

    /// How often present servers were come back to after their connections broke.
    pub fn resumed(&self) -> u32 {
        self.links.iter().map(|link| link.session.resumed()).sum()
    }

    /// Most tokens of the session.
    pub fn max_length(&self) -> u32 {
        self.max_length
    }

    /// Tokens of the session so far.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Whether every server takes tokens back. With others [`roll_back`](Self::roll_back) costs all
    /// tokens that are kept.
    pub fn rolls_back(&self) -> bool {
        self.links.iter().all(|link| link.rolls_back)
    }

    /// Forgets the tokens from `position` on; the next step goes on from there. Servers are told
    /// with that step, as by Petals' client (`start_from_position`), and one that takes the
    /// place of another is sent what was kept. So is one of a version that ignores the position, in
    /// a new session.
    ///
    /// # Errors
    /// [`ChainError::NotBehind`] for a position that the session has not reached.
    pub fn roll_back(&mut self, position: u32) -> Result<(), ChainError> {
        if position > self.position {
            return Err(ChainError::NotBehind { position: self.position, asked: position });
        }
        for link in &mut self.links {
            link.is_stale |= !link.rolls_back && position < link.session.position();
            link.session.roll_back(position);
            link.history.roll_back(position as usize);
        }
        self.position = position;
        let kept = self.prompts.take().filter(|_| position > 0);
        self.prompts = kept.map(|(all, order)| (all.first(position as usize), order));
        Ok(())
    }

    /// Runs a step through all blocks and returns what comes out, with the times summed over the
    /// servers.
    ///
    /// # Errors
    /// [`ChainError`]; failures of single servers are repaired as long as others serve their
    /// blocks. After an error of the servers the session is of no use.
    pub fn step(
        &mut self,
        step: impl Into<ChainStep>,
    ) -> BoxFuture<'_, Result<(Hidden, StepTiming), ChainError>> {
        Box::pin(self.run(step.into()))
    }

    async fn run(&mut self, step: ChainStep) -> Result<(Hidden, StepTiming), ChainError> {
        let order = self.check(&step)?;
        let tokens = step.hidden.tokens;
        let after = u64::from(self.position) + tokens as u64;
        self.rows = step.hidden.rows;
        self.follow_prompts(step.prompts, order.as_deref());
        let step_id = uuid::Uuid::new_v4().to_string();
        let (mut flowing, mut timing, mut at, mut failures) =
            (step.hidden, StepTiming::default(), 0, 0);
        while at < self.links.len() {
            let next_servers = self.next_servers(at);
            if self.links[at].is_stale {
                let history = self.open_again(at).await?;
                flowing = self.replay(&history, order.as_deref(), flowing.last(tokens));
            }
            let link = &mut self.links[at];
            let blocks = link.session.leg().blocks.clone();
            // A server behind one that was replaced may be new, too: it gets the whole history from
            // that one's output, in the rows of now.
            let fresh = link.session.position() == 0;
            let prompts = self.prompts.as_ref().filter(|_| fresh);
            let prompts = prompts.map(|(all, order)| {
                all.of_blocks(blocks.start as usize..blocks.end as usize).in_order(order)
            });
            let part = match fresh {
                true => flowing.clone(),
                false => flowing.last(tokens),
            };
            let order = order.as_deref().filter(|_| !fresh);
            let input = StepInput {
                hidden: &part,
                hypo_ids: step.hypo_ids.as_deref().filter(|_| !fresh),
                prompts,
                step_id: &step_id,
                next_servers: if fresh { &[] } else { &next_servers },
            };
            match link.session.step(&input).await {
                Ok((output, spent)) => {
                    timing += spent;
                    let sent = part.tokens;
                    link.history.push(order, part);
                    self.credit(at, sent, spent);
                    flowing = output;
                    at += 1;
                }
                Err(error) => {
                    if let Some(text) = error.length_refused() {
                        let (peer, max_length) = (link.session.leg().peer, self.max_length);
                        return Err(ChainError::TooLong { peer, max_length, text });
                    }
                    failures += 1;
                    let history = self.replace(at, error, failures).await?;
                    flowing = self.replay(&history, order, part);
                }
            }
        }
        self.position = u32::try_from(after).unwrap_or(u32::MAX);
        Ok((flowing.last(tokens), timing))
    }

    /// Keeps the deep prompts of the first step, and later their rows in the order of now.
    fn follow_prompts(&mut self, given: Option<Prompts>, order: Option<&[usize]>) {
        if self.position == 0 {
            self.prompts = given.map(|all| (all, (0..self.rows).collect()));
        } else if let (Some((_, rows)), Some(order)) = (&mut self.prompts, order) {
            *rows = order.iter().map(|&row| rows[row]).collect();
        }
    }

    /// All that a server was sent and then `now`, for a new session.
    fn replay(&mut self, history: &History, order: Option<&[usize]>, now: Hidden) -> Hidden {
        let tokens = now.tokens;
        let all = history.replay(order, now);
        self.sent_again += all.tokens - tokens;
        all
    }

    /// The server at `at` has answered.
    fn credit(&self, at: usize, tokens: usize, spent: StepTiming) {
        let Some(leg) = self.links.get(at).map(|link| link.session.leg()) else { return };
        self.swarm.trust(&leg.peer);
        // Servers behind may have computed the step before they were asked: it was pushed.
        if at == 0 && tokens == 1 {
            self.swarm.note_rate(&leg.peer, leg.blocks.len(), spent.total);
        }
    }

    /// The servers behind the one at `at` that have the session, so that outputs can be pushed to
    /// them: each computes a step before this client has brought it there.
    fn next_servers(&self, at: usize) -> Vec<NextServer> {
        let behind = self.links.iter().skip(at + 1);
        let holds_all = |link: &&ChainLink| link.session.position() > 0 && !link.is_stale;
        behind.take_while(holds_all).map(|link| link.session.address()).collect()
    }

    /// Checks a step, and returns its order of rows.
    fn check(&self, step: &ChainStep) -> Result<Option<Vec<usize>>, ChainError> {
        let hidden = &step.hidden;
        let after = u64::from(self.position) + hidden.tokens as u64;
        if after > u64::from(self.max_length) {
            return Err(ChainError::Full {
                position: self.position,
                max_length: self.max_length,
                tokens: hidden.tokens,
            });
        }
        if !hidden.is_whole() || ![0, hidden.rows].contains(&self.rows) {
            return Err(ChainError::BadStep(
                "a step needs the rows of the session, tokens, and bytes that make whole elements",
            ));
        }
        if let Some(prompts) = &step.prompts {
            let fits = prompts.is_whole()
                && (prompts.blocks, prompts.rows)
                    == (self.swarm.num_blocks() as usize, hidden.rows)
                && prompts.tokens <= hidden.tokens;
            if self.position > 0 || !fits {
                return Err(ChainError::BadStep(
                    "deep prompts come with the first step, for all blocks and rows, and are no longer than it",
                ));
            }
        }
        let row = |id: &i64| usize::try_from(*id).ok().filter(|row| *row < hidden.rows);
        let order = step.hypo_ids.as_ref().map(|ids| {
            let order: Option<Vec<usize>> = ids.iter().map(row).collect();
            order.filter(|order| order.len() == hidden.rows)
        });
        order.map_or(Ok(None), |order| {
            let bad = ChainError::BadStep("hypo ids name one row of the step for each");
            order.map(Some).ok_or(bad)
        })
    }

    /// Puts new servers in place of the one at `at`, and returns what the old one was sent.
    async fn replace(
        &mut self,
        at: usize,
        error: SessionError,
        failures: usize,
    ) -> Result<History, ChainError> {
        let failed = self.links.remove(at);
        let leg = failed.session.leg().clone();
        tracing::warn!(peer = %leg.peer, blocks = ?leg.blocks, %error, "server failed, trying another");
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
        Ok(failed.history)
    }

    /// Puts a new session on the same server in place of a stale one, and returns what that was sent.
    async fn open_again(&mut self, at: usize) -> Result<History, ChainError> {
        let (swarm, leg) = (&self.swarm, self.links[at].session.leg().clone());
        let opened = ServerSession::open(swarm.p2p(), swarm.prefix(), leg, self.max_length).await;
        match opened {
            Ok(session) => {
                let rolls_back = self.swarm.rolls_back(&session.leg().peer);
                let link = &mut self.links[at];
                // The place on the server stays.
                (link.session, link.rolls_back, link.is_stale) = (session, rolls_back, false);
                Ok(std::mem::take(&mut link.history))
            }
            Err(error) => self.replace(at, error, 1).await,
        }
    }

    fn link(&self, session: ServerSession, slot: SessionSlot) -> ChainLink {
        let rolls_back = self.swarm.rolls_back(&session.leg().peer);
        let history = History::default();
        ChainLink { session, _slot: slot, history, rolls_back, is_stale: false }
    }

    /// Opens sessions along the best route through `blocks`; servers that cannot be reached are
    /// banned and routed around.
    async fn connect(
        &mut self,
        blocks: std::ops::Range<u32>,
    ) -> Result<Vec<ChainLink>, ChainError> {
        let mut failures = 0;
        loop {
            let mut links = Vec::new();
            let mut failed = None;
            let purpose = RoutePurpose::Session { max_length: self.max_length };
            let legs = self.swarm.route(blocks.clone(), purpose).await?;
            let peers: Vec<PeerId> = legs.iter().map(|leg| leg.peer).collect();
            let patience = if self.links.is_empty() { PATIENCE } else { PATIENCE_OF_OPEN };
            let slots = self.swarm.session_slots(&peers, patience).await?;
            for (leg, slot) in legs.into_iter().zip(slots) {
                match ServerSession::open(
                    self.swarm.p2p(),
                    self.swarm.prefix(),
                    leg.clone(),
                    self.max_length,
                )
                .await
                {
                    Ok(session) => links.push(self.link(session, slot)),
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
                return Err(ChainError::TooManyFailures { failures, peer, source });
            }
            tracing::warn!(%peer, error = %source, "server unreachable, trying another");
            self.swarm.ban(peer);
            pause(failures).await;
        }
    }

    /// Ends the session on every server.
    pub fn close(self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            for link in self.links {
                let peer = link.session.leg().peer;
                if let Err(error) = link.session.close().await {
                    tracing::debug!(%peer, %error, "session did not close cleanly");
                }
            }
        })
    }
}

/// The pause before the next try after `failures` others; none after the first server of a step.
async fn pause(failures: usize) {
    if failures > 0 {
        let doublings = (failures - 1).min(MAX_FAILURES_PER_STEP) as u32;
        tokio::time::sleep((FIRST_PAUSE * (1 << doublings)).min(LONGEST_PAUSE)).await;
    }
}
