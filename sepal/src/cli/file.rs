//! Files of settings: TOML (`*.toml`), and for every other name the lines `name: value` that
//! upstream's `configargparse` reads (`DefaultConfigFileParser`), so that a `config.yml` of
//! `run_server` serves as it is.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeInteger, DeString, DeTable, DeValue};

/// Longest accepted file.
const MAX_BYTES: u64 = 1 << 20;

/// A setting of a file: the name of its flag with underscores, and its values as a flag would take
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Name of the flag, without dashes before it.
    pub name: String,
    /// Its values; several for a list, `true` or `false` for a switch.
    pub values: Vec<String>,
    /// Its line in the file, from 1 on; 0 for a setting of no file.
    pub line: usize,
}

/// All settings in the file at `path`.
///
/// # Errors
/// A sentence that names the file: it cannot be read, or the line that makes no sense.
pub fn read(path: &Path) -> Result<Vec<Setting>, String> {
    let shown = path.display();
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text))
        .map_err(|error| format!("--config {shown}: {error}"))?;
    if text.len() as u64 > MAX_BYTES {
        return Err(format!(
            "invalid --config {shown}: the file is longer than {MAX_BYTES} bytes; expected a file with settings"
        ));
    }
    let settings = match path.extension().is_some_and(|end| end.eq_ignore_ascii_case("toml")) {
        true => toml(&text),
        false => lines(&text),
    };
    settings.map_err(|why| format!("--config {shown}: {why}"))
}

fn toml(text: &str) -> Result<Vec<Setting>, String> {
    let table = DeTable::parse(text).map_err(|error| error.to_string())?;
    let line = |at: usize| 1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count();
    let setting = |(name, value): (Spanned<DeString<'_>>, Spanned<DeValue<'_>>)| {
        let (line, name) = (line(name.span().start), name.into_inner().into_owned());
        let values = match value.into_inner() {
            DeValue::Array(items) => items.iter().map(|item| scalar(item.get_ref())).collect(),
            value => scalar(&value).map(|value| vec![value]),
        };
        match values {
            Ok(values) => Ok(Setting { name: name.replace('-', "_"), values, line }),
            Err(why) => Err(format!("line {line}: {name} is a {why}")),
        }
    };
    let mut settings: Vec<Setting> =
        table.into_inner().into_iter().map(setting).collect::<Result<_, _>>()?;
    settings.sort_by_key(|setting| setting.line);
    Ok(settings)
}

/// A value as a flag would take it, or what it is and what was expected.
fn scalar(value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.clone().into_owned()),
        DeValue::Integer(number) => Ok(integer(number)),
        DeValue::Float(number) => Ok(number.to_string()),
        DeValue::Boolean(on) => Ok(on.to_string()),
        other => Err(format!(
            "{}: expected a string, a number, true, false, or a list of strings",
            other.type_str()
        )),
    }
}

/// In decimal, as flags take numbers; one beyond 64 bits stays as it is written.
fn integer(number: &DeInteger<'_>) -> String {
    match i64::from_str_radix(number.as_str(), number.radix()) {
        Ok(value) => value.to_string(),
        Err(_) => number.to_string(),
    }
}

fn lines(text: &str) -> Result<Vec<Setting>, String> {
    let is_setting =
        |line: &str| !line.is_empty() && !line.starts_with(['#', ';']) && !line.starts_with("---");
    let numbered = (1..).zip(text.lines().map(str::trim));
    let settings = numbered.filter(|(_, text)| is_setting(text));
    settings.map(|(number, text)| line(number, text)).collect()
}

/// `name: value`, `name = value`, `name value`, or `name` alone for a switch; `[a, b]` is a list.
fn line(number: usize, line: &str) -> Result<Setting, String> {
    if line.starts_with('[') {
        return Err(format!(
            "invalid line {number}, {line:?}: sections are not supported; expected lines `name: value`, or a .toml file"
        ));
    }
    let end = line.find(|c: char| ":=;#".contains(c) || c.is_whitespace()).unwrap_or(line.len());
    let (name, rest) = line.split_at(end);
    let name = name.trim_start_matches('-').replace('-', "_");
    if name.is_empty() {
        return Err(format!("invalid line {number}, {line:?}: expected `name: value`"));
    }
    let value =
        without_comment(rest.trim_start_matches(|c: char| ":=".contains(c) || c.is_whitespace()));
    let list = value.strip_prefix('[').and_then(|inner| inner.strip_suffix(']'));
    let values = match (list, value) {
        (Some(inner), _) => inner
            .split(',')
            .map(|item| unquoted(item.trim()).to_owned())
            .filter(|item| !item.is_empty())
            .collect(),
        (None, "") => vec!["true".to_owned()],
        (None, value) => vec![unquoted(value).to_owned()],
    };
    Ok(Setting { name, values, line: number })
}

/// The value without a comment, which white space sets apart.
fn without_comment(value: &str) -> &str {
    let comment = value
        .char_indices()
        .zip(value.chars().skip(1))
        .find(|((_, before), mark)| before.is_whitespace() && "#;".contains(*mark));
    let end = comment.map_or(value.len(), |((at, _), _)| at);
    let value = value.get(..end).unwrap_or(value).trim();
    if value.starts_with(['#', ';']) { "" } else { value }
}

fn unquoted(value: &str) -> &str {
    let inner = |mark: char| value.strip_prefix(mark).and_then(|rest| rest.strip_suffix(mark));
    inner('"').or_else(|| inner('\'')).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(line: usize, name: &str, values: &[&str]) -> Setting {
        let values = values.iter().map(|value| (*value).to_owned()).collect();
        Setting { name: name.to_owned(), values, line }
    }

    #[test]
    fn toml_and_lines_say_the_same() {
        let expected = |first: usize| {
            [
                setting(first, "block_indices", &["0:4"]),
                setting(first + 1, "initial_peers", &["/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/tcp/6"]),
                setting(first + 2, "new_swarm", &["false"]),
                setting(first + 3, "port", &["31330"]),
            ]
        };
        let text = "block-indices = '0:4'\ninitial_peers = ['/ip4/1.2.3.4/tcp/5', \"/ip4/1.2.3.4/tcp/6\"]\nnew_swarm = false\n\
                    port = 31_330 # a comment\nthroughput = 2.5\n";
        let read = toml(text).unwrap();
        assert_eq!(read[..4], expected(1));
        assert_eq!(read[4], setting(5, "throughput", &["2.5"]));
        let text = "---\n# comment\nblock-indices: 0:4\ninitial_peers: [/ip4/1.2.3.4/tcp/5, '/ip4/1.2.3.4/tcp/6']\n\
                    new_swarm = false\n--port 31330 # a comment\n; more\nthroughput = \"2.5\"\n";
        let read = lines(text).unwrap();
        assert_eq!(read[..4], expected(3));
        assert_eq!(read[4], setting(8, "throughput", &["2.5"]));
        assert_eq!(lines("new_swarm").unwrap(), [setting(1, "new_swarm", &["true"])]);
        assert_eq!(lines("public_name: a#b").unwrap(), [setting(1, "public_name", &["a#b"])]);
        assert_eq!(toml("\nport = 0x10").unwrap(), [setting(2, "port", &["16"])]);
    }

    #[test]
    fn what_is_no_file_of_settings_is_refused_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let refusal = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            let why = read(&path).unwrap_err();
            assert!(why.contains(name), "{why}");
            why
        };
        assert!(refusal("a.toml", "port = ").contains("line 1"));
        let table = refusal("b.toml", "port = 1\n[network]\nport = 1");
        assert!(table.contains("line 2: network is a table"), "{table}");
        let section = refusal("c.yml", "\n[network]\nport: 1");
        assert!(section.contains("line 2") && section.contains("sections"), "{section}");
        assert!(refusal("d.yml", ": 1").contains("name: value"));
        assert!(refusal("e.yml", &"a: 1\n".repeat(1 << 18)).contains("longer"));
        assert!(read(&folder.path().join("none.toml")).unwrap_err().contains("none.toml"));
    }

    proptest::proptest! {
        #[test]
        fn no_text_is_too_strange_to_be_read_or_refused(text in "\\PC{0,200}|[a-z:=#;\\[\\], '\"\n-]{0,200}") {
            let _ = (lines(&text), toml(&text));
        }
    }
}
