//! The promises of the core. An assertion begins with the name of its promise. `scripts/promises.py` writes these words into
//! docs/architecture.md.
//!
//! * work-is-safe: a control daemon ends together with its clients only for a stop for good, if MPS is disabled, or for
//!   `--force`; a server with a fatal GPU error ends only with clients that the error has hit; a client ends for the
//!   budget of its slice only if the slice belongs to one tenant, the client is newer than the clients that stay, the
//!   budget stays exceeded if the client does not end, the client has come since the budget got this small, and no other
//!   client of the slice may have lost its work already
//! * the-door-is-closed-first: when the service asks a control daemon without clients to end, no link leads to the
//!   control daemon, and the control daemon has noticed every program that has connected; no program gets CUDA error 805
//! * programs-wait-for-a-server: programs that come while the links point to the waiting socket begin once a server has
//!   the GPUs, and not before
//! * given-up-is-not-done: the service ends no work for an `apply --force` after the caller got the answer that the
//!   request timed out
//! * limits-are-in-force: a control daemon that is shown as ready has the limits of its order, unless another program has
//!   changed the limits since the last check
//! * what-is-ready-takes-clients: no server of a control daemon that is shown as ready has a fatal GPU error that the
//!   service has read in the log
//! * the-ended-get-no-limits: once the service has read in the log that a server has ended, the service sets no
//!   limits of this server
//! * the-view-is-true: a control daemon that is shown as serving a GPU has the GPU, with the limits of its order, unless
//!   something has happened that the service can't know yet
//! * ready-comes: if nothing happens for four minutes, the service says that it is ready, however long its troubles last:
//!   each order is in force, or the view has the reason why the order is not in force
//! * the-view-settles: on a host without events nothing in the view of a control daemon changes
//! * who-was-hit-is-told: each client that was hit by a fatal GPU error is reported once, and no other client
//! * everybody-is-known: each message about a client names its tenant and its slice, from its first line in the log to
//!   the report of its end, and never those of another process with the same PID; the register has all clients of each
//!   control daemon, even clients with lost log lines
//! * ours-are-no-strangers: no server or client of the service is called a bypass
//! * one-has-a-gpu: no two control daemons of the service have the same GPU, unless the control daemons take turns on the GPU
//! * who-runs-is-written-down: each running control daemon of the service is in the state file, once
//! * only-the-wanted-are-ended: a request ends the work of the clients that it means, and of no other client
//! * a-request-tells-the-truth: once a request to end work is done, no client that the request means is at work;
//!   otherwise the answer names each such client that is still at work, and each client that may have ended without an
//!   answer
//! * a-stop-harms-no-neighbour: once the service has answered a container runtime, no client is at work that the
//!   runtime's signal may end
//! * a-request-holds-up-nobody: the service asks for the end of no client at a server that handles a fatal GPU error,
//!   since the control daemon would wait for the client
//! * slices-follow-bindings: a program in a bound control group has the slices of the nearest binding and no other, no
//!   program elsewhere claims such a slice, and without sharing no two tenants have the same slice
//! * one-answer: all parts of the service that give out slices give the same answer about a slice at the same moment; a
//!   program that may have the slice, and begins at once, comes to a control daemon with the limits of the slice, unless
//!   something has happened that the service can't know yet; at the end of a history the service gives out each slice
//!   that is not drained
//! * a-binding-lasts: apart from Unbind, no binding ends while its control group has programs, or within a minute after
//!   its beginning if the control group has had no program yet; no slice is refused for a binding that could end
//! * names-are-roots: no control group gets a slice, or keeps a slice from other control groups, for a name that a user
//!   other than root has given to the control group
//! * a-shown-limit-is-held: if a slice is shown as limited by the kernel, the control group that has the slice can have
//!   the memory of the slice and no more, unless another program has changed the limit since the service's last check
//! * limits-go-with-bindings: at the end of a history the kernel holds each limit that follows from the bindings and the
//!   configuration, except for limits that the kernel refuses, and no other limit of the service
//! * a-driver-stays: a driver that can be used stays in force, even if a look at the host or a reload fails
//! * drained-takes-none: no directory of a drained slice has a link to a control daemon, unless the answer to the drain
//!   has said that the link can't be removed
//! * a-slice-leads-home: a program that connects through a slice's directory finds the control daemon that has the
//!   slice's GPU
//! * modes-stay: the compute mode of a GPU is not put back while the configuration names the GPU or a control daemon of
//!   the service has the GPU
//! * modes-come-back: after a stop for good, each GPU has the compute mode that the GPU had before the service
//! * a-stop-ends-all: after a stop for good, no control daemon of the service runs that the service could have ended
//! * nothing-spins: an act that fails is followed by a pause, however long the trouble lasts
//! * all-is-served-in-the-end: once nothing goes wrong any more, the service serves all orders after few acts, and no
//!   other control daemon of the service runs
//! * a-published-limit-is-enforced: a program with the environment of a slice can have the memory of the slice and no
//!   more, and no server gives less, with slices of any sizes
//! * an-idle-host-is-quiet: on a host without events on which all orders are served, the service asks only the questions
//!   of the health check, and reports nothing
//! * nothing-grows: the knowledge of a control daemon and of the host has a bounded size at any time
//! * overuse-is-told-in-measure: a tenant that starts and ends clients again and again causes at most 20 messages a
//!   minute about its slice

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mps_core::view::DaemonView;
use mps_core::{Act, Cause, Configured, DaemonAct, DaemonId, MpsSwitch, Order, Tenure};

use super::serving::mode_of;
use super::{Dice, Ending, Service, World};

/// The most acts of the service about one control daemon while no time passes and no event from outside happens.
const MOST_IN_A_ROW: usize = 20;

/// The longest time until the service says that it is ready: a minute less than `TimeoutStartSec=` of the unit.
const READY_WITHIN: Duration = Duration::from_secs(240);

/// The longest time from the end of all troubles of the world until the service serves all orders.
const LONGEST: Duration = Duration::from_secs(600);

/// On a host without events the service asks a control daemon at most `MOST_QUESTIONS` questions during the time `QUIET`: three
/// for each health check. `REGULAR` is a little longer than the time between two health checks.
const QUIET: Duration = Duration::from_secs(300);
const REGULAR: Duration = Duration::from_secs(31);
const MOST_QUESTIONS: usize = 30;

/// The most acts of the service from the end of all troubles until it serves all orders. The world makes at most six orders, so
/// the service may need 16 acts for each order.
const MOST_ACTS: usize = 100;

/// The most characters of the service's knowledge as text: about one control daemon, and about the whole host. The first number
/// is twice the length that 50,000 histories have reached. The second number allows 600 characters for each of the nine control
/// daemons that three GPUs can have at once, including those that are about to end.
const MOST_KNOWN: usize = 3600;
const MOST_DECIDED: usize = 9 * 600;

impl World {
    /// Checks the promise `nothing-grows`: the service's knowledge has a bounded size, no matter what happens for how long.
    pub(crate) fn check_nothing_grows(&self, id: &DaemonId) {
        // Formatting the service's knowledge as text takes long, so this function checks only after every eighth act.
        let Some(service) = self.service.as_ref().filter(|_| self.acts.is_multiple_of(8)) else { return };
        let known = service.watched.get(id).map(|watched| format!("{watched:?}")).unwrap_or_default();
        assert!(known.len() <= MOST_KNOWN, "nothing-grows: of {id} it is known: {known}");
        let decided = format!("{:?}", service.core);
        assert!(decided.len() <= MOST_DECIDED, "nothing-grows: of the host it is known: {decided}");
    }

    /// Checks the promises that hold after each step of a history.
    pub fn check(&self) {
        self.check_one_has_a_gpu();
        self.check_who_runs_is_written_down();
        self.check_ways();
        self.check_limits_are_held();
    }

    /// Checks the promise `one-has-a-gpu`: no two running control daemons of the service have the same GPU, unless both take
    /// turns on it.
    fn check_one_has_a_gpu(&self) {
        let mut tenures = BTreeMap::new();
        for (gpu, id) in self.daemons.values().flat_map(|one| one.gpus.iter().map(|gpu| (gpu, &one.id))) {
            let tenure = id.tenure();
            let other = tenures.insert(gpu, tenure);
            assert!(
                other.is_none_or(|other| other == Tenure::InTurns && tenure == Tenure::InTurns),
                "one-has-a-gpu: two control daemons have {gpu}"
            );
        }
    }

    /// Checks the promise `who-runs-is-written-down`: each running control daemon of the service is in the state file once,
    /// with its GPUs.
    fn check_who_runs_is_written_down(&self) {
        for (pid, one) in &self.daemons {
            let mut entries = self.state_file.daemons.values().filter(|entry| entry.pid == *pid);
            let entry = entries.next();
            assert!(
                entry.is_some_and(|entry| entry.gpus == one.gpus),
                "who-runs-is-written-down: {pid} is not in the state file"
            );
            assert!(entries.next().is_none(), "who-runs-is-written-down: {pid} is in the state file twice");
        }
    }

    pub(crate) fn check_act(&mut self, act: &Act<u32>) {
        self.check_nothing_spins(act);
        self.check_work_is_safe(act);
        self.check_modes_stay(act);
        if let Act::Daemon { id, order, held, act: DaemonAct::Start, .. } = act {
            assert!(self.living(id).is_none(), "one-has-a-gpu: {id} is started, and runs");
            for gpu in order.gpus.iter().filter(|gpu| !held.contains_key(*gpu)) {
                let keeps = |one: &&super::ControlDaemon| {
                    one.gpus.contains(gpu)
                        && (one.id.tenure() == Tenure::Alone || order.id.tenure() == Tenure::Alone)
                };
                let other = self.daemons.values().find(keeps).map(|one| &one.id);
                assert!(other.is_none(), "one-has-a-gpu: {id} is started with {gpu}, which {other:?} has");
            }
        }
    }

    /// Checks the promise `nothing-spins`: while no time passes and no event from outside happens, a control daemon has fewer
    /// than [`MOST_IN_A_ROW`] acts. A service that made no pause after a failed act would exceed this number.
    fn check_nothing_spins(&mut self, act: &Act<u32>) {
        let Act::Daemon { id, .. } = act else { return };
        let acts = self.in_a_row.entry(id.clone()).or_default();
        *acts += 1;
        assert!(*acts < MOST_IN_A_ROW, "nothing-spins: {id} has had {acts} acts, and nothing has happened");
    }

    /// Checks the promise `work-is-safe`: the service ends a control daemon with clients only for a stop of the service, or
    /// when MPS is disabled. `enforcing.rs` checks the part of the promise about clients that the service ends for a budget.
    fn check_work_is_safe(&self, act: &Act<u32>) {
        let Act::Daemon { id, act: DaemonAct::End(permit), .. } = act else { return };
        let cause = permit.cause();
        let ending = self.service.as_ref().and_then(|service| service.ending);
        let is_asked_for = match cause {
            // The cause `Unused` says that the control daemon has no client.
            Cause::Unused => true,
            Cause::Stop => ending == Some(Ending::ForGood),
            Cause::Disabled => {
                let spared = self.service.as_ref().is_some_and(|service| service.spared.contains(id));
                ending != Some(Ending::ForRestart) && self.demand.mps != MpsSwitch::On && !spared
            }
            _ => false,
        };
        assert!(
            is_asked_for,
            "work-is-safe: {id} is ended with its clients ({cause:?}), and nobody has asked for it"
        );
    }

    /// Checks the promise `modes-stay`: the service does not restore the former compute mode of a GPU while the service needs
    /// its own mode.
    fn check_modes_stay(&self, act: &Act<u32>) {
        let Act::PutModeBack(gpu) = act else { return };
        let ending = self.service.as_ref().and_then(|service| service.ending);
        let is_kept = ending.is_none() && self.names(gpu);
        assert!(!is_kept, "modes-stay: the mode of {gpu} is put back, which the configuration names");
        let gives_up =
            |id: &DaemonId| self.service.as_ref().is_some_and(|service| service.without_modes.contains(id));
        let ours = self.state_file.daemons.keys().filter_map(|id| Some((id, self.living(id)?.1)));
        let mut holders = ours.filter(|(_, one)| one.sets_modes && one.gpus.contains(gpu));
        let holder = holders.find(|(id, _)| !gives_up(id));
        assert!(holder.is_none(), "modes-stay: the mode of {gpu} is put back, which {holder:?} has");
    }

    /// True if the configuration names the GPU, or may name it: `others` has the GPUs that the configuration certainly does not
    /// name.
    fn names(&self, gpu: &str) -> bool {
        let Configured { certainly, others } = &self.demand.kept;
        certainly.contains(gpu) || others.as_ref().is_some_and(|others| !others.contains(gpu))
    }

    /// Checks the promise `modes-come-back`: after a stop of the service for good, each GPU has the compute mode that it had
    /// before the service set a mode. `not_ended` has the control daemons that the service could not end.
    pub(crate) fn check_stopped(&self, not_ended: &BTreeSet<DaemonId>) {
        let mut living = self.state_file.daemons.keys().filter(|id| self.living(id).is_some());
        let forgotten = living.find(|id| !not_ended.contains(*id));
        assert_eq!(forgotten, None, "a-stop-ends-all: nobody has tried to end it");
        for (gpu, state) in &self.gpus {
            let still_ours = self.daemons.values().any(|one| one.gpus.contains(gpu))
                || self.state_file.daemons.values().any(|one| one.gpus.contains(gpu));
            assert!(
                state.mode == state.own || still_ours || self.strange.contains(gpu),
                "modes-come-back: {gpu} has {:?} after a stop, and had {:?}",
                state.mode,
                state.own
            );
        }
    }

    /// Checks the promise `ready-comes`. systemd ends a service that does not say READY=1 within five minutes.
    pub fn check_ready_comes(&mut self) {
        let (until, mut dice) = (self.now + READY_WITHIN, Dice::new(self.acts as u64));
        while !self.has_settled() {
            assert!(self.now < until, "ready-comes: {:?}", self.unsettled());
            if self.comes_on() {
                self.carry_on(&mut dice);
            } else {
                self.sleep();
            }
            self.check();
        }
    }

    /// True if the service can say READY=1. Also true if no service runs or the service is ending, since the promise does not
    /// apply then.
    fn has_settled(&self) -> bool {
        let Some(service) = self.service.as_ref().filter(|one| one.ending.is_none()) else { return true };
        let views = self.views(service);
        service.core.is_settled(|id| views.get(id))
    }

    /// Returns the published views of the control daemons, updated to the core's present orders. A published view may be older
    /// than the order.
    pub(crate) fn views(&self, service: &Service) -> BTreeMap<DaemonId, DaemonView> {
        let of_order = |id: &DaemonId| {
            let mut shown = self.shown(id);
            shown.takes(service.core.order(id)?);
            Some((id.clone(), shown.view))
        };
        service
            .shown
            .keys()
            .chain(service.watched.keys())
            .chain(service.tasks.keys())
            .filter_map(of_order)
            .collect()
    }

    fn unsettled(&self) -> Vec<(DaemonId, DaemonView)> {
        let views = self.service.iter().flat_map(|service| self.views(service));
        views.filter(|(_, view)| !view.settled || !view.put_off).collect()
    }

    /// Checks the promise `all-is-served-in-the-end`: once all troubles of the world have ended, the service serves all orders
    /// that can be served, no other control daemon runs, and the service has needed a bounded number of acts.
    pub fn check_all_is_served_in_the_end(&mut self) {
        self.is_calm = true;
        self.is_disk_full = false;
        self.add_to_story(|| "from now on nothing goes wrong".to_owned());
        self.start_service_again();
        self.troubles_end();
        self.nvml_calms_down();
        self.kernel_limits_calm_down();
        let (before, begun) = (self.acts, self.now);
        let mut dice = Dice::new(self.acts as u64);
        for _ in 0..20_000 {
            if self.is_settled() {
                self.check_served();
                self.check_an_idle_host_is_quiet();
                self.check_all_clients_are_known();
                self.check_slices_are_given();
                return self.check_limits_go_with_bindings();
            }
            if self.comes_on() {
                self.carry_on(&mut dice);
            } else {
                self.go_on_in_time();
            }
            self.check();
            assert!(self.acts - before < MOST_ACTS, "all-is-served-in-the-end: too many acts");
            assert!(self.now < begun + LONGEST, "all-is-served-in-the-end: it takes too long");
        }
        panic!("all-is-served-in-the-end: it never comes to rest");
    }

    /// True if the service has work to do before the world's clock advances.
    pub(crate) fn comes_on(&self) -> bool {
        let Some(service) = &self.service else { return false };
        !service.modes.is_empty()
            || self.budgets_come_on()
            || self.kernel_limits_come_on()
            || !self.requests_that_come_on().is_empty()
            || service.tasks.keys().any(|id| self.can_come_on(id))
    }

    fn go_on_in_time(&mut self) {
        self.force_if_clients_are_unknown();
        self.sleep();
    }

    /// Lets time pass until the service has something to do, or an event happens.
    pub(crate) fn sleep(&mut self) {
        self.in_a_row.clear();
        let next = self.next_moment().unwrap_or(self.now + Duration::from_secs(1));
        self.advance(next.max(self.now + Duration::from_millis(1)));
        if self.service.as_ref().and_then(|one| one.core.due()).is_some_and(|due| due <= self.now) {
            self.on(mps_core::CoreEvent::Due);
        }
        self.look_if_due();
    }

    /// Checks the promises `an-idle-host-is-quiet` and `the-view-settles`: on a host without events the service makes only its
    /// regular health checks, and reports nothing. The first health check may still make corrections, so it does not count.
    fn check_an_idle_host_is_quiet(&mut self) {
        let counts = |world: &Self| {
            let count = |one: &super::ControlDaemon| {
                let mps = one.lock();
                (mps.pid, mps.reader.questions.len(), mps.reader.news, mps.reader.shown.view.clone())
            };
            world.daemons.values().map(count).collect::<Vec<_>>()
        };
        self.idle_for(REGULAR);
        let (before, acts) = (counts(self), self.acts);
        self.idle_for(QUIET);
        assert_eq!(self.acts, acts, "an-idle-host-is-quiet: the core has something to do");
        for ((pid, questions, news, view), (_, more, newer, later)) in before.into_iter().zip(counts(self)) {
            assert_eq!(later, view, "the-view-settles: of {pid}");
            let reader = |read: fn(&super::reader::Reader) -> String| {
                self.daemons.get(&pid).map(|one| read(&one.lock().reader)).unwrap_or_default()
            };
            assert!(
                more - questions <= MOST_QUESTIONS,
                "an-idle-host-is-quiet: {pid} is asked too often: {}",
                reader(|reader| format!("{:?}", reader.questions))
            );
            let words = reader(|reader| format!("{:?}", reader.words));
            assert_eq!(newer, news, "an-idle-host-is-quiet: {pid} has news: {words:?}");
        }
    }

    /// Checks the promise `everybody-is-known`: the regular health checks have corrected the register of clients. The check
    /// skips a control daemon that takes turns on its GPU if its log lacks lines, since then neither NVML nor the log names
    /// each client.
    fn check_all_clients_are_known(&self) {
        for one in self.daemons.values() {
            let mps = one.lock();
            let may_miss_some = mps.lines_are_missing && one.id.tenure() == Tenure::InTurns;
            if !may_miss_some {
                mps.check_all_clients_are_known();
            }
        }
    }

    fn idle_for(&mut self, duration: Duration) {
        let (until, mut dice) = (self.now + duration, Dice::new(1));
        while self.now < until {
            if self.comes_on() {
                self.carry_on(&mut dice);
            } else {
                self.go_on_in_time();
            }
        }
    }

    fn start_service_again(&mut self) {
        let mut dice = Dice::new(7);
        for _ in 0..20_000 {
            let is_ending = self.service.as_ref().is_some_and(|service| service.ending.is_some());
            if !is_ending {
                return self.start_service();
            }
            if self.comes_on() {
                self.carry_on(&mut dice);
            } else {
                self.go_on_in_time();
            }
        }
        panic!("all-is-served-in-the-end: the service does not end");
    }

    /// True if each control daemon serves its order, and the service has no other act to carry out.
    fn is_settled(&self) -> bool {
        let Some(service) = &self.service else { return false };
        let serve = |(id, task): (&DaemonId, &super::Task)| {
            let serves = |pid| self.serves(pid, &task.order);
            task.act == DaemonAct::Serve
                && !task.is_interrupted
                && !task.retiring
                && self.living(id).is_some_and(|(pid, _)| serves(pid))
                && !self.can_come_on(id)
                && task.held.is_empty()
        };
        let orders = &self.demand.orders;
        let has_modes = |order: &Order<u32>| {
            let has_mode = |gpu: &String| {
                self.gpus.get(gpu).is_some_and(|state| state.mode == mode_of(order.id.tenure()))
            };
            !order.sets_modes || order.gpus.iter().all(has_mode)
        };
        service.has_plan
            && self.out_of_reach().is_empty()
            && service.core.due().is_none()
            && self.budgets_are_at_rest()
            && !self.kernel_limits_come_on()
            && service.modes.is_empty()
            && service.requests.is_empty()
            && orders.iter().all(has_modes)
            && service.tasks.len() == orders.len()
            && service.tasks.iter().all(serve)
            && orders
                .iter()
                .all(|order| self.living(&order.id).is_some_and(|(_, one)| one.gpus == order.gpus))
    }

    fn check_served(&self) {
        assert_eq!(
            self.daemons.len(),
            self.demand.orders.len(),
            "all-is-served-in-the-end: a control daemon runs that nobody wants"
        );
        for one in self.daemons.values() {
            let mps = one.lock();
            let untold = mps.reader.read.difference(&mps.reader.told).next();
            assert!(untold.is_none(), "who-was-hit-is-told: nobody is told of {untold:?}");
        }
        for gpu in self.state_file.modes.keys().filter(|gpu| !self.strange.contains(*gpu)) {
            let served =
                self.demand.orders.iter().filter(|order| order.sets_modes).flat_map(|order| &order.gpus);
            let is_ours = self.names(gpu) || served.into_iter().any(|one| one == gpu);
            assert!(is_ours, "modes-come-back: {gpu} is not ours any more, and its mode is not put back");
        }
    }
}
