# SPDX-License-Identifier: Apache-2.0
"""A stand-in of Azure Resource Manager with Microsoft.Network, for tests of the Azure provider. Fields, types and enumerations come from
the types of azure-mgmt-network; what resources do is written here. docs/decisions/0042 says what is faithful, and by what evidence. Not
called `azure`, which is the package of Microsoft's clients."""
