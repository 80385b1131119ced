package idempotency_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/belayrpc/belay/idempotency"
)

// Every wrong setting is one error that names the field, its value and the rule.
func TestConfigErrors(t *testing.T) {
	for _, row := range []struct {
		want   []string
		change func(*idempotency.Config)
	}{
		{[]string{"Scope", "nil", "SingleTenant"}, func(c *idempotency.Config) { c.Scope = nil }},
		{[]string{"Retention", "-1s", "negative"}, func(c *idempotency.Config) { c.Retention = -time.Second }},
		{[]string{"MaxExecution", "-1s", "negative"}, func(c *idempotency.Config) { c.MaxExecution = -time.Second }},
		{[]string{"Lease", "-1s", "negative"}, func(c *idempotency.Config) { c.Lease = -time.Second }},
		{[]string{"RenewEvery", "-1s", "negative"}, func(c *idempotency.Config) { c.RenewEvery = -time.Second }},
		{[]string{"FinishReserve", "-1s", "negative"}, func(c *idempotency.Config) { c.FinishReserve = -time.Second }},
		{[]string{"StoreTimeout", "-1s", "negative"}, func(c *idempotency.Config) { c.StoreTimeout = -time.Second }},
		{[]string{"WaitMax", "-1s", "negative"}, func(c *idempotency.Config) { c.WaitMax = -time.Second }},
		{[]string{"Skew", "-1s", "negative"}, func(c *idempotency.Config) { c.Skew = -time.Second }},
		{[]string{"UnknownRetryAfter", "-1s", "negative"}, func(c *idempotency.Config) { c.UnknownRetryAfter = -time.Second }},
		{[]string{"WaitersPerKey", "-1", "negative"}, func(c *idempotency.Config) { c.WaitersPerKey = -1 }},
		{[]string{"Waiters", "-1", "negative"}, func(c *idempotency.Config) { c.Waiters = -1 }},
		{[]string{"MaxReply", "-1", "negative"}, func(c *idempotency.Config) { c.MaxReply = -1 }},
		{[]string{"MinKeyLength", "-1", "negative"}, func(c *idempotency.Config) { c.MinKeyLength = -1 }},
		{[]string{"MinKeyLength", "256", "at most 255"}, func(c *idempotency.Config) { c.MinKeyLength = 256 }},
		{[]string{"Retention", "2m30s", "MaxExecution (30s)", "Skew (1m0s)"}, func(c *idempotency.Config) { c.Retention = 150 * time.Second }},
		{[]string{"Lease", "1h0m0s", "Retention"}, func(c *idempotency.Config) { c.Retention, c.Lease = time.Hour, time.Hour }},
		{[]string{"RenewEvery", "30s", "Lease"}, func(c *idempotency.Config) { c.RenewEvery = 30 * time.Second }},
		{[]string{"FinishReserve", "30s", "Lease"}, func(c *idempotency.Config) { c.FinishReserve = 30 * time.Second }},
		{[]string{"FinishReserve", "30s", "MaxExecution"}, func(c *idempotency.Config) { c.FinishReserve, c.Lease = 30*time.Second, time.Minute }},
		{[]string{"OnTransientError", "3"}, func(c *idempotency.Config) { c.OnTransientError = 3 }},
		{[]string{"FingerprintSecrets[0].Key", "5 bytes", "16"}, func(c *idempotency.Config) {
			c.FingerprintSecrets = []idempotency.Secret{{ID: "a", Key: []byte("short")}}
		}},
		{[]string{"ReplayMetadata[1]", `"authorization"`, "credentials"}, func(c *idempotency.Config) { c.ReplayMetadata = []string{"etag", "authorization"} }},
		{[]string{"ReplayMetadata[0]", `"ETag"`, "lower-case"}, func(c *idempotency.Config) { c.ReplayMetadata = []string{"ETag"} }},
		{[]string{"ReplayMetadata[0]", `""`, "empty"}, func(c *idempotency.Config) { c.ReplayMetadata = []string{""} }},
		{[]string{"ReplayMetadata[0]", `"grpc-status"`, "transport"}, func(c *idempotency.Config) { c.ReplayMetadata = []string{"grpc-status"} }},
	} {
		cfg := idempotency.Config{Scope: idempotency.SingleTenant}
		row.change(&cfg)
		_, err := idempotency.NewEngine(newMemory(t), cfg)
		if err == nil {
			t.Errorf("%v: no error", row.want)
			continue
		}
		for _, part := range row.want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("error %q does not say %q", err, part)
			}
		}
	}
}

func TestConfigOfTheStore(t *testing.T) {
	cfg := idempotency.Config{Scope: idempotency.SingleTenant}
	if _, err := idempotency.NewEngine(nil, cfg); err == nil {
		t.Error("an engine without a store: no error")
	}
	wrong := idempotency.NewMemoryStore(idempotency.MemoryConfig{MaxBytes: -1})
	_, err := idempotency.NewEngine(wrong, cfg)
	if err == nil || !strings.Contains(err.Error(), "MemoryConfig.MaxBytes is -1") {
		t.Errorf("error %v: want one about MaxBytes", err)
	}
	if wrong.Check(bg) == nil {
		t.Error("Check of a wrong store: no error")
	}
	if _, _, err := wrong.Begin(bg, idempotency.Claim{}); err == nil {
		t.Error("Begin on a wrong store: no error")
	}
}

func TestConfigDefaults(t *testing.T) {
	e, err := idempotency.NewEngine(newMemory(t), idempotency.Config{Scope: idempotency.SingleTenant})
	if err != nil {
		t.Fatal(err)
	}
	cfg := e.Config()
	for name, pair := range map[string][2]time.Duration{
		"Retention, of the memory store": {cfg.Retention, 10 * time.Minute},
		"MaxExecution":                   {cfg.MaxExecution, 30 * time.Second},
		"Lease":                          {cfg.Lease, 30 * time.Second},
		"RenewEvery":                     {cfg.RenewEvery, 10 * time.Second},
		"FinishReserve":                  {cfg.FinishReserve, 50 * time.Millisecond},
		"WaitMax":                        {cfg.WaitMax, 5 * time.Second},
		"Skew":                           {cfg.Skew, time.Minute},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s is %v: want %v", name, pair[0], pair[1])
		}
	}
	if cfg.WaitersPerKey != 16 || cfg.Waiters != 256 || cfg.MaxReply != 64<<10 || len(cfg.ReplayMetadata) != 0 {
		t.Errorf("the defaults are %+v", cfg)
	}
	other, err := idempotency.NewEngine(newFaulty(), idempotency.Config{Scope: idempotency.SingleTenant})
	if err != nil {
		t.Fatal(err)
	}
	if r := other.Config().Retention; r != 24*time.Hour {
		t.Errorf("Retention on another store is %v: want 24 h", r)
	}
	if err := e.Check(context.Background()); err != nil {
		t.Errorf("Check: %v", err)
	}
}
