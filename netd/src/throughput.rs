//! What a server announces as its throughput, from measured rates: netd announces it, `sepal plan`
//! foretells it. The workers measure and keep what a block does on their device
//! (`gpu-worker/model/src/rates.rs`); netd measures the network. Source:
//! `petals/server/throughput.py`.

use shared::config::Throughput;

use crate::network_rate::ASSUMED_BITS_PER_S;

/// Share of the network's rate that is left behind a relay.
const RELAY_SHARE: f64 = 0.2;
/// Bits of a number in the tensors between servers.
const WIRE_BITS: f64 = 16.0;

/// Rates of one block on one device, in requests (tokens through one block) per second; the
/// network's in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// One token at a time, with KV cache.
    pub inference_rps: f64,
    /// 1024 tokens at once, without.
    pub forward_rps: f64,
    /// Hidden states through the network, without the loss behind a relay.
    pub network_rps: f64,
}

/// How peers reach this server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Without help.
    Direct,
    /// Only via a relay.
    Relayed,
}

/// Tokens per second of hidden states of `hidden_size` that a network with these bits per second
/// carries both ways. A rate that is 0 or no number was not measured: [`ASSUMED_BITS_PER_S`] then.
#[must_use]
pub fn network_rps(download_bits_per_s: f64, upload_bits_per_s: f64, hidden_size: u32) -> f64 {
    let slower = download_bits_per_s.min(upload_bits_per_s);
    let both = download_bits_per_s.is_finite() && upload_bits_per_s.is_finite() && slower > 0.0;
    let bits_per_s = if both { slower } else { ASSUMED_BITS_PER_S };
    bits_per_s / (WIRE_BITS * f64::from(hidden_size.max(1)))
}

/// The throughput by which servers choose blocks: tokens per second through half of `block_count`
/// blocks on average, since requests start anywhere in a span, or through the network if that is
/// slower.
#[must_use]
pub fn combine(rates: &Rates, block_count: u32, reach: Reach) -> f64 {
    let average_blocks = (f64::from(block_count) + 1.0) / 2.0;
    let network = match reach {
        Reach::Direct => rates.network_rps,
        Reach::Relayed => rates.network_rps * RELAY_SHARE,
    };
    (rates.forward_rps / average_blocks).min(network)
}

/// The throughput that a server announces: what the operator says (`--throughput RPS`), else
/// [`combine`].
#[must_use]
pub fn announced(asked: Throughput, rates: &Rates, block_count: u32, reach: Reach) -> f64 {
    match asked {
        Throughput::Fixed(throughput) => throughput,
        Throughput::Measure | Throughput::Anew | Throughput::DryRun => {
            combine(rates, block_count, reach)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: Rates =
        Rates { inference_rps: 500.0, forward_rps: 48_000.0, network_rps: 7629.39453125 };

    #[test]
    fn worked_examples_come_out() {
        assert_eq!(network_rps(1e9, 1e9, 8192), RATES.network_rps);
        let near = |value: f64, expected: f64| assert!((value - expected).abs() < 0.05, "{value}");
        near(combine(&RATES, 46, Reach::Direct), 2042.6);
        near(combine(&RATES, 46, Reach::Relayed), 1525.9);
        assert_eq!(combine(&RATES, 1, Reach::Direct), RATES.network_rps);
        assert_eq!(network_rps(1e9, 2e8, 8192), 2e8 / 131_072.0);
        assert_eq!(announced(Throughput::Fixed(7.0), &RATES, 46, Reach::Direct), 7.0);
        near(announced(Throughput::Measure, &RATES, 46, Reach::Direct), 2042.6);
    }

    #[test]
    fn network_that_was_not_measured_has_a_hundred_megabits() {
        let assumed = 1e8 / (16.0 * 4096.0);
        for (down, up) in [
            (0.0, 1e9),
            (1e9, 0.0),
            (f64::NAN, 1e9),
            (1e9, f64::NAN),
            (f64::INFINITY, 1e9),
            (-1.0, 1e9),
        ] {
            assert_eq!(network_rps(down, up, 4096), assumed, "{down} {up}");
        }
    }
}
