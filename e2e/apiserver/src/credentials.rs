// SPDX-License-Identifier: Apache-2.0
//! Keys, certificates and kubeconfigs.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use serde_json::{Value, json};

/// The administrator's token. No secret: the server listens on loopback, or in a namespace of its own, and holds nothing.
const TOKEN: &str = "administrator";

/// The files of a server, in its folder.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    pub(crate) folder: PathBuf,
}

impl Files {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Writes what an API server at `address` needs, and the administrator's kubeconfig. More administrators have a token and a
    /// name each.
    pub(crate) fn write(
        folder: PathBuf,
        address: SocketAddr,
        more: &[(String, String)],
    ) -> anyhow::Result<Self> {
        let files = Self { folder };
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "steerage-testserver");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;

        let key = KeyPair::generate()?;
        let mut names = ["127.0.0.1", "localhost", "kubernetes.default.svc"].map(str::to_owned).to_vec();
        names.extend(Some(address.ip().to_string()).filter(|address| !names.contains(address)));
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&key, &authority)?;
        let accounts = KeyPair::generate()?;

        files.put("ca.crt", &authority.pem())?;
        files.put("server.crt", &certificate.pem())?;
        files.put("server.key", &key.serialize_pem())?;
        files.put("accounts.key", &accounts.serialize_pem())?;
        files.put("accounts.pub", &accounts.public_key_pem())?;
        let line = |token: &str, name: &str| format!("{token},{name},{name},system:masters\n");
        let tokens: String = more.iter().map(|(token, name)| line(token, name)).collect();
        files.put("tokens.csv", &(line(TOKEN, "administrator") + &tokens))?;
        files.put("kubeconfig", &kubeconfig(address, &files.path("ca.crt"), &json!({ "token": TOKEN })))?;
        Ok(files)
    }

    /// Writes a kubeconfig for a user of these groups: the administrator's, acting as that user.
    pub(crate) fn put_kubeconfig(
        &self,
        address: SocketAddr,
        name: &str,
        user: &str,
        groups: &[&str],
    ) -> anyhow::Result<PathBuf> {
        let user = json!({ "token": TOKEN, "as": user, "as-groups": groups });
        self.put(name, &kubeconfig(address, &self.path("ca.crt"), &user))
    }

    fn put(&self, name: &str, text: &str) -> anyhow::Result<PathBuf> {
        let path = self.path(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }
}

fn kubeconfig(address: SocketAddr, authority: &Path, user: &Value) -> String {
    // JSON is YAML.
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{ "name": "test", "cluster": {
            "server": format!("https://{address}"), "certificate-authority": authority } }],
        "users": [{ "name": "test", "user": user }],
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
    })
    .to_string()
}
