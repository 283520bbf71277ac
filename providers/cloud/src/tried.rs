// SPDX-License-Identifier: Apache-2.0
//! What was last tried for a part of a load balancer, so that the cloud is not asked again for what it refused, or for what is in place. No I/O.

use steerage_provider_api::Error;

/// A wish that was carried out or refused, for a load balancer that had something then.
#[derive(Clone, Debug)]
pub struct Tried<W, H> {
    wish: W,
    had: H,
    /// Reason and message, if it was refused.
    refused: Option<(&'static str, String)>,
}

impl<W: PartialEq, H: PartialEq> Tried<W, H> {
    /// The wish with its error, if there was one. `None` if another try may end in another way.
    pub fn new(wish: W, had: H, error: Option<&Error>) -> Option<Self> {
        let refused = match error {
            None => None,
            Some(Error::Invalid { reason, message }) => Some((*reason, message.clone())),
            Some(_) => return None,
        };
        Some(Self { wish, had, refused })
    }

    /// The result of the same wish for the same load balancer.
    pub fn result(&self, wish: &W, has: &H) -> Option<Result<(), Error>> {
        let refused = || self.refused.clone().map(|(reason, message)| Error::invalid(reason, message));
        (self.wish == *wish && self.had == *has).then(|| refused().map_or(Ok(()), Err))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_wish_for_the_same_load_balancer_has_a_known_result() {
        let done = Tried::new("a", 1, None).unwrap();
        assert!(matches!(done.result(&"a", &1), Some(Ok(()))));
        assert!(done.result(&"a", &2).is_none() && done.result(&"b", &1).is_none());
        let refused = Tried::new("a", 1, Some(&Error::invalid("Why", "because"))).unwrap();
        assert!(matches!(refused.result(&"a", &1), Some(Err(error)) if error.reason() == "Why"));
        assert!(Tried::new("a", 1, Some(&Error::Unavailable(String::new()))).is_none());
    }
}
