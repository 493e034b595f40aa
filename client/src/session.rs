//! One inference session on one server: a stream of `rpc_inference` (petals
//! `client/inference_session.py`, `_ServerInferenceSession`).

use std::time::{Duration, Instant};

use bytes::Bytes;
use p2p::{CallError, Multiaddr, P2p, PeerId, RpcStream};
use prost::Message;
use swarm::names;
use swarm::wire::messages::{ExpertRequest, ExpertResponse};
use swarm::wire::metadata::{NextServer, StepMetadata};
use swarm::wire::resumption::{NOT_SERVING, Resumable, Secret};
use swarm::wire::step_times::StepTimes;
use swarm::wire::tensor::{TensorError, WireDtype, dummy_tensor, raw_tensor};
use swarm::wire::uid;

use crate::states::{AnswerError, Hidden, Prompts};
use swarm::routing::Leg;

/// Time to open a stream to a server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time to open a stream to a server that was there a moment ago.
const RESUME_TIMEOUT: Duration = Duration::from_secs(1);

/// Time for one step on one server, as in Petals' client.
const STEP_TIMEOUT: Duration = Duration::from_secs(180);

/// How long a client tries to come back to a server whose connection broke, at most.
const MAX_PATIENCE: Duration = Duration::from_secs(5);

/// Pause after the first failed try to come back; grows by half with each.
const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// Longest of these pauses.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Why a step on a server failed.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error(transparent)]
    Call(#[from] CallError),
    /// No answer to a step in time.
    #[error("no answer to a step within {0:?}")]
    Timeout(Duration),
    /// The server closed the stream without an answer.
    #[error("the server closed the session")]
    Closed,
    /// The answer is no message of the protocol.
    #[error("cannot decode the server's answer")]
    Decode(#[from] prost::DecodeError),
    /// The answer holds no states.
    #[error(transparent)]
    Answer(#[from] AnswerError),
    /// The input cannot be sent.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

impl SessionError {
    /// What the server says, if it refuses the length of the session (petals `handler.py`,
    /// `rpc_inference`).
    pub fn length_refused(&self) -> Option<String> {
        match self {
            SessionError::Call(CallError::Remote(text))
                if text.contains("Cannot allocate KV cache for") =>
            {
                Some(text.clone())
            }
            _ => None,
        }
    }
}

/// What a step runs on one server.
#[derive(Clone, Debug)]
pub struct StepInput<'a> {
    /// Hidden states.
    pub hidden: &'a Hidden,
    /// Which row of the cache each row goes on from; `None` for the same.
    pub hypo_ids: Option<&'a [i64]>,
    /// Deep prompts of the server's blocks.
    pub prompts: Option<Prompts>,
    /// Names the step; the same on all servers.
    pub step_id: &'a str,
    /// The servers that the output goes on to.
    pub next_servers: &'a [NextServer],
}

impl<'a> StepInput<'a> {
    /// Hidden states and nothing else.
    pub fn plain(hidden: &'a Hidden, step_id: &'a str) -> StepInput<'a> {
        StepInput { hidden, hypo_ids: None, prompts: None, step_id, next_servers: &[] }
    }
}

/// Where the time of one step on one server went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTiming {
    /// From sending to the last byte of the answer, seen by the client.
    pub total: Duration,
    /// Waiting in the server's ring, if the server tells.
    pub queue: Duration,
    /// Computing, if the server tells.
    pub compute: Duration,
}

impl std::ops::AddAssign for StepTiming {
    fn add_assign(&mut self, other: StepTiming) {
        self.total += other.total;
        self.queue += other.queue;
        self.compute += other.compute;
    }
}

/// A session on one server.
pub struct ServerSession {
    leg: Leg<PeerId>,
    uids: String,
    session_id: String,
    stream: RpcStream,
    max_length: u32,
    position: u32,
    opened: bool,
    p2p: P2p,
    /// Where the server was reached.
    addresses: Vec<Multiaddr>,
    /// With what the session is resumed, if the server keeps it.
    resumable: Option<Resumable>,
    resumed: u32,
}

impl ServerSession {
    /// Opens the stream; the server reserves cache for `max_length` tokens at the first step.
    ///
    /// # Errors
    /// [`SessionError::Call`] when the server cannot be reached.
    pub async fn open(
        p2p: &P2p,
        prefix: &str,
        leg: Leg<PeerId>,
        max_length: u32,
    ) -> Result<ServerSession, SessionError> {
        let stream = p2p.open_stream(leg.peer, names::INFERENCE, CONNECT_TIMEOUT).await?;
        let uids = uid::chain(prefix, leg.blocks.clone());
        let session_id = uuid::Uuid::new_v4().to_string();
        let addresses = p2p.known_addresses(leg.peer).await;
        Ok(ServerSession {
            leg,
            uids,
            session_id,
            stream,
            max_length,
            position: 0,
            opened: false,
            p2p: p2p.clone(),
            addresses,
            resumable: None,
            resumed: 0,
        })
    }

    /// The server and the blocks it runs.
    pub fn leg(&self) -> &Leg<PeerId> {
        &self.leg
    }

    /// Where the server before pushes its outputs.
    pub fn address(&self) -> NextServer {
        NextServer {
            peer_id: self.leg.peer.to_base58(),
            session_id: self.session_id.clone(),
            start: self.leg.blocks.start,
            end: self.leg.blocks.end,
        }
    }

    /// Tokens in the server's cache.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// How often it was resumed after its connection broke.
    pub fn resumed(&self) -> u32 {
        self.resumed
    }

    /// Forgets the tokens from `position` on; the server is told with the next step.
    pub fn roll_back(&mut self, position: u32) {
        self.position = self.position.min(position);
    }

    /// Runs `input` through the server's blocks, starting at the session's position.
    ///
    /// # Errors
    /// [`SessionError`]; the session is of no use afterwards.
    pub async fn step(
        &mut self,
        input: &StepInput<'_>,
    ) -> Result<(Hidden, StepTiming), SessionError> {
        let began = Instant::now();
        let secret = self.resumable.as_ref().map(|kept| kept.secret);
        let request = self.request(input, None)?.encode_to_vec();
        let answer = match (self.ask(request).await, secret) {
            (Err(error), Some(secret)) if is_broken(&error) => {
                tracing::debug!(peer = %self.leg.peer, %error, "connection broke, resuming");
                let request = self.request(input, Some(&secret))?.encode_to_vec();
                self.resume(request, error).await?
            }
            (answer, _) => answer?,
        };
        let total = began.elapsed();
        let response = ExpertResponse::decode(answer)?;
        let output = Hidden::read(response.tensors.first(), input.hidden)?;
        self.opened = true;
        self.resumable = Resumable::decode(&response.metadata).or(self.resumable);
        self.position += u32::try_from(input.hidden.tokens).unwrap_or(u32::MAX);
        let times = StepTimes::decode(&response.metadata);
        let queue = Duration::from_nanos(times.queue_ns);
        let compute = Duration::from_nanos(times.compute_ns);
        Ok((output, StepTiming { total, queue, compute }))
    }

    async fn ask(&mut self, request: Vec<u8>) -> Result<Bytes, SessionError> {
        self.stream.send(request.into()).await?;
        let answer = tokio::time::timeout(STEP_TIMEOUT, self.stream.recv()).await;
        let answer = answer.map_err(|_| SessionError::Timeout(STEP_TIMEOUT))??;
        answer.ok_or(SessionError::Closed)
    }

    /// Comes back to the same server with the step that has no answer, over new connections until
    /// one holds or the patience is over. `error`: how the last connection broke.
    async fn resume(
        &mut self,
        request: Vec<u8>,
        mut error: SessionError,
    ) -> Result<Bytes, SessionError> {
        let grace = self.resumable.map_or(0, |kept| kept.grace_ms);
        let end = Instant::now() + MAX_PATIENCE.min(Duration::from_millis(grace));
        let mut pause = FIRST_PAUSE;
        while Instant::now() < end {
            redial(&self.p2p, self.leg.peer, &self.addresses).await;
            let open = self.p2p.open_stream(self.leg.peer, names::INFERENCE, RESUME_TIMEOUT);
            error = match open.await {
                Ok(stream) => {
                    self.stream = stream;
                    match self.ask(request.clone()).await {
                        Ok(answer) => {
                            self.resumed += 1;
                            tracing::info!(peer = %self.leg.peer, "session resumed");
                            return Ok(answer);
                        }
                        Err(error) if is_broken(&error) => error,
                        Err(error) => return Err(error),
                    }
                }
                Err(error) => error.into(),
            };
            tokio::time::sleep(pause).await;
            pause = (pause * 3 / 2).min(LONGEST_PAUSE);
        }
        Err(error)
    }

    fn request(
        &self,
        input: &StepInput<'_>,
        secret: Option<&Secret>,
    ) -> Result<ExpertRequest, SessionError> {
        let metadata = StepMetadata {
            session_id: &self.session_id,
            step_id: input.step_id,
            open: (!self.opened).then_some((self.max_length, None)),
            next_servers: input.next_servers,
            start_from_position: Some(self.position),
            wants_times: true,
        };
        let metadata = match secret.is_some() || !self.opened {
            true => metadata.encode_resumable(secret),
            false => metadata.encode(),
        };
        let prompts = match &input.prompts {
            Some(prompts) => prompts.message()?,
            None => dummy_tensor(WireDtype::F32),
        };
        let hypo_ids = match input.hypo_ids {
            Some(ids) => {
                let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
                raw_tensor(&[ids.len()], WireDtype::I64, bytes.into())?
            }
            None => dummy_tensor(WireDtype::I64),
        };
        Ok(ExpertRequest {
            uid: self.uids.clone(),
            tensors: vec![input.hidden.message()?, prompts, hypo_ids],
            metadata: metadata.into(),
        })
    }

    /// Ends the session: the server frees its cache.
    ///
    /// # Errors
    /// [`SessionError::Call`] when the connection is gone already.
    pub async fn close(mut self) -> Result<(), SessionError> {
        self.stream.send(ExpertRequest::default().encode_to_vec().into()).await?;
        self.stream.finish().await?;
        while self.stream.recv().await?.is_some() {}
        self.stream.close().await;
        Ok(())
    }
}

/// Whether another connection may help: the server is gone, or starts.
fn is_broken(error: &SessionError) -> bool {
    match error {
        SessionError::Closed => true,
        SessionError::Call(CallError::Remote(text)) => text.contains(NOT_SERVING),
        SessionError::Call(error) => {
            matches!(
                error,
                CallError::Closed | CallError::Unreachable { .. } | CallError::Timeout(_)
            )
        }
        _ => false,
    }
}

/// Connects to a peer at addresses that are known, without a look-up.
async fn redial(p2p: &P2p, peer: PeerId, addresses: &[Multiaddr]) {
    let dial = |addr: &Multiaddr| {
        let full = addr.clone().with_p2p(peer).unwrap_or_else(|addr| addr);
        Box::pin(p2p.connect(full))
    };
    let dials: Vec<_> = addresses.iter().map(dial).collect();
    if !dials.is_empty() {
        // Without a connection, opening the stream tells why.
        let _ = tokio::time::timeout(RESUME_TIMEOUT, futures::future::select_ok(dials)).await;
    }
}
