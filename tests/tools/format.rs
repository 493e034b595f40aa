//! What processes of two builds exchange is pinned by the digest of the sources that define it, beside the
//! number that `sepal upgrade` compares.

use std::fs;
use std::path::{Path, PathBuf};

use crate::harness::root;
use shared::build::{FORMAT, FORMAT_SOURCES};

/// Files and folders with types that cross between processes, or from one executable of the supervisor to
/// the next.
const TYPES: [&str; 8] = [
    "shared/src",
    "supervisor/src/inherited_fds.rs",
    "supervisor/src/handover.rs",
    "supervisor/src/placement.rs",
    "supervisor/src/segments.rs",
    "supervisor/src/sizing.rs",
    "supervisor/src/tree.rs",
    "supervisor/src/tree",
];

/// What readers of another build understand too: they leave out fields that they do not know, and take zero for
/// those that are not there.
const BY_NAME: &str = "shared/src/figures";

/// Files that lay memory out, whole.
const LAYOUTS: [&str; 3] =
    ["shared/src/shm/layout.rs", "shared/src/shm/ring.rs", "shared/src/shm/group/layout.rs"];

/// Code of a source file: no tests, comments or white space.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("a source file");
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
    lines.collect::<Vec<_>>().join(" ")
}

/// The types of a file that are serialized, each to the end of its definition.
fn types(path: &Path) -> String {
    let code = code(path);
    let derived = code
        .split("#[derive(")
        .skip(1)
        .filter(|rest| rest.split(")]").next().is_some_and(|traits| traits.contains("Serialize")));
    let whole = |rest: &str| {
        let mut depth = 0;
        let end = rest.char_indices().find(|(_, letter)| {
            match letter {
                '{' | '(' => depth += 1,
                '}' | ')' => depth -= 1,
                _ => {}
            }
            // The list of traits closes the parenthesis that was split off.
            depth == -1 && matches!(letter, '}' | ';')
        });
        rest[..end.map_or(rest.len(), |(at, _)| at)].to_owned()
    };
    derived.map(whole).collect()
}

fn files(path: PathBuf, found: &mut Vec<PathBuf>) {
    if !path.is_dir() {
        return found.push(path);
    }
    let mut inside: Vec<_> =
        fs::read_dir(path).expect("a folder").flatten().map(|entry| entry.path()).collect();
    inside.sort();
    let is_test = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.contains("test") || name.contains("loom_models")
    };
    inside.into_iter().filter(|path| !is_test(path)).for_each(|path| files(path, found));
}

#[test]
fn what_processes_exchange_is_what_the_format_number_says() {
    let root = root();
    let mut found = Vec::new();
    TYPES.iter().for_each(|source| files(root.join(source), &mut found));
    found.retain(|path| {
        !path.starts_with(root.join(BY_NAME)) && *path != root.join(BY_NAME).with_extension("rs")
    });
    let mut all: String = found.iter().map(|path| types(path)).collect();
    assert!(all.contains("WorkerInit") && all.contains("struct Tree {"));
    all.extend(LAYOUTS.iter().map(|path| code(&root.join(path))));
    // FNV-1a over what the formatter leaves alone.
    let letters = all.bytes().filter(|byte| !byte.is_ascii_whitespace() && *byte != b',');
    let digest = letters.fold(0xcbf2_9ce4_8422_2325u64, |digest, byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    assert_eq!(
        digest, FORMAT_SOURCES,
        "the sources of FORMAT {FORMAT} changed: if anything that crosses between processes did, raise FORMAT in \
         shared/src/build.rs; in any case put {digest:#018x} into FORMAT_SOURCES"
    );
}
