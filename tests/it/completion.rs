//! Tests the completion of yunion-mpsctl's command lines in bash, zsh and fish, with the installed completion files.

use crate::support::host::mpsctl;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::host::{Host, binaries, text};
use crate::support::wait::wait_for;

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/completions").join(name)
}

fn host() -> Host {
    let mut host = Host::new("h200");
    host.prefer(&binaries());
    host.start();
    host.wait_for_state("ready");
    host
}

/// A shell on a terminal. The tests type keys into the shell and read its screen.
struct Shell {
    script: Child,
    keys: ChildStdin,
    screen: Arc<Mutex<Vec<u8>>>,
}

impl Shell {
    /// Starts a shell, and types the commands `preparation`. These commands must make the shell print its current command line
    /// on Ctrl-X Ctrl-P.
    fn start(host: &Host, command: &str, preparation: &str) -> Self {
        let mut script = host.command("script");
        script.args(["-qec", command, "/dev/null"]).env("SHELL", "/bin/sh").env("TERM", "xterm");
        let mut script = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (keys, mut output) = (script.stdin.take().unwrap(), script.stdout.take().unwrap());
        let screen = Arc::new(Mutex::new(Vec::new()));
        let written = Arc::clone(&screen);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                written.lock().unwrap().extend(&bytes[..count]);
            }
        });
        let mut shell = Self { script, keys, screen };
        shell.press(&format!("{preparation}; printf 'REA''DY\\n'\n"));
        shell.wait_for("READY");
        // The typed preparation contains the text that `line` waits for. So the screen is cleared.
        shell.screen.lock().unwrap().clear();
        shell
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    fn wait_for(&self, text: &str) -> String {
        wait_for(text, || {
            let screen = String::from_utf8_lossy(&self.screen.lock().unwrap()).into_owned();
            let (_, after) = screen.rsplit_once(text)?;
            Some(after.to_owned())
        })
    }

    /// Types `keys`, and returns the command line that the shell then has.
    fn line(&mut self, keys: &str) -> String {
        self.press(keys);
        self.press("\u{18}\u{10}");
        let line = wait_for("the command line", || {
            let shown = self.wait_for("LINE=");
            shown.split_once('$').map(|(line, _)| line.to_owned())
        });
        // Ctrl-U clears the command line for the next call of this function.
        self.screen.lock().unwrap().clear();
        self.press("\u{15}");
        line
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

/// Typed keys, and the command line that follows. `^` stands for the tabulator key.
const TYPED: [(&str, &str); 10] = [
    ("yunion-mpsctl dr^", "yunion-mpsctl drain "),
    ("yunion-mpsctl run 00:0^-2^", "yunion-mpsctl run 00:06.0-2 "),
    ("yunion-mpsctl run 0^-3^--fr^", "yunion-mpsctl run 00:06.0-3 --free "),
    ("yunion-mpsctl drain 00:06.0-^1^", "yunion-mpsctl drain 00:06.0-1 "),
    ("yunion-mpsctl env --for^do^", "yunion-mpsctl env --format docker "),
    ("yunion-mpsctl env --format=j^", "yunion-mpsctl env --format=json "),
    ("yunion-mpsctl env --format com^", "yunion-mpsctl env --format compose "),
    ("yunion-mpsctl probe GPU-1^", "yunion-mpsctl probe GPU-168acfc9-c926-5401-354d-2910ddcd391b "),
    ("yunion-mpsctl help undr^", "yunion-mpsctl help undrain "),
    ("yunion-mpsctl run 00:06.0-1 -- setpri^", "yunion-mpsctl run 00:06.0-1 -- setpriv "),
];

fn type_all(shell: &mut Shell) {
    for (keys, line) in TYPED {
        assert_eq!(shell.line(&keys.replace('^', "\t")), line, "{keys}");
    }
}

#[test]
fn bash_completes_what_is_typed() {
    let host = host();
    let source = format!(
        "source '{}'; bind -x '\"\\C-x\\C-p\": printf \"LINE=%s\\$\\n\" \"$READLINE_LINE\"'",
        script("yunion-mpsctl.bash").display()
    );
    let mut bash = Shell::start(&host, "bash --norc --noprofile -i", &source);
    type_all(&mut bash);
}

#[test]
fn zsh_completes_what_is_typed() {
    let host = host();
    let source = format!(
        "fpath=('{}' $fpath); autoload -U compinit; compinit -u -D; bindkey -e; \
         show() {{ print -rn -- \"LINE=$BUFFER\\$\" }}; zle -N show; bindkey '^X^P' show",
        script("").display()
    );
    let mut zsh = Shell::start(&host, "zsh -f -i", &source);
    type_all(&mut zsh);
}

fn fish(host: &Host, line: &str) -> BTreeSet<String> {
    let asked =
        format!("source '{}'; complete --do-complete '{line}'", script("yunion-mpsctl.fish").display());
    let output = host.command("fish").args(["--no-config", "--command", &asked]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{line}: {}", text(&output));
    let offered = String::from_utf8(output.stdout).unwrap();
    offered.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect()
}

#[test]
fn fish_offers_what_fits() {
    let host = host();
    for (line, offered) in [
        ("yunion-mpsctl dr", &["drain"][..]),
        ("yunion-mpsctl run 00:0", &["00:06.0", "00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"]),
        ("yunion-mpsctl drain 00:06.0-", &["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"]),
        ("yunion-mpsctl env --for", &["--format"]),
        ("yunion-mpsctl env --format do", &["docker"]),
        ("yunion-mpsctl env --format=do", &["--format=docker"]),
        ("yunion-mpsctl env --format c", &["cdi", "compose"]),
        ("yunion-mpsctl run 00:06.0-1 -- setpri", &["setpriv"]),
    ] {
        let expected: BTreeSet<String> = offered.iter().map(|word| (*word).to_owned()).collect();
        assert_eq!(fish(&host, line), expected, "{line}");
    }
}

fn offered(command: &mut Command, words: &[&str]) -> Vec<(String, String)> {
    let output = command.args(["complete-words", "yunion-mpsctl"]).args(words).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{words:?}: {}", text(&output));
    let lines = String::from_utf8(output.stdout).unwrap();
    let pair =
        |line: &str| line.split_once('\t').map(|(word, help)| (word.to_owned(), help.to_owned())).unwrap();
    lines.lines().map(pair).collect()
}

#[test]
fn every_subcommand_and_every_option_is_offered() {
    let program = || Command::new(mpsctl());
    let words = |words: &[&str]| -> BTreeSet<String> {
        offered(&mut program(), words).into_iter().map(|(word, _)| word).collect()
    };
    let mut command = mpsctl::command();
    command.build();
    let names: BTreeSet<String> = command.get_subcommands().map(|one| one.get_name().to_owned()).collect();
    let offered = words(&[""]).into_iter().filter(|word| !word.starts_with('-'));
    assert_eq!(offered.collect::<BTreeSet<_>>(), names);
    for subcommand in command.get_subcommands().filter(|subcommand| subcommand.get_name() != "help") {
        let name = subcommand.get_name();
        let options = subcommand.get_arguments().filter(|option| !option.is_hide_set());
        let options: BTreeSet<String> =
            options.filter_map(|option| Some(format!("--{}", option.get_long()?))).collect();
        assert_eq!(words(&[name, "--"]), options, "{name}");
        assert!(options.contains("--help"), "{name}: {options:?}");
    }
}

#[test]
fn clients_are_offered_by_pid_and_device() {
    let host = host();
    let client = host.served(&mut host.program_of("00:06.0-1", &["hold", "600"]));
    let mut ctl = host.command("yunion-mpsctl");
    let offered = offered(&mut ctl, &["terminate", ""]);
    let pid = client.id().to_string();
    let (_, meaning) = offered.iter().find(|(word, _)| *word == pid).unwrap_or_else(|| panic!("{offered:?}"));
    assert!(meaning.contains("cuda-client, user ") && meaning.ends_with(", 00:06.0-1"), "{meaning}");
}

#[test]
fn only_slices_are_offered_where_a_gpu_is_refused() {
    let host = host();
    let names = |words: &[&str]| -> Vec<String> {
        let offered = offered(&mut host.command("yunion-mpsctl"), words).into_iter();
        offered.map(|(word, _)| word).filter(|word| word.starts_with("00:06.0")).collect()
    };
    let slices = ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"];
    assert_eq!(names(&["terminate", "--device", ""]), slices);
    assert!(names(&["drain", ""]).contains(&"00:06.0".to_owned()));
}

#[test]
fn a_service_that_is_not_there_or_hangs_is_not_waited_for() {
    let mut host = host();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(i32::try_from(host.pid()).unwrap()).unwrap(),
        rustix::process::Signal::STOP,
    )
    .unwrap();
    let begun = Instant::now();
    assert_eq!(offered(&mut host.command("yunion-mpsctl"), &["drain", "0"]), []);
    // The completion waits at most a second for the service. The rest of the limit is for a busy machine.
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    host.stop_bus();
    assert_eq!(offered(&mut host.command("yunion-mpsctl"), &["drain", "0"]), []);
}
