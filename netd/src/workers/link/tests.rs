use std::time::Duration;

use shared::ids::GroupId;
use shared::shm::arena::ArenaMap;
use shared::shm::segment::MemfdSegment;
use testkit::link::{FakeWorker, LinkParts};
use tokio::time::timeout;

use super::super::arena::{ArenaMemory, SlotClass, plan};
use super::*;

const PATIENCE: Duration = Duration::from_secs(60);
const BODY: SlotRef = SlotRef { offset: 0, len: 64 };

/// Links a generation of the worker, whose end the test drives.
fn link_worker(link: &Arc<WorkerLink>, generation: u32) -> FakeWorker {
    let parts = LinkParts::new(Generation(generation), Generation(1));
    let [submission, completion] = parts.bells();
    link.up(&parts.worker_up(link.span(), 8), parts.rings(), submission, completion).unwrap();
    parts.worker()
}

/// The next job.
async fn take(worker: &mut FakeWorker) -> JobDescriptor {
    let end = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(job) = worker.take() {
            return job;
        }
        assert!(tokio::time::Instant::now() < end, "no job came");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// What a worker posts in place of the completion of a job, and how it is named.
type Lie = (fn(&mut FakeWorker, JobId), &'static str);

const LIES: [Lie; 6] = [
    (|worker, _| worker.post([7; 8]), "no completion"),
    (|worker, job| worker.post(worker.completion(JobId(job.0 + 1)).encode()), "not in flight"),
    (
        |worker, job| {
            let completion = worker.completion(job);
            worker.post(Completion { worker_generation: Generation(7), ..completion }.encode());
        },
        "other generations",
    ),
    (
        |worker, job| {
            let completion = worker.completion(job);
            worker.post(Completion { netd_generation: Generation(7), ..completion }.encode());
        },
        "other generations",
    ),
    (
        |worker, job| {
            let completion = worker.completion(job);
            worker.post(Completion { compute_ns: u64::MAX, queue_ns: 9, ..completion }.encode());
        },
        "after the job was submitted",
    ),
    (
        // The true one after it is not believed either.
        |worker, job| {
            worker.post(worker.completion(JobId(3)).encode());
            worker.post(worker.completion(job).encode());
        },
        "not in flight",
    ),
];

async fn holds() -> Arc<Holds> {
    let segment = MemfdSegment::create("sepal-test-link-arena", 64 << 20).unwrap();
    let plan = plan(64 << 20, 1024).unwrap();
    let arena = ArenaMemory::new(ArenaMap::map(&segment).unwrap(), plan);
    let slots = arena.reserve(&[64], SlotClass::Short).await.unwrap();
    Arc::new(Holds { slots, pages: None })
}

#[tokio::test]
async fn a_worker_that_lies_is_reported_and_its_jobs_go_to_the_next_generation() {
    for (lie, named) in LIES {
        let (broken, mut reports) = mpsc::channel(4);
        let span = Span::new(0, 2).unwrap();
        let link = Arc::new(WorkerLink::new(WorkerId::solo(GroupId(0)), span, 0, broken));
        let mut worker = link_worker(&link, 1);
        let holds = holds().await;
        let job = tokio::spawn({
            let link = link.clone();
            async move { link.run(WorkKind::Decode, BODY, holds).await }
        });
        let id = take(&mut worker).await.id;
        lie(&mut worker, id);
        let report = timeout(PATIENCE, reports.recv()).await.expect(named).unwrap();
        assert_eq!(report.generation, Generation(1));
        assert!(report.message.contains(named), "{named}: {}", report.message);
        assert!(!job.is_finished(), "{named}: what a liar says is no answer");

        link.down(Generation(1), DeathCause::SelfInflicted, true);
        let mut worker = link_worker(&link, 2);
        let again = take(&mut worker).await;
        assert_eq!((again.id, again.worker_generation), (id, Generation(2)), "{named}");
        worker.post(worker.completion(id).encode());
        let answer = timeout(PATIENCE, job).await.expect(named).unwrap();
        assert_eq!(answer.unwrap().compute_ns, 1, "{named}");
        assert!(reports.try_recv().is_err(), "{named}: the next generation is sound");
    }
}
