//! Open sessions: how many there are, and where to bring what servers before us push to them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use crate::wire::messages::ExpertRequest;

/// Steps pushed to one session and not taken yet; Python servers read ahead as many.
const PUSHED_AHEAD: usize = 5;

/// All open sessions.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    open: usize,
    active: usize,
    by_id: HashMap<String, mpsc::Sender<ExpertRequest>>,
}

/// One open session; it ends with this value.
#[derive(Debug)]
pub struct Registered {
    registry: Registry,
    id: Option<String>,
    pushed: mpsc::Receiver<ExpertRequest>,
}

impl Registry {
    /// A session opens. Without an id, or under an id that another open session has, nothing can be pushed to it.
    pub fn register(&self, id: Option<&str>) -> Registered {
        let (sender, pushed) = mpsc::channel(PUSHED_AHEAD);
        let mut state = self.lock();
        state.open += 1;
        let id = id
            .filter(|id| !state.by_id.contains_key(*id))
            .map(str::to_owned);
        if let Some(id) = &id {
            state.by_id.insert(id.clone(), sender);
        }
        Registered {
            registry: self.clone(),
            id,
            pushed,
        }
    }

    /// Brings a pushed step to its session. Steps for unknown sessions, and those beyond what a session keeps, are dropped:
    /// the client sends its own copy.
    pub fn push(&self, id: &str, request: ExpertRequest) {
        let sender = self.lock().by_id.get(id).cloned();
        if let Some(sender) = sender {
            let _ = sender.try_send(request);
        }
    }

    /// An RPC is being served; it ends with the value.
    pub fn enter(&self) -> Active {
        self.lock().active += 1;
        Active(self.clone())
    }

    /// RPCs that are being served.
    pub fn active(&self) -> usize {
        self.lock().active
    }

    /// Sessions that are open.
    pub fn open(&self) -> usize {
        self.lock().open
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One RPC that is being served.
#[derive(Debug)]
pub struct Active(Registry);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.lock().active -= 1;
    }
}

impl Registered {
    /// The next pushed step; waits for ever if the session cannot be pushed to.
    pub async fn pushed(&mut self) -> ExpertRequest {
        match self.pushed.recv().await {
            Some(request) => request,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut state = self.registry.lock();
        state.open -= 1;
        if let Some(id) = &self.id {
            state.by_id.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(uid: &str) -> ExpertRequest {
        ExpertRequest {
            uid: uid.into(),
            ..ExpertRequest::default()
        }
    }

    #[tokio::test]
    async fn pushes_reach_the_first_session_of_their_id_only() {
        let registry = Registry::default();
        let mut first = registry.register(Some("a"));
        let second = registry.register(Some("a"));
        registry.push("a", request("x"));
        registry.push("b", request("y"));
        assert_eq!(first.pushed().await.uid, "x");
        assert_eq!(registry.open(), 2);
        drop(second);
        registry.push("a", request("z"));
        assert_eq!(first.pushed().await.uid, "z");
        drop(first);
        assert_eq!(registry.open(), 0);
        assert!(registry.lock().by_id.is_empty());
    }

    #[tokio::test]
    async fn a_flood_of_pushes_is_bounded() {
        let registry = Registry::default();
        let mut session = registry.register(Some("a"));
        (0..100).for_each(|n| registry.push("a", request(&n.to_string())));
        for n in 0..PUSHED_AHEAD {
            assert_eq!(session.pushed().await.uid, n.to_string());
        }
        assert!(session.pushed.try_recv().is_err());
    }
}
