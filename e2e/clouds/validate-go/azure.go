// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/arm"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/cloud"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/runtime"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v9"
)

const (
	subscription = "00000000-0000-0000-0000-000000000001"
	group        = "cluster"
	location     = "westeurope"
	networkBase  = "/subscriptions/" + subscription + "/resourceGroups/" + group + "/providers/Microsoft.Network/"
)

// metadata gets tokens from the stand-in's metadata service.
type metadata struct {
	url string
}

func (m metadata) GetToken(ctx context.Context, _ policy.TokenRequestOptions) (azcore.AccessToken, error) {
	url := m.url + "/metadata/identity/oauth2/token?api-version=2018-02-01&resource=https://management.azure.com/"
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return azcore.AccessToken{}, err
	}
	request.Header.Set("Metadata", "true")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return azcore.AccessToken{}, err
	}
	defer response.Body.Close()
	var answer struct {
		Token string `json:"access_token"`
	}
	err = json.NewDecoder(response.Body).Decode(&answer)
	return azcore.AccessToken{Token: answer.Token, ExpiresOn: time.Now().Add(time.Hour)}, err
}

// code says whether the API refused with this status and code.
func code(err error, status int, code string) error {
	var answer *azcore.ResponseError
	if !errors.As(err, &answer) || answer.StatusCode != status || answer.ErrorCode != code {
		return fmt.Errorf("wanted %d %s, got %w", status, code, err)
	}
	return nil
}

// poll waits for an operation that a call has started.
func poll[T any](ctx context.Context, poller *runtime.Poller[T], err error) (T, error) {
	for err == nil && !poller.Done() {
		time.Sleep(10 * time.Millisecond)
		_, err = poller.Poll(ctx)
	}
	if err != nil {
		var none T
		return none, err
	}
	return poller.Result(ctx)
}

// balancer is a load balancer with one rule.
func balancer(port int32) armnetwork.LoadBalancer {
	part := func(path string) *armnetwork.SubResource {
		return &armnetwork.SubResource{ID: to.Ptr(networkBase + "loadBalancers/go/" + path)}
	}
	address := &armnetwork.PublicIPAddress{ID: to.Ptr(networkBase + "publicIPAddresses/go")}
	return armnetwork.LoadBalancer{
		Location: to.Ptr(location),
		SKU:      &armnetwork.LoadBalancerSKU{Name: to.Ptr(armnetwork.LoadBalancerSKUNameStandard)},
		Properties: &armnetwork.LoadBalancerPropertiesFormat{
			FrontendIPConfigurations: []*armnetwork.FrontendIPConfiguration{{
				Name: to.Ptr("front"), Properties: &armnetwork.FrontendIPConfigurationPropertiesFormat{PublicIPAddress: address},
			}},
			BackendAddressPools: []*armnetwork.BackendAddressPool{{Name: to.Ptr("nodes")}},
			Probes: []*armnetwork.Probe{{Name: to.Ptr("healthz"), Properties: &armnetwork.ProbePropertiesFormat{
				Protocol: to.Ptr(armnetwork.ProbeProtocolHTTP), Port: to.Ptr[int32](10256), RequestPath: to.Ptr("/healthz"), IntervalInSeconds: to.Ptr[int32](5),
			}}},
			LoadBalancingRules: []*armnetwork.LoadBalancingRule{{Name: to.Ptr("rule"), Properties: &armnetwork.LoadBalancingRulePropertiesFormat{
				Protocol: to.Ptr(armnetwork.TransportProtocolTCP), FrontendPort: to.Ptr(port), BackendPort: to.Ptr(port), EnableFloatingIP: to.Ptr(true),
				FrontendIPConfiguration: part("frontendIPConfigurations/front"), BackendAddressPool: part("backendAddressPools/nodes"), Probe: part("probes/healthz"),
			}}},
		},
	}
}

// validateAzure creates, reads, changes and deletes what one Service needs, in the order that the API allows.
func validateAzure(ctx context.Context, url string) error {
	manager := cloud.ServiceConfiguration{Endpoint: url, Audience: "https://management.azure.com/"}
	configuration := cloud.Configuration{Services: map[cloud.ServiceName]cloud.ServiceConfiguration{cloud.ResourceManager: manager}}
	options := &arm.ClientOptions{ClientOptions: policy.ClientOptions{
		Cloud: configuration, Retry: policy.RetryOptions{MaxRetries: -1}, InsecureAllowCredentialWithHTTP: true,
	}}
	clients, err := armnetwork.NewClientFactory(subscription, metadata{url}, options)
	if err != nil {
		return err
	}
	balancers, addresses, pools := clients.NewLoadBalancersClient(), clients.NewPublicIPAddressesClient(), clients.NewLoadBalancerBackendAddressPoolsClient()
	put := func(ctx context.Context, port int32) (armnetwork.LoadBalancersClientCreateOrUpdateResponse, error) {
		poller, err := balancers.BeginCreateOrUpdate(ctx, group, "go", balancer(port), nil)
		return poll(ctx, poller, err)
	}
	matching := func(etag string) context.Context {
		return policy.WithHTTPHeader(ctx, http.Header{"If-Match": []string{etag}})
	}
	var first armnetwork.LoadBalancersClientCreateOrUpdateResponse
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"put the address", func() error {
			address := armnetwork.PublicIPAddress{
				Location: to.Ptr(location), SKU: &armnetwork.PublicIPAddressSKU{Name: to.Ptr(armnetwork.PublicIPAddressSKUNameStandard)},
				Properties: &armnetwork.PublicIPAddressPropertiesFormat{PublicIPAllocationMethod: to.Ptr(armnetwork.IPAllocationMethodStatic)},
			}
			poller, err := addresses.BeginCreateOrUpdate(ctx, group, "go", address, nil)
			made, err := poll(ctx, poller, err)
			if err == nil && made.Properties.IPAddress == nil {
				return errors.New("no address")
			}
			return err
		}},
		{"put the load balancer", func() (err error) {
			first, err = put(ctx, 80)
			return err
		}},
		{"put it with its etag", func() error {
			_, err := put(matching(*first.Etag), 81)
			return err
		}},
		{"put it with an old etag", func() error {
			_, err := put(matching(*first.Etag), 82)
			return code(err, http.StatusPreconditionFailed, "PreconditionFailed")
		}},
		{"put the pool", func() error {
			pool := armnetwork.BackendAddressPool{Properties: &armnetwork.BackendAddressPoolPropertiesFormat{
				VirtualNetwork: &armnetwork.SubResource{ID: to.Ptr(networkBase + "virtualNetworks/cluster")},
				LoadBalancerBackendAddresses: []*armnetwork.LoadBalancerBackendAddress{{
					Name: to.Ptr("node"), Properties: &armnetwork.LoadBalancerBackendAddressPropertiesFormat{IPAddress: to.Ptr("10.240.0.4")},
				}},
			}}
			poller, err := pools.BeginCreateOrUpdate(ctx, group, "go", "nodes", pool, nil)
			_, err = poll(ctx, poller, err)
			return err
		}},
		{"read the whole", func() error {
			read, err := balancers.Get(ctx, group, "go", nil)
			if err != nil {
				return err
			}
			pool := read.Properties.BackendAddressPools[0].Properties
			if *read.Properties.LoadBalancingRules[0].Properties.FrontendPort != 81 || len(pool.LoadBalancerBackendAddresses) != 1 || len(pool.LoadBalancingRules) != 1 {
				return fmt.Errorf("read %v", read)
			}
			return nil
		}},
		{"delete what is in use", func() error {
			_, err := addresses.BeginDelete(ctx, group, "go", nil)
			return code(err, http.StatusBadRequest, "PublicIPAddressCannotBeDeleted")
		}},
		{"delete the load balancer", func() error {
			poller, err := balancers.BeginDelete(ctx, group, "go", nil)
			_, err = poll(ctx, poller, err)
			return err
		}},
		{"delete the address", func() error {
			poller, err := addresses.BeginDelete(ctx, group, "go", nil)
			_, err = poll(ctx, poller, err)
			return err
		}},
		{"read what is gone", func() error {
			_, err := balancers.Get(ctx, group, "go", nil)
			return code(err, http.StatusNotFound, "ResourceNotFound")
		}},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}
