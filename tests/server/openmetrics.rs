//! A strict reader of the OpenMetrics text format: what it does not know is an error, so that a server
//! that writes something else fails its test.

use std::collections::{BTreeMap, BTreeSet};

/// One family: its type, and the unit if it has one.
#[derive(Debug)]
struct Family {
    kind: String,
    has_help: bool,
}

/// One sample.
#[derive(Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

/// All families and samples of a text.
#[derive(Debug, Default)]
pub struct Metrics {
    families: BTreeMap<String, Family>,
    samples: Vec<Sample>,
}

/// Endings of the samples of each type.
const SUFFIXES: [(&str, &[&str]); 3] =
    [("counter", &["_total"]), ("gauge", &[""]), ("histogram", &["_bucket", "_sum", "_count"])];

impl Metrics {
    /// Reads a text.
    ///
    /// # Errors
    /// What is not as the format has it, and where.
    pub fn parse(text: &str) -> Result<Metrics, String> {
        let body = text.strip_suffix("# EOF\n").ok_or("the text does not end with # EOF")?;
        let mut metrics = Metrics::default();
        let mut family = String::new();
        for (number, line) in body.lines().enumerate() {
            let failed = |what: &str| format!("line {}: {what}: {line}", number + 1);
            match line.strip_prefix("# ") {
                Some(comment) => metrics.comment(comment, &mut family).map_err(|e| failed(&e))?,
                None => metrics.sample(line, &family).map_err(|e| failed(&e))?,
            }
        }
        metrics.check()?;
        Ok(metrics)
    }

    /// The sum of all samples of this name with these labels.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has = |sample: &&Sample| {
            let of =
                |(key, value): &(&str, &str)| sample.labels.get(*key).is_some_and(|v| v == value);
            sample.name == name && labels.iter().all(of)
        };
        assert!(self.names().contains(name), "{name} is not exported");
        self.samples.iter().filter(has).map(|sample| sample.value).sum()
    }

    /// Names that samples have, or would have.
    pub fn names(&self) -> BTreeSet<String> {
        let of = |(name, family): (&String, &Family)| {
            let suffixes = suffixes(&family.kind).unwrap_or_default();
            suffixes.iter().map(|suffix| format!("{name}{suffix}")).collect::<Vec<_>>()
        };
        self.families.iter().flat_map(of).collect()
    }

    fn comment(&mut self, comment: &str, family: &mut String) -> Result<(), String> {
        let mut words = comment.splitn(3, ' ');
        let (kind, name, rest) = (words.next(), words.next(), words.next());
        let (Some(kind), Some(name), Some(rest)) = (kind, name, rest) else {
            return Err("expected HELP, TYPE or UNIT, a name and a text".to_owned());
        };
        match kind {
            "HELP" => {
                if self.families.contains_key(name) {
                    return Err("the family comes twice".to_owned());
                }
                *family = name.to_owned();
                let new = Family { kind: String::new(), has_help: !rest.is_empty() };
                self.families.insert(name.to_owned(), new);
            }
            "TYPE" if name == family => {
                suffixes(rest)?;
                if let Some(known) = self.families.get_mut(name) {
                    known.kind = rest.to_owned();
                }
            }
            "UNIT" if name == family => {
                if !name.ends_with(&format!("_{rest}")) {
                    return Err("the name does not end with its unit".to_owned());
                }
            }
            _ => return Err("unknown comment, or of another family".to_owned()),
        }
        Ok(())
    }

    fn sample(&mut self, line: &str, family: &str) -> Result<(), String> {
        let end = line.find(['{', ' ']).ok_or("no value")?;
        let (name, rest) = line.split_at(end);
        let of = self.families.get(family).ok_or("a sample before its family")?;
        let suffix = name.strip_prefix(family).ok_or("a sample of another family")?;
        if !suffixes(&of.kind)?.contains(&suffix) {
            return Err(format!("no sample of a {} is called so", of.kind));
        }
        let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if !name.chars().all(is_name) || !name.starts_with("sepal_") {
            return Err("a name that is not one of ours".to_owned());
        }
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(rest) => labels(rest)?,
            None => (BTreeMap::new(), rest),
        };
        let value = rest.strip_prefix(' ').ok_or("no space before the value")?;
        let value: f64 = value.parse().map_err(|_| "the value is no number")?;
        if !value.is_finite() || value < 0.0 {
            return Err("a value that is not finite or below zero".to_owned());
        }
        let sample = Sample { name: name.to_owned(), labels, value };
        let is_same = |other: &Sample| other.name == sample.name && other.labels == sample.labels;
        if self.samples.iter().any(is_same) {
            return Err("the sample comes twice".to_owned());
        }
        self.samples.push(sample);
        Ok(())
    }

    /// Every family has its text and its type; buckets grow up to the count.
    fn check(&self) -> Result<(), String> {
        for (name, family) in &self.families {
            if !family.has_help || family.kind.is_empty() {
                return Err(format!("{name} has no help or no type"));
            }
        }
        let counts = self.samples.iter().filter(|sample| sample.name.ends_with("_count"));
        for count in counts {
            let bucket_name = count.name.replace("_count", "_bucket");
            let mut buckets: Vec<(f64, f64)> = Vec::new();
            for bucket in self.samples.iter().filter(|sample| sample.name == bucket_name) {
                let mut labels = bucket.labels.clone();
                let bound = labels.remove("le").ok_or("a bucket without its bound")?;
                if labels == count.labels {
                    let bound = bound.parse().map_err(|_| format!("{bound} is no bound"))?;
                    buckets.push((bound, bucket.value));
                }
            }
            let grows = buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1);
            if !grows || buckets.last() != Some(&(f64::INFINITY, count.value)) {
                return Err(format!("buckets of {} are {buckets:?}", count.name));
            }
        }
        Ok(())
    }
}

fn suffixes(kind: &str) -> Result<&'static [&'static str], String> {
    let found = SUFFIXES.iter().find(|(name, _)| *name == kind);
    found.map(|(_, suffixes)| *suffixes).ok_or_else(|| format!("unknown type {kind:?}"))
}

/// The labels of a sample, and what follows them.
fn labels(mut rest: &str) -> Result<(BTreeMap<String, String>, &str), String> {
    let mut labels = BTreeMap::new();
    loop {
        let (key, value) = rest.split_once("=\"").ok_or("a label without its value")?;
        let end = value.find('"').ok_or("a label without its end")?;
        let (value, after) = value.split_at(end);
        if value.contains(['\\', '\n']) || value.starts_with("12D3") || value.starts_with("Qm") {
            return Err(format!("a value that should be no label: {value}"));
        }
        if labels.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(format!("label {key} comes twice"));
        }
        let after = after.strip_prefix('"').unwrap_or(after);
        match after.strip_prefix(',') {
            Some(next) => rest = next,
            None => {
                let after = after.strip_prefix('}').ok_or("labels without their end")?;
                return Ok((labels, after));
            }
        }
    }
}
