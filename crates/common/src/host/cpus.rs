//! Sets of CPUs: the lists in /sys, and the CPUs on which a process may run.

use std::fmt;

use rustix::io;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::proc;

/// A set of CPUs that is never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpus(CpuSet);

impl Cpus {
    fn new(is_in: impl Fn(usize) -> bool) -> Option<Self> {
        let mut set = CpuSet::new();
        (0..CpuSet::MAX_CPU).filter(|cpu| is_in(*cpu)).for_each(|cpu| set.set(cpu));
        (set.count() > 0).then_some(Self(set))
    }

    /// Parses a list of CPUs in the kernel's form, such as `0-3,8`. None if the list is empty or malformed, or has a CPU number
    /// above 1023, for which the set has no room.
    pub fn parse(list: &str) -> Option<Self> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let range = first.parse().ok()?..=last.parse().ok()?;
            (!range.is_empty() && *range.end() < CpuSet::MAX_CPU).then_some(range)
        };
        let ranges: Vec<_> = list.trim().split(',').map(range).collect::<Option<_>>()?;
        Self::new(|cpu| ranges.iter().any(|range| range.contains(&cpu)))
    }

    /// The CPUs on which the first thread of a process may run. None if the process has ended, or if the host has more CPUs
    /// than the set has room for.
    pub fn allowed_for(pid: u32) -> Option<Self> {
        let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
        sched_getaffinity(Some(pid)).ok().map(Self)
    }

    pub fn of_host() -> Option<Self> {
        Self::allowed_for(proc::FIRST)
    }

    /// Binds the calling thread to these CPUs, and every program and thread that this thread starts later. CPUs that the thread
    /// may not use are ignored. If the thread may use none of these CPUs, the thread stays unbound.
    pub fn bind(self) -> io::Result<()> {
        let own = sched_getaffinity(None)?;
        match Self::new(|cpu| self.0.is_set(cpu) && own.is_set(cpu)) {
            Some(cpus) => sched_setaffinity(None, &cpus.0),
            None => Ok(()),
        }
    }

    pub fn includes(self, other: Self) -> bool {
        (0..CpuSet::MAX_CPU).all(|cpu| self.0.is_set(cpu) || !other.0.is_set(cpu))
    }

    pub fn union(mut sets: impl Iterator<Item = Option<Self>>) -> Option<Self> {
        let first = sets.next()??;
        sets.try_fold(first, |all, set| {
            set.and_then(|set| Self::new(|cpu| all.0.is_set(cpu) || set.0.is_set(cpu)))
        })
    }

    pub fn describe(self) -> String {
        let all = Self::of_host().is_some_and(|host| self.includes(host));
        if all { "all".to_owned() } else { self.to_string() }
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| self.0.is_set(*cpu)).peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{separator}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_of_the_kernel_are_read_and_written() {
        for (list, written) in [
            ("0-3,8,10-11\n", "0-3,8,10-11"),
            ("0", "0"),
            ("0,1", "0-1"),
            ("7,0-3,2-4", "0-4,7"),
            ("0-1023", "0-1023"),
        ] {
            assert_eq!(Cpus::parse(list).unwrap().to_string(), written, "{list:?}");
        }
        for list in
            ["", "\n", ",", "0,", "3-1", "-", "1-", "-1", "a", "0 1", "0-1-2", "1024", "0-4294967295", "0x1"]
        {
            assert_eq!(Cpus::parse(list), None, "{list:?}");
        }
    }

    #[test]
    fn sets_are_joined_and_compared() {
        let cpus = |list| Cpus::parse(list).unwrap();
        let union = |lists: &[&str]| Cpus::union(lists.iter().map(|list| Cpus::parse(list)));
        assert_eq!(union(&["0-3", "8", "4"]), Some(cpus("0-4,8")));
        assert_eq!(union(&["0-3", "", "8"]), None);
        assert_eq!(union(&[]), None);
        assert!(cpus("0-3").includes(cpus("0,3")) && !cpus("0-3").includes(cpus("3-4")));
        assert_eq!(Cpus::of_host().unwrap().describe(), "all");
    }

    /// The test binds new threads, since a thread that is bound to one CPU can't bind itself to other CPUs again.
    #[test]
    fn a_thread_is_bound_to_the_cpus_that_it_may_use() {
        let own = || Cpus(sched_getaffinity(None).unwrap());
        let bound = |list: String| {
            let bind = move || Cpus::parse(&list).unwrap().bind().map(|()| own());
            std::thread::spawn(bind).join().unwrap().unwrap()
        };
        let first = (0..CpuSet::MAX_CPU).find(|cpu| own().0.is_set(*cpu)).unwrap();
        let stranger = (0..CpuSet::MAX_CPU).find(|cpu| !own().0.is_set(*cpu)).unwrap();
        assert_eq!(bound(first.to_string()).to_string(), first.to_string());
        assert_eq!(bound(format!("{first},{stranger}")).to_string(), first.to_string());
        assert_eq!(bound(stranger.to_string()), own());
    }

    proptest! {
        #[test]
        fn any_text_is_survived(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            Cpus::parse(&String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn anything_that_looks_like_a_list_is_survived(list in "[0-9,\\- \n]{0,40}") {
            if let Some(cpus) = Cpus::parse(&list) {
                prop_assert_eq!(Cpus::parse(&cpus.to_string()), Some(cpus));
            }
        }
    }
}
