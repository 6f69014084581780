//! Tests of the installed files, the manual pages, the completions and the documents.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

const UNITS: [&str; 3] =
    ["yunion-mps-daemon.service", "yunion-mps-metrics.service", "yunion-mps-metrics.timer"];

fn programs() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_yunion-mps-daemon")).parent().unwrap()
}

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/deps.sh installs it"))
}

fn printed(command: &mut Command) -> String {
    let output = run(command);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && complaints.is_empty(), "{command:?}: {complaints}");
    String::from_utf8(output.stdout).unwrap()
}

/// Makes the manual pages and completions. `golden` has the recorded outputs that the manual pages show.
fn pages(golden: &Path) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let program = programs().join("yunion-mps-pages");
    assert!(program.exists(), "{} is not built: cargo build --workspace", program.display());
    printed(Command::new(program).arg(directory.path()).arg(golden));
    directory
}

fn pages_as_shipped() -> TempDir {
    pages(&source("tests/golden/tesla-p40"))
}

fn installed(prefix: Option<&str>, root: &Path) -> Vec<String> {
    installed_by(&mut Command::new(source("packaging/install.sh")), prefix, root)
}

/// Runs an installation command, and returns the sorted paths of the installed files, each with its mode.
fn installed_by(install: &mut Command, prefix: Option<&str>, root: &Path) -> Vec<String> {
    let pages = pages_as_shipped();
    fs::write(pages.path().join("copyright"), "").unwrap();
    install.env("DESTDIR", root).env("BIN", programs()).env("PAGES", pages.path());
    // Oh My Zsh exports `ZSH` with the directory of its own files. install.sh must not take this variable for the directory of
    // completions.
    install.env("ZSH", root.join("home/.oh-my-zsh")).env_remove("ZSH_COMPLETIONS");
    match prefix {
        Some(prefix) => install.env("PREFIX", prefix),
        None => install.env_remove("PREFIX"),
    };
    printed(install);
    let found = printed(Command::new("find").arg(root).args(["!", "-type", "d", "-printf", "%M /%P\n"]));
    let mut files: Vec<String> = found.lines().map(str::to_owned).collect();
    files.sort();
    files
}

/// sed writes the prefix into the units. The prefix may contain characters that have a meaning in sed.
#[test]
fn a_prefix_may_have_any_characters() {
    let root = tempfile::tempdir().unwrap();
    let prefix = r"/opt/a#b&c\1d";
    installed(Some(prefix), root.path());
    let unit = root.path().join("opt").join(r"a#b&c\1d/lib/systemd/system/yunion-mps-daemon.service");
    let unit = fs::read_to_string(unit).unwrap();
    assert!(unit.contains(&format!("ExecStart={prefix}/bin/yunion-mps-daemon")), "{unit}");
}

/// The files of the service's package without those in docs, with their modes.
const INSTALLED: [&str; 43] = [
    "-rw-r--r-- /usr/lib/systemd/catalog/yunion-mps-daemon.catalog",
    "-rw-r--r-- /usr/lib/systemd/catalog/yunion-mps-daemon.zh_CN.catalog",
    "-rw-r--r-- /usr/lib/systemd/system/yunion-mps-daemon.service",
    "-rw-r--r-- /usr/lib/systemd/system/yunion-mps-metrics.service",
    "-rw-r--r-- /usr/lib/systemd/system/yunion-mps-metrics.timer",
    "-rw-r--r-- /usr/lib/sysusers.d/yunion-mps-daemon.conf",
    "-rw-r--r-- /usr/lib/tmpfiles.d/yunion-mps-daemon.conf",
    "-rw-r--r-- /usr/share/bash-completion/completions/yunion-mps-daemon",
    "-rw-r--r-- /usr/share/bash-completion/completions/yunion-mpsctl",
    "-rw-r--r-- /usr/share/dbus-1/interfaces/io.yunion.Mps1.Control.xml",
    "-rw-r--r-- /usr/share/dbus-1/interfaces/io.yunion.Mps1.Device.xml",
    "-rw-r--r-- /usr/share/dbus-1/interfaces/io.yunion.Mps1.Gpu.xml",
    "-rw-r--r-- /usr/share/dbus-1/interfaces/io.yunion.Mps1.Manager.xml",
    "-rw-r--r-- /usr/share/dbus-1/system.d/io.yunion.Mps1.conf",
    "-rw-r--r-- /usr/share/doc/yunion-mps-daemon/CHANGELOG.md",
    "-rw-r--r-- /usr/share/doc/yunion-mps-daemon/README.md",
    "-rw-r--r-- /usr/share/doc/yunion-mps-daemon/README.zh-CN.md",
    "-rw-r--r-- /usr/share/doc/yunion-mps-daemon/copyright",
    "-rw-r--r-- /usr/share/doc/yunion-mps-daemon/host.conf.example",
    "-rw-r--r-- /usr/share/doc/yunion-mps-daemon/host_container_device.yml.example",
    "-rw-r--r-- /usr/share/fish/vendor_completions.d/yunion-mps-daemon.fish",
    "-rw-r--r-- /usr/share/fish/vendor_completions.d/yunion-mpsctl.fish",
    "-rw-r--r-- /usr/share/man/man1/yunion-mpsctl.1",
    "-rw-r--r-- /usr/share/man/man5/yunion-mps-host.conf.5",
    "-rw-r--r-- /usr/share/man/man8/yunion-mps-daemon.8",
    "-rw-r--r-- /usr/share/man/man8/yunion-mps-runc.8",
    "-rw-r--r-- /usr/share/man/zh_CN/man1/yunion-mpsctl.1",
    "-rw-r--r-- /usr/share/man/zh_CN/man5/yunion-mps-host.conf.5",
    "-rw-r--r-- /usr/share/man/zh_CN/man8/yunion-mps-daemon.8",
    "-rw-r--r-- /usr/share/man/zh_CN/man8/yunion-mps-runc.8",
    "-rw-r--r-- /usr/share/zsh/site-functions/_yunion-mps-daemon",
    "-rw-r--r-- /usr/share/zsh/site-functions/_yunion-mpsctl",
    "-rwxr-xr-x /usr/bin/yunion-mps-daemon",
    "-rwxr-xr-x /usr/bin/yunion-mpsctl",
    "lrwxrwxrwx /usr/bin/yunion-mps-crun",
    "lrwxrwxrwx /usr/bin/yunion-mps-nvidia-container-runtime",
    "lrwxrwxrwx /usr/bin/yunion-mps-runc",
    "lrwxrwxrwx /usr/share/man/man5/yunion-mps-host_container_device.yml.5",
    "lrwxrwxrwx /usr/share/man/man8/yunion-mps-crun.8",
    "lrwxrwxrwx /usr/share/man/man8/yunion-mps-nvidia-container-runtime.8",
    "lrwxrwxrwx /usr/share/man/zh_CN/man8/yunion-mps-crun.8",
    "lrwxrwxrwx /usr/share/man/zh_CN/man8/yunion-mps-nvidia-container-runtime.8",
    "lrwxrwxrwx /usr/share/man/zh_CN/man5/yunion-mps-host_container_device.yml.5",
];

#[test]
fn exactly_these_files_are_installed() {
    let root = tempfile::tempdir().unwrap();
    let documents = printed(Command::new("find").arg(source("docs")).args(["-type", "f", "-printf", "%P\n"]));
    let documents =
        documents.lines().map(|file| format!("-rw-r--r-- /usr/share/doc/yunion-mps-daemon/docs/{file}"));
    let mut expected: Vec<String> = INSTALLED.into_iter().map(str::to_owned).chain(documents).collect();
    expected.sort();
    assert_eq!(installed(None, root.path()), expected);
    // The files and manual pages in the units' `Documentation=` are installed.
    let unit: String =
        UNITS.iter().map(|unit| fs::read_to_string(source("systemd").join(unit)).unwrap()).collect();
    let named =
        |key| unit.lines().filter_map(move |line| line.strip_prefix(key)).flat_map(str::split_whitespace);
    let documents: Vec<&str> = named("Documentation=").collect();
    let file = |document: &str| Some(document.strip_prefix("file:")?.to_owned());
    // A manual page has the form `man:NAME(SECTION)`.
    let page = |document: &str| {
        let (name, section) = document.strip_prefix("man:")?.strip_suffix(')')?.split_once('(')?;
        Some(format!("/usr/share/man/man{section}/{name}.{section}"))
    };
    let programs = named("ExecStart=").filter(|word| word.starts_with('/'));
    let mut paths: Vec<String> = programs.map(str::to_owned).collect();
    paths.extend(documents.iter().map(|document| {
        file(document).or_else(|| page(document)).unwrap_or_else(|| panic!("{document} is of no known kind"))
    }));
    assert!(paths.len() > documents.len() && documents.iter().any(|one| page(one).is_some()), "{paths:?}");
    for path in paths {
        assert!(root.path().join(path.trim_start_matches('/')).is_file(), "{path}");
    }
}

fn of_device_plugin(prefix: &str) -> [String; 5] {
    [
        format!("-rw-r--r-- {prefix}/lib/systemd/system/yunion-mps-device-plugin.service"),
        format!("-rw-r--r-- {prefix}/share/doc/yunion-mps-device-plugin/copyright"),
        format!("-rw-r--r-- {prefix}/share/man/man8/yunion-mps-device-plugin.8"),
        format!("-rw-r--r-- {prefix}/share/man/zh_CN/man8/yunion-mps-device-plugin.8"),
        format!("-rwxr-xr-x {prefix}/bin/yunion-mps-device-plugin"),
    ]
}

#[test]
fn exactly_these_files_of_the_device_plugin_are_installed() {
    for prefix in ["/usr", "/opt/mps"] {
        let root = tempfile::tempdir().unwrap();
        let mut install = Command::new(source("packaging/install-device-plugin.sh"));
        assert_eq!(installed_by(&mut install, Some(prefix), root.path()), of_device_plugin(prefix));
        let unit =
            format!("{}/lib/systemd/system/yunion-mps-device-plugin.service", prefix.trim_start_matches('/'));
        let unit = fs::read_to_string(root.path().join(unit)).unwrap();
        assert!(unit.contains(&format!("\nExecStart={prefix}/bin/yunion-mps-device-plugin\n")), "{unit}");
    }
}

#[test]
fn make_install_has_the_service_and_the_device_plugin() {
    for prefix in [None, Some("/opt/mps")] {
        let [service, both] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let mut expected = installed(prefix, service.path());
        expected.extend(of_device_plugin(prefix.unwrap_or("/usr")));
        expected.sort();
        let mut make = Command::new("make");
        make.args(["--silent", "--no-print-directory", "install"]).current_dir(source("."));
        // If `make` has started the tests, these variables would change what the `make` of this test does.
        make.env_remove("MAKEFLAGS").env_remove("MAKELEVEL");
        assert_eq!(installed_by(&mut make, prefix, both.path()), expected);
    }
}

/// docs/README.md lists every file in docs, and every link in a document leads to a file that exists.
#[test]
fn the_index_has_every_document_and_links_lead_somewhere() {
    let index = fs::read_to_string(source("docs/README.md")).unwrap();
    for entry in fs::read_dir(source("docs")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        // docs/README.md need not list pictures, which belong to a page, and tests of alert rules, which belong to the rules.
        let is_part = [".svg", ".test."].iter().any(|part| name.contains(part));
        assert!(is_part || name == "README.md" || index.contains(&format!("]({name})")), "{name}");
    }
    let link = regex::Regex::new(r"\]\(([^)#:]+)(#[^)]*)?\)").unwrap();
    let found = printed(Command::new("find").arg(source("docs")).args(["-name", "*.md"]));
    let pages = found.lines().map(PathBuf::from).chain([source("README.md"), source("README.zh-CN.md")]);
    let mut links = 0;
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        for link in link.captures_iter(&text) {
            links += 1;
            assert!(page.parent().unwrap().join(&link[1]).exists(), "{}: {}", page.display(), &link[1]);
        }
    }
    assert!(links > 20, "{links}");
}

/// No page in docs may be long, except for the reference dbus.md.
#[test]
fn no_page_is_too_long_to_read() {
    for entry in fs::read_dir(source("docs")).unwrap() {
        let page = entry.unwrap().path();
        let is_page = page.extension().is_some_and(|extension| extension == "md");
        if is_page && !page.ends_with("dbus.md") {
            let lines = fs::read_to_string(&page).unwrap().lines().count();
            assert!(lines <= 300, "{} has {lines} lines", page.display());
        }
    }
}

/// The first 40 lines of the README must show the use of the service, its installation and its slices.
#[test]
fn the_readme_begins_with_a_picture_the_installation_and_a_screen() {
    for readme in ["README.md", "README.zh-CN.md"] {
        let text = fs::read_to_string(source(readme)).unwrap();
        let first = text.lines().take(40).collect::<Vec<_>>().join("\n");
        for part in
            ["](docs/overview.svg)", "    yunion-mpsctl run --free", "$ yunion-mpsctl list", "make deb"]
        {
            assert!(first.contains(part), "{readme} has no {part} in its first 40 lines");
        }
    }
}

/// `pictures.py --check` fails if a figure in a text differs from the measured figure.
#[test]
fn the_performance_page_is_what_the_figures_make_of_it() {
    printed(Command::new("python3").arg(source("benches/gpu/pictures.py")).arg("--check"));
}

/// Two packages from one commit must be identical. So copyright.py must write the same file each time.
#[test]
fn the_copyright_file_is_the_same_each_time() {
    let with_seed = |seed: u32| {
        let mut copyright = Command::new(source("packaging/copyright.py"));
        let output = run(copyright.env("PYTHONHASHSEED", seed.to_string()));
        // cargo writes to stderr when it waits for another cargo. So output on stderr is no failure here.
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{complaints}");
        String::from_utf8(output.stdout).unwrap()
    };
    let first = with_seed(0);
    assert!(first.contains("\nLicense: crates-1\n"), "{first}");
    // Without a sort in copyright.py, the order of two versions of a crate would depend on the seed of Python's hashes. About
    // half of the seeds would give another order.
    for seed in 1..6 {
        assert_eq!(with_seed(seed), first, "seed {seed}");
    }
}

/// A program that nohup or `&` has started ignores some signals, and its children inherit this. Tests send these signals to
/// children, so `make test` restores the signals' default actions.
#[test]
fn the_tests_ignore_no_signal_whoever_starts_them() {
    let directory = tempfile::tempdir().unwrap();
    let cargo = directory.path().join("cargo");
    fs::write(&cargo, "#!/bin/sh\ngrep SigIgn: /proc/self/status >&2\nexit 3\n").unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", directory.path().display(), std::env::var("PATH").unwrap());
    for ignored in [&[][..], &["HUP"], &["INT", "QUIT"], &["HUP", "INT", "QUIT"]] {
        let mut tests = Command::new("env");
        tests.args(["--default-signal=HUP", "--default-signal=INT", "--default-signal=QUIT", "env"]);
        tests.args(ignored.iter().map(|signal| format!("--ignore-signal={signal}")));
        let output = run(tests.arg(source("scripts/test.py")).env("PATH", &path));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{said}");
        let mask = said.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).expect(&said);
        assert_eq!(u64::from_str_radix(mask, 16).unwrap() & 7, 0, "{ignored:?}: {mask}");
    }
}

#[test]
fn with_another_prefix_the_unit_starts_what_is_there() {
    let root = tempfile::tempdir().unwrap();
    let files = installed(Some("/opt/mps"), root.path());
    assert!(files.iter().all(|file| file.contains(" /opt/mps/")), "{files:?}");
    let unit = |name: &str| {
        let unit = fs::read_to_string(root.path().join("opt/mps/lib/systemd/system").join(name)).unwrap();
        assert!(!unit.contains("/usr/"), "{unit}");
        unit
    };
    let [service, metrics, _] = UNITS.map(unit);
    assert!(service.contains("\nExecStart=/opt/mps/bin/yunion-mps-daemon\n"), "{service}");
    let documentation = "\nDocumentation=file:/opt/mps/share/doc/yunion-mps-daemon/README.md\n";
    assert!(service.contains(documentation), "{service}");
    assert!(metrics.contains("\nExecStart=/opt/mps/bin/yunion-mpsctl metrics "), "{metrics}");
}

fn subcommands() -> Vec<String> {
    mpsctl::command().get_subcommands().map(|command| command.get_name().to_owned()).collect()
}

/// Returns the words that bash offers for the last word of a command line.
fn completed(script: &Path, line: &str) -> Vec<String> {
    let asked = r#"source "$1"; program="$2"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        function="$(complete -p "$program" | grep -o ' -F [^ ]*' | cut -c 5-)"
        "$function" "$program" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}""#;
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-c", asked, "bash"]).arg(script).args(line.split(' '));
    printed(&mut bash).lines().map(str::to_owned).collect()
}

/// The tests of yunion-mpsctl's completion are in completion.rs.
#[test]
fn bash_completes_the_options_of_the_service() {
    let script = pages_as_shipped();
    let script = script.path().join("yunion-mps-daemon.bash");
    assert_eq!(completed(&script, "yunion-mps-daemon --ch"), ["--check"]);
}

/// Returns the text of a manual page on a very wide terminal. Fails on a warning of groff.
fn shown(page: &Path) -> String {
    printed(Command::new("groff").args(["-ww", "-mandoc", "-Tascii", "-P-cbou", "-rLL=2000n"]).arg(page))
}

#[test]
fn the_manual_pages_are_well_formed() {
    let pages = pages_as_shipped();
    for page in ["yunion-mpsctl.1", "yunion-mps-daemon.8", "yunion-mps-device-plugin.8"] {
        let page = pages.path().join(page);
        shown(&page);
        printed(Command::new("mandoc").args(["-T", "lint", "-W", "error"]).arg(&page));
    }
    for written in ["yunion-mps-host.conf.5", "yunion-mps-runc.8"] {
        let written = source("packaging/man").join(written);
        shown(&written);
        printed(Command::new("mandoc").args(["-T", "lint", "-W", "warning"]).arg(&written));
    }
}

/// groff uses its rules for Chinese only in a Chinese locale. The Chinese manual pages must fit the width of a terminal with
/// and without these rules.
#[test]
fn the_manual_pages_in_chinese_fit_a_terminal() {
    // A Chinese character takes two columns of a terminal.
    let width =
        |line: &str| line.chars().map(|letter| if letter < '\u{2e80}' { 1 } else { 2 }).sum::<usize>();
    let pages = fs::read_dir(source("packaging/man/zh_CN")).unwrap().map(|entry| entry.unwrap().path());
    for page in pages {
        for macros in ["-mandoc", "-mandoc -mzh"] {
            let mut groff = Command::new("groff");
            groff.args(["-ww", "-Kutf8", "-Tutf8", "-P-cbou"]).args(macros.split(' ')).arg(&page);
            let text = printed(&mut groff);
            let lines = text.lines().count();
            assert!(lines > 25 && text.contains("yunion-mpsctl"), "{lines} lines: {text}");
            let wide: Vec<&str> = text.lines().filter(|line| width(line) > 80).collect();
            assert!(wide.is_empty(), "{}: {wide:#?}", page.display());
            for columns in [40, 60] {
                let mut groff = Command::new("timeout");
                groff.args(["20", "groff", "-Kutf8", "-Tutf8", &format!("-rLL={columns}n")]);
                let output = run(groff.args(macros.split(' ')).arg(&page));
                assert!(output.status.success(), "{} in {columns} columns: {output:?}", page.display());
            }
        }
        printed(Command::new("mandoc").args(["-T", "lint", "-W", "error"]).arg(&page));
    }
}

#[test]
fn a_wrong_manual_page_is_complained_about() {
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("page.1");
    fs::write(&page, ".TH PAGE 1\n.SH NAME\npage \\- a page\n.NOSUCHMACRO\n").unwrap();
    let output = run(Command::new("groff").args(["-ww", "-mandoc", "-Tascii"]).arg(&page));
    assert!(String::from_utf8_lossy(&output.stderr).contains("NOSUCHMACRO"), "{output:?}");
}

#[test]
fn the_manual_has_every_subcommand_and_what_it_prints() {
    let golden = tempfile::tempdir().unwrap();
    fs::write(golden.path().join("list.txt"), ".first 00:06.0-0\n'second' \\ |\n").unwrap();
    let text = shown(&pages(golden.path()).path().join("yunion-mpsctl.1"));
    for subcommand in subcommands() {
        assert!(
            text.contains(&format!("\n   {subcommand}\n       yunion-mpsctl {subcommand}")),
            "{subcommand}: {text}"
        );
    }
    assert!(text.contains("\n.first 00:06.0-0\n'second' \\ |\n"), "{text}");
    assert_eq!(text.matches("Output, on a host").count(), 1, "{text}");
    for status in ["EXIT STATUS\n", "126 and 127", "3 (yunion-mps-daemon is not running)"] {
        assert!(text.contains(status), "{status}: {text}");
    }
}

/// The manual page shows recorded output for each subcommand. This output is not indented, so none of its lines may look like a
/// heading of the page.
#[test]
fn every_subcommand_has_an_example_of_its_output() {
    let text = shown(&pages_as_shipped().path().join("yunion-mpsctl.1"));
    let places: Vec<(usize, String)> = subcommands()
        .into_iter()
        .map(|name| (text.find(&format!("\n   {name}\n")).unwrap_or_else(|| panic!("no {name}")), name))
        .collect();
    let end = text.find("\nEXIT STATUS\n").unwrap();
    let ends = places.iter().skip(1).map(|(place, _)| *place).chain([end]);
    for ((begin, name), end) in places.iter().zip(ends) {
        let section = text.get(*begin..end).unwrap_or_else(|| panic!("{name} stands behind the exit status"));
        assert!(section.contains("\n       Examples:\n"), "{section}");
        assert!(section.contains("\n       Output"), "{section}");
    }
    assert_eq!(text.matches("\nEXIT STATUS\n").count(), 1);
}
