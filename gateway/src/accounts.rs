//! What callers have used: requests and tokens of a minute, and the usage of each key for `/metrics`.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::metrics::KeyUsage;

/// Callers whose rates are remembered; the longest silent ones are forgotten.
pub const MAX_CALLERS: usize = 10_000;
const MINUTE_S: f64 = 60.0;

/// SHA-256 of a key.
pub type KeyHash = [u8; 32];

/// Who is counted together.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum CallerKey {
    Key(KeyHash),
    Address(IpAddr),
}

/// What a caller may use in a minute; `None` is as much as it likes.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallerAllowance {
    pub requests: Option<u32>,
    /// Of prompts and answers together.
    pub tokens: Option<u32>,
}

/// Why a caller has to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("more than {limit} requests in a minute; try again in {wait_s} s")]
    Requests {
        limit: u32,
        /// Until one may come.
        wait_s: u64,
    },
    #[error("more than {limit} tokens in a minute; try again in {wait_s} s")]
    Tokens {
        limit: u32,
        /// Until the prompt may come.
        wait_s: u64,
    },
    #[error(
        "the prompt has {prompt} tokens, and {limit} are allowed in a minute: send a shorter one"
    )]
    Prompt {
        prompt: usize,
        /// Tokens of a minute.
        limit: u32,
    },
}

impl Refusal {
    /// Seconds after which to try again.
    pub fn wait_s(&self) -> u64 {
        match self {
            Refusal::Requests { wait_s, .. } | Refusal::Tokens { wait_s, .. } => (*wait_s).max(1),
            Refusal::Prompt { .. } => MINUTE_S as u64,
        }
    }
}

/// What is left of one allowance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Left {
    /// What a minute brings.
    pub limit: u32,
    /// Whole ones, 0 for a caller in debt.
    pub remaining: u32,
    /// Until all of it is there again.
    pub reset: Duration,
}

/// A bucket that fills up within a minute. It holds less than nothing after an answer was longer than what was
/// left.
#[derive(Clone, Copy, Debug)]
struct MinuteBucket {
    limit: u32,
    left: f64,
    at: Instant,
}

impl MinuteBucket {
    fn full(limit: u32, now: Instant) -> MinuteBucket {
        MinuteBucket { limit, left: f64::from(limit), at: now }
    }

    fn refill(&mut self, now: Instant) {
        let gained = now.saturating_duration_since(self.at).as_secs_f64() / MINUTE_S;
        let limit = f64::from(self.limit);
        self.left = (self.left + gained * limit).min(limit);
        self.at = now;
    }

    /// Takes `count`; `Err` is in how many seconds there are so many.
    fn take(&mut self, count: f64, now: Instant) -> Result<(), u64> {
        self.refill(now);
        if self.left < count {
            return Err(self.seconds_until(count).ceil() as u64);
        }
        self.left -= count;
        Ok(())
    }

    fn seconds_until(&self, count: f64) -> f64 {
        (count - self.left).max(0.0) / f64::from(self.limit.max(1)) * MINUTE_S
    }

    fn left(mut self, now: Instant) -> Left {
        self.refill(now);
        let reset = Duration::from_secs_f64(self.seconds_until(f64::from(self.limit)));
        Left { limit: self.limit, remaining: self.left.max(0.0) as u32, reset }
    }
}

/// CallerBuckets of one caller.
#[derive(Clone, Copy, Debug)]
struct CallerBuckets {
    requests: Option<MinuteBucket>,
    tokens: Option<MinuteBucket>,
    at: Instant,
}

/// The rates of all callers.
#[derive(Debug)]
pub struct CallerRates {
    allowance: CallerAllowance,
    callers: Mutex<HashMap<CallerKey, CallerBuckets>>,
}

impl CallerRates {
    /// Holds each caller to `allowance`.
    pub fn new(allowance: CallerAllowance) -> CallerRates {
        CallerRates { allowance, callers: Mutex::default() }
    }

    /// Counts one request.
    ///
    /// # Errors
    /// [`Refusal::Requests`].
    fn request(&self, caller: CallerKey, now: Instant) -> Result<(), Refusal> {
        self.with(caller, now, |buckets| match &mut buckets.requests {
            None => Ok(()),
            Some(bucket) => {
                let limit = bucket.limit;
                bucket.take(1.0, now).map_err(|wait_s| Refusal::Requests { limit, wait_s })
            }
        })
    }

    /// Counts the tokens of a prompt.
    ///
    /// # Errors
    /// [`Refusal::Tokens`], [`Refusal::Prompt`].
    fn prompt(&self, caller: CallerKey, prompt: usize, now: Instant) -> Result<(), Refusal> {
        self.with(caller, now, |buckets| match &mut buckets.tokens {
            None => Ok(()),
            Some(MinuteBucket { limit, .. }) if prompt > *limit as usize => {
                Err(Refusal::Prompt { prompt, limit: *limit })
            }
            Some(bucket) => {
                let limit = bucket.limit;
                let refuse = |wait_s| Refusal::Tokens { limit, wait_s };
                bucket.take((prompt as f64).max(1.0), now).map_err(refuse)
            }
        })
    }

    /// Counts tokens of an answer, which may come before the caller has them.
    fn answer(&self, caller: CallerKey, tokens: usize, now: Instant) {
        self.with(caller, now, |buckets| {
            if let Some(bucket) = &mut buckets.tokens {
                bucket.refill(now);
                bucket.left -= tokens as f64;
            }
        });
    }

    /// What is left of requests and of tokens.
    fn left(&self, caller: CallerKey, now: Instant) -> [Option<Left>; 2] {
        self.with(caller, now, |buckets| {
            [buckets.requests, buckets.tokens].map(|bucket| bucket.map(|bucket| bucket.left(now)))
        })
    }

    fn with<T>(
        &self,
        caller: CallerKey,
        now: Instant,
        work: impl FnOnce(&mut CallerBuckets) -> T,
    ) -> T {
        let full = |limit: Option<u32>| limit.map(|limit| MinuteBucket::full(limit, now));
        let CallerAllowance { requests, tokens } = self.allowance;
        let fresh = CallerBuckets { requests: full(requests), tokens: full(tokens), at: now };
        if requests.is_none() && tokens.is_none() {
            return work(&mut { fresh });
        }
        let mut callers = self.callers.lock();
        if callers.len() >= MAX_CALLERS && !callers.contains_key(&caller) {
            let minute = Duration::from_secs(MINUTE_S as u64);
            callers.retain(|_, buckets| now.saturating_duration_since(buckets.at) < minute);
            if callers.len() >= MAX_CALLERS {
                let oldest = callers.iter().min_by_key(|(_, buckets)| buckets.at);
                let oldest = oldest.map(|(caller, _)| *caller);
                oldest.map(|caller| callers.remove(&caller));
            }
        }
        let buckets = callers.entry(caller).or_insert(fresh);
        buckets.at = now;
        work(buckets)
    }

    /// Callers that are remembered.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.callers.lock().len()
    }
}

tokio::task_local! {
    /// Who made the request that this task answers: every text that it starts is counted, whichever part of the
    /// API starts it.
    static ACCOUNT: CallerAccount;
}

/// Where the use of one caller is counted.
#[derive(Clone, Debug)]
pub struct CallerAccount {
    rates: Arc<CallerRates>,
    caller: CallerKey,
    /// That of its key, if it has one.
    usage: Option<KeyUsage>,
}

impl CallerAccount {
    /// That of `caller`.
    pub fn new(
        rates: Arc<CallerRates>,
        caller: CallerKey,
        usage: Option<KeyUsage>,
    ) -> CallerAccount {
        CallerAccount { rates, caller, usage }
    }

    /// Answers a request of this caller.
    pub async fn answering<T>(&self, answer: impl Future<Output = T>) -> T {
        ACCOUNT.scope(self.clone(), answer).await
    }

    /// That of the request that is being answered; `None` outside of requests.
    pub fn of_request() -> Option<CallerAccount> {
        ACCOUNT.try_with(CallerAccount::clone).ok()
    }

    /// Counts one request.
    ///
    /// # Errors
    /// [`Refusal::Requests`].
    pub fn request(&self, now: Instant) -> Result<(), Refusal> {
        self.rates.request(self.caller, now)
    }

    /// Counts the tokens of a prompt.
    ///
    /// # Errors
    /// [`Refusal`]: the caller has too few left.
    pub fn prompt(&self, tokens: usize) -> Result<(), Refusal> {
        self.rates.prompt(self.caller, tokens, Instant::now())?;
        if let Some(usage) = &self.usage {
            usage.prompt(tokens);
        }
        Ok(())
    }

    /// Counts tokens that were written.
    pub fn answer(&self, tokens: usize) {
        self.rates.answer(self.caller, tokens, Instant::now());
        if let Some(usage) = &self.usage {
            usage.completion(tokens);
        }
    }

    /// What is left of requests and of tokens; `None` of what has no limit.
    pub fn left(&self) -> [Option<Left>; 2] {
        self.rates.left(self.caller, Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const CALLER: CallerKey = CallerKey::Address(IpAddr::V4(Ipv4Addr::LOCALHOST));

    fn rates(requests: Option<u32>, tokens: Option<u32>) -> CallerRates {
        CallerRates::new(CallerAllowance { requests, tokens })
    }

    #[test]
    fn tokens_of_prompts_and_answers_are_taken_and_come_back_within_a_minute() {
        let (rates, now) = (rates(None, Some(60)), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(rates.prompt(CALLER, 20, now), Ok(()));
        rates.answer(CALLER, 30, now);
        let refused = Refusal::Tokens { limit: 60, wait_s: 10 };
        assert_eq!(rates.prompt(CALLER, 20, now), Err(refused));
        assert_eq!(rates.prompt(CALLER, 20, at(9)).unwrap_err().wait_s(), 1);
        assert_eq!(rates.prompt(CALLER, 20, at(10)), Ok(()));
        let [requests, tokens] = rates.left(CALLER, at(25));
        assert_eq!(requests, None);
        let reset = Duration::from_secs(45);
        assert_eq!(tokens, Some(Left { limit: 60, remaining: 15, reset }));
    }

    #[test]
    fn an_answer_longer_than_what_is_left_is_a_debt() {
        let (rates, now) = (rates(None, Some(60)), Instant::now());
        assert_eq!(rates.prompt(CALLER, 10, now), Ok(()));
        rates.answer(CALLER, 110, now);
        let refused = Refusal::Tokens { limit: 60, wait_s: 61 };
        assert_eq!(rates.prompt(CALLER, 1, now), Err(refused));
        let [_, tokens] = rates.left(CALLER, now);
        assert_eq!(tokens.map(|left| left.remaining), Some(0));
        assert_eq!(rates.prompt(CALLER, 1, now + Duration::from_secs(61)), Ok(()));
    }

    #[test]
    fn a_prompt_that_never_fits_is_named_and_others_have_rates_of_their_own() {
        let (rates, now) = (rates(Some(2), Some(60)), Instant::now());
        let refused = Refusal::Prompt { prompt: 61, limit: 60 };
        assert_eq!(rates.prompt(CALLER, 61, now), Err(refused));
        assert_eq!(rates.prompt(CALLER, 60, now), Ok(()));
        let other = CallerKey::Key([7; 32]);
        assert_eq!(rates.prompt(other, 60, now), Ok(()));
        assert_eq!((rates.request(CALLER, now), rates.request(CALLER, now)), (Ok(()), Ok(())));
        let refused = Refusal::Requests { limit: 2, wait_s: 30 };
        assert_eq!(rates.request(CALLER, now), Err(refused));
        assert_eq!(rates.request(other, now), Ok(()));
    }

    #[tokio::test]
    async fn what_is_started_for_a_request_is_counted_for_its_caller() {
        let rates = Arc::new(rates(None, Some(60)));
        let account = CallerAccount::new(rates.clone(), CALLER, None);
        assert!(CallerAccount::of_request().is_none());
        account
            .answering(async { CallerAccount::of_request().expect("the caller's").prompt(60) })
            .await
            .unwrap();
        assert!(rates.prompt(CALLER, 60, Instant::now()).is_err());
    }
}
