//! Composes the messages to children: adds to what the tree wants told the descriptors of shared
//! memory and of weights, which are made or opened here when first needed.

use std::os::fd::AsFd;
use std::path::PathBuf;

use shared::block::Span;
use shared::config::{Device, Throughput};
use shared::control::{
    FdTag, GroupInit, LinkInit, NetdInit, ToNetd, ToPrepare, ToWorker, WeightsInit, WorkerInit,
    WorkerUp,
};
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::ids::{Generation, Rank};
use shared::model::ModelFacts;
use shared::processor::{Processor, Seats};
use shared::shm::group::GroupShape;
use shared::shm::pair::{PairError, RingIdentity};
use shared::survey::Capacity;
use shared::warpgroups::Warpgroups;
use tracing::warn;

use super::{TreeDriver, rings_of};
use crate::channel::Message;
use crate::instance::Instance;
use crate::placement::{DeviceShare, Placement};
use crate::segments::{KvChoice, MakeError};
use crate::sizing::{EXCHANGE_VALUES, PLAN_LOG_BYTES};
use crate::tree::{ChildId, Down, ExitStatus, Init, TreeEvent};

impl TreeDriver<'_> {
    /// Adds descriptors to what the tree wants told.
    pub(super) fn tell(&mut self, id: ChildId, down: Down) {
        let Some(index) = self.processes.iter().position(|child| child.id == id) else {
            return;
        };
        match self.compose(index, down) {
            Ok(true) => {}
            Ok(false) => self.unruly(index, "does not read its control channel"),
            Err(error) => self.cannot_begin(index, fault_of(&error)),
        }
    }

    /// Ends a child that cannot be given what it needs.
    pub(super) fn cannot_begin(&mut self, index: usize, fault: ExitStatus) {
        if let Some(child) = self.processes.get_mut(index) {
            child.fault = Some(fault);
        }
        self.unruly(index, "cannot receive its descriptors");
    }

    fn unruly(&mut self, index: usize, what: &'static str) {
        if let Some(child) = self.processes.get(index) {
            self.pending.push_back(TreeEvent::Unruly(child.id, child.generation, what));
        }
    }

    fn compose(&mut self, index: usize, down: Down) -> Result<bool, MakeError> {
        let Some(child) = self.processes.get_mut(index) else {
            return Ok(true);
        };
        Ok(match down {
            Down::Drain => child.tell(match child.id {
                ChildId::Prepare => Message::Prepare(ToPrepare::Drain),
                ChildId::Netd => Message::Netd(ToNetd::Drain),
                ChildId::Worker(_) => Message::Worker(ToWorker::Drain),
            }),
            Down::Netd(message) => child.tell(Message::Netd(message)),
            Down::Span(span) => {
                let manifest = manifest_of(self.instance, span);
                let counts = self.tree.placements(span).into_iter();
                let cut = counts.map(|placement| placement.span.block_count() as u32).collect();
                child.tell(Message::Prepare(ToPrepare::Span { span, manifest, cut }))
            }
            Down::Init(init) => return self.init(index, init),
            Down::Link { netd } => return self.link(index, netd),
            Down::WorkerUp { placement, generation, capacity } => {
                return self.worker_up(index, placement, generation, capacity);
            }
        })
    }

    /// Tells netd of a worker, unless the rings are gone by now: then so is the worker, and that is
    /// told next.
    fn worker_up(
        &mut self,
        index: usize,
        placement: Placement,
        generation: Generation,
        capacity: Capacity,
    ) -> Result<bool, MakeError> {
        let Some(child) = self.processes.get_mut(index) else {
            return Ok(true);
        };
        let (Some(worker), span) = (placement.workers().next(), placement.span) else {
            return Ok(true);
        };
        // A step goes on from the pages of all ranks.
        let kv_survives = placement.workers().all(|worker| self.segments.kv_survives(worker));
        let mix = |version: u64, worker| {
            version.rotate_left(7) ^ self.segments.kv_version(worker, generation)
        };
        let kv_version = placement.workers().fold(0, mix);
        let identity = rings_of(worker, generation, child.generation);
        let Some(rings) = self.segments.rings(identity) else {
            return Ok(true);
        };
        let arena_bytes = self.config.netd.arena_bytes;
        let limits = self.facts.as_ref().map(|facts| self.config.netd.limits(facts));
        let kv_pages = limits.map_or(0, |limits| limits.kv_pages());
        let pair = rings.pair.try_clone().map_err(MakeError::Descriptor)?;
        let fds = [pair.as_fd(), rings.submission.as_fd(), rings.completion.as_fd()];
        Ok(child.deliver(&fds, |fds| {
            Message::Netd(ToNetd::WorkerUp(WorkerUp {
                worker,
                span,
                kv_pages,
                kv_survives,
                kv_version,
                capacity,
                link: link_init(identity, arena_bytes, fds),
            }))
        }))
    }

    fn init(&mut self, index: usize, init: Init) -> Result<bool, MakeError> {
        match init {
            Init::Prepare(groups) => {
                let Some(child) = self.processes.get_mut(index) else {
                    return Ok(true);
                };
                let board = self.segments.board.try_clone().map_err(MakeError::Descriptor)?;
                let seat = child.seat(self.liveness.heartbeat);
                Ok(child.deliver(&[board.as_fd()], |fds| {
                    Message::Prepare(ToPrepare::Init {
                        config: self.config.prepare.clone(),
                        board: seat,
                        groups,
                        worker: self.config.worker.clone(),
                        fds,
                    })
                }))
            }
            Init::Netd { previous_addrs, served, whole, retired, paused } => {
                self.init_netd(index, previous_addrs, served, whole, retired, paused)
            }
            Init::Worker { whole, .. } if !self.has_weights(whole) => {
                self.await_weights(index, whole, init)?;
                Ok(true)
            }
            Init::Worker { placement, rank, whole, facts, by_warps } => {
                self.init_worker(index, &placement, rank, whole, facts, by_warps)
            }
        }
    }

    fn init_netd(
        &mut self,
        index: usize,
        previous_addrs: Vec<String>,
        served: Option<Span>,
        whole: Option<Span>,
        retired: Vec<Span>,
        paused: bool,
    ) -> Result<bool, MakeError> {
        let Some(child) = self.processes.get_mut(index) else {
            return Ok(true);
        };
        let (board, generation) = (child.seat(self.liveness.heartbeat), child.generation);
        let config = self.config.netd.clone();
        let arena_bytes = config.arena_bytes;
        let shown = self.segments.board.try_clone().map_err(MakeError::Descriptor)?;
        let sessions = self.segments.sessions.try_clone().map_err(MakeError::Descriptor)?;
        let arena = self.segments.arena(self.instance, generation, arena_bytes)?;
        let metrics = self.metrics.for_child().map_err(MakeError::Descriptor)?;
        let has_metrics = metrics.is_some();
        let own = [arena.as_fd(), shown.as_fd(), sessions.as_fd()].into_iter();
        let own: Vec<_> = own.chain(metrics.as_ref().map(AsFd::as_fd)).collect();
        Ok(child.deliver(&own, |fds| {
            let init = NetdInit {
                has_metrics,
                board,
                generation,
                config,
                previous_addrs,
                arena_bytes,
                served,
                whole,
                retired,
                paused,
                fds,
            };
            Message::Netd(ToNetd::Init(Box::new(init)))
        }))
    }

    fn init_worker(
        &mut self,
        index: usize,
        placement: &Placement,
        rank: Rank,
        whole: Span,
        facts: ModelFacts,
        by_warps: bool,
    ) -> Result<bool, MakeError> {
        let Some(child) = self.processes.get(index) else {
            return Ok(true);
        };
        let (at, span) = (usize::from(rank.0), placement.span);
        let found = placement.workers().nth(at).zip(placement.devices.get(at).copied());
        let Some((worker, device)) = found else {
            return Ok(true);
        };
        let (generation, slot) = (child.generation, child.slot);
        let group = match placement.devices.len() {
            1 => None,
            _ => Some(self.group_init(placement)?),
        };
        let of_rank = group.as_ref().and_then(|group| group.shares.get(at));
        let pages_of = of_rank.map_or_else(|| facts.clone(), |rank| facts.of_rank(rank));
        let limits = self.config.netd.limits(&facts);
        let kv_pages = limits.kv_pages();
        let choice = KvChoice::of(device, self.config.worker.kv_mirror);
        let bytes = |survives| pages_of.kv_segment_bytes_if(survives, span, kv_pages);
        let kv_survives = self.segments.kv(self.instance, worker, choice, bytes)?.survives;
        let manifest = manifest_of(self.instance, whole);
        let init = WorkerInit {
            board: child.seat(self.liveness.heartbeat),
            generation,
            worker,
            device,
            seats: self.seats(placement, at, device),
            span,
            kv_pages,
            gradient_bytes: facts.gradient_bytes(limits.max_batch_size),
            kv_survives,
            weights: WeightsInit { manifest, files: Vec::new(), fds: FdTag(0) },
            model: facts.clone(),
            config: self.config.worker.clone(),
            measure: !matches!(self.config.netd.throughput, Throughput::Fixed(_)),
            warpgroups: warpgroups_of(&self.config.warpgroups, device, by_warps),
            group,
            fds: FdTag(0),
        };
        let delivered = self.deliver_init(index, whole, init)?;
        if let Err(error) = self.segments.board.set_span(slot, span) {
            warn!(%error, "cannot write a span to the board");
        }
        self.facts = Some(facts);
        Ok(delivered)
    }

    /// Where the threads of a rank run. A worker that takes the blocks of another device over has all cores
    /// of its own.
    fn seats(&self, placement: &Placement, rank: usize, device: Device) -> Seats {
        let shares = self.tree.shares();
        let of = |(share, found): (usize, &DeviceShare)| {
            let ranks = found.devices.iter().enumerate().filter(|(_, found)| **found == device);
            ranks.map(|(rank, _)| (share, rank)).collect::<Vec<_>>()
        };
        let sharing: Vec<_> = shares.iter().enumerate().flat_map(of).collect();
        let index = sharing.iter().position(|found| *found == (placement.share, rank));
        let (index, count) = index.map_or((0, 1), |index| (index, sharing.len()));
        let processor = Processor::of_worker(&self.config.worker.cpus);
        processor.seats(device, index, count, self.config.worker.threads.max(1) as usize)
    }

    /// What every rank of a group is told of it.
    fn group_init(&self, placement: &Placement) -> Result<GroupInit, MakeError> {
        let shares = self.tree.ranks().get(placement.share);
        let shares = shares.filter(|of| of.len() == placement.devices.len());
        let workers: usize = self.tree.shares().iter().map(|share| share.devices.len()).sum();
        let threads = workers * self.config.worker.threads.max(1) as usize;
        let mut cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        if placement.devices.iter().any(|device| device.is_processor()) {
            cores = cores.min(Processor::of_worker(&self.config.worker.cpus).cpus().len());
        }
        Ok(GroupInit {
            devices: placement.devices.clone(),
            shares: shares.cloned().ok_or(MakeError::NoShares(placement.group))?,
            exchange_values: EXCHANGE_VALUES,
            log_bytes: PLAN_LOG_BYTES,
            may_spin: threads <= cores,
            fds: FdTag(0),
        })
    }

    /// Tells a worker `init`, with the descriptors that belong to it.
    fn deliver_init(
        &mut self,
        index: usize,
        whole: Span,
        mut init: WorkerInit,
    ) -> Result<bool, MakeError> {
        let open = self.weights.of(whole).ok_or(MakeError::NoWeights(whole))?;
        let (files, weights) = open.of_span(init.span);
        init.weights.files = files;
        let Some(child) = self.processes.get_mut(index) else {
            return Ok(true);
        };
        let kv = self.segments.made_kv(init.worker).ok_or(MakeError::TooLarge(0))?;
        let kv = kv.segment.try_clone().map_err(MakeError::Descriptor)?;
        let shown = self.segments.board.try_clone().map_err(MakeError::Descriptor)?;
        let own = [kv.as_fd(), shown.as_fd()];
        let Some(group) = init.group.take() else {
            return Ok(child.deliver_all([&own, &weights], |[fds, weights]| {
                init.weights.fds = weights;
                Message::Worker(ToWorker::Init(Box::new(WorkerInit { fds, ..init })))
            }));
        };
        let shape = GroupShape::of(&group, init.worker, init.generation);
        let made = self.segments.group(self.instance, &shape)?;
        let segment = made.try_clone().map_err(MakeError::Descriptor)?;
        let bells = made.doorbells().map_err(MakeError::Descriptor)?;
        let sockets = match group.has_sockets() {
            true => self.segments.take_sockets(self.instance, &shape, init.worker.rank)?,
            false => Vec::new(),
        };
        let common = std::iter::once(&segment).chain(&bells).chain(&sockets);
        let common: Vec<_> = common.map(AsFd::as_fd).collect();
        Ok(child.deliver_all([&common, &own, &weights], |[common, fds, weights]| {
            init.weights.fds = weights;
            let group = Some(GroupInit { fds: common, ..group });
            Message::Worker(ToWorker::Init(Box::new(WorkerInit { fds, group, ..init })))
        }))
    }

    fn link(&mut self, index: usize, netd: Generation) -> Result<bool, MakeError> {
        let Some(child) = self.processes.get_mut(index) else {
            return Ok(true);
        };
        let ChildId::Worker(worker) = child.id else {
            return Ok(true);
        };
        let identity = rings_of(worker, child.generation, netd);
        let arena_bytes = self.config.netd.arena_bytes;
        let arena = self
            .segments
            .arena(self.instance, netd, arena_bytes)?
            .try_clone()
            .map_err(MakeError::Descriptor)?;
        if worker.rank != Rank(0) {
            return Ok(child.deliver(&[arena.as_fd()], |fds| {
                Message::Worker(ToWorker::Link(link_init(identity, arena_bytes, fds)))
            }));
        }
        let rings = self.segments.make_rings(self.instance, identity)?;
        let pair = rings.pair.try_clone().map_err(MakeError::Descriptor)?;
        let fds = [arena.as_fd(), pair.as_fd(), rings.submission.as_fd(), rings.completion.as_fd()];
        Ok(child.deliver(&fds, |fds| {
            Message::Worker(ToWorker::Link(link_init(identity, arena_bytes, fds)))
        }))
    }
}

fn link_init(identity: RingIdentity, arena_bytes: u64, fds: FdTag) -> LinkInit {
    let RingIdentity { worker_generation, netd_generation, .. } = identity;
    LinkInit { netd_generation, worker_generation, arena_bytes, fds }
}

/// What a worker is told of the warpgroups of its device. `by_warps`: an earlier process of this
/// worker failed on its device or hung, which no sample showed.
fn warpgroups_of(known: &[(Device, Warpgroups)], device: Device, by_warps: bool) -> Warpgroups {
    let found = known.iter().find(|(known, _)| *known == device);
    match (device, found) {
        (Device::Cpu | Device::Node(_) | Device::Emulator(_), _) => Warpgroups::Missing,
        (Device::Cuda(_), _) if by_warps => {
            Warpgroups::Unknown("an earlier process of this worker failed on its device".to_owned())
        }
        (Device::Cuda(_), Some((_, found))) => found.clone(),
        (Device::Cuda(_), None) => Warpgroups::Unknown("no sample was taken".to_owned()),
    }
}

/// The manifest of a span of an instance: while it moves there are two.
pub(super) fn manifest_of(instance: &Instance, span: Span) -> PathBuf {
    let (start, end) = (span.start(), span.end());
    instance.folder().join(format!("manifest-{start}-{end}.json"))
}

pub(super) fn fault_of(error: &MakeError) -> ExitStatus {
    ExitStatus::NotStarted { reason: make_reason(error), message: with_causes(error) }
}

fn make_reason(error: &MakeError) -> ExitReason {
    match error {
        MakeError::Segment(segment) | MakeError::Rings(PairError::Segment(segment))
            if segment.is_out_of_memory() =>
        {
            ExitReason::OutOfMemory
        }
        MakeError::NoMemory { .. } | MakeError::TooLarge(_) => ExitReason::BadConfig,
        MakeError::Weights(error) if !error.is_passing() => ExitReason::BadConfig,
        _ => ExitReason::Failed,
    }
}

#[cfg(test)]
mod tests {
    use shared::warpgroups::{SampleVerdict, WarpgroupKernel};

    use super::*;

    #[test]
    fn a_worker_goes_by_warpgroups_only_where_they_passed_and_none_of_its_processes_failed() {
        let each = |kernel| (kernel, SampleVerdict::SameBits);
        let same = Warpgroups::Sampled(WarpgroupKernel::ALL.into_iter().map(each).collect());
        let known = [(Device::Cuda(1), same.clone())];
        let told = |device, by_warps| warpgroups_of(&known, device, by_warps);
        assert_eq!(told(Device::Cuda(1), false), same);
        for (device, by_warps) in [(Device::Cuda(1), true), (Device::Cuda(0), false)] {
            assert!(matches!(told(device, by_warps), Warpgroups::Unknown(_)), "{device}");
        }
        assert_eq!(told(Device::Cpu, true), Warpgroups::Missing);
    }
}
