//! Takes over a control daemon of an earlier service, or starts a new one. An idle foreign control daemon in the pipe directory
//! is ended first.

use common::host::program;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mps_core::serve::{self, Failure, GpuReach, Known, StartPlace, Starter, Stranger, WantedUsers};
use mps_core::{CoreTime, GpuUuid, Permit, Tenure};

use crate::mps::control::{Control, ControlError};
use crate::mps::launch::PausedProcess;
use crate::mps::log::Follower;
use crate::mps::process::{self, Process};
use common::directories::{self, BadDirectory, immutable};
use common::host::{driver, systemd};
use common::plan::ControlDaemonPlan;
use common::problem::Problem;
use common::state_file::Running;

use super::daemon_run::DaemonRun;
use super::{Machine, PROGRAM, Worker};

impl Machine {
    pub(super) async fn take_over(&mut self) -> Result<(), Failure> {
        let id = self.worker.reporter.id();
        let Some(running) = self.worker.tools.state_file.lock().control_daemon(&id).cloned() else {
            return Ok(());
        };
        let process = match Process::adopt(running.process) {
            Ok(Some(process)) => process,
            Ok(None) => {
                self.worker.end_run(&mut self.run, None);
                return Ok(());
            }
            Err(error) => {
                let pid = running.process.pid;
                return Err(Failure::Failed(format!(
                    "the service can't take over the running control daemon (PID {pid}): {error}"
                )));
            }
        };
        let control = Arc::new(self.worker.tools.front_ends.control_in(running.control_directory()));
        let pid = running.process.pid;
        let log_path = running.log_directory.join("control.log");
        // The log is the standard output of the control daemon. The service opens it there, since the file in the log directory
        // may have been removed. It reads the log from the beginning, since the lines about a server that still runs may be
        // old.
        let log = process.output_file().and_then(|file| {
            let length = file.metadata()?.len();
            Ok((Follower::new(file, &log_path, 0, &self.worker.tools.changes), length))
        });
        let (log, length) = log.map_err(|error| {
            Failure::Failed(format!("the log of control daemon PID {pid} can't be opened: {error}"))
        })?;
        // Another program may have truncated the log while no service ran. The saved offset is then too large, and new lines
        // would not be passed on to the journal.
        let quiet_until = running.log_offset.min(length);
        self.worker.has_run = true;
        self.worker.reporter.update(|status| status.view.pid = Some(pid));
        let run = DaemonRun::new(process, running, control, log, quiet_until);
        if !self.hold(run).take_over().await? {
            self.worker.end_run(&mut self.run, None);
        }
        Ok(())
    }

    pub(super) async fn start(&mut self) -> Result<(), Failure> {
        let (plan, wanted) = (&self.worker.plan, self.worker.wanted());
        let has_other_ways = plan.slice_directories.is_some() || plan.private_directory.is_some();
        let users = WantedUsers {
            multiuser: plan.multiuser && !self.worker.multiuser_refused,
            is_optional: plan.multiuser_optional,
            without: if has_other_ways { "off" } else { "auto" },
        };
        let mut shell = StartShell { worker: &mut self.worker, run: &mut self.run, program: PathBuf::new() };
        let multiuser = serve::start(&mut shell, &mut self.reach, &wanted, users).await?;
        self.worker.multiuser_refused |= users.multiuser && !multiuser;
        if std::mem::replace(&mut self.worker.has_run, true) {
            self.worker.reporter.update(|status| status.view.restarts += 1);
        }
        Ok(())
    }
}

#[derive(Debug)]
struct StartShell<'m> {
    worker: &'m mut Worker,
    run: &'m mut Option<(DaemonRun, Known)>,
    /// The path of the control daemon's program. Empty until `find_program` sets it.
    program: PathBuf,
}

impl Starter for StartShell<'_> {
    type Gpus = Worker;

    fn gpus(&mut self) -> &mut Worker {
        self.worker
    }

    fn now(&self) -> CoreTime {
        self.worker.tools.begun.elapsed()
    }

    fn find_program(&mut self) -> Result<(), Failure> {
        self.program = program::find_program(PROGRAM).map_err(|reason| Failure::Waiting(reason.into()))?;
        Ok(())
    }

    async fn stranger(&mut self, place: StartPlace) -> Result<Option<Stranger>, Failure> {
        let (control, directory) = self.worker.control_in(place);
        if control.is_nobody() || place == StartPlace::Pipe && control.daemon_pid().is_none() {
            return Ok(None);
        }
        let clients = match control.client_pids(&[]).await {
            Err(ControlError::NoDaemon { .. }) => return Ok(None),
            Err(error @ ControlError::NotRun { .. }) => return Err(error.into()),
            // No process listens in the pipe directory. So the error comes from the front end (`nvidia-cuda-mps-control`), and
            // not from a control daemon.
            Err(error) if control.daemon_pid().is_none() => return Err(error.into()),
            Err(error) => Err(error.to_string()),
            Ok(clients) => Ok(clients.values().flatten().count()),
        };
        let directory = directory.display().to_string();
        let end_it = format!(
            "end this control daemon with `echo quit | CUDA_MPS_PIPE_DIRECTORY={directory} {PROGRAM}`"
        );
        Ok(Some(Stranger { pid: control.daemon_pid(), directory, end_it, clients }))
    }

    async fn end_stranger(&mut self, place: StartPlace, pid: u32, may_end: Permit) -> Result<bool, Failure> {
        let taken = Process::open(pid).map_err(|error| {
            Failure::Failed(format!("the process of control daemon PID {pid} can't be opened: {error}"))
        })?;
        let Some(mut other) = taken else { return Ok(true) };
        let (control, _) = self.worker.control_in(place);
        Ok(process::stop_idle(&mut other, &control, may_end).await)
    }

    fn open_directories(&mut self) -> Result<bool, Failure> {
        let plan = &self.worker.plan;
        let bad_directory = |error: BadDirectory| Failure::Waiting(error.to_string());
        let mut moved = Vec::new();
        let pipe = match (plan.tenure(), plan.pipe_directory.parent()) {
            // The service may have made the parent directory immutable, to protect it for a control daemon of another GPU.
            // `open_in` removes the immutable flag while it changes the directory.
            (Tenure::InTurns, Some(above)) => directories::open(above)
                .and_then(|above| directories::open_in(&above, &plan.pipe_directory, &mut moved)),
            _ => directories::open(&plan.pipe_directory),
        };
        let pipe = pipe.map_err(bad_directory)?;
        if plan.private_directory.is_none() || plan.log_directory.starts_with(&plan.pipe_directory) {
            // The control daemon makes files in this directory. So the service removes the immutable flag that it may have set
            // for an earlier control daemon.
            let _ = immutable::set(&pipe, false);
        }
        let reporter = &mut self.worker.reporter;
        for what in moved {
            reporter.warning(what);
        }
        let Some(private) = &plan.private_directory else { return Ok(false) };
        directories::open_private(private).map_err(bad_directory)?;
        Ok(true)
    }

    async fn spawn(&mut self, gpus: &[GpuUuid], multiuser: bool) -> Result<(), Failure> {
        let (control, _) = self.worker.control_in(StartPlace::Own);
        let run = self.worker.spawn(&self.program, &Arc::new(control), gpus, multiuser).await?;
        let known = self.worker.knows_of(&run, true);
        *self.run = Some((run, known));
        Ok(())
    }

    async fn comes_up(&mut self, reach: &mut GpuReach) -> Result<(), Failure> {
        match self.run {
            Some((run, known)) => self.worker.serving(run, known, reach, None).listens().await,
            None => Ok(()),
        }
    }

    fn has_ended(&mut self) {
        self.worker.end_run(self.run, None);
    }
}

impl Worker {
    fn control_in(&self, place: StartPlace) -> (Control, &Path) {
        let plan = &self.plan;
        let directory = match place {
            StartPlace::Own => plan.control_directory(),
            StartPlace::Pipe => &plan.pipe_directory,
        };
        (self.tools.front_ends.control_in(directory), directory)
    }

    fn write_down(&self, running: &Running) -> Result<(), Failure> {
        let written =
            self.tools.state_file.lock().remember_control_daemon(self.reporter.id(), running.clone());
        written.map_err(|error| {
            Failure::Failed(format!(
                "the control daemon is not started, since its PID can't be saved in the state file: {error}"
            ))
        })
    }

    /// Makes room for the FIFO that the control daemon makes for its log. Returns a message if the service has renamed a
    /// directory for this.
    fn free_place_of_fifo(&self) -> Result<Option<String>, BadDirectory> {
        let plan = &self.plan;
        let place = plan.control_directory().join(driver::LOG_FIFO);
        // Without a private directory, the control daemon makes its FIFO in the pipe directory. The configured log directory
        // may be at the path of this FIFO.
        if plan.log_directory.starts_with(&place) {
            let problem = Problem::new(
                "is the path at which the control daemon makes a FIFO, so the control daemon would write no \
                 log",
                "set cuda_mps_log_directory to a directory outside of the pipe directory",
            );
            return Err(BadDirectory { path: plan.log_directory.clone(), problem });
        }
        directories::free_place_of_fifo(plan.control_directory())
    }

    async fn spawn(
        &mut self,
        program: &Path,
        control: &Arc<Control>,
        gpus: &[String],
        multiuser: bool,
    ) -> Result<DaemonRun, Failure> {
        let plan = &self.plan;
        let id = self.reporter.id();
        let not_started =
            |error: std::io::Error| Failure::Failed(format!("the control daemon can't be started: {error}"));
        let waiting = |error: BadDirectory| Failure::Waiting(error.to_string());
        self.free_place_of_fifo().map_err(waiting)?.into_iter().for_each(|what| self.reporter.warning(what));
        let logs = directories::open(&plan.log_directory).map_err(waiting)?;
        let path = plan.log_directory.join("control.log");
        let log_error = |error: std::io::Error| Failure::Failed(format!("{}: {error}", path.display()));
        let mut moved = Vec::new();
        let (output, file) = directories::open_log(&logs, "control.log", &mut moved).map_err(log_error)?;
        for what in moved {
            self.reporter.warning(format!("{path} {what}; the log is a new file", path = path.display()));
        }
        let begin = file.metadata().map_err(log_error)?.len();
        let log = Follower::new(file, &path, begin, &self.tools.changes);

        let waiting = PausedProcess::start(
            program,
            &driver::control_daemon_arguments(multiuser),
            plan.cpus,
            &environment(plan, gpus),
            output,
        )
        .map_err(not_started)?;
        let running = Running {
            process: waiting.identity(),
            pipe_directory: plan.pipe_directory.clone(),
            private_directory: plan.private_directory.clone(),
            slice_directories: plan.slice_directories.clone(),
            log_directory: plan.log_directory.clone(),
            gpus: gpus.to_vec(),
            gpu_names: plan.gpu_names(gpus),
            multiuser,
            near_cpus: plan.cpus.is_some(),
            log_offset: begin,
        };
        let pid = running.process.pid;
        tracing::debug!(
            step = "spawned",
            "process {pid} waits until the service lets it become control daemon {id}"
        );
        self.write_down(&running)?;
        tracing::debug!(step = "written-down", "the state file has process {pid} as control daemon {id}");
        if systemd::runs_us() {
            match systemd::move_to_scope(&id.to_string(), pid).await {
                Ok(scope) => tracing::debug!(step = "scope", "process {pid} is in systemd's unit {scope}"),
                Err(error) => {
                    self.reporter.warning(format!(
                        "systemd can't move control daemon {id} to a scope, so the control daemon stays in the \
                         control group of this service: {error}"
                    ));
                    systemd::lift_limits().await.map_err(|error| {
                        Failure::Failed(format!(
                            "control daemon {id} is not started: MemoryMax= and TasksMax= of this service \
                             would apply to the control daemon, and can't be lifted: {error}"
                        ))
                    })?;
                }
            }
        }
        let process = waiting.go().await.map_err(not_started)?;
        tracing::debug!(step = "started", "process {pid} becomes control daemon {id}");
        self.reporter.update(|status| {
            status.view.pid = Some(pid);
            status.view.starts += 1;
        });
        self.reporter.event(format!("control daemon {id} started as PID {pid}"));
        Ok(DaemonRun::new(process, running, Arc::clone(control), log, 0))
    }
}

fn environment(plan: &ControlDaemonPlan, gpus: &[String]) -> [(&'static str, String); 4] {
    [
        (driver::PROTOCOL.0, driver::PROTOCOL.1.to_owned()),
        ("CUDA_MPS_PIPE_DIRECTORY", plan.control_directory().display().to_string()),
        ("CUDA_MPS_LOG_DIRECTORY", plan.log_directory.display().to_string()),
        ("CUDA_VISIBLE_DEVICES", gpus.join(",")),
    ]
}
