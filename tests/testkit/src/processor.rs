//! Processors that tests describe.

use shared::processor::Processor;

/// Two nodes of eight and four cores, without hyper-threads.
pub fn two_nodes() -> Processor {
    let folder = tempfile::tempdir().unwrap();
    for (path, content) in [("has_cpu", "0,3"), ("node0/cpulist", "0-7"), ("node3/cpulist", "8-11")]
    {
        let path = folder.path().join("node").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    Processor::read(folder.path(), &(0..12).collect::<Vec<u32>>())
}
