//! Bounds on what peers can make this process hold or do, as data: every item of the list in
//! SECURITY.md is made of the constants that the code enforces.

use std::time::Duration;

/// One bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    pub what: String,
    /// How much of it there may be, with units.
    pub value: String,
    /// What happens beyond it.
    pub beyond: &'static str,
}

impl Bound {
    /// A bound.
    #[must_use]
    pub fn new(what: impl Into<String>, value: impl Into<String>, beyond: &'static str) -> Self {
        Self { what: what.into(), value: value.into(), beyond }
    }
}

/// A number with commas: `65,536`.
#[must_use]
pub fn count(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes in the largest unit that divides them: `64 KiB`.
#[must_use]
pub fn bytes(number: usize) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10), ("bytes", 0)];
    let fits = |(_, shift): &(&str, u32)| number.is_multiple_of(1 << shift);
    let (unit, shift) = units.into_iter().find(fits).unwrap_or(("bytes", 0));
    format!("{} {unit}", count(number >> shift))
}

/// A time in the largest unit that divides it: `15 min`.
#[must_use]
pub fn time(time: Duration) -> String {
    let ms = usize::try_from(time.as_millis()).unwrap_or(usize::MAX);
    let units = [("days", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000), ("ms", 1)];
    // One day reads better as 24 h.
    let fits = |(unit, of): &(&str, usize)| ms.is_multiple_of(*of) && (*unit != "days" || ms > *of);
    let (unit, of) = units.into_iter().find(fits).unwrap_or(("ms", 1));
    format!("{} {unit}", count(ms / of))
}

/// Longest line of a Markdown file, in characters.
const WIDTH: usize = 120;

/// A Markdown list of bounds.
#[must_use]
pub fn list(bounds: &[Bound]) -> String {
    let mut list = String::new();
    for Bound { what, value, beyond } in bounds {
        list.push_str(&wrap(&format!("- **{what}**: {value}. Beyond it: {beyond}.")));
        list.push('\n');
    }
    list
}

/// An item of a list, its further lines indented.
fn wrap(item: &str) -> String {
    let (mut lines, mut width) = (String::new(), 0);
    for word in item.split(' ') {
        let length = word.chars().count();
        if width > 0 && width + 1 + length > WIDTH {
            lines.push_str("\n  ");
            width = 2;
        } else if width > 0 {
            lines.push(' ');
            width += 1;
        }
        lines.push_str(word);
        width += length;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_carry_commas_and_their_largest_unit() {
        let counts = [7, 768, 1024, 65_536, 1_000_000].map(count);
        assert_eq!(counts, ["7", "768", "1,024", "65,536", "1,000,000"]);
        let sizes = [3, 1280 << 10, 64 << 20, 4 << 30].map(bytes);
        assert_eq!(sizes, ["3 bytes", "1,280 KiB", "64 MiB", "4 GiB"]);
        let times = [3, 90, 900, 3600, 86_400, 30 * 86_400].map(Duration::from_secs).map(time);
        assert_eq!(times, ["3 s", "90 s", "15 min", "1 h", "24 h", "30 days"]);
        assert_eq!(time(Duration::from_millis(250)), "250 ms");
    }

    #[test]
    fn a_list_has_one_item_per_bound_and_no_long_line() {
        let bounds = [Bound::new("streams", count(1024), "reset")];
        assert_eq!(list(&bounds), "- **streams**: 1,024. Beyond it: reset.\n");
        let long = list(&[Bound::new("a ".repeat(58) + "b", count(7), "reset")]);
        let lines: Vec<usize> = long.lines().map(|line| line.chars().count()).collect();
        assert_eq!(lines, [119, 27], "{long}");
        assert!(long.contains("\n  "), "the second line belongs to the item: {long}");
    }
}
