//! The worker as a process of its own, started from this test executable the way the supervisor
//! starts it.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::time::Instant;

use shared::config::{FaultAction, FaultPlan, FaultPoint, WorkerConfig};
use shared::control::{FdTag, Role};
use shared::dtype::DType;
use shared::ids::{Generation, PageId};
use shared::job::PageCopy;
use shared::shm::board::ChildSnapshot;

use super::*;
use crate::harness::*;

#[test]
#[ignore = "the worker process that the other tests start"]
fn child() {
    as_child(Role::Worker, run);
}

/// A worker process and the supervisor's ends of its channels.
struct Worker {
    process: Child,
    down: DownEnd<ToWorker>,
    up: UpEnd<FromWorker>,
    descriptors: DescriptorSocket,
    seat: Seat,
    generation: Generation,
    tag: u64,
}

struct Start<'a> {
    model: &'a Model,
    kv: &'a MemfdSegment,
    generation: u32,
    fault: Option<FaultPlan>,
    device: Device,
    measure: bool,
}

impl<'a> Start<'a> {
    fn new(model: &'a Model, kv: &'a MemfdSegment, generation: u32) -> Start<'a> {
        Start { model, kv, generation, fault: None, device: Device::Cpu, measure: false }
    }

    /// Starts the process and sends Init.
    fn spawn(self) -> Worker {
        let generation = Generation(self.generation);
        let seat = Seat::of(Role::Worker, generation);
        let Spawned { process, down, up, descriptors } =
            spawn(Role::Worker, generation, "worker::tests::child");
        let mut worker = Worker { process, down, up, descriptors, seat, generation, tag: 0 };
        worker.init(&self);
        worker
    }

    /// Starts the process and waits until it is ready.
    fn ready(self) -> (Worker, Capacity) {
        let mut worker = self.spawn();
        match worker.next() {
            FromWorker::Ready(capacity) => (worker, capacity),
            other => panic!("{other:?} instead of Ready"),
        }
    }
}

impl Worker {
    fn init(&mut self, start: &Start<'_>) {
        let fds = self.next_tag();
        let board = self.seat.board.try_clone().unwrap();
        self.descriptors.send(fds, &[start.kv.as_fd(), board.as_fd()]).unwrap();
        let weights = self.next_tag();
        let paths = start.model.manifest.files.iter().map(|entry| &entry.path);
        let paths = std::iter::once(&start.model.path).chain(paths);
        let files: Vec<File> = paths.map(|path| File::open(path).unwrap()).collect();
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        self.descriptors.send_all(weights, &files).unwrap();
        let init = WorkerInit {
            board: self.seat.seat.clone(),
            generation: self.generation,
            worker: worker_id(),
            device: start.device,
            seats: shared::processor::Seats::Anywhere,
            span: span(),
            model: start.model.facts().clone(),
            weights: WeightsInit {
                manifest: start.model.path.clone(),
                files: (0..).take(start.model.manifest.files.len()).collect(),
                fds: weights,
            },
            kv_pages: KV_PAGES,
            gradient_bytes: shared::model::GRADIENT_BYTES,
            kv_survives: true,
            config: WorkerConfig {
                kv_mirror: shared::config::KvMirror::Auto,
                device_bytes: None,
                threads: 1,
                fault: start.fault,
                ..WorkerConfig::default()
            },
            measure: start.measure,
            warpgroups: Warpgroups::Missing,
            group: None,
            fds,
        };
        self.down.send(ToWorker::Init(Box::new(init))).unwrap();
    }

    fn next_tag(&mut self) -> FdTag {
        self.tag += 1;
        FdTag(self.tag)
    }

    fn next(&mut self) -> FromWorker {
        self.up.try_recv_timeout(DEADLINE).expect("a message in time")
    }

    /// Gives the worker a link and takes netd's end.
    fn link(&mut self, netd_generation: u32) -> Netd {
        let parts = LinkParts::new(self.generation, Generation(netd_generation));
        let (mut init, fds) = parts.for_worker();
        init.fds = self.next_tag();
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.descriptors.send(init.fds, &borrowed).unwrap();
        self.down.send(ToWorker::Link(init)).unwrap();
        match self.next() {
            FromWorker::Linked { netd_generation: linked } => {
                assert_eq!(linked, Generation(netd_generation))
            }
            other => panic!("{other:?} instead of Linked"),
        }
        Netd::of(parts)
    }

    fn seen(&self) -> ChildSnapshot {
        self.seat.board.view().child_snapshot(0).expect("the worker's seat")
    }

    /// Waits until the process has ended.
    fn end(mut self) -> ExitStatus {
        wait(&mut self.process)
    }

    /// Kills it as the supervisor does, and reaps it.
    fn kill(mut self) -> ExitStatus {
        self.process.kill().unwrap();
        self.process.wait().unwrap()
    }

    fn drain(self) -> ExitStatus {
        self.down.send(ToWorker::Drain).unwrap();
        self.end()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The steps of a session that forks after its prefill, so that every later step has something to
/// lose.
const STEPS: usize = 5;

fn step_input(step: usize) -> Vec<f32> {
    if step == 0 { input(20, 4) } else { input(1, 10 + step) }
}

/// The job of step `step`; step 1 copies the page that it writes.
fn step_job(
    netd: &Netd,
    model: &Model,
    session: &mut Session,
    free: &mut Vec<PageId>,
    step: usize,
) -> shared::job::JobBody {
    if step == 1 {
        let copy = free.pop().unwrap();
        session.copies = vec![PageCopy { source: session.table[1], destination: copy, tokens: 4 }];
        session.table[1] = copy;
    }
    session.step(netd, &model.limits(), free, &step_input(step))
}

/// The outputs of all steps without any fault.
fn undisturbed(model: &Model) -> Vec<Vec<u8>> {
    let kv = kv_segment(model.facts());
    let (mut worker, _) = Start::new(model, &kv, 1).ready();
    let mut netd = worker.link(1);
    let (mut session, mut free) = (Session::new(), shuffled_pages());
    let outputs = (0..STEPS)
        .map(|step| {
            let body = step_job(&netd, model, &mut session, &mut free, step);
            netd.call(&body).unwrap()
        })
        .collect();
    assert_eq!(worker.drain().code(), Some(0));
    outputs
}

/// Runs the session while job 1 of the first generation meets `fault`; returns how that worker
/// ended.
fn with_fault(
    model: &Model,
    expected: &[Vec<u8>],
    action: FaultAction,
    point: FaultPoint,
) -> ExitStatus {
    let kv = kv_segment(model.facts());
    let plan = FaultPlan { action, point, job: 1, times: 1, rank: None };
    let (mut worker, _) = Start { fault: Some(plan), ..Start::new(model, &kv, 1) }.ready();
    let mut netd = worker.link(1);
    let (mut session, mut free) = (Session::new(), shuffled_pages());
    let body = step_job(&netd, model, &mut session, &mut free, 0);
    assert!(netd.call(&body).unwrap() == expected[0]);

    let (session_before, free_before) = (session.clone(), free.clone());
    let body = step_job(&netd, model, &mut session, &mut free, 1);
    let job = netd.submit(&body);
    let status = match action {
        FaultAction::Hang => hang(worker),
        FaultAction::Kill | FaultAction::Abort | FaultAction::Repeat => worker.end(),
    };
    if point == FaultPoint::Completion {
        netd.answer(job).unwrap();
        assert!(netd.read(body.output) == expected[1]);
    } else {
        assert!(netd.next(Duration::ZERO).is_none(), "answered before it died at {point:?}");
    }

    // The same job again, and the rest, by a worker that knows nothing of the first. Its plan is
    // spent.
    let (mut worker, _) = Start { fault: Some(plan), ..Start::new(model, &kv, 2) }.ready();
    let mut netd = worker.link(1);
    (session, free) = (session_before, free_before);
    for (step, expected) in expected.iter().enumerate().skip(1) {
        let body = step_job(&netd, model, &mut session, &mut free, step);
        assert!(
            &netd.call(&body).unwrap() == expected,
            "step {step} after {action:?} at {point:?}"
        );
    }
    assert_eq!(worker.drain().code(), Some(0));
    status
}

/// Sees on the board that the worker works and makes no progress, then kills it.
fn hang(worker: Worker) -> ExitStatus {
    let until = Instant::now() + DEADLINE;
    let mut last = None;
    let mut same = 0;
    while same < 20 {
        let seen = worker.seen();
        let now = (seen.phase, seen.progress);
        same = if seen.phase == Phase::Unit && last == Some(now) { same + 1 } else { 0 };
        last = Some(now);
        assert!(Instant::now() < until, "the worker does not hang");
        std::thread::sleep(Duration::from_millis(5));
    }
    worker.kill()
}

const POINTS: [FaultPoint; 7] = [
    FaultPoint::Taken,
    FaultPoint::Copies,
    FaultPoint::Block(0),
    FaultPoint::Block(1),
    FaultPoint::Block(2),
    FaultPoint::Output,
    FaultPoint::Completion,
];

#[test]
fn a_worker_killed_between_any_two_effects_of_a_job_costs_no_bit() {
    let model = Model::new(DType::Bf16);
    let expected = undisturbed(&model);
    for point in POINTS {
        let status = with_fault(&model, &expected, FaultAction::Kill, point);
        assert_eq!(status.signal(), Some(nix::libc::SIGKILL), "{point:?}");
    }
}

#[test]
fn a_worker_that_aborts_or_hangs_in_a_job_costs_no_bit() {
    let model = Model::new(DType::F32);
    let expected = undisturbed(&model);
    let aborted = with_fault(&model, &expected, FaultAction::Abort, FaultPoint::Block(1));
    assert_eq!(aborted.signal(), Some(nix::libc::SIGABRT));
    let killed = with_fault(&model, &expected, FaultAction::Hang, FaultPoint::Block(0));
    assert_eq!(killed.signal(), Some(nix::libc::SIGKILL));
}

/// From outside, where a fault holds it up.
#[test]
fn a_worker_killed_in_any_step_of_a_session_costs_no_bit() {
    let model = Model::new(DType::Bf16);
    let expected = undisturbed(&model);
    let kv = kv_segment(model.facts());
    let (mut session, mut free) = (Session::new(), shuffled_pages());
    let mut generation = 1;
    for (step, expected) in expected.iter().enumerate() {
        let (session_before, free_before) = (session.clone(), free.clone());
        for point in [FaultPoint::Block(0), FaultPoint::Block(2)] {
            (session, free) = (session_before.clone(), free_before.clone());
            let action = FaultAction::Hang;
            let plan = FaultPlan { action, point, job: 0, times: generation, rank: None };
            let start = Start { fault: Some(plan), ..Start::new(&model, &kv, generation) };
            let (mut worker, _) = start.ready();
            let mut netd = worker.link(1);
            let body = step_job(&netd, &model, &mut session, &mut free, step);
            netd.submit(&body);
            assert_eq!(hang(worker).signal(), Some(nix::libc::SIGKILL), "step {step} at {point:?}");
            assert!(netd.next(Duration::ZERO).is_none(), "step {step} answered at {point:?}");
            generation += 1;
        }
        (session, free) = (session_before, free_before);
        let (mut worker, _) = Start::new(&model, &kv, generation).ready();
        let mut netd = worker.link(1);
        let body = step_job(&netd, &model, &mut session, &mut free, step);
        assert!(&netd.call(&body).unwrap() == expected, "step {step}");
        worker.kill();
        generation += 1;
    }
}

#[test]
fn a_second_netd_is_linked_after_the_first() {
    let model = Model::new(DType::F32);
    let kv = kv_segment(model.facts());
    let (mut worker, _) = Start::new(&model, &kv, 3).ready();
    let (first, mut second) = (worker.link(1), worker.link(2));
    drop(first);
    let body = second.job(shared::job::WorkKind::Forward, &model.limits(), 1, &input(3, 1));
    second.call(&body).unwrap();
    let seen = worker.seen();
    assert_eq!(seen.work.all().jobs, 1);
    assert_eq!(worker.drain().code(), Some(0));
}

#[test]
fn a_worker_whose_supervisor_closes_the_channel_ends() {
    let model = Model::new(DType::F32);
    let kv = kv_segment(model.facts());
    let (mut worker, _) = Start::new(&model, &kv, 1).ready();
    let _netd = worker.link(1);
    let (closed, _) = ipc_channel::ipc::channel().unwrap();
    drop(std::mem::replace(&mut worker.down, DownEnd(closed)));
    assert_eq!(worker.end().code(), Some(ExitReason::ParentGone.code().into()));
}

#[test]
fn capacity_is_measured_on_private_pages() {
    let model = Model::new(DType::Bf16);
    let kv = kv_segment(model.facts());
    let (worker, capacity) = Start { measure: true, ..Start::new(&model, &kv, 1) }.ready();
    assert!(capacity.inference_rps > 0.0 && capacity.forward_rps > 0.0, "{capacity:?}");
    assert_eq!(worker.drain().code(), Some(0));
    assert!(alone(&kv).values::<u8>().iter().all(|&b| b == 0xff), "the kv segment was written");
}

/// Starts a worker that cannot serve: what it says, and its exit code.
fn failure(start: Start<'_>) -> (ExitReason, String) {
    let mut worker = start.spawn();
    match worker.next() {
        FromWorker::Failed { reason, message } => {
            assert_eq!(worker.end().code(), Some(reason.code().into()));
            (reason, message)
        }
        other => panic!("{other:?} instead of Failed"),
    }
}

#[test]
fn a_worker_that_cannot_serve_says_why_in_one_sentence() {
    let model = Model::new(DType::F32);
    let kv = kv_segment(model.facts());
    let (reason, message) =
        failure(Start { device: Device::Cuda(3), ..Start::new(&model, &kv, 1) });
    assert_eq!(reason, ExitReason::BadConfig);
    assert!(message.contains("cuda:3") && message.contains("cpu"), "{message}");

    let small = MemfdSegment::create(&unique("kv"), 4096).unwrap();
    let (reason, message) = failure(Start::new(&model, &small, 1));
    assert_eq!(reason, ExitReason::ProtocolMismatch);
    assert!(message.contains("4096"), "{message}");

    let alive = alone(&kv);
    let (reason, _) = failure(Start::new(&model, &kv, 1));
    assert_eq!(
        reason,
        ExitReason::Failed,
        "another worker has not let go of its pages yet: worth another try"
    );
    drop(alive);

    std::fs::write(&model.manifest.files[0].path, "changed").unwrap();
    let (reason, message) = failure(Start::new(&model, &kv, 1));
    assert_eq!(reason, ExitReason::BadConfig);
    assert!(message.contains("model.safetensors") && message.contains("changed"), "{message}");

    std::fs::write(&model.path, "{}").unwrap();
    let (reason, message) = failure(Start::new(&model, &kv, 1));
    assert_eq!(reason, ExitReason::BadConfig);
    assert!(message.contains("manifest.json"), "{message}");
}

#[test]
fn a_checkpoint_cut_short_while_it_is_served_ends_the_worker_with_a_sentence() {
    let model = Model::new(DType::F32);
    let kv = kv_segment(model.facts());
    let (mut worker, _) = Start::new(&model, &kv, 1).ready();
    let mut netd = worker.link(1);
    let (mut session, mut free) = (Session::new(), shuffled_pages());
    let body = step_job(&netd, &model, &mut session, &mut free, 0);
    netd.call(&body).unwrap();

    let path = &model.manifest.files[0].path;
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_len(0).unwrap();
    let body = step_job(&netd, &model, &mut session, &mut free, 1);
    netd.submit(&body);
    match worker.next() {
        FromWorker::Failed { reason, message } => {
            assert_eq!(reason, ExitReason::WeightsChanged);
            assert!(
                message.contains("model.safetensors") && message.contains("changed while mapped"),
                "{message}"
            );
        }
        other => panic!("{other:?} instead of Failed"),
    }
    let code = i32::from(ExitReason::WeightsChanged.code());
    assert_eq!(worker.end().code(), Some(code));
    assert!(netd.next(Duration::ZERO).is_none(), "half a result was posted");
}
