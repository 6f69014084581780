//! Metrics as text, in the two formats that collectors read.

use clap::ValueEnum;

/// The format in which metrics are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExpositionFormat {
    /// `OpenMetrics` 1.0, for Telegraf and collectors of its kind
    Openmetrics,
    /// Prometheus' text format 0.0.4, for the textfile collector of `node_exporter`
    Prometheus,
}

pub(super) type Labels = Vec<(&'static str, String)>;

/// The units in which the name of a metric may end.
const UNITS: [&str; 3] = ["bytes", "ratio", "seconds"];

#[derive(Debug)]
pub(super) struct Family {
    /// The name of the metric without the prefix `yunion_mps_`. A metric with a name that ends in `_total` is a counter,
    /// and every other metric is a gauge. The name of a gauge with a unit ends in the unit.
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) samples: Vec<(Labels, f64)>,
}

/// The text of all metrics. A metric without a sample is omitted.
pub(super) fn exposition(families: &[Family], format: ExpositionFormat) -> String {
    let mut text = String::new();
    for family in families.iter().filter(|family| !family.samples.is_empty()) {
        family.append_to(&mut text, format);
    }
    if format == ExpositionFormat::Openmetrics {
        text.push_str("# EOF\n");
    }
    text
}

impl Family {
    fn append_to(&self, text: &mut String, format: ExpositionFormat) {
        let name = format!("yunion_mps_{}", self.name);
        let without_total = name.strip_suffix("_total");
        let kind = if without_total.is_some() { "counter" } else { "gauge" };
        // In the Prometheus format, a counter and its samples have the same name. OpenMetrics describes a counter by the name
        // without `_total`.
        let described = match format {
            ExpositionFormat::Openmetrics => without_total.unwrap_or(&name),
            ExpositionFormat::Prometheus => &name,
        };
        *text += &format!("# HELP {described} {}\n# TYPE {described} {kind}\n", self.help);
        let unit = name.rsplit('_').next().filter(|word| UNITS.contains(word));
        if let (Some(unit), ExpositionFormat::Openmetrics) = (unit, format) {
            *text += &format!("# UNIT {described} {unit}\n");
        }
        for (labels, value) in &self.samples {
            *text += &format!("{name}{} {value}\n", braces(labels));
        }
    }
}

fn braces(labels: &Labels) -> String {
    let label = |(name, value): &(&str, String)| {
        let value = value.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n");
        format!("{name}=\"{value}\"")
    };
    let labels: Vec<String> = labels.iter().map(label).collect();
    if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn families() -> [Family; 3] {
        let odd = vec![("gpu", "0".to_owned()), ("user", "a\"b\\c\nd".to_owned())];
        [
            Family { name: "faults_total", help: "Faults.", samples: vec![(Vec::new(), 2.0)] },
            Family {
                name: "memory_bytes",
                help: "Memory.",
                samples: vec![(odd, 24_159_191_040.0), (vec![("gpu", String::new())], 0.25)],
            },
            Family { name: "none", help: "None.", samples: Vec::new() },
        ]
    }

    #[test]
    fn openmetrics_has_units_and_an_end() {
        assert_eq!(
            exposition(&families(), ExpositionFormat::Openmetrics),
            "# HELP yunion_mps_faults Faults.\n\
             # TYPE yunion_mps_faults counter\n\
             yunion_mps_faults_total 2\n\
             # HELP yunion_mps_memory_bytes Memory.\n\
             # TYPE yunion_mps_memory_bytes gauge\n\
             # UNIT yunion_mps_memory_bytes bytes\n\
             yunion_mps_memory_bytes{gpu=\"0\",user=\"a\\\"b\\\\c\\nd\"} 24159191040\n\
             yunion_mps_memory_bytes{gpu=\"\"} 0.25\n\
             # EOF\n"
        );
    }

    #[test]
    fn the_older_format_describes_a_counter_by_the_name_of_its_samples() {
        assert_eq!(
            exposition(&families(), ExpositionFormat::Prometheus),
            "# HELP yunion_mps_faults_total Faults.\n\
             # TYPE yunion_mps_faults_total counter\n\
             yunion_mps_faults_total 2\n\
             # HELP yunion_mps_memory_bytes Memory.\n\
             # TYPE yunion_mps_memory_bytes gauge\n\
             yunion_mps_memory_bytes{gpu=\"0\",user=\"a\\\"b\\\\c\\nd\"} 24159191040\n\
             yunion_mps_memory_bytes{gpu=\"\"} 0.25\n"
        );
    }
}
