//! Jobs for gradients, against differences of forward jobs.

use testkit::jobs::job_body;

use super::*;

const BATCH: u32 = 2;
/// Over several pieces, not ending with one.
const TOKENS: u32 = 150;
const PROMPT_TOKENS: u32 = 3;
const HIDDEN: u32 = 64;

/// Slots of the test's own, behind those of the harness.
fn slot(number: u64, elements: u32) -> SlotRef {
    SlotRef { offset: (1 << 20) + number * (128 << 10), len: u64::from(elements) * 4 }
}

struct Job {
    body: JobBody,
    output_gradient: SlotRef,
    prompt_gradient: SlotRef,
}

fn job(netd: &Netd, limits: &JobLimits, x: &[f32], prompts: &[f32], g: &[f32]) -> Job {
    let elements = BATCH * TOKENS * HIDDEN;
    let prompt_slot = slot(2, BLOCKS * BATCH * PROMPT_TOKENS * HIDDEN);
    let job = Job {
        body: JobBody {
            dtype: limits.dtype,
            hidden: HIDDEN,
            input: slot(0, elements),
            output: slot(1, elements),
            prompts: Some(Prompts { slot: prompt_slot, batch: BATCH, tokens: PROMPT_TOKENS }),
            ..job_body(WorkKind::Forward, BATCH, TOKENS, BLOCKS)
        },
        output_gradient: slot(3, elements),
        prompt_gradient: slot(4, BLOCKS * BATCH * PROMPT_TOKENS * HIDDEN),
    };
    netd.write(job.body.input, DType::F32, x);
    netd.write(prompt_slot, DType::F32, prompts);
    netd.write(job.output_gradient, DType::F32, g);
    job
}

impl Job {
    fn backward(&self) -> JobBody {
        JobBody {
            kind: WorkKind::Backward,
            output_gradient: Some(self.output_gradient),
            prompt_gradient: Some(self.prompt_gradient),
            ..self.body.clone()
        }
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    kernels::ops::convert::to_vec(DType::F32, bytes)
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    products.sum()
}

fn moved(x: &[f32], along: &[f32], step: f32) -> Vec<f32> {
    x.iter().zip(along).map(|(x, d)| x + step * d).collect()
}

/// `values` scaled so that their mean square is 1.
fn unit(values: &[f32]) -> Vec<f32> {
    let scale = (dot(values, values) / values.len() as f64).sqrt() as f32;
    values.iter().map(|v| v / scale).collect()
}

/// Along the gradient itself, where nothing else is as steep: any other gradient would give another
/// slope.
#[test]
fn gradients_of_inputs_and_prompts_are_the_slopes_of_forward() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    let tokens = (BATCH * TOKENS) as usize;
    let (x, g) = (input(tokens, 1), input(tokens, 2));
    let prompts = input((BLOCKS * BATCH * PROMPT_TOKENS) as usize, 4);
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let back = job(netd, &limits, &x, &prompts, &g);
        let gradient = floats(&netd.call(&back.backward()).unwrap());
        let prompt_gradient = floats(&netd.read(back.prompt_gradient));
        let mut forward = |x: &[f32], prompts: &[f32]| {
            let body = job(netd, &limits, x, prompts, &g).body;
            dot(&floats(&netd.call(&body).unwrap()), &g)
        };
        const STEP: f32 = 2e-3;
        let way = unit(&gradient);
        let mut at = |step: f32| forward(&moved(&x, &way, step), &prompts);
        let by_x = (at(STEP) - at(-STEP)) / f64::from(2.0 * STEP);
        let prompt_way = unit(&prompt_gradient);
        let mut at = |step: f32| forward(&x, &moved(&prompts, &prompt_way, step));
        let by_prompts = (at(STEP) - at(-STEP)) / f64::from(2.0 * STEP);
        for (got, wanted) in
            [(dot(&gradient, &way), by_x), (dot(&prompt_gradient, &prompt_way), by_prompts)]
        {
            assert!((got / wanted - 1.0).abs() < 3e-3, "{got} is not {wanted}");
        }
    });
}

#[test]
fn decode_steps_in_between_change_no_bit_of_a_gradient() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    let tokens = (BATCH * TOKENS) as usize;
    let prompts = input((BLOCKS * BATCH * PROMPT_TOKENS) as usize, 4);
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        let job = job(netd, &limits, &input(tokens, 1), &prompts, &input(tokens, 2));
        let alone = netd.call(&job.backward()).unwrap();
        let alone_prompts = netd.read(job.prompt_gradient);
        netd.write(job.prompt_gradient, DType::F32, &prompts);
        let id = netd.submit(&job.backward());
        let parts = cut(&input(20, 9), &[1; 20]);
        let (mut session, mut free) = (Session::new(), shuffled_pages());
        decode(netd, &limits, &mut session, &mut free, &parts);
        netd.answer(id).unwrap();
        assert!(netd.read(job.body.output) == alone);
        assert!(netd.read(job.prompt_gradient) == alone_prompts);
    });
}

#[test]
fn what_a_job_keeps_changes_no_bit_of_a_gradient() {
    let tokens = (BATCH * TOKENS) as usize;
    let prompts = input((BLOCKS * BATCH * PROMPT_TOKENS) as usize, 4);
    let gradients = |gradient_bytes| {
        let mut model = Model::new(DType::F32);
        model.gradient_bytes = gradient_bytes;
        let limits = model.limits();
        let (_, got) =
            with_drain_time(&model, &kv_segment(model.facts()), DRAIN_TIME, |netd, _| {
                let (x, g) = (input(tokens, 1), input(tokens, 2));
                let job = job(netd, &limits, &x, &prompts, &g);
                let gradient = netd.call(&job.backward()).unwrap();
                (gradient, netd.read(job.prompt_gradient))
            });
        got
    };
    let nothing = gradients(0);
    let facts = Model::new(DType::F32).facts().clone();
    let needed = u64::from(BLOCKS) * facts.gradient_block_bytes(BATCH, TOKENS, PROMPT_TOKENS);
    // All, and of the block that comes back first alone.
    for bytes in [shared::model::GRADIENT_BYTES, needed + (300 << 10)] {
        assert!(gradients(bytes) == nothing, "{bytes}");
    }
}
