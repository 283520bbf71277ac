// SPDX-License-Identifier: Apache-2.0
//! Requests that complete a change of which half is made: clients may have lost their way until then, so these are not given up because
//! others wait for OpenStack, too.

use std::time::Duration;

use tokio::time::sleep;

/// How often a request is made that is refused. Each waits for ten seconds for its turn, and a provider's call has a minute.
const TRIES: usize = 3;
/// Between two of them.
const PAUSE: Duration = Duration::from_secs(1);

/// Makes the request again while it is refused because of the rate, or because others have no answer yet.
pub(crate) async fn insist<T, E, F: Future<Output = Result<T, E>>>(
    is_throttled: impl Fn(&E) -> bool,
    request: impl Fn() -> F,
) -> Result<T, E> {
    for _ in 1..TRIES {
        match request().await {
            Err(error) if is_throttled(&error) => sleep(PAUSE).await,
            other => return other,
        }
    }
    request().await
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_refused_requests_are_made_again() {
        for (outcomes, made, last) in [
            (&[Err(true), Err(true), Ok(())][..], 3, Ok(())),
            (&[Err(true), Err(false)], 2, Err(false)),
            (&[Err(true), Err(true), Err(true)], 3, Err(true)),
            (&[Ok(())], 1, Ok(())),
        ] {
            let requests = Cell::new(0);
            let request = || {
                requests.set(requests.get() + 1);
                std::future::ready(outcomes[requests.get() - 1])
            };
            assert_eq!(insist(|is_throttled| *is_throttled, request).await, last);
            assert_eq!(requests.get(), made);
        }
    }
}
