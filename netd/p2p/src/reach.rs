//! Calls to peers that are not connected: dial known addresses, else look the peer up by its id and
//! dial what was found.
//!
//! ```text
//!   open --> connected? ---------------------------------------> stream
//!              | no                                                ^
//!              v                                                   |
//!            Dialing --- fails or no address ---> LookingUp ---> DialingFound --- fails ---> Unreachable
//!              |                                     |             |
//!              +------------- connected -------------+-------------+-----> streams of all waiting calls
//! ```
//!
//! A lookup asks the peers nearest to the id over `/ipfs/kad/1.0.0`. It contacts the target itself
//! on its way, so it usually ends with a connection and not with an address.

use std::collections::HashMap;

use libp2p::{
    Multiaddr, PeerId, Swarm, kad,
    swarm::{
        DialError,
        dial_opts::{DialOpts, PeerCondition},
    },
};
use tracing::debug;

use super::{
    behaviour::NodeBehaviour,
    error::{CallError, brief},
    limits::MAX_WAITING_CALLS,
    rpc_streams::OpenStream,
};

/// All calls that wait for a connection.
#[derive(Debug, Default)]
pub(super) struct Reach {
    attempts: HashMap<PeerId, Attempt>,
    lookups: HashMap<kad::QueryId, PeerId>,
}

#[derive(Debug)]
struct Attempt {
    stage: Stage,
    calls: Vec<OpenStream>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Dialing,
    LookingUp,
    DialingFound,
}

/// What became of an attempt to dial.
enum Dial {
    UnderWay,
    Impossible(String),
}

impl Reach {
    /// Opens a stream now, or as soon as the peer is connected.
    pub(super) fn open(&mut self, swarm: &mut Swarm<NodeBehaviour>, call: OpenStream) {
        let peer = call.peer;
        if swarm.is_connected(&peer) {
            return swarm.behaviour_mut().rpc.open(call);
        }
        if self.waiting() >= MAX_WAITING_CALLS {
            return refuse(call, "too many calls wait for a connection");
        }
        if let Some(attempt) = self.attempts.get_mut(&peer) {
            return attempt.calls.push(call);
        }
        self.attempts.insert(peer, Attempt { stage: Stage::Dialing, calls: vec![call] });
        if let Dial::Impossible(reason) = dial(swarm, peer, Vec::new()) {
            self.dial_failed(swarm, peer, &reason);
        }
    }

    /// A connection was made: all calls to the peer go on.
    pub(super) fn connected(&mut self, swarm: &mut Swarm<NodeBehaviour>, peer: PeerId) {
        if let Some(attempt) = self.attempts.remove(&peer) {
            for call in attempt.calls {
                swarm.behaviour_mut().rpc.open(call);
            }
        }
    }

    /// A dial of the peer failed, be it ours or that of a lookup.
    pub(super) fn dial_failed(
        &mut self,
        swarm: &mut Swarm<NodeBehaviour>,
        peer: PeerId,
        reason: &str,
    ) {
        if swarm.is_connected(&peer) {
            return self.connected(swarm, peer);
        }
        let Some(attempt) = self.attempts.get_mut(&peer) else {
            return;
        };
        match attempt.stage {
            Stage::Dialing => {
                debug!(%peer, reason, "looking up the addresses of a peer");
                attempt.stage = Stage::LookingUp;
                let id = swarm.behaviour_mut().kad.look_up(peer);
                self.lookups.insert(id, peer);
            }
            // The lookup may know further addresses.
            Stage::LookingUp => {}
            Stage::DialingFound => self.fail(peer, reason),
        }
    }

    /// A lookup has ended with these peers.
    pub(super) fn looked_up(
        &mut self,
        swarm: &mut Swarm<NodeBehaviour>,
        id: kad::QueryId,
        found: Vec<kad::PeerInfo>,
    ) {
        let Some(peer) = self.lookups.remove(&id) else {
            return;
        };
        if swarm.is_connected(&peer) {
            return self.connected(swarm, peer);
        }
        let Some(attempt) = self.attempts.get_mut(&peer) else {
            return;
        };
        attempt.stage = Stage::DialingFound;
        let addrs = found.into_iter().find(|info| info.peer_id == peer);
        let addrs = addrs.map(|info| info.addrs).unwrap_or_default();
        if let Dial::Impossible(reason) = dial(swarm, peer, addrs) {
            self.fail(peer, &format!("not found among its neighbours, {reason}"));
        }
    }

    fn fail(&mut self, peer: PeerId, reason: &str) {
        for call in self.attempts.remove(&peer).into_iter().flat_map(|attempt| attempt.calls) {
            refuse(call, reason);
        }
    }

    /// Calls that still wait; forgets those whose caller has given up.
    fn waiting(&mut self) -> usize {
        let mut waiting = 0;
        for attempt in self.attempts.values_mut() {
            attempt.calls.retain(|call| !call.reply.is_closed());
            waiting += attempt.calls.len();
        }
        waiting
    }
}

/// Dials these addresses of a peer and all others that are known, from a new port: see `peer_routing`.
fn dial(swarm: &mut Swarm<NodeBehaviour>, peer: PeerId, addrs: Vec<Multiaddr>) -> Dial {
    let dial = DialOpts::peer_id(peer)
        .addresses(addrs)
        .extend_addresses_through_behaviour()
        .condition(PeerCondition::DisconnectedAndNotDialing)
        .allocate_new_port()
        .build();
    match swarm.dial(dial) {
        // Somebody else's dial of the peer is under way; its end is told all the same.
        Ok(()) | Err(DialError::DialPeerConditionFalse(_)) => Dial::UnderWay,
        Err(error) => Dial::Impossible(brief(&error)),
    }
}

fn refuse(call: OpenStream, reason: &str) {
    let error = CallError::Unreachable { peer: call.peer, reason: reason.to_owned() };
    drop(call.reply.send(Err(error)));
}
