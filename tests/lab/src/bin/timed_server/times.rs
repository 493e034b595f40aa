//! How long jobs take, as the model's config.json states it.

use std::time::Duration;

use serde_json::Value;
use shared::job::{JobBody, WorkKind};

/// The key of config.json: `{"step_us": N, "row_us": N, "token_us": N}`, each of one block.
pub const KEY: &str = "stated_times";

/// Times of one block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// Of a decode step of one row.
    pub step_us: f64,
    /// Of each further row that is computed together with it.
    pub row_us: f64,
    /// Of each token of a prefill or a forward pass; a job for gradients takes three times as long.
    pub token_us: f64,
}

impl Times {
    /// Reads them.
    ///
    /// # Errors
    /// A sentence that names the value that is missing or is no time.
    pub fn from_config(config: &Value) -> Result<Times, String> {
        let of = |name: &str| {
            let value = &config[KEY][name];
            let number = value.as_f64().filter(|us| us.is_finite() && (0.0..1e9).contains(us));
            number.ok_or_else(|| {
                format!("{KEY}.{name} of config.json is {value}, expected microseconds")
            })
        };
        Ok(Times { step_us: of("step_us")?, row_us: of("row_us")?, token_us: of("token_us")? })
    }

    /// Decode steps that are computed together, over the blocks of the longest.
    pub fn of_steps<'a>(&self, steps: impl Iterator<Item = &'a JobBody>) -> Duration {
        let (mut rows, mut blocks) = (0u32, 0usize);
        for step in steps {
            rows += step.batch;
            blocks = blocks.max(step.blocks.len());
        }
        let us = self.step_us + self.row_us * f64::from(rows.saturating_sub(1));
        micros(us * blocks as f64)
    }

    /// A prefill, a forward pass, or gradients. No faster than a step.
    pub fn of_job(&self, job: &JobBody) -> Duration {
        let passes = if job.kind == WorkKind::Backward { 3.0 } else { 1.0 };
        let tokens = f64::from(job.batch) * f64::from(job.tokens);
        micros(passes * (self.token_us * tokens).max(self.step_us) * job.blocks.len() as f64)
    }
}

fn micros(us: f64) -> Duration {
    Duration::from_secs_f64(us / 1e6)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use testkit::jobs::job_body as job;

    use super::*;

    #[test]
    fn steps_share_their_time_and_jobs_take_their_own() {
        let config = json!({KEY: {"step_us": 1000, "row_us": 10, "token_us": 20.5}});
        let times = Times::from_config(&config).expect("times");
        let steps = [job(WorkKind::Decode, 1, 1, 3), job(WorkKind::Decode, 2, 1, 4)];
        assert_eq!(times.of_steps(steps.iter()), Duration::from_micros(4 * 1020));
        assert_eq!(times.of_job(&job(WorkKind::Prefill, 1, 100, 2)), Duration::from_micros(4100));
        assert_eq!(times.of_job(&job(WorkKind::Forward, 1, 2, 2)), Duration::from_micros(2000));
        assert_eq!(times.of_job(&job(WorkKind::Backward, 10, 10, 2)), Duration::from_micros(12300));
    }

    #[test]
    fn what_is_no_time_is_named() {
        for value in [json!(null), json!(-1), json!("fast"), json!(1e12)] {
            let config = json!({KEY: {"step_us": 1, "row_us": 1, "token_us": value}});
            let error = Times::from_config(&config).expect_err("no time");
            assert!(error.contains("token_us"), "{error}");
        }
    }
}
