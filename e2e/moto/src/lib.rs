// SPDX-License-Identifier: Apache-2.0
//! A moto server, which simulates AWS on loopback, for tests of the provider and of the controller. A dependency of tests only.
//! It ends with the [`Server`], and at the latest with the thread that started it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};
use steerage_provider_conformance::{CallKind, Request};

/// A running moto server, with the corrections of `server.py`.
#[derive(Debug)]
pub struct Server {
    child: Child,
    addr: SocketAddr,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts it on a free port of its own choice.
    pub fn start() -> anyhow::Result<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/server.py");
        let mut command = Command::new(steerage_requirements::moto_python().map_err(anyhow::Error::msg)?);
        command.arg(script).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        die_with_parent(&mut command);
        let mut child = command.spawn().context("start moto")?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no stdout")?).read_line(&mut line)?;
        let port = line.trim().parse().context("moto did not print its port: see its output above")?;
        Ok(Self { child, addr: SocketAddr::from(([127, 0, 0, 1], port)) })
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// A VPC with a subnet in each of two zones: its id and theirs.
    pub fn network(&self) -> anyhow::Result<(String, Vec<String>)> {
        let vpc = self.ec2("CreateVpc", &[("CidrBlock", "10.0.0.0/16")], "vpcId")?.remove(0);
        let mut subnets = Vec::new();
        for (block, zone) in [("10.0.0.0/22", "us-east-1a"), ("10.0.4.0/22", "us-east-1b")] {
            let parameters = [("VpcId", vpc.as_str()), ("CidrBlock", block), ("AvailabilityZone", zone)];
            subnets.append(&mut self.ec2("CreateSubnet", &parameters, "subnetId")?);
        }
        Ok((vpc, subnets))
    }

    /// Starts `count` instances in a subnet and returns their ids.
    pub fn instances(&self, subnet: &str, count: usize) -> anyhow::Result<Vec<String>> {
        let count = count.to_string();
        let parameters = [
            ("ImageId", "ami-12345678"),
            ("MinCount", count.as_str()),
            ("MaxCount", count.as_str()),
            ("SubnetId", subnet),
        ];
        self.ec2("RunInstances", &parameters, "instanceId")
    }

    /// Stops an instance.
    pub fn stop(&self, instance: &str) -> anyhow::Result<()> {
        self.ec2("StopInstances", &[("InstanceId.1", instance)], "instanceId").map(drop)
    }

    /// Requests a certificate for this domain from ACM and returns its ARN.
    pub fn certificate(&self, domain: &str) -> anyhow::Result<String> {
        let body = format!("{{\"DomainName\":\"{domain}\"}}");
        let head = format!(
            "POST / HTTP/1.1\r\nHost: acm\r\nConnection: close\r\nContent-Type: application/x-amz-json-1.1\r\n\
             X-Amz-Target: CertificateManager.RequestCertificate\r\n\
             Authorization: AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/acm/aws4_request, SignedHeaders=host, Signature=none\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        );
        let answer = self.exchange(&(head + &body)).context("RequestCertificate")?;
        let arn = answer.split('"').find(|text| text.starts_with("arn:"));
        Ok(arn.with_context(|| format!("no ARN in {answer}"))?.to_owned())
    }

    /// Calls EC2's query API and returns the texts of all elements of this name. A VPC and instances do not justify a dependency on its
    /// SDK, which takes minutes to compile.
    fn ec2(&self, action: &str, parameters: &[(&str, &str)], element: &str) -> anyhow::Result<Vec<String>> {
        let mut body = format!("Action={action}&Version=2016-11-15");
        for (key, value) in parameters {
            let value = value.replace('/', "%2F");
            body.extend(["&", key, "=", &value]);
        }
        // moto reads the service from the credential's scope and checks no signature.
        let head = format!(
            "POST / HTTP/1.1\r\nHost: ec2\r\nConnection: close\r\nContent-Type: application/x-www-form-urlencoded\r\n\
             Authorization: AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/ec2/aws4_request, SignedHeaders=host, Signature=none\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        );
        let answer = self.exchange(&(head + &body)).context(action.to_owned())?;
        let (open, close) = (format!("<{element}>"), format!("</{element}>"));
        let texts = answer.split(&open).skip(1).filter_map(|rest| rest.split(&close).next());
        let texts: Vec<String> = texts.map(str::to_owned).collect();
        ensure!(!texts.is_empty(), "{action}: no {element} in {answer}");
        Ok(texts)
    }

    /// The ids of the instances in each target group of this owner, read past moto's API.
    pub fn targets(&self, uid: &str) -> anyhow::Result<BTreeMap<String, BTreeSet<String>>> {
        let text = self.look("targets")?;
        let groups =
            text.lines().filter_map(|line| line.strip_prefix(uid)?.strip_prefix('\t')?.split_once('\t'));
        let ids = |ids: &str| ids.split_whitespace().map(str::to_owned).collect();
        Ok(groups.map(|(group, of)| (group.to_owned(), ids(of))).collect())
    }

    /// All state of moto, read past its API: `snapshot` in `server.py`.
    pub fn snapshot(&self) -> anyhow::Result<String> {
        self.look("snapshot")
    }

    fn look(&self, what: &str) -> anyhow::Result<String> {
        let answer =
            self.exchange(&format!("GET /test/{what} HTTP/1.1\r\nHost: moto\r\nConnection: close\r\n\r\n"))?;
        let (_, body) = answer.split_once("\r\n\r\n").context("an answer without a body")?;
        Ok(body.to_owned())
    }

    fn exchange(&self, request: &str) -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(self.addr)?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.starts_with("HTTP/1.1 200"), "moto answers {answer}");
        Ok(answer)
    }
}

/// The parameters of a call of AWS's query protocol.
pub fn parameters(body: &[u8]) -> BTreeMap<String, String> {
    let text = String::from_utf8_lossy(body);
    text.split('&').filter_map(|p| p.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

/// The kind of a call, by which a proxy in front of moto counts.
pub fn classify(request: &Request) -> CallKind {
    let action = parameters(request.body()).remove("Action").unwrap_or_default();
    if action.starts_with("Describe") { CallKind::Read(action) } else { CallKind::Write(action) }
}

/// Ends the process with the thread that started it, also if that is killed.
#[allow(unsafe_code)] // pre_exec: prctl is safe between fork and exec, and no std function does it
fn die_with_parent(command: &mut Command) {
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
}
