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
        // What replaces a header replaces all of it.
        let text = format!(
            "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n\
             frontend tls\n bind 127.0.0.1:{port} ssl crt {}\n default_backend plain\n\
             backend plain\n server stand-in {to}\n\
             http-response replace-header Azure-AsyncOperation ^http:(.*) https:\\1\n\
             http-response replace-header Location ^http:(.*) https:\\1\n\
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

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use kube::Client;
    use kube::client::Body;
    use kube::config::{KubeConfigOptions, Kubeconfig};
    use serde_json::json;
    use steerage_requirements::requires;

    use super::*;

    /// Answers one request, for an operation that is at `http://localhost`.
    fn answer(listener: &TcpListener) -> std::io::Result<()> {
        let (mut connection, _) = listener.accept()?;
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") && connection.read(&mut byte)? > 0 {
            head.extend(byte);
        }
        connection.write_all(
            b"HTTP/1.1 202 Accepted\r\nAzure-AsyncOperation: http://localhost:1/operations/a?api-version=1\r\n\
              Location: http://localhost:1/operationResults/a?api-version=1\r\n\
              Content-Length: 0\r\nConnection: close\r\n\r\n",
        )
    }

    /// A client follows these URLs: only their scheme may change.
    #[test]
    fn urls_of_operations_have_tls_and_are_whole() -> Result<()> {
        requires!(Ok(()); Program("setpriv"), Program("haproxy"));
        let folder = std::env::temp_dir().join(format!("steerage-bench-tls-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let to = listener.local_addr()?;
        let tls = Terminator::start(&folder, to, to)?;
        let config: Kubeconfig = serde_json::from_value(json!({
            "clusters": [{"name": "a", "cluster": {"server": tls.url(), "certificate-authority": tls.certificate()}}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            "users": [{"name": "a", "user": {}}], "current-context": "a",
        }))?;
        let server = std::thread::spawn(move || answer(&listener));
        let answer = tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
            let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
            let request = http::Request::put("/publicIPAddresses/a").body(Body::empty())?;
            anyhow::Ok(Client::try_from(config)?.send(request).await?)
        })?;
        server.join().unwrap()?;
        fs::remove_dir_all(&folder)?;
        let url = |name: &str| answer.headers()[name].to_str().unwrap();
        assert_eq!(url("Azure-AsyncOperation"), "https://localhost:1/operations/a?api-version=1");
        assert_eq!(url("Location"), "https://localhost:1/operationResults/a?api-version=1");
        Ok(())
    }
}
