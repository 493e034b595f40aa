//! Frequencies of the rotary encoding (transformers `modeling_rope_utils.py`).
//!
//! Some scalings depend on the length of a sequence. That is its length when the job is done: a
//! property of the job, not of where its rows are cut, and what transformers takes for a forward of
//! a whole sequence, a prefill in one step and decoding token by token. Keys that are cached keep
//! the rotation they got.
//!
//! # Discrepancies
//! Yarn: a `factor` counts where `original_max_position_embeddings` is there too (transformers 4.51
//! computes it from that and `max_position_embeddings`, which agree in published models).

use std::f32::consts::PI;

/// How the frequencies of a model are stretched for longer texts than it was first trained on.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All by one factor.
    Linear {
        /// Divides every frequency.
        factor: f32,
    },
    /// Llama 3.1: low frequencies by a factor, high ones not, smoothly between.
    Llama3 {
        /// Divides the low frequencies.
        factor: f32,
        /// Wavelengths above `original / low` are low frequencies.
        low: f32,
        /// Wavelengths below `original / high` are high frequencies; above `low`.
        high: f32,
        /// Positions of the first training.
        original: f32,
    },
    /// NTK-aware: sequences longer than those of training get a larger base.
    Dynamic {
        /// How far the base grows.
        factor: f32,
        /// Positions of the training.
        original: usize,
    },
    /// Low frequencies by a factor, high ones not, with a ramp between that counts rotations over
    /// the training's length.
    Yarn {
        /// Divides the low frequencies.
        factor: f32,
        /// Positions of the training.
        original: f32,
        /// Rotations from which on frequencies stay.
        fast: f32,
        /// Rotations up to which they are divided.
        slow: f32,
        /// Multiplies cos and sin.
        attention: f32,
    },
    /// Every frequency by a factor of its own, others for sequences longer than those of training.
    Long {
        /// Positions of the training.
        original: usize,
        /// Divisors for longer sequences `[head_dim / 2]`.
        long: Vec<f32>,
        /// Divisors for all others `[head_dim / 2]`.
        short: Vec<f32>,
        /// Multiplies cos and sin.
        attention: f32,
    },
}

impl RopeScaling {
    /// `[head_dim / 2]` inverse frequencies to the base `theta`, for sequences of up to the length
    /// of the training.
    pub fn inverse_frequencies(&self, theta: f32, head_dim: usize) -> Vec<f32> {
        self.frequencies_at(theta, head_dim, 0)
    }

    /// The same for a sequence of `length` positions.
    pub fn frequencies_at(&self, theta: f32, head_dim: usize, length: usize) -> Vec<f32> {
        let mut base = f64::from(theta);
        if let RopeScaling::Dynamic { factor, original } = self
            && length > *original
        {
            let (factor, dim) = (f64::from(*factor), head_dim as f64);
            let growth = factor * length as f64 / *original as f64 - (factor - 1.0);
            base *= growth.powf(dim / (dim - 2.0));
        }
        let exponent = |k: usize| (2 * k) as f32 / head_dim as f32;
        // The power in f64 and one rounding: what transformers gets in f32, but for the last bit.
        let plain = |k| 1.0 / base.powf(f64::from(exponent(k))) as f32;
        let ramp = self.ramp(base, head_dim);
        (0..head_dim / 2)
            .map(|k| match self {
                RopeScaling::Long { original, long, short, .. } => {
                    let divisors = if length > *original { long } else { short };
                    plain(k) / divisors.get(k).copied().unwrap_or(1.0)
                }
                RopeScaling::Yarn { factor, .. } => {
                    let divided = ((k as f64 - ramp.0) / (ramp.1 - ramp.0)).clamp(0.0, 1.0) as f32;
                    plain(k) / factor * divided + plain(k) * (1.0 - divided)
                }
                _ => self.scale(plain(k)),
            })
            .collect()
    }

    /// What multiplies cos and sin.
    pub fn attention_factor(&self) -> f32 {
        match self {
            RopeScaling::Yarn { attention, .. } | RopeScaling::Long { attention, .. } => *attention,
            _ => 1.0,
        }
    }

    /// Whether a sequence of `length` positions has other frequencies than a short one.
    pub fn changes_at(&self, length: usize) -> bool {
        match self {
            RopeScaling::Dynamic { original, .. } | RopeScaling::Long { original, .. } => {
                length > *original
            }
            _ => false,
        }
    }

    /// First and last frequency of yarn's ramp.
    fn ramp(&self, base: f64, head_dim: usize) -> (f64, f64) {
        let RopeScaling::Yarn { original, fast, slow, .. } = *self else {
            return (0.0, 1.0);
        };
        let dim = head_dim as f64;
        let at = |rotations: f32| {
            let turns = f64::from(original) / (f64::from(rotations) * 2.0 * std::f64::consts::PI);
            dim * turns.ln() / (2.0 * base.ln())
        };
        let (low, high) = (at(fast).floor().max(0.0), at(slow).ceil().min(dim - 1.0));
        (low, if low == high { high + 0.001 } else { high })
    }

    fn scale(&self, frequency: f32) -> f32 {
        match *self {
            RopeScaling::None
            | RopeScaling::Dynamic { .. }
            | RopeScaling::Yarn { .. }
            | RopeScaling::Long { .. } => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low, high, original } => {
                let wavelength = 2.0 * PI / frequency;
                if wavelength < original / high {
                    frequency
                } else if wavelength > original / low {
                    frequency / factor
                } else {
                    let smooth = (original / wavelength - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_near(got: f32, wanted: f32) {
        assert!((got - wanted).abs() <= 3e-7 * wanted.abs(), "{got} is not {wanted}");
    }

    /// Values of transformers for Llama 3.1 8B.
    #[test]
    fn llama_3_1_frequencies_are_those_of_transformers() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let frequencies = scaling.inverse_frequencies(500_000.0, 128);
        assert_eq!(frequencies.len(), 64);
        let oracle = [
            (0, 1.0),
            (1, 0.814_617_2),
            (28, 0.003_211_446),
            (29, 0.002_166_570_6),
            (30, 0.001_371_893_7),
            (34, 0.000_178_507_79),
            (35, 9.556_212e-5),
            (36, 7.784_655e-5),
            (63, 3.068_926e-7),
        ];
        for (k, wanted) in oracle {
            assert_near(frequencies[k], wanted);
        }
        let plain = RopeScaling::None.inverse_frequencies(500_000.0, 128);
        assert_near(plain[29], 0.002_616_099);
        assert!((35..64).all(|k| frequencies[k] == plain[k] / 8.0));
    }

    #[test]
    fn linear_scaling_divides_every_frequency() {
        let plain = RopeScaling::None.inverse_frequencies(10_000.0, 8);
        assert_near(plain[1], 0.1);
        let scaled = RopeScaling::Linear { factor: 4.0 }.inverse_frequencies(10_000.0, 8);
        assert!(plain.iter().zip(scaled).all(|(p, s)| s == p / 4.0));
    }
}
