//! The role `gpu-worker`: load the span, report ready, then serve links until told to end. The main
//! thread becomes the executor; one thread beside it reads the control channel, since a message may
//! wait while the device computes.

mod control;
mod group;
mod peers;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ipc_channel::IpcError;
use kernels::cuda::driver::CudaDriver;
#[cfg(feature = "emu")]
use kernels::cuda::emu::Emu;
use kernels::cuda::{Cuda, Gpu};
use kernels::ops::{DeviceFailure, OpError};
use shared::bootstrap::{Bootstrap, ControlEnds, DescriptorSocket};
use shared::config::{Device, FaultPlan, FaultPoint};
use shared::control::{FromWorker, ToWorker, WeightsInit, WorkerInit};
use shared::exit::ExitReason;
use shared::ids::Rank;
use shared::job::JobLimits;
use shared::shm::board::{BoardWriter, Phase};
use shared::shm::kv::KvMap;
use shared::shm::segment::MemfdSegment;
use shared::survey::Capacity;
use shared::warpgroups::Warpgroups;
use tracing::{debug, error, info, warn};

use crate::device::DeviceBackend;
use crate::engine::{BlockForm, Engine, EngineError, EngineShape};
use crate::executor::{Executor, Exit, Follower, spin_time};
use crate::fault::Faults;
use crate::gauges;
use crate::node;
use crate::probe;
use blocks::WeightsError;
use blocks::map::{Keep, MapError, MappedWeights, guard};
use control::Rings;
use group::RankGroup;
use kernels::cuda::scratch;
use model::BlockSpec;
use model::manifest::Manifest;
use model::rates::{self, Freshness, Key, RateCache, ThroughputError};
use model::shards::Shard;
use model::sizing::{Sharing, graph_block_bytes, shortage, step_kv_bytes, unit_tokens, work_bytes};
use model::weight_files::WeightFiles;
use shared::error_chain::with_causes;

/// Longest time without progress while weights are mapped: one file system that does not answer.
const LOADING_LIMIT: Duration = Duration::from_secs(60);

/// Longest time for one repetition of a measurement.
const MEASURING_LIMIT: Duration = Duration::from_secs(60);

/// Longest wait for another server of this machine that measures; after that both measure at once.
const RATES_PATIENCE: Duration = Duration::from_secs(20);

/// Descriptors are sent before the message that names them.
const DESCRIPTOR_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the role until it is drained, fails, or the parent is gone.
pub fn run(bootstrap: Bootstrap) -> ExitReason {
    let ends = match bootstrap.connect::<ToWorker, FromWorker>() {
        Ok(ends) => ends,
        Err(failure) => {
            error!(error = with_causes(&failure), "cannot connect to the supervisor");
            return failure.exit_reason();
        }
    };
    let sender = ends.sender.clone();
    let Exit { reason, message } = serve(ends);
    if !message.is_empty() {
        debug!(%reason, message, "worker failed");
        // The supervisor logs the sentence; without a supervisor nobody is left to read it.
        let _ = sender.send(FromWorker::Failed { reason, message });
    }
    reason
}

fn serve(ends: ControlEnds<ToWorker, FromWorker>) -> Exit {
    match ends.receiver.recv() {
        Ok(ToWorker::Init(init)) => serve_on_device(&init, ends),
        Ok(ToWorker::Drain) => Exit { reason: ExitReason::Clean, message: String::new() },
        Ok(ToWorker::Link(_)) => out_of_order(),
        Err(failure) => lost(&failure),
    }
}

fn serve_on_device(init: &WorkerInit, ends: ControlEnds<ToWorker, FromWorker>) -> Exit {
    match init.device {
        Device::Cpu | Device::Node(_) => run_on(
            init,
            ends,
            |start| {
                let mut cpu = node::seated(&init.seats, start.threads);
                if let Some(group) = start.group {
                    cpu.join(group.member()?);
                }
                info!(threads = cpu.threads(), seats = %init.seats, isa = ?cpu.isa(), "computing on the CPU");
                Ok(cpu)
            },
            |_, _, _| Ok(()),
            |_| Ok(()),
        ),
        Device::Cuda(ordinal) => run_on(
            init,
            ends,
            |start| joined(open_cuda(ordinal, &init.warpgroups)?, start),
            |cuda, form, weights| check_memory(cuda, init, form, weights),
            |engine| {
                engine.rehearse()?;
                engine.record_steps()
            },
        ),
        #[cfg(feature = "emu")]
        Device::Emulator(ordinal) => run_on(
            init,
            ends,
            |start| {
                joined(with_products(Cuda::new(emulator(init, ordinal, start.threads)))?, start)
            },
            |cuda, form, weights| check_memory(cuda, init, form, weights),
            |engine| {
                // Rehearsing takes the emulator a while.
                if init.config.device_bytes.is_some() {
                    engine.rehearse()?;
                }
                engine.record_steps()
            },
        ),
        #[cfg(not(feature = "emu"))]
        Device::Emulator(_) => Exit {
            reason: ExitReason::BadConfig,
            message: format!("device {} is not available: this build has no emulator", init.device),
        },
    }
}

/// A device that exchanges with those of the other ranks, if there are any.
fn joined<G: Gpu>(mut cuda: Cuda<G>, start: &Start<'_>) -> Result<Cuda<G>, Exit> {
    if let Some(group) = start.group {
        group.join(&mut cuda)?;
    }
    Ok(cuda)
}

fn out_of_order() -> Exit {
    Exit {
        reason: ExitReason::ProtocolMismatch,
        message: "the supervisor sent its messages out of order".to_owned(),
    }
}

fn lost(failure: &IpcError) -> Exit {
    match failure {
        IpcError::SerializationError(_) => Exit {
            reason: ExitReason::ProtocolMismatch,
            message: format!("cannot read a message of the supervisor: {failure}"),
        },
        _ => Exit { reason: ExitReason::ParentGone, message: String::new() },
    }
}

/// An emulator with the memory that the settings give it.
#[cfg(feature = "emu")]
fn emulator(init: &WorkerInit, ordinal: u32, threads: usize) -> Emu {
    let emu = Emu::new(threads).with_ordinal(ordinal);
    match init.config.device_bytes {
        Some(bytes) => emu.with_memory(usize::try_from(bytes).unwrap_or(usize::MAX)),
        None => emu,
    }
}

/// What is known when a device is opened.
struct Start<'a> {
    threads: usize,
    /// The group of which this worker is a rank.
    group: Option<&'a RankGroup>,
}

/// The worker from loading to the end, over the backend that `open` makes. Before its weights are
/// loaded, `check` refuses what will not fit. `warm_up` makes a device ready to serve at full speed.
fn run_on<B: DeviceBackend>(
    init: &WorkerInit,
    ends: ControlEnds<ToWorker, FromWorker>,
    open: impl FnOnce(&Start<'_>) -> Result<B, Exit>,
    check: impl FnOnce(&B, BlockForm<'_>, &MappedWeights) -> Result<(), Exit>,
    warm_up: impl FnOnce(&mut Engine<'_, B>) -> Result<(), EngineError>,
) -> Exit {
    let run = || {
        // Seats leave this thread with one CPU of its own; the writers of jobs have the others.
        let spin = spin_time();
        let joining = group::open(init, &ends.descriptors)?;
        let (kv, board) = segments(init, &ends.descriptors)?;
        faults(init).at(0, FaultPoint::Start);
        node::stay_on(&init.seats, init.device);
        let group = joining.map(|joining| RankGroup::new(joining, init, &board));
        board.enter(Phase::Loading, LOADING_LIMIT);
        if let Device::Cuda(ordinal) = init.device {
            gauges::watch(ordinal, Arc::clone(&board));
        }
        watch_weights(&ends)?;
        let (manifest, files) = received_weights(init, &ends.descriptors)?;
        let spec = BlockSpec::from_config(&manifest.config).map_err(|e| bad(&e))?;
        let shard = group::shard(init, &spec)?;
        let form = BlockForm { whole: &spec, shard: shard.as_ref() };
        // Before the weights, so that ranks wait for each other no longer than devices take to open.
        let threads = rates::threads(&init.config);
        let backend = open(&Start { threads, group: group.as_ref() })?;
        let weights = map_weights(init, &manifest, files, shard.as_ref(), &board)?;
        check(&backend, form, &weights)?;
        let kv = map_kv(init, kv)?;
        let shape = EngineShape {
            span: init.span,
            dtype: init.model.dtype,
            kv_pages: init.kv_pages,
            gradient_bytes: init.gradient_bytes,
            kv_survives: init.kv_survives,
        };
        let before = private_bytes();
        let mut engine =
            Engine::new(backend, form, &weights, kv, shape).map_err(|e| unplaced(&e))?;
        warm_up(&mut engine).map_err(|e| unplaced(&e))?;
        log_weights(init, &weights, private_bytes().saturating_sub(before));
        Ok(worker(engine, init, board, group, spin, ends))
    };
    run().unwrap_or_else(|end| end)
}

/// Weights are mapped as they are stored; what the process has of its own (`private` bytes) is what
/// it copied out of them.
fn log_weights(init: &WorkerInit, weights: &MappedWeights, private: u64) {
    let [(_, plain), (_, int8), (_, nf4)] = weights.bytes_by_format();
    let (adapters, copied) = (weights.adapter_bytes(), weights.copied_bytes());
    info!(plain, int8, nf4, adapters, private, copied, "weights in bytes by format");
    info!(span = %init.span, device = %init.device, weights_bytes = weights.bytes(), kv_pages = init.kv_pages, "weights loaded");
}

/// Has the supervisor told why, should a mapped file be cut short.
fn watch_weights(ends: &ControlEnds<ToWorker, FromWorker>) -> Result<(), Exit> {
    let sender = ends.sender.clone();
    let watched = guard::install(move |message| {
        let reason = ExitReason::WeightsChanged;
        // The process ends either way.
        let _ = sender.send(FromWorker::Failed { reason, message });
    });
    watched.map_err(|e| Exit {
        reason: ExitReason::Failed,
        message: format!("cannot watch the weights: {e}"),
    })
}

/// Opens a device whose warpgroups are used as far as the supervisor says.
fn open_cuda(ordinal: u32, warpgroups: &Warpgroups) -> Result<Cuda<CudaDriver>, Exit> {
    let driver = CudaDriver::open(ordinal).map_err(|failure| {
        let (reason, message) = failure.told(ordinal);
        Exit { reason, message }
    })?;
    let mut cuda = Cuda::new(driver);
    cuda.follow(warpgroups);
    let found = cuda.gpu().properties();
    info!(
        name = found.name,
        architecture = found.architecture,
        multiprocessors = found.multiprocessors,
        image = found.image,
        "opened a CUDA device"
    );
    match warpgroups.falls_back() {
        true => warn!(
            how = %warpgroups,
            "some warpgroups are not used: prefill is slower, results are the same; `sepal selftest --device cuda:{ordinal}` tells more"
        ),
        false => info!(how = %warpgroups, "products of many rows and attention of many tokens"),
    }
    Ok(cuda)
}

/// Chooses by what the products of many rows are made, on a device that cannot do harm.
#[cfg(feature = "emu")]
fn with_products<G: Gpu>(mut cuda: Cuda<G>) -> Result<Cuda<G>, Exit> {
    let how = cuda.choose_products().map_err(|failure| Exit {
        reason: ExitReason::DeviceLost,
        message: format!("cannot multiply a sample: {}", with_causes(&failure)),
    })?;
    info!(%how, "chose the GEMM kernels");
    Ok(cuda)
}

/// Refuses weights and pages that do not fit into the memory of the device, before any is taken.
fn check_memory<G: Gpu>(
    cuda: &Cuda<G>,
    init: &WorkerInit,
    form: BlockForm<'_>,
    weights: &MappedWeights,
) -> Result<(), Exit> {
    let Ok((free, _)) = cuda.gpu().memory() else {
        return Ok(());
    };
    let free = free as u64;
    let free = init.config.device_bytes.map_or(free, |most| most.min(free));
    let facts = group::kv_facts(init);
    let kv = facts.kv_segment_bytes(init.span, init.kv_pages) as u64;
    let stored = weights.bytes().saturating_add(weights.adapter_bytes());
    let blocks = init.span.block_count() as u64;
    let sharing = form.shard.map_or(Sharing::Alone, |_| Sharing::InGroup);
    let steps = graph_block_bytes(&facts, sharing).saturating_add(step_kv_bytes(&facts));
    let graphs = steps.saturating_mul(blocks);
    let (spec, tokens) = (form.spec(), unit_tokens(form.whole));
    let scratch = scratch::planned_bytes(&spec.dimensions(), tokens);
    let work = work_bytes(spec, tokens, scratch).saturating_add(graphs);
    match shortage(free, stored, kv, work) {
        None => Ok(()),
        Some(why) => Err(Exit {
            reason: ExitReason::OutOfMemory,
            message: format!("blocks {} do not fit {}: {why}", init.span, init.device),
        }),
    }
}

/// Why weights or pages are not where they should be, or a device is not ready.
fn unplaced(error: &EngineError) -> Exit {
    let source = match error {
        EngineError::Op(source) => Some(source),
        EngineError::Weights { source: WeightsError::Upload { source, .. }, .. } => Some(source),
        _ => None,
    };
    let reason = match source {
        Some(OpError::Device(DeviceFailure::OutOfMemory { .. })) => ExitReason::OutOfMemory,
        Some(OpError::Device(_)) => ExitReason::DeviceLost,
        Some(OpError::Group(failure)) => return failure.clone().into(),
        _ => ExitReason::BadConfig,
    };
    Exit { reason, message: with_causes(error) }
}

/// From measuring to the end.
fn worker<B: DeviceBackend>(
    mut engine: Engine<'_, B>,
    init: &WorkerInit,
    board: Arc<BoardWriter>,
    group: Option<RankGroup>,
    spin: Duration,
    ends: ControlEnds<ToWorker, FromWorker>,
) -> Exit {
    let mut capacity = Capacity::default();
    if init.measure {
        board.enter(Phase::Measuring, MEASURING_LIMIT);
        capacity = match measured(&mut engine, init, &board) {
            Ok(capacity) => capacity,
            Err(failure) => return unplaced(&failure),
        };
        info!(
            inference_rps = capacity.inference_rps,
            forward_rps = capacity.forward_rps,
            "measured throughput"
        );
    }
    let faults = faults(init);
    if ends.sender.send(FromWorker::Ready(capacity)).is_err() {
        return Exit { reason: ExitReason::ParentGone, message: String::new() };
    }
    let limits = JobLimits::of(&init.model, init.span, init.kv_pages, 0);
    let serve = || match group {
        Some(group) if init.worker.rank != Rank(0) => {
            let plans = group.reader()?;
            let (inbox, sender) = control::start(init, ends, group.opener())?;
            let follower = Follower::new(engine, limits, faults, board, plans);
            Ok(follower.run(&inbox, |message| {
                let _ = sender.send(message);
            }))
        }
        group => {
            let mut executor = Executor::new(engine, limits, faults, board).spinning(spin);
            if let Some(group) = &group {
                executor = executor.publishing(group.writer()?);
            }
            let (inbox, sender) = control::start(init, ends, Rings::default())?;
            Ok(executor.run(&inbox, |message| {
                let _ = sender.send(message);
            }))
        }
    };
    // A message that cannot be sent means that the parent is gone, which the control thread tells.
    serve().unwrap_or_else(|end: Exit| end)
}

/// The fault that this worker is to inflict on itself.
fn faults(init: &WorkerInit) -> Faults {
    let is_here = |plan: &FaultPlan| plan.rank.is_none_or(|rank| rank == init.worker.rank.0);
    Faults::new(init.config.fault.filter(is_here), init.generation)
}

/// Bytes of memory that are this process's alone; 0 where the system does not tell.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) << 10
}

/// What a block does on this device, or on all devices of the group together: kept from an earlier
/// start, unless there is none or the operator wants it measured. Rank 0 decides; the trials of all
/// ranks are the same.
fn measured<B: DeviceBackend>(
    engine: &mut Engine<'_, B>,
    init: &WorkerInit,
    board: &BoardWriter,
) -> Result<Capacity, EngineError> {
    if init.worker.rank != Rank(0) {
        return match engine.agree(false)? {
            true => probe::measure(engine, || board.progress()),
            false => Ok(Capacity::default()),
        };
    }
    let mut has_measured = false;
    let mut measure = |engine: &mut Engine<'_, B>| {
        has_measured = true;
        engine.agree(true)?;
        probe::measure(engine, || board.progress())
    };
    let measured = match &init.config.rates_dir {
        None => measure(engine),
        Some(folder) => {
            let devices = group::devices(init);
            let key = Key::of(&init.model, devices, &init.config);
            let freshness = match init.config.measure_anew {
                true => Freshness::Measured,
                false => Freshness::Kept,
            };
            let cache = RateCache::new(folder, RATES_PATIENCE);
            match cache.rates(&key, freshness, || measure(engine)) {
                Ok(capacity) => Ok(capacity),
                Err(ThroughputError::Measurement(failure)) => Err(failure),
                Err(failure) => {
                    warn!(error = with_causes(&failure), "cannot save the measured throughput");
                    measure(engine)
                }
            }
        }
    };
    if !has_measured {
        engine.agree(false)?;
    }
    measured
}

/// The manifest and the files of this worker's blocks, which the supervisor opened.
fn received_weights(
    init: &WorkerInit,
    descriptors: &DescriptorSocket,
) -> Result<(Manifest, WeightFiles), Exit> {
    let WeightsInit { manifest: path, files, fds } = &init.weights;
    let received = descriptors.recv_all(*fds, files.len() + 1, DESCRIPTOR_TIMEOUT);
    let mut received = received.map_err(|e| mismatch(&e))?.into_iter();
    let manifest = File::from(received.next().ok_or_else(out_of_order)?);
    let manifest = Manifest::read_open(&manifest, path).map_err(|e| bad(&e))?;
    if manifest.model != init.model {
        let (found, wanted) = (&manifest.model.name, &init.model.name);
        let message = format!("manifest {path:?} is of model {found}, not of {wanted}");
        return Err(Exit { reason: ExitReason::BadConfig, message });
    }
    Ok((manifest, WeightFiles::received(files.iter().copied().zip(received))))
}

fn map_weights(
    init: &WorkerInit,
    manifest: &Manifest,
    files: WeightFiles,
    shard: Option<&Shard>,
    board: &BoardWriter,
) -> Result<MappedWeights, Exit> {
    let keep = match init.device {
        Device::Node(_) => Keep::Copied,
        _ => Keep::Mapped,
    };
    let (span, mapped) = (init.span, || board.progress());
    let weights = MappedWeights::map_shard(manifest, span, files, shard, keep, mapped);
    weights.map_err(|e| {
        let is_passing = matches!(&e, MapError::File(failure) if failure.is_passing());
        let reason = if is_passing { ExitReason::Failed } else { ExitReason::BadConfig };
        Exit { reason, message: with_causes(&e) }
    })
}

/// The descriptor of the kv segment, and the worker's seat on the board.
fn segments(
    init: &WorkerInit,
    descriptors: &DescriptorSocket,
) -> Result<(OwnedFd, Arc<BoardWriter>), Exit> {
    let fds = descriptors.recv(init.fds, 2, DESCRIPTOR_TIMEOUT).map_err(|e| mismatch(&e))?;
    let [kv, board] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| out_of_order())?;
    let board = BoardWriter::open(board, &init.board, init.generation);
    Ok((kv, Arc::new(board.map_err(|e| mismatch(&e))?)))
}

fn map_kv(init: &WorkerInit, fd: OwnedFd) -> Result<KvMap, Exit> {
    let bytes =
        group::kv_facts(init).kv_segment_bytes_if(init.kv_survives, init.span, init.kv_pages);
    let segment = MemfdSegment::from_fd("sepal-kv", fd, bytes).map_err(|e| mismatch(&e))?;
    KvMap::map(&segment).map_err(|e| {
        let reason = match e.is_out_of_memory() {
            true => ExitReason::OutOfMemory,
            false => ExitReason::Failed,
        };
        Exit { reason, message: with_causes(&e) }
    })
}

fn mismatch(error: &dyn std::error::Error) -> Exit {
    Exit { reason: ExitReason::ProtocolMismatch, message: with_causes(error) }
}

fn bad(error: &dyn std::error::Error) -> Exit {
    Exit { reason: ExitReason::BadConfig, message: with_causes(error) }
}

#[cfg(test)]
mod tests;
