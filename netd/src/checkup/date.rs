//! Dates of HTTP, to compare clocks: `Sun, 06 Nov 1994 08:49:37 GMT` (RFC 9110, IMF-fixdate).

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// Seconds since 1970 of a date in a header; `None` for other forms.
pub fn unix_seconds(text: &str) -> Option<i64> {
    let (_, date) = text.trim().split_once(", ")?;
    let words: Vec<&str> = date.split(' ').collect();
    let [day, month, year, time, "GMT"] = words[..] else { return None };
    let month = 1 + i64::try_from(MONTHS.iter().position(|name| *name == month)?).ok()?;
    let number = |text: &str, max: i64| {
        let plain = text.len() <= 4 && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<i64>().ok().filter(|value| plain && *value <= max)
    };
    let (day, year) = (number(day, 31)?, number(year, 9999)?);
    let parts: Vec<&str> = time.split(':').collect();
    let [hour, minute, second] = parts[..] else { return None };
    let seconds = number(hour, 23)? * 3600 + number(minute, 59)? * 60 + number(second, 60)?;
    Some(days(year, month, day) * 86_400 + seconds)
}

/// Days since 1970 in the Gregorian calendar; years begin in March, so that the leap day is last.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * month + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_http_are_seconds_since_1970() {
        for (text, seconds) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
            ("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777),
            ("Tue, 29 Feb 2000 23:59:59 GMT", 951_868_799),
            ("Fri, 01 Mar 2024 00:00:00 GMT", 1_709_251_200),
        ] {
            assert_eq!(unix_seconds(text), Some(seconds), "{text}");
        }
        for bad in [
            "",
            "Sun",
            "Sun, 06 Nov 1994",
            "Sun, 06 Nov 1994 08:49:37 CET",
            "Sun, 06 Brumaire 1994 08:49:37 GMT",
            "Sun, -6 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 99999999999999999999 08:49:37 GMT",
            "Sun, 06 Nov 1994 25:00:00 GMT",
            "Sun, 06 Nov 1994 08:49 GMT",
        ] {
            assert_eq!(unix_seconds(bad), None, "{bad}");
        }
    }
}
