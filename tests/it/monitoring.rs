//! Checks the files for monitoring with Prometheus' own programs: the metrics for `node_exporter`, the alerts, the dashboard,
//! and the systemd units that write the metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use regex::Regex;
use rustix::process::Signal;
use serde_json::Value;

use crate::support::exposition::samples_of;
use crate::support::fetched::fetched;
use crate::support::host::{Host, binaries, process_state, text};
use crate::support::wait::wait_for;

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &str) -> String {
    fs::read_to_string(source(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Runs a program with `input` on stdin. Returns true if the program has succeeded, and its output.
fn judged(command: &mut Command, input: &str) -> (bool, String) {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn();
    let mut child = child.unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/deps.sh installs it"));
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.success(), text(&output))
}

fn remarks(metrics: &str) -> String {
    let (accepted, said) = judged(Command::new(fetched("promtool")).args(["check", "metrics"]), metrics);
    if accepted { said } else { format!("refused: {said}") }
}

/// Returns the recorded files with this name, with their paths. Files below `broken` are of a board with a lost GPU.
fn recorded(file: &str) -> Vec<(PathBuf, String)> {
    let outputs = fs::read_dir(source("tests/golden")).unwrap().map(|entry| entry.unwrap().path());
    let boards = outputs.filter(|path| !path.ends_with("help"));
    let directories = boards.flat_map(|board| [board.join("broken"), board]);
    let files: Vec<PathBuf> =
        directories.map(|board| board.join(file)).filter(|file| file.exists()).collect();
    assert!(files.len() >= 4, "{files:?}");
    files.into_iter().map(|file| (file.clone(), fs::read_to_string(file).unwrap())).collect()
}

/// Returns the samples that a parser of another project reads from Prometheus' older text format, each with its value and its
/// type.
fn parsed_as_the_older_format(exposition: &str) -> BTreeMap<String, (f64, String)> {
    let program = r#"
import json, sys
from prometheus_client.parser import text_string_to_metric_families
samples = {}
for family in text_string_to_metric_families(sys.stdin.read()):
    assert family.documentation, family
    for sample in family.samples:
        labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
        samples[f"{sample.name}{{{labels}}}"] = (sample.value, family.type)
print(json.dumps(samples))
"#;
    let (parsed, said) = judged(Command::new("/usr/bin/python3").args(["-c", program]), exposition);
    assert!(parsed, "{said}\n{exposition}");
    serde_json::from_str(&said).unwrap()
}

#[test]
fn promtool_has_no_remark_about_the_metrics() {
    for (file, metrics) in recorded("metrics-prometheus.txt") {
        assert_eq!(remarks(&metrics), "", "{}", file.display());
        let typed = parsed_as_the_older_format(&metrics);
        for (sample, (_, kind)) in &typed {
            let expected = if sample.contains("_total{") { "counter" } else { "gauge" };
            assert_eq!(kind, expected, "{sample} of {}", file.display());
        }
        // The older and the newer format have the same samples, except for those about single clients.
        let of_clients = ["yunion_mps_client_memory_used_bytes{", "yunion_mps_clients_left_out{"];
        let mut older: BTreeMap<String, f64> =
            typed.into_iter().map(|(sample, (value, _))| (sample, value)).collect();
        older.retain(|sample, _| !of_clients.iter().any(|name| sample.starts_with(name)));
        let newer = fs::read_to_string(file.with_file_name("metrics.txt")).unwrap();
        assert_eq!(older, samples_of(&newer), "{}", file.display());
    }
}

/// Shows that promtool finds wrong metrics. Promtool must complain about the metric names of the newer format.
#[test]
fn promtool_has_remarks_about_wrong_metrics() {
    for (_, newer) in recorded("metrics.txt") {
        assert!(remarks(&newer).contains("yunion_mps_faults"), "{}", remarks(&newer));
    }
    assert!(remarks("x_ms 1\n").contains("no help text"), "{}", remarks("x_ms 1\n"));
}

#[test]
fn the_metrics_of_a_service_that_is_down_are_metrics_too() {
    let host = Host::new("h200");
    let output = host.mpsctl(&["metrics", "--format", "prometheus", "--clients"]);
    let down = text(&output);
    assert!(output.status.success(), "{down}");
    assert_eq!(remarks(&down), "");
    assert_eq!(parsed_as_the_older_format(&down).into_keys().collect::<Vec<_>>(), ["yunion_mps_up{}"]);
}

fn metrics() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (_, metrics) in recorded("metrics-prometheus.txt") {
        let samples = metrics.lines().filter(|line| !line.starts_with('#'));
        names.extend(samples.map(|line| line.split(['{', ' ']).next().unwrap().to_owned()));
    }
    names
}

fn assert_known(text: &str) {
    let known = metrics();
    let named = Regex::new("yunion_mps_[a-z_]+").unwrap();
    for name in named.find_iter(text).map(|found| found.as_str()) {
        assert!(known.contains(name), "there is no {name}");
    }
}

fn promtool(arguments: &[&str], directory: &Path) {
    let (accepted, said) =
        judged(Command::new(fetched("promtool")).args(arguments).current_dir(directory), "");
    assert!(accepted, "promtool {arguments:?}: {said}");
}

#[test]
fn the_alerts_fire_and_stay_silent_as_they_should() {
    let docs = source("docs");
    promtool(&["check", "rules", "alerts.yml"], &docs);
    promtool(&["test", "rules", "alerts.test.yml"], &docs);
    assert_known(&read("docs/alerts.yml"));
}

/// Each alert needs a test case in which it fires, and a test case in which it does not. The alert's text must name a command.
#[test]
fn every_alert_has_both_cases_and_a_command() {
    let rules = read("docs/alerts.yml");
    let rules: Vec<&str> = rules.split("- alert: ").skip(1).collect();
    assert!(rules.len() > 10, "{rules:?}");
    let cases = read("docs/alerts.test.yml");
    let cases: Vec<&str> = cases.split("alertname: ").skip(1).collect();
    for rule in rules {
        let name = rule.lines().next().unwrap();
        let of_it: Vec<&&str> =
            cases.iter().filter(|case| case.split([',', '\n']).next() == Some(name)).collect();
        assert!(of_it.iter().any(|case| case.contains("exp_labels: ")), "{name} fires in no case");
        let silent = |case: &&&str| case.lines().next().unwrap().ends_with("exp_alerts: []}");
        assert!(of_it.iter().any(silent), "{name} stays silent in no case");
        let severities = ["critical", "warning", "info"].map(|severity| format!("severity: {severity}\n"));
        assert!(severities.iter().any(|severity| rule.contains(severity)), "{rule}");
        let description = rule.split_once("description: ").unwrap().1;
        let commands = ["yunion-mpsctl ", "journalctl ", "systemctl ", "busctl "];
        assert!(commands.iter().any(|command| description.contains(command)), "{rule}");
    }
}

fn dashboard() -> Value {
    serde_json::from_str(&read("docs/grafana.json")).unwrap()
}

/// Returns the queries of the dashboard's panels. Grafana's variables are replaced by example values.
fn queries(dashboard: &Value) -> Vec<String> {
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let variables = [("$__rate_interval", "5m"), ("$instance", "gpu1|gpu2"), ("$gpu", "[0-9a-f:.]+")];
    let query = |target: &Value| {
        let query = target["expr"].as_str().unwrap().to_owned();
        variables.iter().fold(query, |query, (variable, value)| query.replace(variable, value))
    };
    targets.map(query).collect()
}

/// Returns the samples of a recorded file in the form of promtool's rule tests, with the labels that Prometheus adds.
fn input_series(file: &str, instance: &str) -> Vec<Value> {
    let metrics = read(file);
    let samples = metrics.lines().filter(|line| !line.starts_with('#'));
    let series = |sample: &str| {
        let (series, value) = sample.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let comma = if labels == "}" { "" } else { "," };
        let series = format!("{name}{{instance=\"{instance}\",job=\"node\"{comma}{labels}");
        serde_json::json!({"series": series, "values": format!("{value}+0x10")})
    };
    samples.map(series).collect()
}

/// Prometheus evaluates each query of the dashboard on the metrics of two hosts, one with a lost GPU. Each query except the
/// search for bypasses must have a result.
#[test]
fn prometheus_answers_every_query_of_the_dashboard() {
    let dashboard = dashboard();
    let mut queries = queries(&dashboard);
    assert!(queries.len() > 20, "{queries:?}");
    // A variable of the dashboard has a query of the form `label_values(METRIC, LABEL)`.
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        if let Some(query) = variable["query"]["query"].as_str() {
            let (metric, label) = query
                .strip_prefix("label_values(")
                .unwrap()
                .strip_suffix(')')
                .unwrap()
                .rsplit_once(", ")
                .unwrap();
            queries.push(format!("count by ({label}) ({})", metric.replace("$instance", "gpu1")));
        }
    }
    let (mut rules, mut expected) = (Vec::new(), Vec::new());
    for (number, query) in queries.iter().enumerate() {
        assert_known(query);
        assert!(!query.contains('$'), "a variable without a value: {query}");
        rules.push(serde_json::json!({"record": format!("dashboard:query{number}"), "expr": query}));
        // A query that ends with `> 0` searches for bypasses. The two hosts have none.
        if !query.ends_with(" > 0") {
            expected.push(serde_json::json!({"labels": format!("dashboard:query{number}"), "value": 1}));
        }
    }
    let rules = serde_json::json!({"groups": [{"name": "dashboard", "rules": rules}]});
    let series = [
        input_series("tests/golden/mixed/metrics-prometheus.txt", "gpu1"),
        input_series("tests/golden/h200x8/broken/metrics-prometheus.txt", "gpu2"),
    ];
    let test = serde_json::json!({
        "rule_files": ["dashboard.yml"],
        "tests": [{
            "interval": "1m",
            "input_series": series.concat(),
            "promql_expr_test": [{
                "expr": "group by (__name__) ({__name__=~\"dashboard:.*\"})",
                "eval_time": "9m",
                "exp_samples": expected,
            }],
        }],
    });
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("dashboard.yml"), rules.to_string()).unwrap();
    fs::write(directory.path().join("test.yml"), test.to_string()).unwrap();
    promtool(&["check", "rules", "dashboard.yml"], directory.path());
    promtool(&["test", "rules", "test.yml"], directory.path());
}

/// The dashboard shows the clients and the memory of whole GPUs beside those of slices, since clients without a slice count for
/// the GPU only. It shows each limit too, since slices may differ in size.
#[test]
fn the_dashboard_shows_all_that_is_taken_and_left() {
    let queries = queries(&dashboard());
    let alone = |name: &str| {
        let whole = format!("yunion_mps_{name}{{instance=~\"gpu1|gpu2\",gpu=~\"[0-9a-f:.]+\"}}");
        assert!(queries.contains(&whole), "no panel shows {name}: {queries:#?}");
    };
    for of in ["clients", "max_clients", "memory_used_bytes"] {
        alone(&format!("gpu_{of}"));
        alone(&format!("device_{of}"));
    }
    alone("gpu_memory_bytes");
    alone("device_memory_limit_bytes");
}

/// Grafana reports no error for two panels that overlap or have the same id. It draws one panel over the other, or confuses
/// them.
#[test]
fn the_dashboard_is_well_formed() {
    let dashboard = dashboard();
    let panels = dashboard["panels"].as_array().unwrap();
    let variable = serde_json::json!({"type": "prometheus", "uid": "${datasource}"});
    let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "two panels have the id of {panel:#}");
        assert!(!panel["title"].as_str().unwrap().is_empty());
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|key| panel["gridPos"][key].as_u64().unwrap());
        assert!(x + w <= 24 && w > 0 && h > 0, "{panel:#}");
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(cells.insert(cell), "{} lies over another panel", panel["title"]);
        }
        if panel["type"] == "row" {
            assert_eq!((x, w, h), (0, 24, 1), "{panel:#}");
            continue;
        }
        assert_eq!(panel["datasource"], variable, "{panel:#}");
        let targets = panel["targets"].as_array().unwrap();
        assert!(targets.iter().all(|target| target["datasource"] == variable), "{panel:#}");
        let names: BTreeSet<&str> = targets.iter().map(|target| target["refId"].as_str().unwrap()).collect();
        assert_eq!(names.len(), targets.len(), "{panel:#}");
    }
    let rows = panels.iter().filter(|panel| panel["type"] == "row").count();
    assert_eq!(rows, 5);
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let names: Vec<&str> = variables.iter().map(|variable| variable["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["datasource", "instance", "gpu"]);
    assert_eq!((&variables[0]["type"], &variables[0]["query"]), (&"datasource".into(), &"prometheus".into()));
}

/// The query in docs/metrics.md joins container ids of the service with container names of cAdvisor. It must find the
/// container.
#[test]
fn the_documented_join_with_cadvisor_finds_the_container() {
    let documentation = read("docs/metrics.md");
    let query = documentation.split_once("```promql\n").unwrap().1.split_once("```").unwrap().0;
    assert_known(query);
    let id = "0123456789abcdef".repeat(4);
    let test = serde_json::json!({
        "tests": [{
            "interval": "1m",
            "input_series": [
                {"series": format!("yunion_mps_client_memory_used_bytes{{instance=\"a\",pid=\"1\",container_id=\"{id}\"}}"), "values": "4"},
                {"series": format!("yunion_mps_client_memory_used_bytes{{instance=\"a\",pid=\"2\",container_id=\"{id}\"}}"), "values": "3"},
                {"series": "yunion_mps_client_memory_used_bytes{instance=\"a\",pid=\"3\",container_id=\"\"}", "values": "9"},
                {"series": format!("container_last_seen{{instance=\"a\",id=\"/system.slice/docker-{id}.scope\",name=\"train\"}}"), "values": "1795264496"},
                {"series": "container_last_seen{instance=\"a\",id=\"/\",name=\"\"}", "values": "1795264496"},
                {"series": "container_last_seen{instance=\"a\",id=\"/system.slice\",name=\"other\"}", "values": "1795264496"},
            ],
            "promql_expr_test": [{
                "expr": query,
                "eval_time": "0m",
                "exp_samples": [{"labels": format!("{{instance=\"a\",container_id=\"{id}\",name=\"train\"}}"), "value": 7}],
            }],
        }],
    });
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("test.yml"), test.to_string()).unwrap();
    promtool(&["test", "rules", "test.yml"], directory.path());
}

/// Returns the arguments of yunion-mpsctl in yunion-mps-metrics.service, with its variables replaced as systemd does.
fn unit_command(directory: &Path, options: &str) -> Vec<String> {
    let unit = read("systemd/yunion-mps-metrics.service");
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/yunion-mpsctl ")).unwrap();
    let command = start.replace("${DIRECTORY}", directory.to_str().unwrap()).replace("$OPTIONS", options);
    command.split_ascii_whitespace().map(str::to_owned).collect()
}

/// The metrics file gets its name only when it is complete, and all users can read it.
#[test]
fn the_textfile_is_written_as_a_whole() {
    let mut host = Host::serving("h200");
    let directory = tempfile::tempdir().unwrap();
    let run = |host: &Host, options| {
        let command = unit_command(directory.path(), options);
        host.mpsctl(&command.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let names = || -> Vec<String> {
        let entries = fs::read_dir(&directory).unwrap().flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
    };
    let file = directory.path().join("yunion-mps.prom");
    let prom = || fs::read_to_string(&file).unwrap();
    for (options, has_clients) in [("", false), ("--clients", true)] {
        let output = run(&host, options);
        assert!(output.status.success() && text(&output).is_empty(), "{}", text(&output));
        assert_eq!(names(), ["yunion-mps.prom"]);
        assert_eq!(remarks(&prom()), "");
        assert_eq!(prom().contains("yunion_mps_clients_left_out 0"), has_clients);
        assert_eq!(parsed_as_the_older_format(&prom())["yunion_mps_up{}"].0, 1.0);
    }
    assert_eq!(host.stop().code(), Some(0));
    assert!(run(&host, "").status.success());
    let down = prom();
    assert_eq!(parsed_as_the_older_format(&down)["yunion_mps_up{}"].0, 0.0);
    // If the command can't collect metrics, the last file stays.
    host.stop_bus();
    assert_eq!(run(&host, "").status.code(), Some(1));
    assert_eq!((names(), prom()), (vec!["yunion-mps.prom".to_owned()], down));
}

/// The service ends while `yunion-mpsctl metrics` waits for its answer. The metrics then say that the service does not run.
#[test]
fn a_service_that_ends_while_it_is_asked_is_down() {
    let mut host = Host::serving("h200");
    host.signal(Signal::STOP);
    let mut command = host.command(binaries().join("yunion-mpsctl"));
    let asking = command.arg("metrics").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // `yunion-mpsctl metrics` waits in state S for the stopped service.
    wait_for("its question", || (process_state(asking.id()) == Some('S')).then_some(()));
    host.signal(Signal::KILL);
    host.ended();
    let output = asking.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(samples_of(&text(&output)), BTreeMap::from([("yunion_mps_up{}".to_owned(), 0.0)]));
}

#[test]
fn a_textfile_that_cannot_be_written_is_named() {
    let host = Host::new("h200");
    let output = host.mpsctl(&["metrics", "--to", "/nowhere/a\u{1b}[2J.prom"]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output);
    assert_eq!(
        said,
        "yunion-mpsctl: can't write /nowhere/a\u{fffd}[2J.prom: No such file or directory (os error 2)\n"
    );
}

/// systemd has no complaint about the units that write the metrics. docs/metrics.md states the exposure level that systemd
/// computes for yunion-mps-metrics.service.
#[test]
fn the_units_for_the_textfile_are_well_formed_and_closed() {
    let directory = tempfile::tempdir().unwrap();
    let installed = binaries().join("yunion-mpsctl");
    for unit in ["yunion-mps-metrics.service", "yunion-mps-metrics.timer"] {
        let text = read(&format!("systemd/{unit}"));
        let text = text.replace("=/usr/bin/yunion-mpsctl ", &format!("={} ", installed.display()));
        fs::write(directory.path().join(unit), text).unwrap();
    }
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no", "yunion-mps-metrics.service", "yunion-mps-metrics.timer"]);
    let (_, said) = judged(verify.current_dir(&directory), "");
    let complaints: Vec<&str> = said.lines().filter(|line| line.contains("yunion-mps-metrics")).collect();
    assert_eq!(complaints, [""; 0]);

    let mut security = Command::new("systemd-analyze");
    security.args(["security", "--offline=true", "./yunion-mps-metrics.service"]);
    let (_, said) = judged(security.current_dir(&directory), "");
    let overall = said.lines().last().unwrap();
    let exposure = overall.split_ascii_whitespace().find_map(|word| word.parse::<f32>().ok());
    let exposure = exposure.unwrap_or_else(|| panic!("no figure in: {said}"));
    let documentation = read("docs/metrics.md");
    let documented = documentation.split_once("exposure ").unwrap().1.split(')').next().unwrap();
    let documented: f32 = documented.parse().unwrap();
    assert!(
        (documented - exposure).abs() < 0.25,
        "docs/metrics.md says {documented}, systemd-analyze {exposure}"
    );
}
