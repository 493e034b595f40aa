//! Short texts of `sepal top`. What other processes or peers wrote is shown without control characters.

use std::time::Duration;

/// A time in at most six characters: `820ms`, `12s`, `3m05s`, `4h12m`, `12d`.
pub fn short(seconds: f64) -> String {
    let time = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
    match (time.as_secs(), time.subsec_millis()) {
        (0, millis) => format!("{millis}ms"),
        (s @ 1..60, _) => format!("{s}s"),
        (s @ 60..3600, _) => format!("{}m{:02}s", s / 60, s % 60),
        (s @ 3600..86_400, _) => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
        (s, _) => format!("{}d", (s / 86_400).min(99_999)),
    }
}

/// A number in at most six characters.
pub fn number(value: f64) -> String {
    match value {
        v if !v.is_finite() => "-".to_owned(),
        v if v < 100.0 => format!("{v:.1}"),
        v if v < 1e5 => format!("{v:.0}"),
        v if v < 1e8 => format!("{:.0}k", v / 1e3),
        v => format!("{:.0}M", (v / 1e6).min(99_999.0)),
    }
}

/// Bytes in GiB.
pub fn gibibytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1u32 << 30))
}

/// `text` without control characters, in at most `most` characters.
pub fn clean(text: &str, most: usize) -> String {
    let plain = text.chars().map(|c| if c.is_control() { '?' } else { c });
    let mut cut: String = plain.take(most).collect();
    if text.chars().count() > most && most > 0 {
        cut.pop();
        cut.push('…');
    }
    cut
}

/// Values as bars of one character each, as high as the largest.
pub fn bars(values: impl Iterator<Item = f64>, most: usize) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let values: Vec<f64> = values.collect();
    let shown = values.get(values.len().saturating_sub(most)..).unwrap_or_default();
    let top = shown.iter().copied().fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let bar = |value: &f64| {
        let height = (value / top * BARS.len() as f64).ceil() as usize;
        BARS.get(height.clamp(1, BARS.len()) - 1).copied().unwrap_or(' ')
    };
    shown.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_numbers_are_short() {
        let shown = [0.0, 0.82, 12.9, 185.0, 15_130.0, 1e6, -3.0, f64::NAN, 1e300].map(short);
        let expected = ["0ms", "820ms", "12s", "3m05s", "4h12m", "11d", "0ms", "0ms", "99999d"];
        assert_eq!(shown, expected);
        let shown = [0.0, 9.96, 99.94, 1234.5, 123_456.0, 2.5e9, f64::NAN].map(number);
        assert_eq!(shown, ["0.0", "10.0", "99.9", "1234", "123k", "2500M", "-"]);
        assert_eq!(gibibytes(3 << 29), "1.5");
    }

    #[test]
    fn what_others_wrote_cannot_steer_the_terminal() {
        assert_eq!(clean("a\u{1b}[2Jb\nc", 20), "a?[2Jb?c");
        assert_eq!((clean("abcdef", 4), clean("abcd", 4)), ("abc…".to_owned(), "abcd".to_owned()));
    }

    #[test]
    fn bars_are_as_high_as_the_largest() {
        assert_eq!(bars([9.0, 0.0, 1.0, 8.0].into_iter(), 3), "▁▁█");
        assert_eq!(bars([0.0, 0.0].into_iter(), 3), "▁▁");
        assert_eq!(bars(std::iter::empty(), 3), "");
    }
}
