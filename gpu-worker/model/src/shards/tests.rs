//! Every family among 2, 3 and 4 ranks, with equal and unequal shares, and what is refused.
#![allow(clippy::single_range_in_vec_init, reason = "a slice may be one range of rows")]

use proptest::prelude::*;
use serde_json::{Value, json};
use testkit::facts::facts;

use super::*;
use crate::spec::TensorSpec;

/// A config of every family and published form.
fn configs() -> Vec<(&'static str, Value)> {
    let decoder = |model_type: &str, more: Value| {
        let mut config = json!({
            "model_type": model_type, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
        });
        merge(&mut config, more);
        config
    };
    let falcon = |more: Value| {
        let mut config = json!({
            "model_type": "falcon", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 1,
        });
        merge(&mut config, more);
        config
    };
    vec![
        ("llama", decoder("llama", json!({"attention_bias": true, "mlp_bias": true}))),
        ("llama with two kv heads", decoder("llama", json!({"num_key_value_heads": 2}))),
        ("llama with one kv head", decoder("llama", json!({"num_key_value_heads": 1}))),
        ("mistral", decoder("mistral", json!({"sliding_window": 64}))),
        ("qwen2", decoder("qwen2", json!({}))),
        ("qwen3", decoder("qwen3", json!({"head_dim": 128}))),
        ("mixtral", decoder("mixtral", json!({"num_local_experts": 3, "num_experts_per_tok": 2}))),
        ("bloom", json!({"model_type": "bloom", "hidden_size": 320, "n_layer": 2, "n_head": 5})),
        (
            "falcon 7b",
            json!({
                "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
            }),
        ),
        ("falcon 40b", falcon(json!({"new_decoder_architecture": true, "num_kv_heads": 2}))),
        (
            "falcon rw",
            falcon(json!({
                "alibi": true, "bias": true, "multi_query": false, "parallel_attn": false,
            })),
        ),
    ]
}

fn merge(config: &mut Value, more: Value) {
    for (name, value) in more.as_object().unwrap() {
        config[name] = value.clone();
    }
}

fn spec(config: &Value) -> BlockSpec {
    BlockSpec::from_config(config).unwrap()
}

fn llama(heads: usize, kv_heads: usize, intermediate: usize) -> BlockSpec {
    spec(&json!({
        "model_type": "llama", "hidden_size": 64 * heads, "intermediate_size": intermediate,
        "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    }))
}

fn heads(spec: &BlockSpec, capacities: &[f64]) -> Vec<usize> {
    Shares::by_capacity(spec, capacities).unwrap().heads
}

/// Rows (or elements) of a slice one by one.
fn rows_of(slice: &Slice, tensor: &TensorSpec) -> Vec<usize> {
    match slice {
        Slice::All | Slice::Columns(_) => (0..tensor.shape[0]).collect(),
        Slice::None => Vec::new(),
        Slice::Rows(ranges) => ranges.iter().cloned().flatten().collect(),
    }
}

/// Holds all that is true of the shards of any block.
fn check(spec: &BlockSpec, shards: &[Shard], what: &str) {
    for (rank, shard) in shards.iter().enumerate() {
        assert_eq!((shard.rank, shard.world), (rank, shards.len()), "{what}");
        let own = &shard.spec;
        assert_eq!((own.hidden, own.head_dim), (spec.hidden, spec.head_dim), "{what}");
        assert_eq!(own.heads, own.kv_heads * own.group(), "{what} rank {rank}");
        // Attention finds the same key/value head for a query head as in the whole block.
        for (index, head) in shard.heads.clone().enumerate() {
            let kv = shard.kv_heads.start + index / own.group();
            assert_eq!(kv, head / spec.group(), "{what} rank {rank} head {head}");
        }
        if let (Position::Alibi { slopes, .. }, Position::Alibi { slopes: all, .. }) =
            (&own.position, &spec.position)
        {
            assert_eq!(slopes[..], all[shard.heads.clone()], "{what} rank {rank}");
        }
    }
    for tensor in spec.tensors(0) {
        let slices: Vec<_> = shards.iter().map(|s| s.slice(&tensor.name).unwrap()).collect();
        tile(&tensor, &slices, what);
        for (shard, slice) in shards.iter().zip(slices) {
            shapes_agree(&tensor, shard, slice, what);
        }
    }
}

/// The slices of all ranks are all of the tensor, and each element is either in one of them or in
/// that of all ranks that read it.
fn tile(tensor: &TensorSpec, slices: &[&Slice], what: &str) {
    let name = &tensor.name;
    if let Slice::Columns(_) = slices[0] {
        let mut end = 0;
        for slice in slices {
            let Slice::Columns(columns) = slice else { panic!("{what} {name}: {slices:?}") };
            assert_eq!(columns.start, end, "{what} {name}");
            end = columns.end;
        }
        assert_eq!(end, tensor.shape[1], "{what} {name}");
        return;
    }
    let mut holders = vec![0; tensor.shape[0]];
    for slice in slices {
        let rows = rows_of(slice, tensor);
        assert!(rows.is_sorted_by(|a, b| a < b), "{what} {name}");
        rows.into_iter().for_each(|row| holders[row] += 1);
    }
    assert!(holders.iter().all(|&count| count >= 1), "{what} {name}");
    let is_shared = ["k_proj", "v_proj", "query_key_value"].iter().any(|part| name.contains(part));
    if !is_shared {
        let wanted =
            if slices.iter().all(|slice| **slice == Slice::All) { slices.len() } else { 1 };
        assert!(holders.iter().all(|&count| count == wanted), "{what} {name}: {holders:?}");
    }
}

/// The slice has the shape that the shard's spec says.
fn shapes_agree(tensor: &TensorSpec, shard: &Shard, slice: &Slice, what: &str) {
    let own = shard.spec.tensors(0).into_iter().find(|own| own.name == tensor.name);
    let found = slice.of(&tensor.shape).map(|shape| match tensor.shape.len() {
        1 => vec![shape.columns.len()],
        _ => vec![shape.rows, shape.columns.len()],
    });
    assert_eq!(found, own.map(|own| own.shape), "{what} rank {} {}", shard.rank, tensor.name);
}

#[test]
fn the_shards_of_every_family_tile_its_blocks() {
    for (name, config) in configs() {
        let spec = spec(&config);
        for capacities in [
            &[1.0][..],
            &[1.0; 2],
            &[1.0; 3],
            &[1.0; 4],
            &[3.0, 1.0],
            &[1.0, 2.5],
            &[1.0, 4.0, 2.0],
            &[1.0, 100.0, 1.0, 1.0],
        ] {
            let shares = Shares::by_capacity(&spec, capacities).unwrap();
            let what = format!("{name} among {capacities:?} as {shares:?}");
            check(&spec, &shares.shards(&spec).unwrap(), &what);
            let stored = serde_json::to_string(&shares).unwrap();
            assert_eq!(serde_json::from_str::<Shares>(&stored).unwrap(), shares);
        }
    }
}

#[test]
fn a_group_of_one_has_the_whole_block() {
    for (name, config) in configs() {
        let spec = spec(&config);
        let shards = Shares::by_capacity(&spec, &[7.0]).unwrap().shards(&spec).unwrap();
        let [shard] = &shards[..] else { panic!("{name}: {shards:?}") };
        assert_eq!(shard.spec, spec, "{name}");
        assert!(!shard.is_slow(), "{name}");
        let mut names = spec.tensors(0).into_iter().map(|tensor| tensor.name);
        assert!(names.all(|tensor| shard.slice(&tensor) == Some(&Slice::All)), "{name}");
    }
}

#[test]
fn heads_are_shared_in_proportion_at_borders_that_attention_knows() {
    let falcon = spec(&configs().remove(8).1);
    assert_eq!(heads(&falcon, &[1.0; 2]), [35, 36]);
    assert_eq!(heads(&falcon, &[1.0; 3]), [23, 24, 24]);
    assert_eq!(heads(&falcon, &[1.0; 4]), [17, 18, 18, 18]);
    assert_eq!(heads(&falcon, &[3.0, 1.0]), [53, 18]);
    // Eight groups of eight: whole ones.
    let large = llama(64, 8, 28672);
    assert_eq!(heads(&large, &[1.0; 4]), [16; 4]);
    assert_eq!(heads(&large, &[1.0; 3]), [16, 24, 24]);
    assert_eq!(heads(&large, &[5.0, 3.0]), [40, 24]);
    // More ranks than groups share the groups.
    assert_eq!(heads(&llama(64, 4, 4096), &[1.0; 8]), [8; 8]);
    assert_eq!(heads(&llama(12, 2, 4096), &[1.0; 3]), [3, 3, 6]);
    // Parts of one group beside whole ones.
    assert_eq!(heads(&llama(12, 3, 4096), &[1.0, 1.0, 4.0]), [2, 2, 8]);
}

#[test]
fn cuts_of_inputs_fall_on_multiples_of_64_where_they_can() {
    // Heads of 80: four of them are five times 64.
    let bloom =
        spec(&json!({"model_type": "bloom", "hidden_size": 2560, "n_layer": 1, "n_head": 32}));
    let shares = Shares::by_capacity(&bloom, &[1.0; 3]).unwrap();
    assert_eq!(shares.heads, [8, 12, 12]);
    assert_eq!(shares.columns, [53 * 64, 53 * 64, 54 * 64]);
    assert!(!shares.shards(&bloom).unwrap().iter().any(Shard::is_slow));
    // Two heads of 80, and a middle of fewer than four times 64.
    let tiny = spec(&json!({
        "model_type": "llama", "hidden_size": 160, "intermediate_size": 192, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }));
    let shards = |spec: &BlockSpec, ranks: usize| {
        Shares::by_capacity(spec, &vec![1.0; ranks]).unwrap().shards(spec).unwrap()
    };
    assert!(shards(&tiny, 2).iter().all(Shard::is_slow));
    let narrow = llama(4, 4, 192);
    let columns = |ranks| shards(&narrow, ranks).into_iter().map(|s| s.columns).collect::<Vec<_>>();
    assert_eq!(columns(2), [0..64, 64..192]);
    assert_eq!(columns(4), [0..48, 48..96, 96..144, 144..192]);
    assert!(!shards(&narrow, 2).iter().any(Shard::is_slow));
    // Even the ranks at the edges read a short group.
    assert!(shards(&narrow, 4).iter().all(Shard::is_slow));
    // The last group is short by itself.
    let odd = llama(4, 4, 200);
    assert_eq!(shards(&odd, 2).iter().map(Shard::is_slow).collect::<Vec<_>>(), [false, true]);
}

#[test]
fn fused_projections_are_cut_by_their_key_value_heads() {
    let falcon = spec(&configs().remove(8).1);
    let shards = Shares::by_capacity(&falcon, &[1.0; 2]).unwrap().shards(&falcon).unwrap();
    let name = "self_attention.query_key_value.weight";
    // The queries of a rank, and the one key and value.
    assert_eq!(shards[0].slice(name), Some(&Slice::Rows(vec![0..35 * 64, 71 * 64..73 * 64])));
    assert_eq!(shards[1].slice(name), Some(&Slice::Rows(vec![35 * 64..73 * 64])));
    let bloom =
        spec(&json!({"model_type": "bloom", "hidden_size": 320, "n_layer": 1, "n_head": 5}));
    let shards = Shares::by_capacity(&bloom, &[1.0; 2]).unwrap().shards(&bloom).unwrap();
    let name = "self_attention.query_key_value.bias";
    assert_eq!(shards[1].slice(name), Some(&Slice::Rows(vec![2 * 192..5 * 192])));
}

#[test]
fn biases_of_partial_products_are_added_once_and_adapters_follow_their_matrices() {
    let spec = spec(&configs().remove(0).1);
    let shards = Shares::by_capacity(&spec, &[1.0; 2]).unwrap().shards(&spec).unwrap();
    for name in ["self_attn.o_proj.bias", "mlp.down_proj.bias"] {
        assert_eq!(shards[0].slice(name), Some(&Slice::All));
        assert_eq!(shards[1].slice(name), Some(&Slice::None));
    }
    assert!(shards[0].spec.o.bias && !shards[1].spec.o.bias);
    let of = |name| shards[1].adapter_slices(name);
    let rows = Slice::Rows(vec![256..512]);
    assert_eq!(of("self_attn.q_proj"), Some([Slice::All, rows]));
    assert_eq!(of("self_attn.o_proj"), Some([Slice::Columns(256..512), Slice::All]));
    assert_eq!(of("mlp.down_proj"), Some([Slice::Columns(704..1408), Slice::All]));
    assert_eq!(of("mlp.side_proj"), None);
}

#[test]
fn the_memory_of_a_rank_is_its_share_and_what_every_rank_holds() {
    let spec = spec(&configs().remove(6).1);
    let shards = Shares::by_capacity(&spec, &[1.0; 2]).unwrap().shards(&spec).unwrap();
    let plain = |quant, part: SliceShape| {
        let size = if quant == QuantType::None { 2 } else { 1 };
        Some(size * part.rows * part.columns.len())
    };
    let elements = |tensor: &TensorSpec| tensor.shape.iter().product::<usize>();
    let names = spec.tensors(0);
    let (own, every): (Vec<_>, Vec<_>) =
        names.iter().partition(|t| shards[0].slice(&t.name) != Some(&Slice::All));
    let sum = |tensors: &[&TensorSpec]| tensors.iter().map(|t| elements(t)).sum::<usize>();
    for shard in &shards {
        let bytes = |quant| shard.weight_bytes(quant, plain).unwrap() as usize;
        assert_eq!(bytes(QuantType::None), 2 * (sum(&own) / 2 + sum(&every)));
        // Norms and the router stay as they are.
        assert_eq!(bytes(QuantType::Int8), sum(&own) / 2 + 2 * sum(&every));
        assert_eq!(shard.weight_bytes(QuantType::None, |_, _| None), None);
    }
    let facts =
        ModelFacts { hidden_size: 512, attention_heads: 8, kv_heads: 4, head_dim: 64, ..facts() };
    let own = shards[1].facts(&facts, 600);
    assert_eq!((own.attention_heads, own.kv_heads, own.block_bytes), (4, 2, 600));
    assert_eq!(own.kv_page_bytes() * 2, facts.kv_page_bytes());
    assert_eq!(own.hidden_size, facts.hidden_size);
}

#[test]
fn what_cannot_be_cut_is_refused_with_its_numbers() {
    let spec = llama(4, 2, 96);
    let refusal =
        |capacities: &[f64]| Shares::by_capacity(&spec, capacities).unwrap_err().to_string();
    assert_eq!(refusal(&[]), "a group has 1 to 16 ranks, not 0");
    assert_eq!(refusal(&[1.0; 17]), "a group has 1 to 16 ranks, not 17");
    assert_eq!(
        refusal(&[1.0; 5]),
        "4 query heads cannot be shared by 5 ranks: each needs at least one"
    );
    let narrow = llama(8, 8, 3);
    let said = Shares::by_capacity(&narrow, &[1.0; 4]).unwrap_err().to_string();
    assert!(said.starts_with("3 columns of the MLP cannot be shared by 4 ranks"), "{said}");
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let said = refusal(&[1.0, bad]);
        assert!(said.starts_with("the capacity of rank 1 is"), "{said}");
    }
}

#[test]
fn stored_shares_that_do_not_fit_the_model_are_refused() {
    let spec = llama(8, 2, 96);
    let refusal = |heads: &[usize], columns: &[usize]| {
        let shares = Shares { heads: heads.to_vec(), columns: columns.to_vec() };
        shares.shards(&spec).unwrap_err().to_string()
    };
    let halves = [48, 48];
    assert_eq!(
        refusal(&[6, 2], &halves),
        "query heads 0 to 5 of rank 0 are not all queries of whole key/value heads (4 each), nor of a single one"
    );
    assert!(refusal(&[3, 5], &halves).contains("query heads 3 to 7 of rank 1"));
    assert_eq!(
        refusal(&[4, 5], &halves),
        "the shares of the ranks are 9 query heads together, the model has 8"
    );
    assert!(refusal(&[usize::MAX, 2], &halves).contains("the model has 8"));
    assert!(refusal(&[4, 4], &[48, 47]).contains("95 columns of the MLP together"));
    assert_eq!(refusal(&[8, 0], &halves), "rank 1 has no query heads");
    assert!(refusal(&[4, 4], &[96]).contains("2 ranks for query heads and 1 for columns"));
    assert!(refusal(&[], &[]).contains("not 0"));
}

proptest! {
    #[test]
    fn any_block_and_any_capacities_give_shards_that_tile_it(
        kv_heads in 1usize..7,
        group in 1usize..6,
        head_dim in (1usize..40).prop_map(|half| 2 * half),
        intermediate in 4usize..700,
        capacities in proptest::collection::vec(0.01f64..100.0, 1..5),
        family in 0usize..3,
    ) {
        let heads = kv_heads * group;
        let (hidden, layers) = (heads * head_dim, 1);
        let config = match family {
            0 => json!({
                "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate,
                "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
                "attention_bias": true,
            }),
            1 => json!({
                "model_type": "falcon", "hidden_size": hidden, "ffn_hidden_size": intermediate,
                "num_hidden_layers": layers, "num_attention_heads": heads, "num_kv_heads": kv_heads,
                "new_decoder_architecture": true,
            }),
            _ => json!({
                "model_type": "mixtral", "hidden_size": hidden, "intermediate_size": intermediate,
                "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
                "num_local_experts": 2,
            }),
        };
        let spec = spec(&config);
        match Shares::by_capacity(&spec, &capacities) {
            Ok(shares) => check(&spec, &shares.shards(&spec).unwrap(), &format!("{config} {shares:?}")),
            Err(error) => prop_assert!(heads < capacities.len(), "{error}"),
        }
    }

    #[test]
    fn no_stored_shares_can_panic(
        heads in proptest::collection::vec(0usize..20, 0..5),
        columns in proptest::collection::vec(0usize..200, 0..5),
    ) {
        let spec = llama(8, 2, 96);
        if let Ok(shards) = (Shares { heads, columns }).shards(&spec) {
            check(&spec, &shards, "stored");
        }
    }
}
