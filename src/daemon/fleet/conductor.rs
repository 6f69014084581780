//! Passes events to `mps_core::Core`, which decides about the control daemons, and has supervisors carry out its acts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mps_core::{Act, Core, CoreEvent, DaemonId, ModeOutcome};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until};

use crate::message::{Message, Subject};
use crate::mps::control::Control;
use crate::supervisor::{SupervisorHandle, Tools};
use crate::tenants::ending_shell::ClientsDaemon;
use common::host::compute_mode::ComputeMode;
use common::host::identity;
use common::plan::ControlDaemonPlan;

/// The core, shared by all parts of the service that have events for it. The results of acts reach the core even while the main
/// loop waits for something.
#[derive(Debug, Clone)]
pub(super) struct Conductor {
    conducted: Arc<Mutex<Conducted>>,
    /// Notified when [`mps_core::Core::due`] may have changed.
    moved: Arc<Notify>,
}

#[derive(Debug)]
pub(super) struct Conducted {
    pub(super) core: Core<ControlDaemonPlan>,
    /// A control daemon that waits for its GPUs has no supervisor yet.
    pub(super) supervisors: BTreeMap<DaemonId, SupervisorHandle>,
    tools: Tools,
    events: mpsc::UnboundedSender<CoreEvent<ControlDaemonPlan>>,
}

impl Conductor {
    pub(super) fn new(tools: Tools) -> Self {
        let (events, happened) = mpsc::unbounded_channel();
        let core = {
            let state_file = tools.state_file.lock();
            let left =
                state_file.control_daemons().iter().map(|(id, running)| (id.clone(), running.gpus.clone()));
            Core::new(left.collect(), state_file.changed_gpus())
        };
        let changed = Arc::clone(&tools.changed);
        let conducted = Conducted { core, supervisors: BTreeMap::new(), tools, events };
        let conductor = Self { conducted: Arc::new(Mutex::new(conducted)), moved: Arc::default() };
        tokio::spawn(conductor.clone().pass_on(happened, changed));
        conductor
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Conducted> {
        self.conducted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns each control daemon of the service that runs, even if it was not taken over. Also returns foreign control
    /// daemons that listen in directories of the service.
    pub(super) fn with_clients(&self) -> Vec<ClientsDaemon> {
        let Conducted { core, supervisors, tools, .. } = &*self.lock();
        let followed = supervisors.iter().filter(|(id, _)| core.goal(id).is_some());
        let mut in_place: BTreeMap<&DaemonId, Arc<Control>> =
            followed.filter_map(|(id, supervisor)| Some((id, supervisor.control_in_place()?))).collect();
        let state_file = tools.state_file.lock();
        let running =
            state_file.control_daemons().iter().filter(|(_, running)| identity::runs(running.process));
        let mut all: Vec<ClientsDaemon> = running
            .map(|(id, running)| {
                in_place.remove(id);
                let control = Arc::new(tools.front_ends.control_in(running.control_directory()));
                ClientsDaemon { control, slice: id.only_slice(), ours: Some(running.clone()) }
            })
            .collect();
        let others = in_place.into_iter();
        all.extend(others.map(|(id, control)| ClientsDaemon { control, slice: id.only_slice(), ours: None }));
        all
    }

    pub(super) fn on(&self, event: CoreEvent<ControlDaemonPlan>) {
        self.lock().on(event);
        self.moved.notify_one();
    }

    /// Gives the core the results of acts, and `CoreEvent::Due` at each moment for which the core waits. The main loop is
    /// notified after each event.
    async fn pass_on(
        self,
        mut happened: mpsc::UnboundedReceiver<CoreEvent<ControlDaemonPlan>>,
        changed: Arc<Notify>,
    ) {
        loop {
            let due = self.lock().due();
            let event = tokio::select! {
                event = happened.recv() => event,
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => Some(CoreEvent::Due),
                () = self.moved.notified() => continue,
            };
            let Some(event) = event else { return };
            self.lock().on(event);
            changed.notify_one();
        }
    }
}

impl Conducted {
    fn due(&self) -> Option<Instant> {
        self.core.due().map(|due| self.tools.begun + due)
    }

    fn on(&mut self, event: CoreEvent<ControlDaemonPlan>) {
        let is_answer = matches!(event, CoreEvent::Done { .. } | CoreEvent::ModeDone { .. } | CoreEvent::Due);
        let acts = self.core.on(event, self.tools.begun.elapsed());
        if !is_answer {
            for (id, supervisor) in &mut self.supervisors {
                if let (Some(order), Some(goal)) = (self.core.order(id), self.core.goal(id)) {
                    supervisor.follow(&order.payload, goal);
                }
            }
        }
        for act in acts {
            self.carry_out(act);
        }
    }

    fn carry_out(&mut self, act: Act<ControlDaemonPlan>) {
        match act {
            Act::Daemon { id, order, goal, held, act } => {
                let new =
                    || SupervisorHandle::new(&order.payload, goal, self.tools.clone(), self.events.clone());
                self.supervisors.entry(id).or_insert_with(new).carry_out(order, goal, held, act);
            }
            Act::Interrupt { id } => {
                if let Some(supervisor) = self.supervisors.get_mut(&id) {
                    supervisor.interrupt();
                }
            }
            Act::Release { id } => {
                if let Some(supervisor) = self.supervisors.remove(&id) {
                    supervisor.release();
                }
            }
            Act::TakeMode(gpu) => {
                let nvml = self.tools.nvml.clone();
                self.see_to_mode(gpu, async move |gpu| {
                    if let Err(error) = nvml.take(&gpu, ComputeMode::ExclusiveProcess).await {
                        tracing::warn!(gpu_uuid = gpu, "the compute mode of {gpu} can't be set: {error}");
                    }
                    ModeOutcome::Taken
                });
            }
            Act::PutModeBack(gpu) => {
                let nvml = self.tools.nvml.clone();
                self.see_to_mode(gpu, async move |gpu| match nvml.put_back(&gpu).await {
                    Ok(()) => ModeOutcome::PutBack,
                    Err(error) => {
                        let text = format_args!("compute mode of {gpu} can't be restored: {error}");
                        Message::ComputeModeStays.log(Subject::gpu(&gpu), text);
                        ModeOutcome::Stays
                    }
                });
            }
        }
    }

    fn see_to_mode<F>(&self, gpu: String, what: impl FnOnce(String) -> F)
    where
        F: Future<Output = ModeOutcome> + Send + 'static,
    {
        let events = self.events.clone();
        let done = what(gpu.clone());
        tokio::spawn(async move {
            let outcome = done.await;
            // Sending fails only at the end of the service, when the receiver is dropped.
            let _ = events.send(CoreEvent::ModeDone { gpu, outcome });
        });
    }
}
