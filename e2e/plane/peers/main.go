// SPDX-License-Identifier: Apache-2.0

// Command aws-cloud-controller-manager is the AWS cloud provider of kubernetes/cloud-provider-aws, as its releases compose it, but
// without the tagging controller, which is off by default. With --cloud-provider=memory the same controllers have a provider that
// answers at once.
package main

import (
	"os"

	"k8s.io/apimachinery/pkg/util/wait"
	cloudprovider "k8s.io/cloud-provider"
	_ "k8s.io/cloud-provider-aws/pkg/providers/v1"
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

// provider starts that of --cloud-provider as --cloud-config says. For AWS the configuration names the cluster, so no resource has to.
func provider(completed *config.CompletedConfig) cloudprovider.Interface {
	wanted := completed.ComponentConfig.KubeCloudShared.CloudProvider
	cloud, err := cloudprovider.InitCloudProvider(wanted.Name, wanted.CloudConfigFile)
	if err != nil || cloud == nil {
		klog.Fatalf("no provider %q: %v", wanted.Name, err)
	}
	if !cloud.HasClusterID() {
		klog.Fatal("the configuration has no KubernetesClusterID")
	}
	return cloud
}
