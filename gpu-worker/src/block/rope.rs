//! Inverse frequencies of the rotary encoding (transformers `modeling_rope_utils.py`).

use std::f32::consts::PI;

/// How the frequencies of a model are stretched for longer texts than it was first trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
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
}

impl RopeScaling {
    /// `[head_dim / 2]` inverse frequencies to the base `theta`.
    pub fn inverse_frequencies(&self, theta: f32, head_dim: usize) -> Vec<f32> {
        let exponent = |k: usize| (2 * k) as f32 / head_dim as f32;
        // The power in f64 and one rounding: what transformers gets in f32, but for the last bit.
        let plain = |k| 1.0 / f64::from(theta).powf(f64::from(exponent(k))) as f32;
        (0..head_dim / 2).map(|k| self.scale(plain(k))).collect()
    }

    fn scale(&self, frequency: f32) -> f32 {
        match *self {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => {
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
        assert!(
            (got - wanted).abs() <= 3e-7 * wanted.abs(),
            "{got} is not {wanted}"
        );
    }

    /// Values of transformers for Llama 3.1 8B.
    #[test]
    fn llama_3_1_frequencies_are_those_of_transformers() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low: 1.0,
            high: 4.0,
            original: 8192.0,
        };
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
