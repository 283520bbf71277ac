// SPDX-License-Identifier: Apache-2.0
//! Annotations of Steerage that nobody knows: typing errors, and those of other versions.

use steerage_model::{Service, annotations, names};

/// Names that are looked at: whoever writes thousands gets no more attention.
const SHOWN: usize = 5;

/// What to tell of each unknown annotation.
pub(crate) fn ignored_annotations(service: &Service) -> impl Iterator<Item = String> {
    unknown_annotations(service).into_iter().map(|(name, nearest)| {
        let nearest = nearest.map(|nearest| format!(" The nearest known one is {nearest}."));
        let nearest = nearest.unwrap_or_default();
        format!(
            "Annotation {name} is unknown and ignored.{nearest} Correct or remove it, or use a version that knows it."
        )
    })
}

/// The unknown annotations of the Service, each with a known one that is near. They are ignored and not refused, because another version
/// may know them: going back to this one must not stop changes.
fn unknown_annotations(service: &Service) -> Vec<(&str, Option<&'static str>)> {
    let known =
        || annotations::ALL.iter().map(|known| known.name).filter(|name| name.starts_with(names::PREFIX));
    let all = service.annotations.keys().map(String::as_str);
    let unknown = all.filter(|name| names::is_of_steerage(name) && known().all(|known| known != *name));
    let last = |name: &str| name.split_once('/').map_or(String::new(), |(_, last)| last.to_owned());
    let distance = |name: &str, known: &str| strsim::levenshtein(&last(name), &last(known));
    let nearest = |name: &str| {
        let near = known().filter(|known| !annotations::is_written_by_controller(known));
        let near = near.filter(|known| distance(name, known) * 3 <= last(name).len());
        near.min_by_key(|known| distance(name, known))
    };
    unknown.take(SHOWN).map(|name| (name, nearest(name))).collect()
}

#[cfg(test)]
mod tests {
    use steerage_model::Key;

    use super::*;

    #[test]
    fn typing_errors_are_found_and_names_of_others_are_not() {
        let of = |names: &[&str]| {
            let mut service = Service::new(Key::new("shop", "web"));
            service.annotations = names.iter().map(|name| ((*name).to_owned(), String::new())).collect();
            let found = unknown_annotations(&service).into_iter();
            found.map(|(name, nearest)| format!("{name} {}", nearest.unwrap_or("-"))).collect::<Vec<_>>()
        };
        assert_eq!(of(&[annotations::STEERING, annotations::PROVIDER, "example.com/stering"]), [""; 0]);
        assert_eq!(of(&["steerage.dev/stering"]), ["steerage.dev/stering steerage.dev/steering"]);
        assert_eq!(of(&["steerage.dev/adresses"]), ["steerage.dev/adresses steerage.dev/addresses"]);
        assert_eq!(of(&["steerage.io/paused"]), ["steerage.io/paused steerage.dev/paused"]);
        assert_eq!(of(&["steerage/pausd"]), ["steerage/pausd steerage.dev/paused"]);
        assert_eq!(of(&["steerage", "steerage-tool.example/paused", "example.com/paused"]), [""; 0]);
        assert_eq!(of(&["steerage.dev/pool"]), ["steerage.dev/pool -"], "not steerage.dev/paused");
        let many: Vec<String> = (0..50).map(|n| format!("steerage.dev/{n}")).collect();
        assert_eq!(of(&many.iter().map(String::as_str).collect::<Vec<_>>()).len(), SHOWN);
    }
}
