// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"

	v1 "k8s.io/api/core/v1"
	cloudprovider "k8s.io/cloud-provider"
)

// memoryCloud answers every call at once, so what remains is the service controller's own work. It counts the calls that it has
// answered, and can leave those for one Service without an answer.
type memoryCloud struct {
	mu       sync.Mutex
	answered map[string]int
	hanging  string
}

func init() {
	cloudprovider.RegisterCloudProvider("memory", newMemoryCloud)
}

// newMemoryCloud serves its counters at the address that is all of its configuration.
func newMemoryCloud(config io.Reader) (cloudprovider.Interface, error) {
	if config == nil {
		return nil, errors.New("--cloud-config must name a file with an address")
	}
	address, err := io.ReadAll(config)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", string(address))
	if err != nil {
		return nil, err
	}
	cloud := &memoryCloud{answered: map[string]int{}}
	routes := http.NewServeMux()
	routes.HandleFunc("GET /metrics", cloud.serveMetrics)
	routes.HandleFunc("POST /hang/{service}", cloud.hang)
	go http.Serve(listener, routes)
	return cloud, nil
}

func (m *memoryCloud) serveMetrics(response http.ResponseWriter, _ *http.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for call, count := range m.answered {
		fmt.Fprintf(response, "provider_calls_total{call=%q} %d\n", call, count)
	}
}

func (m *memoryCloud) hang(_ http.ResponseWriter, request *http.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hanging = request.PathValue("service")
}

// answer counts a call, or waits until its context ends.
func (m *memoryCloud) answer(ctx context.Context, call string, service *v1.Service) error {
	m.mu.Lock()
	hangs := m.hanging == service.Name
	if !hangs {
		m.answered[call]++
	}
	m.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func (m *memoryCloud) GetLoadBalancerName(_ context.Context, _ string, service *v1.Service) string {
	return cloudprovider.DefaultLoadBalancerName(service)
}

func (m *memoryCloud) GetLoadBalancer(ctx context.Context, _ string, service *v1.Service) (*v1.LoadBalancerStatus, bool, error) {
	return status(service), true, m.answer(ctx, "GetLoadBalancer", service)
}

func (m *memoryCloud) EnsureLoadBalancer(ctx context.Context, _ string, service *v1.Service, _ []*v1.Node) (*v1.LoadBalancerStatus, error) {
	return status(service), m.answer(ctx, "EnsureLoadBalancer", service)
}

func (m *memoryCloud) UpdateLoadBalancer(ctx context.Context, _ string, service *v1.Service, _ []*v1.Node) error {
	return m.answer(ctx, "UpdateLoadBalancer", service)
}

func (m *memoryCloud) EnsureLoadBalancerDeleted(ctx context.Context, _ string, service *v1.Service) error {
	return m.answer(ctx, "EnsureLoadBalancerDeleted", service)
}

// status is the same at every call, so that a restart has nothing to write.
func status(service *v1.Service) *v1.LoadBalancerStatus {
	return &v1.LoadBalancerStatus{Ingress: []v1.LoadBalancerIngress{{Hostname: service.Name + ".example.com"}}}
}

func (m *memoryCloud) LoadBalancer() (cloudprovider.LoadBalancer, bool) { return m, true }

func (m *memoryCloud) Initialize(cloudprovider.ControllerClientBuilder, <-chan struct{}) {}

func (m *memoryCloud) ProviderName() string { return "memory" }

func (m *memoryCloud) HasClusterID() bool { return true }

func (m *memoryCloud) Instances() (cloudprovider.Instances, bool) { return nil, false }

func (m *memoryCloud) InstancesV2() (cloudprovider.InstancesV2, bool) { return nil, false }

func (m *memoryCloud) Zones() (cloudprovider.Zones, bool) { return nil, false }

func (m *memoryCloud) Clusters() (cloudprovider.Clusters, bool) { return nil, false }

func (m *memoryCloud) Routes() (cloudprovider.Routes, bool) { return nil, false }
