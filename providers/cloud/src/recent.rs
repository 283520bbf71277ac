// SPDX-License-Identifier: Apache-2.0
//! A read that serves many.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use steerage_provider_api::call_namespace;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// What a caller does where a read failed a moment ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// It reads again.
    Retry,
    /// It takes that failure. A thousand callers that wait for a cloud's failure one after the other would do nothing else.
    GiveUp,
}

/// The result of a read of something that hardly changes. One read at a time is made, and used for a while by all. Those who waited for a
/// read that failed have its failure too: one after the other, their own reads would take as long as the cloud's silence times their
/// number.
#[derive(Debug)]
pub struct Recent<T: ?Sized, E> {
    age: Duration,
    /// When it was last read, and what came of it.
    last: Mutex<Option<LastRead<T, E>>>,
}

type LastRead<T, E> = (Instant, Result<Arc<T>, E>);

impl<T: ?Sized, E: Clone> Recent<T, E> {
    /// Nothing is read yet. A read is used for the time `age`.
    pub fn new(age: Duration) -> Self {
        Self { age, last: Mutex::default() }
    }

    /// The value as it was last read, or else as `read` returns it. If a read failed a moment ago and the caller gives up, its failure.
    pub async fn get(
        &self,
        after_failure: AfterFailure,
        read: impl Future<Output = Result<Arc<T>, E>>,
    ) -> Result<Arc<T>, E> {
        let asked = Instant::now();
        let mut last = self.last.lock().await;
        match &*last {
            Some((at, Ok(value))) if at.elapsed() < self.age => return Ok(Arc::clone(value)),
            Some((at, Err(failure)))
                if *at > asked || at.elapsed() < self.age && after_failure == AfterFailure::GiveUp =>
            {
                return Err(failure.clone());
            }
            _ => {}
        }
        // Others wait for it.
        let found = call_namespace::for_all(read).await;
        *last = Some((Instant::now(), found.clone()));
        found
    }

    /// The value as it was last read, however long ago that was. None while it is read anew: nobody waits for that here.
    pub fn last(&self) -> Option<Arc<T>> {
        self.last.try_lock().ok()?.as_ref().and_then(|(_, found)| found.clone().ok())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn failure_is_shared_with_callers_that_give_up_and_retrying_callers_read_again() {
        let age = Duration::from_mins(1);
        let (recent, reads) = (Recent::<u32, &'static str>::new(age), Cell::new(0));
        let read = |result: Result<u32, &'static str>| {
            let reads = &reads;
            async move {
                reads.set(reads.get() + 1);
                result.map(Arc::new)
            }
        };
        let give_up = AfterFailure::GiveUp;
        assert_eq!(recent.get(give_up, read(Err("down"))).await, Err("down"));
        assert_eq!(recent.get(give_up, read(Ok(1))).await, Err("down"));
        assert_eq!(reads.get(), 1);
        assert_eq!(recent.get(AfterFailure::Retry, read(Ok(1))).await, Ok(Arc::new(1)));
        assert_eq!(recent.get(give_up, read(Ok(2))).await, Ok(Arc::new(1)));
        assert_eq!(reads.get(), 2);
        tokio::time::advance(age).await;
        assert_eq!((recent.last(), reads.get()), (Some(Arc::new(1)), 2));
        assert_eq!(recent.get(give_up, read(Ok(2))).await, Ok(Arc::new(2)));
    }

    /// The cloud says nothing for ten seconds, then refuses.
    #[tokio::test(start_paused = true)]
    async fn who_waits_for_a_read_that_fails_does_not_wait_for_another() {
        let recent = Recent::<u32, &'static str>::new(Duration::from_mins(1));
        let silent = || async {
            tokio::time::sleep(Duration::from_secs(10)).await;
            Err("down")
        };
        let start = Instant::now();
        let (retry, give_up) = (AfterFailure::Retry, AfterFailure::GiveUp);
        let all = tokio::join!(
            recent.get(retry, silent()),
            recent.get(retry, silent()),
            recent.get(give_up, silent()),
            recent.get(retry, silent())
        );
        assert_eq!(all, (Err("down"), Err("down"), Err("down"), Err("down")));
        assert_eq!(start.elapsed(), Duration::from_secs(10));
        assert_eq!(recent.get(retry, async { Ok(Arc::new(1)) }).await, Ok(Arc::new(1)));
    }
}
