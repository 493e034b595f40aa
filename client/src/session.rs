//! One inference session on one server: a stream of `rpc_inference` (petals
//! `client/inference_session.py`, `_ServerInferenceSession`).

use std::time::{Duration, Instant};

use hivemind::names;
use hivemind::p2p::{CallError, P2p, PeerId, RpcStream};
use hivemind::wire::messages::{ExpertRequest, ExpertResponse};
use hivemind::wire::metadata::StepMetadata;
use hivemind::wire::step_times::StepTimes;
use hivemind::wire::tensor::{TensorError, WireDtype, dummy_tensor, raw_tensor};
use hivemind::wire::uid;
use prost::Message;

use crate::routing::Leg;
use crate::states::{AnswerError, Hidden, Prompts};

/// Time to open a stream to a server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time for one step on one server, as in Petals' client.
const STEP_TIMEOUT: Duration = Duration::from_secs(180);

/// Why a step on a server failed.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The call failed.
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
}

impl<'a> StepInput<'a> {
    /// Hidden states and nothing else.
    pub fn plain(hidden: &'a Hidden, step_id: &'a str) -> StepInput<'a> {
        StepInput { hidden, hypo_ids: None, prompts: None, step_id }
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
        Ok(ServerSession { leg, uids, session_id, stream, max_length, position: 0, opened: false })
    }

    /// The server and the blocks it runs.
    pub fn leg(&self) -> &Leg<PeerId> {
        &self.leg
    }

    /// Tokens in the server's cache.
    pub fn position(&self) -> u32 {
        self.position
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
        let request = self.request(input)?;
        let began = Instant::now();
        self.stream.send(request.encode_to_vec().into()).await?;
        let answer = tokio::time::timeout(STEP_TIMEOUT, self.stream.recv())
            .await
            .map_err(|_| SessionError::Timeout(STEP_TIMEOUT))??
            .ok_or(SessionError::Closed)?;
        let total = began.elapsed();
        let response = ExpertResponse::decode(answer)?;
        let output = Hidden::read(response.tensors.first(), input.hidden)?;
        self.opened = true;
        self.position += u32::try_from(input.hidden.tokens).unwrap_or(u32::MAX);
        let times = StepTimes::decode(&response.metadata);
        let queue = Duration::from_nanos(times.queue_ns);
        let compute = Duration::from_nanos(times.compute_ns);
        Ok((output, StepTiming { total, queue, compute }))
    }

    fn request(&self, input: &StepInput<'_>) -> Result<ExpertRequest, SessionError> {
        let metadata = StepMetadata {
            session_id: &self.session_id,
            step_id: input.step_id,
            open: (!self.opened).then_some((self.max_length, None)),
            next_servers: &[],
            start_from_position: Some(self.position),
            wants_times: true,
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
            metadata: metadata.encode().into(),
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
