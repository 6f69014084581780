//! Checks that the random histories of `histories.rs` find defects. The test puts known and possible defects back into the
//! core, one at a time, and some history must fail because of each defect.
//!
//! One copy of the core has all defects, so it is built only once. The environment variable `DEFECT` names the active defect.
//! Without this variable the copy works like the core. A defect replaces a piece of the code. In the new text, `PUT_BACK`
//! stands for a condition that is true only if this defect is active:
//!
//! ```text
//! today:  "if well == 0 {"
//! defect: "if well == 0 || PUT_BACK {"
//! ```
//!
//! With `ONLY="a part of a name"`, the test tries only the defects with this text in their name. No two defects may replace the
//! same piece of a file.

// clippy.toml allows `unwrap` and the like only in functions marked as tests. The helper functions of this file are not
// marked as tests, and call `unwrap` too.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::thread;

/// The test fails if this number of histories does not find a defect.
const HISTORIES: &str = "10000";

/// The defects that only one history in thousands finds, each with the seed of the first history that the test tries. A history
/// with a slightly greater seed finds the defect. If no history finds a defect after a change of the simulated world,
/// `HISTORIES=100000 ONLY=NAME` searches for another seed.
const SEEDS: &[(&str, &str)] = &[
    ("a container that has ended keeps its slice from its successor", "27900"),
    ("clients of one GPU are ended for a fault that may have been on another", "238200"),
    ("clients that nobody can list after a fatal GPU error are nobody", "14400"),
    ("another control daemon says that a server is well", "10400"),
    ("the GPUs of the newest order count as the GPUs that the start under way was told", "9800"),
    ("a server is ended after the grace though others on it are well", "3100"),
    ("every client of a server with a fatal GPU error is called done", "7200"),
    ("a request believes the list of clients after a fatal GPU error", "6200"),
    ("a control daemon that waits for GPUs counts as starting", "6750"),
];

/// The number of histories for the copy without an active defect. Few suffice, since this copy works like the core, which
/// `histories.rs` tests.
const HISTORIES_WITHOUT: &str = "1000";

/// A defect: its name, its file, the present text, the text that replaces it, and the name of the broken promise. The promise
/// is empty if the defect breaks several promises, since a history may break any of these promises first.
type Defect = (&'static str, &'static str, &'static str, &'static str, &'static str);

const DEFECTS: &[Defect] = &[
    (
        "a control daemon that waits for GPUs counts as starting",
        "lifecycle.rs",
        "None => return self.told.take().map(|_| Next::Wait),",
        "None if PUT_BACK => return None,\n                    \
         None => return self.told.take().map(|_| Next::Wait),",
        "ready-comes",
    ),
    (
        "a control daemon that waits for clients counts as one that ends at once",
        "view.rs",
        "self.put_off = true;",
        "self.put_off = !PUT_BACK;",
        "ready-comes",
    ),
    (
        "the view shows a new order as served before its limits are set",
        "view.rs",
        "gpu.being_set = true;",
        "gpu.being_set = !PUT_BACK;",
        "the-view-is-true",
    ),
    (
        "the view forgets the limits that a control daemon which retires did not get",
        "view.rs",
        "gpu.being_set &= self.retiring || !self.serving;",
        "gpu.being_set &= !PUT_BACK && (self.retiring || !self.serving);",
        "the-view-is-true",
    ),
    (
        "the view shows a GPU as served that its control daemon gets with a restart",
        "serve/check.rs",
        "(None, _) => \"the control daemon serves this GPU only after its next restart\".to_owned(),",
        "(None, _) if PUT_BACK => String::new(),\n                    (None, _) => \"the control daemon \
         serves this GPU only after its next restart\".to_owned(),",
        "the-view-is-true",
    ),
    (
        "a server that has ended gets limits",
        "serve/limits.rs",
        "let Some(known) = self.run.servers.running(server) else { return Ok(None) };",
        "let Some(known) = self.run.servers.get(server).filter(|known| PUT_BACK || known.exit_status.is_none())\n        \
         else {\n            return Ok(None);\n        };",
        "the-ended-get-no-limits",
    ),
    (
        "a client that has come is taken for the one that had its PID before",
        "register/mod.rs",
        "if entry.client.process != process {",
        "if entry.client.process != process && !PUT_BACK {",
        "everybody-is-known",
    ),
    (
        "a client whose last line got lost stays a client",
        "register/mod.rs",
        "is_listed(pid) || now < client.since + LISTED_AFTER",
        "is_listed(pid) || PUT_BACK || now < client.since + LISTED_AFTER",
        "everybody-is-known",
    ),
    (
        "a client without an answer loses the slice that it had",
        "register/mod.rs",
        "slices: before.or(client.slices), ..client",
        "slices: before.filter(|_| !PUT_BACK).or(client.slices), ..client",
        "everybody-is-known",
    ),
    (
        "a program that handles the signal of a stop loses its work",
        "tenants/stop.rs",
        "program == Some(Reception::Fatal) && first",
        "(program == Some(Reception::Fatal) || PUT_BACK) && first",
        "only-the-wanted-are-ended",
    ),
    (
        "a program with a handler for SIGTERM is killed while it is at work",
        "tenants/stop.rs",
        "SIGKILL => Ok(true),\n            SIGTERM | SIGINT | SIGQUIT => {",
        "SIGKILL if !PUT_BACK => Ok(true),\n            SIGKILL | SIGTERM | SIGINT | SIGQUIT => {",
        "a-stop-harms-no-neighbour",
    ),
    (
        "a stop forgets the control groups below a container's",
        "tenants/stop.rs",
        "rest.is_empty() || rest.starts_with('/')",
        "rest.is_empty() || rest.starts_with('/') && !PUT_BACK",
        "a-stop-harms-no-neighbour",
    ),
    (
        "a look that fails takes the driver from everybody",
        "driver.rs",
        "            DriverNews::Listed(_) | DriverNews::Failed => return false,",
        "            DriverNews::Failed if PUT_BACK => return in_force.take().is_some(),\n            \
         DriverNews::Listed(_) | DriverNews::Failed => return false,",
        "a-driver-stays",
    ),
    (
        "a driver that is of no use any more stays in force",
        "driver.rs",
        "DriverNews::Unusable => return in_force.take()",
        "DriverNews::Unusable => return in_force.take_if(|_| !PUT_BACK)",
        "all-is-served-in-the-end",
    ),
    (
        "a door gives a drained slice",
        "access.rs",
        "drained.then_some(Obstacle::Drained)",
        "(drained && !PUT_BACK).then_some(Obstacle::Drained)",
        "one-answer",
    ),
    (
        "a door does not know that a slice is bound to somebody else",
        "access.rs",
        "if self.shares {",
        "if self.shares || PUT_BACK {",
        "one-answer",
    ),
    (
        "a door gives a slice that is not served",
        "access.rs",
        "unserved.map(Obstacle::Unserved)",
        "unserved.filter(|_| !PUT_BACK).map(Obstacle::Unserved)",
        "one-answer",
    ),
    (
        "a state file that is too large to be read is written",
        "bindings.rs",
        "bytes_of(&binding) > LARGEST {",
        "bytes_of(&binding) > if PUT_BACK { usize::MAX } else { LARGEST } {",
        "",
    ),
    (
        "a control group without a process gives its slice away before it had one",
        "bindings.rs",
        "(group_use == GroupUse::Empty && self.was_used)",
        "(group_use == GroupUse::Empty && (self.was_used || PUT_BACK))",
        "a-binding-lasts",
    ),
    (
        "a container that has ended keeps its slice from its successor",
        "bindings.rs",
        "group_use == GroupUse::Used && !one.was_used {",
        "group_use == GroupUse::Used && !one.was_used && !PUT_BACK {",
        "slices-follow-bindings",
    ),
    (
        "root can't bind a slice that the records give to another container",
        "bindings.rs",
        "one.by >= by && holds(one)",
        "(one.by >= by || PUT_BACK) && holds(one)",
        "slices-follow-bindings",
    ),
    (
        "a slice is given to a control group, and another one has it",
        "bindings.rs",
        "if let Some(other) = other {",
        "if let Some(other) = other.filter(|_| !PUT_BACK) {",
        "one-answer",
    ),
    (
        "the name of a control group that a user has made is believed",
        "bindings.rs",
        "owner == Some(ROOT)",
        "owner == Some(ROOT) || PUT_BACK",
        "names-are-roots",
    ),
    (
        "a control group that is bound has no time for its first process",
        "bindings.rs",
        "now.saturating_sub(self.since) >= FIRST_PROCESS",
        "now.saturating_sub(self.since) >= if PUT_BACK { 1 } else { FIRST_PROCESS }",
        "a-binding-lasts",
    ),
    (
        "a binding outlives its control group",
        "bindings.rs",
        "GroupUse::Gone => true,",
        "GroupUse::Gone => !PUT_BACK,",
        "slices-follow-bindings",
    ),
    (
        "a program has the slice of a control group further up",
        "bindings.rs",
        ".max_by_key(|one| one.group.path.len())",
        ".max_by_key(|one| if PUT_BACK { usize::MAX - one.group.path.len() } else { one.group.path.len() })",
        "slices-follow-bindings",
    ),
    (
        "a limit that nobody wants any more stays",
        "kernel_limits.rs",
        "if pursued.goal != goal {",
        "if pursued.goal != goal && !(PUT_BACK && matches!(goal, LimitGoal::Lift(_))) {",
        "limits-go-with-bindings",
    ),
    (
        "a limit is forgotten with the answer that got lost",
        "kernel_limits.rs",
        "pursued.ours.extend(pursued.goal.mib());",
        "if PUT_BACK { pursued.ours = pursued.goal.mib(); } else { pursued.ours.extend(pursued.goal.mib()); }",
        "limits-go-with-bindings",
    ),
    (
        "nobody looks at a limit again",
        "kernel_limits.rs",
        "if is_new { SOON } else { CHECK }",
        "if is_new { SOON } else if PUT_BACK { CHECK * 10_000 } else { CHECK }",
        "limits-go-with-bindings",
    ),
    (
        "the limit of somebody else's hook stays for a minute",
        "kernel_limits.rs",
        "let is_new = is_held",
        "let is_new = !PUT_BACK && is_held",
        "a-shown-limit-is-held",
    ),
    (
        "the limit of several slices is shown as the limit of one",
        "kernel_limits.rs",
        ".filter(|limit| limit.slices.len() == 1)",
        ".filter(|limit| PUT_BACK || limit.slices.len() == 1)",
        "a-shown-limit-is-held",
    ),
    (
        "a GPU is given away that a control daemon on the way out still has",
        "lifecycle.rs",
        "self.written.iter().flatten().any(",
        "self.written.iter().filter(|_| !PUT_BACK).flatten().any(",
        "",
    ),
    (
        "a GPU is given away that a control daemon is just started with",
        "lifecycle.rs",
        "let starts = matches!(",
        "let starts = !PUT_BACK && matches!(",
        "one-has-a-gpu",
    ),
    (
        "the GPUs of the newest order count as the GPUs that the start under way was told",
        "lifecycle.rs",
        "self.told.iter().any(|told| told.has(gpu))",
        "self.told.iter().any(|told| if PUT_BACK { self.order.gpus.iter().any(|one| one == gpu) } else { told.has(gpu) })",
        "",
    ),
    (
        "control daemons that take turns keep GPUs from each other",
        "terms/names.rs",
        "Tenure::InTurns => Self::Gpu(GpuUuid::new()),",
        "Tenure::InTurns if !PUT_BACK => Self::Gpu(GpuUuid::new()),\n            \
         Tenure::InTurns => Self::Slice(GpuId(PciAddress::default()).slice(0)),",
        "all-is-served-in-the-end",
    ),
    (
        "a control daemon has a GPU alone on which others take turns",
        "core.rs",
        "DaemonId::first_that_keeps_from(order.id.tenure())",
        "DaemonId::first_that_keeps_from(if PUT_BACK { crate::Tenure::InTurns } else { order.id.tenure() })",
        "",
    ),
    (
        "one that retires is ended with its clients",
        "lifecycle.rs",
        "Goal::Serve | Goal::Retire if self.watched => DaemonAct::Serve",
        "Goal::Retire if self.watched && PUT_BACK => DaemonAct::End(Permit::new(Cause::Disabled)),\n            \
         Goal::Serve | Goal::Retire if self.watched => DaemonAct::Serve",
        "work-is-safe",
    ),
    (
        "a stopped process is not continued by the health check",
        "serve/check.rs",
        "        self.continue_if_stopped();\n        let mut answer",
        "        if !PUT_BACK { self.continue_if_stopped(); }\n        let mut answer",
        "all-is-served-in-the-end",
    ),
    (
        "another control daemon says that a server is well",
        "serve/heal.rs",
        "HealStep::ServerGone if self.place_is_taken()",
        "HealStep::ServerGone if !PUT_BACK && self.place_is_taken()",
        "what-is-ready-takes-clients",
    ),
    (
        "a server is called well as soon as the last client that was hit has gone",
        "serve/heal.rs",
        "                self.shell.pause(FAULT_PAUSE).await;\n                self.well_again",
        "                if !PUT_BACK { self.shell.pause(FAULT_PAUSE).await; }\n                self.well_again",
        "what-is-ready-takes-clients",
    ),
    (
        "a link that could not be made is not tried again",
        "serve/check.rs",
        "if self.run.configured\n                    && let Some(bad)",
        "if self.run.configured\n                    && !PUT_BACK\n                    && let Some(bad)",
        "",
    ),
    (
        "a driver that refuses multi-user mode is asked for it for ever",
        "serve/start.rs",
        "refuses_multiuser: true, .. }) if multiuser",
        "refuses_multiuser: true, .. }) if multiuser && !PUT_BACK",
        "all-is-served-in-the-end",
    ),
    (
        "what a start finds while MPS is off is ended with its clients",
        "core.rs",
        "MpsSwitch::On | MpsSwitch::OffAtStart => Goal::Retire",
        "MpsSwitch::OffAtStart if PUT_BACK => Goal::Stop(Permit::new(Cause::Disabled)),\n            \
         MpsSwitch::On | MpsSwitch::OffAtStart => Goal::Retire",
        "work-is-safe",
    ),
    (
        "MPS is enabled again, and the end with clients goes on",
        "core.rs",
        "if demand.mps == MpsSwitch::On ||",
        "if (demand.mps == MpsSwitch::On && !PUT_BACK) ||",
        "work-is-safe",
    ),
    (
        "MPS is disabled, and whoever waited for clients is ended with them",
        "core.rs",
        "one.goal() == Goal::Serve {",
        "one.goal() == Goal::Serve || PUT_BACK {",
        "work-is-safe",
    ),
    (
        "a compute mode is put back while a start sets it",
        "lifecycle.rs",
        "if modes_change => return None",
        "if modes_change && !PUT_BACK => return None",
        "",
    ),
    (
        "a compute mode is put back while a control daemon has the GPU",
        "core.rs",
        "self.lifecycles.values().any(|one| one.keeps_mode(gpu))",
        "self.lifecycles.values().any(|one| (!PUT_BACK || one.goal() != Goal::Serve) && one.keeps_mode(gpu))",
        "",
    ),
    (
        "the act under way sets a compute mode for an order of before, after it was put back",
        "lifecycle.rs",
        "|| (sets && still_sets())",
        "|| (!PUT_BACK && sets && still_sets())",
        "modes-come-back",
    ),
    (
        "the GPUs that a control daemon runs with beyond its order are forgotten",
        "lifecycle.rs",
        "running.chain(self.order",
        "running.take(if PUT_BACK { 0 } else { usize::MAX }).chain(self.order",
        "",
    ),
    (
        "one that could not be ended is forgotten, though it runs",
        "core.rs",
        "self.left.insert(id.clone(), written);",
        "if !PUT_BACK { self.left.insert(id.clone(), written); }",
        "modes-stay",
    ),
    (
        "one that the state file can't forget is taken over again and again",
        "lifecycle.rs",
        "written.filter(|_| !is_gone)",
        "written.filter(|_| !is_gone || PUT_BACK)",
        "nothing-spins",
    ),
    (
        "a pause that is over stays due while something else is waited for",
        "lifecycle.rs",
        "                self.phase = Phase::Open;\n                match self.choose",
        "                if !PUT_BACK { self.phase = Phase::Open; }\n                match self.choose",
        "nothing-spins",
    ),
    (
        "one that could not be ended with MPS is left alone for ever",
        "lifecycle.rs",
        "ActOutcome::Lives) if permit.cause() == Cause::Stop",
        "ActOutcome::Lives) if permit.cause() == Cause::Stop || (PUT_BACK && permit.cause() != Cause::Unused)",
        "all-is-served-in-the-end",
    ),
    (
        "an act that failed before the stop counts as one that failed after it",
        "lifecycle.rs",
        "_ if is_stale => {}",
        "_ if is_stale && !PUT_BACK => {}",
        "a-stop-ends-all",
    ),
    (
        "a server is ended after the grace though others on it are well",
        "serve/fault.rs",
        "if well == 0 {",
        "if well == 0 || PUT_BACK {",
        "work-is-safe",
    ),
    (
        "the list of clients is believed after a fatal GPU error",
        "serve/end.rs",
        "Ok(0) if self.is_any_server_faulted().await => {",
        "Ok(0) if !PUT_BACK && self.is_any_server_faulted().await => {",
        "the-door-is-closed-first",
    ),
    (
        "another control daemon that takes the place is asked for the clients of ours",
        "serve/end.rs",
        "self.shell.listener() == Some(self.shell.pid())",
        "(PUT_BACK || self.shell.listener() == Some(self.shell.pid()))",
        "",
    ),
    (
        "clients that nobody can count are nobody",
        "serve/end.rs",
        "Some(error) if clients.is_empty() => Err(",
        "Some(error) if !PUT_BACK && clients.is_empty() => Err(",
        "work-is-safe",
    ),
    (
        "a control daemon is asked to end with the door open",
        "serve/end.rs",
        "self.close_door().await?;",
        "if !PUT_BACK { self.close_door().await?; }",
        "the-door-is-closed-first",
    ),
    (
        "the clients are counted before a program that has just come is one of them",
        "serve/door.rs",
        "self.shell.pause(SETTLING).await;",
        "if !PUT_BACK { self.shell.pause(SETTLING).await; }",
        "the-door-is-closed-first",
    ),
    (
        "programs that have waited begin before a server has the GPUs",
        "serve/door.rs",
        "if self.run.multiuser && self.wanted.prewarm {",
        "if !PUT_BACK && self.run.multiuser && self.wanted.prewarm {",
        "programs-wait-for-a-server",
    ),
    (
        "a faulted server is ended with the door open",
        "serve/heal.rs",
        "AfterGrace::End(may_end, stay) => match self.close_door().await {",
        "AfterGrace::End(may_end, stay) => match if PUT_BACK { Ok(()) } else { self.close_door().await } {",
        "all-is-served-in-the-end",
    ),
    (
        "whoever answers when it is served is taken for ours",
        "serve/check.rs",
        "Ok(_) if self.place_is_taken() => {}",
        "Ok(_) if !PUT_BACK && self.place_is_taken() => {}",
        "",
    ),
    (
        "limits that others have changed stay",
        "serve/limits.rs",
        "self.keep_defaults(look, &limits).await?;\n        for server",
        "if !PUT_BACK { self.keep_defaults(look, &limits).await?; }\n        for server",
        "all-is-served-in-the-end",
    ),
    (
        "one that answers again is not told what it has missed",
        "serve/check.rs",
        "if change == Change::AnswersAgain {",
        "if !PUT_BACK && change == Change::AnswersAgain {",
        "all-is-served-in-the-end",
    ),
    (
        "no server runs ahead of the first client after one has ended",
        "serve/heal.rs",
        "let is_missed = run.servers.alive().is_empty()",
        "let is_missed = !PUT_BACK && run.servers.alive().is_empty()",
        "all-is-served-in-the-end",
    ),
    (
        "a client that was hit is told again",
        "serve/mod.rs",
        "fault.told.clone_from(&fault.clients);",
        "if !PUT_BACK { fault.told.clone_from(&fault.clients); }",
        "who-was-hit-is-told",
    ),
    (
        "a fault hides the clients of the one before",
        "serve/heal.rs",
        "            self.tell_fault();\n            self.run.blockers.put",
        "            if !PUT_BACK { self.tell_fault(); }\n            self.run.blockers.put",
        "who-was-hit-is-told",
    ),
    (
        "one without its directory is started again and again, and nobody can force its end",
        "serve/mod.rs",
        "Err(Failure::Unreachable(error)) => self.is_unreachable(error),",
        "Err(Failure::Unreachable(error)) if PUT_BACK => return Err(Failure::Failed(error)),\n            \
         Err(Failure::Unreachable(error)) => self.is_unreachable(error),",
        "all-is-served-in-the-end",
    ),
    (
        "a drained slice leads to its control daemon",
        "links/mod.rs",
        "Some(true) => LinkTarget::Closed,\n        Some(false) if",
        "Some(true) if !PUT_BACK => LinkTarget::Closed,\n        Some(_) if",
        "drained-takes-none",
    ),
    (
        "a slice leads to a control daemon that goes without its GPU",
        "links/mod.rs",
        "is_some_and(|gpu| gpus.contains(gpu))",
        "is_some_and(|gpu| PUT_BACK || gpus.contains(gpu))",
        "a-slice-leads-home",
    ),
    (
        "the links of a control daemon that nobody looks after stay where a slice is drained",
        "links/mod.rs",
        "LinkTarget::Closed => directories.close_slice(name, None),",
        "LinkTarget::Closed if PUT_BACK && self.socket.is_none() => Ok(()),\n            \
         LinkTarget::Closed => directories.close_slice(name, None),",
        "drained-takes-none",
    ),
    (
        "a drain does not tell that the search for old links has failed",
        "links/mod.rs",
        "self.stuck.extend(incomplete);",
        "self.stuck.extend(incomplete.filter(|_| !PUT_BACK));",
        "drained-takes-none",
    ),
    (
        "a control daemon that is in the way of a start is ended with its clients",
        "serve/start.rs",
        "Permit::unused(clients.as_ref().ok().copied())",
        "Permit::unused(if PUT_BACK { Some(0) } else { clients.as_ref().ok().copied() })",
        "work-is-safe",
    ),
    (
        "a GPU that has refused its compute mode once is never served",
        "serve/gpus.rs",
        "self.take_mode(shell, wanted, &gpu).await.err()",
        "if PUT_BACK { Some(LeftOut::ModeRefused(String::new())) } else { self.take_mode(shell, wanted, &gpu).await.err() }",
        "all-is-served-in-the-end",
    ),
    (
        "whoever was there before the service or the smaller budget is ended for it",
        "tenants/watch.rs",
        "self.spared.contains(&member.process)",
        "!PUT_BACK && self.spared.contains(&member.process)",
        "work-is-safe",
    ),
    (
        "the oldest client of a slice is ended for its budget",
        "tenants/budget.rs",
        "filter(|member| !member.stays).max_by_key(age)",
        "filter(|member| !member.stays).max_by_key(|one| if PUT_BACK { (!age(one).0, 0) } else { age(one) })",
        "work-is-safe",
    ),
    (
        "after a lost answer the next client is ended for the budget as well",
        "tenants/enforce.rs",
        "            if has_lost {",
        "            if has_lost && !PUT_BACK {",
        "work-is-safe",
    ),
    (
        "clients are ended in a slice of several tenants",
        "tenants/budget.rs",
        "others.iter().find(is_anothers)",
        "others.iter().filter(|_| !PUT_BACK).find(is_anothers)",
        "work-is-safe",
    ),
    (
        "clients are ended where one only claims the slice",
        "tenants/budget.rs",
        "find(|member| member.only_claims)",
        "find(|member| !PUT_BACK && member.only_claims)",
        "work-is-safe",
    ),
    (
        "clients are ended where overuse is to be told alone",
        "tenants/watch.rs",
        "                && self.gpu.terminate\n",
        "                && (PUT_BACK || self.gpu.terminate)\n",
        "work-is-safe",
    ),
    (
        "a client that was ended counts for the budget, and another is ended",
        "tenants/enforce.rs",
        "!self.has_ended(shell, pid, listed)",
        "(PUT_BACK || !self.has_ended(shell, pid, listed))",
        "work-is-safe",
    ),
    (
        "overuse that comes and goes is told each time",
        "tenants/overuse.rs",
        "&& self.rate_limit.take(1, now)",
        "&& (PUT_BACK || self.rate_limit.take(1, now))",
        "overuse-is-told-in-measure",
    ),
    (
        "clients of one GPU are ended for a fault that may have been on another",
        "serve/fault.rs",
        "if named.is_empty() && !has_one_gpu {",
        "if named.is_empty() && !has_one_gpu && !PUT_BACK {",
        "work-is-safe",
    ),
    (
        "the next service tells of a fault that is over",
        "serve/heal.rs",
        "self.open_door();\n        self.keep_state_file();",
        "self.open_door();\n        if !PUT_BACK { self.keep_state_file(); }",
        "who-was-hit-is-told",
    ),
    (
        "whoever was hit is written down as told before anybody is told",
        "serve/check.rs",
        "        self.tell_fault();\n",
        "        if !PUT_BACK { self.tell_fault(); }\n",
        "who-was-hit-is-told",
    ),
    (
        "a request is carried out that nobody waits for any more",
        "serve/requests.rs",
        "        if !self.shell.is_awaited() {\n            return Err(\"the caller no longer waits for the answer\".to_owned());\n        }\n        self.end",
        "        if !PUT_BACK && !self.shell.is_awaited() {\n            return Err(\"the caller no longer waits for the answer\".to_owned());\n        }\n        self.end",
        "given-up-is-not-done",
    ),
    (
        "a client is asked to end at a server that handles a fatal GPU error",
        "tenants/end_client.rs",
        "Ok(ServerStatus::Fault) => return",
        "Ok(ServerStatus::Fault) if !PUT_BACK => return",
        "",
    ),
    (
        "a program that acts for another user is ended for its own",
        "tenants/target.rs",
        "users.iter().all(|one| one == user)",
        "users.iter().all(|one| PUT_BACK || one == user)",
        "only-the-wanted-are-ended",
    ),
    (
        "every client of a server with a fatal GPU error is called done",
        "tenants/terminate.rs",
        "ClientEnd::Faulted if has_one_gpu(gpus.as_deref()) => {}",
        "ClientEnd::Faulted if PUT_BACK || has_one_gpu(gpus.as_deref()) => {}",
        "a-request-tells-the-truth",
    ),
    (
        "one look that finds nobody is enough",
        "tenants/terminate.rs",
        "let is_certain = look.is_sure",
        "let is_certain = PUT_BACK || look.is_sure",
        "a-request-tells-the-truth",
    ),
    (
        "a request believes the list of clients after a fatal GPU error",
        "tenants/terminate.rs",
        "if !daemon.faulted.is_empty() && !has_one_gpu {",
        "if !PUT_BACK && !daemon.faulted.is_empty() && !has_one_gpu {",
        "a-request-tells-the-truth",
    ),
    (
        "clients that nobody can list after a fatal GPU error are nobody",
        "tenants/terminate.rs",
        "self.doubt = self.doubt.take().or(doubt);",
        "self.doubt = self.doubt.take().or(doubt.filter(|_| !PUT_BACK));",
        "a-request-tells-the-truth",
    ),
    (
        "the next process with a PID is taken for the held process",
        "tenants/end_client.rs",
        "if !shell.is_alive(held) {",
        "if !PUT_BACK && !shell.is_alive(held) {",
        "only-the-wanted-are-ended",
    ),
    (
        "the next process with the wanted PID is wanted too",
        "tenants/terminate.rs",
        "is_some_and(|named| !shell.is_alive(named))",
        "is_some_and(|named| !PUT_BACK && !shell.is_alive(named))",
        "only-the-wanted-are-ended",
    ),
    (
        "a client that has started over is called done",
        "tenants/terminate.rs",
        "shell.is_alive(held) && !found.connections.is_disjoint(connections)",
        "shell.is_alive(held) && (PUT_BACK || !found.connections.is_disjoint(connections))",
        "a-request-tells-the-truth",
    ),
    (
        "whoever was found is forgotten with a look that fails",
        "tenants/terminate.rs",
        "|| !is_complete && shell",
        "|| !PUT_BACK && !is_complete && shell",
        "a-request-tells-the-truth",
    ),
    (
        "a client is called done without an answer",
        "tenants/terminate.rs",
        "            ClientEnd::Done => {}\n",
        "            ClientEnd::Done => {}\n            ClientEnd::NotKnown(_) if PUT_BACK => {}\n",
        "a-request-tells-the-truth",
    ),
    (
        "a client is called unharmed without an answer",
        "tenants/terminate.rs",
        "self.is_left(key, WhyLeft::MayHaveEnded);",
        "self.is_left(key, if PUT_BACK { WhyLeft::AtWork } else { WhyLeft::MayHaveEnded });",
        "a-request-tells-the-truth",
    ),
    (
        "a request takes the clients of another control daemon for clients of ours",
        "tenants/client_shell.rs",
        "Ok(Some(clients)) if clients.place_is_taken",
        "Ok(Some(clients)) if !PUT_BACK && clients.place_is_taken",
        "a-request-tells-the-truth",
    ),
    (
        "a control daemon that does not answer has no client that is wanted",
        "tenants/client_shell.rs",
        "Err(why) => _ = missing.get_or_insert(why),",
        "Err(_) if PUT_BACK => {}\n            Err(why) => _ = missing.get_or_insert(why),",
        "a-request-tells-the-truth",
    ),
];

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        let target = to.join(file.file_name());
        if file.file_type().unwrap().is_dir() {
            copy_folder(&file.path(), &target);
        } else {
            fs::copy(file.path(), target).unwrap();
        }
    }
}

/// Code that is added to the copied core. It returns whether a defect is active.
const CHOICE: &str = r#"
extern crate std;

pub(crate) fn is_put_back(name: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<std::string::String> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("DEFECT").unwrap_or_default()) == name
}
"#;

/// The `Cargo.toml` of the copied core. The copied core and the copied world form a workspace of their own, without other
/// dependencies.
const CORE: &str = r#"
[workspace]
[package]
name = "yunion-mps-core"
edition = "2024"
[lib]
name = "mps_core"
[dev-dependencies]
yunion-mps-core-world = { path = "world" }
[profile.dev]
opt-level = 1
debug = false
"#;
const WORLD: &str = r#"
[package]
name = "yunion-mps-core-world"
edition = "2024"
[lib]
name = "core_world"
[dependencies]
yunion-mps-core = { path = ".." }
"#;

/// Copies the core and its world, and puts all defects into the copy of the core.
fn copy(to: &Path) {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    copy_folder(&own.join("src"), &to.join("src"));
    copy_folder(&own.join("../../tests/world/src"), &to.join("world/src"));
    fs::create_dir_all(to.join("tests")).unwrap();
    fs::copy(own.join("tests/histories.rs"), to.join("tests/histories.rs")).unwrap();
    fs::write(to.join("Cargo.toml"), CORE).unwrap();
    fs::write(to.join("world/Cargo.toml"), WORLD).unwrap();
    for (name, file, today, defect, _) in DEFECTS {
        let path = to.join("src").join(file);
        let text = fs::read_to_string(&path).unwrap();
        let count = text.matches(today).count();
        assert_eq!(count, 1, "{name}: {file} has {count} times, not once:\n{today}");
        assert!(defect.contains("PUT_BACK"), "{name} is there even if it is not chosen");
        let chosen = defect.replace("PUT_BACK", &format!("crate::is_put_back({name:?})"));
        fs::write(&path, text.replace(today, &chosen)).unwrap();
    }
    let path = to.join("src/lib.rs");
    fs::write(&path, fs::read_to_string(&path).unwrap() + CHOICE).unwrap();
}

/// Builds the test `histories.rs` of the copy, and returns the path of the test program.
fn build(copy: &Path) -> PathBuf {
    let built = Command::new(env!("CARGO"))
        .args(["test", "--offline", "--no-run", "--message-format=json", "--test", "histories"])
        .current_dir(copy)
        .env("CARGO_TARGET_DIR", copy.join("target"))
        .output()
        .unwrap();
    let messages = String::from_utf8(built.stdout).unwrap();
    let program = messages.split(r#""executable":""#).nth(1).and_then(|rest| rest.split('"').next());
    program.unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&built.stderr))).into()
}

/// Runs the histories with this defect. The bool is true if all promises hold. The text is the test program's output. Unless
/// `shortest` is "0", the program also shortens a failing history, which takes much longer than to find the history.
fn try_histories(program: &Path, defect: &str, shortest: &str) -> (bool, String) {
    let mut command = Command::new(program);
    command
        .args(["--exact", "what_must_hold_holds_in_every_history"])
        .env("HISTORIES", if defect.is_empty() { HISTORIES_WITHOUT.to_owned() } else { histories() })
        .env("SHORTEST", shortest)
        .env("DEFECT", defect)
        .env_remove("MODEL_SECONDS")
        .env_remove("MODEL_SEED");
    if let Some((_, seed)) = SEEDS.iter().find(|(rare, _)| *rare == defect) {
        command.env("MODEL_SEED", seed);
    }
    let tried = command.output().unwrap();
    let output =
        [tried.stdout, tried.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    (tried.status.success(), output)
}

fn histories() -> String {
    std::env::var("HISTORIES").unwrap_or_else(|_| HISTORIES.to_owned())
}

/// Returns the reason why the test fails for a defect. `None` if the histories find the defect.
fn missed((name, _, _, _, truth): Defect, program: &Path) -> Option<String> {
    let is_found =
        |(holds, output): &(bool, String)| !holds && output.contains("MODEL_SEED=") && output.contains(truth);
    let mut tried = try_histories(program, name, "0");
    if !tried.0 && !is_found(&tried) {
        // A long history may break another promise before it breaks the promise of the defect, so the program shortens the
        // history.
        tried = try_histories(program, name, "1");
    }
    let output = &tried.1;
    (!is_found(&tried)).then(|| format!("{name}: {}", output.lines().take(12).collect::<Vec<_>>().join("\n")))
}

fn chosen() -> impl Iterator<Item = Defect> {
    let only = std::env::var("ONLY").unwrap_or_default();
    DEFECTS.iter().copied().filter(move |defect| defect.0.contains(&only))
}

#[test]
fn each_defect_that_is_put_back_is_found() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("defects");
    copy(&folder);
    let program = build(&folder);
    let (holds, output) = try_histories(&program, "", "1");
    assert!(holds, "no defect is chosen, and the copy has one:\n{output}");
    let (chosen, not_found) = (Mutex::new(chosen()), Mutex::new(Vec::new()));
    let next = || chosen.lock().unwrap().next();
    let try_on = || {
        while let Some(defect) = next() {
            let missed = missed(defect, &program);
            not_found.lock().unwrap().extend(missed);
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(try_on);
        }
    });
    let missed = not_found.into_inner().unwrap();
    assert!(missed.is_empty(), "{} defects are not found:\n{}", missed.len(), missed.join("\n"));
}
