//! Names of types: one stands for one thing, so that a reader need not ask of which crate it is.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{Source, words};

/// What comes before the name of a type where it is defined.
const KEYWORDS: [&str; 4] = ["struct", "enum", "trait", "union"];

/// The names of types, each with the files that define one.
pub fn types(sources: &[Source]) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for source in sources.iter().filter(|source| !is_of_tests(&source.path)) {
        let words: Vec<&str> = words(&source.code_without_tests).collect();
        for pair in words.windows(2).filter(|pair| KEYWORDS.contains(&pair[0])) {
            if pair[1].starts_with(char::is_uppercase) {
                found.entry(pair[1]).or_default().insert(&source.path);
            }
        }
    }
    found
}

fn is_of_tests(path: &str) -> bool {
    let file = path.rsplit('/').next().unwrap_or(path);
    let is_folder = |part: &str| ["tests", "benches", "fuzzing"].contains(&part);
    path.split('/').any(is_folder)
        || ["tests.rs", "fuzz.rs", "harness.rs"].contains(&file)
        || file.ends_with("_tests.rs")
}

#[test]
fn definitions_are_found_and_mentions_are_not() {
    let text = "pub(crate) struct Row<'a>(&'a [u8]);\n/// struct Other\nfn of(row: Row) {}\n";
    let [one, other, test] = ["a/one.rs", "b/other.rs", "b/tests.rs"].map(|p| Source::new(p, text));
    let all = [one, other, test];
    let found = types(&all);
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), ["Row"]);
    assert_eq!(found["Row"], BTreeSet::from(["a/one.rs", "b/other.rs"]));
}

/// Participles that are nouns of the field.
const NOUNS: &str = "blocking embedding feed fuzzing layering logging need packing rating ring \
                     routing sampling serving sharing sizing staging timing training tuning";

/// Adjectives and other words that do not say what a module holds.
const UNSPEAKING: &str = "aside dialable fair fatal held hold known local misc moment new old other \
                          present quiet ready resident small standing steady temporary unary util utils";

/// Whether a module's name ends in a word that is no noun: an adjective or a participle.
fn is_unspeaking(module: &str) -> bool {
    let last = module.rsplit('_').next().unwrap_or(module);
    let is_participle = last.ends_with("ed") || last.ends_with("ing");
    let is_in = |list: &str| list.split(' ').any(|word| word == last);
    (is_participle && !is_in(NOUNS)) || is_in(UNSPEAKING)
}

/// Files of modules whose name, or that of a module above, is no noun. Names of crates are not asked.
pub fn unspeaking_modules(sources: &[Source]) -> BTreeSet<&str> {
    let is_offender = |source: &&Source| {
        let inside = source.path.split_once("src/").map_or("", |(_, inside)| inside);
        !is_of_tests(&source.path) && inside.trim_end_matches(".rs").split('/').any(is_unspeaking)
    };
    sources.iter().filter(is_offender).map(|source| source.path.as_str()).collect()
}

#[test]
fn adjectives_and_participles_are_told_from_nouns() {
    for name in ["moving", "stored", "shared_and_held", "small", "string_util"] {
        assert!(is_unspeaking(name), "{name}");
    }
    for name in ["peer_routing", "feed", "stall_timeout", "fused_ops", "pause"] {
        assert!(!is_unspeaking(name), "{name}");
    }
    let paths = ["shared/src/ring.rs", "a/src/moving/step.rs", "a/src/moving/tests.rs"];
    let all = paths.map(|path| Source::new(path, ""));
    assert_eq!(unspeaking_modules(&all), BTreeSet::from(["a/src/moving/step.rs"]));
}
