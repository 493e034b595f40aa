//! Decode steps on the emulator: recorded launches against direct ones.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blocks::map::MappedWeights;
use kernels::cuda::Cuda;
use kernels::cuda::emu::Emu;
use model::BlockSpec;
use model::sizing::{GRAPH_LAUNCH_BYTES, Sharing, graph_block_bytes};
use serde_json::json;
use shared::config::QuantType;
use shared::dtype::DType;
use shared::ids::{JobId, PageId};
use shared::job::{JobBody, Prompts, SlotRef, StepPages, WorkKind};
use shared::shm::arena::ArenaMap;
use shared::shm::segment::MemfdSegment;
use testkit::jobs::job_body;
use testkit::models::{bytes, values, word};
use testkit::wide_models::{mixture_config, mixture_tensors, wide_config, wide_tensors};

use super::{Engine, EngineShape};
use crate::harness::{BLOCKS, KV_PAGES, Model, alone, kv_segment, span, unique};
use crate::job::Job;
use crate::schedule::{Schedule, UnitTimes};

pub(super) const HIDDEN: usize = 128;
pub(super) const SLOT: u64 = 1 << 16;

/// An engine on the emulator, and sessions of one row each.
pub(super) struct Bench<'w> {
    pub engine: Engine<'w, Cuda<Emu>>,
    pub arena: Arc<ArenaMap>,
    schedule: Schedule,
    /// Positions of each session; its pages are its own.
    sessions: Vec<usize>,
    /// Most blocks of a unit so far.
    longest: u32,
    /// Tokens of the deep prompts of every step.
    prompts: usize,
}

pub(super) fn model(adapters: usize) -> Model {
    let tensors = wide_tensors(BLOCKS as usize, DType::Bf16);
    let config = wide_config(BLOCKS as usize);
    Model::of_tensors(DType::Bf16, QuantType::Nf4, &config, &tensors, adapters)
}

/// A model whose MLP is a mixture of experts.
pub(super) fn mixture(quant: QuantType, adapters: usize) -> Model {
    let tensors = mixture_tensors(BLOCKS as usize, DType::Bf16);
    let config = mixture_config(BLOCKS as usize);
    Model::of_tensors(DType::Bf16, quant, &config, &tensors, adapters)
}

impl<'w> Bench<'w> {
    pub(super) fn new(model: &'w Model, weights: &'w MappedWeights, sessions: usize) -> Bench<'w> {
        let shape = EngineShape {
            span: span(),
            dtype: DType::Bf16,
            kv_pages: KV_PAGES,
            gradient_bytes: shared::model::GRADIENT_BYTES,
            kv_survives: true,
        };
        let (kv, cuda) = (alone(&kv_segment(model.facts())), Cuda::new(Emu::new(2)));
        let mut engine = Engine::new(cuda, &model.spec, weights, kv, shape).unwrap();
        let segment = MemfdSegment::create(&unique("arena"), 4 << 20).unwrap();
        let arena = Arc::new(ArenaMap::map(&segment).unwrap());
        engine.link(&arena);
        let patient = Duration::from_secs(3600);
        Bench {
            engine,
            arena,
            schedule: Schedule::new(UnitTimes { bulk: Duration::ZERO, decode: patient }),
            sessions: vec![0; sessions],
            longest: 0,
            prompts: 0,
        }
    }

    /// A step of `tokens` tokens of a session; its values depend on session and position alone.
    fn body(&mut self, session: usize, tokens: usize, adapter: Option<u32>) -> JobBody {
        let prefix = self.sessions[session];
        self.sessions[session] += tokens;
        let slot =
            |number: u64| SlotRef { offset: number * SLOT, len: (tokens * HIDDEN * 2) as u64 };
        let (input, output) = (slot(2 * session as u64), slot(2 * session as u64 + 1));
        let value = |i: usize| ((prefix * HIDDEN + i) as f32 * 0.731 + session as f32).sin();
        let values: Vec<u8> = (0..tokens * HIDDEN)
            .flat_map(|i| half::bf16::from_f32(value(i)).to_le_bytes())
            .collect();
        self.arena.write(input.offset, &values).unwrap();
        let first = 8 * session as u32;
        let prompts = (self.prompts > 0).then(|| self.prompts_of(session));
        JobBody {
            dtype: DType::Bf16,
            adapter,
            hidden: HIDDEN as u32,
            pages: StepPages {
                prefixes: vec![prefix as u32],
                tables: vec![(first..first + 8).map(PageId).collect()],
                copies: vec![],
            },
            input,
            output,
            prompts,
            ..job_body(WorkKind::of_step(1, tokens as u32), 1, tokens as u32, BLOCKS)
        }
    }

    /// Deep prompts of a session for all blocks, in the arena.
    fn prompts_of(&mut self, session: usize) -> Prompts {
        let len = BLOCKS as usize * self.prompts * HIDDEN;
        let values: Vec<u8> = (0..len)
            .flat_map(|i| {
                let value = ((i + 7 * session) as f32 * 0.37).cos();
                half::bf16::from_f32(value).to_le_bytes()
            })
            .collect();
        let slot = SlotRef { offset: (16 + session as u64) * SLOT, len: values.len() as u64 };
        self.arena.write(slot.offset, &values).unwrap();
        Prompts { slot, batch: 1, tokens: self.prompts as u32 }
    }

    /// Runs steps of (session, tokens, adapter) together; their outputs.
    fn steps(&mut self, steps: &[(usize, usize, Option<u32>)]) -> Vec<Vec<u8>> {
        let (mut jobs, mut begun) = (HashMap::new(), HashMap::new());
        let mut outputs = Vec::new();
        for &(session, tokens, adapter) in steps {
            let body = self.body(session, tokens, adapter);
            outputs.push(body.output);
            let job = Job::new(JobId(1), body, 16);
            let key = self.schedule.accept(job.walk());
            begun.insert(key, self.engine.begin(&job, 0).unwrap());
            jobs.insert(key, job);
        }
        while let Some(unit) = self.schedule.next(Instant::now()) {
            self.longest = self.longest.max(unit.count);
            self.engine.unit(&unit, &jobs, &mut begun).unwrap();
            for advance in self.schedule.done(&unit, Duration::from_millis(1)) {
                if advance.finished {
                    let job = jobs.remove(&advance.job).unwrap();
                    self.engine.output(&job, &begun[&advance.job]).unwrap();
                }
            }
        }
        self.engine.synchronize().unwrap();
        outputs
            .into_iter()
            .map(|slot| {
                let mut bytes = vec![0u8; slot.len as usize];
                self.arena.read(slot.offset, &mut bytes).unwrap();
                bytes
            })
            .collect()
    }

    /// Sessions of different lengths, together and alone, over the ends of pages and of tiles of
    /// attention; all outputs.
    fn talk(&mut self, adapters: [Option<u32>; 3]) -> Vec<Vec<u8>> {
        let [a, b, c] = adapters;
        let mut outputs = self.steps(&[(0, 14, a), (1, 30, b), (2, 61, c)]);
        for step in 0..5 {
            outputs.extend(self.steps(&[(0, 1, a), (1, 1, b), (2, 1, c)]));
            outputs.extend(self.steps(&[(step % 3, 2, adapters[step % 3])]));
        }
        outputs
    }
}

#[test]
fn recorded_steps_have_the_bits_of_direct_ones_and_are_recorded_once() {
    let model = model(0);
    let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
    let mut direct = Bench::new(&model, &weights, 3);
    let expected = direct.talk([None; 3]);
    assert_eq!(direct.engine.steps.recorded(), 0);
    let mut recorded = Bench::new(&model, &weights, 3);
    recorded.engine.record_steps().unwrap();
    let warm = recorded.engine.steps.recorded();
    assert_eq!(warm, 6 * (u64::from(BLOCKS) + 1), "1, 2, 4, 8, 16 and 32 tokens, and a run");
    let got = recorded.talk([None; 3]);
    assert!(got == expected, "recorded steps differ");
    assert_eq!(recorded.engine.steps.recorded(), warm, "nothing is recorded again");
    assert_eq!(recorded.longest, BLOCKS, "steps go through all blocks at once");
    assert!(got.iter().flatten().any(|&byte| byte != 0));
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn mixtures_of_experts_are_recorded_and_have_the_bits_of_direct_steps() {
    for quant in [QuantType::Nf4, QuantType::None] {
        let model = mixture(quant, 0);
        let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
        let mut direct = Bench::new(&model, &weights, 3);
        let expected = direct.talk([None; 3]);
        let mut recorded = Bench::new(&model, &weights, 3);
        recorded.engine.record_steps().unwrap();
        let warm = recorded.engine.steps.recorded();
        assert_eq!(warm, 6 * (u64::from(BLOCKS) + 1));
        let got = recorded.talk([None; 3]);
        assert!(got == expected, "recorded steps differ");
        assert_eq!(recorded.engine.steps.recorded(), warm);
        assert_eq!(recorded.longest, BLOCKS);
        for (tokens, most) in [(1, 12), (8, 15)] {
            let launches = recorded.engine.steps.launches(0, tokens).expect("a recording");
            assert!(launches <= most, "{launches} launches");
        }
        // A decode step takes nothing of the device any more.
        let before = recorded.engine.backend.taken();
        recorded.steps(&[(0, 1, None), (1, 1, None), (2, 1, None)]);
        assert_eq!(recorded.engine.backend.taken(), before);
    }
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn blocks_with_other_sums_and_norms_are_recorded_with_the_bits_of_direct_steps() {
    let falcon = json!({
        "model_type": "falcon", "hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": BLOCKS,
    });
    let mut two_norms = falcon.clone();
    two_norms["new_decoder_architecture"] = json!(true);
    two_norms["num_kv_heads"] = json!(1);
    let bloom = json!({"model_type": "bloom", "hidden_size": 128, "n_layer": BLOCKS, "n_head": 2});
    for config in [falcon, two_norms, bloom] {
        let spec = BlockSpec::from_config(&config).unwrap();
        let tensors = (0..BLOCKS as usize)
            .flat_map(|block| spec.tensors(block))
            .enumerate()
            .map(|(seed, tensor)| {
                let data = bytes(DType::Bf16, &values(&tensor.shape, seed));
                (tensor.full_name, (word(DType::Bf16), tensor.shape, data))
            })
            .collect();
        let model = Model::of_tensors(DType::Bf16, QuantType::None, &config, &tensors, 0);
        let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
        let expected = Bench::new(&model, &weights, 3).talk([None; 3]);
        let mut recorded = Bench::new(&model, &weights, 3);
        recorded.engine.record_steps().unwrap();
        assert!(recorded.engine.steps.launches(0, 1).is_some());
        let got = recorded.talk([None; 3]);
        assert!(got == expected, "recorded steps of {config} differ");
        assert!(recorded.engine.steps.replayed() > 0);
    }
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn steps_with_adapters_and_deep_prompts_are_recorded_and_have_the_bits_of_direct_ones() {
    recorded_with_adapters(&model(2), 9);
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn adapters_beside_experts_are_recorded_and_have_the_bits_of_direct_ones() {
    recorded_with_adapters(&mixture(QuantType::Nf4, 2), 12);
}

/// `most` launches of a block without adapters.
fn recorded_with_adapters(model: &Model, most: u64) {
    let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
    let choices = [[Some(1), None, Some(0)], [Some(0), Some(0), Some(0)], [None; 3]];
    let mut recorded = Bench::new(model, &weights, 3);
    recorded.engine.record_steps().unwrap();
    let warm = recorded.engine.steps.recorded();
    assert_eq!(warm, 6 * (2 * u64::from(BLOCKS) + 1), "with adapters and without, and a run");
    let plain = recorded.engine.steps.launches(0, 1).expect("a recording");
    assert!(plain <= most, "{plain} launches of a step without adapters");
    let mut seen: Vec<Vec<Vec<u8>>> = Vec::new();
    for (choice, prompts) in [(choices[0], 0), (choices[1], 0), (choices[2], 0), (choices[0], 3)] {
        let mut direct = Bench::new(model, &weights, 3);
        (direct.prompts, recorded.prompts) = (prompts, prompts);
        recorded.sessions = vec![0; 3];
        let expected = direct.talk(choice);
        let got = recorded.talk(choice);
        assert!(got == expected, "recorded steps of {choice:?} differ");
        assert!(!seen.contains(&got), "adapters and prompts change something");
        seen.push(got);
        let (taken, replayed) = (recorded.engine.backend.taken(), recorded.engine.steps.replayed());
        recorded.steps(&[(0, 1, choice[0]), (1, 1, choice[1]), (2, 1, choice[2])]);
        assert_eq!(recorded.engine.backend.taken(), taken, "a step takes memory");
        let replayed = recorded.engine.steps.replayed() - replayed;
        assert_eq!(replayed, u64::from(BLOCKS), "a step is replayed");
    }
    assert_eq!(recorded.longest, BLOCKS, "through all blocks at once");
    assert_eq!(recorded.engine.steps.recorded(), warm, "nothing is recorded again");
}

#[test]
fn a_recorded_block_is_a_handful_of_launches() {
    let model = model(0);
    let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
    let mut bench = Bench::new(&model, &weights, 1);
    assert_eq!(bench.engine.steps.launches(0, 1), None);
    bench.engine.record_steps().unwrap();
    // Products of several tokens have a launch more.
    for (tokens, most) in [(1, 9), (8, 13), (32, 13)] {
        let launches = bench.engine.steps.launches(0, tokens).expect("a recording");
        println!("{launches} launches for {tokens} tokens through a Llama block in NF4");
        assert!(launches <= most, "{launches} launches");
    }
}

#[test]
fn memory_is_planned_for_every_recorded_launch() {
    for model in [model(0), model(2), mixture(QuantType::Nf4, 0), mixture(QuantType::Nf4, 2)] {
        let weights = MappedWeights::map(&model.manifest, span(), || ()).unwrap();
        let mut bench = Bench::new(&model, &weights, 1);
        bench.engine.record_steps().unwrap();
        let launches = bench.engine.steps.recorded_launches();
        let planned = u64::from(BLOCKS) * graph_block_bytes(model.facts(), Sharing::Alone);
        assert!(launches > 0 && launches * GRAPH_LAUNCH_BYTES <= planned, "{launches}");
    }
}
