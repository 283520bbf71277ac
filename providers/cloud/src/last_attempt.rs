// SPDX-License-Identifier: Apache-2.0
//! What was last tried for a part of a load balancer, so that the cloud is not asked again for what it refused, or for what is in place. No I/O.

use steerage_provider_api::Error;

/// What was wanted, and got or refused, for a load balancer that had something then.
#[derive(Clone, Debug)]
pub struct LastAttempt<W, H> {
    wanted: W,
    found: H,
    /// Reason and message, if it was refused.
    refused: Option<(&'static str, String)>,
}

impl<W: PartialEq, H: PartialEq> LastAttempt<W, H> {
    /// What was wanted, with its error, if there was one. `None` if another try may end in another way.
    pub fn new(wanted: W, found: H, error: Option<&Error>) -> Option<Self> {
        let refused = match error {
            None => None,
            Some(Error::Invalid { reason, message }) => Some((*reason, message.clone())),
            Some(_) => return None,
        };
        Some(Self { wanted, found, refused })
    }

    /// The result of the same attempt for the same load balancer.
    pub fn result(&self, wanted: &W, has: &H) -> Option<Result<(), Error>> {
        let refused = || self.refused.clone().map(|(reason, message)| Error::invalid(reason, message));
        (self.wanted == *wanted && self.found == *has).then(|| refused().map_or(Ok(()), Err))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_attempt_for_the_same_load_balancer_has_a_known_result() {
        let done = LastAttempt::new("a", 1, None).unwrap();
        assert!(matches!(done.result(&"a", &1), Some(Ok(()))));
        assert!(done.result(&"a", &2).is_none() && done.result(&"b", &1).is_none());
        let refused = LastAttempt::new("a", 1, Some(&Error::invalid("Why", "because"))).unwrap();
        assert!(matches!(refused.result(&"a", &1), Some(Err(error)) if error.reason() == "Why"));
        assert!(LastAttempt::new("a", 1, Some(&Error::Unavailable(String::new()))).is_none());
    }
}
