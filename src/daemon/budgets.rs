//! The budgets of slices: which are watched over, and what is told of them.

use super::Daemon;
use crate::membership::Slices;
use crate::message::{About, Message};
use crate::mps::control::Caller;
use crate::plan::Plan;
use crate::tenants::budgets::{GpuBudget, News};

impl Daemon {
    /// Watches over the slices of this plan.
    pub(super) fn keep_budgets(&mut self, plan: &Plan) {
        // A control daemon on the way out may still have clients, in another pipe directory.
        let leaving = self.fleet.statuses_of_leaving();
        let plans = plan.control_daemons.iter().chain(leaving.iter().map(|status| &status.plan));
        let slices = Slices::of(plans);
        let on_overuse = self.settings.on_overuse;
        self.budgets.pursue(plan.gpus.iter().filter_map(|gpu| GpuBudget::of(gpu, on_overuse, &slices)));
    }

    /// Tells the news of a watch, or answers it.
    pub(super) fn take_news(&mut self, news: News) {
        match news {
            News::Controls(reply) => drop(reply.send(self.fleet.controls(Caller::Root, false))),
            News::Event(text) => self.event(text),
            News::CutBack(device, text) => self.tell_of_slice(Message::CutBack, &device, text),
            News::OverUse(overuse, text) => {
                self.tell_of_slice(Message::OverBudget, &overuse.device, text);
                // Whoever hears of it finds it published.
                self.settle();
                if let Err(error) = self.overuses.try_send(overuse) {
                    tracing::debug!("the bus is not told of an overuse: {error}");
                }
            }
        }
    }

    fn tell_of_slice(&mut self, message: Message, slice: &str, text: String) {
        message.log(About { slice: Some(slice), ..About::default() }, &text);
        self.keep_event(text);
    }
}
