//! What a span takes of memory once it is loaded: the weights as they are stored, mapped, and next
//! to nothing of its own. In a process of its own, so that nobody else's memory is counted.

use std::path::Path;

use blocks::kv::page_layout;
use blocks::map::MappedWeights;
use blocks::{BlockWeights, Workspace, forward};
use kernels::{Cpu, KvPages, StepRow};
use prepare::Inspected;
use safetensors::tensor::Dtype;
use shared::block::{BlockIndex, Span};
use shared::config::{PrepareConfig, QuantChoice, QuantType};
use shared::dtype::DType;
use shared::ids::PageId;
use testkit::configs::prepare_config;
use testkit::models::Tensors;

const HIDDEN: usize = 1024;
const MIDDLE: usize = 2816;
const BLOCKS: usize = 2;

/// Matrices of a block, and what its tensors have in all.
const MATRICES: [(&str, usize, usize); 7] = [
    ("self_attn.q_proj", HIDDEN, HIDDEN),
    ("self_attn.k_proj", HIDDEN, HIDDEN),
    ("self_attn.v_proj", HIDDEN, HIDDEN),
    ("self_attn.o_proj", HIDDEN, HIDDEN),
    ("mlp.gate_proj", MIDDLE, HIDDEN),
    ("mlp.up_proj", MIDDLE, HIDDEN),
    ("mlp.down_proj", HIDDEN, MIDDLE),
];

fn write_model(folder: &Path) {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": MIDDLE, "num_hidden_layers": BLOCKS,
        "num_attention_heads": 16, "torch_dtype": "bfloat16",
    });
    // Numbers around 0.02 with either sign.
    let values = |count: usize| -> Vec<u8> {
        let value = |i: usize| 0x3c80u16 | (i.wrapping_mul(2_654_435_761) >> 7 & 0x803f) as u16;
        (0..count).flat_map(|i| value(i).to_le_bytes()).collect()
    };
    let mut tensors = Tensors::new();
    for block in 0..BLOCKS {
        for (name, outputs, inputs) in MATRICES {
            let name = format!("model.layers.{block}.{name}.weight");
            let shape = vec![outputs, inputs];
            tensors.insert(name, (Dtype::BF16, shape, values(outputs * inputs)));
        }
        for name in ["input_layernorm", "post_attention_layernorm"] {
            let name = format!("model.layers.{block}.{name}.weight");
            tensors.insert(name, (Dtype::BF16, vec![HIDDEN], values(HIDDEN)));
        }
    }
    testkit::models::write_model(folder, &config, &tensors);
}

/// Bytes of memory that belong to this process alone (`RssAnon`), which is where a copy of weights
/// would be.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("RssAnon:")).unwrap();
    let kilobytes: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kilobytes << 10
}

#[test]
fn a_loaded_span_takes_its_weights_as_stored_and_at_most_a_tenth_more() {
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("model");
    write_model(&model);
    let numbers: usize = MATRICES.iter().map(|(_, o, i)| o * i * BLOCKS).sum();
    for (quant_type, bits) in
        [(QuantType::None, 16.0), (QuantType::Int8, 8.1), (QuantType::Nf4, 4.2)]
    {
        let config = PrepareConfig {
            dtype: Some(DType::Bf16),
            quant_type: QuantChoice::Named(quant_type),
            ..prepare_config(&model, root.path().join("cache"))
        };
        let mut inspected = Inspected::new(&config).unwrap();
        let span = Span::new(0, BLOCKS as u32).unwrap();
        let manifest = inspected.make_ready(span, |_| Ok(())).unwrap();
        let spec = inspected.spec.clone();
        drop(inspected);

        let before = private_bytes();
        let weights = MappedWeights::map(&manifest, span, || ()).unwrap();
        let mut cpu = Cpu::new(2);
        let blocks: Vec<_> = span
            .blocks()
            .map(|block: BlockIndex| {
                let find = |name: &str| weights.tensor(block, name);
                BlockWeights::new(&mut cpu, &spec, DType::Bf16, find).unwrap()
            })
            .collect();
        let loaded = private_bytes().saturating_sub(before);
        // And computing leaves no copy behind either.
        let mut work = Workspace::new(&mut cpu);
        let layout = page_layout(&spec, DType::Bf16);
        let mut pool = vec![0; layout.page_bytes()];
        let mut hidden = vec![0.5; HIDDEN];
        for block in &blocks {
            let rows = [StepRow::new(1, 0, &[PageId(0)])];
            let mut pages = KvPages::new(layout, &mut pool);
            forward(&mut cpu, &spec, block, &mut work, &rows, &mut hidden, &mut pages).unwrap();
        }
        let computed = private_bytes().saturating_sub(before);
        let stored = weights.bytes();
        println!(
            "{quant_type}: {stored} bytes stored, {loaded} private once loaded, {computed} after a step"
        );
        assert!(
            stored as f64 <= numbers as f64 * bits / 8.0 * 1.01,
            "{quant_type}: {stored} bytes"
        );
        assert!(loaded <= stored / 10, "{quant_type}: {loaded} private bytes beside {stored}");
        assert!(computed <= stored / 10, "{quant_type}: {computed} private bytes beside {stored}");
    }
}
