//! Open sessions: how many there are, and where to bring what servers before us push to them.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use shared::block::BlockIndex;
use tokio::sync::mpsc;

use super::request::StepMessage;

/// Steps pushed to one session and not taken yet; Python servers read ahead as many.
pub(crate) const PUSHED_AHEAD: usize = 5;

/// All open sessions.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    sessions: Arc<Mutex<OpenSessions>>,
}

#[derive(Debug, Default)]
struct OpenSessions {
    open: usize,
    active: usize,
    by_id: HashMap<String, Addressee>,
}

#[derive(Debug)]
struct Addressee {
    blocks: Vec<BlockIndex>,
    steps: mpsc::Sender<StepMessage>,
}

/// What became of a pushed step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// It is with its session.
    Taken,
    /// No open session has the id: it may have ended, or not have begun.
    Unknown,
    /// The session of that id runs other blocks.
    OtherBlocks,
    /// The session has enough pushed steps before it.
    Full,
}

/// One open session; it ends with this value.
#[derive(Debug)]
pub struct RegisteredSession {
    registry: Registry,
    id: Option<String>,
    pushed: mpsc::Receiver<StepMessage>,
}

impl Registry {
    /// A session over `blocks` opens. Without an id nothing can be pushed to it. `None` if another
    /// open session has the id.
    pub fn register(&self, id: Option<&str>, blocks: &[BlockIndex]) -> Option<RegisteredSession> {
        let (steps, pushed) = mpsc::channel(PUSHED_AHEAD);
        let mut sessions = self.sessions.lock();
        if let Some(id) = id {
            if sessions.by_id.contains_key(id) {
                return None;
            }
            let blocks = blocks.to_vec();
            sessions.by_id.insert(id.to_owned(), Addressee { blocks, steps });
        }
        sessions.open += 1;
        Some(RegisteredSession { registry: self.clone(), id: id.map(str::to_owned), pushed })
    }

    /// Brings a pushed step over `blocks` to its session. One that does not arrive is dropped: the
    /// client sends its own copy.
    pub fn push(&self, id: &str, blocks: &[BlockIndex], step: StepMessage) -> Pushed {
        let sessions = self.sessions.lock();
        let Some(session) = sessions.by_id.get(id) else {
            return Pushed::Unknown;
        };
        if session.blocks != blocks {
            return Pushed::OtherBlocks;
        }
        match session.steps.try_send(step) {
            Ok(()) => Pushed::Taken,
            Err(_) => Pushed::Full,
        }
    }

    /// An RPC is being served; it ends with the value.
    pub fn enter(&self) -> Active {
        self.sessions.lock().active += 1;
        Active(self.clone())
    }

    /// RPCs that are being served.
    pub fn active(&self) -> usize {
        self.sessions.lock().active
    }

    /// Sessions that are open.
    pub fn open(&self) -> usize {
        self.sessions.lock().open
    }
}

/// One RPC that is being served.
#[derive(Debug)]
pub struct Active(Registry);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.sessions.lock().active -= 1;
    }
}

impl RegisteredSession {
    /// The next pushed step; waits for ever if the session cannot be pushed to.
    pub async fn pushed(&mut self) -> StepMessage {
        match self.pushed.recv().await {
            Some(step) => step,
            None => std::future::pending().await,
        }
    }
}

impl Drop for RegisteredSession {
    fn drop(&mut self) {
        let mut sessions = self.registry.sessions.lock();
        sessions.open -= 1;
        if let Some(id) = &self.id {
            sessions.by_id.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swarm::names;
    use swarm::wire::messages::ExpertRequest;
    use swarm::wire::metadata::RequestMetadata;

    const BLOCKS: [BlockIndex; 2] = [BlockIndex(3), BlockIndex(4)];

    fn step(uid: &str) -> StepMessage {
        let request = ExpertRequest { uid: uid.into(), ..ExpertRequest::default() };
        StepMessage::pushed(request, RequestMetadata::parse(b"", names::PUSH).unwrap(), None)
    }

    #[tokio::test]
    async fn pushes_reach_the_session_of_their_id_and_blocks_only() {
        let registry = Registry::default();
        let mut first = registry.register(Some("a"), &BLOCKS).unwrap();
        assert!(registry.register(Some("a"), &BLOCKS).is_none());
        let nameless = registry.register(None, &BLOCKS).unwrap();
        assert_eq!(registry.push("a", &BLOCKS, step("x")), Pushed::Taken);
        assert_eq!(registry.push("b", &BLOCKS, step("y")), Pushed::Unknown);
        assert_eq!(registry.push("a", &BLOCKS[..1], step("y")), Pushed::OtherBlocks);
        assert_eq!(first.pushed().await.request.uid, "x");
        assert_eq!(registry.open(), 2);
        drop((nameless, first));
        assert_eq!(registry.push("a", &BLOCKS, step("z")), Pushed::Unknown);
        assert_eq!(registry.open(), 0);
        assert!(registry.sessions.lock().by_id.is_empty());
    }

    #[tokio::test]
    async fn a_flood_of_pushes_is_bounded() {
        let registry = Registry::default();
        let mut session = registry.register(Some("a"), &BLOCKS).unwrap();
        let results: Vec<_> =
            (0..100).map(|n| registry.push("a", &BLOCKS, step(&n.to_string()))).collect();
        assert!(results[PUSHED_AHEAD..].iter().all(|r| *r == Pushed::Full));
        for n in 0..PUSHED_AHEAD {
            assert_eq!(session.pushed().await.request.uid, n.to_string());
        }
        assert!(session.pushed.try_recv().is_err());
    }
}
