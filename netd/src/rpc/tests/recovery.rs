//! Deaths of the worker, and what its clients see of them.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use shared::control::DeathCause::{Outside, SelfInflicted};

use super::rig::*;
use crate::clock::skip;
use crate::rpc::Timeouts;

/// Sessions that each take `steps` steps and check every answer.
async fn generate(rig: &Rig, number: usize, steps: usize) -> Result<(), String> {
    let mut session = rig.session().await;
    let mut sum = number as f32;
    session.open(hidden(1, &[sum]), 64).await?;
    for step in 1..steps {
        sum += step as f32;
        let answer = session.step(hidden(1, &[step as f32]), Some(step as u32), None).await?;
        assert_eq!(firsts(&answer), [sum + 4.0]);
    }
    session.close().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_go_on_over_many_kills_with_the_same_results() {
    let rig = Rig::new().await;
    let memory = rig.workers[0].memory.clone();
    let rig = std::sync::Arc::new(tokio::sync::RwLock::new(rig));
    let clients: Vec<_> = (0..8)
        .map(|number| {
            let rig = rig.clone();
            tokio::spawn(async move {
                let mut session = rig.read().await.session().await;
                let mut sum = number as f32;
                session.open(hidden(1, &[sum]), 64).await.unwrap();
                for step in 1..60 {
                    sum += step as f32;
                    let answer =
                        session.step(hidden(1, &[step as f32]), Some(step), None).await.unwrap();
                    assert_eq!(firsts(&answer), [sum + 4.0]);
                }
                session.close().await;
            })
        })
        .collect();
    for round in 1..=10usize {
        let seen = round * 20;
        until(|| memory.jobs.lock().unwrap().len() >= seen).await;
        let mut rig = rig.write().await;
        // Every kill hits jobs in flight.
        memory.orders.paused.store(true, SeqCst);
        until(|| rig.service.workers.arena().slots_in_use() > 0).await;
        rig.kill(0, Outside, true);
        memory.orders.paused.store(false, SeqCst);
        rig.start(0);
    }
    for client in clients {
        client.await.unwrap();
    }
    let rig = rig.read().await;
    assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
    until(|| rig.service.kv.figures().tokens_free == 65536).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_without_a_mirror_takes_its_sessions_with_it_and_no_others() {
    let mut rig = Rig::new().await;
    rig.memory().orders.loses_kv.store(true, SeqCst);
    rig.kill(0, Outside, true);
    rig.start(0);
    let (mut idle, mut busy) = (rig.session().await, rig.session().await);
    for session in [&mut idle, &mut busy] {
        session.open(hidden(1, &[1.0]), 30).await.unwrap();
    }
    rig.memory().orders.paused.store(true, SeqCst);
    let message = busy.message(hidden(1, &[2.0]), None, None, None);
    busy.send(&message).await;
    until(|| rig.service.workers.arena().slots_in_use() > 0).await;
    rig.kill(0, Outside, true);
    rig.memory().orders.paused.store(false, SeqCst);
    rig.start(0);
    let jobs = rig.memory().jobs.lock().unwrap().len();
    let lost = busy.answer().await.unwrap_err();
    assert!(lost.contains("open a new session"), "{lost}");
    let lost = idle.step(hidden(1, &[2.0]), None, None).await.unwrap_err();
    assert!(lost.contains("open a new session"), "{lost}");
    // Neither step reached the new generation.
    assert_eq!(rig.memory().jobs.lock().unwrap().len(), jobs);
    let mut fresh = rig.session().await;
    let answer = fresh.open(hidden(1, &[1.0]), 30).await.unwrap();
    assert_eq!(firsts(&answer), [5.0]);
    let answer = fresh.step(hidden(1, &[2.0]), None, None).await.unwrap();
    assert_eq!(firsts(&answer), [7.0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nonsense_in_a_ring_is_reported_once_and_its_jobs_go_to_the_next_generation() {
    let (mut rig, mut session) = Rig::with_session().await;
    rig.memory().orders.paused.store(true, SeqCst);
    let message = session.message(hidden(1, &[2.0]), None, None, None);
    session.send(&message).await;
    until(|| rig.service.workers.arena().slots_in_use() > 0).await;
    rig.scribble(0);
    let report = tokio::time::timeout(DEADLINE, rig.broken.recv()).await;
    let broken = report.unwrap().unwrap();
    let worker = &rig.workers[0];
    assert_eq!((broken.worker, broken.generation), (worker.id(), worker.generation));
    assert!(broken.message.contains("1099511627776"), "{broken:?}");
    // What a job names stays in use while the worker may write it.
    assert!(rig.service.workers.arena().slots_in_use() > 0);
    rig.scribble(0);
    rig.kill(0, SelfInflicted, true);
    rig.memory().orders.paused.store(false, SeqCst);
    rig.start(0);
    assert_eq!(firsts(&session.answer().await.unwrap()), [7.0]);
    assert!(rig.broken.try_recv().is_err(), "one report");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_lost_after_its_effects_is_done_again_with_the_same_result() {
    let mut rig = Rig::new().await;
    let mut session = rig.session().await;
    session.open(hidden(2, &[1.0, 2.0]), 30).await.unwrap();
    rig.memory().orders.dies_at_tokens.store(3, SeqCst);
    let message =
        session.message(hidden(2, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), None, None, Some(&[1, 1]));
    session.send(&message).await;
    rig.wait_for_death(0);
    rig.memory().orders.dies_at_tokens.store(0, SeqCst);
    rig.report_death(0, Outside, true);
    rig.start(0);
    let answer = session.answer().await.unwrap();
    assert_eq!(firsts(&answer), [7.0, 9.0, 12.0, 10.0, 15.0, 21.0]);
    let jobs = rig.memory().jobs.lock().unwrap().clone();
    assert_eq!(jobs.len(), 3);
    assert_eq!(jobs[1], jobs[2]);
    assert_eq!(jobs[1].pages.copies.len(), 1);
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_crashes_the_worker_alone_twice_is_refused_and_no_other() {
    let mut rig = Rig::new().await;
    rig.memory().orders.dies_at_tokens.store(13, SeqCst);
    let mut good = rig.session().await;
    good.open(hidden(1, &[1.0]), 30).await.unwrap();
    let mut bad = rig.session().await;
    bad.open(hidden(1, &[1.0]), 30).await.unwrap();
    let poison = bad.message(hidden(1, &[1.0; 13]), None, None, None);
    let step = good.message(hidden(1, &[2.0]), None, None, None);
    rig.memory().orders.paused.store(true, SeqCst);
    bad.send(&poison).await;
    good.send(&step).await;
    until(|| rig.service.workers.arena().slots_in_use() == 6).await;
    rig.memory().orders.paused.store(false, SeqCst);
    let mut deaths = 0;
    let text = loop {
        let died = rig.workers[0].dead();
        if died {
            deaths += 1;
            rig.wait_for_death(0);
            rig.report_death(0, SelfInflicted, true);
            rig.start(0);
        }
        if let Ok(answer) = tokio::time::timeout(Duration::from_millis(5), bad.answer()).await {
            break answer.unwrap_err();
        }
    };
    assert!(text.contains("crashed the worker twice"), "{text}");
    assert!((2..=3).contains(&deaths), "{deaths} deaths");
    assert_eq!(firsts(&good.answer().await.unwrap()), [7.0]);
    good.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_will_not_come_back_fails_its_sessions_with_a_text() {
    let (mut rig, mut session) = Rig::with_session().await;
    rig.memory().orders.paused.store(true, SeqCst);
    let message = session.message(hidden(1, &[2.0]), None, None, None);
    session.send(&message).await;
    until(|| rig.service.workers.arena().slots_in_use() == 3).await;
    rig.kill(0, Outside, false);
    assert!(session.answer().await.unwrap_err().contains("will not be restarted"));
    let mut late = rig.session().await;
    assert!(late.open(hidden(1, &[1.0]), 30).await.unwrap_err().contains("will not be restarted"));
    until(|| rig.service.workers.arena().slots_in_use() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_unkillable_workers_jobs_name_stays_out_of_use() {
    let rig = Rig::new().await;
    let mut session = rig.session().await;
    rig.memory().orders.paused.store(true, SeqCst);
    let message = session.message(hidden(1, &[2.0]), Some(32), None, None);
    session.send(&message).await;
    until(|| rig.memory().orders.holds.load(SeqCst)).await;
    let worker = &rig.workers[0];
    rig.service.workers.unkillable(worker.id(), worker.generation);
    assert!(session.answer().await.unwrap_err().contains("will not be restarted"));
    until(|| rig.service.open_sessions() == 0).await;
    assert_eq!(rig.service.workers.arena().slots_in_use(), 3);
    assert_eq!(rig.service.kv.figures().tokens_free, 65536 - 128);
    rig.memory().orders.paused.store(false, SeqCst);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_arena_slows_down_and_loses_nothing() {
    // Bulk of 768 KiB holds one request of 1024 tokens (two slots of 256 KiB) at a time.
    let rig = Rig::shaped(Shape { arena_bytes: 1 << 20, ..Shape::default() }).await;
    let rig = std::sync::Arc::new(rig);
    rig.memory().orders.paused.store(true, SeqCst);
    let clients: Vec<_> = (0..6)
        .map(|_| {
            let rig = rig.clone();
            tokio::spawn(async move {
                let mut session = rig.session().await;
                let answer = session.open(hidden(1, &[1.0; 1024]), 1024).await.unwrap();
                assert_eq!(firsts(&answer)[1023], 1028.0);
                session.close().await;
            })
        })
        .collect();
    let waiting = || rig.service.workers.arena().waiting() + rig.service.admission_queue.waiting();
    until(|| waiting() == 5).await;
    rig.memory().orders.paused.store(false, SeqCst);
    for client in clients {
        client.await.unwrap();
    }
    assert_eq!(rig.service.workers.arena().slots_in_use(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_jobs_than_the_ring_holds_all_get_done() {
    let rig =
        std::sync::Arc::new(Rig::shaped(Shape { arena_bytes: 16 << 20, ..Shape::default() }).await);
    rig.memory().orders.paused.store(true, SeqCst);
    let service = rig.service.clone();
    let jobs: Vec<_> = (0..600)
        .map(|_| {
            let service = service.clone();
            tokio::spawn(async move {
                let request = crate::rpc::compute::Arguments::of(
                    &[
                        hidden(1, &[1.0]),
                        swarm::wire::tensor::dummy_tensor(swarm::wire::tensor::WireDtype::F32),
                    ],
                    None,
                    false,
                );
                let caller = crate::workers::job::Caller {
                    peer: p2p::PeerId::random(),
                    points: 0.0,
                    compression: swarm::wire::messages::Compression::None,
                };
                let blocks = vec![shared::block::BlockIndex(0)];
                {
                    let request = request.unwrap();
                    let kind = |_, _| shared::job::WorkKind::Forward;
                    let job = service.job(kind, blocks, None, &request, caller).unwrap();
                    service.compute(job, &request).await.map(|(tensor, _)| firsts(&tensor))
                }
            })
        })
        .collect();
    until(|| service.workers.arena().slots_in_use() >= 3 * 256).await;
    rig.memory().orders.paused.store(false, SeqCst);
    for job in jobs {
        assert_eq!(job.await.unwrap(), Ok(vec![2.0]));
    }
    assert_eq!(service.workers.arena().slots_in_use(), 0);
}

#[tokio::test]
async fn silent_sessions_end_and_long_ones_get_an_empty_text() {
    let (rig, Timeouts { step, session, .. }) = (Rig::new().await, Shape::default().timeouts);
    assert!(step < session && session < 2 * step);
    let (mut silent, mut endless) = (rig.session().await, rig.session().await);
    silent.open(hidden(1, &[1.0]), 30).await.unwrap();
    endless.open(hidden(1, &[1.0]), 30).await.unwrap();
    skip(session / 2).await;
    endless.step(hidden(1, &[1.0]), None, None).await.unwrap();
    skip(step - session / 2).await;
    assert_eq!(silent.answer().await, Err("closed".into()));
    skip(session - step).await;
    assert_eq!(endless.answer().await, Err(String::new()));
    generate(&rig, 1, 3).await.unwrap();
}
