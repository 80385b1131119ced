package main

import (
	"fmt"
	"os"
	"runtime"
	"strings"
)

// describeMachine says in one line where the figures come from.
func describeMachine() string {
	return fmt.Sprintf("%s %s/%s, GOMAXPROCS %d, %s", runtime.Version(), runtime.GOOS, runtime.GOARCH,
		runtime.GOMAXPROCS(0), cpuModel())
}

// cpuModel reads the processor's name where Linux tells it.
func cpuModel() string {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown processor"
	}
	for line := range strings.Lines(string(info)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown processor"
}
