// SPDX-License-Identifier: Apache-2.0
//! Where the key of the edge group comes from: a file, or the chart's Secret. Sessions ask for it each time they begin, so that a new
//! key needs no restart.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use steerage_model::chain;
use steerage_watch::Backoff;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::session::SharedKey;

/// The entry of the Secret.
const ENTRY: &str = "key";
/// A Secret that was read is read again after this time.
const REFRESH: Duration = Duration::from_mins(5);
const TIMEOUT: Duration = Duration::from_secs(10);
const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));

#[derive(Clone, Debug)]
pub(crate) enum KeySource {
    File(PathBuf),
    /// As [`read_secret`] has read it last.
    Secret(watch::Receiver<Option<SharedKey>>),
}

impl KeySource {
    /// The file comes first. Without it, and without a cluster that has the Secret, there is no key.
    pub(crate) fn choose(
        file: Option<PathBuf>,
        has_cluster: bool,
        secret: watch::Receiver<Option<SharedKey>>,
    ) -> Option<Self> {
        file.map(Self::File).or_else(|| has_cluster.then_some(Self::Secret(secret)))
    }

    pub(super) fn is_secret(&self) -> bool {
        matches!(self, Self::Secret(_))
    }

    pub(super) fn key(&self) -> io::Result<SharedKey> {
        match self {
            Self::File(path) => SharedKey::read(path),
            Self::Secret(key) => {
                key.borrow().clone().ok_or_else(|| io::Error::other("the Secret is not read yet"))
            }
        }
    }
}

impl std::fmt::Display for KeySource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "the file {}", path.display()),
            Self::Secret(_) => f.write_str("the Secret of --peers-key-secret"),
        }
    }
}

/// Reads the Secret again and again until shutdown. Without an answer the last key stays.
pub(crate) async fn read_secret(
    client: Client,
    namespace: String,
    name: String,
    key: watch::Sender<Option<SharedKey>>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let secrets = Api::<Secret>::namespaced(client, &namespace);
    let (mut backoff, mut logged) = (RETRY, None);
    while !shutdown.is_cancelled() {
        let answer = tokio::time::timeout(TIMEOUT, secrets.get(&name)).await;
        let (wait, problem) = match answer.map_err(|_| "no answer".to_owned()).and_then(usable) {
            Ok(found) => {
                key.send_replace(Some(found));
                backoff = RETRY;
                (REFRESH, None)
            }
            Err(problem) => (backoff.next_delay(), Some(problem)),
        };
        if logged != problem
            && let Some(error) = &problem
        {
            let effect = match &*key.borrow() {
                Some(_) => "continuing with the last one",
                None => "flow exceptions are not exchanged until it is",
            };
            tracing::warn!(
                secret = %format_args!("{namespace}/{name}"),
                error,
                "key of the edge group not read; {effect}; retrying"
            );
        }
        logged = problem;
        let _ = shutdown.run_until_cancelled(tokio::time::sleep(wait)).await;
    }
    Ok(())
}

/// The Secret's text never becomes part of the problem.
fn usable(answer: Result<Secret, kube::Error>) -> Result<SharedKey, String> {
    let secret = answer.map_err(|error| chain(&error))?;
    let entry = secret.data.as_ref().and_then(|data| data.get(ENTRY));
    let entry = entry.ok_or_else(|| format!("it has no entry `{ENTRY}`"))?;
    SharedKey::new(&entry.0).ok_or_else(|| format!("its entry `{ENTRY}` is shorter than 32 bytes"))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    fn secret(entry: &str, value: &str) -> Secret {
        let data = [(entry.to_owned(), ByteString(value.as_bytes().to_vec()))].into();
        Secret { data: Some(data), ..Secret::default() }
    }

    #[test]
    fn secret_has_a_long_key() {
        let long = "k".repeat(32);
        assert!(usable(Ok(secret(ENTRY, &long))).is_ok());
        for (found, said) in [
            (secret(ENTRY, "short-but-secret"), "shorter than 32 bytes"),
            (secret("other", &long), "no entry `key`"),
            (Secret::default(), "no entry `key`"),
        ] {
            let problem = usable(Ok(found)).expect_err("unusable");
            assert!(problem.contains(said) && !problem.contains("secret"), "{problem}");
        }
    }

    #[test]
    fn sessions_wait_for_the_secret() {
        let (sender, receiver) = watch::channel(None);
        let source = KeySource::Secret(receiver);
        assert!(source.key().is_err());
        sender.send_replace(SharedKey::new(&[b'k'; 32]));
        assert!(source.key().is_ok());
    }
}
