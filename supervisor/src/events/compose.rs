//! Composes the messages to children: adds to what the tree wants told the names and descriptors of shared memory, which
//! are made here when first needed.

use std::os::fd::AsFd;
use std::path::PathBuf;

use shared::block::Span;
use shared::config::Throughput;
use shared::control::{
    Capacity, FdTag, LinkInit, NetdInit, ToNetd, ToPrepare, ToWorker, WorkerInit, WorkerUp,
};
use shared::exit::ExitReason;
use shared::ids::Generation;
use shared::model::ModelFacts;
use shared::shm::pair::RingIdentity;
use shared::shm::segment::SegmentError;
use tracing::warn;

use super::{Driver, chain, rings_of};
use crate::channel::Message;
use crate::instance::Instance;
use crate::plan::Placement;
use crate::running::slot_of;
use crate::segments::{KvChoice, MakeError};
use crate::tree::{ChildId, Down, End, Event, Init};

impl Driver<'_> {
    /// Adds names and descriptors to what the tree wants told.
    pub(super) fn tell(&mut self, id: ChildId, down: Down) {
        let Some(index) = self.running.iter().position(|running| running.id == id) else {
            return;
        };
        match self.compose(index, down) {
            Ok(true) => {}
            Ok(false) => self.unruly(index, "does not read what it is told"),
            Err(error) => {
                let end = End::NotStarted {
                    reason: make_reason(&error),
                    message: chain(&error),
                };
                if let Some(running) = self.running.get_mut(index) {
                    running.fault = Some(end);
                }
                self.unruly(index, "cannot be given its shared memory");
            }
        }
    }

    fn unruly(&mut self, index: usize, what: &'static str) {
        if let Some(running) = self.running.get(index) {
            self.pending
                .push_back(Event::Unruly(running.id, running.generation, what));
        }
    }

    fn compose(&mut self, index: usize, down: Down) -> Result<bool, MakeError> {
        let Some(running) = self.running.get_mut(index) else {
            return Ok(true);
        };
        Ok(match down {
            Down::Drain => running.tell(match running.id {
                ChildId::Prepare => Message::Prepare(ToPrepare::Drain),
                ChildId::Netd => Message::Netd(ToNetd::Drain),
                ChildId::Worker(_) => Message::Worker(ToWorker::Drain),
            }),
            Down::Span(span) => {
                let manifest = manifest_of(self.instance, span);
                running.tell(Message::Prepare(ToPrepare::Span { span, manifest }))
            }
            Down::Shrink(rest) => running.tell(Message::Netd(ToNetd::Shrink(rest))),
            Down::MakeRoom(to) => running.tell(Message::Netd(ToNetd::MakeRoom(to))),
            Down::MoveFailed { to, why } => {
                running.tell(Message::Netd(ToNetd::MoveFailed { to, why }))
            }
            Down::Fits(blocks) => {
                warn!(
                    blocks,
                    "the memory of this machine does not hold the whole model"
                );
                running.tell(Message::Netd(ToNetd::Fits(blocks)))
            }
            Down::Model(facts) => {
                let kept = self.kept.map(ToNetd::Kept).into_iter();
                let mut messages = kept.chain([ToNetd::Model(facts)]);
                messages.all(|message| running.tell(Message::Netd(message)))
            }
            Down::WorkerDown {
                worker,
                generation,
                cause,
                restarting,
            } => running.tell(Message::Netd(ToNetd::WorkerDown {
                worker,
                generation,
                cause,
                restarting,
            })),
            Down::WorkerUnkillable { worker, generation } => {
                running.tell(Message::Netd(ToNetd::WorkerUnkillable {
                    worker,
                    generation,
                }))
            }
            Down::Init(init) => return self.init(index, init),
            Down::Link { netd } => return self.link(index, netd),
            Down::WorkerUp {
                placement,
                generation,
                capacity,
            } => return Ok(self.worker_up(index, placement, generation, capacity)),
        })
    }

    /// Tells netd of a worker, unless the rings are gone by now: then so is the worker, and that is told next.
    fn worker_up(
        &mut self,
        index: usize,
        placement: Placement,
        generation: Generation,
        capacity: Capacity,
    ) -> bool {
        let Some(running) = self.running.get_mut(index) else {
            return true;
        };
        let Placement { worker, span, .. } = placement;
        let kv_survives = self.segments.kv_survives(worker);
        let identity = rings_of(worker, generation, running.generation);
        let Some(rings) = self.segments.rings(identity) else {
            return true;
        };
        let (arena_bytes, name) = (self.config.netd.arena_bytes, rings.pair.name().to_owned());
        let limits = self
            .facts
            .as_ref()
            .map(|facts| self.config.netd.limits(facts));
        let kv_pages = limits.map_or(0, |limits| limits.kv_pages());
        let bells = [rings.submission.as_fd(), rings.completion.as_fd()];
        running.deliver(&bells, |fds| {
            Message::Netd(ToNetd::WorkerUp(WorkerUp {
                worker,
                span,
                kv_pages,
                kv_survives,
                capacity,
                link: link_init(identity, name, arena_bytes, fds),
            }))
        })
    }

    fn init(&mut self, index: usize, init: Init) -> Result<bool, MakeError> {
        match init {
            Init::Prepare => {
                let Some(running) = self.running.get_mut(index) else {
                    return Ok(true);
                };
                Ok(running.tell(Message::Prepare(ToPrepare::Init {
                    config: self.config.prepare.clone(),
                    board: running.seat(&self.segments.board),
                    devices: self.config.devices.clone(),
                    worker: self.config.worker.clone(),
                })))
            }
            Init::Netd {
                previous_addrs,
                served,
                retired,
            } => self.init_netd(index, previous_addrs, served, retired),
            Init::Worker {
                placement,
                whole,
                facts,
                by_warps,
            } => self.init_worker(index, placement, (whole, facts), by_warps),
        }
    }

    fn init_netd(
        &mut self,
        index: usize,
        previous_addrs: Vec<String>,
        served: Option<Span>,
        retired: Vec<Span>,
    ) -> Result<bool, MakeError> {
        let Some(running) = self.running.get_mut(index) else {
            return Ok(true);
        };
        let (board, generation) = (running.seat(&self.segments.board), running.generation);
        let config = self.config.netd.clone();
        let arena_bytes = config.arena_bytes;
        let arena = self
            .segments
            .arena(self.instance, generation, arena_bytes)?;
        Ok(running.deliver(&[arena.as_fd()], |fds| {
            let init = NetdInit {
                board,
                generation,
                config,
                previous_addrs,
                arena_bytes,
                served,
                retired,
                fds,
            };
            Message::Netd(ToNetd::Init(Box::new(init)))
        }))
    }

    fn init_worker(
        &mut self,
        index: usize,
        placement: Placement,
        (whole, facts): (Span, ModelFacts),
        by_warps: bool,
    ) -> Result<bool, MakeError> {
        let Some(running) = self.running.get_mut(index) else {
            return Ok(true);
        };
        let Placement {
            worker,
            device,
            span,
        } = placement;
        let (board, generation) = (running.seat(&self.segments.board), running.generation);
        let limits = self.config.netd.limits(&facts);
        let kv_pages = limits.kv_pages();
        let gradient_bytes = facts.gradient_bytes(limits.max_batch_size);
        let choice = KvChoice::of(device, self.config.worker.kv_mirror);
        let bytes = |survives| facts.kv_segment_bytes_if(survives, span, kv_pages);
        let kv = self.segments.kv(self.instance, worker, choice, bytes)?;
        let kv_survives = kv.survives;
        let init = |fds| WorkerInit {
            board,
            generation,
            worker,
            device,
            span,
            kv_pages,
            gradient_bytes,
            kv_survives,
            manifest: manifest_of(self.instance, whole),
            model: facts.clone(),
            config: self.config.worker.clone(),
            measure: !matches!(self.config.netd.throughput, Throughput::Fixed(_)),
            by_warps,
            fds,
        };
        let delivered = running.deliver(&[kv.segment.as_fd()], |fds| {
            Message::Worker(ToWorker::Init(Box::new(init(fds))))
        });
        if let Err(error) = self.segments.board.set_span(slot_of(running.id), span) {
            warn!(%error, "cannot show a span");
        }
        self.facts = Some(facts);
        Ok(delivered)
    }

    fn link(&mut self, index: usize, netd: Generation) -> Result<bool, MakeError> {
        let Some(running) = self.running.get_mut(index) else {
            return Ok(true);
        };
        let ChildId::Worker(worker) = running.id else {
            return Ok(true);
        };
        let identity = rings_of(worker, running.generation, netd);
        let arena_bytes = self.config.netd.arena_bytes;
        let arena = self
            .segments
            .arena(self.instance, netd, arena_bytes)?
            .try_clone()
            .map_err(MakeError::Doorbell)?;
        let rings = self.segments.make_rings(self.instance, identity)?;
        let name = rings.pair.name().to_owned();
        let fds = [
            arena.as_fd(),
            rings.submission.as_fd(),
            rings.completion.as_fd(),
        ];
        Ok(running.deliver(&fds, |fds| {
            Message::Worker(ToWorker::Link(link_init(identity, name, arena_bytes, fds)))
        }))
    }
}

fn link_init(identity: RingIdentity, rings: String, arena_bytes: u64, fds: FdTag) -> LinkInit {
    let RingIdentity {
        worker_generation,
        netd_generation,
        ..
    } = identity;
    LinkInit {
        netd_generation,
        worker_generation,
        rings,
        arena_bytes,
        fds,
    }
}

/// The manifest of a span of an instance: while it moves there are two.
fn manifest_of(instance: &Instance, span: Span) -> PathBuf {
    let (start, end) = (span.start(), span.end());
    instance
        .folder()
        .join(format!("manifest-{start}-{end}.json"))
}

fn make_reason(error: &MakeError) -> ExitReason {
    match error {
        MakeError::Segment(SegmentError::NoRoom { .. }) => ExitReason::OutOfMemory,
        MakeError::NoMemory { .. } | MakeError::TooLarge(_) => ExitReason::BadConfig,
        _ => ExitReason::Failed,
    }
}
