// SPDX-License-Identifier: Apache-2.0
//! Reads answers.

use aws_smithy_types::error::ErrorMetadata;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use crate::error::Refusal;
use crate::types::{Reservation, SecurityGroup, Subnet};

/// A list in an answer.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Items<T> {
    #[serde(rename = "item", default = "Vec::new")]
    pub(crate) items: Vec<T>,
}

impl<T> Default for Items<T> {
    fn default() -> Self {
        Self { items: Vec::new() }
    }
}

/// Reads a list as a `Vec`.
pub(crate) fn listed<'de, D, T>(from: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Ok(Items::deserialize(from)?.items)
}

/// One page of a list.
pub(crate) trait Page: DeserializeOwned {
    type Item;

    /// The page's items, and the token of the next page. The last page has an empty token, or none.
    fn split(self) -> (Vec<Self::Item>, Option<String>);
}

/// Declares the answer of an action that lists, with the element that holds the list.
macro_rules! page {
    ($answer:ident, $element:literal, $item:ty) => {
        #[derive(Debug, Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub(crate) struct $answer {
            #[serde(rename = $element)]
            list: Items<$item>,
            next_token: Option<String>,
        }

        impl Page for $answer {
            type Item = $item;

            fn split(self) -> (Vec<$item>, Option<String>) {
                (self.list.items, self.next_token.filter(|token| !token.is_empty()))
            }
        }
    };
}

page!(Instances, "reservationSet", Reservation);
page!(SecurityGroups, "securityGroupInfo", SecurityGroup);
page!(Subnets, "subnetSet", Subnet);

/// The answer of `CreateSecurityGroup`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Created {
    pub(crate) group_id: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Refused {
    errors: Errors,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Errors {
    error: Vec<CodeAndMessage>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CodeAndMessage {
    code: String,
    #[serde(default)]
    message: String,
}

/// What an answer that is not a success says. A proxy's page says nothing.
pub(crate) fn refusal(body: &str) -> Refusal {
    let refused: Refused = quick_xml::de::from_str(body).unwrap_or_default();
    let metadata = match refused.errors.error.into_iter().next() {
        Some(error) => ErrorMetadata::builder().code(error.code).message(error.message).build(),
        None => ErrorMetadata::builder().build(),
    };
    Refusal { metadata }
}
