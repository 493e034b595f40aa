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
