//! Reloads the configuration. A configuration that is refused changes nothing.

use std::time::Duration;

use tokio::time::timeout;

use super::findings::{self, join, say_findings};
use super::grant::grant;
use super::{Daemon, logging};
use crate::dbus::Reply;
use crate::message::{Message, Subject};
use common::bus::error::RequestError;
use common::plan::{self, Plan};
use common::problem::LocatedProblem;

/// The longest wait of a caller until the new configuration is in force. It must be shorter than the deadline of a request on
/// the bus.
const PATIENCE: Duration = Duration::from_secs(50);

/// Reloads the configuration for a caller on the bus. The caller gets the answer when the new configuration is in force.
pub(super) async fn and_tell(daemon: &mut Daemon, reply: Reply<u64>) {
    if let Err(error) = daemon.reload().await {
        return drop(reply.send(Err(error)));
    }
    let (reloads, mut in_force) = (daemon.reloads, daemon.in_force.subscribe());
    let snapshot = daemon.snapshot.subscribe();
    tokio::spawn(async move {
        let waited = timeout(PATIENCE, in_force.wait_for(|settled| *settled >= reloads)).await;
        let _ = reply.send(match waited {
            Ok(Ok(_)) => Ok(snapshot.borrow().generation),
            Ok(Err(_)) => Err(RequestError::Busy("the service is stopping".to_owned())),
            Err(_) => Err(RequestError::Busy(format!(
                "the service has accepted the new configuration, but has not put it in force within {seconds} \
                 s; watch the progress with yunion-mpsctl status",
                seconds = PATIENCE.as_secs()
            ))),
        });
    });
}

impl Daemon {
    pub(super) async fn reload(&mut self) -> Result<(), RequestError> {
        if self.ending.is_some() {
            return Err(RequestError::Busy("the service is stopping".to_owned()));
        }
        self.service_manager.reloading();
        let result = self.replace_configuration().await;
        match &result {
            Ok(()) => {
                self.refused.clear();
                if self.forget_resets()
                    && let Err(stuck) = self.fleet.link()
                {
                    tracing::warn!("{stuck}");
                }
                self.reloads += 1;
                self.event("the service has reloaded its configuration".to_owned());
            }
            Err(error) => {
                self.refused = format!("the new configuration was refused: {error}");
                let text =
                    format_args!("{refused}; the old configuration stays in force", refused = self.refused);
                Message::ConfigurationRefused.log(Subject::default(), text);
            }
        }
        self.settle();
        result
    }

    async fn replace_configuration(&mut self) -> Result<(), RequestError> {
        let invalid = |problems: &[LocatedProblem]| RequestError::InvalidConfig(join(problems));
        let loaded = findings::load(&self.sources).map_err(|problems| invalid(&problems))?;
        say_findings(&loaded);
        if let Some(problem) = loaded.silent_end().filter(|_| self.settings.enabled) {
            return Err(invalid(&[problem]));
        }
        let plan = if loaded.settings.enabled {
            let inventory = self.look_for_gpus().await;
            let planned = plan::plan(&loaded.settings, &inventory, self.planned_gpus());
            grant(planned, &self.settings, self.plan.is_ok())?
        } else {
            Ok(Plan::default())
        };
        tracing::debug!(step = "granted", "the new configuration is valid");
        if !loaded.settings.enabled {
            let doomed = self.fleet.ended_by_disabling();
            self.name_clients("enable_cuda_mps: false", &doomed).await;
        }
        logging::set(&self.level, loaded.settings.log_level);
        self.settings = loaded.settings;
        match plan {
            Ok(plan) => self.put_in_force(plan),
            Err(reason) => self.not_yet(reason),
        }
        Ok(())
    }
}
