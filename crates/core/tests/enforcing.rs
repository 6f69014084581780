//! The end of the newest clients of a slice that is over its budget: which client ends first, and which client the service
//! spares for how long. The random histories test combinations with other events.

// clippy.toml allows `unwrap` and the like only in functions marked as tests. The helper functions of this file are not
// marked as tests, and call `unwrap` too.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use core_world::overuse::{Overuse, SLICE};
use core_world::story::SERVER;
use mps_core::mps::ServerStatus;
use mps_core::tenants::{Victim, VictimState};

fn later(story: &mut Overuse, seconds: u64) {
    story.pass(Duration::from_secs(seconds));
    story.list_members();
}

fn states(victims: &[Victim]) -> Vec<(u32, VictimState)> {
    victims.iter().map(|victim| (victim.process.pid, victim.state.clone())).collect()
}

fn tried(story: &mut Overuse) -> Vec<u32> {
    states(&story.attempt().1).iter().map(|(pid, _)| *pid).collect()
}

#[test]
fn the_newest_go_until_the_rest_fits() {
    let mut story = Overuse::with_clients(4);
    let (asked, victims, broken_off) = story.attempt();
    assert_eq!(asked, [4, 3]);
    assert_eq!(states(&victims), [(4, VictimState::Ended), (3, VictimState::Ended)]);
    assert_eq!((victims[0].slice, broken_off), (SLICE, None));
    // After the work of a client was ended, the client stays in the control daemon's list until its next call of CUDA. The
    // client does not count for the budget any more.
    later(&mut story, 5);
    assert_eq!(story.attempt().0, [0; 0]);
    // The work of client 3 was ended. Now client 3 connects again and starts work.
    story.host().member(3, 30, 33);
    later(&mut story, 5);
    assert_eq!(story.attempt().0, [3]);
}

#[test]
fn one_that_cannot_be_ended_is_left_alone_longer_each_time_and_the_next_newest_goes() {
    let mut story = Overuse::with_clients(3);
    story.host().is_held(3);
    let (asked, victims, _) = story.attempt();
    assert_eq!(asked, [2], "the rest fits without it");
    let stays = VictimState::Stays("it stays stopped".to_owned());
    assert_eq!(states(&victims), [(3, stays.clone()), (2, VictimState::Ended)]);
    // A debugger holds client 3, so the service can't end it. After the first failure the service spares client 3 for 1 s, and
    // after the second failure for 2 s. Newer clients come meanwhile.
    story.host().member(4, 40, 4);
    later(&mut story, 1);
    assert_eq!(states(&story.attempt().1), [(4, VictimState::Ended)]);
    story.host().member(5, 50, 5);
    story.host().is_held(5);
    later(&mut story, 1);
    assert_eq!(tried(&mut story), [5, 3, 1]);
    story.host().member(1, 10, 11);
    later(&mut story, 1);
    assert_eq!(tried(&mut story), [5, 1], "3 has another second");
    story.host().member(1, 10, 12);
    later(&mut story, 1);
    assert_eq!(tried(&mut story), [3, 1], "and 5 has one now");
}

#[test]
fn one_that_cannot_be_ended_is_left_alone_as_long_though_a_control_daemon_says_nothing_meanwhile() {
    let mut story = Overuse::with_clients(3);
    story.host().is_held(3);
    for connection in [21, 22] {
        assert_eq!(tried(&mut story), [3, 2]);
        story.host().member(2, 20, connection);
        later(&mut story, 1);
    }
    story.host().has_no_directory = true;
    assert_eq!(tried(&mut story), [0; 0]);
    story.host().has_no_directory = false;
    assert_eq!(tried(&mut story), [2], "3 has another second");
}

#[test]
fn one_that_may_have_lost_its_work_is_settled_before_anybody_else_is_touched() {
    let mut story = Overuse::with_clients(3);
    story.host().stage.lost_answers = 1;
    let (asked, victims, broken_off) = story.attempt();
    assert_eq!(asked, [3]);
    assert_eq!(states(&victims), [(3, VictimState::Unknown("an answer got lost".to_owned()))]);
    assert_eq!(broken_off.as_deref(), Some("an answer got lost"));
    // The answer to the request to end the work of client 3 got lost, so client 3 may have lost its work. Now a newer client
    // comes. The service first tries again to end the work of client 3, and then ends the work of the newer client.
    story.host().member(4, 40, 4);
    story.list_members();
    assert_eq!(story.attempt().0, [0; 0], "it is tried again after a pause");
    later(&mut story, 1);
    assert_eq!(story.attempt().0, [3, 4]);
    later(&mut story, 1);
    assert_eq!(story.attempt().0, [0; 0]);
}

#[test]
fn nobody_is_touched_while_the_server_handles_a_fault() {
    let mut story = Overuse::with_clients(3);
    story.host().is_status(SERVER, ServerStatus::Fault);
    let (asked, victims, broken_off) = story.attempt();
    assert_eq!((asked, victims.len()), (vec![], 0));
    assert_eq!(broken_off.as_deref(), Some("server 200 handles a fatal GPU error"));
    story.host().is_status(SERVER, ServerStatus::Active);
    assert_eq!(story.attempt().0, [3]);
}

#[test]
fn another_process_with_the_pid_of_a_client_is_left_alone() {
    let mut story = Overuse::with_clients(3);
    story.host().member(3, 99, 3);
    assert_eq!(story.attempt().0, [0; 0], "without the client, the rest fits");
    story.host().only_stay(&[1, 2]);
    story.pass(Duration::from_secs(1));
    assert_eq!(story.attempt().0, [0; 0]);
    let mut story = Overuse::with_clients(3);
    story.host().during("hold", |host| host.member(3, 99, 99));
    assert_eq!(story.attempt().0, [0; 0]);
}

#[test]
fn one_that_the_control_daemon_does_not_know_has_gone() {
    let mut story = Overuse::with_clients(4);
    story.host().during("end the work", |host| host.only_stay(&[1, 2, 3]));
    let (asked, victims, _) = story.attempt();
    assert_eq!(asked, [4, 3]);
    assert_eq!(states(&victims), [(3, VictimState::Ended)]);
}

#[test]
fn an_old_look_ends_nobody() {
    let mut story = Overuse::with_clients(3);
    story.pass(Duration::from_secs(2));
    assert_eq!(story.attempt().0, [0; 0]);
    later(&mut story, 0);
    story.host().stage.takes.insert("list", Duration::from_secs(2));
    assert_eq!(story.attempt().0, [0; 0], "the list has taken too long as well");
    later(&mut story, 0);
    story.host().stage.takes.insert("list", Duration::from_millis(1999));
    assert_eq!(story.attempt().0, [3]);
}

#[test]
fn an_old_list_ends_nobody() {
    let mut story = Overuse::with_clients(9);
    story.host().stage.takes.insert("end the work", Duration::from_secs(1));
    story.looked_at = Duration::from_secs(1);
    assert_eq!(story.attempt().0, [9, 8]);
}

#[test]
fn one_that_ends_while_it_is_continued_has_gone() {
    let mut story = Overuse::with_clients(4);
    story.host().during("go on", |host| host.only_stay(&[1, 2, 3]));
    let (asked, victims, _) = story.attempt();
    assert_eq!((asked, states(&victims)), (vec![3], vec![(3, VictimState::Ended)]));
}
