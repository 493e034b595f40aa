//! Holds the shape of the source tree: which crate may depend on which, where tokio, libp2p and
//! CUDA may appear, where `unsafe` may stand, who may start processes, which modules may import each
//! other, which words name things, how long a file may grow, and the form of the documents.

#![forbid(unsafe_code)]

mod circles;
mod documents;
mod glossary;
mod names;
mod processes;
mod source;
mod workspace;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use glossary::Names;
use source::{Source, cuda_sources, read, relative, sources, strip, words};
use workspace::Workspace;

/// What each crate may depend on within the workspace, in any kind of dependency.
const EDGES: &[(&str, &[&str])] = &[
    ("shared", &[]),
    // For tests alone; see TEST_EDGES.
    ("fuzzing", &[]),
    ("testkit", &["shared"]),
    // Reaches p2p in the place of the crate of the same name, through `[patch.crates-io]`.
    ("multistream-select", &[]),
    ("kernels", &["shared"]),
    ("model", &["shared"]),
    ("prepare", &["model", "kernels", "shared"]),
    ("blocks", &["model", "kernels", "shared"]),
    ("gpu-worker", &["blocks", "model", "kernels", "shared"]),
    ("resource-manager", &[]),
    ("p2p", &["resource-manager", "shared"]),
    ("swarm", &["p2p", "resource-manager", "shared"]),
    ("netd", &["swarm", "p2p", "resource-manager", "shared"]),
    ("client", &["blocks", "swarm", "p2p", "model", "kernels", "shared"]),
    ("gateway", &["client", "swarm", "p2p", "shared"]),
    ("supervisor", &["model", "shared"]),
    // Programs that measure; nothing depends on them.
    ("lab", &["client", "gpu-worker", "model", "netd", "p2p", "sepal", "shared", "swarm"]),
    (
        "sepal",
        &[
            "client",
            "gateway",
            "gpu-worker",
            "kernels",
            "model",
            "netd",
            "p2p",
            "prepare",
            "shared",
            "supervisor",
            "swarm",
        ],
    ),
];

/// What the tests of a crate may depend on besides: prepare's map what it wrote as workers do, and
/// the workers' serve models that prepare made ready. Crates with decoders fuzz them.
const TEST_EDGES: &[(&str, &str)] = &[
    ("prepare", "blocks"),
    ("gpu-worker", "prepare"),
    // With their feature `emu`.
    ("gpu-worker", "gpu-worker"),
    ("kernels", "kernels"),
    ("kernels", "testkit"),
    ("gpu-worker", "testkit"),
    ("lab", "testkit"),
    ("model", "testkit"),
    ("swarm", "testkit"),
    ("netd", "testkit"),
    ("prepare", "testkit"),
    ("sepal", "testkit"),
    ("supervisor", "testkit"),
    ("shared", "fuzzing"),
    ("p2p", "fuzzing"),
    ("swarm", "fuzzing"),
    ("netd", "fuzzing"),
    ("model", "fuzzing"),
    ("prepare", "fuzzing"),
    ("gateway", "fuzzing"),
    ("supervisor", "fuzzing"),
];

/// Families of packages (by prefix) that only these crates may name.
const ONLY_IN: &[(&str, &[&str])] = &[
    // In prepare only under `hub`, whose library needs a reactor.
    // sepal has channels of tokio alone, for the programs that host a server.
    (
        "tokio",
        &[
            "resource-manager",
            "p2p",
            "swarm",
            "netd",
            "client",
            "gateway",
            "prepare",
            "sepal",
            "lab",
        ],
    ),
    ("libp2p", &["p2p", "resource-manager"]),
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
    // Counts allocations; calls libFuzzer.
    "tests/fuzzing/src/",
    "supervisor/src/spawn.rs",
    // The page of `--web`, beside the tree.
    "supervisor/src/web.rs",
    "gpu-worker/blocks/src/map.rs",
    "gpu-worker/blocks/src/map/guard.rs",
    "kernels/src/cuda/",
    "kernels/src/cpu/simd/",
    "kernels/src/cpu/pool.rs",
    // One look-up in the innermost loop of products from NF4.
    "kernels/src/quant/nf4.rs",
    "kernels/src/ops/",
    // Starts kernels that are wrong on purpose, which no safe function has.
    "kernels/tests/sanitized.rs",
];

/// Who may start processes: the supervisor, which owns every child of a server; and `sepal demo`,
/// which starts servers. Then what is no part of the executable: tests, which start all kinds, and
/// benchmarks, whose two sides are processes.
const PROCESSES_IN: &[&str] = &[
    "supervisor/src/devices/subprocess.rs",
    // Asks journald for a bug report.
    "sepal/src/doctor/journal.rs",
    "supervisor/src/spawn.rs",
    // The page of `--web`, beside the tree.
    "supervisor/src/web.rs",
    "client/src/demo.rs",
    "kernels/benches/",
    "kernels/src/cuda/driver/probe/tests.rs",
    "kernels/src/cuda/driver/tests.rs",
    "kernels/src/cuda/group/tests/",
    "kernels/tests/",
    "netd/benches/",
    "shared/benches/",
    "shared/src/sandbox/tests.rs",
    "shared/src/shm/group/tests/",
    "shared/src/shm/ring/tests.rs",
    "supervisor/tests/",
    "tests/",
];

/// Circles of imports that are still to be opened. The list may only shrink.
const CIRCLES: &[&[&str]] = &[];

/// Retired words that files still use, with how their paths begin. The list may only shrink.
const RETIRED_IN: &[(&str, &[&str])] = &[];

/// Names of types that stand for one thing in several crates: a JSON or msgpack value, a model.
const SHARED_NAMES: [&str; 2] = ["Model", "Value"];

/// The layer of `kernels` that defines the operations: it builds without any device.
const REFERENCE_LAYER: &[&str] = &[
    "kernels/src/backend.rs",
    "kernels/src/cpu/",
    "kernels/src/error.rs",
    "kernels/src/kv.rs",
    "kernels/src/ops/",
    "kernels/src/quant/",
    "kernels/src/tensor.rs",
];

/// Lines of a file, its unit tests left out.
const LONGEST_FILE: usize = 800;

/// The composition root only chooses a role.
const LONGEST_MAIN: usize = 100;

#[test]
fn crates_depend_only_along_the_allowed_edges() {
    let allowed: BTreeMap<&str, &[&str]> = EDGES.iter().copied().collect();
    let packages = Workspace::read().packages;
    let names: BTreeSet<&str> = packages.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, allowed.keys().copied().collect(), "EDGES lists the crates of the workspace");
    for package in &packages {
        for dependency in package.dependencies.iter().filter(|d| names.contains(d.name.as_str())) {
            let edge = (package.name.as_str(), dependency.name.as_str());
            let in_tests = dependency.kind == "dev" && TEST_EDGES.contains(&edge);
            assert!(
                in_tests || allowed[edge.0].contains(&edge.1),
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
    let Workspace { mut members, default_members, .. } = Workspace::read();
    // Only the laboratory builds its programs.
    members.retain(|member| !member.contains("/tests/lab#"));
    assert_eq!(members, default_members);
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
    let offenders: Vec<String> = sources().into_iter().filter(offends).map(|s| s.path).collect();
    assert!(offenders.is_empty(), "`unsafe` outside of UNSAFE_IN: {offenders:?}");
}

#[test]
fn only_the_supervisor_starts_processes_of_a_server() {
    let sources = sources();
    let starts = |source: &&Source| processes::starts_one(&source.code_without_tests);
    let found: Vec<&str> = sources.iter().filter(starts).map(|s| s.path.as_str()).collect();
    let is_listed = |path: &&&str| PROCESSES_IN.iter().any(|start| path.starts_with(start));
    let offenders: Vec<_> = found.iter().filter(|path| !is_listed(path)).collect();
    assert!(offenders.is_empty(), "start processes outside of PROCESSES_IN: {offenders:?}");
    for start in PROCESSES_IN {
        let is_needed = found.iter().any(|path| path.starts_with(start));
        assert!(is_needed, "take it out of PROCESSES_IN, nothing there starts a process: {start}");
    }
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
    let offenders: Vec<String> = roots.filter(needs_attribute).map(|r| relative(&r)).collect();
    assert!(
        offenders.is_empty(),
        "need #![forbid(unsafe_code)], or #![deny(unsafe_code)] in a crate of UNSAFE_IN: {offenders:?}"
    );
}

#[test]
fn the_reference_layer_imports_nothing_of_cuda() {
    let sources = sources();
    for folder in REFERENCE_LAYER {
        let found = sources.iter().any(|source| source.path.starts_with(folder));
        assert!(found, "{folder} has no source: update REFERENCE_LAYER");
    }
    let offends = |source: &&Source| {
        let is_reference = REFERENCE_LAYER.iter().any(|folder| source.path.starts_with(folder));
        is_reference && words(&source.code).any(|word| word == "cuda" || word == "cudarc")
    };
    let offenders: Vec<&String> = sources.iter().filter(offends).map(|s| &s.path).collect();
    assert!(offenders.is_empty(), "these name the CUDA backend: {offenders:?}");
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
        assert!(!source.path.ends_with("/utils.rs"), "{}: name what it does", source.path);
    }
}

#[test]
fn modules_beside_each_other_do_not_import_each_other_in_a_circle() {
    let found = circles::circles(&sources());
    let is_within = |circle: &circles::Circle, listed: &[&str]| {
        circle.modules.iter().all(|module| listed.contains(&module.as_str()))
    };
    for circle in &found {
        assert!(
            CIRCLES.iter().any(|listed| is_within(circle, listed)),
            "a circle of {:#?}\nby {:#?}",
            circle.modules,
            circle.imports
        );
    }
    for listed in CIRCLES {
        let is_open = !found.iter().any(|circle| is_within(circle, listed));
        assert!(!is_open, "take it out of CIRCLES, it is open: {listed:?}");
    }
}

#[test]
fn no_name_uses_a_word_that_the_glossary_retires() {
    let (retired, sources) = (glossary::retired(), [sources(), cuda_sources()].concat());
    let sources: Vec<Names> = sources.iter().map(Names::of).collect();
    let listed = |word: &str| RETIRED_IN.iter().find(|(w, _)| *w == word).map_or(&[][..], |w| w.1);
    let mut offenders = Vec::new();
    for word in &retired {
        let exceptions = listed(word.word());
        let files: Vec<&str> =
            sources.iter().filter(|s| word.is_used_in(s)).map(|s| s.path).collect();
        let is_listed = |file: &&str| exceptions.iter().any(|start| file.starts_with(start));
        let new = files.iter().filter(|file| !is_listed(file));
        offenders.extend(new.map(|file| (word.word(), *file)));
        for start in exceptions {
            let is_used = files.iter().any(|file| file.starts_with(start));
            assert!(is_used, "take it out of RETIRED_IN: {} in {start}", word.word());
        }
    }
    assert!(offenders.is_empty(), "the glossary retires these words: {offenders:#?}");
    let unknown = RETIRED_IN.iter().find(|(w, _)| !retired.iter().any(|r| r.word() == *w));
    assert!(unknown.is_none(), "the glossary does not retire {unknown:?}");
}

#[test]
fn a_type_name_stands_for_two_types_at_most() {
    let sources = sources();
    let found = names::types(&sources);
    let crowded =
        found.iter().filter(|(name, files)| files.len() > 2 && !SHARED_NAMES.contains(name));
    let crowded: Vec<_> = crowded.collect();
    assert!(crowded.is_empty(), "give each of these types the noun of its room: {crowded:#?}");
}

#[test]
fn a_module_is_named_by_a_noun() {
    let sources = sources();
    let found = names::unspeaking_modules(&sources);
    assert!(found.is_empty(), "say what these modules hold: {found:#?}");
}

#[test]
fn the_composition_root_is_small_and_has_no_modules() {
    let main = sources().into_iter().find(|s| s.path == "sepal/src/commands.rs");
    let main = main.expect("the composition root");
    assert!(main.lines_without_tests <= LONGEST_MAIN, "{} lines", main.lines_without_tests);
    assert!(words(&main.code).all(|word| word != "mod"), "modules belong to the crates");
}
