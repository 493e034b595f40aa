//! Tables and sizes for people, for the commands of this package that print.

use std::time::SystemTime;

/// Columns as wide as their longest cell.
pub fn aligned(rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            let width = width(column);
            format!("{cell:width$}")
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Bytes of files, in steps of 1000.
pub fn decimal(bytes: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 99.95);
    format!("{value:.digits$} {}", units.get(unit).unwrap_or(&""))
}

/// How long ago that was, in its largest unit.
pub fn age(then: SystemTime) -> String {
    let seconds = then.elapsed().map_or(0, |age| age.as_secs());
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86400),
    }
}
