//! Tests of slices in jobs of Slurm: the commands of docs/slurm.md, cancelled jobs, and the neighbours of these jobs.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::Check;
use crate::machine::{Machine, text};
use crate::package;
use crate::service::{DEVICES, HOST, HOST_CONF, UUID, new_host, serving, state};
use crate::wait::wait_for;

pub(crate) const CHECKS: &[Check] = &[
    ("the_guide_makes_slices_gpus_of_slurm", guide),
    ("each_job_has_a_slice_of_its_own", own_slices),
    ("scancel_in_the_middle_of_a_kernel_leaves_the_neighbour_alive", cancelled),
    ("without_srun_in_a_batch_script_the_neighbour_ends_as_the_guide_warns", unprotected),
    ("a_user_ends_no_work_of_another", of_another),
    ("a_prolog_in_the_job_binds_the_job", prolog),
    ("the_cluster_stops", stop),
];

/// Slurm's time limits are whole minutes, so these checks take minutes and run only in `make soak`.
pub(crate) const SOAK_CHECKS: &[Check] = &[
    ("the_cluster_starts", guide),
    ("a_job_beyond_its_time_limit_leaves_the_neighbour_alive", beyond_time_limit),
    ("the_cluster_stops", stop),
];

/// The commands of docs/slurm.md that these tests do not run, each with the reason.
const ELSEWHERE: [(&str, &str); 2] = [
    ("scontrol update NodeName=node1 State=DRAIN Reason=\"new driver\"", "the node has another name"),
    ("yunion-mpsctl drain --all --wait", "readme::CHECKS run it"),
];

const JOBS: &str = "/srv/jobs";
const TYPE: &str = "h200_sxm_141gb.35gb";

/// Returns the indented lines of docs/slurm.md from a line that begins with `from` to a line that ends with `to`.
fn lines(from: &str, to: &str) -> String {
    let guide = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/slurm.md")).unwrap();
    let indented = guide.lines().filter_map(|line| line.strip_prefix("    ")).map(str::trim);
    let lines: Vec<&str> = indented.skip_while(|line| !line.starts_with(from)).collect();
    let end = lines.iter().position(|line| line.ends_with(to));
    let end = end.unwrap_or_else(|| panic!("docs/slurm.md: no lines from {from:?} to {to:?}"));
    lines[..=end].join("\n") + "\n"
}

/// Checks that docs/slurm.md has exactly the line `words`, and returns this line.
fn line(words: &str) -> String {
    lines(words, words)
}

/// Installs the service, and prepares the parts of a Slurm cluster that docs/slurm.md takes for granted.
pub(crate) fn prepared(machine: &Machine) {
    package::installed(machine);
    new_host(machine);
    // Without an address besides 127.0.0.1, the C library resolves no names. Slurm wants a device file, and the simulated GPU
    // has only a plain file.
    machine.sh("ip address add 10.0.0.1/32 dev lo
        mknod -m 666 /dev/nvidia0 c 195 0
        useradd --create-home alice
        mkdir -p /var/lib/slurm/slurmctld /var/lib/slurm/slurmd /etc/yunion /etc/slurm
        systemctl start munge");
    // If slurmd stops after slurmctld, it waits in vain for an answer of slurmctld. The time limit shortens this wait at the
    // shutdown of the machine.
    machine.write("/etc/systemd/system/slurmd.service.d/test.conf", "[Service]\nTimeoutStopSec=5\n");
    machine.sh("systemctl daemon-reload");
    // Slurm's plugin for control groups of version 2 refuses a kernel that also has a hierarchy of version 1.
    let unified = machine.sh("cat /proc/self/cgroup").starts_with("0:");
    let plugin = if unified {
        "CgroupPlugin=cgroup/v2"
    } else {
        machine.sh("mkdir -p /srv/cgroup/freezer; mount -t cgroup -o freezer freezer /srv/cgroup/freezer");
        "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/srv/cgroup"
    };
    machine.write("/etc/slurm/cgroup.conf", &format!("{plugin}\n"));
    machine.write(
        &format!("{JOBS}/a-cuda-program"),
        &format!(
            "#!/bin/sh\n[ $# -gt 0 ] || set -- props\n\
             export YUNION_MPS_SIM={HOST} LD_LIBRARY_PATH={HOST}/lib\nexec {HOST}/bin/cuda-client \"$@\"\n"
        ),
    );
    machine.write(
        &format!("{JOBS}/train.py"),
        "import os\nos.execv('./a-cuda-program', ['a-cuda-program', 'long', '600'])\n",
    );
    machine.write(&format!("{JOBS}/a-rank"), "#!/bin/sh\nexec printenv YUNION_MPS_DEVICE\n");
    machine.sh(&format!("chmod 755 {JOBS}/a-cuda-program {JOBS}/a-rank; chown -R alice: {JOBS}"));
}

fn guide(machine: &mut Machine) {
    serving(machine);
    let host_conf = machine.sh(&format!("cat {HOST_CONF}"));
    machine.write(HOST_CONF, &(host_conf + &line("cuda_mps_may_terminate: owner")));
    machine.sh(&line("systemctl reload yunion-mps-daemon"));
    wait_for("the state ready", || (state(machine) == "ready").then_some(()));
    machine.complained(&["su", "alice", "-c", "yunion-mpsctl list"]);
    machine.sh(&lines("install -m 644", "systemctl reload dbus"));
    wait_for("the bus", || {
        machine.run(&["su", "alice", "-c", "yunion-mpsctl list"]).status.success().then_some(())
    });
    machine.sh(&line("yunion-mpsctl slurm >/etc/yunion/gres.conf"));
    machine.write("/etc/slurm/gres.conf", &line("include /etc/yunion/gres.conf"));

    let printed = machine.sh("cat /etc/yunion/gres.conf");
    let node = lines("GresTypes=", &format!("Gres=gpu:{TYPE}:4"));
    let (settings, node) = node.split_once("# NodeName=node1 ... ").unwrap();
    assert!(printed.contains(&format!("# slurm.conf: NodeName=... {node}")), "{printed}");
    let host = machine.sh("hostname");
    let host = host.trim();
    machine.write(
        "/etc/slurm/slurm.conf",
        &format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nAuthType=auth/munge\n\
             StateSaveLocation=/var/lib/slurm/slurmctld\nSlurmdSpoolDir=/var/lib/slurm/slurmd\n\
             SlurmctldPidFile=/run/slurmctld.pid\nSlurmdPidFile=/run/slurmd.pid\nMpiDefault=none\n\
             SlurmdParameters=config_overrides\nSelectTypeParameters=CR_Core\n{settings}\
             NodeName={host} NodeAddr=127.0.0.1 CPUs=16 {node}\
             PartitionName=main Nodes=ALL Default=YES State=UP\n"
        ),
    );
    machine.sh(&line("systemctl restart slurmctld"));
    machine.sh(&line("systemctl restart slurmd"));
    wait_for("the node", || machine.sh("sinfo --noheader --format=%T").starts_with("idle").then_some(()));

    let props = alice(machine, &line("srun --gres=gpu:1 yunion-mpsctl run --slurm -- ./a-cuda-program"));
    // A slice has a quarter of the 132 SMs, and a GPU assigns SMs in pairs.
    assert!(props.contains(" sms 32 "), "{props}");
    let typed = format!("srun --gres=gpu:{TYPE}:1 yunion-mpsctl run --slurm --");
    assert!(alice(machine, &line(&format!("{typed} ./a-cuda-program"))).contains(" sms 32 "));
    let name = alice(machine, &line(&format!("{typed} printenv YUNION_MPS_DEVICE")));
    assert!(DEVICES.contains(&name.trim()), "{name}");
    let tasks = line("srun -n2 --gpus-per-task=1 yunion-mpsctl run --slurm -- printenv YUNION_MPS_DEVICE");
    let tasks = alice(machine, &tasks);
    let tasks: Vec<&str> = tasks.lines().collect();
    assert!(tasks.len() == 2 && tasks[0] != tasks[1], "{tasks:?}");
    let of_ranks = |words: &str| -> BTreeSet<String> {
        let told = alice(machine, &line(words));
        let slices: Vec<&str> = told.lines().collect();
        assert_eq!(slices.len(), 4, "{words}: {told}");
        slices.into_iter().map(str::to_owned).collect()
    };
    let each = "srun -n4 --gpus-per-task=1 yunion-mpsctl run --slurm --";
    assert_eq!(of_ranks(&format!("{each} ./a-rank")).len(), 4);
    let bound = "sh -c 'exec ${YUNION_MPS_CPUS:+taskset -c $YUNION_MPS_CPUS} ./a-rank'";
    assert_eq!(of_ranks(&format!("{each} {bound}")).len(), 4);
    assert_eq!(of_ranks("srun --gpus=1 --ntasks-per-gpu=4 yunion-mpsctl run --slurm -- ./a-rank").len(), 1);
    let visible =
        alice(machine, "srun --gres=gpu:1 yunion-mpsctl run --slurm -- printenv CUDA_VISIBLE_DEVICES");
    assert_eq!(visible.trim(), UUID);
    // Slurm counts slices, and CUDA counts GPUs. If Slurm set `CUDA_VISIBLE_DEVICES`, CUDA would take the number of a slice for
    // the number of a GPU.
    assert_eq!(alice(machine, "srun --gres=gpu:1 sh -c 'echo ${CUDA_VISIBLE_DEVICES-none}'").trim(), "none");
    let without = machine.complained(&["su", "alice", "-c", "srun yunion-mpsctl run --slurm -- true"]);
    assert!(without.contains("Slurm has given no slice to this step"), "{without}");
    for (line, why) in ELSEWHERE {
        assert!(
            lines(line, line).contains(line),
            "docs/slurm.md has no line {line:?}, which was not run: {why}"
        );
    }
}

/// Tests the Prolog script where Slurm 24.11 and later run it: in the control group of the job's extern step.
fn prolog(machine: &mut Machine) {
    let script = lines("#!/bin/sh", "yunion-mpsctl bind --slurm");
    machine.write("/etc/slurm/prolog.sh", &script);
    line("Prolog=/etc/slurm/prolog.sh");
    line("PrologFlags=RunInJob");
    let job = "/sys/fs/cgroup/slurmstepd.scope/job_7";
    machine.sh(&format!("chmod 755 /etc/slurm/prolog.sh; mkdir -p {job}/step_extern {job}/step_0"));
    let prolog =
        |given: &str| format!("echo $$ >{job}/step_extern/cgroup.procs; {given} exec /etc/slurm/prolog.sh");
    machine.sh(&prolog(""));
    let bound =
        || machine.printed(&["yunion-mpsctl", "list", "--json"]).matches("\"bound_to\": \"job 7\"").count();
    assert_eq!(bound(), 0, "it has asked for no slice");
    // Outside of a job's control group, the Prolog script succeeds without a slice in its environment. With a slice it fails
    // and prints the reason.
    machine.sh("exec /etc/slurm/prolog.sh");
    let elsewhere = machine.complained(&["sh", "-c", "SLURM_JOB_GPUS=0 exec /etc/slurm/prolog.sh"]);
    assert!(elsewhere.contains("which does not belong to a job: set PrologFlags=RunInJob"), "{elsewhere}");
    machine.sh(&prolog("SLURM_JOB_GPUS=1,2"));
    assert_eq!(bound(), 2);
    // A client that claims a slice of its job has this slice. A client that claims another slice has all slices of its job.
    for (number, has) in [("1", DEVICES[1]), ("0", &*format!("{},{}", DEVICES[1], DEVICES[2]))] {
        let claim = DEVICES[number.parse::<usize>().unwrap()];
        machine.sh(&format!(
            "cd {JOBS}; echo $$ >{job}/step_0/cgroup.procs
            eval \"$(yunion-mpsctl env {claim})\"; ./a-cuda-program hold 600 >/dev/null 2>&1 &"
        ));
        assert_eq!(at_work(machine, 1), [has]);
        let client = &clients(machine)[0];
        assert_eq!((&client["known_by"], &client["label"]), (&"bound".into(), &"job 7".into()));
        machine.sh(&format!("kill -9 {}", client["pid"]));
        at_work(machine, 0);
    }
    machine.sh(&format!("rmdir {job}/step_extern {job}/step_0 {job}"));
    wait_for("no binding", || (bound() == 0).then_some(()));
}

fn own_slices(machine: &mut Machine) {
    let jobs = ["one", "two", "three", "four", "five"];
    for job in jobs {
        batch(machine, job, "", &with_srun("./a-cuda-program hold 600"));
    }
    let slices = at_work(machine, 4);
    assert_eq!(slices, DEVICES, "each slice has one job");
    wait_for("the job without a slice", || {
        let waiting = machine.sh("squeue --noheader --states=PENDING --format=%j");
        (waiting.trim() == "five").then_some(())
    });
    for job in jobs.iter().rev() {
        machine.sh(&format!("scancel --name={job}"));
    }
    at_work(machine, 0);
}

fn cancelled(machine: &mut Machine) {
    // docs/slurm.md shows this batch script, and says that a variant with `exec` is safe too.
    for script in [script(), script().replace("srun ", "exec ")] {
        batch(machine, "victim", "", &script);
        let freed = &at_work(machine, 1)[0];
        batch(machine, "neighbour", "", &with_srun("./a-cuda-program hold 8"));
        at_work(machine, 2);
        alice(machine, "scancel --name=victim");
        ended(machine, "victim", "CANCELLED");
        // The next job asks for three GPUs, and gets all slices except the neighbour's.
        let next = "srun --gres=gpu:3 yunion-mpsctl run --slurm -- printenv YUNION_MPS_DEVICE";
        let next = alice(machine, next);
        assert!(next.contains(freed.as_str()), "{next}");
        ended(machine, "neighbour", "COMPLETED");
        let result = machine.sh(&format!("cat {JOBS}/neighbour.out"));
        assert!(result.contains(" ok iters "), "{result}");
        at_work(machine, 0);
    }
}

fn unprotected(machine: &mut Machine) {
    batch(machine, "victim", "", &(script().replace("srun ", "") + "echo the shell waits\n"));
    batch(machine, "neighbour", "", &with_srun("./a-cuda-program hold 600"));
    at_work(machine, 2);
    machine.sh("scancel --name=victim");
    ended(machine, "neighbour", "FAILED");
    let result = machine.sh(&format!("cat {JOBS}/neighbour.out"));
    assert!(result.contains("(700)"), "{result}");
    wait_for("the state ready", || (state(machine) == "ready").then_some(()));
    at_work(machine, 0);
}

fn of_another(machine: &mut Machine) {
    let unit = "systemd-run --quiet --unit=of-root yunion-mpsctl run --free --";
    machine.sh(&format!("{unit} {JOBS}/a-cuda-program hold 600"));
    at_work(machine, 1);
    let pid = clients(machine).iter().find(|client| client["user"] == "root").unwrap()["pid"].to_string();
    let refused = machine.complained(&["su", "alice", "-c", &format!("yunion-mpsctl terminate {pid}")]);
    assert!(
        refused.contains("no MPS client of user ")
            && refused.contains(&format!(" on this host has PID {pid}; ")),
        "{refused}"
    );
    machine.sh("systemctl stop of-root");
    at_work(machine, 0);
}

fn beyond_time_limit(machine: &mut Machine) {
    batch(machine, "limited", "--time=1", &script());
    batch(machine, "neighbour", "", &with_srun("./a-cuda-program hold 600"));
    at_work(machine, 2);
    // Slurm's shortest time limit is a minute, and Slurm checks the limits every half minute.
    let over = "until scontrol --oneliner show job | grep 'JobName=limited ' | grep -q JobState=TIMEOUT; do sleep 0.1; done";
    machine.printed(&["timeout", "120", "sh", "-c", over]);
    at_work(machine, 1);
    assert!(jobs(machine, "neighbour").contains("JobState=RUNNING "));
    alice(machine, "scancel --name=neighbour");
    at_work(machine, 0);
    assert_eq!(state(machine), "ready");
}

/// The cluster must stop before the machine powers off. Otherwise the machine would wait for processes of jobs.
fn stop(machine: &mut Machine) {
    wait_for("the end of every job", || machine.sh("squeue --noheader").is_empty().then_some(()));
    machine.sh("systemctl stop slurmd; systemctl stop slurmctld");
}

fn script() -> String {
    lines("#!/bin/sh", "python3 train.py")
}

fn with_srun(command: &str) -> String {
    script().replace("python3 train.py", command)
}

#[track_caller]
fn alice(machine: &Machine, command: &str) -> String {
    machine.printed(&["su", "alice", "-c", &format!("cd {JOBS}; {command}")])
}

fn batch(machine: &Machine, name: &str, options: &str, script: &str) {
    machine.write(&format!("{JOBS}/{name}.sh"), script);
    alice(machine, &format!("sbatch --job-name={name} --output={name}.out {options} {name}.sh"));
}

fn clients(machine: &Machine) -> Vec<Value> {
    let listed = machine.run(&["yunion-mpsctl", "clients", "--json"]);
    serde_json::from_slice(&listed.stdout).unwrap_or_default()
}

/// Waits until the service lists `number` clients, and returns the sorted names of their slices.
#[track_caller]
fn at_work(machine: &Machine, number: usize) -> Vec<String> {
    let mut slices = wait_for(&format!("{number} clients"), || {
        let clients = clients(machine);
        (clients.len() == number).then_some(clients)
    });
    slices.sort_by_key(|client| client["device"].to_string());
    slices.iter().map(|client| client["device"].as_str().unwrap_or_default().to_owned()).collect()
}

fn jobs(machine: &Machine, name: &str) -> String {
    let shown = text(&machine.run(&["scontrol", "--oneliner", "show", "job"]).stdout);
    let job = shown.lines().rfind(|line| line.contains(&format!("JobName={name} ")));
    job.unwrap_or_default().to_owned()
}

#[track_caller]
fn ended(machine: &Machine, name: &str, how: &str) {
    wait_for(&format!("job {name} to be {how}"), || {
        jobs(machine, name).contains(&format!("JobState={how} ")).then_some(())
    });
}
