//! The rule of same bits on the fast path, in one table: each row of a decode step alone = in
//! batches of 2, 7, 16 and 32 = after a restart of the worker, for every dtype and quantization.

use serde_json::json;
use shared::config::QuantType;
use shared::model::PAGE_TOKENS;
use testkit::models::llama_config;

use super::*;

const ROWS: usize = 32;

/// Heads of 32, which attention takes by products of pairs; the tensors are those of all tests.
fn model(dtype: DType, quant: QuantType) -> Model {
    let mut config = llama_config(BLOCKS as usize);
    config["num_attention_heads"] = json!(2);
    config["num_key_value_heads"] = json!(1);
    Model::stored(dtype, quant, &config)
}

/// The answers to one step of the sessions `first..first + count` in one job, without their moving
/// on.
fn step(
    netd: &mut Netd,
    limits: &JobLimits,
    sessions: &[Session],
    first: usize,
    count: usize,
) -> Vec<u8> {
    let inputs: Vec<f32> = (first..first + count).flat_map(|s| input(1, 100 + s)).collect();
    let rows = &sessions[first..first + count];
    let kind = WorkKind::of_step(count as u32, 1);
    let mut body = netd.job(kind, limits, count as u32, &inputs);
    body.pages.prefixes = rows.iter().map(|session| session.prefix).collect();
    body.pages.tables = rows.iter().map(|session| session.table.clone()).collect();
    netd.call(&body).unwrap()
}

/// The answers to one step of all sessions in jobs of `batch` rows.
fn steps(netd: &mut Netd, limits: &JobLimits, sessions: &[Session], batch: usize) -> Vec<u8> {
    (0..ROWS)
        .step_by(batch)
        .flat_map(|first| step(netd, limits, sessions, first, batch.min(ROWS - first)))
        .collect()
}

#[test]
fn a_row_has_the_same_bits_alone_in_any_batch_and_after_a_restart() {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for quant in [QuantType::None, QuantType::Int8, QuantType::Nf4] {
            let model = model(dtype, quant);
            let (limits, kv) = (model.limits(), kv_segment(model.facts()));
            let mut sessions = vec![Session::new(); ROWS];
            let mut alone = Vec::new();
            with_executor(&model, &kv, |netd, _| {
                let mut free = shuffled_pages();
                for (number, session) in sessions.iter_mut().enumerate() {
                    let prefill = input(1 + 5 * number % 31, number);
                    let body = session.step(netd, &limits, &mut free, &prefill);
                    netd.call(&body).unwrap();
                    // The step to come may begin a page; the poisoned rest of it must not show.
                    if (session.prefix as usize).is_multiple_of(PAGE_TOKENS) {
                        session.table.push(free.pop().unwrap());
                    }
                }
                alone = steps(netd, &limits, &sessions, 1);
                for batch in [2, 7, 16, 32] {
                    let together = steps(netd, &limits, &sessions, batch);
                    assert!(together == alone, "{dtype} {quant}: batches of {batch}");
                }
            });
            let distinct = alone.chunks(64).collect::<std::collections::HashSet<_>>();
            assert!(distinct.len() > ROWS, "the rows are not all the same");
            with_executor(&model, &kv, |netd, _| {
                for batch in [1, 7, 32] {
                    let later = steps(netd, &limits, &sessions, batch);
                    assert!(later == alone, "{dtype} {quant}: restarted, batches of {batch}");
                }
            });
        }
    }
}
