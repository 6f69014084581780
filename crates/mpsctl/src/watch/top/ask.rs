//! The requests of `top` to the service. Each kind of request has a task of its own, so a slow answer delays neither the keys
//! nor the screen.

use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinSet;

use super::TopEvent;
use super::model::TopAnswers;
use crate::watch::{ReconnectingProxy, in_time};
use common::bus::answers::known;
use common::bus::proxy::{BusError, DaemonProxy};

/// Starts tasks that repeat their requests to the service until the returned set is dropped.
pub(super) fn start(events: &UnboundedSender<TopEvent>) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    tasks.spawn(ask_published(events.clone()));
    tasks.spawn(ask_clients(events.clone()));
    tasks
}

async fn ask_published(events: UnboundedSender<TopEvent>) {
    let mut watched = ReconnectingProxy::default();
    loop {
        let answer = in_time(published(&mut watched)).await;
        if events.send(TopEvent::Published(answer)).is_err() {
            return;
        }
        watched.pause().await;
    }
}

async fn published(watched: &mut ReconnectingProxy) -> Result<TopAnswers, BusError> {
    let daemon = watched.daemon().await?;
    let service = daemon.service().await?;
    let devices = known(daemon.devices().await)?;
    Ok(TopAnswers { service, devices, events: daemon.events().await? })
}

/// The service's list of clients may come late, since the service waits for a control daemon that hangs. So this request has no
/// time limit.
async fn ask_clients(events: UnboundedSender<TopEvent>) {
    let mut watched = ReconnectingProxy::default();
    loop {
        let answer = async { watched.daemon().await?.clients().await }.await;
        if events.send(TopEvent::Clients(answer)).is_err() {
            return;
        }
        watched.pause().await;
    }
}

pub(super) fn end(pid: u32, events: &UnboundedSender<TopEvent>, tasks: &mut JoinSet<()>) {
    let events = events.clone();
    tasks.spawn(async move {
        let done = async { DaemonProxy::connect().await?.terminate_client(pid).await }.await;
        // Sending fails only after `top` has closed the screen.
        let _ = events.send(TopEvent::Ended(pid, done));
    });
}
