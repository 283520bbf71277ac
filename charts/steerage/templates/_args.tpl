{{- /* The command lines, one place to compare with each program's args.rs. */ -}}

{{- define "steerage.commonArgs" -}}
- --log-level={{ .root.Values.log.level }}
- --log-format={{ .root.Values.log.format }}
- --admin-address=[::]:{{ .port }}
{{- end }}

{{- define "steerage.controllerArgs" -}}
{{- $controller := .Values.controller -}}
{{ include "steerage.commonArgs" (dict "root" . "port" $controller.adminPort) }}
- --provider={{ $controller.provider }}
- --default-steering={{ $controller.defaultSteering }}
{{- if $controller.serveUnsetClass }}
- --serve-unset-class
{{- end }}
{{- with $controller.serveClasses }}
- --serve-classes={{ join "," . }}
{{- end }}
{{- if $controller.migrateLegacyAnnotations }}
- --migrate-legacy-annotations
{{- end }}
{{- if $controller.podReadinessGates }}
- --pod-readiness-gates
{{- end }}
{{- if $controller.drainCordonedNodes }}
- --drain-cordoned-nodes
{{- end }}
- --leader-elect-resource-name={{ include "steerage.fullname" . }}-controller
{{- if eq $controller.provider "aws" }}
- --aws-cluster-name={{ .Values.aws.clusterName }}
{{- with .Values.aws.vpcId }}
- --aws-vpc-id={{ . }}
{{- end }}
{{- with .Values.aws.subnets }}
- --aws-subnets={{ join "," . }}
{{- end }}
{{- with .Values.aws.backendSecurityGroup }}
- --aws-backend-security-group={{ . }}
{{- end }}
- --aws-scheme={{ .Values.aws.scheme }}
{{- if .Values.aws.sharedLoadBalancers }}
- --aws-shared-load-balancers=/etc/steerage/shared-load-balancers.json
{{- end }}
{{- with .Values.aws.adopt }}
- --aws-adopt={{ join "," . }}
{{- end }}
{{- with .Values.aws.region }}
- --aws-region={{ . }}
{{- end }}
{{- with .Values.aws.elbv2Endpoint }}
- --aws-elbv2-endpoint={{ . }}
{{- end }}
{{- with .Values.aws.ec2Endpoint }}
- --aws-ec2-endpoint={{ . }}
{{- end }}
{{- end }}
{{- if eq $controller.provider "azure" }}
- --azure-cluster-name={{ .Values.azure.clusterName }}
- --azure-subscription-id={{ .Values.azure.subscriptionId }}
- --azure-resource-group={{ .Values.azure.resourceGroup }}
- --azure-location={{ .Values.azure.location }}
- --azure-virtual-network={{ .Values.azure.virtualNetwork }}
{{- with .Values.azure.subnet }}
- --azure-subnet={{ . }}
{{- end }}
{{- with .Values.azure.networkSecurityGroup }}
- --azure-network-security-group={{ . }}
{{- end }}
{{- with .Values.azure.zones }}
- --azure-zones={{ join "," . }}
{{- end }}
{{- with .Values.azure.identityClientId }}
- --azure-identity-client-id={{ . }}
{{- end }}
{{- end }}
{{- if eq $controller.provider "gce" }}
- --gce-cluster-name={{ .Values.gce.clusterName }}
{{- with .Values.gce.project }}
- --gce-project={{ . }}
{{- end }}
{{- with .Values.gce.region }}
- --gce-region={{ . }}
{{- end }}
{{- with .Values.gce.network }}
- --gce-network={{ . }}
{{- end }}
{{- with .Values.gce.subnetwork }}
- --gce-subnetwork={{ . }}
{{- end }}
{{- with .Values.gce.nodeTags }}
- --gce-node-tags={{ join "," . }}
{{- end }}
{{- with .Values.gce.zones }}
- --gce-zones={{ join "," . }}
{{- end }}
{{- end }}
{{- if eq $controller.provider "openstack" }}
- --openstack-cluster-name={{ .Values.openstack.clusterName }}
- --openstack-cloud={{ .Values.openstack.cloud }}
- --openstack-subnet-id={{ .Values.openstack.subnetId }}
{{- with .Values.openstack.memberSubnetId }}
- --openstack-member-subnet-id={{ . }}
{{- end }}
{{- with .Values.openstack.ipv6SubnetId }}
- --openstack-ipv6-subnet-id={{ . }}
{{- end }}
{{- with .Values.openstack.ipv6MemberSubnetId }}
- --openstack-ipv6-member-subnet-id={{ . }}
{{- end }}
{{- with .Values.openstack.nodeSecurityGroupId }}
- --openstack-node-security-group-id={{ . }}
- --openstack-node-ports={{ $.Values.openstack.nodePorts }}
{{- end }}
{{- if .Values.openstack.sharedLoadBalancers }}
- --openstack-shared-load-balancers=/etc/steerage/shared-load-balancers.json
{{- end }}
{{- with .Values.openstack.adopt }}
- --openstack-adopt={{ . }}
{{- end }}
{{- with .Values.openstack.floatingNetworkId }}
- --openstack-floating-network-id={{ . }}
{{- end }}
- --openstack-provider={{ .Values.openstack.provider }}
{{- end }}
{{- with $controller.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "steerage.edgeArgs" -}}
{{- $edge := .Values.edge.onNodes -}}
{{ include "steerage.commonArgs" (dict "root" . "port" $edge.adminPort) }}
- --namespace={{ .Release.Namespace }}
- --peers-port={{ $edge.peersPort }}
- --peers-key-secret={{ include "steerage.fullname" . }}-edge-peers
- --hand-over-wait=30s
- --shutdown-grace-period=40s
{{- with $edge.interface }}
- --interface={{ . }}
{{- end }}
{{- with .Values.edge.tunnel }}
{{- if and .vni .send }}
- --tunnel-vni={{ int .vni }}
- --tunnel-port={{ int .port }}
- --tunnel-mtu={{ int .mtu }}
{{- end }}
{{- end }}
{{- with $edge.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "steerage.agentArgs" -}}
{{- $agent := .Values.agent -}}
{{ include "steerage.commonArgs" (dict "root" . "port" $agent.adminPort) }}
{{- if $agent.kubeProxyReplacement }}
- --kube-proxy-replacement
{{- end }}
{{- if $agent.denyServiceExternalIPs }}
- --deny-service-external-ips
{{- end }}
{{- if $agent.masqueradeAll }}
- --masquerade-all
{{- end }}
{{- with $agent.metricsBindAddress }}
- --metrics-bind-address={{ . }}
{{- end }}
{{- if $agent.kubeProxyConfigMap }}
- --config=/etc/steerage/kube-proxy/config.conf
{{- end }}
{{- if $agent.forwardWithoutLocalEndpoints }}
- --forward-without-local-endpoints
{{- with $agent.forwardTunnelDevices }}
- --forward-tunnel-devices={{ join "," . }}
{{- end }}
{{- end }}
{{- with $agent.apiServer }}
- --api-server={{ . }}
{{- end }}
{{- if and .Values.edge.tunnel.vni (eq .Values.controller.provider "edge") }}
- --edge-tunnel-vni={{ int .Values.edge.tunnel.vni }}
- --edge-tunnel-port={{ int .Values.edge.tunnel.port }}
- --edge-tunnel-sources={{ join "," .Values.edge.tunnel.sources }}
{{- range .Values.edge.addressPools }}
- --edge-tunnel-vips={{ join "," .addresses }}
{{- end }}
{{- end }}
{{- if and $agent.dropUnassignedVips (eq .Values.controller.provider "edge") }}
{{- range .Values.edge.addressPools }}
{{- range .addresses }}
- --drop-unassigned-vips={{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- with $agent.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}
