//! Programs without MPS that have only just come to a GPU. Such a program most often ends soon: it was started while no control
//! daemon ran. If a control daemon starts without this GPU, it has to start again for it, after the last client of the other
//! GPUs has ended. If it starts with this GPU, it serves the GPU as soon as the program ends. Meanwhile no other program
//! gets in, since a program that finds a control daemon connects to it.

use std::time::Duration;

use crate::host::inventory::Inventory;
use crate::host::proc;

/// The time that such a program gets to end. After that its GPU is left out, and the others are served without it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Removes these programs from the inventory. Gives the time until the first of them has had its time.
pub(super) fn pass_over(inventory: &mut Inventory) -> Option<Duration> {
    let up = proc::uptime()?;
    let mut first: Option<Duration> = None;
    for facts in inventory.gpus.iter_mut().filter_map(|gpu| gpu.nvml.as_mut().ok()) {
        facts.foreign_processes.retain(|(pid, _)| {
            let left = proc::started(*pid).and_then(|started| PATIENCE.checked_sub(up.checked_sub(started)?));
            let left = left.filter(|left| !left.is_zero());
            first = [first, left].into_iter().flatten().min();
            left.is_none()
        });
    }
    first
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::publish::snapshot::tests::gpu;

    #[test]
    fn who_has_just_come_is_passed_over_and_who_stays_is_not() {
        let mut new = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let mut view = gpu("00:06.0", "GPU-1").plan.gpu;
        let facts = view.nvml.as_mut().unwrap();
        facts.foreign_processes = vec![(new.id(), "cat".to_owned()), (1, "init".to_owned())];
        let mut inventory =
            Inventory { driver: Ok(String::new()), gpus: vec![view], others: Vec::new(), cpus: None };
        let left = pass_over(&mut inventory).unwrap();
        assert!(left > Duration::ZERO && left <= PATIENCE, "{left:?}");
        let there =
            |inventory: &Inventory| inventory.gpus[0].nvml.as_ref().unwrap().foreign_processes.clone();
        assert_eq!(there(&inventory), [(1, "init".to_owned())]);
        assert_eq!(pass_over(&mut inventory), None);
        assert_eq!(there(&inventory).len(), 1);
        new.kill().unwrap();
        new.wait().unwrap();
    }
}
