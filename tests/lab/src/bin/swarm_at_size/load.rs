//! How long steps take on servers that many sessions share: the approximate mean value analysis of closed queueing networks (Bard and
//! Schweitzer), one pass at a time. A session finds a server as busy as the others leave it; a step of it takes as long as that says;
//! and how long steps take says how busy it leaves the servers.
//!
//! As in Petals, steps of inference go before batches, and wait for the block of a batch that is being computed.

/// Tokens of a request for a batch.
pub const BATCH_TOKENS: f64 = 1024.0;
/// Weight of the newest pass.
const PASS_WEIGHT: f64 = 0.5;
/// Most of a server's time that batches see taken by steps.
const MOST_BUSY: f64 = 0.9;

/// What a step asks of one server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Demand {
    /// Seconds of its processor.
    Step(f64),
    /// Seconds of its processor and of its network.
    Batch(f64, f64),
}

/// A server's share in a step, and how many steps of this session are there on average: on the processor, on the network.
#[derive(Clone, Debug)]
pub struct Visit {
    pub server: usize,
    /// What it has to do.
    pub demand: Demand,
    present: (f64, f64),
}

impl Visit {
    /// A first visit.
    pub fn new(server: usize, demand: Demand) -> Visit {
        Visit { server, demand, present: (0.0, 0.0) }
    }
}

/// Seconds that a visit takes with the others who are there.
#[derive(Clone, Copy)]
struct Residence {
    compute_s: f64,
    transfer_s: f64,
}

impl Residence {
    fn total_s(self) -> f64 {
        self.compute_s + self.transfer_s
    }
}

/// How busy a server is.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    steps: f64,
    step_share: f64,
    batches: f64,
    batch_share: f64,
    transfers: f64,
}

/// All servers, in one pass after the other.
pub struct Loads {
    known: Vec<Load>,
    next: Vec<Load>,
    /// Seconds that one block of a batch takes.
    batch_block_s: Vec<f64>,
}

impl Loads {
    /// Idle servers, by the tokens of one block that each computes per second.
    pub fn new(forward_rps: impl Iterator<Item = f64>) -> Loads {
        let batch_block_s: Vec<f64> = forward_rps.map(|rps| BATCH_TOKENS / rps).collect();
        let idle = vec![Load::default(); batch_block_s.len()];
        Loads { known: idle.clone(), next: idle, batch_block_s }
    }

    /// Seconds that a step of a session takes; adds what it leaves on the servers for the next pass. `way_s` is time that nobody shares.
    pub fn step_s(&mut self, way_s: f64, visits: &mut [Visit]) -> f64 {
        let total_s =
            way_s + visits.iter().map(|visit| self.residence(visit).total_s()).sum::<f64>();
        for visit in visits {
            let Residence { compute_s, transfer_s } = self.residence(visit);
            visit.present = (compute_s / total_s, transfer_s / total_s);
            let next = &mut self.next[visit.server];
            match visit.demand {
                Demand::Step(seconds) => {
                    next.steps += visit.present.0;
                    next.step_share += seconds / total_s;
                }
                Demand::Batch(seconds, _) => {
                    next.batches += visit.present.0;
                    next.batch_share += seconds / total_s;
                    next.transfers += visit.present.1;
                }
            }
        }
        total_s
    }

    fn residence(&self, visit: &Visit) -> Residence {
        let load = &self.known[visit.server];
        let others = |all: f64, own: f64| 1.0 + (all - own).max(0.0);
        match visit.demand {
            Demand::Step(seconds) => {
                let blocked_s = load.batch_share.min(1.0) * self.batch_block_s[visit.server] / 2.0;
                let compute_s = seconds * others(load.steps, visit.present.0) + blocked_s;
                Residence { compute_s, transfer_s: 0.0 }
            }
            Demand::Batch(compute_s, transfer_s) => {
                let left = 1.0 - load.step_share.min(MOST_BUSY);
                Residence {
                    compute_s: compute_s / left * others(load.batches, visit.present.0),
                    transfer_s: transfer_s * others(load.transfers, visit.present.1),
                }
            }
        }
    }

    pub fn end_pass(&mut self) {
        let smooth = |known: &mut f64, next: f64| *known += PASS_WEIGHT * (next - *known);
        for (known, next) in self.known.iter_mut().zip(&mut self.next) {
            smooth(&mut known.steps, next.steps);
            smooth(&mut known.step_share, next.step_share);
            smooth(&mut known.batches, next.batches);
            smooth(&mut known.batch_share, next.batch_share);
            smooth(&mut known.transfers, next.transfers);
            *next = Load::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes until nothing changes; seconds of a step of each session.
    fn converge(loads: &mut Loads, sessions: &mut [(f64, Vec<Visit>)]) -> Vec<f64> {
        let mut last = Vec::new();
        for _ in 0..500 {
            last =
                sessions.iter_mut().map(|(way_s, visits)| loads.step_s(*way_s, visits)).collect();
            loads.end_pass();
        }
        last
    }

    #[test]
    fn sessions_of_a_busy_server_get_a_share_each() {
        for count in [1usize, 10, 100] {
            let mut loads = Loads::new([1e4].into_iter());
            let mut sessions = vec![(0.3, vec![Visit::new(0, Demand::Step(0.02))]); count];
            let step_s = converge(&mut loads, &mut sessions)[0];
            let per_s = count as f64 / step_s;
            assert!(per_s <= 50.0 + 1e-6, "{count} sessions make {per_s} steps of 20 ms a second");
            let bound = (count as f64 / 0.32).min(50.0);
            assert!(per_s > 0.8 * bound, "{count} sessions make {per_s} of {bound} steps a second");
        }
    }

    #[test]
    fn batches_wait_for_steps_and_steps_for_one_block_of_a_batch() {
        let mut loads = Loads::new([1e4].into_iter());
        let mut sessions = vec![
            (0.1, vec![Visit::new(0, Demand::Step(0.02))]),
            (0.1, vec![Visit::new(0, Demand::Batch(1.0, 0.5))]),
        ];
        let both = converge(&mut loads, &mut sessions);
        assert!(both[0] > 0.12 && both[0] < 0.12 + BATCH_TOKENS / 1e4 / 2.0, "{both:?}");
        assert!(both[1] > 1.6, "{both:?}");
    }
}
