//! Takes secrets out of text before it leaves the machine: those that are known, and what has the
//! form of one.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::Value;

/// What stands in the place of a secret.
const REMOVED: &str = "[removed]";

/// Names whose values are secret, as whole words of a name: `token`, `hf_token`, `--token`,
/// `AWS_SECRET_ACCESS_KEY`.
const NAMES: [&str; 12] = [
    "token",
    "password",
    "passwd",
    "secret",
    "api_key",
    "api-key",
    "apikey",
    "access_key",
    "private_key",
    "credentials",
    AUTHORIZATION,
    BEARER,
];

/// A header whose value has several words: a scheme and a secret.
const AUTHORIZATION: &str = "authorization";

/// A scheme that a secret follows.
const BEARER: &str = "bearer";

/// How tokens of the Hub begin.
const PREFIXES: [&str; 2] = ["hf_", "api_org_"];

/// Letters of a token of the Hub, at least.
const LEAST_TOKEN: usize = 8;

/// Shorter values are no secrets, and would be found everywhere.
const LEAST_SECRET: usize = 4;

/// Takes secrets out of lines.
#[derive(Clone, Debug, Default)]
pub struct Remover {
    known: Vec<String>,
}

impl Remover {
    /// Removes these values wherever they stand, and what looks like a secret.
    pub fn new(known: impl IntoIterator<Item = String>) -> Remover {
        let known = known.into_iter().map(|secret| secret.trim().to_owned());
        Remover { known: known.filter(|secret| secret.len() >= LEAST_SECRET).collect() }
    }

    /// `text` without secrets; the number of lines stays.
    pub fn clean(&self, text: &str) -> String {
        self.without_known(text).split_inclusive('\n').map(|line| generic(&values(line))).collect()
    }

    /// A file of settings without secrets. Each line that names a secret loses what follows the name,
    /// in whatever form the file gives the value. The number of lines stays.
    pub fn clean_settings(&self, text: &str) -> String {
        settings(&self.without_known(text)).split_inclusive('\n').map(generic).collect()
    }

    /// Cleans each text in `value`, and removes texts whose fields have secret names.
    pub fn clean_json(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.clean(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.clean_json(item)),
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value.is_string() && secret_name(name).is_some() {
                        true => *value = REMOVED.into(),
                        false => self.clean_json(value),
                    }
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn without_known(&self, text: &str) -> String {
        let known = |text: String, secret: &String| text.replace(secret, REMOVED);
        self.known.iter().fold(text.to_owned(), known)
    }
}

/// Removes what has the form of a secret, whatever stands before it.
fn generic(line: &str) -> String {
    accounts(&tokens(line))
}

/// Removes what begins as a token of the Hub does.
fn tokens(line: &str) -> String {
    let mut clean = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(at) = PREFIXES.iter().filter_map(|prefix| rest.find(prefix)).min() {
        let (before, from) = rest.split_at(at);
        let end = from.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(from.len());
        let (word, after) = from.split_at(end);
        let begins = before.chars().next_back().is_none_or(|c| !c.is_ascii_alphanumeric());
        clean.push_str(before);
        // Names of variables and functions begin so too, but tokens mix cases and digits.
        let is_one = word.len() >= LEAST_TOKEN
            && begins
            && !word.chars().all(|c| c.is_ascii_lowercase() || c == '_');
        clean.push_str(if is_one { REMOVED } else { word });
        rest = after;
    }
    clean + rest
}

/// Removes the values of secret names: `token = x`, `"token": "x"`, `--token x`, `Bearer x`.
fn values(line: &str) -> String {
    let body = line.trim_end_matches(['\r', '\n']);
    let lower = body.to_ascii_lowercase();
    let (mut clean, mut done) = (String::with_capacity(line.len()), 0);
    for (at, name) in names(&lower) {
        let Some(value) = value_after(&lower, at, name).filter(|_| at >= done) else {
            continue;
        };
        clean.push_str(&line[done..value.start]);
        clean.push_str(REMOVED);
        done = value.end;
    }
    clean + &line[done..]
}

/// Secret names in a line of lower case by their position, as whole words.
fn names(line: &str) -> BTreeMap<usize, &'static str> {
    let is_word = |c: char| c.is_ascii_alphanumeric();
    let all =
        NAMES.iter().flat_map(|name| line.match_indices(name).map(move |(at, _)| (at, *name)));
    all.filter(|(at, name)| {
        !line[..*at].ends_with(is_word) && !line[at + name.len()..].starts_with(is_word)
    })
    .collect()
}

/// Characters of names of settings and variables.
fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '-'
}

/// Where the value of the name at `at` lies in a line of lower case, if it has one.
fn value_after(line: &str, at: usize, name: &str) -> Option<Range<usize>> {
    let rest = &line[at + name.len()..];
    // Sizes and counts, such as `token_bytes=4`.
    if name == "token" && rest.starts_with('_') {
        return None;
    }
    let start = line[..at].trim_end_matches(is_of_name).len();
    let is_flag = line[start..].starts_with("--") || name == BEARER;
    let rest = rest.trim_start_matches(is_of_name);
    let name_end = rest.trim_start_matches(['"', '\'', '\\']);
    let after = name_end.trim_start_matches([' ', '\t']);
    let (value, is_word) = match after.strip_prefix(['=', ':']) {
        Some(value) => (value.trim_start_matches([' ', '\t']), false),
        None if is_flag && after.len() < rest.len() => (after, name != AUTHORIZATION),
        None => return None,
    };
    let start = line.len() - value.len();
    (!value.trim_end().is_empty()).then(|| start..start + length(value, is_word))
}

/// How long the value is with which `text` begins: a quoted string, a word, or the rest of the line,
/// since a secret may have several words.
fn length(text: &str, is_word: bool) -> usize {
    let Some(quote) = text.chars().next().filter(|c| "\"'".contains(*c)) else {
        let word = text.find(char::is_whitespace).filter(|_| is_word);
        return word.unwrap_or(text.len());
    };
    let mut is_escaped = false;
    let end = text[1..].find(|c: char| {
        let is_end = c == quote && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        is_end
    });
    // Something else follows the quotes of `"""x"""`.
    let is_ended =
        |rest: &str| rest.chars().next().is_none_or(|c| c.is_whitespace() || ",;)}]".contains(c));
    end.map(|end| end + 2).filter(|end| is_ended(&text[*end..])).unwrap_or(text.len())
}

/// Where the first secret name of a line of settings ends, with all of the setting's name.
fn secret_name(line: &str) -> Option<usize> {
    let (at, name) = names(&line.to_ascii_lowercase()).pop_first()?;
    let rest = &line[at + name.len()..];
    Some(line.len() - rest.trim_start_matches(is_of_name).len())
}

/// Removes what follows secret names, in all lines of a value that has several.
fn settings(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut value_end: Option<&str> = None;
    for line in text.split_inclusive('\n') {
        let body = line.trim_end_matches(['\r', '\n']);
        let ending = &line[body.len()..];
        if let Some(end) = value_end {
            value_end = value_end.filter(|_| !body.contains(end));
            clean.extend([REMOVED, ending]);
        } else if let Some(end) = secret_name(body) {
            value_end = unended(&body[end..]);
            clean.extend([&body[..end], " ", REMOVED, ending]);
        } else {
            clean.push_str(line);
        }
    }
    clean
}

/// What ends the value after a name, if a later line has its end: `"""`, `'''` or `]`.
fn unended(rest: &str) -> Option<&'static str> {
    let value = rest.trim_start_matches(['"', '\'']).trim_start_matches([' ', '\t', '=', ':']);
    let ends = [("\"\"\"", "\"\"\""), ("'''", "'''"), ("[", "]")];
    ends.into_iter().find_map(|(start, end)| {
        let inner = value.strip_prefix(start)?;
        (!inner.contains(end)).then_some(end)
    })
}

/// Removes the account from addresses: `https://user:password@host`.
fn accounts(line: &str) -> String {
    let mut clean = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, from)) = rest.split_once("://") {
        clean.push_str(before);
        clean.push_str("://");
        let end =
            from.find(|c: char| c.is_whitespace() || "/\"'".contains(c)).unwrap_or(from.len());
        let (host, after) = from.split_at(end);
        match host.rsplit_once('@') {
            Some((_, host)) => clean.push_str(&format!("{REMOVED}@{host}")),
            None => clean.push_str(host),
        }
        rest = after;
    }
    clean + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_go_and_the_rest_stays() {
        let remover = Remover::new(["sesame-42".to_owned(), "a".to_owned()]);
        for (text, clean) in [
            ("opened by sesame-42.", "opened by [removed]."),
            ("token = \"x y\" # ours\nport = 1\n", "token = [removed] # ours\nport = 1\n"),
            ("token: abc\n", "token: [removed]\n"),
            ("\"token\": \"abc\", \"port\": 1", "\"token\": [removed], \"port\": 1"),
            ("HF_TOKEN=abc next", "HF_TOKEN=[removed]"),
            ("token = '''abc'''\nport = 1", "token = [removed]\nport = 1"),
            ("token = \"\"\"abc\"\"\"\r\n", "token = [removed]\r\n"),
            ("token = \"a\\\"b\" # c", "token = [removed] # c"),
            ("password: correct horse", "password: [removed]"),
            ("AWS_SECRET_ACCESS_KEY=a/b+c", "AWS_SECRET_ACCESS_KEY=[removed]"),
            ("x-api-key: abc", "x-api-key: [removed]"),
            ("token: Some(\"abc\")", "token: [removed]"),
            (r#"{"message":"{\"token\": \"abc\"}"}"#, r#"{"message":"{\"token\": [removed]"#),
            (
                "sepal serve m --hf_token abc --port 1",
                "sepal serve m --hf_token [removed] --port 1",
            ),
            ("sepal serve m --token abc --port 1", "sepal serve m --token [removed] --port 1"),
            ("Authorization: Bearer abc.def", "Authorization: [removed]"),
            ("Authorization: Basic dXNlcg==", "Authorization: [removed]"),
            ("> authorization: token abc\n", "> authorization: [removed]\n"),
            (
                "{\"authorization\": \"Basic dXNlcg==\", \"a\": 1}",
                "{\"authorization\": [removed], \"a\": 1}",
            ),
            ("sent Bearer abc to it", "sent Bearer [removed] to it"),
            ("got hf_AbCdEf1234567890, why", "got [removed], why"),
            ("https://ada:pw@proxy:80/x", "https://[removed]@proxy:80/x"),
            ("password=\"unended", "password=[removed]"),
        ] {
            assert_eq!(remover.clean(text), clean, "{text}");
        }
        for plain in [
            "a token went through\n",
            "kv_tokens_free=3 tokens: 5 token",
            "token_bytes=4 max_token_length: 5",
            "hf_hub=off, hf_hub::api",
            "https://huggingface.co/a@b",
            "# token is set and not shown",
            "",
        ] {
            assert_eq!(remover.clean(plain), plain);
        }
    }

    #[test]
    fn a_line_of_settings_that_names_a_secret_loses_its_value_in_any_form() {
        let remover = Remover::new(None);
        for (text, clean) in [
            ("token abc\nport 1\n", "token [removed]\nport 1\n"),
            ("--token abc", "--token [removed]"),
            ("TOKEN: abc def # ours\r\n", "TOKEN [removed]\r\n"),
            ("token = '''abc'''\nport = 1\n", "token [removed]\nport = 1\n"),
            ("\"token\" = \"\"\"abc\"\"\"\n", "\"token [removed]\n"),
            ("# token abc", "# token [removed]"),
            ("aws_secret_access_key = x y", "aws_secret_access_key [removed]"),
            (
                "token = \"\"\"\nabc\n\"\"\"\nport = 1",
                "token [removed]\n[removed]\n[removed]\nport = 1",
            ),
            ("token = [\n  'abc',\n]\nport = 1", "token [removed]\n[removed]\n[removed]\nport = 1"),
            ("name = \"hf_AbCdEf1234567890\"", "name = \"[removed]\""),
            ("proxy: https://ada:pw@proxy:80", "proxy: https://[removed]@proxy:80"),
            ("attn_cache_tokens: 4096\nmodel org/name", "attn_cache_tokens: 4096\nmodel org/name"),
        ] {
            assert_eq!(remover.clean_settings(text), clean, "{text}");
        }
    }

    #[test]
    fn json_stays_json() {
        let remover = Remover::new(["sesame-42".to_owned()]);
        let mut value = serde_json::json!({
            "found": "the token: abc", "token": "abc", "count": 3, "list": ["sesame-42", null]
        });
        remover.clean_json(&mut value);
        let clean = serde_json::json!({
            "found": "the token: [removed]", "token": "[removed]", "count": 3,
            "list": ["[removed]", null]
        });
        assert_eq!(value, clean);
    }

    proptest::proptest! {
        #[test]
        fn a_planted_secret_never_stays(before in "\\PC{0,40}", after in "\\PC{0,40}") {
            let remover = Remover::new(["Pl4nted-secret".to_owned()]);
            let text = format!("{before}Pl4nted-secret{after}");
            proptest::prop_assert!(!remover.clean(&text).contains("Pl4nted-secret"));
            proptest::prop_assert!(!remover.clean_settings(&text).contains("Pl4nted-secret"));
        }

        #[test]
        fn no_value_of_a_setting_stays(
            name in "(hf_)?token|[a-z]_secret_[a-z]|--password",
            between in "[ =:]{1,3}|['\"]{0,3}",
            value in "[ -~]{0,20}",
        ) {
            let clean = Remover::new(None).clean_settings(&format!("{name}{between} {value}\nport 1"));
            let expected = format!("{name} {REMOVED}\n");
            proptest::prop_assert!(clean.starts_with(&expected));
        }
    }
}
