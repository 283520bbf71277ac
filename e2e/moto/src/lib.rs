// SPDX-License-Identifier: Apache-2.0
//! A moto server, which simulates AWS, for tests of the provider and of the controller, and for a lab's cloud. A dependency of what
//! tests only. It ends with the [`Server`], and at the latest with the thread that started it. [`Moto`] calls one that runs already.

pub mod peer;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::ops::Deref;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use steerage_provider_conformance::{CallKind, Request};

/// State and reason of each target, by the ARN of its target group and its id.
pub type TargetStates = BTreeMap<String, BTreeMap<String, (String, String)>>;

/// For how long AWS holds groups after their load balancer was deleted.
#[derive(Clone, Copy, Debug)]
pub struct Release {
    /// Target groups.
    pub target_group: Duration,
    /// Security groups.
    pub security_group: Duration,
}

impl Release {
    /// Less than with AWS, where it is seconds and minutes, but long enough that a test sees who tries too early.
    pub const USUAL: Self =
        Self { target_group: Duration::from_secs(3), security_group: Duration::from_secs(8) };
    /// For tests that delete many load balancers.
    pub const QUICK: Self =
        Self { target_group: Duration::from_millis(100), security_group: Duration::from_millis(200) };
}

/// A running moto server, with the corrections of `server.py`.
#[derive(Debug)]
pub struct Server {
    child: Child,
    moto: Moto,
}

impl Deref for Server {
    type Target = Moto;

    fn deref(&self) -> &Moto {
        &self.moto
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts it on a free port of loopback.
    pub fn start(release: Release) -> anyhow::Result<Self> {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], 0)), release)
    }

    /// Starts it at an address of the calling thread's network namespace; with port 0, on a free port.
    pub fn start_at(listen: SocketAddr, release: Release) -> anyhow::Result<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/server.py");
        let mut command = Command::new(steerage_requirements::moto_python().map_err(anyhow::Error::msg)?);
        command.args([script, &listen.ip().to_string(), &listen.port().to_string()]);
        command
            .args([release.target_group, release.security_group].map(|time| time.as_secs_f64().to_string()));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        die_with_parent(&mut command);
        let mut child = command.spawn().context("start moto")?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no stdout")?).read_line(&mut line)?;
        let port = line.trim().parse().context("moto did not print its port: see its output above")?;
        Ok(Self { child, moto: Moto::at(SocketAddr::new(listen.ip(), port)) })
    }
}

/// A moto server that runs at an address. Its calls block.
#[derive(Clone, Copy, Debug)]
pub struct Moto {
    addr: SocketAddr,
}

impl Moto {
    /// The server at this address.
    pub fn at(addr: SocketAddr) -> Self {
        Self { addr }
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// A VPC with a subnet in each of two zones: its id and theirs.
    pub fn network(&self) -> anyhow::Result<(String, Vec<String>)> {
        let vpc = self.vpc("10.0.0.0/16")?;
        let subnets = [("10.0.0.0/22", "us-east-1a"), ("10.0.4.0/22", "us-east-1b")]
            .map(|(block, zone)| self.subnet(&vpc, block, zone));
        Ok((vpc, subnets.into_iter().collect::<anyhow::Result<_>>()?))
    }

    /// Creates a VPC and returns its id.
    pub fn vpc(&self, block: &str) -> anyhow::Result<String> {
        Ok(self.ec2("CreateVpc", &[("CidrBlock", block)], "vpcId")?.remove(0))
    }

    /// Gives a VPC one more range.
    pub fn add_range(&self, vpc: &str, block: &str) -> anyhow::Result<()> {
        self.ec2("AssociateVpcCidrBlock", &[("VpcId", vpc), ("CidrBlock", block)], "vpcId").map(drop)
    }

    /// Creates a subnet and returns its id.
    pub fn subnet(&self, vpc: &str, block: &str, zone: &str) -> anyhow::Result<String> {
        let parameters = [("VpcId", vpc), ("CidrBlock", block), ("AvailabilityZone", zone)];
        Ok(self.ec2("CreateSubnet", &parameters, "subnetId")?.remove(0))
    }

    /// Gives a resource of EC2 a tag.
    pub fn tag(&self, id: &str, key: &str, value: &str) -> anyhow::Result<()> {
        let parameters = [("ResourceId.1", id), ("Tag.1.Key", key), ("Tag.1.Value", value)];
        self.ec2("CreateTags", &parameters, "requestId").map(drop)
    }

    /// Starts an instance with a private address in a subnet and returns its id.
    pub fn instance(&self, subnet: &str, address: Ipv4Addr) -> anyhow::Result<String> {
        self.instance_with(subnet, address, &[])
    }

    /// The same with a security group. Without one moto gives it none, unlike AWS.
    pub fn grouped_instance(&self, subnet: &str, address: Ipv4Addr, group: &str) -> anyhow::Result<String> {
        self.instance_with(subnet, address, &[("SecurityGroupId.1", group)])
    }

    fn instance_with(
        &self,
        subnet: &str,
        address: Ipv4Addr,
        more: &[(&str, &str)],
    ) -> anyhow::Result<String> {
        let address = address.to_string();
        let parameters = [
            ("ImageId", "ami-12345678"),
            ("MinCount", "1"),
            ("MaxCount", "1"),
            ("SubnetId", subnet),
            ("PrivateIpAddress", address.as_str()),
        ];
        Ok(self.ec2("RunInstances", &[&parameters, more].concat(), "instanceId")?.remove(0))
    }

    /// Creates a security group and returns its id.
    pub fn security_group(&self, vpc: &str, name: &str) -> anyhow::Result<String> {
        let parameters = [("VpcId", vpc), ("GroupName", name), ("GroupDescription", name)];
        Ok(self.ec2("CreateSecurityGroup", &parameters, "groupId")?.remove(0))
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
        self.query(("ec2", "2016-11-15"), action, parameters, element)
    }

    /// The same of `ELBv2`, for what other programs create there.
    pub fn elbv2(
        &self,
        action: &str,
        parameters: &[(&str, &str)],
        element: &str,
    ) -> anyhow::Result<Vec<String>> {
        self.query(("elasticloadbalancing", "2015-12-01"), action, parameters, element)
    }

    fn query(
        &self,
        (service, version): (&str, &str),
        action: &str,
        parameters: &[(&str, &str)],
        element: &str,
    ) -> anyhow::Result<Vec<String>> {
        let mut body = format!("Action={action}&Version={version}");
        for (key, value) in parameters {
            let value = value.replace('/', "%2F");
            body.extend(["&", key, "=", &value]);
        }
        // moto reads the service from the credential's scope and checks no signature.
        let head = format!(
            "POST / HTTP/1.1\r\nHost: {service}\r\nConnection: close\r\nContent-Type: application/x-www-form-urlencoded\r\n\
             Authorization: AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/{service}/aws4_request, SignedHeaders=host, Signature=none\r\n\
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

    /// How many calls that may change something it has answered.
    pub fn writes(&self) -> anyhow::Result<u64> {
        Ok(self.look("writes")?.parse()?)
    }

    /// The health of each target of each target group, as `DescribeTargetHealth` answers it.
    pub fn health(&self) -> anyhow::Result<TargetStates> {
        let text = self.look("health")?;
        let mut states = TargetStates::new();
        for line in text.lines() {
            let fields: Vec<_> = line.split('\t').collect();
            let [group, id, state, reason] = fields[..] else {
                anyhow::bail!("not a target's health: {line}")
            };
            let of_group = states.entry(group.to_owned()).or_default();
            of_group.insert(id.to_owned(), (state.to_owned(), reason.to_owned()));
        }
        Ok(states)
    }

    /// Sets the health of all targets. Without it, every registered target is healthy. A target that is not registered is shown too.
    pub fn set_health(&self, states: &TargetStates) -> anyhow::Result<()> {
        let lines = states.iter().flat_map(|(group, targets)| {
            targets.iter().map(move |(id, (state, reason))| format!("{group}\t{id}\t{state}\t{reason}\n"))
        });
        let body: String = lines.collect();
        let head = "POST /test/health HTTP/1.1\r\nHost: moto\r\nConnection: close\r\nContent-Length";
        self.exchange(&format!("{head}: {}\r\n\r\n{body}", body.len())).map(drop)
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
