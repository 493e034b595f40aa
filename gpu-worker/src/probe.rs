//! Measures what a block of this model does on this device, as Petals does it (petals
//! `server/throughput.py`): one-token steps over a growing cache, and one long sequence without
//! cache. On private pages, never on the kv segment, and in at most about [`BUDGET`] where Petals
//! takes as long as a hundred steps and ten long sequences need.

use std::time::{Duration, Instant};

use kernels::StepRow;
use shared::ids::PageId;
use shared::model::PAGE_TOKENS;
use shared::survey::Capacity;

use crate::device::DeviceBackend;
use crate::engine::{Engine, EngineError};

/// Time for all measurements, as long as one repetition of each takes less.
const BUDGET: Duration = Duration::from_millis(300);

/// Most one-token steps, and so the longest prefix.
const STEPS: usize = 100;

/// Longest sequence.
const TOKENS: usize = 1024;

/// Measures the first block. `progress` is called after each repetition. In a group all ranks
/// measure at once, and rank 0 decides how often; its result is that of all of them.
///
/// # Errors
/// [`EngineError`] when the block refuses, which its checks exclude.
pub fn measure<B: DeviceBackend>(
    engine: &mut Engine<'_, B>,
    mut progress: impl FnMut(),
) -> Result<Capacity, EngineError> {
    let pages: Vec<PageId> = (0..TOKENS.div_ceil(PAGE_TOKENS) as u32).map(PageId).collect();
    let unit = engine.forward_tokens();
    let mut pass = |engine: &mut Engine<'_, B>, prefix: usize, tokens: usize| {
        let mut hidden = noise(tokens * engine.hidden_size());
        let rows = [StepRow::new(tokens, prefix, &pages)];
        let start = Instant::now();
        engine.trial(&rows, &mut hidden, pages.len())?;
        let elapsed = start.elapsed();
        progress();
        Ok::<_, EngineError>(elapsed)
    };
    // Reads the weights from the disk, if need be.
    pass(engine, 0, 1)?;
    let (mut steps, mut spent) = (0, Duration::ZERO);
    while engine.agree(steps < STEPS && spent < BUDGET / 3)? {
        spent += pass(engine, steps, 1)?;
        steps += 1;
    }
    let inference_rps = steps as f64 / seconds(spent);
    // In units as those in which real sequences are computed.
    let (mut tokens, mut spent) = (0, Duration::ZERO);
    while engine.agree(tokens < TOKENS && spent < BUDGET / 2)? {
        spent += pass(engine, tokens, unit)?;
        tokens += unit;
    }
    engine.trim();
    Ok(Capacity { inference_rps, forward_rps: tokens as f64 / seconds(spent) })
}

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64().max(1e-9)
}

/// Numbers of about unit variance without a pattern that a norm would remove.
fn noise(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 12.9898).sin() * 1.4).collect()
}
