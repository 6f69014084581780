//! The socket between the bus and us, with a gate in it: each call passes here before anything is done for it, and each
//! answer before it is sent. So few calls are worked on at a time, and nobody has more than his share ([`Callers`]).
//!
//! zbus begins a task for each call that it is given, and an answer waits in memory until the bus takes it. Behind the
//! gate both are bounded: a call that would be one too many waits in the socket, where it is the bus's.

use std::borrow::Cow;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::Notify;
use tokio::time::timeout;
use zbus::connection::Builder;
use zbus::connection::socket::{ReadHalf, Socket, Split, WriteHalf};
use zbus::export::async_trait::async_trait;
use zbus::fdo::{self, DBusProxy};
use zbus::message::{Header, Type};
use zbus::names::{BusName, UniqueName};
use zbus::{Address, Connection, Message};

use super::RequestError;
use super::callers::{Callers, Verdict};
use super::wire::{self, Arrival, BODY_MAX, Incoming};

/// The bus itself, as a sender.
const BUS: &str = "org.freedesktop.DBus";

/// The most calls that are answered at a time. An answer takes microseconds, unless the bus does not take it.
const AT_A_TIME: usize = 4;

/// The bus gets so long to take a message before we leave it and join it again. It takes microseconds; a bus that stops
/// reading from us does so for as long as somebody else pleases.
const WRITE_TIMEOUT: Duration = Duration::from_secs(20);

/// The bus gets so long to say who somebody is.
const BUS_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause between two looks at which connections have gone or read.
const LOOK_PERIOD: Duration = Duration::from_secs(1);

/// A call: who sent it, and its number.
type CallId = (String, u32);

/// A call that has passed the gate and has no answer yet.
#[derive(Debug)]
struct Call {
    wants_answer: bool,
    /// The user for whom it is a request that takes its time.
    request_of: Option<u32>,
    /// The body of its answer, if that is here as bytes.
    body: Option<Arc<[u8]>>,
}

#[derive(Debug)]
struct Inside {
    calls: HashMap<CallId, Call>,
    callers: Callers,
    last_look: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Gate {
    inside: Mutex<Inside>,
    /// A call has been answered or has become a request.
    freed: Notify,
    /// The bus has not taken a message.
    broken: Notify,
    socket: tokio::sync::Mutex<OwnedWriteHalf>,
    /// A second connection, for questions about callers: their answers must not wait behind calls.
    asker: Connection,
}

impl Gate {
    /// Joins the bus at `address`. The socket is for the connection that serves.
    ///
    /// # Errors
    /// The bus can't be reached.
    pub(super) async fn open(address: &Address) -> zbus::Result<(Arc<Self>, Ends<GatedReader, GatedWriter>)> {
        let (incoming, outgoing) = wire::connect(address).await?;
        let asker = Builder::socket(Ends(AnswersReader(incoming), PlainWriter(outgoing))).build().await?;
        let (incoming, outgoing) = wire::connect(address).await?;
        let inside = Inside { calls: HashMap::new(), callers: Callers::new(Instant::now()), last_look: None };
        let gate = Arc::new(Self {
            inside: Mutex::new(inside),
            freed: Notify::new(),
            broken: Notify::new(),
            socket: tokio::sync::Mutex::new(outgoing),
            asker,
        });
        let reader = GatedReader { gate: Arc::clone(&gate), incoming };
        Ok((Arc::clone(&gate), Ends(reader, GatedWriter(gate))))
    }

    /// Makes a request of a call: it may take its time, and the next call is answered meanwhile. Returns the user, as
    /// the kernel has told the bus.
    ///
    /// # Errors
    /// The user has too many under way.
    pub(super) fn request(&self, header: &Header<'_>) -> Result<u32, RequestError> {
        let unknown = || RequestError::AccessDenied("the bus doesn't say who you are".to_owned());
        let sender = header.sender().ok_or_else(unknown)?.as_str();
        let mut inside = self.inside();
        let uid = inside.callers.uid_of(sender).ok_or_else(unknown)?;
        inside.callers.begin_request(uid, Instant::now()).map_err(RequestError::Busy)?;
        let id = (sender.to_owned(), header.primary().serial_num().get());
        match inside.calls.get_mut(&id) {
            Some(call) if call.request_of.is_none() => call.request_of = Some(uid),
            // It has been answered already, so nothing is under way.
            _ => inside.callers.end_request(uid),
        }
        drop(inside);
        self.freed.notify_one();
        Ok(uid)
    }

    /// Has a call answered with these bytes as the body, in the place of the body of the answer that zbus sends. So
    /// all who ask share one copy.
    ///
    /// # Errors
    /// There is no such call.
    pub(super) fn answer_with(&self, header: &Header<'_>, body: Arc<[u8]>) -> Result<(), RequestError> {
        let sender = header.sender().map(ToString::to_string).unwrap_or_default();
        let id = (sender, header.primary().serial_num().get());
        let mut inside = self.inside();
        let over = || RequestError::Failed("the call is not under way".to_owned());
        inside.calls.get_mut(&id).ok_or_else(over)?.body = Some(body);
        Ok(())
    }

    /// The call that came is let in, or refused here.
    async fn let_in(self: &Arc<Self>, arrival: Arrival) -> zbus::Result<Option<Message>> {
        let header = arrival.message.header();
        let Some(sender) = header.sender() else { return Ok(None) };
        if !self.is_known(sender).await {
            return Ok(None);
        }
        let verdict = self.inside().callers.judge(sender, Instant::now());
        let refusal = match (verdict, arrival.too_large) {
            (Verdict::Ignore, _) => {
                self.look_if_due();
                return Ok(None);
            }
            (Verdict::Refuse(why), _) => Some(("io.yunion.Mps1.Error.Busy", why)),
            (Verdict::Admit, Some(bytes)) => Some((
                "org.freedesktop.DBus.Error.LimitsExceeded",
                format!("the arguments take {bytes} bytes, and {BODY_MAX} are allowed"),
            )),
            (Verdict::Admit, None) => None,
        };
        if let Some((name, text)) = refusal {
            if arrival.wants_answer {
                let answer = Message::error(&header, name).build(&text)?;
                self.account(sender, answer.data().len());
                self.write(answer.data(), &[]).await?;
            }
            return Ok(None);
        }
        self.wait_for_a_place().await;
        let id = (sender.to_string(), header.primary().serial_num().get());
        let call = Call { wants_answer: arrival.wants_answer, request_of: None, body: None };
        match self.inside().calls.entry(id) {
            Entry::Vacant(place) => place.insert(call),
            // Nobody could tell the answers apart.
            Entry::Occupied(_) => return Ok(None),
        };
        Ok(Some(arrival.message.clone()))
    }

    /// Has it that the user behind a connection is known, if anybody knows.
    async fn is_known(&self, sender: &UniqueName<'_>) -> bool {
        if self.inside().callers.uid_of(sender).is_some() {
            return true;
        }
        match timeout(BUS_TIMEOUT, self.ask_who(sender)).await {
            Ok(Ok(uid)) => {
                self.inside().callers.meet(sender, uid);
                true
            }
            // It has gone, most often.
            Ok(Err(error)) => {
                tracing::debug!("the bus doesn't say who {sender} is: {error}");
                false
            }
            Err(_) => {
                tracing::debug!("the bus doesn't say who {sender} is");
                false
            }
        }
    }

    async fn ask_who(&self, sender: &UniqueName<'_>) -> fdo::Result<u32> {
        let bus = DBusProxy::new(&self.asker).await?;
        bus.get_connection_unix_user(BusName::Unique(sender.to_owned())).await
    }

    async fn wait_for_a_place(&self) {
        loop {
            let freed = self.freed.notified();
            if self.inside().calls.values().filter(|call| call.request_of.is_none()).count() < AT_A_TIME {
                return;
            }
            freed.await;
        }
    }

    fn account(self: &Arc<Self>, name: &str, bytes: usize) {
        self.inside().callers.answered(name, bytes, Instant::now());
        self.look_if_due();
    }

    /// Looks which connections have gone and which read, beside all else, if it is time to.
    fn look_if_due(self: &Arc<Self>) {
        let now = Instant::now();
        {
            let mut inside = self.inside();
            let rested =
                inside.last_look.is_none_or(|last| now.saturating_duration_since(last) >= LOOK_PERIOD);
            if !rested || !inside.callers.look_is_due() {
                return;
            }
            inside.last_look = Some(now);
        }
        let gate = Arc::clone(self);
        tokio::spawn(gate.look());
    }

    async fn look(self: Arc<Self>) {
        let names = async { DBusProxy::new(&self.asker).await?.list_names().await };
        let Ok(Ok(names)) = timeout(BUS_TIMEOUT, names).await else { return };
        let there: HashSet<String> = names.into_iter().map(|name| name.to_string()).collect();
        for name in self.inside().callers.keep(&there, Instant::now()) {
            let gate = Arc::clone(&self);
            // However long it takes: the bus answers for a connection that goes.
            tokio::spawn(async move {
                let reads = gate.reads(&name).await;
                gate.inside().callers.has_answered(&name, reads);
            });
        }
    }

    /// Whether a connection reads what it is sent: it then answers, if only that it knows no such method. The bus hands
    /// messages over in their order, so the answers before are read as well.
    async fn reads(&self, name: &str) -> bool {
        let asked = self.asker.call_method(Some(name), "/", Some("org.freedesktop.DBus.Peer"), "Ping", &());
        match asked.await {
            Ok(_) | Err(zbus::Error::MethodError(..)) => true,
            // The bus says that it has gone, or may not be asked, in other words.
            Err(zbus::Error::FDO(error)) => matches!(
                *error,
                fdo::Error::UnknownMethod(_)
                    | fdo::Error::UnknownInterface(_)
                    | fdo::Error::UnknownObject(_)
                    | fdo::Error::NotSupported(_)
                    | fdo::Error::Failed(_)
            ),
            Err(_) => false,
        }
    }

    /// Has the bus take a message, which may be in two parts.
    async fn write(&self, head: &[u8], body: &[u8]) -> io::Result<()> {
        let mut socket = self.socket.lock().await;
        let written = async {
            socket.write_all(head).await?;
            socket.write_all(body).await
        };
        match timeout(WRITE_TIMEOUT, written).await {
            Ok(written) => written,
            Err(_) => {
                // A part of it may be there, so nothing can follow.
                self.broken.notify_one();
                Err(io::ErrorKind::TimedOut.into())
            }
        }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        // Every change is one assignment.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The two ends of the socket of a connection.
pub(super) struct Ends<R, W>(R, W);

impl<R: ReadHalf, W: WriteHalf> Socket for Ends<R, W> {
    type ReadHalf = R;
    type WriteHalf = W;

    fn split(self) -> Split<R, W> {
        Split::new(self.0, self.1)
    }
}

#[derive(Debug)]
pub(super) struct GatedReader {
    gate: Arc<Gate>,
    incoming: Incoming,
}

#[async_trait]
impl ReadHalf for GatedReader {
    async fn receive_message(
        &mut self,
        number: u64,
        early: &mut Vec<u8>,
        _: &mut Vec<OwnedFd>,
    ) -> zbus::Result<Message> {
        self.incoming.give_back(early);
        loop {
            let arrival = tokio::select! {
                arrival = self.incoming.next(number) => arrival?,
                () = self.gate.broken.notified() => return Err(io::Error::from(io::ErrorKind::TimedOut).into()),
            };
            if arrival.message.message_type() != Type::MethodCall {
                match answer_or_news(arrival) {
                    Some(message) => return Ok(message),
                    None => continue,
                }
            }
            if let Some(call) = self.gate.let_in(arrival).await? {
                return Ok(call);
            }
        }
    }

    async fn recvmsg(&mut self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        Ok((self.incoming.handshake(buffer).await?, Vec::new()))
    }
}

#[derive(Debug)]
pub(super) struct GatedWriter(Arc<Gate>);

#[async_trait]
impl WriteHalf for GatedWriter {
    async fn send_message(&mut self, message: &Message) -> zbus::Result<()> {
        let gate = &self.0;
        let header = message.header();
        let (Some(number), Some(caller)) = (header.reply_serial(), header.destination()) else {
            return Ok(gate.write(message.data(), &[]).await?);
        };
        let id = (caller.to_string(), number.get());
        let (wanted, body) = match gate.inside().calls.get_mut(&id) {
            Some(call) => (call.wants_answer, call.body.take()),
            None => (true, None),
        };
        let is_return = message.message_type() == Type::MethodReturn;
        let (head, body) = match &body {
            Some(body) if is_return => (Cow::from(wire::head_for(message, body.len())), &**body),
            _ => (Cow::from(&**message.data()), &[][..]),
        };
        let written = if wanted {
            gate.account(caller, head.len() + body.len());
            gate.write(&head, body).await
        } else {
            Ok(())
        };
        // Not before it is out of our memory.
        let mut inside = gate.inside();
        if let Some(uid) = inside.calls.remove(&id).and_then(|call| call.request_of) {
            inside.callers.end_request(uid);
        }
        drop(inside);
        gate.freed.notify_one();
        Ok(written?)
    }

    async fn sendmsg(&mut self, buffer: &[u8], _: &[BorrowedFd<'_>]) -> io::Result<usize> {
        self.0.socket.lock().await.write(buffer).await
    }

    async fn close(&mut self) -> io::Result<()> {
        self.0.socket.lock().await.shutdown().await
    }
}

/// A message that is not a call, if it is one to have: an answer, or a signal of the bus. Every user may send signals.
fn answer_or_news(arrival: Arrival) -> Option<Message> {
    if arrival.too_large.is_some() {
        return None;
    }
    let is_news = arrival.message.message_type() == Type::Signal;
    let from_bus = arrival.message.header().sender().is_some_and(|sender| sender.as_str() == BUS);
    (!is_news || from_bus).then_some(arrival.message)
}

/// The reading end of a connection that only asks.
#[derive(Debug)]
struct AnswersReader(Incoming);

#[async_trait]
impl ReadHalf for AnswersReader {
    async fn receive_message(
        &mut self,
        number: u64,
        early: &mut Vec<u8>,
        _: &mut Vec<OwnedFd>,
    ) -> zbus::Result<Message> {
        self.0.give_back(early);
        loop {
            let arrival = self.0.next(number).await?;
            let is_call = arrival.message.message_type() == Type::MethodCall;
            if let Some(message) = answer_or_news(arrival).filter(|_| !is_call) {
                return Ok(message);
            }
        }
    }

    async fn recvmsg(&mut self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        Ok((self.0.handshake(buffer).await?, Vec::new()))
    }
}

#[derive(Debug)]
struct PlainWriter(OwnedWriteHalf);

#[async_trait]
impl WriteHalf for PlainWriter {
    async fn sendmsg(&mut self, buffer: &[u8], _: &[BorrowedFd<'_>]) -> io::Result<usize> {
        self.0.write(buffer).await
    }

    async fn close(&mut self) -> io::Result<()> {
        self.0.shutdown().await
    }
}
