// SPDX-License-Identifier: Apache-2.0
//! Which Services this controller manages, which of them are paused, and which finalizers are its own.

use steerage_model::{Service, ServiceKind, annotations, names};

use super::PlanError;

/// Which Services this controller manages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ManagedClasses {
    /// The name of the provider; the class is `steerage.dev/<name>`.
    pub(crate) provider: &'static str,
    /// Whether Services without a class are managed too.
    pub(crate) serve_unset: bool,
}

/// Whether the Service should have a load balancer of this controller.
pub(crate) fn is_managed(service: &Service, classes: &ManagedClasses) -> bool {
    if service.kind != ServiceKind::LoadBalancer || service.deleting {
        return false;
    }
    has_managed_class(service, classes) || (service.class.is_none() && classes.serve_unset)
}

/// Whether the Service asks that nothing of it be changed.
pub(crate) fn is_paused(service: &Service) -> Result<bool, PlanError> {
    let Some(value) = service.annotations.get(annotations::PAUSED).map(|value| value.trim()) else {
        return Ok(false);
    };
    value.parse().map_err(|_| PlanError::InvalidAnnotation {
        name: annotations::PAUSED,
        value: value.to_owned(),
        problem: "write true or false".to_owned(),
    })
}

/// Whether the Service names this controller's class.
pub(crate) fn has_managed_class(service: &Service, classes: &ManagedClasses) -> bool {
    service.class.as_ref().and_then(|class| class.strip_prefix(names::PREFIX)) == Some(classes.provider)
}

/// The finalizer for a Service that this controller manages.
pub(crate) fn finalizer(service: &Service) -> &'static str {
    if service.class.is_some() { names::FINALIZER } else { names::UPSTREAM_FINALIZER }
}

/// The finalizers on the Service that this controller set.
///
/// Steerage's finalizer is shared by one controller per provider, and a Service that is no longer of type `LoadBalancer` has lost its
/// class as well: the annotation `steerage.dev/provider` decides. A cloud-controller-manager also sets upstream's finalizer, which is
/// therefore ours only beside that annotation.
pub(crate) fn owned_finalizers(service: &Service, classes: &ManagedClasses) -> Vec<&'static str> {
    let provider = service.annotations.get(annotations::PROVIDER).map(String::as_str);
    if provider.is_some_and(|provider| provider != classes.provider) {
        return Vec::new();
    }
    let upstream = (names::UPSTREAM_FINALIZER, provider.is_some());
    [(names::FINALIZER, true), upstream]
        .into_iter()
        .filter(|(finalizer, is_ours)| *is_ours && service.has_finalizer(finalizer))
        .map(|(finalizer, _)| finalizer)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use steerage_model::Key;

    const EDGE: ManagedClasses = ManagedClasses { provider: "edge", serve_unset: false };

    fn service(class: Option<&str>) -> Service {
        let mut service = Service::new(Key::new("default", "web"));
        service.kind = ServiceKind::LoadBalancer;
        service.class = class.map(str::to_owned);
        service
    }

    #[test]
    fn only_services_of_the_managed_class_are_managed() {
        let unset_too = ManagedClasses { serve_unset: true, ..EDGE };
        for (class, alone, with_unset) in [
            (Some("steerage.dev/edge"), true, true),
            (Some("steerage.dev/aws"), false, false),
            (Some("edge"), false, false),
            (Some("example.com/steerage.dev/edge"), false, false),
            (None, false, true),
        ] {
            let service = service(class);
            assert_eq!(
                (is_managed(&service, &EDGE), is_managed(&service, &unset_too)),
                (alone, with_unset),
                "{class:?}"
            );
        }
    }

    #[test]
    fn only_true_pauses_and_other_words_are_refused() {
        let paused = |value: &str| {
            let mut service = service(None);
            service.annotations.insert(annotations::PAUSED.to_owned(), value.to_owned());
            is_paused(&service).map_err(|error| error.reason())
        };
        assert_eq!(is_paused(&service(None)), Ok(false));
        assert_eq!((paused("true"), paused(" false ")), (Ok(true), Ok(false)));
        for value in ["yes", "True", "1", ""] {
            assert_eq!(paused(value), Err("InvalidAnnotation"), "{value:?}");
        }
    }

    #[test]
    fn deleted_services_and_other_types_are_not_managed() {
        let mut deleted = service(Some("steerage.dev/edge"));
        deleted.deleting = true;
        assert!(!is_managed(&deleted, &EDGE));
        let mut plain = service(Some("steerage.dev/edge"));
        plain.kind = ServiceKind::NodePort;
        assert!(!is_managed(&plain, &EDGE));
    }

    #[test]
    fn the_provider_annotation_decides_whose_a_finalizer_is() {
        let with = |finalizer: &str, provider: Option<&str>| {
            let mut service = service(None);
            service.finalizers = vec![finalizer.to_owned()];
            service.annotations.extend(provider.map(|p| (annotations::PROVIDER.to_owned(), p.to_owned())));
            owned_finalizers(&service, &EDGE)
        };
        assert_eq!(with(names::FINALIZER, None), [names::FINALIZER]);
        assert_eq!(with(names::FINALIZER, Some("edge")), [names::FINALIZER]);
        assert!(with(names::FINALIZER, Some("aws")).is_empty(), "another controller's");
        assert!(with(names::UPSTREAM_FINALIZER, None).is_empty(), "a cloud-controller-manager's");
        assert_eq!(with(names::UPSTREAM_FINALIZER, Some("edge")), [names::UPSTREAM_FINALIZER]);
        assert!(with("example.com/other", Some("edge")).is_empty());
    }
}
