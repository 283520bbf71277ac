// SPDX-License-Identifier: Apache-2.0

// Command validate-clouds runs the Go clients that Kubernetes' own controllers use against the stand-in of a cloud: validate-clouds azure|gce URL.
package main

import (
	"context"
	"fmt"
	"os"
)

func main() {
	validators := map[string]func(context.Context, string) error{"azure": validateAzure, "gce": validateGCE}
	if len(os.Args) != 3 || validators[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: validate-clouds azure|gce URL")
		os.Exit(2)
	}
	if err := validators[os.Args[1]](context.Background(), os.Args[2]); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}
