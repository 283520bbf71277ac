// SPDX-License-Identifier: Apache-2.0
//! haproxy in front of the stand-in of Azure: TLS with a certificate of its own, and the tokens of a managed identity.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

/// How long haproxy may take until it listens.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running haproxy, which ends when dropped.
pub(super) struct Terminator {
    child: Child,
    port: u16,
    identity_port: u16,
    certificate: PathBuf,
}

impl Terminator {
    /// Forwards to `to` what comes with TLS, and to `identity` what asks for tokens, from free ports of loopback. Its files are in
    /// `folder`.
    pub(super) fn start(folder: &Path, to: SocketAddr, identity: SocketAddr) -> Result<Self> {
        let free = || anyhow::Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port());
        let (port, identity_port) = (free()?, free()?);
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
        let [certificate, both, config] = ["tls.crt", "tls.pem", "haproxy.cfg"].map(|name| folder.join(name));
        fs::write(&certificate, made.cert.pem())?;
        fs::write(&both, format!("{}{}", made.cert.pem(), made.signing_key.serialize_pem()))?;
        let text = format!(
            "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n\
             frontend tls\n bind 127.0.0.1:{port} ssl crt {}\n default_backend plain\n\
             backend plain\n server stand-in {to}\n\
             http-response replace-header Azure-AsyncOperation ^http: https:\n\
             http-response replace-header Location ^http: https:\n\
             frontend identity\n bind 127.0.0.1:{identity_port}\n default_backend identity\n\
             backend identity\n http-request set-header Metadata true\n server stand-in {identity}\n",
            both.display()
        );
        fs::write(&config, text)?;
        // It ends with the driver, even if that is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "haproxy", "-q", "-db", "-f"]).arg(&config);
        let child = command.stdin(Stdio::null()).spawn().context("cannot start haproxy")?;
        let mut terminator = Self { child, port, identity_port, certificate };
        let begun = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            ensure!(terminator.child.try_wait()?.is_none(), "haproxy ended: see its output above");
            ensure!(begun.elapsed() < PATIENCE, "haproxy does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(terminator)
    }

    /// Its URL.
    pub(super) fn url(&self) -> String {
        format!("https://localhost:{}", self.port)
    }

    /// Where tokens of the managed identity are, as App Service has them.
    pub(super) fn identity_endpoint(&self) -> String {
        format!("http://localhost:{}/metadata/identity/oauth2/token", self.identity_port)
    }

    /// The file with the certificate, which clients have to trust.
    pub(super) fn certificate(&self) -> &Path {
        &self.certificate
    }
}

impl Drop for Terminator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
