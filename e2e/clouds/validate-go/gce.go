// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"google.golang.org/api/compute/v1"
	"google.golang.org/api/googleapi"
	"google.golang.org/api/option"
)

const (
	project = "test-project"
	region  = "us-central1"
	zone    = "us-central1-a"
	prefix  = "https://www.googleapis.com/compute/v1/projects/" + project + "/"
)

// gce is the client and where it polls.
type gce struct {
	*compute.Service
}

// finish waits for an operation that a call has started.
func (g gce) finish(operation *compute.Operation, err error) error {
	for err == nil && operation.Status != "DONE" {
		time.Sleep(5 * time.Millisecond)
		switch {
		case operation.Zone != "":
			operation, err = g.ZoneOperations.Wait(project, zone, operation.Name).Do()
		case operation.Region != "":
			operation, err = g.RegionOperations.Get(project, region, operation.Name).Do()
		default:
			operation, err = g.GlobalOperations.Get(project, operation.Name).Do()
		}
	}
	if err == nil && operation.Error != nil {
		return fmt.Errorf("operation %s: %s", operation.OperationType, operation.Error.Errors[0].Code)
	}
	return err
}

// refused says whether the API refused with this status and reason.
func refused(err error, status int, reason string) error {
	var answer *googleapi.Error
	if !errors.As(err, &answer) || answer.Code != status || len(answer.Errors) == 0 || answer.Errors[0].Reason != reason {
		return fmt.Errorf("wanted %d %s, got %v", status, reason, err)
	}
	return nil
}

// validateGCE creates, reads, changes and deletes what one Service needs, in the order that the API allows.
func validateGCE(ctx context.Context, url string) error {
	service, err := compute.NewService(ctx, option.WithEndpoint(url+"/compute/v1/"), option.WithHTTPClient(http.DefaultClient))
	if err != nil {
		return err
	}
	g := gce{service}
	check := &compute.HealthCheck{
		Name: "go", Type: "HTTP", CheckIntervalSec: 8, TimeoutSec: 1,
		HttpHealthCheck: &compute.HTTPHealthCheck{Port: 10256, RequestPath: "/healthz"},
	}
	group := &compute.NetworkEndpointGroup{
		Name: "go", NetworkEndpointType: "GCE_VM_IP", Network: prefix + "global/networks/default",
		Subnetwork: prefix + "regions/" + region + "/subnetworks/default",
	}
	backends := &compute.BackendService{
		Name: "go", Protocol: "TCP", LoadBalancingScheme: "EXTERNAL", HealthChecks: []string{prefix + "regions/" + region + "/healthChecks/go"},
		Backends: []*compute.Backend{{Group: prefix + "zones/" + zone + "/networkEndpointGroups/go", BalancingMode: "CONNECTION"}},
	}
	rule := &compute.ForwardingRule{
		Name: "go", LoadBalancingScheme: "EXTERNAL", IPProtocol: "TCP", Ports: []string{"80"},
		BackendService: prefix + "regions/" + region + "/backendServices/go",
	}
	firewall := &compute.Firewall{
		Name: "go", Network: group.Network, SourceRanges: []string{"0.0.0.0/0"}, TargetTags: []string{"node"}, Direction: "INGRESS",
		Allowed: []*compute.FirewallAllowed{{IPProtocol: "tcp", Ports: []string{"80"}}},
	}
	node := []*compute.NetworkEndpoint{{Instance: "go-node"}}
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"insert the health check", func() error { return g.finish(g.RegionHealthChecks.Insert(project, region, check).Do()) }},
		{"insert it again", func() error {
			_, err := g.RegionHealthChecks.Insert(project, region, check).Do()
			return refused(err, http.StatusConflict, "alreadyExists")
		}},
		{"insert the group", func() error { return g.finish(g.NetworkEndpointGroups.Insert(project, zone, group).Do()) }},
		{"attach the node", func() error {
			request := &compute.NetworkEndpointGroupsAttachEndpointsRequest{NetworkEndpoints: node}
			return g.finish(g.NetworkEndpointGroups.AttachNetworkEndpoints(project, zone, "go", request).Do())
		}},
		{"insert the backend service", func() error { return g.finish(g.RegionBackendServices.Insert(project, region, backends).Do()) }},
		{"insert the rule", func() error { return g.finish(g.ForwardingRules.Insert(project, region, rule).Do()) }},
		{"insert the firewall", func() error { return g.finish(g.Firewalls.Insert(project, firewall).Do()) }},
		{"read the node's health", func() error { return g.healthy(ctx, backends.Backends[0].Group) }},
		{"update with an old fingerprint", g.updateTwice},
		{"delete what is in use", func() error {
			_, err := g.RegionBackendServices.Delete(project, region, "go").Do()
			return refused(err, http.StatusBadRequest, "resourceInUseByAnotherResource")
		}},
		{"delete the rule", func() error { return g.finish(g.ForwardingRules.Delete(project, region, "go").Do()) }},
		{"delete the backend service", func() error { return g.finish(g.RegionBackendServices.Delete(project, region, "go").Do()) }},
		{"delete the group", func() error { return g.finish(g.NetworkEndpointGroups.Delete(project, zone, "go").Do()) }},
		{"delete the health check", func() error { return g.finish(g.RegionHealthChecks.Delete(project, region, "go").Do()) }},
		{"delete the firewall", func() error { return g.finish(g.Firewalls.Delete(project, "go").Do()) }},
		{"read what is gone", func() error {
			_, err := g.RegionHealthChecks.Get(project, region, "go").Do()
			return refused(err, http.StatusNotFound, "notFound")
		}},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

// healthy reads the endpoints and their health.
func (g gce) healthy(ctx context.Context, group string) error {
	var names []string
	request := &compute.NetworkEndpointGroupsListEndpointsRequest{HealthStatus: "SHOW"}
	err := g.NetworkEndpointGroups.ListNetworkEndpoints(project, zone, "go", request).Pages(ctx, func(page *compute.NetworkEndpointGroupsListNetworkEndpoints) error {
		for _, item := range page.Items {
			names = append(names, item.NetworkEndpoint.Instance+" "+item.NetworkEndpoint.IpAddress)
		}
		return nil
	})
	if err != nil || !slices.Equal(names, []string{"go-node 10.128.0.2"}) {
		return fmt.Errorf("endpoints %v, %w", names, err)
	}
	health, err := g.RegionBackendServices.GetHealth(project, region, "go", &compute.ResourceGroupReference{Group: group}).Do()
	if err != nil {
		return err
	}
	if len(health.HealthStatus) != 1 || health.HealthStatus[0].HealthState != "HEALTHY" {
		return fmt.Errorf("health %v", health.HealthStatus)
	}
	return nil
}

// updateTwice updates the backend service twice with what it read once.
func (g gce) updateTwice() error {
	read, err := g.RegionBackendServices.Get(project, region, "go").Do()
	if err != nil {
		return err
	}
	read.SessionAffinity = "CLIENT_IP"
	if err := g.finish(g.RegionBackendServices.Update(project, region, "go", read).Do()); err != nil {
		return err
	}
	_, err = g.RegionBackendServices.Update(project, region, "go", read).Do()
	return refused(err, http.StatusPreconditionFailed, "conditionNotMet")
}
