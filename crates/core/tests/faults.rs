//! All cases of a fatal GPU error with up to four clients. The service may end clients that the error has hit, and never ends
//! other clients.

use std::collections::BTreeSet;
use std::time::Duration;

use mps_core::mps::ServerStatus;
use mps_core::serve::fault::{AfterGrace, HealStep, after_grace, is_over, next_look, next_step};
use mps_core::{Cause, Permit};

fn sets() -> impl Iterator<Item = BTreeSet<u32>> {
    (0..16).map(|bits: u32| (0..4).filter(|client| bits >> client & 1 == 1).collect())
}

#[test]
fn a_bystander_is_never_ended() {
    let mut ended = 0;
    for (named, clients) in sets().flat_map(|named| sets().map(move |clients| (named.clone(), clients))) {
        for has_one_gpu in [false, true] {
            let row = format!("{named:?} {clients:?} {has_one_gpu}");
            match after_grace(&named, has_one_gpu, clients.clone()) {
                AfterGrace::End(permit, stay) => {
                    ended += 1;
                    assert_eq!((permit.cause(), &stay), (Cause::Fault, &clients), "{row}");
                    let all_were_hit = clients.is_subset(&named);
                    assert!(if named.is_empty() { has_one_gpu } else { all_were_hit }, "{row}");
                }
                AfterGrace::GpuNotKnown(stay) => {
                    assert!(named.is_empty() && !has_one_gpu && stay == clients, "{row}");
                }
                AfterGrace::OthersAreWell(stay, others) => {
                    assert_eq!(stay.len() + others, clients.len(), "{row}");
                    assert!(others > 0 && stay.is_subset(&named), "{row}");
                }
            }
        }
    }
    assert!(ended > 100, "{ended} of them were ended");
}

#[test]
fn nobody_is_looked_at_before_the_grace_is_over() {
    let [before, after] = [9, 10].map(Duration::from_secs);
    let step = |server, age| next_step(server, age, after);
    for age in [before, after] {
        assert_eq!(step(ServerStatus::Active, age), HealStep::Recovered);
        assert_eq!(step(ServerStatus::Unsupported, age), HealStep::LookForThoseHit);
        assert_eq!(step(ServerStatus::Gone, age), HealStep::ServerGone);
        assert_eq!(step(ServerStatus::Initializing, age), HealStep::Wait);
    }
    assert_eq!(step(ServerStatus::Fault, before), HealStep::Wait);
    assert_eq!(step(ServerStatus::Fault, after), HealStep::LookWhoStays);
}

#[test]
fn a_fault_is_over_when_nobody_who_was_hit_is_left() {
    let [soon, late] = [4, 5].map(Duration::from_secs);
    let hit = BTreeSet::from([7, 8]);
    assert_eq!(is_over(&BTreeSet::new(), |_| false, soon), None, "the log may name them yet");
    assert_eq!(is_over(&BTreeSet::new(), |_| true, late), Some(true));
    for age in [soon, late] {
        assert_eq!(is_over(&hit, |pid| pid == 8, age), Some(false));
        assert_eq!(is_over(&hit, |pid| pid == 9, age), Some(true), "9 was not hit");
    }
}

#[test]
fn the_pause_between_looks_grows_with_the_fault() {
    let pauses =
        [0, 1_000, 10_000, 50_000, 500_000].map(|age| next_look(Duration::from_millis(age)).as_millis());
    assert_eq!(pauses, [250, 250, 1000, 5000, 5000]);
}

#[test]
fn only_a_count_of_nobody_is_nobody() {
    let cause = |permit: Option<Permit>| permit.map(Permit::cause);
    assert_eq!(
        [Some(0), Some(1), None].map(|clients| cause(Permit::unused(clients))),
        [Some(Cause::Unused), None, None]
    );
    for clients in [Some(0), Some(1), None] {
        assert_eq!(cause(Permit::for_a_change(true, clients)), Some(Cause::Forced));
        assert_eq!(Permit::for_a_change(false, clients), Permit::unused(clients));
    }
    assert!(Permit::unused(Some(0)).is_some_and(|permit| permit.to_string().contains("no work is lost")));
    let forced = Permit::for_a_change(true, None);
    assert!(forced.is_some_and(|permit| permit.to_string().contains("loses its work")));
}
