use std::fs::{File, FileTimes};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use shared::block::Span;
use shared::config::{HubConfig, PrepareConfig, QuantChoice, QuantType};
use shared::dtype::DType;
use tempfile::TempDir;
use testkit::hub::{COMMIT, StandIn};
use testkit::models::*;

use super::*;
use crate::Inspected;

/// A cache with blocks 0 and 1 of a model of the Hub, both quantized too.
struct Filled {
    cache: TempDir,
    config: PrepareConfig,
    _model: TempDir,
    _hub: StandIn,
}

fn filled() -> Filled {
    let model = tempfile::tempdir().unwrap();
    write_model(model.path(), &llama_config(3), &llama_tensors(3, DType::Bf16));
    let hub = StandIn::serve("org/tiny", model.path());
    let cache = tempfile::tempdir().unwrap();
    let config = PrepareConfig {
        quant_type: QuantChoice::Named(QuantType::Nf4),
        ..hub.prepare_config("org/tiny", &cache)
    };
    ready(&config);
    let filled = Filled { cache, config, _model: model, _hub: hub };
    filled.wait_until_unused();
    filled
}

fn ready(config: &PrepareConfig) {
    let span = Span::new(0, 2).unwrap();
    Inspected::new(config).unwrap().make_ready(span, |_| Ok(())).unwrap();
}

impl Filled {
    fn run(&self, action: CacheAction) -> Said {
        let folder = self.cache.path();
        match &action {
            CacheAction::List { json } => list(folder, *json),
            CacheAction::Prune(wanted) => prune::run(folder, wanted),
            CacheAction::Verify { repair, json } => verify::run(folder, *repair, *json),
            CacheAction::Export { model, revision, out } => {
                export::run(folder, model, revision.as_deref(), out)
            }
        }
        .unwrap()
    }

    fn json(&self, action: CacheAction) -> serde_json::Value {
        serde_json::from_str(&self.run(action).text).unwrap()
    }

    /// A process that another test is starting has a copy of every descriptor, and of its lock, for a
    /// moment.
    fn wait_until_unused(&self) {
        let end = Instant::now() + Duration::from_secs(60);
        let is_used = |entry: &serde_json::Value| entry["files_in_use"] != 0;
        while self.json(CacheAction::List { json: true })["entries"]
            .as_array()
            .unwrap()
            .iter()
            .any(is_used)
        {
            assert!(Instant::now() < end, "a file stays in use");
            std::thread::yield_now();
        }
    }

    fn block(&self, number: u32) -> PathBuf {
        let name = format!("models--org--tiny/sepal/{COMMIT}/block-{number}.safetensors");
        self.cache.path().join(name)
    }

    fn prepared(&self) -> Vec<PathBuf> {
        let folder = self.cache.path().join("prepared/m-org_tiny");
        let files = std::fs::read_dir(folder).into_iter().flatten();
        files.map(|file| file.unwrap().path()).collect()
    }
}

#[test]
fn the_list_names_model_revision_format_blocks_and_use() {
    let filled = filled();
    let held = File::open(filled.block(1)).unwrap();
    held.lock_shared().unwrap();
    let list = filled.json(CacheAction::List { json: true });
    let entries = list["entries"].as_array().unwrap();
    let found: Vec<_> = entries
        .iter()
        .map(|entry| {
            assert_eq!(entry["model"], "org/tiny");
            let text = |key: &str| entry[key].as_str().unwrap_or("-").to_owned();
            (text("format"), text("blocks"), text("revision"), entry["files_in_use"].as_u64())
        })
        .collect();
    let entry = |format: &str, blocks: &str, revision: &str, used| {
        (format.to_owned(), blocks.to_owned(), revision.to_owned(), Some(used))
    };
    assert_eq!(
        found,
        [
            entry("files", "-", "-", 0),
            entry("checkpoint", "0:2", COMMIT, 1),
            entry("nf4, bfloat16", "0:2", COMMIT, 0)
        ]
    );
    let sum: u64 = entries.iter().filter_map(|entry| entry["bytes"].as_u64()).sum();
    assert_eq!(list["bytes"].as_u64(), Some(sum));
    let text = filled.run(CacheAction::List { json: false }).text;
    for part in ["org/tiny", "0123456789ab", "nf4, bfloat16", "0:2", "1 of 2 files"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let documented = include_str!("../../../../deploy/TOOLS.md");
    for key in entries[0].as_object().unwrap().keys().chain(list.as_object().unwrap().keys()) {
        assert!(documented.contains(&format!("`{key}`")), "deploy/TOOLS.md does not name {key}");
    }
}

#[test]
fn pruning_deletes_what_was_asked_for_but_nothing_in_use() {
    let filled = filled();
    let held = File::open(filled.block(1)).unwrap();
    held.lock_shared().unwrap();
    let model = Some("org/tiny".to_owned());
    let wanted = PruneConfig { model, dry_run: true, ..PruneConfig::default() };
    let said = filled.run(CacheAction::Prune(wanted.clone())).text;
    assert!(said.starts_with("would delete 3 files") && filled.block(0).is_file(), "{said}");
    let said =
        filled.run(CacheAction::Prune(PruneConfig { dry_run: false, ..wanted.clone() })).text;
    assert!(said.starts_with("deleted 3 files") && said.contains("in use"), "{said}");
    assert!(!filled.block(0).is_file() && filled.block(1).is_file());
    assert!(filled.prepared().is_empty());
    drop(held);
    filled.wait_until_unused();
    filled.run(CacheAction::Prune(PruneConfig { dry_run: false, ..wanted }));
    let left: Vec<_> = std::fs::read_dir(filled.cache.path().join("models--org--tiny"))
        .map_or(vec![], |files| files.map(|file| file.unwrap().file_name()).collect());
    assert!(left.iter().all(|name| name == "refs"), "{left:?}");
    // What is gone is fetched and converted again.
    ready(&filled.config);
    assert!(filled.block(1).is_file() && filled.prepared().len() == 2);

    let old = FileTimes::new().set_accessed(SystemTime::now() - Duration::from_secs(90_000));
    File::open(filled.block(0)).unwrap().set_times(old).unwrap();
    let older_than = Some(Duration::from_secs(86_400));
    filled.run(CacheAction::Prune(PruneConfig { older_than, ..PruneConfig::default() }));
    assert!(!filled.block(0).is_file() && filled.block(1).is_file());
}

#[test]
fn a_look_at_the_cache_is_no_use_of_its_files() {
    let filled = filled();
    let files = filled.prepared().into_iter().chain([filled.block(0), filled.block(1)]);
    let files: Vec<PathBuf> = files.collect();
    // An access time so old is set by any read, also where the file system sets it rarely.
    let then = SystemTime::now() - Duration::from_secs(40 * 86_400);
    for file in &files {
        let old = FileTimes::new().set_accessed(then);
        File::open(file).unwrap().set_times(old).unwrap();
    }
    filled.run(CacheAction::List { json: false });
    filled.run(CacheAction::Verify { repair: false, json: false });
    let older_than = Some(Duration::from_secs(30 * 86_400));
    let wanted = PruneConfig { older_than, ..PruneConfig::default() };
    filled.run(CacheAction::Prune(PruneConfig { dry_run: true, ..wanted.clone() }));
    assert!(files.iter().all(|file| file.is_file()));
    filled.run(CacheAction::Prune(wanted));
    assert!(files.iter().all(|file| !file.exists()), "they were not used for 40 days");
}

#[test]
fn a_conversion_under_way_is_neither_damaged_nor_deleted() {
    let filled = filled();
    let folder = filled.cache.path().join("prepared/m-org_tiny");
    let writing = folder.join(".block-2-bfloat16-00.safetensors.77.tmp");
    let left = folder.join(".block-1-bfloat16-00.safetensors.66.tmp");
    for file in [&writing, &left] {
        std::fs::write(file, "half a hea").unwrap();
    }
    let killed = FileTimes::new().set_modified(SystemTime::now() - Duration::from_secs(90_000));
    File::options().append(true).open(&left).unwrap().set_times(killed).unwrap();
    let found = filled.json(CacheAction::Verify { repair: true, json: true });
    assert_eq!(found["damaged"].as_array().unwrap().len(), 1, "{found}");
    assert!(writing.is_file() && !left.exists());
    let model = Some("org/tiny".to_owned());
    filled.run(CacheAction::Prune(PruneConfig { model, ..PruneConfig::default() }));
    assert!(writing.is_file() && !filled.block(0).exists());
}

#[test]
fn what_a_start_made_ready_stays_until_its_workers_map_it() {
    let filled = filled();
    let mut starting = Inspected::new(&filled.config).unwrap();
    starting.make_ready(Span::new(0, 1).unwrap(), |_| Ok(())).unwrap();
    let model = Some("org/tiny".to_owned());
    let wanted = PruneConfig { model, ..PruneConfig::default() };
    let said = filled.run(CacheAction::Prune(wanted.clone())).text;
    assert!(said.contains("in use"), "{said}");
    let left: Vec<_> = filled.prepared();
    assert!(left.len() == 1 && left[0].to_str().unwrap().contains("block-0-"), "{left:?}");
    drop(starting);
    filled.run(CacheAction::Prune(wanted));
    assert!(filled.prepared().is_empty());
}

#[test]
fn damaged_files_are_named_and_repaired() {
    let filled = filled();
    let verify = |repair| filled.json(CacheAction::Verify { repair, json: true });
    let clean = verify(false);
    assert_eq!(clean["damaged"].as_array().unwrap().len(), 0, "{clean}");
    assert!(clean["files"].as_u64().unwrap() >= 5);

    // A bit of a weight, the end of a block, and a whole file of the Hub.
    let flipped = filled.prepared().remove(0);
    let mut bytes = std::fs::read(&flipped).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&flipped, &bytes).unwrap();
    let bytes = std::fs::read(filled.block(1)).unwrap();
    std::fs::write(filled.block(1), &bytes[..bytes.len() - 1]).unwrap();
    let found = verify(false);
    let damaged = found["damaged"].as_array().unwrap();
    let problems: Vec<&str> = damaged.iter().filter_map(|one| one["problem"].as_str()).collect();
    assert_eq!(problems.len(), 2, "{found}");
    assert!(problems.iter().any(|problem| problem.contains("cut short")), "{problems:?}");
    assert!(problems.iter().any(|problem| problem.contains("SHA-256")), "{problems:?}");
    assert_eq!(
        filled.run(CacheAction::Verify { repair: false, json: false }).reason,
        ExitReason::Failed
    );

    let repaired = filled.run(CacheAction::Verify { repair: true, json: false });
    assert_eq!(repaired.reason, ExitReason::Clean);
    assert!(!flipped.exists() && !filled.block(1).exists() && filled.block(0).exists());
    ready(&filled.config);
    assert_eq!(verify(false)["damaged"].as_array().unwrap().len(), 0);
    let documented = include_str!("../../../../deploy/TOOLS.md");
    for key in ["files", "damaged", "path", "problem", "deleted"] {
        assert!(documented.contains(&format!("`{key}`")), "deploy/TOOLS.md does not name {key}");
    }
}

#[test]
fn an_exported_model_is_served_from_its_folder_under_its_own_name() {
    let filled = filled();
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("exported");
    let export = |model: &str, out: &Path| {
        export::run(filled.cache.path(), model, None, out).map(|said| said.text)
    };
    let said = export("org/tiny", &out).unwrap();
    assert!(said.contains("holds blocks 0:2 of 3 of org/tiny"), "{said}");
    assert!(said.ends_with("exported --block_indices 0:2\n"), "{said}");
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1, "nothing is left beside it");

    let of_folder = |start, end| {
        let config = PrepareConfig {
            model: out.to_str().unwrap().to_owned(),
            cache_dir: place.path().join("cache"),
            hub: HubConfig { offline: true, ..HubConfig::default() },
            ..filled.config.clone()
        };
        let mut inspected = Inspected::new(&config).unwrap();
        inspected.make_ready(Span::new(start, end).unwrap(), |_| Ok(()))
    };
    let manifest = of_folder(0, 2).unwrap();
    let facts = &manifest.model;
    assert_eq!((facts.name.as_str(), facts.dht_prefix.as_deref()), ("org/tiny", Some("tiny-hf")));
    let bytes = |manifest: &model::manifest::Manifest| {
        let weights =
            blocks::map::MappedWeights::map(manifest, Span::new(0, 2).unwrap(), || ()).unwrap();
        let tensor = weights.tensor(shared::block::BlockIndex(1), "mlp.up_proj.weight");
        tensor.unwrap().bytes().to_vec()
    };
    let mut original = Inspected::new(&filled.config).unwrap();
    let original = original.make_ready(Span::new(0, 2).unwrap(), |_| Ok(())).unwrap();
    assert_eq!(bytes(&manifest), bytes(&original));
    let refused = of_folder(1, 3).unwrap_err().to_string();
    assert!(
        refused.contains("holds blocks 0:2 of 3") && refused.contains("--block_indices"),
        "{refused}"
    );

    let again = export("org/tiny", &out).unwrap_err().to_string();
    assert!(again.contains("not empty"), "{again}");
    let absent = export("org/absent", &place.path().join("other")).unwrap_err().to_string();
    assert!(absent.contains("org/absent") && absent.contains("sepal cache ls"), "{absent}");
}

#[test]
fn names_in_files_cannot_change_what_the_terminal_shows() {
    let filled = filled();
    let header = r#"{"\u001b[2Jweight":{"dtype":"F32","shape":[3],"data_offsets":[0,4]}}"#;
    let length = (header.len() as u64).to_le_bytes();
    let bytes = [&length[..], header.as_bytes(), &[0; 4]].concat();
    std::fs::write(filled.block(0), bytes).unwrap();
    let folder = filled.cache.path().join("models--org--\u{1b}[31mred/sepal/c");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("block-0.safetensors"), "x").unwrap();
    let verified = filled.run(CacheAction::Verify { repair: false, json: false }).text;
    let listed = filled.run(CacheAction::List { json: false }).text;
    for text in [&verified, &listed] {
        assert!(text.contains("\\u{1b}") && !text.contains('\u{1b}'), "{text:?}");
    }
    assert!(verified.contains("\\u{1b}[2Jweight"), "{verified}");
}

#[test]
fn a_folder_that_does_not_exist_holds_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent");
    assert!(list(&absent, false).unwrap().text.contains("nothing is kept"));
    let wanted = PruneConfig { max_bytes: Some(0), ..PruneConfig::default() };
    assert!(prune::run(&absent, &wanted).unwrap().text.contains("0 files"));
    assert!(!absent.exists(), "and is not made");
}
