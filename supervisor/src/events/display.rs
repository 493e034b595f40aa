//! What the operator sees of the run: the log, or the screen of a terminal in its place.

use shared::block::Span;
use shared::config::LogFormat;
use shared::control::{FromPrepare, Rating};
use shared::ids::Generation;
use shared::model::RankShare;
use shared::shm::board::ChildState;
use tracing::{error, info, warn};

use super::TreeDriver;
use crate::feed::{Event, ProcessState};
use crate::placement;
use crate::terminal::{Happened, Screen, Summary};
use crate::tree::{ChildId, Lifecycle};

impl TreeDriver<'_> {
    /// The screen, if this run is shown to a person.
    pub(super) fn screen_for(format: LogFormat, model: &str) -> Option<Screen> {
        (format == LogFormat::Terminal).then(|| Screen::new(model))
    }

    /// Follows what prepare does.
    pub(super) fn heard_prepare(&mut self, message: &FromPrepare) {
        if let (FromPrepare::Progress(progress), Some(feed)) = (message, &mut *self.feed) {
            feed.tell(&Event::from(*progress));
        }
        let Some(screen) = &mut self.screen else { return };
        match message {
            FromPrepare::Progress(progress) => screen.progress(progress),
            FromPrepare::Prepared => screen.stage("starting workers".to_owned()),
            _ => {}
        }
    }

    /// Shows a child's new state on the board and tells of it.
    pub(super) fn show(
        &mut self,
        id: ChildId,
        generation: Generation,
        state: Lifecycle,
        why: &str,
    ) {
        if let Err(error) = self.segments.board.set_state(self.slot_of(id), board_state(state)) {
            warn!(child = %id, %error, "cannot write a state to the board");
        }
        if let (Some(feed), Some(state)) = (&mut *self.feed, process_state(state)) {
            let (name, generation, why) = (id.to_string(), generation.0, why.to_owned());
            feed.tell(&Event::Process { name, generation, state, why });
        }
        if let Some(screen) = &mut self.screen {
            if let Some(happened) = happened(state, why) {
                screen.child(&id.to_string(), happened);
            }
            return;
        }
        let why = (!why.is_empty()).then_some(tracing::field::display(why));
        if matches!(
            state,
            Lifecycle::Reaped
                | Lifecycle::Backoff { .. }
                | Lifecycle::Held { .. }
                | Lifecycle::Unkillable
        ) {
            warn!(child = %id, generation = generation.0, why, "{}", state.name());
        } else {
            let of_child = |child: &&crate::child_process::ChildProcess| child.id == id;
            let pid = self.processes.iter().find(of_child).map(|child| child.process.pid());
            info!(child = %id, generation = generation.0, pid, why, "{}", state.name());
        }
    }

    /// A child is about to be killed by the supervisor.
    pub(super) fn note_kill(&self, id: ChildId, generation: Generation, why: &str) {
        match &self.screen {
            Some(screen) => screen.line(&format!("killing {id}: {why}")),
            None => warn!(child = %id, generation = generation.0, why, "killing"),
        }
    }

    /// Something the operator must act on. Until clients were told of this server it waits for the
    /// end of the run, whose last line it is.
    pub(super) fn complain(&mut self, text: String) {
        if self.span.is_some() {
            error!("{text}");
            if let Some(feed) = &mut *self.feed {
                feed.tell(&Event::Complaint { text: text.clone() });
            }
        }
        self.complaint = Some(text);
    }

    /// Clients can come.
    pub(super) fn announce(&mut self, span: Span, peer_id: &str, addrs: &[String]) {
        info!(state = %"ONLINE", %span, peer_id = %peer_id, addrs = %addrs.join(" "), "online");
        if let Some(feed) = &mut *self.feed {
            let (peer_id, addrs) = (peer_id.to_owned(), addrs.to_vec());
            feed.tell(&Event::Online { span, peer_id, addrs });
        }
        let summary = self.summary(span, peer_id, addrs);
        if let Some(screen) = &mut self.screen {
            screen.online(&summary);
        }
    }

    /// What a person wants to know once clients can come.
    fn summary(&self, span: Span, peer_id: &str, addrs: &[String]) -> Summary {
        let model = &self.config.prepare.model;
        let blocks = self.facts.as_ref().map_or(0, |facts| facts.num_blocks);
        let title = format!("Serving blocks {span} of the {blocks} of {model}");
        let mut lines = vec![("PeerID", peer_id.to_owned()), ("devices", self.device_names())];
        if let Some(facts) = &self.facts {
            lines.push(("memory", self.memory_text(span, facts)));
        }
        let Some(addr) = addrs.first() else {
            return Summary { title, lines };
        };
        let prefix = self.config.netd.dht_prefix.as_deref();
        let flag = prefix.map(|prefix| format!(" --dht_prefix {prefix}")).unwrap_or_default();
        let argument = prefix.map(|prefix| format!(", dht_prefix={prefix:?}")).unwrap_or_default();
        let join = format!("sepal serve MODEL{flag} --initial_peers {addr}");
        let generate =
            format!("sepal generate {model}{flag} --initial_peers {addr} --prompt 'Hello'");
        let petals = format!(
            "AutoDistributedModelForCausalLM.from_pretrained({model:?}, \
             initial_peers=[{addr:?}]{argument})"
        );
        lines.extend([
            ("address", addr.clone()),
            ("join", join),
            ("generate", generate),
            ("Petals", petals),
            ("status", format!("sepal status --instance {}", self.instance.name())),
        ]);
        lines.extend(self.config.web.map(|addr| ("page", format!("http://{addr}/"))));
        lines.extend([("stop", "Ctrl-C: sessions finish their running steps".to_owned())]);
        Summary { title, lines }
    }

    fn device_names(&self) -> String {
        let shares = self.tree.shares().iter();
        shares.map(|share| placement::names(&share.devices)).collect::<Vec<_>>().join(", ")
    }

    fn memory_text(&self, span: Span, facts: &shared::model::ModelFacts) -> String {
        let limits = self.config.netd.limits(facts);
        let weights = facts.block_bytes.saturating_mul(span.block_count() as u64);
        let cache = match self.tree.ranks().iter().find(|ranks| !ranks.is_empty()) {
            Some(ranks) => {
                let bytes = |rank: &RankShare| {
                    facts.of_rank(rank).kv_segment_bytes(span, limits.kv_pages()) as u64
                };
                ranks.iter().map(bytes).sum()
            }
            None => facts.kv_segment_bytes(span, limits.kv_pages()) as u64,
        };
        format!(
            "{} of weights ({}), {} for the KV cache ({} tokens per block)",
            indicatif::HumanBytes(weights),
            facts.quant_type,
            indicatif::HumanBytes(cache),
            limits.attn_cache_tokens,
        )
    }

    /// What a dry run was for.
    pub(super) fn tell_rating(&mut self, rating: &Rating) {
        let Rating { capacity, network, network_rps, throughput, blocks } = rating;
        if let Some(screen) = &mut self.screen {
            screen.clear();
            screen.line(&format!(
                "one-token steps through a block: {:.1} per second\n\
                 tokens through a block in long batches: {:.1} per second\n\
                 network: {:.1} Mbit/s ({}), which carries {:.1} tokens per second\n\
                 throughput to announce for {blocks} blocks: {:.1}",
                capacity.inference_rps,
                capacity.forward_rps,
                network.mbps(),
                network.source,
                network_rps,
                throughput,
            ));
            return;
        }
        info!(
            inference_rps = rounded(capacity.inference_rps),
            forward_rps = rounded(capacity.forward_rps),
            network_rps = rounded(*network_rps),
            network_mbps = rounded(network.mbps()),
            network = %network.source,
            throughput = rounded(*throughput),
            blocks,
            "measured; ending the dry run"
        );
    }
}

/// To one digit behind the point: no measurement knows more.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn board_state(state: Lifecycle) -> ChildState {
    match state {
        Lifecycle::Waiting => ChildState::Unset,
        Lifecycle::Starting { .. } => ChildState::Starting,
        Lifecycle::Ready { .. } => ChildState::Ready,
        Lifecycle::Draining { .. } => ChildState::Draining,
        Lifecycle::Reaped | Lifecycle::Backoff { .. } => ChildState::Backoff,
        Lifecycle::Held { .. } | Lifecycle::Unkillable => ChildState::Held,
        Lifecycle::Gone => ChildState::Gone,
    }
}

fn process_state(state: Lifecycle) -> Option<ProcessState> {
    match state {
        Lifecycle::Waiting | Lifecycle::Reaped => None,
        Lifecycle::Starting { .. } => Some(ProcessState::Starting),
        Lifecycle::Ready { .. } => Some(ProcessState::Ready),
        Lifecycle::Draining { .. } => Some(ProcessState::Draining),
        Lifecycle::Backoff { .. } => Some(ProcessState::Restarting),
        Lifecycle::Held { .. } | Lifecycle::Unkillable => Some(ProcessState::Lost),
        Lifecycle::Gone => Some(ProcessState::Ended),
    }
}

fn happened(state: Lifecycle, why: &str) -> Option<Happened<'_>> {
    match state {
        // What follows is shown when its whole group is reaped.
        Lifecycle::Waiting | Lifecycle::Reaped | Lifecycle::Gone => None,
        Lifecycle::Starting { .. } => Some(Happened::Started),
        Lifecycle::Ready { .. } => Some(Happened::Ready),
        Lifecycle::Draining { .. } => Some(Happened::Draining),
        Lifecycle::Backoff { .. } => Some(Happened::Died(why)),
        Lifecycle::Held { .. } | Lifecycle::Unkillable => Some(Happened::Lost(why)),
    }
}
