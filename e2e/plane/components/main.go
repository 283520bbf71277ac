// SPDX-License-Identifier: Apache-2.0

// Command plane is Kubernetes' processes in one binary, each under its own name: a link called kubelet is the kubelet.
// One binary links their common code once, which saves four fifths of the build and of the disk.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// kubectlName is not among the servers: its errors are for a person, not for a log.
const kubectlName = "kubectl"

var servers = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	name := filepath.Base(os.Args[0])
	if name == kubectlName {
		util.CheckErr(cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()))
		return
	}
	command, known := servers[name]
	if !known {
		fmt.Fprintf(os.Stderr, "%s: call me by a link of the name of one of: %s\n", name, strings.Join(names(), " "))
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}

// names lists, sorted, what the binary can be called; hack/prepare makes those links.
func names() []string {
	all := []string{kubectlName}
	for name := range servers {
		all = append(all, name)
	}
	slices.Sort(all)
	return all
}
