// SPDX-License-Identifier: Apache-2.0
//! What is counted for each answer of AWS, over the SDK with an HTTP client that gives made-up answers.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_config::timeout::TimeoutConfig;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_credential_types::Credentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, SharedHttpConnector, http_client_fn,
};
use aws_smithy_types::body::SdkBody;
use elb::config::http::{HttpRequest, HttpResponse};
use elb::error::ConnectorError;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

use super::*;
use crate::client::{
    BalancerCalls as _, Client, ListenerCalls as _, SecurityGroupCalls as _, Tags, TargetCalls as _,
};
use crate::iam_policy;

enum Answer {
    Http(u16, &'static str),
    NoConnection,
    Silence,
}

const THROTTLED: &str = "<ErrorResponse><Error><Type>Sender</Type><Code>Throttling</Code><Message>Rate exceeded</Message></Error></ErrorResponse>";
const DENIED: &str = "<ErrorResponse><Error><Type>Sender</Type><Code>AccessDenied</Code><Message>no</Message></Error></ErrorResponse>";
const GONE: &str = "<ErrorResponse><Error><Type>Sender</Type><Code>TargetGroupNotFound</Code><Message>gone</Message></Error></ErrorResponse>";
const IN_USE: &str = "<Response><Errors><Error><Code>DependencyViolation</Code><Message>in use</Message></Error></Errors><RequestID>1</RequestID></Response>";
const NO_GROUP: &str = "<Response><Errors><Error><Code>InvalidGroup.NotFound</Code><Message>gone</Message></Error></Errors><RequestID>1</RequestID></Response>";
const GROUPS: &str = "<DescribeSecurityGroupsResponse><securityGroupInfo/><nextToken>2</nextToken></DescribeSecurityGroupsResponse>";
const LAST_GROUPS: &str =
    "<DescribeSecurityGroupsResponse><securityGroupInfo/></DescribeSecurityGroupsResponse>";
const DELETED: &str = "<DeleteListenerResponse><DeleteListenerResult/></DeleteListenerResponse>";
const PAGE: &str = "<DescribeLoadBalancersResponse><DescribeLoadBalancersResult><LoadBalancers/><NextMarker>2</NextMarker></DescribeLoadBalancersResult></DescribeLoadBalancersResponse>";
const NEXT_PAGE: &str = "<DescribeLoadBalancersResponse><DescribeLoadBalancersResult><LoadBalancers/><NextMarker>3</NextMarker></DescribeLoadBalancersResult></DescribeLoadBalancersResponse>";
const LAST_PAGE: &str = "<DescribeLoadBalancersResponse><DescribeLoadBalancersResult><LoadBalancers/></DescribeLoadBalancersResult></DescribeLoadBalancersResponse>";

#[derive(Clone)]
struct MadeUp(Arc<Mutex<VecDeque<Answer>>>);

impl std::fmt::Debug for MadeUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MadeUp")
    }
}

impl HttpConnector for MadeUp {
    fn call(&self, _: HttpRequest) -> HttpConnectorFuture {
        match self.0.lock().unwrap().pop_front().expect("an answer for each request") {
            Answer::Http(status, body) => {
                let status = status.try_into().expect("a status");
                HttpConnectorFuture::ready(Ok(HttpResponse::new(status, SdkBody::from(body))))
            }
            Answer::NoConnection => HttpConnectorFuture::ready(Err(ConnectorError::io("refused".into()))),
            Answer::Silence => HttpConnectorFuture::new(std::future::pending()),
        }
    }
}

/// A client that gets these answers, in this order, and the registry of its metrics.
fn client(
    answers: impl Into<VecDeque<Answer>>,
    credentials: Option<impl ProvideCredentials + 'static>,
) -> (Client, Registry) {
    let answers = MadeUp(Arc::new(Mutex::new(answers.into())));
    let mut sdk = SdkConfig::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("us-east-1"))
        .http_client(http_client_fn(move |_, _| SharedHttpConnector::new(answers.clone())))
        .timeout_config(TimeoutConfig::builder().operation_timeout(Duration::from_secs(30)).build());
    sdk.set_credentials_provider(credentials.map(SharedCredentialsProvider::new));
    let mut registry = Registry::default();
    let metrics = crate::api_metrics(&mut registry);
    (Client::new(&sdk.build(), None, None, metrics), registry)
}

fn test_credentials() -> Credentials {
    Credentials::new("test", "test", None, None, "test")
}

/// The counted requests to `ELBv2`: action, code and number.
fn counted(registry: &Registry) -> Vec<String> {
    counted_by("ELBv2", registry)
}

fn counted_by(api: &str, registry: &Registry) -> Vec<String> {
    let mut text = String::new();
    encode(&mut text, registry).unwrap();
    let start = format!("aws_api_requests_total{{api=\"{api}\",action=\"");
    let lines = text.lines().filter_map(|line| line.strip_prefix(start.as_str()));
    let mut counted: Vec<_> = lines
        .filter(|line| !line.ends_with(" 0"))
        .map(|line| line.replace("\",code=\"", " ").replace("\"}", ""))
        .collect();
    counted.sort();
    counted
}

#[test]
fn every_called_action_is_listed() {
    let listed: BTreeSet<_> = [(iam_policy::ELB, &ELBV2), (iam_policy::EC2, &EC2)]
        .into_iter()
        .flat_map(|(service, api)| api.api.actions.iter().map(move |action| (service, (*action).to_owned())))
        .collect();
    assert_eq!(iam_policy::called(), listed);
}

#[tokio::test]
async fn requests_count_under_their_action_and_code() {
    let answers = [
        Answer::Http(200, DELETED),
        Answer::Http(400, THROTTLED),
        Answer::Http(400, THROTTLED),
        Answer::Http(403, DENIED),
        Answer::Http(400, GONE),
        Answer::Http(503, "<html>a proxy</html>"),
        Answer::NoConnection,
    ];
    let (client, registry) = client(answers, Some(test_credentials()));
    client.delete_listener("arn").await.unwrap();
    for code in ["Throttling", "Throttling", "AccessDenied"] {
        assert!(client.delete_listener("arn").await.unwrap_err().is(code), "{code}");
    }
    assert!(client.targets("arn").await.unwrap_err().is_not_found());
    client.targets("arn").await.unwrap_err();
    client.targets("arn").await.unwrap_err();
    let expected = [
        "DeleteListener 200 1",
        "DeleteListener AccessDenied 1",
        "DeleteListener Throttling 2",
        "DescribeTargetHealth 503 1",
        "DescribeTargetHealth TargetGroupNotFound 1",
        "DescribeTargetHealth connection 1",
    ];
    assert_eq!(counted(&registry), expected);
}

#[tokio::test]
async fn requests_to_ec2_count_under_its_name() {
    let answers = [
        Answer::Http(200, GROUPS),
        Answer::Http(200, LAST_GROUPS),
        Answer::Http(400, IN_USE),
        Answer::Http(400, NO_GROUP),
        Answer::Http(503, "<html>a proxy</html>"),
    ];
    let (client, registry) = client(answers, Some(test_credentials()));
    assert_eq!(client.security_groups(&Tags::new()).await.unwrap(), []);
    assert!(!client.delete_security_group("sg-1").await.unwrap(), "in use");
    assert!(client.delete_security_group("sg-1").await.unwrap(), "gone");
    client.delete_security_group("sg-1").await.unwrap_err();
    let expected = [
        "DeleteSecurityGroup 503 1",
        "DeleteSecurityGroup DependencyViolation 1",
        "DeleteSecurityGroup InvalidGroup.NotFound 1",
        "DescribeSecurityGroups 200 2",
    ];
    assert_eq!(counted_by("EC2", &registry), expected);
    assert!(counted(&registry).is_empty());
}

#[tokio::test]
async fn every_page_of_a_list_counts() {
    let answers = [PAGE, NEXT_PAGE, LAST_PAGE].map(|page| Answer::Http(200, page));
    let (client, registry) = client(answers, Some(test_credentials()));
    assert_eq!(client.all_balancers().await.unwrap(), []);
    assert_eq!(counted(&registry), ["DescribeLoadBalancers 200 3"]);
}

#[tokio::test(start_paused = true)]
async fn request_without_an_answer_counts_as_timeout_with_its_duration() {
    let (client, registry) = client([Answer::Silence], Some(test_credentials()));
    client.delete_listener("arn").await.unwrap_err();
    assert_eq!(counted(&registry), ["DeleteListener timeout 1"]);
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    let sum = "aws_api_request_duration_seconds_sum{api=\"ELBv2\",action=\"DeleteListener\"} 30.";
    assert!(text.contains(sum), "{text}");
}

/// As a change of a listener is after ten seconds.
#[tokio::test(start_paused = true)]
async fn request_that_is_given_up_counts_as_timeout() {
    let (client, registry) = client([Answer::Silence], Some(test_credentials()));
    let time = Duration::from_secs(10);
    tokio::time::timeout(time, client.delete_listener("arn")).await.unwrap_err();
    assert_eq!(counted(&registry), ["DeleteListener timeout 1"]);
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    let sum = "aws_api_request_duration_seconds_sum{api=\"ELBv2\",action=\"DeleteListener\"} 10.";
    assert!(text.contains(sum), "{text}");
}

#[tokio::test]
async fn request_without_credentials_is_not_sent_and_counts_as_other() {
    let (client, registry) = client([], None::<Credentials>);
    client.delete_listener("arn").await.unwrap_err();
    assert_eq!(counted(&registry), ["DeleteListener other 1"]);
}

/// As a role that may not be assumed.
#[derive(Debug)]
struct Refusing;

impl ProvideCredentials for Refusing {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::ready(Err(CredentialsError::provider_error("no such role")))
    }
}

#[tokio::test]
async fn failure_of_the_credentials_source_is_named_and_nothing_is_open() {
    let (client, registry) = client([], Some(Refusing));
    let failures = [
        client.delete_listener("arn").await.unwrap_err(),
        client.delete_security_group("sg-1").await.unwrap_err(),
    ];
    for (failure, call) in failures.into_iter().zip(["ELBv2 DeleteListener", "EC2 DeleteSecurityGroup"]) {
        assert!(!failure.leaves_open(), "{failure:?}");
        let error = steerage_provider_api::Error::from(failure);
        let text = error.to_string();
        assert!(text.starts_with(&format!("No credentials for AWS ({call}: ")), "{text}");
        assert!(text.contains("no such role"), "{text}");
        assert_eq!(error.reason(), "ProviderUnavailable");
    }
    let (client, _) = self::client([Answer::NoConnection], Some(test_credentials()));
    let failure = client.delete_listener("arn").await.unwrap_err();
    assert!(failure.leaves_open() && !failure.is("NoCredentials"));
    assert_eq!(counted(&registry), ["DeleteListener other 1"]);
}
