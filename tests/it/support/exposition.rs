//! Reads metrics in `OpenMetrics` text with a parser of another project.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

use super::host::text;

/// Returns the value of each sample, by the sample's name and labels.
pub(crate) fn samples_of(exposition: &str) -> BTreeMap<String, f64> {
    let program = r#"
import json, sys
try:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families
except ImportError:
    sys.exit("python has no module prometheus_client: install the Debian package python3-prometheus-client")
samples = {}
for family in text_string_to_metric_families(sys.stdin.read()):
    assert family.documentation, family
    for sample in family.samples:
        labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
        samples[f"{sample.name}{{{labels}}}"] = sample.value
print(json.dumps(samples))
"#;
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-c", program]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut python = python.spawn().unwrap();
    python.stdin.take().unwrap().write_all(exposition.as_bytes()).unwrap();
    let output = python.wait_with_output().unwrap();
    assert!(output.status.success(), "{}\n{exposition}", text(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}
