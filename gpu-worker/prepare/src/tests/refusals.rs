//! Checkpoints that are wrong: one sentence with file, tensor and reason, and nothing half done.

use super::*;

/// What is wrong with a folder, how to make it so, and words that the sentence must hold.
type BadFolder = (&'static str, fn(&Path), &'static [&'static str]);

pub(super) fn change_config(folder: &Path, key: &str, value: Value) {
    let mut config = llama_config(2);
    config[key] = value;
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

fn change_tensor(folder: &Path, change: impl FnOnce(&mut Tensors)) {
    let mut tensors = llama_tensors(2, DType::F32);
    change(&mut tensors);
    std::fs::write(folder.join("model.safetensors"), safetensors(&tensors)).unwrap();
}

const UP: &str = "model.layers.1.mlp.up_proj.weight";

fn set_value(folder: &Path, value: f32) {
    change_tensor(folder, |t| {
        t.get_mut(UP).unwrap().2[400..404].copy_from_slice(&value.to_le_bytes())
    });
}

fn replace_weights(folder: &Path, index: &str) {
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
}

const BAD_FOLDERS: &[BadFolder] = &[
    ("no folder", |f| std::fs::remove_dir_all(f).unwrap(), &["tiny", "folder"]),
    (
        "no config",
        |f| std::fs::remove_file(f.join("config.json")).unwrap(),
        &["config.json", "missing"],
    ),
    (
        "config is no JSON",
        |f| std::fs::write(f.join("config.json"), "{").unwrap(),
        &["config.json", "JSON"],
    ),
    (
        "huge config",
        |f| std::fs::write(f.join("config.json"), vec![b' '; 5 << 20]).unwrap(),
        &["config.json", "longer"],
    ),
    (
        "unknown model type",
        |f| change_config(f, "model_type", json!("gpt9")),
        &["config.json", "gpt9", "llama"],
    ),
    ("unknown dtype", |f| change_config(f, "torch_dtype", json!("int3")), &["int3", "float32"]),
    (
        "no weights",
        |f| std::fs::remove_file(f.join("model.safetensors")).unwrap(),
        &["model.safetensors", "weights"],
    ),
    (
        "weights of another format than their name says",
        |f| std::fs::rename(f.join("model.safetensors"), f.join("pytorch_model.bin")).unwrap(),
        &["pytorch_model.bin", "no zip archive of torch"],
    ),
    (
        "empty weights",
        |f| std::fs::write(f.join("model.safetensors"), "").unwrap(),
        &["model.safetensors", "cut short"],
    ),
    (
        "huge header",
        |f| std::fs::write(f.join("model.safetensors"), u64::MAX.to_le_bytes()).unwrap(),
        &["model.safetensors", "header", "16777216"],
    ),
    (
        "header of garbage",
        |f| {
            std::fs::write(f.join("model.safetensors"), [&4u64.to_le_bytes()[..], b"ab{}"].concat())
                .unwrap()
        },
        &["model.safetensors", "header"],
    ),
    (
        "offsets in disorder",
        |f| {
            let json = br#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#;
            std::fs::write(
                f.join("model.safetensors"),
                [&(json.len() as u64).to_le_bytes()[..], json].concat(),
            )
            .unwrap();
        },
        &["model.safetensors", "tensor x", "before"],
    ),
    (
        "missing tensor",
        |f| change_tensor(f, |t| drop(t.remove(UP))),
        &["model.safetensors", UP, "missing"],
    ),
    (
        "wrong shape",
        |f| change_tensor(f, |t| t.get_mut(UP).unwrap().1 = vec![64, 96]),
        &["model.safetensors", UP, "[64, 96]", "[96, 64]"],
    ),
    (
        "wrong type",
        |f| change_tensor(f, |t| t.get_mut(UP).unwrap().0 = Dtype::I32),
        &["model.safetensors", UP, "I32"],
    ),
    ("NaN", |f| set_value(f, f32::NAN), &["model.safetensors", UP, "NaN"]),
    ("infinity", |f| set_value(f, f32::INFINITY), &["model.safetensors", UP, "infinite"]),
    ("too large for bfloat16", |f| set_value(f, f32::MAX), &["model.safetensors", UP, "bfloat16"]),
    ("index is no index", |f| replace_weights(f, "[]"), &["index.json"]),
    (
        "index without the tensor",
        |f| replace_weights(f, r#"{"weight_map": {}}"#),
        &["index.json", "model.layers.0", "not listed"],
    ),
    (
        "index that points outside",
        |f| {
            let map: std::collections::BTreeMap<_, _> = llama_tensors(2, DType::F32)
                .into_keys()
                .map(|name| (name, "../other.safetensors"))
                .collect();
            replace_weights(f, &json!({ "weight_map": map }).to_string());
        },
        &["index.json", "../other.safetensors", "no file of this folder"],
    ),
];

#[test]
fn every_bad_folder_gets_a_sentence_that_names_what_is_wrong() {
    for (what, spoil, words) in BAD_FOLDERS {
        for dtype in [DType::Bf16, DType::F32] {
            if dtype == DType::F32 && *what == "too large for bfloat16" {
                continue;
            }
            let place = place(Some(dtype));
            write_model(place.folder(), &llama_config(2), &llama_tensors(2, DType::F32));
            spoil(place.folder());
            let config = PrepareConfig {
                dtype: if *what == "unknown dtype" { None } else { Some(dtype) },
                ..place.config.clone()
            };
            let result =
                Inspected::new(&config).and_then(|mut i| i.make_ready(span(0, 2), |_| Ok(())));
            let error = result.expect_err(what);
            let text = error.to_string();
            assert!(words.iter().all(|w| text.contains(w)), "{what} ({dtype}): {text}");
            assert_eq!(error.exit_reason(), ExitReason::BadConfig, "{what}");
            assert!(!text.contains('\n'), "{what}: one sentence");
        }
    }
}

#[test]
fn a_span_outside_the_model_is_refused() {
    let place = place(None);
    write_model(place.folder(), &llama_config(2), &llama_tensors(2, DType::Bf16));
    let text = place.ready(span(1, 3)).unwrap_err().to_string();
    assert!(text.contains("1:3") && text.contains("0:2"), "{text}");
}

#[test]
fn a_checkpoint_cut_short_anywhere_is_refused() {
    let place = place(Some(DType::F32));
    write_model(place.folder(), &llama_config(1), &llama_tensors(1, DType::F32));
    let path = place.folder().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let lengths =
        (0..header).step_by(13).chain((header..whole.len()).step_by(997)).chain([whole.len() - 1]);
    for length in lengths {
        std::fs::write(&path, &whole[..length]).unwrap();
        let text = place.ready(span(0, 1)).unwrap_err().to_string();
        assert!(
            text.contains("model.safetensors") && text.contains("cut short"),
            "{length}: {text}"
        );
    }
}

#[test]
fn a_refusal_by_the_caller_stops_the_work_and_leaves_nothing_half_done() {
    let place = place(None);
    write_model(place.folder(), &llama_config(1), &llama_tensors(1, DType::F32));
    let mut left = 3;
    let result = Inspected::new(&place.config).unwrap().make_ready(span(0, 1), |_| {
        left -= 1;
        if left == 0 { Err(PrepareError::Stopped) } else { Ok(()) }
    });
    assert!(matches!(result, Err(PrepareError::Stopped)));
    assert!(place.prepared_files().is_empty());
}
