//! `io.yunion.Mps1.Control`, documented in `config/io.yunion.Mps1.Control.xml`. The bus policy allows only root to call this
//! interface. This module checks the caller again, since an administrator may have installed another policy.

use tokio::sync::mpsc;
use zbus::message::Header;
use zbus::{Connection, interface};

use super::binding::{self, CallOptions};
use super::request::{
    Callers, NAME_MAX, Reply, Request, Result, WantedBinding, ask, bounded_name, bounded_names,
};
use super::slices::SliceDesk;
use common::bus::error::RequestError;

pub(super) struct ControlInterface {
    requests: mpsc::Sender<Request>,
    callers: Callers,
    desk: SliceDesk,
}

impl ControlInterface {
    pub(super) fn new(requests: mpsc::Sender<Request>, callers: Callers, desk: SliceDesk) -> Self {
        Self { requests, callers, desk }
    }

    async fn for_root(&self, bus: &Connection, call: &Header<'_>) -> Result<()> {
        match self.callers.user_behind(bus, call).await? {
            Some(uid) => Err(RequestError::AccessDenied(format!(
                "only root may call io.yunion.Mps1.Control on D-Bus, not user {uid}"
            ))),
            None => Ok(()),
        }
    }

    async fn ask<T>(
        &self,
        bus: &Connection,
        call: &Header<'_>,
        request: impl FnOnce(Reply<T>) -> Request,
    ) -> Result<T> {
        self.for_root(bus, call).await?;
        ask(&self.requests, request).await
    }
}

#[interface(name = "io.yunion.Mps1.Control", introspection_docs = false)]
impl ControlInterface {
    #[zbus(out_args("generation"))]
    async fn reload(
        &self,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<u64> {
        self.ask(bus, &call, Request::Reload).await
    }

    async fn apply(
        &self,
        force: bool,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<()> {
        self.ask(bus, &call, |reply| Request::Apply(force, reply)).await
    }

    async fn restart_server(
        &self,
        gpu: String,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<()> {
        bounded_name(&gpu)?;
        self.ask(bus, &call, |reply| Request::RestartServer(gpu, reply)).await
    }

    async fn release_devices(
        &self,
        devices: Vec<String>,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<()> {
        bounded_names(&devices)?;
        self.ask(bus, &call, |reply| Request::ReleaseDevices(devices, reply)).await
    }

    async fn drain(
        &self,
        names: Vec<String>,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<()> {
        bounded_names(&names)?;
        self.ask(bus, &call, |reply| Request::Drain(names, reply)).await
    }

    async fn undrain(
        &self,
        names: Vec<String>,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<()> {
        bounded_names(&names)?;
        self.ask(bus, &call, |reply| Request::Undrain(names, reply)).await
    }

    #[zbus(out_args("bound"))]
    async fn bind(
        &self,
        devices: Vec<String>,
        pid: u32,
        options: CallOptions,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<Vec<String>> {
        let (wish, group, label) = binding::wanted(devices, pid, options)?;
        self.for_root(bus, &call).await?;
        let shares = wish.share;
        let slices = self.desk.to_bind(wish).await?;
        let wanted = WantedBinding { slices, group, label, shares };
        ask(&self.requests, |reply| Request::Bind(wanted, reply)).await
    }

    async fn unbind(
        &self,
        pid: u32,
        options: CallOptions,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<()> {
        let group = binding::group(pid, options)?;
        self.ask(bus, &call, |reply| Request::Unbind(group, reply)).await
    }

    async fn release_container(
        &self,
        id: String,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<()> {
        if id.len() > NAME_MAX {
            let length = id.len();
            return Err(RequestError::Failed(format!(
                "a container id has at most {NAME_MAX} digits, and this id has {length}"
            )));
        }
        self.ask(bus, &call, |reply| Request::ReleaseContainer(id, reply)).await
    }

    async fn release_group(
        &self,
        pid: u32,
        options: CallOptions,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<()> {
        let wanted = binding::stop(pid, options)?;
        self.ask(bus, &call, |reply| Request::ReleaseGroup(wanted, reply)).await
    }
}
