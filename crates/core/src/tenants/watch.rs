//! The watch over the budgets of a GPU's slices. Each reading of the GPU's clients decides the published use, the messages, the
//! clients that may be ended, and the time of the next reading.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::budget::{self, InUse, Member, Part};
use super::overuse::SliceOveruse;
use crate::terms::{ProcessId, SliceSize};
use crate::{CoreTime, Permit};

/// The time between two readings of a GPU's clients while some slice has two or more clients, and the time from the arrival of
/// a client to the next reading. The driver lists a new client only with some delay.
pub const PERIOD: Duration = Duration::from_secs(1);

/// The shortest time between two readings of a GPU. One reading then finds all clients that come within this time.
const SHARE: Duration = Duration::from_millis(250);

/// This time replaces [`PERIOD`] and [`SHARE`] while a tenant starts ended clients of some slice again and again.
const QUICK: Duration = Duration::from_millis(100);

/// The longest pause between two attempts to end clients of a GPU. The pause doubles after an attempt that ends no client.
const LAST_PAUSE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceBudgets {
    /// The size of each slice, at the index of the slice's ordinal. The memory and the number of clients in a size are the
    /// slice's budget.
    pub budgets: Vec<SliceSize>,
    /// True if clients lose their work because of overuse. False if overuse is only reported.
    pub terminate: bool,
}

impl SliceBudgets {
    /// Returns whether clients that fitted into the budgets `before` may exceed these budgets.
    fn is_stricter_than(&self, before: &Self) -> bool {
        let is_smaller = |(now, before): (&SliceSize, &SliceSize)| {
            now.memory_mib < before.memory_mib || now.max_clients < before.max_clients
        };
        self.budgets.iter().zip(&before.budgets).any(is_smaller)
            || self.budgets.len() != before.budgets.len()
            || (self.terminate && !before.terminate)
    }
}

#[derive(Debug, Clone)]
pub struct OverBudget<T> {
    /// The time of the reading that has found the overuse.
    pub as_of: CoreTime,
    pub slice: u32,
    pub budget: SliceSize,
    pub members: Vec<Member<T>>,
    pub may_end: Permit,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Victim {
    pub slice: u32,
    pub process: ProcessId,
    pub state: VictimState,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VictimState {
    Ended,
    /// The service could not end the client, for this reason. The service tries again later.
    Stays(String),
    /// The client may have lost its work, since the control daemon has not answered, for this reason. The service tries this
    /// client again before any other client of the slice.
    Unknown(String),
}

#[derive(Debug)]
pub struct Look<T> {
    /// The use of each slice, by ordinal, and a text about its overuse. The text is empty while no overuse is shown.
    pub uses: Vec<(InUse, String)>,
    pub news: Vec<OveruseNews>,
    /// The slices that are over their budgets, if the configuration and the facts about their clients permit the end of work.
    pub over: Vec<OverBudget<T>>,
    /// True if an attempt to end clients of the slices in `over` begins now. The caller must report its result to
    /// [`BudgetWatch::has_attempted`].
    pub begins_attempt: bool,
    /// The time of the next reading, if no event causes an earlier reading. None if no reading is planned.
    pub due: Option<CoreTime>,
}

/// A message about a slice: it exceeds its budget, it exceeds other parts of the budget than before, or it fits again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OveruseNews {
    pub slice: u32,
    /// The exceeded parts of the budget, each as one word. Empty if the slice fits again.
    pub reasons: Vec<&'static str>,
    pub clients: Vec<ProcessId>,
    words: String,
    memory_mib: Option<u64>,
    /// The reason why the service ends no work of the slice, although the configuration says that overuse ends work. None
    /// otherwise.
    spared: Option<String>,
}

impl OveruseNews {
    pub fn text(&self, device: &str, clients: &str) -> String {
        if self.reasons.is_empty() {
            return format!("{device} is within its budget again");
        }
        let words = &self.words;
        let memory = self.memory_mib.map(|mib| format!("{mib} MiB ")).unwrap_or_default();
        let spared = self.spared.as_ref().map(|why| format!("; the service ends no work: {why}"));
        let spared = spared.unwrap_or_default();
        format!("{device} is over its budget: {words}; {memory}in use by {clients}{spared}")
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttemptNews {
    pub slice: u32,
    /// With the state [`VictimState::Ended`], all clients that have lost their work. With any other state, only one client.
    pub clients: Vec<ProcessId>,
    pub state: VictimState,
    /// The number of ended clients in earlier messages that the rate limit has suppressed. None if no message was suppressed.
    suppressed: Option<usize>,
}

impl AttemptNews {
    pub fn text(&self, device: &str, clients: &str) -> String {
        match &self.state {
            VictimState::Ended => {
                let before = self.suppressed.map(|count| {
                    format!(
                        "; since the last such message, the service has also ended the GPU work of {count} \
                         other clients"
                    )
                });
                let before = before.unwrap_or_default();
                format!(
                    "the service has ended the GPU work of {clients}, since {device} was over its \
                     budget{before}"
                )
            }
            VictimState::Stays(reason) => {
                format!("{device} is over its budget, and the work of {clients} can't be ended: {reason}")
            }
            VictimState::Unknown(reason) => format!(
                "{device} is over its budget, and the service does not know if the work of {clients} has \
                 ended: {reason}"
            ),
        }
    }
}

#[derive(Debug)]
pub struct BudgetWatch {
    gpu: SliceBudgets,
    /// The clients that never lose their work for a budget: the clients that were on the GPU when the service started, when a
    /// reload made a budget smaller, or when an attempt to end clients failed. Only clients that come later can be ended.
    spared: BTreeSet<ProcessId>,
    spares_next: bool,
    /// The slices that have exceeded their budget at least once, by their ordinals.
    slices: BTreeMap<u32, SliceOveruse>,
    has_come: bool,
    /// True if some slice had two or more clients at the last reading.
    is_busy: bool,
    /// The time of the next attempt to end clients. None while an attempt is under way.
    next_attempt: Option<CoreTime>,
    pause: Duration,
}

impl BudgetWatch {
    /// A watch before its first reading. The clients that the first reading finds are spared.
    pub fn new(gpu: SliceBudgets, now: CoreTime) -> Self {
        Self {
            gpu,
            spared: BTreeSet::new(),
            spares_next: true,
            slices: BTreeMap::new(),
            has_come: false,
            is_busy: false,
            next_attempt: Some(now),
            pause: PERIOD,
        }
    }

    /// Sets the budgets of the GPU's slices. If a budget gets smaller, the clients that are on the GPU now are spared.
    pub fn pursue(&mut self, gpu: SliceBudgets) {
        self.spares_next |= gpu.is_stricter_than(&self.gpu);
        let is_there = |slice: &u32| usize::try_from(*slice).is_ok_and(|slice| slice < gpu.budgets.len());
        self.slices.retain(|slice, _| is_there(slice));
        self.gpu = gpu;
    }

    pub fn client_has_come(&mut self, now: CoreTime) {
        self.has_come = true;
        let soon = now + self.period(now);
        self.next_attempt = self.next_attempt.map(|at| at.min(soon));
        self.pause = PERIOD;
    }

    pub fn share(&self, now: CoreTime) -> Duration {
        if self.start_over(now) { QUICK } else { SHARE }
    }

    /// The time from the arrival of a client to the next reading, and from a successful attempt to end clients to the next
    /// attempt.
    fn period(&self, now: CoreTime) -> Duration {
        if self.start_over(now) { QUICK } else { PERIOD }
    }

    fn start_over(&self, now: CoreTime) -> bool {
        self.slices.values().any(|slice| slice.starts_over(now))
    }

    /// Records that a reading has failed. Returns the time of the next reading. None if no reading is needed.
    pub fn is_blind(&mut self, now: CoreTime) -> Option<CoreTime> {
        let is_shown = |slice: &SliceOveruse| !slice.parts().is_empty();
        let has_come = core::mem::take(&mut self.has_come);
        (has_come || self.is_busy || self.slices.values().any(is_shown)).then(|| now + PERIOD)
    }

    /// Decides the consequences of a reading. `found` has all clients on the GPU. A client without a known slice is in `found`
    /// and not in `members`. `runs` returns whether a process from an earlier reading may still exist.
    pub fn decide<T: PartialEq>(
        &mut self,
        found: &[ProcessId],
        mut members: BTreeMap<u32, Vec<Member<T>>>,
        runs: impl Fn(ProcessId) -> bool,
        now: CoreTime,
    ) -> Look<T> {
        // The driver may omit a client from its list for a moment, so a client stays spared until its process has ended.
        self.spared.retain(|process| runs(*process));
        if core::mem::take(&mut self.spares_next) {
            self.spared.extend(found);
        }
        let (mut uses, mut news, mut over) = (Vec::new(), Vec::new(), Vec::new());
        for (slice, budget) in (0..).zip(self.gpu.budgets.clone()) {
            let mut of_slice = members.remove(&slice).unwrap_or_default();
            for member in &mut of_slice {
                member.stays |= self.spared.contains(&member.process);
            }
            let in_use = budget::in_use(&of_slice);
            let exceeded = budget::exceeded(budget, in_use);
            let may_cut_back = budget::may_cut_back(&of_slice);
            let (shown, has_changed) = self.show(slice, &exceeded, now);
            let words = budget::describe(budget, &shown);
            if has_changed {
                news.push(OveruseNews {
                    slice,
                    reasons: shown.iter().map(|part| part.as_str()).collect(),
                    clients: of_slice.iter().map(|member| member.process).collect(),
                    words: words.clone(),
                    memory_mib: in_use.memory_mib,
                    spared: may_cut_back.clone().err().filter(|_| self.gpu.terminate),
                });
            }
            uses.push((in_use, words));
            if !exceeded.is_empty()
                && self.gpu.terminate
                && let Ok(may_end) = may_cut_back
            {
                over.push(OverBudget { as_of: now, slice, budget, members: of_slice, may_end });
            }
        }
        self.is_busy = uses.iter().any(|(in_use, _)| in_use.clients > 1);
        let has_come = core::mem::take(&mut self.has_come);
        let busy = self.is_busy.then(|| now + PERIOD);
        let soon = (has_come || !over.is_empty()).then(|| now + self.period(now));
        let again = self.slices.values_mut().filter_map(|slice| slice.next_check(now));
        let due = again.chain(busy).chain(soon).min();
        Look { uses, news, begins_attempt: self.begins_attempt(&over, now), over, due }
    }

    /// Records the exceeded parts of a slice's budget. Returns the parts that are shown as exceeded from now on, and true if
    /// the shown parts have changed.
    fn show(&mut self, slice: u32, exceeded: &BTreeSet<Part>, now: CoreTime) -> (BTreeSet<Part>, bool) {
        if !self.slices.contains_key(&slice) && exceeded.is_empty() {
            return (BTreeSet::new(), false);
        }
        let slice = self.slices.entry(slice).or_insert_with(SliceOveruse::new);
        let has_changed = slice.observe(exceeded, now);
        (slice.parts(), has_changed)
    }

    fn begins_attempt<T>(&mut self, over: &[OverBudget<T>], now: CoreTime) -> bool {
        let can_go = over.iter().any(|slice| slice.members.iter().any(|member| !member.stays));
        can_go && self.next_attempt.take_if(|at| now >= *at).is_some()
    }

    /// Records the end of an attempt to end clients, and returns the messages about it. `victims` is None if the attempt has
    /// failed, so that the service does not know which clients have lost work. All present clients are then spared.
    pub fn has_attempted(&mut self, victims: Option<Vec<Victim>>, now: CoreTime) -> Vec<AttemptNews> {
        self.spares_next |= victims.is_none();
        let victims = victims.unwrap_or_default();
        let of_ended = victims.iter().filter(|victim| victim.state == VictimState::Ended);
        let cut_back: BTreeSet<u32> = of_ended.map(|victim| victim.slice).collect();
        for slice in &cut_back {
            self.slices.entry(*slice).or_insert_with(SliceOveruse::new).note_ending(now);
        }
        self.pause = if cut_back.is_empty() { (self.pause * 2).min(LAST_PAUSE) } else { self.period(now) };
        self.next_attempt = Some(now + self.pause);
        let slices: BTreeSet<u32> = victims.iter().map(|victim| victim.slice).collect();
        let of = |slice: u32| victims.iter().filter(move |victim| victim.slice == slice);
        slices.into_iter().flat_map(|slice| self.tell(slice, of(slice), now)).collect()
    }

    fn tell<'v>(
        &mut self,
        slice: u32,
        victims: impl Iterator<Item = &'v Victim>,
        now: CoreTime,
    ) -> Vec<AttemptNews> {
        let (mut ended, mut other) = (Vec::new(), None);
        for Victim { process, state, .. } in victims {
            match state {
                VictimState::Ended => ended.push(*process),
                VictimState::Stays(_) => _ = other.get_or_insert((*process, state.clone())),
                VictimState::Unknown(_) => other = Some((*process, state.clone())),
            }
        }
        let told = &mut self.slices.entry(slice).or_insert_with(SliceOveruse::new).endings_told;
        if !told.take(ended.len(), now) {
            return Vec::new();
        }
        let news = |clients, state, suppressed| AttemptNews { slice, clients, state, suppressed };
        let ended = (!ended.is_empty()).then(|| news(ended, VictimState::Ended, told.suppressed()));
        let other = other.map(|(process, state)| news([process].to_vec(), state, None));
        ended.into_iter().chain(other).collect()
    }
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const BUDGET: SliceSize = SliceSize { memory_mib: 100, thread_percentage: 50, max_clients: 2 };

    fn gpu(terminate: bool) -> SliceBudgets {
        SliceBudgets { budgets: alloc::vec![BUDGET; 2], terminate }
    }

    fn process(pid: u32) -> ProcessId {
        ProcessId { pid, start_time: u64::from(pid) }
    }

    fn member(pid: u32, memory_mib: u64) -> Member<u32> {
        let (process, memory_mib) = (process(pid), Some(memory_mib));
        Member { process, memory_mib, only_claims: false, tenant: Some(7), stays: false }
    }

    /// A reading that finds these members of slice 1.
    fn look(watch: &mut BudgetWatch, members: &[Member<u32>], now: CoreTime) -> Look<u32> {
        let found: Vec<ProcessId> = members.iter().map(|member| member.process).collect();
        watch.decide(&found, BTreeMap::from([(1, members.to_vec())]), |_| true, now)
    }

    fn texts(look: &Look<u32>) -> Vec<String> {
        look.news.iter().map(|news| news.text("slice 1", "them")).collect()
    }

    fn watch(gpu: SliceBudgets) -> BudgetWatch {
        let mut watch = BudgetWatch::new(gpu, CoreTime::ZERO);
        assert_eq!(look(&mut watch, &[], CoreTime::ZERO).due, None);
        watch
    }

    fn is_cut_back(look: &Look<u32>) -> bool {
        assert!(look.over.iter().all(|one| one.slice == 1) && (!look.begins_attempt || look.over.len() == 1));
        look.begins_attempt
    }

    #[test]
    fn overuse_is_told_and_cut_back() {
        let mut watch = watch(gpu(true));
        let members = [member(1, 60), member(2, 60)];
        let over = look(&mut watch, &members, SECOND);
        let words = "the clients of the slice hold more than its 100 MiB together";
        assert_eq!(
            texts(&over),
            ["slice 1 is over its budget: ".to_owned() + words + "; 120 MiB in use by them"]
        );
        let news = over.news.first().unwrap();
        assert_eq!((&*news.reasons, &*news.clients), (&["memory"][..], &[process(1), process(2)][..]));
        assert_eq!(over.uses[1].1, words);
        assert_eq!((over.uses[0].0.clients, over.uses[1].0.clients, over.due), (0, 2, Some(2 * SECOND)));
        assert!(is_cut_back(&over));
        assert!(!is_cut_back(&look(&mut watch, &members, 2 * SECOND)), "an attempt is under way");
        assert_eq!(watch.has_attempted(Some(Vec::new()), 3 * SECOND), []);
        assert!(
            !is_cut_back(&look(&mut watch, &members, 4 * SECOND)),
            "no client was ended, and it is too early"
        );
        watch.client_has_come(4 * SECOND);
        assert!(!is_cut_back(&look(&mut watch, &members, 4 * SECOND)), "it may be about to end");
        assert!(is_cut_back(&look(&mut watch, &members, 5 * SECOND)));
        let mut fits = |second: u32| texts(&look(&mut watch, &members[..1], second * SECOND));
        assert_eq!(fits(6), [""; 0], "it may be over it again in a moment");
        assert_eq!(fits(9), ["slice 1 is within its budget again"]);
    }

    #[test]
    fn only_slices_that_are_no_more_are_forgotten() {
        let members = [member(1, 60), member(2, 60)];
        for (slices, told_again) in [(2, false), (1, true)] {
            let mut watch = watch(gpu(true));
            assert_eq!(look(&mut watch, &members, SECOND).news.len(), 1);
            watch.pursue(SliceBudgets { budgets: alloc::vec![BUDGET; slices], terminate: true });
            watch.pursue(gpu(true));
            assert_eq!(!look(&mut watch, &members, 2 * SECOND).news.is_empty(), told_again, "{slices}");
        }
    }

    #[test]
    fn a_slice_of_several_tenants_is_told_with_the_reason() {
        for terminate in [true, false] {
            let mut watch = watch(gpu(terminate));
            let over =
                look(&mut watch, &[member(1, 60), Member { tenant: Some(8), ..member(2, 60) }], SECOND);
            let reason =
                "; the service ends no work: processes 1 and 2 may belong to different users or containers";
            assert_eq!(texts(&over).concat().ends_with(reason), terminate);
            assert!(!is_cut_back(&over));
        }
    }

    #[test]
    fn whoever_was_there_before_is_spared() {
        let of = |mib| [member(1, mib), member(2, mib)];
        let mut watch = BudgetWatch::new(gpu(true), CoreTime::ZERO);
        assert!(!is_cut_back(&look(&mut watch, &of(60), SECOND)), "both were there before the watch");
        let mut watch = self::watch(gpu(false));
        assert!(!is_cut_back(&look(&mut watch, &of(60), SECOND)), "it is told alone");
        watch.pursue(gpu(true));
        assert!(!is_cut_back(&look(&mut watch, &of(60), SECOND)), "both were there before the reload");
        let mut watch = self::watch(gpu(true));
        look(&mut watch, &of(50), SECOND);
        watch.pursue(gpu(true));
        assert!(
            is_cut_back(&look(&mut watch, &of(60), SECOND)),
            "a reload that changes nothing spares no client"
        );
        assert_eq!(watch.has_attempted(None, SECOND), []);
        watch.client_has_come(SECOND);
        assert!(!is_cut_back(&look(&mut watch, &of(60), 3 * SECOND)), "who has lost work is not known");
        for stricter in [
            [BUDGET, SliceSize { memory_mib: 99, ..BUDGET }].to_vec(),
            [BUDGET, SliceSize { max_clients: 1, ..BUDGET }].to_vec(),
            alloc::vec![BUDGET; 3],
        ] {
            let mut watch = self::watch(gpu(true));
            watch.pursue(SliceBudgets { budgets: stricter.clone(), terminate: true });
            assert!(!is_cut_back(&look(&mut watch, &of(60), SECOND)), "{stricter:?}");
        }
    }

    #[test]
    fn a_client_that_is_spared_stays_so_until_its_process_has_ended() {
        let [old, new] = [1, 2].map(process);
        let mut watch = BudgetWatch::new(gpu(true), CoreTime::ZERO);
        let look = |watch: &mut BudgetWatch, found: &[ProcessId], runs: fn(ProcessId) -> bool| {
            watch.decide(found, BTreeMap::<_, Vec<Member<u32>>>::new(), runs, SECOND);
            watch.spared.iter().copied().collect::<Vec<_>>()
        };
        assert_eq!(look(&mut watch, &[old], |_| true), [old]);
        assert_eq!(look(&mut watch, &[new], |_| true), [old]);
        assert_eq!(look(&mut watch, &[], |one| one.pid != 1), []);
        // A process with the PID of a spared client and another start time is another client, which is not spared.
        assert_eq!(look(&mut watch, &[old, ProcessId { pid: 1, start_time: 3 }], |_| true), []);
        watch.spares_next = true;
        assert_eq!(look(&mut watch, &[new, old], |_| true), [old, new]);
    }

    #[test]
    fn a_gpu_that_can_not_be_looked_at_is_looked_at_again_while_there_is_a_reason() {
        let mut watch = watch(gpu(true));
        assert_eq!(watch.is_blind(SECOND), None);
        watch.client_has_come(SECOND);
        assert_eq!(watch.is_blind(SECOND), Some(2 * SECOND));
        assert_eq!(watch.is_blind(2 * SECOND), None, "it was looked at once more");
        look(&mut watch, &[member(1, 60), member(2, 60)], 3 * SECOND);
        assert_eq!(watch.is_blind(4 * SECOND), Some(5 * SECOND));
        assert_eq!(look(&mut watch, &[member(1, 60)], 5 * SECOND).due, Some(8 * SECOND));
        assert_eq!(watch.is_blind(6 * SECOND), Some(7 * SECOND), "overuse is still shown");
    }

    fn victim(pid: u32, state: VictimState) -> Victim {
        Victim { slice: 1, process: process(pid), state }
    }

    #[test]
    fn what_came_of_an_attempt_is_told_and_not_too_often() {
        let mut watch = watch(gpu(true));
        let ended =
            |pids: &[u32]| pids.iter().map(|pid| victim(*pid, VictimState::Ended)).collect::<Vec<_>>();
        let mut told = |mut victims: Vec<_>, more: Option<Victim>| {
            victims.extend(more);
            let news = watch.has_attempted(Some(victims), SECOND).into_iter();
            let who = |news: &AttemptNews| {
                format!("{:?}", news.clients.iter().map(|one| one.pid).collect::<Vec<_>>())
            };
            news.map(|news| news.text("slice 1", &who(&news))).collect::<Vec<_>>()
        };
        let stays = victim(4, VictimState::Stays("a debugger has it".to_owned()));
        let first = told(ended(&[1, 2]), Some(stays.clone()));
        assert_eq!(
            first,
            [
                "the service has ended the GPU work of [1, 2], since slice 1 was over its budget",
                "slice 1 is over its budget, and the work of [4] can't be ended: a debugger has it",
            ]
        );
        let unknown = victim(5, VictimState::Unknown("no answer".to_owned()));
        assert_eq!(
            told(Vec::new(), Some(unknown)),
            ["slice 1 is over its budget, and the service does not know if the work of [5] has ended: no \
              answer"]
        );
        assert_eq!((told(ended(&[1]), None).len(), told(ended(&[1]), None).len()), (1, 1));
        assert_eq!(told(ended(&[1, 2]), Some(stays)), [""; 0]);
        let news = watch.has_attempted(Some(ended(&[9])), 61 * SECOND);
        let text = news.first().unwrap().text("slice 1", "9");
        assert!(
            text.ends_with(
                "; since the last such message, the service has also ended the GPU work of 2 other clients"
            ),
            "{text}"
        );
    }

    /// A tenant who starts clients again after each end exceeds the budget until the next reading. After three ends within a
    /// minute, the service reads the GPU within a tenth of a second after a client comes, and ends the client at once. A minute
    /// later, the time between readings is as before.
    #[test]
    fn who_starts_over_and_over_is_looked_at_with_each_newcomer() {
        let mut watch = watch(gpu(true));
        let mut now = SECOND;
        let mut pids = 2..;
        let mut starts_over = |watch: &mut BudgetWatch, now: CoreTime| {
            let (newcomer, share) = (pids.next().unwrap(), watch.share(now));
            watch.client_has_come(now);
            let over = look(watch, &[member(1, 60), member(newcomer, 60)], now);
            if over.begins_attempt {
                watch.has_attempted(Some([victim(newcomer, VictimState::Ended)].to_vec()), now);
            }
            (over.begins_attempt, over.due, share)
        };
        for _ in 0..2 {
            assert_eq!(starts_over(&mut watch, now), (true, Some(now + PERIOD), SHARE));
            let soon = now + PERIOD / 2;
            assert_eq!(starts_over(&mut watch, soon), (false, Some(soon + PERIOD), SHARE), "it has time");
            now += PERIOD;
        }
        assert_eq!(starts_over(&mut watch, now), (true, Some(now + PERIOD), SHARE));
        for _ in 0..30 {
            now += QUICK;
            assert_eq!(starts_over(&mut watch, now), (true, Some(now + QUICK), QUICK));
        }
        now += 61 * SECOND;
        assert_eq!(starts_over(&mut watch, now), (true, Some(now + PERIOD), SHARE));
    }

    #[test]
    fn the_pause_doubles_while_nobody_is_ended() {
        let mut watch = watch(gpu(true));
        let mut pause_after = |state: VictimState| {
            watch.has_attempted(Some([victim(1, state)].to_vec()), CoreTime::ZERO);
            watch.next_attempt.unwrap().as_secs()
        };
        let stays = || VictimState::Stays(String::new());
        let pauses = [(); 6].map(|()| pause_after(stays()));
        assert_eq!(pauses, [2, 4, 8, 16, 30, 30]);
        assert_eq!(
            (pause_after(VictimState::Ended), pause_after(VictimState::Unknown(String::new()))),
            (1, 2)
        );
    }
}
