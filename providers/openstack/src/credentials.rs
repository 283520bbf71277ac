// SPDX-License-Identifier: Apache-2.0
//! Where to log in, and as whom: from `clouds.yaml` or the environment, under the names that all clients of OpenStack read. Nothing here
//! shows a secret.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};
use steerage_provider_cloud::http::CertificatesError;

/// What is missing or wrong. Never names a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CredentialsError {
    /// A file cannot be used.
    #[error("{}: {problem}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// No file has the cloud.
    #[error("no clouds.yaml has the cloud `{0}`; looked at {1}")]
    NoCloud(String, String),
    /// A setting is missing.
    #[error("{0} is missing in {1}")]
    Missing(&'static str, String),
    /// A setting has an unsupported value.
    #[error("{0} has the unsupported value `{1}` in {2}. {3}")]
    Unsupported(&'static str, String, String, &'static str),
}

impl From<CertificatesError> for CredentialsError {
    fn from(CertificatesError { file, problem }: CertificatesError) -> Self {
        Self::File { file, problem }
    }
}

/// Credentials, and which endpoints to use.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// URL of Keystone's version 3.
    pub(crate) auth_url: String,
    /// The body of the request for a token, with the secret.
    login: Value,
    /// The region, if not the only one.
    pub(crate) region: Option<String>,
    /// The interface: `public`, `internal` or `admin`.
    pub(crate) interface: String,
    /// The file with the certificates of the cloud's authority, instead of the system's.
    pub(crate) ca_file: Option<PathBuf>,
    /// URL of Octavia, instead of that of Keystone's catalog.
    pub(crate) load_balancer_endpoint: Option<String>,
    /// URL of Neutron, instead of that of Keystone's catalog.
    pub(crate) network_endpoint: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("auth_url", &self.auth_url).finish_non_exhaustive()
    }
}

/// The settings of one cloud, by their names in `clouds.yaml`, those of `auth` among them.
type Settings = BTreeMap<String, String>;

#[derive(Deserialize)]
struct CloudsFile {
    #[serde(default)]
    clouds: BTreeMap<String, BTreeMap<String, Value>>,
}

impl Credentials {
    /// Reads them as OpenStack's clients do: the cloud of this name, or else the one of `OS_CLOUD`, from the `clouds.yaml` in
    /// `OS_CLIENT_CONFIG_FILE`, the working directory, `~/.config/openstack` or `/etc/openstack`; without a name, the variables `OS_…`.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or a setting is missing or not supported.
    pub fn load(cloud: Option<&str>) -> Result<Self, CredentialsError> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let Some(cloud) = cloud.map(str::to_owned).or_else(|| variable("OS_CLOUD")) else {
            return Self::from_environment(std::env::vars());
        };
        let mut files: Vec<PathBuf> = Vec::new();
        if let Some(file) = variable("OS_CLIENT_CONFIG_FILE") {
            files.push(file.into());
        } else {
            files.push("clouds.yaml".into());
            files.extend(variable("HOME").map(|home| Path::new(&home).join(".config/openstack/clouds.yaml")));
            files.push("/etc/openstack/clouds.yaml".into());
        }
        for file in &files {
            match std::fs::read_to_string(file) {
                Ok(text) => {
                    if let Some(found) = Self::from_file(&text, &cloud, file)? {
                        return Ok(found);
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(CredentialsError::File { file: file.clone(), problem: error.to_string() });
                }
            }
        }
        let looked: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        Err(CredentialsError::NoCloud(cloud, looked.join(", ")))
    }

    /// From the text of a `clouds.yaml`. `None` if it lacks the cloud.
    fn from_file(text: &str, cloud: &str, file: &Path) -> Result<Option<Self>, CredentialsError> {
        let parsed: Result<CloudsFile, _> = serde_saphyr::from_str(text);
        // The parser's message may quote a line with a secret.
        let unreadable = |_| CredentialsError::File {
            file: file.to_owned(),
            problem: "it is no valid clouds.yaml".to_owned(),
        };
        let Some(found) = parsed.map_err(unreadable)?.clouds.remove(cloud) else { return Ok(None) };
        let mut settings = Settings::new();
        for (key, value) in found {
            match value {
                Value::Object(auth) if key == "auth" => {
                    settings.extend(auth.into_iter().filter_map(|(key, value)| Some((key, scalar(value)?))));
                }
                value => settings.extend(scalar(value).map(|value| (key, value))),
            }
        }
        let place = format!("cloud `{cloud}` of {}", file.display());
        Self::from_settings(&settings, &place).map(Some)
    }

    /// From variables `OS_…`, which have the names of `clouds.yaml` in capitals.
    fn from_environment(variables: impl Iterator<Item = (String, String)>) -> Result<Self, CredentialsError> {
        let named = variables.filter_map(|(name, value)| {
            let name = name.strip_prefix("OS_")?.to_ascii_lowercase();
            (!value.is_empty()).then_some((name, value))
        });
        Self::from_settings(&named.collect(), "the environment (OS_…)")
    }

    fn from_settings(settings: &Settings, place: &str) -> Result<Self, CredentialsError> {
        let get = |name: &str| settings.get(name).cloned();
        let need =
            |name: &'static str| get(name).ok_or_else(|| CredentialsError::Missing(name, place.to_owned()));
        let url = need("auth_url")?;
        let url = url.trim_end_matches('/');
        let auth_url = if url.ends_with("/v3") { url.to_owned() } else { format!("{url}/v3") };
        if let Some(verify) = get("verify").filter(|verify| !matches!(verify.as_str(), "true" | "True")) {
            let advice = "Steerage always verifies certificates: name the authority's by cacert.";
            return Err(CredentialsError::Unsupported("verify", verify, place.to_owned(), advice));
        }
        Ok(Self {
            auth_url,
            login: login(settings, place)?,
            region: get("region_name"),
            interface: get("interface")
                .map_or_else(|| "public".to_owned(), |name| name.trim_end_matches("URL").to_owned()),
            ca_file: get("cacert").map(PathBuf::from),
            load_balancer_endpoint: get("load_balancer_endpoint_override"),
            network_endpoint: get("network_endpoint_override"),
        })
    }

    /// The body of the request for a token.
    pub(crate) fn login(&self) -> &Value {
        &self.login
    }

    /// The same with other endpoints of Octavia and Neutron, for tests.
    #[must_use]
    pub fn at(mut self, load_balancer: String, network: String) -> Self {
        (self.load_balancer_endpoint, self.network_endpoint) = (Some(load_balancer), Some(network));
        self
    }

    /// Those of an application credential.
    pub fn application(auth_url: &str, id: &str, secret: &str) -> Result<Self, CredentialsError> {
        let settings = [
            ("auth_url", auth_url),
            ("application_credential_id", id),
            ("application_credential_secret", secret),
        ];
        let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        Self::from_settings(&settings, "the arguments")
    }
}

fn login(settings: &Settings, place: &str) -> Result<Value, CredentialsError> {
    let get = |name: &str| settings.get(name).map(String::as_str);
    let need =
        |name: &'static str| get(name).ok_or_else(|| CredentialsError::Missing(name, place.to_owned()));
    let kind = get("auth_type").unwrap_or(match get("application_credential_secret") {
        Some(_) => "v3applicationcredential",
        None => "password",
    });
    let domain = |of: &str| {
        let (id, name) = (get(&format!("{of}_domain_id")), get(&format!("{of}_domain_name")));
        match (id.or(get("domain_id")), name.or(get("domain_name"))) {
            (Some(id), _) => json!({ "id": id }),
            (None, Some(name)) => json!({ "name": name }),
            (None, None) => json!({ "id": get("default_domain").unwrap_or("default") }),
        }
    };
    let user = |named: &'static str| -> Result<Value, CredentialsError> {
        match get("user_id") {
            Some(id) => Ok(json!({ "id": id })),
            None => Ok(json!({ "name": need(named)?, "domain": domain("user") })),
        }
    };
    match kind {
        "v3applicationcredential" => {
            let secret = need("application_credential_secret")?;
            let credential = if let Some(id) = get("application_credential_id") {
                json!({ "id": id, "secret": secret })
            } else {
                let name = need("application_credential_name")?;
                json!({ "name": name, "secret": secret, "user": user("username")? })
            };
            let methods = ["application_credential"];
            Ok(
                json!({ "auth": { "identity": { "methods": methods, "application_credential": credential } } }),
            )
        }
        "password" | "v3password" => {
            let mut user = user("username")?;
            user["password"] = need("password")?.into();
            let project = match (get("project_id"), get("project_name").or(get("tenant_name"))) {
                (Some(id), _) => json!({ "id": id }),
                (None, Some(name)) => json!({ "name": name, "domain": domain("project") }),
                (None, None) => return Err(CredentialsError::Missing("project_name", place.to_owned())),
            };
            let identity = json!({ "methods": ["password"], "password": { "user": user } });
            Ok(json!({ "auth": { "identity": identity, "scope": { "project": project } } }))
        }
        other => Err(CredentialsError::Unsupported(
            "auth_type",
            other.to_owned(),
            place.to_owned(),
            "Use v3applicationcredential or password.",
        )),
    }
}

fn scalar(value: Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text),
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "
clouds:
  prod:
    auth_type: v3applicationcredential
    auth:
      auth_url: https://keystone.example:5000/
      application_credential_id: abc
      application_credential_secret: SECRET
    region_name: north
    interface: internal
    cacert: /etc/openstack/ca.pem
  people:
    auth:
      auth_url: https://keystone.example:5000/v3
      username: steerage
      password: SECRET
      project_name: cluster
      user_domain_name: Default
      project_domain_id: default
    network_endpoint_override: https://neutron.example
  careless:
    verify: false
    auth: {auth_url: https://keystone.example, username: a, password: SECRET, project_id: p}
  odd:
    auth_type: v3oidcpassword
    auth: {auth_url: https://keystone.example}
";

    fn read(cloud: &str) -> Result<Option<Credentials>, CredentialsError> {
        Credentials::from_file(FILE, cloud, Path::new("clouds.yaml"))
    }

    #[test]
    fn application_credential_and_password_are_read_from_a_file() {
        let found = read("prod").unwrap().unwrap();
        assert_eq!(found.auth_url, "https://keystone.example:5000/v3");
        assert_eq!((found.region.as_deref(), found.interface.as_str()), (Some("north"), "internal"));
        assert_eq!(found.ca_file.as_deref(), Some(Path::new("/etc/openstack/ca.pem")));
        let identity = &found.login()["auth"]["identity"];
        assert_eq!(identity["application_credential"], json!({ "id": "abc", "secret": "SECRET" }));
        assert!(found.login()["auth"].get("scope").is_none(), "the credential has its project");
        let found = read("people").unwrap().unwrap();
        assert_eq!(found.auth_url, "https://keystone.example:5000/v3");
        let user = &found.login()["auth"]["identity"]["password"]["user"];
        assert_eq!(
            *user,
            json!({ "name": "steerage", "password": "SECRET", "domain": { "name": "Default" } })
        );
        let scope = &found.login()["auth"]["scope"]["project"];
        assert_eq!(*scope, json!({ "name": "cluster", "domain": { "id": "default" } }));
        assert_eq!(found.network_endpoint.as_deref(), Some("https://neutron.example"));
        assert_eq!(read("other"), Ok(None));
    }

    #[test]
    fn environment_has_the_same_names() {
        let variables = [
            ("OS_AUTH_URL", "https://k"),
            ("OS_APPLICATION_CREDENTIAL_ID", "abc"),
            ("OS_APPLICATION_CREDENTIAL_SECRET", "SECRET"),
            ("OS_REGION_NAME", ""),
            ("HOME", "/root"),
        ];
        let variables = || variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter();
        let found = Credentials::from_environment(variables()).unwrap();
        assert_eq!(found, Credentials::application("https://k/v3", "abc", "SECRET").unwrap());
        let missing = Credentials::from_environment(variables().skip(1)).unwrap_err();
        assert_eq!(missing.to_string(), "auth_url is missing in the environment (OS_…)");
    }

    #[test]
    fn nothing_shows_a_secret() {
        let found = read("prod").unwrap().unwrap();
        assert!(!format!("{found:?}").contains("SECRET"));
        for cloud in ["careless", "odd"] {
            let error = read(cloud).unwrap_err();
            assert!(!error.to_string().contains("SECRET") && error.to_string().contains(cloud), "{error}");
        }
        let broken = Credentials::from_file("clouds: [SECRET", "prod", Path::new("clouds.yaml")).unwrap_err();
        assert_eq!(broken.to_string(), "clouds.yaml: it is no valid clouds.yaml");
    }
}
