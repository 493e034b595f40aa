//! Texts at which a generated text ends, although they may begin in one token and end in another. Pure.

/// Holds back what may become one of the texts.
#[derive(Debug)]
pub struct Stops {
    stops: Vec<String>,
    held: String,
}

impl Stops {
    /// Ends at any of `stops`; empty ones never come.
    pub fn new(stops: &[String]) -> Stops {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Stops { stops, held: String::new() }
    }

    /// Takes the next piece of text. Returns what can be shown, and whether the text is over; what
    /// ends it is not shown.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop)).min();
        if let Some(at) = first {
            let shown = self.held[..at].to_owned();
            self.held.clear();
            return (shown, true);
        }
        let may_begin = |from: &usize| {
            self.held.get(*from..).is_some_and(|end| self.stops.iter().any(|s| s.starts_with(end)))
        };
        let keep = (0..self.held.len()).find(may_begin).unwrap_or(self.held.len());
        let held = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, held), false)
    }

    /// What was held back, at the end.
    pub fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut of = Stops::new(&stops.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>());
        let mut shown = String::new();
        for piece in pieces {
            let (text, over) = of.push(piece);
            shown += &text;
            if over {
                return (shown, true);
            }
        }
        (shown + &of.rest(), false)
    }

    #[test]
    fn a_text_ends_before_what_ends_it_however_it_is_cut() {
        assert_eq!(run(&["END"], &["a E", "N", "D b"]), ("a ".into(), true));
        assert_eq!(run(&["END", "N"], &["a E", "ND b"]), ("a ".into(), true));
        assert_eq!(run(&["END", "N"], &["a N", "END b"]), ("a ".into(), true));
        assert_eq!(run(&["END"], &["E", "N", "E", "N", "x"]), ("ENENx".into(), false));
        assert_eq!(run(&["END"], &["EN"]), ("EN".into(), false));
        assert_eq!(run(&["\n\n", ""], &["é\n", "\né"]), ("é".into(), true));
        assert_eq!(run(&[], &["a", "b"]), ("ab".into(), false));
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(text in "[abé]{0,30}", stop in "[abé]{1,4}", cut in 0usize..30) {
            let at = (0..=cut.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            let (first, second) = text.split_at(at);
            let expected = match text.find(&stop) {
                Some(at) => (text[..at].to_owned(), true),
                None => (text.clone(), false),
            };
            prop_assert_eq!(run(&[&stop], &[first, second]), expected);
        }
    }
}
