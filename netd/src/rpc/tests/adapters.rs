//! Requests that choose an adapter: its index reaches the workers in every kind of job.

use prost::Message;
use shared::block::Span;
use shared::job::WorkKind;
use swarm::names;
use swarm::wire::keys;
use swarm::wire::messages::*;
use swarm::wire::metadata::encode_batch_metadata;
use swarm::wire::msgpack::Value;
use swarm::wire::tensor::{WireDtype, dummy_tensor};

use super::errors::with_key;
use super::rig::*;

/// Kind and adapter of the jobs so far, of all workers.
fn jobs(rig: &Rig) -> Vec<(WorkKind, Option<u32>)> {
    let jobs = std::mem::take(&mut *rig.memory().jobs.lock().unwrap());
    jobs.iter().map(|job| (job.kind, job.adapter)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adapter_is_chosen_per_request_and_for_the_life_of_a_session() {
    let rig = Rig::new().await;
    for (name, index) in [("org/second", Some(1)), ("org/first", Some(0)), ("", None)] {
        let request = |tensors: usize| ExpertRequest {
            uid: uids(0..2),
            tensors: [hidden(1, &[1.0]), hidden(1, &[1.0])][..tensors - 1]
                .iter()
                .cloned()
                .chain([dummy_tensor(WireDtype::F32)])
                .collect(),
            metadata: encode_batch_metadata(Some(name), tensors).into(),
        };
        rig.call(names::FORWARD, request(2)).await.unwrap();
        rig.call(names::BACKWARD, request(3)).await.unwrap();
        assert_eq!(jobs(&rig), [(WorkKind::Forward, index), (WorkKind::Backward, index)]);

        let mut session = rig.session().await;
        let message = session.message(hidden(1, &[1.0, 2.0]), Some(30), Some(0), None);
        let first = with_key(message, keys::ACTIVE_ADAPTER, Some(Value::str(name)));
        session.ask(&first).await.unwrap();
        // Later messages name none: Petals looks at the first.
        session.step(hidden(1, &[3.0]), None, None).await.unwrap();
        assert_eq!(jobs(&rig), [(WorkKind::Decode, index); 2]);
        session.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_adapter_is_refused_before_anything_is_computed() {
    let rig = Rig::new().await;
    let request = ExpertRequest {
        uid: uids(0..2),
        tensors: vec![hidden(1, &[1.0]), dummy_tensor(WireDtype::F32)],
        metadata: encode_batch_metadata(Some("org/third"), 2).into(),
    };
    let error = rig.call(names::FORWARD, request).await.unwrap_err();
    assert!(error.contains("adapter org/third not found"), "{error}");
    assert!(jobs(&rig).is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_worker_of_a_chain_is_told_the_adapter() {
    let spans = vec![Span::new(0, 1).unwrap(), Span::new(1, BLOCKS).unwrap()];
    let shape = Shape { spans, ..Shape::default() };
    let rig = Rig::shaped(shape).await;
    let request = ExpertRequest {
        uid: uids(0..BLOCKS),
        tensors: vec![hidden(1, &[1.0]), hidden(1, &[1.0]), dummy_tensor(WireDtype::F32)],
        metadata: encode_batch_metadata(Some("org/second"), 3).into(),
    };
    let answer = rig.call(names::BACKWARD, request).await.unwrap();
    assert_eq!(ExpertResponse::decode(answer).unwrap().tensors.len(), 1);
    for worker in &rig.workers {
        let jobs = worker.memory.jobs.lock().unwrap();
        assert!(!jobs.is_empty() && jobs.iter().all(|job| job.adapter == Some(1)));
    }
}
