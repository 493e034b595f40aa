//! What an engine takes of a device's memory: what was planned for it, and nothing once it has
//! rehearsed.

use kernels::QuantType;
use kernels::StepRow;
use kernels::cuda::Cuda;
use kernels::cuda::emu::Emu;
use model::sizing::resident_bytes;
use shared::ids::PageId;
use shared::shm::segment::MemfdSegment;
use testkit::models::llama_config;
use testkit::wide_models::{mixture_config, mixture_tensors};

use super::*;
use crate::harness::planned_work;
use crate::harness::*;

#[test]
fn steps_after_the_rehearsal_take_no_memory_and_all_of_it_was_planned() {
    let config = mixture_config(BLOCKS as usize);
    let tensors = mixture_tensors(BLOCKS as usize, DType::Bf16);
    for model in [
        Model::stored(DType::Bf16, QuantType::Nf4, &llama_config(BLOCKS as usize)),
        Model::of_tensors(DType::Bf16, QuantType::Nf4, &config, &tensors, 0),
    ] {
        take_no_more_than_planned(&model);
    }
}

fn take_no_more_than_planned(model: &Model) {
    let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
    let bytes = model.facts().kv_segment_bytes(span(), KV_PAGES);
    let segment = MemfdSegment::create(&unique("planned"), bytes).unwrap();
    let shape = EngineShape {
        span: span(),
        dtype: model.facts().dtype,
        kv_pages: KV_PAGES,
        gradient_bytes: shared::model::GRADIENT_BYTES,
        kv_survives: false,
    };
    let backend = Cuda::new(Emu::new(2));
    let kv = KvMap::map(&segment).unwrap();
    let mut engine = Engine::new(backend, &model.spec, &weights, kv, shape).unwrap();
    engine.rehearse().unwrap();
    let rehearsed = engine.backend.taken();
    let planned = weights.bytes() + bytes as u64 + planned_work(&model.spec);
    assert!(rehearsed.bytes <= planned, "{rehearsed:?} of {planned}");
    // As a measurement leaves it.
    engine.trim();
    for (sessions, tokens, prefix) in [
        (1, 1, 0),
        (1, 17, 3),
        (8, 1, 100),
        (32, 1, 40),
        (2, 30, 0),
        (1, engine.forward_tokens(), 0),
        (3, 1, 1),
    ] {
        let used = (prefix + tokens).div_ceil(PAGE_TOKENS);
        let page = |number: usize| PageId(u32::try_from(number).unwrap());
        let tables: Vec<Vec<PageId>> = (0..sessions)
            .map(|session| (session * used..(session + 1) * used).map(page).collect())
            .collect();
        let rows: Vec<StepRow<'_>> =
            tables.iter().map(|pages| StepRow::new(tokens, prefix, pages)).collect();
        let mut hidden = vec![0.25; sessions * tokens * engine.hidden_size()];
        engine.trial(&rows, &mut hidden, sessions * used).unwrap();
    }
    let after = engine.backend.taken();
    assert_eq!(after.allocations, rehearsed.allocations, "{after:?}");
    assert!(
        rehearsed.bytes > resident_bytes(&model.spec, WorkKind::Backward) as u64,
        "what is resident is taken before the first job"
    );
}
