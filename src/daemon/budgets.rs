//! The part of the main loop for the limits of slices: it has the budgets of slices watched, has the kernel enforce memory
//! limits, and reports the slices that exceed their budgets.

use super::requests::Finished;
use super::{Daemon, FAULTS};
use crate::dbus::Reply;
use crate::message::{Message, Subject};
use crate::tenants::budgets::{GpuBudget, LoopEvent};
use common::plan::Plan;

impl Daemon {
    pub(super) fn keep_limits(&mut self, plan: &Plan) {
        self.keep_kernel_limits(plan);
        self.keep_budgets(plan);
    }

    pub(super) fn keep_budgets(&mut self, plan: &Plan) {
        // With a new plan or binding, a client may belong to another slice than before. So the register of clients gets the new
        // slices first.
        self.fleet.clients().pursue(self.fleet.slices());
        let on_overuse = self.settings.on_overuse;
        self.budgets.pursue(plan.gpus.iter().filter_map(|gpu| GpuBudget::from_plan(gpu, on_overuse)));
    }

    /// The answer comes when the present clients of all GPUs and their memory are published.
    pub(super) fn look_at_clients(&mut self, reply: Reply<()>) {
        let looked = self.budgets.look_now();
        self.requests.beside.spawn(async move {
            looked.await;
            Finished { event: None, answer: Ok(()), reply }
        });
    }

    pub(super) fn handle(&mut self, event: LoopEvent) {
        match event {
            LoopEvent::CriticalError(uuid, error) => self.met(&uuid, error),
            LoopEvent::Recorded(container, device) => self.bind_recorded(container, device),
            LoopEvent::Event(text) => self.event(text),
            LoopEvent::CutBack(device, text) => self.tell_of_slice(Message::CutBack, &device, text),
            LoopEvent::OverUse(slice, signal, text) => {
                self.tell_of_slice(Message::OverBudget, &slice, text);
                // The new state is published before the signal, so that a program that receives the signal reads the new state.
                self.settle();
                // Signals about overuse fill at most half of the queue, so that signals about faults always have room.
                if self.signals.capacity() <= FAULTS || self.signals.try_send(signal).is_err() {
                    tracing::debug!(
                        "the D-Bus signal OverUse of {slice} is not sent, since too many signals wait"
                    );
                }
            }
        }
    }

    fn tell_of_slice(&mut self, message: Message, slice: &str, text: String) {
        message.log(Subject { slice: Some(slice), ..Subject::default() }, &text);
        self.events.push(message.event(text));
    }
}
