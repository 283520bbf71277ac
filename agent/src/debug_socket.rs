// SPDX-License-Identifier: Apache-2.0
//! Where the running agent answers questions of `steerage-agent explain` and `dump`: a unix socket in the abstract namespace,
//! which the kernel keeps per network namespace. So its name is also the proof that no other agent serves this namespace, and
//! goes with the process, however that ends. Asked by root only; changes nothing.

use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};

use crate::agent::Input;
use crate::dump::Snapshot;
use crate::explain::PacketQuery;

/// The name in the abstract namespace.
const NAME: &str = "steerage-agent";
/// The longest question, in bytes.
const LONGEST: u64 = 256;
/// Time for a question to arrive, and for its answer to be taken.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often the kernel is compared before a difference counts as one.
const COMPARISONS: u32 = 3;

/// Why there is no debug_socket, or no answer.
#[derive(Debug, thiserror::Error)]
pub enum DebugSocketError {
    /// Another agent serves this network namespace.
    #[error("another steerage-agent{} serves this network namespace; two would undo each other's work", who(*process))]
    Taken {
        /// Its process, where it can be seen from here.
        process: Option<i32>,
    },
    /// The socket failed.
    #[error("unix socket @{NAME}")]
    Socket(#[from] io::Error),
    /// Nobody answers.
    #[error("no steerage-agent runs in this network namespace")]
    Nobody,
}

fn who(process: Option<i32>) -> String {
    process.map_or_else(String::new, |process| format!(" (process {process})"))
}

/// What may be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DebugCommand {
    /// What becomes of the packets to a frontend.
    Explain(PacketQuery),
    /// What the kernel should hold and does; with `all`, also what is as it should be.
    Dump {
        /// All elements, not only those that differ.
        all: bool,
    },
}

/// What the loop answers.
#[derive(Debug)]
pub enum DebugReply {
    /// The whole answer.
    Text(String),
    /// What is still to be compared with the kernel; not in the loop, which has changes to follow.
    Snapshot(Box<Snapshot>),
}

/// A request, and where its answer goes.
#[derive(Debug)]
pub struct DebugRequest {
    /// What is asked.
    pub command: DebugCommand,
    /// Who asked.
    pub reply: oneshot::Sender<DebugReply>,
}

/// The open socket.
#[derive(Debug)]
pub struct DebugSocket {
    listener: UnixListener,
}

impl DebugSocket {
    /// Takes the name, in the network namespace of the calling thread.
    pub fn open() -> Result<Self, DebugSocketError> {
        match UnixListener::bind_addr(&address()?) {
            Ok(listener) => {
                listener.set_nonblocking(true)?;
                Ok(Self { listener })
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                Err(DebugSocketError::Taken { process: holder() })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Answers, one after the other, until nobody listens to `inputs` any more.
    pub async fn serve(self, inputs: mpsc::UnboundedSender<Input>) {
        let own = nix::unistd::geteuid().as_raw();
        let listener = match tokio::net::UnixListener::from_std(self.listener) {
            Ok(listener) => listener,
            Err(error) => return tracing::warn!(%error, "questions cannot be taken"),
        };
        while !inputs.is_closed() {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let allowed = stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own);
                    if allowed {
                        // Who is slow or gone has only itself to blame.
                        let _ = tokio::time::timeout(PATIENCE, answer(stream, &inputs)).await;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "questions cannot be taken");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}

async fn answer(mut stream: tokio::net::UnixStream, inputs: &mpsc::UnboundedSender<Input>) -> io::Result<()> {
    let mut text = String::new();
    (&mut stream).take(LONGEST).read_to_string(&mut text).await?;
    let reply = match DebugCommand::parse(text.trim()) {
        Ok(request) => reply(request, inputs).await,
        Err(error) => format!("{error}\n"),
    };
    stream.write_all(reply.as_bytes()).await?;
    stream.shutdown().await
}

/// Asks the loop. The kernel is compared again where it differs: the loop may have been writing.
async fn reply(request: DebugCommand, inputs: &mpsc::UnboundedSender<Input>) -> String {
    for attempt in 1.. {
        let (answer, answered) = oneshot::channel();
        let inquiry = DebugRequest { command: request.clone(), reply: answer };
        let all = matches!(request, DebugCommand::Dump { all: true });
        let snapshot = match inputs.send(Input::Debug(inquiry)).map(|()| answered) {
            Ok(answered) => match answered.await {
                Ok(DebugReply::Text(text)) => return text,
                Ok(DebugReply::Snapshot(snapshot)) => snapshot,
                Err(_) => break,
            },
            Err(_) => break,
        };
        match tokio::task::spawn_blocking(move || snapshot.compare(all)).await {
            Ok(Ok(comparison)) if comparison.differences == 0 || attempt == COMPARISONS => {
                return comparison.text;
            }
            Ok(Err(error)) if attempt == COMPARISONS => {
                return format!("the kernel's state cannot be read: {error}\n");
            }
            _ => {}
        }
    }
    "the agent is ending\n".to_owned()
}

impl DebugCommand {
    /// As it goes over the socket.
    fn line(&self) -> String {
        match self {
            Self::Dump { all: false } => "dump".to_owned(),
            Self::Dump { all: true } => "dump all".to_owned(),
            Self::Explain(PacketQuery { frontend, from: None }) => format!("explain {frontend}"),
            Self::Explain(PacketQuery { frontend, from: Some(from) }) => format!("explain {frontend} {from}"),
        }
    }

    fn parse(line: &str) -> Result<Self, String> {
        let words: Vec<_> = line.split(' ').collect();
        let (frontend, from) = match words.as_slice() {
            ["dump"] => return Ok(Self::Dump { all: false }),
            ["dump", "all"] => return Ok(Self::Dump { all: true }),
            ["explain", frontend] => (frontend, None),
            ["explain", frontend, from] => (frontend, Some(from)),
            _ => {
                return Err(format!(
                    "`{line}` is not understood: client and agent are of different versions"
                ));
            }
        };
        let from =
            from.map(|from| from.parse().map_err(|_| format!("`{from}` is no address"))).transpose()?;
        PacketQuery::new(frontend.parse()?, from).map(Self::Explain)
    }
}

/// Asks the agent that runs in the network namespace of the calling thread. Blocks.
pub fn ask(request: &DebugCommand) -> Result<String, DebugSocketError> {
    let mut stream = UnixStream::connect_addr(&address()?).map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => DebugSocketError::Nobody,
        _ => error.into(),
    })?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(request.line().as_bytes())?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

fn address() -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(NAME)
}

/// The process that has the name, if it still does and is seen from this process namespace.
fn holder() -> Option<i32> {
    let stream = UnixStream::connect_addr(&address().ok()?).ok()?;
    let credentials = getsockopt(&stream, PeerCredentials).ok()?;
    Some(credentials.pid()).filter(|process| *process > 0)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use steerage_requirements::{in_new_netns, requires};

    use super::*;

    #[test]
    fn requests_survive_the_way() {
        let from: IpAddr = "fd00::2".parse().unwrap();
        for from in [None, Some(from)] {
            let question = PacketQuery::new("[fd00::1]:53/UDP".parse().unwrap(), from).unwrap();
            let request = DebugCommand::Explain(question);
            assert_eq!(DebugCommand::parse(&request.line()), Ok(request));
        }
        for all in [false, true] {
            let request = DebugCommand::Dump { all };
            assert_eq!(DebugCommand::parse(&request.line()), Ok(request));
        }
        for line in
            ["", "explain", "explain x", "explain 10.0.0.1:80/TCP y", "explain 10.0.0.1:80/TCP fd00::1"]
        {
            DebugCommand::parse(line).expect_err(line);
        }
    }

    #[test]
    fn the_name_is_taken_once_per_network_namespace() {
        requires!(NetworkNamespace);
        let take_twice = || {
            let first = DebugSocket::open().unwrap();
            let own = i32::try_from(std::process::id()).unwrap();
            let second = DebugSocket::open().unwrap_err();
            assert!(
                matches!(second, DebugSocketError::Taken { process: Some(process) } if process == own),
                "{second}"
            );
            drop(first);
            DebugSocket::open().unwrap();
        };
        in_new_netns(|| {
            let here = DebugSocket::open().unwrap();
            in_new_netns(take_twice);
            drop(here);
        });
    }

    #[test]
    fn questions_are_answered_and_nonsense_is_told() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let request =
                DebugCommand::Explain(PacketQuery::new("10.0.0.1:80/TCP".parse().unwrap(), None).unwrap());
            assert!(matches!(ask(&request), Err(DebugSocketError::Nobody)));
            let (inputs, mut queue) = mpsc::unbounded_channel();
            let debug_socket = DebugSocket::open().unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            std::thread::scope(|scope| {
                // A new thread inherits the network namespace.
                let asker = scope.spawn(|| ask(&request).unwrap());
                runtime.block_on(async {
                    let heard = async {
                        let Some(Input::Debug(DebugRequest { command: heard, reply: answer })) = queue.recv().await else {
                            panic!("no question");
                        };
                        assert_eq!(heard, request);
                        answer.send(DebugReply::Text("because\n".to_owned())).unwrap();
                    };
                    tokio::select! {
                        () = debug_socket.serve(inputs) => panic!("ended"),
                        () = async { heard.await; while !asker.is_finished() { tokio::task::yield_now().await; } } => {}
                    }
                });
                assert_eq!(asker.join().unwrap(), "because\n");
            });
        });
    }
}
