//! Who calls, and how much each user may have: of our time, and of the bus's memory.
//!
//! An answer that its caller does not read stays in the bus, and the bus stops reading from a service when its answers take
//! too much room there (127 MiB in dbus-daemon), which would silence us for everybody. So unprivileged users have a
//! share, counted in bytes of answers: so many a second, and so many that nobody has seen them read. Root has no limit.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::time::Instant;

/// The bytes of answers that there are at once, and each second after that: for one user, and for all unprivileged users.
const OF_USER: Rate = Rate { burst: 4 << 20, per_second: 2 << 20 };
const IN_ALL: Rate = Rate { burst: 8 << 20, per_second: 4 << 20 };

/// The least that a call counts, in bytes of answers: a short answer takes our time, too.
const CALL: i64 = 1 << 10;

/// The most bytes of answers that may wait to be read, for one user and for all unprivileged users.
const UNREAD_OF_USER: u64 = 16 << 20;
const UNREAD_IN_ALL: u64 = 64 << 20;

/// The bytes that refusals may take beyond that. After them, a call gets no answer.
const REFUSALS: u64 = 1 << 20;

/// The most requests that a user may have under way, and all unprivileged users. A request takes its time.
const REQUESTS_OF_USER: usize = 8;
const REQUESTS_IN_ALL: usize = 64;

/// The most connections that are asked at a time whether they read, of one user and of all. The bus keeps a place for each
/// answer to come (dbus-daemon: 128), and some never answer.
const ASKED_OF_USER: usize = 8;
const ASKED_IN_ALL: usize = 64;

/// With so many connections it is time to look which of them have gone.
const CONNECTIONS: usize = 512;

/// The most connections that are known. The bus allows each user 256.
const CONNECTIONS_MAX: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    Admit,
    Refuse(String),
    /// It gets no answer: its user has been refused often enough.
    Ignore,
}

/// A rate in bytes, and how many bytes there are at once after a rest.
#[derive(Debug, Clone, Copy)]
struct Rate {
    burst: i64,
    per_second: i64,
}

/// Bytes that may still be had; below zero for what was had beyond them.
#[derive(Debug)]
struct Credit {
    bytes: i64,
    at: Instant,
}

impl Credit {
    fn full(rate: Rate, now: Instant) -> Self {
        Self { bytes: rate.burst, at: now }
    }

    /// Gives back what has come back by now.
    fn refill(&mut self, rate: Rate, now: Instant) {
        let passed = i64::try_from(now.saturating_duration_since(self.at).as_micros()).unwrap_or(i64::MAX);
        let back = passed.saturating_mul(rate.per_second) / 1_000_000;
        if back > 0 {
            self.bytes = self.bytes.saturating_add(back).min(rate.burst);
            self.at = now;
        }
    }
}

#[derive(Debug)]
struct User {
    credit: Credit,
    /// Bytes of answers that it has not been seen to read.
    unread: u64,
    requests: usize,
}

/// A connection to the bus that has called.
#[derive(Debug)]
struct Caller {
    uid: u32,
    unread: u64,
    /// It was asked whether it reads, and has not answered yet.
    asked: bool,
}

/// The users that call, and their connections.
#[derive(Debug)]
pub(super) struct Callers {
    connections: HashMap<String, Caller>,
    users: HashMap<u32, User>,
    in_all: Credit,
}

/// Whether nothing is counted for a user: root, and whoever runs this service.
pub(super) fn is_privileged(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

impl Callers {
    pub(super) fn new(now: Instant) -> Self {
        Self { connections: HashMap::new(), users: HashMap::new(), in_all: Credit::full(IN_ALL, now) }
    }

    /// The user who has this connection, where the connection has called before.
    pub(super) fn uid_of(&self, name: &str) -> Option<u32> {
        self.connections.get(name).map(|caller| caller.uid)
    }

    /// Takes note of a connection that has not called before. There is always a place for root.
    pub(super) fn meet(&mut self, name: &str, uid: u32) {
        if is_privileged(uid) || self.connections.len() < CONNECTIONS_MAX {
            self.connections.insert(name.to_owned(), Caller { uid, unread: 0, asked: false });
        }
    }

    /// Decides about a call by this connection.
    pub(super) fn judge(&mut self, name: &str, now: Instant) -> Verdict {
        let Some(uid) = self.uid_of(name) else { return Verdict::Ignore };
        if is_privileged(uid) {
            return Verdict::Admit;
        }
        self.in_all.refill(IN_ALL, now);
        let (credit_in_all, unread_in_all) = (self.in_all.bytes, self.unread_in_all());
        let user = self.user(uid, now);
        if user.unread >= UNREAD_OF_USER + REFUSALS
            || unread_in_all >= UNREAD_IN_ALL + REFUSALS
            || user.credit.bytes <= -OF_USER.burst
        {
            return Verdict::Ignore;
        }
        if user.unread >= UNREAD_OF_USER {
            return Verdict::Refuse(format!(
                "user {uid} has not read {} MiB of answers; close the connections that do not read",
                user.unread >> 20
            ));
        }
        if unread_in_all >= UNREAD_IN_ALL {
            return Verdict::Refuse("too many answers have not been read; ask again later".to_owned());
        }
        if user.credit.bytes <= 0 {
            return Verdict::Refuse(format!(
                "user {uid} asks for more than {} MiB of answers a second; ask again later",
                OF_USER.per_second >> 20
            ));
        }
        if credit_in_all <= 0 {
            return Verdict::Refuse("too many users ask at once; ask again later".to_owned());
        }
        Verdict::Admit
    }

    /// Takes note of an answer of so many bytes to this connection; a refusal is an answer, too.
    pub(super) fn answered(&mut self, name: &str, bytes: usize, now: Instant) {
        let Some(caller) = self.connections.get_mut(name).filter(|caller| !is_privileged(caller.uid)) else {
            return;
        };
        let uid = caller.uid;
        let (unread, cost) =
            (u64::try_from(bytes).unwrap_or(u64::MAX), i64::try_from(bytes).unwrap_or(i64::MAX).max(CALL));
        caller.unread = caller.unread.saturating_add(unread);
        self.in_all.bytes = self.in_all.bytes.saturating_sub(cost);
        let user = self.user(uid, now);
        user.unread = user.unread.saturating_add(unread);
        user.credit.bytes = user.credit.bytes.saturating_sub(cost);
    }

    /// Begins a request that takes its time.
    ///
    /// # Errors
    /// Too many are under way, in words.
    pub(super) fn begin_request(&mut self, uid: u32, now: Instant) -> Result<(), String> {
        let unprivileged = self.users.iter().filter(|(uid, _)| !is_privileged(**uid));
        let in_all: usize = unprivileged.map(|(_, user)| user.requests).sum();
        let user = self.user(uid, now);
        if !is_privileged(uid) {
            if user.requests >= REQUESTS_OF_USER {
                return Err(format!(
                    "user {uid} has {REQUESTS_OF_USER} requests under way; wait for one of them to end"
                ));
            }
            if in_all >= REQUESTS_IN_ALL {
                return Err(format!("{REQUESTS_IN_ALL} requests are under way; ask again later"));
            }
        }
        user.requests += 1;
        Ok(())
    }

    /// Ends one.
    pub(super) fn end_request(&mut self, uid: u32) {
        if let Some(user) = self.users.get_mut(&uid) {
            user.requests = user.requests.saturating_sub(1);
        }
    }

    /// Whether it is time to look which connections have gone, and which read.
    pub(super) fn look_is_due(&self) -> bool {
        self.connections.len() >= CONNECTIONS
            || self.unread_in_all() >= UNREAD_IN_ALL / 2
            || self.users.values().any(|user| user.unread >= UNREAD_OF_USER / 2)
    }

    /// Forgets the connections that are not among `there`. Gives the remaining connections that are to be asked whether they read, the
    /// most unread first.
    pub(super) fn keep(&mut self, there: &HashSet<String>, now: Instant) -> Vec<String> {
        let gone: Vec<String> =
            self.connections.keys().filter(|name| !there.contains(*name)).cloned().collect();
        for name in gone {
            self.has_read(&name);
            self.connections.remove(&name);
        }
        for user in self.users.values_mut() {
            user.credit.refill(OF_USER, now);
        }
        self.users
            .retain(|_, user| user.credit.bytes < OF_USER.burst || user.unread > 0 || user.requests > 0);
        let mut asked: HashMap<u32, usize> = HashMap::new();
        for caller in self.connections.values().filter(|caller| caller.asked) {
            *asked.entry(caller.uid).or_default() += 1;
        }
        let mut in_all: usize = asked.values().sum();
        let unread = self.connections.iter_mut().filter(|(_, caller)| caller.unread > 0 && !caller.asked);
        let mut unread: Vec<_> = unread.collect();
        unread.sort_by_key(|(_, caller)| Reverse(caller.unread));
        let mut to_ask = Vec::new();
        for (name, caller) in unread {
            let of_user = asked.entry(caller.uid).or_default();
            if *of_user < ASKED_OF_USER && in_all < ASKED_IN_ALL {
                (*of_user, in_all) = (*of_user + 1, in_all + 1);
                caller.asked = true;
                to_ask.push(name.clone());
            }
        }
        to_ask
    }

    /// Takes note of the end of a question whether a connection reads: it has answered, or the bus has for it.
    pub(super) fn has_answered(&mut self, name: &str, reads: bool) {
        if reads {
            self.has_read(name);
        }
        if let Some(caller) = self.connections.get_mut(name) {
            caller.asked = false;
        }
    }

    /// Takes note that a connection has read its answers, or has gone with them.
    fn has_read(&mut self, name: &str) {
        let Some(caller) = self.connections.get_mut(name) else { return };
        let unread = std::mem::take(&mut caller.unread);
        if let Some(user) = self.users.get_mut(&caller.uid) {
            user.unread = user.unread.saturating_sub(unread);
        }
    }

    fn unread_in_all(&self) -> u64 {
        self.users.values().map(|user| user.unread).sum()
    }

    /// A user, with the credit that has come back by now.
    fn user(&mut self, uid: u32, now: Instant) -> &mut User {
        let new = || User { credit: Credit::full(OF_USER, now), unread: 0, requests: 0 };
        let user = self.users.entry(uid).or_insert_with(new);
        user.credit.refill(OF_USER, now);
        user
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const NOBODY: u32 = 65534;
    const MIB: usize = 1 << 20;

    fn callers(names: &[(&str, u32)]) -> (Callers, Instant) {
        let now = Instant::now();
        let mut callers = Callers::new(now);
        for (name, uid) in names {
            callers.meet(name, *uid);
        }
        (callers, now)
    }

    fn refused(verdict: &Verdict) -> bool {
        matches!(verdict, Verdict::Refuse(_))
    }

    #[test]
    fn a_user_has_a_rate_and_root_has_none() {
        let (mut callers, now) = callers(&[(":1.1", NOBODY), (":1.2", NOBODY), (":1.3", 0)]);
        callers.answered(":1.1", 4 * MIB, now);
        // It is the user who is counted, by whichever connection.
        assert!(refused(&callers.judge(":1.2", now)));
        assert_eq!(callers.judge(":1.3", now), Verdict::Admit);
        assert_eq!(callers.judge(":1.2", now + Duration::from_millis(1)), Verdict::Admit);
        // Refusals count as well, and in the end there are none.
        for _ in 0..5 * 1024 {
            callers.answered(":1.1", 200, now);
        }
        assert_eq!(callers.judge(":1.1", now + Duration::from_millis(1)), Verdict::Ignore);
        assert_eq!(callers.judge(":1.3", now), Verdict::Admit);
        callers.answered(":1.3", 500 * MIB, now);
        assert_eq!(callers.judge(":1.3", now), Verdict::Admit);
        assert_eq!(callers.judge(":1.1", now + Duration::from_secs(60)), Verdict::Admit);
        assert_eq!(callers.judge("never met", now), Verdict::Ignore);
    }

    #[test]
    fn credit_comes_back_however_often_is_asked() {
        let (mut callers, start) = callers(&[(":1.1", NOBODY)]);
        callers.answered(":1.1", 4 * MIB, start);
        let mut now = start;
        for _ in 0..100_000 {
            now += Duration::from_micros(1);
            callers.judge(":1.1", now);
        }
        assert_eq!(callers.judge(":1.1", now), Verdict::Admit);
    }

    #[test]
    fn who_does_not_read_gets_no_more_until_the_answers_are_read_or_gone() {
        let (mut callers, mut now) = callers(&[(":1.1", NOBODY), (":1.2", NOBODY), (":1.3", 1000)]);
        for _ in 0..4 {
            callers.answered(":1.1", 4 * MIB, now);
            now += Duration::from_secs(10);
        }
        assert!(callers.look_is_due());
        assert!(refused(&callers.judge(":1.1", now)));
        assert!(refused(&callers.judge(":1.2", now)));
        assert_eq!(callers.judge(":1.3", now), Verdict::Admit);
        callers.answered(":1.2", MIB, now);
        assert_eq!(callers.judge(":1.2", now), Verdict::Ignore);

        let there = HashSet::from([":1.1".to_owned(), ":1.2".to_owned()]);
        assert_eq!(callers.keep(&there, now), [":1.1", ":1.2"]);
        assert_eq!(callers.uid_of(":1.3"), None);
        // Each is asked once at a time.
        assert!(callers.keep(&there, now).is_empty());
        callers.has_answered(":1.2", true);
        callers.has_answered(":1.1", false);
        assert_eq!(callers.keep(&there, now), [":1.1"]);
        assert!(refused(&callers.judge(":1.2", now)));
        assert!(callers.keep(&HashSet::from([":1.2".to_owned()]), now).is_empty());
        assert_eq!(callers.judge(":1.2", now), Verdict::Admit);
        assert!(!callers.look_is_due());
    }

    #[test]
    fn all_users_together_are_bounded() {
        let (mut callers, mut now) = callers(&[]);
        for uid in 1..=8 {
            callers.meet(&format!(":1.{uid}"), 60_000 + uid);
            callers.answered(&format!(":1.{uid}"), 8 * MIB, now);
            now += Duration::from_secs(10);
        }
        callers.meet(":1.9", NOBODY);
        assert!(refused(&callers.judge(":1.9", now)));
        for n in 0..2 * CONNECTIONS_MAX {
            callers.meet(&format!(":2.{n}"), NOBODY);
        }
        assert_eq!(callers.connections.len(), CONNECTIONS_MAX);
        callers.meet(":3.1", 0);
        assert_eq!(callers.judge(":3.1", now), Verdict::Admit);
    }

    #[test]
    fn few_are_asked_at_a_time_whether_they_read() {
        let (mut callers, now) = callers(&[]);
        let names: HashSet<String> = (0..200).map(|n| format!(":1.{n}")).collect();
        for (number, name) in names.iter().enumerate() {
            callers.meet(name, if number == 0 { 1000 } else { NOBODY });
            callers.answered(name, if number == 0 { 1 } else { 100 }, now);
        }
        assert_eq!(callers.keep(&names, now).len(), ASKED_OF_USER + 1);
    }

    #[test]
    fn requests_under_way_are_bounded_but_for_root() {
        let (mut callers, now) = callers(&[]);
        for _ in 0..1000 {
            callers.begin_request(0, now).unwrap();
        }
        for user in 0..8 {
            for _ in 0..REQUESTS_OF_USER {
                callers.begin_request(60_000 + user, now).unwrap();
            }
        }
        assert!(callers.begin_request(60_000, now).unwrap_err().contains("wait for one"));
        assert!(callers.begin_request(NOBODY, now).unwrap_err().contains("ask again"));
        callers.begin_request(0, now).unwrap();
        callers.end_request(60_000);
        callers.begin_request(NOBODY, now).unwrap();
    }
}
