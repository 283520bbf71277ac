// SPDX-License-Identifier: Apache-2.0
//! Changes that Octavia's API takes and its worker fails.

use super::*;

#[tokio::test]
async fn change_that_the_worker_fails_is_repeated_and_told() {
    requires!(OpenStack);
    let cloud = Cloud::shared("failing").await.unwrap();
    let provider = cloud.fresh().await.unwrap();
    let lb = annotated(web(&cloud, "failing"), INTERNAL, "true");
    converge_remembered(&provider, &lb).await.unwrap();
    let balancer = cloud.balancer(&lb.owner).unwrap();
    let path = format!("loadbalancers/{}", id(&balancer));
    let describe = |text: &str| {
        let body = json!({ "loadbalancer": { "description": text } });
        cloud.change(id(&balancer), "PUT", &path, Some(&body)).unwrap();
    };
    let pool = cloud.listener(id(&balancer), 80).unwrap()["default_pool_id"].as_str().unwrap().to_owned();
    let members = || {
        let found = cloud.octavia(&format!("pools/{pool}/members")).unwrap()["members"].clone();
        let of = |key: &str| -> Vec<String> {
            found.as_array().unwrap().iter().map(|member| member[key].to_string()).collect()
        };
        (of("name").len(), of("provisioning_status").iter().any(|status| status.contains("ERROR")))
    };
    describe("test:fail");
    let moved = fixture::with_targets(&cloud, &lb, &[2]);
    let error = cloud::applied(&provider, &moved).await;
    assert!(error.to_string().contains("members of pool"), "{error}");
    assert_eq!(cloud.balancer(&lb.owner).unwrap()["provisioning_status"], "ACTIVE");
    assert_eq!(members(), (3, true));
    describe("");
    converge_remembered(&provider, &moved).await.unwrap();
    assert_eq!(members(), (1, false));
}
