package main

import "slices"

// races is everything that is measured, in the order of the report.
func races() []race {
	return slices.Concat(
		clientRaces(),
		budgetRaces(),
		breakerRaces(),
		rpcRaces(),
		dedupeRaces(),
		streamRaces(),
	)
}

// whats are the values of what=, in order.
func whats() []string {
	var out []string
	for _, r := range races() {
		if !slices.Contains(out, r.what) {
			out = append(out, r.what)
		}
	}
	return out
}
