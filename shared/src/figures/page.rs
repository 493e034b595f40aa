//! From a field to the rows of a page of metrics.

use std::collections::BTreeMap;

/// Declares a struct of figures. What a field is for stands behind its type:
///
/// - `Counter("NAME")`, `Gauge("NAME", "unit")`, `Gauge("NAME"; label = "value")`: a metric. Its help is
///   the documentation of the field; of several fields with one name, that of the first.
/// - `figures`, `figures(label = "value")`: a struct of figures, with a label for all of them.
/// - `shown`: `sepal status` and `sepal top` show it, and no metric does.
macro_rules! figures {
    (
        $(#[doc = $about:literal])+
        pub struct $name:ident {
            $(
                $(#[doc = $help:literal])+
                $(#[serde($($serde:tt)*)])?
                pub $field:ident: $type:ty => $kind:ident $(($($how:tt)*))?,
            )*
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug, Default, PartialEq, ::serde::Serialize, ::serde::Deserialize)]
        #[serde(default)]
        pub struct $name {
            $(
                $(#[doc = $help])+
                $(#[serde($($serde)*)])?
                pub $field: $type,
            )*
        }

        impl $crate::figures::Export for $name {
            fn export(&self, page: &mut $crate::figures::Page) {
                $($crate::figures::page::export!(
                    page, &self.$field, concat!($($help),+), $kind $(($($how)*))?
                );)*
            }
        }
    };
}

/// Puts one field on a page.
macro_rules! export {
    ($page:ident, $of:expr, $help:expr, shown) => {};
    ($page:ident, $of:expr, $help:expr, figures) => {
        $crate::figures::Export::export($of, $page)
    };
    ($page:ident, $of:expr, $help:expr, figures($label:ident = $value:literal)) => {
        $page.labelled((stringify!($label), $value.to_owned()), |page| {
            $crate::figures::Export::export($of, page);
        })
    };
    (
        $page:ident, $of:expr, $help:expr,
        $kind:ident($name:literal $(, $unit:literal)? $(; $label:ident = $value:expr)?)
    ) => {{
        let (kind, unit) = ($crate::figures::MetricKind::$kind, concat!($($unit)?));
        let labels = [$((stringify!($label), $value.to_owned()))?];
        $page.add($crate::figures::Metric { name: $name, help: $help, kind, unit }, labels, $of);
    }};
}

pub(crate) use {export, figures};

/// A family of metrics, as Prometheus knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Without its unit and without `_total`.
    pub name: &'static str,
    /// A documentation comment.
    pub help: &'static str,
    pub kind: MetricKind,
    /// A base unit, in the plural; empty for a number without one.
    pub unit: &'static str,
}

impl Metric {
    /// Its help in one line, without a full stop.
    pub fn help(&self) -> &'static str {
        self.help.trim().trim_end_matches('.')
    }
}

/// How a metric behaves over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

/// A label and its value.
pub type LabelPair = (&'static str, String);

/// One value of a family.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub labels: Vec<LabelPair>,
    pub value: Value,
}

/// What a sample tells.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Number(f64),
    Histogram(Buckets),
}

/// Counts of values by their size.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Buckets {
    /// All values together.
    pub sum: f64,
    /// Upper bounds, each with the number of values between it and the bound before; the last is
    /// infinite.
    pub buckets: Vec<(f64, u64)>,
}

/// A family with its samples.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    pub metric: Metric,
    pub samples: Vec<Sample>,
}

/// What struct of figures puts itself on a page.
pub trait Export {
    /// Adds all of its metrics, those too that have no value now.
    fn export(&self, page: &mut Page);
}

/// What a metric may be: one value, or one for each label.
pub trait Samples {
    /// Adds the values to `samples`; all of them have `labels`, which is as before at the end.
    fn samples(&self, labels: &mut Vec<LabelPair>, samples: &mut Vec<Sample>);
}

/// Whose names are the values of a label.
pub trait Label {
    /// The label.
    const LABEL: &'static str;

    /// As the value of the label.
    fn value(&self) -> String;
}

/// The metrics of one scrape, each family once.
#[derive(Debug, Default)]
pub struct Page {
    families: Vec<Family>,
    /// Labels of what is being added.
    labels: Vec<LabelPair>,
    /// Whether families are added without samples.
    is_describing: bool,
}

impl Page {
    /// All metrics of `figures`.
    pub fn of(figures: &impl Export) -> Page {
        let mut page = Page::default();
        figures.export(&mut page);
        page
    }

    /// All families, in the order in which they were first added.
    pub fn families(&self) -> &[Family] {
        &self.families
    }

    /// Adds what `value` tells of a metric now.
    pub fn add<const LABELS: usize>(
        &mut self,
        metric: Metric,
        labels: [LabelPair; LABELS],
        value: &impl Samples,
    ) {
        let known = self.families.iter().position(|family| family.metric.name == metric.name);
        let index = known.unwrap_or(self.families.len());
        if known.is_none() {
            self.families.push(Family { metric, samples: Vec::new() });
        }
        let outer = self.labels.len();
        self.labels.extend(labels);
        if let (false, Some(family)) = (self.is_describing, self.families.get_mut(index)) {
            value.samples(&mut self.labels, &mut family.samples);
        }
        self.labels.truncate(outer);
    }

    /// Gives a label to all that `add` adds.
    pub fn labelled(&mut self, label: LabelPair, add: impl FnOnce(&mut Page)) {
        self.labels.push(label);
        add(self);
        self.labels.pop();
    }

    /// Adds the families of `T`, of which there may be none now.
    fn describe<T: Export + Default>(&mut self) {
        let outer = std::mem::replace(&mut self.is_describing, true);
        T::default().export(self);
        self.is_describing = outer;
    }
}

impl<K: Label, T: Export + Default> Export for BTreeMap<K, T> {
    fn export(&self, page: &mut Page) {
        page.describe::<T>();
        for (key, figures) in self {
            page.labelled((K::LABEL, key.value()), |page| figures.export(page));
        }
    }
}

impl<K: Label, T: Samples> Samples for BTreeMap<K, T> {
    fn samples(&self, labels: &mut Vec<LabelPair>, samples: &mut Vec<Sample>) {
        for (key, value) in self {
            labels.push((K::LABEL, key.value()));
            value.samples(labels, samples);
            labels.pop();
        }
    }
}

impl<T: Samples> Samples for Option<T> {
    fn samples(&self, labels: &mut Vec<LabelPair>, samples: &mut Vec<Sample>) {
        self.iter().for_each(|value| value.samples(labels, samples));
    }
}

impl Samples for Buckets {
    fn samples(&self, labels: &mut Vec<LabelPair>, samples: &mut Vec<Sample>) {
        samples.push(Sample { labels: labels.clone(), value: Value::Histogram(self.clone()) });
    }
}

/// Numbers and switches are one sample.
macro_rules! one_sample {
    ($($type:ty: $number:expr;)*) => {$(
        impl Samples for $type {
            fn samples(&self, labels: &mut Vec<LabelPair>, samples: &mut Vec<Sample>) {
                let number: fn($type) -> f64 = $number;
                let value = Value::Number(number(*self));
                samples.push(Sample { labels: labels.clone(), value });
            }
        }
    )*};
}

one_sample! {
    f64: |number| number;
    u64: |number| number as f64;
    u32: f64::from;
    bool: |is_on| f64::from(u8::from(is_on));
}
