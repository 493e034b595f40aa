//! The plan as a person at a terminal reads it.

use super::report::{FormatPlan, GroupPlan, Plan, RateOrigin};

/// The heads of the columns.
const HEAD: [&str; 8] =
    ["FORMAT", "DEVICE", "BLOCK", "KV/TOKEN", "WORKSPACE", "BLOCKS", "THROUGHPUT", "DOWNLOAD"];

/// Rows for all formats and devices, and a line for what needs one.
pub fn text(plan: &Plan) -> String {
    let mut rows = vec![HEAD.map(str::to_owned).to_vec()];
    for format in &plan.formats {
        rows.extend(format_rows(plan, format));
    }
    let mut text = format!("{}\n\n", title(plan));
    text.push_str(&aligned(&rows));
    text.push('\n');
    for note in notes(plan) {
        text.push_str(&note);
        text.push('\n');
    }
    text
}

fn title(plan: &Plan) -> String {
    let memory = plan.memory_bytes.map(|bytes| format!(", {} of memory free", binary(bytes)));
    let commit = plan.commit.as_deref().map(|commit| {
        let short: String = commit.chars().take(12).collect();
        format!(" at {short}")
    });
    format!(
        "{}{}: {}, {} blocks, {}, sessions of at most {} tokens, KV cache of {} tokens per block{}",
        plan.model,
        commit.unwrap_or_default(),
        plan.model_type,
        plan.model_blocks,
        plan.dtype,
        plan.inference_max_length,
        plan.attn_cache_tokens,
        memory.unwrap_or_default()
    )
}

/// A row for each group of devices; the first has what is true of the format.
fn format_rows(plan: &Plan, format: &FormatPlan) -> Vec<Vec<String>> {
    let row = |(index, group): (usize, &GroupPlan)| {
        let is_first = index == 0;
        let of_format = |text: String| if is_first { text } else { String::new() };
        let mark = if format.is_default { " *" } else { "" };
        vec![
            of_format(format!("{}{mark}", format.quant_type)),
            group.devices.join(" + "),
            binary(format.block_bytes),
            binary(format.kv_token_bytes),
            binary(group.workspace_bytes),
            format!("{} of {}", group.blocks, plan.model_blocks),
            of_format(throughput(format)),
            of_format(download(format)),
        ]
    };
    let mut rows: Vec<Vec<String>> = format.groups.iter().enumerate().map(row).collect();
    if format.groups.len() > 1 {
        let all = format!("{} of {}", format.blocks, plan.model_blocks);
        let none = String::new;
        rows.push(vec![none(), "all".to_owned(), none(), none(), none(), all, none(), none()]);
    }
    rows
}

fn throughput(format: &FormatPlan) -> String {
    let about = match format.throughput_origin {
        RateOrigin::Estimated => " (estimated)",
        RateOrigin::Given => " (given)",
        RateOrigin::Measured => " (measured)",
        RateOrigin::Unknown => "",
    };
    match format.throughput_rps {
        Some(rps) => format!("{rps:.1} tokens/s{about}"),
        None => "not known".to_owned(),
    }
}

fn download(format: &FormatPlan) -> String {
    match format.download_bytes {
        0 => "none".to_owned(),
        bytes => format!("{}, {}", decimal(bytes), duration(format.download_s)),
    }
}

/// A line for each thing that the table does not say.
fn notes(plan: &Plan) -> Vec<String> {
    let mut notes = vec![
        "* the format that sepal serve takes with these flags".to_owned(),
        "BLOCKS are those that sepal serve would serve; the swarm decides where they begin, unless --block_indices does".to_owned(),
        format!(
            "throughput is what would be announced, over a network of {} Mbit/s ({}); downloads take as long as that",
            plan.network_mbps, plan.network_source
        ),
    ];
    if plan.formats.iter().all(|format| !format.is_default) {
        notes.remove(0);
    }
    let mut bases: Vec<&str> =
        plan.formats.iter().filter_map(|format| format.estimate_basis.as_deref()).collect();
    bases.dedup();
    notes.extend(bases.iter().map(|basis| format!("estimated: {basis}")));
    let refused = plan.formats.iter().filter_map(|format| {
        let why = format.refusal.as_ref()?;
        Some(format!("{} would be refused: {why}", format.quant_type))
    });
    notes.extend(refused);
    notes
}

/// Columns as wide as their longest cell.
fn aligned(rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            let width = width(column).unwrap_or(0);
            format!("{cell:width$}")
        });
        let cells: Vec<String> = cells.collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Bytes of memory, in steps of 1024.
fn binary(bytes: u64) -> String {
    scaled(bytes, 1024.0, ["B", "KiB", "MiB", "GiB", "TiB"])
}

/// Bytes of files, in steps of 1000.
fn decimal(bytes: u64) -> String {
    scaled(bytes, 1000.0, ["B", "kB", "MB", "GB", "TB"])
}

fn scaled(bytes: u64, step: f64, units: [&str; 5]) -> String {
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 99.95);
    format!("{value:.digits$} {}", units.get(unit).unwrap_or(&""))
}

/// About how long, in at most two units.
fn duration(seconds: f64) -> String {
    let whole = seconds.clamp(1.0, 1e9).round() as u64;
    match (whole / 3600, whole / 60 % 60, whole % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, _) => format!("{minutes} min"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_short() {
        let sizes = [0, 1023, 1024, 408_814_387, 16 << 30, u64::MAX].map(binary);
        assert_eq!(sizes, ["0 B", "1023 B", "1.0 KiB", "390 MiB", "16.0 GiB", "16777216 TiB"]);
        assert_eq!([999, 1_500_000, 25_000_000_000].map(decimal), ["999 B", "1.5 MB", "25.0 GB"]);
        let times = [0.0, 59.4, 61.0, 3599.0, 7322.0].map(duration);
        assert_eq!(times, ["1 s", "59 s", "1 min", "59 min", "2 h 2 min"]);
    }
}
