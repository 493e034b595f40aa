//! Downloads from a stand-in of the Hub: what is asked for, what is kept, and what happens when it
//! goes wrong.

use ::blocks::map::MappedWeights;
use model::header::TensorInfo;
use model::manifest::Manifest;
use shared::block::{BlockIndex, Span};
use shared::config::Secret;
use shared::dtype::DType;
use shared::exit::ExitReason;
use tempfile::TempDir;
use testkit::hub::{COMMIT, Got, StandIn};
use testkit::models::*;
use testkit::span;

use super::*;
use crate::Inspected;

const QUICK: Pauses = Pauses {
    first: Duration::from_millis(1),
    longest: Duration::from_millis(5),
    failures: 4,
    stall: Duration::from_secs(60),
};

struct Site {
    hub: StandIn,
    model: TempDir,
    cache: TempDir,
    config: PrepareConfig,
}

/// A model of four blocks on the stand-in, and an empty cache.
fn site() -> Site {
    let model = tempfile::tempdir().unwrap();
    write_model(model.path(), &llama_config(4), &llama_tensors(4, DType::Bf16));
    let hub = StandIn::serve("org/tiny", model.path());
    let cache = tempfile::tempdir().unwrap();
    let mut config = hub.prepare_config("org/tiny", &cache);
    config.hub.token = Some(Secret::new("good"));
    Site { hub, model, cache, config }
}

impl Site {
    fn ready(&self, span: Span) -> Result<Manifest, PrepareError> {
        Inspected::new(&self.config)?.make_ready(span, |_| Ok(()))
    }

    /// Checks that the served bytes are those of the model's own folder.
    fn assert_same(&self, manifest: &Manifest, span: Span) {
        let local = PrepareConfig {
            model: self.model.path().to_str().unwrap().to_owned(),
            ..self.config.clone()
        };
        let expected = Inspected::new(&local).unwrap().make_ready(span, |_| Ok(())).unwrap();
        let weights = MappedWeights::map(manifest, span, || ()).unwrap();
        let wanted = MappedWeights::map(&expected, span, || ()).unwrap();
        for block in span.blocks() {
            for name in expected.block(block).unwrap().keys() {
                let bytes = |weights: &MappedWeights| {
                    weights.tensor(BlockIndex(block.0), name).unwrap().bytes().to_vec()
                };
                assert_eq!(bytes(&weights), bytes(&wanted), "{block} {name}");
            }
        }
    }

    fn bytes_got(&self) -> u64 {
        let length = |got: &Got| got.range.as_ref().map_or(0, |range| range.end - range.start);
        self.hub.take_got().iter().map(length).sum()
    }

    fn fetch_with(&self, pauses: Pauses, block: u32) -> Result<(), PrepareError> {
        let mut hub = Hub::with_pauses(&self.config, pauses)?;
        let mut checkpoint = hub.checkpoint(Weights::Fetched)?;
        let spec = Inspected::new(&self.config)?.spec;
        let wanted: Vec<Wanted> =
            spec.tensors(block as usize).into_iter().map(Wanted::from).collect();
        hub.fetch(&mut checkpoint, block, &wanted, &mut |_| Ok(()))
    }
}

#[test]
fn only_the_served_blocks_are_downloaded_and_only_once() {
    let site = site();
    let manifest = site.ready(span(1, 3)).unwrap();
    site.assert_same(&manifest, span(1, 3));
    let whole = std::fs::metadata(site.model.path().join("model.safetensors")).unwrap().len();
    let got = site.bytes_got();
    let blocks = 2 * manifest.model.block_bytes;
    assert!((blocks..blocks + 16_384).contains(&got) && got < whole * 3 / 4, "{got} of {whole}");
    assert_eq!(manifest.model.name, "org/tiny");
    assert_eq!(manifest.model.dht_prefix.as_deref(), Some("tiny-hf"));

    site.ready(span(1, 3)).unwrap();
    assert!(site.bytes_got() <= 8, "what is there is not downloaded again");
    let wider = site.ready(span(1, 4)).unwrap();
    site.assert_same(&wider, span(1, 4));
    assert!(site.bytes_got() < manifest.model.block_bytes + 16_384);
}

#[test]
fn what_was_downloaded_serves_offline_and_nothing_else_does() {
    let mut site = site();
    site.ready(span(0, 2)).unwrap();
    site.config.hub.offline = true;
    site.config.hub.endpoint = Some("http://127.0.0.1:9".to_owned());
    let manifest = site.ready(span(0, 2)).unwrap();
    assert_eq!(manifest.blocks.len(), 2);
    let missing = site.ready(span(2, 3)).unwrap_err();
    assert!(missing.to_string().contains("HF_HUB_OFFLINE"), "{missing}");
    assert_eq!(missing.exit_reason(), ExitReason::BadConfig);
    site.config.model = "org/other".to_owned();
    assert!(site.ready(span(0, 1)).unwrap_err().to_string().contains("org/other"));
}

#[test]
fn an_interrupted_transfer_goes_on_where_it_stopped() {
    let site = site();
    site.hub.trouble(|troubles| troubles.cut_after = Some((10_000, 3)));
    let mut progress = 0;
    let mut inspected = Inspected::new(&site.config).unwrap();
    let manifest = inspected
        .make_ready(span(0, 1), |_| {
            progress += 1;
            Ok(())
        })
        .unwrap();
    site.assert_same(&manifest, span(0, 1));
    assert!(progress > 3);
    let ranges: Vec<Range<u64>> = site
        .hub
        .take_got()
        .into_iter()
        .filter_map(|got| got.range)
        .filter(|range| range.end - range.start > 10_000)
        .collect();
    let asked: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    assert!(ranges.len() >= 3 && asked < 4 * manifest.model.block_bytes, "{ranges:?}");
    assert!(
        ranges
            .windows(2)
            .any(|pair| pair[1].start == pair[0].start + 10_000 && pair[1].end == pair[0].end),
        "{ranges:?}"
    );
}

#[test]
fn a_killed_download_is_taken_up_by_the_next_process() {
    let site = site();
    let mut inspected = Inspected::new(&site.config).unwrap();
    site.hub.trouble(|troubles| troubles.cut_after = Some((20_000, usize::MAX)));
    let mut calls = 0;
    let stopped = inspected.make_ready(span(0, 1), |_| {
        calls += 1;
        if calls > 4 { Err(PrepareError::Stopped) } else { Ok(()) }
    });
    assert!(matches!(stopped, Err(PrepareError::Stopped)));
    let partial = site
        .cache
        .path()
        .join(format!("models--org--tiny/sepal/{COMMIT}/block-0.safetensors.partial"));
    let done = std::fs::metadata(&partial).unwrap().len();
    assert!(done > 1000);
    site.hub.trouble(|troubles| troubles.cut_after = None);
    site.hub.take_got();
    let manifest = site.ready(span(0, 1)).unwrap();
    site.assert_same(&manifest, span(0, 1));
    assert!(
        site.bytes_got() < manifest.model.block_bytes,
        "the first part was not asked for again"
    );
    assert!(!partial.exists());
}

#[test]
fn a_hub_that_is_down_for_a_moment_is_asked_again_and_one_that_stays_down_is_left() {
    let site = site();
    site.hub.trouble(|troubles| troubles.unavailable = 3);
    site.fetch_with(QUICK, 0).unwrap();
    let down = StandInDown::config(&site.config);
    let error = Hub::with_pauses(&down, QUICK).unwrap_err();
    assert!(error.to_string().contains("cannot reach the Hub"), "{error}");
    assert_eq!(error.exit_reason(), ExitReason::Unreachable, "the operator decides");
}

/// Nobody listens there.
struct StandInDown;

impl StandInDown {
    fn config(of: &PrepareConfig) -> PrepareConfig {
        let mut config = of.clone();
        config.cache_dir = of.cache_dir.join("empty");
        config.hub.endpoint = Some("http://127.0.0.1:9".to_owned());
        config
    }
}

#[test]
fn what_the_operator_has_to_change_is_said_at_once() {
    let mut site = site();
    site.hub.trouble(|troubles| troubles.token = Some("other".to_owned()));
    let refused = |site: &Site| {
        let error = site.ready(span(0, 1)).unwrap_err();
        assert_eq!(error.exit_reason(), ExitReason::BadConfig);
        error.to_string()
    };
    let text = refused(&site);
    assert!(text.contains("401") && text.contains("--token") && !text.contains("good"), "{text}");
    site.hub.trouble(|troubles| troubles.token = Some("good".to_owned()));
    site.config.model = "org/absent".to_owned();
    site.config.hub.revision = Some("v7".to_owned());
    let text = refused(&site);
    assert!(text.contains("org/absent") && text.contains("v7") && text.contains("404"), "{text}");
    site.config.model = "org/tiny".to_owned();
    site.ready(span(0, 1)).unwrap();
}

#[test]
fn a_hub_that_ignores_ranges_is_refused_before_its_bytes_are_taken_for_a_tensor() {
    let site = site();
    site.hub.trouble(|troubles| troubles.no_ranges = true);
    let error = site.ready(span(1, 2)).unwrap_err().to_string();
    // Small files came whole before.
    assert!(error.contains("ranges") && error.contains(".safetensors"), "{error}");
}

#[test]
fn a_block_that_does_not_fit_is_refused_with_the_figures() {
    let mut site = site();
    site.config.hub.max_disk_bytes = Some(10_000);
    let error = site.ready(span(0, 1)).unwrap_err();
    assert!(error.to_string().contains("--max_disk_space 10000"), "{error}");
    assert_eq!(error.exit_reason(), ExitReason::BadConfig);
    site.config.hub.max_disk_bytes = None;
    let one = site.ready(span(0, 1)).unwrap().model.block_bytes;
    // Room for one block: the one that nobody holds any more goes.
    site.config.hub.max_disk_bytes = Some(one + one / 2);
    site.ready(span(1, 2)).unwrap();
    let folder = site.cache.path().join(format!("models--org--tiny/sepal/{COMMIT}"));
    assert!(
        !folder.join("block-0.safetensors").exists() && folder.join("block-1.safetensors").exists()
    );
}

#[test]
fn a_file_with_another_sum_than_the_hub_gives_is_not_taken() {
    let site = site();
    std::fs::write(site.model.path().join("pytorch_model.bin"), vec![7; 100_000]).unwrap();
    std::fs::remove_file(site.model.path().join("model.safetensors")).unwrap();
    let pickled = Site { hub: StandIn::serve("org/tiny", site.model.path()), ..site };
    let mut config = pickled.config.clone();
    config.hub.endpoint = Some(pickled.hub.endpoint.clone());
    let hub = Hub::with_pauses(&config, QUICK).unwrap();
    pickled.hub.trouble(|troubles| troubles.wrong_sums = true);
    let error = hub.whole_file("pytorch_model.bin", &mut |_| Ok(())).unwrap_err();
    assert!(error.to_string().contains("SHA-256"), "{error}");
    let fetched = |hub: &Hub| hub.snapshot().join("pytorch_model.bin").is_file();
    assert!(!fetched(&hub), "what is wrong does not stay");
    pickled.hub.trouble(|troubles| troubles.wrong_sums = false);
    hub.whole_file("pytorch_model.bin", &mut |_| Ok(())).unwrap();
    assert!(fetched(&hub));
}

#[test]
fn a_header_that_names_bytes_beyond_any_file_is_refused() {
    let site = site();
    let path = site.model.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let header = Header::read(&std::fs::File::open(&path).unwrap(), bytes.len() as u64);
    let mut entries: BTreeMap<String, serde_json::Value> = BTreeMap::new();
    // A tensor of almost all bytes that can be counted, and the others after it.
    let header = header.unwrap();
    let mut at = u64::MAX - header.tensors.values().map(TensorInfo::bytes).sum::<u64>();
    let first = serde_json::json!({"dtype": "U8", "shape": [at], "data_offsets": [0, at]});
    entries.insert("first".to_owned(), first);
    for (name, info) in &header.tensors {
        let range = [at, at + info.bytes()];
        let entry =
            serde_json::json!({"dtype": info.dtype, "shape": info.shape, "data_offsets": range});
        entries.insert(name.clone(), entry);
        at += info.bytes();
    }
    let json = serde_json::to_vec(&entries).unwrap();
    let hostile = [&(json.len() as u64).to_le_bytes()[..], &json, &bytes].concat();
    std::fs::write(&path, hostile).unwrap();
    let hub = StandIn::serve("org/tiny", site.model.path());
    let mut config = site.config.clone();
    config.hub.endpoint = Some(hub.endpoint.clone());
    let site = Site { config, hub, ..site };
    let error = site.fetch_with(QUICK, 0).unwrap_err();
    assert!(error.to_string().contains("no file has"), "{error}");
}

/// Time is virtual here.
#[tokio::test(start_paused = true)]
async fn an_answer_may_take_long_as_long_as_it_comes() {
    let pieces = |pause: Duration| {
        let piece = move |number: u8| async move {
            tokio::time::sleep(pause).await;
            Ok([number; 1000])
        };
        Box::pin(futures::stream::iter(0..9).then(piece))
    };
    let start = tokio::time::Instant::now();
    let (mut got, second) = (Vec::new(), Duration::from_secs(1));
    let mut each = |bytes: &[u8]| {
        got.extend_from_slice(bytes);
        Ok(())
    };
    body(pieces(STALL - second), 9000, STALL, &mut each).await.unwrap();
    assert_eq!(start.elapsed(), 9 * (STALL - second));
    assert_eq!((got.len(), got[0], got[8999]), (9000, 0, 8));
    let start = tokio::time::Instant::now();
    let silent = body(pieces(STALL + second), 9000, STALL, &mut |_| Ok(())).await;
    assert!(matches!(silent, Err(Trouble::Stalled)), "{silent:?}");
    assert_eq!(start.elapsed(), STALL);
}

#[test]
fn a_whole_file_tells_that_it_comes_and_its_silence_is_an_error() {
    let site = site();
    std::fs::write(site.model.path().join("pytorch_model.bin"), [7; 9000]).unwrap();
    let hub = StandIn::serve("org/tiny", site.model.path());
    let mut config = site.config.clone();
    config.hub.endpoint = Some(hub.endpoint.clone());
    let found = Hub::with_pauses(&config, Pauses { failures: 1, ..QUICK }).unwrap();
    // The next piece comes once the one before has been seen.
    let asked = hub.send_when_asked(9);
    let mut looks = 0;
    let mut alive = |_| {
        looks += 1;
        // Full: asked for all of them already.
        let _ = asked.try_send(());
        Ok(())
    };
    found.whole_file("pytorch_model.bin", &mut alive).unwrap();
    assert!(looks >= 9, "told to be alive {looks} times only");

    std::fs::remove_file(found.snapshot().join("pytorch_model.bin")).unwrap();
    std::fs::remove_dir_all(found.root.join("blobs")).unwrap();
    // Nobody asks for the second piece.
    let _asked = hub.send_when_asked(2);
    let stall = Duration::from_millis(200);
    let found = Hub { pauses: Pauses { stall, ..found.pauses }, ..found };
    let error = found.whole_file("pytorch_model.bin", &mut |_| Ok(())).unwrap_err();
    assert!(error.to_string().contains("nothing came"), "{error}");
}

#[test]
fn an_adapter_comes_whole() {
    let site = site();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("adapter_config.json"), "{}").unwrap();
    std::fs::write(folder.path().join("adapter_model.bin"), [1; 5000]).unwrap();
    let hub = StandIn::serve("me/lora", folder.path());
    let mut config = site.config.clone();
    config.hub.endpoint = Some(hub.endpoint.clone());
    config.hub.revision = Some("of-the-model".to_owned());
    let weights = ["adapter_model.safetensors", "adapter_model.bin"];
    let found = Hub::adapter(&config, "me/lora", "adapter_config.json", &weights).unwrap();
    assert_eq!(std::fs::read(found.join("adapter_model.bin")).unwrap(), [1; 5000]);
    let absent = Hub::adapter(&config, "me/none", "adapter_config.json", &weights).unwrap_err();
    assert!(absent.to_string().contains("me/none"), "{absent}");
}

/// All files and links below a folder.
fn all_below(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let below = |path: PathBuf| match path.is_dir() && !path.is_symlink() {
        true => all_below(&path),
        false => vec![path],
    };
    entries.flat_map(|entry| below(entry.path())).collect()
}

#[test]
fn a_mirror_cannot_choose_where_files_are_written() {
    let root = tempfile::tempdir().unwrap();
    let precious = root.path().join("config.json");
    std::fs::write(&precious, "mine").unwrap();
    let up = "../".repeat(20);
    let outside = format!("{up}{}", root.path().join("planted").display());
    let absolute = root.path().join("planted").display().to_string();
    for name in [outside.as_str(), absolute.as_str(), "..", ".", "a/../../b", "config.json", "zz"] {
        for is_commit in [true, false] {
            let mut site = site();
            site.config.cache_dir = root.path().join("cache");
            site.hub.trouble(|troubles| match is_commit {
                true => troubles.commit = Some(name.to_owned()),
                false => troubles.etag = Some(name.to_owned()),
            });
            let error = Hub::with_pauses(&site.config, QUICK).unwrap_err();
            assert!(error.to_string().contains("hexadecimal"), "{name}: {error}");
        }
    }
    assert_eq!(all_below(root.path()), std::slice::from_ref(&precious), "nothing was written");
    assert_eq!(std::fs::read_to_string(precious).unwrap(), "mine");
}

#[test]
fn a_mirror_that_names_another_shape_evicts_nothing() {
    let site = site();
    let other = site.cache.path().join("models--org--other/sepal/c/block-0.safetensors");
    std::fs::create_dir_all(other.parent().unwrap()).unwrap();
    std::fs::write(&other, vec![0; 2 << 20]).unwrap();
    let path = site.model.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let header = Header::read(&std::fs::File::open(&path).unwrap(), bytes.len() as u64).unwrap();
    let side = 1u64 << 24;
    let mut at = 0;
    let mut entries = BTreeMap::new();
    for name in header.tensors.keys() {
        let range = [at, at + 2 * side * side];
        entries.insert(
            name.clone(),
            serde_json::json!({"dtype": "BF16", "shape": [side, side], "data_offsets": range}),
        );
        at = range[1];
    }
    let json = serde_json::to_vec(&entries).unwrap();
    std::fs::write(&path, [&(json.len() as u64).to_le_bytes()[..], &json].concat()).unwrap();
    let hub = StandIn::serve("org/tiny", site.model.path());
    let mut config = site.config.clone();
    config.hub.endpoint = Some(hub.endpoint.clone());
    let site = Site { config, hub, ..site };
    let error = site.fetch_with(QUICK, 0).unwrap_err();
    assert!(error.to_string().contains("config.json asks for"), "{error}");
    assert!(other.exists(), "nothing was evicted for it");
}

#[test]
fn a_file_that_claims_to_be_small_and_is_not_is_refused() {
    let site = site();
    let big = std::fs::File::create(site.model.path().join("config.json")).unwrap();
    big.set_len(SMALL_BYTES + 1).unwrap();
    let hub = StandIn::serve("org/tiny", site.model.path());
    let mut config = site.config.clone();
    config.hub.endpoint = Some(hub.endpoint.clone());
    let error = Hub::with_pauses(&config, QUICK).unwrap_err();
    assert!(error.to_string().contains("67108865 bytes, the limit is"), "{error}");
}

#[test]
fn a_client_gets_all_small_files_of_its_tokenizer_and_templates() {
    let site = site();
    std::fs::create_dir(site.model.path().join("additional_chat_templates")).unwrap();
    let files = [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tool_use.jinja",
    ];
    for file in files {
        std::fs::write(site.model.path().join(file), file).unwrap();
    }
    let hub = StandIn::serve("org/tiny", site.model.path());
    let mut config = site.config.clone();
    config.hub.endpoint = Some(hub.endpoint.clone());
    let mut hub = Hub::with_pauses(&config, QUICK).unwrap();
    let folder = hub.client_tensors(|_| Ok(Vec::new()), &mut |_| Ok(())).unwrap();
    for file in files {
        assert_eq!(std::fs::read_to_string(folder.join(file)).unwrap(), file);
    }
}

#[test]
fn the_commit_that_was_found_is_used_when_the_hub_cannot_be_reached() {
    let site = site();
    drop(Hub::with_pauses(&site.config, QUICK).unwrap());
    site.hub.trouble(|troubles| troubles.unavailable = usize::MAX);
    let hub = Hub::with_pauses(&site.config, QUICK).unwrap();
    assert_eq!(hub.commit(), COMMIT);
    let refs = site.cache.path().join("models--org--tiny/refs/main");
    assert_eq!(std::fs::read_to_string(&refs).unwrap(), COMMIT);
    // What it says is no path either.
    std::fs::write(refs, "../../../../etc").unwrap();
    let error = Hub::with_pauses(&site.config, QUICK).unwrap_err();
    assert!(matches!(error, PrepareError::Unreachable { .. }), "{error}");
}
