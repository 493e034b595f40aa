//! Values of Petals' `WrappedLlamaBlock` in float32 with weights and inputs from formulas: no checkpoint needed.

use serde_json::{Value, json};

use crate::*;

const BATCH: usize = 2;
const TOKENS: usize = 6;
const HIDDEN: usize = 64;

struct Case {
    rope: Value,
    first: [f32; 3],
    last: [f32; 3],
    sum: f64,
    norm: f64,
    /// First, second and last element of the keys as `[batch * kv_heads, head_dim, 6]`.
    keys: [f32; 3],
}

fn cases() -> [Case; 2] {
    let first = [0.583180, 0.734342, 1.947967];
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8});
    [
        Case {
            rope: json!({"rope_theta": 1e4}),
            first,
            last: [-5.961027, -1.583607, -7.466435],
            sum: 593.89694,
            norm: 81.60655,
            keys: [0.399349, -1.586827, -0.205759],
        },
        Case {
            rope: json!({"rope_theta": 5e5, "rope_scaling": llama3}),
            first,
            last: [-5.954805, -1.624097, -7.423174],
            sum: 588.50738,
            norm: 81.21170,
            keys: [0.399349, 4.669843, -0.204479],
        },
    ]
}

fn spec(case: &Case) -> BlockSpec {
    let mut config = json!({
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-5
    });
    for (name, value) in case.rope.as_object().unwrap() {
        config[name] = value.clone();
    }
    BlockSpec::from_config(&config).unwrap()
}

/// Matrices `sin(0.37 i + 1.3 k + 0.01 (i mod 17)(k + 1)) * 1.5 / sqrt(inputs)`, norms `1 + 0.2 sin(0.9 i + k)`; `k` is the
/// place of the tensor's name in the order of names.
fn weights(spec: &BlockSpec) -> HashMap<String, Stored> {
    let mut tensors = spec.tensors(0);
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let stored = |k: usize, shape: &[usize]| {
        let inputs = shape[shape.len() - 1];
        let value = |i: usize| match shape.len() {
            1 => 1.0 + 0.2 * (0.9 * i as f64 + k as f64).sin(),
            _ => {
                let angle = 0.37 * i as f64 + 1.3 * k as f64 + 0.01 * ((i % 17) * (k + 1)) as f64;
                angle.sin() * 1.5 / (inputs as f64).sqrt()
            }
        };
        let bytes = (0..shape.iter().product())
            .flat_map(|i| (value(i) as f32).to_le_bytes())
            .collect();
        Stored {
            dtype: DType::F32,
            outputs: shape.iter().product::<usize>() / inputs,
            inputs,
            bytes,
        }
    };
    tensors
        .iter()
        .enumerate()
        .map(|(k, t)| (t.full_name.clone(), stored(k, &t.shape)))
        .collect()
}

fn input() -> Vec<f32> {
    let value = |b: usize, t: usize, j: usize| {
        let (b, t, j) = (b as f64, t as f64, j as f64);
        (0.3 * j + 0.7 * t * (1.0 + 0.05 * j) + 2.1 * b).cos() as f32
    };
    let tokens = (0..BATCH).flat_map(|b| (0..TOKENS).map(move |t| (b, t)));
    tokens
        .flat_map(|(b, t)| (0..HIDDEN).map(move |j| value(b, t, j)))
        .collect()
}

/// The output when each row's tokens come in steps of the given lengths, and the chain with its cache.
fn run<'w>(
    spec: &BlockSpec,
    tensors: &'w HashMap<String, Stored>,
    steps: &[usize],
) -> (Vec<f32>, Chain<'w>) {
    let (tables, pages) = shuffled_tables(BATCH, TOKENS);
    let mut chain = Chain::new(spec, DType::F32, tensors, 2, pages);
    let (input, mut output) = (input(), vec![f32::NAN; BATCH * TOKENS * HIDDEN]);
    let mut prefix = 0;
    for &tokens in steps {
        let rows: Vec<StepRow<'_>> = tables
            .iter()
            .map(|pages| StepRow {
                tokens,
                prefix,
                pages,
            })
            .collect();
        let part = |row: usize| {
            ((row * TOKENS + prefix) * HIDDEN)..((row * TOKENS + prefix + tokens) * HIDDEN)
        };
        let mut hidden: Vec<f32> = (0..BATCH)
            .flat_map(|row| input[part(row)].to_vec())
            .collect();
        chain.block(0, &rows, &[], &mut hidden);
        for (row, values) in hidden.chunks(tokens * HIDDEN).enumerate() {
            output[part(row)].copy_from_slice(values);
        }
        prefix += tokens;
    }
    (output, chain)
}

fn assert_near(got: &[f32], wanted: &[f32], what: &str) {
    for (got, wanted) in got.iter().zip(wanted) {
        assert!((got - wanted).abs() < 2e-5, "{what}: {got} is not {wanted}");
    }
}

#[test]
fn the_block_gives_what_petals_gives() {
    for case in cases() {
        let spec = spec(&case);
        let tensors = weights(&spec);
        let (output, _) = run(&spec, &tensors, &[TOKENS]);
        assert_near(&output[..3], &case.first, "first");
        assert_near(&output[output.len() - 3..], &case.last, "last");
        let sum: f64 = output.iter().map(|&v| f64::from(v)).sum();
        let norm = output
            .iter()
            .map(|&v| f64::from(v).powi(2))
            .sum::<f64>()
            .sqrt();
        assert!(
            (sum - case.sum).abs() < 1e-3 && (norm - case.norm).abs() < 1e-4,
            "sum {sum}, norm {norm}"
        );
    }
}

#[test]
fn four_tokens_then_one_then_one_give_the_bits_of_six_at_once() {
    for case in cases() {
        let spec = spec(&case);
        let tensors = weights(&spec);
        let whole = run(&spec, &tensors, &[TOKENS]).0;
        for steps in [&[4, 1, 1][..], &[1; 6], &[2, 3, 1], &[5, 1]] {
            assert_eq!(
                bits(&run(&spec, &tensors, steps).0),
                bits(&whole),
                "{steps:?}"
            );
        }
    }
}

#[test]
fn the_cache_holds_petals_rotated_keys_and_free_slots_are_untouched() {
    for case in cases() {
        let spec = spec(&case);
        let tensors = weights(&spec);
        let (_, chain) = run(&spec, &tensors, &[4, 1, 1]);
        let (tables, pages) = shuffled_tables(BATCH, TOKENS);
        let vector = chain.shape.layout.vector_bytes();
        let key = |row: usize, head: usize, slot: usize| {
            let page = tables[row][0].0 as usize;
            let start = ((page * spec.kv_heads + head) * 2 * kernels::PAGE_TOKENS + slot) * vector;
            convert::to_vec(DType::F32, &chain.pool[start..start + vector])
        };
        let (first, last) = (key(0, 0, 0), key(BATCH - 1, spec.kv_heads - 1, TOKENS - 1));
        let got = [first[0], key(0, 0, 1)[0], last[spec.head_dim - 1]];
        assert_near(&got, &case.keys, "keys");
        let written = chain
            .pool
            .chunks(vector)
            .filter(|slot| slot.iter().any(|&b| b != 0xff))
            .count();
        assert_eq!(
            written,
            BATCH * TOKENS * spec.kv_heads * 2,
            "of {pages} pages"
        );
    }
}

#[test]
fn a_deep_prompt_is_added_before_the_block() {
    let case = &cases()[0];
    let spec = spec(case);
    let tensors = weights(&spec);
    let (tables, pages) = shuffled_tables(1, TOKENS);
    let rows = [StepRow {
        tokens: TOKENS,
        prefix: 0,
        pages: &tables[0],
    }];
    let prompt: Vec<f32> = (0..2 * HIDDEN).map(|i| (i as f32 * 0.1).sin()).collect();
    let mut with = input()[..TOKENS * HIDDEN].to_vec();
    let mut by_hand = with.clone();
    by_hand[HIDDEN..3 * HIDDEN]
        .iter_mut()
        .zip(&prompt)
        .for_each(|(x, p)| *x += p);
    let mut chain = Chain::new(&spec, DType::F32, &tensors, 1, pages);
    chain.block(
        0,
        &rows,
        &[PromptPart {
            offset: HIDDEN,
            values: &prompt,
        }],
        &mut with,
    );
    chain.block(0, &rows, &[], &mut by_hand);
    assert_eq!(bits(&with), bits(&by_hand));
}

#[test]
fn weights_of_a_wrong_shape_or_dtype_or_none_are_refused_by_name() {
    let case = &cases()[0];
    let spec = spec(case);
    let mut cpu = Cpu::new(1);
    let mut refusal = |tensors: &HashMap<String, Stored>, dtype| {
        let find = |name: &str| {
            tensors
                .get(&format!("model.layers.0.{name}"))
                .map(Stored::view)
        };
        BlockWeights::new(&mut cpu, &spec, dtype, find)
            .err()
            .unwrap()
            .to_string()
    };
    let name = "model.layers.0.mlp.up_proj.weight";
    let mut tensors = weights(&spec);
    assert!(refusal(&tensors, DType::Bf16).contains("self_attn.q_proj.weight is float32"));
    let up = tensors.get_mut(name).unwrap();
    (up.outputs, up.inputs) = (up.inputs, up.outputs);
    assert!(refusal(&tensors, DType::F32).contains("mlp.up_proj.weight has shape [64, 96]"));
    tensors.remove(name);
    assert_eq!(
        refusal(&tensors, DType::F32),
        "tensor mlp.up_proj.weight is missing"
    );
}
