//go:build race

package main

// duplicates is how many calls of one key arrive at once. Under the race
// detector a thousand do not fit into their deadline on two cores.
const duplicates = 250
