// SPDX-License-Identifier: Apache-2.0
//! Stand-ins of the APIs of GCE and Azure on loopback, for tests. A dependency of what tests only. `server.py` and the packages beside it
//! are the stand-ins; decision 42 says what is faithful. They end with the [`Server`], and at the latest with the process that started it.

pub mod azure;
pub mod gce;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::ops::Deref;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

/// A cloud that has a stand-in.
#[derive(Clone, Copy, Debug)]
pub enum Cloud {
    /// Resource Manager with Microsoft.Network.
    Azure,
    /// Compute Engine.
    Gce,
}

impl Cloud {
    fn as_str(self) -> &'static str {
        match self {
            Self::Azure => "azure",
            Self::Gce => "gce",
        }
    }
}

/// A stand-in that runs. Its calls block.
#[derive(Clone, Debug)]
pub struct StandIn {
    url: String,
    settings: Value,
}

/// A stand-in that ends with this.
#[derive(Debug)]
pub struct Server {
    child: Child,
    stand_in: StandIn,
}

impl Deref for Server {
    type Target = StandIn;

    fn deref(&self) -> &StandIn {
        &self.stand_in
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The stand-in ends with its input.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts it on a free port of loopback. `settings` replace those of `SETTINGS` in the cloud's `cloud.py`.
    pub fn start(cloud: Cloud, settings: &Value) -> anyhow::Result<Self> {
        Self::start_at(cloud, SocketAddr::from((IpAddr::V4(Ipv4Addr::LOCALHOST), 0)), settings)
    }

    /// Starts it at an address of the calling thread's network namespace; with port 0, on a free port.
    pub fn start_at(cloud: Cloud, listen: SocketAddr, settings: &Value) -> anyhow::Result<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/server.py");
        let mut command = Command::new(steerage_requirements::clouds_python().map_err(anyhow::Error::msg)?);
        command.args([script, cloud.as_str(), "--until-eof", "--host", &listen.ip().to_string()]);
        command.args(["--port", &listen.port().to_string(), "--settings", &settings.to_string()]);
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().context("start the stand-in")?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no stdout")?).read_line(&mut line)?;
        match serde_json::from_str::<Value>(&line) {
            Ok(mut started) => {
                let url = started["url"].as_str().context("no URL")?.to_owned();
                Ok(Self { child, stand_in: StandIn { url, settings: started["settings"].take() } })
            }
            Err(error) => {
                let _ = child.wait();
                Err(error).context("the stand-in did not start: see its output above")
            }
        }
    }
}

impl StandIn {
    /// That at this address, which somebody else started.
    pub fn at(address: SocketAddr) -> anyhow::Result<Self> {
        let mut stand_in = Self { url: format!("http://{address}"), settings: Value::Null };
        stand_in.settings = stand_in.control("GET", "settings", None)?;
        Ok(stand_in)
    }

    /// Its URL: all services are below it, those that give tokens too.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its address.
    pub fn addr(&self) -> anyhow::Result<SocketAddr> {
        self.url.trim_start_matches("http://").parse().context("not an address")
    }

    /// A setting that is a text, such as `project`.
    pub fn setting(&self, name: &str) -> &str {
        self.settings[name].as_str().unwrap_or_default()
    }

    /// Makes a call below `/test/`, which tests control the stand-in by: see `core/server.py` and the cloud's `control`.
    pub fn control(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let (status, answer) = self.send(method, &format!("/test/{path}"), &[], body)?;
        ensure!(status == 200, "{method} /test/{path}: {status} {answer}");
        Ok(answer)
    }

    /// Injects a fault: see `FIELDS` in `core/faults.py`. The first fault that applies to a call is used.
    pub fn inject(&self, fault: &Value) -> anyhow::Result<()> {
        self.control("POST", "faults", Some(fault)).map(drop)
    }

    /// Removes all faults.
    pub fn clear_faults(&self) -> anyhow::Result<()> {
        self.control("DELETE", "faults", None).map(drop)
    }

    /// Allows this many calls at once, and then this many per second; others are refused as the cloud does.
    pub fn throttle(&self, burst: u32, per_second: f64) -> anyhow::Result<()> {
        self.control("POST", "throttle", Some(&json!({ "burst": burst, "rate": per_second }))).map(drop)
    }

    /// Ends the throttling.
    pub fn unthrottle(&self) -> anyhow::Result<()> {
        self.control("POST", "throttle", Some(&json!({}))).map(drop)
    }

    /// For how long an operation of the cloud runs from now on.
    pub fn set_delay(&self, delay: Duration) -> anyhow::Result<()> {
        self.control("POST", "settings", Some(&json!({ "delay": delay.as_secs_f64() }))).map(drop)
    }

    /// Puts the stand-in's clock forward: operations end, and tokens expire, as if this time had passed.
    pub fn skip(&self, time: Duration) -> anyhow::Result<()> {
        self.control("POST", "time", Some(&json!({ "skip": time.as_secs_f64() }))).map(drop)
    }

    /// Ends all tokens: the next call with one gets 401.
    pub fn revoke_tokens(&self) -> anyhow::Result<()> {
        self.control("DELETE", "tokens", None).map(drop)
    }

    /// How often each method was called, by the cloud's name of it.
    pub fn calls(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        let answer = self.control("GET", "calls", None)?;
        Ok(serde_json::from_value(answer["counts"].clone())?)
    }

    /// Begins to count anew.
    pub fn clear_calls(&self) -> anyhow::Result<()> {
        self.control("DELETE", "calls", None).map(drop)
    }

    /// Content of everything that was made through the API, by path, without identifiers, times and versions.
    pub fn snapshot(&self) -> anyhow::Result<BTreeMap<String, Value>> {
        Ok(serde_json::from_value(self.control("GET", "snapshot", None)?)?)
    }

    /// Makes any request; status and JSON of the answer, which is a text if it is no JSON.
    pub fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&Value>,
    ) -> anyhow::Result<(u16, Value)> {
        let body = body.map(ToString::to_string).unwrap_or_default();
        let mut request = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
        let _ = write!(request, "Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        for (name, value) in headers {
            request.extend([name, ": ", value, "\r\n"]);
        }
        let mut connection = TcpStream::connect(self.addr()?)?;
        std::io::Write::write_all(&mut connection, format!("{request}\r\n{body}").as_bytes())?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer)?;
        let (head, content) = answer.split_once("\r\n\r\n").context("no answer")?;
        let status = head.split(' ').nth(1).context("no status")?.parse()?;
        Ok((status, serde_json::from_str(content).unwrap_or_else(|_| Value::String(content.to_owned()))))
    }
}
