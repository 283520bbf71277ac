// SPDX-License-Identifier: Apache-2.0

// Command aws-cloud-controller-manager is the AWS cloud provider of kubernetes/cloud-provider-aws, as its releases compose it, but
// without the tagging controller, which is off by default.
package main

import (
	"os"

	"k8s.io/apimachinery/pkg/util/wait"
	cloudprovider "k8s.io/cloud-provider"
	aws "k8s.io/cloud-provider-aws/pkg/providers/v1"
	"k8s.io/cloud-provider/app"
	"k8s.io/cloud-provider/app/config"
	"k8s.io/cloud-provider/names"
	"k8s.io/cloud-provider/options"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/cli/flag"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/klog/v2"
)

func main() {
	settings, err := options.NewCloudControllerManagerOptions()
	if err != nil {
		klog.Fatalf("cannot set default options: %v", err)
	}
	command := app.NewCloudControllerManagerCommand(
		settings, provider, app.DefaultInitFuncConstructors, names.CCMControllerAliases(), flag.NamedFlagSets{}, wait.NeverStop)
	os.Exit(cli.Run(command))
}

// provider connects to AWS as --cloud-config says. The configuration names the cluster, so no AWS resource has to.
func provider(completed *config.CompletedConfig) cloudprovider.Interface {
	cloud, err := cloudprovider.InitCloudProvider(aws.ProviderName, completed.ComponentConfig.KubeCloudShared.CloudProvider.CloudConfigFile)
	if err != nil || cloud == nil {
		klog.Fatalf("no AWS provider: %v", err)
	}
	if !cloud.HasClusterID() {
		klog.Fatal("the configuration has no KubernetesClusterID")
	}
	return cloud
}
