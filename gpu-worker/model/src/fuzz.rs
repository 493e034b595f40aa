//! Fuzz targets of the files that describe a model: `config.json` and headers of checkpoints.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use fuzzing::{Target, outcome};
use serde_json::Value;

use crate::BlockSpec;
use crate::header::Header;
use crate::sizing;

/// Files called `name` one folder below `tests/golden/blocks`: one for each family and form.
fn golden(name: &str) -> Vec<PathBuf> {
    let blocks = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/blocks");
    let folders = std::fs::read_dir(blocks).expect("golden blocks");
    let files = folders.map(|entry| entry.expect("entry").path().join(name));
    let mut files: Vec<PathBuf> = files.filter(|path| path.is_file()).collect();
    files.sort();
    files
}

#[test]
fn fuzz_configs_of_models() {
    let seeds = golden("config.json").into_iter().map(|path| std::fs::read(path).expect("read"));
    // A value of JSON takes 32 bytes for two of the file, and a list doubles as it grows. What a
    // block is made of has a fixed size.
    Target::new("config.json", seeds).with_bound(1 << 20, 128).fuzz(move |input| {
        let Ok(config) = serde_json::from_slice::<Value>(input) else { return "no JSON".into() };
        let spec = BlockSpec::from_config(&config);
        if let Ok(spec) = &spec {
            assert!(!spec.tensors(0).is_empty() && !spec.linears().is_empty());
            let _ = (spec.dimensions(), spec.mlp.intermediate(), spec.group());
            let _ = (sizing::token_flops(spec), sizing::resident_tokens(spec));
            assert!(sizing::work_bytes(spec, sizing::unit_tokens(spec), 0) > 0);
        }
        outcome(&spec)
    });
}

#[test]
fn fuzz_headers_of_safetensors() {
    let file = tempfile::tempfile().expect("a file");
    let seeds = golden("block.safetensors").into_iter().chain(golden("model.safetensors"));
    let seeds = seeds.take(8).map(|path| {
        let bytes = std::fs::read(path).expect("read");
        // The header and a little of the data.
        let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight"));
        bytes[..(8 + header as usize + 16).min(bytes.len())].to_vec()
    });
    let small =
        br#"{"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},"__metadata__":{"k":"v"}}"#;
    let small = [&(small.len() as u64).to_le_bytes()[..], small, &[0; 8]].concat();
    Target::new("safetensors headers", seeds.chain([small])).with_bound(1 << 20, 96).fuzz(
        move |input| {
            file.set_len(input.len() as u64).expect("resize");
            file.write_all_at(input, 0).expect("write");
            let header = Header::read(&file, input.len() as u64);
            if let Ok(header) = &header {
                for tensor in header.tensors.values() {
                    let end = header.data_start + tensor.data_offsets.1;
                    assert!(end <= input.len() as u64);
                    let dtype = tensor.block_dtype();
                    let _ = dtype.map(|dtype| tensor.block_elements(dtype));
                }
            }
            outcome(&header) + &outcome(&Header::parse(input.get(8..).unwrap_or_default()))
        },
    );
}
