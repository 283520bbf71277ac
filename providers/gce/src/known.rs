// SPDX-License-Identifier: Apache-2.0
//! What is known of the resources that Services share, so that not each Service reads them: what this process made, changed and deleted,
//! and which Service is making one. No I/O.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use steerage_model::Key;
use tokio::time::Instant;

use crate::object::Id;

/// Others may have changed it after this time.
const AGE: Duration = Duration::from_secs(30);
/// The others wait no longer for the Service that makes one. Then one of them makes it, and GCE says if it exists.
const LONGEST_CREATION: Duration = Duration::from_secs(15);

#[derive(Clone, Debug)]
enum Known {
    /// It has this content; `None` if it was deleted.
    Content(Option<Value>),
    /// This Service makes it.
    MadeBy(Key),
}

/// The content of a resource; `None` if it does not exist.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Content(pub(crate) Option<Value>);

/// What is known, by resource.
#[derive(Debug, Default)]
pub(crate) struct KnownShared(Mutex<BTreeMap<Id, (Instant, Known)>>);

/// Who makes a shared resource.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Claim {
    /// The Service that asks.
    Own,
    /// Another one, which has not ended.
    Other,
    /// It exists by now.
    Exists(Value),
}

impl KnownShared {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Id, (Instant, Known)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its content by now.
    pub(crate) fn note(&self, id: &Id, content: Option<Value>) {
        self.lock().insert(id.clone(), (Instant::now(), Known::Content(content)));
    }

    /// A change of it failed, or nobody knows what came of it.
    pub(crate) fn forget(&self, id: &Id) {
        self.lock().remove(id);
    }

    /// Its content, if it is newer than the list that began to be read then, or than half a minute.
    pub(crate) fn content(&self, id: &Id, listed: Option<Instant>) -> Option<Content> {
        match self.lock().get(id)? {
            (at, Known::Content(content))
                if at.elapsed() < AGE || listed.is_some_and(|listed| *at >= listed) =>
            {
                Some(Content(content.clone()))
            }
            _ => None,
        }
    }

    /// The Service is about to make it, unless another one does.
    pub(crate) fn claim(&self, id: &Id, service: &Key) -> Claim {
        let mut known = self.lock();
        match known.get(id) {
            Some((at, Known::MadeBy(other))) if other != service && at.elapsed() < LONGEST_CREATION => {
                Claim::Other
            }
            Some((at, Known::Content(Some(content)))) if at.elapsed() < AGE => Claim::Exists(content.clone()),
            _ => {
                known.insert(id.clone(), (Instant::now(), Known::MadeBy(service.clone())));
                Claim::Own
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::object::Kind;

    #[tokio::test(start_paused = true)]
    async fn one_service_makes_it_and_the_others_wait_until_it_has_or_does_not_answer() {
        let known = KnownShared::default();
        let id = Id::new(Kind::HealthCheck, "check");
        let [a, b] = ["a", "b"].map(|name| Key::new("shop", name));
        assert_eq!(known.claim(&id, &a), Claim::Own);
        assert_eq!((known.claim(&id, &a), known.claim(&id, &b)), (Claim::Own, Claim::Other));
        assert_eq!(known.content(&id, None), None);
        tokio::time::advance(LONGEST_CREATION).await;
        assert_eq!((known.claim(&id, &b), known.claim(&id, &a)), (Claim::Own, Claim::Other));
        known.forget(&id);
        assert_eq!(known.claim(&id, &a), Claim::Own, "it failed");
        known.note(&id, Some(json!({})));
        assert_eq!(known.claim(&id, &b), Claim::Exists(json!({})));
        known.note(&id, None);
        assert_eq!(known.claim(&id, &b), Claim::Own, "it was deleted");
    }

    #[tokio::test(start_paused = true)]
    async fn content_is_believed_for_half_a_minute_or_against_an_older_list() {
        let known = KnownShared::default();
        let id = Id::new(Kind::HealthCheck, "check");
        let before = Instant::now();
        tokio::time::advance(Duration::from_secs(1)).await;
        known.note(&id, None);
        assert_eq!(known.content(&id, None), Some(Content(None)));
        tokio::time::advance(AGE).await;
        assert_eq!(known.content(&id, None), None);
        assert_eq!(
            (known.content(&id, Some(before)), known.content(&id, Some(Instant::now()))),
            (Some(Content(None)), None)
        );
    }
}
