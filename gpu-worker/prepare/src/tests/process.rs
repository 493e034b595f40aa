//! Prepare as a process: what it says, and how it ends.

use std::os::fd::AsFd;

use shared::control::FdTag;

use super::refusals::change_config;
use super::*;

#[test]
#[ignore = "the process that the other tests start"]
fn child() {
    as_child(Role::Prepare, run);
}

fn started(config: &PrepareConfig) -> (Seat, Spawned<ToPrepare, FromPrepare>) {
    started_on(config, &[Device::Cpu], 1)
}

fn started_on(
    config: &PrepareConfig,
    devices: &[Device],
    world_size: usize,
) -> (Seat, Spawned<ToPrepare, FromPrepare>) {
    let seat = Seat::of(Role::Prepare, Generation(1));
    let spawned = spawn(Role::Prepare, Generation(1), "tests::process::child");
    let board = seat.board.try_clone().unwrap();
    spawned.descriptors.send(FdTag(1), &[board.as_fd()]).unwrap();
    let init = ToPrepare::Init {
        config: config.clone(),
        board: seat.seat.clone(),
        groups: devices.chunks(world_size).map(<[Device]>::to_vec).collect(),
        worker: WorkerConfig {
            rates_dir: Some(config.cache_dir.clone()),
            ..WorkerConfig::default()
        },
        fds: FdTag(1),
    };
    spawned.down.send(init).unwrap();
    (seat, spawned)
}

#[test]
fn the_process_tells_facts_then_progress_then_that_the_manifest_is_there() {
    let place = place(None);
    write_model(place.folder(), &llama_config(3), &llama_tensors(3, DType::F32));
    let (seat, mut prepare) = started(&place.config);
    let next = || prepare.up.try_recv_timeout(DEADLINE).expect("a message in time");
    let FromPrepare::Surveyed(survey) = next() else { panic!("the survey comes first") };
    let path = place.folder().join("manifest.json");
    prepare
        .down
        .send(ToPrepare::Span { span: span(1, 3), manifest: path.clone(), cut: vec![2] })
        .unwrap();
    let mut told = Vec::new();
    loop {
        match next() {
            FromPrepare::Progress(progress) => told.push(progress),
            FromPrepare::Prepared => break,
            other => panic!("{other:?} before the manifest"),
        }
    }
    let mut blocks: Vec<_> =
        told.iter().map(|progress| (progress.block, progress.blocks)).collect();
    blocks.dedup();
    assert_eq!(blocks, [(1, 2), (2, 2)], "one block after the other");
    assert!(
        told.last().is_some_and(|last| last.bytes_done > 0 && last.bytes_total > 0),
        "{told:?}"
    );
    assert_eq!(wait(&mut prepare.process).code(), Some(0));
    let manifest = Manifest::read(&path).unwrap();
    assert_eq!(manifest.model, survey.facts);
    assert_eq!(manifest.missing_block(span(1, 3)), None);
    assert_eq!(manifest.missing_block(span(0, 3)), Some(BlockIndex(0)));
    let progress = seat.board.view().child_snapshot(0).unwrap().progress;
    assert!(progress >= 2 * 9, "one per tensor, not {progress}");
}

#[test]
fn the_process_tells_what_each_rank_holds_and_tells_the_same_at_every_start() {
    let place = place(None);
    write_model(place.folder(), &llama_config(2), &llama_tensors(2, DType::F32));
    let told = |devices: &[Device], world_size| {
        let (_seat, prepare) = started_on(&place.config, devices, world_size);
        match prepare.up.try_recv_timeout(DEADLINE).expect("a message in time") {
            FromPrepare::Surveyed(survey) => (survey.ranks, survey.facts),
            other => panic!("{other:?} before the survey"),
        }
    };
    let (groups, facts) = told(&[Device::Cpu; 4], 2);
    let [first, second] = &groups[..] else { panic!("{groups:?}") };
    assert_eq!(first, second);
    let [one, other] = &first[..] else { panic!("{first:?}") };
    assert_eq!(one.heads + other.heads, facts.attention_heads);
    let bytes = one.block_bytes + other.block_bytes;
    // Norms are on both ranks.
    assert!(bytes > facts.block_bytes && bytes < facts.block_bytes * 11 / 10, "{bytes} {facts:?}");
    assert!(place.config.cache_dir.join("sepal_shares_v1.json").is_file());
    assert_eq!(told(&[Device::Cpu; 2], 2).0, std::slice::from_ref(first));
}

#[test]
fn blocks_that_cannot_be_shared_are_refused_before_anything_else_is_told() {
    let place = place(None);
    write_model(place.folder(), &llama_config(1), &llama_tensors(1, DType::F32));
    let (_seat, mut prepare) = started_on(&place.config, &[Device::Cpu; 15], 15);
    match prepare.up.try_recv_timeout(DEADLINE).unwrap() {
        FromPrepare::Failed { reason, message } => {
            assert_eq!(reason, ExitReason::BadConfig);
            assert!(message.contains("query heads cannot be shared by 15 ranks"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(wait(&mut prepare.process).code(), Some(2));
}

#[test]
fn the_process_says_what_is_wrong_and_exits_with_the_reason() {
    let place = place(None);
    write_model(place.folder(), &llama_config(1), &llama_tensors(1, DType::F32));
    change_config(place.folder(), "model_type", json!("gpt9"));
    let (_seat, mut prepare) = started(&place.config);
    match prepare.up.try_recv_timeout(DEADLINE).unwrap() {
        FromPrepare::Failed { reason, message } => {
            assert_eq!(reason, ExitReason::BadConfig);
            assert!(message.contains("gpt9"), "{message}");
        }
        other => panic!("{other:?} instead of Failed"),
    }
    assert_eq!(wait(&mut prepare.process).code(), Some(ExitReason::BadConfig.code().into()));
}

#[test]
fn a_drain_or_a_closed_channel_ends_the_process_before_a_span_is_chosen() {
    let place = place(None);
    write_model(place.folder(), &llama_config(1), &llama_tensors(1, DType::F32));
    let (_seat, mut prepare) = started(&place.config);
    prepare.down.send(ToPrepare::Drain).unwrap();
    assert_eq!(wait(&mut prepare.process).code(), Some(0));
    let (_seat, Spawned { mut process, down, .. }) = started(&place.config);
    drop(down);
    assert_eq!(wait(&mut process).code(), Some(ExitReason::ParentGone.code().into()));
}
