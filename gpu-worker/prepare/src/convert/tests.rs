use blocks::map::MappedWeights;
use model::manifest::Manifest;
use shared::config::{PrepareConfig, QuantChoice, QuantType};
use shared::dtype::DType;
use tempfile::TempDir;
use testkit::models::*;
use testkit::span;

use super::*;
use crate::staging::MARKER;

struct Site {
    root: TempDir,
    config: ConvertConfig,
}

/// A model of four blocks, to be converted to `quant_type`.
fn site(quant_type: QuantType) -> Site {
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("tiny");
    write_model(&model, &llama_config(4), &llama_tensors(4, DType::F32));
    let config = ConvertConfig {
        model: model.to_str().unwrap().to_owned(),
        quant_type,
        out: root.path().join("out"),
        blocks: None,
        dtype: None,
        cache_dir: root.path().join("cache"),
        hub: HubConfig::default(),
    };
    Site { root, config }
}

impl Site {
    fn convert(&self) -> Result<String, String> {
        convert(&self.config, |_| Ok(())).map_err(|error| error.to_string())
    }

    /// As `sepal serve OUT` reads it, on a machine without the original.
    fn served(&self, asked: Option<QuantType>, span: Span) -> Result<Manifest, String> {
        let config = PrepareConfig {
            model: self.config.out.to_str().unwrap().to_owned(),
            quant_type: asked.map_or(QuantChoice::ByDevice(QuantType::None), QuantChoice::Named),
            cache_dir: self.root.path().join("other-cache"),
            ..self.config.prepare()
        };
        let mut inspected = Inspected::new(&config).map_err(|error| error.to_string())?;
        inspected.make_ready(span, |_| Ok(())).map_err(|error| error.to_string())
    }

    fn files(&self, folder: &str) -> Vec<String> {
        let files = std::fs::read_dir(self.root.path().join(folder)).into_iter().flatten();
        let mut names: Vec<String> =
            files.map(|file| file.unwrap().file_name().to_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }
}

#[test]
fn a_converted_folder_holds_the_bytes_that_serving_the_original_makes() {
    for quant in [QuantType::Int8, QuantType::Nf4] {
        let site = site(quant);
        let said = site.convert().unwrap();
        assert!(said.contains(&format!("blocks 0:4 of 4 of tiny in {quant}")), "{said}");
        let mut original = Inspected::new(&site.config.prepare()).unwrap();
        let original = original.make_ready(span(0, 4), |_| Ok(())).unwrap();
        let served = site.served(None, span(0, 4)).unwrap();
        assert_eq!(served.model, original.model);
        let map = |manifest: &Manifest| MappedWeights::map(manifest, span(0, 4), || ()).unwrap();
        let (one, other) = (map(&served), map(&original));
        for (block, tensors) in &original.blocks {
            assert_eq!(tensors.len(), served.blocks[block].len());
            for name in tensors.keys() {
                let bytes = |weights: &MappedWeights| {
                    weights.tensor(BlockIndex(*block), name).unwrap().bytes().to_vec()
                };
                assert_eq!(bytes(&one), bytes(&other), "{quant} {block} {name}");
            }
        }
        let marks = "other-cache/prepared/m-tiny";
        let bytes = |name: String| {
            std::fs::metadata(site.root.path().join(marks).join(name)).unwrap().len()
        };
        let made: Vec<u64> = site.files(marks).into_iter().map(bytes).collect();
        assert_eq!(made.len(), 4, "each block was checked");
        assert!(
            made.iter().all(|bytes| *bytes < 2048),
            "nothing was converted at the start: {made:?}"
        );
        // Asked again, nothing is done.
        assert!(site.convert().unwrap().contains("already holds"));
    }
}

#[test]
fn another_format_and_blocks_that_are_not_there_are_refused() {
    let mut site = site(QuantType::Nf4);
    site.config.blocks = Some(span(1, 3));
    let said = site.convert().unwrap();
    assert!(said.ends_with("out --block_indices 1:3"), "{said}");
    assert_eq!(site.files("out").len(), 4, "two blocks, config and record");
    assert!(site.served(Some(QuantType::Nf4), span(1, 3)).is_ok());
    let refused = site.served(Some(QuantType::Int8), span(1, 3)).unwrap_err();
    assert!(refused.contains("converted to nf4") && refused.contains("int8"), "{refused}");
    let refused = site.served(None, span(0, 4)).unwrap_err();
    assert!(refused.contains("holds blocks 1:3 of 4"), "{refused}");
    site.config.blocks = Some(span(3, 5));
    site.config.out = site.root.path().join("more");
    assert!(site.convert().unwrap_err().contains("3:5"));
    // What is converted cannot be converted again.
    site.config.model = site.root.path().join("out").to_str().unwrap().to_owned();
    site.config.blocks = None;
    assert!(site.convert().unwrap_err().contains("converted already"));
}

#[test]
fn an_interrupted_run_is_taken_up_and_never_taken_for_a_model() {
    let site = site(QuantType::Nf4);
    let mut blocks = 0;
    let stopped = convert(&site.config, |progress| {
        blocks += u32::from(matches!(progress, PrepareProgress::Block { .. }));
        if blocks == 3 { Err(PrepareError::Stopped) } else { Ok(()) }
    });
    assert!(matches!(stopped, Err(PrepareError::Stopped)));
    assert!(!site.config.out.exists());
    let left = [MARKER, "block-0.safetensors", "block-1.safetensors"];
    assert_eq!(site.files("out.partial"), left);
    let partial = PrepareConfig {
        model: site.root.path().join("out.partial").to_str().unwrap().to_owned(),
        ..site.config.prepare()
    };
    assert!(Inspected::new(&partial).is_err(), "a folder half written is no model");

    let first = site.root.path().join("out.partial/block-0.safetensors");
    let before = std::fs::metadata(&first).unwrap().modified().unwrap();
    let mut converted = 0;
    convert(&site.config, |progress| {
        converted += usize::from(matches!(progress, PrepareProgress::Tensor { .. }));
        Ok(())
    })
    .unwrap();
    assert!(site.files("out.partial").is_empty() && site.config.out.exists());
    let after = std::fs::metadata(site.config.out.join("block-0.safetensors")).unwrap();
    assert_eq!(after.modified().unwrap(), before, "finished blocks are used again");
    assert_eq!(converted % 2, 0);
    assert!(site.served(None, span(0, 4)).is_ok());
    assert!(!site.config.out.join(MARKER).exists());
}

#[test]
fn a_folder_of_somebody_else_is_neither_taken_up_nor_emptied() {
    let mut site = site(QuantType::Nf4);
    let partial = site.root.path().join("out.partial");
    std::fs::create_dir(&partial).unwrap();
    std::fs::write(partial.join("letter"), "dear").unwrap();
    let refused = site.convert().unwrap_err();
    assert!(refused.contains("out.partial") && refused.contains("did not write"), "{refused}");
    assert_eq!(site.files("out.partial"), ["letter"]);
    std::fs::remove_file(partial.join("letter")).unwrap();

    // Of its own folder, convert removes its own files alone.
    let stopped = convert(&site.config, |progress| match progress {
        PrepareProgress::Block { block: 2, .. } => Err(PrepareError::Stopped),
        _ => Ok(()),
    });
    assert!(matches!(stopped, Err(PrepareError::Stopped)));
    for name in ["letter", ".block-0.safetensors.77.tmp", "block-9.safetensors", "block-x"] {
        std::fs::write(partial.join(name), "dear").unwrap();
    }
    site.config.blocks = Some(span(1, 2));
    site.convert().unwrap();
    let files = ["block-1.safetensors", "block-x", "config.json", "letter", RECORD];
    assert_eq!(site.files("out"), files);
}

#[test]
fn a_folder_made_from_files_that_changed_is_not_taken_for_the_result() {
    let site = site(QuantType::Nf4);
    let model = site.root.path().join("tiny");
    site.convert().unwrap();
    assert!(site.convert().unwrap().contains("already holds"));
    write_model(&model, &llama_config(4), &llama_tensors(4, DType::F16));
    let refused = site.convert().unwrap_err();
    assert!(refused.contains("other weights") && refused.contains("--out"), "{refused}");
    std::fs::remove_dir_all(&site.config.out).unwrap();
    assert!(!site.convert().unwrap().contains("already"));
}

#[test]
fn what_is_in_the_way_or_damaged_is_named() {
    let site = site(QuantType::Int8);
    std::fs::create_dir(&site.config.out).unwrap();
    std::fs::write(site.config.out.join("letter"), "dear").unwrap();
    let refused = site.convert().unwrap_err();
    assert!(refused.contains("not empty") && refused.contains("--out"), "{refused}");
    std::fs::remove_file(site.config.out.join("letter")).unwrap();
    site.convert().unwrap();

    let block = site.config.out.join("block-2.safetensors");
    let whole = std::fs::read(&block).unwrap();
    std::fs::write(&block, &whole[..whole.len() - 1]).unwrap();
    let refused = site.served(None, span(0, 4)).unwrap_err();
    assert!(refused.contains("block-2") && refused.contains("copy it again"), "{refused}");
    std::fs::remove_file(&block).unwrap();
    assert!(site.served(None, span(0, 4)).unwrap_err().contains("block-2"));
    // Tensors of another shape, in a file of the right length.
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(site.config.out.join("config.json")).unwrap())
            .unwrap();
    config["intermediate_size"] = 128.into();
    std::fs::write(site.config.out.join("config.json"), config.to_string()).unwrap();
    assert!(site.served(None, span(0, 1)).unwrap_err().contains("convert the model again"));
}

#[test]
fn the_values_of_a_converted_block_are_checked_once() {
    let site = site(QuantType::Nf4);
    site.convert().unwrap();
    site.served(None, span(0, 4)).unwrap();
    let block = site.config.out.join("block-1.safetensors");
    let written = std::fs::metadata(&block).unwrap().modified().unwrap();
    let mut bytes = std::fs::read(&block).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&block, &bytes).unwrap();
    let later = written + std::time::Duration::from_secs(5);
    let set = |at| std::fs::File::options().append(true).open(&block).unwrap().set_modified(at);
    set(later).unwrap();
    let refused = site.served(None, span(0, 4)).unwrap_err();
    for part in ["block-1", "SHA-256", "copy it again"] {
        assert!(refused.contains(part), "{refused}");
    }
    assert!(site.served(None, span(2, 4)).is_ok());
    // What was checked, with the same time and length, is not read again.
    set(written).unwrap();
    assert!(site.served(None, span(0, 4)).is_ok());
}

#[test]
fn a_full_disk_is_said_before_the_work_begins() {
    let folder = tempfile::tempdir().unwrap();
    let refused = check_space(folder.path(), u64::MAX).unwrap_err().to_string();
    assert!(refused.contains("are free on the disk") && refused.contains("--out"), "{refused}");
    assert!(check_space(folder.path(), 0).is_ok());
}
