//! The glossary of `CONTRIBUTING.md`, and where the sources use a word that it retires.
//!
//! Its table has the columns "word", "means" and "instead of". Words in backquotes in the last
//! column are retired: `Name` is no bare name of a type, `name` is no word of a name, and `*_name`
//! ends no name in the crate of kernels, neither in Rust nor of a file in CUDA.

use std::collections::BTreeSet;

use super::source::{Source, read, root, words};

/// A word that the glossary retires.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Retired(String);

/// Every retired word.
pub fn retired() -> BTreeSet<Retired> {
    let text = read(&root().join("CONTRIBUTING.md"));
    let section = text.split("## Glossary").nth(1).expect("CONTRIBUTING.md has a glossary");
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| ")).skip(1);
    let cells = rows.filter_map(|row| row.split('|').nth(3));
    let found: BTreeSet<Retired> = cells.flat_map(backquoted).map(Retired).collect();
    assert!(found.len() > 10, "the table was not found");
    found
}

fn backquoted(cell: &str) -> impl Iterator<Item = String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned)
}

impl Retired {
    pub fn word(&self) -> &str {
        &self.0
    }

    /// Whether a file uses the word.
    pub fn is_used_in(&self, file: &Names<'_>) -> bool {
        if let Some(ending) = self.0.strip_prefix('*') {
            return file.is_of_kernels && file.names.iter().any(|name| name.ends_with(ending));
        }
        if self.0.starts_with(char::is_uppercase) {
            return file.types.contains(self.word());
        }
        file.words.contains(self.word())
    }
}

/// What a file names, each once.
pub struct Names<'s> {
    pub path: &'s str,
    is_of_kernels: bool,
    /// Identifiers, keywords, and the file's own name.
    names: BTreeSet<&'s str>,
    types: BTreeSet<&'s str>,
    /// The words that names consist of.
    words: BTreeSet<String>,
}

impl<'s> Names<'s> {
    /// The names of a file.
    pub fn of(source: &'s Source) -> Names<'s> {
        let in_code: BTreeSet<&str> = words(&source.code).collect();
        let stem = source.path.rsplit('/').next().and_then(|file| file.split('.').next());
        Names {
            path: &source.path,
            is_of_kernels: source.path.starts_with("kernels/"),
            types: type_names(&source.code).collect(),
            words: in_code.iter().flat_map(|name| words_of(name)).collect(),
            names: in_code.into_iter().chain(stem).collect(),
        }
    }
}

/// Names of the types that a file declares.
fn type_names(code: &str) -> impl Iterator<Item = &str> {
    let kinds = ["struct", "enum", "trait", "type", "union"];
    words(code).zip(words(code).skip(1)).filter(move |(kind, _)| kinds.contains(kind)).map(|w| w.1)
}

/// The words that make up a name, in lower case.
fn words_of(name: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    let mut was_lower = false;
    for c in name.chars() {
        if c == '_' || c.is_uppercase() && was_lower {
            found.push(String::new());
        }
        was_lower = c.is_lowercase();
        if c != '_' {
            found.last_mut().expect("it begins with one").extend(c.to_lowercase());
        }
    }
    found
}

#[test]
fn a_retired_word_is_found_in_names_of_its_kind() {
    let source = Source::new;
    let in_file = |word: &str, file: &Source| Retired(word.into()).is_used_in(&Names::of(file));
    let uses = |word: &str, code: &str| in_file(word, &source("a.rs", code));
    assert!(uses("State", "pub struct State<T> {}") && uses("Part", "type Part = u8;"));
    assert!(!uses("State", "struct ChildState; use other::State;"));
    assert!(uses("turn", "fn take_turn()") && uses("turn", "TurnQueue") && uses("turn", "TURN"));
    assert!(!uses("turn", "return returned turns"));
    let kernel = source("kernels/src/ops/linear.rs", "fn linear_few() { v.any() }");
    assert!(in_file("*_few", &kernel) && !in_file("*_any", &kernel));
    assert!(!uses("*_few", "fn linear_few()"));
}
