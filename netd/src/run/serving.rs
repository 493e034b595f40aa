//! From the first worker to the drain: another part of [`Daemon`].

use super::*;

impl Daemon {
    /// Links a worker; true if that made the server ready for clients, also again after a worker of
    /// these blocks was lost for good.
    pub(super) fn worker_up(&mut self, up: WorkerUp, fds: Vec<OwnedFd>) -> Result<bool, Fatal> {
        let mismatch = |what: String| Fatal { reason: ExitReason::ProtocolMismatch, message: what };
        let Ok([rings, submission, completion]) = <[_; control::WORKER_FDS]>::try_from(fds) else {
            return Err(mismatch(format!("worker {} came without its rings", up.worker)));
        };
        let bell = |fd| Doorbell::from_fd(fd).map_err(|error| mismatch(error.to_string()));
        let workers = self.workers_of(&up);
        let is_new = !workers.knows(up.worker);
        if let Err(error) = workers.up(&up, rings, bell(submission)?, bell(completion)?) {
            warn!(worker = %up.worker, %error, "cannot link a worker");
            return Ok(false);
        }
        if !Arc::ptr_eq(&workers, &self.workers) {
            self.coming_up(up);
            return Ok(false);
        }
        self.has_new |= is_new;
        self.ups.retain(|other| other.worker != up.worker);
        self.ups.push(up);
        if !self.workers.cover(self.offer.span) {
            return Ok(false);
        }
        // It is another worker than the one that was announced.
        let is_new = std::mem::take(&mut self.has_new);
        if self.online.borrow().is_some() {
            if is_new && !self.switching {
                let ups = self.present_ups();
                self.announced.renew(&self.offer, &self.joined, &ups);
            }
            return Ok(is_new);
        }
        Ok(self.may_go_online())
    }

    /// The workers of the blocks that are offered now. Others are up, but cut off by a worker that is
    /// gone.
    pub(super) fn present_ups(&self) -> Vec<WorkerUp> {
        let offered = |up: &&WorkerUp| up.span.blocks().any(|b| self.offer.span.contains(b));
        self.ups.iter().filter(offered).cloned().collect()
    }

    pub(super) fn service_parts(&self) -> ServiceParts {
        let pages = self.present_ups().iter().map(|up| up.kv_pages).min().unwrap_or(0);
        let limits = self.offer.limits;
        let holds = self.offer.span.blocks().all(|block| self.whole.contains(block));
        let span = if holds { self.whole } else { self.offer.span };
        let pool = Pool::new(span, pages, limits.attn_cache_tokens);
        let p2p = self.joined.p2p.clone();
        let net_of = NetOf::new(move |peer| p2p.net_of(peer));
        let queue = WaitQueue::new(pool, self.init.config.max_kv_share, net_of);
        let kv = KvMemory::new(queue, self.facts.kv_token_bytes() as u64);
        ServiceParts {
            prefix: self.offer.prefix.clone(),
            facts: self.facts.clone(),
            limits,
            span: self.offer.span,
            workers: self.workers.clone(),
            kv,
            timeouts: Timeouts::from(&self.init.config),
            compression: self.init.config.compression,
            gradient_bytes: self.facts.gradient_bytes(limits.max_batch_size),
            p2p: self.joined.p2p.clone(),
            dht_client_mode: self.joined.using_relay,
            draining: self.draining.subscribe(),
            telemetry: self.telemetry.clone(),
            resumption: self.resumption.clone(),
        }
    }

    pub(super) fn go_online(&mut self) {
        let service = Service::new(self.service_parts());
        self.resumption.restore(&service);
        let left = service.kv.tokens_left();
        self.online.send_replace(Some(Arc::new(service)));
        self.came_from = None;
        self.announced.online(&self.offer, &self.joined, &self.present_ups(), left);
        info!(span = %self.offer.span, prefix = self.offer.prefix, "serving");
        self.measure_network();
    }

    /// Workers are gone for good: `rest` is announced and served from now on. True if clients can
    /// come to it.
    pub(super) async fn shrink(&mut self, rest: Span) -> bool {
        let inside = rest.blocks().all(|block| self.offer.span.contains(block));
        if self.switching || !inside {
            // Said of the blocks that this server has left by now.
            return false;
        }
        if self.is_paused {
            // What follows the pause is told at its end.
            return false;
        }
        warn!(span = %self.offer.span, %rest, "workers lost, serving the remaining blocks");
        let service = self.online.borrow().clone();
        if let Some(service) = &service {
            service.serve(rest);
        }
        self.offer = self.offer.at(rest);
        // The blocks that are lost are taken back before the rest is announced again.
        self.announced.end(Instant::now() + FAREWELL).await;
        match service {
            Some(service) => {
                let left = service.kv.tokens_left();
                self.announced.online(&self.offer, &self.joined, &self.present_ups(), left);
                true
            }
            None if self.workers.cover(rest) => self.may_go_online(),
            None => {
                self.announced = self.offer.announce_joining(&self.joined);
                false
            }
        }
    }

    /// A worker that was gone is up again: `span` is announced and served from now on. True if clients
    /// can come to it.
    pub(super) fn grow(&mut self, span: Span) -> bool {
        let holds = |outer: Span, inner: Span| inner.blocks().all(|block| outer.contains(block));
        if self.switching
            || self.is_paused
            || !holds(self.whole, span)
            || !holds(span, self.offer.span)
        {
            return false;
        }
        info!(from = %self.offer.span, to = %span, "a worker is back, serving more blocks");
        self.offer = self.offer.at(span);
        self.announced.stop();
        let Some(service) = self.online.borrow().clone() else {
            self.announced = self.offer.announce_joining(&self.joined);
            return self.workers.cover(span) && self.may_go_online();
        };
        service.serve(span);
        let left = service.kv.tokens_left();
        self.announced.online(&self.offer, &self.joined, &self.present_ups(), left);
        true
    }

    /// Takes no new sessions while the machine is short of memory.
    pub(super) fn watch_memory(&mut self) {
        if let Some(figures) = self.memory.look() {
            match self.memory.is_short() {
                true => warn!(figures, "short of memory, refusing new sessions"),
                false => info!(figures, "memory is back, taking new sessions"),
            }
        }
        if let Some(service) = self.online.borrow().as_ref() {
            service.kv.close(self.memory.is_short());
            self.resumption.sweep(service.kv.figures().waiting > 0);
        }
    }

    pub(super) fn update_figures(&self) {
        self.telemetry
            .set_announced(self.offer.announced(&self.present_ups(), self.announced.state()));
        if let Some(service) = self.online.borrow().as_ref() {
            self.announced.cache_tokens_left(service.kv.tokens_left());
        }
    }

    /// Announces OFFLINE and lets running steps finish, both at once.
    pub(super) async fn drain(&mut self) {
        info!("draining");
        self.draining.send_replace(true);
        self.end_moves().await;
        self.announced.offline();
        let service = self.online.borrow().clone();
        let sessions = ended(service, DRAIN_LIMIT, LAST_WORDS);
        tokio::join!(sessions, self.announced.end(Instant::now() + FAREWELL));
    }

    /// Leaves place to the next generation of this daemon: clients that can resume their sessions find
    /// them there, others are told to come back.
    pub(super) async fn step_aside(&mut self) {
        let service = self.online.send_replace(None);
        let sessions = service.as_ref().map_or(0, |service| service.open_sessions());
        info!(sessions, "another network daemon takes over, connections end");
        self.resumption.hand_over();
        self.end_left();
        self.draining.send_replace(true);
        ended(service, REPLACE_LIMIT, REPLACE_WORDS).await;
    }
}

/// Waits until the RPCs of `service` have ended, not longer than `limit`. Sessions were ended with a text:
/// their callers have the time of `words` to read it.
async fn ended(service: Option<Arc<Service>>, limit: Duration, words: Duration) {
    let Some(service) = service.filter(|service| service.active() > 0) else { return };
    let deadline = Instant::now() + limit;
    let mut look = tokio::time::interval(Duration::from_millis(10));
    while service.active() > 0 && Instant::now() < deadline {
        look.tick().await;
    }
    tokio::time::sleep(words).await;
}
