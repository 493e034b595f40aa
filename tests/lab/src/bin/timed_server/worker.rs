//! The role `gpu-worker` over a [`Device`]: hidden states leave as they came, after the stated time. Weights are received and not read; KV
//! pages are not touched.

use std::fs::File;
use std::thread;
use std::time::{Duration, Instant};

use gpu_worker::link::{LINK_DESCRIPTORS, NetdLink};
use ipc_channel::TryRecvError;
use model::manifest::Manifest;
use shared::bootstrap::{Bootstrap, ControlEnds};
use shared::clock::monotonic_ns;
use shared::control::{FromWorker, LinkInit, ToWorker, WorkerInit};
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::job::{
    Completion, Entry, JobBody, JobDescriptor, JobError, JobLimits, SlotRef, WorkKind,
};
use shared::shm::board::{BoardWriter, Phase};
use shared::survey::Capacity;

use crate::device::{Device, Job};
use crate::times::Times;

type Ends = ControlEnds<ToWorker, FromWorker>;

/// Descriptors are sent before the message that names them.
const DESCRIPTOR_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest sleep on the doorbell before messages of the supervisor are looked for.
const MESSAGE_POLL: Duration = Duration::from_millis(20);

/// Why the worker ends.
enum Stop {
    /// As the supervisor wishes, or without it.
    Told(ExitReason),
    /// What is wrong, for the operator.
    Failed(String),
}

impl<E: std::error::Error> From<E> for Stop {
    fn from(error: E) -> Stop {
        Stop::Failed(with_causes(&error))
    }
}

/// Runs the role until it is drained, fails, or the parent is gone.
pub fn run(bootstrap: Bootstrap) -> ExitReason {
    let ends: Ends = match bootstrap.connect() {
        Ok(ends) => ends,
        Err(error) => return error.exit_reason(),
    };
    match serve(&ends) {
        Ok(never) => match never {},
        Err(Stop::Told(reason)) => reason,
        Err(Stop::Failed(message)) => {
            let reason = ExitReason::Failed;
            // Without a supervisor nobody is left to read it.
            let _ = ends.sender.send(FromWorker::Failed { reason, message });
            reason
        }
    }
}

enum Never {}

fn serve(ends: &Ends) -> Result<Never, Stop> {
    let init = match ends.receiver.recv()? {
        ToWorker::Init(init) => init,
        ToWorker::Drain => return Err(Stop::Told(ExitReason::Clean)),
        ToWorker::Link(_) => return Err(Stop::Failed("a link came before Init".to_owned())),
    };
    let kv_and_board = ends.descriptors.recv(init.fds, 2, DESCRIPTOR_TIMEOUT)?;
    let board = kv_and_board
        .into_iter()
        .last()
        .map(|fd| BoardWriter::open(fd, &init.board, init.generation));
    let board = board.ok_or_else(|| Stop::Failed("no board came".to_owned()))??;
    let times = stated_times(&init, ends)?;
    tell(ends, FromWorker::Ready(Capacity::default()))?;
    let worker =
        Worker { board, device: Device::new(times), link: None, init: *init, is_draining: false };
    worker.run(ends)
}

fn tell(ends: &Ends, message: FromWorker) -> Result<(), Stop> {
    ends.sender.send(message).map_err(|_| Stop::Told(ExitReason::ParentGone))
}

/// The times that the config.json in the manifest states.
fn stated_times(init: &WorkerInit, ends: &Ends) -> Result<Times, Stop> {
    let weights = &init.weights;
    let files =
        ends.descriptors.recv_all(weights.fds, weights.files.len() + 1, DESCRIPTOR_TIMEOUT)?;
    let manifest =
        files.into_iter().next().ok_or_else(|| Stop::Failed("no manifest came".to_owned()))?;
    let manifest = Manifest::read_open(&File::from(manifest), &weights.manifest)?;
    Times::from_config(&manifest.config).map_err(Stop::Failed)
}

struct Worker {
    init: WorkerInit,
    board: BoardWriter,
    device: Device,
    link: Option<NetdLink>,
    is_draining: bool,
}

impl Worker {
    fn run(mut self, ends: &Ends) -> Result<Never, Stop> {
        self.board.enter(Phase::Idle, Duration::ZERO);
        loop {
            self.obey(ends)?;
            self.take_jobs()?;
            self.work()?;
            self.board.progress();
        }
    }

    fn obey(&mut self, ends: &Ends) -> Result<(), Stop> {
        match ends.receiver.try_recv() {
            Ok(ToWorker::Link(init)) => {
                self.link = Some(self.open(&init, ends)?);
                self.device.clear();
                tell(ends, FromWorker::Linked { netd_generation: init.netd_generation })
            }
            Ok(ToWorker::Drain) => {
                self.is_draining = true;
                Ok(())
            }
            Ok(ToWorker::Init(_)) => Err(Stop::Failed("a second Init came".to_owned())),
            Err(TryRecvError::Empty) => Ok(()),
            Err(TryRecvError::IpcError(_)) => Err(Stop::Told(ExitReason::ParentGone)),
        }
    }

    fn open(&self, link: &LinkInit, ends: &Ends) -> Result<NetdLink, Stop> {
        let fds = ends.descriptors.recv(link.fds, LINK_DESCRIPTORS, DESCRIPTOR_TIMEOUT)?;
        Ok(NetdLink::open(link, self.init.worker, self.init.generation, fds)?)
    }

    fn take_jobs(&mut self) -> Result<(), Stop> {
        let Some(link) = &mut self.link else {
            return Ok(());
        };
        let WorkerInit { model, span, kv_pages, .. } = &self.init;
        let limits = JobLimits::of(model, *span, *kv_pages, link.arena.len());
        while let Some(entry) = link.submissions.pop()? {
            match accepted(link, &entry, &limits) {
                Ok(job) => self.device.accept(job),
                Err(error) => {
                    let descriptor = JobDescriptor::decode(&entry)?;
                    answer(link, &descriptor, Err(error), Duration::ZERO)?;
                }
            }
        }
        Ok(())
    }

    /// Computes, or sleeps.
    fn work(&mut self) -> Result<(), Stop> {
        let Some(link) = &mut self.link else {
            thread::sleep(MESSAGE_POLL);
            return if self.is_draining { Err(Stop::Told(ExitReason::Clean)) } else { Ok(()) };
        };
        let Some(work) = self.device.next() else {
            if self.is_draining {
                return Err(Stop::Told(ExitReason::Clean));
            }
            link.submissions.wait(&link.submission_bell, Duration::ZERO, MESSAGE_POLL)?;
            return Ok(());
        };
        let until = Instant::now() + work.time;
        // Copies are a part of the time.
        let copied: Vec<_> =
            work.ended.into_iter().map(|job| (copy(link, &job.body), job.descriptor)).collect();
        thread::sleep(until.saturating_duration_since(Instant::now()));
        for (result, descriptor) in copied {
            answer(link, &descriptor, result, work.time)?;
        }
        Ok(())
    }
}

fn accepted(link: &NetdLink, entry: &Entry, limits: &JobLimits) -> Result<Job, JobError> {
    let descriptor = JobDescriptor::decode(entry)?;
    let mut bytes = vec![0u8; descriptor.body.len as usize];
    read(link, descriptor.body, &mut bytes)?;
    Ok(Job { descriptor, body: JobBody::decode(&bytes, limits)? })
}

/// The output of a job: its input, or for gradients the gradient of its output. The gradient of prompts is zero.
fn copy(link: &NetdLink, body: &JobBody) -> Result<(), JobError> {
    let from =
        body.output_gradient.filter(|_| body.kind == WorkKind::Backward).unwrap_or(body.input);
    let mut bytes = vec![0u8; from.len as usize];
    read(link, from, &mut bytes)?;
    write(link, body.output, &bytes)?;
    match body.prompt_gradient {
        Some(slot) => write(link, slot, &vec![0u8; slot.len as usize]),
        None => Ok(()),
    }
}

fn read(link: &NetdLink, slot: SlotRef, bytes: &mut [u8]) -> Result<(), JobError> {
    link.arena.read(slot.offset, bytes).map_err(|_| bad_slot(slot))
}

fn write(link: &NetdLink, slot: SlotRef, bytes: &[u8]) -> Result<(), JobError> {
    link.arena.write(slot.offset, bytes).map_err(|_| bad_slot(slot))
}

fn bad_slot(slot: SlotRef) -> JobError {
    JobError::BadSlot { offset: slot.offset, len: slot.len }
}

fn answer(
    link: &mut NetdLink,
    job: &JobDescriptor,
    result: Result<(), JobError>,
    time: Duration,
) -> Result<(), Stop> {
    let compute_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let completion = Completion {
        id: job.id,
        worker_generation: link.worker_generation,
        netd_generation: link.netd_generation,
        result,
        queue_ns: monotonic_ns().saturating_sub(job.submitted_ns).saturating_sub(compute_ns),
        compute_ns,
    };
    // netd never has more jobs under way than the ring has room for.
    link.completions.push(completion.encode())?;
    link.completions.ring_if_sleeping(&link.completion_bell)?;
    Ok(())
}
