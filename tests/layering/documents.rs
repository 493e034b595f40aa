//! The form of the documents: how long lines and pages may grow, that links lead somewhere, and that the
//! tests which they name exist.

use std::fs;
use std::path::{Path, PathBuf};

use super::source::{read, relative, root, sources};

/// Characters of a line.
const LONGEST_LINE: usize = 120;

/// Lines of the pages that a newcomer reads first.
const LONGEST_PAGES: &[(&str, usize)] = &[("README.md", 110), ("ARCHITECTURE.md", 200)];

/// A Markdown file.
struct Page {
    path: PathBuf,
    text: String,
}

/// Every Markdown file of the repository.
fn pages() -> Vec<Page> {
    let mut pages = Vec::new();
    let mut folders = vec![root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a readable folder") {
            let path = entry.expect("a readable folder").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // What is built or installed here is none of ours.
            let is_ours = !name.starts_with('.') && !["target", "node_modules"].contains(&&*name);
            if path.is_dir() && is_ours && !path.is_symlink() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(Page::at(path));
            }
        }
    }
    assert!(pages.len() > 15, "the documents were found");
    pages
}

impl Page {
    fn at(path: PathBuf) -> Page {
        Page { text: read(&path), path }
    }

    /// By its path from the root of the repository.
    fn named(name: &str) -> Page {
        Page::at(root().join(name))
    }

    /// The text without blocks of code, where brackets are no links.
    fn prose(&self) -> String {
        let pieces = self.text.split("```").step_by(2);
        pieces.collect::<Vec<_>>().concat()
    }

    /// The targets of its links.
    fn links(&self) -> Vec<String> {
        let prose = self.prose();
        let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        targets.map(str::to_owned).collect()
    }

    /// The anchors of its headings, as web pages of repositories make them.
    fn anchors(&self) -> Vec<String> {
        let prose = self.prose();
        let headings = prose.lines().filter(|line| line.starts_with('#'));
        let anchor = |heading: &str| {
            let text = heading.trim_start_matches('#').trim().to_lowercase();
            let kept = text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        };
        headings.map(anchor).collect()
    }
}

#[test]
fn lines_of_documents_have_at_most_120_characters() {
    let mut long = Vec::new();
    for page in pages() {
        let lines = page.text.lines().zip(1..);
        let over = lines.filter(|(line, _)| line.chars().count() > LONGEST_LINE);
        long.extend(over.map(|(_, number)| format!("{}:{number}", relative(&page.path))));
    }
    assert!(long.is_empty(), "lines over {LONGEST_LINE} characters: {long:#?}");
}

#[test]
fn the_first_pages_stay_short() {
    for (name, longest) in LONGEST_PAGES {
        let lines = Page::named(name).text.lines().count();
        assert!(lines <= *longest, "{name} has {lines} lines, at most {longest} are allowed");
    }
}

#[test]
fn links_between_documents_lead_somewhere() {
    let (mut checked, mut broken) = (0, Vec::new());
    for page in pages() {
        for link in page.links().into_iter().filter(|link| !link.contains("://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let folder = page.path.parent().expect("a file has a folder");
            let path = if file.is_empty() { page.path.clone() } else { folder.join(file) };
            let is_there = path.exists()
                && (anchor.is_empty() || Page::at(path).anchors().iter().any(|a| a == anchor));
            if !is_there {
                broken.push(format!("{}: {link}", relative(&page.path)));
            }
            checked += 1;
        }
    }
    assert!(checked > 30, "the links were found");
    assert!(broken.is_empty(), "broken links: {broken:#?}");
}

#[test]
fn packages_hold_every_document_that_readme_and_docs_link() {
    let build = read(&root().join("deploy/build"));
    let listed = build.split("documents=(").nth(1).expect("deploy/build lists the documents");
    let listed: Vec<&str> =
        listed.split(')').next().unwrap_or_default().split_whitespace().collect();
    let root = root().canonicalize().expect("the repository");
    let is_for_users = |page: &Page| {
        let path = relative(&page.path);
        path == "README.md" || path.starts_with("docs/")
    };
    for page in pages().into_iter().filter(is_for_users) {
        for link in page.links().into_iter().filter(|link| !link.contains("://")) {
            let file = link.split('#').next().unwrap_or_default();
            let folder = page.path.parent().expect("a file has a folder");
            // The test of links tells of those that lead nowhere.
            let Ok(path) = folder.join(file).canonicalize() else { continue };
            let path = path.strip_prefix(&root).expect("a file of the repository");
            let is_page = path.starts_with("docs") && listed.contains(&"docs/*.md");
            let is_listed = is_page || listed.iter().any(|document| Path::new(document) == path);
            let (page, path) = (relative(&page.path), path.display());
            assert!(is_listed, "deploy/build installs no {path}, which {page} links");
        }
    }
}

#[test]
fn every_kind_of_bad_input_names_tests_that_exist() {
    let text = Page::named("netd/README.md").text;
    let section = text.split("## How bad input").nth(1).expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let sources = sources();
    let mut checked = 0;
    for item in section.split("\n- **").skip(1) {
        let item = item.split("\n\n").next().unwrap_or_default();
        let (_, tests) = item.split_once("Tests:").unwrap_or_else(|| panic!("no test: {item}"));
        let names: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test: {item}");
        for name in names {
            let function = format!("fn {name}(");
            let exists = sources.iter().any(|source| source.code.contains(&function));
            assert!(exists, "no test is called {name}");
            checked += 1;
        }
    }
    assert!(checked > 30, "the list was found");
}
