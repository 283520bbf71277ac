// SPDX-License-Identifier: Apache-2.0
//! As whom the controller logs in: a managed identity of its VM, a federated token of its pod (workload identity), or a client secret. The
//! variables are those of Azure's own clients. Secrets are in no message and in no log.

use std::fmt;
use std::path::PathBuf;

/// What is missing or wrong. Never names a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CredentialsError {
    /// A variable is missing.
    #[error("the variable {0} is set, and {1} is not")]
    Missing(&'static str, &'static str),
    /// A variable has a value that cannot be right.
    #[error("the variable {0} has the wrong value `{1}`: {2}")]
    Wrong(&'static str, String, &'static str),
    /// The certificates of the system cannot be used.
    #[error("no usable certificates: {0}")]
    Certificates(String),
}

/// Credentials.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials(pub(crate) Login);

/// How to log in.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Login {
    /// The metadata service of the VM gives tokens.
    Managed {
        client_id: Option<String>,
        url: String,
    },
    /// A token of Kubernetes in a file, which is written anew before it ends.
    Federated {
        tenant: Tenant,
        file: PathBuf,
    },
    Secret {
        tenant: Tenant,
        secret: String,
    },
}

/// An application of a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tenant {
    pub(crate) authority: String,
    pub(crate) id: String,
    pub(crate) client_id: String,
}

const METADATA: &str = "http://169.254.169.254";
const AUTHORITY: &str = "https://login.microsoftonline.com";

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Login::Managed { .. } => "managed identity",
            Login::Federated { .. } => "workload identity",
            Login::Secret { .. } => "client secret",
        })
    }
}

impl Credentials {
    /// The managed identity with this client ID, or the only one.
    pub fn managed(client_id: Option<String>) -> Self {
        Self(Login::Managed { client_id, url: METADATA.to_owned() })
    }

    /// Reads the environment. A client secret is used before a federated token, and a managed identity without both.
    ///
    /// # Errors
    ///
    /// If a variable is missing or wrong.
    pub fn load(client_id: Option<&str>) -> Result<Self, CredentialsError> {
        Self::read(client_id, |name| std::env::var(name).ok())
    }

    fn read(
        client_id: Option<&str>,
        variable: impl Fn(&'static str) -> Option<String>,
    ) -> Result<Self, CredentialsError> {
        let get = |name| variable(name).filter(|value| !value.is_empty());
        let (secret, file) = ("AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE");
        let tenant = |because| {
            let needed = |name| {
                let value = get(name).ok_or(CredentialsError::Missing(because, name))?;
                let is_id = value.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.'));
                if is_id { Ok(value) } else { Err(CredentialsError::Wrong(name, value, "use an ID")) }
            };
            let name = "AZURE_AUTHORITY_HOST";
            let authority = get(name).unwrap_or_else(|| AUTHORITY.to_owned());
            if !authority.starts_with("https://") {
                return Err(CredentialsError::Wrong(name, authority, "use an https:// URL"));
            }
            Ok(Tenant {
                authority: authority.trim_end_matches('/').to_owned(),
                id: needed("AZURE_TENANT_ID")?,
                client_id: needed("AZURE_CLIENT_ID")?,
            })
        };
        if let Some(value) = get(secret) {
            return Ok(Self(Login::Secret { tenant: tenant(secret)?, secret: value }));
        }
        if let Some(path) = get(file) {
            return Ok(Self(Login::Federated { tenant: tenant(file)?, file: path.into() }));
        }
        Ok(Self::managed(client_id.filter(|id| !id.is_empty()).map(str::to_owned)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(set: &[(&str, &str)]) -> Result<Credentials, String> {
        let get =
            |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        Credentials::read(Some("mine"), get).map_err(|error| error.to_string())
    }

    #[test]
    fn environment_says_as_whom() {
        let tenant = [("AZURE_TENANT_ID", "t"), ("AZURE_CLIENT_ID", "c")];
        assert_eq!(format!("{:?}", read(&[]).unwrap()), "managed identity");
        let secret =
            [&tenant[..], &[("AZURE_CLIENT_SECRET", "s"), ("AZURE_FEDERATED_TOKEN_FILE", "/f")]].concat();
        let Login::Secret { tenant: of, .. } = read(&secret).unwrap().0 else { panic!("not a secret") };
        assert_eq!(of.authority, AUTHORITY);
        let file = [&tenant[..], &[("AZURE_FEDERATED_TOKEN_FILE", "/f")]].concat();
        assert_eq!(format!("{:?}", read(&file).unwrap()), "workload identity");
        assert!(!format!("{:?}", read(&secret).unwrap()).contains("\"s\""));
    }

    #[test]
    fn missing_and_wrong_variables_are_named_and_no_secret_is_shown() {
        let error = read(&[("AZURE_CLIENT_SECRET", "SECRET")]).unwrap_err();
        assert_eq!(error, "the variable AZURE_CLIENT_SECRET is set, and AZURE_TENANT_ID is not");
        let wrong = [("AZURE_CLIENT_SECRET", "SECRET"), ("AZURE_TENANT_ID", "a/b"), ("AZURE_CLIENT_ID", "c")];
        let error = read(&wrong).unwrap_err();
        assert!(error.contains("AZURE_TENANT_ID") && !error.contains("SECRET "), "{error}");
        let plain = [("AZURE_FEDERATED_TOKEN_FILE", "/f"), ("AZURE_AUTHORITY_HOST", "http://a")];
        assert!(read(&plain).unwrap_err().contains("AZURE_AUTHORITY_HOST"));
    }
}
