//go:build !race

package main

// duplicates is how many calls of one key arrive at once.
const duplicates = 1000
