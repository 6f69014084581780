//! Messages as they come over the bus's socket. Every local user may send us what he likes, so a message has a bounded
//! size before anything of it is kept.

use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream as StdStream};

use tokio::io::{AsyncReadExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use zbus::address::Transport;
use zbus::address::transport::UnixSocket;
use zbus::connection::socket::ReadHalf;
use zbus::export::async_trait::async_trait;
use zbus::message::EndianSig;
use zbus::{Address, Message};

/// The fixed beginning of a message.
const BEGINNING: usize = 16;

/// The largest size of the rest of a header that is taken. Object paths make it long; ours are short.
const FIELDS_MAX: usize = 8 << 10;

/// As large as the body of a call is taken. Some hundred names of slices are a few KiB.
pub(super) const BODY_MAX: usize = 64 << 10;

/// As large as the body of an answer to us is taken, or of a signal of the bus: `ListNames` on a host with some thousand
/// connections.
const ANSWER_MAX: usize = 1 << 20;

/// Joins the socket of a bus.
///
/// # Errors
/// It is not there, or the address is not that of a Unix socket.
pub(super) async fn connect(address: &Address) -> io::Result<(Incoming, OwnedWriteHalf)> {
    let Transport::Unix(unix) = address.transport() else { return Err(not_a_socket(address)) };
    let stream = match unix.path() {
        UnixSocket::File(path) => UnixStream::connect(path).await?,
        UnixSocket::Abstract(name) => {
            let name = std::os::unix::ffi::OsStrExt::as_bytes(name.as_os_str());
            let stream = StdStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
            stream.set_nonblocking(true)?;
            UnixStream::from_std(stream)?
        }
        _ => return Err(not_a_socket(address)),
    };
    let (read, write) = stream.into_split();
    Ok((Incoming { early: Vec::new(), stream: BufReader::new(read) }, write))
}

fn not_a_socket(address: &Address) -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        format!("the address {address} is not that of a Unix socket; correct DBUS_SYSTEM_BUS_ADDRESS"),
    )
}

#[derive(Debug)]
pub(super) struct Arrival {
    /// The message; without its body where that was too large.
    pub(super) message: Message,
    /// The size of the body in bytes where it was too large.
    pub(super) too_large: Option<usize>,
    /// Whether the sender wants an answer. The message itself says so in any case.
    pub(super) wants_answer: bool,
}

/// The reading end of the socket.
#[derive(Debug)]
pub(super) struct Incoming {
    /// Bytes of the first messages that were read with the end of the handshake.
    early: Vec<u8>,
    stream: BufReader<OwnedReadHalf>,
}

impl Incoming {
    /// Some bytes of the handshake that comes before the messages.
    pub(super) async fn handshake(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer).await
    }

    /// Takes back what was read of the messages with the end of the handshake.
    pub(super) fn give_back(&mut self, early: &mut Vec<u8>) {
        self.early.append(early);
    }

    /// The next message, as the one with this number. A message that has too large a header is passed over.
    pub(super) async fn next(&mut self, number: u64) -> zbus::Result<Arrival> {
        loop {
            let mut bytes = vec![0; BEGINNING];
            self.fill(&mut bytes).await?;
            let lengths = Lengths::of(&bytes).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
            if lengths.fields > FIELDS_MAX {
                self.skip(lengths.fields_padded() + lengths.body).await?;
                continue;
            }
            let body_max = if lengths.is_call { BODY_MAX } else { ANSWER_MAX };
            let kept = if lengths.body > body_max { 0 } else { lengths.body };
            let fields = BEGINNING..BEGINNING + lengths.fields_padded();
            bytes.resize(fields.end + kept, 0);
            self.fill(bytes.get_mut(BEGINNING..).unwrap_or_default()).await?;
            let mut too_large = None;
            if kept < lengths.body {
                self.skip(lengths.body).await?;
                too_large = Some(lengths.body);
                if let Some(length) = bytes.get_mut(BODY_LENGTH) {
                    length.fill(0);
                }
            }
            let mut wants_answer = false;
            if let Some(flags) = bytes.get_mut(FLAGS) {
                wants_answer = *flags & NO_ANSWER == 0;
                // Every call is answered, so that it is seen when it is done.
                *flags &= !NO_ANSWER;
            }
            let message = Here.receive_message(number, &mut bytes, &mut Vec::new()).await?;
            return Ok(Arrival { message, too_large, wants_answer });
        }
    }

    async fn fill(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let early = self.early.len().min(buffer.len());
        let (first, rest) = buffer.split_at_mut(early);
        for (to, from) in first.iter_mut().zip(self.early.drain(..early)) {
            *to = from;
        }
        self.stream.read_exact(rest).await.map(|_| ())
    }

    async fn skip(&mut self, count: usize) -> io::Result<()> {
        let mut left = count;
        let mut waste = [0; 4096];
        while left > 0 {
            let step = left.min(waste.len());
            self.fill(waste.get_mut(..step).unwrap_or_default()).await?;
            left -= step;
        }
        Ok(())
    }
}

/// The head of a message, as it is before a body of this length.
pub(super) fn head_for(message: &Message, body: usize) -> Vec<u8> {
    let whole = message.data();
    let mut head: Vec<u8> = whole.iter().copied().take(whole.len() - message.body().len()).collect();
    // More than the bus takes of any message.
    let length = u32::try_from(body).unwrap_or(u32::MAX);
    if let Some(place) = head.get_mut(BODY_LENGTH) {
        place.copy_from_slice(&match message.primary_header().endian_sig() {
            EndianSig::Little => length.to_le_bytes(),
            EndianSig::Big => length.to_be_bytes(),
        });
    }
    head
}

/// The places of the flags and of the body's length in the beginning of a message.
const FLAGS: usize = 2;
const BODY_LENGTH: std::ops::Range<usize> = 4..8;
const FIELDS_LENGTH: std::ops::Range<usize> = 12..16;

/// `NO_REPLY_EXPECTED`, among the flags.
const NO_ANSWER: u8 = 1;

/// `METHOD_CALL`, as the kind of a message.
const CALL: u8 = 1;

/// The lengths that the beginning of a message gives for the rest, in bytes.
#[derive(Debug)]
struct Lengths {
    is_call: bool,
    fields: usize,
    body: usize,
}

impl Lengths {
    fn of(beginning: &[u8]) -> Option<Self> {
        let number = |range: std::ops::Range<usize>| {
            let bytes: [u8; 4] = beginning.get(range)?.try_into().ok()?;
            let number = match beginning.first()? {
                b'l' => u32::from_le_bytes(bytes),
                b'B' => u32::from_be_bytes(bytes),
                _ => return None,
            };
            usize::try_from(number).ok()
        };
        let is_call = *beginning.get(1)? == CALL;
        Some(Self { is_call, fields: number(FIELDS_LENGTH)?, body: number(BODY_LENGTH)? })
    }

    /// With what fills them up to the body, which begins at a multiple of eight.
    fn fields_padded(&self) -> usize {
        self.fields.next_multiple_of(8)
    }
}

/// Takes a message apart of which every byte is here.
#[derive(Debug)]
struct Here;

#[async_trait]
impl ReadHalf for Here {
    async fn recvmsg(&mut self, _: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::AsyncWriteExt;
    use zbus::message::{Flags, Type};

    use super::*;

    /// The messages that the reading end finds in these bytes, some of which were read before.
    async fn read(bytes: &[u8], early: usize) -> Vec<zbus::Result<Arrival>> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (read, _write) = ours.into_split();
        let (first, rest) = bytes.split_at(early.min(bytes.len()));
        let mut incoming = Incoming { early: Vec::new(), stream: BufReader::new(read) };
        incoming.give_back(&mut first.to_vec());
        let rest = rest.to_vec();
        let writing = tokio::spawn(async move {
            let mut theirs = theirs;
            // The reader may have had enough.
            let _ = theirs.write_all(&rest).await;
        });
        let mut arrivals = Vec::new();
        loop {
            let arrival = incoming.next(1).await;
            let ended = arrival.is_err();
            arrivals.push(arrival);
            if ended {
                break;
            }
        }
        drop(incoming);
        writing.await.unwrap();
        arrivals
    }

    fn call(name: &str) -> Message {
        Message::method_call("/io/yunion/Mps1/Manager", "GetDevice")
            .interface("io.yunion.Mps1.Manager")
            .build(&name)
            .unwrap()
    }

    fn bytes(messages: &[&Message]) -> Vec<u8> {
        messages.iter().flat_map(|message| message.data().to_vec()).collect()
    }

    #[tokio::test]
    async fn messages_come_whole_however_they_are_cut() {
        let (first, second) = (call("00:06.0-1"), call("\u{1}\u{fc}"));
        let all = bytes(&[&first, &second]);
        for early in 0..all.len() {
            let arrivals = read(&all, early).await;
            let names =
                arrivals.iter().flatten().map(|one| one.message.body().deserialize::<String>().unwrap());
            assert_eq!(names.collect::<Vec<_>>(), ["00:06.0-1", "\u{1}\u{fc}"], "{early}");
            assert_eq!(arrivals.len(), 3);
        }
    }

    #[tokio::test]
    async fn a_body_that_is_too_large_is_passed_over_and_told() {
        let (large, next) = (call(&"x".repeat(BODY_MAX)), call("00:06.0"));
        let arrivals = read(&bytes(&[&large, &next]), 0).await;
        let sizes: Vec<_> = arrivals.iter().flatten().map(|arrival| arrival.too_large).collect();
        assert_eq!(sizes, [Some(BODY_MAX + 5), None]);
        let [Ok(first), ..] = arrivals.as_slice() else { panic!("{arrivals:?}") };
        assert_eq!(first.message.header().member().unwrap().as_str(), "GetDevice");
        assert!(first.message.body().is_empty());
    }

    #[tokio::test]
    async fn a_header_that_is_too_large_is_passed_over() {
        let path = format!("/{}", "x".repeat(FIELDS_MAX));
        let large = Message::method_call(path.as_str(), "Get").build(&"argument").unwrap();
        let arrivals = read(&bytes(&[&large, &call("00:06.0")]), 0).await;
        assert_eq!(arrivals.iter().flatten().count(), 1);
    }

    #[tokio::test]
    async fn whether_an_answer_is_wanted_is_kept() {
        let quiet = Message::method_call("/", "Get").with_flags(Flags::NO_REPLY_EXPECTED);
        let arrivals = read(&bytes(&[&quiet.build(&()).unwrap(), &call("")]), 0).await;
        let wanted: Vec<_> = arrivals.iter().flatten().map(|arrival| arrival.wants_answer).collect();
        assert_eq!(wanted, [false, true]);
        for arrival in arrivals.into_iter().flatten() {
            assert_eq!(arrival.message.message_type(), Type::MethodCall);
            assert!(!arrival.message.primary_header().flags().contains(Flags::NO_REPLY_EXPECTED));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200), endian in "[lB]") {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let mut begun = endian.into_bytes();
            begun.extend(&bytes);
            assert!(runtime.block_on(read(&begun, 3)).last().unwrap().is_err());
        }
    }
}
