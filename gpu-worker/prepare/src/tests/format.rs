//! The files that prepare writes, and what workers map of them.

use super::*;

#[test]
fn tensors_in_the_block_dtype_are_mapped_from_the_checkpoint() {
    let place = place(Some(DType::F32));
    let tensors = llama_tensors(2, DType::F32);
    write_model(place.folder(), &llama_config(2), &tensors);
    let manifest = place.ready(span(0, 2)).unwrap();
    assert_eq!(manifest.files.len(), 1);
    assert_eq!(
        manifest.files[0].path,
        place.folder().join("model.safetensors").canonicalize().unwrap()
    );
    let weights = MappedWeights::map(&manifest, span(1, 2), || ()).unwrap();
    let (_, _, data) = &tensors["model.layers.1.mlp.up_proj.weight"];
    assert_eq!(tensor(&weights, 1, "mlp.up_proj.weight"), data);
    assert!(
        weights.tensor(BlockIndex(0), "mlp.up_proj.weight").is_none(),
        "block 0 is not in the span"
    );
}

#[test]
fn float32_is_rounded_to_the_nearest_bfloat16_with_ties_to_even() {
    let place = place(Some(DType::Bf16));
    let mut tensors = llama_tensors(1, DType::F32);
    // Exactly between two neighbours: down to even, up to even; just above the middle; subnormal;
    // largest that fits.
    let cases = [
        (0x3f80_8000u32, 0x3f80u16),
        (0x3f81_8000, 0x3f82),
        (0x3f80_8001, 0x3f81),
        (0x0000_8001, 0x0001),
        (0xff7f_7fff, 0xff7f),
        (0x8000_0000, 0x8000),
    ];
    let norm = tensors.get_mut("model.layers.0.input_layernorm.weight").unwrap();
    for (i, (bits, _)) in cases.iter().enumerate() {
        norm.2[4 * i..4 * i + 4].copy_from_slice(&bits.to_le_bytes());
    }
    write_model(place.folder(), &llama_config(1), &tensors);
    let weights = MappedWeights::map(&place.ready(span(0, 1)).unwrap(), span(0, 1), || ()).unwrap();
    let got = tensor(&weights, 0, "input_layernorm.weight");
    for (i, (bits, expected)) in cases.iter().enumerate() {
        assert_eq!(u16::from_le_bytes([got[2 * i], got[2 * i + 1]]), *expected, "{bits:#x}");
    }
    let reference = &llama_tensors(1, DType::Bf16)["model.layers.0.mlp.down_proj.weight"].2;
    assert_eq!(tensor(&weights, 0, "mlp.down_proj.weight"), reference);
}

#[test]
fn prepared_files_are_valid_for_the_reference_crate_and_leave_no_temporary_file() {
    let place = place(None);
    write_model(place.folder(), &llama_config(2), &llama_tensors(2, DType::F32));
    place.ready(span(0, 2)).unwrap();
    let files = place.prepared_files();
    assert_eq!(files.len(), 2);
    for file in files {
        let bytes = std::fs::read(file.path()).unwrap();
        let read = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(read.len(), 9);
        assert_eq!(read.tensor("self_attn.k_proj.weight").unwrap().shape(), [32, 64]);
    }
}

#[test]
fn prepared_files_are_reused_until_the_checkpoint_changes() {
    let place = place(None);
    write_model(place.folder(), &llama_config(2), &llama_tensors(2, DType::F32));
    let first = place.ready(span(0, 2)).unwrap();
    let mut tensors = 0;
    let again = Inspected::new(&place.config)
        .unwrap()
        .make_ready(span(0, 2), |p| {
            tensors += usize::from(matches!(p, PrepareProgress::Tensor { .. }));
            Ok(())
        })
        .unwrap();
    assert_eq!((tensors, &again), (0, &first), "nothing is converted twice");

    let mut changed = llama_tensors(2, DType::F32);
    changed.remove("model.layers.1.mlp.up_proj.weight");
    changed.insert(
        "model.layers.1.mlp.up_proj.weight".into(),
        (Dtype::F32, vec![96, 64], bytes(DType::F32, &[0.5; 96 * 64])),
    );
    write_model(place.folder(), &llama_config(2), &changed);
    let weights = MappedWeights::map(&place.ready(span(0, 2)).unwrap(), span(0, 2), || ()).unwrap();
    assert_eq!(tensor(&weights, 1, "mlp.up_proj.weight"), bytes(DType::Bf16, &[0.5; 96 * 64]));
}

#[test]
fn a_prepared_file_that_was_cut_short_is_made_again() {
    let place = place(None);
    write_model(place.folder(), &llama_config(1), &llama_tensors(1, DType::F32));
    let first = place.ready(span(0, 1)).unwrap();
    let file = place.prepared_files().pop().unwrap().path();
    let whole = std::fs::read(&file).unwrap();
    for cut in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&file, &whole[..cut]).unwrap();
        let blocks = place.ready(span(0, 1)).unwrap().blocks;
        assert_eq!(
            (blocks, std::fs::read(&file).unwrap()),
            (first.blocks.clone(), whole.clone()),
            "cut at {cut}"
        );
    }
}

#[test]
fn a_sharded_checkpoint_opens_only_the_shards_of_the_span() {
    let place = place(Some(DType::F32));
    let tensors = llama_tensors(3, DType::F32);
    write_sharded(place.folder(), &llama_config(3), &tensors);
    std::fs::remove_file(place.folder().join("model-0.safetensors")).unwrap();
    let manifest = place.ready(span(1, 3)).unwrap();
    assert_eq!(manifest.files.len(), 2);
    let weights = MappedWeights::map(&manifest, span(1, 3), || ()).unwrap();
    assert_eq!(
        tensor(&weights, 2, "mlp.up_proj.weight"),
        tensors["model.layers.2.mlp.up_proj.weight"].2
    );
    let missing = place.ready(span(0, 1)).unwrap_err().to_string();
    assert!(missing.contains("model-0.safetensors") && missing.contains("missing"), "{missing}");
}

#[test]
fn a_manifest_round_trips_and_a_changed_file_is_not_mapped() {
    let place = place(None);
    write_model(place.folder(), &llama_config(1), &llama_tensors(1, DType::Bf16));
    let manifest = place.ready(span(0, 1)).unwrap();
    let path = place.folder().join("manifest.json");
    manifest.write(&path).unwrap();
    assert_eq!(Manifest::read(&path).unwrap(), manifest);

    let checkpoint = place.folder().join("model.safetensors");
    let mut bytes = std::fs::read(&checkpoint).unwrap();
    bytes.push(0);
    std::fs::write(&checkpoint, bytes).unwrap();
    let changed = MappedWeights::map(&manifest, span(0, 1), || ()).unwrap_err();
    assert!(
        matches!(&changed, MapError::File(WeightFileError::Changed(p)) if p.ends_with("model.safetensors")),
        "{changed}"
    );
    std::fs::remove_file(&checkpoint).unwrap();
    assert!(
        MappedWeights::map(&manifest, span(0, 1), || ())
            .unwrap_err()
            .to_string()
            .contains("model.safetensors")
    );
}

#[test]
fn a_manifest_that_lies_is_refused() {
    let place = place(Some(DType::F32));
    write_model(place.folder(), &llama_config(1), &llama_tensors(1, DType::F32));
    let good = place.ready(span(0, 1)).unwrap();
    let lies: [fn(&mut model::manifest::TensorEntry); 5] = [
        |t| t.offset = u64::MAX - 3,
        |t| t.len *= 2,
        |t| t.file = 9,
        |t| t.shape = vec![u64::MAX, 64],
        |t| t.shape = vec![],
    ];
    for (i, lie) in lies.iter().enumerate() {
        let mut manifest = good.clone();
        lie(manifest.blocks.get_mut(&0).unwrap().get_mut("mlp.up_proj.weight").unwrap());
        let error = MappedWeights::map(&manifest, span(0, 1), || ()).unwrap_err();
        assert!(matches!(error, MapError::BadTensor { .. }), "lie {i}: {error}");
    }
    assert!(matches!(
        MappedWeights::map(&good, span(0, 2), || ()),
        Err(MapError::MissingBlock(BlockIndex(1)))
    ));
}

#[test]
fn temporary_files_of_killed_processes_are_removed_when_they_are_old() {
    let place = place(None);
    write_model(place.folder(), &llama_config(1), &llama_tensors(1, DType::F32));
    let folder = place.config.cache_dir.join("prepared/m-tiny");
    std::fs::create_dir_all(&folder).unwrap();
    let days = |n: u64| std::time::SystemTime::now() - Duration::from_secs(n * 24 * 3600);
    for (name, written) in
        [("old.tmp", days(2)), ("new.tmp", days(0)), ("old.safetensors", days(2))]
    {
        let file = std::fs::File::create(folder.join(name)).unwrap();
        file.set_modified(written).unwrap();
    }
    place.ready(span(0, 1)).unwrap();
    let left: Vec<_> = place.prepared_files().into_iter().map(|f| f.file_name()).collect();
    assert_eq!(left.len(), 3, "{left:?}");
    assert!(!left.contains(&"old.tmp".into()), "{left:?}");
}
