// SPDX-License-Identifier: Apache-2.0
//! The unix socket on which the running agent replies to `steerage-agent explain` and `dump`. For root only; it changes nothing.
//!
//! Its name is in the abstract namespace, which the kernel keeps per network namespace and frees when the process ends, however
//! that happens. So holding the name also proves that no other agent serves this network namespace.

use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};

use crate::debug_request::{DebugCommand, DebugReply, DebugRequest};
use crate::dump::compare;
use crate::input::Input;

/// The name in the abstract namespace.
const NAME: &str = "steerage-agent";
/// Bytes of the longest command.
const MAX_COMMAND: u64 = 256;
/// Time for a command to arrive, and for its reply to be read.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Comparisons before a difference is reported: the loop may have been writing during the first ones.
const COMPARISONS: u32 = 3;

/// Why the socket cannot be opened or asked.
#[derive(Debug, thiserror::Error)]
pub enum DebugSocketError {
    /// Another agent holds the name.
    #[error("another steerage-agent{} serves this network namespace; two would undo each other's work", in_process(*process))]
    Taken {
        /// Its process, if this process namespace shows it.
        process: Option<i32>,
    },
    /// The socket failed.
    #[error("unix socket @{NAME}")]
    Socket(#[from] io::Error),
    /// No agent listens.
    #[error("no steerage-agent runs in this network namespace. Run this on the node, or in the agent's pod.")]
    NotRunning,
}

fn in_process(process: Option<i32>) -> String {
    process.map_or_else(String::new, |process| format!(" (process {process})"))
}

/// The open socket.
#[derive(Debug)]
pub struct DebugSocket {
    listener: UnixListener,
}

impl DebugSocket {
    /// Takes the name in the network namespace of the calling thread.
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

    /// Serves one connection after the other until the receiver of `inputs` is gone.
    pub async fn serve(self, inputs: mpsc::UnboundedSender<Input>) {
        let own = nix::unistd::geteuid().as_raw();
        let listener = match tokio::net::UnixListener::from_std(self.listener) {
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
        Ok(command) => reply_to(command, inputs).await,
        Err(error) => format!("{error}\n"),
    };
    stream.write_all(reply.as_bytes()).await?;
    stream.shutdown().await
}

/// Asks the loop, and compares with the kernel what it gives.
async fn reply_to(command: DebugCommand, inputs: &mpsc::UnboundedSender<Input>) -> String {
    let all = matches!(command, DebugCommand::Dump { all: true });
    for attempt in 1.. {
        let (reply, received) = oneshot::channel();
        if inputs.send(Input::Debug(DebugRequest { command: command.clone(), reply })).is_err() {
            break;
        }
        let ruleset = match received.await {
            Ok(DebugReply::Text(text)) => return text,
            Ok(DebugReply::Ruleset(ruleset)) => ruleset,
            Err(_) => break,
        };
        match tokio::task::spawn_blocking(move || compare(&ruleset, all)).await {
            Ok(Ok(comparison)) if comparison.differences == 0 || attempt == COMPARISONS => {
                return comparison.text;
            }
            Ok(Err(error)) if attempt == COMPARISONS => {
                return format!("cannot read the kernel's tables: {error}\n");
            }
            _ => {}
        }
    }
    "the agent is shutting down\n".to_owned()
}

/// Sends a command to the agent in the network namespace of the calling thread, and waits for its reply.
pub fn send_command(command: &DebugCommand) -> Result<String, DebugSocketError> {
    let mut stream = UnixStream::connect_addr(&address()?).map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => DebugSocketError::NotRunning,
        _ => error.into(),
    })?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(command.to_line().as_bytes())?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

fn address() -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(NAME)
}

/// The process that holds the name, if it still does and this process namespace shows it.
fn holder() -> Option<i32> {
    let stream = UnixStream::connect_addr(&address().ok()?).ok()?;
    let credentials = getsockopt(&stream, PeerCredentials).ok()?;
    Some(credentials.pid()).filter(|process| *process > 0)
}

#[cfg(test)]
mod tests {
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
            DebugSocket::open().unwrap();
        };
        in_new_netns(|| {
            let here = DebugSocket::open().unwrap();
            in_new_netns(open_twice);
            drop(here);
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
