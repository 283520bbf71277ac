// SPDX-License-Identifier: Apache-2.0
//! The server is real, obeys RBAC, can be cut off, and leaves nothing behind.

#![allow(clippy::expect_used, reason = "a test")]

use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, ListParams, ObjectMeta, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use steerage_requirements::requires;
use steerage_testserver::Server;

#[tokio::test]
async fn server_keeps_data_across_a_stop_and_ends_with_its_owner() {
    requires!(KubeApiserver);
    let server = Server::start().expect("server");
    let folder = server.kubeconfig().parent().expect("folder").to_owned();
    let namespaces: Api<Namespace> = Api::all(server.client().await.expect("client"));
    let namespace = Namespace {
        metadata: ObjectMeta { name: Some("kept".into()), ..ObjectMeta::default() },
        ..Namespace::default()
    };
    namespaces.create(&PostParams::default(), &namespace).await.expect("create");
    server.cut().expect("cut");
    namespaces.get("kept").await.expect_err("nobody answers");
    server.heal().expect("heal");
    namespaces.get("kept").await.expect("what was stored is still there");
    drop(server);
    assert!(!folder.exists());
    namespaces.get("kept").await.expect_err("nobody answers");
}

#[tokio::test]
async fn a_user_has_the_rights_of_its_groups_and_no_others() {
    requires!(KubeApiserver);
    let server = Server::shared();
    let list = async |user: &str, groups: &[&str]| {
        let path = server.kubeconfig_for(user, groups).expect("kubeconfig");
        let kubeconfig = Kubeconfig::read_from(path).expect("kubeconfig");
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
        let client = Client::try_from(config.expect("config")).expect("client");
        Api::<Namespace>::all(client).list(&ListParams::default()).await
    };
    let error = list("nobody", &[]).await.expect_err("without rights");
    assert!(matches!(&error, kube::Error::Api(status) if status.code == 403), "{error}");
    list("somebody", &["system:masters"]).await.expect("with rights");
}
