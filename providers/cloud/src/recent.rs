// SPDX-License-Identifier: Apache-2.0
//! A read that serves many.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

/// What a caller does where a read failed a moment ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// It reads again.
    Retry,
    /// It goes without. A thousand callers that wait for a cloud's failure one after the other would do nothing else.
    GiveUp,
}

/// The result of a read of something that hardly changes. One read at a time is made, and used for a while by all.
#[derive(Debug)]
pub struct Recent<T: ?Sized> {
    age: Duration,
    /// When it was last read; without a value if that failed.
    last: Mutex<Option<(Instant, Option<Arc<T>>)>>,
}

impl<T: ?Sized> Recent<T> {
    /// Nothing is read yet. A read is used for the time `age`.
    pub fn new(age: Duration) -> Self {
        Self { age, last: Mutex::default() }
    }

    /// The value as it was last read, or else as `read` returns it. `None` if a read failed a moment ago and the caller gives up.
    pub async fn get<E>(
        &self,
        after_failure: AfterFailure,
        read: impl Future<Output = Result<Arc<T>, E>>,
    ) -> Result<Option<Arc<T>>, E> {
        let mut last = self.last.lock().await;
        match &*last {
            Some((at, value)) if at.elapsed() < self.age => match (value, after_failure) {
                (Some(value), _) => return Ok(Some(Arc::clone(value))),
                (None, AfterFailure::GiveUp) => return Ok(None),
                (None, AfterFailure::Retry) => {}
            },
            _ => {}
        }
        let found = read.await;
        *last = Some((Instant::now(), found.as_ref().ok().map(Arc::clone)));
        found.map(Some)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_read_serves_for_its_age_and_a_failure_only_those_that_retry() {
        let age = Duration::from_mins(1);
        let (recent, reads) = (Recent::<u32>::new(age), Cell::new(0));
        let read = |result: Result<u32, &'static str>| {
            let reads = &reads;
            async move {
                reads.set(reads.get() + 1);
                result.map(Arc::new)
            }
        };
        let give_up = AfterFailure::GiveUp;
        assert_eq!(recent.get(give_up, read(Err("down"))).await, Err("down"));
        assert_eq!(recent.get(give_up, read(Ok(1))).await, Ok(None));
        assert_eq!(reads.get(), 1);
        assert_eq!(recent.get(AfterFailure::Retry, read(Ok(1))).await, Ok(Some(Arc::new(1))));
        assert_eq!(recent.get(give_up, read(Ok(2))).await, Ok(Some(Arc::new(1))));
        assert_eq!(reads.get(), 2);
        tokio::time::advance(age).await;
        assert_eq!(recent.get(give_up, read(Ok(2))).await, Ok(Some(Arc::new(2))));
    }
}
