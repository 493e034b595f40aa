//! Guesses of the next tokens: from the text so far, what followed the last tokens when they came before
//! (prompt lookup decoding), or by a small model of this machine. A step that carries guesses computes them
//! all at once, and the first wrong one and what follows it are rolled back, so that a text takes fewer round
//! trips.

mod model;

pub use model::{DraftError, DraftModel};

use model::DraftReader;

/// Longest run of last tokens that is looked for.
const LONGEST_MATCH: usize = 3;
/// Tokens of the text that are searched, from its end.
const WINDOW: usize = 16 << 10;

/// Makes guesses, fewer while they are wrong.
#[derive(Debug)]
pub struct Drafts {
    most: usize,
    now: usize,
    model: Option<DraftReader>,
}

impl Drafts {
    /// At most `most` guesses for a step; 0 makes none.
    pub fn new(most: usize) -> Drafts {
        Drafts { most, now: most.min(2), model: None }
    }

    /// The same, by a model where the text does not repeat itself.
    #[must_use]
    pub fn with_model(self, model: Option<&DraftModel>) -> Drafts {
        let model = model.filter(|_| self.most > 0);
        Drafts { model: model.map(DraftModel::reader), ..self }
    }

    /// Has the model read `text`, while the servers do.
    pub fn read(&mut self, text: &[u32]) {
        if let Some(model) = &mut self.model {
            model.read(text);
        }
    }

    /// What may follow `text`, at most `limit` tokens.
    pub async fn guess(&mut self, text: &[u32], limit: usize) -> Vec<u32> {
        let found = self.repeat(text, limit);
        match &mut self.model {
            Some(model) if found.is_empty() && limit > 0 => {
                model.guess(text, limit.min(self.now)).await
            }
            _ => found,
        }
    }

    /// What followed the last tokens of `text` when they came before.
    fn repeat(&self, text: &[u32], limit: usize) -> Vec<u32> {
        let text = text.get(text.len().saturating_sub(WINDOW)..).unwrap_or_default();
        let limit = limit.min(self.now);
        if limit == 0 {
            return Vec::new();
        }
        // A long match is right more often than a small model, and costs nothing.
        let shortest = if self.model.is_some() { LONGEST_MATCH } else { 1 };
        let found = (shortest..=LONGEST_MATCH).rev().find_map(|length| {
            let (before, last) = text.split_at_checked(text.len().checked_sub(length)?)?;
            let same = |start: &usize| text.get(*start..start + length) == Some(last);
            (0..before.len()).rev().find(same).map(|start| start + length)
        });
        let follows = found.and_then(|start| text.get(start..)).unwrap_or_default();
        follows.iter().take(limit).copied().collect()
    }

    /// Notes how many of the guesses of a step were right.
    pub fn learn(&mut self, guessed: usize, right: usize) {
        self.now = match (guessed, right) {
            (0, _) => self.now,
            (_, 0) => (self.now / 2).max(1),
            (guessed, right) if right == guessed => (2 * self.now).min(self.most),
            _ => (right + 1).min(self.most),
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_followed_the_longest_and_latest_match_is_guessed() {
        let mut drafts = Drafts::new(4);
        drafts.learn(2, 2);
        assert_eq!(drafts.repeat(&[1, 2, 3, 9, 2, 3, 8, 5, 2, 3], 9), [8, 5, 2, 3]);
        assert_eq!(drafts.repeat(&[1, 2, 3, 7, 9, 9, 1, 2, 3], 2), [7, 9]);
        assert_eq!(drafts.repeat(&[4, 4], 9), [4]);
        assert!(drafts.repeat(&[1, 2, 3], 9).is_empty());
        assert!(drafts.repeat(&[], 9).is_empty());
        assert!(Drafts::new(0).repeat(&[4, 4], 9).is_empty());
    }

    #[test]
    fn wrong_guesses_make_fewer_and_right_ones_more() {
        let mut drafts = Drafts::new(8);
        let text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1];
        let count = |drafts: &Drafts| drafts.repeat(&text, 99).len();
        assert_eq!(count(&drafts), 2);
        drafts.learn(2, 2);
        drafts.learn(4, 4);
        assert_eq!(count(&drafts), 8);
        drafts.learn(8, 3);
        assert_eq!(count(&drafts), 4);
        (0..9).for_each(|_| drafts.learn(4, 0));
        assert_eq!(count(&drafts), 1, "it goes on trying");
    }

    proptest! {
        #[test]
        fn guesses_stood_in_the_text_behind_its_last_token(
            text in prop::collection::vec(0u32..5, 0..60), most in 0usize..9, limit in 0usize..9,
        ) {
            let guesses = Drafts::new(most).repeat(&text, limit);
            prop_assert!(guesses.len() <= most.min(limit));
            if let Some(last) = text.last().filter(|_| !guesses.is_empty()) {
                let whole = [&[*last], &guesses[..]].concat();
                prop_assert!(text.windows(whole.len()).any(|part| part == whole));
            }
        }
    }
}
