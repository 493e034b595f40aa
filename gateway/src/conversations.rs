//! Sessions that are kept open after a text has ended: a conversation that goes on sends its new tokens
//! only.

use std::time::{Duration, Instant};

use client::chain::Chain;
use parking_lot::Mutex;

/// A session is taken for a prompt that begins with so many of its tokens at least: fewer save nothing
/// and may be what all prompts begin with.
const MIN_COMMON: usize = 16;

/// An open session and the tokens that it holds.
struct OpenSession<S> {
    session: S,
    tokens: Vec<u32>,
    at: Instant,
}

/// What is kept of a session: how long it may become.
pub trait KeptSession {
    /// Most tokens.
    fn max_length(&self) -> u32;
}

impl KeptSession for Chain {
    fn max_length(&self) -> u32 {
        Chain::max_length(self)
    }
}

/// Open sessions of one model, the most recently used ones, for a bounded time.
pub struct Conversations<S> {
    kept: Mutex<Vec<OpenSession<S>>>,
    most: usize,
    idle: Duration,
}

impl<S: KeptSession> Conversations<S> {
    /// Keeps at most `most` sessions, each for `idle` after its last use.
    pub fn new(most: usize, idle: Duration) -> Conversations<S> {
        Conversations { kept: Mutex::default(), most, idle }
    }

    /// The session that has the most tokens in common with the beginning of `prompt` and can take it and
    /// `more` tokens; with the number of these tokens, which is smaller than the prompt.
    pub fn take(&self, prompt: &[u32], more: u32) -> Option<(S, usize)> {
        let mut kept = self.kept.lock();
        let needed = prompt.len() as u64 + u64::from(more);
        let common = |one: &OpenSession<S>| {
            let same = one.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
            same.min(prompt.len().saturating_sub(1))
        };
        let fits = |one: &OpenSession<S>| needed <= u64::from(one.session.max_length());
        let best = kept.iter().enumerate().filter(|(_, one)| fits(one));
        let best = best.map(|(index, one)| (common(one), index)).max()?;
        let (common, index) = Some(best).filter(|(common, _)| *common >= MIN_COMMON)?;
        Some((kept.swap_remove(index).session, common))
    }

    /// Keeps a session that holds `tokens`; returns those that are to be closed.
    pub fn keep(&self, session: S, tokens: Vec<u32>, now: Instant) -> Vec<S> {
        let mut kept = self.kept.lock();
        kept.push(OpenSession { session, tokens, at: now });
        let mut closed = Vec::new();
        while kept.len() > self.most {
            let oldest = kept.iter().enumerate().min_by_key(|(_, one)| one.at);
            let Some((index, _)) = oldest else { break };
            closed.push(kept.swap_remove(index).session);
        }
        closed
    }

    /// Takes out sessions that were not used for long.
    pub fn expired(&self, now: Instant) -> Vec<S> {
        let mut kept = self.kept.lock();
        let is_old = |one: &mut OpenSession<S>| now.duration_since(one.at) >= self.idle;
        kept.extract_if(.., is_old).map(|one| one.session).collect()
    }

    /// Takes out the session that was not used for longest.
    pub fn take_oldest(&self) -> Option<S> {
        let mut kept = self.kept.lock();
        let (index, _) = kept.iter().enumerate().min_by_key(|(_, one)| one.at)?;
        Some(kept.swap_remove(index).session)
    }

    /// Sessions that are kept.
    pub fn len(&self) -> usize {
        self.kept.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Fake(char, u32);

    impl KeptSession for Fake {
        fn max_length(&self) -> u32 {
            self.1
        }
    }

    fn tokens(count: u32) -> Vec<u32> {
        (0..count).collect()
    }

    #[test]
    fn the_longest_session_that_fits_is_taken_and_once() {
        let sessions = Conversations::new(8, Duration::from_secs(60));
        let now = Instant::now();
        assert!(sessions.keep(Fake('a', 100), tokens(20), now).is_empty());
        assert!(sessions.keep(Fake('b', 100), tokens(40), now).is_empty());
        assert!(sessions.keep(Fake('c', 49), tokens(45), now).is_empty());
        let mut prompt = tokens(40);
        prompt.extend([7; 5]);
        assert_eq!(sessions.take(&prompt, 5), Some((Fake('b', 100), 40)));
        assert_eq!(sessions.take(&prompt, 5), Some((Fake('a', 100), 20)));
        assert_eq!(sessions.take(&prompt, 5), None);
        assert_eq!(sessions.take(&prompt, 4), Some((Fake('c', 49), 40)));
    }

    #[test]
    fn the_last_token_of_a_prompt_is_always_sent() {
        let sessions = Conversations::new(8, Duration::from_secs(60));
        sessions.keep(Fake('a', 100), tokens(40), Instant::now());
        assert_eq!(sessions.take(&tokens(30), 5), Some((Fake('a', 100), 29)));
    }

    #[test]
    fn short_beginnings_in_common_and_empty_prompts_take_nothing() {
        let sessions = Conversations::new(8, Duration::from_secs(60));
        sessions.keep(Fake('a', 100), tokens(40), Instant::now());
        let mut prompt = tokens(MIN_COMMON as u32 - 1);
        prompt.extend([99; 30]);
        assert_eq!(sessions.take(&prompt, 1), None);
        assert_eq!(sessions.take(&[], 1), None);
    }

    #[test]
    fn the_oldest_give_way_and_idle_ones_expire() {
        let sessions = Conversations::new(2, Duration::from_secs(60));
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        sessions.keep(Fake('a', 100), tokens(20), at(1));
        sessions.keep(Fake('b', 100), tokens(20), at(0));
        assert_eq!(sessions.keep(Fake('c', 100), tokens(20), at(2)), [Fake('b', 100)]);
        assert_eq!(sessions.expired(at(60)), []);
        assert_eq!(sessions.expired(at(61)), [Fake('a', 100)]);
        assert_eq!(sessions.len(), 1);
        let none = Conversations::new(0, Duration::from_secs(60));
        assert_eq!(none.keep(Fake('a', 100), tokens(20), now), [Fake('a', 100)]);
    }
}
