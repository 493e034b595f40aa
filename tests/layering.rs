//! Holds the shape of the source tree: which crate may depend on which, where tokio, libp2p and
//! CUDA may appear, where `unsafe` may stand, and how long a file may grow.
//!
//! The manifests are read through `cargo metadata --no-deps`, which needs no network and builds
//! nothing; the sources are read as text, with comments and literals taken out.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// What each crate may depend on within the workspace, in any kind of dependency.
const EDGES: &[(&str, &[&str])] = &[
    ("shared", &[]),
    // Reaches netd in the place of the crate of the same name, through `[patch.crates-io]`.
    ("multistream-select", &[]),
    ("kernels", &["shared"]),
    ("gpu-worker", &["kernels", "shared"]),
    ("netd", &["shared"]),
    ("client", &["netd", "kernels", "shared"]),
    ("supervisor", &["shared"]),
    (
        "sepal",
        &[
            "client",
            "gpu-worker",
            "kernels",
            "netd",
            "shared",
            "supervisor",
        ],
    ),
];

/// Families of packages (by prefix) that only these crates may name.
const ONLY_IN: &[(&str, &[&str])] = &[
    // In gpu-worker only under `prepare/hub`, whose library needs a reactor.
    ("tokio", &["netd", "client", "gpu-worker"]),
    ("libp2p", &["netd", "client"]),
    ("cudarc", &["kernels"]),
];

/// Where `unsafe` may stand: shared memory, the first steps of a child, spawning, mapped files,
/// device calls, vector instructions, and the pool of threads that borrow their caller's stack; and
/// the ring benchmark, which compares with bare futexes and eventfds and counts allocations.
const UNSAFE_IN: &[&str] = &[
    "shared/src/shm/",
    "shared/src/bootstrap.rs",
    "shared/src/bootstrap/",
    "shared/benches/ring/",
    "shared/tests/ring_allocations.rs",
    "supervisor/src/spawn.rs",
    "gpu-worker/src/weights/map.rs",
    "gpu-worker/src/weights/map/guard.rs",
    "kernels/src/cuda/",
    "kernels/src/cpu/simd/",
    "kernels/src/cpu/pool.rs",
    // One look-up in the innermost loop of products from NF4.
    "kernels/src/quant/nf4.rs",
    "kernels/src/ops/",
    // Starts kernels that are wrong on purpose, which no safe function has.
    "kernels/tests/sanitized.rs",
];

/// Lines of a file, its unit tests left out.
const LONGEST_FILE: usize = 800;

/// The composition root only chooses a role.
const LONGEST_MAIN: usize = 80;

#[test]
fn crates_depend_only_along_the_allowed_edges() {
    let allowed: BTreeMap<&str, &[&str]> = EDGES.iter().copied().collect();
    let packages = Workspace::read().packages;
    let names: BTreeSet<&str> = packages.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(
        names,
        allowed.keys().copied().collect(),
        "EDGES lists the crates of the workspace"
    );
    for package in &packages {
        for dependency in package
            .dependencies
            .iter()
            .filter(|d| names.contains(d.name.as_str()))
        {
            assert!(
                allowed[package.name.as_str()].contains(&dependency.name.as_str()),
                "{} must not depend on {}",
                package.name,
                dependency.name
            );
        }
    }
}

#[test]
fn tokio_libp2p_and_cuda_stay_in_their_crates() {
    for package in &Workspace::read().packages {
        for dependency in &package.dependencies {
            for (family, homes) in ONLY_IN {
                let named = dependency.name.starts_with(family);
                // The tests of the executable drive clients of the swarm.
                let in_test = package.name == "sepal" && dependency.kind == "dev";
                assert!(
                    !named || in_test || homes.contains(&package.name.as_str()),
                    "{} must not depend on {}: {family} lives in {homes:?}",
                    package.name,
                    dependency.name
                );
            }
        }
    }
}

#[test]
fn plain_cargo_commands_cover_every_crate() {
    let workspace = Workspace::read();
    assert_eq!(workspace.members, workspace.default_members);
}

#[test]
fn every_manifest_takes_the_lints_of_the_workspace() {
    for package in &Workspace::read().packages {
        let manifest = read(&package.manifest);
        assert!(
            manifest.contains("[lints]\nworkspace = true"),
            "{} lacks `[lints] workspace = true`",
            package.manifest.display()
        );
    }
}

#[test]
fn unsafe_stands_only_where_it_is_allowed() {
    let offends = |source: &Source| {
        let allowed = UNSAFE_IN.iter().any(|place| source.path.starts_with(place));
        !allowed && words(&source.code).any(|word| word == "unsafe")
    };
    let offenders: Vec<String> = sources()
        .into_iter()
        .filter(offends)
        .map(|s| s.path)
        .collect();
    assert!(
        offenders.is_empty(),
        "`unsafe` outside of UNSAFE_IN: {offenders:?}"
    );
}

#[test]
fn every_crate_without_unsafe_forbids_it() {
    let needs_attribute = |root: &PathBuf| {
        let folder = relative(root.parent().expect("a source file has a folder"));
        let has_places = UNSAFE_IN.iter().any(|place| place.starts_with(&folder));
        let code = strip(&read(root));
        let forbids = code.contains("#![forbid(unsafe_code)]");
        let denies = code.contains("#![deny(unsafe_code)]");
        let may_deny = has_places && root.ends_with("lib.rs");
        !(forbids || denies && may_deny)
    };
    let roots = Workspace::read().packages.into_iter().flat_map(|p| p.roots);
    let offenders: Vec<String> = roots
        .filter(needs_attribute)
        .map(|r| relative(&r))
        .collect();
    assert!(
        offenders.is_empty(),
        "need #![forbid(unsafe_code)], or #![deny(unsafe_code)] in a crate of UNSAFE_IN: {offenders:?}"
    );
}

#[test]
fn atomics_of_shared_memory_come_from_the_model_checked_module() {
    for source in sources() {
        let in_shm = source.path.starts_with("shared/src/shm/");
        // Tests stop their threads with flags of their own.
        let may = source.path.ends_with("/sync.rs") || source.path.ends_with("/tests.rs");
        assert!(
            !in_shm || may || !source.code.contains("sync::atomic"),
            "{} bypasses shm::sync, so loom does not see it",
            source.path
        );
    }
}

#[test]
fn files_stay_readable() {
    for source in sources() {
        let lines = source.lines_without_tests;
        let of_tests = source.path.ends_with("/tests.rs");
        assert!(
            of_tests || lines <= LONGEST_FILE,
            "{} has {lines} lines without its tests",
            source.path
        );
        assert!(
            !source.path.ends_with("/utils.rs"),
            "{}: name what it does",
            source.path
        );
    }
}

#[test]
fn the_composition_root_is_small_and_has_no_modules() {
    let main = sources()
        .into_iter()
        .find(|s| s.path == "supervisor/src/main.rs");
    let main = main.expect("the package's one executable");
    assert!(
        main.lines_without_tests <= LONGEST_MAIN,
        "{} lines",
        main.lines_without_tests
    );
    assert!(
        words(&main.code).all(|word| word != "mod"),
        "modules belong to the crates"
    );
}

#[test]
fn comments_and_literals_are_not_code() {
    let code = strip(
        r##"a /* unsafe /* unsafe */ */ b // unsafe
        "unsafe \" unsafe" r#"unsafe " unsafe"# b"unsafe" 'u' '\'' &'static str c"##,
    );
    assert!(words(&code).all(|word| word != "unsafe"), "{code}");
    assert_eq!(
        words(&code)
            .filter(|w| ["a", "b", "static", "str", "c"].contains(w))
            .count(),
        6
    );
    assert!(words(&strip("fn f() { unsafe { g() } }")).any(|word| word == "unsafe"));
    assert!(words(&strip("#![deny(unsafe_code)]")).all(|word| word != "unsafe"));
}

struct Workspace {
    packages: Vec<Package>,
    members: BTreeSet<String>,
    default_members: BTreeSet<String>,
}

struct Package {
    name: String,
    manifest: PathBuf,
    dependencies: Vec<Dependency>,
    /// First source files of its library and its executables.
    roots: Vec<PathBuf>,
}

struct Dependency {
    name: String,
    /// `normal`, `dev` or `build`.
    kind: String,
}

impl Workspace {
    fn read() -> Self {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args([
                "metadata",
                "--no-deps",
                "--offline",
                "--format-version",
                "1",
            ])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("cargo starts");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo writes JSON");
        Self {
            packages: list(&metadata["packages"])
                .iter()
                .map(Package::parse)
                .collect(),
            members: list(&metadata["workspace_members"])
                .iter()
                .map(text)
                .collect(),
            default_members: list(&metadata["workspace_default_members"])
                .iter()
                .map(text)
                .collect(),
        }
    }
}

impl Package {
    fn parse(value: &Value) -> Self {
        let dependency = |d: &Value| Dependency {
            name: text(&d["name"]),
            kind: d["kind"].as_str().unwrap_or("normal").to_owned(),
        };
        let is_root = |target: &&Value| {
            list(&target["kind"])
                .iter()
                .any(|kind| ["lib", "bin"].contains(&text(kind).as_str()))
        };
        Self {
            name: text(&value["name"]),
            manifest: text(&value["manifest_path"]).into(),
            dependencies: list(&value["dependencies"])
                .iter()
                .map(dependency)
                .collect(),
            roots: list(&value["targets"])
                .iter()
                .filter(is_root)
                .map(|target| text(&target["src_path"]).into())
                .collect(),
        }
    }
}

#[test]
fn every_kind_of_bad_input_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = read(&root.join("ARCHITECTURE.md"));
    let section = text.split("## Bad input").nth(1).expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| "));
    let sources = sources();
    let mut checked = 0;
    for row in rows.skip(2) {
        let cell = row.rsplit('|').nth(1).unwrap_or_default();
        let names: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test: {row}");
        for name in names {
            let function = format!("fn {name}(");
            let exists = sources.iter().any(|source| source.code.contains(&function));
            assert!(exists, "no test is called {name}");
            checked += 1;
        }
    }
    assert!(checked > 10, "the table was not found");
}

struct Source {
    /// From the root of the repository, with slashes.
    path: String,
    /// Without comments and literals.
    code: String,
    lines_without_tests: usize,
}

/// Every Rust file of the repository.
fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::from(env!("CARGO_MANIFEST_DIR"))];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a readable folder") {
            let entry = entry.expect("a readable folder");
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_folder = entry.file_type().expect("a file has a type").is_dir();
            if is_folder && !name.starts_with('.') && name != "target" {
                folders.push(entry.path());
            } else if !is_folder && name.ends_with(".rs") {
                let text = read(&entry.path());
                found.push(Source {
                    path: relative(&entry.path()),
                    code: strip(&text),
                    lines_without_tests: lines_without_tests(&text),
                });
            }
        }
    }
    assert!(found.len() > EDGES.len(), "the sources were found");
    found
}

/// Lines up to the unit tests, which stand last in a file.
fn lines_without_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let begins_tests = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ");
    lines
        .windows(2)
        .position(begins_tests)
        .unwrap_or(lines.len())
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
}

/// The text with comments, strings and character literals replaced by a space.
fn strip(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = comment_end(&chars, at).or_else(|| literal_end(&chars, at));
        code.push(if end.is_some() { ' ' } else { chars[at] });
        at = end.unwrap_or(at + 1);
    }
    code
}

/// The index after the comment that begins at `at`.
fn comment_end(chars: &[char], at: usize) -> Option<usize> {
    let starts = |at: usize, pattern: &str| chars[at..].iter().copied().take(2).eq(pattern.chars());
    if starts(at, "//") {
        let newline = chars[at..].iter().position(|c| *c == '\n');
        return Some(newline.map_or(chars.len(), |length| at + length));
    }
    if !starts(at, "/*") {
        return None;
    }
    let (mut depth, mut end) = (0, at);
    while end < chars.len() {
        if starts(end, "/*") {
            depth += 1;
            end += 2;
        } else if starts(end, "*/") {
            depth -= 1;
            end += 2;
            if depth == 0 {
                return Some(end);
            }
        } else {
            end += 1;
        }
    }
    Some(chars.len())
}

/// The index after the string or character literal that begins at `at`; lifetimes are none.
fn literal_end(chars: &[char], at: usize) -> Option<usize> {
    let in_word = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
    match chars[at] {
        'r' if !in_word || chars[at - 1] == 'b' => raw_string_end(chars, at),
        '"' => Some(quoted_end(chars, at, '"')),
        '\'' if chars.get(at + 1) == Some(&'\\') || chars.get(at + 2) == Some(&'\'') => {
            Some(quoted_end(chars, at, '\''))
        }
        _ => None,
    }
}

fn raw_string_end(chars: &[char], at: usize) -> Option<usize> {
    let hashes = chars[at + 1..].iter().take_while(|c| **c == '#').count();
    let open = at + 1 + hashes;
    if chars.get(open) != Some(&'"') {
        return None;
    }
    let closes = |quote: &usize| {
        chars[*quote] == '"'
            && chars[quote + 1..].iter().take_while(|c| **c == '#').count() >= hashes
    };
    Some(
        (open + 1..chars.len())
            .find(closes)
            .map_or(chars.len(), |quote| quote + 1 + hashes),
    )
}

fn quoted_end(chars: &[char], at: usize, quote: char) -> usize {
    let mut end = at + 1;
    while end < chars.len() && chars[end] != quote {
        end += if chars[end] == '\\' { 2 } else { 1 };
    }
    (end + 1).min(chars.len())
}

fn relative(path: &Path) -> String {
    let inside = path
        .strip_prefix(env!("CARGO_MANIFEST_DIR"))
        .expect("a path of the repository");
    inside.to_string_lossy().into_owned()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
}

fn list(value: &Value) -> &[Value] {
    value
        .as_array()
        .map(Vec::as_slice)
        .expect("cargo metadata has this list")
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .expect("cargo metadata has this text")
        .to_owned()
}
