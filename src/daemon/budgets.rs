//! The limits of slices: which are watched over, and what is told of them.

use tokio::sync::oneshot;

use super::Daemon;
use crate::dbus::Reply;
use crate::message::{Message, Subject};
use crate::tenants::budgets::{BudgetEvent, GpuBudget};
use common::plan::Plan;

impl Daemon {
    /// Watches over the slices of this plan, and has the kernel hold the memory limits of bound control groups.
    pub(super) fn keep_limits(&mut self, plan: &Plan) {
        self.keep_kernel_limits(plan);
        self.keep_budgets(plan);
    }

    /// Watches over the slices of this plan.
    pub(super) fn keep_budgets(&mut self, plan: &Plan) {
        let slices = self.fleet.slices();
        let on_overuse = self.settings.on_overuse;
        self.budgets
            .pursue(plan.gpus.iter().filter_map(|gpu| GpuBudget::from_plan(gpu, on_overuse, &slices)));
    }

    /// Looks at the clients of all GPUs. Whoever has asked finds the numbers published.
    pub(super) fn look_at_clients(&self, reply: Reply<()>) {
        let (published, is_published) = oneshot::channel();
        self.budgets.look_now(published);
        tokio::spawn(async move {
            let _ = is_published.await;
            let _ = reply.send(Ok(()));
        });
    }

    /// Tells the event of a watch, or answers it.
    pub(super) fn handle_budget_event(&mut self, event: BudgetEvent) {
        match event {
            BudgetEvent::Daemons(reply) => drop(reply.send(self.fleet.with_clients())),
            BudgetEvent::Recorded(container) => self.bind_recorded(container),
            BudgetEvent::Event(text) => self.event(text),
            BudgetEvent::Looked(published) => {
                self.settle();
                let _ = published.send(());
            }
            BudgetEvent::CutBack(device, text) => self.tell_of_slice(Message::CutBack, &device, text),
            BudgetEvent::OverUse(overuse, text) => {
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
        message.log(Subject { slice: Some(slice), ..Subject::default() }, &text);
        self.events.push(message.event(text));
    }
}
