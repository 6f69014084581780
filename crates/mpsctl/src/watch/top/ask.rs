//! The questions to the service, each in a task of its own: an answer that takes its time holds up neither the keys nor
//! the screen. One question of a kind is under way at a time.

use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinSet;

use super::News;
use super::model::Published;
use crate::watch::{Watched, in_time};
use common::bus::answers::known;
use common::bus::proxy::{BusError, DaemonProxy};

/// Asks again and again, until the tasks are dropped.
pub(super) fn start(news: &UnboundedSender<News>) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    tasks.spawn(ask_published(news.clone()));
    tasks.spawn(ask_clients(news.clone()));
    tasks
}

async fn ask_published(news: UnboundedSender<News>) {
    let mut watched = Watched::default();
    loop {
        let answer = in_time(published(&mut watched)).await;
        if news.send(News::Published(answer)).is_err() {
            return;
        }
        watched.pause().await;
    }
}

async fn published(watched: &mut Watched) -> Result<Published, BusError> {
    let daemon = watched.daemon().await?;
    let service = daemon.service().await?;
    let devices = known(daemon.devices().await)?;
    Ok(Published { service, devices, events: daemon.events().await? })
}

/// A control daemon may hang, and the service waits for its answer.
async fn ask_clients(news: UnboundedSender<News>) {
    let mut watched = Watched::default();
    loop {
        let answer = async { watched.daemon().await?.clients().await }.await;
        if news.send(News::Clients(answer)).is_err() {
            return;
        }
        watched.pause().await;
    }
}

/// Ends the GPU work of a process.
pub(super) fn end(pid: u32, news: &UnboundedSender<News>, tasks: &mut JoinSet<()>) {
    let news = news.clone();
    tasks.spawn(async move {
        let done = async { DaemonProxy::connect().await?.terminate_client(pid).await }.await;
        // Nobody listens any more.
        let _ = news.send(News::Ended(pid, done));
    });
}
