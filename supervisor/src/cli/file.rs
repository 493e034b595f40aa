//! Files of settings: TOML (`*.toml`), and for every other name the lines `name: value` that
//! upstream's `configargparse` reads (`DefaultConfigFileParser`), so that a `config.yml` of
//! `run_server` serves as it is.

use std::fs::File;
use std::io::Read;
use std::path::Path;

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
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let setting = |(name, value): (String, toml::Value)| {
        let values = match value {
            toml::Value::Array(items) => items.iter().map(|item| scalar(&name, item)).collect(),
            value => scalar(&name, &value).map(|value| vec![value]),
        };
        values.map(|values| Setting { name: name.replace('-', "_"), values })
    };
    table.into_iter().map(setting).collect()
}

fn scalar(name: &str, value: &toml::Value) -> Result<String, String> {
    match value {
        toml::Value::String(text) => Ok(text.clone()),
        toml::Value::Integer(number) => Ok(number.to_string()),
        toml::Value::Float(number) => Ok(number.to_string()),
        toml::Value::Boolean(on) => Ok(on.to_string()),
        other => Err(format!(
            "{name} is a {}: expected a string, a number, true, false, or a list of strings",
            other.type_str()
        )),
    }
}

fn lines(text: &str) -> Result<Vec<Setting>, String> {
    let is_setting =
        |line: &&str| !line.is_empty() && !line.starts_with(['#', ';']) && !line.starts_with("---");
    text.lines().map(str::trim).filter(is_setting).map(line).collect()
}

/// `name: value`, `name = value`, `name value`, or `name` alone for a switch; `[a, b]` is a list.
fn line(line: &str) -> Result<Setting, String> {
    if line.starts_with('[') {
        return Err(format!(
            "invalid line {line:?}: sections are not supported; expected lines `name: value`, or a .toml file"
        ));
    }
    let end = line.find(|c: char| ":=;#".contains(c) || c.is_whitespace()).unwrap_or(line.len());
    let (name, rest) = line.split_at(end);
    let name = name.trim_start_matches('-').replace('-', "_");
    if name.is_empty() {
        return Err(format!("invalid line {line:?}: expected `name: value`"));
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
    Ok(Setting { name, values })
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

    fn setting(name: &str, values: &[&str]) -> Setting {
        let values = values.iter().map(|value| (*value).to_owned()).collect();
        Setting { name: name.to_owned(), values }
    }

    #[test]
    fn toml_and_lines_say_the_same() {
        let expected = [
            setting("block_indices", &["0:4"]),
            setting("initial_peers", &["/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/tcp/6"]),
            setting("new_swarm", &["false"]),
            setting("port", &["31330"]),
            setting("throughput", &["2.5"]),
        ];
        let text = "block-indices = '0:4'\ninitial_peers = ['/ip4/1.2.3.4/tcp/5', \"/ip4/1.2.3.4/tcp/6\"]\nnew_swarm = false\n\
                    port = 31330 # a comment\nthroughput = 2.5\n";
        assert_eq!(toml(text).unwrap(), expected);
        let text = "---\n# comment\nblock-indices: 0:4\ninitial_peers: [/ip4/1.2.3.4/tcp/5, '/ip4/1.2.3.4/tcp/6']\n\
                    new_swarm = false\n--port 31330 # a comment\n; more\nthroughput = \"2.5\"\n";
        assert_eq!(lines(text).unwrap(), expected);
        assert_eq!(lines("new_swarm").unwrap(), [setting("new_swarm", &["true"])]);
        assert_eq!(lines("public_name: a#b").unwrap(), [setting("public_name", &["a#b"])]);
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
        assert!(refusal("b.toml", "[network]\nport = 1").contains("network is a table"));
        assert!(refusal("c.yml", "[network]\nport: 1").contains("sections"));
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
