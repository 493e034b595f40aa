//! Fuzz target of the state that one executable hands over to the next: the next is another build, and
//! reads what it is shown before it knows whether it can.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fuzzing::{Target, outcome};
use shared::block::Span;
use shared::build::Build;
use shared::config::{Device, ServeConfig, SpanChoice};
use shared::control::{FromNetd, FromPrepare};
use shared::exit::ExitReason;
use shared::ids::{Generation, GroupId, WorkerId};
use shared::shm::pair::RingIdentity;
use shared::survey::Survey;

use crate::handover::{HandedChild, Handover, PendingEvent};
use crate::inherited_fds::{Fd, Handed};
use crate::instance::Instance;
use crate::placement::DeviceShare;
use crate::segments::{KvChoice, Segments};
use crate::sizing::InstanceMemory;
use crate::tree::{ChildId, Policy, Tree, TreeEvent, Up};
use crate::weights::Weights;

/// A tree whose workers were started.
fn tree(config: &ServeConfig) -> Tree {
    let mut tree = Tree::new(Policy {
        restart: config.restart,
        drain_timeout: config.drain_timeout,
        shares: DeviceShare::groups(&config.devices, config.world_size),
        cuts: Vec::new(),
        span: config.netd.span,
        fallback: config.fallback,
        memory: InstanceMemory::of(config),
        pace: Duration::from_secs(1),
    });
    let said = |id, up| TreeEvent::Said(id, Generation(1), up);
    let facts = testkit::facts::llama_70b();
    let listening = FromNetd::Listening {
        peer_id: "12D3KooW".into(),
        addrs: vec!["/ip4/1.2.3.4/tcp/5".into()],
    };
    let events = [
        TreeEvent::Start,
        said(ChildId::Prepare, Up::Prepare(FromPrepare::Surveyed(Box::new(Survey::of(facts))))),
        said(ChildId::Netd, Up::Netd(listening)),
        said(ChildId::Netd, Up::Netd(FromNetd::ProposedSpan(Span::new(0, 4).expect("a span")))),
        said(ChildId::Prepare, Up::Prepare(FromPrepare::Prepared)),
    ];
    for event in events {
        tree.on(event, Instant::now());
    }
    tree
}

/// The state of a run with all kinds of segments.
fn state(config: ServeConfig) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("a folder");
    let instance = Instance::claim(folder.path(), None).expect("an instance");
    let mut segments = Segments::new(&instance, 0).expect("segments");
    let worker = WorkerId::solo(GroupId(0));
    segments.arena(&instance, Generation(1), 4096).expect("an arena");
    segments.kv(&instance, worker, KvChoice::Segment, |_| 4096).expect("pages");
    let identity =
        RingIdentity { worker, worker_generation: Generation(1), netd_generation: Generation(1) };
    segments.make_rings(&instance, identity).expect("rings");
    let mut handed = Handed::default();
    let child = HandedChild {
        id: ChildId::Worker(worker),
        generation: Generation(1),
        slot: 2,
        pid: 4711,
        pidfd: Fd::inherited(90),
        descriptors: Fd::inherited(91),
        last_tag: 3,
    };
    let said = Up::Netd(FromNetd::Failed { reason: ExitReason::Failed, message: "why".into() });
    let state = Handover {
        build: Build::this(),
        arguments: ["sepal", "serve", "m"].map(Into::into).to_vec(),
        tree: tree(&config),
        config,
        instance: "1".to_owned(),
        lock: Fd::inherited(92),
        status: Fd::inherited(93),
        metrics: Some(Fd::inherited(94)),
        page: None,
        leaving_pages: Vec::new(),
        children: vec![child],
        pending: vec![PendingEvent::Said(ChildId::Netd, Generation(1), said)],
        segments: segments.hand_over(&mut handed).expect("descriptors"),
        weights: Weights::default().hand_over(&mut handed).expect("descriptors"),
        facts: Some(testkit::facts::llama_70b()),
        span: Span::new(0, 4).ok(),
        addrs: vec!["/ip4/1.2.3.4/tcp/5".to_owned()],
        was_ready: true,
        patience: Duration::from_secs(5),
        resumes: false,
    };
    postcard::to_allocvec(&state).expect("bytes")
}

#[test]
fn fuzz_states_of_an_upgrade() {
    let one = testkit::configs::serve_config();
    let mut two = ServeConfig { devices: vec![Device::Cpu; 2], ..one.clone() };
    two.netd.span = SpanChoice::Count(4);
    two.metrics = Some("127.0.0.1:9".parse().expect("an address"));
    Target::new("states of an upgrade", [one, two].map(state)).fuzz(|input| {
        let read = Handover::read(input);
        if let Ok(state) = &read {
            let again = postcard::to_allocvec(state).expect("bytes");
            Handover::read(&*again).expect("what was written is read");
            // A tree that was read goes on without a panic, whatever it holds.
            let mut tree = state.tree.clone();
            let mut events =
                VecDeque::from([TreeEvent::HandedOver(state.patience), TreeEvent::Tick]);
            while let Some(event) = events.pop_front() {
                tree.on(event, Instant::now());
            }
        }
        outcome(&read)
    });
}
