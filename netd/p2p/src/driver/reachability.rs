//! Whether peers can dial this node, and what it does so that they can: the router, relays, or
//! relaying itself. Another part of [`Driver`].

use super::*;

impl NodeDriver {
    pub(super) fn set_reachable(&mut self, reachable: bool) {
        self.swarm.behaviour_mut().kad.set_server(reachable);
        if reachable && !self.announces {
            let public: Vec<Multiaddr> = self
                .swarm
                .listeners()
                .filter(|addr| !is_relayed(addr) && is_public(addr))
                .cloned()
                .collect();
            for addr in public {
                self.swarm.add_external_address(addr);
            }
            self.offer_to_relay();
        }
        self.found_reachable(reachable);
    }

    /// Peers can dial this node, or they cannot: then relays are wanted.
    pub(super) fn found_reachable(&mut self, reachable: bool) {
        self.reachable.send_replace(Some(reachable));
        self.want_relays(!reachable);
    }

    pub(super) fn want_relays(&mut self, wanted: bool) {
        self.relays.want(wanted && self.traversal.auto_relay);
        self.reserve();
    }

    /// Asks relays for reservations until there are enough.
    pub(super) fn reserve(&mut self) {
        let now = Instant::now();
        while let Some((relay, addr)) = self.relays.next(now) {
            let circuit = addr.with(Protocol::P2p(relay)).with(Protocol::P2pCircuit);
            match self.swarm.listen_on(circuit) {
                Ok(listener) => {
                    debug!(%relay, "requesting a relay reservation");
                    self.relays.reserving(listener, relay);
                }
                Err(error) => {
                    debug!(%relay, %error, "cannot request a relay reservation");
                    self.relays.failed(&relay, now);
                }
            }
        }
    }

    pub(super) fn tell_relayed(&mut self) {
        let addrs = self.relays.addrs();
        self.relayed.send_if_modified(|told| {
            let changed = *told != addrs;
            *told = addrs;
            changed
        });
    }

    /// Relays for others while they can dial this node itself. libp2p would count addresses through
    /// relays as well.
    pub(super) fn offer_to_relay(&mut self) {
        let dialable = self.swarm.external_addresses().any(|addr| !is_relayed(addr));
        if !self.traversal.relay_service || self.relaying == dialable {
            return;
        }
        self.relaying = dialable;
        info!(relaying = dialable, "relay service changed");
        let status = if dialable { relay::Status::Enable } else { relay::Status::Disable };
        if let Some(service) = self.swarm.behaviour_mut().relay_service.as_mut() {
            service.set_status(Some(status));
        }
        // Who has identified this node a moment ago does not know yet.
        self.push_addresses();
    }

    /// Tells every peer our addresses anew.
    pub(super) fn push_addresses(&mut self) {
        let peers: Vec<PeerId> = self.swarm.connected_peers().copied().collect();
        self.swarm.behaviour_mut().identify.push(peers);
    }

    /// Somebody far away has reached a public address of this machine itself: others can, too.
    pub(super) fn note_reached(&mut self, endpoint: &ConnectedPoint) {
        if let ConnectedPoint::Listener { local_addr, send_back_addr } = endpoint
            && !self.announces
            && !endpoint.is_relayed()
            && is_public(local_addr)
            && is_public(send_back_addr)
            && self.swarm.listeners().any(|addr| addr == local_addr)
        {
            self.swarm.add_external_address(local_addr.clone());
            self.offer_to_relay();
        }
    }

    /// The router of this net was asked to forward our port. Its addresses are told by the swarm as
    /// external ones.
    pub(super) fn on_router(&mut self, event: upnp::Event) {
        let forwards = match event {
            upnp::Event::NewExternalAddr { external_addr, .. } => {
                info!(address = %external_addr, "router forwards a port to this node");
                true
            }
            upnp::Event::ExpiredExternalAddr { external_addr, .. } => {
                warn!(address = %external_addr, "router stopped forwarding a port to this node");
                false
            }
            upnp::Event::GatewayNotFound => {
                debug!("no router offers UPnP port forwarding");
                false
            }
            upnp::Event::NonRoutableGateway => {
                info!("router forwards ports but is behind another NAT itself");
                false
            }
        };
        self.forwarded.send_replace(Some(forwards));
    }
}
