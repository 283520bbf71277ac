// SPDX-License-Identifier: Apache-2.0
//! A cluster in which the vendor's controller and Steerage run side by side, for tests of how a Service's address goes from one to the
//! other. The programs, the stand-ins and the objects are those of the measurement; here Steerage serves its own class only.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use steerage_testclouds::StandIn;

use super::cloud::Vendor;
use super::objects;
use super::program::{Program, Programs};
use super::world::World;
use crate::host;
use crate::who::Who;

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// On a busy machine renewals come late, and here nothing starts a controller again that has lost its Lease.
const LEASE: &[&str] = &["--leader-elect-lease-duration=3m", "--leader-elect-renew-deadline=150s"];

/// Both controllers, the API server, and the stand-in. If it is dropped without [`Handover::end`], the programs' logs stay.
pub struct Handover {
    peer: Program,
    ours: Program,
    programs: Programs,
    stand_in: StandIn,
    // Last, so that it is dropped after its users.
    world: World,
}

impl Handover {
    /// Google's glbc, and this controller of Steerage, on the stand-in of Compute Engine.
    ///
    /// # Errors
    /// If a program does not start.
    pub fn gce(controller: &Path) -> Result<Self> {
        Self::start(Vendor::Gce, controller)
    }

    /// cloud-provider-azure, and this controller of Steerage, on the stand-in of Azure.
    ///
    /// # Errors
    /// If a program does not start.
    pub fn azure(controller: &Path) -> Result<Self> {
        Self::start(Vendor::Azure, controller)
    }

    fn start(vendor: Vendor, controller: &Path) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        ensure!(controller.exists(), "{} is missing", controller.display());
        let folder = std::env::temp_dir().join(format!("steerage-handover-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let programs = Programs {
            vendor,
            controller: controller.to_owned(),
            peer: host::prepared(vendor.peer_program())?,
            folder,
            flags: LEASE,
        };
        let world = World::start(vendor, Who::Peer)?;
        let stand_in = StandIn::at(world.recorder().addr())?;
        let peer = programs.start(Who::Peer, &world, 0)?;
        let ours = programs.start(Who::Ours, &world, 0)?;
        Ok(Self { peer, ours, programs, stand_in, world })
    }

    /// The cloud, for what a user does there.
    pub fn stand_in(&self) -> &StandIn {
        &self.stand_in
    }

    /// What the cloud calls the machine with the endpoints of all Services.
    pub fn machine(&self) -> &str {
        &self.world.holder().id
    }

    /// Where the programs' logs are.
    pub fn folder(&self) -> &Path {
        &self.programs.folder
    }

    /// Creates the Service of this number, which has one endpoint, with these annotations and fields. Returns its name.
    ///
    /// # Errors
    /// If the API server refuses it.
    pub fn create(&self, number: u32, annotations: &Value, fields: &Value) -> Result<String> {
        let mut service = objects::service(number, annotations);
        for (field, value) in fields.as_object().into_iter().flatten() {
            service["spec"][field] = value.clone();
        }
        let objects = json!({
            "apiVersion": "v1", "kind": "List",
            "items": [objects::slice(number, &self.world.holder().name), service],
        });
        self.kubectl_with(&["apply", "-f", "-"], &objects.to_string())?;
        Ok(objects::service_name(number))
    }

    /// The annotations with which the vendor's controller serves a Service without a class.
    pub fn annotations(&self) -> Value {
        self.world.cloud.annotations()
    }

    /// Changes a Service: `kubectl patch`.
    ///
    /// # Errors
    /// If the API server refuses it.
    pub fn patch(&self, service: &str, change: &Value) -> Result<()> {
        self.kubectl(&["patch", "service", service, "--type=merge", "-p", &change.to_string()]).map(drop)
    }

    /// Waits until the vendor's controller let the Service go: no finalizer, and no address.
    ///
    /// # Errors
    /// If it does not within the time.
    pub fn let_go(&self, service: &str, limit: Duration) -> Result<()> {
        until(&format!("{service} without finalizers"), limit, || {
            let path = "jsonpath={.metadata.finalizers}{.status.loadBalancer.ingress}";
            let left = self.kubectl(&["get", "service", service, "--ignore-not-found", "-o", path])?;
            Ok(left.is_empty().then_some(()))
        })
    }

    /// Runs kubectl, and returns its output.
    ///
    /// # Errors
    /// If it fails.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        self.kubectl_with(arguments, "")
    }

    fn kubectl_with(&self, arguments: &[&str], input: &str) -> Result<String> {
        let mut child = Command::new(host::prepared("kubectl")?)
            .arg("--kubeconfig")
            .arg(self.world.kubeconfig())
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start kubectl")?;
        child.stdin.take().context("no stdin")?.write_all(input.as_bytes())?;
        let output = child.wait_with_output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl {}: {error}", arguments.join(" "));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The address that the Service publishes, once it does.
    ///
    /// # Errors
    /// If it does not within the time.
    pub fn address(&self, service: &str, limit: Duration) -> Result<String> {
        until(&format!("an address of {service}"), limit, || {
            let path = "jsonpath={.status.loadBalancer.ingress[0].ip}";
            let address = self.kubectl(&["get", "service", service, "-o", path])?;
            Ok((!address.is_empty()).then_some(address))
        })
    }

    /// Keeps a node from all load balancers, or ends that: the controllers look at all their Services.
    ///
    /// # Errors
    /// If the API server refuses it.
    pub fn exclude_node(&mut self, is_out: bool) -> Result<()> {
        if is_out { self.world.take_node_out() } else { self.world.put_node_back() }
    }

    /// Ends the vendor's controller, and starts it again: it looks at all its Services.
    ///
    /// # Errors
    /// If it ended by itself, or does not start.
    pub fn restart_peer(&mut self) -> Result<()> {
        let new = self.programs.start(Who::Peer, &self.world, 1)?;
        std::mem::replace(&mut self.peer, new).end()
    }

    /// Begins to count calls of both controllers.
    pub fn reset_calls(&self) {
        self.world.recorder().reset();
    }

    /// The writes of both controllers since then, by name.
    pub fn writes(&self) -> Vec<String> {
        let counts = self.world.recorder().counts();
        let writes = counts.calls().filter(|(action, _)| !action.is_read);
        writes.map(|(action, count)| format!("{count} {}", action.name)).collect()
    }

    /// Ends both controllers, and removes their logs.
    ///
    /// # Errors
    /// If one of them ended by itself.
    pub fn end(self) -> Result<()> {
        let Self { peer, ours, programs, stand_in: _, world } = self;
        peer.end()?;
        ours.end()?;
        drop(world);
        let folder: PathBuf = programs.folder;
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))
    }
}

/// Asks until there is an answer.
///
/// # Errors
/// If there is none within the time, or asking fails.
pub fn until<T>(what: &str, limit: Duration, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if begun.elapsed() >= limit {
            bail!("waited for {what} for {limit:?}");
        }
        sleep(LOOK);
    }
}
