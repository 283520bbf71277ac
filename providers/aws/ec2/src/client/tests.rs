// SPDX-License-Identifier: Apache-2.0
//! What is sent and what is read, over an HTTP client that keeps requests and gives made-up answers.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use aws_config::Region;
use aws_credential_types::Credentials;
use aws_credential_types::provider::SharedCredentialsProvider;
use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, SharedHttpConnector, http_client_fn,
};

use super::*;
use crate::types::{AssociationState, IpRange, Ipv6Association, Ipv6Range, PrefixListId};

type Requests = Vec<HttpRequest>;
type Answers = VecDeque<(u16, &'static str)>;

#[derive(Clone, Default)]
struct Wire(Arc<Mutex<(Requests, Answers)>>);

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Wire")
    }
}

impl HttpConnector for Wire {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let (requests, answers) = &mut *self.0.lock().unwrap();
        requests.push(request);
        // Without an answer, the other side is silent.
        answers.pop_front().map_or_else(
            || HttpConnectorFuture::new(std::future::pending()),
            |(status, body)| {
                let status = status.try_into().unwrap();
                HttpConnectorFuture::ready(Ok(HttpResponse::new(status, SdkBody::from(body))))
            },
        )
    }
}

impl Wire {
    /// The forms that were sent, with their parameters apart from action and version.
    fn sent(&self) -> Vec<Vec<(String, String)>> {
        let (requests, _) = &*self.0.lock().unwrap();
        let body = |request: &HttpRequest| request.body().bytes().unwrap().to_vec();
        let form = |body: Vec<u8>| form_urlencoded::parse(&body).into_owned().collect::<Vec<_>>();
        let forms = requests.iter().map(|request| form(body(request)));
        forms.map(|form| form.into_iter().filter(|(name, _)| name != "Version").collect()).collect()
    }
}

fn client(answers: impl IntoIterator<Item = (u16, &'static str)>) -> (Client, Wire) {
    let wire = Wire::default();
    wire.0.lock().unwrap().1.extend(answers);
    let credentials = Credentials::new("AKID", "secret", Some("session".to_owned()), None, "test");
    let connector = wire.clone();
    let sdk = SdkConfig::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("eu-central-1"))
        .credentials_provider(SharedCredentialsProvider::new(credentials))
        .sleep_impl(aws_smithy_async::rt::sleep::SharedAsyncSleep::new(
            aws_smithy_async::rt::sleep::TokioSleep::new(),
        ))
        .http_client(http_client_fn(move |_, _| SharedHttpConnector::new(connector.clone())))
        .build();
    let timeouts = TimeoutConfig::builder().operation_timeout(Duration::from_secs(10)).build();
    (Client::new(&sdk, "https://ec2.eu-central-1.amazonaws.com", &timeouts, None), wire)
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn tag(key: &str, value: &str) -> Tag {
    Tag { key: key.to_owned(), value: value.to_owned() }
}

#[tokio::test]
async fn request_is_posted_and_signed_for_ec2() {
    let (client, wire) = client([(200, "<DeleteSecurityGroupResponse/>")]);
    client.delete_security_group("sg-1").await.unwrap();
    let (requests, _) = &*wire.0.lock().unwrap();
    let [request] = requests.as_slice() else { panic!("{requests:?}") };
    assert_eq!((request.method(), request.uri()), ("POST", "https://ec2.eu-central-1.amazonaws.com/"));
    let header = |name| request.headers().get(name).unwrap_or_default();
    assert_eq!(header("content-type"), "application/x-www-form-urlencoded");
    assert_eq!(header("x-amz-security-token"), "session");
    assert!(header("user-agent").starts_with("aws-sdk-rust/"), "{}", header("user-agent"));
    let signature = header("authorization");
    assert!(signature.starts_with("AWS4-HMAC-SHA256 Credential=AKID/"), "{signature}");
    assert!(
        signature.contains("/eu-central-1/ec2/aws4_request, SignedHeaders=content-type;host;"),
        "{signature}"
    );
    assert_eq!(
        request.body().bytes(),
        Some(&b"Action=DeleteSecurityGroup&Version=2016-11-15&GroupId=sg-1"[..])
    );
}

#[tokio::test]
async fn parameters_are_named_as_in_the_reference() {
    let done = (200, "<Response><return>true</return></Response>");
    let made = (200, "<CreateSecurityGroupResponse><groupId>sg-1</groupId></CreateSecurityGroupResponse>");
    let (client, wire) = client([made, done, done, done]);
    let tags = vec![tag("a&b", "c=d"), tag("empty", "")];
    let group = NewSecurityGroup { name: "n", description: "d", vpc: "vpc-1", tags: tags.clone() };
    assert_eq!(client.create_security_group(&group).await.unwrap().as_deref(), Some("sg-1"));
    client.create_tags(&["sg-1".to_owned(), "sg-2".to_owned()], &tags).await.unwrap();
    let range = |cidr: &str, text: Option<&str>| IpRange {
        cidr_ip: cidr.to_owned(),
        description: text.map(str::to_owned),
    };
    let permissions = [
        IpPermission {
            ip_protocol: "tcp".to_owned(),
            from_port: Some(80),
            to_port: Some(81),
            ip_ranges: vec![range("192.0.2.0/24", Some("own")), range("198.51.100.0/24", None)],
            ipv6_ranges: vec![Ipv6Range { cidr_ipv6: "2001:db8::/32".to_owned(), description: None }],
            prefix_list_ids: vec![PrefixListId { prefix_list_id: "pl-1".to_owned(), description: None }],
        },
        IpPermission { ip_protocol: "-1".to_owned(), ..IpPermission::default() },
    ];
    client.authorize_security_group_ingress("sg-1", &permissions).await.unwrap();
    client.revoke_security_group_ingress("sg-1", &permissions[1..]).await.unwrap();
    let expected = [
        pairs(&[
            ("Action", "CreateSecurityGroup"),
            ("GroupName", "n"),
            ("GroupDescription", "d"),
            ("VpcId", "vpc-1"),
            ("TagSpecification.1.ResourceType", "security-group"),
            ("TagSpecification.1.Tag.1.Key", "a&b"),
            ("TagSpecification.1.Tag.1.Value", "c=d"),
            ("TagSpecification.1.Tag.2.Key", "empty"),
            ("TagSpecification.1.Tag.2.Value", ""),
        ]),
        pairs(&[
            ("Action", "CreateTags"),
            ("ResourceId.1", "sg-1"),
            ("ResourceId.2", "sg-2"),
            ("Tag.1.Key", "a&b"),
            ("Tag.1.Value", "c=d"),
            ("Tag.2.Key", "empty"),
            ("Tag.2.Value", ""),
        ]),
        pairs(&[
            ("Action", "AuthorizeSecurityGroupIngress"),
            ("GroupId", "sg-1"),
            ("IpPermissions.1.IpProtocol", "tcp"),
            ("IpPermissions.1.FromPort", "80"),
            ("IpPermissions.1.ToPort", "81"),
            ("IpPermissions.1.IpRanges.1.CidrIp", "192.0.2.0/24"),
            ("IpPermissions.1.IpRanges.1.Description", "own"),
            ("IpPermissions.1.IpRanges.2.CidrIp", "198.51.100.0/24"),
            ("IpPermissions.1.Ipv6Ranges.1.CidrIpv6", "2001:db8::/32"),
            ("IpPermissions.1.PrefixListIds.1.PrefixListId", "pl-1"),
            ("IpPermissions.2.IpProtocol", "-1"),
        ]),
        pairs(&[
            ("Action", "RevokeSecurityGroupIngress"),
            ("GroupId", "sg-1"),
            ("IpPermissions.1.IpProtocol", "-1"),
        ]),
    ];
    assert_eq!(wire.sent(), expected);
}

const GROUPS: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<DescribeSecurityGroupsResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
  <requestId>1</requestId>
  <securityGroupInfo>
    <item>
      <ownerId>123456789012</ownerId><groupId>sg-1</groupId><groupName>web</groupName>
      <groupDescription>a &amp; b</groupDescription><vpcId>vpc-1</vpcId>
      <ipPermissions>
        <item>
          <ipProtocol>tcp</ipProtocol><fromPort>80</fromPort><toPort>80</toPort>
          <groups><item><groupId>sg-2</groupId><userId>123456789012</userId></item></groups>
          <ipRanges>
            <item><cidrIp>192.0.2.0/24</cidrIp><description>own &lt;1&gt;</description></item>
            <item><cidrIp>198.51.100.0/24</cidrIp></item>
          </ipRanges>
          <ipv6Ranges><item><cidrIpv6>::/0</cidrIpv6></item></ipv6Ranges>
          <prefixListIds><item><prefixListId>pl-1</prefixListId></item></prefixListIds>
        </item>
        <item><ipProtocol>-1</ipProtocol><groups/><ipRanges/><prefixListIds/></item>
      </ipPermissions>
      <ipPermissionsEgress><item><ipProtocol>-1</ipProtocol></item></ipPermissionsEgress>
      <tagSet><item><key>Name</key><value>web</value></item><item><key>empty</key><value/></item></tagSet>
    </item>
  </securityGroupInfo>
  <nextToken>more</nextToken>
</DescribeSecurityGroupsResponse>"#;
const LAST_GROUPS: &str = "<DescribeSecurityGroupsResponse><securityGroupInfo><item><groupId>sg-3</groupId></item></securityGroupInfo><nextToken/></DescribeSecurityGroupsResponse>";

#[tokio::test]
async fn all_pages_of_a_list_are_read() {
    let (client, wire) = client([(200, GROUPS), (200, LAST_GROUPS)]);
    let filters = [
        Filter::new("vpc-id", "vpc-1"),
        Filter { name: "tag:Name".to_owned(), values: vec!["web".to_owned(), "api".to_owned()] },
    ];
    let found = client.describe_security_groups(&filters).await.unwrap();
    let web = SecurityGroup {
        group_id: "sg-1".to_owned(),
        group_name: "web".to_owned(),
        vpc_id: "vpc-1".to_owned(),
        tags: vec![tag("Name", "web"), tag("empty", "")],
        ip_permissions: vec![
            IpPermission {
                ip_protocol: "tcp".to_owned(),
                from_port: Some(80),
                to_port: Some(80),
                ip_ranges: vec![
                    IpRange { cidr_ip: "192.0.2.0/24".to_owned(), description: Some("own <1>".to_owned()) },
                    IpRange { cidr_ip: "198.51.100.0/24".to_owned(), description: None },
                ],
                ipv6_ranges: vec![Ipv6Range { cidr_ipv6: "::/0".to_owned(), description: None }],
                prefix_list_ids: vec![PrefixListId { prefix_list_id: "pl-1".to_owned(), description: None }],
            },
            IpPermission { ip_protocol: "-1".to_owned(), ..IpPermission::default() },
        ],
    };
    let last = SecurityGroup { group_id: "sg-3".to_owned(), ..SecurityGroup::default() };
    assert_eq!(found, [web, last]);
    let mut asked = pairs(&[
        ("Action", "DescribeSecurityGroups"),
        ("Filter.1.Name", "vpc-id"),
        ("Filter.1.Value.1", "vpc-1"),
        ("Filter.2.Name", "tag:Name"),
        ("Filter.2.Value.1", "web"),
        ("Filter.2.Value.2", "api"),
        ("MaxResults", "1000"),
    ]);
    let first = asked.clone();
    asked.extend(pairs(&[("NextToken", "more")]));
    assert_eq!(wire.sent(), [first, asked]);
}

#[tokio::test]
async fn subnets_and_instances_are_read() {
    let subnets = "<DescribeSubnetsResponse><subnetSet>\
        <item><subnetId>subnet-1</subnetId><availabilityZone>eu-central-1a</availabilityZone>\
        <availableIpAddressCount>251</availableIpAddressCount>\
        <ipv6CidrBlockAssociationSet><item><associationId>a</associationId><ipv6CidrBlock>2001:db8::/64</ipv6CidrBlock>\
        <ipv6CidrBlockState><state>associated</state></ipv6CidrBlockState></item></ipv6CidrBlockAssociationSet>\
        <tagSet><item><key>kubernetes.io/role/elb</key><value>1</value></item></tagSet></item>\
        <item><subnetId>subnet-2</subnetId><outpostArn>arn</outpostArn><ipv6CidrBlockAssociationSet/></item>\
        </subnetSet></DescribeSubnetsResponse>";
    let instances = "<DescribeInstancesResponse><reservationSet>\
        <item><instancesSet><item><instanceId>i-1</instanceId><privateIpAddress>10.0.0.1</privateIpAddress></item></instancesSet></item>\
        <item><instancesSet><item><instanceId>i-2</instanceId></item></instancesSet></item>\
        </reservationSet></DescribeInstancesResponse>";
    let (client, wire) = client([(200, subnets), (200, instances)]);
    let found = client.describe_subnets(&[]).await.unwrap();
    let first = Subnet {
        subnet_id: "subnet-1".to_owned(),
        availability_zone: "eu-central-1a".to_owned(),
        available_ip_address_count: 251,
        outpost_arn: None,
        ipv6_ranges: vec![Ipv6Association {
            ipv6_cidr_block: "2001:db8::/64".to_owned(),
            ipv6_cidr_block_state: AssociationState { state: "associated".to_owned() },
        }],
        tags: vec![tag("kubernetes.io/role/elb", "1")],
    };
    assert_eq!(found[0], first);
    assert!(found[0].ipv6_ranges[0].is_associated() && found[1].ipv6_ranges.is_empty());
    assert_eq!((found[1].outpost_arn.as_deref(), found.len()), (Some("arn"), 2));
    let found = client.describe_instances(&["i-1".to_owned(), "i-2".to_owned()]).await.unwrap();
    let found: Vec<_> =
        found.iter().map(|one| (one.instance_id.as_str(), one.private_ip_address.as_deref())).collect();
    assert_eq!(found, [("i-1", Some("10.0.0.1")), ("i-2", None)]);
    let asked = pairs(&[("Action", "DescribeInstances"), ("InstanceId.1", "i-1"), ("InstanceId.2", "i-2")]);
    assert_eq!(wire.sent()[1], asked);
}

#[tokio::test]
async fn refusal_has_code_and_message() {
    let refused = "<?xml version=\"1.0\"?><Response><Errors><Error><Code>DependencyViolation</Code>\
        <Message>resource sg-1 has a dependent object</Message></Error></Errors><RequestID>1</RequestID></Response>";
    let (client, wire) = client([(400, refused), (503, "<html>a proxy"), (503, "")]);
    let error = client.delete_security_group("sg-1").await.unwrap_err();
    assert_eq!(error.code(), Some("DependencyViolation"));
    assert_eq!(error.message(), Some("resource sg-1 has a dependent object"));
    for _ in 0..2 {
        let error = client.delete_security_group("sg-1").await.unwrap_err();
        assert_eq!((error.code(), error.message()), (None, None));
    }
    assert_eq!(wire.sent().len(), 3, "no request was repeated");
}

#[tokio::test]
async fn unreadable_answer_is_an_error_without_a_code() {
    let (client, _) = client([(200, "<html>a proxy"), (200, "")]);
    for _ in 0..2 {
        let error = client.describe_subnets(&[]).await.unwrap_err();
        assert!(matches!(error, Error::Unreadable(_)), "{error:?}");
        assert_eq!(error.code(), None);
    }
}

#[tokio::test(start_paused = true)]
async fn silence_ends_with_the_timeout() {
    let (client, _) = client([]);
    let error = client.delete_security_group("sg-1").await.unwrap_err();
    let Error::Failed(failed) = error else { panic!("{error:?}") };
    assert!(matches!(*failed, SdkError::TimeoutError(_)), "{failed:?}");
}

/// In a process of its own, whose environment names a proxy.
const PROXIED: &str = "STEERAGE_TEST_PROXIED";

#[tokio::test]
async fn proxy_of_the_environment_is_used() {
    if std::env::var_os(PROXIED).is_some() {
        let sdk = SdkConfig::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new("eu-central-1"))
            .credentials_provider(SharedCredentialsProvider::new(Credentials::new(
                "a", "b", None, None, "test",
            )))
            .build();
        let client = Client::new(&sdk, "https://ec2.test", &TimeoutConfig::disabled(), None);
        client.describe_subnets(&[]).await.unwrap_err();
        return;
    }
    let proxy = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "client::tests::proxy_of_the_environment_is_used"])
        .env(PROXIED, "1")
        .env("HTTPS_PROXY", format!("http://{}", proxy.local_addr().unwrap()))
        .env_remove("NO_PROXY")
        .env_remove("no_proxy")
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let (mut connection, _) = tokio::time::timeout(Duration::from_mins(1), proxy.accept())
        .await
        .expect("a request to the proxy")
        .unwrap();
    let mut asked = [0; 24];
    tokio::io::AsyncReadExt::read_exact(&mut connection, &mut asked).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&asked), "CONNECT ec2.test:443 HTT");
    drop((connection, proxy));
    assert!(child.wait().await.unwrap().success());
}
