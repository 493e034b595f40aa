use std::collections::BTreeMap;

use model::survey::{BlockSource, Estimate};
use shared::config::QuantType;
use shared::model::ModelFacts;
use shared::network::RateSource;
use shared::survey::{DeviceMemory, Speeds, Survey};
use testkit::facts::llama_70b;

use super::*;
use crate::cli::{Command, parse};

/// Settings of `sepal plan m` with these flags.
fn options(flags: &str) -> PlanOptions {
    let args = format!("sepal plan m {flags}");
    match parse(args.split_whitespace().map(Into::into), &|_| None) {
        Ok(Command::Plan(options)) => *options,
        other => panic!("{other:?}"),
    }
}

/// Llama-2-70B in a format, a block having so many MiB.
fn facts(quant_type: QuantType, mib: u64) -> ModelFacts {
    ModelFacts { quant_type, block_bytes: mib << 20, ..llama_70b() }
}

fn format(quant_type: QuantType, mib: u64) -> FormatSurvey {
    let facts = facts(quant_type, mib);
    FormatSurvey { quant_type, survey: Survey::of(facts), estimate: None }
}

fn survey(formats: Vec<FormatSurvey>) -> ModelSurvey {
    let block = |block: u32| {
        let missing = BTreeMap::from([(format!("block-{block}"), 1_000_000_000)]);
        (block, BlockSource { stored_bytes: 999_999_000, missing })
    };
    let source = CheckpointSource::Hub { commit: "0123456789abcdef".into() };
    ModelSurvey { source, formats, blocks: (0..80).map(block).collect() }
}

const GIGABIT: NetworkRate = NetworkRate { bits_per_s: 1e9, source: RateSource::Operator };

/// The plan with so many MiB of memory.
fn planned(flags: &str, mib: u64, survey: &ModelSurvey) -> Plan {
    let config = options(flags).config;
    let memory = InstanceMemory { available_bytes: Some(mib << 20), ..InstanceMemory::of(&config) };
    plan(&config, &memory, survey, GIGABIT)
}

/// Rates of the worked example of Petals' formula (`netd::throughput`).
const KEPT: Capacity = Capacity { inference_rps: 500.0, forward_rps: 48_000.0 };

#[test]
fn each_format_has_what_fits_of_it() {
    // 2464 MiB whatever is served, and 96 of KV cache for each block (`sizing`).
    let all = [(QuantType::None, 1632), (QuantType::Int8, 816), (QuantType::Nf4, 440)];
    let survey = survey(all.map(|(quant, mib)| format(quant, mib)).to_vec());
    let plan = planned("--device cpu --attn_cache_tokens 16384", 2464 + 7 * 536, &survey);
    let blocks: Vec<(&str, u32, bool)> = plan
        .formats
        .iter()
        .map(|format| (format.quant_type.as_str(), format.blocks, format.is_default))
        .collect();
    assert_eq!(blocks, [("none", 2, true), ("int8", 4, false), ("nf4", 7, false)]);
    let nf4 = &plan.formats[2];
    assert_eq!((nf4.block_bytes, nf4.kv_token_bytes), (440 << 20, 4096));
    let group = &nf4.groups[0];
    assert_eq!(
        (group.workspace_bytes, group.kv_bytes, group.most_blocks, group.blocks),
        (2464 << 20, 96 << 20, 7, 7)
    );
    // A gigabyte for each block, at a gigabit per second.
    assert_eq!((nf4.download_bytes, nf4.download_s), (7_000_000_000, 56.0));
    assert_eq!((nf4.throughput_rps, nf4.throughput_origin), (None, RateOrigin::Unknown));
}

#[test]
fn the_throughput_is_that_of_the_worked_example_and_says_how_it_is_known() {
    let mut nf4 = format(QuantType::Nf4, 440);
    nf4.survey.kept = Some(KEPT);
    nf4.estimate = Some(Estimate { capacity: Capacity::default(), basis: "nothing".into() });
    let kept = survey(vec![nf4.clone()]);
    let plan = planned("--device cpu --num_blocks 46 --quant_type nf4", 1 << 20, &kept);
    let of = &plan.formats[0];
    assert_eq!((of.blocks, of.throughput_origin), (46, RateOrigin::Measured));
    assert!((of.throughput_rps.unwrap() - 2042.6).abs() < 0.05, "{of:?}");
    assert_eq!(of.network_rps, 7629.39453125);
    assert_eq!(of.estimate_basis, None);
    let given = planned("--device cpu --num_blocks 46 --throughput 7", 1 << 20, &kept);
    assert_eq!(given.formats[0].throughput_rps, Some(7.0));
    assert_eq!(given.formats[0].throughput_origin, RateOrigin::Given);

    nf4.survey.kept = None;
    nf4.estimate = Some(Estimate { capacity: KEPT, basis: "a guess".into() });
    let estimated = planned("--device cpu --num_blocks 1", 1 << 20, &survey(vec![nf4]));
    let of = &estimated.formats[0];
    assert_eq!(of.throughput_rps, Some(of.network_rps), "one block waits for the network");
    assert_eq!(of.throughput_origin, RateOrigin::Estimated);
    let text = table::text(&estimated);
    assert!(text.contains("(estimated)") && text.contains("estimated: a guess"), "{text}");
}

#[test]
fn devices_share_the_blocks_as_serve_cuts_them() {
    let card = |ordinal, gib: u64| DeviceMemory {
        device: Device::Cuda(ordinal),
        free_bytes: gib << 30,
        work_bytes: 100 << 20,
    };
    let mut nf4 = format(QuantType::Nf4, 440);
    nf4.survey.devices = vec![card(0, 24), card(1, 12)];
    nf4.survey.speeds = Some(Speeds { rates: vec![1.0, 1.0], cuts: vec![vec![40, 20]] });
    let survey = survey(vec![nf4.clone()]);
    let plan = planned("--device cuda:0,cuda:1 --attn_cache_tokens 16384", 64 << 10, &survey);
    let of = &plan.formats[0];
    let most: Vec<u32> = of.groups.iter().map(|group| group.most_blocks).collect();
    let blocks: Vec<u32> = of.groups.iter().map(|group| group.blocks).collect();
    assert_eq!(of.blocks, most.iter().sum::<u32>());
    assert_eq!(blocks, most, "both are full");
    assert!(of.is_default, "nf4 on CUDA devices");
    // As an earlier start decided.
    let sixty = "--device cuda:0,cuda:1 --attn_cache_tokens 1024 --num_blocks 60";
    let plan = planned(sixty, 64 << 10, &survey);
    let blocks: Vec<u32> = plan.formats[0].groups.iter().map(|group| group.blocks).collect();
    assert_eq!(blocks, [40, 20]);
    let text = table::text(&plan);
    for part in ["nf4 *", "cuda:0", "cuda:1", "60 of 80", "60.0 GB, 8 min", "at 0123456789ab:"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn of_a_folder_with_some_blocks_as_many_are_served_as_lie_side_by_side() {
    let mut survey = survey(vec![format(QuantType::Nf4, 440)]);
    survey.blocks.retain(|block, _| [0, 1, 4, 5, 6, 9].contains(block));
    let blocks = |flags: &str| planned(flags, 1 << 20, &survey).formats[0].blocks;
    assert_eq!(blocks("--device cpu"), 3);
    assert_eq!(blocks("--device cpu --num_blocks 2"), 2);
}

#[test]
fn what_serve_would_refuse_is_said_with_its_arithmetic() {
    let survey = survey(vec![format(QuantType::None, 1632), format(QuantType::Nf4, 440)]);
    let flags = "--device cpu --num_blocks 5 --attn_cache_tokens 16384";
    let plan = planned(flags, 2464 + 5 * 536, &survey);
    let [none, nf4] = &plan.formats[..] else { panic!("{plan:?}") };
    assert_eq!((none.blocks, none.throughput_rps, none.download_bytes), (0, None, 0));
    assert!(none.refusal.as_ref().unwrap().contains("5 x (1632.0 MiB of weights"), "{none:?}");
    assert_eq!((nf4.blocks, &nf4.refusal), (5, &None));
    let text = table::text(&plan);
    assert!(text.contains("none would be refused: 5 blocks of llama-70b need"), "{text}");
    let outside = planned("--device cpu --block_indices 79:81", 1 << 20, &survey);
    assert!(outside.formats[0].refusal.as_ref().unwrap().contains("79:81"), "{outside:?}");
}

#[test]
fn the_keys_of_the_json_stay() {
    let survey = survey(vec![format(QuantType::None, 1632)]);
    let json = serde_json::to_value(planned("--device cpu", 1 << 20, &survey)).unwrap();
    let keys = |value: &serde_json::Value| -> Vec<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    let (format, documented) = (&json["formats"][0], include_str!("../../../deploy/TOOLS.md"));
    let all = [keys(&json), keys(format), keys(&format["groups"][0])].concat();
    assert_eq!(all.len(), 11 + 17 + 8);
    for key in all {
        assert!(documented.contains(&format!("`{key}`")), "deploy/TOOLS.md does not name {key}");
    }
    assert_eq!((&json["version"], &json["model_blocks"]), (&1.into(), &80.into()));
    assert_eq!(format["throughput_origin"], "unknown");
}

#[test]
fn a_named_format_is_planned_alone() {
    let all = options("").formats;
    assert_eq!(all, [QuantType::None, QuantType::Int8, QuantType::Nf4]);
    let one = options("--quant_type int8 --json");
    assert_eq!((one.formats, one.json), (vec![QuantType::Int8], true));
}
