//! Fuzz targets of what processes tell each other: jobs, completions, control messages. A process
//! that a peer has taken over writes them.

use std::time::Duration;

use fuzzing::{Target, outcome};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::block::Span;
use crate::control::{
    DeathCause, FdTag, FromNetd, FromPrepare, FromWorker, LinkInit, ToNetd, ToPrepare, ToWorker,
    WorkerUp,
};
use crate::exit::ExitReason;
use crate::figures::{Figures, KvFigures, Page, SessionFigures};
use crate::ids::{Generation, GroupId, JobId, WorkerId};
use crate::job::tests::{self, slot};
use crate::job::{
    Completion, Entry, JobBody, JobDescriptor, JobError, JobLimits, Prompts, WorkKind,
};
use crate::survey::Capacity;

fn limits() -> JobLimits {
    JobLimits { adapters: 1, ..tests::limits() }
}

fn span() -> Span {
    limits().span
}

fn step() -> JobBody {
    let prompts = Some(Prompts { slot: slot(1024, 64), batch: 1, tokens: 1 });
    JobBody { adapter: Some(0), prompts, ..tests::step() }
}

fn backward() -> JobBody {
    JobBody { adapter: Some(0), ..tests::backward() }
}

#[test]
fn fuzz_job_bodies() {
    let forward = JobBody {
        kind: WorkKind::Forward,
        output_gradient: None,
        prompt_gradient: None,
        ..backward()
    };
    let seeds = [step(), backward(), forward].map(|job| job.encode());
    Target::new("job bodies", seeds).fuzz(|input| {
        let job = JobBody::decode(input, &limits());
        if let Ok(job) = &job {
            assert_eq!(JobBody::decode(&job.encode(), &limits()).as_ref(), Ok(job));
            assert!(job.pages.tables.iter().flatten().all(|page| page.0 < limits().kv_pages));
            assert!(job.input.offset + job.input.len <= limits().arena_bytes);
        }
        outcome(&job)
    });
}

fn bytes_of(entry: Entry) -> Vec<u8> {
    entry.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn entry_of(input: &[u8]) -> Entry {
    let mut entry = Entry::default();
    for (word, bytes) in entry.iter_mut().zip(input.chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(whole);
    }
    entry
}

#[test]
fn fuzz_ring_entries() {
    let generation = Generation(3);
    let descriptor = JobDescriptor {
        id: JobId(7),
        kind: WorkKind::Forward,
        worker: WorkerId::solo(GroupId(1)),
        worker_generation: generation,
        netd_generation: generation,
        body: slot(64, 256),
        submitted_ns: 9,
    };
    let completion = |result| Completion {
        id: JobId(7),
        worker_generation: generation,
        netd_generation: generation,
        result,
        queue_ns: 1,
        compute_ns: 2,
    };
    let seeds = [
        bytes_of(descriptor.encode()),
        bytes_of(completion(Ok(())).encode()),
        bytes_of(completion(Err(JobError::BadPage { page: 1, pages: 2 })).encode()),
    ];
    Target::new("ring entries", seeds).fuzz(|input| {
        let entry = entry_of(input);
        let completion = Completion::decode(&entry);
        if let Some(completion) = completion {
            assert_eq!(Completion::decode(&completion.encode()), Some(completion));
        }
        let told = completion.map(|c| outcome(&c.result));
        format!("{told:?} {}", outcome(&JobDescriptor::decode(&entry)))
    });
}

fn posted(message: impl Serialize) -> Vec<u8> {
    postcard::to_allocvec(&message).expect("plain data")
}

fn read<T: DeserializeOwned>(input: &[u8]) -> String {
    outcome(&postcard::from_bytes::<T>(input))
}

/// What netd says, and what the supervisor does with it, is bounded by what ipc-channel hands over.
#[test]
fn fuzz_control_messages() {
    let (worker, generation) = (WorkerId::solo(GroupId(0)), Generation(1));
    let link = LinkInit {
        netd_generation: generation,
        worker_generation: generation,
        arena_bytes: 1 << 30,
        fds: FdTag(4),
    };
    let up = WorkerUp {
        worker,
        span: span(),
        kv_pages: 1000,
        kv_survives: true,
        kv_version: 1,
        capacity: Capacity { inference_rps: 10.0, forward_rps: 20.0 },
        link: link.clone(),
    };
    let failed = || (ExitReason::DeviceLost, "the device is gone".to_owned());
    let (reason, message) = failed();
    let addrs = vec!["/ip4/127.0.0.1/tcp/31337/p2p/Qm".to_owned()];
    let seeds = [
        posted(FromNetd::Listening { peer_id: "Qm".into(), addrs }),
        posted(FromNetd::ProposedSpan(span())),
        posted(FromNetd::BrokenRings { worker, generation, message: "nonsense".into() }),
        posted(FromNetd::Failed { reason, message: message.clone() }),
        posted(FromWorker::Ready(up.capacity)),
        posted(FromWorker::Failed { reason, message }),
        posted(ToWorker::Link(link)),
        posted(ToNetd::WorkerUp(up)),
        posted(ToNetd::WorkerDown {
            worker,
            generation,
            cause: DeathCause::Outside,
            restarting: true,
        }),
        posted(ToNetd::MoveFailed { to: span(), why: "no memory".into() }),
        posted(ToNetd::Pause { patience: Duration::from_secs(9) }),
        posted(ToPrepare::Span { span: span(), manifest: "/a/b".into(), cut: vec![2, 2] }),
    ];
    Target::new("control messages", seeds).fuzz(|input| {
        [
            read::<FromNetd>(input),
            read::<FromWorker>(input),
            read::<FromPrepare>(input),
            read::<ToNetd>(input),
            read::<ToWorker>(input),
            read::<ToPrepare>(input),
        ]
        .join(" ")
    });
}

/// What netd shows of itself, and the supervisor tells further.
#[test]
fn fuzz_figures() {
    let figures = Figures {
        kv: KvFigures { wait_s: 0.5, ..KvFigures::default() },
        sessions: vec![SessionFigures { number: 7, ..SessionFigures::default() }],
        ..Figures::default()
    };
    let refused =
        br#"{"clients": {"refused": {"malformed": 3}}, "announced": {"state": "online"}}"#;
    Target::new("figures", [figures.encode(), refused.to_vec()]).fuzz(|input| {
        let figures = Figures::decode(input);
        if let Ok(figures) = &figures {
            // Who asks for the report reads what the supervisor read.
            assert!(Figures::decode(&figures.encode()).is_ok());
            Page::of(figures);
        }
        outcome(&figures)
    });
}

#[test]
fn fuzz_spans_and_addresses_of_settings() {
    let seeds = ["0:8", "3:4", "model.17"].map(|text| text.as_bytes().to_vec());
    Target::new("spans", seeds).fuzz(|input| {
        let text = String::from_utf8_lossy(input);
        outcome(&text.parse::<Span>()) + &outcome(&text.parse::<crate::block::ModuleUid>())
    });
}
