//! What templates find in transformers and Jinja does not have: `tojson` as Python's `json.dumps` writes,
//! `strftime_now`, `raise_exception`, and `{% generation %}` (transformers
//! `utils/chat_template_utils.py`).

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io;
use std::sync::LazyLock;

use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value};
use regex::Regex;
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::{Formatter, PrettyFormatter};

/// Adds all of it to an environment.
pub fn extend(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    // Not `none`, which Jinja's authors and minijinja see differently.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
}

fn invalid(text: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, text)
}

fn raise_exception(text: String) -> Result<Value, Error> {
    Err(invalid(text))
}

/// The time here and now, in the form of C's `strftime`.
fn strftime_now(form: &str) -> Result<String, Error> {
    let mut text = String::new();
    let written = write!(text, "{}", chrono::Local::now().format(form));
    written.map_err(|_| invalid(format!("{form:?} is no form of a time")))?;
    Ok(text)
}

/// `json.dumps(value, ensure_ascii=False, indent=..., separators=..., sort_keys=...)`.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators = match options.get::<Option<Vec<String>>>("separators")?.as_deref() {
        None => (", ".to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("tojson needs two separators")),
    };
    let sorted: Option<bool> = options.get("sort_keys")?;
    // False by default there, and True is refused with the options that are unknown.
    if options.get::<Option<bool>>("ensure_ascii")? == Some(true) {
        return Err(invalid("tojson with ensure_ascii=True is not supported"));
    }
    options.assert_all_used()?;
    let failed = |error: serde_json::Error| invalid(format!("no JSON can be made of it: {error}"));
    let value = match sorted {
        Some(true) => {
            let mut json = serde_json::to_value(value).map_err(failed)?;
            json.sort_all_objects();
            Value::from(Serde(json))
        }
        _ => value.clone(),
    };
    let (item, key) = separators;
    let mut out = Vec::new();
    match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut out, OneLine { item, key })),
        Some(indent) => {
            let spaces = " ".repeat(indent.min(MAX_INDENT));
            let lines = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, lines))
        }
    }
    .map_err(failed)?;
    // Nothing is to be escaped in it.
    Ok(Value::from_safe_string(String::from_utf8_lossy(&out).into_owned()))
}

const MAX_INDENT: usize = 16;

/// JSON on one line with spaces as Python sets them.
struct OneLine {
    item: String,
    key: String,
}

impl OneLine {
    fn separate<W: ?Sized + io::Write>(&self, out: &mut W, is_first: bool) -> io::Result<()> {
        if is_first { Ok(()) } else { out.write_all(self.item.as_bytes()) }
    }
}

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        is_first: bool,
    ) -> io::Result<()> {
        self.separate(out, is_first)
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        is_first: bool,
    ) -> io::Result<()> {
        self.separate(out, is_first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }
}

/// The template without `{% generation %}`, which marks what an assistant said and changes no prompt.
pub fn without_marks(source: &str) -> Cow<'_, str> {
    static MARKS: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("a valid pattern")
    });
    // Blocks of another kind, so that white space around them goes as it would.
    MARKS.replace_all(source, |mark: &regex::Captures<'_>| match mark.get(2) {
        None => format!("{{%{} if true {}%}}", &mark[1], &mark[3]),
        Some(_) => format!("{{%{} endif {}%}}", &mark[1], &mark[3]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::context;

    fn render(template: &str) -> Result<String, Error> {
        let mut environment = Environment::new();
        extend(&mut environment);
        let tool = r#"{"type": "function", "at": {"z": [1, 2.5, "é<&'>", true, null], "a": {}}}"#;
        let tool: Value = serde_json::from_str(tool).unwrap();
        environment.render_str(&without_marks(template), context! { tool })
    }

    /// Written by `json.dumps` of Python 3.11 with `ensure_ascii=False`.
    #[test]
    fn json_is_written_as_by_python_and_keeps_its_order() {
        let one_line =
            r#"{"type": "function", "at": {"z": [1, 2.5, "é<&'>", true, null], "a": {}}}"#;
        assert_eq!(render("{{ tool | tojson }}").unwrap(), one_line);
        let lines = "{\n    \"z\": [\n        1,\n        2.5,\n        \"é<&'>\",\n        true,\n        null\n    ],\n    \"a\": {}\n}";
        assert_eq!(render("{{ tool.at | tojson(indent=4) }}").unwrap(), lines);
        let narrow = r#"{"a":{},"z":[1,2.5,"é<&'>",true,null]}"#;
        let template = "{{ tool.at | tojson(separators=(',', ':'), sort_keys=true) }}";
        assert_eq!(render(template).unwrap(), narrow);
    }

    #[test]
    fn unknown_options_are_errors_and_times_have_forms() {
        assert!(
            render("{{ tool | tojson(colour=1) }}").unwrap_err().to_string().contains("colour")
        );
        let year = render("{{ strftime_now('%Y') }}").unwrap();
        assert!(year.parse::<u32>().is_ok_and(|year| year > 2020), "{year}");
        assert!(render("{{ strftime_now('%!') }}").is_err());
        assert!(render("{{ raise_exception('no') }}").unwrap_err().to_string().contains("no"));
    }

    #[test]
    fn nothing_is_not_iterable() {
        let template =
            "{{ none is iterable }} {{ [] is iterable }} {{ 'x' is iterable }} {{ 7 is iterable }}";
        assert_eq!(render(template).unwrap(), "False True True False");
    }

    #[test]
    fn marks_of_what_an_assistant_says_change_nothing() {
        let marked =
            "a {%- generation -%} b {%- endgeneration %} c{% generation %}d{% endgeneration %}";
        assert_eq!(render(marked).unwrap(), "ab cd");
    }
}
