//! Whole numbers as clients write them: many languages have no integers, and send `100.0`.

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Number;

/// Above this a float does not say which whole number is meant.
const MOST_EXACT: f64 = 9_007_199_254_740_992.0;

/// A whole number, or `null`.
///
/// # Errors
/// A number with a fraction, or outside of `T`; the text names it.
pub fn whole<'de, D: Deserializer<'de>, T: TryFrom<i64>>(from: D) -> Result<Option<T>, D::Error> {
    let Some(number) = Option::<Number>::deserialize(from)? else {
        return Ok(None);
    };
    let exact = |float: &f64| float.fract() == 0.0 && float.abs() <= MOST_EXACT;
    let integer =
        number.as_i64().or_else(|| number.as_f64().filter(exact).map(|float| float as i64));
    let fits = integer.and_then(|integer| T::try_from(integer).ok());
    let bad = || D::Error::custom(format!("{number} is not a whole number of the expected range"));
    fits.map(Some).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(default)]
    struct Both {
        #[serde(deserialize_with = "whole")]
        signed: Option<i64>,
        #[serde(deserialize_with = "whole")]
        small: Option<u32>,
    }

    #[test]
    fn floats_without_a_fraction_are_whole_numbers_and_others_are_refused() {
        let read = |text: &str| serde_json::from_str::<Both>(text);
        let both = |signed, small| Both { signed, small };
        assert_eq!(read(r#"{"signed": -1, "small": 100.0}"#).unwrap(), both(Some(-1), Some(100)));
        assert_eq!(read(r#"{"signed": 1e3, "small": null}"#).unwrap(), both(Some(1000), None));
        assert_eq!(read("{}").unwrap(), both(None, None));
        for bad in [
            r#"{"signed": 0.5}"#,
            r#"{"signed": 1e300}"#,
            r#"{"signed": 18446744073709551615}"#,
            r#"{"small": -1}"#,
            r#"{"small": 4294967296.0}"#,
            r#"{"small": "7"}"#,
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
        assert!(read(r#"{"signed": 0.5}"#).unwrap_err().to_string().contains("0.5"));
    }
}
