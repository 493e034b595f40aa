//! Fuzz targets of PyTorch files: the archive with everything in it, and the pickle alone.

use std::path::Path;

use fuzzing::{Target, outcome};

use super::*;

fn files() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/torch");
    let entries = std::fs::read_dir(folder).expect("golden files");
    let paths = entries.map(|entry| entry.expect("entry").path());
    let mut paths: Vec<_> = paths.filter(|p| p.extension().is_some_and(|e| e == "bin")).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).expect("read")).collect()
}

fn pickles() -> Vec<Vec<u8>> {
    let file = tempfile::tempfile().expect("a file");
    let pickle = |bytes: &Vec<u8>| {
        file.set_len(bytes.len() as u64).ok()?;
        file.write_all_at(bytes, 0).ok()?;
        let archive = Archive::read(&file, bytes.len() as u64).ok()?;
        let root = archive.root("data.pkl").ok()?;
        archive.bytes(&file, &format!("{root}data.pkl"), MAX_PICKLE_BYTES).ok()?
    };
    files().iter().filter_map(pickle).collect()
}

#[test]
fn fuzz_archives() {
    let file = tempfile::tempfile().expect("a file");
    Target::new("torch archives", files()).with_bound(1 << 20, 256).fuzz(move |input| {
        file.set_len(input.len() as u64).expect("resize");
        file.write_all_at(input, 0).expect("write");
        let header = read(&file, input.len() as u64);
        if let Ok(header) = &header {
            let ends = header.tensors.values().map(|tensor| tensor.data_offsets);
            assert!(ends.into_iter().all(|(begin, end)| begin <= end && end <= input.len() as u64));
        }
        outcome(&header)
    });
}

#[test]
fn fuzz_pickles() {
    // A value of the machine takes 100 bytes for an opcode of one.
    Target::new("pickles", pickles()).with_bound(1 << 20, 512).fuzz(move |input| {
        let tensors = pickle::tensors(input);
        for (_, tensor) in tensors.iter().flatten() {
            let _ = outcome(&place(tensor, Some((0, 1 << 20))));
        }
        outcome(&tensors)
    });
}
