//! Text of strangers, made safe to show: names, versions and errors of peers go into logs and onto
//! terminals, where control characters would forge lines, move the cursor or reorder what is read.

use std::borrow::Cow;
use std::fmt::{self, Display, Write};

/// Whether a character can change how the text around it is shown: a control character, a terminal
/// escape, a line or paragraph separator, a bidirectional override, or an invisible one that hides
/// text.
pub fn is_deceptive(c: char) -> bool {
    c.is_control()
        || matches!(c,
            // Marks, embeddings, overrides and isolates of the bidirectional algorithm (UAX #9).
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            // Separators of lines and paragraphs.
            | '\u{2028}' | '\u{2029}'
            // Zero width: spaces, joins of words, byte order marks, annotations, tags.
            | '\u{200b}' | '\u{2060}'..='\u{2064}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}')
}

/// `text` with every deceptive character in the form of a Rust literal: `\n`, `\u{1b}`, `\u{202e}`.
pub fn escaped(text: &str) -> Cow<'_, str> {
    match text.contains(is_deceptive) {
        true => Cow::Owned(Escaped(text).to_string()),
        false => Cow::Borrowed(text),
    }
}

/// `json` with every deceptive character as JSON escapes it: `\u009b`, `\u202e`. A parser reads the
/// same value. Line feeds stay: inside strings, JSON escapes them itself.
pub fn escaped_json(json: &str) -> Cow<'_, str> {
    let deceives = |c: char| c != '\n' && is_deceptive(c);
    if !json.contains(deceives) {
        return Cow::Borrowed(json);
    }
    let mut shown = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        match deceives(c) {
            true => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    shown.push_str(&format!("\\u{unit:04x}"));
                }
            }
            false => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// Shows a value as [`escaped`] does.
#[derive(Clone, Copy, Debug)]
pub struct Escaped<T>(pub T);

impl<T: Display> Display for Escaped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaping(f), "{}", self.0)
    }
}

/// A writer that escapes what goes through it.
#[derive(Debug)]
pub struct Escaping<W>(pub W);

impl<W: Write> Write for Escaping<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some((at, c)) = rest.char_indices().find(|(_, c)| is_deceptive(*c)) {
            let (plain, from) = rest.split_at(at);
            self.0.write_str(plain)?;
            write!(self.0, "{}", c.escape_default())?;
            rest = &from[c.len_utf8()..];
        }
        self.0.write_str(rest)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_deceives_is_shown_as_a_literal_and_the_rest_stays() {
        for (text, shown) in [
            ("Llama of Zoë 🦙 日本", "Llama of Zoë 🦙 日本"),
            ("a\nERROR forged", "a\\nERROR forged"),
            ("\x1b[2J\x1b]0;title\x07", "\\u{1b}[2J\\u{1b}]0;title\\u{7}"),
            ("\u{9b}31m\u{7f}\0", "\\u{9b}31m\\u{7f}\\u{0}"),
            ("user\u{202e}gpj.exe", "user\\u{202e}gpj.exe"),
            ("a\u{2066}b\u{2069}\u{200f}", "a\\u{2066}b\\u{2069}\\u{200f}"),
            ("a\u{2028}b\u{feff}\u{e0041}", "a\\u{2028}b\\u{feff}\\u{e0041}"),
            ("tab\treturn\r", "tab\\treturn\\r"),
        ] {
            assert_eq!(escaped(text), shown);
            assert_eq!(Escaped(text).to_string(), shown);
        }
        assert!(matches!(escaped("plain"), Cow::Borrowed(_)));
    }

    #[test]
    fn json_is_shown_without_what_deceives_and_says_the_same() {
        let value = serde_json::json!({"found": "a\n\u{9b}31m\u{7f}\u{202e}b\u{e0041} Zoë 🦙"});
        let json = format!("{value:#}");
        let shown = escaped_json(&json);
        assert!(!shown.contains(|c: char| c != '\n' && is_deceptive(c)), "{shown:?}");
        assert!(shown.contains(r"a\n\u009b31m\u007f\u202eb\udb40\udc41 Zoë 🦙"), "{shown}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
        assert!(matches!(escaped_json("{\n}"), Cow::Borrowed(_)));
    }

    proptest! {
        #[test]
        fn nothing_that_is_shown_deceives(text in any::<String>()) {
            let shown = escaped(&text);
            prop_assert!(!shown.contains(is_deceptive));
            prop_assert_eq!(escaped(&shown), shown.as_ref());
        }
    }
}
