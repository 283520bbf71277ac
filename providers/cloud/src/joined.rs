// SPDX-License-Identifier: Apache-2.0
//! Questions about single objects that a list answers where many ask at once.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use steerage_provider_api::call_namespace;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::oneshot::{self, Receiver, Sender};

/// So many objects in a list cost the cloud as much as a request.
const OBJECTS_OF_A_REQUEST: usize = 50;
/// Who waits longer for the requests of others asks alone: one lost answer does not hold up everybody.
const PATIENCE: Duration = Duration::from_secs(5);

/// Joins the reads of objects of type `T`. While one read is made, those who come gather; then one list answers all of them. Who is alone
/// reads the one object, and where the list is so long that it costs more than the single reads, everybody does. No answer is older than
/// the question.
#[derive(Debug)]
pub struct Joined<T, E> {
    waiting: Mutex<Vec<Sender<Answer<T, E>>>>,
    /// Held by who reads: the length of the last list.
    last_len: tokio::sync::Mutex<usize>,
}

type Answer<T, E> = Result<Arc<[T]>, E>;

impl<T, E> Default for Joined<T, E> {
    fn default() -> Self {
        Self { waiting: Mutex::default(), last_len: tokio::sync::Mutex::default() }
    }
}

/// Those who wait for an answer, as the one whose turn it is finds them.
enum Waiting<T, E> {
    /// Nobody else.
    Alone,
    /// So few that a list costs more than their single reads.
    Few,
    Many(Vec<Sender<Answer<T, E>>>),
}

impl<T, E: Clone> Joined<T, E> {
    /// What `one` reads, or what `pick` finds in what `all` lists. If it finds nothing there, `one` is read.
    ///
    /// # Errors
    ///
    /// Those of the read that was made.
    pub async fn read<V>(
        &self,
        one: impl Future<Output = Result<V, E>>,
        all: impl Future<Output = Result<Vec<T>, E>>,
        pick: impl FnOnce(&[T]) -> Option<V>,
    ) -> Result<V, E> {
        loop {
            let mut receiver = self.ask();
            let Ok(mut last_len) = tokio::time::timeout(PATIENCE, self.last_len.lock()).await else {
                drop(receiver);
                return one.await;
            };
            let answer = match receiver.try_recv() {
                Ok(answer) => answer,
                // Who read for all was abandoned.
                Err(TryRecvError::Closed) => continue,
                Err(TryRecvError::Empty) => match self.waiting(*last_len) {
                    Waiting::Alone => {
                        drop(receiver);
                        // Others wait for this read, so it does not take the turn of its own namespace.
                        let found = call_namespace::for_all(one).await;
                        drop(last_len);
                        return found;
                    }
                    Waiting::Few => {
                        drop((receiver, last_len));
                        return one.await;
                    }
                    Waiting::Many(senders) => {
                        let answer: Answer<T, E> = call_namespace::for_all(all).await.map(Arc::from);
                        if let Ok(listed) = &answer {
                            *last_len = listed.len();
                        }
                        for sender in senders {
                            // Who gave up needs no answer.
                            let _ = sender.send(answer.clone());
                        }
                        answer
                    }
                },
            };
            drop(last_len);
            return match pick(&answer?) {
                Some(found) => Ok(found),
                None => one.await,
            };
        }
    }

    fn ask(&self) -> Receiver<Answer<T, E>> {
        let (sender, receiver) = oneshot::channel();
        self.lock().push(sender);
        receiver
    }

    fn waiting(&self, last_len: usize) -> Waiting<T, E> {
        let mut waiting = self.lock();
        waiting.retain(|sender| !sender.is_closed());
        match waiting.len() {
            0 | 1 => Waiting::Alone,
            few if few * OBJECTS_OF_A_REQUEST < last_len => Waiting::Few,
            _ => Waiting::Many(std::mem::take(&mut waiting)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Sender<Answer<T, E>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;

    use super::*;

    /// A cloud with so many objects. It counts single reads and lists, each of which takes a second.
    struct Objects {
        joined: Joined<usize, &'static str>,
        len: usize,
        counts: Mutex<(usize, usize)>,
        /// What single reads and lists fail with.
        failure: Option<&'static str>,
        hangs_at_list: Option<usize>,
    }

    impl Objects {
        fn of(len: usize) -> Self {
            Self {
                joined: Joined::default(),
                len,
                counts: Mutex::default(),
                failure: None,
                hangs_at_list: None,
            }
        }

        async fn read(&self, id: usize) -> Result<Option<usize>, &'static str> {
            let one = async {
                self.counts.lock().unwrap().0 += 1;
                tokio::time::sleep(Duration::from_secs(1)).await;
                self.failure.map_or(Ok((id < self.len).then_some(id)), Err)
            };
            let all = async {
                self.counts.lock().unwrap().1 += 1;
                if self.hangs_at_list == Some(self.counts.lock().unwrap().1) {
                    std::future::pending::<()>().await;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
                self.failure.map_or(Ok((0..self.len).collect()), Err)
            };
            self.joined
                .read(one, all, |listed| listed.iter().find(|found| **found == id).map(|id| Some(*id)))
                .await
        }

        fn counts(&self) -> (usize, usize) {
            std::mem::take(&mut *self.counts.lock().unwrap())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_list_answers_all_who_came_during_a_read() {
        let cloud = Objects::of(100);
        assert_eq!(cloud.read(7).await, Ok(Some(7)));
        assert_eq!(cloud.counts(), (1, 0));
        let found = join_all((0..50).map(|id| cloud.read(id))).await;
        assert!(found.iter().enumerate().all(|(id, found)| *found == Ok(Some(id))));
        assert_eq!(cloud.counts(), (1, 1));
        let later = async |id: usize| {
            tokio::time::sleep(Duration::from_millis(10) * u32::from(id > 0)).await;
            cloud.read(id).await
        };
        join_all((0..50).map(later)).await;
        assert_eq!(cloud.counts(), (1, 1));
        // What the list lacks is looked for alone.
        let found = join_all([0, 3, 100].map(|id| cloud.read(id))).await;
        assert_eq!(found, [Ok(Some(0)), Ok(Some(3)), Ok(None)]);
        assert_eq!(cloud.counts(), (2, 1));
    }

    /// Others wait for it, however many requests its own namespace has.
    #[tokio::test(start_paused = true)]
    async fn read_for_which_others_gather_is_for_no_namespace() {
        let owner = steerage_provider_api::Owner {
            service: steerage_model::Key::new("shop", "web"),
            uid: String::new(),
        };
        let joined = Joined::<usize, ()>::default();
        let one = async { Ok::<_, ()>(call_namespace::current()) };
        let read = joined.read(one, async { Ok(Vec::new()) }, |_| None);
        assert_eq!(call_namespace::for_owner(&owner, read).await.unwrap(), call_namespace::ALL);
    }

    #[tokio::test(start_paused = true)]
    async fn few_do_not_list_many() {
        let cloud = Objects::of(1000);
        join_all((0..3).map(|id| cloud.read(id))).await;
        assert_eq!(cloud.counts(), (1, 1), "the length is not known yet");
        let start = tokio::time::Instant::now();
        join_all((0..10).map(|id| cloud.read(id))).await;
        assert_eq!(cloud.counts(), (10, 0));
        assert_eq!(start.elapsed(), Duration::from_secs(2), "not one after the other");
        join_all((0..21).map(|id| cloud.read(id))).await;
        assert_eq!(cloud.counts(), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn all_learn_of_a_failure_at_once() {
        let cloud = Objects { failure: Some("down"), ..Objects::of(100) };
        let found = join_all((0..50).map(|id| cloud.read(id))).await;
        assert!(found.iter().all(|found| *found == Err("down")));
        assert_eq!(cloud.counts(), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn another_one_lists_where_who_did_is_abandoned() {
        let cloud = Objects { hangs_at_list: Some(1), ..Objects::of(100) };
        let abandoned = tokio::time::timeout(Duration::from_secs(2), cloud.read(1));
        let (first, abandoned, found) =
            futures::join!(cloud.read(0), abandoned, join_all((2..10).map(|id| cloud.read(id))));
        assert!(first.is_ok() && abandoned.is_err());
        assert!(found.iter().all(Result::is_ok));
        assert_eq!(cloud.counts(), (1, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn list_that_hangs_holds_nobody_up_for_long() {
        let cloud = Objects { hangs_at_list: Some(1), ..Objects::of(100) };
        let hangs = tokio::time::timeout(Duration::from_mins(1), cloud.read(1));
        let others = async {
            let start = tokio::time::Instant::now();
            let found = join_all((2..10).map(|id| cloud.read(id))).await;
            (found, start.elapsed())
        };
        let (first, hangs, (found, took)) = futures::join!(cloud.read(0), hangs, others);
        assert!(first.is_ok() && hangs.is_err());
        assert!(found.iter().all(Result::is_ok));
        assert_eq!(cloud.counts(), (9, 1));
        assert_eq!(took, PATIENCE + Duration::from_secs(1));
    }
}
