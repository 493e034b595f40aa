//! Values of Petals' own blocks in float32 with weights and inputs from formulas: no checkpoint
//! needed.

use serde_json::{Value, json};

use crate::*;

const BATCH: usize = 2;
const TOKENS: usize = 6;
const HIDDEN: usize = 64;

struct Case {
    name: &'static str,
    config: Value,
    first: [f32; 3],
    last: [f32; 3],
    sum: f64,
    norm: f64,
    /// First, second and last element of the keys as `[batch * kv_heads, head_dim, 6]`.
    keys: [f32; 3],
    /// First elements of the gradient of the input, and its norm.
    gradient: [f32; 3],
    gradient_norm: f64,
}

fn llama(rope: Value) -> Value {
    let fields = json!({"model_type": "llama", "intermediate_size": 96, "num_key_value_heads": 2, "rms_norm_eps": 1e-5});
    with(&[base(64, 4), fields, rope])
}

fn base(hidden: usize, heads: usize) -> Value {
    json!({"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": 1, "n_layer": 1})
}

/// All fields of several objects.
fn with(objects: &[Value]) -> Value {
    let fields = objects.iter().flat_map(|o| o.as_object().unwrap().clone());
    Value::Object(fields.collect())
}

fn cases() -> Vec<Case> {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8});
    let bloom = with(&[base(48, 3), json!({"model_type": "bloom"})]);
    let post_norm = json!({"apply_residual_connection_post_layernorm": true});
    let falcon = with(&[base(64, 4), json!({"model_type": "falcon"})]);
    let new = json!({"new_decoder_architecture": true, "num_kv_heads": 2});
    let rw = json!({"alibi": true, "bias": true, "multi_query": false, "parallel_attn": false});
    let mixtral = with(&[
        base(64, 4),
        json!({"model_type": "mixtral", "intermediate_size": 96, "num_key_value_heads": 2, "num_local_experts": 4,
            "num_experts_per_tok": 2}),
    ]);
    let llama_first = [0.583180, 0.734342, 1.947967];
    let bloom_keys = [-2.016859, -4.329587, 1.536262];
    let mixtral_first = [-3.383632, -14.796777, -6.606905];
    let mixtral_keys = [-1.802787, 2.645292, 0.111957];
    vec![
        Case {
            name: "llama",
            config: llama(json!({"rope_theta": 1e4})),
            first: llama_first,
            last: [-5.961027, -1.583607, -7.466435],
            sum: 593.89694,
            norm: 81.60655,
            keys: [0.399349, -1.586827, -0.205759],
            gradient: [2.634_07, 3.142342, 2.779864],
            gradient_norm: 52.14678,
        },
        Case {
            name: "llama 3.1",
            config: llama(json!({"rope_theta": 5e5, "rope_scaling": llama3})),
            first: llama_first,
            last: [-5.954805, -1.624097, -7.423174],
            sum: 588.50738,
            norm: 81.21170,
            keys: [0.399349, 4.669843, -0.204479],
            gradient: [2.613695, 3.129118, 2.799931],
            gradient_norm: 74.26557,
        },
        Case {
            name: "bloom",
            config: bloom.clone(),
            first: [-0.784500, -1.462277, 1.669072],
            last: [-1.678985, 0.735397, -2.051991],
            sum: -184.18397,
            norm: 47.52797,
            keys: bloom_keys,
            gradient: [2.581322, 0.662154, 0.146151],
            gradient_norm: 40.85573,
        },
        Case {
            name: "bloom, residual after the norm",
            config: with(&[bloom, post_norm]),
            first: [-0.794823, -0.931544, 1.587243],
            last: [-0.671708, 0.472271, -0.784981],
            sum: -230.54273,
            norm: 47.59600,
            keys: bloom_keys,
            gradient: [3.375717, 1.722727, 0.692011],
            gradient_norm: 38.92250,
        },
        Case {
            name: "falcon, new architecture",
            config: with(&[falcon.clone(), new]),
            first: [-2.013669, 0.215620, 1.003904],
            last: [-1.044397, 2.765571, 1.420632],
            sum: -72.44591,
            norm: 110.06881,
            keys: [0.034661, -0.438457, -0.466461],
            gradient: [8.349613, 5.288903, 2.770264],
            gradient_norm: 73.87166,
        },
        Case {
            name: "falcon rw",
            config: with(&[falcon, rw]),
            first: [-1.025937, -2.406881, -2.630912],
            last: [-4.893697, -1.207516, -0.326853],
            sum: -97.95848,
            norm: 78.04461,
            keys: [0.068516, -4.942481, -0.107908],
            gradient: [6.329569, 7.154636, 7.698943],
            gradient_norm: 564.29742,
        },
        Case {
            name: "mixtral",
            config: mixtral.clone(),
            first: mixtral_first,
            last: [-11.229977, -5.267021, -21.187748],
            sum: -1176.64120,
            norm: 297.61589,
            keys: mixtral_keys,
            gradient: [-4.312542, 3.022795, 3.760354],
            gradient_norm: 236.57056,
        },
        Case {
            name: "mixtral, window",
            config: with(&[mixtral, json!({"sliding_window": 2})]),
            first: mixtral_first,
            last: [-1.830256, -1.757199, 3.242262],
            sum: -1144.74777,
            norm: 284.76406,
            keys: mixtral_keys,
            gradient: [-4.906111, 2.429338, 3.760377],
            gradient_norm: 218.82265,
        },
    ]
}

fn spec(case: &Case) -> BlockSpec {
    BlockSpec::from_config(&case.config).unwrap()
}

/// Matrices `sin(0.37 i + 1.3 k + 0.01 (i mod 17)(k + 1)) * 1.5 / sqrt(inputs)`, biases `0.1
/// sin(0.5 i + k)`, other vectors `1 + 0.2 sin(0.9 i + k)`; `k` is the place of the tensor's name
/// in the order of names.
fn weights(spec: &BlockSpec) -> HashMap<String, Stored> {
    let mut tensors = spec.tensors(0);
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let stored = |k: usize, name: &str, shape: &[usize]| {
        let is_bias = name.ends_with("bias");
        let inputs = shape[shape.len() - 1];
        let value = |i: usize| match shape.len() {
            1 if is_bias => 0.1 * (0.5 * i as f64 + k as f64).sin(),
            1 => 1.0 + 0.2 * (0.9 * i as f64 + k as f64).sin(),
            _ => {
                let angle = 0.37 * i as f64 + 1.3 * k as f64 + 0.01 * ((i % 17) * (k + 1)) as f64;
                angle.sin() * 1.5 / (inputs as f64).sqrt()
            }
        };
        let bytes =
            (0..shape.iter().product()).flat_map(|i| (value(i) as f32).to_le_bytes()).collect();
        Stored {
            dtype: DType::F32,
            quant: QuantType::None,
            outputs: shape.iter().product::<usize>() / inputs,
            inputs,
            bytes,
        }
    };
    tensors
        .iter()
        .enumerate()
        .map(|(k, t)| (t.full_name.clone(), stored(k, &t.name, &t.shape)))
        .collect()
}

fn input(width: usize) -> Vec<f32> {
    let value = |b: usize, t: usize, j: usize| {
        let (b, t, j) = (b as f64, t as f64, j as f64);
        (0.3 * j + 0.7 * t * (1.0 + 0.05 * j) + 2.1 * b).cos() as f32
    };
    let tokens = (0..BATCH).flat_map(|b| (0..TOKENS).map(move |t| (b, t)));
    tokens.flat_map(|(b, t)| (0..width).map(move |j| value(b, t, j))).collect()
}

/// The output when each row's tokens come in steps of the given lengths, and the chain with its
/// cache.
fn run<'w>(
    spec: &BlockSpec,
    tensors: &'w HashMap<String, Stored>,
    steps: &[usize],
) -> (Vec<f32>, Chain<'w>) {
    let (tables, pages) = shuffled_tables(BATCH, TOKENS);
    let mut chain = Chain::new(spec, DType::F32, tensors, 2, pages);
    let width = spec.hidden;
    let (input, mut output) = (input(width), vec![f32::NAN; BATCH * TOKENS * width]);
    let mut prefix = 0;
    for &tokens in steps {
        let rows = rows_of(&tables, &(prefix..prefix + tokens));
        let part = prefix * width..(prefix + tokens) * width;
        let mut hidden = cut_out(&input, TOKENS * width, part);
        chain.block(0, &rows, &[], &mut hidden);
        put(&mut output, &hidden, TOKENS * width, prefix * width);
        prefix += tokens;
    }
    (output, chain)
}

fn assert_near(got: &[f32], wanted: &[f32], what: &str) {
    for (got, wanted) in got.iter().zip(wanted) {
        assert!(
            (got - wanted).abs() < 2e-5 * wanted.abs().max(1.0),
            "{what}: {got} is not {wanted}"
        );
    }
}

#[test]
fn the_block_gives_what_petals_gives() {
    for case in cases() {
        let spec = spec(&case);
        let tensors = weights(&spec);
        let (output, _) = run(&spec, &tensors, &[TOKENS]);
        assert_near(&output[..3], &case.first, case.name);
        assert_near(&output[output.len() - 3..], &case.last, case.name);
        let sum: f64 = output.iter().map(|&v| f64::from(v)).sum();
        let norm = output.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        assert!(
            (sum - case.sum).abs() < 1e-3 && (norm - case.norm).abs() < 1e-4,
            "{}: sum {sum}, norm {norm}",
            case.name
        );
    }
}

#[test]
fn the_gradient_is_that_of_petals() {
    for case in cases() {
        let spec = spec(&case);
        let tensors = weights(&spec);
        let (_, mut chain) = run(&spec, &tensors, &[TOKENS]);
        let (tables, _) = shuffled_tables(BATCH, TOKENS);
        let rows = rows_of(&tables, &(0..TOKENS));
        let output_gradient =
            (0..BATCH * TOKENS * spec.hidden).map(|i| (0.11 * i as f64).cos() as f32);
        let mut taken = Taken::new(&spec, BATCH, TOKENS);
        taken.gradient = output_gradient.collect();
        let (x, saved) = (input(spec.hidden), SavedActivations::default());
        chain.gradient(0, &rows, &[], &x, &mut taken, saved);
        assert_near(&taken.gradient[..3], &case.gradient, case.name);
        let squares = taken.gradient.iter().map(|&v| f64::from(v).powi(2));
        let norm = squares.sum::<f64>().sqrt();
        let error = (norm - case.gradient_norm).abs() / case.gradient_norm;
        assert!(error < 1e-5, "{}: norm {norm}", case.name);
    }
}

#[test]
fn four_tokens_then_one_then_one_give_the_bits_of_six_at_once() {
    for case in cases() {
        let spec = spec(&case);
        let tensors = weights(&spec);
        let whole = run(&spec, &tensors, &[TOKENS]).0;
        for steps in [&[4, 1, 1][..], &[1; 6], &[2, 3, 1], &[5, 1]] {
            assert_eq!(bits(&run(&spec, &tensors, steps).0), bits(&whole), "{steps:?}");
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
        assert_near(&got, &case.keys, case.name);
        let written =
            chain.pool.chunks(vector).filter(|slot| slot.iter().any(|&b| b != 0xff)).count();
        assert_eq!(written, BATCH * TOKENS * spec.kv_heads * 2, "of {pages} pages");
    }
}

#[test]
fn a_deep_prompt_is_added_before_the_block() {
    let case = &cases()[0];
    let spec = spec(case);
    let tensors = weights(&spec);
    let (tables, pages) = shuffled_tables(1, TOKENS);
    let rows = [StepRow::new(TOKENS, 0, &tables[0])];
    let prompt: Vec<f32> = (0..2 * HIDDEN).map(|i| (i as f32 * 0.1).sin()).collect();
    let mut with = input(HIDDEN)[..TOKENS * HIDDEN].to_vec();
    let mut by_hand = with.clone();
    by_hand[HIDDEN..3 * HIDDEN].iter_mut().zip(&prompt).for_each(|(x, p)| *x += p);
    let mut chain = Chain::new(&spec, DType::F32, &tensors, 1, pages);
    chain.block(0, &rows, &[PromptPart { offset: HIDDEN, values: &prompt }], &mut with);
    chain.block(0, &rows, &[], &mut by_hand);
    assert_eq!(bits(&with), bits(&by_hand));
}

#[test]
fn weights_of_a_wrong_shape_or_dtype_or_none_are_refused_by_name() {
    let case = &cases()[0];
    let spec = spec(case);
    let mut cpu = Cpu::new(1);
    let mut refusal = |tensors: &HashMap<String, Stored>, dtype| {
        let find = |name: &str| tensors.get(&format!("model.layers.0.{name}")).map(Stored::view);
        BlockWeights::new(&mut cpu, &spec, dtype, find).err().unwrap().to_string()
    };
    let name = "model.layers.0.mlp.up_proj.weight";
    let mut tensors = weights(&spec);
    assert!(refusal(&tensors, DType::Bf16).contains("self_attn.q_proj.weight is float32"));
    let up = tensors.get_mut(name).unwrap();
    (up.outputs, up.inputs) = (up.inputs, up.outputs);
    assert!(refusal(&tensors, DType::F32).contains("mlp.up_proj.weight has shape [64, 96]"));
    tensors.remove(name);
    assert_eq!(refusal(&tensors, DType::F32), "tensor mlp.up_proj.weight is missing");
}
