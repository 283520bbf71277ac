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
    /// Classes of other controllers, whose Services are managed too.
    pub(crate) others: Vec<String>,
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

/// Whether the Service names this controller's class, or another one that it serves.
pub(crate) fn has_managed_class(service: &Service, classes: &ManagedClasses) -> bool {
    let Some(class) = &service.class else { return false };
    class.strip_prefix(names::PREFIX) == Some(classes.provider) || classes.others.contains(class)
}

/// The class of a managed Service, if it is another controller's.
pub(crate) fn served_class(service: &Service) -> Option<&str> {
    service.class.as_deref().filter(|class| !class.starts_with(names::PREFIX))
}

/// Whether the Service was managed until a flag was removed. A class never changes, unless the type did.
pub(crate) fn is_unmanaged_by_flag(service: &Service, classes: &ManagedClasses) -> bool {
    if service.kind != ServiceKind::LoadBalancer || service.deleting || is_managed(service, classes) {
        return false;
    }
    match &service.class {
        None => true,
        Some(class) => service.annotations.get(annotations::SERVED_CLASS) == Some(class),
    }
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

    const EDGE: ManagedClasses = ManagedClasses { provider: "edge", serve_unset: false, others: Vec::new() };

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
    fn service_of_a_served_class_keeps_its_load_balancer_without_the_flag() {
        let class = "service.k8s.aws/nlb";
        let serving = ManagedClasses { others: vec![class.to_owned()], ..EDGE };
        let mut service = service(Some(class));
        assert!(is_managed(&service, &serving) && !is_managed(&service, &EDGE));
        assert_eq!(finalizer(&service), names::FINALIZER);
        assert!(!is_unmanaged_by_flag(&service, &EDGE), "never managed");
        service.annotations.insert(annotations::SERVED_CLASS.to_owned(), class.to_owned());
        assert!(is_unmanaged_by_flag(&service, &EDGE) && !is_unmanaged_by_flag(&service, &serving));
        service.class = Some("example.com/other".to_owned());
        assert!(!is_unmanaged_by_flag(&service, &EDGE), "its type and then its class changed");
        service.class = None;
        assert!(is_unmanaged_by_flag(&service, &EDGE));
        service.deleting = true;
        assert!(!is_unmanaged_by_flag(&service, &EDGE));
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
