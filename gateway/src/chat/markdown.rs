//! Markdown on a terminal, piece by piece as it comes: headings and `**bold**` are bold, code is coloured. Pure.

const BOLD: &str = "\x1b[1m";
const CODE: &str = "\x1b[36m";
const PLAIN: &str = "\x1b[0m";

/// Where the text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    Plain,
    Bold,
    Heading,
    Code,
    Fence,
}

/// Styles pieces of a text. Control characters other than line feeds and tabs are left out: what a server
/// computes cannot move the cursor.
#[derive(Debug)]
pub struct Markdown {
    style: Style,
    is_line_start: bool,
    /// Marks whose number is not known yet: `*`, `` ` `` or `#`.
    held: String,
}

impl Markdown {
    /// At the beginning of a text.
    pub fn new() -> Markdown {
        Markdown { style: Style::Plain, is_line_start: true, held: String::new() }
    }

    /// The piece as the terminal is to get it.
    pub fn push(&mut self, piece: &str) -> String {
        let mut out = String::with_capacity(piece.len() + 16);
        for c in piece.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')) {
            if !self.held.is_empty() && !self.held.starts_with(c) {
                self.decide(&mut out);
            }
            let may_mark = match c {
                '`' => true,
                '*' => !matches!(self.style, Style::Code | Style::Fence),
                '#' => self.is_line_start && self.style == Style::Plain,
                _ => false,
            };
            if may_mark {
                self.held.push(c);
                continue;
            }
            if c == '\n' && matches!(self.style, Style::Heading | Style::Code) {
                self.change(Style::Plain, &mut out);
            }
            out.push(c);
            self.is_line_start = c == '\n';
        }
        out
    }

    /// What was held back, and the plain style.
    pub fn end(mut self) -> String {
        let mut out = String::new();
        self.decide(&mut out);
        if self.style != Style::Plain {
            out.push_str(PLAIN);
        }
        out
    }

    /// Acts on marks that are complete.
    fn decide(&mut self, out: &mut String) {
        let held = std::mem::take(&mut self.held);
        let at_start = std::mem::replace(&mut self.is_line_start, false);
        match (held.as_str(), self.style) {
            ("", _) => self.is_line_start = at_start,
            ("```", Style::Fence) => self.change(Style::Plain, out),
            ("```", _) if at_start => self.change(Style::Fence, out),
            ("`", Style::Plain) => self.change(Style::Code, out),
            ("`", Style::Code) => self.change(Style::Plain, out),
            ("**", Style::Plain) => self.change(Style::Bold, out),
            ("**", Style::Bold) => self.change(Style::Plain, out),
            (marks, Style::Plain) if marks.starts_with('#') => {
                self.change(Style::Heading, out);
                out.push_str(marks);
            }
            (marks, _) => out.push_str(marks),
        }
    }

    fn change(&mut self, style: Style, out: &mut String) {
        out.push_str(match style {
            Style::Plain => PLAIN,
            Style::Bold | Style::Heading => BOLD,
            Style::Code | Style::Fence => CODE,
        });
        self.style = style;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn styled(pieces: &[&str]) -> String {
        let mut markdown = Markdown::new();
        let shown: String = pieces.iter().map(|piece| markdown.push(piece)).collect();
        shown + &markdown.end()
    }

    #[test]
    fn marks_are_styles_however_the_text_is_cut() {
        let text = "# Title\nA **bold** word, `code` and 2 * 3.\n```rust\nlet a = **b;\n```\nEnd.";
        let whole = styled(&[text]);
        assert_eq!(
            whole,
            format!(
                "{BOLD}# Title{PLAIN}\nA {BOLD}bold{PLAIN} word, {CODE}code{PLAIN} and 2 * 3.\n{CODE}rust\nlet a = **b;\n{PLAIN}\nEnd."
            )
        );
        let letters: Vec<String> = text.chars().map(String::from).collect();
        assert_eq!(styled(&letters.iter().map(String::as_str).collect::<Vec<_>>()), whole);
    }

    #[test]
    fn what_is_open_at_the_end_is_closed_and_control_characters_are_left_out() {
        assert_eq!(styled(&["**open"]), format!("{BOLD}open{PLAIN}"));
        assert_eq!(styled(&["a `b\nc"]), format!("a {CODE}b{PLAIN}\nc"));
        assert_eq!(styled(&["a\x1b[2J\x07b\r"]), "a[2Jb");
        assert_eq!(styled(&["2*3 ** "]), format!("2*3 {BOLD} {PLAIN}"));
    }
}
