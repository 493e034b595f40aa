use std::path::Path;

use model::manifest::Manifest;
use shared::config::{PrepareConfig, QuantChoice, QuantType};
use shared::dtype::DType;
use tempfile::TempDir;
use testkit::hub::StandIn;
use testkit::models::*;
use testkit::span;

use super::*;

const ALL: [QuantType; 3] = [QuantType::None, QuantType::Int8, QuantType::Nf4];

/// A model on a stand-in of the Hub, and an empty cache.
struct Site {
    hub: StandIn,
    config: PrepareConfig,
    _cache: TempDir,
}

fn site(model: &Path) -> Site {
    let hub = StandIn::serve("org/tiny", model);
    let cache = tempfile::tempdir().unwrap();
    let config = hub.prepare_config("org/tiny", &cache);
    Site { hub, config, _cache: cache }
}

fn surveyed(config: &PrepareConfig, choice: SpanChoice) -> Result<ModelSurvey, String> {
    let request = SurveyRequest {
        prepare: config,
        groups: &[vec![Device::Emulator(0)]],
        worker: &WorkerConfig::default(),
        formats: &ALL,
        choice,
    };
    survey_model(request).map_err(|(_, message)| message)
}

fn ready(config: &PrepareConfig, span: Span) -> Manifest {
    Inspected::new(config).unwrap().make_ready(span, |_| Ok(())).unwrap()
}

#[test]
fn a_survey_of_the_hub_fetches_no_byte_of_a_weight_and_foretells_the_download() {
    let model = tempfile::tempdir().unwrap();
    write_sharded(model.path(), &llama_config(4), &llama_tensors(4, DType::Bf16));
    let site = site(model.path());
    let survey = surveyed(&site.config, SpanChoice::All).unwrap();
    let got = site.hub.take_got();
    let mut bytes = 0;
    for one in got.iter().filter(|one| one.file.ends_with(".safetensors")) {
        let file = std::fs::read(model.path().join(&one.file)).unwrap();
        let data_start = 8 + u64::from_le_bytes(file[..8].try_into().unwrap());
        let range = one.range.clone().expect("a range, never a whole file");
        assert!(range.end <= data_start, "{one:?} of a header of {data_start} bytes");
        bytes += range.end - range.start;
    }
    assert!(bytes > 0);

    // The same bytes are fetched when the blocks are made ready, and no more are missing then.
    let foretold = survey.download_bytes(span(1, 3));
    ready(&site.config, span(1, 3));
    let folder = site.config.cache_dir.join("models--org--tiny/sepal");
    let commit = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    let files = std::fs::read_dir(commit).unwrap().map(|file| file.unwrap().metadata().unwrap());
    assert_eq!(files.map(|file| file.len()).sum::<u64>(), foretold);
    let later = surveyed(&site.config, SpanChoice::All).unwrap();
    assert_eq!(later.download_bytes(span(1, 3)), 0);
    assert_eq!(later.download_bytes(span(0, 4)), survey.download_bytes(span(0, 4)) - foretold);
    assert_eq!(later.blocks[&1].stored_bytes, survey.blocks[&1].stored_bytes);
}

#[test]
fn a_survey_holds_what_prepare_makes_ready_in_every_format() {
    let model = tempfile::tempdir().unwrap();
    write_model(model.path(), &llama_config(2), &llama_tensors(2, DType::Bf16));
    let site = site(model.path());
    let survey = surveyed(&site.config, SpanChoice::Fixed(span(0, 1))).unwrap();
    assert_eq!(survey.blocks.len(), 1, "only the chosen blocks are looked at");
    for format in &survey.formats {
        let config = PrepareConfig {
            quant_type: QuantChoice::Named(format.quant_type),
            ..site.config.clone()
        };
        assert_eq!(ready(&config, span(0, 1)).model, format.survey.facts);
        assert_eq!(format.survey.devices.len(), 1);
    }
    let bytes: Vec<u64> =
        survey.formats.iter().map(|format| format.survey.facts.block_bytes).collect();
    assert!(bytes[0] > bytes[1] && bytes[1] > bytes[2], "{bytes:?}");
}

#[test]
fn of_a_pickled_checkpoint_on_the_hub_the_sizes_are_asked_for() {
    let torch = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/torch/llama");
    let site = site(&torch);
    let survey = surveyed(&site.config, SpanChoice::All).unwrap();
    let got = site.hub.take_got();
    let of_weights = got.iter().filter(|one| one.file.ends_with(".bin"));
    let bytes: u64 = of_weights.map(|one| one.range.as_ref().map_or(u64::MAX, |r| r.end)).sum();
    assert!(bytes <= 8, "{got:?}");
    let all = std::fs::read_dir(&torch).unwrap().map(|file| file.unwrap());
    let weights = all.filter(|file| file.path().extension().is_some_and(|of| of == "bin"));
    let sizes: u64 = weights.map(|file| file.metadata().unwrap().len()).sum();
    assert_eq!(survey.most_download_bytes(2), sizes);
}

#[test]
fn a_folder_has_nothing_to_download_and_its_headers_are_checked() {
    let model = tempfile::tempdir().unwrap();
    write_model(model.path(), &llama_config(2), &llama_tensors(2, DType::Bf16));
    let mut config = site(model.path()).config;
    config.model = model.path().to_str().unwrap().to_owned();
    let survey = surveyed(&config, SpanChoice::All).unwrap();
    assert_eq!((survey.most_download_bytes(2), survey.source), (0, CheckpointSource::Folder));
    assert_eq!(survey.blocks[&1].stored_bytes, survey.formats[0].survey.facts.block_bytes);

    let path = model.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    for (cut, words) in [(4, "cut short"), (200, "cut short"), (whole.len() - 1, "cut short")] {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let refused = surveyed(&config, SpanChoice::All).unwrap_err();
        assert!(refused.contains(words) && refused.contains("model.safetensors"), "{refused}");
    }
    std::fs::write(&path, &whole).unwrap();
    write_model(model.path(), &llama_config(3), &llama_tensors(2, DType::Bf16));
    let refused = surveyed(&config, SpanChoice::All).unwrap_err();
    assert!(refused.contains("model.layers.2") && refused.contains("incomplete"), "{refused}");
}

#[test]
fn a_header_on_the_hub_that_was_cut_short_or_describes_another_model_is_named() {
    let model = tempfile::tempdir().unwrap();
    write_model(model.path(), &llama_config(1), &llama_tensors(1, DType::Bf16));
    let path = model.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let mut spoiled = whole.clone();
    spoiled[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    std::fs::write(&path, &spoiled).unwrap();
    let refused = surveyed(&site(model.path()).config, SpanChoice::All).unwrap_err();
    assert!(refused.contains("is no safetensors file"), "{refused}");
    spoiled = whole.clone();
    spoiled[9..20].fill(b'x');
    std::fs::write(&path, &spoiled).unwrap();
    let refused = surveyed(&site(model.path()).config, SpanChoice::All).unwrap_err();
    assert!(refused.contains("header that cannot be read"), "{refused}");

    let mut config = llama_config(1);
    config["intermediate_size"] = 128.into();
    write_model(model.path(), &config, &llama_tensors(1, DType::Bf16));
    let refused = surveyed(&site(model.path()).config, SpanChoice::All).unwrap_err();
    assert!(refused.contains("mlp") && refused.contains("128"), "{refused}");
}

#[test]
fn offline_only_what_is_there_can_be_surveyed() {
    let model = tempfile::tempdir().unwrap();
    write_model(model.path(), &llama_config(2), &llama_tensors(2, DType::Bf16));
    let mut site = site(model.path());
    ready(&site.config, span(0, 1));
    site.config.hub.offline = true;
    let chosen = SpanChoice::Fixed(span(0, 1));
    assert_eq!(surveyed(&site.config, chosen).unwrap().most_download_bytes(1), 0);
    let refused = surveyed(&site.config, SpanChoice::All).unwrap_err();
    assert!(refused.contains("block-1") && refused.contains("--offline"), "{refused}");
}
