// SPDX-License-Identifier: Apache-2.0
//! The APIs of Keystone, Neutron and Octavia on loopback, for tests. A dependency of what tests only. `server.py` says how they are put
//! together. They end with the [`Server`], and at the latest with the process that started it.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde::Deserialize;
use serde_json::{Value, json};
use steerage_provider_conformance::{CallKind, Request};

/// What a client needs to log in, and what exists at the start.
#[derive(Clone, Debug, Deserialize)]
pub struct Access {
    /// URL of all services; each is below its name.
    pub url: String,
    /// URL of Keystone.
    pub auth_url: String,
    /// The user of the cluster's project.
    pub username: String,
    /// The project's name.
    pub project_name: String,
    /// The project's ID.
    pub project_id: String,
    /// The user's password, and the secret of the application credential.
    pub secret: String,
    /// ID of an application credential of the user.
    pub application_credential_id: String,
    /// The cluster's network.
    pub network_id: String,
    /// Its IPv4 subnet, `10.0.0.0/16`.
    pub subnet_id: String,
    /// Its IPv6 subnet.
    pub ipv6_subnet_id: String,
    /// The network of floating IPs, which a router joins with the IPv4 subnet.
    pub floating_network_id: String,
    /// A flavor of load balancers.
    pub flavor_id: String,
    /// Name of an availability zone of load balancers.
    pub availability_zone: String,
}

/// Running services.
#[derive(Debug)]
pub struct Server {
    child: Child,
    access: Access,
    token: Mutex<Option<String>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // The launcher ends with its input, and removes its state.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts them on a free port. Load balancers become active after the delay. `flags` are further flags of `server.py`.
    pub fn start(delay: Duration, flags: &[&str]) -> anyhow::Result<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/server.py");
        let mut command =
            Command::new(steerage_requirements::openstack_python().map_err(anyhow::Error::msg)?);
        command.args([script, "--until-eof", "--delay", &delay.as_secs_f64().to_string()]).args(flags);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().context("start OpenStack's services")?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no stdout")?).read_line(&mut line)?;
        let access = serde_json::from_str(&line).context("the services did not start: see the output above");
        match access {
            Ok(access) => Ok(Self { child, access, token: Mutex::default() }),
            Err(error) => {
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// How to use them.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// Their address.
    pub fn addr(&self) -> anyhow::Result<SocketAddr> {
        self.access.url.trim_start_matches("http://").parse().context("not an address")
    }

    /// Makes a request as the cluster's user, and blocks for the answer's JSON. The path begins with the service's name.
    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let token = self.token()?;
        let (status, _, answer) = self.send(method, path, Some(&token), body)?;
        ensure!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        Ok(answer)
    }

    /// The same for Octavia, once the load balancer can be changed, and until the change is complete.
    pub fn change(
        &self,
        balancer: &str,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        self.settled(balancer)?;
        let answer = self.call(method, &format!("/load-balancer/v2.0/lbaas/{path}"), body)?;
        self.settled(balancer)?;
        Ok(answer)
    }

    /// Waits until no change of a load balancer is under way.
    pub fn settled(&self, balancer: &str) -> anyhow::Result<()> {
        let path = format!("/load-balancer/v2.0/lbaas/loadbalancers/{balancer}");
        for _ in 0..1000 {
            let (status, _, answer) = self.send("GET", &path, Some(&self.token()?), None)?;
            let state = answer["loadbalancer"]["provisioning_status"].as_str().unwrap_or_default();
            if status == 404 || !state.starts_with("PENDING") {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        anyhow::bail!("{balancer} stays in a change")
    }

    /// Lets the catalog name this address for Neutron and Octavia. Clients that log in from now on go there.
    pub fn set_catalog(&self, to: SocketAddr) -> anyhow::Result<()> {
        let token = self.log_in("admin", &json!({ "name": "admin", "domain": { "id": "default" } }))?;
        let (_, _, listed) = self.send("GET", "/identity/v3/endpoints", Some(&token), None)?;
        for endpoint in listed["endpoints"].as_array().context("no endpoints")? {
            let (id, url) = (endpoint["id"].as_str(), endpoint["url"].as_str());
            let (id, url) = id.zip(url).context("no endpoint")?;
            let url = url.replacen(&self.access.url, &format!("http://{to}"), 1);
            let body = json!({ "endpoint": { "url": url } });
            let path = format!("/identity/v3/endpoints/{id}");
            let (status, _, answer) = self.send("PATCH", &path, Some(&token), Some(&body))?;
            ensure!(status == 200, "{path}: {status} {answer}");
        }
        Ok(())
    }

    fn token(&self) -> anyhow::Result<String> {
        let mut known = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(token) = &*known {
            return Ok(token.clone());
        }
        let Access { username, project_id, .. } = &self.access;
        let token = self.log_in(username, &json!({ "id": project_id }))?;
        *known = Some(token.clone());
        Ok(token)
    }

    /// A token of a user for a project. All users have the same password.
    fn log_in(&self, user: &str, project: &Value) -> anyhow::Result<String> {
        let user = json!({ "name": user, "password": self.access.secret, "domain": { "id": "default" } });
        let identity = json!({ "methods": ["password"], "password": { "user": user } });
        let body = json!({ "auth": { "identity": identity, "scope": { "project": project } } });
        let (status, headers, answer) = self.send("POST", "/identity/v3/auth/tokens", None, Some(&body))?;
        ensure!(status == 201, "login: {status} {answer}");
        let is_it = |line: &&str| line.to_ascii_lowercase().starts_with("x-subject-token:");
        let line = headers.lines().find(is_it).context("no token")?;
        Ok(line.split_once(':').map(|(_, token)| token.trim().to_owned()).unwrap_or_default())
    }

    fn send(
        &self,
        method: &str,
        path: &str,
        token: Option<&str>,
        body: Option<&Value>,
    ) -> anyhow::Result<(u16, String, Value)> {
        send(self.addr()?, method, path, token, body)
    }
}

/// Makes a request below `/test` of services that run at an address: what `server.py` shows beside the APIs.
pub fn beside(addr: SocketAddr, method: &str, path: &str) -> anyhow::Result<Value> {
    let (status, _, answer) = send(addr, method, &format!("/test/{path}"), None, None)?;
    ensure!(status == 200, "{method} /test/{path}: {status} {answer}");
    Ok(answer)
}

/// Status, headers and JSON of the answer.
fn send(
    addr: SocketAddr,
    method: &str,
    path: &str,
    token: Option<&str>,
    body: Option<&Value>,
) -> anyhow::Result<(u16, String, Value)> {
    let body = body.map(ToString::to_string).unwrap_or_default();
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n",
        body.len()
    );
    if let Some(token) = token {
        let _ = write!(request, "X-Auth-Token: {token}\r\n");
    }
    let mut connection = TcpStream::connect(addr)?;
    std::io::Write::write_all(&mut connection, format!("{request}\r\n{body}").as_bytes())?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer)?;
    let (head, content) = answer.split_once("\r\n\r\n").context("no answer")?;
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    Ok((status, head.to_owned(), serde_json::from_str(content).unwrap_or(Value::String(content.to_owned()))))
}

/// The kind of a request: its method, and the kind of object that its path names last. Logging in is not counted.
pub fn classify(request: &Request) -> CallKind {
    let path = request.uri().path();
    if path.starts_with("/identity") {
        return CallKind::Background;
    }
    let is_id = |part: &&str| part.len() >= 32 && part.contains(|c: char| c.is_ascii_digit());
    let kind = path.rsplit('/').find(|part| !part.is_empty() && !is_id(part)).unwrap_or_default();
    let name = format!("{} {kind}", request.method());
    if request.method() == "GET" { CallKind::Read(name) } else { CallKind::Write(name) }
}
