// SPDX-License-Identifier: Apache-2.0
//! The unix socket on which the running agent replies to `steerage-agent explain` and `dump`. For root only; it changes nothing.
//!
//! Its name is in the abstract namespace, which the kernel keeps per network namespace and frees when the process ends, however
//! that happens. Any process of the host's network may take the name: then the agent goes without the socket, and a client that
//! finds another user's process refuses it. Which agent runs is not decided here but by [`InstanceLock`], where the kernel has it.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, getsockopt, socket};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};

use crate::debug_request::{DebugCommand, DebugReply, DebugRequest};
use crate::dump::compare;
use crate::input::Input;
use crate::instance_lock::InstanceLock;

/// The name in the abstract namespace.
const NAME: &str = "steerage-agent";
/// Bytes of the longest command.
const MAX_COMMAND: u64 = 256;
/// Time for a command to arrive, and for its reply to be read.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Time for the first byte of a reply.
const FIRST_BYTE: Duration = Duration::from_secs(3);
/// The first byte of each reply, as soon as the loop has answered: to compare takes longer where the tables are large.
const ALIVE: u8 = 0;
/// Comparisons before a difference is reported: the loop may have been writing during the first ones.
const COMPARISONS: u32 = 3;

/// Why the socket cannot be opened or asked.
#[derive(Debug, thiserror::Error)]
pub enum DebugSocketError {
    /// Another agent runs.
    #[error("another steerage-agent{} serves this network namespace; two would undo each other's work", in_process(*process))]
    Taken {
        /// Its process, if this process namespace shows it.
        process: Option<i32>,
    },
    /// The socket failed.
    #[error("unix socket @{NAME}")]
    Socket(#[from] io::Error),
    /// The lock failed.
    #[error("cannot lock this network namespace")]
    Lock(#[from] steerage_nft::Error),
    /// The name belongs to a process that cannot be an agent.
    #[error("the unix socket @{NAME} belongs to a process of user {0}, not to an agent")]
    NotRoot(u32),
    /// The agent hangs, or is busy.
    #[error("the agent does not answer within {}s: it hangs, or is busy", FIRST_BYTE.as_secs())]
    Silent,
    /// No agent listens.
    #[error("no steerage-agent runs in this network namespace. Run this on the node, or in the agent's pod.")]
    NotRunning,
}

fn in_process(process: Option<i32>) -> String {
    process.map_or_else(String::new, |process| format!(" (process {process})"))
}

/// The open socket, and the lock that lets one agent run.
#[derive(Debug)]
pub struct DebugSocket {
    listener: Option<UnixListener>,
    _lock: Option<InstanceLock>,
    /// What the log is to say: it does not exist yet when the socket is opened.
    notes: Vec<String>,
}

impl DebugSocket {
    /// Takes the lock and the name in the network namespace of the calling thread.
    pub fn open() -> Result<Self, DebugSocketError> {
        let lock = match InstanceLock::take() {
            Ok(None) => return Err(taken(holder())),
            Ok(lock) => lock,
            // Without tables that have owners only the name tells.
            Err(error) if error.is_unsupported() => None,
            Err(error) => return Err(error.into()),
        };
        let mut notes = Vec::new();
        if lock.as_ref().is_some_and(|lock| lock.replaced_table) {
            notes.push("lock table had no owner, as after a restored ruleset; replaced it".to_owned());
        }
        let (listener, note) = match bind() {
            Ok(listener) => (Some(listener), None),
            Err(error) if lock.is_some() => {
                let by = holder().map_or_else(String::new, |holder| format!(", held by {holder:?}"));
                (
                    None,
                    Some(format!(
                        "debug socket unavailable ({error}{by}); continuing without explain and dump"
                    )),
                )
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => match holder() {
                Some(Holder { user, .. }) if user != own_user() && user != 0 => {
                    let note = format!(
                        "a process of user {user} has the debug socket's name; continuing without explain and dump"
                    );
                    (None, Some(note))
                }
                holder => return Err(taken(holder)),
            },
            Err(error) => return Err(error.into()),
        };
        notes.extend(note);
        Ok(Self { listener, _lock: lock, notes })
    }

    /// Logs what happened when it was opened.
    pub fn report(&self) {
        for note in &self.notes {
            tracing::warn!("{note}");
        }
    }

    /// Serves one connection after the other until the receiver of `inputs` is gone.
    pub async fn serve(self, inputs: mpsc::UnboundedSender<Input>) {
        let own = own_user();
        let Some(listener) = self.listener else { return inputs.closed().await };
        let listener = match tokio::net::UnixListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => {
                return tracing::warn!(%error, "debug socket unavailable; continuing without explain and dump");
            }
        };
        while !inputs.is_closed() {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let allowed = stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own);
                    if allowed {
                        // An error is the client's: it was slow or has gone.
                        let _ = tokio::time::timeout(TIMEOUT, attend(stream, &inputs)).await;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "debug socket cannot accept; retrying");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}

async fn attend(mut stream: tokio::net::UnixStream, inputs: &mpsc::UnboundedSender<Input>) -> io::Result<()> {
    let mut line = String::new();
    (&mut stream).take(MAX_COMMAND).read_to_string(&mut line).await?;
    let reply = match DebugCommand::parse(line.trim()) {
        Ok(command) => reply_to(command, inputs, &mut stream).await?,
        Err(error) => format!("{error}\n"),
    };
    stream.write_all(reply.as_bytes()).await?;
    stream.shutdown().await
}

/// Asks the loop, and compares with the kernel what it gives.
async fn reply_to(
    command: DebugCommand,
    inputs: &mpsc::UnboundedSender<Input>,
    stream: &mut tokio::net::UnixStream,
) -> io::Result<String> {
    let all = matches!(command, DebugCommand::Dump { all: true });
    for attempt in 1.. {
        let (reply, received) = oneshot::channel();
        if inputs.send(Input::Debug(DebugRequest { command: command.clone(), reply })).is_err() {
            break;
        }
        let (ruleset, written) = match received.await {
            Ok(DebugReply::Text(text)) => return Ok(text),
            Ok(DebugReply::Ruleset(ruleset, written)) => (ruleset, written),
            Err(_) => break,
        };
        stream.write_all(&[ALIVE]).await?;
        match tokio::task::spawn_blocking(move || compare(&ruleset, &written, all)).await {
            Ok(Ok(comparison)) if comparison.differences == 0 || attempt == COMPARISONS => {
                return Ok(comparison.text);
            }
            Ok(Err(error)) if attempt == COMPARISONS => {
                return Ok(format!("cannot read the kernel's tables: {error}\n"));
            }
            _ => {}
        }
    }
    Ok("the agent is shutting down\n".to_owned())
}

/// Sends a command to the agent in the network namespace of the calling thread, and waits for its reply.
pub fn send_command(command: &DebugCommand) -> Result<String, DebugSocketError> {
    let mut stream = connect().map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => DebugSocketError::NotRunning,
        _ => error.into(),
    })?;
    let user = getsockopt(&stream, PeerCredentials).map_err(io::Error::from)?.uid();
    if user != 0 && user != own_user() {
        return Err(DebugSocketError::NotRoot(user));
    }
    stream.set_read_timeout(Some(FIRST_BYTE))?;
    stream.write_all(command.to_line().as_bytes())?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut first = [0];
    let count = stream.read(&mut first).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => DebugSocketError::Silent,
        _ => error.into(),
    })?;
    let mut reply = first[..count].to_vec();
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.read_to_end(&mut reply)?;
    reply.retain(|byte| *byte != ALIVE);
    String::from_utf8(reply).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error).into())
}

fn address() -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(NAME)
}

fn own_user() -> u32 {
    nix::unistd::geteuid().as_raw()
}

fn bind() -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&address()?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects, or fails at once: a process that accepts no connection must not stop this one.
fn connect() -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    nix::sys::socket::connect(socket.as_raw_fd(), &UnixAddr::new_abstract(NAME.as_bytes())?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Who has the socket's name.
#[derive(Debug)]
struct Holder {
    user: u32,
    /// If this process namespace shows it.
    process: Option<i32>,
}

/// The holder of the name, if that accepts connections.
fn holder() -> Option<Holder> {
    let credentials = getsockopt(&connect().ok()?, PeerCredentials).ok()?;
    let process = Some(credentials.pid()).filter(|process| *process > 0);
    Some(Holder { user: credentials.uid(), process })
}

fn taken(holder: Option<Holder>) -> DebugSocketError {
    DebugSocketError::Taken { process: holder.and_then(|holder| holder.process) }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use steerage_requirements::{in_new_netns, requires};

    use super::*;
    use crate::explain::PacketQuery;

    #[test]
    fn name_is_held_once_per_network_namespace() {
        requires!(NetworkNamespace);
        let open_twice = || {
            let first = DebugSocket::open().unwrap();
            let own = i32::try_from(std::process::id()).unwrap();
            let second = DebugSocket::open().unwrap_err();
            assert!(
                matches!(second, DebugSocketError::Taken { process: Some(process) } if process == own),
                "{second}"
            );
            drop(first);
            // A process that another test has just forked has the socket too, until it executes its program.
            let dropped = Instant::now();
            loop {
                match DebugSocket::open() {
                    Err(DebugSocketError::Taken { .. }) if dropped.elapsed() < Duration::from_secs(30) => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    opened => break drop(opened.unwrap()),
                }
            }
        };
        in_new_netns(|| {
            let here = DebugSocket::open().unwrap();
            in_new_netns(open_twice);
            drop(here);
        });
    }

    /// Runs `check` while a process of another user has the name, and has done this with its socket `s`.
    fn with_a_stranger(then: &str, check: impl FnOnce()) {
        let script = format!(
            "import os, socket, sys; os.setuid(65534); new = lambda: socket.socket(socket.AF_UNIX); s = new(); \
             s.bind(b'\\0steerage-agent'); {then}; print(flush=True); sys.stdin.read()"
        );
        let mut stranger = std::process::Command::new("python3")
            .args(["-c", &script])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = [0];
        stranger.stdout.take().unwrap().read_exact(&mut ready).unwrap();
        check();
        drop(stranger.stdin.take());
        stranger.wait().unwrap();
    }

    fn agent_starts_and_a_second_one_does_not() {
        let agent = DebugSocket::open().unwrap();
        let second = DebugSocket::open().unwrap_err();
        assert!(matches!(second, DebugSocketError::Taken { .. }), "{second}");
        drop(agent);
    }

    #[test]
    fn another_users_process_neither_stops_an_agent_nor_answers_for_it() {
        requires!(NetworkNamespace, Program("python3"));
        in_new_netns(|| {
            with_a_stranger("s.listen()", || {
                let command = DebugCommand::Dump { all: false };
                assert!(matches!(send_command(&command), Err(DebugSocketError::NotRoot(65534))));
                agent_starts_and_a_second_one_does_not();
            });
        });
    }

    #[test]
    fn process_that_has_the_name_and_does_not_listen_stops_no_agent() {
        requires!(NetworkNamespace, Program("python3"));
        in_new_netns(|| with_a_stranger("pass", agent_starts_and_a_second_one_does_not));
    }

    /// A connection to it waits until one is accepted.
    #[test]
    fn process_that_accepts_nothing_stops_no_agent() {
        requires!(NetworkNamespace, Program("python3"));
        let full = "s.listen(0); waiting = [new() for _ in range(4)]; [c.setblocking(False) for c in waiting]; \
                    [c.connect_ex(b'\\0steerage-agent') for c in waiting]";
        in_new_netns(|| {
            with_a_stranger(full, || {
                agent_starts_and_a_second_one_does_not();
                let error = send_command(&DebugCommand::Dump { all: false }).unwrap_err();
                assert!(matches!(error, DebugSocketError::Socket(_)), "{error}");
            });
        });
    }

    #[test]
    fn agent_that_hangs_is_not_waited_for() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let _accepts_nothing = bind().unwrap();
            let error = send_command(&DebugCommand::Dump { all: false }).unwrap_err();
            assert!(matches!(error, DebugSocketError::Silent), "{error}");
        });
    }

    #[test]
    fn commands_get_the_loops_reply() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let command =
                DebugCommand::Explain(PacketQuery::new("10.0.0.1:80/TCP".parse().unwrap(), None).unwrap());
            assert!(matches!(send_command(&command), Err(DebugSocketError::NotRunning)));
            let (inputs, mut queue) = mpsc::unbounded_channel();
            let debug_socket = DebugSocket::open().unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            std::thread::scope(|scope| {
                // A new thread inherits the network namespace.
                let client = scope.spawn(|| send_command(&command).unwrap());
                runtime.block_on(async {
                    let heard = async {
                        let Some(Input::Debug(DebugRequest { command: heard, reply: answer })) = queue.recv().await else {
                            panic!("no command");
                        };
                        assert_eq!(heard, command);
                        answer.send(DebugReply::Text("because\n".to_owned())).unwrap();
                    };
                    tokio::select! {
                        () = debug_socket.serve(inputs) => panic!("ended"),
                        () = async { heard.await; while !client.is_finished() { tokio::task::yield_now().await; } } => {}
                    }
                });
                assert_eq!(client.join().unwrap(), "because\n");
            });
        });
    }
}
