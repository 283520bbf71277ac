# SPDX-License-Identifier: Apache-2.0
"""A stand-in of the Compute Engine API, for tests of the GCE provider. Routes, parameters, fields and types come from Google's discovery
document; what resources do is written here. docs/decisions/0042 says what is faithful, and by what evidence."""
