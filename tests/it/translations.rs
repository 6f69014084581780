//! Tests that the Chinese documents agree with the English documents in everything that is not prose.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Each English document, with its Chinese translation.
const PAGES: [(&str, &str); 4] = [
    ("README.md", "README.zh-CN.md"),
    ("docs/troubleshooting.md", "docs/troubleshooting.zh-CN.md"),
    ("docs/operations.md", "docs/operations.zh-CN.md"),
    ("docs/recipes.md", "docs/recipes.zh-CN.md"),
];

fn read(path: &str) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&file).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn is_chinese(text: &str) -> bool {
    text.chars().any(|letter| ('\u{4e00}'..='\u{9fff}').contains(&letter))
}

/// Returns the words that a translation must not change: code, and numbers outside of code.
fn fixed(text: &str) -> BTreeSet<&str> {
    let code = text.split('`').skip(1).step_by(2);
    let beside = text.split('`').step_by(2);
    let numbers = beside.flat_map(|part| part.split(|letter: char| !letter.is_ascii_digit()));
    code.chain(numbers.filter(|number| !number.is_empty())).collect()
}

/// Removes the comment from a line of a command block. A comment begins with a # at the beginning of a word.
fn command(line: &str) -> &str {
    let mut places = line.match_indices('#').map(|(place, _)| line.split_at(place).0);
    places.find(|before| before.is_empty() || before.ends_with(' ')).unwrap_or(line).trim_end()
}

fn cells(row: &str) -> Vec<&str> {
    row.trim_matches('|').split('|').map(str::trim).collect()
}

/// Returns the headings, commands, rows and pictures of a page, and the fixed words in the prose of each section.
fn outline(page: &str) -> Vec<String> {
    let mut outline = Vec::new();
    let mut prose = String::new();
    let mut is_screen = false;
    // A heading ends the section before it. So another heading is added at the end of the page.
    for line in page.lines().chain(["#"]) {
        if line.starts_with("```") {
            is_screen = !is_screen;
        } else if is_screen {
            outline.push(format!("screen: {line}"));
        } else if line.starts_with('#') {
            outline.push(format!("prose: {:?}", fixed(&prose)));
            prose.clear();
            let title = line.trim_start_matches('#');
            outline.push(format!("{}: {:?}", line.strip_suffix(title).unwrap_or_default(), fixed(title)));
        } else if let Some(block) = line.strip_prefix("    ") {
            outline.push(format!("command: {}", command(block)));
        } else if line.starts_with('|') {
            let cells = cells(line);
            outline.push(format!("row of {}: {:?}: {:?}", cells.len(), fixed(cells[0]), fixed(line)));
        } else if line.starts_with("![") {
            outline.push(format!("picture: {}", line.split("](").nth(1).unwrap()));
        } else {
            prose += line;
            prose += " ";
        }
    }
    outline
}

#[test]
fn both_languages_have_the_same_outline() {
    for (english, chinese) in PAGES {
        let (english_outline, chinese_outline) = (outline(&read(english)), outline(&read(chinese)));
        for (one, other) in english_outline.iter().zip(&chinese_outline) {
            assert_eq!(one, other, "{english} and {chinese}");
        }
        assert_eq!(english_outline.len(), chinese_outline.len(), "{english} and {chinese}");
    }
}

#[test]
fn an_outline_is_all_but_the_prose() {
    let page = "# Title\n\nSome `code`, of 12\nwords.\n\n## Error 46, `x`\n\n    run it   # a comment\n    $#\n\n\
                ![a picture](it.svg)\n\n```text\n    # of 12\n```\n\n| key | meaning |\n|---|---|\n| `a` 1 | see `b` |\n";
    let expected = [
        "prose: {}",
        "#: {}",
        "prose: {\"12\", \"code\"}",
        "##: {\"46\", \"x\"}",
        "command: run it",
        "command: $#",
        "picture: it.svg)",
        "screen:     # of 12",
        "row of 2: {}: {}",
        "row of 2: {}: {}",
        "row of 2: {\"1\", \"a\"}: {\"1\", \"a\", \"b\"}",
        "prose: {}",
        "#: {}",
    ];
    assert_eq!(outline(page), expected);
}

#[test]
fn each_language_leads_to_the_other() {
    for (english, chinese) in PAGES {
        let name = |path: &str| Path::new(path).file_name().unwrap().to_str().unwrap().to_owned();
        let first_line = |path: &str| read(path).lines().next().unwrap().to_owned();
        assert_eq!(first_line(english), format!("English | [简体中文]({})", name(chinese)));
        assert_eq!(first_line(chinese), format!("[English]({}) | 简体中文", name(english)));
    }
    for (english, chinese) in &PAGES[1..] {
        assert!(read("README.md").contains(&format!("]({english})")), "{english}");
        assert!(read("README.zh-CN.md").contains(&format!("]({chinese})")), "{chinese}");
    }
}

fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = kept.chars().filter(|letter| letter.is_alphanumeric() || [' ', '-', '_'].contains(letter));
    kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

#[test]
fn every_link_leads_somewhere() {
    for path in PAGES.into_iter().flat_map(|(english, chinese)| [english, chinese]) {
        let page = read(path);
        let links = page.split("](").skip(1).map(|rest| rest.split(')').next().unwrap());
        for link in links.filter(|link| !link.starts_with("http")) {
            // A link has the form FILE, #PLACE or FILE#PLACE.
            let (file, place) = link.split_once('#').unwrap_or((link, ""));
            let file = if file.is_empty() { path.into() } else { Path::new(path).with_file_name(file) };
            let target = read(file.to_str().unwrap());
            let mut headings = target.lines().filter(|line| line.starts_with('#'));
            assert!(place.is_empty() || headings.any(|heading| anchor(heading) == place), "{path}: {link}");
        }
    }
}

/// Words in the sources of `yunion-mpsctl doctor` that have the form of a finding's name and name no finding.
const NO_FINDINGS: [&str; 10] = [
    "bad-setting",
    "control-group",
    "exit-code",
    "kebab-case",
    "mps-daemon",
    "not-found",
    "nvidia-cuda-mps",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "start-limit-hit",
];

fn looks_like_a_name(text: &str) -> bool {
    text.contains('-')
        && text
            .split('-')
            .all(|word| !word.is_empty() && word.bytes().all(|letter| letter.is_ascii_lowercase()))
}

/// Returns the names of the findings in the sources of `yunion-mpsctl doctor`, each with the severities that stand before it.
fn findings() -> BTreeMap<String, BTreeSet<&'static str>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/mpsctl/src/doctor");
    let mut sources: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| format!("crates/mpsctl/src/doctor/{}", entry.unwrap().file_name().to_str().unwrap()))
        .collect();
    let shared = ["config/agent.rs", "plan/gpu_plan.rs", "plan/warnings.rs"];
    sources.extend(shared.map(|source| format!("crates/common/src/{source}")));
    let mut findings: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for source in sources {
        let text = read(&source);
        let code = text.split("#[cfg(test)]").next().unwrap().lines();
        let code: Vec<&str> = code.map(str::trim).filter(|line| !line.starts_with("//")).collect();
        let code = code.join("\n");
        let pieces: Vec<&str> = code.split('"').collect();
        for pair in pieces.windows(2).filter(|pair| looks_like_a_name(pair[1])) {
            let severities = findings.entry(pair[1].to_owned()).or_default();
            let before = pair[0].trim_end();
            for (severity, variant) in [("error", "Error"), ("warning", "Warning"), ("info", "Info")] {
                if before.ends_with(&format!("{severity}("))
                    || before.ends_with(&format!("Severity::{variant},"))
                {
                    severities.insert(severity);
                }
            }
        }
    }
    for word in NO_FINDINGS {
        assert!(findings.remove(word).is_some(), "doctor's sources no longer have {word}");
    }
    assert!(findings.len() > 70, "{findings:?}");
    findings
}

#[test]
fn every_finding_of_doctor_is_explained_once() {
    let findings = findings();
    for path in [PAGES[1].0, PAGES[1].1] {
        let page = read(path);
        let rows = page.lines().filter(|line| line.starts_with("| `")).map(cells);
        let explained: Vec<(&str, &str)> =
            rows.map(|row| (row[0].trim_matches('`'), *row.get(1).unwrap())).collect();
        for (name, severities) in &findings {
            let rows: Vec<_> = explained.iter().filter(|(explained, _)| explained == name).collect();
            let [(_, severity)] = rows[..] else { panic!("{path}: {} rows for {name}", rows.len()) };
            let words = ["error", "warning", "info"].into_iter().filter(|word| severity.contains(word));
            let words: BTreeSet<&str> = words.collect();
            assert!(!words.is_empty() && words.is_superset(severities), "{path}: {name} is {severities:?}");
            assert!(severities.is_empty() || words == *severities, "{path}: {name} is {severities:?}");
            assert_eq!(page.matches(&format!("`{name}`")).count(), 1, "{path}: {name}");
        }
        for (name, _) in explained {
            assert!(findings.contains_key(name), "{path}: doctor finds no {name}");
        }
    }
}

fn chinese_manual(name: &str) -> String {
    read(&format!("packaging/man/zh_CN/{name}")).replace("\\-", "-")
}

fn terms(part: &str) -> Vec<&str> {
    let lines: Vec<&str> = part.lines().collect();
    lines.windows(2).filter(|pair| pair[0] == ".TP").map(|pair| pair[1]).collect()
}

/// Returns a key of the configuration and its default. The page writes the default as `default: VALUE` in its own language.
fn key(key: &str, default: &str) -> (String, Option<String>) {
    let default = default.split_once(": ").map(|(_, default)| default.trim_end_matches(')').to_owned());
    (key.to_owned(), default)
}

fn keys_of_manual() -> Vec<(String, Option<String>)> {
    let page = read("packaging/man/yunion-mps-host.conf.5");
    let items = page.lines().filter_map(|line| line.strip_prefix(".It Ic "));
    let items = items.map(|item| item.split_once(" Pq ").unwrap_or((item, "")));
    let keys: Vec<_> = items.map(|(name, default)| key(name, default)).collect();
    assert!(keys.len() > 20, "{keys:?}");
    keys
}

#[test]
fn the_manual_of_the_configuration_has_the_same_keys() {
    let page = chinese_manual("yunion-mps-host.conf.5");
    // In the Chinese manual page, keys are bold and files are italic.
    let keys = terms(&page).into_iter().filter_map(|term| term.strip_prefix("\\fB")?.split_once("\\fR"));
    let keys: Vec<_> = keys.map(|(name, default)| key(name, default)).collect();
    assert_eq!(keys, keys_of_manual());
}

fn options_in(part: &str) -> BTreeSet<String> {
    let is_of_option = |letter: char| letter.is_ascii_lowercase() || letter == '-';
    let words = terms(part).into_iter().flat_map(|term| term.split(|letter| !is_of_option(letter)));
    words.filter_map(|word| word.strip_prefix("--")).map(str::to_owned).collect()
}

fn options_of(command: &clap::Command) -> BTreeSet<String> {
    let options = command.get_arguments().filter(|option| !option.is_hide_set());
    options.filter_map(|option| option.get_long().map(str::to_owned)).collect()
}

#[test]
fn the_manual_of_yunion_mps_daemon_has_every_option() {
    let mut command = common::arguments::command();
    command.build();
    assert_eq!(options_in(&chinese_manual("yunion-mps-daemon.8")), options_of(&command));
}

#[test]
fn the_manual_of_the_device_plugin_has_every_option() {
    let mut command = device_plugin::command();
    command.build();
    assert_eq!(options_in(&chinese_manual("yunion-mps-device-plugin.8")), options_of(&command));
}

#[test]
fn the_manual_of_yunion_mpsctl_has_every_subcommand_and_option() {
    let page = chinese_manual("yunion-mpsctl.1");
    let (beginning, subcommands) = page.split_once("\n.SH 子命令\n").unwrap();
    let (subcommands, _) = subcommands.split_once("\n.SH ").unwrap();
    let (groups, _) = subcommands.split_once("\n.SS ").unwrap();
    let groups: Vec<String> = groups
        .lines()
        .filter(|line| line.starts_with(|letter: char| letter.is_ascii_lowercase()))
        .map(str::to_owned)
        .collect();
    assert_eq!(groups, mpsctl::GROUPS.map(|(_, names)| names.join(", ")));
    let sections = subcommands.split("\n.SS ").skip(1).map(|section| section.split_once('\n').unwrap());
    let described: Vec<(&str, BTreeSet<String>)> =
        sections.map(|(name, text)| (name, options_in(text))).collect();
    let mut command = mpsctl::command();
    command.build();
    let all = command.get_subcommands().filter(|subcommand| subcommand.get_name() != "help");
    let mut all: Vec<(&str, BTreeSet<String>)> =
        all.map(|subcommand| (subcommand.get_name(), options_of(subcommand))).collect();
    // The manual page explains `--help` once for all commands, at its beginning.
    for (name, options) in &mut all {
        assert!(options.remove("help"), "{name}");
    }
    assert_eq!(described, all);
    assert_eq!(options_in(beginning), options_of(&command));
}

/// Returns each key in host.conf, with the comment above it.
fn keys_of_host_conf() -> Vec<(String, String)> {
    let text = read("config/host.conf");
    let with_key = |paragraph: &str| {
        let (comment, line) = paragraph.trim_end().rsplit_once('\n')?;
        let (key, _) = line.strip_prefix('#')?.split_once(": ")?;
        (!key.contains(' ')).then(|| (key.to_owned(), comment.to_owned()))
    };
    text.split("\n\n").filter_map(with_key).collect()
}

/// Returns each key of an entry in the device file, with its explanation. An explanation is a line `#   KEY   TEXT` with the
/// lines below it that are indented further.
fn keys_of_device_file() -> Vec<(String, String)> {
    let text = read("config/host_container_device.yml");
    let mut keys: Vec<(String, String)> = Vec::new();
    for line in text.lines() {
        match line.strip_prefix("#   ") {
            Some(line) if !line.starts_with(' ') => {
                let (key, explained) = line.split_once("  ").unwrap_or_else(|| panic!("{line}"));
                keys.push((key.to_owned(), explained.trim().to_owned()));
            }
            Some(line) if !keys.is_empty() => {
                let (_, explained) = keys.last_mut().unwrap();
                *explained += &format!("\n{}", line.trim());
            }
            _ => {}
        }
    }
    keys
}

#[test]
fn the_examples_explain_every_key_in_both_languages() {
    let (host_conf, device_file) = (keys_of_host_conf(), keys_of_device_file());
    let names = |keys: &[(String, String)]| keys.iter().map(|(key, _)| key.clone()).collect::<Vec<_>>();
    let manual: Vec<String> = keys_of_manual().into_iter().map(|(key, _)| key).collect();
    assert_eq!([names(&host_conf), names(&device_file)].concat(), manual);
    for (key, comment) in host_conf.into_iter().chain(device_file) {
        // The English comment of a key comes first, then the Chinese comment.
        let languages: Vec<bool> = comment.lines().map(is_chinese).collect();
        assert!(languages.is_sorted(), "{key}: {comment}");
        assert_eq!((languages.first(), languages.last()), (Some(&false), Some(&true)), "{key}: {comment}");
    }
}
