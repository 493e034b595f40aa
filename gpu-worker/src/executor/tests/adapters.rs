//! Jobs that choose adapters.

use super::*;

/// Adapters of the sessions: some share one, some have none.
const CHOICES: [Option<u32>; 6] = [None, Some(1), Some(0), Some(1), None, Some(0)];

#[test]
fn decode_steps_with_different_adapters_are_computed_together_and_have_the_bits_of_each_alone() {
    let model = Model::with_adapters(DType::Bf16, 2);
    let limits = model.limits();
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let mut free = shuffled_pages();
        let step =
            |netd: &Netd, session: &mut Session, free: &mut Vec<PageId>, i: usize, x: &[f32]| {
                JobBody { adapter: CHOICES[i], ..session.step(netd, &limits, free, x) }
            };
        let (prefill, next) = (input(21, 4), input(1, 50));
        let (mut alone, mut sessions) = (Vec::new(), Vec::new());
        for i in 0..CHOICES.len() {
            let mut session = Session::new();
            let body = step(netd, &mut session, &mut free, i, &prefill);
            netd.call(&body).unwrap();
            let before = session.clone();
            let body = step(netd, &mut session, &mut free, i, &next);
            alone.push(netd.call(&body).unwrap());
            // The same step again, later and together with the others.
            sessions.push(before);
        }
        for (i, j) in [(0, 1), (0, 2), (1, 2)] {
            assert!(alone[i] != alone[j], "sessions {i} and {j} have different adapters");
        }
        for (i, j) in [(0, 4), (1, 3), (2, 5)] {
            assert!(alone[i] == alone[j], "sessions {i} and {j} have the same adapter");
        }
        let jobs: Vec<_> = sessions
            .iter_mut()
            .enumerate()
            .map(|(i, session)| {
                let body = step(netd, session, &mut free, i, &next);
                (netd.push(&body), body)
            })
            .collect();
        netd.wake();
        for (i, (id, body)) in jobs.into_iter().enumerate() {
            netd.answer(id).unwrap();
            assert!(netd.read(body.output) == alone[i], "session {i}");
        }
    });
}

#[test]
fn forwards_take_their_adapter_and_without_one_the_bits_are_those_of_the_bare_model() {
    let (bare, model) = (Model::new(DType::F32), Model::with_adapters(DType::F32, 2));
    let whole = input(45, 3);
    let forward = |model: &Model, adapters: &[Option<u32>]| {
        let mut outputs = Vec::new();
        with_executor(model, &kv_segment(model.facts()), |netd, _| {
            for adapter in adapters {
                let mut body = netd.job(WorkKind::Forward, &model.limits(), 1, &whole);
                body.adapter = *adapter;
                outputs.push(netd.call(&body).unwrap());
            }
        });
        outputs
    };
    let adapted = forward(&model, &[None, Some(0), Some(1), None]);
    assert!(adapted[0] == forward(&bare, &[None])[0]);
    assert!(adapted[0] == adapted[3]);
    assert!(adapted[0] != adapted[1] && adapted[1] != adapted[2]);
}

#[test]
fn an_index_that_is_not_loaded_is_refused() {
    let model = Model::with_adapters(DType::F32, 1);
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let mut body = netd.job(WorkKind::Forward, &model.limits(), 1, &input(2, 3));
        body.adapter = Some(1);
        let refused = JobError::UnknownAdapter { adapter: 1, loaded: 1 };
        assert_eq!(netd.call(&body), Err(refused));
    });
}
