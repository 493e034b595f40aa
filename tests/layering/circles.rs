//! Circles of imports between modules that have one parent.
//!
//! A module stands for all files below it. It imports another module when a file of the one names
//! an item of the other, in a `use` or by a path. A parent and its own descendants may use each
//! other. Code of tests has no part in circles.

use std::collections::{BTreeMap, BTreeSet};

use super::source::Source;

/// Modules with one parent that import each other, directly or through one another.
pub struct Circle {
    /// Paths of the modules, without `.rs`.
    pub modules: BTreeSet<String>,
    /// One line per import between two of them.
    pub imports: BTreeSet<String>,
}

/// The names that lead from the root of a crate to a module.
type ModulePath = Vec<String>;
type Modules<'a> = BTreeMap<ModulePath, &'a Source>;

/// Imports between modules with one parent: importer, imported, and lines that say what is taken.
type Imports = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Every circle of every crate.
pub fn circles(sources: &[Source]) -> Vec<Circle> {
    let mut imports = Imports::new();
    for (folder, modules) in crates(sources) {
        for (path, source) in &modules {
            add_imports(&mut imports, &folder, &modules, path, source);
        }
    }
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|module| (module.as_str(), reach(&imports, module))).collect();
    let mut found: BTreeMap<BTreeSet<&str>, BTreeSet<String>> = BTreeMap::new();
    for (module, others) in &reached {
        let returns =
            |other: &&&str| reached.get(**other).is_some_and(|back| back.contains(module));
        let circle: BTreeSet<&str> = others.iter().filter(returns).copied().collect();
        let taken = imports[*module].iter().filter(|(to, _)| circle.contains(to.as_str()));
        let taken: Vec<String> = taken.flat_map(|(_, lines)| lines.iter().cloned()).collect();
        if !circle.is_empty() {
            found.entry(circle).or_default().extend(taken);
        }
    }
    let own = |modules: BTreeSet<&str>| modules.into_iter().map(str::to_owned).collect();
    found.into_iter().map(|(m, imports)| Circle { modules: own(m), imports }).collect()
}

/// The modules that `from` imports, directly or through others; `from` itself where it is in a
/// circle.
fn reach<'a>(imports: &'a Imports, from: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(module) = open.pop() {
        for next in imports.get(module).into_iter().flat_map(BTreeMap::keys) {
            if reached.insert(next.as_str()) {
                open.push(next);
            }
        }
    }
    reached
}

/// Source folders of the crates with their modules.
fn crates(sources: &[Source]) -> BTreeMap<String, Modules<'_>> {
    let mut found: BTreeMap<String, Modules<'_>> = BTreeMap::new();
    for source in sources.iter().filter(|source| !is_test(&source.path)) {
        let Some(at) = source.path.find("src/") else { continue };
        let (folder, file) = source.path.split_at(at + "src/".len());
        let mut path: ModulePath =
            file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
        path.pop_if(|name| ["mod", "lib", "main"].contains(&name.as_str()));
        found.entry(folder.to_owned()).or_default().insert(path, source);
    }
    found
}

/// Whether a file is compiled for tests, models or benchmarks alone.
fn is_test(path: &str) -> bool {
    let folders = ["tests", "test", "benches", "examples", "testdata"];
    let endings = ["tests.rs", "stand_in.rs", "fixtures.rs", "loom_models.rs"];
    path.split('/').any(|name| folders.contains(&name))
        || endings.iter().any(|ending| path.ends_with(ending))
}

fn add_imports(
    imports: &mut Imports,
    folder: &str,
    modules: &Modules<'_>,
    path: &ModulePath,
    source: &Source,
) {
    let is_child = |name: &str| modules.contains_key(&[path.as_slice(), &[name.into()]].concat());
    let tokens = without_tests(tokens(&source.code));
    for names in named_paths(&tokens) {
        let Some(names) = from_root(path, &names, is_child) else { continue };
        let module = (0..=names.len()).rev().find(|n| modules.contains_key(&names[..*n]));
        let (module, item) = names.split_at(module.unwrap_or_default());
        let common = path.iter().zip(module).take_while(|(a, b)| a == b).count();
        if common == path.len() || common == module.len() {
            continue;
        }
        let name = |path: &[String]| format!("{folder}{}", path[..=common].join("/"));
        let taken = item.first().map_or("*", String::as_str);
        let target = modules.get(module).map_or("", |source| source.path.as_str());
        imports
            .entry(name(path))
            .or_default()
            .entry(name(module))
            .or_default()
            .insert(format!("{} -> {target}: {taken}", source.path));
    }
}

/// The path from the root of its crate; none when it leads out of the crate.
fn from_root(
    module: &[String],
    names: &[&str],
    is_child: impl Fn(&str) -> bool,
) -> Option<Vec<String>> {
    let own = |names: &[&str]| -> Vec<String> { names.iter().map(|n| (*n).to_owned()).collect() };
    match names {
        ["crate", rest @ ..] => Some(own(rest)),
        ["self" | "super", ..] => {
            let relative = names.iter().take_while(|n| ["self", "super"].contains(n)).count();
            let up = names[..relative].iter().filter(|name| **name == "super").count();
            let base = module.get(..module.len().checked_sub(up)?)?;
            Some([base.to_vec(), own(&names[relative..])].concat())
        }
        [first, ..] if is_child(first) => Some([module.to_vec(), own(names)].concat()),
        _ => None,
    }
}

/// Words, `::` and single characters.
fn tokens(code: &str) -> Vec<&str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = match first {
            _ if is_word(first) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            ':' if rest.starts_with("::") => 2,
            _ => first.len_utf8(),
        };
        found.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    found
}

/// Leaves out what stands under `#[cfg(test)]`, `#[cfg(loom)]` and `#[cfg(all(test, ...))]`.
fn without_tests(tokens: Vec<&str>) -> Vec<&str> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let is_test = match &tokens[at..] {
            ["#", "[", "cfg", "(", "all", "(", which, ..] => ["test", "loom"].contains(which),
            ["#", "[", "cfg", "(", which, ..] => ["test", "loom"].contains(which),
            _ => false,
        };
        if is_test {
            at = item_end(&tokens, at);
        } else {
            kept.push(tokens[at]);
            at += 1;
        }
    }
    kept
}

/// The index after the item whose attributes begin at `at`.
fn item_end(tokens: &[&str], mut at: usize) -> usize {
    let mut depth = 0_usize;
    while at < tokens.len() {
        match tokens[at] {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => depth = depth.saturating_sub(1),
            _ => {}
        }
        let ends = tokens[at] == "}" || tokens[at] == ";";
        at += 1;
        if ends && depth == 0 {
            break;
        }
    }
    at
}

/// Every path of more than one name, those of `use` in full.
fn named_paths<'a>(tokens: &[&'a str]) -> Vec<Vec<&'a str>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let rest = &tokens[at..];
        let length = match rest {
            ["use", next, ..] if *next != "<" => {
                let length = rest.iter().position(|t| *t == ";").unwrap_or(rest.len());
                add_use(&rest[1..length], &[], &mut found);
                length
            }
            [_, "::", ..] => {
                let joints = rest.iter().skip(1).step_by(2).take_while(|t| **t == "::").count();
                let names = rest.iter().step_by(2).take(joints + 1).copied();
                found.push(names.take_while(|name| is_name(name)).collect());
                2 * joints + 1
            }
            _ => 1,
        };
        at += length;
    }
    found
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// The paths of a `use`, whose groups are written out.
fn add_use<'a>(tokens: &[&'a str], before: &[&'a str], found: &mut Vec<Vec<&'a str>>) {
    let add = |path: Vec<&'a str>, found: &mut Vec<Vec<&'a str>>| {
        if path.len() > before.len() {
            found.push(path);
        }
    };
    let mut path = before.to_vec();
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at] {
            "{" => {
                let end = item_end(tokens, at);
                add_use(&tokens[at + 1..end - 1], &path, found);
                path.clear();
                at = end - 1;
            }
            "," => add(std::mem::replace(&mut path, before.to_vec()), found),
            "as" => at += 1,
            "::" => {}
            name => path.push(name),
        }
        at += 1;
    }
    add(path, found);
}

#[test]
fn a_circle_is_found_through_uses_paths_and_children() {
    let source = Source::new;
    let sources = [
        source("a/src/lib.rs", "mod one; mod two; mod three; mod four;"),
        source("a/src/one.rs", "use crate::{two::{Two as B, other}, four::Four};"),
        source("a/src/two.rs", "mod inner; fn f() { inner::g() }"),
        source("a/src/two/inner.rs", "fn g() -> super::super::three::Three { super::f() }"),
        source("a/src/three.rs", "use super::one; fn f() { one::f() } // use crate::four::Four;"),
        source("a/src/four.rs", "#[cfg(test)]\nmod tests { use crate::one::One; }"),
        source("a/src/one/tests.rs", "use crate::four::Four;"),
    ];
    let found = circles(&sources);
    assert_eq!(found.len(), 1);
    let expected = ["a/src/one", "a/src/three", "a/src/two"].map(str::to_owned);
    assert_eq!(found[0].modules, expected.into());
    assert!(found[0].imports.contains("a/src/two/inner.rs -> a/src/three.rs: Three"));
}
