//! A peer of the swarm that can say anything: requests made by hand over the real protocol.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use p2p::{CallError, Multiaddr, P2p, P2pConfig, P2pError, PeerId, RpcStream, Traversal};
use prost::Message;
use swarm::names;
use swarm::wire::messages::{ExpertRequest, ExpertResponse, Tensor};
use swarm::wire::metadata::{StepMetadata, encode_batch_metadata};
use swarm::wire::tensor::{ShapeLimits, WireDtype, WireTensor, dummy_tensor, raw_tensor};
use swarm::wire::uid;

use super::DEADLINE;

/// Tokens of the prompt of [`Peer::run_fed_back`].
pub const PROMPT: usize = 21;

/// A client-mode node that is connected to one server.
pub struct Peer {
    pub p2p: P2p,
    pub server: PeerId,
    prefix: String,
    /// The LoRA adapter that requests choose.
    adapter: Option<String>,
    sessions: AtomicU64,
}

/// One `rpc_inference` stream.
pub struct Session {
    stream: RpcStream,
    uids: String,
    id: String,
    adapter: Option<String>,
    max_length: u32,
    step: u64,
}

impl Peer {
    pub async fn connect(addr: &str, prefix: &str) -> Peer {
        Peer::try_connect(addr, prefix).await.expect("connect to the server")
    }

    /// The same with a server that may be away.
    pub async fn try_connect(addr: &str, prefix: &str) -> Result<Peer, P2pError> {
        let addr: Multiaddr = addr.parse().expect("multiaddr");
        let config = P2pConfig::of_caller(vec![addr.clone()], DEADLINE);
        let config = P2pConfig { traversal: Traversal::CLIENT, ..config };
        let (p2p, _inbound) = P2p::start(config).await?;
        let server = p2p.connect(addr).await?;
        let sessions = AtomicU64::new(0);
        Ok(Peer { p2p, server, prefix: prefix.to_owned(), adapter: None, sessions })
    }

    /// The same, with requests that choose an adapter.
    pub fn with_adapter(self, adapter: Option<&str>) -> Peer {
        Peer { adapter: adapter.map(str::to_owned), ..self }
    }

    /// Opens a session over `blocks`.
    pub async fn session(&self, blocks: Range<u32>, max_length: u32) -> Session {
        self.try_session(blocks, max_length).await.expect("open a session")
    }

    /// The same with a server that may be away.
    pub async fn try_session(
        &self,
        blocks: Range<u32>,
        max_length: u32,
    ) -> Result<Session, CallError> {
        let stream = self.p2p.open_stream(self.server, names::INFERENCE, DEADLINE).await?;
        let number = self.sessions.fetch_add(1, Ordering::Relaxed);
        let id = format!("{}-{number}", self.p2p.peer_id());
        let (uids, adapter) = (uid::chain(&self.prefix, blocks), self.adapter.clone());
        Ok(Session { stream, uids, id, adapter, max_length, step: 0 })
    }

    /// A session that feeds its outputs back, so that one wrong bit anywhere changes everything after
    /// it: a prompt of 21 tokens of `width` values, then decode steps of two rows, every third of which
    /// swaps or shares rows as beam search does. Before each step, `between` may do harm.
    pub async fn run_fed_back(
        &self,
        blocks: Range<u32>,
        (width, seed): (usize, u32),
        steps: usize,
        mut between: impl FnMut(usize),
    ) -> Vec<Vec<f32>> {
        let mut session = self.session(blocks, (PROMPT + steps) as u32).await;
        let prompt = noise(&[2, PROMPT, width], seed);
        let mut outputs = vec![session.step(prompt, None).await.expect("prefill")];
        for step in 0..steps {
            between(step);
            let (hidden, order) = fed_back(outputs.last().unwrap(), width, step);
            let none = dummy_tensor(WireDtype::F32);
            let output = session.step_with(hidden, None, none, order).await;
            outputs.push(output.expect("a decode step"));
        }
        session.close().await;
        outputs
    }

    /// A forward request over `blocks`.
    pub async fn forward(&self, blocks: Range<u32>, hidden: Tensor) -> Result<Vec<f32>, CallError> {
        let request = ExpertRequest {
            uid: uid::chain(&self.prefix, blocks),
            tensors: vec![hidden, dummy_tensor(WireDtype::F32)],
            metadata: encode_batch_metadata(self.adapter.as_deref(), 2).into(),
        };
        let bytes = request.encode_to_vec().into();
        let answer = self.p2p.call_unary(self.server, names::FORWARD, bytes, DEADLINE).await?;
        Ok(values(&ExpertResponse::decode(answer).expect("an answer")))
    }
}

impl Session {
    /// One step with `hidden` `[batch, tokens, hidden]`, continuing at `position` or where the
    /// session is.
    pub async fn step(
        &mut self,
        hidden: Tensor,
        position: Option<u32>,
    ) -> Result<Vec<f32>, CallError> {
        self.step_with(hidden, position, dummy_tensor(WireDtype::F32), dummy_tensor(WireDtype::I64))
            .await
    }

    /// One step with prompts and hypo ids.
    pub async fn step_with(
        &mut self,
        hidden: Tensor,
        position: Option<u32>,
        prompts: Tensor,
        hypo_ids: Tensor,
    ) -> Result<Vec<f32>, CallError> {
        let step_id = format!("{}-{}", self.id, self.step);
        let metadata = StepMetadata {
            session_id: &self.id,
            step_id: &step_id,
            open: (self.step == 0).then_some((self.max_length, self.adapter.as_deref())),
            next_servers: &[],
            start_from_position: position,
            wants_times: false,
        };
        self.step += 1;
        let request = ExpertRequest {
            uid: self.uids.clone(),
            tensors: vec![hidden, prompts, hypo_ids],
            metadata: metadata.encode().into(),
        };
        self.raw(request.encode_to_vec()).await
    }

    /// Sends one frame as it is.
    pub async fn raw(&mut self, frame: Vec<u8>) -> Result<Vec<f32>, CallError> {
        self.stream.send(frame.into()).await?;
        self.answer().await
    }

    /// Waits for the next answer, or for what the server says instead.
    pub async fn answer(&mut self) -> Result<Vec<f32>, CallError> {
        let answer =
            tokio::time::timeout(DEADLINE, self.stream.recv()).await.expect("an answer in time")?;
        let answer = answer.ok_or(CallError::Closed)?;
        Ok(values(&ExpertResponse::decode(answer).expect("an answer")))
    }

    /// Ends the session as a client does and waits until the server has closed it.
    pub async fn close(self) {
        assert_eq!(self.try_close().await, Ok(None));
    }

    /// The same; what the server says at the end, which is nothing.
    pub async fn try_close(mut self) -> Result<Option<prost::bytes::Bytes>, CallError> {
        self.stream.send(ExpertRequest::default().encode_to_vec().into()).await?;
        self.stream.finish().await?;
        let end = tokio::time::timeout(DEADLINE, self.stream.recv());
        end.await.expect("the server closes")
    }
}

/// A float32 tensor of the shape, of numbers that depend on `seed`.
pub fn noise(shape: &[usize], seed: u32) -> Tensor {
    let count: usize = shape.iter().product();
    let bytes: Vec<u8> = (0..count)
        .flat_map(|i| ((i as f32 * 0.37 + seed as f32 * 1.7).sin()).to_le_bytes())
        .collect();
    raw_tensor(shape, WireDtype::F32, bytes.into()).expect("a tensor")
}

/// The step after one of `[2, tokens, width]` that came back, so that one wrong bit anywhere
/// changes everything after it: a token per row, and hypo ids, which swap or share rows two times
/// of three.
pub fn fed_back(output: &[f32], width: usize, step: usize) -> (Tensor, Tensor) {
    let rows = output.chunks(output.len() / 2);
    let last = rows.flat_map(|row| &row[row.len() - width..]);
    let bytes: Vec<u8> = last.flat_map(|v| v.sin().to_le_bytes()).collect();
    let hidden = raw_tensor(&[2, 1, width], WireDtype::F32, bytes.into()).expect("a tensor");
    let order = match step % 3 {
        0 => ids(&[1, 1]),
        1 => ids(&[1, 0]),
        _ => dummy_tensor(WireDtype::I64),
    };
    (hidden, order)
}

/// An int64 tensor of one dimension.
pub fn ids(values: &[i64]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    raw_tensor(&[values.len()], WireDtype::I64, bytes.into()).expect("a tensor")
}

fn values(response: &ExpertResponse) -> Vec<f32> {
    let limits = ShapeLimits { max_rank: 3, max_elements: 1 << 24 };
    let tensor = response.tensors.first().expect("one tensor");
    WireTensor::parse(tensor, limits).expect("a tensor").to_f32_vec().expect("finite floats")
}
