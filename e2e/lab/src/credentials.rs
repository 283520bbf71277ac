// SPDX-License-Identifier: Apache-2.0
//! The lab's own certificate authority, and a kubeconfig per component with the groups that RBAC expects.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use serde_json::json;

use crate::error::{Doing, Error, Result};
use crate::state::{Lab, write};

/// A holder of a client certificate: file name, user, groups.
struct User {
    file: String,
    name: String,
    group: Option<&'static str>,
}

/// Writes the authority, the serving certificates, the key of service accounts and all kubeconfigs.
pub fn create(lab: &Lab) -> Result<()> {
    let authority = Authority::new(lab)?;
    authority.serving("apiserver", "kube-apiserver", api_server_names(lab))?;
    for node in lab.plan.nodes() {
        let names = vec![node.name.clone(), node.ipv4.to_string(), node.ipv6.to_string(), "127.0.0.1".into()];
        authority.serving(&format!("{}-kubelet", node.name), &node.name, names)?;
    }
    for user in users(lab) {
        authority.client(&user)?;
        kubeconfig(lab, &user.file)?;
    }
    let key = KeyPair::generate().map_err(failed("service accounts"))?;
    secret(lab, "service-accounts.key", &key.serialize_pem())?;
    write(&lab.credential("service-accounts.pub"), &key.public_key_pem())
}

fn users(lab: &Lab) -> Vec<User> {
    let user = |file: &str, name: &str, group| User { file: file.into(), name: name.into(), group };
    let mut users = vec![
        user("admin", "lab-admin", Some("system:masters")),
        user("kube-controller-manager", "system:kube-controller-manager", None),
        user("kube-scheduler", "system:kube-scheduler", None),
        user("kube-proxy", "system:kube-proxy", None),
        user("apiserver-kubelet-client", KUBELET_CLIENT, None),
    ];
    users.extend(lab.plan.nodes().iter().map(|node| User {
        file: node.name.clone(),
        name: format!("system:node:{}", node.name),
        group: Some("system:nodes"),
    }));
    users
}

/// The user that the API server is to kubelets.
pub const KUBELET_CLIENT: &str = "kube-apiserver-kubelet-client";

fn api_server_names(lab: &Lab) -> Vec<String> {
    let host = lab.plan.control_plane();
    let mut names: Vec<_> = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
        .map(str::to_owned)
        .to_vec();
    names.push("kubernetes.default.svc.cluster.local".into());
    names.extend(["127.0.0.1", "::1", "10.96.0.1", "fd96::1"].map(str::to_owned));
    names.extend([host.ipv4.to_string(), host.ipv6.to_string()]);
    names
}

struct Authority<'a> {
    lab: &'a Lab,
    issuer: Issuer<'static, KeyPair>,
}

impl<'a> Authority<'a> {
    fn new(lab: &'a Lab) -> Result<Self> {
        let name = format!("steerage lab {}", lab.plan.name);
        let key = KeyPair::generate().map_err(failed(&name))?;
        let mut params = parameters(&name, None, Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let certificate = params.self_signed(&key).map_err(failed(&name))?;
        write(&lab.credential("ca.crt"), &certificate.pem())?;
        secret(lab, "ca.key", &key.serialize_pem())?;
        Ok(Self { lab, issuer: Issuer::new(params, key) })
    }

    fn serving(&self, file: &str, name: &str, names: Vec<String>) -> Result<()> {
        let mut params = parameters(name, None, names)?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(file, name, params)
    }

    fn client(&self, user: &User) -> Result<()> {
        let mut params = parameters(&user.name, user.group, Vec::new())?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(&user.file, &user.name, params)
    }

    fn sign(&self, file: &str, name: &str, mut params: CertificateParams) -> Result<()> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        let key = KeyPair::generate().map_err(failed(name))?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(failed(name))?;
        write(&self.lab.credential(&format!("{file}.crt")), &certificate.pem())?;
        secret(self.lab, &format!("{file}.key"), &key.serialize_pem())
    }
}

fn parameters(name: &str, group: Option<&str>, names: Vec<String>) -> Result<CertificateParams> {
    let mut params = CertificateParams::new(names).map_err(failed(name))?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    Ok(params)
}

fn failed(subject: &str) -> impl FnOnce(rcgen::Error) -> Error {
    let subject = subject.to_owned();
    |source| Error::Certificate { subject, source }
}

fn secret(lab: &Lab, file: &str, text: &str) -> Result<()> {
    let path = lab.credential(file);
    write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
        .doing(|| format!("closing {} to others", path.display()))
}

/// A kubeconfig that names the certificate files; JSON is YAML too.
fn kubeconfig(lab: &Lab, user: &str) -> Result<()> {
    let credentials = json!({
        "client-certificate": lab.credential(&format!("{user}.crt")),
        "client-key": lab.credential(&format!("{user}.key")),
    });
    write_kubeconfig(lab, user, &credentials)
}

/// A kubeconfig for a bearer token, such as a service account's.
pub fn kubeconfig_for_token(lab: &Lab, user: &str, token: &str) -> Result<()> {
    write_kubeconfig(lab, user, &json!({ "token": token }))
}

fn write_kubeconfig(lab: &Lab, user: &str, credentials: &serde_json::Value) -> Result<()> {
    let name = &lab.plan.name;
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": name, "cluster": {
            "server": lab.plan.api_server(), "certificate-authority": lab.credential("ca.crt"),
        } }],
        "users": [{ "name": user, "user": credentials }],
        "contexts": [{ "name": name, "context": { "cluster": name, "user": user } }],
        "current-context": name,
    });
    secret(lab, &format!("{user}.kubeconfig"), &format!("{config:#}\n"))
}
