//! The limits of slices: which are watched over, and the messages about them.

use super::requests::Finished;
use super::{Daemon, FAULTS};
use crate::dbus::Reply;
use crate::message::{Message, Subject};
use crate::tenants::budgets::{GpuBudget, LoopEvent};
use common::plan::Plan;

impl Daemon {
    /// Watches over the slices of this plan, and has the kernel hold the memory limits of bound control groups.
    pub(super) fn keep_limits(&mut self, plan: &Plan) {
        self.keep_kernel_limits(plan);
        self.keep_budgets(plan);
    }

    /// Watches over the slices of this plan.
    pub(super) fn keep_budgets(&mut self, plan: &Plan) {
        // A client may have another slice now.
        self.fleet.clients().pursue(self.fleet.slices());
        let on_overuse = self.settings.on_overuse;
        self.budgets.pursue(plan.gpus.iter().filter_map(|gpu| GpuBudget::from_plan(gpu, on_overuse)));
    }

    /// Looks at the clients of all GPUs. At the answer the numbers are published.
    pub(super) fn look_at_clients(&mut self, reply: Reply<()>) {
        let looked = self.budgets.look_now();
        self.requests.beside.spawn(async move {
            looked.await;
            Finished { event: None, answer: Ok(()), reply }
        });
    }

    /// Tells an event, or answers it.
    pub(super) fn handle(&mut self, event: LoopEvent) {
        match event {
            LoopEvent::CriticalError(uuid, error) => self.met(&uuid, error),
            LoopEvent::Daemons(reply) => drop(reply.send(self.fleet.with_clients())),
            LoopEvent::Recorded(container, device) => self.bind_recorded(container, device),
            LoopEvent::Event(text) => self.event(text),
            LoopEvent::CutBack(device, text) => self.tell_of_slice(Message::CutBack, &device, text),
            LoopEvent::OverUse(slice, signal, text) => {
                self.tell_of_slice(Message::OverBudget, &slice, text);
                // A listener finds it published.
                self.settle();
                // Half of the places are for faults.
                if self.signals.capacity() <= FAULTS || self.signals.try_send(signal).is_err() {
                    tracing::debug!("the bus gets no signal of the overuse of {slice}");
                }
            }
        }
    }

    fn tell_of_slice(&mut self, message: Message, slice: &str, text: String) {
        message.log(Subject { slice: Some(slice), ..Subject::default() }, &text);
        self.events.push(message.event(text));
    }
}
