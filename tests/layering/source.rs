//! The sources as text: every Rust file of the repository, without comments and literals.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

/// A file of Rust or CUDA.
#[derive(Clone)]
pub struct Source {
    /// From the root of the repository, with slashes.
    pub path: String,
    /// Without comments and literals.
    pub code: String,
    /// The same before its unit tests.
    pub code_without_tests: String,
    /// Lines before its unit tests.
    pub lines_without_tests: usize,
}

/// Every Rust file of the repository, read once.
pub fn sources() -> Vec<Source> {
    static FOUND: LazyLock<Vec<Source>> = LazyLock::new(|| files_of(&["rs"]));
    assert!(FOUND.len() > 100, "the sources were found");
    FOUND.clone()
}

/// Every file of kernels and of their emulator.
pub fn cuda_sources() -> Vec<Source> {
    let found = files_of(&["cu", "cuh", "h", "cpp"]);
    assert!(found.len() > 30, "the kernels were found");
    found
}

/// The files whose names end so, in the order of their paths.
fn files_of(extensions: &[&str]) -> Vec<Source> {
    let mut found = Vec::new();
    let mut folders = vec![root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a readable folder") {
            let entry = entry.expect("a readable folder");
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_folder = entry.file_type().expect("a file has a type").is_dir();
            let extension = name.rsplit('.').next().unwrap_or_default();
            if is_folder && !name.starts_with('.') && name != "target" {
                folders.push(entry.path());
            } else if !is_folder && extensions.contains(&extension) {
                found.push(Source::read(&entry.path()));
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

impl Source {
    fn read(path: &Path) -> Self {
        Self::new(&relative(path), &read(path))
    }

    /// The file of this path with this text.
    pub fn new(path: &str, text: &str) -> Self {
        let lines = lines_without_tests(text);
        let before_tests: String = text.split_inclusive('\n').take(lines).collect();
        Self {
            path: path.to_owned(),
            code: strip(text),
            code_without_tests: strip(&before_tests),
            lines_without_tests: lines,
        }
    }
}

/// Lines up to the unit tests, which stand last in a file.
fn lines_without_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let begins_tests = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ");
    lines.windows(2).position(begins_tests).unwrap_or(lines.len())
}

/// The identifiers and keywords of code.
pub fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// The text with comments, strings and character literals replaced by a space.
pub fn strip(text: &str) -> String {
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
    Some((open + 1..chars.len()).find(closes).map_or(chars.len(), |quote| quote + 1 + hashes))
}

fn quoted_end(chars: &[char], at: usize, quote: char) -> usize {
    let mut end = at + 1;
    while end < chars.len() && chars[end] != quote {
        end += if chars[end] == '\\' { 2 } else { 1 };
    }
    (end + 1).min(chars.len())
}

/// The root of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a package lies in the repository")
}

/// The path from the root of the repository.
pub fn relative(path: &Path) -> String {
    let inside = path.strip_prefix(root()).expect("a path of the repository");
    inside.to_string_lossy().into_owned()
}

/// The text of a file.
pub fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
}

#[test]
fn comments_and_literals_are_not_code() {
    let code = strip(
        r##"a /* unsafe /* unsafe */ */ b // unsafe
        "unsafe \" unsafe" r#"unsafe " unsafe"# b"unsafe" 'u' '\'' &'static str c"##,
    );
    assert!(words(&code).all(|word| word != "unsafe"), "{code}");
    assert_eq!(words(&code).filter(|w| ["a", "b", "static", "str", "c"].contains(w)).count(), 6);
    assert!(words(&strip("fn f() { unsafe { g() } }")).any(|word| word == "unsafe"));
    assert!(words(&strip("#![deny(unsafe_code)]")).all(|word| word != "unsafe"));
}
